"""The number of samples needed to detect a difference, and the difference that a number of samples can detect."""

from collections.abc import Callable
from functools import lru_cache
from math import ceil, floor, inf, sqrt

import numpy as np
from scipy.special import chdtri, gammaln, nctdtr, nctdtrit

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays

_FEW_FLIPPED = range(6, 11)  # Units whose signs can be flipped at the usual level, and so few that it costs power.
_FAR = 3_000.0  # Standard errors; the approximation beyond is exact to 1e-5 and better.
_NORMAL = 2_000  # Degrees of freedom from which Student's t is as good as normal.


def sample_size(
    delta: float,
    *,
    omega2: float,
    sigma_a2: float = 0.0,
    sigma_b2: float = 0.0,
    repeats_a: int = 1,
    repeats_b: int = 1,
    level: float = 0.95,
    power: float = 0.8,
) -> int | arrays.Undefined:
    """Samples needed to show a true difference `delta` between two systems on the same samples. Miller (2024).

    n = (z_a/2 + z_b)^2 (omega^2 + sigma_A^2/K_A + sigma_B^2/K_B)/delta^2, rounded up: omega^2 is the variance of the
    true difference over samples, sigma^2 the variance of one system's repeats of a sample, K the repeats.
    """
    _check_finite("delta", delta)
    variance = _variance(omega2, sigma_a2, sigma_b2, repeats_a, repeats_b)
    if delta == 0:
        return arrays.Undefined("No number of samples can detect a difference of 0.")
    # A hair off, so that rounding does not turn an exact 969 into 970.
    return max(1, ceil(_reach(level, power) ** 2 * variance / delta**2 - 1e-9))


def mde(
    n: int,
    *,
    omega2: float,
    sigma_a2: float = 0.0,
    sigma_b2: float = 0.0,
    repeats_a: int = 1,
    repeats_b: int = 1,
    level: float = 0.95,
    power: float = 0.8,
) -> float | arrays.Undefined:
    """Minimum detectable effect of `n` samples: `sample_size` solved for delta. Miller (2024)."""
    if n < 1:
        return arrays.Undefined("There are no samples.")
    return _reach(level, power) * sqrt(_variance(omega2, sigma_a2, sigma_b2, repeats_a, repeats_b) / n)


def samples_to_detect(
    n: int,
    se: float,
    delta: float,
    *,
    units: int | None = None,
    df: float | None = None,
    excess: float = 0.0,
    level: float = 0.95,
    power: float = 0.8,
) -> int | arrays.Undefined:
    """Samples at which a true difference `delta` would show, given that `n` samples left the standard error `se`.

    n (z_a/2 + z_b)^2 se^2/delta^2, rounded up: the error shrinks with the root of n. With a clustered error it counts
    samples in clusters of the same kind, so more clusters, not larger ones. `units` says how many samples or clusters
    the error comes from; z_a/2 is then t for the number that is needed, and the sum a quantile of the noncentral t with
    `df` degrees of freedom (by default units - 1) shifted by it: an error that few units tell may be too small, and
    over all such errors the difference is found with this power (Julious and Owen 2006). `excess` is that of
    `excess_width`: what makes an interval wider than t shrinks with the number of units.
    """
    _check_finite("delta", delta)
    if se == inf:
        return arrays.Undefined("The values are too large for a standard error.")
    _check_finite("se", se)
    if n < 1:
        return arrays.Undefined("There are no samples.")
    if delta == 0:
        return arrays.Undefined("No number of samples can detect a difference of 0.")
    if se <= 0:
        return arrays.Undefined("Without a standard error the number of samples is not known.")
    if units is None:
        return max(1, ceil(n * (_reach(level, power) * se / delta) ** 2 - 1e-9))
    _reach(level, power)  # For its checks.
    ratio, known = (se / delta) ** 2 * units, max(1.0, units - 1.0 if df is None else df)

    def enough(count: int) -> bool:
        critical = arrays.t_quantile(arrays.two_sided(level), count - 1) * sqrt(1 + excess / count)
        reach = critical + arrays.normal_quantile(power) if known > _NORMAL else float(nctdtrit(known, critical, power))
        return count >= ratio * reach * reach - 1e-9

    return ceil(n * _least(enough) / units - 1e-9)


def excess_width(half: float, se: float, df: float, units: float, *, level: float = 0.95) -> float:
    """How much wider than t an interval of this half-width is: (w^2 - 1) `units`, w being the ratio to that of t.

    An interval that allows for one difference farther out than all has the variance of one more unit, so w^2 - 1 falls
    with their number.
    """
    plain = arrays.t_quantile(arrays.two_sided(level), df) * se
    return 0.0 if plain <= 0 else max(0.0, (half / plain) ** 2 - 1) * units


def samples_to_reach(rate: float, bound: float, *, level: float = 0.95, power: float = 0.8) -> int | arrays.Undefined:
    """Independent trials at which the exact interval of a true `rate` lies beyond `bound` with this power.

    The smallest n with P(X >= k | rate) >= power, where k is the least count whose upper tail at the bound is at most
    (1 - level)/2; for a rate below the bound, the same of failures.
    """
    _reach(level, power)  # For its checks.
    if not (0 <= rate <= 1 and 0 < bound < 1):
        raise ConfigurationError(
            f"a rate must be from 0 to 1, and its bound above 0 and below 1 (got {rate} and {bound})"
        )
    if rate == bound:
        return arrays.Undefined("The rate equals its bound, so no number of samples can tell them apart.")
    if rate < bound:
        rate, bound = 1 - rate, 1 - bound

    def enough(count: int) -> bool:
        _, beyond = arrays.binomial_ranks((1 - level) / 2, count, bound)  # P(X > beyond) is small enough.
        return arrays.binomial_tail(beyond, count, rate) >= power

    return _least(enough)


def pairs_to_clear(
    wins: int, losses: int, n: int, *, bound: float = 0.0, level: float = 0.95, power: float = 0.8
) -> int | arrays.Undefined:
    """Pairs at which the Bonett-Price interval of pass/fail pairs like these would leave out `bound`.

    The smallest n at which its centre d n/(n+2) lies z_a/2 SE + z_b SD from the bound, SE being the interval's own
    error and SD that of its centre, at the observed rates of wins and losses; cf. `binary_mde`.
    """
    _reach(level, power)  # For its checks.
    arrays.check_counts(wins + losses, n)
    if n < 1:
        return arrays.Undefined("There are no pairs.")
    return _pairs_to_clear((wins - losses) / n, (wins + losses) / n, bound, level, power)


def pairs_to_detect(unequal: float, delta: float, *, level: float = 0.95, power: float = 0.8) -> int | arrays.Undefined:
    """Pass/fail pairs that show a true difference `delta` of two systems that disagree on the share `unequal`.

    `delta` is taken to bring as many disagreements with it: it may be that all those seen cancel out. So this is the
    number of pairs whose `pairs_mde` is `delta`.
    """
    _reach(level, power)  # For its checks.
    if not 0 <= unequal <= 1:
        raise ConfigurationError(f"a share of pairs must be from 0 to 1 (got {unequal})")
    if not 0 < delta <= 1:
        return arrays.Undefined("A detectable difference of two rates must be above 0 and at most 1.")
    return _pairs_to_clear(delta, min(1.0, unequal + delta), 0.0, level, power)


def smallest_detectable(se: float, df: float, *, excess: float = 0.0, level: float = 0.95, power: float = 0.8) -> float:
    """The true difference that is found with this power, given its standard error with its degrees of freedom.

    `excess` is that of `excess_width`, for df + 1 units.
    """
    _check_finite("se", se)
    wide = arrays.t_quantile(arrays.two_sided(level), df) * sqrt(1 + excess / (df + 1)) if excess else 0.0
    return se * detectable_shift(df, reach=wide, level=level, power=power)


def detectable_shift(
    df: float, *, units: int | None = None, reach: float = 0.0, level: float = 0.95, power: float = 0.8
) -> float:
    """The true difference that is found with this power, in standard errors with `df` degrees of freedom.

    It solves P(T > t_a/2) = power for the shift of a noncentral t: (t_a/2 + t_b) promises too much of few degrees of
    freedom at a high level. `reach` is the half-width of the interval in standard errors, if that is more than t_a/2.
    Of 6 to 10 `units` the sign-flip test has to reject too, which so few allow only where nearly all of them agree:
    its power is that of 1,000 drawn sets of normal units. All is over c4(df), because an error estimated from few
    units is too small on average.
    """
    arrays.check_level(level)
    arrays.check_power(power)
    if df > _NORMAL:
        return max(reach, arrays.normal_quantile(arrays.two_sided(level))) + arrays.normal_quantile(power)
    shift = _t_shift(max(reach, arrays.t_quantile(arrays.two_sided(level), df)), df, power)
    if units in _FEW_FLIPPED:
        shift = max(shift, _flip_shift(units or 0, level, power))
    return shift / float(np.exp(gammaln((df + 1) / 2) - gammaln(df / 2)) * sqrt(2 / df))


@lru_cache(maxsize=1024)
def _t_shift(critical: float, df: float, power: float) -> float:
    if critical > _FAR:  # Where the normal part of a noncentral t is negligible, and its distribution not computable.
        return critical * sqrt(float(chdtri(df, 1 - power)) / df)

    def shortfall(shift: float) -> float:
        return 1 - float(nctdtr(df, shift, critical)) - power

    high = critical + arrays.t_quantile(power, df)
    while shortfall(high) < 0:
        high *= 1.5
    return arrays.find_root(shortfall, 0.0, high)


@lru_cache(maxsize=256)
def _flip_shift(units: int, level: float, power: float) -> float:
    """The shift at which normal units pass the t test and the sign-flip test with this power.

    The sign-flip test rejects where at most (1 - level) 2^(units - 1) sets of units have a sum of 0 or below, the empty
    one included; where not even one may, all units have to agree.
    """
    allowed = max(1, floor((1 - level) * 2 ** (units - 1) + 1e-9))
    draws = np.random.default_rng(units).normal(size=(1_000, units))
    critical = arrays.t_quantile(arrays.two_sided(level), units - 1)
    sets = ((np.arange(2**units)[:, None] >> np.arange(units)) & 1).astype(np.float64)
    sums, sizes = draws @ sets.T, sets.sum(axis=1)
    spread = draws.std(axis=1, ddof=1)

    def shortfall(shift: float) -> float:
        per_unit = shift / sqrt(units)
        found = (draws.mean(axis=1) + per_unit) * sqrt(units) / spread > critical
        found &= np.count_nonzero(sums + per_unit * sizes <= 0, axis=1) <= allowed
        return float(found.mean()) - power

    high = 2 * _t_shift(critical, units - 1, power)
    while shortfall(high) < 0:
        high *= 1.5
    return arrays.find_root(shortfall, 0.0, high, xtol=1e-3)


def _pairs_to_clear(d: float, rate: float, bound: float, level: float, power: float) -> int | arrays.Undefined:
    if d == bound:
        return arrays.Undefined("The difference equals its bound, so no number of pairs can tell them apart.")

    def enough(count: int) -> bool:
        shrink = count / (count + 2)
        error = sqrt((rate * shrink + 2 / (count + 2) - (d * shrink) ** 2) / (count + 2))
        scatter = sqrt(count * max(0.0, rate - d * d)) / (count + 2)
        away = (d * shrink - bound) * (1 if d > bound else -1)
        return away >= arrays.normal_quantile(arrays.two_sided(level)) * error + arrays.normal_quantile(power) * scatter

    return _least(enough)


def _least(enough: Callable[[int], bool]) -> int:
    """Return the smallest number, at least 2, that is enough, if all larger ones are too; at most 10^15."""
    high = 2
    while not enough(high) and high < 10**15:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _reach(level: float, power: float) -> float:
    arrays.check_level(level)
    arrays.check_power(power)
    return arrays.normal_quantile(arrays.two_sided(level)) + arrays.normal_quantile(power)


def _variance(omega2: float, sigma_a2: float, sigma_b2: float, repeats_a: int, repeats_b: int) -> float:
    for name, value in (("omega2", omega2), ("sigma_a2", sigma_a2), ("sigma_b2", sigma_b2)):
        _check_finite(name, value)
        if value < 0:
            raise ConfigurationError(f"the variance {name} must be at least 0 (got {value})")
    if repeats_a < 1 or repeats_b < 1:
        raise ConfigurationError(f"each system must have at least 1 repeat (got {repeats_a} and {repeats_b})")
    return omega2 + sigma_a2 / repeats_a + sigma_b2 / repeats_b


def _check_finite(name: str, value: float) -> None:
    if not abs(value) < float("inf"):
        raise ConfigurationError(f"{name} must be a finite number (got {value})")
