"""Evaluate the rules of a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fairtrial import stats
from fairtrial.base.formatting import (
    bound_text,
    change_text,
    count,
    end_text,
    level,
    margin_text,
    mean_text,
    open_range,
    range_text,
    rate,
    size_text,
)
from fairtrial.reports.compare import pairing
from fairtrial.reports.compare.verdicts import has_few_clusters, is_mcnemar
from fairtrial.reports.figures.columns import Columns, LabelColumn
from fairtrial.reports.figures.estimates import corrected_of, mean_of, quantile_of
from fairtrial.reports.figures.metrics import PASSED, UNIT, is_ratio, is_verdict, measured_metric, parse_quantile
from fairtrial.reports.gate.needed import ENDED, Needed, samples_for_floor, samples_for_margin, samples_for_quantile

type CheckStatus = Literal["pass", "fail", "inconclusive"]

UNSEEN = 3
"""What happens to this many of n units on average is seen in none of them in 5% of runs."""

_INVISIBLE = 5e-4  # Ends of intervals are shown in tenths of a percent.
_BEYOND = 1e300
"""A number beyond every other: what a missing one may have been, for the ranks of the others."""


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One rule and its result.

    `value` with `low` and `high` is a mean, or a difference where `kind` is "margin"; `bound` is the floor, the ceiling
    or the margin. `missing` counts the planned trials, or pairs, without a number; the interval holds whatever they
    would have been, or, if `missing_at_random`, leaves them out. Where the check is open, `needed` is the number of
    samples (of the slice, if it has one) that shows with power .8 what `needed_if` assumes, and `needed_clusters` the
    number of clusters like those at hand. `labels` are the numbers of people's labels, of the candidate and the
    baseline, by which a judge was corrected; `drawn` says whether they are known to be of random samples, without which
    nothing is decided, and `needed_labels` is the number of labels (of each side) in place of `needed`.
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
    missing: int = 0
    missing_share: float = 0.0
    missing_at_random: bool = False
    needed_if: str | None = None
    needed_clusters: int | None = None
    labels: tuple[int, ...] = ()
    drawn: bool | None = None
    needed_labels: int | None = None


@dataclass(frozen=True, slots=True)
class MissingRule:
    """How a rule treats missing values: above the share `limit`, it is inconclusive.

    Up to it, they are taken at their worst or, `at_random`, left out.
    """

    limit: float = 0.05
    at_random: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """A mean, or the quantile that `metric` names, must be at least (or, as a ceiling, at most) `bound`."""

    metric: str
    slice: str | None
    bound: float
    candidate: Columns
    ceiling: bool
    missing: MissingRule = MissingRule()

    @property
    def what(self) -> str:
        """The subject of the rule, for the start of a sentence."""
        name = " of ".join(self.metric.split(":", 1)) if parse_quantile(self.metric) else self.metric
        return f"{_where(self.slice)}{'pass rate' if self.metric == PASSED else name}"


@dataclass(frozen=True, slots=True, eq=False)
class Margin:
    """candidate - baseline must lie above -margin."""

    metric: str
    slice: str | None
    margin: float
    pairs: pairing.Pairs
    missing: MissingRule = MissingRule()

    @property
    def what(self) -> str:
        """The subject of the rule, for the start of a sentence."""
        return f"{_where(self.slice)}{self.metric} of {self.pairs.candidate.name} against {self.pairs.baseline.name}"


type Check = Floor | Margin


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The missing values of one rule: their number, the total, and why they prevent a decision, if they do."""

    missing: int
    share: float
    refusal: str | None
    fill: tuple[float, float] | None  # Range used to fill missing values; None: they are left out.


def evaluate_checks(checks: Sequence[Check], settings: pairing.ComparisonSettings) -> tuple[GateCheck, ...]:
    """Evaluate every rule; a failure must hold after adjusting for the number of rules."""
    return tuple(_evaluate(one, len(checks), settings) for one in checks)


def _evaluate(rule: Check, checks: int, settings: pairing.ComparisonSettings) -> GateCheck:
    if isinstance(rule, Margin):
        return _margin(rule, checks, settings)
    return (_floor if parse_quantile(rule.metric) is None else _quantile_floor)(rule, checks, settings)


def _gaps(rule: Check, settings: pairing.ComparisonSettings) -> _Gaps:
    """Return the missing values of a rule."""
    if isinstance(rule, Margin):
        missing, planned, of = rule.pairs.missing_values(rule.metric), rule.pairs.planned, "pair"
        watched = rule.pairs.watched
    else:
        metric = measured_metric(rule.metric)
        missing, planned, of = rule.candidate.missing_values(metric), rule.candidate.trials, "trial"
        watched = rule.candidate.watched
    if not missing:
        return _Gaps(0, 0.0, None, None)
    share = missing / planned
    if isinstance(rule, Margin) and not rule.pairs.matched:
        return _Gaps(missing, share, "the two sides have no sample in common: run both on the same data.", None)
    if share > rule.missing.limit:
        return _Gaps(
            missing, share,
            f"{missing:,} of {count(planned, of)} ({rate(share)}) {'has' if missing == 1 else 'have'} no number for "
            f"it, more than the {bound_text(rule.missing.limit, percent=True)} that is allowed: {_remedy(rule)}.",
            None,
        )  # fmt: skip
    if rule.missing.at_random or watched:  # Intervals that hold at any time already allow for every outcome.
        return _Gaps(missing, share, None, None)
    if isinstance(rule, Floor) and parse_quantile(rule.metric) is not None:
        return _Gaps(missing, share, None, (-_BEYOND, _BEYOND))
    declared = settings.range_of(rule.metric)
    if declared is None:
        return _Gaps(
            missing, share,
            f"{missing:,} of {count(planned, of)} {'has' if missing == 1 else 'have'} no number for it, and without "
            "declared bounds it could be anything. Declare them with bounds, or set max_missing to assume that missing "
            "numbers are like the others.",
            None,
        )  # fmt: skip
    return _Gaps(missing, share, None, declared)


def _remedy(rule: Check) -> str:
    """Return what to do about missing values."""
    if isinstance(rule, Margin) and rule.pairs.matched < rule.pairs.rows:
        samples = count(rule.pairs.rows - rule.pairs.matched, "changed sample")
        return f"{samples} {'is' if samples.startswith('1 ') else 'are'} among them. Run both sides on the same data"
    return "finish the run, or repair its scoring"


def _floor(rule: Floor, checks: int, settings: pairing.ComparisonSettings) -> GateCheck:
    metric, bound, percent = rule.metric, rule.bound, is_verdict(rule.metric)
    gaps = _gaps(rule, settings)
    found, interval = _mean(rule, gaps, settings.level)
    if gaps.refusal is None and has_few_clusters(found):
        gaps = replace(gaps, refusal=" ".join(found.notes))
    columns = [] if (column := rule.candidate.labels_of(metric)) is None else [column]
    labels = tuple(one.count for one in columns)
    gaps, drawn = _of_drawn(gaps, columns)
    kind: Literal["floor", "ceiling"] = "ceiling" if rule.ceiling else "floor"
    if found.mean is None or interval is None:
        why = found.reason or "there is no interval."
        if not found.n:
            why = f"no trial of {rule.candidate.name} has a value for it."
        return GateCheck(
            kind, metric, rule.slice, "inconclusive", bound, found.mean, None, None, found.n, None, None,
            f"{rule.what}: cannot be decided: {gaps.refusal or why}", gaps.missing, gaps.share, labels=labels,
            drawn=drawn,
        )  # fmt: skip
    low, high = float(interval.low), float(interval.high)
    exact = "" if gaps.fill is not None or labels or _equals_report(found, interval) else "exact "
    figures = (
        f"{rule.what} {mean_text(found.mean, percent=percent)} ({exact}{level(settings.level)} interval "
        f"{end_text(low, bound, percent=percent)} to {end_text(high, bound, percent=percent)}, "
        f"{count(found.n, 'sample')}{_by_labels(labels)}{_completed(gaps)})"
    )
    limit = bound_text(bound, percent=percent)
    needed = Needed()
    status: CheckStatus = "inconclusive"
    if gaps.refusal is not None:
        text = f"cannot be decided: {gaps.refusal}"
    elif found.heavy_tail and (low <= bound if rule.ceiling else low < bound):
        # With a long tail, the low end is reliable and the high end is not.
        way = f"{'ceilings' if rule.ceiling else 'floors'} for p95:{metric} or median:{metric}"
        text = f"cannot be decided: {' '.join(found.notes)} A gate takes {way}."
    elif high <= bound if rule.ceiling else low >= bound:
        status, text = (
            "pass",
            f"all of the interval is {'at or below' if rule.ceiling else 'at or above'} {limit}.",
        )
    elif low > bound if rule.ceiling else high < bound:
        strict = interval if checks == 1 else _mean(rule, gaps, 1 - settings.alpha / checks)[1]
        if strict is not None and (strict.low > bound if rule.ceiling else strict.high < bound):
            status, text = "fail", f"all of the interval is {'above' if rule.ceiling else 'below'} {limit}."
        else:
            text = f"missed on its own, but not clearly enough for one of {checks} rules."
    else:
        needed = samples_for_floor(rule, found, settings)
        text = f"the interval contains {limit}: inconclusive.{needed.sentence}"
    text += _assumption(rule, gaps)
    return GateCheck(
        kind, metric, rule.slice, status, bound, float(found.mean), low, high, found.n, None, needed.samples,
        f"{figures}: {text}", gaps.missing, gaps.share, rule.missing.at_random and gaps.missing > 0, needed.assumed,
        needed.clusters, labels, drawn, needed.labels,
    )  # fmt: skip


def _of_drawn(gaps: _Gaps, columns: Sequence[LabelColumn]) -> tuple[_Gaps, bool | None]:
    """Return whether all labels are of drawn trials, None without labels; else they prevent a decision.

    A PASS is a proof, and labels that somebody chose prove nothing about the other trials.
    """
    why = [one.undrawn for one in columns if one.undrawn is not None]
    if why and gaps.refusal is None and not any(one.refusal for one in columns):
        gaps = replace(gaps, refusal=" ".join(dict.fromkeys(f"{reason[:1].lower()}{reason[1:]}" for reason in why)))
    return gaps, not why if columns else None


def _quantile_floor(rule: Floor, checks: int, settings: pairing.ComparisonSettings) -> GateCheck:
    """Compare a quantile with its floor or ceiling, using order statistics."""
    gaps = _gaps(rule, settings)
    found = _quantile(rule, gaps, settings.level)
    kind: Literal["floor", "ceiling"] = "ceiling" if rule.ceiling else "floor"
    bound, limit = rule.bound, bound_text(rule.bound, percent=False)
    refusal = gaps.refusal
    if refusal is None and has_few_clusters(found):
        refusal = " ".join(found.notes)
    if found.value is None:
        refusal = refusal or f"no trial of {rule.candidate.name} has a value for it."
    low, high = (None if end is None else end_text(end, bound, percent=False) for end in (found.low, found.high))
    figures = (
        f"{rule.what} {mean_text(found.value, percent=False)} ({level(settings.level)} interval "
        f"{open_range(low, high)}, {count(found.n, 'sample')}{_completed(gaps)})"
    )
    needed = Needed()
    status: CheckStatus = "inconclusive"
    if refusal is not None:
        text = f"cannot be decided: {refusal}"
    elif _beyond(found, rule, met=True):
        status, text = (
            "pass",
            f"all of the interval is {'at or below' if rule.ceiling else 'at or above'} {limit}.",
        )
    elif _beyond(found, rule, met=False):
        strict = found if checks == 1 else _quantile(rule, gaps, 1 - settings.alpha / checks)
        if _beyond(strict, rule, met=False):
            status, text = "fail", f"all of the interval is {'above' if rule.ceiling else 'below'} {limit}."
        else:
            text = f"missed on its own, but not clearly enough for one of {checks} rules."
    elif rule.candidate.watched:
        text = f"cannot be decided. {ENDED}"
    else:
        needed = samples_for_quantile(rule, found, settings)
        text = f"the interval contains {limit}: inconclusive.{needed.sentence}"
    text += _assumption(rule, gaps)
    return GateCheck(
        kind, rule.metric, rule.slice, status, bound, found.value, found.low, found.high, found.n, None, needed.samples,
        f"{figures}: {text}", gaps.missing, gaps.share, rule.missing.at_random and gaps.missing > 0, needed.assumed,
        needed.clusters,
    )  # fmt: skip


def _beyond(found: stats.QuantileEstimate, rule: Floor, *, met: bool) -> bool:
    """True if the whole interval meets the bound or, if not `met`, misses it; an open end does neither."""
    if rule.ceiling is met:
        end = found.high
        return end is not None and (end <= rule.bound if met else end < rule.bound)
    end = found.low
    return end is not None and (end >= rule.bound if met else end > rule.bound)


def _quantile(rule: Floor, gaps: _Gaps, level: float) -> stats.QuantileEstimate:
    """Return the observed quantile, and the interval for any possible missing values."""
    metric, share = parse_quantile(rule.metric) or (rule.metric, 0.5)
    found = quantile_of(rule.candidate, metric, share, level=level)
    if gaps.fill is None or found.value is None:
        return found
    least, most = (
        quantile_of(rule.candidate.completed(metric, value), metric, share, level=level) for value in gaps.fill
    )
    return replace(
        found,
        low=None if least.low is None or least.low <= -_BEYOND else least.low,
        high=None if most.high is None or most.high >= _BEYOND else most.high,
    )


def _mean(rule: Floor, gaps: _Gaps, level: float) -> tuple[stats.MeanEstimate, stats.Interval | None]:
    """Return the observed mean, and the interval for any possible missing values."""
    found, interval = _decisive(rule, rule.candidate, level)
    if gaps.fill is None or interval is None:
        return found, interval
    ends = [_decisive(rule, rule.candidate.completed(rule.metric, value), level)[1] for value in gaps.fill]
    return found, pairing.hull(interval, ends)


def _decisive(rule: Floor, columns: Columns, level: float) -> tuple[stats.MeanEstimate, stats.Interval | None]:
    """Return a mean with the interval used for decisions: exact for pass/fail outcomes.

    Wilson's is right on average over many rates and too narrow for some: at a true rate of .99 it lies wholly below
    it in up to a tenth of runs.
    """
    bounds = columns.bounds(rule.metric)
    worst = None if bounds is None else bounds[1] if rule.ceiling else bounds[0]
    if columns.labels_of(rule.metric) is not None:
        found = corrected_of(columns, rule.metric, "system", worst=worst, level=level, exact=True)
        return found, found.interval
    found = mean_of(columns, rule.metric, "system", worst=worst, level=level)
    if found.interval is None or found.mean is None or not found.effective_n or columns.watched:
        return found, found.interval
    if bounds != UNIT or not columns.scores(rule.metric, "system", worst=worst).binary:
        return found, found.interval
    exact = stats.exact_rate_interval(found.mean, found.effective_n, level=level)
    single = found.clusters is None and found.trials == found.n
    return found, exact if single else pairing.hull(found.interval, [exact])


def _equals_report(found: stats.MeanEstimate, interval: stats.Interval) -> bool:
    """Return whether the interval used for the decision looks like the one that reports show."""
    shown = found.interval
    return shown is None or max(abs(shown.low - interval.low), abs(shown.high - interval.high)) < _INVISIBLE


def _margin(rule: Margin, checks: int, settings: pairing.ComparisonSettings) -> GateCheck:
    metric, percent = rule.metric, is_verdict(rule.metric)
    gaps = _gaps(rule, settings)
    found, interval = _difference(rule, gaps, settings)
    relative = is_ratio(metric)
    sides = (rule.pairs.candidate, rule.pairs.baseline)
    columns = [column for side in sides if (column := side.labels_of(metric)) is not None]
    labels = tuple(column.count for column in columns)
    gaps, drawn = _of_drawn(gaps, columns)
    if gaps.refusal is None and (has_few_clusters(found) or found.heavy_tail):
        gaps = replace(gaps, refusal=" ".join(found.notes))
    if found.difference is None or interval is None:
        why = gaps.refusal or found.reason or "there is no interval."
        return GateCheck(
            "margin", metric, rule.slice, "inconclusive", rule.margin, found.difference, None, None, found.n, None,
            None, f"{rule.what}: cannot be decided: {why}", gaps.missing, gaps.share, labels=labels, drawn=drawn,
        )  # fmt: skip
    lower = bool(settings.lower(metric))
    worst, best = _turned(interval, lower=lower)
    figures = (
        f"{rule.what}: {change_text(found.difference, percent=percent, relative=relative)} ({level(settings.level)} "
        f"interval {range_text(interval.low, interval.high, percent=percent, relative=relative)}, "
        f"{count(found.n, 'pair')}"
        f"{_by_labels(labels)}{_completed(gaps)})"
    )
    margin = margin_text(rule.margin, percent=percent, relative=relative)
    needed = Needed()
    status: CheckStatus = "inconclusive"
    if gaps.refusal is not None:
        text = f"cannot be decided: {gaps.refusal}"
    elif worst > -rule.margin:
        size = size_text(worst, percent=percent, relative=relative)
        at_worst = "no worse at all" if worst >= 0 else f"at worst {size} worse"
        within = f", within the margin of {margin}" if rule.margin else ""
        status, text = "pass", f"{at_worst}{within}.{_unseen_losses(rule, found, settings)}"
    elif best < -rule.margin:
        strict = interval
        if checks > 1:
            strict = _difference(rule, gaps, replace(settings, alpha=settings.alpha / checks))[1] or strict
        if _turned(strict, lower=lower)[1] < -rule.margin:
            allowed = f"more than the {margin} allowed" if rule.margin else "and no loss is allowed"
            size = size_text(best, percent=percent, relative=relative)
            status, text = "fail", f"at least {size} worse, {allowed}."
        else:
            text = f"beyond the margin of {margin} on its own, but not clearly enough for one of {checks} rules."
    elif best < 0:
        text = f"it is worse, but whether by more than {margin} is inconclusive."
    else:
        needed = samples_for_margin(rule, found, settings)
        by = f" by more than {margin}" if rule.margin else ""
        text = f"it may or may not be worse{by}.{needed.sentence}"
    text += _assumption(rule, gaps)
    return GateCheck(
        "margin", metric, rule.slice, status, rule.margin, float(found.difference), float(interval.low),
        float(interval.high), found.n, None if found.p_value is None else float(found.p_value), needed.samples,
        f"{figures}: {text}", gaps.missing, gaps.share, rule.missing.at_random and gaps.missing > 0, needed.assumed,
        needed.clusters, labels, drawn, needed.labels,
    )  # fmt: skip


def _difference(
    rule: Margin, gaps: _Gaps, settings: pairing.ComparisonSettings
) -> tuple[stats.PairedDifference, stats.Interval | None]:
    """Return the observed difference, and the interval for any possible missing values."""
    found = pairing.difference(pairing.scores_of(rule.pairs, rule.metric, "system", settings), rule.pairs, settings)
    if gaps.fill is None or found.interval is None:
        return found, found.interval
    return found, pairing.difference_with_missing(rule.pairs, rule.metric, found.interval, gaps.fill, settings)


def _unseen_losses(rule: Margin, found: stats.PairedDifference, settings: pairing.ComparisonSettings) -> str:
    """Return a caveat if a loss beyond the margin may be too rare to be detected.

    Of n pairs none shows what happens to 3/n of all samples in 5% of runs (Hanley and Lippman-Hand 1983).
    """
    bounds = pairing.scores_of(rule.pairs, rule.metric, "system", settings).bounds
    units = found.n if found.clusters is None else found.clusters
    seen = bounds is None or units * rule.margin >= UNSEEN * (bounds[1] - bounds[0])
    if seen or is_mcnemar(found) or found.test in (stats.BETTING_TEST, stats.LABELS_TEST):
        return ""
    of = "pair" if found.clusters is None else "cluster"
    rare = f"fewer than {rate(min(1.0, UNSEEN / units))} of the {of}s"
    return f" A large loss in {rare} may not be among these {units:,}."


def _turned(interval: stats.Interval, *, lower: bool) -> tuple[float, float]:
    """Return the worst and the best end of an interval of differences."""
    low, high = float(interval.low), float(interval.high)
    return (-high, -low) if lower else (low, high)


def _where(name: str | None) -> str:
    return "" if name is None else f"[{name}] "


def _by_labels(labels: tuple[int, ...]) -> str:
    """Return a remark on the labels behind an interval."""
    if not labels:
        return ""
    return f", {count(labels[0], 'label')}" if len(labels) == 1 else f", {' and '.join(map(str, labels))} labels"


def _completed(gaps: _Gaps) -> str:
    """Return a remark that the interval covers missing values."""
    if gaps.fill is None:
        return ""
    return f", whatever the {'' if gaps.missing == 1 else f'{gaps.missing:,} '}missing would have been"


def _assumption(rule: Check, gaps: _Gaps) -> str:
    if not rule.missing.at_random or not gaps.missing or gaps.refusal is not None:
        return ""
    one = gaps.missing == 1
    return (
        f" This assumes that the {'' if one else f'{gaps.missing:,} '}missing {'is' if one else 'are'} like the others."
    )
