"""Alarms on daily scores: how many are false, how late true ones are, and whether the named range of days is right.

A year has 365 days. After an alarm of a year without a change, the next reference is drawn and the watch starts again.
`python -m benchmarks.coverage_designs.alarm` prints the delays beside those of thresholds and daily tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fairtrial.stats.drift import REFERENCE_RISK, DriftDetector, change_days, reference_bound, shared

from . import COVERAGE, Array, Design, Measured, Rng, draw_rates

EVERY, YEAR, YEARS = 1_000, 365, 1_000
PROMISE = (0.0, YEAR / EVERY)
LATE = 999.0  # Days, of a change that was not found.
START = 100


@dataclass(frozen=True, slots=True)
class Traffic:
    """Scores of a day and of the reference: grades with their probabilities, evenly over slices."""

    volume: int
    reference: int
    chances: tuple[float, ...]  # Of the scores 0, ..., 1 at equal distances.
    slices: int = 0

    @property
    def values(self) -> Array:
        return np.linspace(0.0, 1.0, len(self.chances))

    def draw(self, rng: Rng, total: int, runs: int, drop: float = 0.0) -> Array:
        """Draw how often each stream has each score: all of them, then each slice. A drop turns scores into 0."""
        chances = np.asarray(self.chances)
        share = drop / float(self.values @ chances)
        chances = (1 - share) * chances
        chances[0] += share
        parts = max(self.slices, 1)
        counts = rng.multinomial(total // parts, chances, size=(runs, parts)).astype(float)
        return np.concatenate([counts.sum(axis=1, keepdims=True), counts], axis=1) if self.slices else counts

    def bounds(self, references: Array) -> Array:
        """Return the lower bound of each stream of each run."""
        risks = REFERENCE_RISK * shared(references.shape[1])
        return np.array([[bound(tuple(one), risk) for one, risk in zip(run, risks, strict=True)] for run in references])


def traffic(rate: float, volume: int, reference: int, slices: int = 0) -> Traffic:
    """Return passes and failures."""
    return Traffic(volume, reference, (1 - rate, rate), slices)


@lru_cache(maxsize=100_000)
def bound(counts: tuple[float, ...], risk: float) -> float:
    """Return the bound of a reference with these numbers of scores at equal distances."""
    values = np.linspace(0.0, 1.0, len(counts))
    return reference_bound(np.repeat(values, np.asarray(counts, dtype=int)), risk=risk)


GRADES = {"grades with mean .9": (0.02, 0.02, 0.06, 0.14, 0.76), "grades with mean .5": (0.1, 0.2, 0.4, 0.2, 0.1)}


def designs() -> Iterator[Design]:
    """Return the designs."""
    for rate in (0.5, 0.9, 0.99):
        for volume in (10, 100, 1_000, 10_000):
            for reference in (200, 1_000, 5_000):
                cell = f"{rate:.0%} pass, {volume:,} a day, reference of {reference:,}"
                quick = 200 if (rate, reference) == (0.9, 1_000) else 0
                yield _false("no change", traffic(rate, volume, reference), cell, quick)
    for slices in (2, 5, 20):
        for volume, reference in ((100, 1_000), (100, 5_000), (10_000, 1_000), (10_000, 5_000)):
            for rate in (0.5, 0.9, 0.99):
                cell = f"{rate:.0%} pass, {volume:,} a day, reference of {reference:,}, {slices} slices"
                quick = 50 if (slices, rate, volume, reference) == (5, 0.9, 100, 1_000) else 0
                yield _false("no change, with slices", traffic(rate, volume, reference, slices), cell, quick)
    for name, chances in GRADES.items():
        for volume in (10, 100, 10_000):
            for reference in (200, 1_000, 5_000):
                cell = f"{name}, {volume:,} a day, reference of {reference:,}"
                quick = 50 if (volume, reference) == (100, 200) else 0
                yield _false("no change, graded", Traffic(volume, reference, chances), cell, quick)
    for rate, spread in ((0.9, 0.5), (0.9, 0.05), (0.5, 0.5)):
        for volume, reference in ((50, 200), (100, 1_000), (500, 5_000)):
            once = partial(false_alarms_replayed, rate, spread, volume, reference)
            cell = f"{rate:.0%} pass, samples correlated by {spread:g}, {volume} a day, reference of {reference:,}"
            quick = 50 if (volume, rate, spread) == (100, 0.9, 0.5) else 0
            yield Design("no change, one dataset every day", "false alarms a year", PROMISE, once, cell, quick=quick,
                         most=YEARS)  # fmt: skip
    for drop, most in ((0.03, 30), (0.05, 10), (0.1, 4)):
        cell = f"90% pass, 100 a day, reference of 5,000, {100 * drop:g} points on day {START}"
        late = partial(median_delay, traffic(0.9, 100, 5_000), drop)
        yield Design("a drop", "median delay in days", (0.0, most), late, cell, quick=100, most=YEARS)
    for rate, volume, reference, drop in ((0.9, 100, 5_000, 0.05), (0.9, 100, 500, 0.1), (0.7, 1_000, 1_000, 0.05)):
        cell = f"{rate:.0%} pass, {volume:,} a day, reference of {reference:,}, {100 * drop:g} points"
        for name, made in (("passes", traffic(rate, volume, reference)),
                           ("grades", Traffic(volume, reference, GRADES["grades with mean .9"]))):  # fmt: skip
            held = partial(range_holds, made, drop)
            named = cell if name == "passes" else f"graded, {cell.partition(', ')[2]}"
            yield Design("the day that an alarm names", "coverage", COVERAGE, held, named, quick=100, most=YEARS)


def _false(name: str, made: Traffic, cell: str, quick: int) -> Design:
    return Design(name, "false alarms a year", PROMISE, partial(false_alarms, made), cell, quick=quick, most=YEARS)


def false_alarms(made: Traffic, runs: int, rng: Rng) -> Measured:
    """Return the false alarms of a year without a change, each followed by a new reference."""
    detector = DriftDetector(made.bounds(made.draw(rng, made.reference, runs)), every=EVERY)
    alarms = np.zeros(runs)
    for _ in range(YEAR):
        detector.add_day(made.values, made.draw(rng, made.volume, runs))
        fired = detector.share >= 1
        if fired.any():
            alarms += fired
            count = int(fired.sum())
            detector.bounds[fired] = made.bounds(made.draw(rng, made.reference, count))
            detector.levels[fired] = -np.inf
    return Measured(float(alarms.mean()), max(float(alarms.std()), 1 / sqrt(runs)) / sqrt(runs))


def false_alarms_replayed(rate: float, spread: float, volume: int, reference: int, runs: int, rng: Rng) -> Measured:
    """Return the false alarms of a year in which the same samples are run every day, each with its own chance."""
    chances = draw_rates(rng, rate, spread, (runs, volume))

    def bounds(rows: NDArray[np.bool_]) -> Array:
        passed = rng.binomial(reference // volume, chances[rows]).sum(axis=1)
        return np.array([[bound((float(reference - one), float(one)), REFERENCE_RISK)] for one in passed])

    detector = DriftDetector(bounds(np.ones(runs, dtype=bool)), every=EVERY)
    alarms = np.zeros(runs)
    for _ in range(YEAR):
        passed = (rng.random(chances.shape) < chances).sum(axis=1)
        detector.add_day(np.array([0.0, 1.0]), np.stack([volume - passed, passed], axis=1)[:, None].astype(float))
        fired = detector.share >= 1
        alarms += fired
        if fired.any():
            detector.bounds[fired], detector.levels[fired] = bounds(fired), -np.inf
    return Measured(float(alarms.mean()), max(float(alarms.std()), 1 / sqrt(runs)) / sqrt(runs))


def change(made: Traffic, drop: float, runs: int, rng: Rng) -> tuple[Array, NDArray[np.bool_], Array, Array]:
    """Return the delays of runs, whether each had no alarm before its change, and the references and days."""
    references = made.draw(rng, made.reference, runs)
    detector = DriftDetector(made.bounds(references), every=EVERY)
    delays, early, days = np.full(runs, LATE), np.zeros(runs, dtype=bool), []
    for day in range(START + 120):
        days.append(made.draw(rng, made.volume, runs, drop if day >= START else 0.0))
        detector.add_day(made.values, days[-1])
        fired = detector.share >= 1
        if day < START:
            early |= fired
        else:
            delays = np.where(fired, np.minimum(delays, day - START + 1), delays)
    return delays, ~early, references, np.stack(days, axis=1)


def median_delay(made: Traffic, drop: float, runs: int, rng: Rng) -> Measured:
    """Return the median number of days from a change to its alarm."""
    delays, clean, *_ = change(made, drop, runs, rng)
    found = np.sort(delays[clean])
    spread = float(np.quantile(found, 0.75) - np.quantile(found, 0.25))
    return Measured(float(np.median(found)), max(spread, 1.0) / sqrt(found.size))


def range_holds(made: Traffic, drop: float, runs: int, rng: Rng) -> float:
    """Return how often the range of days named by a true alarm contains the day of the change."""
    delays, clean, references, days = change(made, drop, runs, rng)
    held = total = 0
    for run in np.flatnonzero(clean & (delays < LATE)):
        seen = days[run, : START + int(delays[run]), 0]
        reference = (float(references[run, 0] @ made.values), float(references[run, 0].sum()))
        _, low, high = change_days(seen @ made.values, seen.sum(axis=-1), reference)
        held, total = held + (low <= START <= high), total + 1
    return held / max(total, 1)


# Other rules, for the table of delays.


def compare_rules(runs: int = YEARS, rate: float = 0.9, volume: int = 100, reference: int = 5_000) -> str:
    """Return a Markdown table: false alarms a year, and median delays of drops on day 100."""
    rng = np.random.default_rng(7)
    made = traffic(rate, volume, reference)
    rows = [
        "| rule | years without a change with an alarm | 2 | 3 | 5 | 10 points: median days |",
        "|---|---|---|---|---|---|",
    ]
    quiet = other_alarms(made, 0.0, runs, rng, YEAR)
    drops = (0.02, 0.03, 0.05, 0.1)
    found = {drop: other_alarms(made, drop, runs, rng, YEAR) for drop in drops}
    for name, fired in quiet.items():
        share = float(fired.any(axis=1).mean())
        rows.append(f"| {name} | {share:.1%} | {' | '.join(_delay(found[drop][name]) for drop in drops)} |")
    return "\n".join(rows)


def _delay(fired: NDArray[np.bool_]) -> str:
    clean = fired[~fired[:, :START].any(axis=1), START:]
    if not clean.size:
        return "-"
    first = np.where(clean.any(axis=1), clean.argmax(axis=1) + 1, LATE)
    return f"{np.median(first):.0f}" if np.median(first) < LATE else "not found"


def other_alarms(made: Traffic, drop: float, runs: int, rng: Rng, days: int) -> dict[str, NDArray[np.bool_]]:
    """Return on which days each rule has an alarm."""
    references = made.draw(rng, made.reference, runs)
    detector = DriftDetector(made.bounds(references), every=EVERY)
    rates, fired = np.empty((runs, days)), np.zeros((runs, days), dtype=bool)
    for day in range(days):
        counts = made.draw(rng, made.volume, runs, drop if day >= START else 0.0)
        detector.add_day(made.values, counts)
        rates[:, day], fired[:, day] = counts[:, 0, 1] / made.volume, detector.share >= 1
    known = references[:, 0, 1:] / made.reference
    sums = np.cumsum(np.pad(rates, ((0, 0), (1, 0))), axis=1)
    week = np.ones((runs, days))
    week[:, 6:] = (sums[:, 7:] - sums[:, :-7]) / 7
    pooled = (rates * made.volume + known * made.reference) / (made.volume + made.reference)
    error = np.sqrt(pooled * (1 - pooled) * (1 / made.volume + 1 / made.reference))
    tests: Callable[[float], NDArray[np.bool_]] = lambda z: rates - known < -z * error  # noqa: E731
    below = {f"mean of 7 days below {100 * limit:.0f}%": week < limit for limit in (0.88, 0.87, 0.86)}
    return {**below, "daily test at 5%": tests(1.645), "daily test at 0.1%": tests(3.09),
            f"at most one false alarm in {EVERY:,} days": fired}  # fmt: skip


if __name__ == "__main__":
    print(compare_rules())
