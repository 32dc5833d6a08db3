"""The rates and means of one experiment, each with its interval."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from fairtrial.analysis.anytime import mean_at_any_time
from fairtrial.analysis.columns import Columns, read_columns
from fairtrial.analysis.metrics import BUILT_IN, CRITERION, PASSED, REWARD, VALUE, View, is_verdict, verdict_column
from fairtrial.analysis.slices import SliceBy
from fairtrial.analysis.slicing import cut, needs, normalize_slices
from fairtrial.analysis.source import ExperimentSource
from fairtrial.stats import MeanEstimate, mean_interval, mean_pass_at_k, mean_pass_hat_k


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate or mean over samples with its interval. What is undefined is None, and `note` says why.

    `metric` is what was averaged and `view` which trials counted ("scored", or errors too, as failures). `n` counts
    samples, `trials` their repeats, `clusters` groups of samples that are not independent (None: all are).
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


@dataclass(frozen=True, slots=True)
class SliceEstimates:
    """The rates and means of some of the samples: `part["pass_rate"].low`."""

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
    """The `estimates` of each slice: metadata keys, `by_input`, `by_metric` or functions of the input."""
    ways = normalize_slices(slice_by)
    needed = needs(ways)
    columns = read_columns(source, cluster=cluster, keys=needed.keys, inputs=needed.inputs).looked_at()
    found = []
    for part in cut(ways, columns):
        some = columns.take(part.rows)
        found.append(SliceEstimates(part.name, part.by, some.planned, tuple(_estimates(some, level)), part.value))
    return tuple(found)


def estimates(columns: Columns, *, level: float = 0.95) -> tuple[Estimate, ...]:
    """Pass rate and mean score, over what was scored and with errors as failures, and every metric, with intervals.

    They are named "pass_rate", "pass_rate_all", "mean_score", "mean_score_all", "mean_reward" (where rewards differ
    from scores), with repeats "pass@K" and "pass^K", and then after the metrics: "polite" is the mean of that metric
    and, if it is a criterion, "pass_rate:polite" the share of trials that met it. Repeats are averaged
    per sample. Of a run that ended by its own rule only pass rates have an interval, one that allows for it.
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
    for name, metric, view in main:
        if metric in columns.values:
            yield estimate(columns, metric, view=view, name=name, level=level)
    if columns.repeats > 1 and PASSED in columns.values:
        trials = columns.scores(PASSED, "system")
        for name, formula in (("pass@", mean_pass_at_k), ("pass^", mean_pass_hat_k)):
            found = formula(trials, columns.repeats, clusters=columns.clusters, level=level)
            # A sample counts if it has all its repeats.
            found = replace(found, trials=found.n * columns.repeats)
            yield _named(f"{name}{columns.repeats}", PASSED, "system", found)
    metrics = [metric for metric in columns.values if metric not in BUILT_IN and not is_verdict(metric)]
    for metric in sorted(metrics, key=lambda metric: verdict_column(metric) not in columns.values):  # Criteria first.
        if (verdicts := verdict_column(metric)) in columns.values:
            yield estimate(columns, verdicts, name=f"{CRITERION}{metric}", level=level)
        yield estimate(columns, metric, level=level)


def estimate(
    columns: Columns, metric: str, *, view: View = "scored", name: str | None = None, level: float = 0.95
) -> Estimate:
    """One metric's mean with its interval."""
    return _named(metric if name is None else name, metric, view, mean_of(columns, metric, view, level=level))


def mean_of(
    columns: Columns, metric: str, view: View, *, worst: float | None = 0.0, level: float = 0.95
) -> MeanEstimate:
    """The statistics behind an estimate."""
    bounds = columns.bounds(metric)
    scores = columns.scores(metric, view, worst=None if bounds is None else worst)
    found = mean_interval(scores, clusters=columns.clusters, bounds=bounds, level=level)
    return mean_at_any_time(columns, metric, scores, found, view, level) if columns.adaptive is not None else found


def _named(name: str, metric: str, view: View, found: MeanEstimate) -> Estimate:
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
