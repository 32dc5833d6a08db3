"""Rankings of several systems, and means over suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, sqrt

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats import intervals
from fairtrial.stats.resampling import CELLS, RESAMPLE_CLUSTERS_UP_TO, RESAMPLE_UP_TO, draws_for


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """A weighted mean of the means of suites; `reason` explains a value of None.

    `weights` sum to 1. `se` is sqrt(sum(w^2 SE^2)) and `df` its degrees of freedom; `n` counts samples of all suites.
    """

    mean: float | None
    se: float | None
    df: float | None
    interval: arrays.Interval | None
    weights: tuple[float, ...]
    n: int
    reason: str | None = None


def weighted_mean(
    estimates: Sequence[intervals.MeanEstimate],
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
    arrays.check_level(level)
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
            raise ConfigurationError(f"the intervals of all suites must be at level {level:g} (got {interval.level:g})")
    variance = float(sum(error**2 for error, _ in errors))
    low = mean - sqrt(sum((share * (value - interval.low)) ** 2 for share, value, interval in ends))
    high = mean + sqrt(sum((share * (interval.high - value)) ** 2 for share, value, interval in ends))
    df = variance**2 / float(sum(error**4 / own for error, own in errors)) if variance > 0 else None
    if len(used) == 1:
        return WeightedMean(mean, sqrt(variance), df, ends[0][2], tuple(shares.tolist()), n)
    if df is not None:
        half = arrays.t_quantile(arrays.two_sided(level), df) * sqrt(variance)
        low, high = min(low, mean - half), max(high, mean + half)
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    method = "intervals of the suites combined" if df is None else f"t with {df:.4g} df and intervals of the suites"
    return WeightedMean(mean, sqrt(variance), df, arrays.Interval(low, high, level, method), tuple(shares.tolist()), n)


def normalize_weights(weights: Sequence[float] | None, count: int) -> arrays.FloatArray:
    """Return weights that sum to 1; by default equal ones."""
    if count == 0:
        raise ConfigurationError("a weighted mean needs at least one suite")
    if weights is None:
        return np.full(count, 1 / count)
    array = arrays.as_values(weights, "weights")
    if array.size != count:
        raise ConfigurationError(f"there must be one weight for each of {count} suites (got {array.size})")
    if array.min() < 0 or array.sum() <= 0:
        raise ConfigurationError(f"weights must be at least 0, and one of them above 0 (got {array.tolist()})")
    return np.asarray(array / array.sum(), dtype=np.float64)


type BoolArray = NDArray[np.bool_]

_GROUPED = 4  # Units are drawn by kind if there are this many times fewer kinds than units.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class SystemScores:
    """The scores of several systems on the samples of one suite: a row for each sample, a column for each system.

    With repeats, a cell is their mean and `repeated` is True. `clusters` names the cluster of each sample; `bounds` is
    the range of the metric, None if it has none.
    """

    scores: NDArray[np.float64]
    clusters: arrays.Labels | None = None
    bounds: tuple[float, float] | None = (0.0, 1.0)
    repeated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SimultaneousDifferences:
    """Differences `first` - `second` of systems whose intervals hold together at the level.

    `p_values` are adjusted: at most 1 - level exactly if the interval leaves out 0. Where the data determine no
    interval, its ends are infinite and p is 1. `critical` is the number of standard errors to either side.
    """

    first: arrays.IntArray
    second: arrays.IntArray
    differences: arrays.FloatArray
    low: arrays.FloatArray
    high: arrays.FloatArray
    p_values: arrays.FloatArray
    critical: float


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """The systems in order, with the uncertainty of that order.

    `means` are means over samples, weighted over suites. `ranks` count from 1 for the best; equal means share the
    better rank. With probability `level` every true rank lies between `best_ranks` and `worst_ranks`. `best_chances`
    are the shares of resamples in which a system has the best mean. `against` holds the differences from the baseline
    alone, which are fewer, so their intervals are narrower than the same ones in `pairs`.
    """

    n: int
    clusters: int | None
    means: arrays.FloatArray
    ranks: arrays.IntArray
    best_ranks: arrays.IntArray
    worst_ranks: arrays.IntArray
    best_chances: arrays.FloatArray
    pairs: SimultaneousDifferences
    against: SimultaneousDifferences | None
    level: float
    draws: int
    method: str
    notes: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Whether there are enough clusters to determine ranks."""
        return not self.notes


def rank_systems(
    *suites: SystemScores | NDArray[np.float64],
    weights: Sequence[float] | None = None,
    higher_is_better: bool = True,
    baseline: int | None = None,
    level: float = 0.95,
    draws: int | None = None,
    seed: int = 0,
) -> Ranking | arrays.Undefined:
    """Rank systems by their means with rank intervals that hold together. Mogstad and others (2024).

    A system is better than another if the interval of their difference leaves out 0, in intervals that hold for all
    pairs together. Its rank is at least 1 + the number of better systems, and at most m - the number of worse ones.

    The intervals are centre -+ c SE, with the clustered error of the difference. c is the quantile of the largest
    |t| over all pairs (max-T; Westfall and Young 1993) when whole samples, or clusters, are resampled with the scores
    of all systems together, each t with the error of its own resample; it is at least the quantile for normal
    differences with the observed covariance and degrees of freedom, which alone is used above 5,000 samples or 1,000
    clusters. Pairs of single pass/fail outcomes get two pseudo-pairs with the largest possible difference, one each way
    (Bonett and Price 2012); so do other pairs with a range while fewer than 10 samples differ and none has repeats, and
    those without spread. Differences from `baseline` alone have a c of their own (as Dunnett 1955).

    Several suites are resampled each on its own. Means and errors are then sum(w mean) and sqrt(sum(w^2 SE^2)), with
    `weights` scaled to sum to 1; by default equal ones. With too few clusters, or a long tail, no rank is determined,
    as `notes` say.
    """
    arrays.check_level(level)
    tables = [suite if isinstance(suite, SystemScores) else SystemScores(suite) for suite in suites]
    shares = normalize_weights(weights, len(tables))
    systems = _count_systems(tables)
    pairs = SystemPairs.of(systems, baseline)
    strata: list[_Stratum] = []
    for table, share in zip(tables, shares.tolist(), strict=True):
        stratum = _stratum(table, share, pairs)
        if isinstance(stratum, arrays.Undefined):
            return stratum
        strata.append(stratum)
    estimates = _combined(strata, pairs)
    units = sum(stratum.units for stratum in strata)
    wanted = draws_for(draws, units)
    maxima = [normal_maxima(estimates, pairs, higher_is_better, wanted, seed)]
    clustered = any(table.clusters is not None for table in tables)
    resampled = units <= (RESAMPLE_CLUSTERS_UP_TO if clustered else RESAMPLE_UP_TO)
    if resampled:
        maxima.append(_resampled_maxima(strata, estimates, pairs, higher_is_better, wanted, seed))
    notes = tuple(dict.fromkeys(stratum.note for stratum in strata if stratum.note is not None))
    return ranking_of(
        estimates,
        pairs,
        maxima,
        higher_is_better=higher_is_better,
        level=level,
        n=sum(stratum.n for stratum in strata),
        clusters=units if clustered else None,
        draws=wanted,
        method="max-T of a joint bootstrap" if resampled else "max-T of normal differences",
        notes=notes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SystemPairs:
    """All pairs of systems, and the families of pairs whose intervals hold together: all, and those of a baseline."""

    systems: int
    first: arrays.IntArray
    second: arrays.IntArray
    families: tuple[BoolArray, ...]
    baseline: int | None

    @classmethod
    def of(cls, systems: int, baseline: int | None) -> SystemPairs:
        """All pairs of `systems` systems."""
        if systems < 2:
            raise ConfigurationError(f"a ranking needs at least two systems (got {systems})")
        if baseline is not None and not 0 <= baseline < systems:
            raise ConfigurationError(f"baseline must be the number of a system, 0 to {systems - 1} (got {baseline})")
        first, second = np.triu_indices(systems, 1)
        families = [np.ones(first.size, dtype=np.bool_)]
        if baseline is not None:
            families.append((first == baseline) | (second == baseline))
        return cls(systems, first, second, tuple(families), baseline)

    def differences(self, values: arrays.FloatArray) -> arrays.FloatArray:
        """first - second, along the last axis."""
        return np.asarray(values[..., self.first] - values[..., self.second], dtype=np.float64)

    def maxima(self, statistics: arrays.FloatArray) -> list[arrays.FloatArray]:
        """The largest of each draw's statistics, for each family."""
        return [statistics[:, family].max(axis=1) for family in self.families]


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """The means of systems with their covariance, and of each pair the centre and error of its interval."""

    means: arrays.FloatArray
    covariance: arrays.FloatArray
    centres: arrays.FloatArray
    errors: arrays.FloatArray
    df: float

    def spreads(self, pairs: SystemPairs) -> arrays.FloatArray:
        """The errors of differences by the covariance alone; 0 for pairs whose differences are all equal."""
        own = np.diag(self.covariance)
        variances = own[pairs.first] + own[pairs.second] - 2 * self.covariance[pairs.first, pairs.second]
        return np.sqrt(np.where(variances > _ROUNDING * self.errors**2, variances, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Maxima:
    """Of each draw the largest |t|, for each family of pairs; and the share of draws in which each system is best."""

    largest: tuple[arrays.FloatArray, ...]
    best: arrays.FloatArray


def normal_maxima(estimates: Estimates, pairs: SystemPairs, higher_is_better: bool, draws: int, seed: int) -> Maxima:
    """Draws of normal estimates with the observed covariance, over the root of a chi-square: multivariate t.

    Every pair has a spread of 1, with pseudo-units or without. A pair that the data show no spread of, so that nothing
    is known of how it goes together with the others, is drawn on its own.
    """
    rng = np.random.default_rng([seed, 1])
    values, vectors = np.linalg.eigh(estimates.covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    spreads = estimates.spreads(pairs)
    alone = np.flatnonzero((spreads == 0) & (estimates.errors > 0))
    largest: list[list[arrays.FloatArray]] = []
    best = np.zeros(pairs.systems)
    for size in _chunks(draws, max(pairs.systems, pairs.first.size)):
        drawn = rng.standard_normal((size, pairs.systems)) @ root.T
        scale = np.sqrt(rng.chisquare(estimates.df, (size, 1)) / estimates.df) if np.isfinite(estimates.df) else 1.0
        found = _ratios(pairs.differences(drawn), spreads, spreads)
        found[:, alone] = np.abs(rng.standard_normal((size, alone.size)))
        largest.append(pairs.maxima(found / scale))
        best += _count_best(drawn / scale + estimates.means, higher_is_better)
    return Maxima(tuple(np.concatenate(family) for family in zip(*largest, strict=True)), best / draws)


def ranking_of(
    estimates: Estimates,
    pairs: SystemPairs,
    maxima: Sequence[Maxima],
    *,
    higher_is_better: bool,
    level: float,
    n: int,
    clusters: int | None,
    draws: int,
    method: str,
    notes: tuple[str, ...],
) -> Ranking:
    """Ranks and simultaneous intervals from estimates and from the draws that tell how far off they may be.

    Where there are several kinds of draws, the widest intervals are taken; the last kind says who is best.
    """
    every = _intervals(estimates, pairs, [one.largest[0] for one in maxima], level)
    sign = 1 if higher_is_better else -1
    better = np.zeros((pairs.systems, pairs.systems), dtype=np.bool_)
    if not notes:
        low, high = (every.low, every.high) if sign > 0 else (-every.high, -every.low)
        better[pairs.first, pairs.second] = low > 0
        better[pairs.second, pairs.first] = high < 0
    means = estimates.means
    # Means that differ by rounding only are tied, unless their intervals tell them apart.
    ahead = (sign * (means[None, :] - means[:, None]) > _ROUNDING * np.maximum(1.0, np.abs(means))) | better.T
    against = None
    if pairs.baseline is not None:
        against = _from_baseline(
            _intervals(estimates, pairs, [one.largest[1] for one in maxima], level), pairs.families[1], pairs.baseline
        )
    return Ranking(
        n=n,
        clusters=clusters,
        means=means,
        ranks=(1 + ahead.sum(axis=1)).astype(np.intp),
        best_ranks=(1 + better.sum(axis=0)).astype(np.intp),
        worst_ranks=(pairs.systems - better.sum(axis=1)).astype(np.intp),
        best_chances=maxima[-1].best,
        pairs=every,
        against=against,
        level=level,
        draws=draws,
        method=method,
        notes=notes,
    )


def _intervals(
    estimates: Estimates, pairs: SystemPairs, largest: Sequence[arrays.FloatArray], level: float
) -> SimultaneousDifferences:
    critical = max(_upper(maxima, level) for maxima in largest)
    statistics = np.divide(
        np.abs(estimates.centres), estimates.errors, out=np.zeros_like(estimates.errors), where=estimates.errors > 0
    )
    p = np.zeros(statistics.size)
    for maxima in largest:
        ordered = np.sort(maxima)
        beyond = ordered.size - np.searchsorted(ordered, statistics, "left")
        p = np.maximum(p, (1 + beyond) / (1 + ordered.size))
    known = estimates.errors > 0
    half = np.full(known.shape, np.inf)
    half[known] = critical * estimates.errors[known]
    return SimultaneousDifferences(
        first=pairs.first,
        second=pairs.second,
        differences=pairs.differences(estimates.means),
        low=estimates.centres - half,
        high=estimates.centres + half,
        p_values=np.where(known, p, 1.0),
        critical=critical,
    )


def _upper(maxima: arrays.FloatArray, level: float) -> float:
    """The value beyond which a statistic has an adjusted p of at most 1 - level; infinite if the draws are too few."""
    reached = floor((1 - level) * (maxima.size + 1) + 1e-9)
    return float(np.partition(maxima, maxima.size - reached)[maxima.size - reached]) if reached else np.inf


def _from_baseline(found: SimultaneousDifferences, family: BoolArray, baseline: int) -> SimultaneousDifferences:
    """The pairs of a family, turned so that each is another system's difference from the baseline."""
    turned = found.first[family] == baseline
    sign = np.where(turned, -1.0, 1.0)
    low, high = found.low[family], found.high[family]
    return SimultaneousDifferences(
        first=np.where(turned, found.second[family], found.first[family]),
        second=np.full(turned.size, baseline, dtype=np.intp),
        differences=sign * found.differences[family],
        low=np.where(turned, -high, low),
        high=np.where(turned, -low, high),
        p_values=found.p_values[family],
        critical=found.critical,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Stratum:
    """One suite. Units are samples, or clusters with the sums of their scores, which are shifted to lie around 0."""

    weight: float
    n: int
    totals: arrays.FloatArray  # A row for each unit, a column for each system.
    sizes: arrays.FloatArray
    shift: float
    pseudo: arrays.FloatArray  # Of each pair, the difference of the two pseudo-units that are added; 0 for none.
    note: str | None

    @property
    def units(self) -> int:
        """How many units there are."""
        return int(self.sizes.size)

    def moments(self, pairs: SystemPairs) -> arrays.FloatArray:
        """Of each unit, all that is summed up in a resample: see `_Sums`."""
        rows, columns = np.triu_indices(pairs.systems)
        products = self.totals[:, rows] * self.totals[:, columns]
        sizes = self.sizes[:, None]
        return np.hstack([self.totals, self.totals * sizes, sizes, sizes * sizes, products])

    def width(self, pairs: SystemPairs) -> int:
        """How many numbers one draw takes."""
        return int(max(self.units, self.moments(pairs).shape[1]))

    def resample(
        self, pairs: SystemPairs, sizes: Sequence[int], rng: np.random.Generator
    ) -> Iterator[arrays.FloatArray]:
        """Sums of moments over units drawn with replacement, in chunks of draws of these sizes."""
        moments, units = self.moments(pairs), self.units
        rows = np.column_stack([self.totals, self.sizes])
        _, places, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
        grouped = places.size * _GROUPED <= units
        if grouped:  # Equal units are interchangeable: how often each kind is drawn is multinomial.
            moments = moments[places]
        for size in sizes:
            if grouped:
                drawn = rng.multinomial(units, counts / units, size=size)
            else:
                chosen = rng.integers(0, units, (size, units)) + np.arange(size)[:, None] * units
                drawn = np.bincount(chosen.reshape(-1), minlength=size * units).reshape(size, units)
            yield drawn.astype(np.float64) @ moments

    def pair_estimates(
        self, sums: arrays.FloatArray, pairs: SystemPairs
    ) -> tuple[arrays.FloatArray, arrays.FloatArray]:
        """The centre of each pair's difference and its variance, from sums of moments."""
        m = pairs.systems
        size, squares = sums[:, 2 * m : 2 * m + 1], sums[:, 2 * m + 1 : 2 * m + 2]
        place = np.zeros((m, m), dtype=np.intp)
        place[np.triu_indices(m)] = np.arange(m * (m + 1) // 2) + 2 * m + 2
        own = sums[:, place[np.arange(m), np.arange(m)]]
        spread = own[:, pairs.first] + own[:, pairs.second] - 2 * sums[:, place[pairs.first, pairs.second]]
        added = self.pseudo > 0
        typical = float(self.sizes.mean())
        total = size + 2 * typical * added
        centre = pairs.differences(sums[:, :m]) / total
        residuals = spread - 2 * centre * pairs.differences(sums[:, m : 2 * m]) + centre * centre * squares
        residuals += added * typical**2 * ((self.pseudo - centre) ** 2 + (self.pseudo + centre) ** 2)
        scale = np.where(added, 1.0, self.units / (self.units - 1))
        variance = np.maximum(residuals, 0.0) * scale / (total * total)
        # What is left of equal differences is rounding.
        variance[variance <= 1e-24 * np.maximum(1.0, spread)] = 0.0
        return centre, variance

    @property
    def means(self) -> arrays.FloatArray:
        """The mean of each system."""
        return np.asarray(self.totals.sum(axis=0) / self.n + self.shift, dtype=np.float64)


def _stratum(table: SystemScores, weight: float, pairs: SystemPairs) -> _Stratum | arrays.Undefined:
    scores = np.asarray(table.scores, dtype=np.float64)
    arrays.as_values(scores.reshape(-1), "scores")
    arrays.check_bounds(scores.reshape(-1), table.bounds, "scores")
    n = scores.shape[0]
    if n < 2:
        return arrays.Undefined("A ranking needs at least two samples that all systems have.")
    shift = float(scores.mean())
    note = None if table.bounds is not None else intervals.heavy_difference_note(*scores.T)
    totals, sizes = scores - shift, np.ones(n)
    if table.clusters is not None:
        groups = arrays.as_clusters(table.clusters, n)
        if groups.count < 2:
            return arrays.Undefined("All samples are in one cluster, so the variance between clusters is not known.")
        sizes = groups.sizes
        totals = np.column_stack([groups.totals(column) for column in (scores - shift).T])
        error = intervals.totals_error(totals[:, 0], sizes)
        note = intervals.few_clusters_note(groups.count, error.effective) or note
    apart = pairs.differences(scores)
    apart[np.abs(apart) <= _ROUNDING * max(1.0, float(np.max(np.abs(scores))))] = 0.0
    pseudo = np.zeros(pairs.first.size)
    if table.bounds is not None:
        largest = table.bounds[1] - table.bounds[0]
        single = not table.repeated
        verdicts = single and table.clusters is None and bool(np.all((scores == 0) | (scores == 1)))
        few = np.count_nonzero(apart, axis=0) < intervals.FEW_IMPERFECT
        constant = np.ptp(apart, axis=0) == 0
        pseudo = np.where(verdicts | (single & few) | constant, largest, 0.0)
    return _Stratum(weight, n, totals, sizes, shift, pseudo, note)


def _combined(strata: Sequence[_Stratum], pairs: SystemPairs) -> Estimates:
    """Weighted sums over suites; degrees of freedom by Satterthwaite (1946), those of the pair with the fewest."""
    m = pairs.systems
    means, covariance = np.zeros(m), np.zeros((m, m))
    centres, variances, per_df = (np.zeros(pairs.first.size) for _ in range(3))
    for stratum in strata:
        share = stratum.sizes / stratum.n
        residuals = stratum.totals - stratum.totals.sum(axis=0) * share[:, None]
        own = (residuals / (1 - share)[:, None]).T @ residuals / stratum.n**2
        df = intervals.totals_error(stratum.totals[:, 0], stratum.sizes).df
        centre, variance = (one[0] for one in stratum.pair_estimates(stratum.moments(pairs).sum(axis=0)[None], pairs))
        plain = own[pairs.first, pairs.first] + own[pairs.second, pairs.second] - 2 * own[pairs.first, pairs.second]
        plain = np.maximum(plain, 0.0)  # Rounding may leave a little less than nothing.
        # Without pseudo-units the clustered error, which allows for clusters of unequal size.
        variance = stratum.weight**2 * np.where((stratum.pseudo > 0) | (variance == 0), variance, plain)
        means += stratum.weight * stratum.means
        covariance += stratum.weight**2 * own
        centres += stratum.weight * centre
        variances += variance
        per_df += variance**2 / df
    known = per_df > 0
    df = float(np.min(variances[known] ** 2 / per_df[known])) if known.any() else np.inf
    return Estimates(means, covariance, centres, np.sqrt(variances), df)


def _resampled_maxima(
    strata: Sequence[_Stratum], estimates: Estimates, pairs: SystemPairs, higher_is_better: bool, draws: int, seed: int
) -> Maxima:
    """Draws of whole units with the scores of all systems, each suite on its own."""
    width = max(max(stratum.width(pairs) for stratum in strata), pairs.first.size)
    sizes = list(_chunks(draws, width))
    streams = [
        stratum.resample(pairs, sizes, np.random.default_rng([seed, 2, place])) for place, stratum in enumerate(strata)
    ]
    largest: list[list[arrays.FloatArray]] = []
    best = np.zeros(pairs.systems)
    for size, *chunk in zip(sizes, *streams, strict=True):
        means = np.zeros((size, pairs.systems))
        centres, variances = (np.zeros((size, pairs.first.size)) for _ in range(2))
        for stratum, sums in zip(strata, chunk, strict=True):
            centre, variance = stratum.pair_estimates(sums, pairs)
            means += stratum.weight * (sums[:, : pairs.systems] / sums[:, 2 * pairs.systems, None] + stratum.shift)
            centres += stratum.weight * centre
            variances += stratum.weight**2 * variance
        largest.append(pairs.maxima(_ratios(centres - estimates.centres, np.sqrt(variances), estimates.errors)))
        best += _count_best(means, higher_is_better)
    return Maxima(tuple(np.concatenate(family) for family in zip(*largest, strict=True)), best / draws)


def _chunks(draws: int, width: int) -> Iterator[int]:
    """Split `draws` into numbers of draws for which a table of this width fits into memory."""
    step = max(1, CELLS // width)
    for start in range(0, draws, step):
        yield min(step, draws - start)


def _ratios(
    differences: arrays.FloatArray, errors: arrays.FloatArray, observed: arrays.FloatArray
) -> arrays.FloatArray:
    """|t| of each draw and pair: infinite where a draw has no error left, 0 for pairs that have none to begin with."""
    size = np.abs(differences)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = size / errors
    return np.where((observed == 0) | (size <= 1e-9 * observed), 0.0, found)


def _count_best(means: arrays.FloatArray, higher_is_better: bool) -> arrays.FloatArray:
    """In how many rows each column is the best; columns that tie share the row."""
    turned = means if higher_is_better else -means
    best = turned >= turned.max(axis=1, keepdims=True) - _ROUNDING * max(1.0, float(np.max(np.abs(means))))
    return np.asarray((best / best.sum(axis=1, keepdims=True)).sum(axis=0), dtype=np.float64)


def _count_systems(tables: Sequence[SystemScores]) -> int:
    shapes = {np.asarray(table.scores).shape[1:] for table in tables}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        raise ConfigurationError(
            "scores must have a row for each sample and a column for each system, the same in all suites"
        )
    return int(shape[0])
