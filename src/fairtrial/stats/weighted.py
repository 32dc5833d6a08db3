"""Means over several suites with fixed weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from fairtrial.stats._arrays import FloatArray, as_values, check_level, t_quantile, two_sided
from fairtrial.stats.intervals import MeanEstimate
from fairtrial.stats.results import Interval


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """A weighted mean of the means of suites; `reason` explains a value of None.

    `weights` sum to 1. `se` is sqrt(sum(w^2 SE^2)) and `df` its degrees of freedom; `n` counts samples of all suites.
    """

    mean: float | None
    se: float | None
    df: float | None
    interval: Interval | None
    weights: tuple[float, ...]
    n: int
    reason: str | None = None


def weighted_mean(
    estimates: Sequence[MeanEstimate],
    weights: Sequence[float] | None = None,
    *,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
) -> WeightedMean:
    """The mean of several suites with fixed weights, scaled to sum to 1; by default equal ones (the macro average).

    Weights in proportion to the numbers of samples make the micro average. Suites are strata, independent of each
    other: SE^2 = sum(w^2 SE_i^2), with t of Satterthwaite's (1946) degrees of freedom, (sum(v))^2 / sum(v^2/df) with
    v = w^2 SE_i^2. Where a suite is near an end of its range, its SE says too little; so the interval is stretched to
    that made of the suites' own intervals, mean -+ sqrt(sum(w^2 (mean_i - end_i)^2)) at each end (Zou and Donner 2008).
    Of one suite it is the suite's own. `estimates` must have intervals at this level.
    """
    check_level(level)
    shares = normalize_weights(weights, len(estimates))
    used = [(share, one) for share, one in zip(shares.tolist(), estimates, strict=True) if share > 0]
    n = sum(one.n for one in estimates)
    values = [one.mean for _, one in used if one.mean is not None]
    if len(values) < len(used):
        return WeightedMean(None, None, None, None, tuple(shares.tolist()), n, "A suite has no scored sample.")
    mean = float(sum(share * value for (share, _), value in zip(used, values, strict=True)))
    errors = [(share * one.se, one.df) for share, one in used if one.se is not None and one.df is not None]
    ends = [(share, one.mean or 0.0, one.interval) for share, one in used if one.interval is not None]
    if len(errors) < len(used) or len(ends) < len(used):
        reason = next((one.reason for _, one in used if one.reason is not None), "A suite has no interval.")
        return WeightedMean(mean, None, None, None, tuple(shares.tolist()), n, reason)
    for _, _, interval in ends:
        if abs(interval.level - level) > 1e-12:
            raise ValueError(f"The intervals of all suites must be at level {level:g} (got {interval.level:g}).")
    variance = float(sum(error**2 for error, _ in errors))
    low = mean - sqrt(sum((share * (value - interval.low)) ** 2 for share, value, interval in ends))
    high = mean + sqrt(sum((share * (interval.high - value)) ** 2 for share, value, interval in ends))
    df = variance**2 / float(sum(error**4 / own for error, own in errors)) if variance > 0 else None
    if len(used) == 1:
        return WeightedMean(mean, sqrt(variance), df, ends[0][2], tuple(shares.tolist()), n)
    if df is not None:
        half = t_quantile(two_sided(level), df) * sqrt(variance)
        low, high = min(low, mean - half), max(high, mean + half)
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    method = "intervals of the suites combined" if df is None else f"t with {df:.4g} df and intervals of the suites"
    return WeightedMean(mean, sqrt(variance), df, Interval(low, high, level, method), tuple(shares.tolist()), n)


def normalize_weights(weights: Sequence[float] | None, count: int) -> FloatArray:
    """Return weights that sum to 1; by default equal ones."""
    if count == 0:
        raise ValueError("A weighted mean needs at least one suite.")
    if weights is None:
        return np.full(count, 1 / count)
    array = as_values(weights, "weights")
    if array.size != count:
        raise ValueError(f"There must be one weight for each of {count} suites (got {array.size}).")
    if array.min() < 0 or array.sum() <= 0:
        raise ValueError(f"Weights must be at least 0, and one of them above 0 (got {array.tolist()}).")
    return np.asarray(array / array.sum(), dtype=np.float64)
