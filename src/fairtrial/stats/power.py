"""How many samples show a difference, and what difference a number of samples can show."""

from collections.abc import Callable
from math import ceil, sqrt

from fairtrial.stats._arrays import check_counts, check_level, check_power, normal_quantile, t_quantile, two_sided
from fairtrial.stats.results import Undefined


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
) -> int | Undefined:
    """Samples needed to show a true difference `delta` between two systems on the same samples. Miller (2024).

    n = (z_a/2 + z_b)^2 (omega^2 + sigma_A^2/K_A + sigma_B^2/K_B)/delta^2, rounded up: omega^2 is the variance of the
    true difference over samples, sigma^2 the variance of one system's repeats of a sample, K the repeats.
    """
    _check_finite("delta", delta)
    variance = _variance(omega2, sigma_a2, sigma_b2, repeats_a, repeats_b)
    if delta == 0:
        return Undefined("No number of samples shows a difference of nought.")
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
) -> float | Undefined:
    """Minimum detectable effect of `n` samples: `sample_size` solved for delta. Miller (2024)."""
    if n < 1:
        return Undefined("There are no samples.")
    return _reach(level, power) * sqrt(_variance(omega2, sigma_a2, sigma_b2, repeats_a, repeats_b) / n)


def samples_to_detect(
    n: int, se: float, delta: float, *, units: int | None = None, level: float = 0.95, power: float = 0.8
) -> int | Undefined:
    """Samples at which a true difference `delta` would show, given that `n` samples left the standard error `se`.

    n (z_a/2 + z_b)^2 se^2/delta^2, rounded up: the error shrinks with the root of n. With a clustered error it counts
    samples in clusters of the same kind, so more clusters, not larger ones. `units` says how many samples or clusters
    the error comes from; t quantiles for the number that is needed then replace z, which promises too much of few.
    """
    _check_finite("delta", delta)
    _check_finite("se", se)
    if n < 1:
        return Undefined("There are no samples.")
    if delta == 0:
        return Undefined("No number of samples shows a difference of nought.")
    if se <= 0:
        return Undefined("Without a standard error nothing tells how many samples are needed.")
    if units is None:
        return max(1, ceil(n * (_reach(level, power) * se / delta) ** 2 - 1e-9))
    _reach(level, power)  # For its checks.
    ratio = (se / delta) ** 2 * units

    def enough(count: int) -> bool:
        reach = t_quantile(two_sided(level), count - 1) + t_quantile(power, count - 1)
        return count >= ratio * reach * reach - 1e-9

    return ceil(n * _least(enough) / units - 1e-9)


def samples_to_clear(
    n: int,
    effective_n: float,
    rate: float,
    bound: float,
    *,
    units: int | None = None,
    level: float = 0.95,
    power: float = 0.8,
) -> int | Undefined:
    """Samples at which Wilson's interval of a true rate m would leave out `bound` f, given what `n` are worth.

    That takes (z_a/2 sqrt(f(1-f)) + z_b sqrt(m(1-m)))^2/(m-f)^2 independent trials (Fleiss 1981): the interval's reach
    is made of the variance at the bound, the scatter of the observed rate of its own. A rate of exactly 0 or 1 scatters
    as (k+1)/(n+2) would. `units` are the samples or clusters behind a t quantile, as in `samples_to_detect`.
    """
    _reach(level, power)  # For its checks.
    if n < 1 or effective_n <= 0:
        return Undefined("There are no samples.")
    if not (0 <= rate <= 1 and 0 < bound < 1):
        raise ValueError(f"A rate lies between 0 and 1 and its bound inside; got {rate} and {bound}.")
    if rate == bound:
        return Undefined("No number of samples tells a rate from itself.")
    typical = rate if 0 < rate < 1 else (rate * effective_n + 1) / (effective_n + 2)
    reach, scatter = sqrt(bound * (1 - bound)), sqrt(typical * (1 - typical))
    count_of = n if units is None else units

    def enough(count: int) -> bool:
        z = normal_quantile(two_sided(level)) if units is None else t_quantile(two_sided(level), count - 1)
        needed = ((z * reach + normal_quantile(power) * scatter) / (rate - bound)) ** 2
        return count * effective_n / count_of >= needed - 1e-9

    return ceil(n * _least(enough) / count_of - 1e-9)


def pairs_to_clear(
    wins: int, losses: int, n: int, *, bound: float = 0.0, level: float = 0.95, power: float = 0.8
) -> int | Undefined:
    """Pairs at which the Bonett-Price interval of pass/fail pairs like these would leave out `bound`.

    The smallest n at which its centre d n/(n+2) lies z_a/2 SE + z_b SD from the bound, SE being the interval's own
    error and SD that of its centre, at the observed rates of wins and losses; cf. `binary_mde`.
    """
    _reach(level, power)  # For its checks.
    check_counts(wins + losses, n)
    if n < 1:
        return Undefined("There are no pairs.")
    d, rate = (wins - losses) / n, (wins + losses) / n
    if d == bound:
        return Undefined("No number of pairs tells a difference from itself.")

    def enough(count: int) -> bool:
        shrink = count / (count + 2)
        error = sqrt((rate * shrink + 2 / (count + 2) - (d * shrink) ** 2) / (count + 2))
        scatter = sqrt(count * max(0.0, rate - d * d)) / (count + 2)
        away = (d * shrink - bound) * (1 if d > bound else -1)
        return away >= normal_quantile(two_sided(level)) * error + normal_quantile(power) * scatter

    return _least(enough)


def _least(enough: Callable[[int], bool]) -> int:
    """The smallest number from 2 on that is enough, where all larger ones are too; beyond 10^15 nobody counts."""
    high = 2
    while not enough(high) and high < 10**15:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _reach(level: float, power: float) -> float:
    check_level(level)
    check_power(power)
    return normal_quantile(two_sided(level)) + normal_quantile(power)


def _variance(omega2: float, sigma_a2: float, sigma_b2: float, repeats_a: int, repeats_b: int) -> float:
    for name, value in (("omega2", omega2), ("sigma_a2", sigma_a2), ("sigma_b2", sigma_b2)):
        _check_finite(name, value)
        if value < 0:
            raise ValueError(f"{name} is a variance and cannot be negative; got {value}.")
    if repeats_a < 1 or repeats_b < 1:
        raise ValueError(f"Each system is run at least once; got {repeats_a} and {repeats_b} repeats.")
    return omega2 + sigma_a2 / repeats_a + sigma_b2 / repeats_b


def _check_finite(name: str, value: float) -> None:
    if not abs(value) < float("inf"):
        raise ValueError(f"{name} must be a finite number; got {value}.")
