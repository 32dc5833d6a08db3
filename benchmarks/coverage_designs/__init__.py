"""The designs that `benchmarks/coverage.py` measures: one module per family, each with a function `designs()`.

A family is any module of this package whose name has no leading underscore; it is found by itself, nothing is listed
anywhere. To add one, write `coverage_designs/NAME.py`:

    from . import ALARMS, COVERAGE, Design, Rng, contains, share

    def designs() -> Iterator[Design]:
        yield Design("mean of lognormal values", "coverage", COVERAGE, share(once), cell="sigma 1, n 30", quick=400)

- `name` and `cell` say what was drawn, `what` what was counted; cells of one name and `what` share a row of the
  published table, which shows the worst of them.
- `measure(runs, rng)` returns a share, or a `Measured`. `share(once)` makes one of a function that does one run. `rng`
  is seeded from the name and the cell, so that a figure is the same alone and among others. Draw all runs at once where
  the function of the package allows it; call that function and never write it again.
- `exact=True` for what is enumerated: `measure` is called with 0 runs, and the figure has no Monte Carlo error.
- `quick` is the number of runs in `--quick`, which every change runs: 0 leaves the design out (the default), and of an
  exact one any other number takes it in. A family has about 10 s of one core for all of its quick designs.
- `most` limits the runs of a design that is slow beyond repair; the table shows how many it had.
- A design that cannot be kept within its limit returns `Measured(figure, unwarned=...)`: the same share with the runs
  in which the package printed its warning counted as right (see `share_or_warned`). If `unwarned` is within the limit,
  the verdict is "warned".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fairtrial.stats import Interval

type Array = NDArray[np.float64]
type Rng = np.random.Generator
type Limit = tuple[float, float]

COVERAGE: Limit = (0.93, 1.0)
"""How often a 95% interval must hold the truth."""

ALARMS: Limit = (0.0, 0.06)
"""How often identical systems may be called different."""

GATE_ERRORS: Limit = (0.0, 0.05)
"""How often a gate may decide wrongly, over all of its rules."""

POWER: Limit = (0.75, 0.90)
"""How often a difference of the reported minimum detectable effect must be found."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A share, its standard error (None: that of a share of independent runs), and the share allowing for warnings."""

    figure: float
    error: float | None = None
    unwarned: float | None = None


@dataclass(frozen=True, slots=True)
class Design:
    """One figure to measure and the limit it is compared with; the module's docstring explains the fields."""

    name: str
    what: str
    limit: Limit
    measure: Callable[[int, Rng], float | Measured]
    cell: str = ""
    exact: bool = False
    quick: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a design came to. `error` is the Monte Carlo standard error, 0 if nothing was simulated."""

    family: str
    design: str
    cell: str
    what: str
    limit: Limit
    figure: float
    error: float
    runs: int
    unwarned: float | None
    seconds: float

    @property
    def verdict(self) -> str:
        """Return "holds", "warned" or "FAILS"; a figure fails only beyond three Monte Carlo standard errors."""
        if self._holds(self.figure):
            return "holds"
        return "warned" if self.unwarned is not None and self._holds(self.unwarned) else "FAILS"

    @property
    def excess(self) -> float:
        """How far the figure lies beyond the limit; below 0 where it lies inside."""
        low, high = self.limit
        below = low - self.figure if low > 0 else -np.inf
        return float(max(below, self.figure - high if high != 1 else -np.inf))

    def _holds(self, figure: float) -> bool:
        slack = 3 * self.error + 1e-9
        return self.limit[0] - slack <= figure <= self.limit[1] + slack


def share(once: Callable[[Rng], bool]) -> Callable[[int, Rng], float]:
    """Measure how often `once` is true."""
    return lambda runs, rng: sum(once(rng) for _ in range(runs)) / runs


def share_or_warned(once: Callable[[Rng], tuple[bool, bool]], *, good: bool = True) -> Callable[[int, Rng], Measured]:
    """Measure how often the first value of `once` is true; the second says whether the package printed its warning.

    `good` says which outcome a warned run counts as in `unwarned`: true for coverage, false for errors.
    """

    def measure(runs: int, rng: Rng) -> Measured:
        happened = warned = 0
        for _ in range(runs):
            result, told = once(rng)
            happened += result
            warned += (result or told) if good else (result and not told)
        return Measured(happened / runs, unwarned=warned / runs)

    return measure


def contains(interval: Interval | None, truth: float) -> bool:
    """Whether an interval contains the truth; one that is undefined claims nothing."""
    return interval is None or interval.low - 1e-12 <= truth <= interval.high + 1e-12


def draw_rates(rng: Rng, rate: float, correlation: float, size: int | tuple[int, ...]) -> Array:
    """Draw chances of passing with this mean and intra-class correlation, from a beta distribution."""
    total = (1 - correlation) / correlation
    return rng.beta(rate * total, (1 - rate) * total, size)


def draw_outcomes(rng: Rng, chances: Array) -> Array:
    """Draw a pass (1) or a failure (0) for each chance."""
    return (rng.random(chances.shape) < chances).astype(float)


def monte_carlo_error(figure: float, runs: int) -> float:
    """Return the standard error of a share of `runs` runs; of none and of all of them that of one in `runs`."""
    return sqrt(max(figure * (1 - figure), 1 / runs) / runs) if runs else 0.0
