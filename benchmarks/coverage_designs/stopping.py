"""Stop and compare: what is said about a run that ended by its own rule.

Working model: samples pass with chances of their own, drawn from a beta distribution; a better system passes a share
of what the other fails, a worse one fails a share of what the other passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.comparison import MetricComparison
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.stats import Interval, paired_rates_interval, pairs_decision, stopped_by_width

from . import COVERAGE, GATE_ERRORS, Array, Design, Rng, draw_outcomes, draw_rates, share

ALWAYS = (1.0, 1.0)
MOST = 300
DRAWS = ComparisonSettings(draws=499)


@dataclass(frozen=True, slots=True)
class Systems:
    """Two systems: the mean of the baseline, the true difference, and how the scores of both are drawn."""

    mean: float
    difference: float
    repeats: int = 1
    is_graded: bool = False

    def draw(self, rng: Rng, samples: int = MOST) -> tuple[Array, Array]:
        """Draw the scores of all samples, one row for each."""
        if self.is_graded:
            return self._grades(rng, 0.0), self._grades(rng, 4 * self.difference)
        chances = draw_rates(rng, self.mean, 0.4, samples)
        gain = self.difference
        others = chances + (gain * (1 - chances) / (1 - self.mean) if gain > 0 else gain * chances / self.mean)
        shape = (samples, self.repeats)
        return draw_outcomes(rng, np.broadcast_to(chances[:, None], shape)), draw_outcomes(
            rng, np.broadcast_to(others[:, None], shape)
        )

    def _grades(self, rng: Rng, lifted: float) -> Array:
        """Draw scores of which half are 1 and the others Beta(2, 2); a share of all is lifted to 1."""
        perfect = rng.random((MOST, 1)) < 1 - 0.5 * (1 - lifted)
        return np.where(perfect, 1.0, rng.beta(2, 2, (MOST, 1)))


WATCHED = {
    "identical, 70% pass": Systems(0.7, 0.0),
    "identical, 95% pass": Systems(0.95, 0.0),
    "identical, 70% pass, 3 repeats": Systems(0.7, 0.0, repeats=3),
    "identical, graded": Systems(0.75, 0.0, is_graded=True),
    "70% and 80% pass": Systems(0.7, 0.1),
    "70% and 80% pass, 3 repeats": Systems(0.7, 0.1, repeats=3),
    "graded, 0.75 and 0.85": Systems(0.75, 0.1, is_graded=True),
}


def designs() -> Iterator[Design]:
    """Return the designs."""
    for kind, systems in WATCHED.items():
        name, cell = "stopped once one is better, then compared", f"{kind}, a look after every sample up to {MOST}"
        quick = 20 if systems.repeats == 1 else 0
        yield Design(name, "coverage", COVERAGE, share(partial(compared, covers, systems)), cell, quick=quick)
        if systems.repeats > 1:
            continue
        yield Design(name, "verdict as interval", ALWAYS, share(partial(compared, agrees, systems)), cell, quick=quick)
        if not systems.difference:
            yield Design("floor of it exactly met", "PASS", GATE_ERRORS, share(partial(passes, systems)), cell)
    for rate in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98):
        for difference in (0.0, 0.05, -0.1):
            if rate + difference < 1:
                yield from width_designs(rate, difference)


def width_designs(rate: float, difference: float) -> Iterator[Design]:
    """A rule that looks at the width of both pass rates, then the ordinary interval of the difference."""
    name = "stopped by width, then compared"
    for width in (0.1, 0.2):
        cell, quick = f"{rate:.0%} pass, {difference:+.0%}, width {width}, a look every 10 samples", 0
        if (rate, difference, width) == (0.8, 0.0, 0.2):
            quick = 500
        runs = partial(pairs_after_width, Systems(rate, difference), width)
        yield Design(name, "coverage", COVERAGE, runs, cell, quick=quick)
    for kind, repeats in (("the earlier run with 3 repeats", 3), ("graded", 1)):
        if rate in (0.5, 0.8, 0.98) and difference <= 0:
            once = share(partial(compared_after_width, Systems(rate, difference, repeats), kind))
            cell = f"{kind}, {rate:.0%} pass, {difference:+.0%}, width 0.2"
            quick = 40 if (rate, difference) == (0.8, 0.0) else 0
            yield Design(name, "coverage", COVERAGE, once, cell, quick=quick)


def watched_sides(systems: Systems, rng: Rng) -> list[Columns]:
    """Return both systems as far as the run came that ended once one was better."""
    sides = systems.draw(rng)
    seen = pairs_decision(sides[1].mean(axis=1) - sides[0].mean(axis=1)).looked_at
    return [
        Columns.of({"value": side[:seen]}, name=name, adaptive=seen) for side, name in zip(sides, "ab", strict=True)
    ]


def compared(holds: Callable[[MetricComparison, float], bool], systems: Systems, rng: Rng) -> bool:
    """Whether something holds of a comparison of two systems where the run stopped."""
    baseline, candidate = watched_sides(systems, rng)
    return holds(compare_columns(baseline, [candidate], metrics=["value"])["b"]["value"], systems.difference)


def covers(found: MetricComparison, truth: float) -> bool:
    """Whether the interval contains the true difference."""
    return found.low is not None and found.high is not None and found.low <= truth <= found.high


def differs(found: MetricComparison, _truth: float) -> bool:
    """Whether the systems are called different."""
    return found.verdict in ("better", "worse")


def agrees(found: MetricComparison, truth: float) -> bool:
    """Whether verdict, interval and p-value say the same."""
    called = differs(found, truth)
    return called is not covers(found, 0.0) and called is (found.p is not None and found.p <= 0.05)


def passes(systems: Systems, rng: Rng) -> bool:
    """Whether a floor at the true mean of the baseline passes where the run stopped."""
    return gate_columns(watched_sides(systems, rng)[0], GateRules(floors={"value": systems.mean})).status == "pass"


def compared_after_width(systems: Systems, kind: str, rng: Rng) -> bool:
    """Whether the ordinary interval contains the difference where the width of pass rates stopped the run."""
    truth, sides = systems.difference, list(systems.draw(rng))
    if systems.repeats > 1:  # The baseline is an earlier run of fixed length.
        sides[1] = sides[1][:, :1]
        seen = stop_by_width(sides[1:])
    else:
        seen = stop_by_width(sides)
    if kind == "graded":  # A score of .6 or more passes.
        truth *= 0.8 - 0.3
        sides = [np.where(one > 0, rng.uniform(0.6, 1.0, one.shape), rng.uniform(0.0, 0.6, one.shape)) for one in sides]
    baseline, candidate = (
        replace(Columns.of({"value": side[:seen]}, name=name, adaptive=seen), stopped_by_width=True)
        for side, name in zip(sides, "ab", strict=True)
    )
    return covers(compare_columns(baseline, [candidate], metrics=["value"], settings=DRAWS)["b"]["value"], truth)


def stop_by_width(sides: Sequence[Array]) -> int:
    """Return the samples at the first look, every 10, at which the interval of every rate is 20 points wide or less."""
    for seen in range(10, MOST, 10):
        if all(rate_width(int(side[:seen].sum()), seen) <= 0.2 for side in sides):
            return seen
    return MOST


def pairs_after_width(systems: Systems, width: float, runs: int, rng: Rng) -> float:
    """Return how often the interval of pass/fail pairs contains the difference; it depends on three counts alone."""
    covered = 0
    for _ in range(runs):
        baseline, candidate = (side[:, 0] for side in systems.draw(rng, 800))
        passed = [np.cumsum(side)[9::10].astype(int).tolist() for side in (baseline, candidate)]
        looks = range(10, 801, 10)
        widths = (
            max(map(rate_width, counts, (seen, seen)))
            for counts, seen in zip(zip(*passed, strict=True), looks, strict=True)
        )
        seen = next((seen for seen, one in zip(looks, widths, strict=True) if one <= width), 800)
        change = candidate[:seen] - baseline[:seen]
        found = pairs_interval(int(np.count_nonzero(change > 0)), int(np.count_nonzero(change < 0)), seen)
        covered += found.contains(systems.difference)
    return covered / runs


@cache
def rate_width(successes: int, n: int) -> float:
    """Return the width of the interval of a rate that the rule looks at."""
    return stopped_by_width(successes, n).width


@cache
def pairs_interval(wins: int, losses: int, n: int) -> Interval:
    """Return the interval of a comparison of single pass/fail outcomes."""
    return paired_rates_interval(wins, losses, n)
