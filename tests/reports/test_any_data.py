"""Reports, comparisons, gates, leaderboards and plans of arbitrary runs: no warning, no "nan", no contradiction.

Whatever was stored, each must print something readable, every estimate must lie in its interval, and no verdict may
contradict the interval that is shown beside it.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairtrial import EvalReport, FairtrialError, Metric, Score, compare, gate, leaderboard, plan
from tests.reports.build import stored

ERRORS = ("task_error", "timeout", "scorer_error", "dead_letter", "not_run")
VALUES = {
    "shares": st.floats(0, 1),
    "passes": st.sampled_from([0.0, 1.0]),
    "one value": st.just(0.5),
    "large": st.floats(-1e30, 1e30),
    "tiny": st.floats(0, 1e-300),
    "alike": st.floats(1e9, 1e9 + 1e-3),
}
DECIDED = {"better": 1, "higher": 1, "worse": -1, "lower": -1}


@dataclass(frozen=True)
class Stored:
    report: EvalReport
    cluster: str | None


@st.composite
def runs(draw: st.DrawFn) -> Stored:
    n = draw(st.integers(1, 25))
    repeats = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(sorted(VALUES)))
    faulty = draw(st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    pool = draw(st.lists(VALUES[kind], min_size=1, max_size=6))

    def trial() -> Any:
        if rng.random() < faulty:
            return ERRORS[rng.integers(len(ERRORS))]
        metrics = [Metric("m", pool[rng.integers(len(pool))])] if rng.random() < 0.95 else []
        if rng.random() < 0.5:
            metrics.append(Metric("polite", rng.random(), passed=bool(rng.random() < 0.7)))
        return Score(float(rng.random() < 0.7) if rng.random() < 0.5 else rng.random(), metrics=metrics)

    names = [f"e{place}" for place in range(draw(st.integers(2, 4)))]
    groups = draw(st.sampled_from([1, 2, 5, 100]))
    metadata = [{"c": int(rng.integers(groups)), "kind": ["a", "b", None, 3][rng.integers(4)]} for _ in range(n)]
    inputs = [int(rng.integers(max(1, n // 2))) for _ in range(n)] if draw(st.booleans()) else None
    trials = {name: [[trial() for _ in range(repeats)] for _ in range(n)] for name in names}
    return Stored(stored(trials, metadata=metadata, inputs=inputs), draw(st.sampled_from([None, "c"])))


def shown(record: Any) -> str:
    text = str(record)
    assert not re.search(r"(?<![a-z])(nan|inf|None)(?![a-z])", text), text
    return text


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns; None if it refuses the data with an error of our own."""
    try:
        return call()
    except FairtrialError:
        return None


def check_comparison(found: Any) -> None:
    shown(found)
    shown(found.in_detail())
    for candidate in found.candidates:
        for metric in candidate.metrics:
            if metric.low is None or metric.difference is None:
                assert metric.verdict not in DECIDED
                continue
            slack = 1e-9 * max(1.0, abs(metric.difference))
            assert metric.low - slack <= metric.difference <= metric.high + slack
            if metric.verdict in DECIDED:
                assert metric.low > 0 or metric.high < 0, metric


@pytest.mark.long
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(run=runs())
def test_arbitrary_runs_are_reported_without_contradictions(run: Stored) -> None:
    report, cluster = run.report, run.cluster
    sides = report.parts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown(report)
        for part in sides:
            json.dumps(part.summary, allow_nan=False)
            for estimate in part.estimates:
                if estimate.low is not None and estimate.high is not None and estimate.value is not None:
                    slack = 1e-9 * max(1.0, abs(estimate.value))
                    assert estimate.low - slack <= estimate.value <= estimate.high + slack
        for given_ in ({}, {"metrics": None, "slice_by": "kind"}, {"metrics": ["m"], "higher_is_better": ["m"]}):
            found = attempt(lambda given_=given_: compare(*sides, cluster=cluster, **given_))  # type: ignore[misc]
            if found is not None:
                check_comparison(found)
        for metric in ("passed", "value", "m"):
            board = attempt(lambda metric=metric: leaderboard(report, metric=metric, higher_is_better=["m"]))  # type: ignore[misc]
            if board is not None:
                shown(board)
                assert all(one.rank_low <= one.rank <= one.rank_high for one in board.systems)
            planned = attempt(lambda metric=metric: plan(report, metric=metric, cluster=cluster))  # type: ignore[misc]
            if planned is not None:
                shown(planned)
        for rules, baseline in (
            ({"min_pass_rate": 0.5, "floors": {"value": 0.3}}, None),
            ({"ceilings": {"p95:m": 3.0, "p95:latency_ms": 30}, "max_missing_share": 0.5}, None),
            ({"margins": {"passed": 0.05, "m": 0.2}, "higher_is_better": ["m"]}, sides[0]),
        ):
            decided = attempt(lambda rules=rules, baseline=baseline: gate(sides[1], rules, baseline))  # type: ignore[misc]
            if decided is not None:
                shown(decided)
                assert decided.passed == (decided.status == "pass")


def test_the_check_notices_a_contradiction() -> None:
    with pytest.raises(AssertionError):
        shown("a mean of nan")
