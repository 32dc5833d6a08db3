"""The estimates of a report's slices, and means over several reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairtrial.reports.figures import estimates
from fairtrial.reports.figures.metrics import PASSED
from fairtrial.reports.figures.slices import SliceBy
from fairtrial.reports.leaderboard import suite_means
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of
from fairtrial.stats import Heterogeneity, Undefined


def slice_estimates(
    report: EvalReport | ExperimentReport,
    slice_by: SliceBy | Sequence[SliceBy],
    *,
    cluster: str | None = None,
    level: float = 0.95,
) -> tuple[estimates.SliceEstimates, ...]:
    """Estimate every rate and mean of each slice: metadata keys, `by_input`, `by_metric` or functions of the input."""
    source = source_of(report, 'name one, as in report["terse"]')
    return estimates.slice_estimates(source, slice_by, cluster=cluster, level=level)


def slice_rate_test(report: EvalReport | ExperimentReport, by: SliceBy) -> Heterogeneity | Undefined:
    """Whether the pass rates of slices differ from each other: one test over all slices."""
    return estimates.slice_rate_test(source_of(report, 'name one, as in report["terse"]'), by)


def mean_over_suites(
    *reports: EvalReport | ExperimentReport,
    metric: str = PASSED,
    weights: Mapping[str, float] | None = None,
    level: float = 0.95,
) -> suite_means.SuitesMean:
    """Compute the mean of one system over several suites with its interval: macro, micro, or weighted.

    Suites are strata: SE^2 = sum(w^2 SE^2), with Satterthwaite's degrees of freedom. Task errors and timeouts count as
    the worst value of the metric, if it has one. Of one suite it is the mean and the interval of the suite itself.

    Args:
        *reports: One experiment of each suite: `mean_over_suites(math["careful"], code["careful"])`.
        metric: "passed", "value", "latency_ms", or a metric by name.
        weights: The weight of each suite by the name of its dataset.
        level: The confidence of all intervals.
    """
    example = 'name one experiment of each, as in mean_over_suites(math["careful"], code["careful"])'
    return suite_means.mean_over_suites([source_of(report, example) for report in reports], metric, weights, level)
