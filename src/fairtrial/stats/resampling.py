"""Tests of paired outcomes: exact, and by resampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import floor, sqrt

import numpy as np
from scipy.special import bdtr, bdtrc, gammaln, ndtr, xlog1py, xlogy

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays

_ENUMERATED = 100
"""Up to this many pairs, power is computed by enumeration."""


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided exact test that wins and losses are equally likely: binomial with rate 1/2. McNemar (1947)."""
    _check(wins, losses)
    if wins + losses == 0:
        return 1.0
    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def mcnemar_midp(wins: int, losses: int) -> float:
    """The exact test with only half the probability of the observed split: less cautious. Fagerland et al. (2013).

    p = 2 P(X < k) + P(X = k) for k = min(wins, losses) and X binomial(wins + losses, 1/2).
    """
    _check(wins, losses)
    if wins == losses:
        return 1.0
    k, m = min(wins, losses), wins + losses
    return min(1.0, float(bdtr(k, m, 0.5) + (bdtr(k - 1, m, 0.5) if k else 0.0)))


def bonett_price(wins: int, losses: int, n: int, *, level: float = 0.95) -> arrays.Interval | arrays.Undefined:
    """Interval for the difference of two paired rates that cannot collapse. Bonett and Price (2012).

    One win and one loss are added: with b = (wins+1)/(n+2) and c = (losses+1)/(n+2) it is
    b - c -+ z sqrt((b + c - (b-c)^2)/(n+2)), cut to [-1, 1]. Undefined for n = 0.
    """
    _check(wins, losses)
    arrays.check_level(level)
    if n < wins + losses:
        raise ConfigurationError(
            f"wins and losses must be at most the number of pairs (got {wins} and {losses} of {n})"
        )
    if n == 0:
        return arrays.Undefined("There are no pairs.")
    centre, error = _bonett_price(wins, losses, n)
    half = arrays.normal_quantile(arrays.two_sided(level)) * error
    return arrays.Interval(max(-1.0, centre - half), min(1.0, centre + half), level, "Bonett-Price")


def bonett_price_p(wins: int, losses: int, n: int) -> float:
    """The largest 1 - level at which the Bonett-Price interval of at least one pair still holds 0."""
    centre, error = _bonett_price(wins, losses, n)
    return 2 * arrays.normal_tail(abs(centre) / error)


def _bonett_price(wins: int, losses: int, n: int) -> tuple[float, float]:
    won, lost = (wins + 1) / (n + 2), (losses + 1) / (n + 2)
    return won - lost, sqrt((won + lost - (won - lost) ** 2) / (n + 2))


def binary_mde(wins: int, losses: int, n: int, *, level: float = 0.95, power: float = 0.8) -> float | arrays.Undefined:
    """The smallest true difference of paired rates that `n` pairs would show with the given power. Miettinen (1968).

    The Bonett-Price interval centres on d n/(n+2), so d solves

        d n/(n+2) = z_a/2 SE(d) + z_b SD(d),

    SE being the interval's own error and SD that of its centre, both at a rate of disagreement q + d. Here q is the
    disagreement that cancels out: the observed one, less the part of the observed difference e that is not noise,
    sqrt(max(0, e^2 - disagreement/n)). A true difference of d adds at least d to the disagreement, so the error of two
    near-identical systems would be too optimistic. For up to 100 pairs, where the normal approximation is too
    optimistic as well, the power is enumerated.
    """
    _check(wins, losses)
    arrays.check_level(level)
    arrays.check_power(power)
    if n < 1:
        return arrays.Undefined("There are no pairs.")
    disagreement = (wins + losses) / n
    cancelling = disagreement - sqrt(max(0.0, ((wins - losses) / n) ** 2 - disagreement / n))
    return pairs_mde(n, cancelling, level=level, power=power)


def pairs_mde(n: int, cancelling: float, *, level: float = 0.95, power: float = 0.8) -> float | arrays.Undefined:
    """`binary_mde` of `n` pairs of which the share `cancelling` disagrees beside what the difference itself brings."""
    arrays.check_level(level)
    arrays.check_power(power)
    z_interval, z_power = arrays.normal_quantile(arrays.two_sided(level)), arrays.normal_quantile(power)
    shrink = n / (n + 2)

    def shortfall(d: float) -> float:
        rate = min(1.0, cancelling + d)
        error = sqrt((rate * shrink + 2 / (n + 2) - (d * shrink) ** 2) / (n + 2))
        spread = sqrt(n * max(0.0, rate - d * d)) / (n + 2)
        return z_interval * error + z_power * spread - d * shrink

    def shortfall_of_power(d: float) -> float:
        return power - _pairs_power(n, min(1.0, cancelling + d), d, level)

    missing = shortfall if n > _ENUMERATED else shortfall_of_power
    if missing(1.0) > 0:
        return arrays.Undefined(
            f"With {n} pair{'s' if n > 1 else ''}, even the largest possible difference might be missed."
        )
    return arrays.find_root(missing, 0.0, 1.0, xtol=1e-6)


def _pairs_power(n: int, unequal: float, difference: float, level: float) -> float:
    """The chance that `n` pairs show a true difference: over all numbers of unequal pairs, and of wins among them."""
    counts = np.arange(n + 1)
    log_chance = gammaln(n + 1) - gammaln(counts + 1) - gammaln(n - counts + 1)
    log_chance = log_chance + xlogy(counts, unequal) + xlog1py(n - counts, -unequal)
    won = 0.5 + difference / (2 * unequal) if unequal > 0 else 0.5
    shown = bdtrc(_fewest_wins(n, level) - 1, counts, min(won, 1.0))
    return float(np.sum(np.exp(log_chance) * shown))


@lru_cache(maxsize=256)
def _fewest_wins(n: int, level: float) -> arrays.FloatArray:
    """For each number of unequal pairs, the fewest wins that show a difference; one more than all where none do."""
    unequal = np.arange(n + 1)[:, None]
    losses = np.arange(n + 1)[None, :]
    wins = unequal - losses
    ahead = wins > losses
    tail = bdtr(np.minimum(losses, unequal), unequal, 0.5)
    before = np.where(losses > 0, bdtr(np.clip(losses - 1, 0, unequal), unequal, 0.5), 0.0)
    p = tail + np.where(unequal == n, tail, before)  # Where all pairs differ, the test is the exact one.
    centre, spread = (wins - losses) / (n + 2), (unequal + 2) / (n + 2)
    statistic = centre / np.sqrt(np.maximum(spread - centre**2, 1e-300) / (n + 2))
    shown = ahead & (p <= 1 - level) & (2 * ndtr(-statistic) <= 1 - level)
    return np.asarray(np.arange(n + 1) + 1 - shown.sum(axis=1), dtype=np.float64)


def _check(wins: int, losses: int) -> None:
    if wins < 0 or losses < 0:
        raise ConfigurationError(f"wins and losses must be at least 0 (got {wins} and {losses})")


DRAWS, DRAWS_OF_MANY = 9_999, 4_999
"""Random sign patterns or resamples, up to 1,000 units and above, unless the caller asks for another number."""

ENUMERATE_UP_TO = 14
"""Up to this many units every one of the 2^units sign patterns is tried."""

RESAMPLE_UP_TO, RESAMPLE_CLUSTERS_UP_TO = 5_000, 1_000
"""Above this many samples, or clusters, Student's t replaces resampling, with the same result at a lower cost."""

CELLS = 2_000_000
"""Numbers in one chunk of random draws: 16 MB of floats."""

_WORTH_GROUPING = 20  # a binomial draw costs about as much as this many random signs


@dataclass(frozen=True, slots=True)
class SignFlip:
    """The p-value of a sign-flip test, and whether every pattern was tried or only `draws` random ones."""

    p_value: float
    exact: bool
    draws: int


@dataclass(frozen=True, slots=True)
class Units:
    """What is flipped or resampled as a whole: totals of differences, and the number of samples in each."""

    totals: arrays.FloatArray
    sizes: arrays.FloatArray

    @property
    def count(self) -> int:
        """How many units there are."""
        return int(self.totals.size)

    @property
    def difference(self) -> float:
        """The mean difference over all samples."""
        return float(self.totals.sum() / self.sizes.sum())

    @property
    def spread(self) -> bool:
        """Whether the units' own means differ by more than rounding."""
        means = self.totals / self.sizes
        return bool(np.ptp(means) > 1e-12 * max(1.0, float(np.max(np.abs(means)))))


def units_of(differences: arrays.FloatArray, clusters: arrays.Labels | None = None) -> Units:
    """Return samples, or clusters, sorted, so that the result does not depend on the order of the data."""
    if clusters is None:
        return Units(np.sort(differences), np.ones(differences.size))
    groups = arrays.as_clusters(clusters, differences.size)
    totals, sizes = groups.totals(differences), groups.sizes
    order = np.lexsort((totals, sizes))
    return Units(totals[order], sizes[order])


def signflip(
    differences: arrays.Values, *, clusters: arrays.Labels | None = None, draws: int | None = None, seed: int = 0
) -> SignFlip | arrays.Undefined:
    """Two-sided sign-flip permutation test of a mean difference of 0. Fisher (1935).

    If the two systems are equal, every difference is as likely as its negative. p is the share of sign patterns
    whose |sum| is at least the observed one: all patterns where there are at most 14 non-zero units or where all
    have one magnitude (then it is the binomial test, and on 0/1 scores the exact McNemar test), else `draws` random
    ones (9,999, or 4,999 above 1,000 units), with p = (1 + hits)/(1 + draws) (Phipson and Smyth 2010). Clusters are
    flipped whole.
    """
    array = arrays.as_values(differences, "differences")
    if array.size == 0:
        return arrays.Undefined("There are no pairs.")
    return signflip_units(units_of(array, clusters), draws=draws, seed=seed)


def signflip_units(units: Units, *, draws: int | None, seed: int) -> SignFlip:
    """`signflip` for units."""
    moving = units.totals[units.totals != 0]
    m = moving.size
    if m == 0:
        return SignFlip(1.0, exact=True, draws=1)
    magnitudes = np.abs(moving)
    if np.ptp(magnitudes) <= 1e-12 * magnitudes[0]:
        wins = int(np.count_nonzero(moving > 0))
        p = mcnemar_exact(wins, m - wins)
        return SignFlip(min(1.0, p), exact=True, draws=0)
    # Sums of the same terms in another order differ by rounding; patterns that tie with the data count as hits.
    threshold = abs(float(moving.sum())) - 1e-11 * float(magnitudes.sum())
    hits = total = 0
    exact = m <= ENUMERATE_UP_TO
    # With the same random patterns as `signflip_interval_units`, p and the interval agree about 0.
    pool = units if not exact and units.count <= RESAMPLE_UP_TO else Units(moving, np.ones(m))
    for sums in _flipped(pool, draws, seed, every=exact):
        hits += int(np.count_nonzero(np.abs(sums[:, 0]) >= threshold))
        total += len(sums)
    return SignFlip(hits / total if exact else (1 + hits) / (1 + total), exact, total)


def signflip_interval(
    differences: arrays.Values,
    *,
    clusters: arrays.Labels | None = None,
    level: float = 0.95,
    draws: int | None = None,
    seed: int = 0,
) -> arrays.Interval | arrays.Undefined:
    """All mean differences that the sign-flip test does not reject. Tritchler (1984).

    For a pattern of signs with flipped sums A (of differences) and B (of sizes), the shift theta is not rejected by
    that pattern between (S - A)/(N - B) and (S + A)/(N + B), where S and N are the unflipped sums. The interval's
    ends are the order statistics of those bounds at which the share of such patterns falls to 1 - level.
    Undefined below 6 units at 95%: even the most extreme pattern is then too likely.
    """
    array = arrays.as_values(differences, "differences")
    arrays.check_level(level)
    if array.size == 0:
        return arrays.Undefined("There are no pairs.")
    return signflip_interval_units(units_of(array, clusters), level=level, draws=draws, seed=seed)


def signflip_interval_units(
    units: Units, *, level: float, draws: int | None, seed: int
) -> arrays.Interval | arrays.Undefined:
    """`signflip_interval` for units."""
    exact = units.count <= ENUMERATE_UP_TO
    total, size = float(units.totals.sum()), float(units.sizes.sum())
    lows: list[arrays.FloatArray] = []
    highs: list[arrays.FloatArray] = []
    for sums in _flipped(units, draws, seed, every=exact):
        flipped, weight = sums[:, 0], sums[:, 1]
        # The pattern that flips nothing, or everything, agrees with every shift: its bounds are infinite.
        same, opposite = weight >= size, weight <= -size
        first = np.where(same, -np.inf, (total - flipped) / np.where(same, 1.0, size - weight))
        second = np.where(opposite, np.inf, (total + flipped) / np.where(opposite, 1.0, size + weight))
        lows.append(np.where(same | opposite, -np.inf, np.minimum(first, second)))
        highs.append(np.where(same | opposite, np.inf, np.maximum(first, second)))
    low, high = np.concatenate(lows), np.concatenate(highs)
    if not exact:  # the observed pattern is one of the possible ones
        low, high = np.append(low, -np.inf), np.append(high, np.inf)
    reached = floor((1 - level) * low.size + 1e-9)
    lower = float(np.partition(low, reached)[reached])
    upper = float(-np.partition(-high, reached)[reached])
    # A pattern that ties with the data has a bound of 0 but for rounding, and 0 belongs to the interval.
    rounding = 1e-11 * float(np.abs(units.totals).sum()) / size
    lower, upper = (0.0 if abs(end) <= rounding else end for end in (lower, upper))
    if not (np.isfinite(lower) and np.isfinite(upper)):
        few = "1 unit is" if units.count == 1 else f"{units.count} units are"
        return arrays.Undefined(f"{few} too few for a sign-flip interval at {100 * level:g}%.")
    return arrays.Interval(lower, upper, level, "inverted sign-flip test")


def bca_interval(
    values: arrays.Values,
    *,
    clusters: arrays.Labels | None = None,
    level: float = 0.95,
    widened: bool = False,
    draws: int | None = None,
    seed: int = 0,
) -> arrays.Interval | arrays.Undefined:
    """Bias-corrected and accelerated bootstrap interval of a mean, clusters resampled whole. Efron (1987).

    With `widened`, the normal quantile is replaced by sqrt(u/(u-1)) t(u-1) for u units, which repairs the
    bootstrap's narrowness in small data (Hesterberg 2015). Undefined for equal values.
    """
    array = arrays.as_values(values)
    arrays.check_level(level)
    if array.size == 0:
        return arrays.Undefined("There are no samples.")
    return bca_interval_units(units_of(array, clusters), level=level, widened=widened, draws=draws, seed=seed)


def bca_interval_units(
    units: Units, *, level: float, widened: bool, draws: int | None, seed: int
) -> arrays.Interval | arrays.Undefined:
    """`bca_interval` for units."""
    made = Bootstrap.of(units, draws=draws, seed=seed)
    return made if isinstance(made, arrays.Undefined) else made.interval(level, widened=widened)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Resampled means, sorted, with the bias and the acceleration that correct their quantiles. Efron (1987)."""

    resampled: arrays.FloatArray
    bias: float
    acceleration: float
    units: int

    @classmethod
    def of(cls, units: Units, *, draws: int | None, seed: int) -> Bootstrap | arrays.Undefined:
        """Resample units with replacement; undefined for equal values."""
        u = units.count
        if u < 2 or not units.spread:
            return arrays.Undefined("All values are equal, so the bootstrap interval would be a point.")
        even = bool(np.ptp(units.sizes) == 0)
        totals = units.totals / units.sizes[0] if even else units.totals
        rng = np.random.default_rng(seed)
        wanted = draws_for(draws, u)
        step = max(1, CELLS // u)
        made = []
        for start in range(0, wanted, step):
            chosen = rng.integers(0, u, (min(step, wanted - start), u))
            sums = totals[chosen].sum(axis=1)
            made.append(sums / u if even else sums / units.sizes[chosen].sum(axis=1))
        resampled = np.sort(np.concatenate(made))
        observed = float(totals.mean()) if even else units.difference
        below, upto = np.searchsorted(resampled, observed, "left"), np.searchsorted(resampled, observed, "right")
        percentile = float(below + upto) / (2 * resampled.size)
        left_out = (units.totals.sum() - units.totals) / (units.sizes.sum() - units.sizes)
        pulls = float(left_out.mean()) - left_out
        squares = float(np.sum(pulls * pulls))
        if not 0 < percentile < 1 or squares <= 0:
            return arrays.Undefined("The bootstrap resamples agree too closely for an interval.")
        return cls(resampled, arrays.normal_quantile(percentile), float(np.sum(pulls**3)) / (6 * squares**1.5), u)

    def interval(self, level: float, *, widened: bool) -> arrays.Interval | arrays.Undefined:
        """The corrected quantiles; `widened` as `bca_interval` says."""
        z = arrays.normal_quantile(arrays.two_sided(level))
        if widened:
            z = self._widening * arrays.t_quantile(arrays.two_sided(level), self.units - 1)
        shares = [self._corrected(end) for end in (-z, z)]
        if not all(0 < share < 1 for share in shares):
            return arrays.Undefined("The bootstrap resamples agree too closely for an interval.")
        low, high = (float(end) for end in np.quantile(self.resampled, shares))
        return arrays.Interval(low, high, level, "BCa bootstrap, widened for small n" if widened else "BCa bootstrap")

    def p_value(self) -> float:
        """The largest 1 - level at which the widened interval still holds 0."""
        sign = 1 if self.resampled[self.resampled.size // 2] > 0 else -1
        beyond = self.resampled <= 0 if sign > 0 else self.resampled >= 0
        share = np.count_nonzero(beyond) / self.resampled.size
        if share <= 0:
            return 1 / (1 + self.resampled.size)
        # The corrected quantile at z is Phi(b + y/(1 - a y)) with y = b + z; it is solved for z.
        w = sign * arrays.normal_quantile(min(share, 1 - 1e-16)) - self.bias
        y = w / (1 + self.acceleration * w)
        z = -sign * (y - self.bias)
        return min(1.0, 2 * arrays.t_tail(z / self._widening, self.units - 1))

    @property
    def _widening(self) -> float:
        return sqrt(self.units / (self.units - 1))

    def _corrected(self, z: float) -> float:
        y = self.bias + z
        return arrays.normal_tail(-self.bias - y / (1 - self.acceleration * y))


def draws_for(asked: int | None, units: int) -> int:
    """The number of random draws for `units` units; `asked` overrides it."""
    if asked is None:
        return DRAWS if units <= 1_000 else DRAWS_OF_MANY
    if asked < 1:
        raise ConfigurationError(f"draws must be at least 1 (got {asked})")
    return asked


def _flipped(units: Units, draws: int | None, seed: int, *, every: bool) -> Iterator[arrays.FloatArray]:
    """Chunks of (sum of totals, sum of sizes) under sign patterns: every pattern, or random ones."""
    pairs = np.column_stack([units.totals, units.sizes])
    whole = pairs.sum(axis=0)
    u = units.count
    if every:
        shifts = np.arange(u)
        bits = (np.arange(2**u)[:, None] >> shifts) & 1
        yield 2 * (bits.astype(np.float64) @ pairs) - whole
        return
    draws = draws_for(draws, u)
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    if len(distinct) * _WORTH_GROUPING <= u:
        # Equal units are interchangeable: how many of them keep their sign is binomial.
        yield 2 * (rng.binomial(counts, 0.5, size=(draws, len(distinct))) @ distinct) - whole
        return
    step = max(1, CELLS // u)
    for start in range(0, draws, step):
        size = (min(step, draws - start), (u + 7) // 8)
        bits_of = np.unpackbits(rng.integers(0, 256, size=size, dtype=np.uint8), axis=1)[:, :u]
        yield 2 * (bits_of.astype(np.float64) @ pairs) - whole
