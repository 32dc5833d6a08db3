"""The execution of one trial with any user code."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from fairtrial import ChatMessage, Sample, Score, TokenUsage, ToolInvoked, TrialContext, TrialKey, current_trial, task
from fairtrial.data.session import PromptExecuted, SessionView, restore_session
from fairtrial.errors import BrokenUserError, FairtrialError, ModelRefusedError
from fairtrial.scoring import all_of, evaluator, exact_match, token_usage_under, tool_call_count, tool_not_called
from fairtrial.testing import FakeClock
from fairtrial.trials.run_trial import AttemptFailed, run_trial
from tests.trials.build import KEY, answer, rules, trial


@dataclass(frozen=True)
class Answer:
    text: str


async def test_a_trial_that_works_is_scored_and_carries_everything_the_store_needs() -> None:
    async def talk(given: str, ctx: TrialContext) -> str:
        ctx.session.record(ChatMessage("user", given))
        return "a"

    result = await trial(talk)
    assert (result.outcome, result.stage, result.error, result.attempt) == ("scored", None, None, 1)
    assert result.score == Score(1.0, True)
    assert (result.output, result.output_json) == ("a", '"a"')
    assert result.snapshot is not None
    assert restore_session(result.snapshot).trajectory.messages == (ChatMessage("user", "q"),)


@pytest.mark.proves("R87")
async def test_every_trial_has_a_session_of_its_own_tagged_with_run_and_sample() -> None:
    seen: list[TrialContext] = []

    async def look(given: str, ctx: TrialContext) -> str:
        seen.append(ctx)
        return "a"

    made = rules(look, tags=(("team", "search"),))
    for ordinal in range(2):
        await run_trial(made, KEY, ordinal, Sample("s1", "q", "a"), 0)
    assert seen[0].session is not seen[1].session
    assert seen[0].session.tags == {
        "run_id": "run",
        "sample_id": "s1",
        "experiment": "baseline",
        "team": "search",
    }


async def test_the_task_reads_its_experiment_and_a_seed_that_experiments_share() -> None:
    seen: list[tuple[Any, int]] = []

    async def look(given: str, ctx: TrialContext) -> str:
        seen.append((ctx.experiment.params.get("style"), ctx.seed))
        return "a"

    made = rules(look, seed=7)
    for experiment in (0, 1):
        await run_trial(made, KEY, experiment, Sample("s1", "q", "a"), experiment)
    await run_trial(made, TrialKey("run", "baseline", "s1", 1), 2, Sample("s1", "q", "a"), 0)
    assert [style for style, _ in seen] == [None, "terse", None]
    assert seen[0][1] == seen[1][1] != seen[2][1]


async def test_an_isolated_evaluator_brings_its_score_home() -> None:
    @evaluator(isolate=True)
    def judge(output: str, expected: str) -> dict[str, Any]:
        return {"right": output == expected, "short": len(output) < 5}

    result = await trial(answer, judge)
    assert result.score is not None
    assert {metric.name: metric.value for metric in result.score.metrics} == {"right": 1.0, "short": 1.0}


async def test_an_isolated_task_brings_home_its_output_and_what_it_recorded() -> None:
    @task(isolate=True)
    def work(given: str, ctx: TrialContext) -> Answer:
        ctx.session.record(ToolInvoked("search"))
        return Answer("a")

    def judge(output: Answer, expected: str, session: SessionView) -> bool:
        return output.text == expected and len(session[ToolInvoked].all()) == 1

    result = await trial(work, judge)
    assert result.error is None
    assert result.passed


async def test_an_isolated_task_that_fails_brings_home_what_it_recorded() -> None:
    @task(isolate=True)
    def work(given: str, ctx: TrialContext) -> str:
        ctx.session.record(ToolInvoked("search"))
        raise ValueError("after the search")

    result = await trial(work, max_retries=0)
    assert result.outcome == "task_error"
    assert result.snapshot is not None
    assert [event.name for event in restore_session(result.snapshot)[ToolInvoked].all()] == ["search"]


async def test_idle_child_processes_end_with_their_rules() -> None:
    @task(isolate=True)
    def process(given: str) -> int:
        return os.getpid()

    made = rules(process)
    result = await run_trial(made, KEY, 0, Sample("s1", "q", "a"), 0)
    os.kill(result.output, 0)  # It is kept for the next trial.
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(result.output, 0)


async def test_an_isolated_task_whose_output_cannot_leave_its_process_says_so() -> None:
    @task(isolate=True)
    def work(given: str) -> Any:
        return object()

    result = await trial(work)
    assert "cannot be sent as JSON" in (result.error or "")


async def test_a_task_that_changes_its_input_is_told_so_and_the_sample_stays_as_it_was() -> None:
    async def careless(given: dict[str, Any]) -> str:
        given["turns"].append("mine")
        return "a"

    sample = Sample("s1", {"turns": ["yours"]}, "a")
    result = await run_trial(rules(careless), KEY, 0, sample, 0)
    assert (result.outcome, result.stage) == ("task_error", "task")
    assert "modified its input" in (result.error or "")
    assert sample.input == {"turns": ["yours"]}


async def test_an_input_that_never_equals_itself_is_not_taken_for_a_changed_one() -> None:
    async def echo(given: dict[str, Any]) -> str:
        return "a"

    result = await trial(echo, given={"x": float("nan")})
    assert result.outcome == "scored"


async def test_blocking_tasks_and_evaluators_run_in_threads_and_inline_ones_on_the_loop() -> None:
    threads: dict[str, int] = {}

    def blocking(given: str) -> str:
        threads["task"] = threading.get_ident()
        assert current_trial().key == KEY
        return "a"

    @evaluator(inline=True)
    def quick(output: str, expected: str) -> bool:
        threads["inline"] = threading.get_ident()
        return True

    def slow(output: str, expected: str) -> bool:
        threads["evaluator"] = threading.get_ident()
        return True

    result = await trial(blocking, all_of(quick, slow))
    assert result.passed
    assert threads["inline"] == threading.get_ident()
    assert threading.get_ident() not in (threads["task"], threads["evaluator"])


async def test_a_blocking_function_that_returns_an_awaitable_is_awaited() -> None:
    def hand_over(given: str) -> Any:
        return answer(given)

    assert (await trial(hand_over)).output == "a"
    assert (await trial(task(inline=True)(hand_over))).output == "a"


async def test_current_trial_outside_a_trial_says_where_it_works() -> None:
    with pytest.raises(FairtrialError, match="no trial is running"):
        current_trial()


class Resource:
    """Counts how many of its kind are open."""

    open = 0

    def __init__(self, log: list[str], name: str = "env", *, fail: bool = False, slow: bool = False) -> None:
        self.log, self.name, self.fail, self.slow = log, name, fail, slow

    async def __aenter__(self) -> Resource:
        Resource.open += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        await anyio.lowlevel.checkpoint()
        Resource.open -= 1
        self.log.append(f"closed {self.name}")
        if self.slow:
            await anyio.sleep_forever()
        if self.fail:
            raise OSError("will not close")


@pytest.mark.proves("R99")
@pytest.mark.parametrize("ending", ["success", "failure", "timeout", "scorer"])
async def test_what_a_trial_opened_is_closed_after_scoring_whatever_happens(ending: str) -> None:
    log: list[str] = []

    async def work(given: str, ctx: TrialContext) -> str:
        await ctx.enter(Resource(log, "first"))
        await ctx.enter(Resource(log, "second"))
        if ending == "failure":
            raise ValueError
        if ending == "timeout":
            await anyio.sleep_forever()
        return "a"

    async def judge(output: str, expected: str) -> bool:
        log.append("scored")
        if ending == "scorer":
            raise ValueError
        return True

    await trial(work, judge, timeout_seconds=0.2)
    assert log[-2:] == ["closed second", "closed first"]
    assert log[:-2] == (["scored"] if ending in ("success", "scorer") else [])
    assert Resource.open == 0


@pytest.mark.proves("R99")
async def test_a_cancelled_trial_closes_what_it_opened_and_passes_the_cancellation_on() -> None:
    log: list[str] = []
    finished = False

    async def work(given: str, ctx: TrialContext) -> str:
        await ctx.enter(Resource(log))
        await anyio.sleep_forever()
        raise AssertionError

    async def outer() -> None:
        nonlocal finished
        await trial(work)
        finished = True

    async with anyio.create_task_group() as group:
        group.start_soon(outer)
        await anyio.wait_all_tasks_blocked()
        assert Resource.open == 1
        group.cancel_scope.cancel()
    assert (log, finished, Resource.open) == (["closed env"], False, 0)


@pytest.mark.proves("R99")
@pytest.mark.parametrize(
    ("how", "message"), [("fail", "will not close"), ("slow", "closing did not finish within 0.1 s")]
)
async def test_a_failing_close_is_recorded_and_never_masks_the_result(how: str, message: str) -> None:
    async def work(given: str, ctx: TrialContext) -> str:
        await ctx.enter(Resource([], fail=how == "fail", slow=how == "slow"))
        return "a"

    result = await trial(work, close_seconds=0.1)
    assert result.passed
    assert message in str(result.metadata["close_error"])


@pytest.mark.proves("R85")
async def test_retries_record_every_attempt_and_evaluators_see_the_last_one() -> None:
    opened: list[str] = []

    async def flaky(given: str, ctx: TrialContext) -> str:
        await ctx.enter(Resource(opened, f"attempt {ctx.attempt}"))
        ctx.session.record(ToolInvoked("search"))
        ctx.session.record(PromptExecuted(usage=TokenUsage(100, 10, cost_usd=0.5)))
        if ctx.attempt < 3:
            error = ConnectionError("busy")
            error.retry_after = 0.0  # type: ignore[attr-defined]  # what providers' errors carry
            raise error
        return "a"

    judge = all_of(exact_match, tool_call_count("search", max_count=1), token_usage_under(110))
    result = await trial(flaky, judge, max_retries=5)
    assert (result.outcome, result.attempt, result.passed) == ("scored", 3, True)
    assert result.usage == TokenUsage(300, 30, 0, 1.5)
    assert opened == ["closed attempt 1", "closed attempt 2", "closed attempt 3"]
    assert result.snapshot is not None
    session = restore_session(result.snapshot)
    failures = session[AttemptFailed].all()
    assert [(found.attempt, found.outcome) for found in failures] == [(1, "task_error"), (2, "task_error")]
    assert "busy" in failures[0].error
    assert [envelope.attempt for envelope in session.envelopes if envelope.actor == "task"] == [1, 1, 2, 2, 3, 3]


def _delete(ctx: TrialContext) -> None:
    with ctx.session.span("tool"):
        ctx.session.record(ToolInvoked("delete"))
        current_trial().session.record(ToolInvoked("delete"))


async def test_events_a_timed_out_thread_records_late_do_not_count_for_the_next_attempt() -> None:
    next_began, late_recorded = threading.Event(), threading.Event()

    def work(given: str, ctx: TrialContext) -> str:
        if ctx.attempt == 1:
            next_began.wait(20)
            _delete(ctx)
            late_recorded.set()
            return "late"
        next_began.set()
        late_recorded.wait(20)
        return "a"

    result = await trial(work, tool_not_called("delete"), timeout_seconds=1.0, max_retries=1)
    assert (result.outcome, result.attempt, result.passed) == ("scored", 2, True)
    assert result.metadata["late_events"] == 3
    assert result.snapshot is not None
    late = [e for e in restore_session(result.snapshot).envelopes if e.actor == "task"]
    assert [envelope.attempt for envelope in late] == [1, 1, 1]


async def test_events_an_async_task_leaves_running_do_not_count_for_the_next_attempt() -> None:
    async with anyio.create_task_group() as outside:
        recorded = anyio.Event()

        async def work(given: str, ctx: TrialContext) -> str:
            async def tool() -> None:
                await anyio.sleep(0.3)
                _delete(ctx)
                recorded.set()

            if ctx.attempt == 1:
                outside.start_soon(tool)
                raise ConnectionError("busy")
            await recorded.wait()
            return "a"

        result = await trial(work, tool_not_called("delete"), max_retries=1)
    assert (result.outcome, result.attempt, result.passed) == ("scored", 2, True)
    assert result.metadata["late_events"] == 3


async def test_retries_end_with_the_error_of_the_last_attempt() -> None:
    calls = 0

    async def broken(given: str) -> str:
        nonlocal calls
        calls += 1
        error = ConnectionError(f"call {calls}")
        error.retry_after = 0  # type: ignore[attr-defined]
        raise error

    result = await trial(broken, max_retries=2)
    assert (calls, result.attempt, result.outcome) == (3, 3, "task_error")
    assert "call 3" in (result.error or "")
    assert "in broken" in str(result.metadata["traceback"])


def calls_itself(count: int) -> None:
    names = [f"step_{number}" for number in range(count)]
    space: dict[str, Any] = {}
    for name, following in zip(names, [*names[1:], "int"], strict=True):
        file = f"{'x' * 1000} {name}"  # Names that make a long traceback, as deep folders and generated code do.
        exec(compile(f"def {name}(given): {following}(given)", file, "exec"), space)
    space[names[0]]("no number")


@pytest.mark.parametrize(("count", "shown"), [(2, 2), (12, 4)])
@pytest.mark.parametrize("isolate", [False, True])
async def test_the_traceback_of_an_error_ends_with_the_last_calls(count: int, shown: int, isolate: bool) -> None:
    @task(isolate=isolate)
    def work(given: str) -> None:
        calls_itself(count)

    result = await trial(work)
    text = str(result.metadata["traceback"])
    assert text.count(", in step_") == shown
    assert text.rstrip().endswith(f"in step_{count - 1}")
    assert (len(text) == 4000) == (count == 12)
    assert "programming_error" not in result.metadata


async def test_a_traceback_has_the_last_eight_calls() -> None:
    async def work(given: int) -> str:
        return await work(given - 1) if given else "abc"[9:][0]

    result = await trial(work, given=20)
    assert str(result.metadata["traceback"]).count(", in work") == 3  # Of eight, Python shows three.
    assert "Previous line repeated 5 more times" in str(result.metadata["traceback"])
    assert result.metadata["programming_error"] is True


async def test_the_error_of_a_trial_is_limited() -> None:
    async def work(given: int) -> str:
        raise ValueError("x" * given)

    for length, kept in ((9_988, "x" * 9_988), (9_989, "x" * 9_988 + " ...")):
        assert (await trial(work, given=length)).error == f"ValueError: {kept}"


@pytest.mark.parametrize(
    ("retry_after", "pauses"),
    [
        (None, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),  # The longest ones, which are drawn here.
        (0, [0.0] * 7),
        (7, [7.0] * 7),
        (61.5, [60.0] * 7),
        (-1, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        ("soon", [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
    ],
)
async def test_pauses_between_attempts_grow_or_are_those_that_the_error_asks_for(
    retry_after: Any, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await anyio.lowlevel.checkpoint()

    async def broken(given: str) -> str:
        error = ConnectionError("busy")
        error.retry_after = retry_after  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr("fairtrial.trials.run_trial.anyio.sleep", sleep)
    monkeypatch.setattr("fairtrial.trials.failures.random.uniform", lambda low, high: high if low == 0 else low)
    result = await trial(broken, max_retries=7)
    assert (result.attempt, result.metadata["earlier_attempts"]) == (8, 0)
    assert slept == pauses


async def test_an_output_may_be_as_large_as_allowed() -> None:
    for output, kept in (("x" * 8, True), ("x" * 9, False), (b"x" * 30, False), ([1, 2, 3, 4], True), ([1] * 6, False)):

        async def work(given: str, output: Any = output) -> Any:
            return output

        result = await trial(work, lambda output, expected: True, max_output_bytes=10)
        assert (result.outcome == "scored") is kept
        if not kept:
            assert (result.stage, result.output, result.output_json) == ("output", None, None)
            assert result.error == "the output is larger than 10 bytes; return a reference to it"


@pytest.mark.parametrize("isolate", [False, True])
async def test_a_refusal_is_an_error_or_an_output_that_is_scored(isolate: bool) -> None:
    @task(isolate=isolate)
    def declines(given: str) -> str:
        raise ModelRefusedError("declined", refusal="I cannot help.") if given == "q" else ConnectionError("busy")

    scored = await trial(declines, expected="I cannot help.", refusals="score")
    assert (scored.outcome, scored.output, scored.passed) == ("scored", "I cannot help.", True)
    error = await trial(declines, expected="I cannot help.")
    assert (error.outcome, error.stage, error.output) == ("task_error", "task", None)
    other = await trial(declines, given="another", refusals="score")
    assert (other.outcome, other.output) == ("task_error", None)


@pytest.mark.parametrize("isolate", [False, True])
async def test_a_broken_user_is_no_error_of_the_task_or_the_evaluator_that_finds_it(isolate: bool) -> None:
    @task(isolate=isolate)
    def talks(given: str) -> str:
        raise BrokenUserError("it invents")

    @evaluator(isolate=isolate)
    def checks(output: str) -> float:
        raise BrokenUserError("it invents")

    found = await trial(talks), await trial(answer, checks)
    assert [(result.outcome, result.stage) for result in found] == [("user_error", "task"), ("user_error", "score")]


async def test_a_continued_trial_counts_its_attempts_on() -> None:
    made = rules(answer)
    again = await run_trial(made, KEY, 0, Sample("s1", "q", "a"), 0, attempt=3)
    assert (again.attempt, again.metadata["earlier_attempts"]) == (3, 2)
    first = await run_trial(made, KEY, 0, Sample("s1", "q", "a"), 0)
    assert (first.attempt, "earlier_attempts" in first.metadata) == (1, False)


@pytest.mark.proves("R58")
async def test_latency_is_the_tasks_own_time_on_a_clock_that_never_runs_backwards() -> None:
    class SetBack(FakeClock):
        """The time of day is set back while the task works."""

        def time(self) -> float:
            return super().time() - 3600 * self.monotonic()

    clock = SetBack()

    async def work(given: str) -> str:
        clock.advance(1.25)
        return "a"

    async def judge(output: str, expected: str) -> bool:
        clock.advance(60)
        return True

    assert (await trial(work, judge, clock=clock)).latency_ms == 1250


@asynccontextmanager
async def opened(log: list[str]) -> AsyncIterator[str]:
    log.append("open")
    yield "thing"
    log.append("closed")


async def test_enter_hands_back_what_the_resource_gives() -> None:
    log: list[str] = []

    async def work(given: str, ctx: TrialContext) -> str:
        return await ctx.enter(opened(log))

    assert (await trial(work, expected="thing")).passed
    assert log == ["open", "closed"]
