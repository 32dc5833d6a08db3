"""Compare judges with people's labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from fairtrial import stats
from fairtrial.base.codec import dumps
from fairtrial.base.formatting import count
from fairtrial.base.frozen import first_is
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, LabelColumn, refuse_weighted
from fairtrial.reports.figures.labels import (
    SURELY_PICKED,
    CollectedLabels,
    LabelDraw,
    Labels,
    collect,
    label_draw,
    own_labels,
    why_picked,
)
from fairtrial.reports.figures.metrics import PASSED, SCORED, VALUE, ExperimentSource
from fairtrial.reports.render.renderable import Renderable
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of
from fairtrial.stats.agreement import Measurement

if TYPE_CHECKING:
    from fairtrial.reports.render.document import Document


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval and the count behind it. Undefined values are None; `note` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class JudgeConfusion:
    """Counts of the judge's and people's verdicts on labelled trials."""

    true_passes: int
    false_passes: int  # The judge passed what people failed.
    false_fails: int  # The judge failed what people passed.
    true_fails: int

    @property
    def n(self) -> int:
        """The number of trials with both verdicts."""
        return self.true_passes + self.false_passes + self.false_fails + self.true_fails


@dataclass(frozen=True, slots=True)
class Panel:
    """The agreement of several annotators with each other: an upper limit for a judge.

    `trials` have at least two labels. `pairs` is the share of pairs of annotators that agree; `fleiss` needs as many
    labels on each of these trials, `krippendorff` does not.
    """

    annotators: int
    trials: int
    pairs: Figure
    fleiss: Figure
    krippendorff: Figure


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class Calibration(Renderable):
    """The comparison of a judge with people's labels.

    Attributes:
        run_id: The judged run.
        experiment: Whose outputs were judged.
        metric: The judge's figure that was compared with the labels: "passed", "value" or a metric.
        label: The name of the labels, "" where they were handed in.
        level: The level of all intervals.
        judged: Trials the judge scored.
        labelled: Of these, trials with a label; where annotators disagree, the majority's.
        annotators: The names of the annotators.
        confusion: The judge's verdicts against the people's; None for graded figures.
        agreement: The share of equal verdicts; look at it beside kappa.
        kappa: Agreement beyond chance: Cohen's kappa, or Krippendorff's alpha for graded figures.
        sensitivity: Of what people passed, the share the judge passed.
        specificity: Of what people failed, the share the judge failed.
        judge_rate: The mean of the judge's figures, uncorrected.
        label_rate: The mean of the labels alone.
        corrected: What people would say of all judged trials: post-stratified by the judge's verdict or, for graded
            figures, by regression on the judge's.
        rogan_gladen: The same from sensitivity and specificity; pass/fail only, and never more precise.
        length: The rank correlation of the judge's figure with the output's length.
        length_error: That of the judge's error with the output's length: a bias, where the former may be merit.
        panel: How far several annotators agree; None if no trial has two labels.
        judge_models: The judges' models, as far as they are known.
        same_family: Models under test that are of a judge's family.
        warnings: What may make the figures wrong.
        notes: What else a reader should know.
        drawn: Whether the labelled trials are known to be drawn at random: by a review, because they are all trials, or
            because the caller says so. If not, every figure that rests on labels holds only if they were.
    """

    json_format: ClassVar[str] = "fairtrial.calibration/1"

    run_id: str
    experiment: str
    metric: str
    label: str
    level: float
    judged: int
    labelled: int
    annotators: tuple[str, ...]
    confusion: JudgeConfusion | None
    agreement: Figure
    kappa: Figure
    sensitivity: Figure
    specificity: Figure
    judge_rate: Figure
    label_rate: Figure
    corrected: Figure
    rogan_gladen: Figure
    length: Figure
    length_error: Figure
    panel: Panel | None
    judge_models: tuple[str, ...]
    same_family: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    drawn: bool

    def document(self, cases: int) -> Document:
        """Return what is shown; a calibration has no single trials, whatever `cases` is."""
        from fairtrial.reports.calibrate.document import calibration_document

        return calibration_document(self)

    def __repr__(self) -> str:
        return f"<Calibration of {self.metric}, experiment {self.experiment} of {self.run_id}>"


type _Array = NDArray[np.float64]

_FEW = 30
_PICKED = 0.01  # Below this p-value a warning says that the labels are not a random sample.
_UNEQUAL = "No interval: trials did not all have the same chance of being labelled."


def calibrate(
    judged: EvalReport | ExperimentReport,
    labels: Labels | None = None,
    *,
    metric: str = PASSED,
    name: str | None = None,
    level: float = 0.95,
    by_verdict: bool = False,
    drawn: bool = False,
) -> Calibration:
    """Compare a judge's scores with people's labels of the same trials, and correct the pass rate.

    The labelled trials must be a random sample of the judged ones, or of those with each verdict (`by_verdict`), or
    have weights (`Label.weight`).

    Args:
        judged: The judged run, or one of its experiments: `report["terse"]`.
        labels: Sample ids (or, with repeats, trial keys) with what people say: True or False, a number, "pass" or
            "fail", or one of the judge's ratings. Labels of the run's store are read unless they are given.
        metric: Which of the judge's figures is meant: "passed", "value", or a metric by name.
        name: Which labels of the store are meant, if they have several names.
        level: The confidence of all intervals.
        by_verdict: Trials were drawn at random among those that the judge passed, and among those that it failed, in
            whatever numbers.
        drawn: The labelled trials were drawn at random. That is known of the labels of a review; of others, what people
            would say is conditional on it unless it is declared.
    """
    source = source_of(judged, 'name one, as in calibrate(report["terse"])')
    return calibrate_source(source, labels, metric=metric, name=name, level=level, by_verdict=by_verdict, drawn=drawn)


def calibrate_source(
    source: ExperimentSource,
    labels: Labels | None = None,
    *,
    metric: str = PASSED,
    name: str | None = None,
    level: float = 0.95,
    by_verdict: bool = False,
    drawn: bool = False,
) -> Calibration:
    """Compare the scores of one experiment with people's labels (default: those in its store)."""
    columns = _judge_columns(source, metric)
    own = None if labels is None else own_labels(labels, source, name=source.name, alone=True)
    found = collect(source, columns, own, metric, name)
    column, graded = found.column(columns, metric, by_verdict=by_verdict)
    option = "drawn=True, --labels-drawn"
    draw = label_draw(source, columns, column, found.name, declared=drawn, stored=own is None, option=option)
    return _calibration(source, columns, column, found, draw, level, graded=graded)


def _judge_columns(source: ExperimentSource, metric: str) -> Columns:
    columns = read_columns(source, metrics=[metric])
    refuse_weighted((columns,), "a calibration")
    if metric in columns.values:
        return columns
    known = ", ".join([PASSED, VALUE, *source.store.metric_totals(source.run.run_id).get(source.name, {})])
    raise ConfigurationError(f"no trial of experiment {source.name!r} has a metric {metric!r}; there are {known}")


@dataclass(frozen=True, slots=True)
class _Data:
    """The judge's scores and the labels of labelled trials, and the judge's scores of the rest.

    `groups` says which of the labelled trials belong together, `clusters` which of the samples. `unequal` is True
    unless every trial had the same chance of being labelled: then labels alone, and tables of them, are not those of
    all.
    """

    f: _Array
    y: _Array
    rest: _Array
    groups: NDArray[np.intp] | None
    bounds: tuple[float, float] | None
    level: float
    trials: stats.JudgedTrials
    clusters: NDArray[np.intp] | None
    by_verdict: bool

    @property
    def unequal(self) -> bool:
        """True unless every trial had the same probability of being labelled, or all were labelled."""
        return (self.by_verdict or self.trials.weights is not None) and self.rest.size > 0

    @property
    def binary(self) -> bool:
        """True if judge and people only give pass or fail."""
        return all(bool(np.all(np.isin(array, (0, 1)))) for array in (self.f, self.y, self.rest))

    def mean(self, values: _Array, *, where: NDArray[np.bool_] | None = None, nothing: str = "") -> Figure:
        """Estimate the mean of values of the labelled trials, or of some of them."""
        keep = np.ones(values.size, dtype=np.bool_) if where is None else where
        found = stats.mean_interval(
            values[keep],
            clusters=None if self.groups is None else self.groups[keep],
            bounds=self.bounds,
            level=self.level,
        )
        return figure_of(found.mean, found.interval, found.n, nothing if found.n == 0 else found.reason)


def figure_of(value: float | None, interval: stats.Interval | None, n: int, note: str | None = None) -> Figure:
    """Return a figure with its interval, or with a note on why it has none."""
    if interval is None:
        return Figure(value, None, None, n, None, note or None)
    return Figure(value, interval.low, interval.high, n, interval.method, note or None)


def _calibration(
    source: ExperimentSource,
    columns: Columns,
    labels: LabelColumn,
    found: CollectedLabels,
    draw: LabelDraw,
    level: float,
    *,
    graded: bool,
) -> Calibration:
    metric = labels.metric
    values = columns.values[metric]
    judged = (columns.outcomes == SCORED) & np.isfinite(values)
    every = values[judged]
    marked = np.isfinite(labels.values)
    lengths, models, families = _read_results(source, columns)
    rows = np.broadcast_to(np.arange(len(columns.ids))[:, None], judged.shape)
    codes = rows if columns.clusters is None else columns.clusters[rows]
    together = columns.repeats > 1 or columns.clusters is not None
    y = labels.values[marked]
    bounds = columns.bounds(metric)
    if bounds is not None and y.size and (y.min() < 0 or y.max() > 1):
        bounds = None
    data = _Data(
        f=values[marked],
        y=y,
        rest=values[judged & ~marked],
        groups=codes[marked].astype(np.intp) if together else None,
        bounds=bounds,
        level=level,
        trials=replace(columns, labels=labels).judged_trials("scored"),
        clusters=None if columns.clusters is None else columns.clusters[judged.any(axis=1)],
        by_verdict=labels.by_verdict,
    )
    table = _confusion(data) if data.binary else None
    overall = stats.mean_interval(
        columns.scores(metric, "scored"), clusters=columns.clusters, bounds=columns.bounds(metric), level=level
    )
    length = stats.rank_correlation(every, lengths[judged], level=level)
    error = stats.rank_correlation(data.f - data.y, lengths[marked], level=level)
    return Calibration(
        run_id=source.run.run_id,
        experiment=source.name,
        metric=metric,
        label=found.name,
        level=level,
        judged=int(every.size),
        labelled=int(data.y.size),
        annotators=found.annotators,
        confusion=table,
        **_label_figures(data, table, _correlation(error, together=together)),
        judge_rate=figure_of(overall.mean, overall.interval, overall.trials, overall.reason),
        length=_correlation(length, together=together),
        panel=_panel(found, graded, together, level),
        judge_models=models,
        same_family=families,
        warnings=tuple(_warnings(source, data, found, draw, families)),
        notes=tuple(_notes(found, data, draw)),
        drawn=draw.drawn,
    )


def _label_figures(data: _Data, table: JudgeConfusion | None, length_error: Figure) -> dict[str, Figure]:
    """Return what the labels say about all trials: if they cannot correct the rate, they tell nothing else either."""
    nothing = "No judged trial is labelled."
    label_rate = data.mean(data.y, nothing=nothing)
    if data.unequal and data.y.size:
        label_rate = Figure(None, None, None, data.y.size, None, "Alone the labels are no random sample.")
    corrected = _corrected(data, label_rate)
    found = {
        "agreement": _agreement(data, nothing) if table else _graded(data.y.size),
        "kappa": _kappa(data, table),
        "sensitivity": _share(data, table, 1.0, "People failed every labelled trial."),
        "specificity": _share(data, table, 0.0, "People passed every labelled trial."),
        "label_rate": label_rate,
        "corrected": corrected,
        "rogan_gladen": _rogan_gladen(data, table),
        "length_error": length_error,
    }
    if corrected.value is None and data.y.size:
        return {name: Figure(None, None, None, figure.n, None, corrected.note) for name, figure in found.items()}
    return found


def _read_results(source: ExperimentSource, columns: Columns) -> tuple[_Array, tuple[str, ...], tuple[str, ...]]:
    """Return the output lengths, the judges' models, and the judged models of the same family."""
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


def _confusion(data: _Data) -> JudgeConfusion:
    def count(judge: int, people: int) -> int:
        return int(np.count_nonzero((data.f == judge) & (data.y == people)))

    return JudgeConfusion(count(1, 1), count(1, 0), count(0, 1), count(0, 0))


def _agreement(data: _Data, nothing: str) -> Figure:
    agreed = (data.f == data.y).astype(np.float64)
    if not data.unequal or not data.y.size:
        return data.mean(agreed, nothing=nothing)
    labels = np.where(np.isfinite(data.trials.labels), data.trials.labels == data.trials.scores, np.nan)
    return _corrected_figure(data, replace(data.trials, labels=labels.astype(np.float64)))


def _weighted_table(data: _Data, table: JudgeConfusion) -> list[list[float]]:
    """Estimate the table of verdicts (judge's in rows, fail first) if all trials were labelled."""
    counts = [[table.true_fails, table.false_fails], [table.false_passes, table.true_passes]]
    if not data.unequal:
        return [[float(count) for count in row] for row in counts]
    trials = data.trials
    weights = np.ones(trials.scores.size) if trials.weights is None else trials.weights
    made = []
    for verdict in (0.0, 1.0):
        here = trials.scores == verdict
        some = here & trials.labelled
        total = float(weights[some].sum()) or 1.0
        passes = float(weights[some & (trials.labels == 1)].sum()) / total
        size = float(np.count_nonzero(here)) if some.any() else 0.0
        made.append([size * (1 - passes), size * passes])
    return made


def _share(data: _Data, table: JudgeConfusion | None, people: float, nothing: str) -> Figure:
    if table is None:
        return _graded(data.y.size)
    if data.unequal and table.n:
        weighted = _weighted_table(data, table)
        column = int(people)
        total = weighted[0][column] + weighted[1][column]
        right = weighted[column][column]
        return Figure(right / total if total else None, None, None, table.n, None, _UNEQUAL if total else nothing)
    missing = nothing if table.n else "No judged trial is labelled."
    return data.mean((data.f == people).astype(np.float64), where=data.y == people, nothing=missing)


def _kappa(data: _Data, table: JudgeConfusion | None) -> Figure:
    n = int(data.y.size)
    if table is None:
        both = [data.f.tolist(), data.y.tolist()]
        return _beyond_chance(
            stats.krippendorff_alpha(both, measurement="interval"),
            stats.krippendorff_alpha_interval(both, measurement="interval", level=data.level),
            n,
            _UNEQUAL if data.unequal else None if data.groups is None else _TOGETHER,
        )
    if data.unequal and table.n:
        drawn = stats.cohen_kappa_table(_weighted_table(data, table))
        return _beyond_chance(drawn, None, n, _UNEQUAL)
    counts = [[table.true_fails, table.false_fails], [table.false_passes, table.true_passes]]
    return _beyond_chance(
        stats.cohen_kappa_table(counts),
        stats.kappa_interval(counts, level=data.level),
        n,
        None if data.groups is None else _TOGETHER,
    )


_TOGETHER = "No interval: trials are not independent."


def _correlation(found: stats.RankCorrelation, *, together: bool) -> Figure:
    if together and found.interval is not None:
        return Figure(found.value, None, None, found.n, None, _TOGETHER)
    return figure_of(found.value, found.interval, found.n, found.reason)


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
    if (picked := _why_picked(data, SURELY_PICKED)) is not None:
        return Figure(None, None, None, int(data.y.size), None, picked)
    return _corrected_figure(data, data.trials)


def _corrected_figure(data: _Data, trials: stats.JudgedTrials) -> Figure:
    found = stats.corrected_mean(trials, clusters=data.clusters, bounds=data.bounds, level=data.level)
    note = " ".join([*found.notes, *([found.reason] if found.reason else [])])
    return figure_of(found.estimate, found.interval, found.labelled, note)


def _why_picked(data: _Data, alpha: float) -> str | None:
    return why_picked(data.trials, by_verdict=data.by_verdict, clustered=data.groups is not None, alpha=alpha)


def _rogan_gladen(data: _Data, table: JudgeConfusion | None) -> Figure:
    if table is None:
        return _graded(data.y.size)
    if data.y.size and data.unequal:
        return Figure(None, None, None, data.y.size, None, "It needs labels of a random sample.")
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
        return Figure(found.estimate, None, None, found.labelled, None, _TOGETHER)
    return figure_of(found.estimate, found.interval, found.labelled, note)


def _panel(found: CollectedLabels, graded: bool, together: bool, level: float) -> Panel | None:
    shared = [votes for votes in found.by_trial.values() if len(votes) > 1]
    if not shared:
        return None
    people = sorted({who for votes in shared for who in votes})
    agreed = [float(np.mean([a == b for a, b in combinations(votes.values(), 2)])) for votes in shared]
    pairs = stats.mean_interval(agreed, level=level)
    ratings = [[votes.get(who) for votes in shared] for who in people]
    measurement: Measurement = "interval" if graded else "nominal"
    why_none = _TOGETHER if together else None
    seen = sorted({vote for votes in shared for vote in votes.values()})
    table = [[list(votes.values()).count(vote) for vote in seen] for votes in shared]
    if len({len(votes) for votes in shared}) > 1:
        fleiss = Figure(None, None, None, len(shared), None, "Trials have different numbers of labels.")
    else:
        interval = stats.fleiss_kappa_interval(table, level=level)
        fleiss = _beyond_chance(stats.fleiss_kappa(table), interval, len(shared), why_none)
    return Panel(
        len(people),
        len(shared),
        figure_of(pairs.mean, None if together else pairs.interval, pairs.n, _TOGETHER if together else pairs.reason),
        fleiss,
        _beyond_chance(
            stats.krippendorff_alpha(ratings, measurement=measurement),
            stats.krippendorff_alpha_interval(ratings, measurement=measurement, level=level),
            len(shared),
            why_none,
        ),
    )


def _beyond_chance(
    value: float | stats.Undefined, interval: stats.Interval | stats.Undefined | None, n: int, why_none: str | None
) -> Figure:
    """Return agreement beyond chance; `why_none` says why it has no interval, if it has none."""
    if isinstance(value, stats.Undefined):
        return Figure(None, None, None, n, None, value.reason)
    if why_none is not None:
        return Figure(value, None, None, n, None, why_none)
    if isinstance(interval, stats.Undefined):
        return Figure(value, None, None, n, None, interval.reason)
    return figure_of(value, interval, n)


def _warnings(
    source: ExperimentSource, data: _Data, found: CollectedLabels, draw: LabelDraw, families: tuple[str, ...]
) -> Iterator[str]:
    if not data.y.size:
        yield "There are no labels to compare the judge with: label a random sample of the judged trials first."
        return
    if (picked := _why_picked(data, _PICKED)) is not None:
        yield picked
    elif not draw.drawn:
        yield draw.remark
    if data.y.size < _FEW:
        few = count(int(data.y.size), "label is", "labels are")
        yield f"{few} too few to assess a judge: start with {_FEW} to 100."
    if source.run.noted.is_adaptive:
        yield "The run could stop early; the intervals here assume a fixed number of samples."
    if families:
        yield (
            f"The judge and the judged model are of one family ({', '.join(families)}): models rate their own family's "
            "answers too high."
        )
    if found.tied:
        left_out = "is left out, a hard one" if found.tied == 1 else "are left out, which are the hard ones"
        yield (
            f"{count(found.tied, 'trial')} on which the annotators are evenly split {left_out}: one more label on "
            "each would decide."
        )


def _notes(found: CollectedLabels, data: _Data, draw: LabelDraw) -> Iterator[str]:
    if found.unknown:
        of = count(found.unknown, "label is of a trial", "labels are of trials")
        yield f"{of} that this run does not have, and left out."
    if found.unjudged:
        of = count(found.unjudged, "label is of a trial", "labels are of trials")
        yield f"{of} that the judge has not scored, and left out."
    if found.rounded:
        numbers = count(found.rounded, "label is a number", "labels are numbers")
        yield f"{numbers} between 0 and 1: from 0.5 on, a label counts as a pass."
    if draw.drawn and data.rest.size:
        yield draw.remark
