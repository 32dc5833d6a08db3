"""Means made more precise by earlier runs of the same samples: right, wrong and drifting models of the items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from scipy.special import ndtr

from fairtrial.stats import HistoryMean, Repeats, history_mean

from . import COVERAGE, Array, Design, Limit, Measured, Rng, contains, draw_outcomes, share

SAME_WIDTH: Limit = (0.0, 0.999)
"""The width with this share of the samples and a history, relative to that of all of them without one."""
SHARE = 0.6

CORRELATIONS = (0.0, 0.3, 0.7, 0.9, 0.97)
SIZES = ((50, 500), (100, 500), (300, 500), (50, 2_000), (100, 2_000), (300, 2_000))

type Draw = Callable[[Rng, float, int], tuple[Array, Array]]
"""Draws histories and results of items with this correlation."""


def designs() -> Iterator[Design]:
    """Return the designs."""
    for kind, (truth, draw) in KINDS.items():
        for correlation in CORRELATIONS:
            for n, pool in SIZES:
                cell = f"{kind}, correlation {correlation:g}, {n} of {pool:,}"
                quick = 150 if (n, pool) == (100, 500) and correlation in (0.0, 0.7) else 0
                once = partial(covered, draw, truth, correlation, n, pool)
                yield Design("mean with a history", "coverage", COVERAGE, share(once), cell, quick=quick)
    for kind in ("pass/fail, right", "graded, right"):
        for n, pool in ((50, 2_000), (100, 2_000), (300, 2_000), (300, 10_000)):
            cell = f"{kind}, correlation 0.7, {n} and {n / SHARE:.0f} of {pool:,}"
            measure, quick = partial(relative_width, KINDS[kind][1], n, pool), 100 if n == 100 else 0
            yield Design("60% of the samples, with a history", "relative width", SAME_WIDTH, measure, cell, quick=quick)
    for zeros in (0.01, 0.03, 0.1):
        for n, pool in SIZES:
            cell = f"0.95 to 1, but {zeros:.0%} are 0, half of them foreseen, {n} of {pool:,}"
            once = partial(covered, partial(never_quite_one, zeros), (1 - zeros) * 0.975, 0.5, n, pool)
            yield Design("mean with a history", "coverage", COVERAGE, share(once), cell)
    for correlation in (0.3, 0.7, 0.9):
        for n, pool in ((100, 500), (300, 2_000)):
            cell = f"clusters of 5, ICC 0.3, correlation {correlation:g}, {n} of {pool:,}"
            once = partial(clustered_covered, correlation, n, pool)
            yield Design("mean with a history", "coverage", COVERAGE, share(once), cell)
            cell = f"3 repeats, a third of the run without a history, correlation {correlation:g}, {n} of {pool:,}"
            once = partial(repeats_covered, correlation, n, pool)
            yield Design("mean with a history", "coverage", COVERAGE, share(once), cell)


def latent(rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Draw two standard normal variables of which the uniform ranks have this correlation."""
    one, two = rng.standard_normal((2, size))
    own = 2 * np.sin(np.pi / 6 * correlation)
    return one, own * one + np.sqrt(1 - own**2) * two


def verdicts(rate: float, rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Verdicts that equal the earlier one, or are drawn again: the model of a slope is right."""
    before = (rng.random(size) < rate).astype(float)
    return before, np.where(rng.random(size) < correlation, before, rng.random(size) < rate).astype(float)


def wrong_verdicts(rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Verdicts whose chance is a step of an earlier rate of five runs, which has two peaks."""
    difficulty, now = latent(rng, correlation, size)
    before = rng.binomial(5, ndtr(3 * np.abs(difficulty) - 2)) / 5 * np.where(difficulty > 0, 1, 0.5)
    return before, (now > 0).astype(float)


def drifting_verdicts(rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Verdicts of a system that has changed: most items became easy, a tenth hard, each history from another run."""
    before, now = latent(rng, correlation, size)
    level = rng.choice([-1.0, 0.0, 1.5], size)
    flipped = rng.random(size) < 0.1
    return ndtr(before + level), (np.where(flipped, -now, now) > -1.0).astype(float)


def scores(rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Graded scores, most of them near an end of the range, that equal the earlier one or are drawn again."""
    before = rng.beta(0.5, 0.5, size)
    return before, np.where(rng.random(size) < correlation, before, rng.beta(0.5, 0.5, size))


def wrong_scores(rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Graded scores that fall and rise with the earlier ones, with another spread at each end."""
    before, now = latent(rng, correlation, size)
    return ndtr(before) ** 4, ndtr(now) ** 2


def drifting_scores(rng: Rng, correlation: float, size: int) -> tuple[Array, Array]:
    """Graded scores most of which are 1 by now, of items that earlier runs saw at other levels."""
    before, now = latent(rng, correlation, size)
    return np.clip(0.3 + before / 4 + rng.choice([0.0, 0.3], size), 0, 1), np.minimum(1.0, ndtr(now + 1) * 1.3)


def never_quite_one(zeros: float, rng: Rng, foreseen: float, size: int) -> tuple[Array, Array]:
    """Scores a hair below 1 and rare zeros, of which earlier runs had this share."""
    before = np.where(rng.random(size) < zeros, 0.0, rng.uniform(0.95, 1.0, size))
    again = rng.random(size) < foreseen
    return before, np.where(again, before, np.where(rng.random(size) < zeros, 0.0, rng.uniform(0.95, 1.0, size)))


def _mean_of(draw: Draw) -> float:
    return float(np.mean(draw(np.random.default_rng(1), 0.0, 4_000_000)[1]))


KINDS: dict[str, tuple[float, Draw]] = {
    "pass/fail, right": (0.6, partial(verdicts, 0.6)),
    "pass/fail, 90%, right": (0.9, partial(verdicts, 0.9)),
    "pass/fail, wrong": (0.5, wrong_verdicts),
    "pass/fail, drifting": (0.9 * float(ndtr(1)) + 0.1 * float(ndtr(1)), drifting_verdicts),
    "graded, right": (0.5, scores),
    "graded, wrong": (1 / 3, wrong_scores),
    "graded, drifting": (_mean_of(drifting_scores), drifting_scores),
}


def adjusted(draw: Draw, correlation: float, n: int, pool: int, rng: Rng) -> HistoryMean:
    """Adjust the mean of a run of n of the items."""
    before, now = draw(rng, correlation, pool)
    return history_mean(now[:n], before[:n], before[n:])


def covered(draw: Draw, truth: float, correlation: float, n: int, pool: int, rng: Rng) -> bool:
    """Whether the interval contains the truth."""
    return contains(adjusted(draw, correlation, n, pool, rng).interval, truth)


def relative_width(draw: Draw, n: int, pool: int, runs: int, rng: Rng) -> Measured:
    """Compare the mean width of n samples with a history with that of more samples without one."""
    widths = np.zeros((runs, 2))
    for run in range(runs):
        some, plain = (adjusted(draw, 0.7, size, pool, rng) for size in (n, round(n / SHARE)))
        widths[run] = [0.0 if one is None else one.width for one in (some.interval, plain.plain.interval)]
    found = widths.mean(axis=0)
    error = float(np.std(widths[:, 0] / found[0] - widths[:, 1] / found[1]) / np.sqrt(runs))
    return Measured(float(found[0] / found[1]), error)


def clustered_covered(correlation: float, n: int, pool: int, rng: Rng) -> bool:
    """Whether the interval contains the rate of samples in clusters, which share a part of history and result."""
    clusters = np.arange(pool) // 5
    parts = [latent(rng, correlation, size) for size in (pool // 5, pool)]
    before, now = (np.sqrt(0.3) * parts[0][k][clusters] + np.sqrt(0.7) * parts[1][k] for k in (0, 1))
    y = (now > -0.5).astype(float)
    found = history_mean(y[:n], ndtr(before)[:n], ndtr(before)[n:], clusters=clusters)
    return contains(found.interval, float(ndtr(0.5)))


def repeats_covered(correlation: float, n: int, pool: int, rng: Rng) -> bool:
    """Whether the interval contains the rate with repeats, where some samples are new and harder."""
    before, now = latent(rng, correlation, pool)
    new = rng.random(n) < 1 / 3
    chances = ndtr(now[:n] * 2 - 0.5 * new)
    y = draw_outcomes(rng, np.repeat(chances[:, None], 3, axis=1))
    x = np.where(new, np.nan, ndtr(before[:n]))
    found = history_mean(Repeats(y.reshape(-1), np.full(n, 3)), x, ndtr(before[n:]))
    truth = (2 * 0.5 + float(ndtr(-0.5 / np.sqrt(5)))) / 3
    return contains(found.interval, truth)
