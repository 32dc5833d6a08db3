"""Figures of runs that used their own results to decide when to stop: valid at any time, or undefined.

An ordinary interval of such a run is too narrow: among many looks, the one that ended the run was a lucky one. Samples
count in the order of the plan, which was fixed before the first result.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fairtrial.reports.figures.columns import Columns, FloatArray, IntArray
from fairtrial.reports.figures.metrics import Range, View
from fairtrial.stats import (
    BETTING_TEST,
    BettingMartingale,
    MeanEstimate,
    PairedDifference,
    Repeats,
    paired_difference,
    stopped_by_width,
)

LOOKED = "The run used its own results to decide when to stop, and this figure has no interval that allows for it."
_NO_RANGE = (
    "The run used its own results to decide when to stop: only metrics with a declared range have an interval that "
    "allows for it. Declare bounds."
)
_CLUSTERED = (
    "The run used its own results to decide when to stop, and saw clusters in part: only independent samples have an "
    "interval that allows for it."
)


def difference_at_any_time(
    candidate: Repeats,
    baseline: Repeats,
    *,
    planned: tuple[int, int] | None,
    lost: int,
    clusters: IntArray | None,
    bounds: Range | None,
    level: float,
) -> PairedDifference:
    """Return candidate - baseline with interval and p-value of one betting martingale.

    `planned` are the repeats of each sample on both sides and `lost` the pairs without a sample: what is missing is
    taken at its worst for every conclusion. With `planned` None, samples without a score are left out.
    """
    # Few draws: their result is not used.
    plain = paired_difference(candidate, baseline, clusters=clusters, bounds=bounds, level=level, draws=99)
    only = replace(plain, interval=None, p_value=None, test=None, mde=None, notes=())
    if not plain.n:
        return only
    if bounds is None or clusters is not None:
        return replace(only, reason=_NO_RANGE if bounds is None else _CLUSTERED)
    if planned is None:
        known = (candidate.counts > 0) & (baseline.counts > 0)
        candidate, baseline, lost = candidate.only(known), baseline.only(known), 0
    (low_a, high_a), (low_b, high_b) = (
        _ends(side, repeats, lost, bounds)
        for side, repeats in zip((candidate, baseline), planned or (None, None), strict=True)
    )
    width = bounds[1] - bounds[0]
    martingale = BettingMartingale(low_a - high_b, high_a - low_b, bounds=(-width, width))
    p = min(1.0, 1 / martingale.capital(0.0))
    return replace(only, interval=martingale.interval(level), p_value=p, test=BETTING_TEST, reason=None)


def mean_at_any_time(
    columns: Columns, metric: str, scores: Repeats, found: MeanEstimate, view: View, level: float
) -> MeanEstimate:
    """Return a mean with the interval of a betting martingale; of the system, missing trials at their worst."""
    bounds = columns.bounds(metric)
    only = replace(found, interval=None, effective_n=None, notes=())
    if not found.n:
        return only
    if bounds is None or found.clusters is not None:
        return replace(only, reason=_NO_RANGE if bounds is None else _CLUSTERED)
    if view == "system":
        low, high = _ends(scores, columns.repeats, columns.planned - len(columns.ids), bounds)
    else:
        low, high = _ends(scores.only(scores.counts > 0), None, 0, bounds)
    return replace(only, interval=BettingMartingale(low, high, bounds=bounds).interval(level), reason=None)


def rate_stopped_by_width(scores: Repeats, found: MeanEstimate, level: float) -> MeanEstimate:
    """Return a pass rate with the interval whose width ended the run; other means as they are."""
    if not found.n or found.clusters is not None or not (scores.binary and np.all(scores.counts <= 1)):
        return found
    return replace(found, interval=stopped_by_width(int(scores.flat.sum()), found.n, level=level))


def _ends(scores: Repeats, repeats: int | None, lost: int, bounds: Range) -> tuple[FloatArray, FloatArray]:
    """Return the least and the largest mean that each sample may have, whatever its missing repeats would have been.

    `lost` more samples have no repeat at all. With `repeats` None, no repeat is missing.
    """
    counts = np.append(scores.counts, np.zeros(lost, dtype=np.intp))
    sums = np.bincount(np.repeat(np.arange(counts.size), counts), scores.flat, counts.size)
    planned = counts if repeats is None else np.maximum(counts, repeats)
    low, high = (np.clip((sums + (planned - counts) * end) / planned, *bounds) for end in bounds)
    return low, high
