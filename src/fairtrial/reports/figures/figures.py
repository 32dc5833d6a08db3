"""All figures of one experiment, computed in one pass over its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import RepeatedInputs
from fairtrial.reports.figures.estimates import Estimate, estimates, per_trial
from fairtrial.reports.figures.history import read_history
from fairtrial.reports.figures.metrics import NOTHING_SCORED, PASSED, VALUE, ExperimentSource
from fairtrial.stats import Interval, VarianceSplit, variance_split
from fairtrial.store.notes import AdaptiveNote

LEVEL = 0.95
BINS = 20
"""How many equal parts of 0 to 1 the distribution of scores is counted in."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of one experiment.

    `bounds` has for each estimate, by name, the range of its values if it is known. `split` and what `estimates` has
    of pass@k are there with repeats only. `distribution` counts the values of scored trials in equal parts of 0 to 1.
    `adaptive` is what the run noted if it decided by its results when to end; `estimates` are then those of the
    samples it looked at, with intervals that stay valid, or with none. `per_trial` is what a trial takes: latency,
    tokens, cost and other metrics without a range. `history_notes` say which declared earlier runs are not used.
    """

    level: float
    estimates: tuple[Estimate, ...]
    bounds: Mapping[str, tuple[float, float] | None]
    split: VarianceSplit | None
    distribution: tuple[int, ...]
    adaptive: AdaptiveNote | None = None
    per_trial: tuple[Estimate, ...] = ()
    repeated_inputs: RepeatedInputs | None = None
    history_notes: tuple[str, ...] = ()

    def get(self, name: str) -> Estimate | None:
        """Return the estimate with this name."""
        return next((estimate for estimate in self.estimates if estimate.name == name), None)

    def interval(self, name: str) -> Interval | None:
        """Return the interval of the estimate with this name; None if it is undefined."""
        found = self.get(name)
        if found is None or found.low is None or found.high is None:
            return None
        return Interval(found.low, found.high, self.level, found.method or "")


def read_figures(source: ExperimentSource) -> Figures:
    """Read the results of an experiment once and compute every figure."""
    adaptive = source.run.noted.adaptive
    level = LEVEL if adaptive is None else adaptive.rule.level
    history = read_history(source)
    keys = () if history is None else history.keys
    columns = read_columns(source, costs=True, keys=keys).analysed_prefix()
    found = estimates(columns, level=level)
    if history is not None:
        found = history.adjust(columns, found, level)
    values = columns.values[VALUE]
    # Rounding prevents .15 * 20 = 2.999... from falling into the lower bin.
    places = np.floor(np.round(values[np.isfinite(values)] * BINS, 9)).astype(np.intp)
    counts = np.bincount(np.clip(places, 0, BINS - 1), minlength=BINS)
    split = variance_split(columns.scores(PASSED, "scored")) if columns.repeats > 1 else None
    if split is not None and not split.n and columns.planned:
        split = replace(split, reason=NOTHING_SCORED)
    return Figures(
        level,
        found,
        {estimate.name: columns.bounds(estimate.metric) for estimate in found},
        split,
        tuple(counts.tolist()),
        adaptive,
        per_trial(columns, level=level),
        columns.repeated_inputs,
        () if history is None else history.notes,
    )
