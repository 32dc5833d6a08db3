"""Systems whose latency or cost has a long tail: differences and margins of means, quantiles and geometric means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from fairtrial.stats import PairedDifference, geometric_ratio, paired_difference, quantile_difference

from . import ALARMS, COVERAGE, GATE_ERRORS, Array, Design, Rng, contains, share

UPPER_TAIL = 1.6448536269514722  # The 95th percentile of a standard normal variable.
SPREADS = ((2.0, 1.0), (1.5, 0.5), (1.0, 0.3), (1.0, 1.0), (0.5, 1.5))
DRAWS = 299
RARE = 0.03

type Draw = Callable[[Rng, int], tuple[Array, Array]]


def designs() -> Iterator[Design]:
    """Return the designs."""
    for one, two in SPREADS:
        for n in (30, 100, 300):
            cell, quick = f"lognormal {one:g} against {two:g}, n {n}", 200 if n == 30 else 0
            draw = partial(lognormal, one, two)
            yield Design(
                "equal means, long tails", "called", ALARMS, share(partial(called, draw, n)), cell, quick=quick
            )
            missed = partial(passed, partial(slower, one, two), n)
            yield Design("margin of a mean exactly met", "PASS", GATE_ERRORS, share(missed), cell, quick=quick)
            ratio = partial(ratio_covered, one, two, n)
            yield Design("ratio of geometric means", "coverage", COVERAGE, share(ratio), cell, quick=quick)
            medians = partial(quantile_covered, one, two, n, 0.5, 0.0)
            yield Design("difference of medians", "coverage", COVERAGE, share(medians), cell, quick=quick)
            if n > 30:
                tails = partial(quantile_covered, one, two, n, 0.95, UPPER_TAIL)
                yield Design("difference of 95th percentiles", "coverage", COVERAGE, share(tails), cell)
    for n in (100, 300):
        rare = partial(called, rare_costs, n)
        cell = f"{1 - RARE:.0%} free calls against even ones, n {n}"
        yield Design("equal means, long tails", "called", ALARMS, share(rare), cell)


def lognormal(one: float, two: float, rng: Rng, n: int) -> tuple[Array, Array]:
    """Draw two sides of mean 1."""
    return rng.lognormal(-(one**2) / 2, one, n), rng.lognormal(-(two**2) / 2, two, n)


def slower(one: float, two: float, rng: Rng, n: int) -> tuple[Array, Array]:
    """Draw two sides, the first of which has a mean that is larger by 0.3."""
    first, second = lognormal(one, two, rng, n)
    return 1.3 * first, second


def rare_costs(rng: Rng, n: int) -> tuple[Array, Array]:
    """Draw costs of mean 1: even ones, and free calls of which a few are dear."""
    dear = np.where(rng.random(n) < RARE, rng.lognormal(-0.125, 0.5, n) / RARE, 0.0)
    return rng.lognormal(-0.005, 0.1, n), dear


def _compared(draw: Draw, n: int, rng: Rng) -> PairedDifference:
    return paired_difference(*draw(rng, n), bounds=None, draws=DRAWS, seed=int(rng.integers(2**31)))


def called(draw: Draw, n: int, rng: Rng) -> bool:
    """Whether two sides with equal means get a verdict."""
    found = _compared(draw, n, rng)
    return not found.heavy_tail and bool(found.differs)


def passed(draw: Draw, n: int, rng: Rng) -> bool:
    """Whether a margin of 0.3 passes that is exactly met."""
    found = _compared(draw, n, rng)
    return not found.heavy_tail and found.interval is not None and found.interval.high < 0.3


def ratio_covered(one: float, two: float, n: int, rng: Rng) -> bool:
    """Whether the interval of the ratio of geometric means contains the truth."""
    found = geometric_ratio(rng.lognormal(0.1, one, n), rng.lognormal(0, two, n), draws=DRAWS)
    return contains(found.interval, float(np.expm1(0.1)))


def quantile_covered(one: float, two: float, n: int, at: float, z: float, rng: Rng) -> bool:
    """Whether the interval of a difference of quantiles contains the truth; none excludes nothing."""
    sides = (rng.lognormal(0, one, n), rng.lognormal(0, two, n))
    found = quantile_difference(*sides, at, draws=DRAWS, seed=int(rng.integers(2**31)))
    return found.interval is None or contains(found.interval, float(np.exp(z * one) - np.exp(z * two)))
