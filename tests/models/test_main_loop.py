"""The loop of a task, and scripted models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_type

import anyio
import pytest
from pydantic import BaseModel

from fairtrial import (
    Dataset,
    EvalResult,
    EvalSuite,
    Experiment,
    Sample,
    Session,
    ToolCall,
    TrialContext,
    TrialKey,
    current_trial,
)
from fairtrial.data.session import ChatMessage, PromptExecuted, TokenUsage, restore_session
from fairtrial.errors import ConfigurationError, ModelUnavailableError, OutputParseError, RateLimitedError
from fairtrial.fleet import MainLoop
from fairtrial.models import MarkdownSection, OutputRepaired, Prompt, PromptTemplate, ScriptedAdapter, prompt_task
from fairtrial.models.adapter import Completion, PromptResponse, ProviderAdapter, ToolSpec
from fairtrial.scoring import all_of, exact_match, resolve, token_usage_under
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task, task


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True, slots=True)
class QAParams:
    question: str


class QAModel(BaseModel):
    question: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


QA = PromptTemplate[Answer]("qa", "answer", "qa", [MarkdownSection[QAParams]("", "$question", "q")])
STYLED = PromptTemplate[str]("qa", "s", "styled", [MarkdownSection[None]("", "$question in $style style", "q")])


@dataclass(frozen=True, slots=True)
class Noted:
    what: str


class QALoop(MainLoop[str, Answer]):
    def initialize(self, input: str) -> tuple[Prompt[Answer], Session]:
        session = Session()
        session.record(Noted(input))
        return Prompt(QA).bind(QAParams(input)), session


class SlowLoop(QALoop):
    async def initialize(self, input: str) -> tuple[Prompt[Answer], Session]:  # type: ignore[override]  # async works too
        return Prompt(QA).bind(QAParams(input)), current_trial().session


async def run(
    fn: Any, given: Any = "why", *, scorer: Any = exact_match, params: Any = None, expected: Any = None, **rules: Any
) -> EvalResult:
    experiment = Experiment(params=params or {})
    chosen = TrialRules((resolve_task(fn),), (experiment,), resolve(scorer), **rules)
    sample = Sample("s", given, Answer("because") if expected is None else expected)
    return await run_trial(chosen, TrialKey("r", "baseline", "s"), 0, sample, 0)


@pytest.mark.proves("R64")
async def test_a_loop_executes_the_prompt_it_initialises() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("because")], usage=TokenUsage(1, 2)))
    response, session = await loop.execute("why")
    assert response.output == Answer("because")
    assert response.usage == TokenUsage(1, 2)
    assert session[Noted].all() == (Noted("why"),)
    assert [message.text for message in session.trajectory.messages] == ["why", '{"text":"because"}']
    assert session[PromptExecuted].all()[0].prompt_name == "qa"


@pytest.mark.proves("R64")
async def test_a_loop_executes_any_task() -> None:
    def shout(text: str, ctx: TrialContext) -> str:
        ctx.session.record(Noted(text))
        assert current_trial() is ctx
        return text.upper()

    async def count(text: str) -> dict[str, int]:
        return {"n": len(text)}

    response, session = await MainLoop(shout).execute("hi")
    assert response.output == response.completion.raw == "HI"
    assert session[Noted].all() == (Noted("hi"),)
    assert (await MainLoop(count).execute("hi"))[0].output == {"n": 2}
    assert (await MainLoop(task(inline=True)(lambda text: object())).execute("hi"))[0].completion.raw.startswith("<obj")


async def test_what_a_task_opened_is_closed_after_execution() -> None:
    closed: list[str] = []

    async def work(text: str, ctx: TrialContext) -> str:
        ctx.resources.callback(closed.append, text)
        return text

    await MainLoop(work).execute("x")
    assert closed == ["x"]


@pytest.mark.proves("R64")
async def test_a_loop_is_a_task_and_its_record_is_in_the_trials() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("because")], usage=TokenUsage(1, 2)))
    result = await run(loop, scorer=all_of(exact_match, token_usage_under(3)))
    assert (result.outcome, result.output, result.passed) == ("scored", Answer("because"), True)
    assert result.usage == TokenUsage(1, 2)
    assert result.snapshot is not None
    assert restore_session(result.snapshot)[Noted].all() == (Noted("why"),)
    resolved = resolve_task(loop)
    assert (resolved.name, resolved.output_type) == ("QALoop", Answer)


async def test_a_retried_loop_is_judged_by_its_last_attempt() -> None:
    adapter = ScriptedAdapter([ModelUnavailableError("gone"), Answer("because")], usage=TokenUsage(1, 1))
    result = await run(QALoop(adapter=adapter), scorer=token_usage_under(2), max_retries=1)
    assert result.passed
    assert result.snapshot is not None
    recorded = restore_session(result.snapshot)
    assert [(found.attempt, found.data) for found in recorded.envelopes if found.kind.endswith("Noted")] == [
        (1, {"what": "why"}),
        (2, {"what": "why"}),
    ]


async def test_a_loop_may_record_in_the_trials_session_itself() -> None:
    result = await run(SlowLoop(adapter=ScriptedAdapter([Answer("because")])))
    assert result.passed
    assert result.snapshot is not None
    assert len(restore_session(result.snapshot)[PromptExecuted].all()) == 1


async def test_a_loop_around_a_task_is_that_task() -> None:
    def shout(text: str) -> str:
        return text.upper()

    result = await run(MainLoop(shout), expected="WHY")
    assert result.passed
    resolved = resolve_task(MainLoop(shout))
    assert (resolved.name, resolved.output_type) == ("shout", str)


async def test_a_loop_keeps_its_adapter_and_has_a_short_repr() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("because")]))
    assert (await loop.execute("why"))[0].output == Answer("because")
    assert isinstance(loop.adapter, ScriptedAdapter)
    assert repr(loop) == "<QALoop>"


def test_a_loop_needs_a_task_or_an_initialize_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="either a task or an initialize"):
        MainLoop()
    with pytest.raises(ConfigurationError, match="either a task or an initialize"):
        QALoop(str.upper, adapter=ScriptedAdapter([]))
    with pytest.raises(ConfigurationError, match="must have adapter"):
        QALoop()
    with pytest.raises(NotImplementedError):
        MainLoop(str.upper).initialize("x")


class Untyped(MainLoop):
    def initialize(self, input: Any) -> Any:
        return QA.bind(question=input), Session()


def test_a_loop_that_names_no_types_gives_anything() -> None:
    assert resolve_task(Untyped(adapter=ScriptedAdapter([]))).output_type is object


@pytest.mark.parametrize("given", ["why", QAParams("why"), QAModel(question="why"), {"question": "why"}])
async def test_a_prompt_with_a_model_is_a_task(given: Any) -> None:
    adapter = ScriptedAdapter({"why": Answer("because")})
    prompted = prompt_task(QA, adapter)
    result = await run(prompted, given)
    assert result.passed
    assert result.snapshot is not None
    spoken = restore_session(result.snapshot).trajectory.messages
    assert spoken[0] == ChatMessage("user", "why")
    assert len(spoken) == 2
    assert (resolve_task(prompted).name, resolve_task(prompted).output_type) == ("qa", Answer)


async def test_parameters_the_input_does_not_have_come_from_the_experiment() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True)
    for given in ("why", {"question": "why"}):
        assert (await run(prompt_task(STYLED, adapter), given, params={"style": "terse"}, expected="ok")).passed
    assert {call.text for call in adapter.calls} == {"why in terse style"}


async def test_an_input_that_is_not_the_parameters_needs_a_function() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True)
    refused = await run(prompt_task(STYLED, adapter), "why")
    assert refused.outcome == "task_error"
    assert "needs $question, $style (got an input of type str)" in str(refused.error)
    assert 'columns={"input": ["question", "style"]}, or --column input=question,style)' in str(refused.error)
    split = prompt_task(
        STYLED, adapter, params=lambda text: dict(zip(("question", "style"), text.split(), strict=True))
    )
    assert (await run(split, "why plain", expected="ok")).passed


def test_a_prompt_that_no_input_fills_is_refused_before_the_first_trial() -> None:
    adapter = ScriptedAdapter(["ok"], repeat=True)

    def suite(*inputs: object, **params: str) -> EvalSuite[Any, Any, Any]:
        experiments = [Experiment("e", params=params, task=prompt_task(STYLED, adapter))]
        return EvalSuite(
            "styled", Dataset.of([(one, "ok") for one in inputs]), None, exact_match, experiments=experiments
        )

    with pytest.raises(ConfigurationError, match=r"sample '\w+': prompt .* needs \$question, \$style"):
        suite("why", "how").run_sync(store="memory:")
    assert len(adapter.calls) == 0
    assert suite("why", "how", style="terse").run_sync(store="memory:").pass_rate == 1.0
    mixed = suite("why", {"question": "why", "style": "terse"}).run_sync(store="memory:")
    assert (mixed.pass_rate_all, dict(mixed.errors)) == (0.5, {"task_error": 1})


def test_prompts_work_under_any_event_loop() -> None:
    loop = QALoop(adapter=ScriptedAdapter([Answer("a"), Answer("b")]))
    answers = [anyio.run(loop.execute, "x", backend=backend)[0].output for backend in ("asyncio", "trio")]
    assert answers == [Answer("a"), Answer("b")]


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    score: float


VERDICT = PromptTemplate[Verdict]("t", "v", "verdict", [MarkdownSection[None]("", "Judge $x", "j")])


def ask(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


async def test_a_list_of_replies_is_used_in_order_and_ends_with_an_error() -> None:
    adapter = ScriptedAdapter(["one", "two"])
    said = [(await adapter.complete(ask("?"))).output for _ in range(2)]
    assert said == ["one", "two"]
    with pytest.raises(ConfigurationError, match="2 replies, and this is call 3"):
        await adapter.complete(ask("?"))
    assert len(adapter.calls) == 3


async def test_a_list_may_start_again() -> None:
    adapter = ScriptedAdapter(["one", "two"], repeat=True)
    assert [(await adapter.complete(ask("?"))).output for _ in range(3)] == ["one", "two", "one"]


async def test_a_mapping_answers_by_the_last_user_message() -> None:
    adapter = ScriptedAdapter({"capital of France": "Paris", "capital": "Rome"})
    assert (await adapter.complete(ask("capital"))).output == "Rome"
    assert (await adapter.complete(ask("the capital of France?"))).output == "Paris"
    with pytest.raises(ConfigurationError, match="no reply to 'weather'"):
        await adapter.complete(ask("weather"))


async def test_a_function_answers_sync_or_async() -> None:
    def shout(messages: Sequence[ChatMessage]) -> str:
        return messages[-1].text.upper()

    async def whisper(messages: Sequence[ChatMessage]) -> str:
        return messages[-1].text.lower()

    assert (await ScriptedAdapter(shout).complete(ask("Hi"))).output == "HI"
    assert (await ScriptedAdapter(whisper).complete(ask("Hi"))).output == "hi"


async def test_an_exception_is_raised_and_the_next_reply_given() -> None:
    adapter = ScriptedAdapter([RateLimitedError("slow down", retry_after=2), "fine"])
    with pytest.raises(RateLimitedError, match="slow down"):
        await adapter.complete(ask("?"))
    assert (await adapter.complete(ask("?"))).output == "fine"


async def test_values_are_sent_as_json_and_read_as_the_type_asked_for() -> None:
    adapter = ScriptedAdapter(
        [Verdict("ok", 1.0), {"reason": "no", "score": 0}, '```json\n{"reason":"f","score":1}\n```']
    )
    completion = await adapter.complete(ask("?"), output_type=Verdict)
    assert_type(completion, Completion[Verdict])
    assert completion.output == Verdict("ok", 1.0)
    assert completion.raw == '{"reason":"ok","score":1.0}'
    response = await adapter.evaluate(VERDICT.bind(x="this"))
    assert_type(response, PromptResponse[Verdict])
    assert response.output == Verdict("no", 0.0)
    assert (await adapter.evaluate(VERDICT.bind(x="this"))).output == Verdict("f", 1.0)


async def test_tool_calls_are_given_with_ids_and_leave_the_output_open() -> None:
    adapter = ScriptedAdapter([ToolCall("add", {"a": 1}), [ToolCall("a"), ToolCall("b", id="mine")]])
    tool = ToolSpec("add", "adds", {"type": "object"})
    one = await adapter.complete(ask("?"), tools=[tool], output_type=Verdict)
    assert one.output is None
    assert one.message.tool_calls == (ToolCall("add", {"a": 1}, "call_0_0"),)
    assert one.finish_reason == "tool_calls"
    two = await adapter.complete(ask("?"))
    assert [call.id for call in two.message.tool_calls] == ["call_1_0", "mine"]


async def test_every_call_is_recorded_with_its_usage_and_its_actor() -> None:
    session = Session()
    adapter = ScriptedAdapter(["abcd"] * 2, model="m")
    await adapter.complete(ask("12345"), session=session, prompt_name="p")
    await adapter.complete(ask("12345"), session=session, actor="judge")
    recorded = session.everything()[PromptExecuted].all()
    assert recorded[0] == PromptExecuted("p", "scripted", "m", TokenUsage(2, 1), "stop")
    assert len(recorded) == 2
    assert len(session[PromptExecuted].all()) == 1


async def test_usage_may_be_given() -> None:
    completion = await ScriptedAdapter(["x"], usage=TokenUsage(7, 8, 1, 0.5)).complete(ask("?"))
    assert completion.usage == TokenUsage(7, 8, 1, 0.5)


async def test_an_answer_that_cannot_be_read_is_repaired_once_and_recorded() -> None:
    session = Session()
    adapter = ScriptedAdapter(["it is fine", Verdict("ok", 1.0)], usage=TokenUsage(1, 2))
    completion = await adapter.complete(ask("?"), output_type=Verdict, session=session, prompt_name="p")
    assert completion.output == Verdict("ok", 1.0)
    assert completion.usage == TokenUsage(2, 4)
    (repair,) = session[OutputRepaired].all()
    assert (repair.prompt_name, repair.raw, repair.repaired) == ("p", "it is fine", True)
    assert "not JSON" in repair.problem
    assert [message.role for message in adapter.calls[1].messages] == ["user", "assistant", "user"]
    assert "not JSON" in adapter.calls[1].text
    assert len(session[PromptExecuted].all()) == 2


async def test_an_answer_that_stays_unreadable_is_an_error_with_the_answer() -> None:
    session = Session()
    adapter = ScriptedAdapter(["nope", '{"reason": 1}', "unused"])
    with pytest.raises(OutputParseError, match="did not answer with a Verdict, even when asked again") as caught:
        await adapter.complete(ask("?"), output_type=Verdict, session=session)
    assert caught.value.raw == '{"reason": 1}'
    assert len(adapter.calls) == 2
    assert [event.repaired for event in session[OutputRepaired].all()] == [False]


async def test_an_unreadable_answer_without_a_session_is_repaired_too() -> None:
    adapter = ScriptedAdapter(["nope", "[1, 2]"])
    assert (await adapter.complete(ask("?"), output_type=list[int])).output == [1, 2]


async def test_a_prompt_answered_with_tool_calls_has_no_output() -> None:
    with pytest.raises(OutputParseError, match="answered with tool calls"):
        await ScriptedAdapter([ToolCall("x")]).evaluate(VERDICT.bind(x=1))


async def test_codec_marks_in_an_answer_are_ordinary_text() -> None:
    adapter = ScriptedAdapter(['["\\ufdd0nan", "a\\u0000b"]', '"\\ufdd0nan"', '"\\ufdd0nan"'])
    assert (await adapter.complete(ask("?"), output_type=list[str])).output == ["\ufdd0nan", "a\0b"]
    with pytest.raises(OutputParseError):
        await adapter.complete(ask("?"), output_type=float)


async def test_the_calls_can_be_looked_at() -> None:
    adapter = ScriptedAdapter(["x"], params={"temperature": 0, "seed": 1})
    await adapter.complete(ask("hello"), params={"seed": 2}, actor="judge")
    (call,) = adapter.calls
    assert (call.text, call.actor, call.output_type) == ("hello", "judge", str)
    assert call.params == {"temperature": 0, "seed": 2}


def test_a_script_is_a_list_a_mapping_or_a_function() -> None:
    with pytest.raises(ConfigurationError, match="replies of ScriptedAdapter must be"):
        ScriptedAdapter("text")


def test_it_is_a_provider_adapter() -> None:
    adapter: ProviderAdapter = ScriptedAdapter([])
    assert (adapter.name, adapter.model) == ("scripted", "scripted")


async def test_a_call_takes_a_text_or_mappings_in_place_of_messages() -> None:
    adapter = ScriptedAdapter(["one", "two"])
    assert (await adapter.complete("Say one.")).text == "one"
    system = {"role": "system", "content": "Be brief."}
    assert (await adapter.complete([system, ChatMessage("user", "Say two.")])).text == "two"
    assert [call.messages for call in adapter.calls] == [
        (ChatMessage("user", "Say one."),),
        (ChatMessage("system", "Be brief."), ChatMessage("user", "Say two.")),
    ]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (ChatMessage("user", "Hi"), r"a text or a list of ChatMessages \(got ChatMessage\)"),
        ({"role": "user", "content": "Hi"}, r"a text or a list of ChatMessages \(got dict\)"),
        (None, r"a text or a list of ChatMessages \(got NoneType\)"),
        (["Hi"], r"messages\[0\] must be a ChatMessage or a mapping \(got str\)"),
        ([{"role": "user"}], r"messages\[0\] must have 'role', 'content' and at most 'name' \(got 'role'\)"),
        ([{"role": "user", "content": "Hi", "tool_calls": []}], "'content', 'tool_calls'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]: ChatMessage\.content must be text"),
    ],
)
async def test_a_call_with_something_else_is_refused_with_an_example(messages: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        await ScriptedAdapter(["one"]).complete(messages)  # type: ignore[arg-type]  # what users pass
    assert "ChatMessage(" in str(caught.value)


def test_a_blocking_call_is_recorded_in_its_trial() -> None:
    adapter = ScriptedAdapter(["four"], usage=TokenUsage(3, 1))

    def answer(question: str) -> str:
        completion = adapter.complete_sync(question)
        assert_type(completion, Completion[str])
        return completion.text

    suite = EvalSuite("s", Dataset.of([("two and two", "four")]), answer, exact_match)
    report = suite.run_sync(store="memory:")
    assert (report.pass_rate, report.total_tokens) == (1.0, 4)
