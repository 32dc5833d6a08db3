"""Pairs of reports for tests of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairtrial import Comparison, EvalReport, compare
from tests.report.build import Trial, stored


def two(baseline: Sequence[Trial], candidate: Sequence[Trial], **given: Any) -> EvalReport:
    return stored({"plain": baseline, "terse": candidate}, **given)


def one(report: EvalReport, **given: Any) -> Comparison:
    return compare(report["plain"], report["terse"], **given)
