"""Agreement of raters beyond chance: Krippendorff's alpha of labels and of numbers, and Fleiss' kappa.

A rater gives the true label of an item with probability sqrt(alpha), else a label by its frequency, so that two ratings
of one item agree beyond chance by alpha. "or all at once": with probability alpha all raters give the true label.
Numbers are normal with a common part of an item, in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import sqrt

import numpy as np

from fairtrial.stats import (
    Interval,
    Undefined,
    fleiss_kappa_interval,
    krippendorff_alpha_interval,
)

from . import COVERAGE, Array, Design, Rng, contains, share

LABELS = {"two labels": (0.5, 0.5), "one label of 90%": (0.9, 0.1), "four labels": (0.25,) * 4}
ALPHAS = (0.0, 0.4, 0.8, 0.95)
STEPS = {"evenly used": (-1.0, -0.3, 0.4, 1.1), "mostly the best": (-2.0, -1.6, -1.3, -0.8)}


def designs() -> Iterator[Design]:
    """Return the designs."""
    for items in (10, 20, 50, 200):
        for alpha in ALPHAS:
            for name, shares in LABELS.items():
                for raters in (5,) if len(shares) > 2 else (2, 3, 5):
                    for missing in (0.0, 0.3):
                        once = alpha_of_labels(items, raters, alpha, shares, missing, together=raters == 3)
                        cell = f"{items} items, {raters} raters{' or all at once' if raters == 3 else ''}, {name}"
                        cell += f", alpha {alpha}, {missing:.0%} missing"
                        quick = 400 if items == 50 and raters == 2 and not missing and max(shares) == 0.9 else 0
                        design = "Krippendorff's alpha of labels"
                        yield Design(design, "coverage", COVERAGE, share(once), cell, quick=quick)
            once = kappa_of_labels(items, 3, alpha, (0.9, 0.1))
            cell = f"{items} items, 3 raters, one label of 90%, kappa {alpha}"
            yield Design("Fleiss' kappa", "coverage", COVERAGE, share(once), cell, quick=200 if items == 20 else 0)
            for name, steps in STEPS.items():
                for raters in (2, 5):
                    once = alpha_of_numbers(items, raters, alpha, steps)
                    cell = f"{items} items, {raters} raters, five steps {name}, correlation {alpha}"
                    quick = 200 if items == 50 and raters == 2 and alpha == 0.4 else 0
                    yield Design(
                        "Krippendorff's alpha of numbers", "coverage", COVERAGE, share(once), cell, quick=quick
                    )


def draw_labels(rng: Rng, shape: tuple[int, int], alpha: float, shares: Sequence[float], *, together: bool) -> Array:
    """Draw the labels of items (rows) by raters (columns)."""
    items, raters = shape
    true, own = rng.choice(len(shares), (items, 1), p=shares), rng.choice(len(shares), shape, p=shares)
    copied = rng.random((items, 1)) < alpha if together else rng.random((items, raters)) < sqrt(alpha)
    return np.where(copied, true, own).astype(np.float64)


def alpha_of_labels(
    items: int, raters: int, alpha: float, shares: Sequence[float], missing: float, *, together: bool
) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of alpha contains it, ratings missing at random."""

    def once(rng: Rng) -> bool:
        ratings = draw_labels(rng, (items, raters), alpha, shares, together=together)
        present = rng.random(ratings.shape) >= missing
        rows = np.where(present, ratings, None).T.tolist()
        return _contains(krippendorff_alpha_interval(rows), alpha)

    return once


def kappa_of_labels(items: int, raters: int, kappa: float, shares: Sequence[float]) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of Fleiss' kappa contains it."""

    def once(rng: Rng) -> bool:
        ratings = draw_labels(rng, (items, raters), kappa, shares, together=False)
        table = np.stack([np.count_nonzero(ratings == label, axis=1) for label in range(len(shares))], axis=1)
        return _contains(fleiss_kappa_interval(table.tolist()), kappa)

    return once


def draw_numbers(rng: Rng, shape: tuple[int, int], correlation: float, steps: Sequence[float]) -> Array:
    """Draw the ratings of items (rows) by raters (columns)."""
    common, own = rng.normal(size=(shape[0], 1)), rng.normal(size=shape)
    return np.digitize(sqrt(correlation) * common + sqrt(1 - correlation) * own, steps).astype(np.float64)


@cache
def true_alpha(correlation: float, steps: tuple[float, ...]) -> float:
    """Return alpha of a million items."""
    ratings = draw_numbers(np.random.default_rng(1), (1_000_000, 2), correlation, steps)
    return 1 - float(np.mean((ratings[:, 0] - ratings[:, 1]) ** 2) / (2 * np.var(ratings)))


def alpha_of_numbers(items: int, raters: int, correlation: float, steps: tuple[float, ...]) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of alpha of numbers contains it."""
    interval_of = partial(krippendorff_alpha_interval, measurement="interval")

    def once(rng: Rng) -> bool:
        ratings = draw_numbers(rng, (items, raters), correlation, steps)
        return _contains(interval_of(ratings.T.tolist()), true_alpha(correlation, steps))

    return once


def _contains(found: Interval | Undefined, truth: float) -> bool:
    return contains(None if isinstance(found, Undefined) else found, truth)
