"""Pairs of reports for tests of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairtrial import AnalysisPlan, EvalReport, Metric, Score, compare
from fairtrial.reports import Comparison
from fairtrial.store.notes import PlanNote, write_notes
from tests.reports.build import Trial, stored


def two(baseline: Sequence[Trial], candidate: Sequence[Trial], **given: Any) -> EvalReport:
    return stored({"plain": baseline, "terse": candidate}, **given)


def one(report: EvalReport, **given: Any) -> Comparison:
    return compare(report["plain"], report["terse"], **given)


def planned(trials: Any, plan: AnalysisPlan | None, **changes: Any) -> EvalReport:
    """A run of these trials, with a plan that it had before its first result."""
    notes = {} if plan is None else write_notes(plans=[PlanNote(plan.digest, plan.content, 1e9)])
    return stored(trials, notes=notes, **changes)


def graded(place: int, shift: int) -> Score:
    """A score with two metrics, of which one side has more."""
    more = shift and place % 5 == 0
    metrics = [
        Metric("calm", 0.2 + 0.01 * (place % 7) + (0.1 if more else 0.0), higher_is_better=True),
        Metric("clear", 0.5 + 0.01 * (place % 3) * shift, higher_is_better=True),
    ]
    return Score(1.0 if place % 4 or (shift and place % 8) else 0.0, metrics=metrics)


GRADED = {name: [graded(place, shift) for place in range(60)] for shift, name in enumerate(("plain", "terse"))}
