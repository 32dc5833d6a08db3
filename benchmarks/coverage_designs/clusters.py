"""Samples in clusters of equal and unequal size.

Working model: the samples of a cluster share a chance of passing, drawn from a beta distribution with the stated mean
and intra-class correlation (ICC); graded scores share a normal effect. In comparisons each system has cluster effects
of its own, which is the case in which clusters matter most for a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import sqrt

import numpy as np

from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.compare.verdicts import AdjustedDifference, verdict_of
from fairtrial.stats import mean_interval, paired_difference

from . import ALARMS, COVERAGE, Design, Rng, contains, draw_outcomes, draw_rates, share

SHAPES: dict[str, list[int]] = {
    "8 of 20": [20] * 8,
    "4 of 25": [25] * 4,
    "3 of 40": [40] * 3,
    "40 of 5": [5] * 40,
    "8 of 2 to 60": [2, 3, 5, 8, 12, 20, 40, 60],
    "20 of 2 to 60": [2, 3, 5, 8, 12, 20, 40, 60] * 2 + [4] * 4,
    "40 of 2 to 60": [2, 3, 5, 8, 12, 20, 40, 60] * 5,
    "100 of 2 to 60": [2, 3, 5, 8, 12, 20, 40, 60] * 12 + [4] * 4,
    "one of 100, seven of 5": [100, *[5] * 7],
    "two of 80, ten of 4": [80, 80, *[4] * 10],
    "one of 150, four of 10": [150, *[10] * 4],
}
FEW = {
    "3 of 50": [50] * 3,
    "100, 10, 10": [100, 10, 10],
    "100, 20, 10, 5": [100, 20, 10, 5],
    "100, 30, 10, 5, 5": [100, 30, 10, 5, 5],
    "one of 200, nine of 5": [200, *[5] * 9],
}
CORRELATIONS = (0.1, 0.5, 0.9)
RATES = (0.5, 0.8, 0.95, 0.99)
QUICK = ("8 of 2 to 60", "one of 100, seven of 5", "one of 150, four of 10", "8 of 20")


def designs() -> Iterator[Design]:
    """Return the designs."""
    for shape, sizes in SHAPES.items():
        for correlation in CORRELATIONS:
            cell = f"clusters: {shape}, ICC {correlation}"
            quick = 400 if shape in QUICK and correlation == 0.5 else 0
            for rate in RATES:
                once = rate_in_clusters(sizes, rate, correlation)
                few = quick if rate in (0.5, 0.99) else 0
                yield Design("pass rate", "coverage", COVERAGE, share(once), f"{cell}, rate {rate}", quick=few)
            once = score_in_clusters(sizes, correlation)
            yield Design("graded score", "coverage", COVERAGE, share(once), cell, quick=quick)
    for shape, sizes in (SHAPES | FEW).items():
        for correlation in CORRELATIONS:
            cell = f"clusters: {shape}, ICC {correlation}"
            once = alarm_in_clusters(sizes, correlation)
            quick = 150 if shape in ("8 of 2 to 60", "100, 20, 10, 5") and correlation == 0.5 else 0
            yield Design("identical systems", "false alarms", ALARMS, share(once), cell, quick=quick)


def labels_of(sizes: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the cluster of each sample."""
    return np.repeat(np.arange(len(sizes)), sizes)


def rate_in_clusters(sizes: Sequence[int], rate: float, correlation: float) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of a pass rate over clusters contains it."""
    labels = labels_of(sizes)

    def once(rng: Rng) -> bool:
        passed = draw_outcomes(rng, draw_rates(rng, rate, correlation, len(sizes))[labels])
        return contains(mean_interval(passed, clusters=labels).interval, rate)

    return once


def score_in_clusters(sizes: Sequence[int], correlation: float) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of a graded score over clusters contains its mean."""
    labels = labels_of(sizes)

    def once(rng: Rng) -> bool:
        noise = sqrt(correlation) * rng.normal(size=len(sizes))[labels]
        noise += sqrt(1 - correlation) * rng.normal(size=labels.size)
        return contains(mean_interval(np.clip(0.5 + 0.15 * noise, 0, 1), clusters=labels).interval, 0.5)

    return once


def alarm_in_clusters(sizes: Sequence[int], correlation: float) -> Callable[[Rng], bool]:
    """Return one run: whether two systems of equal average are called better or worse."""
    labels = labels_of(sizes)

    def once(rng: Rng) -> bool:
        sides = [draw_outcomes(rng, draw_rates(rng, 0.7, correlation, len(sizes))[labels]) for _ in "ab"]
        found = paired_difference(*sides, clusters=labels, draws=299)
        return verdict_of(AdjustedDifference(found), ComparisonSettings(), lower=False) in ("better", "worse")

    return once
