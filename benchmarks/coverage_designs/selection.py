"""The best of many candidates on a validation split, compared with the baseline on a test split, once or often.

Candidates are drawn with the difficulty of samples in common. The one with the most passes on the validation split is
compared on the test split through `compare_columns`, at the level that the ledger gives the look.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.looks import TestLooks
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.stats import paired_rates_interval

from . import COVERAGE, GATE_ERRORS, Array, Design, Rng, share

RATE = 0.7
LOOKS = 20
TRUTHS = {"equal": 0.0, "unequal, s.d. 3 points": 0.03}


def designs() -> Iterator[Design]:
    """Return the designs."""
    for truth, spread in TRUTHS.items():
        for candidates in (5, 20, 50, 100):
            for n in (50, 200, 500):
                cell = f"best of {candidates} on {n} samples, truth {truth}"
                quick = 200 if (candidates, n) == (20, 50) else 0
                for spends in (False, True):
                    name = "test of the best of many, first of all looks" if spends else "test of the best of many"
                    seen = partial(first_look, candidates, n, spread, spends)
                    yield from _both(name, cell, seen, quick)
        for candidates, n in ((5, 50), (20, 50), (20, 200), (5, 500)):
            cell = f"best of {candidates} on {n} samples each time, truth {truth}"
            quick = 40 if (candidates, n) == (5, 50) else 0
            seen = partial(all_looks, candidates, n, spread)
            yield from _both(f"{LOOKS} looks at a test split", cell, seen, quick, " in all looks")


def _both(name: str, cell: str, seen: partial[list[Seen]], quick: int, where: str = "") -> Iterator[Design]:
    what = f'false "better"{where}'
    yield Design(name, what, GATE_ERRORS, share(partial(false_better, seen)), cell, quick=quick)
    yield Design(name, f"coverage{where}", COVERAGE, share(partial(covered, seen)), cell, quick=quick)


class Seen(NamedTuple):
    """What a look shows, and the true difference."""

    better: bool
    low: float
    high: float
    truth: float


def false_better(draw: partial[list[Seen]], rng: Rng) -> bool:
    """Whether a candidate is called better that is not."""
    return any(one.better and one.truth <= 0 for one in draw(rng))


def covered(draw: partial[list[Seen]], rng: Rng) -> bool:
    """Whether every interval contains the true difference."""
    return all(one.low - 1e-12 <= one.truth <= one.high + 1e-12 for one in draw(rng))


def first_look(candidates: int, n: int, spread: float, spends: bool, rng: Rng) -> list[Seen]:
    """Draw a search and its only look."""
    baseline, chosen = RATE, search(candidates, n, spread, rng)
    sides = draw_passes(np.array([baseline, chosen]), rng.standard_normal(n), rng)
    return [shown(sides[0], sides[1], 1, chosen - baseline, spends=spends)]


def all_looks(candidates: int, n: int, spread: float, rng: Rng) -> list[Seen]:
    """Draw a search for each look at the same samples; what is called better is the next baseline."""
    difficulty = rng.standard_normal(n)
    baseline, old = RATE, draw_passes(np.array([RATE]), difficulty, rng)[0]
    found = []
    for number in range(1, LOOKS + 1):
        chosen = search(candidates, n, spread, rng)
        new = draw_passes(np.array([chosen]), difficulty, rng)[0]
        found.append(shown(old, new, number, chosen - baseline, spends=True))
        if found[-1].better:
            baseline, old = chosen, new
    return found


def search(candidates: int, n: int, spread: float, rng: Rng) -> float:
    """Return the true rate of the candidate with the most passes on a validation split."""
    if spread == 0.0:
        return RATE  # Whichever is chosen.
    rates = np.clip(RATE + spread * rng.standard_normal(candidates), 0.05, 0.95)
    return float(rates[np.argmax(draw_passes(rates, rng.standard_normal(n), rng).sum(axis=1))])


def draw_passes(rates: Array, difficulty: Array, rng: Rng) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Draw passes by candidate and sample; half of the variance is the difficulty of the sample."""
    noise = rng.standard_normal((rates.size, difficulty.size), dtype=np.float32)
    return noise < ndtri(rates)[:, None] * np.sqrt(2) - difficulty  # type: ignore[no-any-return]


def shown(
    old: np.ndarray[tuple[int], np.dtype[np.bool_]],
    new: np.ndarray[tuple[int], np.dtype[np.bool_]],
    number: int,
    truth: float,
    *,
    spends: bool,
) -> Seen:
    """Return what a look shows."""
    return Seen(*compared(int((new & ~old).sum()), int((old & ~new).sum()), old.size, number, spends), truth)


@cache
def compared(wins: int, losses: int, n: int, number: int, spends: bool) -> tuple[bool, float, float]:
    """Return whether the candidate is better, and the interval: of pass/fail pairs, both depend on counts alone."""
    alpha = TestLooks("", n, (number,), 0.05, spends).spent
    found = paired_rates_interval(wins, losses, n, level=1 - alpha)
    if number == 1:  # What users call says the same; it is slower.
        change = np.repeat([1.0, -1.0, 0.0], [wins, losses, n - wins - losses])
        old, new = (Columns.of({"passed": np.maximum(sign * change, 0.0)}, name=f"{sign}") for sign in (-1, 1))
        made = compare_columns(old, [new], metrics=["passed"], settings=ComparisonSettings(alpha=alpha)).candidates[0]
        if (made.verdict == "better", made["passed"].low, made["passed"].high) != (
            found.low > 0,
            found.low,
            found.high,
        ):
            raise AssertionError(f"{wins} wins and {losses} losses of {n}: compare says {made.verdict}, not {found}")
    return found.low > 0, found.low, found.high
