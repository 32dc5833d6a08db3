"""Two experiments on the same samples, paired by sample id, and what one metric says about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fairtrial.analysis.anytime import difference_at_any_time
from fairtrial.analysis.columns import Columns, FloatArray, IntArray
from fairtrial.analysis.metrics import COSTS, FAILED, PASSED, UNIT, VALUE, View, is_verdict
from fairtrial.frozen import EMPTY
from fairtrial.stats import PairedDifference, Repeats, paired_difference


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
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


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The samples that both sides have, in the baseline's order, and what the join left over."""

    candidate: Columns
    baseline: Columns
    clusters: IntArray | None
    only_candidate: int
    only_baseline: int
    repeated_ids: int
    planned: int

    @property
    def matched(self) -> int:
        """How many samples both sides have."""
        return len(self.baseline.ids)

    @property
    def missing_share(self) -> float:
        """The share of planned pairs of which a side says nothing about its system."""
        if not self.planned:
            return 0.0
        usable = self.candidate.counted("system").any(axis=1) & self.baseline.counted("system").any(axis=1)
        return 1 - int(np.count_nonzero(usable)) / self.planned

    def take(self, rows: NDArray[np.bool_]) -> Pairs:
        """Some of the pairs."""
        labels = None if self.clusters is None else _independent(self.clusters[rows])
        count = int(np.count_nonzero(rows))
        return replace(
            self, candidate=self.candidate.take(rows), baseline=self.baseline.take(rows), clusters=labels, planned=count
        )


def pair(candidate: Columns, baseline: Columns) -> Pairs:
    """Join two experiments on sample id. An id that a side has twice names no pair and is left out."""
    repeated = 0
    if list(candidate.ids) == list(baseline.ids) and len(set(baseline.ids)) == len(baseline.ids):
        left, right = candidate, baseline
        only_candidate = only_baseline = 0
    else:
        doubles = {name for side in (candidate, baseline) for name, count in Counter(side.ids).items() if count > 1}
        repeated = len(doubles)
        where = {name: place for place, name in enumerate(candidate.ids) if name not in doubles}
        rows = [(where[name], place) for place, name in enumerate(baseline.ids) if name in where]
        places = np.asarray(rows, dtype=np.intp).reshape(-1, 2)
        left, right = candidate.take(places[:, 0]), baseline.take(places[:, 1])
        both = doubles & set(candidate.ids) & set(baseline.ids)
        only_candidate = len(set(candidate.ids)) - len(rows) - len(both)
        only_baseline = len(set(baseline.ids)) - len(rows) - len(both)
    labels = right.clusters if right.clusters is not None else left.clusters
    # Of one dataset, what is not among the pairs was not run; of two, it may never have been meant to be. Nor was what
    # lies beyond the samples that a run ended with by its own rule.
    same_plan = bool(baseline.fingerprint) and baseline.fingerprint == candidate.fingerprint
    return Pairs(
        left,
        right,
        None if labels is None else _independent(labels),
        only_candidate,
        only_baseline,
        repeated,
        min(baseline.planned, candidate.planned) - repeated if same_plan else len(right.ids),
    )


def scores_of(pairs: Pairs, metric: str, view: View, settings: ComparisonSettings) -> Scores:
    """A metric's numbers on both sides; failures of the system count as its worst value, if it has one."""
    sides = (pairs.candidate, pairs.baseline)
    if metric in settings.bounds:
        bounds = settings.bounds[metric]
    else:
        found = [side.bounds(metric) for side in sides if np.isfinite(side.values.get(metric, np.empty(0))).any()]
        bounds = (
            UNIT if metric == VALUE or is_verdict(metric) or (found and all(one == UNIT for one in found)) else None
        )
    worst = None if bounds is None else bounds[1] if settings.lower(metric) else bounds[0]
    left_out = 0
    if worst is None and view != "scored" and metric not in COSTS:
        left_out = sum(side.count(FAILED) for side in sides)
    candidate, baseline = (side.scores(metric, view, worst=worst) for side in sides)
    return Scores(metric, candidate, baseline, bounds, left_out)


def difference(scores: Scores, pairs: Pairs, settings: ComparisonSettings) -> PairedDifference:
    """candidate - baseline, with all that is to be said about it."""
    if pairs.candidate.adaptive is not None or pairs.baseline.adaptive is not None:
        return difference_at_any_time(
            scores.candidate,
            scores.baseline,
            clusters=pairs.clusters,
            bounds=scores.bounds,
            level=settings.level,
        )
    return paired_difference(
        scores.candidate,
        scores.baseline,
        clusters=pairs.clusters,
        bounds=scores.bounds,
        level=settings.level,
        power=settings.power,
        test=settings.test,
        draws=settings.draws,
        seed=settings.seed,
    )


def changes(pairs: Pairs) -> FloatArray:
    """How much each sample's share of passes changed, failures of the system counting as such; 0 where unknown."""
    sides = [side.scores(PASSED, "system") for side in (pairs.candidate, pairs.baseline)]
    known = (sides[0].counts > 0) & (sides[1].counts > 0)
    change = np.zeros(known.size)
    change[known] = sides[0].only(known).means - sides[1].only(known).means
    change[np.abs(change) < 1e-12] = 0.0
    return change


def _independent(labels: IntArray) -> IntArray | None:
    """None where every sample is a cluster of its own."""
    return None if labels.size and np.unique(labels).size == labels.size else labels
