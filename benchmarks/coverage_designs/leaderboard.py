"""Several systems on the same samples: simultaneous rank intervals, differences from a baseline, the chance of best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from fairtrial.stats import Ranking, SystemScores, mean_interval, rank_systems, weighted_mean

from . import ALARMS, COVERAGE, Array, Design, Rng, contains, draw_outcomes, share

DRAWS = 999
EQUAL, TIED, APART = [0.8] * 6, [0.8, 0.8, 0.75, 0.75, 0.7, 0.6], [0.9, 0.85, 0.8, 0.7, 0.6, 0.5]
NEAR_ONE = [0.97] * 6
CLUSTERS = {"8 of 20": [20] * 8, "8 of 2 to 60": [2, 3, 5, 8, 12, 20, 40, 60], "40 of 5": [5] * 40}


def designs() -> Iterator[Design]:
    """Return the designs."""
    for name, rates in {"equal": EQUAL, "tied in part": TIED, "apart": APART, "equal near 1": NEAR_ONE}.items():
        for n in (30, 100, 500):
            measure = share(partial(ranks_covered, rates, n))
            quick = 200 if n == 500 and name != "apart" else 0
            yield Design("ranks of six systems", "coverage", COVERAGE, measure, f"{name}, n {n}", quick=quick)
    for name, sizes in CLUSTERS.items():
        measure = share(partial(clustered_ranks_covered, sizes))
        yield Design("ranks of six systems in clusters", "coverage", COVERAGE, measure, name)
    for n in (30, 100):
        measure = share(partial(skewed_ranks_covered, n))
        yield Design("ranks of six lognormal metrics", "coverage", COVERAGE, measure, f"n {n}")
    yield Design("two suites of equal systems", "coverage", COVERAGE, share(suites_covered), "n 100 and 40")
    for n in (100, 500):
        measure = share(partial(baseline_alarm, n))
        yield Design("five systems equal to a baseline", "false alarms", ALARMS, measure, f"n {n}", quick=100)
    for count, n in ((3, 50), (10, 10), (40, 10)):
        for rate in (0.5, 0.95):
            measure = share(partial(mean_covered, count, n, rate))
            cell = f"{count} of {n}, rate {rate:g}"
            yield Design("mean over suites", "coverage", COVERAGE, measure, cell, quick=100 if count < 40 else 0)


def true_ranks(rates: Sequence[float]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the best and the worst rank of each system; equal ones share all ranks between them."""
    values = np.asarray(rates)
    better, worse = ((values > values[:, None]).sum(axis=1), (values < values[:, None]).sum(axis=1))
    return np.asarray(1 + better, dtype=np.intp), np.asarray(values.size - worse, dtype=np.intp)


def covered(found: object, rates: Sequence[float]) -> bool:
    """Whether every rank interval contains all ranks that the system has."""
    if not isinstance(found, Ranking):
        return True
    best, worst = true_ranks(rates)
    return bool(np.all(found.best_ranks <= best) and np.all(found.worst_ranks >= worst))


def draw_systems(rng: Rng, rates: Sequence[float], n: int, shared: Array | None = None) -> Array:
    """Draw outcomes of systems with these pass rates, half of whose variance on the normal scale is the sample's."""
    difficulty = rng.standard_normal((n, 1)) if shared is None else shared
    return draw_outcomes(rng, norm.cdf(np.sqrt(2) * norm.ppf(rates) + difficulty))


def ranks_covered(rates: Sequence[float], n: int, rng: Rng) -> bool:
    """Whether the ranks of systems with these pass rates are covered."""
    return covered(rank_systems(draw_systems(rng, rates, n), draws=DRAWS, seed=int(rng.integers(1 << 30))), rates)


def clustered_ranks_covered(sizes: Sequence[int], rng: Rng) -> bool:
    """Whether the ranks of equal systems are covered if each has luck of its own in each cluster."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    luck = rng.standard_normal((len(sizes), 6))[labels]
    scores = draw_outcomes(rng, norm.cdf(np.sqrt(2) * norm.ppf(0.8) + luck))
    return covered(rank_systems(SystemScores(scores, labels), draws=DRAWS), EQUAL)


def skewed_ranks_covered(n: int, rng: Rng) -> bool:
    """Whether the ranks of equal systems are covered in a metric with a long tail."""
    found = rank_systems(SystemScores(rng.lognormal(0, 1, (n, 6)), bounds=None), higher_is_better=False, draws=DRAWS)
    return covered(found, EQUAL)


def suites_covered(rng: Rng) -> bool:
    """Whether the ranks by the mean over two suites are covered."""
    return covered(rank_systems(draw_systems(rng, EQUAL, 100), draw_systems(rng, NEAR_ONE, 40), draws=DRAWS), EQUAL)


def baseline_alarm(n: int, rng: Rng) -> bool:
    """Whether any of five systems that are equal to the baseline is called different from it."""
    found = rank_systems(draw_systems(rng, EQUAL, n), baseline=0, draws=DRAWS)
    if not isinstance(found, Ranking) or found.against is None:
        return False
    return bool(np.any((found.against.low > 0) | (found.against.high < 0)))


def mean_covered(count: int, n: int, rate: float, rng: Rng) -> bool:
    """Whether the interval of the mean over suites contains the truth."""
    outcomes = draw_outcomes(rng, np.full((count, n), rate))
    return contains(weighted_mean([mean_interval(one) for one in outcomes]).interval, rate)
