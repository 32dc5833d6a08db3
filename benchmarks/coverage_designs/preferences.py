"""Bradley and Terry's model with ties: strengths and ranks of systems that are compared two at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np

from fairtrial.stats import BradleyTerry, Preference, bradley_terry

from . import ALARMS, COVERAGE, Design, Rng, share_or_warned

STRENGTHS, EQUAL = (0.0, 0.0, 0.5, 1.2), (0.0,) * 4
DRAWS = 999


def designs() -> Iterator[Design]:
    """Return the designs."""
    for name, strengths in {"equal": EQUAL, "two of four equal": STRENGTHS}.items():
        for samples in (30, 120, 500):
            cell, quick = f"{name}, {samples} samples in both orders", 60 if samples == 120 else 0
            for what, place in (("coverage of ranks", 0), ("coverage of a strength", 1)):
                measure = partial(one_share, strengths, samples, place)
                yield Design("Bradley-Terry with ties", what, COVERAGE, measure, cell, quick=quick)
    for samples in (60, 240):
        yield Design(
            "equal systems in one presentation order",
            "a best system",
            ALARMS,
            share_or_warned(partial(best_of_one_order, samples), good=False),
            f"{samples} samples, what is first has log odds of 1",
            quick=30 if samples == 60 else 0,
        )


def best_of_one_order(samples: int, rng: Rng) -> tuple[bool, bool]:
    """Whether one of equal systems is called the best if always the same one is first, and whether a note says so."""
    names, made = [str(place) for place in range(3)], []
    for sample in range(samples):
        first, second = sorted(rng.choice(3, 2, replace=False))
        won = rng.random() < 1 / (1 + np.exp(-1.0))
        made.append(Preference(names[first], names[second], names[first if won else second], sample))
    found = bradley_terry(made, draws=DRAWS)
    if not isinstance(found, BradleyTerry):
        return False, True
    return any(one.rank_high == 1 for one in found.systems), bool(found.notes)


def one_share(strengths: Sequence[float], samples: int, place: int, runs: int, _rng: Rng) -> float:
    """Return one of the two shares that the same runs give."""
    return shares_covered(tuple(strengths), samples, runs)[place]


@cache
def shares_covered(strengths: tuple[float, ...], samples: int, runs: int) -> tuple[float, float]:
    """Return how often all ranks, and the strength of the last system, are covered."""
    rng = np.random.default_rng([samples, *(round(1000 * one) for one in strengths)])
    found = [fitted(strengths, samples, rng) for _ in range(runs)]
    return (
        sum(ranks_covered(strengths, one) for one in found) / runs,
        sum(strength_covered(strengths, one) for one in found) / runs,
    )


def draw_preferences(
    rng: Rng, strengths: Sequence[float], samples: int, *, tie: float = 0.5, order: float = 0.0
) -> list[Preference]:
    """Draw two systems for each sample and compare them in both orders."""
    values, names = np.asarray(strengths), [str(place) for place in range(len(strengths))]
    one = rng.integers(0, values.size, samples)
    other = (one + rng.integers(1, values.size, samples)) % values.size
    first, second = np.stack([one, other], axis=1).ravel(), np.stack([other, one], axis=1).ravel()
    gap = values[first] - values[second] + order
    won, lost = np.exp(gap / 2), np.exp(-gap / 2)
    level = rng.random(first.size) * (won + lost + tie)
    outcomes = np.where(level < won, 0, np.where(level < won + lost, 1, 2))
    made = []
    for place, (a, b, outcome) in enumerate(zip(first.tolist(), second.tolist(), outcomes.tolist(), strict=True)):
        made.append(Preference(names[a], names[b], (names[a], names[b], None)[outcome], place // 2))
    return made


def fitted(strengths: Sequence[float], samples: int, rng: Rng) -> BradleyTerry | None:
    """Return the model of a draw; None if not all systems were drawn."""
    given = draw_preferences(rng, strengths, samples)
    if len({name for one in given for name in (one.first, one.second)}) < len(strengths):
        return None
    found = bradley_terry(given, draws=DRAWS)
    return found if isinstance(found, BradleyTerry) else None


def ranks_covered(strengths: Sequence[float], found: BradleyTerry | None) -> bool:
    """Whether all rank intervals contain all ranks that their systems have."""
    values = np.asarray(strengths)
    return found is None or all(
        found[str(place)].rank_low <= 1 + np.count_nonzero(values > value)
        and found[str(place)].rank_high >= values.size - np.count_nonzero(values < value)
        for place, value in enumerate(strengths)
    )


def strength_covered(strengths: Sequence[float], found: BradleyTerry | None) -> bool:
    """Whether the interval of the last system's strength contains it."""
    if found is None:
        return True
    truth, one = strengths[-1] - float(np.mean(strengths)), found[str(len(strengths) - 1)]
    return (one.low is None or one.low <= truth) and (one.high is None or truth <= one.high)
