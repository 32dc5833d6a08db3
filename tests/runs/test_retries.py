"""The stored trials that a resumed run repeats: which, with which attempt, and at which cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fairtrial import Dataset, EvalResult, Sample, Score, TokenUsage, TrialKey, open_store
from fairtrial.runs.retries import RetrySet
from fairtrial.store.protocol import RunRecord, RunStore
from tests.trials.build import answer, rules

DATASET = Dataset([Sample(f"s{place}", place, place) for place in range(7)], name="numbers")


def result(place: int, outcome: Any, **facts: Any) -> EvalResult:
    error = None if outcome == "scored" else "it broke"
    score = Score(1.0) if outcome == "scored" else None
    key = TrialKey("run", "baseline", f"s{place}")
    return EvalResult(key=key, ordinal=place, outcome=outcome, score=score, error=error, **facts)


STORED = [
    result(0, "scored", usage=TokenUsage(1, 1, cost_usd=9.0)),
    result(1, "task_error", attempt=3, usage=TokenUsage(10, 2, cost_usd=1.0), judge_cost_usd=0.5, cache_hits=1),
    result(2, "timeout"),
    result(3, "scorer_error", usage=TokenUsage(5, 5, cost_usd=2.0)),
    result(4, "scorer_error", attempt=2, metadata={"trace_incomplete": True}),
    result(5, "dead_letter", unpriced_calls=2),
]


@pytest.fixture
def stored() -> tuple[RunStore, RunRecord]:
    store = open_store("memory:")
    run = RunRecord("run", "s", "numbers", "", "f", 7, ("baseline",), 1, created_at=1.0)
    run = store.create_run(run)
    store.commit("run", STORED, dict(enumerate(DATASET)))
    return store, run


def retry_set(stored: tuple[RunStore, RunRecord], *, retry_errors: bool) -> RetrySet:
    store, run = stored
    return RetrySet(store, DATASET, run, rules(answer), retry_errors=retry_errors)


def test_without_a_request_only_failed_scoring_is_repeated(stored: tuple[RunStore, RunRecord]) -> None:
    found = retry_set(stored, retry_errors=False)
    assert found.to_score == found.ordinals == {3, 4}
    assert (found.to_run, found.count) == ((), 2)
    assert found.attempts() == {}
    assert found.costs() == {3: 2.0}


def test_with_retried_errors_a_trial_without_its_trace_is_executed_again(stored: tuple[RunStore, RunRecord]) -> None:
    found = retry_set(stored, retry_errors=True)
    assert found.to_score == {3}
    assert (found.to_run, found.count) == ((1, 2, 4, 5), 5)
    assert found.ordinals == {1, 2, 3, 4, 5}
    assert found.attempts() == {1: 4, 2: 2, 4: 3, 5: 2}
    assert found.costs() == {1: 1.5, 3: 2.0, 5: 0.0}


async def test_the_trials_come_with_what_is_to_be_scored(stored: tuple[RunStore, RunRecord]) -> None:
    found = retry_set(stored, retry_errors=True)
    trials = [trial async for trial in found.trials()]
    assert [(trial.ordinal, trial.attempt, trial.stored is not None) for trial in trials] == [
        (1, 4, False),
        (2, 2, False),
        (3, 2, True),
        (4, 3, False),
        (5, 2, False),
    ]
    assert [trial.sample.id for trial in trials] == ["s1", "s2", "s3", "s4", "s5"]
    assert [trial.ordinal async for trial in found.trials(only_score=True)] == [3]


def test_a_repeated_trial_keeps_what_its_failed_execution_cost(stored: tuple[RunStore, RunRecord]) -> None:
    found = retry_set(stored, retry_errors=True)
    fresh = result(1, "scored", usage=TokenUsage(1, 1, cost_usd=0.25), cache_hits=2, unknown_endings={"odd": 1})
    merged = found.with_earlier_cost(fresh)
    assert (merged.usage, merged.judge_cost_usd, merged.cache_hits) == (TokenUsage(11, 3, cost_usd=1.25), 0.5, 3)
    assert merged.unknown_endings == {"odd": 1}
    judged = found.with_earlier_cost(replace(fresh, judge_cost_usd=0.25))
    assert judged.judge_cost_usd == 0.75
    unpriced = found.with_earlier_cost(result(5, "scored", unpriced_calls=1))
    assert (unpriced.unpriced_calls, unpriced.judge_cost_usd) == (3, None)
    # The session of a rescored trial has all its calls already, and that of a trial without any cost none.
    for same in (result(3, "scored"), result(2, "scored"), result(6, "scored")):
        assert found.with_earlier_cost(same) is same
