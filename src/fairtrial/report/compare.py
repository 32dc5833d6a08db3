"""Candidates against a baseline on the same samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.analysis.compare import DEFAULT_METRICS, compare_columns, read_sides
from fairtrial.analysis.comparison import ComparisonRecord
from fairtrial.analysis.metrics import COSTS
from fairtrial.analysis.pairing import ComparisonSettings
from fairtrial.analysis.slices import SliceBy
from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY
from fairtrial.report.renderable import RenderableRecord
from fairtrial.report.report import EvalReport, ExperimentReport, source_of

__all__ = ["DEFAULT_METRICS", "Comparison", "compare"]


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(ComparisonRecord, RenderableRecord):
    """Candidates against one baseline: `comparison["terse"]["passed"].verdict`, or print it.

    `tests` counts the tests that were made together, for which adjusted p-values allow.
    """


def compare(
    baseline: EvalReport | ExperimentReport,
    *candidates: EvalReport | ExperimentReport,
    metrics: Sequence[str] | str | None = DEFAULT_METRICS,
    cluster: str | None = None,
    slice_by: SliceBy | Sequence[SliceBy] = (),
    alpha: float = 0.05,
    lower_is_better: Collection[str] = (),
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    test: Literal["midp", "exact"] = "midp",
    seed: int = 0,
) -> Comparison:
    """Compare one or more candidates with a baseline, sample by sample.

    Sides are reports, or experiments of one report: `compare(report["plain"], report["terse"])`. Samples are joined
    on their id. Task errors and timeouts count as failures of the system; scorer errors, dead letters and trials that
    were not run are missing, and every verdict is repeated on what was scored on both sides.

    Args:
        baseline: What the candidates are held against.
        *candidates: What may be better or worse.
        metrics: "passed", "value", "reward", "latency_ms", "tokens", "cost_usd", the names of metrics, and for the
            pass rate of a criterion "passed:" before its name. None for all of them but latency, tokens and cost.
            Unless given, "passed", "value" and, where rewards differ from values, "reward".
        cluster: The metadata key whose value samples share that are not independent; None for the runs' own
            (`EvalConfig.cluster`), "" for none.
        slice_by: Metadata keys, `by_input`, `by_metric` or functions of the input: the comparison is repeated on each
            slice.
        alpha: The chance of calling equal systems different that is accepted, over all metrics and candidates.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        bounds: Ranges of metrics where they are not 0 to 1; None for a metric without limits. Unless told otherwise, a
            metric that was never seen outside 0 to 1 is taken to lie there.
        test: "exact" for McNemar's exact test in place of the mid-p one.
        seed: Of the random draws, so that the same data always give the same answer.
    """
    example = 'compare its experiments, as in compare(report["plain"], report["terse"])'
    sources = [source_of(side, example) for side in (baseline, *candidates)]
    if len(sources) < 2:
        raise ConfigurationError("a comparison needs a baseline and at least one candidate")
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha is the accepted chance of a false alarm, such as 0.05, not {alpha}")
    wanted = (metrics,) if isinstance(metrics, str) else metrics
    columns = read_sides(sources, wanted, cluster, slice_by)
    lower = (lower_is_better,) if isinstance(lower_is_better, str) else lower_is_better
    settings = ComparisonSettings(alpha, 0.8, frozenset((*lower, *COSTS)), bounds, test, None, seed)
    record = compare_columns(
        columns[0], columns[1:], metrics=wanted, slice_by=slice_by, settings=settings, sources=sources
    )
    return Comparison.of(record)
