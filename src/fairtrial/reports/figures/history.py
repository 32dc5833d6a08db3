"""Figures made more precise by earlier runs of the same samples, if the run declares them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.errors import UnknownRunError
from fairtrial.reports.figures.analysis_plan import plan_of
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, FloatArray, IntArray
from fairtrial.reports.figures.estimates import Estimate, HistoryEstimate
from fairtrial.reports.figures.metrics import ExperimentSource, View
from fairtrial.stats import history_mean
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
        if not self.sides:
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
