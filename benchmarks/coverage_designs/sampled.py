"""Rates of live traces that were sampled at several shares, which a budget lowers: bias and coverage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np

from fairtrial.integrations.tracing.live import lowered
from fairtrial.stats import unequal_chances_mean
from fairtrial.stats.drift import DriftDetector

from . import COVERAGE, Array, Design, Measured, Rng

UNBIASED = (0.0, 0.005)
"""How far the mean of estimates may be from the truth: half a point."""
BETS = (0.0, 1.0)
"""What a bet that the mean has dropped may become in a day without a drop, on average."""


@dataclass(frozen=True, slots=True)
class LiveDay:
    """The traces of a day: a common kind, and a rare stratum with a share and a pass rate of its own.

    With a budget, judging a trace costs 1, and 3 if it fails, so that what lowers the rates depends on the scores.
    """

    traces: int
    sample: float
    rate: float
    rare: float = 0.0
    rare_sample: float = 1.0
    rare_rate: float = 0.0
    budget: float | None = None
    checks: int = 24

    @property
    def truth(self) -> float:
        return (1 - self.rare) * self.rate + self.rare * self.rare_rate

    def draw(self, rng: Rng) -> tuple[Array, Array]:
        """Draw the scores of the sampled traces of a day, and their weights."""
        factor, spent, load, scores, weights = 1.0, 0.0, 0.0, [], []
        for check in range(self.checks):
            for share, chance, rate in ((1 - self.rare, self.sample, self.rate),
                                        (self.rare, self.rare_sample, self.rare_rate)):  # fmt: skip
                taken = rng.binomial(rng.poisson(self.traces * share / self.checks), factor * chance)
                scores.append((rng.random(taken) < rate).astype(float))
                weights.append(np.full(taken, 1 / (factor * chance) if factor else 1.0))
                spent += float(np.sum(3 - 2 * scores[-1]))
                load += taken / factor if factor else 0.0  # As many as there would have been, had no rate been lowered.
            if self.budget is not None and spent:
                mean = spent / sum(map(np.size, scores))
                per_check = mean * factor * load / (check + 1)
                factor = lowered(factor, self.budget, spent, per_check, self.checks - check - 1)
        return np.concatenate(scores), np.concatenate(weights)


DAYS = {
    "one share": LiveDay(20_000, 0.01, 0.9),
    "a stratum of failures at 20%": LiveDay(20_000, 0.01, 0.95, 0.05, 0.2, 0.4),
    "a rare stratum, all of it": LiveDay(20_000, 0.01, 0.98, 0.02, 1.0, 0.1),
    "few failures among the common": LiveDay(20_000, 0.01, 0.99, 0.05, 0.2, 0.9),
    "a small day": LiveDay(5_000, 0.01, 0.95, 0.05, 0.2, 0.4),
    "half pass": LiveDay(20_000, 0.01, 0.5, 0.1, 0.1, 0.2),
    "a budget for a third": LiveDay(20_000, 0.01, 0.9, budget=80),
    "strata and a budget for a third": LiveDay(40_000, 0.01, 0.95, 0.02, 0.2, 0.4, budget=260),
}


def designs() -> Iterator[Design]:
    """Return the designs."""
    for name, day in DAYS.items():
        yield Design("rate of sampled live traces", "coverage", COVERAGE, partial(covered, day), name, quick=150,
                     most=2_000)  # fmt: skip
        yield Design("rate of sampled live traces", "bias", UNBIASED, partial(bias, day), name, quick=150, most=2_000)
    for name in ("strata and a budget for a third", "a stratum of failures at 20%"):
        yield Design("a bet on a day without a drop", "mean of the capital", BETS, partial(capital, DAYS[name]), name,
                     quick=150, most=2_000)  # fmt: skip


def covered(day: LiveDay, runs: int, rng: Rng) -> float:
    """Return how often the interval contains the rate of all traces."""
    held = 0
    for _ in range(runs):
        interval = unequal_chances_mean(*day.draw(rng)).interval
        held += interval is not None and interval.low <= day.truth <= interval.high
    return held / runs


def bias(day: LiveDay, runs: int, rng: Rng) -> Measured:
    """Return the distance of the mean of estimates from the rate of all traces."""
    found = np.array([unequal_chances_mean(*day.draw(rng)).mean for _ in range(runs)], dtype=float)
    return Measured(abs(float(found.mean()) - day.truth), float(found.std()) / sqrt(runs))


def capital(day: LiveDay, runs: int, rng: Rng) -> Measured:
    """Return what the smallest stake of the alarm becomes in a day, without the 1 that is added to it."""
    found = np.empty(runs)
    for run in range(runs):
        scores, weights = day.draw(rng)
        detector = DriftDetector(np.array([day.truth]), every=1_000)
        detector.add_day(scores, np.ones((1, scores.size)), weights / weights.max())
        found[run] = np.exp(detector.levels[0, 0])
    return Measured(float(found.mean()), float(found.std()) / sqrt(runs))
