"""Runs that look at their own results to know when to end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fairtrial.stats import pairs_decision, rate_decision

from . import ALARMS, COVERAGE, Design, Rng, share

MOST = 2_000
WRONG = (0.0, 0.025)


def designs() -> Iterator[Design]:
    """Return the designs."""
    for unequal in (0.05, 0.2, 0.5):
        once = partial(pairs_alarm, unequal)
        cell = f"{unequal:.0%} unequal, a look after every pair up to {MOST:,}"
        yield Design("identical systems", "false alarms", ALARMS, share(once), cell, quick=60 if unequal == 0.2 else 0)
    for won, lost in ((0.15, 0.10), (0.10, 0.05), (0.25, 0.15), (0.06, 0.04)):
        cell = f"{won:.0%} won, {lost:.0%} lost, a look after every pair up to {MOST:,}"
        quick = 60 if won == 0.15 else 0
        once = partial(difference_covered, won, lost)
        yield Design("difference where the run stopped", "coverage", COVERAGE, share(once), cell, quick=quick)
        once = partial(wrong_direction, won, lost)
        yield Design("difference where the run stopped", "wrong direction", WRONG, share(once), cell, quick=quick)
    for rate in (0.5, 0.8, 0.9, 0.95, 0.98):
        for width in (0.1, 0.2):
            yield Design(
                "rate where the width stopped the run",
                "coverage",
                COVERAGE,
                share(partial(rate_covered, rate, width)),
                f"rate {rate}, width {width}, a look after every sample",
                quick=100 if width == 0.2 else 0,
            )


def pairs_alarm(unequal: float, rng: Rng) -> bool:
    """Whether identical systems are told apart at any look."""
    differences = rng.choice([1, 0, -1], size=MOST, p=[unequal / 2, 1 - unequal, unequal / 2])
    return pairs_decision(differences).verdict is not None


def difference_covered(won: float, lost: float, rng: Rng) -> bool:
    """Whether the interval contains the difference where the run stopped."""
    differences = rng.choice([1, 0, -1], size=MOST, p=[won, 1 - won - lost, lost])
    return pairs_decision(differences).interval.contains(won - lost)


def wrong_direction(won: float, lost: float, rng: Rng) -> bool:
    """Whether the better system is called worse."""
    differences = rng.choice([1, 0, -1], size=MOST, p=[won, 1 - won - lost, lost])
    return pairs_decision(differences).verdict == "worse"


def rate_covered(rate: float, width: float, rng: Rng) -> bool:
    """Whether the interval contains the rate where its width stopped the run."""
    return rate_decision(rng.random(700) < rate, width=width).interval.contains(rate)
