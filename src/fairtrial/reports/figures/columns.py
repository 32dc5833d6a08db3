"""Columns of an experiment: one array per metric."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.codec import canonical
from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures import metrics
from fairtrial.reports.figures.column_samples import StoredIds
from fairtrial.reports.figures.summaries import unequal_weights_error
from fairtrial.stats import JudgedTrials, Repeats

type _Hashes = NDArray[np.int64]
type _Mask = NDArray[np.bool_]


class SampleContents:
    """The hashes of the input and of the expected value of each sample, read when they are needed."""

    def __init__(self, read: Callable[[], tuple[_Hashes, _Hashes]]) -> None:
        self._read = read

    @cached_property
    def hashes(self) -> tuple[_Hashes, _Hashes]:
        """The hashes of inputs and of expected values, in the order of the samples."""
        return self._read()

    def take(self, places: NDArray[Any]) -> SampleContents:
        """Return those of the samples at these positions."""

        def read() -> tuple[_Hashes, _Hashes]:
            inputs, expected = self.hashes
            return inputs[places], expected[places]

        return SampleContents(read)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedContents:
    """Which samples are not the same on all sides: masks of another input, and of the same with another expected value.

    `unknown` counts the others whose input is not known on every side: only their id says that they are the same.
    """

    inputs: _Mask
    expected: _Mask
    unknown: int

    @property
    def masks(self) -> tuple[_Mask, _Mask]:
        """The samples with another input, and those with another expected value only."""
        return self.inputs, self.expected

    @property
    def any(self) -> _Mask:
        """The samples that are not the same."""
        return np.asarray(self.inputs | self.expected)

    def take(self, rows: NDArray[Any]) -> ChangedContents:
        """Return those of some of the samples."""
        return ChangedContents(self.inputs[rows], self.expected[rows], self.unknown)


def compare_contents(sides: Sequence[SampleContents]) -> ChangedContents:
    """Compare what the same ids mean on several sides. What is unknown differs from nothing."""
    inputs, expected = (_differ([side.hashes[which] for side in sides]) for which in (0, 1))
    unknown = np.any([side.hashes[0] == UNKNOWN for side in sides], axis=0)
    return ChangedContents(inputs, expected & ~inputs, int(np.count_nonzero(unknown & ~inputs & ~expected)))


def _differ(columns: Sequence[_Hashes]) -> _Mask:
    seen, differ = columns[0], np.zeros(columns[0].size, dtype=np.bool_)
    for other in columns[1:]:
        differ |= (seen != other) & (seen != UNKNOWN) & (other != UNKNOWN)
        seen = np.where(seen == UNKNOWN, other, seen)
    return differ


type FloatArray = NDArray[np.float64]
type IntArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class LabelColumn:
    """People's labels for one metric, cell by cell; NaN where there is none.

    `weights` are those of the labels, None if all are equal. `certain` marks cells whose label nobody had to give.
    `by_verdict` says that trials were drawn at random within each verdict of the judge. `refusal` says why these labels
    correct nothing, if they do not, and `undrawn` why they may not be a random sample.
    """

    metric: str
    values: FloatArray
    weights: FloatArray | None = None
    certain: NDArray[np.bool_] | None = None
    by_verdict: bool = False
    refusal: str | None = None
    undrawn: str | None = None

    @property
    def count(self) -> int:
        """The number of labelled trials."""
        return int(np.count_nonzero(np.isfinite(self.values) & (True if self.certain is None else ~self.certain)))

    def take(self, places: IntArray) -> LabelColumn:
        """Return the samples at these positions."""
        return replace(
            self,
            values=self.values[places],
            weights=None if self.weights is None else self.weights[places],
            certain=None if self.certain is None else self.certain[places],
        )

    def completed(self, gaps: NDArray[np.bool_], value: float) -> LabelColumn:
        """Return the labels of more samples, with `value` in every gap, as if it were certain."""
        pad = ((0, len(gaps) - len(self.values)), (0, 0))
        return replace(
            self,
            values=np.where(gaps, value, np.pad(self.values, pad, constant_values=np.nan)),
            weights=None if self.weights is None else np.pad(self.weights, pad, constant_values=1.0),
            certain=gaps,
        )


@dataclass(frozen=True, slots=True)
class RepeatedInputs:
    """Samples with the same input as others.

    `samples` repeat the input of an earlier one. They are clusters unless `independent` says why not. `across` inputs
    occur in several declared clusters, which stay as they were declared.
    """

    samples: int
    across: int = 0
    independent: str = ""

    @property
    def remark(self) -> str:
        """Return a remark about them."""
        many = f"{self.samples:,} samples repeat" if self.samples > 1 else "1 sample repeats"
        sentence = f"{many} the input of another"
        if self.independent:
            return f"{sentence}; {self.independent}"
        if self.across:
            shared = "1 input is" if self.across == 1 else f"{self.across:,} inputs are"
            return f"{sentence}; {shared} in more than one declared cluster, which count as independent."
        return f"{sentence}; {'they count as clusters' if self.samples > 1 else 'the two count as a cluster'}."


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The numbers of one experiment: `outcomes` and each of `values` have a row per sample and a column per repeat.

    A value is NaN where a trial has none. `planned` counts all samples of the plan, `ids` those whose names are stored.
    `clusters` numbers the cluster of each sample; None if samples are independent. `groups` maps each slicing key to
    the slice of each sample. `adaptive` is set if the run decided from its own results when to stop: the number of
    leading samples it had analysed by then (`analysed_prefix`). `ranges` are the declared bounds of metrics and
    `directions` says of those that declare it whether more is better. `stopped_by_width`: the adaptive rule looked
    at the width of intervals alone, so that ordinary intervals hold. `labels` correct the judge's verdicts.
    `repeated_inputs` are part of `clusters`. `contents` say what each id means; None if that is not known. `weights`
    say how many traces each sample stands for; None if samples were not drawn.
    """

    name: str
    ids: Sequence[str]
    planned: int
    outcomes: NDArray[np.int8]
    values: Mapping[str, FloatArray]
    clusters: IntArray | None = None
    groups: Mapping[str, Sequence[Hashable]] = EMPTY
    fingerprint: str = ""
    adaptive: int | None = None
    ranges: Mapping[str, metrics.Range] = EMPTY
    directions: Mapping[str, bool] = EMPTY
    stopped_by_width: bool = False
    labels: LabelColumn | None = None
    repeated_inputs: RepeatedInputs | None = None
    contents: SampleContents | None = None
    weights: FloatArray | None = None

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        *,
        name: str = "columns",
        ids: Sequence[str] | None = None,
        clusters: Sequence[Hashable] | NDArray[Any] | None = None,
        outcomes: NDArray[Any] | None = None,
        groups: Mapping[str, Sequence[Hashable]] = EMPTY,
        adaptive: int | None = None,
        directions: Mapping[str, bool] = EMPTY,
        ranges: Mapping[str, metrics.Range] = EMPTY,
    ) -> Columns:
        """Create columns from arrays of one score, or one row of repeats, per sample (default: all scored)."""
        arrays: dict[str, FloatArray] = {}
        for key, given in values.items():
            array = np.asarray(given, dtype=np.float64)
            arrays[key] = array[:, None] if array.ndim == 1 else array
        shape = next(iter(arrays.values())).shape
        classes = (
            np.full(shape, metrics.SCORED, dtype=np.int8) if outcomes is None else np.asarray(outcomes, dtype=np.int8)
        )
        known = [str(place) for place in range(shape[0])] if ids is None else list(ids)
        codes = None if clusters is None else codes_of(clusters)
        return cls(
            name, known, shape[0], classes.reshape(shape), arrays, codes, groups, "", adaptive, ranges, directions
        )

    @property
    def watched(self) -> bool:
        """Whether the run stopped, or could have stopped, because of its rates: ordinary intervals do not hold."""
        return self.adaptive is not None and not self.stopped_by_width

    @property
    def unequal_weights(self) -> FloatArray | None:
        """The weights, if samples were drawn with different chances."""
        weights = self.weights
        return weights if weights is not None and weights.size and np.ptp(weights) > 1e-9 * weights.max() else None

    @property
    def repeats(self) -> int:
        """Planned repeats of each sample."""
        return int(self.outcomes.shape[1])

    @property
    def trials(self) -> int:
        """The number of planned trials."""
        return self.planned * self.repeats

    def count(self, *classes: int) -> int:
        """Count trials with one of these outcomes."""
        found = np.bincount(self.outcomes.reshape(-1), minlength=metrics.MISSING + 1)
        return int(sum(found[one] for one in classes))

    def counted(self, view: metrics.View) -> NDArray[np.bool_]:
        """Return the trials that count, cell by cell."""
        return np.asarray((self.outcomes >= metrics.SCORED) & (self.outcomes <= metrics.LAST_COUNTED[view]))

    @property
    def missing(self) -> int:
        """Trials that say nothing about the system: not run, or not scored for reasons outside the system."""
        return self.trials - self.count(metrics.SCORED, metrics.FAILED)

    def gaps(self, metric: str) -> NDArray[np.bool_]:
        """Return the trials without a value in this metric that should have one, cell by cell.

        A failure of the system is none if the metric has a worst value, by its range and its direction. Nor is an
        executed trial without a latency, which is a warm-up.
        """
        finite = np.isfinite(self.values.get(metric, np.full((1, 1), np.nan)))
        if metric in metrics.COSTS:
            return np.asarray(~finite & ~(self.counted("system") & (metric == metrics.LATENCY)))
        known = metric in (metrics.VALUE, metrics.REWARD) or metrics.is_verdict(metric) or metric in self.directions
        excused = (self.outcomes == metrics.FAILED) & (known and self.bounds(metric) is not None)
        return np.asarray(~((self.outcomes == metrics.SCORED) & finite) & ~excused)

    def missing_values(self, metric: str) -> int:
        """Count planned trials without a value in this metric (see `gaps`)."""
        return int(np.count_nonzero(self.gaps(metric))) + (self.planned - len(self.ids)) * self.repeats

    def completed(self, metric: str, value: float, *, rows: int | None = None) -> Columns:
        """Return one metric with every missing value replaced by `value`; `rows` are the samples of the plan."""
        extra = (self.planned if rows is None else rows) - len(self.ids)
        pad = ((0, extra), (0, 0))
        values = np.broadcast_to(self.values.get(metric, np.full((1, 1), np.nan)), self.outcomes.shape)
        gaps = np.pad(self.gaps(metric), pad, constant_values=True)
        clusters = self.clusters
        if clusters is not None and extra:
            clusters = np.append(clusters, np.arange(extra, dtype=np.intp) + clusters.max(initial=-1) + 1)
        return replace(
            self,
            ids=[*self.ids, *("" for _ in range(extra))],
            planned=len(self.ids) + extra,
            outcomes=np.where(gaps, metrics.SCORED, np.pad(self.outcomes, pad)).astype(np.int8),
            values={metric: np.where(gaps, value, np.pad(values, pad))},
            clusters=clusters,
            groups=EMPTY,
            labels=None if self.labels is None else self.labels.completed(gaps, value),
            contents=None,
            weights=None if self.weights is None else np.pad(self.weights, (0, extra), mode="mean"),
        )

    def take(self, rows: NDArray[Any]) -> Columns:
        """Return the samples at these positions, or marked in a mask; they become the plan."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return replace(
            self,
            ids=take_ids(self.ids, places),
            planned=int(places.size),
            outcomes=self.outcomes[places],
            values={name: array[places] for name, array in self.values.items()},
            clusters=None if self.clusters is None else self.clusters[places],
            groups={name: [labels[place] for place in places.tolist()] for name, labels in self.groups.items()},
            labels=None if self.labels is None else self.labels.take(places),
            contents=None if self.contents is None else self.contents.take(places),
            weights=None if self.weights is None else self.weights[places],
        )

    def without(self, rows: NDArray[np.bool_]) -> Columns:
        """Return the same samples with the trials of some of them missing."""
        return replace(
            self,
            outcomes=np.where(rows[:, None], metrics.NOT_RUN, self.outcomes).astype(np.int8),
            values={name: np.where(rows[:, None], np.nan, array) for name, array in self.values.items()},
        )

    def analysed_prefix(self) -> Columns:
        """Return the samples that an adaptive run had analysed when it stopped; all samples of other runs.

        What finished beyond them did so because it was quick, and would mislead.
        """
        return self if self.adaptive is None else self.take(np.arange(self.adaptive, dtype=np.intp))

    def bounds(self, metric: str) -> metrics.Range | None:
        """Return the range of a metric: 0 to 1 for scores and verdicts, else the declared one; None without one."""
        return metrics.UNIT if metric == metrics.VALUE or metrics.is_verdict(metric) else self.ranges.get(metric)

    def outside(self, metric: str, bounds: metrics.Range) -> float | None:
        """Return a value of a metric that lies outside of these bounds; None if there is none."""
        values = self.values.get(metric, np.empty(0))
        found = values[(values < bounds[0]) | (values > bounds[1])]
        return float(found[0]) if found.size else None

    def declare(self, bounds: Mapping[str, metrics.Range | None], directions: Mapping[str, bool]) -> Columns:
        """Return the columns with these ranges (None: none) and directions; a value outside raises an error."""
        for metric, ends in bounds.items():
            if ends is not None and (outside := self.outside(metric, ends)) is not None:
                raise ConfigurationError(
                    f"bounds.{metric} must contain every number of {self.name} (got {outside:g}, outside of "
                    f"{ends[0]:g} to {ends[1]:g})"
                )
        kept = {name: ends for name, ends in {**self.ranges, **bounds}.items() if ends is not None}
        return replace(self, ranges=FrozenDict(kept), directions=FrozenDict({**self.directions, **directions}))

    def scores(self, metric: str, view: metrics.View, *, worst: float | None = 0.0) -> Repeats:
        """Return the scores of the counted trials of every sample; a failure scores `worst`, or nothing if None."""
        values = self.values.get(metric, np.full((1, 1), np.nan))
        finite = np.isfinite(values)
        if not finite.any() and (self.count(metrics.SCORED) or metric in metrics.COSTS):
            # No trial has this metric: failures alone must not define it.
            return Repeats(np.empty(0), np.zeros(len(self.ids), dtype=np.intp))
        scored = finite if metric in metrics.COSTS else (self.outcomes == metrics.SCORED) & finite
        counted = scored
        if worst is not None and view != "scored":
            counted = scored | (self.counted(view) & (self.outcomes != metrics.SCORED))
            values = np.where(scored, values, worst)
        flat = np.broadcast_to(values, counted.shape)
        if counted.all():  # The usual case, without copies.
            return Repeats(flat.reshape(-1), np.full(len(counted), counted.shape[1], dtype=np.intp))
        return Repeats(flat[counted], counted.sum(axis=1).astype(np.intp))

    def labels_of(self, metric: str) -> LabelColumn | None:
        """Return the labels that correct this metric, if any."""
        return self.labels if self.labels is not None and self.labels.metric == metric else None

    def judged_trials(self, view: metrics.View, *, worst: float | None = 0.0) -> JudgedTrials:
        """Return the counted trials of the metric with people's labels; failures are certain.

        Samples without a counted trial are left out, and the others numbered from 0.
        """
        labels = self.labels
        if labels is None:
            raise ValueError("These columns have no labels.")
        values = self.values[labels.metric]
        scored = (self.outcomes == metrics.SCORED) & np.isfinite(values)
        failed = np.zeros(scored.shape, dtype=np.bool_)
        if worst is not None and view != "scored":
            failed = self.counted(view) & ~scored & (self.outcomes != metrics.SCORED)
        cells = scored | failed
        known = failed if labels.certain is None else failed | labels.certain
        places = np.cumsum(cells.any(axis=1)) - 1
        return JudgedTrials(
            scores=np.where(failed, np.nan, values)[cells],
            labels=np.where(failed, 0.0 if worst is None else worst, labels.values)[cells],
            weights=None if labels.weights is None else labels.weights[cells],
            certain=known[cells],
            samples=np.broadcast_to(places[:, None], cells.shape)[cells],
        )


def refuse_weighted(sides: Sequence[Columns], what: str) -> None:
    """Raise if the samples of one of these were drawn with different chances, which these figures do not allow for."""
    for one in sides:
        if one.unequal_weights is not None:
            raise unequal_weights_error(one.name, what)


def take_ids(ids: Sequence[str], places: IntArray) -> Sequence[str]:
    """Return the ids at these positions."""
    return ids.take(places) if isinstance(ids, StoredIds) else [ids[place] for place in places.tolist()]


def hashable(value: Any) -> Hashable:
    """Return a hashable form of a JSON value: lists and objects become their canonical text."""
    return canonical(value).decode() if isinstance(value, list | dict) else value


def codes_of(labels: Sequence[Hashable] | NDArray[Any]) -> IntArray:
    """Number the clusters from 0; each sample without one is its own cluster."""
    if isinstance(labels, np.ndarray) and np.issubdtype(labels.dtype, np.integer):
        return labels.astype(np.intp)
    seen: dict[Hashable, int] = {}
    names = labels.tolist() if isinstance(labels, np.ndarray) else labels
    # 1, 1.0 and True are equal in Python and three values in JSON.
    return np.fromiter(
        (
            seen.setdefault((place,) if label is None else (label, type(label).__name__), len(seen))
            for place, label in enumerate(names)
        ),
        dtype=np.intp,
        count=len(names),
    )
