"""Comparisons of systems that are identical, or differ by a known amount, through the functions that users call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
from scipy.special import gammaln, xlogy

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.stats import paired_difference, paired_rates_interval

from . import (
    ALARMS,
    COVERAGE,
    GATE_ERRORS,
    Array,
    Design,
    Rng,
    contains,
    draw_outcomes,
    draw_rates,
    share,
    share_or_warned,
)

TRUTHS = ((0.05, 0.0), (0.2, 0.0), (0.5, 0.0), (0.3, 0.1), (0.1, 0.02), (0.9, 0.02))


def designs() -> Iterator[Design]:
    """Return the designs."""
    for name, draw in IDENTICAL.items():
        yield Design("identical systems", "false alarms", ALARMS, share(partial(alarmed, draw)), name, quick=150)
    for moving in (0.05, 0.2, 1.0):
        for n in (20, 50):
            once = partial(graded_alarm, n, moving)
            cell = f"graded, {moving:.0%} of {n} scores differ"
            yield Design("identical systems", "false alarms", ALARMS, share(once), cell, quick=100 if n == 50 else 0)
    for n in (300, 1000):
        for metrics in (1, 8):
            cell = f"{metrics} metrics of {n} samples" if metrics > 1 else f"1 metric of {n} samples"
            yield Design(
                "difference of exactly what matters",
                '"as good as"',
                GATE_ERRORS,
                share_or_warned(partial(called_as_good, n, metrics), good=False),
                cell,
                quick=60 if n == 300 else 0,
            )
    for n in (10, 20, 40, 100, 200):
        for won, lost in TRUTHS:
            cell = f"{won:.0%} won, {lost:.0%} lost, {n} pairs"
            yield _exact("difference of pass rates", "coverage", partial(difference_coverage, n, won, lost), cell, n)
    for n in (10, 14, 20, 22, 30, 40, 60, 100):
        cell = f"{n} pairs, any rates"
        yield _exact("difference of pass rates", "coverage, worst rates", partial(worst_coverage, n), cell, n)
    for n in (50, 300):
        yield Design(
            "difference of graded scores", "coverage", COVERAGE, share(partial(graded_coverage, n)), f"true 0.05, n {n}"
        )


def _exact(name: str, what: str, figure: Callable[[], float], cell: str, n: int) -> Design:
    return Design(name, what, COVERAGE, lambda _runs, _rng: figure(), cell, exact=True, quick=int(n == 40))


def alarmed(draw: Callable[[Rng], list[Columns]], rng: Rng) -> bool:
    """Whether any metric of any candidate is called better or worse."""
    sides = draw(rng)
    made = compare_columns(sides[0], sides[1:], metrics=tuple(sides[0].values), settings=ComparisonSettings(draws=499))
    return any(
        metric.verdict in ("better", "worse", "higher", "lower") for one in made.candidates for metric in one.metrics
    )


def called_as_good(n: int, metrics: int, rng: Rng) -> tuple[bool, bool]:
    """Whether any metric that is worse by 0.05 is called as good, and whether each is said to be decided alone.

    Enough pairs differ that an interval inside the difference that matters can contain 0.
    """
    names = [f"m{place}" for place in range(metrics)]
    both, level, won = rng.random((metrics, n)) < 0.8, rng.random((metrics, n)), 0.01 if n < 500 else 0.09
    old = np.where(level < won, 0.0, np.where(level < 2 * won + 0.05, 1.0, both))
    new = np.where(level < won, 1.0, np.where(level < 2 * won + 0.05, 0.0, both))
    sides = [Columns.of(dict(zip(names, rows, strict=True)), name=side) for side, rows in (("old", old), ("new", new))]
    settings = ComparisonSettings(higher_is_better=frozenset(names), bounds=dict.fromkeys(names, (0.0, 1.0)))
    made = compare_columns(sides[0], sides[1:], metrics=names, settings=settings).candidates[0]
    called = [one.verdict == "as good as" for one in made.metrics]
    return any(called), any("is decided for each of" in warning for warning in made.warnings)


def single(rng: Rng) -> list[Columns]:
    """Draw pass/fail outcomes of 100 samples."""
    chance = draw_rates(rng, 0.8, 0.5, 100)
    return [Columns.of({"passed": draw_outcomes(rng, chance)}, name=name) for name in "ab"]


def with_errors(rng: Rng) -> list[Columns]:
    """Draw 100 samples of which a tenth times out and a few cannot be scored, on both sides."""
    chance = draw_rates(rng, 0.8, 0.5, 100)
    sides = []
    for name in "ab":
        outcomes = rng.choice([SCORED, FAILED, MISSING], size=100, p=[0.87, 0.1, 0.03])
        sides.append(Columns.of({"passed": draw_outcomes(rng, chance)}, name=name, outcomes=outcomes))
    return sides


def three_candidates(rng: Rng) -> list[Columns]:
    """Draw a baseline and three candidates on 80 samples."""
    chance = draw_rates(rng, 0.7, 0.5, 80)
    return [Columns.of({"passed": draw_outcomes(rng, chance)}, name=name) for name in "abcd"]


def clusters_and_metrics(rng: Rng) -> list[Columns]:
    """Draw three metrics of 60 samples in 10 clusters, two repeats each."""
    labels = np.arange(60) % 10
    shared = draw_rates(rng, 0.7, 0.3, 10)
    sides = []
    for name in "ab":
        # In a third of the clusters each system has its own luck: clusters matter for the difference, too.
        own = np.where(rng.random(10) < 0.3, draw_rates(rng, 0.7, 0.3, 10), shared)[labels][:, None]
        passed = draw_outcomes(rng, np.broadcast_to(own, (60, 2)))
        value = np.clip(0.5 * passed + 0.5 * rng.random((60, 2)), 0, 1)
        words = 100 * own + rng.normal(0, 20, (60, 2))
        sides.append(Columns.of({"passed": passed, "value": value, "words": words}, name=name, clusters=labels))
    return sides


IDENTICAL: dict[str, Callable[[Rng], list[Columns]]] = {
    "pass/fail, 100 samples": single,
    "timeouts and scorer errors, 100 samples": with_errors,
    "three candidates, 80 samples": three_candidates,
    "three metrics, 10 clusters of 6, 2 repeats": clusters_and_metrics,
}


def graded_alarm(n: int, moving: float, rng: Rng) -> bool:
    """Whether two identical systems are called different whose scores differ on a share of the samples only."""
    base = rng.beta(4, 1, n)
    first, second = (np.clip(base + rng.normal(0, 0.1, n), 0, 1) for _ in "ab")
    second = np.where(rng.random(n) < moving, second, first)
    return bool(paired_difference(first, second, draws=499).differs)


def graded_coverage(n: int, rng: Rng) -> bool:
    """Whether the interval of a difference of 0.05 contains it."""
    base = rng.uniform(0.2, 0.7, n)
    found = paired_difference(base + 0.05 + rng.uniform(-0.1, 0.1, n), base + rng.uniform(-0.1, 0.1, n), draws=499)
    return contains(found.interval, 0.05)


@cache
def ends(n: int) -> tuple[Array, Array]:
    """Return the ends of the intervals by wins and losses; of what cannot be, numbers that contain nothing."""
    low, high = np.full((n + 1, n + 1), np.inf), np.full((n + 1, n + 1), -np.inf)
    for wins in range(n + 1):
        for losses in range(n + 1 - wins):
            found = paired_rates_interval(wins, losses, n)
            low[wins, losses], high[wins, losses] = found.low, found.high
    return low, high


def difference_coverage(n: int, won: float, lost: float) -> float:
    """Return the exact coverage of the interval of a difference, over all numbers of wins and losses."""
    low, high = ends(n)
    wins, losses = np.mgrid[: n + 1, : n + 1]
    ties = n - wins - losses
    contained = (ties >= 0) & (low <= won - lost + 1e-12) & (high >= won - lost - 1e-12)
    wins, losses, ties = wins[contained], losses[contained], ties[contained]
    chances = gammaln(n + 1) - gammaln(wins + 1) - gammaln(losses + 1) - gammaln(ties + 1)
    chances += xlogy(wins, won) + xlogy(losses, lost) + xlogy(ties, max(0.0, 1 - won - lost))
    return float(np.exp(chances).sum())


def worst_coverage(n: int) -> float:
    """Return the least coverage over a grid of rates of wins, losses and ties, denser where one of them is rare."""
    rare = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
    truths = [(won, lost) for won in np.arange(0.01, 1.0, 0.03) for lost in rare]
    truths += [(won, 1 - tied - won) for won in np.arange(0.01, 1.0, 0.03) for tied in rare]
    return min(difference_coverage(n, won, lost) for won, lost in truths if 0 <= lost <= won <= 1 - lost)
