"""A mean made more precise by what earlier runs measured on the same samples.

Earlier results enter as a control variate and never as data: if they say nothing, or something wrong, about the
samples, the estimate has the same expectation and only the gain is lost.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats.intervals import (
    FEW_IMPERFECT,
    MeanEstimate,
    few_imperfect,
    mean_interval,
    totals_error,
    wilson_effective,
)

FEWEST_KNOWN = 20
"""Below this many samples (or clusters) with a history the slope is too poorly known to gain anything."""

LEAST_GAIN = 1.05
"""Below this ratio of squared widths the plain figure is kept."""

DRAW_TEST = 0.001
"""Below this p the samples of the run are no random part of those with a history."""

FEW_RESIDUALS = 4
"""Below this many results that the history did not foresee, the spread that is left is not trusted."""

NEAR = 0.1
"""What lies this near to an end of the range, as a share of it, has been seen at that end."""

_FOLDS = 10


@dataclass(frozen=True, slots=True)
class HistoryMean:
    """A mean adjusted by the history of its samples, beside the plain one; `reason` says why the two are equal.

    `plain_samples` is the number of samples that would be as precise without a history. `known` samples of the run have
    a history, and `pool` samples altogether, those of the run among them. `slope` is what a sample's score rises by
    with its history.
    """

    plain: MeanEstimate
    mean: float | None
    se: float | None
    interval: arrays.Interval | None
    plain_samples: float
    known: int
    pool: int
    slope: float
    reason: str | None


def history_mean(
    values: arrays.Samples,
    history: arrays.Values,
    pool: arrays.Values,
    *,
    clusters: arrays.Labels | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    level: float = 0.95,
) -> HistoryMean:
    """Mean over samples, adjusted by how easy earlier runs found them. Deng et al. (2013), Angelopoulos et al. (2023).

    `values` are the scores of the run, as for `mean_interval`. `history` has what earlier runs measured on each of
    these samples (NaN: nothing), `pool` the same of samples that the run does not have. The run's samples with a
    history must be a random part of all that have one. `clusters` are those of the run's samples, then of the pool's.

    theta = mean(y - b c), c = x - mean of x over all N samples with a history, 0 for a sample without one. The slope b
    of a tenth of the samples (or clusters) comes from the other nine, so that theta is unbiased whatever x is. With the
    pull of each sample (or the sum over a cluster) on theta, (y - b c)/n in the run and b x/N in the pool,
    SE^2 is the sum of their squares about the mean: var(y - b x)/n + b^2 var(x)/N. The interval is Wilson's with
    t and n_eff = m(1-m)/SE^2, m being theta as a share of the range. An end of the range near which fewer than 10
    samples (or clusters) lie, or both if the history foresaw almost every result, is at least as far out as that of t
    for one more sample there.

    Plain figures are kept, with a `reason`: below 20 samples (or clusters) with a history; if the run has all samples
    of the pool; while few samples are imperfect or few are above zero, by the rules of `mean_interval`; if the run's
    samples are no random part of the pool (p below .001); and if the interval would be worth less than 5% more samples.
    """
    arrays.check_level(level)
    samples = arrays.as_samples(values)
    x, rest = np.asarray(history, dtype=np.float64), arrays.as_values(pool, "pool")
    n = samples.counts.size
    if x.shape != (n,):
        raise ConfigurationError(f"history must have one number for each of the {n} samples (got {x.shape})")
    arrays.check_bounds(samples.flat, bounds)
    plain = mean_interval(samples, clusters=None if clusters is None else clusters[:n], bounds=bounds, level=level)
    scored = samples.counts > 0
    codes = None if clusters is None else arrays.as_clusters(clusters, n + rest.size).codes
    if codes is not None:
        codes = np.concatenate([codes[:n][scored], codes[n:]])
    low, high = bounds
    y, x = (samples.only(scored).means - low) / (high - low), x[scored]
    data = _Run(y, x, rest, *_units(codes, y.size, rest.size))
    reason = plain.reason or data.why_plain(plain, rate=samples.binary and bounds == (0.0, 1.0))
    if reason is None and plain.interval is not None:
        found = data.adjusted(level)
        gain = 0.0 if found is None else (plain.interval.width / (high - low) / found.interval.width) ** 2
        if found is not None and gain >= LEAST_GAIN:
            ends = [low + end * (high - low) for end in (found.interval.low, found.interval.high)]
            return HistoryMean(
                plain,
                low + found.mean * (high - low),
                found.se * (high - low),
                arrays.Interval(ends[0], ends[1], level, found.interval.method),
                plain.n * gain,
                data.known_count,
                data.pool_size,
                found.slope * (high - low),
                None,
            )
        reason = "The history says too little about these results to make them more precise."
    return HistoryMean(
        plain, plain.mean, plain.se, plain.interval, float(plain.n), data.known_count, data.pool_size, 0.0, reason
    )


@dataclass(frozen=True, slots=True)
class _Adjustment:
    mean: float
    se: float
    slope: float
    interval: arrays.Interval


def _units(codes: arrays.IntArray | None, n: int, more: int) -> tuple[arrays.IntArray, arrays.IntArray, int]:
    """Return the number of the cluster of each sample of the run and of the pool, and how many clusters the run has.

    Those of the run come first.
    """
    if codes is None:
        return np.arange(n, dtype=np.intp), np.arange(n, n + more, dtype=np.intp), n
    own = np.unique(codes[:n])
    order = np.concatenate([own, np.setdiff1d(codes[n:], own)])
    places = np.empty(int(codes.max(initial=-1)) + 1, dtype=np.intp)
    places[order] = np.arange(order.size)
    return places[codes[:n]], places[codes[n:]], own.size


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Scores of a run as shares of their range, the history of its samples and of others, and the cluster of each."""

    y: arrays.FloatArray
    x: arrays.FloatArray
    rest: arrays.FloatArray
    units: arrays.IntArray
    rest_units: arrays.IntArray
    count: int

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.isfinite(self.x)

    @property
    def known_count(self) -> int:
        return int(np.count_nonzero(self.known))

    @property
    def pool_size(self) -> int:
        return self.known_count + self.rest.size

    @property
    def sizes(self) -> arrays.FloatArray:
        """The number of samples of the run in each of its clusters."""
        return np.bincount(self.units, minlength=self.count).astype(np.float64)

    def totals(self, values: arrays.FloatArray) -> arrays.FloatArray:
        return np.bincount(self.units, weights=values, minlength=self.count).astype(np.float64)

    def why_plain(self, plain: MeanEstimate, *, rate: bool) -> str | None:
        """Return why the history cannot be used, if it cannot."""
        known = np.unique(self.units[self.known]).size
        if known < FEWEST_KNOWN:
            what = "samples" if plain.clusters is None else "clusters"
            return f"{known} {what} of the run have a history; it takes {FEWEST_KNOWN}."
        if not self.rest.size:
            return "The run has all samples with a history: there is nothing to add."
        few = few_imperfect(self.totals(self.y), self.sizes, plain.effective_clusters or float(self.count), rate=rate)
        if few:
            return "Too few samples differ from the others to trust the spread of these results."
        own, pool = self.x[self.known], np.concatenate([self.x[self.known], self.rest])
        variance = float(pool.var()) * (1 / own.size - 1 / pool.size)
        if variance <= 1e-24:
            return "The history of all samples is the same."
        typical = float(np.sum(self.sizes**2)) / self.y.size  # At worst, samples of a cluster have one history.
        z = abs(float(own.mean() - pool.mean())) / sqrt(variance * typical)
        if 2 * arrays.normal_tail(z) < DRAW_TEST:
            return "The samples of the run are no random part of those with a history."
        return None

    def slopes(self) -> arrays.FloatArray:
        """Return the slope for each sample, from the samples of the other folds."""
        folds = min(_FOLDS, self.count)
        # A fixed order that has nothing to do with that of the samples.
        fold = (np.random.default_rng(0).permutation(self.count) % folds)[self.units]
        known, slopes = self.known, np.zeros(self.y.size)
        for one in range(folds):
            other = known & (fold != one)
            x = self.x[other] - self.x[other].mean()
            spread = float(x @ x)
            slopes[fold == one] = float(x @ self.y[other]) / spread if spread > 1e-24 else 0.0
        return slopes

    def adjusted(self, level: float) -> _Adjustment | None:
        """Return the adjusted mean; None if it lies outside of the range, or its error is 0."""
        known, n = self.known, self.y.size
        pool = np.concatenate([self.x[known], self.rest])
        slopes = np.where(known, self.slopes(), 0.0)
        scores = self.y - slopes * np.where(known, self.x - pool.mean(), 0.0)
        mean, weight = float(scores.mean()), float(slopes.sum()) / n
        totals, sizes = self.totals(scores), self.sizes
        error = totals_error(totals, sizes)
        pulls = np.zeros(int(max(self.units.max(), self.rest_units.max())) + 1)
        pulls[: self.count] = (totals - mean * sizes) / n / np.sqrt(1 - sizes / n)
        where = np.concatenate([self.units[known], self.rest_units])
        pulls += np.bincount(where, weights=weight * (pool - pool.mean()) / pool.size, minlength=pulls.size)
        squared, df = float(pulls @ pulls), max(1.0, error.df - 1)
        if not 0 < mean < 1 or squared <= 1e-24:
            return None
        method = f"control variate, Wilson score with effective n {mean * (1 - mean) / squared:.1f}, t with {df:.4g} df"
        t = arrays.t_quantile(arrays.two_sided(level), df)
        found = wilson_effective(mean, mean * (1 - mean) / squared, quantile=t, level=level, method=method)
        trusted = _effective_count(totals - mean * sizes) >= FEW_RESIDUALS
        seen = self.totals(self.y) / sizes  # Distances from the ends of the range.
        ends = [found.low, found.high]
        for end, distance in enumerate((seen, 1 - seen)):
            if not trusted or np.count_nonzero(distance <= NEAR) < FEW_IMPERFECT:
                # A surprise is a result at one end of the range after a history at the other.
                history = 0.0 if trusted else weight * (pool.mean() - (pool.max(), pool.min())[end])
                more = end + (min(0.0, history) if end == 0 else max(0.0, history))
                reached = _end_with_one_more(totals, sizes, end, more, max(0.0, squared - error.se**2), level)
                ends[end] = min(1.0, max(found.high, reached)) if end else max(0.0, min(found.low, reached))
        found = arrays.Interval(ends[0], ends[1], level, method)
        return _Adjustment(mean, sqrt(squared), weight * n / self.known_count, found)


def _effective_count(residuals: arrays.FloatArray) -> float:
    """Return how many equal residuals would have this spread and this kurtosis."""
    squares = residuals * residuals
    return float(squares.sum()) ** 2 / float(squares @ squares)


def _end_with_one_more(
    totals: arrays.FloatArray, sizes: arrays.FloatArray, end: int, value: float, added: float, level: float
) -> float:
    """Return an end of the t interval of these samples (or clusters) and one more with this value."""
    size = float(sizes.mean())
    totals, sizes = np.append(totals, value * size), np.append(sizes, size)
    error = totals_error(totals, sizes)
    half = arrays.t_quantile(arrays.two_sided(level), max(1.0, error.df - 1)) * sqrt(error.se**2 + added)
    return float(totals.sum() / sizes.sum()) + (half if end else -half)
