"""Compare candidates with a baseline on the same samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.comparison import ComparisonRecord, Side
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.compare.settings import DEFAULT_METRICS, compare_columns, read_sides
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.labels import Labels, label_use
from fairtrial.reports.figures.metrics import COSTS, PASSED, VALUE, measured_metric
from fairtrial.reports.figures.rules import checked_smallest_difference
from fairtrial.reports.figures.slicing import SliceBy, name_of_slices, normalize_slices
from fairtrial.reports.plan.plan_check import check_comparison, plan_of_sides
from fairtrial.reports.renderable import Renderable, RenderableRecord
from fairtrial.reports.report import EvalReport, ExperimentReport, source_of

__all__ = ["DEFAULT_METRICS", "Comparison", "compare"]


@first_is(Side)
@dataclass(frozen=True, slots=True, repr=False)
class Comparison(ComparisonRecord, RenderableRecord):
    """Candidates against one baseline: `comparison["terse"]["passed"].verdict`, or print it.

    `tests` counts the tests that were made together, for which adjusted p-values allow. `print(comparison.in_detail())`
    shows the tests, the trials and the comparison without errors too. `plan` says whether it is as planned.
    """

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(one.name for one in self.candidates)} with {self.baseline.name}>"

    def in_detail(self) -> DetailedComparison:
        """Return the same comparison, to be printed with every detail."""
        return DetailedComparison(self)

    def to_latex(self) -> str:
        """Return the table of differences for a paper; it needs no LaTeX package, and foreign text is escaped."""
        from fairtrial.reports.compare.methods import comparison_table

        return comparison_table(self)

    def methods(self) -> str:
        """Return a paragraph for the methods section of a paper, made of what was done."""
        from fairtrial.reports.compare.methods import methods_paragraph

        return methods_paragraph(self)


class DetailedComparison(Renderable):
    """A comparison that is printed with every detail."""

    __slots__ = ("comparison",)

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def _record(self) -> object:
        from fairtrial.reports.compare.document import ComparisonInDetail

        return ComparisonInDetail(self.comparison)


def compare(
    baseline: EvalReport | ExperimentReport,
    *candidates: EvalReport | ExperimentReport,
    metrics: Sequence[str] | str | None = DEFAULT_METRICS,
    cluster: str | None = None,
    slice_by: SliceBy | Sequence[SliceBy] = (),
    alpha: float | None = None,
    lower_is_better: Collection[str] = (),
    higher_is_better: Collection[str] = (),
    smallest_difference_that_matters: float | Mapping[str, float] | None = None,
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    test: Literal["midp", "exact"] = "midp",
    seed: int = 0,
    labels: Labels | bool = False,
    label_metric: str = PASSED,
    label_name: str | None = None,
    labels_by_verdict: bool = False,
    labels_drawn: bool = False,
) -> Comparison:
    """Compare one or more candidates with a baseline, sample by sample.

    Sides are reports, or experiments of one report: `compare(report["plain"], report["terse"])`. Samples are joined
    on their id; one with another input or expected value on the other side is missing. Task errors and timeouts count
    as failures of the system; scorer errors, dead letters and trials that were not run are missing, and every verdict
    is repeated on what was scored on both sides. If the runs have an `AnalysisPlan`, it replaces the defaults below,
    and `Comparison.plan` lists what is not as planned.

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
        alpha: The accepted chance of calling equal systems different, over all metrics and candidates: .05 by default.
            With a plan, once for the primary metric and once for all others.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        higher_is_better: Metrics of which more is better, besides "passed", "value" and "reward". Metrics may declare
            it themselves (`Metric.higher_is_better`); others are reported as higher or lower instead of better.
        smallest_difference_that_matters: One number for shares (.05 by default), or one for each metric by name. Two
            sides whose interval lies within it are reported as equally good, and the number of samples to detect it
            is shown.
        bounds: Ranges of metrics, such as {"f1": (0, 1)}; None for a metric without limits. By default what metrics
            declare themselves (`Metric.bounds`); no range is guessed from values.
        test: "exact" for McNemar's exact test instead of the mid-p one.
        seed: The seed of the random draws, so that the same data always give the same result.
        labels: People's labels of some trials of every side, which correct the scores of a judge: True for the labels
            in the store, else labels by TrialKey, as `Label` records, or by sample id under the name of each
            experiment. If no metrics are named, only `label_metric` is compared.
        label_metric: What the labels are about.
        label_name: Which labels of the store are meant, if they have several names.
        labels_by_verdict: Trials to label were drawn at random within each verdict of the judge (see `calibrate`).
        labels_drawn: Trials to label were drawn at random. That is known of the labels of a review; of others, figures
            are conditional on it unless it is declared.
    """
    example = 'compare its experiments, as in compare(report["plain"], report["terse"])'
    sources = [source_of(side, example) for side in (baseline, *candidates)]
    if len(sources) < 2:
        raise ConfigurationError("a comparison needs a baseline and at least one candidate")
    run_plan = plan_of_sides(sources)
    plan = None if run_plan is None else run_plan.in_use
    default = plan or AnalysisPlan()
    alpha = default.alpha if alpha is None else alpha
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha must be between 0 and 1, such as 0.05 (got {alpha})")
    use = label_use(labels, label_metric, label_name, by_verdict=labels_by_verdict, drawn=labels_drawn)
    wanted = (metrics,) if isinstance(metrics, str) else metrics
    if wanted is DEFAULT_METRICS and use is not None:
        wanted = (label_metric,)
    follows = wanted is DEFAULT_METRICS and plan is not None
    ways: Sequence[SliceBy] = normalize_slices(slice_by)
    planned_slices = () if ways else default.slices
    matters = smallest_difference_that_matters
    read = default.metrics if follows else wanted
    key = default.cluster if cluster is None else cluster
    columns = read_sides(sources, read, key, ways or planned_slices, use)
    if follows:  # What no trial or sample has cannot be compared; the check of the plan names it.
        wanted = _present(default.metrics, columns) or wanted
    groups = columns[0].groups
    ways = ways or [name for name in planned_slices if any(label is not None for label in groups[name])]
    lower = (lower_is_better,) if isinstance(lower_is_better, str) else tuple(lower_is_better)
    higher = (higher_is_better,) if isinstance(higher_is_better, str) else tuple(higher_is_better)
    settings = ComparisonSettings(
        alpha=alpha,
        lower_is_better=frozenset((*(lower or default.lower_is_better), *COSTS)),
        higher_is_better=frozenset(higher or default.higher_is_better),
        bounds=bounds or default.bounds,
        test=test,
        seed=seed,
        smallest_difference_that_matters=checked_smallest_difference(
            default.smallest_difference_that_matters if matters is None else matters
        ),
        primary=None if plan is None else plan.primary,
    )
    record = compare_columns(columns[0], columns[1:], metrics=wanted, slice_by=ways, settings=settings, sources=sources)
    slices = [name_of_slices(way) for way in normalize_slices(ways)]
    chosen = {"cluster": cluster, "lower_is_better": lower, "higher_is_better": higher, "bounds": bounds, "test": test}
    return Comparison.of(record, plan=check_comparison(run_plan, record, slices, chosen))


def _present(metrics: Sequence[str], sides: Sequence[Columns]) -> tuple[str, ...]:
    known = {PASSED, VALUE, *COSTS}.union(*(side.values for side in sides))
    return tuple(name for name in metrics if measured_metric(name) in known)
