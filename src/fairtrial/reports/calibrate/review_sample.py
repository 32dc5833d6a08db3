"""Draw the trials of a review: a random sample that everybody computes alike from its seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairtrial.reports.figures.trial_columns import Condition, TrialColumns
from fairtrial.store.notes import ReviewNote


class DrawnTrials(NamedTuple):
    """The trials of a review: their ordinals, those of each experiment in the order in which they were drawn.

    `judged` counts the trials from which they were drawn.
    """

    ordinals: tuple[int, ...]
    judged: int


def draw_trials(columns: TrialColumns, review: ReviewNote) -> DrawnTrials:
    """Return the trials of a review: of each experiment the scored ones with the smallest hashes of their ordinals.

    A larger review contains all trials of a smaller one with the same seed.
    """
    drawn: list[int] = []
    judged = 0
    for name in review.experiments:
        found = columns.select(Condition("outcome", ("scored",)), Condition("experiment", (name,))).ordinals()
        judged += found.size
        drawn += smallest(found, review).tolist()
    return DrawnTrials(tuple(drawn), judged)


def smallest(ordinals: NDArray[np.int64], review: ReviewNote) -> NDArray[np.int64]:
    """Return the trials that a review draws among these, in the order in which they are drawn."""
    keys = keyed_hash(int(review.seed, 16), ordinals)
    if ordinals.size > review.size:
        some = np.argpartition(keys, review.size)[: review.size]
        keys, ordinals = keys[some], ordinals[some]
    return ordinals[np.lexsort((ordinals, keys))]


def keyed_hash(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return hashes of numbers that look random and independent to whoever does not know the seed.

    Two rounds of the finalizer of SplitMix64, which maps 64 bits one to one, so that no two numbers are equal.
    """
    hashes = numbers.astype(np.uint64)
    for key in (seed & (1 << 64) - 1, (seed * 0x9E3779B97F4A7C15 + 1) & (1 << 64) - 1):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes = hashes ^ (hashes >> np.uint64(31))
    return hashes
