"""One metric on both sides of a comparison, and how it is to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fairtrial.frozen import EMPTY
from fairtrial.report.columns import COSTS
from fairtrial.stats import Repeats


@dataclass(frozen=True, slots=True)
class Settings:
    """How differences are computed; `bounds` are ranges of metrics, None for a metric without limits."""

    alpha: float = 0.05
    power: float = 0.8
    lower_is_better: frozenset[str] = frozenset(COSTS)
    bounds: Mapping[str, tuple[float, float] | None] = field(default=EMPTY)
    test: Literal["midp", "exact"] = "midp"
    draws: int | None = None
    seed: int = 0

    @property
    def level(self) -> float:
        """The confidence level of intervals."""
        return 1 - self.alpha

    def lower(self, metric: str) -> bool:
        """Whether less of a metric is better."""
        return metric in self.lower_is_better


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One metric on both sides of the pairs, ready to be compared."""

    metric: str
    candidate: Repeats
    baseline: Repeats
    bounds: tuple[float, float] | None
    left_out: int  # Failures of the system that have no number in this metric.

    def same_as(self, other: Scores) -> bool:
        """Whether the two metrics have the same numbers throughout: then they are one and the same test."""
        return all(
            np.array_equal(mine.counts, its.counts) and np.array_equal(mine.flat, its.flat)
            for mine, its in ((self.candidate, other.candidate), (self.baseline, other.baseline))
        )
