"""The scoring of a trial, and of what is stored of one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import anyio
import pytest

from fairtrial import EvalResult, Sample, ScriptedAdapter, TokenUsage, TrialContext, all_of, current_trial, llm_judge
from fairtrial.data.session import PromptExecuted, SessionView, ToolInvoked, restore_session
from fairtrial.scoring import Score, token_usage_under
from fairtrial.trials.run_trial import score_again
from tests.trials.build import KEY, answer, rules, trial


@dataclass(frozen=True)
class Answer:
    text: str


async def test_task_and_scoring_have_deadlines_of_their_own_that_are_those_of_the_time_limit() -> None:
    deadlines: list[float] = []
    left: list[float] = []
    scoring: list[bool] = []

    async def work(given: str, ctx: TrialContext) -> str:
        deadlines.append(ctx.deadline)
        left.append(ctx.deadline - time.monotonic())
        await anyio.sleep(0.01)
        scoring.append(ctx.scoring)
        return "a"

    async def judge(output: str, expected: str) -> bool:
        deadlines.append(current_trial().deadline)
        left.append(current_trial().deadline - time.monotonic())
        scoring.append(current_trial().scoring)
        return True

    assert (await trial(work, judge, timeout_seconds=50.0)).passed
    assert scoring == [False, True]
    assert deadlines[1] > deadlines[0]
    assert all(40 < seconds <= 50 for seconds in left)


async def test_a_stored_result_of_unknown_duration_stays_one() -> None:
    for metadata, known in (({}, 70), ({"untimed": True}, None)):
        stored = EvalResult(
            key=KEY, ordinal=0, outcome="scored", score=Score(0.0), output="a", latency_ms=70, metadata=metadata,
            usage=TokenUsage(3, 4), unpriced_calls=2,
        )  # fmt: skip
        again = await score_again(rules(answer), KEY, 0, Sample("s1", "q", "a"), stored, None)
        assert (again.passed, again.known_latency_ms, again.usage) == (True, known, TokenUsage(3, 4))
        assert (again.unpriced_calls, again.attempt) == (2, 1)


@pytest.mark.proves("R39")
async def test_what_judges_record_is_outside_the_evaluators_view_and_the_tasks_cost() -> None:
    async def work(given: str, ctx: TrialContext) -> str:
        ctx.session.record(PromptExecuted(usage=TokenUsage(10, 1)))
        return "a"

    async def judge(output: str, expected: str, session: SessionView) -> bool:
        current_trial().session.record(PromptExecuted(usage=TokenUsage(1000, 1)), actor="judge")
        return len(session[PromptExecuted].all()) == 1

    result = await trial(work, all_of(judge, token_usage_under(11)))
    assert result.passed
    assert result.usage.total_tokens == 11


async def test_a_stored_output_is_scored_again_without_its_task_and_keeps_its_costs() -> None:
    async def work(given: str, ctx: TrialContext) -> Answer:
        ctx.session.record(ToolInvoked("search"))
        return Answer("a")

    def broken(output: Answer, expected: str) -> bool:
        raise RuntimeError("judge is down")

    first = await trial(work, broken)
    assert first.outcome == "scorer_error"
    assert first.snapshot is not None

    async def never(given: str) -> Answer:
        raise AssertionError("the task must not be called")

    def judge(output: Answer, expected: str, session: SessionView) -> bool:
        assert current_trial().key == KEY
        return output.text == expected and len(session[ToolInvoked].all()) == 1

    stored = EvalResult(key=KEY, ordinal=0, outcome="scorer_error", output={"text": "a"}, latency_ms=70, started_at=5.0)
    recorded = restore_session(first.snapshot)
    sample = Sample("s1", "q", "a")
    again = await score_again(rules(never, judge), KEY, 0, sample, stored, recorded, attempt=2)
    assert (again.outcome, again.attempt, again.latency_ms, again.started_at) == ("scored", 2, 70, 5.0)
    assert again.passed
    without = await score_again(rules(never), KEY, 0, Sample("s1", "q", Answer("a")), stored, None)
    assert without.passed

    async def number(given: str) -> int:
        raise AssertionError("the task must not be called")

    odd = await score_again(rules(number), KEY, 0, sample, stored, None)
    assert (odd.outcome, odd.stage) == ("scorer_error", "score")
    assert "does not match the output type of the task" in (odd.error or "")


async def test_scoring_again_costs_what_its_own_run_paid_for_judges() -> None:
    judge = llm_judge(
        ScriptedAdapter([{"reason": "r", "rating": "good"}], repeat=True, usage=TokenUsage(10, 1, cost_usd=1.0)),
        "Right.",
    )
    first = await trial(answer, judge)
    assert first.judge_cost_usd == 1.0
    assert first.snapshot is not None
    stored, recorded = replace(first, output="a"), restore_session(first.snapshot)
    for run_id, cost in ((KEY.run_id, 2.0), ("another", 1.0)):
        key = KEY._replace(run_id=run_id)
        again = await score_again(rules(answer, judge), key, 0, Sample("s1", "q", "a"), stored, recorded)
        assert (again.outcome, again.judge_cost_usd) == ("scored", cost)
