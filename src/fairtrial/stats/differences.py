"""Which interval and which test suit a set of paired differences; `paired.paired_difference` explains the choice."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy import stats

from fairtrial.stats._arrays import FloatArray, IntArray, t_quantile, two_sided
from fairtrial.stats.intervals import FEW_IMPERFECT, clustered_se, sem
from fairtrial.stats.mcnemar import binary_mde, bonett_price, mcnemar_exact, mcnemar_midp
from fairtrial.stats.resampling import (
    RESAMPLE_CLUSTERS_UP_TO,
    RESAMPLE_UP_TO,
    Units,
    bca_interval_units,
    signflip_interval_units,
    signflip_units,
    units_of,
)
from fairtrial.stats.results import Interval, Undefined


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for: level, power, the largest possible difference (None: no limit), draws and seed."""

    level: float
    power: float
    largest: float | None
    draws: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The inference about one set of differences; `reasons` explain every None."""

    interval: Interval | None
    p_value: float | None
    test: str | None
    se: float | None
    mde: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    low: float
    high: float
    name: str


def binary_answer(differences: FloatArray, plan: Plan, *, exact: bool) -> Answer:
    """McNemar's test and the Bonett-Price interval for pairs of single pass/fail outcomes."""
    wins, losses = int(np.count_nonzero(differences > 0)), int(np.count_nonzero(differences < 0))
    n = differences.size
    reasons: list[str] = []
    se = _defined(sem(differences), reasons)
    mde = _defined(binary_mde(wins, losses, n, level=plan.level, power=plan.power), reasons)
    interval = bonett_price(wins, losses, n, level=plan.level)
    p = mcnemar_exact(wins, losses) if exact else mcnemar_midp(wins, losses)
    test = "exact McNemar test" if exact else "mid-p McNemar test"
    return Answer(interval if isinstance(interval, Interval) else None, p, test, se, mde, tuple(reasons))


def resampled_answer(differences: FloatArray, labels: IntArray | None, plan: Plan) -> Answer:
    """Sign-flip test, and the hull of the bootstrap and sign-flip intervals, for samples or whole clusters."""
    units = units_of(differences, labels)
    if labels is not None and units.count < 2:
        reason = "All samples are in one cluster, so nothing shows how much clusters differ."
        return Answer(None, None, None, None, None, (reason,))
    reasons: list[str] = []
    se = _defined(sem(differences) if labels is None else clustered_se(differences, labels), reasons)
    facing = _orientation(units)
    turned = Units(facing * units.totals, units.sizes) if facing else units
    turned = _sorted(turned)
    p, test = _test(turned, se, plan, clustered=labels is not None)
    spans, pseudo_se = _spans(differences, turned, labels, se, facing, plan)
    if not spans:
        reasons.append("Without bounds, equal differences (or a single one) give no interval.")
        return Answer(None, p, test, se, None, tuple(reasons))
    low, high = min(span.low for span in spans), max(span.high for span in spans)
    if not facing:
        # The data are their own mirror image; so must the interval be, whatever the random draws.
        low, high = -max(-low, high), max(-low, high)
    elif facing < 0:
        low, high = -high, -low
    mde = _defined(_mde((high - low) / 2, se or pseudo_se or 0.0, units.count, plan), reasons)
    if plan.largest is not None:
        low, high = max(-plan.largest, low), min(plan.largest, high)
    method = " and ".join(span.name for span in spans)
    return Answer(Interval(low, high, plan.level, method), p, test, se, mde, tuple(reasons))


def _test(units: Units, se: float | None, plan: Plan, *, clustered: bool) -> tuple[float, str]:
    whole = " of whole clusters" if clustered else ""
    moving = units.totals[units.totals != 0]
    if moving.size > (RESAMPLE_CLUSTERS_UP_TO if clustered else RESAMPLE_UP_TO) and np.ptp(np.abs(moving)) > 0 and se:
        df = units.count - 1
        return float(2 * stats.t.sf(abs(units.difference) / se, df)), f"t test with {df} df" + (
            ", clustered error" if clustered else ""
        )
    found = signflip_units(units, draws=plan.draws, seed=plan.seed)
    how = "exact" if found.exact else f"{found.draws} draws"
    return found.p_value, f"sign-flip test{whole}, {how}"


def _spans(
    differences: FloatArray,
    units: Units,
    labels: IntArray | None,
    se: float | None,
    facing: int,
    plan: Plan,
) -> tuple[list[_Span], float | None]:
    """The intervals whose hull is reported, and the error of the one with pseudo-units if it is among them.

    They face the way that `units` do.
    """
    whole = "" if labels is None else " of whole clusters"
    spans: list[_Span] = []
    centre = units.difference
    spread = units.spread and se is not None and se > 0
    too_few = 2 ** (1 - units.count) > 1 - plan.level
    if spread and se is not None:
        flip: Interval | Undefined
        if units.count > (RESAMPLE_UP_TO if labels is None else RESAMPLE_CLUSTERS_UP_TO):
            spans.append(_t_span(centre, se, units.count - 1, plan.level))
        elif isinstance(
            flip := signflip_interval_units(units, level=plan.level, draws=plan.draws, seed=plan.seed), Interval
        ):
            boot = bca_interval_units(units, level=plan.level, widened=True, draws=plan.draws, seed=plan.seed)
            if isinstance(boot, Interval):
                spans.append(_Span(boot.low, boot.high, boot.method + whole))
            spans.append(_Span(flip.low, flip.high, flip.method + whole))
        elif labels is not None or plan.largest is None or not too_few:
            # Also where the draws are too few for so high a level.
            spans.append(_t_span(centre, se, units.count - 1, plan.level))
    if labels is not None and too_few:
        # Two or three clusters may agree by luck; what is known of the samples is a floor for the width.
        alone = resampled_answer(differences * (facing or 1), None, plan).interval
        if alone is not None:
            spans.append(_Span(alone.low, alone.high, f"{alone.method} of single samples"))
    few = np.count_nonzero(differences) < FEW_IMPERFECT or not spread or (labels is None and too_few)
    if not few or plan.largest is None:
        return spans, None
    pseudo, error = _pseudo_span(units, plan.largest, plan.level)
    return [*spans, pseudo], error


def _t_span(centre: float, se: float, df: int, level: float) -> _Span:
    half = t_quantile(two_sided(level), df) * se
    return _Span(centre - half, centre + half, f"t with {df} df")


def _pseudo_span(units: Units, largest: float, level: float) -> tuple[_Span, float]:
    """Bonett and Price's idea for units of any kind: add one with the largest difference each way."""
    size = float(units.sizes.mean())
    total = float(units.sizes.sum()) + 2 * size
    centre = float(units.totals.sum()) / total
    residuals = units.totals - centre * units.sizes
    extra = (size * (largest - centre)) ** 2 + (size * (largest + centre)) ** 2
    se = sqrt(float(np.sum(residuals * residuals)) + extra) / total
    half = t_quantile(two_sided(level), units.count + 1) * se
    return _Span(centre - half, centre + half, "Bonett-Price pseudo-pairs"), se


def _mde(half: float, error: float, count: int, plan: Plan) -> float | Undefined:
    """What the interval's own reach, and one more error for the power, add up to."""
    found = half + t_quantile(plan.power, max(1, count - 1)) * error
    if plan.largest is not None and found > plan.largest:
        return Undefined("Even the largest possible difference might be missed.")
    return found


def _orientation(units: Units) -> int:
    """1 or -1 such that data and their negative are turned to the same side; 0 if they are the same data."""
    there, back = _sorted(units), _sorted(Units(-units.totals, units.sizes))
    apart = np.flatnonzero(there.totals != back.totals)
    if not apart.size:
        return 0
    return 1 if there.totals[apart[0]] > back.totals[apart[0]] else -1


def _sorted(units: Units) -> Units:
    order = np.lexsort((units.totals, units.sizes))
    return Units(units.totals[order], units.sizes[order])


def _defined(value: float | Undefined, reasons: list[str]) -> float | None:
    if isinstance(value, Undefined):
        reasons.append(value.reason)
        return None
    return value
