"""The scores of a suite's runs by day (UTC), as the alarm adds them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.formatting import count, listed
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.column_reader import in_batches, read_columns
from fairtrial.reports.figures.columns import Columns, FloatArray
from fairtrial.reports.figures.metrics import MISSING, PASSED, SCORED, ExperimentSource, Range, unknown_metric
from fairtrial.reports.figures.slicing import cut
from fairtrial.stats.drift import reference_bound
from fairtrial.store.protocol import RunRecord, RunStore

ANCHOR = "anchor"
"""The metadata key of samples whose recorded output people have labelled: true if it should pass, else false."""
ALL = ""
"""The stream of all scores; the others are named as slices are."""
NO_SCORES: FloatArray = np.empty((2, 0))


@dataclass(frozen=True, slots=True, eq=False)
class ScoredDay:
    """The scores of a day, from 0 to 1 with 1 the best, of all trials and of each slice; `unscored` have none.

    Each stream has a row of scores and one of their weights, which are 1 unless traces were sampled at several rates.
    """

    day: str
    runs: tuple[RunRecord, ...]
    scores: Mapping[str, FloatArray]
    unscored: int

    def tally(self, streams: Sequence[str]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the distinct scores, how often each stream has them, and their weights as shares of the largest."""
        parts = [self.scores.get(name, NO_SCORES) for name in streams]
        pairs, codes = np.unique(np.concatenate(parts, axis=1), axis=1, return_inverse=True)
        ends = np.cumsum([part.shape[1] for part in parts])[:-1]
        counts = [np.bincount(own, minlength=pairs.shape[1]) for own in np.split(codes.reshape(-1), ends)]
        return pairs[0], np.array(counts), pairs[1] / pairs[1].max()


@dataclass(frozen=True, slots=True)
class WatchedMetric:
    """A metric, its range, and whether less of it is better."""

    name: str
    bounds: Range = (0.0, 1.0)
    lower: bool = False
    worst: float | None = 0.0

    @classmethod
    def declared(cls, name: str, columns: Columns, bounds: Mapping[str, Range | None]) -> WatchedMetric:
        """Return a metric as these columns declare it.

        Raises:
            ConfigurationError: there is no such metric, or it has no range or no direction.
        """
        if name != PASSED and name not in columns.values:
            raise unknown_metric(name, columns.values)
        settings = ComparisonSettings(bounds=bounds).declared_by(columns)
        ends, lower = settings.range_of(name), settings.lower(name)
        if ends is None:
            raise ConfigurationError(
                f"an alarm needs a metric with a range, and {name!r} declares none\n"
                f"give it one: --bounds {name}=LOW:HIGH, or in the evaluator: Metric({name!r}, ..., bounds=(0, 1))"
            )
        if lower is None:
            raise ConfigurationError(
                f"{name!r} does not declare which way is better\n"
                f"declare it in the evaluator: Metric({name!r}, ..., higher_is_better=True)"
            )
        return cls(name, ends, lower, settings.worst_of(name))

    def best_is_1(self, values: FloatArray) -> FloatArray:
        """Return values as shares of the range, 1 being the best."""
        low, high = self.bounds
        outside = values[(values < low) | (values > high)]
        if outside.size:
            raise ConfigurationError(
                f"bounds.{self.name} must contain every value (got {outside[0]:g}, outside of {low:g} to {high:g})"
            )
        shares = (values - low) / (high - low)
        return 1 - shares if self.lower else shares

    def value(self, share: float) -> float:
        """Return the value that is this share of the range."""
        low, high = self.bounds
        return high - share * (high - low) if self.lower else low + share * (high - low)


@dataclass(frozen=True, slots=True, eq=False)
class DailyScores:
    """The days with scores, oldest first.

    `replayed`: runs repeat one dataset, so that each trial counts; else each cluster or sample of a day counts once.
    """

    days: tuple[ScoredDay, ...]
    replayed: bool
    remarks: tuple[str, ...]


type Reader = Callable[[Columns, bool], tuple[Mapping[str, FloatArray], int]]
"""Returns the scores of a run by stream, and how many trials have none; it is told whether a dataset is replayed."""


def day_of(run: RunRecord) -> str:
    """Return the day on which a run was started, in UTC."""
    return datetime.fromtimestamp(run.created_at, UTC).date().isoformat()


def read_days(
    store: RunStore,
    runs: Sequence[RunRecord],
    experiment: str,
    readers: Sequence[Reader],
    *,
    metrics: Sequence[str],
    keys: Sequence[str],
    since: str = "",
) -> list[DailyScores]:
    """Read the scores of a suite's finished runs by day, for each reader; every run is read once."""
    kept, replayed, remarks = _comparable(runs, experiment, since)
    days: list[list[ScoredDay]] = [[] for _ in readers]
    for day, own in groupby(in_batches(store, kept, metrics), lambda one: day_of(one[0])):
        runs_of_day: list[RunRecord] = []
        parts: list[dict[str, list[FloatArray]]] = [{} for _ in readers]
        unscored = [0] * len(readers)
        for run, batch in own:
            runs_of_day.append(run)
            source = ExperimentSource(store, run, experiment)
            columns = read_columns(source, metrics=metrics, keys=keys, cluster="" if replayed else None, batch=batch)
            for place, read in enumerate(readers):
                scores, missing = read(columns, replayed)
                unscored[place] += missing
                for name, values in scores.items():
                    parts[place].setdefault(name, []).append(values)
        for place, found in enumerate(parts):
            joined = {name: np.concatenate(values, axis=1) for name, values in found.items()}
            if joined[ALL].size:
                days[place].append(ScoredDay(day, tuple(runs_of_day), joined, unscored[place]))
    return [DailyScores(tuple(one), replayed, remarks) for one in days]


def can_be_watched(run: RunRecord) -> bool:
    """Return whether a run was planned before its results, and has them all."""
    return run.status == "finished" and not run.noted.is_adaptive


def runs_to_watch(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return runs in their order, the newest finished scoring of an imported run in its place, with its time.

    Traces are imported without scores: what they are worth is in a rescored run. That of an executed run has the
    outputs of another day and is left out.
    """
    imported = {run.run_id: run for run in runs if run.imported}
    scorings: dict[str, RunRecord] = {}
    for run in sorted(runs, key=lambda one: (one.created_at, one.number)):
        if run.parent_run in imported and run.status == "finished":
            scorings[run.parent_run] = run
    return [
        replace(scorings[run.run_id], created_at=run.created_at) if run.run_id in scorings else run
        for run in runs
        if run.parent_run is None
    ]


def is_replayed(runs: Iterable[RunRecord]) -> bool:
    """Return whether runs repeat a dataset on several days; else each day has samples of its own."""
    days: dict[str, set[str]] = {}
    for run in runs:
        days.setdefault(run.dataset_fingerprint, set()).add(day_of(run))
    return any(len(own) > 1 for own in days.values())


def _comparable(
    runs: Iterable[RunRecord], experiment: str, since: str
) -> tuple[list[RunRecord], bool, tuple[str, ...]]:
    """Return the runs that can be watched together, oldest first, and whether they repeat one dataset."""
    left_out: Counter[str] = Counter()
    kept = []
    for run in sorted(runs, key=lambda one: (one.created_at, one.number)):
        if day_of(run) < since or experiment not in run.experiments:
            continue
        if can_be_watched(run):
            kept.append(run)
        else:
            left_out["run with adaptive stopping" if run.noted.is_adaptive else "unfinished run"] += 1
    replayed = is_replayed(kept)
    if replayed:
        newest = kept[-1].dataset_fingerprint
        left_out["run on another version of the dataset"] += sum(run.dataset_fingerprint != newest for run in kept)
        kept = [run for run in kept if run.dataset_fingerprint == newest]
    else:
        # Draws that are repeated are no further draws; of an import that was repeated, the scored one counts.
        last = {run.dataset_fingerprint: run for run in sorted(kept, key=lambda one: one.parent_run is not None)}
        left_out["run on samples of another run of its day"] += len(kept) - len(last)
        kept = [run for run in kept if last[run.dataset_fingerprint] is run]
    parts = [count(number, what, what.replace("run", "runs", 1)) for what, number in left_out.items() if number]
    return kept, replayed, (f"Left out: {listed(parts)}.",) if parts else ()


def system_reader(metric: WatchedMetric, by: str | None) -> Reader:
    """Return a reader of the scores of the system; errors of the system count as the worst score, anchors are none."""

    def read(columns: Columns, replayed: bool) -> tuple[Mapping[str, FloatArray], int]:
        columns = columns.take(np.array([not isinstance(one, bool) for one in columns.groups[ANCHOR]], dtype=np.bool_))
        scores = {ALL: _units(columns, metric, replayed=replayed)}
        if by is not None and any(value is not None for value in columns.groups[by]):
            scores |= {
                part.name: _units(columns.take(part.rows), metric, replayed=replayed) for part in cut((by,), columns)
            }
        return scores, columns.count(MISSING)

    return read


def judge_reader(columns: Columns, _replayed: bool) -> tuple[Mapping[str, FloatArray], int]:
    """Return for each scored anchor trial whether the judge agrees with people."""
    labels = columns.groups[ANCHOR]
    rows = np.array([isinstance(one, bool) for one in labels], dtype=np.bool_)
    anchors = columns.take(rows)
    truth = np.array([one for one in labels if isinstance(one, bool)], dtype=np.float64)
    scores = anchors.scores(PASSED, "scored")
    agreed = scores.flat == np.repeat(truth, scores.counts)
    return {ALL: _unweighted(agreed.astype(np.float64))}, anchors.trials - anchors.count(SCORED)


def _unweighted(scores: FloatArray) -> FloatArray:
    return np.stack([scores, np.ones_like(scores)])


def _units(columns: Columns, metric: WatchedMetric, *, replayed: bool) -> FloatArray:
    """Return the independent scores of a run, and their weights.

    Trials of a replayed dataset differ by chance alone, given its samples. Otherwise the samples are draws too: the
    trials of a sample, or of a cluster, count as one.
    """
    scores = columns.scores(metric.name, "scored" if metric.worst is None else "system", worst=metric.worst)
    if replayed:
        return _unweighted(metric.best_is_1(scores.flat))
    some = scores.counts > 0
    if not some.any():
        return NO_SCORES
    means = scores.only(some).means
    weights = np.ones_like(means) if columns.weights is None else columns.weights[some]
    if columns.clusters is not None:
        means, weights = _cluster_means(means, weights, columns.clusters[some])
    return np.stack([metric.best_is_1(means), weights])


def _cluster_means(means: FloatArray, weights: FloatArray, clusters: NDArray[np.intp]) -> tuple[FloatArray, FloatArray]:
    """Return the mean of each cluster, and the mean weight of its samples."""
    _, codes, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    total = np.bincount(codes, weights=weights)
    return np.bincount(codes, weights=means * weights) / total, total / sizes


def weights_of(scores: FloatArray) -> FloatArray | None:
    """Return the weights of scores; None if they are equal."""
    return scores[1] if scores.size and np.ptp(scores[1]) > 1e-9 * scores[1].max() else None


def mean_and_count(days: Sequence[ScoredDay], stream: str) -> tuple[float, int]:
    """Return the mean score of a stream over days, and the number of scores."""
    found = _joined(days, stream)
    return (float(np.average(found[0], weights=found[1])) if found.size else float("nan")), found.shape[1]


def sums(days: Sequence[ScoredDay], stream: str) -> Iterator[tuple[float, float]]:
    """Yield the sum and the number of the scores of each day; of weighted ones their effective number."""
    for day in days:
        values, weights = day.scores.get(stream, NO_SCORES)
        worth = float(weights.sum()) ** 2 / float(np.sum(weights * weights)) if weights.size else 0.0
        yield (float(np.average(values, weights=weights)) * worth if weights.size else 0.0), worth


def bound_of(days: Sequence[ScoredDay], stream: str, risk: float) -> float:
    """Return the lower bound of the mean of a stream in the reference."""
    found = _joined(days, stream)
    return reference_bound(found[0], risk=risk, weights=weights_of(found))


def _joined(days: Sequence[ScoredDay], stream: str) -> FloatArray:
    """Return the scores of a stream over days, each day's weights with the mean 1: each score of a day counts."""
    parts = [day.scores[stream] for day in days if stream in day.scores and day.scores[stream].size]
    scaled = [np.stack([values, weights / weights.mean()]) for values, weights in parts]
    return np.concatenate(scaled, axis=1) if scaled else NO_SCORES
