"""The rules of a gate, each held against the numbers it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial.analysis.columns import Columns
from fairtrial.analysis.estimates import mean_of
from fairtrial.analysis.metrics import COSTS, FAILED, PASSED, UNIT, is_verdict
from fairtrial.analysis.pairing import ComparisonSettings, Pairs, difference, scores_of
from fairtrial.analysis.verdicts import AdjustedDifference, adjust, samples_beyond
from fairtrial.formatting import (
    bound_text,
    change_text,
    count,
    end_text,
    level,
    margin_text,
    mean_text,
    range_text,
    samples_text,
    size_text,
)
from fairtrial.stats import MeanEstimate, PairedDifference, Undefined, samples_to_clear, samples_to_detect

type CheckStatus = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One rule and what the numbers say to it.

    `value` with `low` and `high` is a mean, or a difference where `kind` is "margin"; `bound` is the floor, the ceiling
    or the margin. `needed` is the number of samples that would decide, where the check is open.
    """

    kind: Literal["floor", "ceiling", "margin"]
    metric: str
    slice: str | None
    status: CheckStatus
    bound: float
    value: float | None
    low: float | None
    high: float | None
    n: int
    p: float | None
    needed: int | None
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """A mean must be at least (or, as a ceiling, at most) `bound`."""

    metric: str
    slice: str | None
    bound: float
    candidate: Columns
    ceiling: bool


@dataclass(frozen=True, slots=True, eq=False)
class Margin:
    """candidate - baseline must lie above -margin."""

    metric: str
    slice: str | None
    margin: float
    pairs: Pairs


type Check = Floor | Margin


def evaluate_checks(checks: Sequence[Check], settings: ComparisonSettings) -> tuple[GateCheck, ...]:
    """Hold every rule against its numbers; that one is missed must hold allowing for how many there are."""
    scores = {
        place: scores_of(one.pairs, one.metric, "system", settings)
        for place, one in enumerate(checks)
        if isinstance(one, Margin)
    }
    found = {
        place: AdjustedDifference(difference(scores[place], one.pairs, settings))
        for place, one in enumerate(checks)
        if isinstance(one, Margin)
    }
    # Floors are held to their share of alpha among all rules, so margins must be adjusted for all of them too.
    adjust(list(found.values()), "holm", others=len(checks) - len(found))
    for one in found.values():
        one.tests = len(checks)
    return tuple(
        _margin(one, found[place], scores[place].left_out, settings)
        if isinstance(one, Margin)
        else _floor(one, len(checks), settings)
        for place, one in enumerate(checks)
    )


def _floor(rule: Floor, checks: int, settings: ComparisonSettings) -> GateCheck:
    metric, bound, percent = rule.metric, rule.bound, is_verdict(rule.metric)
    worst = 1.0 if rule.ceiling else 0.0
    found = mean_of(rule.candidate, metric, "system", worst=worst, level=settings.level)
    strict = mean_of(rule.candidate, metric, "system", worst=worst, level=1 - settings.alpha / checks)
    what = f"{_where(rule.slice)}{'pass rate' if metric == PASSED else metric}"
    kind: Literal["floor", "ceiling"] = "ceiling" if rule.ceiling else "floor"
    if found.mean is None or found.interval is None or strict.interval is None:
        why = found.reason or "there is no interval."
        if not found.n:
            why = f"no trial of {rule.candidate.name} says anything about it."
        return GateCheck(
            kind, metric, rule.slice, "inconclusive", bound, found.mean, None, None, found.n, None, None,
            f"{what}: cannot be decided: {why}",
        )  # fmt: skip
    low, high = float(found.interval.low), float(found.interval.high)
    figures = (
        f"{what} {mean_text(found.mean, percent=percent)} ({level(settings.level)} interval "
        f"{end_text(low, bound, percent=percent)} to {end_text(high, bound, percent=percent)}, "
        f"{count(found.n, 'sample')})"
    )
    limit = bound_text(bound, percent=percent)
    needed: int | None = None
    status: CheckStatus
    if high <= bound if rule.ceiling else low >= bound:
        status, told = "pass", f"all of the interval is {'at or below' if rule.ceiling else 'at or above'} {limit}."
    elif strict.interval.low > bound if rule.ceiling else strict.interval.high < bound:
        status, told = "fail", f"all of the interval is {'above' if rule.ceiling else 'below'} {limit}."
    else:
        status, needed = "inconclusive", _samples_for_floor(rule, found, checks, settings)
        told = f"the interval holds {limit}, so it may be met or missed; {_would_decide(needed)}"
        if not low <= bound <= high:
            told = f"missed alone, but not clearly enough for one of {checks} rules; {_would_decide(needed)}"
    unbounded = rule.candidate.bounds(metric) is None and metric not in COSTS
    told += _left_out(rule.candidate.count(FAILED) if unbounded else 0, rule.candidate.lacking(metric))
    return GateCheck(
        kind, metric, rule.slice, status, bound, float(found.mean), low, high, found.n, None, needed,
        f"{figures}: {told}",
    )  # fmt: skip


def _margin(rule: Margin, found: AdjustedDifference, left_out: int, settings: ComparisonSettings) -> GateCheck:
    metric, one, percent = rule.metric, found.difference, is_verdict(rule.metric)
    names = rule.pairs.candidate.name, rule.pairs.baseline.name
    if one.difference is None or one.interval is None:
        why = one.reason or "there is no interval."
        return GateCheck(
            "margin", metric, rule.slice, "inconclusive", rule.margin, one.difference, None, None, one.n, None, None,
            f"{_where(rule.slice)}{metric} against {names[1]}: cannot be decided: {why}",
        )  # fmt: skip
    low, high = float(one.interval.low), float(one.interval.high)
    # Turned so that up is better.
    worst, best = (-high, -low) if settings.lower(metric) else (low, high)
    figures = (
        f"{_where(rule.slice)}{metric} of {names[0]} against {names[1]}: "
        f"{change_text(one.difference, percent=percent)} "
        f"({level(settings.level)} interval {range_text(low, high, percent=percent)}, {count(one.n, 'pair')})"
    )
    margin = margin_text(rule.margin, percent=percent)
    lacking = rule.pairs.candidate.lacking(metric) + rule.pairs.baseline.lacking(metric)
    needed: int | None = None
    status: CheckStatus
    if worst > -rule.margin:
        at_worst = "no worse at all" if worst >= 0 else f"at worst {size_text(worst, percent=percent)} worse"
        status, told = "pass", f"{at_worst}, within the margin of {margin}."
    elif best < 0 and (found.tests == 1 or (found.adjusted is not None and found.adjusted <= settings.alpha)):
        status, told = "fail", "worse, and all of the interval says so."
    else:
        status, needed = "inconclusive", _samples_for_margin(rule, one, found.tests, settings)
        told = (
            f"it may be worse by more than {margin}, and it may not be worse at all"
            if best >= 0
            else f"worse alone, but not clearly enough for one of {found.tests} rules"
        )
        told = f"{told}; {_would_decide(needed)}"
    return GateCheck(
        "margin", metric, rule.slice, status, rule.margin, float(one.difference), low, high, one.n,
        None if one.p_value is None else float(one.p_value), needed,
        f"{figures}: {told}{_left_out(left_out, lacking)}",
    )  # fmt: skip


def _where(name: str | None) -> str:
    return "" if name is None else f"[{name}] "


def _left_out(failures: int, lacking: int) -> str:
    """A metric that is not confined to a range has no worst value to give to a failure; and some trials lack it."""
    told = f" {count(failures, 'failed trial')} could not be counted in it." if failures else ""
    return f"{told} {count(lacking, 'scored trial')} had no number for it." if lacking else told


def _would_decide(needed: int | None) -> str:
    if needed is None:
        return "no number of samples can be named that would decide."
    return f"about {samples_text(needed)} samples would decide."


def _samples_for_floor(rule: Floor, found: MeanEstimate, checks: int, settings: ComparisonSettings) -> int | None:
    """Samples at which the interval would clear the bound, if the mean stays where it is."""
    # A confidence sequence is wider than an interval of a fixed number of samples, and a run has ended.
    if found.mean is None or rule.candidate.adaptive is not None:
        return None
    distance = found.mean - rule.bound
    if not distance:
        return None
    # To be missed takes more than to be met, where there are several rules.
    strictness = settings.level if (distance < 0) is rule.ceiling else 1 - settings.alpha / checks
    needed: int | Undefined
    units = found.n if found.clusters is None else found.clusters
    if found.effective_n and rule.candidate.bounds(rule.metric) == UNIT and 0 < rule.bound < 1:
        single = found.clusters is None and found.trials == found.n
        needed = samples_to_clear(
            found.n, found.effective_n, found.mean, rule.bound, units=None if single else units, level=strictness,
            power=settings.power,
        )  # fmt: skip
    elif found.se:
        needed = samples_to_detect(found.n, found.se, distance, units=units, level=strictness, power=settings.power)
    else:
        return None
    return None if isinstance(needed, Undefined) else max(found.n + 1, needed)


def _samples_for_margin(rule: Margin, found: PairedDifference, checks: int, settings: ComparisonSettings) -> int | None:
    """Samples at which the interval would clear -margin from above, or 0 from below, whichever is sooner."""
    if found.difference is None:
        return None
    sign = -1 if settings.lower(rule.metric) else 1
    moved = sign * found.difference
    counts = []
    if moved > -rule.margin:
        counts.append(samples_beyond(found, -sign * rule.margin, level=settings.level, settings=settings))
    if moved < 0:  # To be broken takes more, where there are several rules.
        counts.append(samples_beyond(found, 0.0, level=1 - settings.alpha / checks, settings=settings))
    known = [samples for samples in counts if samples is not None]
    return max(found.n + 1, min(known)) if known else None
