"""How often a nominal 95% interval holds the truth: python benchmarks/coverage.py [runs]

Pass/fail samples. One repeat: by enumeration. Repeats and clusters: by seeded simulation, with the chance of a pass
drawn per sample (or per cluster) from a beta distribution with the given intra-class correlation. Beside our interval
stands the naive one: the mean of all trials -+ 1.96 sqrt(m(1-m)/trials), which takes every trial for independent.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from fairtrial.stats import Interval, mean_interval, wilson

RATES = (0.5, 0.8, 0.95, 0.99)
SIZES = (10, 30, 100, 1000)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the table."""

    kind: str
    detail: str
    rate: float
    n: int
    covered: float
    naive: float


@cache
def _wilson(successes: int, n: int) -> Interval:
    found = wilson(successes, n)
    assert isinstance(found, Interval)
    return found


def _naive_holds(mean: float, trials: int, rate: float) -> bool:
    return abs(mean - rate) <= 1.959964 * sqrt(mean * (1 - mean) / trials)


def plain(rate: float, n: int) -> Row:
    """Exact coverage with one repeat: the sum of the probabilities of the counts whose interval holds the rate."""
    chances = binom.pmf(np.arange(n + 1), n, rate)
    ours = sum(chance for k, chance in enumerate(chances) if _wilson(k, n).contains(rate))
    naive = sum(chance for k, chance in enumerate(chances) if _naive_holds(k / n, n, rate))
    return Row("one repeat", "enumerated", rate, n, float(ours), float(naive))


def _chances(rng: np.random.Generator, rate: float, correlation: float, size: int) -> NDArray[np.float64]:
    if correlation == 1:
        return rng.binomial(1, rate, size).astype(np.float64)
    total = (1 - correlation) / correlation
    return rng.beta(rate * total, (1 - rate) * total, size)


def repeats(rate: float, n: int, repeated: int, *, correlation: float, runs: int, seed: int = 0) -> Row:
    """Simulated coverage with `repeated` repeats of each of `n` samples."""
    rng = np.random.default_rng([seed, n, repeated, round(1000 * rate), round(100 * correlation)])
    ours = naive = 0
    for _ in range(runs):
        scores = rng.binomial(1, _chances(rng, rate, correlation, n)[:, None], (n, repeated))
        interval = mean_interval(scores).interval
        ours += interval is not None and interval.contains(rate)
        naive += _naive_holds(float(scores.mean()), scores.size, rate)
    return Row("repeats", f"K={repeated} icc={correlation}", rate, n, ours / runs, naive / runs)


def clusters(
    rate: float, n: int, count: int, *, correlation: float = 0.3, uneven: bool = False, runs: int, seed: int = 0
) -> Row:
    """Simulated coverage with `n` samples in `count` clusters, of one size or of sizes spread from 1 to 5."""
    rng = np.random.default_rng([seed, n, count, round(1000 * rate), int(uneven)])
    weights = np.linspace(1, 5, count) if uneven else np.ones(count)
    edges = np.round(np.cumsum(weights) / weights.sum() * n).astype(int)
    labels = np.searchsorted(edges, np.arange(n), side="right")
    ours = naive = 0
    for _ in range(runs):
        scores = rng.binomial(1, _chances(rng, rate, correlation, count)[labels])
        interval = mean_interval(scores, clusters=labels).interval
        ours += interval is not None and interval.contains(rate)
        naive += _naive_holds(float(scores.mean()), n, rate)
    detail = f"C={count} icc={correlation}{' uneven' if uneven else ''}"
    return Row("clusters", detail, rate, n, ours / runs, naive / runs)


CLUSTERS = (
    (30, 10, False),
    (30, 15, False),
    (100, 10, False),
    (100, 20, True),
    (100, 50, False),
    (1000, 10, False),
    (1000, 20, True),
    (1000, 50, False),
    (1000, 100, False),
)


def table(runs: int) -> Iterator[Row]:
    """All rows."""
    for rate in RATES:
        for n in SIZES:
            yield plain(rate, n)
    for correlation in (0.1, 0.3, 0.6, 1.0):
        for repeated in (3, 8):
            for rate in RATES:
                for n in SIZES:
                    yield repeats(rate, n, repeated, correlation=correlation, runs=runs)
    for rate in RATES:
        # Ten clusters of one sample: nothing is shared, and the counts are as coarse as with one repeat.
        yield clusters(rate, 10, 10, runs=runs)
        for n, count, uneven in CLUSTERS:
            yield clusters(rate, n, count, uneven=uneven, runs=runs)


def main() -> None:
    """Print the table."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    print(f"coverage of nominal 95% intervals, {runs} runs where simulated")
    print(f"{'samples':<12}{'':<22}{'rate':>6}{'n':>6}{'ours':>8}{'naive':>8}")
    for row in table(runs):
        print(f"{row.kind:<12}{row.detail:<22}{row.rate:>6}{row.n:>6}{row.covered:>8.3f}{row.naive:>8.3f}")


if __name__ == "__main__":
    main()
