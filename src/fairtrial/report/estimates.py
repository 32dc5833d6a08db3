"""The estimates of a report's slices."""

from __future__ import annotations

from collections.abc import Sequence

from fairtrial.analysis import estimates
from fairtrial.analysis.slices import SliceBy
from fairtrial.report.report import EvalReport, ExperimentReport, source_of


def slice_estimates(
    report: EvalReport | ExperimentReport,
    slice_by: SliceBy | Sequence[SliceBy],
    *,
    cluster: str | None = None,
    level: float = 0.95,
) -> tuple[estimates.SliceEstimates, ...]:
    """Every rate and mean of each slice: metadata keys, `by_input`, `by_metric` or functions of the input."""
    source = source_of(report, 'name one, as in report["terse"]')
    return estimates.slice_estimates(source, slice_by, cluster=cluster, level=level)
