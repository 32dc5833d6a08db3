"""Another version of the dataset: some ids mean easier questions on the new side, on which it always passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.columns import Columns, SampleContents
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate_columns

from . import GATE_ERRORS, Design, Rng, share

RATE, LOSS = 0.8, 0.05


def designs() -> Iterator[Design]:
    """Return the designs."""
    for n in (500, 2000):
        for changed in (0.01, 0.04, 0.3, 1.0):
            cell = f"n {n}, {changed:.0%} of the samples changed, worse by the margin of {LOSS} on the others"
            quick = 60 if n == 500 else 0
            for what, once in (("PASS of the margin", passes), ('"as good as"', as_good_as)):
                measure = share(partial(once, n, changed))
                yield Design("another version of the dataset", what, GATE_ERRORS, measure, cell, quick=quick)


def draw(n: int, changed: float, rng: Rng) -> tuple[Columns, Columns]:
    """Draw a system that is worse by `LOSS` where it got the same question, and its baseline."""
    other = rng.random(n) < changed
    level = rng.random(n)
    old, new = level < RATE, other | (level < RATE - LOSS)
    sides = []
    for name, values, hashes in (("new", new, np.arange(n) + n * other), ("old", old, np.arange(n))):
        contents = SampleContents(partial(_contents, hashes))
        sides.append(replace(Columns.of({"passed": values.astype(float)}, name=name), contents=contents))
    return sides[0], sides[1]


def _contents(inputs: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    return inputs, np.zeros_like(inputs)


def passes(n: int, changed: float, rng: Rng) -> bool:
    """Whether the worse system passes a margin that it does not keep."""
    new, old = draw(n, changed, rng)
    return gate_columns(new, GateRules(margin=LOSS), old).status == "pass"


def as_good_as(n: int, changed: float, rng: Rng) -> bool:
    """Whether the worse system is called as good."""
    new, old = draw(n, changed, rng)
    return compare_columns(old, [new], metrics=["passed"]).candidates[0].verdict == "as good as"
