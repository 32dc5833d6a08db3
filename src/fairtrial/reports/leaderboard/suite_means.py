"""The mean of one system over several suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.source import ExperimentSource
from fairtrial.reports.leaderboard.ranking import refuse_adaptive, suite_weights
from fairtrial.stats import MeanEstimate, WeightedMean, mean_interval, weighted_mean


@dataclass(frozen=True, slots=True)
class SuitesMean:
    """The mean of one system over several suites: `found.macro.mean`, `found.macro.interval`.

    `suites` has the mean of each dataset. In `macro` every dataset weighs the same, in `micro` every sample; `weighted`
    has the weights that were given, and is None without.
    """

    metric: str
    suites: Mapping[str, MeanEstimate]
    macro: WeightedMean
    micro: WeightedMean
    weighted: WeightedMean | None


def mean_over_suites(
    sources: Sequence[ExperimentSource], metric: str, weights: Mapping[str, float] | None, level: float
) -> SuitesMean:
    """Read the mean of each suite and combine them; failures count as the worst value, if there is one."""
    if not sources:
        raise ConfigurationError("a mean over suites needs at least one report (got 0)")
    refuse_adaptive(sources, "a mean over suites")
    means: dict[str, MeanEstimate] = {}
    ranges = set()
    for source in sources:
        name = source.run.dataset_name
        if name in means:
            raise ConfigurationError(
                f"each dataset must be given once (got {name!r} twice)\nname one experiment of each suite"
            )
        columns = read_columns(source, metrics=(metric,))
        settings = ComparisonSettings().declared_by(columns)
        bounds = settings.range_of(metric)
        scores = columns.scores(metric, "system", worst=settings.worst_of(metric))
        means[name] = mean_interval(scores, clusters=columns.clusters, bounds=bounds, level=level)
        if not means[name].n:
            raise ConfigurationError(f"no trial of {source.name!r} on {name!r} has a value for {metric!r}")
        ranges.add(bounds)
    common = ranges.pop() if len(ranges) == 1 else None
    estimates = list(means.values())
    own = None if weights is None else suite_weights(weights, list(means))
    return SuitesMean(
        metric,
        means,
        weighted_mean(estimates, bounds=common, level=level),
        weighted_mean(estimates, [one.n for one in estimates], bounds=common, level=level),
        None if own is None else weighted_mean(estimates, own, bounds=common, level=level),
    )
