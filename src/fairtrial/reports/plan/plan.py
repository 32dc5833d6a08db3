"""Plan the number of samples of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.base.frozen import first_is
from fairtrial.reports.figures.metrics import PASSED, SMALLEST_DIFFERENCE
from fairtrial.reports.plan.planning import REPEATS, PlanRequest, SamplePlanRecord, plan_sources
from fairtrial.reports.renderable import RenderableRecord
from fairtrial.reports.report import EvalReport, ExperimentReport, sources_of


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class SamplePlan(SamplePlanRecord, RenderableRecord):
    """Samples, repeats and cost of a comparison; `SamplePlanRecord` describes the attributes."""

    def __repr__(self) -> str:
        return f"<SamplePlan: {self.sentence}>"


def plan(
    *history: EvalReport | ExperimentReport,
    difference: float = SMALLEST_DIFFERENCE,
    metric: str = PASSED,
    power: float = 0.8,
    alpha: float = 0.05,
    repeats: Sequence[int] | int = REPEATS,
    tests: int | None = None,
    cluster: str | None = None,
    sample_cost_usd: float = 0.0,
) -> SamplePlan:
    """Plan how many samples and repeats are needed to detect a difference, and their cost.

    Earlier runs show how often two sides differ on the same samples, how much repeats of a sample vary, and what a
    trial costs. Their observed difference is not used, because it is mostly chance. Values that no run shows are
    assumed and listed in `assumptions`.

    Args:
        *history: Reports of earlier runs, or experiments of them, newest first; none for the worst case.
        difference: The true difference to detect: .05 is five points of a pass rate.
        metric: The metric to compare: "passed", "value", or a metric of an earlier run.
        power: The probability of detecting it.
        alpha: The accepted chance of a false alarm, over all tests.
        repeats: The numbers of repeats to plan for.
        tests: The number of metrics and candidates that are compared together, which share alpha. By default that of
            `compare` for two sides: one, or two if there are values other than 0 and 1.
        cluster: The metadata key that groups samples that are not independent; None for that of the runs, "" for none.
        sample_cost_usd: The cost of making a new sample, labels included; it affects the best number of repeats.
    """
    sources = [source for report in history for source in sources_of(report)]
    wanted = (repeats,) if isinstance(repeats, int) else tuple(dict.fromkeys(repeats))
    request = PlanRequest(difference, metric, power, alpha, wanted, tests, sample_cost_usd)
    return SamplePlan.of(plan_sources(sources, request, cluster))
