"""The interval of a rate without numpy and scipy, which take a second to import, for the progress display of runs."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, lgamma, log, log1p, sqrt

Z_95 = 1.959963984540054
"""The normal quantile of a 95% interval."""

FEW_OUTCOMES = 12
"""Up to this many passes, or failures, Clopper-Pearson takes the place of Wilson."""

_TAIL = 0.025


def wilson_bounds(rate: float, n: float, z: float) -> tuple[float, float]:
    """All p with |rate - p| <= z sqrt(p(1-p)/n), in closed form. Wilson (1927). `n` is more than 0."""
    z2 = z * z / n
    centre = (rate + z2 / 2) / (1 + z2)
    half = sqrt(rate * (1 - rate) * z2 + z2 * z2 / 4) / (1 + z2)
    # Rounding may leave the end a hair inside the rate it must contain when the rate is 0 or 1.
    return 0.0 if rate == 0 else max(0.0, centre - half), 1.0 if rate == 1 else min(1.0, centre + half)


def rate_bounds(successes: int, n: int) -> tuple[float, float]:
    """The 95% interval of a rate as reports print it (`fairtrial.stats.rate_interval`). `n` is more than 0."""
    few = min(successes, n - successes)
    if few > FEW_OUTCOMES:
        return wilson_bounds(successes / n, n, Z_95)
    low = _root(lambda p: _at_most(few - 1, n, p), 1 - _TAIL) if few else 0.0
    high = _root(lambda p: _at_most(few, n, p), _TAIL)
    return (low, high) if few == successes else (1 - high, 1 - low)


def _at_most(most: int, n: int, p: float) -> float:
    """P(X <= most) for X ~ Binomial(n, p), with p from 0 to 1 exclusive."""
    logs = (
        lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(p) + (n - k) * log1p(-p) for k in range(most + 1)
    )
    return sum(exp(each) for each in logs)


def _root(falling: Callable[[float], float], wanted: float) -> float:
    """The argument from 0 to 1 at which a falling function has the wanted value, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return (low + high) / 2
