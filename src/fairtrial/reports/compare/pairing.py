"""Pair the trials of two experiments: by sample, and by what was changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from fairtrial import stats
from fairtrial.base.formatting import count
from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures import metrics
from fairtrial.reports.figures.column_samples import StoredIds
from fairtrial.reports.figures.columns import (
    ChangedContents,
    Columns,
    FloatArray,
    IntArray,
    compare_contents,
    refuse_weighted,
    take_ids,
)
from fairtrial.reports.figures.estimates import difference_at_any_time
from fairtrial.reports.figures.rules import checked_smallest_difference


@dataclass(frozen=True, slots=True)
class ChangedSamples:
    """Samples that are not the same on all sides, with some ids: another input, or only another expected value."""

    inputs: int
    expected: int
    input_ids: tuple[str, ...]
    expected_ids: tuple[str, ...]

    @property
    def remark(self) -> str:
        """Return a remark about them: which are changed, and that they are missing."""
        parts = []
        for changed, what, ids in (
            (self.inputs, "input", self.input_ids),
            (self.expected, "expected value", self.expected_ids),
        ):
            if changed:
                more = f" and {changed - len(ids):,} more" if changed > len(ids) else ""
                parts.append(f"the {what} of {count(changed, 'sample')} ({', '.join(ids)}{more})")
        return (
            f"Changed between the sides: {' and '.join(parts)}. Changed samples are not paired; they count as missing."
        )


NOTHING_SCORED = "no trial was scored."
_NAMED = 3  # Changed samples of a kind that are named.


def names_of(names: Collection[str]) -> tuple[str, ...]:
    """Return names as a tuple; a text is one name."""
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Settings of a comparison; `bounds` are ranges of metrics, None for a metric without limits.

    Of latency, tokens and cost less is always better. `primary` is the metric that a plan tests on its own; None
    without a plan.
    """

    alpha: float = 0.05
    power: float = 0.8
    lower_is_better: frozenset[str] = frozenset()
    bounds: Mapping[str, metrics.Range | None] = field(default=EMPTY)
    test: Literal["midp", "exact"] = "midp"
    draws: int | None = None
    seed: int = 0
    smallest_difference_that_matters: float | Mapping[str, float] = metrics.SMALLEST_DIFFERENCE
    higher_is_better: frozenset[str] = frozenset()
    primary: str | None = None

    @classmethod
    def of(
        cls,
        *,
        alpha: float,
        lower_is_better: Collection[str],
        higher_is_better: Collection[str],
        smallest_difference_that_matters: float | Mapping[str, float],
        **others: Any,
    ) -> ComparisonSettings:
        """Return settings that a user chose. One name stands for a list of one.

        Raises:
            ConfigurationError: alpha is no probability, or the smallest difference is not above 0.
        """
        if not 0 < alpha < 1:
            raise ConfigurationError(f"alpha must be between 0 and 1, such as 0.05 (got {alpha})")
        return cls(
            alpha=alpha,
            lower_is_better=frozenset(names_of(lower_is_better)),
            higher_is_better=frozenset(names_of(higher_is_better)),
            smallest_difference_that_matters=checked_smallest_difference(smallest_difference_that_matters),
            **others,
        )

    @property
    def level(self) -> float:
        """The confidence level of intervals."""
        return 1 - self.alpha

    def lower(self, metric: str) -> bool | None:
        """Return True if lower is better for a metric; None if the direction is not declared."""
        metric = metrics.measured_metric(metric)
        if metric in metrics.COSTS or metric in self.lower_is_better:
            return True
        known = (
            metric in (metrics.PASSED, metrics.VALUE, metrics.REWARD)
            or metrics.is_verdict(metric)
            or metric in self.higher_is_better
        )
        return False if known else None

    def declared_by(self, *sides: Columns) -> ComparisonSettings:
        """Return the settings with the directions and ranges that metrics declare on any side.

        Explicit settings take precedence. A range does not hold if a side that does not declare it has left it.
        """
        found = {name: higher for side in reversed(sides) for name, higher in side.directions.items()}
        unsaid = {name: higher for name, higher in found.items() if self.lower(name) is None}
        ranges: dict[str, metrics.Range | None] = {}
        for side in sides:
            for name, ends in side.ranges.items():
                metrics.widen(ranges, name, ends)
        kept = {
            name: ends
            for name, ends in ranges.items()
            if ends is not None and all(side.outside(name, ends) is None for side in sides)
        }
        return replace(
            self,
            bounds=FrozenDict({**kept, **self.bounds}),
            lower_is_better=self.lower_is_better.union(name for name, higher in unsaid.items() if not higher),
            higher_is_better=self.higher_is_better.union(name for name, higher in unsaid.items() if higher),
        )

    def declare(self, columns: Columns) -> Columns:
        """Return columns whose metrics have the ranges and directions of these settings."""
        named = [name for name in columns.values if self.lower(name) is not None]
        return columns.declare(self.bounds, {name: not self.lower(name) for name in named})

    def range_of(self, metric: str) -> metrics.Range | None:
        """Return the range of a metric if it is declared; scores and verdicts lie between 0 and 1."""
        if not metrics.is_mean(metric):
            return None
        return self.bounds.get(metric, metrics.UNIT if metric == metrics.VALUE or metrics.is_verdict(metric) else None)

    def worst_of(self, metric: str) -> float | None:
        """Return what a failure of the system counts as in a metric; None if it has no range or no direction."""
        if metrics.is_ratio(metric):
            return None
        bounds, lower = self.range_of(metrics.measured_metric(metric)), self.lower(metric)
        # Without a declared direction a failure has no worst value: the least toxicity would be the best.
        return None if bounds is None or lower is None else bounds[1] if lower else bounds[0]

    def matters(self, metric: str, bounds: tuple[float, float] | None) -> float | None:
        """Return the smallest difference in a metric that matters; None for a metric without a range, unless set."""
        given = self.smallest_difference_that_matters
        if isinstance(given, Mapping):
            if metric in given:
                return given[metric]
            given = metrics.SMALLEST_DIFFERENCE
        return given if bounds == metrics.UNIT else None


@dataclass(frozen=True, slots=True, eq=False)
class LabelledSides:
    """The judged trials of both sides on their common samples, with people's labels."""

    candidate: stats.JudgedTrials
    baseline: stats.JudgedTrials
    clusters: IntArray | None
    refusal: str | None  # Why the labels are unusable.
    drawn: bool  # Whether the labelled trials of both sides are known to be random samples.

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of labels of candidate and baseline."""
        return int(np.count_nonzero(self.candidate.labelled)), int(np.count_nonzero(self.baseline.labelled))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One metric on both sides of the pairs, ready to be compared."""

    metric: str
    candidate: stats.Repeats
    baseline: stats.Repeats
    bounds: tuple[float, float] | None
    left_out: int  # Failures of the system without a value in this metric.
    labelled: LabelledSides | None = None
    view: metrics.View = "system"

    @property
    def repeats(self) -> int | None:
        """The maximum number of repeats of pass/fail scores; None for graded scores."""
        sides = (self.candidate, self.baseline)
        if self.bounds != metrics.UNIT or not all(side.binary for side in sides):
            return None
        return max(1, *(int(side.counts.max(initial=0)) for side in sides))

    def same_as(self, other: Scores) -> bool:
        """True if two metrics have the same numbers, compared in the same way: then they are one test."""
        ways = [one.metric.removesuffix(metrics.measured_metric(one.metric)) for one in (self, other)]
        return (
            ways[0] == ways[1]
            and (self.labelled is None) == (other.labelled is None)
            and all(
                np.array_equal(mine.counts, its.counts) and np.array_equal(mine.flat, its.flat)
                for mine, its in ((self.candidate, other.candidate), (self.baseline, other.baseline))
            )
        )


type ChangeKind = Literal["lost", "gained", "changed", "same"]
"""What became of a sample: fewer passes, more passes, as many passes with another mean score, nothing."""
_KINDS: Mapping[ChangeKind, int] = {"same": 1, "changed": 2, "lost": 3, "gained": 4}


@dataclass(frozen=True, slots=True, eq=False)
class SampleChanges:
    """How the result of each common sample changed, failures of the system included.

    `codes` has what became of each sample. `passed` and `values` are the share of passes and the mean score on both
    sides, the baseline's first; 0 where a side has no counted trial. `missing` counts planned pairs of which a side has
    none.
    """

    ids: Sequence[str]
    codes: NDArray[np.int8]
    passed: tuple[FloatArray, FloatArray]
    values: tuple[FloatArray, FloatArray]
    order: IntArray  # The largest change first.
    missing: int

    def count(self, kind: ChangeKind) -> int:
        """Return the number of samples of a kind."""
        return int(np.count_nonzero(self.codes == _KINDS[kind]))

    def places(self, kind: ChangeKind) -> IntArray:
        """Return the positions of the samples of a kind, the largest change first."""
        found: IntArray = self.order[self.codes[self.order] == _KINDS[kind]]
        return found

    def ids_of(self, kind: ChangeKind) -> Sequence[str]:
        """Return the ids of the samples of a kind, the largest change first."""
        return take_ids(self.ids, self.places(kind))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The common samples of both sides, in the baseline's order, and counts of the others.

    Samples that are not the same on both sides (`changed`) are among them, with all of their trials missing.
    """

    candidate: Columns
    baseline: Columns
    clusters: IntArray | None
    only_candidate: int
    only_baseline: int
    repeated_ids: int
    planned: int
    changed: ChangedContents | None = None
    scored: bool = True  # Whether any trial of either experiment was scored, in slices of them too.

    @property
    def rows(self) -> int:
        """The number of common ids."""
        return len(self.baseline.ids)

    @property
    def matched(self) -> int:
        """The number of common samples: ids that mean the same on both sides."""
        return self.rows - (0 if self.changed is None else int(np.count_nonzero(self.changed.any)))

    @property
    def watched(self) -> bool:
        """Whether a run on either side used its rates to decide when to stop."""
        return self.candidate.watched or self.baseline.watched

    @property
    def missing_share(self) -> float:
        """The share of planned pairs with a missing side."""
        if not self.planned:
            return 0.0
        usable = self.candidate.counted("system").any(axis=1) & self.baseline.counted("system").any(axis=1)
        return 1 - int(np.count_nonzero(usable)) / self.planned

    def take(self, rows: NDArray[np.bool_]) -> Pairs:
        """Return some of the pairs. Samples that were not run may belong to them; that is not known."""
        labels = None if self.clusters is None else shared_clusters(self.clusters[rows])
        planned = int(np.count_nonzero(rows)) + self.planned - self.rows
        candidate, baseline = self.candidate.take(rows), self.baseline.take(rows)
        changed = None if self.changed is None else self.changed.take(rows)
        return replace(self, candidate=candidate, baseline=baseline, clusters=labels, planned=planned, changed=changed)

    def has_scores(self, metric: str) -> bool:
        """Return whether there is anything to compare: two systems that only failed are not as good as each other."""
        return self.scored or metrics.measured_metric(metric) in metrics.COSTS

    def missing_values(self, metric: str) -> int:
        """Count planned pairs with at least one trial without a value in this metric."""
        metric = metrics.measured_metric(metric)
        gaps = self.candidate.gaps(metric).any(axis=1) | self.baseline.gaps(metric).any(axis=1)
        return int(np.count_nonzero(gaps)) + self.planned - self.rows

    def completed(self, metric: str, candidate: float, baseline: float) -> Pairs:
        """Return the pairs with missing values replaced by `candidate` and `baseline`."""
        clusters = self.clusters
        if clusters is not None:
            extra = np.arange(self.planned - self.rows, dtype=np.intp)
            clusters = np.append(clusters, extra + clusters.max(initial=-1) + 1)
        return replace(
            self,
            candidate=self.candidate.completed(metric, candidate, rows=self.planned),
            baseline=self.baseline.completed(metric, baseline, rows=self.planned),
            clusters=clusters,
            changed=None,
        )


def pair(candidate: Columns, baseline: Columns) -> Pairs:
    """Join two experiments on sample id; ids that occur twice on a side are left out.

    A sample whose input or expected value is another on the other side is no pair: its trials are missing.
    """
    refuse_weighted((candidate, baseline), "a comparison")
    repeated = 0
    if _same_ids(candidate.ids, baseline.ids):
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
    (left, right), changed = without_changed([left, right])
    return Pairs(
        left,
        right,
        None if labels is None else shared_clusters(labels),
        only_candidate,
        only_baseline,
        repeated,
        min(baseline.planned, candidate.planned) - repeated if same_plan else len(right.ids),
        changed,
        scored=any(side.count(metrics.SCORED) for side in (candidate, baseline)),
    )


def changed_samples(ids: Sequence[str], changed: ChangedContents | None) -> ChangedSamples | None:
    """Return the samples that are not the same on all sides, with the ids of a few; None if all are."""
    if changed is None or not changed.any.any():
        return None
    counts, names = zip(
        *((int(np.count_nonzero(mask)), take_ids(ids, np.flatnonzero(mask)[:_NAMED])) for mask in changed.masks),
        strict=True,
    )
    return ChangedSamples(*counts, *map(tuple, names))


def without_changed(sides: Sequence[Columns]) -> tuple[Sequence[Columns], ChangedContents | None]:
    """Return sides with the same ids, the trials of samples that are not the same on all of them missing.

    Sides of one dataset, which its fingerprint tells, and sides whose samples are not known need no look at them.
    """
    contents = [side.contents for side in sides if side.contents is not None]
    if len(contents) < len(sides) or (sides[0].fingerprint and len({side.fingerprint for side in sides}) == 1):
        return sides, None
    changed = compare_contents(contents)
    return ([side.without(changed.any) for side in sides] if changed.any.any() else sides), changed


def _same_ids(candidate: Sequence[str], baseline: Sequence[str]) -> bool:
    """True if both sides have the same samples in the same order, each once."""
    if isinstance(candidate, StoredIds) and isinstance(baseline, StoredIds):
        return candidate.same_as(baseline) and baseline.are_unique
    return list(candidate) == list(baseline) and len(set(baseline)) == len(baseline)


def scores_of(pairs: Pairs, metric: str, view: metrics.View, settings: ComparisonSettings) -> Scores:
    """Return the scores of a metric on both sides; failures count as its worst value, if it has one.

    Where nothing at all was scored, failures count as nothing.
    """
    sides = (pairs.candidate, pairs.baseline)
    view = view if pairs.has_scores(metric) else "scored"
    bounds, worst = settings.range_of(metric), settings.worst_of(metric)
    left_out, measured = 0, metrics.measured_metric(metric)
    if worst is None and view != "scored" and measured not in metrics.COSTS:
        left_out = sum(side.count(metrics.FAILED) for side in sides)
    candidate, baseline = (side.scores(measured, view, worst=worst) for side in sides)
    both_counted = (candidate.counts > 0) & (baseline.counts > 0)
    labelled = _labelled(pairs, metric, view, worst, both_counted)
    return Scores(metric, candidate, baseline, bounds, left_out, labelled, view)


def _labelled(
    pairs: Pairs, metric: str, view: metrics.View, worst: float | None, rows: NDArray[np.bool_]
) -> LabelledSides | None:
    labels = [side.labels_of(metric) for side in (pairs.candidate, pairs.baseline)]
    if labels[0] is None or labels[1] is None:
        return None
    return LabelledSides(
        pairs.candidate.take(rows).judged_trials(view, worst=worst),
        pairs.baseline.take(rows).judged_trials(view, worst=worst),
        None if pairs.clusters is None else pairs.clusters[rows],
        " ".join(dict.fromkeys(one.refusal for one in labels if one is not None and one.refusal)) or None,
        all(one is not None and one.undrawn is None for one in labels),
    )


def difference(scores: Scores, pairs: Pairs, settings: ComparisonSettings) -> stats.PairedDifference:
    """Compute candidate - baseline with its interval and test."""
    found = _difference(scores, pairs, settings)
    return found if pairs.has_scores(scores.metric) else replace(found, reason=NOTHING_SCORED)


def _difference(scores: Scores, pairs: Pairs, settings: ComparisonSettings) -> stats.PairedDifference:
    if pairs.watched:
        system = scores.view == "system"
        return difference_at_any_time(
            scores.candidate,
            scores.baseline,
            planned=(pairs.candidate.repeats, pairs.baseline.repeats) if system else None,
            lost=pairs.planned - pairs.rows,
            clusters=pairs.clusters,
            bounds=scores.bounds,
            level=settings.level,
        )
    if scores.labelled is not None:
        return _corrected(scores, scores.labelled, settings)
    sides = (scores.candidate, scores.baseline)
    common = _Common(clusters=pairs.clusters, level=settings.level, power=settings.power, draws=settings.draws)
    if (quantile := metrics.parse_quantile(scores.metric)) is not None:
        return stats.quantile_difference(*sides, quantile[1], seed=settings.seed, **common)
    if metrics.is_ratio(scores.metric):
        return stats.geometric_ratio(*sides, seed=settings.seed, **common)
    found = stats.paired_difference(*sides, bounds=scores.bounds, test=settings.test, seed=settings.seed, **common)
    if not found.heavy_tail:
        return found
    return replace(found, notes=(*found.notes, way_on(scores.metric)))


def way_on(metric: str) -> str:
    """Say what to compare instead of means with a long tail."""
    half, most = metrics.quantile_name(metric, 0.5), metrics.quantile_name(metric, 0.95)
    return f"Compare {half}, {most} or {metrics.GEOMETRIC}{metric} instead."


class _Common(TypedDict):
    """The settings of every method that compares two sides."""

    clusters: IntArray | None
    level: float
    power: float
    draws: int | None


def difference_with_missing(
    pairs: Pairs, metric: str, interval: stats.Interval, fill: tuple[float, float], settings: ComparisonSettings
) -> stats.Interval | None:
    """Return the interval that holds whatever the missing values would have been, in the range `fill`."""
    least, most = fill
    completed = [pairs.completed(metric, *ends) for ends in ((least, most), (most, least))]
    return hull(
        interval, [difference(scores_of(one, metric, "system", settings), one, settings).interval for one in completed]
    )


def hull(interval: stats.Interval, others: Sequence[stats.Interval | None]) -> stats.Interval | None:
    """Return the smallest interval that contains all of these; None if one is undefined."""
    whole = interval
    for one in others:
        if one is None:
            return None
        whole = replace(whole, low=min(whole.low, one.low), high=max(whole.high, one.high))
    return whole


def _corrected(scores: Scores, sides: LabelledSides, settings: ComparisonSettings) -> stats.PairedDifference:
    found = stats.corrected_difference(
        sides.candidate,
        sides.baseline,
        clusters=sides.clusters,
        bounds=scores.bounds,
        level=settings.level,
        power=settings.power,
    )
    if sides.refusal is None:
        return found
    return replace(
        found, mean_a=None, mean_b=None, difference=None, interval=None, p_value=None, mde=None, reason=sides.refusal
    )


def labels_needed(
    pairs: Pairs, metric: str, found: stats.PairedDifference, shift: float, settings: ComparisonSettings
) -> int | stats.Undefined:
    """Return the labels of each side at which a true difference of `shift` would show."""
    columns = [side.labels_of(metric) for side in (pairs.candidate, pairs.baseline)]
    most = max(0 if column is None else column.count for column in columns)
    judged = replace(
        pairs, candidate=replace(pairs.candidate, labels=None), baseline=replace(pairs.baseline, labels=None)
    )
    judge = difference(scores_of(judged, metric, "system", settings), judged, settings)
    return stats.labels_to_detect(most, found.se, judge.se, shift, level=settings.level, power=settings.power)


def changes(pairs: Pairs) -> SampleChanges:
    """Return how the result of each common sample changed."""
    known, passed = _means(pairs, metrics.PASSED)
    scored, values = _means(pairs, metrics.VALUE)
    change = passed[1] - passed[0]
    by_value = np.where(scored, values[1] - values[0], 0.0)
    for numbers in (change, by_value):
        numbers[np.abs(numbers) < 1e-12] = 0.0
    codes = np.full(known.size, _KINDS["same"], dtype=np.int8)
    codes[by_value != 0] = _KINDS["changed"]
    codes[change < 0] = _KINDS["lost"]
    codes[change > 0] = _KINDS["gained"]
    codes[~known] = 0
    order = np.argsort(-np.abs(np.where(change == 0, by_value, change)), kind="stable")
    missing = pairs.planned - int(np.count_nonzero(known))
    return SampleChanges(pairs.baseline.ids, codes, passed, values, order, missing)


def _means(pairs: Pairs, metric: str) -> tuple[NDArray[np.bool_], tuple[FloatArray, FloatArray]]:
    """Return where both sides have a counted trial, and the mean of each there, the baseline's first; else 0."""
    sides = [side.scores(metric, "system") for side in (pairs.baseline, pairs.candidate)]
    known = (sides[0].counts > 0) & (sides[1].counts > 0)
    means = [np.zeros(known.size) for _ in sides]
    for found, side in zip(means, sides, strict=True):
        found[known] = side.only(known).means
    return known, (means[0], means[1])


def shared_clusters(labels: IntArray) -> IntArray | None:
    """Return the clusters; None if every sample is its own cluster."""
    return None if labels.size and np.unique(labels).size == labels.size else labels
