from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from fairtrial import Dataset, EvalResult, EvalSuite, Experiment, Sample, Session, TrialContext, TrialKey, current_trial
from fairtrial.data.session import ChatMessage, PromptExecuted, TokenUsage, restore_session
from fairtrial.errors import ConfigurationError, ModelUnavailableError
from fairtrial.fleet import MainLoop
from fairtrial.models import MarkdownSection, Prompt, PromptTemplate, ScriptedAdapter, prompt_task
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
