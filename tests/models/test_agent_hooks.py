from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from fairtrial import Attachment, ChatMessage, Dataset, EvalSuite, ToolCall
from fairtrial.base.codec import to_json
from fairtrial.data.session import PromptExecuted, ToolInvoked
from fairtrial.errors import ConfigurationError, ModelAuthError, ModelUnavailableError
from fairtrial.models import (
    AgentEnded,
    HistoryReplaced,
    ScriptedAdapter,
    StopAgent,
    Tool,
    agent_task,
    summarize_history,
    tool_schema_accuracy,
    trim_history,
)
from fairtrial.rl.local_model import with_adapter
from fairtrial.scoring import exact_match
from tests.models.test_agent import run


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def add(a: int, b: int = 1) -> int:
    return a + b


def turns(count: int, text: str = "") -> list[Any]:
    """Replies that call a tool this often, then answer."""
    return [*(ChatMessage("assistant", text, (ToolCall("add", {"a": at}, f"c{at}"),)) for at in range(count)), "done"]


def sent(adapter: ScriptedAdapter) -> list[list[str]]:
    return [[message.text or message.tool_calls[0].id for message in call.messages] for call in adapter.calls]


async def test_a_long_conversation_is_trimmed_to_its_beginning_and_its_last_turns() -> None:
    adapter = ScriptedAdapter(turns(4))
    task = agent_task(adapter, tools=[add], system="Be brief.", before_request=trim_history(max_chars=40))
    result, session = await run(task)
    assert result.passed
    # Each turn is a call of 11 characters and a result of 1; a call is never sent without its result.
    assert sent(adapter)[-1] == ["Be brief.", "go", "c2", "3", "c3", "4"]
    assert session[HistoryReplaced].all() == (HistoryReplaced(2), HistoryReplaced(2))
    assert [message.text for message in session.trajectory.messages if message.role == "tool"] == ["1", "2", "3", "4"]


async def test_the_last_turn_is_kept_however_long_it_is() -> None:
    adapter = ScriptedAdapter(turns(2))
    await run(agent_task(adapter, tools=[add], before_request=trim_history(max_chars=1)))
    assert sent(adapter)[-1] == ["go", "c1", "2"]


async def test_an_answer_that_was_trimmed_is_still_the_output_of_a_truncated_agent() -> None:
    adapter = ScriptedAdapter([*turns(1, "I am thinking.")[:1], *turns(4)])
    task = agent_task(adapter, tools=[add], max_turns=4, before_request=trim_history(max_chars=1))
    result, _ = await run(task)
    assert "I am thinking." not in sent(adapter)[-1]
    assert result.output == "I am thinking."


async def test_old_turns_are_replaced_by_a_summary_which_is_recorded_and_paid() -> None:
    writer = ScriptedAdapter(["1 was added."])
    adapter = ScriptedAdapter(turns(4))
    task = agent_task(adapter, tools=[add], before_request=summarize_history(writer, max_chars=45))
    result, session = await run(task)
    assert result.passed
    summary = ChatMessage("user", "Summary of the conversation so far:\n1 was added.")
    assert sent(adapter)[-1] == ["go", summary.text, "c3", "4"]
    (asked,) = writer.calls
    lines = [json.loads(line) for line in asked.text.split("\n\n", 1)[1].splitlines()]
    assert [(line["role"], line["text"]) for line in lines][:2] == [("assistant", ""), ("tool", "1")]
    assert lines[0]["tool_calls"][0]["arguments"] == {"a": 0}
    (replaced,) = session[HistoryReplaced].all()
    assert replaced == HistoryReplaced(6, (summary,))
    calls = [event for event in session.everything().envelopes if event.actor == "summary"]
    assert len(calls) == 1
    assert result.usage.total_tokens == sum(
        call.usage.total_tokens for call in session[PromptExecuted].all() if call.usage is not None
    )


async def test_a_hook_may_send_what_it_wants_and_a_conversation_it_leaves_alone_is_not_recorded() -> None:
    def remind(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        return [*messages, ChatMessage("user", "Hurry.")] if len(messages) == 3 else messages

    adapter = ScriptedAdapter(turns(1))
    _, session = await run(agent_task(adapter, tools=[add], before_request=remind))
    assert sent(adapter) == [["go"], ["go", "c0", "1", "Hurry."]]
    assert session[HistoryReplaced].all() == (HistoryReplaced(0, (ChatMessage("user", "Hurry."),)),)


async def test_a_hook_may_change_the_order_of_the_messages() -> None:
    adapter = ScriptedAdapter(["done"])
    _, session = await run(agent_task(adapter, system="Be brief.", before_request=lambda messages: messages[::-1]))
    assert sent(adapter) == [["go", "Be brief."]]
    assert session[HistoryReplaced].all() == (HistoryReplaced(0),)


async def test_a_denied_call_does_not_happen_and_the_model_learns_why() -> None:
    made: list[int] = []

    def pay(euros: int) -> str:
        made.append(euros)
        return "paid"

    async def ask(call: ToolCall) -> str | None:
        return "more than 100 euros need a person" if call.arguments["euros"] > 100 else None

    calls = [ToolCall("pay", {"euros": 500}, "a"), ToolCall("pay", {"euros": 5}, "b")]
    adapter = ScriptedAdapter([calls, "done"])
    _, session = await run(agent_task(adapter, tools=[pay], before_tool=ask))
    assert made == [5]
    denied = next(call for call in session[ToolInvoked].all() if call.call_id == "a")
    assert (denied.success, denied.error) == (False, "denied: more than 100 euros need a person")
    answers = [message for message in session.trajectory.messages if message.role == "tool"]
    assert [message.text for message in answers] == ["Error: denied: more than 100 euros need a person", "paid"]


async def test_the_hook_before_a_tool_can_end_the_agent_before_any_later_call() -> None:
    def refuse(call: ToolCall) -> None:
        if call.arguments["a"] == 2:
            raise StopAgent("stopped by the policy")

    calls = [ToolCall("add", {"a": at}, str(at)) for at in (1, 2, 3)]
    adapter = ScriptedAdapter([calls, "never"])
    result, session = await run(agent_task(adapter, tools=[add], before_tool=refuse))
    assert result.output == "stopped by the policy"
    assert [call.call_id for call in session[ToolInvoked].all() if call.success] == ["1"]
    (ended,) = session[AgentEnded].all()
    assert (ended.reason, ended.turns) == ("terminated", 1)
    assert ended.detail == "before_tool, at a call of 'add', ended it"


@pytest.mark.parametrize("decision", [lambda call: False, lambda call: 1 / 0])
async def test_a_hook_with_a_mistake_is_an_error_of_the_trial_and_not_of_the_tool(decision: Any) -> None:
    result, _ = await run(agent_task(ScriptedAdapter(turns(1)), tools=[add], before_tool=decision))
    assert result.outcome == "task_error"
    assert result.error is not None
    assert "ExceptionGroup" not in result.error
    assert "before_tool must return None" in result.error or "ZeroDivisionError" in result.error


async def test_another_model_takes_over_when_the_first_cannot_be_reached() -> None:
    first = ScriptedAdapter([*turns(1)[:1], ModelUnavailableError("gone"), "never"], model="first")
    second = ScriptedAdapter([*turns(1)], model="second")
    result, session = await run(agent_task(first, tools=[add], fallback=second))
    assert result.passed
    assert [call.model for call in session[PromptExecuted].all() if call.usage] == ["first", "second", "second"]
    (ended,) = session[AgentEnded].all()
    assert (ended.turns, ended.fallback) == (3, "second")
    assert len(first.calls) == 2


async def test_a_mistake_is_not_repeated_with_another_model_and_its_failure_ends_the_trial() -> None:
    other = ScriptedAdapter([ModelUnavailableError("gone, too")])
    result, session = await run(agent_task(ScriptedAdapter([ModelAuthError("no key")]), fallback=other))
    assert (result.outcome, other.calls) == ("task_error", ())
    assert session[AgentEnded].all()[0].fallback == ""
    result, _ = await run(agent_task(ScriptedAdapter([ModelUnavailableError("gone")]), fallback=other))
    assert "gone, too" in str(result.error)


def test_a_suite_with_another_model_has_no_fallback_to_a_third_one() -> None:
    third = ScriptedAdapter(["never"])
    task = agent_task(ScriptedAdapter(["x"]), fallback=third)
    dataset = Dataset.of([("go", "done")])
    gone = ScriptedAdapter([ModelUnavailableError("gone")])
    again = with_adapter(EvalSuite("s", dataset, task, exact_match), gone)
    suite = EvalSuite("s", dataset, again, exact_match)
    (result,) = suite.run_sync(store="memory:").results
    assert (result.outcome, third.calls) == ("task_error", ())


async def test_a_long_result_is_cut_for_the_model_and_in_the_record() -> None:
    adapter = ScriptedAdapter([[ToolCall("page", {}, "a"), ToolCall("parts", {}, "b")], "done"])

    def page() -> str:
        return "x" * 1_000_000

    picture = Attachment.of(b"png", media_type="image/png")

    def parts() -> list[Any]:
        return ["abcdef", picture, "ghijkl", "m"]

    _, session = await run(agent_task(adapter, tools=[page, parts], max_result_chars=10))
    page_text, several = [message.content for message in session.trajectory.messages if message.role == "tool"]
    assert page_text == "x" * 10 + "\n[999990 of 1000000 characters were left out]"
    assert several == ("abcdef", picture, "ghij", "\n[3 of 13 characters were left out]")
    recorded = {call.call_id: call.result for call in session[ToolInvoked].all()}
    assert recorded["a"] == page_text
    assert recorded["b"] == to_json(several)
    with pytest.raises(ConfigurationError, match="max_result_chars must be at least 1"):
        agent_task(adapter, max_result_chars=0)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}},
    "required": ["city"],
    "additionalProperties": False,
}


async def test_a_tool_can_be_described_by_a_json_schema() -> None:
    def look(**arguments: Any) -> str:
        return json.dumps(arguments)

    weather = Tool(look, name="weather", description="The weather.", parameters=SCHEMA)
    calls = [ToolCall("weather", {"city": "Rome"}, "a"), ToolCall("weather", {"city": "R"}, "b")]
    adapter = ScriptedAdapter([calls, "done"])
    _, session = await run(agent_task(adapter, tools=[weather]))
    (spec,) = adapter.calls[0].tools
    assert (spec.name, spec.description, spec.parameters) == ("weather", "The weather.", SCHEMA)
    good, bad = sorted(session[ToolInvoked].all(), key=lambda call: call.call_id)
    assert good.result == '{"city": "Rome"}'
    assert bad.error == "bad arguments: $.city: 'R' is too short"
    score = tool_schema_accuracy([weather])(None, None, session.view())
    assert score.value == 0.5


@pytest.mark.parametrize(
    ("schema", "problem"), [({"type": "array"}, 'must have "type": "object"'), ({"type": "object", "required": 1}, "1")]
)
def test_a_schema_that_is_none_is_refused_at_once(schema: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match="tool 'weather'") as refused:
        Tool(lambda: None, name="weather", parameters=schema)
    assert problem in str(refused.value)
