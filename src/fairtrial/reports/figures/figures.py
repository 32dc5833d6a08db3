"""The figures of one experiment, also adjusted by earlier runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.errors import UnknownRunError
from fairtrial.reports.figures.analysis_plan import plan_of
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, FloatArray, IntArray, RepeatedInputs
from fairtrial.reports.figures.estimates import Estimate, HistoryEstimate, estimates, per_trial
from fairtrial.reports.figures.metrics import NOTHING_SCORED, PASSED, VALUE, ExperimentSource, View
from fairtrial.stats import Interval, VarianceSplit, history_mean, variance_split
from fairtrial.store.notes import AdaptiveNote
from fairtrial.store.protocol import RunRecord, RunStore

type _Key = tuple[str, int, int]  # The id of a sample and the hashes of its input and expected value.


def read_history(source: ExperimentSource) -> RunHistory | None:
    """Find the earlier runs that a run declares, in its plan or its settings; None if it declares none."""
    planned = plan_of(source.run)
    plan = None if planned is None else planned.in_use
    declared = (plan.history if plan is not None else 0) or source.run.config.get("history")
    if not declared or source.run.noted.is_adaptive:
        return None
    finder = _Finder(source.store, source.run)
    if isinstance(declared, int):
        found = finder.latest(declared)
    else:
        names = declared if isinstance(declared, Sequence) else ()
        found = [side for name in names for side in finder.named(str(name))]
    return RunHistory(source, tuple(dict.fromkeys(found)), tuple(finder.notes))


class _Finder:
    """Finds runs that ended before the first trial of a run."""

    def __init__(self, store: RunStore, run: RunRecord) -> None:
        self._store, self._run = store, run
        self._began = _first_run(store, run).created_at
        self.notes: list[str] = []

    def latest(self, count: int) -> list[ExperimentSource]:
        """Return the experiments of the latest runs of the suite, or of parts of it."""
        suite = self._run.suite.partition("+")[0]
        runs = [run for run in self._store.runs() if run.suite.partition("+")[0] == suite and not self._why_not(run)]
        if not runs:
            self.notes.append("No run of the suite ended before this one began: there is no history.")
        return [side for run in runs[:count] for side in self._sides(run, None)]

    def named(self, name: str) -> Iterator[ExperimentSource]:
        """Yield the experiments of a run by its name or id; there are none if it is no earlier run."""
        text, _, experiment = name.partition(":")
        run = next((run for run in self._store.runs() if text in (run.name, run.run_id)), None)
        if run is None or (experiment and experiment not in run.experiments):
            self.notes.append(f"{name} is not in this store: its history is not used.")
        elif why := self._why_not(run):
            self.notes.append(f"{name} {why}: its history is not used.")
        else:
            yield from self._sides(run, experiment or None)

    def _why_not(self, run: RunRecord) -> str | None:
        if run.run_id == self._run.run_id or run.finished_at is None or run.finished_at > self._began:
            return "had not ended when this run began"
        if run.noted.sampling is not None:
            return "has live traces"
        return "is of another dataset" if run.dataset_name != self._run.dataset_name else None

    def _sides(self, run: RunRecord, experiment: str | None) -> list[ExperimentSource]:
        return [ExperimentSource(self._store, run, name) for name in run.experiments if experiment in (None, name)]


def _first_run(store: RunStore, run: RunRecord) -> RunRecord:
    """Return the run whose outputs a rescored run scores; any other run itself."""
    while run.parent_run is not None:
        try:
            run = store.get_run(run.parent_run)
        except UnknownRunError:  # Deleted: its own start, which is later, cannot stand for it.
            return replace(run, created_at=0.0)
    return run


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The earlier experiments of a run's history. `notes` say which declared ones are not used."""

    source: ExperimentSource
    sides: tuple[ExperimentSource, ...]
    notes: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The metadata keys that must be read of the run."""
        return (self.source.cluster_key,) if self.source.cluster_key else ()

    def adjust(self, columns: Columns, found: Sequence[Estimate], level: float) -> tuple[Estimate, ...]:
        """Return the estimates, those of a mean with a range with its history."""
        if not self.sides or columns.unequal_weights is not None:
            return tuple(found)
        items = _Items.of(columns, [read_columns(side, keys=self.keys) for side in self.sides], self.keys)
        runs = len({side.run.run_id for side in self.sides})
        return tuple(
            one
            if one.view == "system" or columns.bounds(one.metric) is None or not one.n
            else replace(one, history=items.estimate(columns, one, level, runs))
            for one in found
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """All samples with a content, those of the run first; where those of each earlier experiment are among them."""

    sides: tuple[tuple[Columns, IntArray], ...]
    count: int
    labels: list[Hashable] | None

    @classmethod
    def of(cls, columns: Columns, sides: Sequence[Columns], keys: Sequence[str]) -> _Items:
        places: dict[_Key, int] = {}
        labels: list[Hashable] = []
        own = _keys(columns)
        for place, (key, label) in enumerate(zip(own, _labels(columns, keys), strict=True)):
            labels.append(label)
            if key is not None:
                places[key] = place
        found = []
        for side in sides:
            where = np.full(len(side.ids), -1, dtype=np.intp)
            for row, (key, label) in enumerate(zip(_keys(side), _labels(side, keys), strict=True)):
                if key is None:
                    continue
                where[row] = places.setdefault(key, len(labels))
                if where[row] == len(labels):
                    labels.append(label)
            found.append((side, where))
        kinds = set(labels)
        # If all inputs are equal, the real input must be elsewhere, such as in metadata.
        clustered = bool(keys) and len(kinds) < len(labels) and kinds != {("input", own[0] and own[0][1])}
        return cls(tuple(found), len(labels), labels if clustered else None)

    def means(self, metric: str, view: View) -> FloatArray:
        """Return the mean of each sample in the earlier experiments that have it; NaN without any."""
        sums, counts = np.zeros(self.count), np.zeros(self.count)
        for side, where in self.sides:
            scores = side.scores(metric, view)
            some = (scores.counts > 0) & (where >= 0)
            np.add.at(sums, where[some], scores.only(some).means)
            np.add.at(counts, where[some], 1)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def estimate(self, columns: Columns, one: Estimate, level: float, runs: int) -> HistoryEstimate:
        """Adjust an estimate of the run."""
        bounds = columns.bounds(one.metric) or (0.0, 1.0)
        scores, means = columns.scores(one.metric, one.view), self.means(one.metric, one.view)
        n = scores.counts.size
        rest = np.isfinite(means[n:])
        labels = None
        if self.labels is not None:
            labels = [*self.labels[:n], *(label for label, has in zip(self.labels[n:], rest, strict=True) if has)]
        found = history_mean(scores, means[:n], means[n:][rest], clusters=labels, bounds=bounds, level=level)
        plain, interval = found.reason is not None, found.interval
        return HistoryEstimate(
            one.value if plain else found.mean,
            one.low if plain or interval is None else interval.low,
            one.high if plain or interval is None else interval.high,
            one.n if plain else int(found.plain_samples),
            found.known,
            found.pool,
            runs,
            one.method if plain or interval is None else interval.method,
            found.reason,
        )


def _keys(columns: Columns) -> list[_Key | None]:
    """Return what identifies each sample in other runs; None if its content is not stored."""
    if columns.contents is None:
        return [None] * len(columns.ids)
    inputs, expected = columns.contents.hashes
    rows = zip(columns.ids, inputs.tolist(), expected.tolist(), strict=True)
    return [None if UNKNOWN in (asked, wanted) else (name, asked, wanted) for name, asked, wanted in rows]


def _labels(columns: Columns, keys: Sequence[str]) -> list[Hashable]:
    """Return the cluster of each sample under a name that all runs share: its declared one, else its input."""
    declared: Sequence[Hashable] = columns.groups[keys[0]] if keys else [None] * len(columns.ids)
    asked: list[int] = [] if columns.contents is None else columns.contents.hashes[0].tolist()
    return [
        ("input", asked[place] if asked and asked[place] != UNKNOWN else columns.ids[place])
        if label is None
        else ("declared", type(label).__name__, label)
        for place, label in enumerate(declared)
    ]


LEVEL = 0.95
BINS = 20
"""How many equal parts of 0 to 1 the distribution of scores is counted in."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of one experiment.

    `bounds` has for each estimate, by name, the range of its values if it is known. `split` and what `estimates` has
    of pass@k are there with repeats only. `distribution` counts the values of scored trials in equal parts of 0 to 1.
    `adaptive` is what the run noted if it decided by its results when to end; `estimates` are then those of the
    samples it looked at, with intervals that stay valid, or with none. `per_trial` is what a trial takes: latency,
    tokens, cost and other metrics without a range. `history_notes` say which declared earlier runs are not used.
    """

    level: float
    estimates: tuple[Estimate, ...]
    bounds: Mapping[str, tuple[float, float] | None]
    split: VarianceSplit | None
    distribution: tuple[int, ...]
    adaptive: AdaptiveNote | None = None
    per_trial: tuple[Estimate, ...] = ()
    repeated_inputs: RepeatedInputs | None = None
    history_notes: tuple[str, ...] = ()

    def get(self, name: str) -> Estimate | None:
        """Return the estimate with this name."""
        return next((estimate for estimate in self.estimates if estimate.name == name), None)

    def interval(self, name: str) -> Interval | None:
        """Return the interval of the estimate with this name; None if it is undefined."""
        found = self.get(name)
        if found is None or found.low is None or found.high is None:
            return None
        return Interval(found.low, found.high, self.level, found.method or "")


def read_figures(source: ExperimentSource) -> Figures:
    """Read the results of an experiment once and compute every figure."""
    adaptive = source.run.noted.adaptive
    level = LEVEL if adaptive is None else adaptive.rule.level
    history = read_history(source)
    keys = () if history is None else history.keys
    columns = read_columns(source, costs=True, keys=keys).analysed_prefix()
    found = estimates(columns, level=level)
    if history is not None:
        found = history.adjust(columns, found, level)
    values = columns.values[VALUE]
    # Rounding prevents .15 * 20 = 2.999... from falling into the lower bin.
    places = np.floor(np.round(values[np.isfinite(values)] * BINS, 9)).astype(np.intp)
    counts = np.bincount(np.clip(places, 0, BINS - 1), minlength=BINS)
    split = variance_split(columns.scores(PASSED, "scored")) if columns.repeats > 1 else None
    if split is not None and not split.n and columns.planned:
        split = replace(split, reason=NOTHING_SCORED)
    return Figures(
        level,
        found,
        {estimate.name: columns.bounds(estimate.metric) for estimate in found},
        split,
        tuple(counts.tolist()),
        adaptive,
        per_trial(columns, level=level),
        columns.repeated_inputs,
        () if history is None else history.notes,
    )
