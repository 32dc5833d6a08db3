"""Intervals for one rate or one mean.

None of them collapses to a point: 10 passes out of 10 give .69 to 1, not 1 to 1.
"""

from dataclasses import dataclass, replace
from math import ceil, floor, sqrt

import numpy as np
from scipy.special import betaincinv

from fairtrial.base.rates import FEW_OUTCOMES, wilson_bounds
from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays

FEW_CLUSTERS = 3.5
"""Below this effective number of clusters there is an interval but no verdict: the error itself is poorly known."""

FEW_IMPERFECT = 10
"""Below this many samples (or clusters) that differ from the common outcome, the observed spread is not trusted."""

FEW_LARGE_IMPERFECT = 8
"""The same as an effective number of clusters, if it is also below half of that of all: a few large ones decide."""

HEAVY_SHARES = ((1_000, 0.6), (100, 0.4), (50, 0.35), (0, 0.3))
"""From how many values on which share of the sum, carried by the largest 5%, makes the mean unreliable. By simulation:
below these, the interval of a lognormal mean lies wholly below it in at most .06 of runs (`benchmarks/coverage.py`)."""

COMPARED_SHARE = 5 / 6
"""The share of a side's sum at which a difference of means is unreliable, relative to that of a mean: of two sides with
other tails the lucky draws of one are called a difference."""

FARTHER = 2.0
"""The distance of the added value from the mean, relative to the farthest observed value, for a long tail."""

ASSUMED_CORRELATION = 0.4
"""Intra-class correlation assumed for clusters while the observed spread is not trusted."""


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over samples with its interval; `reason` explains a value of None.

    `effective_n` is the number of independent trials that the interval assumes, `effective_clusters` the number of
    clusters of equal size with the same information. `heavy_tail`: a few values make up so much of the sum that the
    interval is not reliable. `df` are the degrees of freedom of `se`.
    """

    n: int
    trials: int
    unscored: int
    clusters: int | None
    mean: float | None
    sd: float | None
    se: float | None
    interval: arrays.Interval | None
    effective_n: float | None
    notes: tuple[str, ...]
    reason: str | None
    effective_clusters: float | None = None
    heavy_tail: bool = False
    df: float | None = None


@dataclass(frozen=True, slots=True)
class QuantileEstimate:
    """A quantile with an interval between order statistics; an end that the values cannot bound is None.

    `n` counts samples and `trials` values; `clusters`, `effective_clusters` and `effective_n` are those of
    `MeanEstimate`.
    """

    n: int
    trials: int
    clusters: int | None
    share: float
    value: float | None
    low: float | None
    high: float | None
    method: str | None
    reason: str | None
    notes: tuple[str, ...] = ()
    effective_clusters: float | None = None
    effective_n: float | None = None


@dataclass(frozen=True, slots=True)
class ClusteredError:
    """The standard error of a mean over clusters, its degrees of freedom, and the effective number of clusters."""

    se: float
    df: float
    effective: float


def wilson(successes: int, n: int, *, level: float = 0.95) -> arrays.Interval | arrays.Undefined:
    """Score interval for a rate: all p with |k/n - p| <= z sqrt(p(1-p)/n). Wilson (1927).

    In closed form (k/n + z^2/2n -+ z sqrt(k/n (1-k/n)/n + z^2/4n^2)) / (1 + z^2/n). Undefined for n = 0.
    """
    arrays.check_counts(successes, n)
    arrays.check_level(level)
    if n == 0:
        return _NOTHING
    return arrays.Interval(
        *wilson_bounds(successes / n, n, arrays.normal_quantile(arrays.two_sided(level))), level, "Wilson score"
    )


def clopper_pearson(successes: int, n: int, *, level: float = 0.95) -> arrays.Interval | arrays.Undefined:
    """Exact interval for a rate from the two binomial tails; never covers too little. Clopper and Pearson (1934)."""
    arrays.check_counts(successes, n)
    arrays.check_level(level)
    if n == 0:
        return _NOTHING
    exact = exact_rate_interval(successes / n, n, level=level)
    return arrays.Interval(exact.low, exact.high, level, "Clopper-Pearson")


def rate_interval(successes: int, n: int, *, level: float = 0.95) -> arrays.Interval | arrays.Undefined:
    """Interval of a rate: Clopper-Pearson up to 12 passes or 12 failures, else Wilson.

    Wilson's interval alone holds a rate of .99 in 84% of runs at some n, and Clopper-Pearson is needlessly wide in the
    middle. With this rule the least coverage at 95%, over every rate and every n, is .930 (`benchmarks/coverage.py`
    enumerates it); 12 is the smallest limit that reaches .93.
    """
    few = min(successes, n - successes) <= FEW_OUTCOMES
    return (clopper_pearson if few else wilson)(successes, n, level=level)


def exact_rate_interval(rate: float, effective_n: float, *, level: float = 0.95) -> arrays.Interval:
    """Clopper and Pearson's interval for an observed rate worth `effective_n` trials. Korn and Graubard (1998).

    For decisions: neither tail is ever above (1 - level)/2, where Wilson's may reach .1 for rates near 0 and 1.
    """
    arrays.check_level(level)
    tail, passes = (1 - level) / 2, rate * effective_n
    low = float(betaincinv(passes, effective_n - passes + 1, tail)) if rate > 0 else 0.0
    high = float(betaincinv(passes + 1, effective_n - passes, 1 - tail)) if rate < 1 else 1.0
    return arrays.Interval(low, high, level, "exact binomial tails")


def beta_uniform(successes: int, n: int, *, level: float = 0.95) -> arrays.Interval:
    """Equal-tailed credible interval of Beta(1+k, 1+n-k): a flat prior updated by the data. Bayes (1763).

    With n = 0 it is the prior's own interval.
    """
    arrays.check_counts(successes, n)
    arrays.check_level(level)
    low, high = betaincinv(1 + successes, 1 + n - successes, [(1 - level) / 2, (1 + level) / 2])
    return arrays.Interval(float(low), float(high), level, "beta posterior, uniform prior")


def wilson_effective(rate: float, effective_n: float, *, quantile: float, level: float, method: str) -> arrays.Interval:
    """Wilson's formula for an observed rate worth `effective_n` independent trials, with any quantile for z.

    The effective number is Kish's (1965): the n at which independent trials would have the observed error.
    """
    return arrays.Interval(*wilson_bounds(rate, effective_n, quantile), level, method)


def sem(values: arrays.Values) -> float | arrays.Undefined:
    """Standard error of a mean, sd/sqrt(n), with n-1 in the variance. Undefined below two values."""
    array = arrays.as_values(values)
    if array.size < 2:
        return arrays.Undefined("A standard error needs at least two samples.")
    return plain_se(array)


def clustered_se(
    values: arrays.Values, clusters: arrays.Labels, *, correction: bool = True
) -> float | arrays.Undefined:
    """Standard error of a mean when samples of one cluster resemble each other. Liang and Zeger (1986).

    SE^2 = sum over clusters of (sum of residuals in it)^2 / n^2, times C/(C-1) with `correction`.
    With clusters of one sample it is the plain standard error. Undefined below two clusters.
    """
    array = arrays.as_values(values)
    groups = arrays.as_clusters(clusters, array.size)
    if groups.count < 2:
        return _ONE_CLUSTER
    return _clustered_se(array, groups, correction=correction)


def clustered_error(values: arrays.Values, clusters: arrays.Labels) -> ClusteredError | arrays.Undefined:
    """Standard error of a mean and its degrees of freedom, for few clusters or clusters of unequal size.

    SE^2 = sum over clusters of S_g^2/(1 - n_g/n) / n^2, S_g being the sum of residuals in a cluster of n_g of the n
    samples: the CR2 estimate of Bell and McCaffrey (2002) for a mean. Its degrees of freedom are Satterthwaite's,
    (tr M)^2/tr(M^2), where M holds the covariances of S_g/sqrt(1 - n_g/n) under the working model that samples are
    independent with equal variance. Of clusters of equal size they are C - 1; of one large cluster and some small
    ones, between 1 and 2. The effective number of clusters is (sum of n_g)^2 / (sum of n_g^2). Undefined below two
    clusters.
    """
    array = arrays.as_values(values)
    groups = arrays.as_clusters(clusters, array.size)
    return _ONE_CLUSTER if groups.count < 2 else totals_error(groups.totals(array), groups.sizes)


def totals_error(
    totals: arrays.FloatArray, sizes: arrays.FloatArray, *, variance: float | None = None
) -> ClusteredError:
    """`clustered_error` from the sums and the sizes of at least two clusters.

    With the `variance` of samples, the working model of the degrees of freedom has the intra-class correlation that the
    error shows. Clusters of one size have C - 1 all the same; of unequal ones with similar values, the large ones
    decide, and there are fewer.
    """
    n, count = float(sizes.sum()), sizes.size
    if _are_equal(sizes):  # What follows, without arrays of equal numbers.
        residuals = totals - float(totals.sum()) / count
        squared = float(np.sum(residuals * residuals)) / (1 - 1 / count) / n**2
        return ClusteredError(sqrt(squared), count - 1.0, float(count))
    share = sizes / n
    residuals = totals - float(totals.sum()) * share
    squared = float(np.sum(residuals * residuals / (1 - share))) / n**2
    typical = float(np.sum(sizes * share))
    correlation = 0.0
    if variance is not None and variance > 0 and typical > 1:
        correlation = min(1.0, max(0.0, (squared * n / variance - 1) / (typical - 1)))
    df = satterthwaite(share, sizes * (1 + correlation * (sizes - 1)))
    return ClusteredError(sqrt(squared), df, 1 / float(np.sum(share * share)))


def _are_equal(sizes: arrays.FloatArray) -> bool:
    return bool((sizes == sizes[0]).all())


def with_one_farther(
    totals: arrays.FloatArray, sizes: arrays.FloatArray, mean: float
) -> tuple[float, ClusteredError, float]:
    """Return the mean of clusters with this mean and one more of mean size, and its error.

    The one more is twice as far from the mean as the farthest, whose residual is the last value.
    """
    size, count = float(sizes.mean()), sizes.size
    residuals = totals - mean * sizes
    low, high = float(residuals.min()), float(residuals.max())
    farthest = float(residuals[np.argmax(np.abs(residuals))]) if high == -low else max(low, high, key=abs)
    added = FARTHER * farthest
    if _are_equal(sizes):  # The squares around the new mean follow from those around the old one.
        n = size * (count + 1)
        squares = float(np.sum(np.square(residuals, out=residuals))) + added * added * count / (count + 1)
        error = ClusteredError(sqrt(squares / (1 - 1 / (count + 1))) / n, float(count), count + 1.0)
        return mean + added / n, error, farthest
    more, sizes = np.append(totals, mean * size + added), np.append(sizes, size)
    return float(more.sum() / sizes.sum()), totals_error(more, sizes), farthest


def satterthwaite(share: arrays.FloatArray, variances: arrays.FloatArray) -> float:
    """(tr M)^2/tr(M^2) of the covariances M of S_g/sqrt(1 - share), for independent sums with these variances."""
    weights, total = 1 / (1 - share), float(variances.sum())
    # The covariances are diag(v) + B, B = -(v s' + s v') + V s s', in sums over clusters instead of matrices.
    own = share * (total * share - 2 * variances)
    vv, vs, ss = (float(np.sum(weights * part)) for part in (variances**2, variances * share, share**2))
    trace = float(np.sum(weights * (variances + own)))
    squares = float(np.sum(weights**2 * variances * (variances + 2 * own)))
    squares += 2 * vv * ss + 2 * vs**2 - 4 * total * vs * ss + (total * ss) ** 2
    return trace**2 / squares


def few_clusters_note(count: int, effective: float) -> str | None:
    """Return a note if there are too few clusters, or one is too large, for a verdict; else None."""
    if effective >= FEW_CLUSTERS:
        return None
    worth = "" if effective > count - 0.05 else f", worth {effective:.1f} of equal size because some are much larger"
    return f"Only {count} cluster{'s' if count > 1 else ''}{worth}: about 4 are the least for a verdict."


def t_interval(
    values: arrays.Values, *, bounds: tuple[float, float] | None = None, level: float = 0.95
) -> arrays.Interval | arrays.Undefined:
    """Mean -+ t(n-1) sd/sqrt(n), cut to `bounds`. Student (1908).

    Undefined below two values and for values that are all equal: their spread says nothing.
    """
    array = arrays.as_values(values)
    arrays.check_bounds(array, bounds)
    arrays.check_level(level)
    if array.size < 2:
        return arrays.Undefined("A t interval needs at least two samples.")
    if _constant(array):
        return arrays.Undefined("Every sample has the same value: the t interval would be a point.")
    half = arrays.t_quantile(arrays.two_sided(level), array.size - 1) * plain_se(array)
    return _clipped(float(array.mean()), half, bounds, level, f"t with {array.size - 1} df")


def mean_interval(
    values: arrays.Samples,
    *,
    clusters: arrays.Labels | None = None,
    binary: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
) -> MeanEstimate:
    """Mean over samples with the interval that suits the data; the interval's `method` names it.

    `values` holds one score per sample, or a sequence of repeats per sample (their number may vary; samples
    without a scored repeat are left out and counted in `unscored`). Repeats are averaged per sample first, so the
    error is sd(sample means)/sqrt(n): flattening the repeats would understate it.

    - pass/fail, one repeat: `rate_interval`.
    - any other score in a range, as a share m of it: Wilson with t(n-1) and n_eff = m(1-m)/SE^2, of pass/fail scores
      at most the number of trials. While fewer than 10 samples are imperfect, or fewer than 10 are above zero, n_eff is
      at most n: what was hardly seen has shown little of its spread. Otherwise each end is at least as far out as that
      of Student's t for the data and one more sample at that end of the range: scores that are all a hair below 1 say
      no more about rare zeros than perfect ones.
    - the same in clusters: `clustered_error` for SE; t under a working model with the correlation within clusters that
      SE shows. While fewer than 10 clusters are imperfect (or above zero), or they are worth fewer than 8 and less than
      half of all, n_eff is at most n/(1 + .4(s-1)) for clusters of s samples (Kish's design effect at a correlation of
      .4): a handful of failures in one large cluster otherwise passes for near certainty. If all samples are equal,
      n_eff is at most the effective number of clusters. Otherwise one more cluster of mean size moves the ends out.
    - without bounds: t on the sample means. The end on the side of the farthest sample (or cluster) is that of the same
      data with one more, twice as far from the mean: of a long tail the largest values are seldom seen. No interval of
      a mean holds for a few samples of a very long tail: `heavy_tail` says where a few make up most of the sum, and
      `quantile_interval` has what holds there.

    Where fewer than 10 samples (or clusters) are all there are, it is enough that none lies at an end of the range.
    `binary` is read from the scores when None, if their range is 0 to 1. With `bounds=None` nothing is cut, and equal
    values have no interval.
    """
    arrays.check_level(level)
    samples = arrays.as_samples(values)
    arrays.check_bounds(samples.flat, bounds)
    groups = None if clusters is None else arrays.as_clusters(clusters, samples.counts.size)
    scored = samples.counts > 0
    unscored = int(np.count_nonzero(~scored))
    if unscored:
        samples = samples.only(scored)
        groups = None if groups is None else groups.only(scored)
    if binary and not samples.binary:
        raise ConfigurationError("binary=True, but some scores are neither 0 nor 1: leave binary out for graded scores")
    # A metric with another range is not a rate, even if all its values are 0 or 1.
    rate = samples.binary and bounds == (0.0, 1.0) if binary is None else binary
    return _estimate(samples, groups, unscored, rate=rate, bounds=bounds, level=level)


_NOTHING = arrays.Undefined("There are no samples.")
_ONE_CLUSTER = arrays.Undefined("All samples are in one cluster, so the variance between clusters is not known.")


def _estimate(
    samples: arrays.Repeats,
    groups: arrays.Clusters | None,
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
    reason: str | None = None
    error: ClusteredError | None = None
    if groups is not None and groups.count < 2:
        reason = _ONE_CLUSTER.reason
    elif n < 2:
        reason = "One sample has no standard error."
    else:
        error = (
            ClusteredError(plain_se(means), n - 1, float(n))
            if groups is None
            else totals_error(groups.totals(means), groups.sizes, variance=float(means.var()))
        )
    interval: arrays.Interval | None = None
    effective: float | None = None
    assumed = False
    if groups is not None and error is None:
        pass
    elif bounds is not None:
        low, high = bounds
        interval, effective, assumed = _bounded_interval(samples, groups, error, bounds, level, rate=rate)
        interval = arrays.Interval(
            low + interval.low * (high - low), low + interval.high * (high - low), level, interval.method
        )
    elif error is None or _constant(means) or error.se <= 1e-12 * float(np.max(np.abs(means))):
        reason = " ".join(filter(None, (reason, "Without bounds, equal values (or a single one) give no interval.")))
    else:
        interval = _unbounded_interval(means, groups, error, level)
    heavy = None if bounds is not None else heavy_tail_note(means)
    worth = None if groups is None or error is None else error.effective
    notes = [None if count is None or worth is None else few_clusters_note(count, worth), heavy]
    if assumed and not _constant(means) and notes[0] is None:
        notes.append(
            f"{count} clusters are too few to estimate how similar their samples are: the interval assumes that they "
            "are very similar."
        )
    return MeanEstimate(
        n=n,
        trials=int(samples.flat.size),
        unscored=unscored,
        clusters=count,
        mean=mean,
        sd=sd,
        se=None if error is None else error.se,
        interval=interval,
        effective_n=effective,
        notes=tuple(note for note in notes if note is not None),
        reason=reason,
        effective_clusters=worth,
        heavy_tail=heavy is not None,
        df=None if error is None else error.df,
    )


def heavy_tail_note(values: arrays.FloatArray) -> str | None:
    """Return a note if a few values make up so much of the sum that no interval of the mean is reliable; else None."""
    found = _heavy_tail(values, 1.0)
    return found and f"{found}: the interval of the mean is not reliable; use the median or the 95th percentile."


def heavy_difference_note(*sides: arrays.FloatArray) -> str | None:
    """Return a note if a side's tail is so long that no interval of a difference of means is reliable; else None."""
    found = next(filter(None, (_heavy_tail(side, COMPARED_SHARE) for side in sides)), None)
    return found and f"{found}: a difference of means is not reliable."


def _heavy_tail(values: arrays.FloatArray, strictness: float) -> str | None:
    total = float(np.sum(values))
    if values.size < 3 or total <= 0 or float(np.min(values)) < 0:
        return None
    count = max(2, ceil(values.size / 20))
    share = float(np.partition(values, values.size - count)[-count:].sum()) / total
    # Of a handful of values two make up much of the sum even if all are equal.
    limit = strictness * next(share for least, share in HEAVY_SHARES if values.size >= least)
    if share <= max(limit, 3 * count / values.size):
        return None
    return f"The largest {count:,} of {values.size:,} values make up {share:.0%} of the sum"


def _unbounded_interval(
    means: arrays.FloatArray, groups: arrays.Clusters | None, error: ClusteredError, level: float
) -> arrays.Interval:
    """Return Student's t interval with one end moved outwards by an added value, as `mean_interval` explains."""
    mean = float(means.mean())
    half = arrays.t_quantile(arrays.two_sided(level), error.df) * error.se
    low, high = mean - half, mean + half
    totals, sizes = (means, np.ones(means.size)) if groups is None else (groups.totals(means), groups.sizes)
    centre, wider, farthest = with_one_farther(totals, sizes, mean)
    half = arrays.t_quantile(arrays.two_sided(level), wider.df) * wider.se
    low, high = (low, max(high, centre + half)) if farthest > 0 else (min(low, centre - half), high)
    method = f"t with {error.df:.4g} df" + ("" if groups is None else ", clustered error")
    return arrays.Interval(low, high, level, f"{method}, and one value farther out")


def quantile_interval(
    values: arrays.Samples, share: float, *, clusters: arrays.Labels | None = None, level: float = 0.95
) -> QuantileEstimate:
    """A quantile with the interval between two order statistics, whatever the distribution. Woodruff (1952).

    `values` are one per sample, or repeats of each, as for `mean_interval`. The number of values below the true
    quantile is binomial with rate `share`: the ends are the values whose ranks bound it in both tails at (1 - level)/2,
    by exact binomial tails. With repeats or clusters the tails are those of the effective number of values, which is
    the smaller of what `mean_interval` finds for the shares below the quantile and below the median. An end that the
    values cannot reach is None: the 95th percentile has no upper end below 72 values at 95%.
    """
    arrays.check_level(level)
    if not 0 < share < 1:
        raise ConfigurationError(f"the share below a quantile must lie between 0 and 1 (got {share})")
    samples = arrays.as_samples(values)
    array = np.sort(samples.flat)
    n, trials = int(np.count_nonzero(samples.counts)), array.size
    if trials == 0:
        return QuantileEstimate(0, 0, None, share, None, None, None, None, _NOTHING.reason)
    value = _at_share(array, share)
    tail = (1 - level) / 2
    if clusters is None and trials == n:
        first, last = arrays.binomial_ranks(tail, n, share)
        last += 1
        notes: tuple[str, ...] = ()
        count, worth, worth_n, method = None, None, float(n), "order statistics"
    else:
        # How similar the values of a cluster are shows at the median; few lie beyond a quantile near 0 or 1.
        middle = value if share == 0.5 else _at_share(array, 0.5)
        shares = [
            mean_interval(arrays.Repeats((samples.flat <= at).astype(np.float64), samples.counts), clusters=clusters)
            for at in dict.fromkeys((value, middle))
        ]
        notes, count, worth = shares[0].notes, shares[0].clusters, shares[0].effective_clusters
        df, effective = shares[0].df, min(one.effective_n or 0.0 for one in shares)
        if df is None or not effective:
            return QuantileEstimate(n, trials, count, share, value, None, None, None, shares[0].reason, notes, worth)
        # Fewer degrees of freedom stretch the tails as they stretch t against z.
        stretch = arrays.normal_quantile(arrays.two_sided(level)) / arrays.t_quantile(arrays.two_sided(level), df)
        worth_n = effective * stretch**2
        ends = exact_rate_interval(share, worth_n, level=level)
        # An end exists if `worth_n` independent values would have one: not all may lie on one side by chance.
        first = floor(ends.low * trials) if (1 - share) ** worth_n <= tail else 0
        last = ceil(ends.high * trials) if share**worth_n <= tail else trials + 1
        method = f"order statistics with effective n {effective:.1f}"
    low = float(array[first - 1]) if first >= 1 else None
    high = float(array[last - 1]) if last <= trials else None
    reason = None
    if low is None or high is None:
        few = "1 value does" if trials == 1 else f"{trials:,} values do"
        reason = f"{few} not bound this quantile on both sides."
    return QuantileEstimate(n, trials, count, share, value, low, high, method, reason, notes, worth, worth_n)


def _at_share(ordered: arrays.FloatArray, share: float) -> float:
    """Return a quantile of ordered values, as numpy's "inverted_cdf", which would put them in order again."""
    return float(ordered[max(0, ceil(ordered.size * share - 1))])


def _bounded_interval(
    samples: arrays.Repeats,
    groups: arrays.Clusters | None,
    error: ClusteredError | None,
    bounds: tuple[float, float],
    level: float,
    *,
    rate: bool,
) -> tuple[arrays.Interval, float, bool]:
    """Wilson's interval of the mean as a share of its range, and the number of independent trials it assumes.

    The last value says whether that number comes from an assumed correlation within clusters.
    """
    n = samples.counts.size
    low, high = bounds
    means = (samples.means - low) / (high - low)
    share = min(1.0, max(0.0, float(means.mean())))
    if groups is None and rate and samples.single:
        exact = rate_interval(round(float(means.sum())), n, level=level)
        if isinstance(exact, arrays.Interval):
            return exact, float(n), False
    if error is None:
        # A lone sample has repeats but no sample-to-sample spread: it is worth one trial.
        z = arrays.normal_quantile(arrays.two_sided(level))
        return wilson_effective(share, n, quantile=z, level=level, method="Wilson score"), float(n), False
    se = error.se / (high - low)
    # Repeats of equal worth: n K when all have K, less when uneven, as samples weigh the same however often repeated.
    # A score in [0, 1] with mean m varies at most as much as a coin with rate m, and may vary less.
    most = n * n / float(np.sum(1 / samples.counts)) if rate else np.inf
    effective = min(most, share * (1 - share) / (se * se) if se > 1e-12 else np.inf)
    assumed = False
    if groups is None:
        sizes, totals = np.ones(n), means
        few = few_imperfect(totals, sizes, n, rate=False) or not np.isfinite(effective)
        if few:
            effective = min(effective, n)
        units = "scores" if samples.single else "repeats"
    else:
        sizes, totals = groups.sizes, groups.totals(means)
        few = few_imperfect(totals, sizes, error.effective, rate=rate) or not np.isfinite(effective)
        if few:
            typical = float(np.sum(sizes * sizes)) / n
            most = n / (1 + ASSUMED_CORRELATION * (typical - 1))
            assumed = most < effective
            effective = min(effective, most)
        if _constant(means):
            effective = min(effective, error.effective)
        units = "clusters" if samples.single else "clusters and repeats"
    method = f"Wilson score with effective n {effective:.1f} from {units}, t with {error.df:.4g} df"
    t = arrays.t_quantile(arrays.two_sided(level), error.df)
    found = wilson_effective(share, effective, quantile=t, level=level, method=method)
    if not few:
        ends = [with_one_more(totals, sizes, end, level) for end in (0, 1)]
        found = replace(found, low=min(found.low, ends[0].low), high=max(found.high, ends[1].high))
    return found, float(effective), assumed


def with_one_more(
    totals: arrays.FloatArray, sizes: arrays.FloatArray, value: float, level: float, *, size: float | None = None
) -> arrays.Interval:
    """Return the t interval of the mean of these samples (or clusters) and one more at an end of the range.

    The one more has the mean `size`, unless it is given.
    """
    size = float(sizes.mean()) if size is None else size
    totals, sizes = np.append(totals, value * size), np.append(sizes, size)
    error = totals_error(totals, sizes)
    half = arrays.t_quantile(arrays.two_sided(level), error.df) * error.se
    return _clipped(float(totals.sum() / sizes.sum()), half, (0.0, 1.0), level, "t")


def few_imperfect(totals: arrays.FloatArray, sizes: arrays.FloatArray, effective: float, *, rate: bool) -> bool:
    """Whether so few samples or clusters are imperfect, or above zero, that the observed spread is not trusted.

    `totals` are their sums of shares of the range, and `effective` is what they are worth in clusters of one size.
    """
    imperfect, above = totals < sizes, totals > 0
    fewest = min(np.count_nonzero(imperfect), np.count_nonzero(above))
    worth = min(_effective_number(sizes[imperfect]), _effective_number(sizes[above]))
    few = bool(fewest < (FEW_IMPERFECT if rate else min(FEW_IMPERFECT, sizes.size)))
    return few or worth < min(FEW_LARGE_IMPERFECT, effective / 2)


def _effective_number(sizes: arrays.FloatArray) -> float:
    """Return how many clusters of one size are worth as much as these."""
    return float(sizes.sum()) ** 2 / float(np.sum(sizes * sizes)) if sizes.size else 0.0


def _clipped(
    mean: float, half: float, bounds: tuple[float, float] | None, level: float, method: str
) -> arrays.Interval:
    low, high = (-np.inf, np.inf) if bounds is None else bounds
    return arrays.Interval(float(max(low, mean - half)), float(min(high, mean + half)), level, method)


def plain_se(array: arrays.FloatArray) -> float:
    """`sem` of a checked array; scipy's own costs a millisecond a call."""
    return float(array.std(ddof=1)) / sqrt(array.size)


def _clustered_se(array: arrays.FloatArray, groups: arrays.Clusters, *, correction: bool = True) -> float:
    totals = groups.totals(array - array.mean())
    variance = float(np.sum(totals * totals)) / array.size**2
    return sqrt(variance * groups.count / (groups.count - 1) if correction else variance)


def _constant(array: arrays.FloatArray) -> bool:
    """Whether the values are equal but for rounding, which averaging repeats may leave."""
    return bool(np.ptp(array) <= 1e-12 * max(1.0, float(np.max(np.abs(array)))))
