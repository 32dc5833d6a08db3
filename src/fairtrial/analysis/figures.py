"""All the numbers that a report gives of one experiment, made in one reading of its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairtrial.analysis.columns import read_columns
from fairtrial.analysis.estimates import Estimate, estimates
from fairtrial.analysis.metrics import PASSED, VALUE
from fairtrial.analysis.source import ExperimentSource, adaptive_note
from fairtrial.stats import Interval, VarianceSplit, variance_split

LEVEL = 0.95
BINS = 20
"""How many equal parts of 0 to 1 the distribution of scores is counted in."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of one experiment.

    `bounds` has for each estimate, by name, the range of its values if it is known. `split` and what `estimates` has
    of pass@k are there with repeats only. `distribution` counts the values of scored trials in equal parts of 0 to 1.
    `adaptive` is what the run noted if it decided by its results when to end; `estimates` are then those of the
    samples it looked at, with intervals that stay valid, or with none.
    """

    level: float
    estimates: tuple[Estimate, ...]
    bounds: Mapping[str, tuple[float, float] | None]
    split: VarianceSplit | None
    distribution: tuple[int, ...]
    adaptive: Mapping[str, Any] | None = None

    def get(self, name: str) -> Estimate | None:
        """The estimate of this name."""
        return next((estimate for estimate in self.estimates if estimate.name == name), None)

    def interval(self, name: str) -> Interval | None:
        """The interval of the estimate of this name; None if it is undefined."""
        found = self.get(name)
        if found is None or found.low is None or found.high is None:
            return None
        return Interval(found.low, found.high, self.level, found.method or "")


def read_figures(source: ExperimentSource) -> Figures:
    """Read an experiment's results once and make every figure of them."""
    adaptive = adaptive_note(source.run)
    level = LEVEL if adaptive is None else float(adaptive["rule"]["level"])
    columns = read_columns(source).looked_at()
    found = estimates(columns, level=level)
    values = columns.values[VALUE]
    # The rounding keeps .15 out of the part below it, where .15 * 20 would put it by a hair.
    places = np.floor(np.round(values[np.isfinite(values)] * BINS, 9)).astype(np.intp)
    counts = np.bincount(np.clip(places, 0, BINS - 1), minlength=BINS)
    return Figures(
        level,
        found,
        {estimate.name: columns.bounds(estimate.metric) for estimate in found},
        variance_split(columns.scores(PASSED, "scored")) if columns.repeats > 1 else None,
        tuple(counts.tolist()),
        adaptive,
    )
