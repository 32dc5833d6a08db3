"""Rank more than two systems on the same samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fairtrial.base.frozen import EMPTY, first_is
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.metrics import COSTS, PASSED, SMALLEST_DIFFERENCE
from fairtrial.reports.figures.rules import checked_smallest_difference
from fairtrial.reports.leaderboard.ranking import rank_sources
from fairtrial.reports.leaderboard.table import LeaderboardRecord
from fairtrial.reports.renderable import RenderableRecord
from fairtrial.reports.report import EvalReport, ExperimentReport, sources_of


@first_is(str)
@dataclass(frozen=True, slots=True, repr=False)
class Leaderboard(LeaderboardRecord, RenderableRecord):
    """Systems in the order of one metric, the best first: `leaderboard["terse"].rank_low`, or print it."""

    def __repr__(self) -> str:
        return f"<Leaderboard of {len(self.systems)} systems by {self.metric}>"


def leaderboard(
    *reports: EvalReport | ExperimentReport,
    metric: str = PASSED,
    baseline: str | None = None,
    cluster: str | None = None,
    weights: Mapping[str, float] | None = None,
    alpha: float = 0.05,
    lower_is_better: Collection[str] = (),
    higher_is_better: Collection[str] = (),
    smallest_difference_that_matters: float | Mapping[str, float] = SMALLEST_DIFFERENCE,
    bounds: Mapping[str, tuple[float, float] | None] = EMPTY,
    seed: int = 0,
) -> Leaderboard:
    """Rank systems that were run on the same samples, with rank intervals that hold for all of them together.

    A report stands for all its experiments. Samples are joined on their id, and only those that every system has a
    score on are used; how many were left out is said. Task errors and timeouts count as failures. Runs of several
    datasets are taken together: experiments of the same name are one system, and its mean is the weighted mean over the
    datasets.

    Args:
        *reports: Runs, or experiments of runs: `leaderboard(report)`, `leaderboard(old["plain"], new)`.
        metric: "passed", "value", "reward", "latency_ms", "tokens", "cost_usd", or a metric by name.
        baseline: The system whose differences from all others are shown, with intervals that hold together.
        cluster: The metadata key whose value samples share that are not independent; None for the runs' own, "" for
            none.
        weights: The weight of each dataset by name, if there are several; by default equal ones.
        alpha: The accepted chance that a rank interval, or an interval of a difference, misses the truth.
        lower_is_better: Metrics of which less is better, besides latency, tokens and cost.
        higher_is_better: Metrics of which more is better, besides "passed", "value" and "reward".
        smallest_difference_that_matters: A system whose difference from the baseline is smaller is as good as it.
        bounds: Ranges of metrics that do not declare theirs, such as {"f1": (0, 1)}; None for a metric without limits.
        seed: Of the random draws, so that the same data always give the same answer.
    """
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha must lie between 0 and 1, such as 0.05 (got {alpha})")
    lower = (lower_is_better,) if isinstance(lower_is_better, str) else lower_is_better
    higher = (higher_is_better,) if isinstance(higher_is_better, str) else higher_is_better
    settings = ComparisonSettings(
        alpha=alpha,
        lower_is_better=frozenset((*lower, *COSTS)),
        higher_is_better=frozenset(higher),
        bounds=bounds,
        seed=seed,
        smallest_difference_that_matters=checked_smallest_difference(smallest_difference_that_matters),
    )
    record = rank_sources(
        [source for report in reports for source in sources_of(report)],
        metric=metric,
        baseline=baseline,
        cluster=cluster,
        weights=weights,
        settings=settings,
    )
    return Leaderboard.of(record)
