"""Judges held against people's labels.

numpy is imported here: import this module only where numbers are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fairtrial import stats
from fairtrial.analysis.calibration import RANDOM_SAMPLE, CalibrationRecord, Confusion, Figure, Panel
from fairtrial.analysis.columns import Columns, read_columns
from fairtrial.analysis.labels import CollectedLabels, Labels, collect
from fairtrial.analysis.metrics import PASSED, SCORED, VALUE
from fairtrial.analysis.source import ExperimentSource, adaptive_note
from fairtrial.codec import dumps
from fairtrial.errors import ConfigurationError

type _Array = NDArray[np.float64]

_FEW = 30
_PICKED = 0.01


def calibrate_source(
    source: ExperimentSource,
    labels: Labels | None = None,
    *,
    metric: str = PASSED,
    name: str | None = None,
    level: float = 0.95,
) -> CalibrationRecord:
    """Hold the scores of one experiment against people's labels; those of its store unless they are given."""
    columns = _judged(source, metric)
    found = collect(source, columns, labels, metric, name)
    return _calibration(source, columns, found, metric, level)


def _judged(source: ExperimentSource, metric: str) -> Columns:
    columns = read_columns(source, metrics=[metric])
    if metric in columns.values:
        return columns
    known = ", ".join([PASSED, VALUE, *source.store.metric_totals(source.run.run_id).get(source.name, {})])
    raise ConfigurationError(f"no trial of experiment {source.name!r} has a metric {metric!r}; there are {known}")


@dataclass(frozen=True, slots=True)
class _Data:
    """Labelled trials first in everything: judge's figures, labels, lengths, and which trials belong together."""

    f: _Array
    y: _Array
    rest: _Array
    groups: NDArray[np.intp] | None
    bounds: tuple[float, float] | None
    level: float

    @property
    def binary(self) -> bool:
        """True if judge and people only say pass or fail."""
        return all(bool(np.all(np.isin(array, (0, 1)))) for array in (self.f, self.y, self.rest))

    @property
    def labelled_groups(self) -> NDArray[np.intp] | None:
        """The groups of the labelled trials."""
        return None if self.groups is None else self.groups[: self.y.size]

    def mean(self, values: _Array, *, where: NDArray[np.bool_] | None = None, nothing: str = "") -> Figure:
        """The mean of something known of the labelled trials, or of some of them."""
        keep = np.ones(values.size, dtype=np.bool_) if where is None else where
        groups = self.labelled_groups
        found = stats.mean_interval(
            values[keep], clusters=None if groups is None else groups[keep], bounds=self.bounds, level=self.level
        )
        return _figure(found.mean, found.interval, found.n, nothing if found.n == 0 else found.reason)


def _figure(value: float | None, interval: stats.Interval | None, n: int, note: str | None = None) -> Figure:
    if interval is None:
        return Figure(value, None, None, n, None, note or None)
    return Figure(value, interval.low, interval.high, n, interval.method, note or None)


def _calibration(
    source: ExperimentSource, columns: Columns, found: CollectedLabels, metric: str, level: float
) -> CalibrationRecord:
    values = columns.values[metric]
    judged = (columns.outcomes == SCORED) & np.isfinite(values)
    every = values[judged]
    graded = metric != PASSED and not (
        bool(np.all(np.isin(every, (0, 1))))
        and all(vote in (0.0, 1.0) for votes in found.by_trial.values() for vote in votes.values())
    )
    labels = found.majority_labels(graded)
    marked = np.zeros(judged.shape, dtype=np.bool_)
    for trial in labels:
        marked[trial] = True
    lengths, models, families = _read_results(source, columns)
    rows = np.broadcast_to(np.arange(len(columns.ids))[:, None], judged.shape)
    codes = rows if columns.clusters is None else columns.clusters[rows]
    together = columns.repeats > 1 or columns.clusters is not None
    y = np.asarray([labels[row, repeat] for row, repeat in np.argwhere(marked).tolist()], dtype=np.float64)
    bounds = columns.bounds(metric)
    if bounds is not None and y.size and (y.min() < 0 or y.max() > 1):
        bounds = None
    rest = judged & ~marked
    data = _Data(
        f=values[marked],
        y=y,
        rest=values[rest],
        groups=np.concatenate([codes[marked], codes[rest]]).astype(np.intp) if together else None,
        bounds=bounds,
        level=level,
    )
    nothing = "No judged trial is labelled."
    table = _confusion(data) if data.binary else None
    overall = stats.mean_interval(
        columns.scores(metric, "scored"), clusters=columns.clusters, bounds=columns.bounds(metric), level=level
    )
    label_rate = data.mean(data.y, nothing=nothing)
    length = stats.rank_correlation(every, lengths[judged], level=level)
    error = stats.rank_correlation(data.f - data.y, lengths[marked], level=level)
    return CalibrationRecord(
        run_id=source.run.run_id,
        experiment=source.name,
        metric=metric,
        label=found.name,
        level=level,
        judged=int(every.size),
        labelled=int(data.y.size),
        annotators=found.annotators,
        confusion=table,
        agreement=(
            data.mean((data.f == data.y).astype(np.float64), nothing=nothing) if table else _graded(data.y.size)
        ),
        kappa=_kappa(data, table),
        sensitivity=_share(data, table, 1.0, "People failed every labelled trial."),
        specificity=_share(data, table, 0.0, "People passed every labelled trial."),
        judge_rate=_figure(overall.mean, overall.interval, overall.trials, overall.reason),
        label_rate=label_rate,
        corrected=_corrected(data, label_rate),
        rogan_gladen=_rogan_gladen(data, table),
        length=_correlation(length, together=together),
        length_error=_correlation(error, together=together),
        panel=_panel(found, graded, together, level),
        judge_models=models,
        same_family=families,
        warnings=tuple(_warnings(source, data, found, families)),
        notes=tuple(_notes(found)),
    )


def _read_results(source: ExperimentSource, columns: Columns) -> tuple[_Array, tuple[str, ...], tuple[str, ...]]:
    """The length of every output, the judges' models, and the models under test of a judge's family."""
    lengths = np.zeros(columns.outcomes.shape)
    rows = {sample_id: row for row, sample_id in enumerate(columns.ids)}
    models: set[str] = set()
    families: set[str] = set()
    for result in source.store.results(source.run.run_id, experiment=source.name, outcomes=("scored",)):
        output = result.output if isinstance(result.output, str) else dumps(result.output)
        lengths[rows[result.sample_id], result.repeat] = len(output)
        for metric in () if result.score is None else result.score.metrics:
            if "judge_model" in metric.metadata:
                models.add(str(metric.metadata["judge_model"]))
            if "same_family" in metric.metadata:
                families.add(str(metric.metadata["same_family"]))
    return lengths, tuple(sorted(models)), tuple(sorted(families))


def _graded(n: int) -> Figure:
    return Figure(None, None, None, n, None, "Only pass/fail figures have it.")


def _confusion(data: _Data) -> Confusion:
    def count(judge: int, people: int) -> int:
        return int(np.count_nonzero((data.f == judge) & (data.y == people)))

    return Confusion(count(1, 1), count(1, 0), count(0, 1), count(0, 0))


def _share(data: _Data, table: Confusion | None, people: float, nothing: str) -> Figure:
    if table is None:
        return _graded(data.y.size)
    missing = nothing if table.n else "No judged trial is labelled."
    return data.mean((data.f == people).astype(np.float64), where=data.y == people, nothing=missing)


def _kappa(data: _Data, table: Confusion | None) -> Figure:
    n = int(data.y.size)
    if table is None:
        alpha = stats.krippendorff_alpha([data.f.tolist(), data.y.tolist()], measurement="interval")
        if isinstance(alpha, stats.Undefined):
            return Figure(None, None, None, n, None, alpha.reason)
        return Figure(alpha, None, None, n, "Krippendorff's alpha, interval")
    counts = [[table.true_fails, table.false_fails], [table.false_passes, table.true_passes]]
    kappa, interval = stats.cohen_kappa_table(counts), stats.kappa_interval(counts, level=data.level)
    if isinstance(kappa, stats.Undefined) or isinstance(interval, stats.Undefined):
        reason = kappa.reason if isinstance(kappa, stats.Undefined) else None
        return Figure(None, None, None, n, None, reason)
    if data.groups is not None:
        return Figure(kappa, None, None, n, None, _TOGETHER)
    return _figure(kappa, interval, n)


_TOGETHER = "No interval: trials are not independent."


def _correlation(found: stats.RankCorrelation, *, together: bool) -> Figure:
    if together and found.interval is not None:
        return Figure(found.value, None, None, found.n, None, _TOGETHER)
    return _figure(found.value, found.interval, found.n, found.reason)


def _corrected(data: _Data, label_rate: Figure) -> Figure:
    if data.y.size and not data.rest.size:
        return Figure(
            label_rate.value,
            label_rate.low,
            label_rate.high,
            label_rate.n,
            label_rate.method,
            "Every trial is labelled.",
        )
    found = stats.prediction_powered_mean(
        data.y, data.f, data.rest, bounds=data.bounds, clusters=data.groups, level=data.level
    )
    note = " ".join([*found.notes, *([found.reason] if found.reason else [])])
    return _figure(found.estimate, found.interval, found.judged + found.labelled, note)


def _rogan_gladen(data: _Data, table: Confusion | None) -> Figure:
    if table is None:
        return _graded(data.y.size)
    found = stats.rogan_gladen(
        int(data.rest.sum()),
        int(data.rest.size),
        true_passes=table.true_passes,
        positives=table.true_passes + table.false_fails,
        true_fails=table.true_fails,
        negatives=table.true_fails + table.false_passes,
        level=data.level,
    )
    note = " ".join([*found.notes, *([found.reason] if found.reason else [])])
    if data.groups is not None and found.interval is not None:
        return Figure(found.estimate, None, None, found.judged + found.labelled, None, _TOGETHER)
    return _figure(found.estimate, found.interval, found.judged + found.labelled, note)


def _panel(found: CollectedLabels, graded: bool, together: bool, level: float) -> Panel | None:
    shared = [votes for votes in found.by_trial.values() if len(votes) > 1]
    if not shared:
        return None
    people = sorted({who for votes in shared for who in votes})
    agreed = [float(np.mean([a == b for a, b in combinations(votes.values(), 2)])) for votes in shared]
    pairs = stats.mean_interval(agreed, level=level)
    alpha = stats.krippendorff_alpha(
        [[votes.get(who) for votes in shared] for who in people], measurement="interval" if graded else "nominal"
    )
    kappa: float | stats.Undefined
    if len({len(votes) for votes in shared}) > 1:
        kappa = stats.Undefined("Trials have different numbers of labels.")
    else:
        seen = sorted({vote for votes in shared for vote in votes.values()})
        kappa = stats.fleiss_kappa([[list(votes.values()).count(vote) for vote in seen] for votes in shared])
    return Panel(
        len(people),
        len(shared),
        _figure(pairs.mean, None if together else pairs.interval, pairs.n, _TOGETHER if together else pairs.reason),
        _alone(kappa, len(shared)),
        _alone(alpha, len(shared)),
    )


def _alone(value: float | stats.Undefined, n: int) -> Figure:
    if isinstance(value, stats.Undefined):
        return Figure(None, None, None, n, None, value.reason)
    return Figure(value, None, None, n)


def _warnings(
    source: ExperimentSource, data: _Data, found: CollectedLabels, families: tuple[str, ...]
) -> Iterator[str]:
    if not data.y.size:
        yield "There are no labels to hold the judge against: label a random sample of the judged trials first."
        return
    yield RANDOM_SAMPLE
    apart = stats.groups_differ(data.f, data.rest)
    if data.groups is None and not isinstance(apart, stats.Undefined) and apart < _PICKED:
        yield (
            f"The labelled trials do not look like a random sample: the judge's mean is {data.f.mean():.2f} on them "
            f"and {data.rest.mean():.2f} on the others (p = {apart:.2g})."
        )
    if data.y.size < _FEW:
        plural = "s" if data.y.size > 1 else ""
        yield f"{data.y.size} label{plural} say little about a judge: {_FEW} to 100 are a start."
    if adaptive_note(source.run) is not None:
        yield "The run was allowed to stop by itself; the intervals here are for runs of a size fixed before."
    if families:
        yield (
            f"The judge is of one family with what it judges ({', '.join(families)}): models rate their own family's "
            "answers too high."
        )
    if found.tied:
        yield (
            f"{found.tied:,} trials on which the annotators are evenly split are left out, and they are the hard ones: "
            "one more vote on each would settle them."
        )


def _notes(found: CollectedLabels) -> Iterator[str]:
    if found.unknown:
        yield f"{found.unknown:,} labels are of trials that this run does not have; they are left out."
    if found.unjudged:
        yield f"{found.unjudged:,} labels are of trials that the judge has not scored; they are left out."
    if found.rounded:
        yield f"{found.rounded:,} labels are numbers between 0 and 1: from 0.5 on they count as a pass."
