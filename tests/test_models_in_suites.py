"""Models, judges, caches and faults in whole runs against a real server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import anyio
import pytest

from fairtrial import ChatMessage, Dataset, EvalConfig, Sample, TrialContext, llm_judge, open_store, prompt_task
from fairtrial.base.codec import from_json
from fairtrial.integrations.model_server import Fault, HalfSent, Hang, ModelServer, RateLimited, Refused, ServerFailed
from fairtrial.integrations.model_server.config import FaultRule
from fairtrial.integrations.model_server.faults import (
    ConnectionReset,
    ContentFiltered,
    ContextTooLong,
    EmptyBody,
    MalformedJson,
    NotAuthorised,
    WrongShape,
)
from fairtrial.integrations.model_server.reply import ParsedRequest, Reply
from fairtrial.models import MarkdownSection, OpenAIAdapter, PromptTemplate, ResponseCache, RetryPolicy, ScriptedAdapter
from fairtrial.models.judges.fence import read_fences
from fairtrial.scoring import all_of, contains, exact_match
from fairtrial.suites import EvalSuite
from tests.models.test_judges import HOSTILE

QUICK = RetryPolicy(attempts=4, base_seconds=0.001, max_seconds=0.01)


def adapter(server: ModelServer, **changes: object) -> OpenAIAdapter:
    settings: dict[str, object] = {"retry": QUICK, **changes}
    return OpenAIAdapter(model="test-model", base_url=f"{server.base_url}/v1", api_key="none", **settings)  # type: ignore[arg-type]


def questions(count: int) -> Dataset[str, str]:
    return Dataset([Sample(f"s{i}", f"question {i}", f"question {i}") for i in range(count)], name="echo")


async def answer(model: OpenAIAdapter, question: str, ctx: TrialContext) -> str:
    completion = await model.complete([ChatMessage("user", question)], session=ctx.session)
    return completion.message.text


ECHO = PromptTemplate[str](
    ns="test", key="echo", name="echo", sections=[MarkdownSection(title="", template="$question", key="q")]
)


@pytest.mark.proves("R66", "R86")
def test_a_suite_of_a_prompt_and_an_adapter_binds_inputs_by_name() -> None:
    dataset = Dataset([Sample("a", {"question": "2+2?"}, "4")])
    model = ScriptedAdapter({"2+2?": "4"})
    report = EvalSuite("qa", dataset, prompt_task(ECHO, model), exact_match).run_sync(store="memory:")
    assert report.pass_rate == 1.0


RETRIED: list[Fault] = [
    RateLimited(),
    RateLimited(retry_after=0.01),
    ServerFailed(500),
    ServerFailed(503),
    ConnectionReset(),
    HalfSent(),
    MalformedJson(),
    WrongShape(),
    EmptyBody(),
]
FINAL: list[tuple[Fault, str]] = [
    (NotAuthorised(401), "ModelAuthError"),
    (NotAuthorised(403), "ModelAuthError"),
    (ContextTooLong(), "ContextLengthError"),
    (ContentFiltered(), "ModelRefusedError"),
    (Refused(), "ModelRefusedError"),
]


@pytest.mark.parametrize("fault", RETRIED, ids=repr)
def test_a_fault_that_passes_is_retried_and_costs_no_trial(fault: Fault) -> None:
    trials = 60
    rules = [FaultRule(fault, probability=0.3, by="content", attempts=(1, 2))]
    with ModelServer(lambda request: request.last_user, faults=rules) as server:
        model = adapter(server)

        async def ask(question: str, ctx: TrialContext) -> str:
            return await answer(model, question, ctx)

        suite = EvalSuite("faults", questions(trials), ask, contains, config=EvalConfig(max_concurrent=20))
        report = suite.run_sync(store="memory:")
        assert (report.successful, report.pass_rate) == (trials, 1.0), dict(report.errors)
        assert server.stats().requests > trials


@pytest.mark.parametrize(("fault", "name"), FINAL, ids=lambda value: str(value))
def test_a_fault_that_stays_is_the_error_of_its_trials_alone(fault: Fault, name: str) -> None:
    trials = 40
    rules = [FaultRule(fault, when="7$")]
    with ModelServer(lambda request: request.last_user, faults=rules) as server:
        model = adapter(server)

        async def ask(question: str, ctx: TrialContext) -> str:
            return await answer(model, question, ctx)

        report = EvalSuite("faults", questions(trials), ask, contains).run_sync(store="memory:")
        failed = [result for result in report.results if not result.success]
        assert [result.sample_id for result in failed] == ["s7", "s17", "s27", "s37"]
        assert all(result.outcome == "task_error" and name in (result.error or "") for result in failed)
        assert report.pass_rate == 1.0


def test_a_server_that_never_answers_is_a_timeout_of_its_trials_alone() -> None:
    rules = [FaultRule(Hang(), when="7$")]
    with ModelServer(lambda request: request.last_user, faults=rules) as server:
        model = adapter(server)

        async def ask(question: str, ctx: TrialContext) -> str:
            return await answer(model, question, ctx)

        config = EvalConfig(timeout_seconds=1.0, max_concurrent=20)
        report = EvalSuite("faults", questions(20), ask, contains, config=config).run_sync(store="memory:")
        assert dict(report.errors) == {"timeout": 2}
        assert report.successful == 18


@pytest.mark.proves("R107")
def test_the_second_run_of_a_cached_suite_makes_no_request_and_gives_the_same_results(tmp_path: Path) -> None:
    with ModelServer(lambda request: f"{request.last_user} #{request.number}") as server:

        def run() -> list[tuple[str, int, object]]:
            with closing(ResponseCache(tmp_path / "cache.db")) as cache:
                model = adapter(server, cache=cache)

                async def ask(question: str, ctx: TrialContext) -> str:
                    return await answer(model, question, ctx)

                suite = EvalSuite("cached", questions(20), ask, contains, config=EvalConfig(repeats=2))
                report = suite.run_sync(store="memory:")
                return [(result.sample_id, result.repeat, result.output) for result in report.results]

        first = run()
        asked = server.stats().requests
        second = run()
        assert asked == 40
        assert server.stats().requests == 40
        assert first == second
        outputs = {output for _, _, output in first}
        assert len(outputs) == 40, "repeats must stay distinct"


@pytest.mark.parametrize("output", HOSTILE, ids=range(len(HOSTILE)))
def test_the_prompt_a_server_receives_holds_a_hostile_output_whole_in_its_fence(output: str) -> None:
    with ModelServer(lambda request: Reply(output={"reason": "r", "rating": "wrong"})) as server:
        judge = llm_judge(adapter(server), "Right.")
        dataset = Dataset([Sample("a", "q", "x")])
        report = EvalSuite("judged", dataset, lambda given: output, judge).run_sync(store="memory:")
        assert dict(report.errors) == {}
        (received,) = server.requests()
        fences = read_fences(received.last_user)
        assert [name for _, name, _ in fences] == ["input", "reference_answer", "output_to_assess"]
        assert from_json(object, fences[-1][2]) == output
        token = fences[0][0]
        question = received.last_user[received.last_user.rindex(f"<<<END {token}") :].split("\n", 1)[1]
        assert question.startswith("\nCriterion: Right.")


def test_resuming_after_a_judge_that_failed_costs_only_judge_calls(tmp_path: Path) -> None:
    def reply(request: ParsedRequest) -> Reply | str:
        if "impartial judge" in request.system:
            return Reply(output={"reason": "r", "rating": "good"})
        return "an answer"

    flaky = [FaultRule(ServerFailed(500), probability=0.3, by="content", when="Criterion", attempts=(1, 2))]
    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    once = RetryPolicy(attempts=1)
    calls: list[str] = []
    with ModelServer(reply, faults=flaky, seed=3) as server:
        model, judging = adapter(server), adapter(server, retry=once)

        async def ask(question: str, ctx: TrialContext) -> str:
            calls.append(question)
            return await answer(model, question, ctx)

        suite = EvalSuite("judged", questions(60), ask, all_of(llm_judge(judging, "Right.")), version="1")
        report = suite.run_sync(store=store)
        failures = report.errors.get("scorer_error", 0)
        assert report.status == "unscored"
        assert 5 <= failures <= 35
        rounds = 1
        while report.status == "unscored" and rounds < 10:
            report = suite.run_sync(store=store)
            rounds += 1
        assert (report.status, report.pass_rate, report.successful) == ("finished", 1.0, 60)
        assert len(calls) == 60
    store.close()


def test_the_suite_works_on_an_event_loop_of_its_own() -> None:
    async def main() -> None:
        model = ScriptedAdapter(lambda messages: messages[-1].text)
        report = await EvalSuite("echo", questions(3), prompt_task(ECHO, model), contains).run(store="memory:")
        assert report.pass_rate == 1.0

    anyio.run(main)
