"""Estimates of an experiment with their intervals."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairtrial import stats
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns, FloatArray, IntArray
from fairtrial.reports.figures.metrics import (
    BUILT_IN,
    COST,
    COSTS,
    CRITERION,
    FAILED,
    MISSING,
    NOTHING_SCORED,
    PASSED,
    REWARD,
    TOKENS,
    VALUE,
    ExperimentSource,
    Range,
    View,
    is_verdict,
    quantile_name,
    verdict_column,
)
from fairtrial.reports.figures.slicing import SliceBy, cut, needs, normalize_slices

LOOKED = "The run used its own results to decide when to stop, and this figure has no interval that allows for it."
_NO_RANGE = (
    "The run used its own results to decide when to stop: only metrics with a declared range have an interval that "
    "allows for it. Declare bounds."
)
_CLUSTERED = (
    "The run used its own results to decide when to stop, and saw clusters in part: only independent samples have an "
    "interval that allows for it."
)

NO_WEIGHTED_QUANTILE = "Traces were sampled at several rates, for which there is no quantile."
NO_WEIGHTED_TEST = "Traces were sampled at several rates, for which there is no test."
NO_WEIGHTED_LABELS = "Traces were sampled at several rates, for which labels do not correct the judge."


def difference_at_any_time(
    candidate: stats.Repeats,
    baseline: stats.Repeats,
    *,
    planned: tuple[int, int] | None,
    lost: int,
    clusters: IntArray | None,
    bounds: Range | None,
    level: float,
) -> stats.PairedDifference:
    """Return candidate - baseline with interval and p-value of one betting martingale.

    `planned` are the repeats of each sample on both sides and `lost` the pairs without a sample: what is missing is
    taken at its worst for every conclusion. With `planned` None, samples without a score are left out.
    """
    # Few draws: their result is not used.
    plain = stats.paired_difference(candidate, baseline, clusters=clusters, bounds=bounds, level=level, draws=99)
    only = replace(plain, interval=None, p_value=None, test=None, mde=None, notes=())
    if not plain.n:
        return only
    if bounds is None or clusters is not None:
        return replace(only, reason=_NO_RANGE if bounds is None else _CLUSTERED)
    if planned is None:
        known = (candidate.counts > 0) & (baseline.counts > 0)
        candidate, baseline, lost = candidate.only(known), baseline.only(known), 0
    (low_a, high_a), (low_b, high_b) = (
        _ends(side, repeats, lost, bounds)
        for side, repeats in zip((candidate, baseline), planned or (None, None), strict=True)
    )
    width = bounds[1] - bounds[0]
    martingale = stats.BettingMartingale(low_a - high_b, high_a - low_b, bounds=(-width, width))
    p = min(1.0, 1 / martingale.capital(0.0))
    return replace(only, interval=martingale.interval(level), p_value=p, test=stats.BETTING_TEST, reason=None)


def mean_at_any_time(
    columns: Columns, metric: str, scores: stats.Repeats, found: stats.MeanEstimate, view: View, level: float
) -> stats.MeanEstimate:
    """Return a mean with the interval of a betting martingale; of the system, missing trials at their worst."""
    bounds = columns.bounds(metric)
    only = replace(found, interval=None, effective_n=None, notes=())
    if not found.n:
        return only
    if bounds is None or found.clusters is not None:
        return replace(only, reason=_NO_RANGE if bounds is None else _CLUSTERED)
    if view == "system":
        low, high = _ends(scores, columns.repeats, columns.planned - len(columns.ids), bounds)
    else:
        low, high = _ends(scores.only(scores.counts > 0), None, 0, bounds)
    return replace(only, interval=stats.BettingMartingale(low, high, bounds=bounds).interval(level), reason=None)


def rate_stopped_by_width(scores: stats.Repeats, found: stats.MeanEstimate, level: float) -> stats.MeanEstimate:
    """Return a pass rate with the interval whose width ended the run; other means as they are."""
    if not found.n or found.clusters is not None or not (scores.binary and np.all(scores.counts <= 1)):
        return found
    return replace(found, interval=stats.stopped_by_width(int(scores.flat.sum()), found.n, level=level))


def _ends(scores: stats.Repeats, repeats: int | None, lost: int, bounds: Range) -> tuple[FloatArray, FloatArray]:
    """Return the least and the largest mean that each sample may have, whatever its missing repeats would have been.

    `lost` more samples have no repeat at all. With `repeats` None, no repeat is missing.
    """
    counts = np.append(scores.counts, np.zeros(lost, dtype=np.intp))
    sums = np.bincount(np.repeat(np.arange(counts.size), counts), scores.flat, counts.size)
    planned = counts if repeats is None else np.maximum(counts, repeats)
    low, high = (np.clip((sums + (planned - counts) * end) / planned, *bounds) for end in bounds)
    return low, high


SHOWN_QUANTILES = (0.5, 0.95)
"""The quantiles of latency, tokens, cost and other metrics without a range that a report has."""


@dataclass(frozen=True, slots=True)
class HistoryEstimate:
    """The same figure, made more precise by earlier runs of its samples; the plain one if `note` says why.

    Attributes:
        value: The adjusted figure.
        low: The lower end of its interval.
        high: The upper end.
        plain_samples: Number of samples that would be as precise without a history.
        known: Number of samples of the run with a history.
        samples: Number of samples with a history in all.
        runs: Number of earlier runs.
        method: The method of the interval.
        note: Why the history was not used.
    """

    value: float | None
    low: float | None
    high: float | None
    plain_samples: int
    known: int
    samples: int
    runs: int
    method: str | None
    note: str | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate, mean or quantile with its interval. Undefined values are None; `note` says why.

    `metric` is what was averaged and `view` which trials counted ("scored", or errors too, as failures). `n` counts
    samples, `trials` their repeats, `clusters` groups of samples that are not independent (None: all are). `history` is
    there if the run declares earlier runs of its samples (`EvalConfig.history`).
    """

    name: str
    metric: str
    view: View
    value: float | None
    low: float | None
    high: float | None
    n: int
    trials: int
    clusters: int | None
    method: str | None
    note: str | None
    history: HistoryEstimate | None = None


@dataclass(frozen=True, slots=True)
class SliceEstimates:
    """The rates and means of a slice of the samples: `part["pass_rate"].low`."""

    name: str
    by: str
    n: int
    estimates: tuple[Estimate, ...]
    value: Hashable = None

    def __getitem__(self, name: str) -> Estimate:
        for one in self.estimates:
            if one.name == name:
                return one
        raise KeyError(f"no estimate {name!r}; there are {', '.join(one.name for one in self.estimates)}")


def slice_estimates(
    source: ExperimentSource,
    slice_by: SliceBy | Sequence[SliceBy],
    *,
    cluster: str | None = None,
    level: float = 0.95,
) -> tuple[SliceEstimates, ...]:
    """Compute the `estimates` of each slice: metadata keys, `by_input`, `by_metric` or functions of the input."""
    ways = normalize_slices(slice_by)
    needed = needs(ways)
    columns = read_columns(source, cluster=cluster, keys=needed.keys, inputs=needed.inputs).analysed_prefix()
    found = []
    for part in cut(ways, columns):
        some = columns.take(part.rows)
        found.append(SliceEstimates(part.name, part.by, some.planned, tuple(_estimates(some, level)), part.value))
    return tuple(found)


def slice_rate_test(source: ExperimentSource, by: SliceBy) -> stats.Heterogeneity | stats.Undefined:
    """Whether the pass rates of what was scored differ between slices; undefined for a run that chose its own end."""
    ways = normalize_slices(by)
    needed = needs(ways)
    columns = read_columns(source, metrics=[PASSED, *needed.metrics], keys=needed.keys, inputs=needed.inputs)
    if columns.watched:
        return stats.Undefined(LOOKED)
    if columns.unequal_weights is not None:
        return stats.Undefined(NO_WEIGHTED_TEST)
    codes = np.full(len(columns.ids), -1, dtype=np.intp)
    for code, part in enumerate(cut(ways, columns)):
        codes[part.rows] = code
    scores = columns.scores(PASSED, "scored")
    known = (scores.counts > 0) & (codes >= 0)
    clusters = None if columns.clusters is None else columns.clusters[known]
    return stats.heterogeneity(scores.only(known).means, codes[known], clusters=clusters)


def estimates(columns: Columns, *, level: float = 0.95) -> tuple[Estimate, ...]:
    """Estimate pass rate and mean score (scored trials only, and errors as failures) and every metric.

    They are named "pass_rate", "pass_rate_all", "mean_score", "mean_score_all", "mean_reward" (where rewards differ
    from scores), with repeats "pass@k" and "pass^k" for every k from 2 to their number, and then after the metrics:
    "polite" is the mean of that metric and, if it is a criterion, "pass_rate:polite" the share of trials that met it.
    Repeats are averaged per sample. Of a run that used its own results to decide when to stop, means with a known range
    have an interval that allows for it, and other figures none.
    """
    return tuple(_estimates(columns, level))


def _estimates(columns: Columns, level: float) -> Iterator[Estimate]:
    main: tuple[tuple[str, str, View], ...] = (
        ("pass_rate", PASSED, "scored"),
        ("pass_rate_all", PASSED, "all"),
        ("mean_score", VALUE, "scored"),
        ("mean_score_all", VALUE, "all"),
        ("mean_reward", REWARD, "scored"),
    )
    only_scored = not columns.watched and not columns.count(FAILED, MISSING)
    mean: stats.MeanEstimate | None = None
    for name, metric, view in main:
        if metric in columns.values:
            if mean is None or view == "scored" or not only_scored:  # Else "all" are those scored, just estimated.
                mean = mean_of(columns, metric, view, level=level)
            yield _named(name, metric, view, mean)
    if columns.repeats > 1 and PASSED in columns.values:
        trials = columns.scores(PASSED, "system")
        whole = stats.Repeats(trials.flat[np.repeat(trials.counts == columns.repeats, trials.counts)], trials.counts)
        # A sample counts if it has all its repeats.
        whole = replace(whole, counts=np.where(trials.counts == columns.repeats, trials.counts, 0))
        for name, formula in (("pass@", stats.mean_pass_at_k), ("pass^", stats.mean_pass_hat_k)):
            ends: list[float] = []  # With k, pass@k cannot fall and pass^k cannot rise.
            for k in range(2, columns.repeats + 1):
                found = formula(whole, k, clusters=columns.clusters, level=level)
                found = _with_reason(columns, replace(found, trials=found.n * columns.repeats))
                if columns.watched:
                    found = replace(found, interval=None, notes=(), reason=LOOKED)
                if found.interval is not None and name == "pass@":
                    ends.append(found.interval.low)
                    found = replace(found, interval=replace(found.interval, low=max(ends)))
                elif found.interval is not None:
                    ends.append(found.interval.high)
                    found = replace(found, interval=replace(found.interval, high=min(ends)))
                yield _named(f"{name}{k}", PASSED, "system", found)
    metrics = [metric for metric in columns.values if metric not in BUILT_IN and not is_verdict(metric)]
    for metric in sorted(metrics, key=lambda metric: verdict_column(metric) not in columns.values):  # Criteria first.
        if (verdicts := verdict_column(metric)) in columns.values:
            yield estimate(columns, verdicts, name=f"{CRITERION}{metric}", level=level)
        yield estimate(columns, metric, level=level)


def estimate(
    columns: Columns, metric: str, *, view: View = "scored", name: str | None = None, level: float = 0.95
) -> Estimate:
    """Estimate the mean of one metric with its interval."""
    return _named(metric if name is None else name, metric, view, mean_of(columns, metric, view, level=level))


def mean_of(
    columns: Columns, metric: str, view: View, *, worst: float | None = 0.0, level: float = 0.95
) -> stats.MeanEstimate:
    """Return the statistics behind an estimate."""
    bounds = columns.bounds(metric)
    scores = columns.scores(metric, view, worst=None if bounds is None else worst)
    weights = columns.unequal_weights
    if weights is None:
        found = stats.mean_interval(scores, clusters=columns.clusters, bounds=bounds, level=level)
    else:
        found = _weighted(columns, weights, scores, bounds, level)
    found = _with_reason(columns, found)
    if columns.watched:
        return mean_at_any_time(columns, metric, scores, found, view, level)
    by_width = columns.stopped_by_width and (metric == VALUE or is_verdict(metric))
    return rate_stopped_by_width(scores, found, level) if by_width else found


def _weighted(
    columns: Columns, weights: FloatArray, scores: stats.Repeats, bounds: Range | None, level: float
) -> stats.MeanEstimate:
    """Return a mean over the traces that samples stand for."""
    some = scores.counts > 0
    clusters = None if columns.clusters is None else columns.clusters[some]
    found = stats.unequal_chances_mean(
        scores.only(some).means, weights[some], clusters=clusters, bounds=bounds, level=level
    )
    return replace(found, unscored=int(np.count_nonzero(~some)))


def _with_reason(columns: Columns, found: stats.MeanEstimate) -> stats.MeanEstimate:
    """Return an estimate without values with the reason: there may be samples of which no trial was scored."""
    return replace(found, reason=NOTHING_SCORED) if not found.n and columns.planned else found


def per_trial(columns: Columns, *, level: float = 0.95) -> tuple[Estimate, ...]:
    """Estimate the median and 95th percentile of latency, tokens, cost and metrics without a range.

    They are named "median:latency_ms" and "p95:latency_ms"; before them comes the mean, "latency_ms", of what is not
    among `estimates` already. What nobody measured is left out, and so are tokens and cost that are 0 throughout.
    """
    return tuple(_per_trial(columns, level))


def _per_trial(columns: Columns, level: float) -> Iterator[Estimate]:
    others = [name for name in columns.values if name not in BUILT_IN and not is_verdict(name)]
    for metric in (*COSTS, *others):
        values = columns.values.get(metric, np.empty(0))
        measured = values[np.isfinite(values)]
        if columns.bounds(metric) is not None or not measured.size or (metric in (TOKENS, COST) and not measured.any()):
            continue
        if metric in COSTS:
            yield estimate(columns, metric, level=level)
        for share in SHOWN_QUANTILES:
            found = quantile_of(columns, metric, share, level=level)
            note = " ".join([*found.notes, *filter(None, [found.reason])]) or None
            yield Estimate(
                quantile_name(metric, share), metric, "scored", found.value, found.low, found.high, found.n,
                found.trials, found.clusters, found.method, note,
            )  # fmt: skip


def corrected_of(
    columns: Columns, metric: str, view: View, *, worst: float | None, level: float, exact: bool
) -> stats.MeanEstimate:
    """Estimate the mean that people would give, from the labels of these columns; undefined without usable labels."""
    labels, bounds = columns.labels_of(metric), columns.bounds(metric)
    found = mean_of(columns, metric, view, worst=worst, level=level)
    if labels is None or not found.n:
        return found
    some = columns.take(columns.scores(metric, view, worst=worst).counts > 0)
    corrected = stats.corrected_mean(
        some.judged_trials(view, worst=worst), clusters=some.clusters, bounds=bounds, level=level, exact=exact
    )
    reason = labels.refusal or (NO_WEIGHTED_LABELS if columns.unequal_weights is not None else corrected.reason)
    return replace(
        found,
        mean=corrected.estimate if reason is None else None,
        se=corrected.se if reason is None else None,
        interval=corrected.interval if reason is None else None,
        effective_n=None,
        notes=(*found.notes, *corrected.notes),
        reason=reason,
    )


def quantile_of(columns: Columns, metric: str, share: float, *, level: float = 0.95) -> stats.QuantileEstimate:
    """Estimate a quantile of a metric over trials, such as the 95th percentile of latency_ms."""
    found = stats.quantile_interval(columns.scores(metric, "scored"), share, clusters=columns.clusters, level=level)
    if columns.unequal_weights is not None:
        return replace(found, value=None, low=None, high=None, method=None, reason=NO_WEIGHTED_QUANTILE)
    return replace(found, low=None, high=None, method=None, reason=LOOKED) if columns.watched else found


def _named(name: str, metric: str, view: View, found: stats.MeanEstimate) -> Estimate:
    interval = found.interval
    notes = [*found.notes, *([found.reason] if found.reason else [])]
    return Estimate(
        name=name,
        metric=metric,
        view=view,
        value=found.mean,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        n=found.n,
        trials=found.trials,
        clusters=found.clusters,
        method=None if interval is None else interval.method,
        note=" ".join(notes) or None,
    )
