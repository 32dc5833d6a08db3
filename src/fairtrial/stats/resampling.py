"""Sign-flip tests, the intervals they imply, and BCa bootstrap intervals, for samples or whole clusters.

All of them work on units: a unit is one sample, or one cluster with the sum of its differences and its size.
The mean difference is sum(totals)/sum(sizes) in both cases.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, sqrt

import numpy as np

from fairtrial.stats._arrays import (
    FloatArray,
    Labels,
    Values,
    as_clusters,
    as_values,
    check_level,
    normal_quantile,
    normal_tail,
    t_quantile,
    t_tail,
    two_sided,
)
from fairtrial.stats.mcnemar import mcnemar_exact
from fairtrial.stats.results import Interval, Undefined

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

    totals: FloatArray
    sizes: FloatArray

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


def units_of(differences: FloatArray, clusters: Labels | None = None) -> Units:
    """Return samples, or clusters, sorted, so that the result does not depend on the order of the data."""
    if clusters is None:
        return Units(np.sort(differences), np.ones(differences.size))
    groups = as_clusters(clusters, differences.size)
    totals, sizes = groups.totals(differences), groups.sizes
    order = np.lexsort((totals, sizes))
    return Units(totals[order], sizes[order])


def signflip(
    differences: Values, *, clusters: Labels | None = None, draws: int | None = None, seed: int = 0
) -> SignFlip | Undefined:
    """Two-sided sign-flip permutation test of a mean difference of 0. Fisher (1935).

    If the two systems are alike, every difference is as likely as its negative. p is the share of sign patterns
    whose |sum| is at least the observed one: all patterns where there are at most 14 non-zero units or where all
    have one magnitude (then it is the binomial test, and on 0/1 scores the exact McNemar test), else `draws` random
    ones (9,999, or 4,999 above 1,000 units), with p = (1 + hits)/(1 + draws) (Phipson and Smyth 2010). Clusters are
    flipped whole.
    """
    array = as_values(differences, "differences")
    if array.size == 0:
        return Undefined("There are no pairs.")
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
    differences: Values,
    *,
    clusters: Labels | None = None,
    level: float = 0.95,
    draws: int | None = None,
    seed: int = 0,
) -> Interval | Undefined:
    """All mean differences that the sign-flip test does not reject. Tritchler (1984).

    For a pattern of signs with flipped sums A (of differences) and B (of sizes), the shift theta is not rejected by
    that pattern between (S - A)/(N - B) and (S + A)/(N + B), where S and N are the unflipped sums. The interval's
    ends are the order statistics of those bounds at which the share of such patterns falls to 1 - level.
    Undefined below 6 units at 95%: even the most extreme pattern is then too likely.
    """
    array = as_values(differences, "differences")
    check_level(level)
    if array.size == 0:
        return Undefined("There are no pairs.")
    return signflip_interval_units(units_of(array, clusters), level=level, draws=draws, seed=seed)


def signflip_interval_units(units: Units, *, level: float, draws: int | None, seed: int) -> Interval | Undefined:
    """`signflip_interval` for units."""
    exact = units.count <= ENUMERATE_UP_TO
    total, size = float(units.totals.sum()), float(units.sizes.sum())
    lows: list[FloatArray] = []
    highs: list[FloatArray] = []
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
        return Undefined(f"{few} too few for a sign-flip interval at {100 * level:g}%.")
    return Interval(lower, upper, level, "inverted sign-flip test")


def bca_interval(
    values: Values,
    *,
    clusters: Labels | None = None,
    level: float = 0.95,
    widened: bool = False,
    draws: int | None = None,
    seed: int = 0,
) -> Interval | Undefined:
    """Bias-corrected and accelerated bootstrap interval of a mean, clusters resampled whole. Efron (1987).

    With `widened`, the normal quantile is replaced by sqrt(u/(u-1)) t(u-1) for u units, which repairs the
    bootstrap's narrowness in small data (Hesterberg 2015). Undefined for equal values.
    """
    array = as_values(values)
    check_level(level)
    if array.size == 0:
        return Undefined("There are no samples.")
    return bca_interval_units(units_of(array, clusters), level=level, widened=widened, draws=draws, seed=seed)


def bca_interval_units(
    units: Units, *, level: float, widened: bool, draws: int | None, seed: int
) -> Interval | Undefined:
    """`bca_interval` for units."""
    made = Bootstrap.of(units, draws=draws, seed=seed)
    return made if isinstance(made, Undefined) else made.interval(level, widened=widened)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Resampled means, sorted, with the bias and the acceleration that correct their quantiles. Efron (1987)."""

    resampled: FloatArray
    bias: float
    acceleration: float
    units: int

    @classmethod
    def of(cls, units: Units, *, draws: int | None, seed: int) -> "Bootstrap | Undefined":
        """Resample units with replacement; undefined for equal values."""
        u = units.count
        if u < 2 or not units.spread:
            return Undefined("All values are equal, so the bootstrap interval would be a point.")
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
            return Undefined("The bootstrap resamples agree too closely for an interval.")
        return cls(resampled, normal_quantile(percentile), float(np.sum(pulls**3)) / (6 * squares**1.5), u)

    def interval(self, level: float, *, widened: bool) -> Interval | Undefined:
        """The corrected quantiles; `widened` as `bca_interval` says."""
        z = normal_quantile(two_sided(level))
        if widened:
            z = self._widening * t_quantile(two_sided(level), self.units - 1)
        shares = [self._corrected(end) for end in (-z, z)]
        if not all(0 < share < 1 for share in shares):
            return Undefined("The bootstrap resamples agree too closely for an interval.")
        low, high = (float(end) for end in np.quantile(self.resampled, shares))
        return Interval(low, high, level, "BCa bootstrap, widened for small n" if widened else "BCa bootstrap")

    def p_value(self) -> float:
        """The largest 1 - level at which the widened interval still holds 0."""
        sign = 1 if self.resampled[self.resampled.size // 2] > 0 else -1
        beyond = self.resampled <= 0 if sign > 0 else self.resampled >= 0
        share = np.count_nonzero(beyond) / self.resampled.size
        if share <= 0:
            return 1 / (1 + self.resampled.size)
        # The corrected quantile at z is Phi(b + y/(1 - a y)) with y = b + z; it is solved for z.
        w = sign * normal_quantile(min(share, 1 - 1e-16)) - self.bias
        y = w / (1 + self.acceleration * w)
        z = -sign * (y - self.bias)
        return min(1.0, 2 * t_tail(z / self._widening, self.units - 1))

    @property
    def _widening(self) -> float:
        return sqrt(self.units / (self.units - 1))

    def _corrected(self, z: float) -> float:
        y = self.bias + z
        return normal_tail(-self.bias - y / (1 - self.acceleration * y))


def draws_for(asked: int | None, units: int) -> int:
    """The number of random draws for so many units, unless one is asked for."""
    if asked is None:
        return DRAWS if units <= 1_000 else DRAWS_OF_MANY
    if asked < 1:
        raise ValueError(f"draws must be at least 1 (got {asked}).")
    return asked


def _flipped(units: Units, draws: int | None, seed: int, *, every: bool) -> Iterator[FloatArray]:
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
