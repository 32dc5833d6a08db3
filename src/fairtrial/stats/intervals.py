"""Intervals for one rate or one mean.

None of them collapses to a point: 10 passes out of 10 give .72 to 1, not 1 to 1.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy import stats

from fairtrial.stats._arrays import (
    Clusters,
    FloatArray,
    Labels,
    Repeats,
    Samples,
    Values,
    as_clusters,
    as_samples,
    as_values,
    check_bounds,
    check_counts,
    check_level,
    normal_quantile,
    t_quantile,
    two_sided,
)
from fairtrial.stats.results import Interval, Undefined

FEW_CLUSTERS = 5
"""Below this many clusters a report says that the error itself is poorly known."""

FEW_IMPERFECT = 10
"""Below this many samples (or clusters) that differ from the common outcome, the observed spread is not trusted."""

ASSUMED_CORRELATION = 0.4
"""Intra-class correlation assumed for clusters while the observed spread is not trusted."""


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over samples with its interval; whatever is None is explained by `reason`."""

    n: int
    trials: int
    unscored: int
    clusters: int | None
    mean: float | None
    sd: float | None
    se: float | None
    interval: Interval | None
    effective_n: float | None
    notes: tuple[str, ...]
    reason: str | None


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval | Undefined:
    """Score interval for a rate: all p with |k/n - p| <= z sqrt(p(1-p)/n). Wilson (1927).

    In closed form (k/n + z^2/2n -+ z sqrt(k/n (1-k/n)/n + z^2/4n^2)) / (1 + z^2/n). Undefined for n = 0.
    """
    check_counts(successes, n)
    check_level(level)
    if n == 0:
        return _NOTHING
    found = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    return Interval(max(0.0, float(found.low)), min(1.0, float(found.high)), level, "Wilson score")


def clopper_pearson(successes: int, n: int, *, level: float = 0.95) -> Interval | Undefined:
    """Exact interval for a rate from the two binomial tails; never covers too little. Clopper and Pearson (1934)."""
    check_counts(successes, n)
    check_level(level)
    if n == 0:
        return _NOTHING
    found = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="exact")
    return Interval(float(found.low), float(found.high), level, "Clopper-Pearson")


def beta_uniform(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Equal-tailed credible interval of Beta(1+k, 1+n-k): a flat prior updated by the data. Bayes (1763).

    With n = 0 it is the prior's own interval.
    """
    check_counts(successes, n)
    check_level(level)
    low, high = stats.beta(1 + successes, 1 + n - successes).interval(level)
    return Interval(float(low), float(high), level, "beta posterior, uniform prior")


def wilson_effective(rate: float, effective_n: float, *, quantile: float, level: float, method: str) -> Interval:
    """Wilson's formula for an observed rate worth `effective_n` independent trials, with any quantile for z.

    The effective number is Kish's (1965): the n at which independent trials would have the observed error.
    """
    z2 = quantile * quantile / effective_n
    centre = (rate + z2 / 2) / (1 + z2)
    half = sqrt(rate * (1 - rate) * z2 + z2 * z2 / 4) / (1 + z2)
    # Rounding may leave the end a hair inside the rate it must contain when the rate is 0 or 1.
    low = 0.0 if rate == 0 else max(0.0, centre - half)
    high = 1.0 if rate == 1 else min(1.0, centre + half)
    return Interval(low, high, level, method)


def sem(values: Values) -> float | Undefined:
    """Standard error of a mean, sd/sqrt(n), with n-1 in the variance. Undefined below two values."""
    array = as_values(values)
    if array.size < 2:
        return Undefined("A standard error needs at least two samples.")
    return plain_se(array)


def clustered_se(values: Values, clusters: Labels, *, correction: bool = True) -> float | Undefined:
    """Standard error of a mean when samples of one cluster resemble each other. Liang and Zeger (1986).

    SE^2 = sum over clusters of (sum of residuals in it)^2 / n^2, times C/(C-1) with `correction`.
    With clusters of one sample it is the plain standard error. Undefined below two clusters.
    """
    array = as_values(values)
    groups = as_clusters(clusters, array.size)
    if groups.count < 2:
        return _ONE_CLUSTER
    return _clustered_se(array, groups, correction=correction)


def t_interval(
    values: Values, *, bounds: tuple[float, float] | None = None, level: float = 0.95
) -> Interval | Undefined:
    """Mean -+ t(n-1) sd/sqrt(n), cut to `bounds`. Student (1908).

    Undefined below two values and for values that are all equal: their spread says nothing.
    """
    array = as_values(values)
    check_bounds(array, bounds)
    check_level(level)
    if array.size < 2:
        return Undefined("A t interval needs at least two samples.")
    if _constant(array):
        return Undefined("Every sample has the same value: the t interval would be a point.")
    half = t_quantile(two_sided(level), array.size - 1) * plain_se(array)
    return _clipped(float(array.mean()), half, bounds, level, f"t with {array.size - 1} df")


def mean_interval(
    values: Samples,
    *,
    clusters: Labels | None = None,
    binary: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
) -> MeanEstimate:
    """Mean over samples with the interval that suits the data; the interval's `method` names it.

    `values` holds one score per sample, or a sequence of repeats per sample (their number may vary; samples
    without a scored repeat are left out and counted in `unscored`). Repeats are averaged per sample first, so the
    error is sd(sample means)/sqrt(n): flattening the repeats would understate it.

    - pass/fail, one repeat: Wilson.
    - pass/fail, repeats: Wilson with t(n-1) and n_eff = min(trials, m(1-m)/SE^2), at most n while fewer than
      10 samples are imperfect, or fewer than 10 are above zero.
    - pass/fail, clusters: Wilson with t(C-1) and n_eff = min(n, m(1-m)/SE^2) from the clustered error; n_eff = C
      when every outcome is equal. While fewer than 10 clusters are imperfect (or above zero), n_eff is at most
      n/(1 + .4(s-1)) for clusters of s samples (Kish's design effect at a correlation of .4): a handful of failures
      in one large cluster otherwise passes for near certainty, and the interval covers .83 where it says .95.
    - graded: t on the sample means, cut to `bounds`; if all are equal, Wilson on the mean as a share of the range.

    `binary` is read from the scores when None, if their range is 0 to 1. With `bounds=None` nothing is cut, and equal
    values have no interval.
    """
    check_level(level)
    samples = as_samples(values)
    check_bounds(samples.flat, bounds)
    groups = None if clusters is None else as_clusters(clusters, samples.counts.size)
    scored = samples.counts > 0
    unscored = int(np.count_nonzero(~scored))
    if unscored:
        samples = samples.only(scored)
        groups = None if groups is None else groups.only(scored)
    if binary and not samples.binary:
        raise ValueError("binary=True, but some scores are neither 0 nor 1: leave binary out for graded scores.")
    # A count that happened to be 0 or 1 is no rate: its range says so.
    rate = samples.binary and bounds == (0.0, 1.0) if binary is None else binary
    return _estimate(samples, groups, unscored, rate=rate, bounds=bounds, level=level)


_NOTHING = Undefined("There are no samples.")
_ONE_CLUSTER = Undefined("All samples are in one cluster, so nothing shows how much clusters differ.")


def _estimate(
    samples: Repeats,
    groups: Clusters | None,
    unscored: int,
    *,
    rate: bool,
    bounds: tuple[float, float] | None,
    level: float,
) -> MeanEstimate:
    means = samples.means
    n = means.size
    count = None if groups is None else groups.count
    if n == 0:
        return MeanEstimate(0, 0, unscored, count, None, None, None, None, None, (), _NOTHING.reason)
    mean = float(means.mean())
    sd = float(means.std(ddof=1)) if n > 1 else None
    reasons: list[str] = []
    se: float | None = None
    if groups is not None and groups.count < 2:
        reasons.append(_ONE_CLUSTER.reason)
    elif n < 2:
        reasons.append("One sample has no standard error.")
    else:
        se = plain_se(means) if groups is None else _clustered_se(means, groups)
    interval: Interval | None
    effective: float | None
    if groups is not None and groups.count < 2:
        interval, effective = None, None
    elif rate:
        interval, effective = _rate_interval(samples, groups, mean, se, level)
    else:
        interval, effective = _graded_interval(means, groups, mean, se, bounds, level), None
        if interval is None:
            reasons.append("Without bounds, equal values (or a single one) give no interval.")
    notes: tuple[str, ...] = ()
    if groups is not None and 2 <= groups.count < FEW_CLUSTERS:
        notes = (f"Only {groups.count} clusters: the error itself is poorly known below {FEW_CLUSTERS}.",)
    return MeanEstimate(
        n, int(samples.flat.size), unscored, count, mean, sd, se, interval, effective, notes, " ".join(reasons) or None
    )


def _rate_interval(
    samples: Repeats, groups: Clusters | None, mean: float, se: float | None, level: float
) -> tuple[Interval, float]:
    """The Wilson interval of pass/fail scores and the number of independent trials it assumes."""
    n = samples.counts.size
    if groups is None and (samples.single or se is None):
        # A lone sample has repeats but no sample-to-sample spread: it is worth one trial.
        z = normal_quantile(two_sided(level))
        return wilson_effective(mean, n, quantile=z, level=level, method="Wilson score"), float(n)
    means = samples.means
    # Repeats of equal worth: n K when all have K, less when uneven, as samples weigh the same however often repeated.
    trials = n * n / float(np.sum(1 / samples.counts))
    spread = mean * (1 - mean)
    observed = spread / (se * se) if se else np.inf
    if groups is None:
        effective = min(trials, observed)
        if min(np.count_nonzero(means < 1), np.count_nonzero(means > 0)) < FEW_IMPERFECT:
            effective = min(effective, n)
        df, units = n - 1, "repeats"
    else:
        effective = min(trials, observed)
        sizes = groups.sizes
        totals = groups.totals(means)
        if min(np.count_nonzero(totals < sizes), np.count_nonzero(totals > 0)) < FEW_IMPERFECT:
            typical = float(np.sum(sizes * sizes)) / n
            effective = min(effective, n / (1 + ASSUMED_CORRELATION * (typical - 1)))
        if _constant(means):
            effective = min(effective, groups.count)
        df, units = groups.count - 1, "clusters" if samples.single else "clusters and repeats"
    method = f"Wilson score with effective n {effective:.1f} from {units}, t with {df} df"
    t = t_quantile(two_sided(level), df)
    return wilson_effective(mean, effective, quantile=t, level=level, method=method), float(effective)


def _graded_interval(
    means: FloatArray,
    groups: Clusters | None,
    mean: float,
    se: float | None,
    bounds: tuple[float, float] | None,
    level: float,
) -> Interval | None:
    """The t interval of graded scores, or Wilson on the mean where the observed spread is nought."""
    units = means.size if groups is None else groups.count
    # Clusters with equal means leave an error of nought, or of pure rounding, although samples differ.
    if se is not None and not _constant(means) and se > 1e-12 * max(1.0, float(np.max(np.abs(means)))):
        half = t_quantile(two_sided(level), units - 1) * se
        method = f"t with {units - 1} df" if groups is None else f"t with {units - 1} df, clustered error"
        return _clipped(mean, half, bounds, level, method)
    if bounds is None:
        return None
    low, high = bounds
    share = min(1.0, max(0.0, (mean - low) / (high - low)))
    # A score in [0, 1] with mean m varies at most as much as a coin with rate m, so this errs on the wide side.
    method = "Wilson score on the mean, as the scores show no spread"
    z = normal_quantile(two_sided(level))
    found = wilson_effective(share, units, quantile=z, level=level, method=method)
    return Interval(low + found.low * (high - low), low + found.high * (high - low), level, method)


def _clipped(mean: float, half: float, bounds: tuple[float, float] | None, level: float, method: str) -> Interval:
    low, high = (-np.inf, np.inf) if bounds is None else bounds
    return Interval(float(max(low, mean - half)), float(min(high, mean + half)), level, method)


def plain_se(array: FloatArray) -> float:
    """`sem` of a checked array; by hand because scipy's own costs a millisecond a call."""
    return float(array.std(ddof=1)) / sqrt(array.size)


def _clustered_se(array: FloatArray, groups: Clusters, *, correction: bool = True) -> float:
    totals = groups.totals(array - array.mean())
    variance = float(np.sum(totals * totals)) / array.size**2
    return sqrt(variance * groups.count / (groups.count - 1) if correction else variance)


def _constant(array: FloatArray) -> bool:
    """Whether the values are equal but for rounding, which averaging repeats may leave."""
    return bool(np.ptp(array) <= 1e-12 * max(1.0, float(np.max(np.abs(array)))))
