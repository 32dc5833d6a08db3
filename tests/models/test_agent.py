from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import openai
import pytest

from fairtrial import ChatMessage, Dataset, EvalResult, EvalSuite, Experiment, Sample, ToolCall, TrialKey, current_trial
from fairtrial.data.session import PromptExecuted, TokenUsage, ToolInvoked, restore_session
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import CodecError, ConfigurationError, ModelUnavailableError
from fairtrial.models import AgentEnded, ScriptedAdapter, agent_task, tool_schema_accuracy
from fairtrial.models.tools import UNPARSED, Tool, as_tools
from fairtrial.scoring import Case, Score, all_tools_succeeded, exact_match, resolve, tool_calls_match
from fairtrial.testing.environments import session_of
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, slots=True)
class Place:
    city: str
    country: str = "Italy"


def add(a: int, b: Annotated[int, "the other"] = 1) -> int:
    """Adds two numbers."""
    return a + b


async def weather(place: Place) -> dict[str, Any]:
    """The weather of a place."""
    return {"city": place.city, "sky": "blue"}


def divide(a: float, b: float) -> float:
    return a / b


async def run(
    task: Any, *, sample: Sample[Any, Any] | None = None, scorer: Any = exact_match, **rules: Any
) -> tuple[EvalResult, RecordedView]:
    chosen = TrialRules((resolve_task(task),), (Experiment(),), resolve(scorer), **rules)
    given = Sample("s", "go", "done") if sample is None else sample
    result = await run_trial(chosen, TrialKey("r", "baseline", given.id), 0, given, 0)
    assert result.snapshot is not None
    return result, restore_session(result.snapshot)


@pytest.mark.proves("R97")
async def test_an_agent_calls_tools_until_it_answers_and_everything_is_recorded() -> None:
    calls = [ToolCall("add", {"a": 2}, "c1"), ToolCall("weather", {"place": {"city": "Rome"}}, "c2")]
    adapter = ScriptedAdapter([calls, "done"], usage=TokenUsage(10, 5))
    result, session = await run(agent_task(adapter, tools=[add, weather], system="Be brief."))
    assert (result.outcome, result.output, result.passed) == ("scored", "done", True)
    assert result.usage == TokenUsage(20, 10)
    assert session.trajectory.messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "go"),
        ChatMessage("assistant", "", tuple(calls)),
        ChatMessage("tool", "3", name="c1"),
        ChatMessage("tool", '{"city":"Rome","sky":"blue"}', name="c2"),
        ChatMessage("assistant", "done"),
    )
    invoked = sorted(session[ToolInvoked].all(), key=lambda call: call.call_id)  # Recorded as they end.
    assert [(call.name, call.params, call.result, call.success, call.error) for call in invoked] == [
        ("add", {"a": 2}, 3, True, None),
        ("weather", {"place": {"city": "Rome"}}, {"city": "Rome", "sky": "blue"}, True, None),
    ]
    assert invoked[0].session_id == session.session_id
    assert (invoked[0].adapter, invoked[0].prompt_name) == ("scripted", "agent")
    assert len(session[PromptExecuted].all()) == 2
    assert session[AgentEnded].all() == (AgentEnded("terminated", 2),)


async def test_the_model_is_shown_the_tools_of_the_functions() -> None:
    adapter = ScriptedAdapter(["done"])
    await run(agent_task(adapter, tools=[add, weather]))
    one, two = adapter.calls[0].tools
    assert (one.name, one.description) == ("add", "Adds two numbers.")
    assert one.parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "description": "the other"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert two.parameters["properties"]["place"]["required"] == ["city"]


async def test_a_tool_that_says_in_its_result_that_it_failed_is_a_failed_tool() -> None:
    def search(query: str) -> dict[str, Any]:
        """Searches."""
        return {"success": False, "error": "not found"}

    adapter = ScriptedAdapter([ToolCall("search", {"query": "x"}), "done"])
    result, session = await run(agent_task(adapter, tools=[search]), scorer=all_tools_succeeded())
    assert session[ToolInvoked].all()[0].failed
    assert result.score is not None
    assert (result.score.passed, result.score.reason) == (False, "failed tools: search")


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (ToolCall("add", {"a": "two"}), "bad arguments: at $.a: expected int"),
        (ToolCall("add", {}), "bad arguments: add needs the parameter 'a'"),
        (ToolCall("add", {"a": 1, "c": 2}), "bad arguments: add has no parameter 'c'"),
        (ToolCall("ad", {"a": 1}), "there is no tool 'ad'; the tools are: add, divide"),
        (ToolCall("divide", {"a": 1, "b": 0}), "ZeroDivisionError"),
        (ToolCall("add", {UNPARSED: '{"a'}), "the arguments must be a JSON object"),
    ],
)
async def test_a_failed_call_is_told_to_the_model_and_recorded(call: ToolCall, problem: str) -> None:
    adapter = ScriptedAdapter([call, "done"])
    result, session = await run(agent_task(adapter, tools=[add, divide]))
    assert result.passed
    (invoked,) = session[ToolInvoked].all()
    assert invoked.success is False
    assert invoked.failed
    assert invoked.error is not None
    assert invoked.error.startswith(problem)
    assert adapter.calls[1].text == f"Error: {invoked.error}"


async def test_a_result_that_cannot_be_shown_is_a_failure() -> None:
    def odd() -> object:
        return object()

    result, session = await run(agent_task(ScriptedAdapter([ToolCall("odd"), "done"]), tools=[odd]))
    assert result.passed
    assert "cannot be shown" in str(session[ToolInvoked].all()[0].error)


async def test_calls_of_one_turn_run_side_by_side_and_are_recorded_when_they_end() -> None:
    both = anyio.Event()
    threads: list[str] = []

    async def first() -> str:
        await both.wait()
        return "1"

    async def second() -> str:
        both.set()
        return "2"

    def third() -> str:
        threads.append(threading.current_thread().name)
        assert current_trial().key.sample_id == "s"
        return "3"

    calls = [ToolCall("first"), ToolCall("second"), ToolCall("third")]
    _, session = await run(agent_task(ScriptedAdapter([calls, "done"]), tools=[first, second, third]))
    invoked = session[ToolInvoked].all()
    assert {call.result for call in invoked} == {"1", "2", "3"}
    assert [call.result for call in invoked if call.result != "3"] == ["2", "1"]
    assert all(call.duration_ms is not None and call.duration_ms >= 0 for call in invoked)
    # What the model is told, and what is compared with expectations, is in the order in which it asked.
    assert [message.text for message in session.trajectory.messages if message.role == "tool"] == ["1", "2", "3"]
    score = tool_calls_match(["first", "second", "third"], order="exact")(None, None, session.view())
    assert isinstance(score, Score)
    assert score.passed
    assert threads != [threading.main_thread().name]


async def test_an_inline_tool_runs_on_the_event_loop() -> None:
    seen: list[str] = []

    def quick() -> None:
        seen.append(threading.current_thread().name)

    _, session = await run(agent_task(ScriptedAdapter([ToolCall("quick"), "done"]), tools=[Tool(quick, inline=True)]))
    assert seen == [threading.current_thread().name]
    assert session.trajectory.messages[-2].text == "null"


async def test_an_agent_that_never_answers_is_truncated_and_what_it_said_last_is_scored() -> None:
    said = ChatMessage("assistant", "thinking", (ToolCall("add", {"a": 1}, "c"),))
    adapter = ScriptedAdapter([said], repeat=True)
    result, session = await run(agent_task(adapter, tools=[add], max_turns=3))
    assert (result.outcome, result.output) == ("scored", "thinking")
    assert session[AgentEnded].all() == (AgentEnded("truncated", 3, "3 turns"),)
    assert len(adapter.calls) == 3


async def test_an_agent_that_says_nothing_has_an_empty_output() -> None:
    adapter = ScriptedAdapter([ToolCall("add", {"a": 1})], repeat=True)
    result, _ = await run(agent_task(adapter, tools=[add], max_turns=1))
    assert result.output == ""


async def test_tokens_and_time_are_budgets_too() -> None:
    adapter = ScriptedAdapter([ToolCall("add", {"a": 1})], repeat=True, usage=TokenUsage(60, 0))
    _, session = await run(agent_task(adapter, tools=[add], max_tokens=100))
    assert session[AgentEnded].all() == (AgentEnded("truncated", 2, "120 tokens of 100"),)

    async def sleep() -> None:
        await anyio.sleep_forever()

    calls = [ToolCall("add", {"a": 1}), ToolCall("sleep")]
    result, session = await run(agent_task(ScriptedAdapter([calls]), tools=[add, sleep], max_seconds=0.05))
    assert result.outcome == "scored"
    assert session[AgentEnded].all() == (AgentEnded("truncated", 1, "0.05 seconds"),)
    assert [call.name for call in session[ToolInvoked].all()] == ["add"]


async def test_a_tool_that_takes_too_long_fails_and_the_agent_goes_on() -> None:
    async def sleep() -> None:
        await anyio.sleep_forever()

    task = agent_task(ScriptedAdapter([ToolCall("sleep"), "done"]), tools=[sleep], tool_timeout_seconds=0.02)
    result, session = await run(task)
    assert result.passed
    assert session[ToolInvoked].all()[0].error == "it did not finish within 0.02 s"


async def test_an_answer_cut_short_is_truncated() -> None:
    class Cut(ScriptedAdapter):
        async def _send(self, call: Any) -> Any:
            import dataclasses

            return dataclasses.replace(await super()._send(call), finish_reason="length")

    result, session = await run(agent_task(Cut(["do"])))
    assert result.output == "do"
    assert session[AgentEnded].all() == (AgentEnded("truncated", 1, "the answer was truncated"),)


async def test_a_model_that_fails_is_an_error_of_the_trial() -> None:
    result, session = await run(agent_task(ScriptedAdapter([ModelUnavailableError("gone")])))
    assert result.outcome == "task_error"
    assert session[AgentEnded].all() == (AgentEnded("error", 0, "ModelUnavailableError: gone"),)


async def test_a_trial_that_times_out_says_so_in_its_record() -> None:
    async def sleep() -> None:
        await anyio.sleep_forever()

    adapter = ScriptedAdapter([ToolCall("sleep")])
    result, session = await run(agent_task(adapter, tools=[sleep]), timeout_seconds=0.05)
    assert result.outcome == "timeout"
    assert session[AgentEnded].all() == (AgentEnded("truncated", 1, "cancelled"),)


async def test_typed_answers_and_conversations_as_input() -> None:
    adapter = ScriptedAdapter([Place("Rome")])
    opening = [ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c")]
    task = agent_task(adapter, output_type=Place, params={"temperature": 0})
    result, _ = await run(task, sample=Sample("s", opening, Place("Rome")))
    assert result.passed
    assert resolve_task(task).output_type is Place
    assert adapter.calls[0].messages == tuple(opening)
    assert adapter.calls[0].params == {"temperature": 0}
    await run(agent_task(ScriptedAdapter(["x"])), sample=Sample("s", ChatMessage("user", "hi")))
    other = ScriptedAdapter(["x"])
    await run(agent_task(other), sample=Sample("s", Place("Rome")))
    assert other.calls[0].text == '{"city":"Rome","country":"Italy"}'


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prompt": "What is 2+2?"}, "What is 2+2?"),
        ({"prompt": [{"role": "user", "content": "What is 2+2?"}]}, "What is 2+2?"),
        ({"messages": [{"role": "user", "content": "What is 2+2?"}]}, "What is 2+2?"),
        ({"messages": [ChatMessage("user", "What is 2+2?")]}, "What is 2+2?"),
        ({"role": "user", "content": "What is 2+2?"}, "What is 2+2?"),
    ],
)
async def test_a_prompt_and_messages_in_a_mapping_mean_what_they_say(given: Any, text: str) -> None:
    adapter = ScriptedAdapter(["4"])
    await run(agent_task(adapter), sample=Sample("s", given))
    assert [(message.role, message.text) for message in adapter.calls[0].messages] == [("user", text)]
    assert Case(Sample("s", given), "4").trajectory.messages[0].text == text


async def test_a_conversation_in_openais_format_is_read_whole() -> None:
    """Also as OpenAI's SDK writes the messages that it returned: with every key, most of them None."""
    returned = openai.types.chat.ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
            ],
        }
    )
    sent: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]},
        returned.model_dump(),
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    adapter = ScriptedAdapter(["2"])
    said = (
        ChatMessage("developer", "Be brief."),
        ChatMessage("user", "What is 1+1?"),
        ChatMessage("assistant", "", (ToolCall("add", {"a": 1, "b": None}, "c1"),)),
        ChatMessage("tool", "2", name="c1"),
    )
    await run(agent_task(adapter), sample=Sample("s", sent))
    await run(
        agent_task(adapter),
        sample=Sample("s", {"messages": [*sent[:2], returned.model_dump(exclude_none=True), sent[3]]}),
    )
    await run(agent_task(adapter, prepare_messages=lambda sample: sent), sample=Sample("s", "x"))
    assert [call.messages for call in adapter.calls] == [said] * 3
    assert Case(Sample("s", sent), "2").trajectory.messages[:4] == said


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]},
            "must be text .*image_url",
        ),
        ({"content": "x", "refusal": "No."}, "must have no keys but .*'refusal'"),
        ({"tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{a"}}]}, "must be a JSON object .*{a"),
        ({"tool_calls": [{"id": "c", "function": "add"}]}, "a tool call must be a mapping"),
    ],
)
async def test_what_would_be_lost_of_openais_format_is_refused(message: Any, problem: str) -> None:
    adapter = ScriptedAdapter(["x"])
    task = agent_task(adapter, system="Be brief.")
    result, _ = await run(task, sample=Sample("s", [{"role": "assistant", **message}]))
    assert result.outcome == "task_error"
    assert re.search(problem, result.error or "")
    assert len(adapter.calls) == 0


@pytest.mark.parametrize(
    "given", [{"question": "why"}, {"prompt": "x", "level": 3}, {"prompt": 5}, {"messages": "hi"}, {"messages": []}, {}]
)
async def test_a_mapping_that_says_no_prompt_is_refused_before_a_call(given: Any) -> None:
    adapter = ScriptedAdapter(["x"])
    task = agent_task(adapter, system="Be brief.")
    result, _ = await run(task, sample=Sample("s", given))
    assert result.outcome == "task_error"
    assert "an input that is a mapping must be" in (result.error or "")
    assert len(adapter.calls) == 0


async def test_a_run_whose_inputs_are_such_mappings_is_refused_before_the_first_trial() -> None:
    adapter = ScriptedAdapter(["x"])
    suite = EvalSuite("s", Dataset([Sample("a", {"question": "why"})]), agent_task(adapter), lambda output: True)
    with pytest.raises(ConfigurationError, match="sample 'a': an input that is a mapping must be"):
        await suite.run(store="memory:")
    assert len(adapter.calls) == 0


@pytest.mark.proves("R96")
async def test_the_opening_messages_may_be_prepared_from_the_sample() -> None:
    def prepare(sample: Sample[Any, Any]) -> Sequence[ChatMessage]:
        return [ChatMessage("user", f"{sample.input}, for {sample.metadata['who']}")]

    async def prepare_slowly(sample: Sample[Any, Any]) -> Sequence[ChatMessage]:
        return prepare(sample)

    for way in (prepare, prepare_slowly):
        adapter = ScriptedAdapter(["x"])
        await run(agent_task(adapter, prepare_messages=way), sample=Sample("s", "go", None, {"who": "Ada"}))
        assert adapter.calls[0].text == "go, for Ada"


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start
        self.closed = 0

    def tools(self) -> Sequence[Any]:
        return (self.increment,)

    def increment(self, by: int = 1) -> int:
        """Counts on."""
        self.value += by
        return self.value

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.proves("R99")
@pytest.mark.parametrize("reply", ["done", ModelUnavailableError("gone")])
async def test_an_environment_offers_its_tools_and_is_always_closed(reply: Any) -> None:
    made: list[Counter] = []

    def make(sample: Sample[Any, Any]) -> Counter:
        made.append(Counter(sample.input))
        return made[-1]

    def still_open(output: Any, expected: Any) -> bool:
        return made[-1].closed == 0 and made[-1].value == 12

    adapter = ScriptedAdapter([ToolCall("increment", {"by": 2}), reply])
    result, _ = await run(agent_task(adapter, environment_factory=make), sample=Sample("s", 10), scorer=still_open)
    assert made[0].closed == 1
    assert result.passed == (reply == "done")


async def test_an_environment_may_be_a_context_manager_or_come_later() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def managed(sample: Sample[Any, Any]) -> AsyncIterator[Counter]:
        events.append("open")
        yield Counter(0)
        events.append("close")

    async def later(sample: Sample[Any, Any]) -> Counter:
        return Counter(0)

    for factory in (managed, later):
        result, _ = await run(agent_task(ScriptedAdapter([ToolCall("increment"), "done"]), environment_factory=factory))
        assert result.passed
    assert events == ["open", "close"]


async def test_existing_evaluators_see_what_the_agent_did() -> None:
    adapter = ScriptedAdapter([ToolCall("divide", {"a": 1, "b": 0}), "done"])
    result, _ = await run(agent_task(adapter, tools=[divide]), scorer=all_tools_succeeded())
    assert not result.passed


@pytest.mark.proves("R105")
def test_schema_accuracy_is_the_share_of_valid_calls() -> None:
    score = tool_schema_accuracy([add, divide])
    mixed = session_of(
        ToolInvoked("add", {"a": 1}, success=True),
        ToolInvoked("add", {"a": "x"}, success=False),
        ToolInvoked("subtract", {}),
        ToolInvoked("divide", {"a": 1, "b": 0}, success=False, error="ZeroDivisionError"),
    )
    found = score(None, None, mixed)
    assert (found.value, found.passed) == (0.5, False)
    assert "there is no tool 'subtract'" in found.reason
    assert {metric.name: metric.value for metric in found.metrics} == {"tool_calls": 4, "valid_tool_calls": 2}
    assert score(None, None, session_of(ToolInvoked("add", {"a": 1}))).passed
    assert score(None, None, session_of()).value == 1.0


def test_tools_with_one_name_or_none_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"names of tools must be unique \(got 'add' twice\)"):
        agent_task(ScriptedAdapter([]), tools=[add, Tool(divide, name="add")])
    with pytest.raises(ConfigurationError, match="a tool must have a name"):
        as_tools([lambda x: x])
    with pytest.raises(ConfigurationError, match="as positional only"):
        as_tools([len])
    with pytest.raises(ConfigurationError, match="max_turns must be at least 1"):
        agent_task(ScriptedAdapter([]), max_turns=0)


class Callable_:
    """An object that can be called."""

    def __call__(self, x: int) -> int:
        return x


def test_partials_objects_and_open_functions_are_tools_too() -> None:
    from functools import partial

    def free(x: int, **rest: str) -> Any:
        return x, rest

    tool = Tool(free, description="Anything goes.")
    assert tool.spec.parameters["additionalProperties"] is True
    assert tool.spec.description == "Anything goes."
    assert tool(**tool.arguments({"x": 1, "y": "z"})) == (1, {"y": "z"})
    fixed = Tool(partial(add, b=5))
    assert (fixed.name, fixed(a=1), fixed.spec.parameters["required"]) == ("add", 6, ["a"])
    assert Tool(Callable_()).spec.parameters["properties"] == {"x": {"type": "integer"}}
    assert repr(fixed) == "<Tool add>"
    with pytest.raises(CodecError, match="must be an object"):
        tool.arguments([1])  # type: ignore[arg-type]  # what a model may send
