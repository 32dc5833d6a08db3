"""Power: a difference of the stated size is found as often as stated.

Two promises are measured, through the functions that the commands call:

- the minimum detectable effect of a comparison: systems that differ by what comparisons of this kind state on average;
- the number of samples that a comparison, a gate or a plan names: a pilot names it, and a fresh run has that size and
  the stated truth. Pilots that name no number are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

import numpy as np

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.comparison import MetricComparison
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.reports.plan.plan import PlanRequest, plan_columns
from fairtrial.reports.plan.spread import HistorySide

from . import POWER, Array, Design, Limit, Rng, draw_outcomes, draw_rates

type Sides = tuple[Columns, Columns]
type Draw = Callable[[Rng, float], Sides]
"""A baseline, and a candidate that is better by the given difference in the first metric."""
type Sized = Callable[[int], Draw]
"""The same for a number of samples."""

FOLLOW_UP: Limit = (0.75, 1.0)
"""How often a fresh run of the size that was named must find what it was named for."""

LONG_TAILS = {"median:ms": 150.0, "p95:ms": 1000 * np.exp(1.6449 * 1.25**0.5) * 0.15, "geomean:ms": 0.15}
"""What 15% more is in each of these figures."""

DRAWS = 499
MATTERS = 0.05
_PILOTS, _ROUNDS = 40, 4


def designs() -> Iterator[Design]:
    """Return the designs."""
    for cell, draw in STATED.items():
        quick = 150 if cell in ("8 clusters, 3 tests", "40 pass/fail pairs, 1 test") else 0
        name = "difference of the minimum detectable effect"
        yield Design(name, "found", POWER, at_stated_effect(draw), cell, quick=quick)
    for cell, (pilot, sized) in PILOTS.items():
        quick = 150 if cell == "pilot of 100 pass/fail pairs" else 0
        for name, named in (("number of samples named by compare", by_compare), ("by plan", by_plan)):
            label = name if name.startswith("number") else f"number of samples named {name}"
            yield Design(label, "found", FOLLOW_UP, follow_up(pilot, sized, named), cell, quick=quick)
    for metric, difference in LONG_TAILS.items():
        label, cell = "number of samples named by plan", f"{metric} of a long tail, pilot of 300 pairs"
        quick = 5 if metric.startswith("geomean") else 0
        yield Design(label, "found", FOLLOW_UP, tail_follow_up(metric, difference), cell, quick=quick, most=1000)
    for n in (40, 100, 300):
        yield Design(
            "number of samples named by a gate",
            "passed",
            FOLLOW_UP,
            margin_follow_up(n),
            f"margin 0.05, pilot of {n} pairs, truly equal",
            quick=150 if n == 100 else 0,
        )
        yield Design(
            "number of samples named by a gate",
            "passed",
            FOLLOW_UP,
            floor_follow_up(n),
            f"floor 0.8, pilot of {n} samples, truth 0.85",
        )


def graded_clusters(clusters: int, size: int, metrics: int) -> Draw:
    """Return graded scores in clusters of one size; the candidate has cluster effects of its own."""
    labels = np.repeat(np.arange(clusters), size)

    def draw(rng: Rng, effect: float) -> Sides:
        level = rng.uniform(0.3, 0.5, labels.size)
        sides: list[dict[str, Array]] = [{}, {}]
        for place in range(metrics):
            own = (0.0 if place else effect) + rng.normal(0, 0.1, clusters)[labels]
            for side, shift in zip(sides, (np.zeros(labels.size), own), strict=True):
                side[f"m{place}"] = np.clip(level + shift + rng.normal(0, 0.1, labels.size), 0, 1)
        return made(sides, labels)

    return draw


def passes_with_repeats(n: int, repeats: int, metrics: int, rate: float = 0.7, correlation: float = 0.5) -> Draw:
    """Return passes and failures with repeats; the candidate passes a share of what failed."""

    def draw(rng: Rng, effect: float) -> Sides:
        sides: list[dict[str, Array]] = [{}, {}]
        for place in range(metrics):
            chance = np.broadcast_to(draw_rates(rng, rate, correlation, n)[:, None], (n, repeats))
            better = np.clip(chance + (0.0 if place else effect) / (1 - rate) * (1 - chance), 0, 1)
            for side, passing in zip(sides, (chance, better), strict=True):
                side[f"m{place}"] = draw_outcomes(rng, passing)
        return made(sides, None)

    return draw


def pass_fail_pairs(n: int, unequal: float, metrics: int = 1) -> Draw:
    """Return single passes and failures: this share of pairs is unequal by chance, and the difference comes on top."""

    def draw(rng: Rng, effect: float) -> Sides:
        sides: list[dict[str, Array]] = [{}, {}]
        for place in range(metrics):
            u, both = rng.random(n), (rng.random(n) < 0.7).astype(float)
            won, lost = u < unequal / 2 + (0.0 if place else effect), u > 1 - unequal / 2
            sides[0][f"m{place}"] = np.where(won, 0.0, np.where(lost, 1.0, both))
            sides[1][f"m{place}"] = np.where(won, 1.0, np.where(lost, 0.0, both))
        return made(sides, None)

    return draw


def long_tails(rng: Rng, n: int, factor: float) -> Sides:
    """Draw lognormal times on the same samples, those of the second side longer by a factor."""
    level = rng.normal(0, 1, n)
    old, new = (1000 * np.exp(level + rng.normal(0, 0.5, n)) * times for times in (1.0, factor))
    sides = [Columns.of({"passed": np.ones(n), "ms": one}, name=name) for name, one in (("old", old), ("new", new))]
    return sides[0], sides[1]


def tail_follow_up(metric: str, difference: float) -> Callable[[int, Rng], float]:
    """Measure how often a run of the size that a plan names finds that times are longer by 15%."""

    def measure(runs: int, rng: Rng) -> float:
        found = 0
        for _ in range(runs):
            pilots = [HistorySide(one, one.name, one.name, "baseline") for one in long_tails(rng, 300, 1.0)]
            size = plan_columns(pilots, PlanRequest(difference, metric, repeats=(1,))).samples
            assert size is not None
            old, new = long_tails(rng, size, 1.15)
            settings = ComparisonSettings(lower_is_better=frozenset({"ms"}))
            made = compare_columns(old, [new], metrics=[metric], settings=settings).candidates[0].metrics[0]
            found += made.verdict == "worse"
        return found / runs

    return measure


def made(values: list[dict[str, Array]], clusters: np.ndarray[tuple[int], np.dtype[np.intp]] | None) -> Sides:
    """Return columns of what was drawn; the first metric is the pass rate too, where it is one."""
    sides = []
    for one, name in zip(values, ("old", "new"), strict=True):
        first = next(iter(one.values()))
        passed = first if bool(np.all((first == 0) | (first == 1))) else np.ones(first.shape)
        columns = {"passed": passed, **one}
        shares = {metric: (0.0, 1.0) for metric, drawn in one.items() if drawn.min() >= 0 and drawn.max() <= 1}
        sides.append(
            Columns.of(columns, name=name, clusters=clusters, directions=dict.fromkeys(one, True), ranges=shares)
        )
    return sides[0], sides[1]


def compared(sides: Sides, seed: int = 0) -> MetricComparison:
    """Return the comparison of the first metric, made together with all others."""
    metrics = [name for name in sides[0].values if name != "passed"]
    settings = ComparisonSettings(draws=DRAWS, seed=seed, smallest_difference_that_matters=MATTERS)
    return compare_columns(sides[0], [sides[1]], metrics=metrics, settings=settings).candidates[0].metrics[0]


def stated_effect(draw: Draw, rng: Rng, start: float = 0.1) -> float:
    """Return the minimum detectable effect that comparisons state on average where it is the true difference."""
    effect = start
    for _ in range(_ROUNDS):
        stated = [compared(draw(rng, effect)).mde for _ in range(_PILOTS)]
        known = [one for one in stated if one is not None]
        if not known:
            return float("nan")
        effect = (effect + float(np.mean(known))) / 2
    return effect


def at_stated_effect(draw: Draw) -> Callable[[int, Rng], float]:
    """Measure how often systems that differ by the stated effect are told apart."""

    def measure(runs: int, rng: Rng) -> float:
        effect = stated_effect(draw, rng)
        return sum(compared(draw(rng, effect), run).verdict == "better" for run in range(runs)) / runs

    return measure


def by_compare(sides: Sides) -> int | None:
    """Return the number of samples that a comparison names."""
    return compared(sides).needed


def by_plan(sides: Sides) -> int | None:
    """Return the number of samples that a plan from these two sides names, with as many repeats as they have."""
    metrics = [name for name in sides[0].values if name != "passed"]
    history = [HistorySide(side, side.name, "run", side.name, ("", side.name)) for side in sides]
    request = PlanRequest(MATTERS, metrics[0], repeats=(sides[0].repeats,), tests=len(metrics))
    return plan_columns(history, request).samples


def follow_up(pilot: Draw, sized: Sized, named: Callable[[Sides], int | None]) -> Callable[[int, Rng], float]:
    """Measure how often a fresh run of the size that a pilot of equal systems named finds the stated difference."""

    def measure(runs: int, rng: Rng) -> float:
        found = 0
        for run in range(runs):
            samples = None
            while samples is None:
                samples = named(pilot(rng, 0.0))
            found += compared(sized(samples)(rng, MATTERS), run).verdict == "better"
        return found / runs

    return measure


def margin_follow_up(n: int, margin: float = 0.05, unequal: float = 0.2) -> Callable[[int, Rng], float]:
    """Measure how often a fresh run of the size that a gate named shows that two equal systems keep the margin."""
    rules = GateRules(margin=margin)

    def gated(size: int, rng: Rng) -> tuple[str, int | None]:
        old, new = pass_fail_pairs(size, unequal)(rng, 0.0)
        result = gate_columns(new, rules, old)
        return result.status, result.needed

    return _repeated_gate(gated, n)


def floor_follow_up(n: int, floor: float = 0.8) -> Callable[[int, Rng], float]:
    """Measure how often a fresh run of the size that a gate named passes a floor that the truth exceeds by .05."""
    rules = GateRules(min_pass_rate=floor)

    def gated(size: int, rng: Rng) -> tuple[str, int | None]:
        passed = (rng.random(size) < floor + MATTERS).astype(float)
        result = gate_columns(Columns.of({"passed": passed}), rules)
        return result.status, result.needed

    return _repeated_gate(gated, n)


def _repeated_gate(gated: Callable[[int, Rng], tuple[str, int | None]], n: int) -> Callable[[int, Rng], float]:
    def measure(runs: int, rng: Rng) -> float:
        passed = 0
        for _ in range(runs):
            needed = None
            while needed is None:
                needed = gated(n, rng)[1]
            passed += gated(needed, rng)[0] == "pass"
        return passed / runs

    return measure


STATED: dict[str, Draw] = {
    "8 clusters, 1 test": graded_clusters(8, 10, 1),
    "8 clusters, 3 tests": graded_clusters(8, 10, 3),
    "8 clusters, 8 tests": graded_clusters(8, 10, 8),
    "6 clusters, 2 tests": graded_clusters(6, 10, 2),
    "20 clusters, 8 tests": graded_clusters(20, 10, 8),
    "30 samples x 5 repeats, 1 test": passes_with_repeats(30, 5, 1),
    "30 samples x 5 repeats, 5 tests": passes_with_repeats(30, 5, 5),
    "40 pass/fail pairs, 1 test": pass_fail_pairs(40, 0.3),
    "40 pass/fail pairs, 2 tests": pass_fail_pairs(40, 0.3, 2),
    "200 pass/fail pairs, 1 test": pass_fail_pairs(200, 0.1),
}
"""Comparisons of the kinds that state an effect; 40 pass/fail pairs are those of the project that `init` makes."""

PILOTS: dict[str, tuple[Draw, Sized]] = {
    **{
        f"pilot of {n} pass/fail pairs": (pass_fail_pairs(n, 0.2), lambda size: pass_fail_pairs(size, 0.2))
        for n in (40, 100, 300)
    },
    "pilot of 40 pass/fail pairs, 2 tests": (
        pass_fail_pairs(40, 0.3, 2),
        lambda size: pass_fail_pairs(size, 0.3, 2),
    ),
    "pilot of 20 clusters of 10": (
        graded_clusters(20, 10, 1),
        lambda size: graded_clusters(ceil(size / 10), 10, 1),
    ),
    "pilot of 8 clusters of 10": (
        graded_clusters(8, 10, 1),
        lambda size: graded_clusters(ceil(size / 10), 10, 1),
    ),
    "pilot of 60 samples x 5 repeats": (
        passes_with_repeats(60, 5, 1),
        lambda size: passes_with_repeats(size, 5, 1),
    ),
}
"""Pilots, and fresh runs of the same kind."""
