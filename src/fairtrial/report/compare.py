"""Compare candidates with a baseline on the same samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.analysis.compare import DEFAULT_METRICS, compare_columns, read_sides
from fairtrial.analysis.comparison import ComparisonRecord, Side
from fairtrial.analysis.gate_rules import checked_smallest_difference
from fairtrial.analysis.labels import Labels, label_use
from fairtrial.analysis.metrics import COSTS, PASSED, SMALLEST_DIFFERENCE
from fairtrial.analysis.pairing import ComparisonSettings
from fairtrial.analysis.slices import SliceBy
from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY, first_is
from fairtrial.report.renderable import Renderable, RenderableRecord
from fairtrial.report.report import EvalReport, ExperimentReport, source_of

__all__ = ["DEFAULT_METRICS", "Comparison", "compare"]


@first_is(Side)
@dataclass(frozen=True, slots=True, repr=False)
class Comparison(ComparisonRecord, RenderableRecord):
    """Candidates against one baseline: `comparison["terse"]["passed"].verdict`, or print it.

    `tests` counts the tests that were made together, for which adjusted p-values allow. `print(comparison.in_detail())`
    shows the tests, the trials and the comparison without errors too.
    """

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(one.name for one in self.candidates)} with {self.baseline.name}>"

    def in_detail(self) -> DetailedComparison:
        """Return the same comparison, to be printed with every detail."""
        return DetailedComparison(self)


class DetailedComparison(Renderable):
    """A comparison that is printed with every detail."""

    __slots__ = ("comparison",)

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def _record(self) -> object:
        from fairtrial.render.comparison_document import ComparisonInDetail

        return ComparisonInDetail(self.comparison)


def compare(
    baseline: EvalReport | ExperimentReport,
    *candidates: EvalReport | ExperimentReport,
    metrics: Sequence[str] | str | None = DEFAULT_METRICS,
    cluster: str | None = None,
    slice_by: SliceBy | Sequence[SliceBy] = (),
    alpha: float = 0.05,
    lower_is_better: Collection[str] = (),
    higher_is_better: Collection[str] = (),
    smallest_difference_that_matters: float | Mapping[str, float] = SMALLEST_DIFFERENCE,
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    test: Literal["midp", "exact"] = "midp",
    seed: int = 0,
    labels: Labels | bool = False,
    label_metric: str = PASSED,
    label_name: str | None = None,
    labels_by_verdict: bool = False,
) -> Comparison:
    """Compare one or more candidates with a baseline, sample by sample.

    Sides are reports, or experiments of one report: `compare(report["plain"], report["terse"])`. Samples are joined
    on their id; one with another input or expected value on the other side is missing. Task errors and timeouts count
    as failures of the system; scorer errors, dead letters and trials that were not run are missing, and every verdict
    is repeated on what was scored on both sides.

    Args:
        baseline: The report or experiment that the candidates are compared with.
        *candidates: The reports or experiments to compare with the baseline.
        metrics: "passed", "value", "reward", "latency_ms", "tokens", "cost_usd", the names of metrics, and for the
            pass rate of a criterion "passed:" before its name. None for all of them but latency, tokens and cost.
            By default "passed", "value" and, if rewards differ from values, "reward".
        cluster: The metadata key that groups samples that are not independent; None for that of the runs
            (`EvalConfig.cluster`), "" for none.
        slice_by: Metadata keys, `by_input`, `by_metric` or functions of the input: the comparison is repeated on each
            slice.
        alpha: The accepted chance of calling equal systems different, over all metrics and candidates.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        higher_is_better: Metrics of which more is better, besides "passed", "value" and "reward". Metrics may declare
            it themselves (`Metric.higher_is_better`); others are reported as higher or lower instead of better.
        smallest_difference_that_matters: One number for shares, or one for each metric by name. Two sides whose
            interval lies within it are reported as equally good, and the number of samples to detect it is shown.
        bounds: Ranges of metrics that are not 0 to 1; None for a metric without limits. By default a metric whose
            values are all from 0 to 1 has that range.
        test: "exact" for McNemar's exact test instead of the mid-p one.
        seed: The seed of the random draws, so that the same data always give the same result.
        labels: People's labels of some trials of every side, which correct the scores of a judge: True for the labels
            in the store, else labels by TrialKey, as `Label` records, or by sample id under the name of each
            experiment. If no metrics are named, only `label_metric` is compared.
        label_metric: What the labels are about.
        label_name: Which labels of the store are meant, if they have several names.
        labels_by_verdict: Trials to label were drawn at random within each verdict of the judge (see `calibrate`).
    """
    example = 'compare its experiments, as in compare(report["plain"], report["terse"])'
    sources = [source_of(side, example) for side in (baseline, *candidates)]
    if len(sources) < 2:
        raise ConfigurationError("a comparison needs a baseline and at least one candidate")
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha must be between 0 and 1, such as 0.05 (got {alpha})")
    use = label_use(labels, label_metric, label_name, by_verdict=labels_by_verdict)
    wanted = (metrics,) if isinstance(metrics, str) else metrics
    if use is not None and wanted is DEFAULT_METRICS:
        wanted = (label_metric,)
    columns = read_sides(sources, wanted, cluster, slice_by, use)
    lower = (lower_is_better,) if isinstance(lower_is_better, str) else lower_is_better
    higher = (higher_is_better,) if isinstance(higher_is_better, str) else higher_is_better
    settings = ComparisonSettings(
        alpha=alpha,
        lower_is_better=frozenset((*lower, *COSTS)),
        higher_is_better=frozenset(higher),
        bounds=bounds,
        test=test,
        seed=seed,
        smallest_difference_that_matters=checked_smallest_difference(smallest_difference_that_matters),
    )
    record = compare_columns(
        columns[0], columns[1:], metrics=wanted, slice_by=slice_by, settings=settings, sources=sources
    )
    return Comparison.of(record)
