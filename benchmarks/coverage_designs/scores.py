"""Graded scores in a range, most of them near one of its ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from fairtrial.stats import mean_interval

from . import COVERAGE, GATE_ERRORS, Array, Design, Rng, contains, share

KINDS: dict[str, tuple[float, Callable[[Rng, int], Array]]] = {
    "1, but 5% partial credit": (0.975, lambda rng, n: np.where(rng.random(n) < 0.05, rng.random(n), 1.0)),
    "1, but 10% partial credit": (0.95, lambda rng, n: np.where(rng.random(n) < 0.1, rng.random(n), 1.0)),
    "1, but 1% are 0 and 1% 0.5": (0.985, lambda rng, n: rng.choice([0.0, 0.5, 1.0], n, p=[0.01, 0.01, 0.98])),
    "1, but 4% are 0 and 1% 0.5": (0.955, lambda rng, n: rng.choice([0.0, 0.5, 1.0], n, p=[0.04, 0.01, 0.95])),
    "0, but 2% Beta(2, 2)": (0.01, lambda rng, n: np.where(rng.random(n) < 0.02, rng.beta(2, 2, n), 0.0)),
    "0, but 5% Beta(2, 2)": (0.025, lambda rng, n: np.where(rng.random(n) < 0.05, rng.beta(2, 2, n), 0.0)),
    "0, but 20% Beta(2, 2)": (0.1, lambda rng, n: np.where(rng.random(n) < 0.2, rng.beta(2, 2, n), 0.0)),
    "Beta(4, 1)": (0.8, lambda rng, n: rng.beta(4, 1, n)),
}


def designs() -> Iterator[Design]:
    """Return the designs."""
    yield from imperfect_designs()
    for kind, (truth, draw) in KINDS.items():
        for n in (20, 50, 200):
            once = partial(covered, draw, n, truth)
            quick = 400 if n == 50 else 0
            yield Design("graded score from 0 to 1", "coverage", COVERAGE, share(once), f"{kind}, n {n}", quick=quick)


def imperfect_designs() -> Iterator[Design]:
    """Scores that are never quite 1, as those of a judge or a similarity, with rare zeros behind them."""
    for zeros in (0.01, 0.02, 0.03, 0.05, 0.1):
        for n in (30, 50, 100, 200, 400):
            cell, quick = f"0.95 to 1, but {zeros:.0%} are 0, n {n}", 300 if n == 50 else 0
            draw, truth = partial(never_quite_one, zeros), (1 - zeros) * 0.975
            once = partial(covered, draw, n, truth)
            yield Design("score that is never quite 1", "coverage", COVERAGE, share(once), cell, quick=quick)
            above = partial(wholly_above, draw, n, truth)
            yield Design("floor of such a score exactly met", "PASS", GATE_ERRORS, share(above), cell, quick=quick)


def never_quite_one(zeros: float, rng: Rng, n: int) -> Array:
    """Draw scores between 0.95 and 1, and this share of zeros."""
    return np.where(rng.random(n) < zeros, 0.0, rng.uniform(0.95, 1.0, n))


def wholly_above(draw: Callable[[Rng, int], Array], n: int, truth: float, rng: Rng) -> bool:
    """Whether the interval of a mean score lies above the truth, so that a floor there passes."""
    interval = mean_interval(draw(rng, n), binary=False).interval
    return interval is not None and interval.low > truth


def covered(draw: Callable[[Rng, int], Array], n: int, truth: float, rng: Rng) -> bool:
    """Whether the interval of a mean score contains the truth."""
    return contains(mean_interval(draw(rng, n), binary=False).interval, truth)
