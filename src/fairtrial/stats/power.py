"""How many samples show a difference, and what difference a number of samples can show."""

from math import ceil, sqrt

from fairtrial.stats._arrays import check_level, check_power, normal_quantile, two_sided
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


def samples_to_detect(n: int, se: float, delta: float, *, level: float = 0.95, power: float = 0.8) -> int | Undefined:
    """Samples at which a true difference `delta` would show, given that `n` samples left the standard error `se`.

    n (z_a/2 + z_b)^2 se^2/delta^2, rounded up: the error shrinks with the root of n. With a clustered error it counts
    samples in clusters of the same kind, so more clusters, not larger ones.
    """
    _check_finite("delta", delta)
    _check_finite("se", se)
    if n < 1:
        return Undefined("There are no samples.")
    if delta == 0:
        return Undefined("No number of samples shows a difference of nought.")
    if se <= 0:
        return Undefined("Without a standard error nothing tells how many samples are needed.")
    return max(1, ceil(n * (_reach(level, power) * se / delta) ** 2 - 1e-9))


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
