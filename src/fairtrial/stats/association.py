"""Test whether two quantities are correlated, and whether two groups differ."""

from dataclasses import dataclass
from math import atanh, sqrt, tanh

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.stats._arrays import Interval, Undefined, Values, as_values, check_level, normal_quantile, two_sided


@dataclass(frozen=True, slots=True)
class RankCorrelation:
    """The rank correlation of two quantities, from -1 to 1; `reason` explains a value of None."""

    n: int
    value: float | None
    interval: Interval | None
    reason: str | None


def rank_correlation(first: Values, second: Values, *, level: float = 0.95) -> RankCorrelation:
    """Spearman's correlation of ranks (1904), with the interval of Bonett and Wright (2000).

    tanh(atanh(r) +- z sqrt((1 + r^2/2)/(n - 3))). Undefined if one of the two never varies; no interval below 5
    pairs, or if the ranks agree throughout.
    """
    check_level(level)
    x, y = as_values(first, "first"), as_values(second, "second")
    if x.size != y.size:
        raise ConfigurationError(
            f"both must have the same number of values (got {x.size} and {y.size}): pair them first"
        )
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return RankCorrelation(x.size, None, None, "One of the two does not vary, so there is no correlation.")
    from scipy.stats import rankdata  # Imported late: it takes as long to load as everything else together.

    r = float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])
    if x.size < 5 or abs(r) > 1 - 1e-12:
        return RankCorrelation(
            x.size, r, None, "There are too few pairs for an interval, or their ranks agree completely."
        )
    half = normal_quantile(two_sided(level)) * sqrt((1 + r * r / 2) / (x.size - 3))
    interval = Interval(tanh(atanh(r) - half), tanh(atanh(r) + half), level, "Bonett-Wright")
    return RankCorrelation(x.size, r, interval, None)


def groups_differ(first: Values, second: Values) -> float | Undefined:
    """Return the p-value of a test whether two groups differ: Fisher's exact test for 0/1, else Mann and Whitney's."""
    x, y = as_values(first, "first"), as_values(second, "second")
    if x.size == 0 or y.size == 0:
        return Undefined("One of the two groups is empty.")
    from scipy.stats import fisher_exact, mannwhitneyu

    if np.all(np.isin(x, (0, 1))) and np.all(np.isin(y, (0, 1))):
        table = [[int(x.sum()), int(x.size - x.sum())], [int(y.sum()), int(y.size - y.sum())]]
        return float(fisher_exact(table).pvalue)
    return float(mannwhitneyu(x, y).pvalue)
