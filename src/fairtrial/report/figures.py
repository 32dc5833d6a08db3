"""All the numbers that a report gives of one experiment, made in one reading of its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fairtrial.report.adaptive import adaptive_note
from fairtrial.report.columns import PASSED, SCORED, VALUE, Columns, read_columns
from fairtrial.report.estimates import Estimate, estimates
from fairtrial.report.report import ExperimentReport
from fairtrial.stats import Interval, VarianceSplit, betabinom_sequence, variance_split

LEVEL = 0.95
BINS = 20
"""How many equal parts of 0 to 1 the distribution of scores is counted in."""

_STOPPED = (
    "The run looked at its own results to know when to end: only its pass rates have an interval that allows for it."
)


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


def read_figures(part: ExperimentReport) -> Figures:
    """Read an experiment's results once and make every figure of them."""
    columns = read_columns(part)
    adaptive = adaptive_note(part.run)
    if adaptive is not None:
        columns = columns.take(np.arange(min(int(adaptive["samples"]), len(columns.ids)), dtype=np.intp))
    # A sample has pass@K if it has all K repeats.
    found = tuple(
        replace(estimate, trials=estimate.n * columns.repeats)
        if estimate.name.startswith(("pass@", "pass^"))
        else estimate
        for estimate in estimates(columns, level=LEVEL)
    )
    level = LEVEL
    if adaptive is not None:
        level = float(adaptive["rule"]["level"])
        found = tuple(_always_valid(estimate, columns, adaptive["experiments"][part.name], level) for estimate in found)
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


def _always_valid(estimate: Estimate, columns: Columns, note: Mapping[str, Any], level: float) -> Estimate:
    """The estimate with an interval that holds although the run looked at its results, or with none."""
    if estimate.name == "pass_rate_all":
        return replace(estimate, low=note["low"], high=note["high"], method=note["method"], note=None)
    if estimate.name == "pass_rate":
        # Each trial that is scored passes with this chance, whenever one stops.
        passed = int(np.nansum(columns.values[PASSED]))
        found = betabinom_sequence(passed, columns.count(SCORED), level=level)
        if estimate.value is not None:
            return replace(estimate, low=found.low, high=found.high, method=found.method, note=None)
    return replace(
        estimate, low=None, high=None, method=None, note=_STOPPED if estimate.note is None else estimate.note
    )
