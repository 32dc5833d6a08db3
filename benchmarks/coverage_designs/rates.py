"""Pass rates and pass/fail pairs of independent samples, enumerated exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
from scipy.stats import binom

from fairtrial.stats import Interval, bonett_price, paired_difference, rate_interval

from . import ALARMS, COVERAGE, Array, Design, Measured, Rng

ALL_N = range(20, 1001)
RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


def designs() -> Iterator[Design]:
    """Return the designs."""
    name = "pass rate of independent samples"
    for rate in RATES:
        measure = _exact(partial(least_coverage, rate, ALL_N))
        yield Design(name, "coverage, worst n", COVERAGE, measure, f"rate {rate:g}, n 20 to 1,000", exact=True)
    for numbers, cell, quick in (
        ((1, 2, 5, 10, 22, 34, 55, 89, 149, 176, 300), "11 n from 1 to 300", 1),
        (range(1, 1001), "n 1 to 1,000", 0),
    ):
        measure = _exact(partial(worst_rate_coverage, numbers))
        yield Design(name, "coverage, worst rate", COVERAGE, measure, cell, exact=True, quick=quick)
    for n in (10, 20, 40, 100, 200):
        for unequal in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
            yield Design(
                "identical systems, single pass/fail outcomes",
                "false alarms",
                ALARMS,
                _exact(partial(pair_alarms, n, unequal)),
                f"{n} pairs, {unequal:.0%} unequal",
                exact=True,
                quick=int(n in (10, 40)),
            )


def _exact(figure: Callable[[], float]) -> Callable[[int, Rng], Measured]:
    return lambda _runs, _rng: Measured(figure())


@cache
def ends(n: int) -> tuple[Array, Array]:
    """Return the low and the high ends of the intervals of 0 to n passes."""
    found = [one for one in (rate_interval(passes, n) for passes in range(n + 1)) if isinstance(one, Interval)]
    return np.asarray([one.low for one in found]), np.asarray([one.high for one in found])


def coverage_at(n: int, rates: Array) -> Array:
    """Return the exact coverage at each rate; the ends rise with the number of passes, so the covering ones adjoin."""
    low, high = ends(n)
    first, last = np.searchsorted(high, rates), np.searchsorted(low, rates, "right") - 1
    return np.asarray(binom.cdf(last, n, rates) - binom.cdf(first - 1, n, rates))


def least_coverage(rate: float, numbers: Sequence[int]) -> float:
    """Return the least coverage at this rate over numbers of samples."""
    return min(float(coverage_at(n, np.asarray([rate]))[0]) for n in numbers)


def worst_rate_coverage(numbers: Sequence[int]) -> float:
    """Return the least coverage over every rate: the worst lies beside an end of some interval."""
    least = 1.0
    for n in numbers:
        beside = np.concatenate([end + side for end in ends(n) for side in (-1e-9, 1e-9)])
        least = min(least, float(np.min(coverage_at(n, beside[(beside > 0) & (beside < 1)]))))
    return least


@cache
def called_different(wins: int, losses: int, n: int) -> bool:
    """Whether the package calls two systems different; of far from extreme counts its interval says so alone."""
    interval = bonett_price(wins, losses, n)
    if isinstance(interval, Interval) and interval.contains(0.0):
        return False  # The verdict can only be stretched towards 0.
    change = np.repeat([1.0, -1.0, 0.0], [wins, losses, n - wins - losses])
    return bool(paired_difference(np.maximum(change, 0), np.maximum(-change, 0)).differs)


def pair_alarms(n: int, unequal: float) -> float:
    """Return the share of identical systems that are called different, with this share of unequal pairs."""
    alarms = 0.0
    for pairs in range(1, n + 1):
        chance = float(binom.pmf(pairs, n, unequal))
        if chance < 1e-12:
            continue
        for wins in range((pairs + 1) // 2):  # The other half mirrors it.
            alone = float(binom.pmf(wins, pairs, 0.5))
            if chance * alone > 1e-12 and called_different(wins, pairs - wins, n):
                alarms += 2 * chance * alone
    return alarms
