"""The limits that end a run early, one result at a time."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from fairtrial import EvalResult, Score, StopWhen, TokenUsage, TrialKey
from fairtrial.runs.adaptive import Adaptive
from fairtrial.runs.scheduler import Limits, RepeatedErrors, Stop
from fairtrial.store.protocol import RunRecord


def result(place: int = 0, outcome: Any = "scored", *, experiment: str = "baseline", **facts: Any) -> EvalResult:
    score = Score(1.0) if outcome == "scored" else None
    error = None if score else "ValueError: no"
    key = TrialKey("run", experiment, f"s{place}")
    return EvalResult(key=key, ordinal=place, outcome=outcome, score=score, error=error, **facts)


def paid(place: int, task: float | None, judge: float | None = None, **facts: Any) -> EvalResult:
    return result(place, usage=TokenUsage(1, 1, cost_usd=task), judge_cost_usd=judge, **facts)


async def stopped_by(limits: Limits, *results: EvalResult) -> Stop:
    stop = Stop()
    for each in results:
        limits.check(each, stop)
    await anyio.lowlevel.checkpoint()
    return stop


async def test_without_limits_nothing_stops_a_run() -> None:
    limits = Limits()
    assert not limits.matter
    stop = await stopped_by(limits, result(0, "task_error"), paid(1, 100.0), result(2, unpriced_calls=3))
    assert (stop.reason, stop.requested.is_set(), limits.spent_usd) == (None, False, 0.0)
    for one in (Limits(stop_on_error=True), Limits(max_cost_usd=0.0), Limits(strict_cost=True)):
        assert one.matter
    assert Limits(repeated_errors=RepeatedErrors(("baseline",), 3)).matter


@pytest.mark.parametrize("only_judges", [False, True])
async def test_an_error_stops_a_run_if_asked_and_a_rescoring_only_by_its_own_errors(only_judges: bool) -> None:
    for outcome, stops in (("task_error", not only_judges), ("scorer_error", True), ("scored", False)):
        stop = await stopped_by(Limits(stop_on_error=True, only_judges=only_judges), result(3, outcome))
        assert (stop.reason is not None, stop.requested.is_set()) == (stops, stops)
        if stop.reason is not None:
            assert stop.reason.startswith("stop_on_error: trial ")
            assert stop.reason.endswith(f" ended as {outcome}")
            assert (stop.resumable, stop.incomplete) == (True, False)


async def test_a_cost_cap_is_reached_by_task_and_judge_together_and_repeated_trials_count_once() -> None:
    limits = Limits(max_cost_usd=3.0, spent_usd=1.0, replaced={1: 0.5})
    stop = await stopped_by(limits, paid(0, 1.0), paid(1, 0.75, 0.25))
    assert (limits.spent_usd, stop.reason) == (2.5, None)
    limits.check(paid(2, None, 0.5), stop)
    assert limits.spent_usd == 3.0
    assert stop.reason is not None
    assert stop.reason.startswith("the cost reached $3.00 of $3.00")
    assert (stop.cost_cap_usd, stop.resumable) == (3.0, True)
    below = await stopped_by(Limits(max_cost_usd=3.0), paid(0, 2.999))
    assert below.reason is None


async def test_a_rescoring_pays_for_its_judges_only() -> None:
    limits = Limits(max_cost_usd=3.0, only_judges=True)
    await stopped_by(limits, paid(0, 9.0, 1.0), paid(1, 9.0))
    assert limits.spent_usd == 1.0


@pytest.mark.parametrize(
    ("facts", "only_judges", "is_unknown"),
    [
        ({"unpriced_calls": 1}, False, True),
        ({"unpriced_calls": 1}, True, False),
        ({"unpriced_judge_calls": 1}, True, True),
        ({"unpriced_judge_calls": 1}, False, True),
        ({}, False, False),
    ],
)
async def test_calls_of_unknown_cost_end_a_strict_run_and_are_warned_about_once_in_others(
    facts: dict[str, Any], only_judges: bool, is_unknown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strict = await stopped_by(Limits(strict_cost=True, only_judges=only_judges), result(0, **facts))
    assert (strict.reason or "").startswith("strict_cost: a model call of trial") is is_unknown
    assert not caplog.records
    lenient = Limits(max_cost_usd=1.0, only_judges=only_judges)
    stop = await stopped_by(lenient, result(0, **facts), result(1, **facts))
    assert stop.reason is None
    assert len(caplog.records) == is_unknown


async def test_the_first_reason_to_stop_is_kept() -> None:
    stop = Stop()
    stop.request("first", resumable=False, incomplete=True)
    stop.request("second", resumable=True)
    assert (stop.reason, stop.resumable, stop.incomplete, stop.requested.is_set()) == ("first", False, True, True)
    assert (Stop().resumable, Stop().incomplete) == (True, False)


def mistake(place: int, experiment: str = "baseline", line: int = 7) -> EvalResult:
    frames = f'  File "/home/me/suite.py", line {line}, in task\n    x\n'
    return result(place, "task_error", experiment=experiment, metadata={"traceback": frames, "programming_error": True})


async def test_equal_mistakes_stop_their_experiment_and_the_run_if_there_is_no_other() -> None:
    limits = Limits(repeated_errors=RepeatedErrors(("a", "b"), 3))
    stop = await stopped_by(limits, mistake(0, "a"), mistake(1, "a"))
    assert not limits.is_stopped("a")
    limits.check(mistake(2, "a"), stop)
    assert (limits.is_stopped("a"), limits.is_stopped("b"), stop.reason) == (True, False, None)
    for place in range(3):
        limits.check(mistake(place, "b"), stop)
    assert stop.reason is not None
    assert stop.reason.count("was stopped because its first 3 trials all ended in the same error") == 2
    assert "experiment a was stopped" in stop.reason
    assert (stop.resumable, stop.incomplete) == (True, True)


async def test_one_trial_that_differs_decides_for_its_experiment() -> None:
    for other in (result(1), mistake(1, line=8)):
        limits = Limits(repeated_errors=RepeatedErrors(("baseline",), 3))
        await stopped_by(limits, mistake(0), other, *(mistake(place) for place in range(2, 9)))
        assert (limits.is_stopped("baseline"), limits.matter) == (False, False)
    passed_over = RepeatedErrors(("a", "b"), 3)
    matters = []
    for experiment in ("a", "b"):
        passed_over.pass_over([experiment])
        matters.append(passed_over.matter)
    assert matters == [True, False]
    limits = Limits(repeated_errors=RepeatedErrors(("a", "b"), 3))
    stop = Stop()
    limits.end_stopped(stop)
    assert stop.reason is None


async def test_equal_errors_that_are_no_mistake_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(repeated_errors=RepeatedErrors(("a", "b")))
    for experiment in ("a", "b"):
        for place in range(20):
            assert not caplog.records or experiment == "b"
            limits.check(result(place, "task_error", experiment=experiment), Stop())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("the first 20 trials that finished all ended in the same error: ")
    assert "interrupt it, fix the error" in record.getMessage()


async def test_an_adaptive_rule_stops_a_run_and_holds_trials_back_until_it_has_looked() -> None:
    run = RunRecord("r", "s", "d", "1", "f", 100, ("baseline",), 1)
    stop = Stop()
    stop.follow(None)
    stop.see(result(0))
    await stop.room_for(10**9)
    stop.follow(Adaptive(StopWhen(0.5, shuffle=False), run, window=2))
    with anyio.move_on_after(0.05) as waited:
        await stop.room_for(2)
    assert waited.cancelled_caught
    await stop.room_for(1)
    async with anyio.create_task_group() as group:
        group.start_soon(stop.room_for, 2)
        await anyio.wait_all_tasks_blocked()
        stop.see(result(0))
    for place in range(1, 40):
        stop.see(result(place))
    assert stop.reason is not None
    assert (stop.resumable, stop.incomplete) == (False, False)
