"""Figures of runs that used their own results to decide when to stop: valid at any time, or undefined.

An ordinary interval of such a run is too narrow: among many looks, the one that ended the run was a lucky one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fairtrial.analysis.columns import Columns, IntArray
from fairtrial.analysis.metrics import FAILED, SCORED, UNIT, View
from fairtrial.stats import (
    MeanEstimate,
    PairedDifference,
    Repeats,
    betabinom_sequence,
    eprocess_pairs,
    paired_difference,
    pairs_sequence,
    stopped_by_width,
)

E_PROCESS = "e-process of unequal pairs"
LOOKED = (
    "The run used its own results to decide when to stop: only pass/fail outcomes, one per sample, have an interval "
    "that allows for it."
)


def difference_at_any_time(
    candidate: Repeats,
    baseline: Repeats,
    *,
    clusters: IntArray | None,
    bounds: tuple[float, float] | None,
    level: float,
) -> PairedDifference:
    """Return candidate - baseline with the confidence sequence and p = 1/E; for graded scores only the means.

    A pair of which a side is missing counts against the conclusion, whichever that is.
    """
    # Few draws: their result is not used.
    plain = paired_difference(candidate, baseline, clusters=clusters, bounds=bounds, level=level, draws=99)
    only = replace(plain, interval=None, p_value=None, test=None, mde=None, notes=())
    if not plain.n:
        return only
    if clusters is not None or not all(_pass_fail(side, bounds) for side in (candidate, baseline)):
        return replace(only, reason=LOOKED)
    wins, losses, missing = plain.wins, plain.losses, plain.unscored
    interval = pairs_sequence(wins, losses, plain.n + missing, missing=missing, level=level)
    evidence = eprocess_pairs(wins, losses, missing=missing)
    return replace(only, interval=interval, p_value=min(1.0, 1 / evidence), test=E_PROCESS, reason=None)


def mean_at_any_time(
    columns: Columns, metric: str, scores: Repeats, found: MeanEstimate, view: View, level: float
) -> MeanEstimate:
    """Return a mean with the confidence sequence of a rate; without an interval if it is not a pass rate."""
    only = replace(found, interval=None, effective_n=None, notes=())
    if not found.n:
        return only
    if found.clusters is not None or not _pass_fail(scores, columns.bounds(metric)):
        return replace(only, reason=LOOKED)
    missing = columns.trials - columns.count(SCORED, FAILED) if view == "system" else 0
    sequence = stopped_by_width if columns.stopped_by_width else betabinom_sequence
    interval = sequence(int(scores.flat.sum()), found.n + missing, missing=missing, level=level)
    return replace(only, interval=interval, reason=None)


def _pass_fail(scores: Repeats, bounds: tuple[float, float] | None) -> bool:
    return bounds == UNIT and scores.binary and bool(np.all(scores.counts <= 1))
