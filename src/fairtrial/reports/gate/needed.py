"""The samples, or labels, that would decide an open rule of a gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairtrial import stats
from fairtrial.base.formatting import bound_text, margin_text, mean_text, rate, samples_text
from fairtrial.reports.compare.pairing import ComparisonSettings, labels_needed
from fairtrial.reports.compare.verdicts import FEW_UNEQUAL, excess_of, is_mcnemar
from fairtrial.reports.figures.estimates import mean_of
from fairtrial.reports.figures.metrics import PASSED, UNIT, is_ratio, is_verdict
from fairtrial.stats.power import excess_width

if TYPE_CHECKING:
    from fairtrial.reports.gate.checks import Floor, Margin

_MORE_SAMPLES = " More labels alone are not enough: even with every trial labelled, it takes more samples."
ENDED = "This run stopped by its own rule: to decide this, run a planned number of samples without stop_when."


@dataclass(frozen=True, slots=True)
class Needed:
    """The number of samples, or of labels, needed for a given true value, and a sentence about it."""

    samples: int | None = None
    clusters: int | None = None
    assumed: str | None = None
    sentence: str = ""
    labels: int | None = None


def samples_for_quantile(rule: Floor, found: stats.QuantileEstimate, settings: ComparisonSettings) -> Needed:
    """Return the samples needed to show that the bound is met, if half as many trials miss it as allowed."""
    share = found.share if rule.ceiling else 1 - found.share
    truth = (1 + share) / 2
    trials = stats.samples_to_reach(truth, share, level=settings.level, power=settings.power)
    if isinstance(trials, stats.Undefined) or not found.effective_n:
        return Needed()
    samples = -(-trials * found.n // max(1, int(found.effective_n)))
    limit = bound_text(rule.bound, percent=False)
    side = "at or below" if rule.ceiling else "at or above"
    assumed = f"{rate(truth)} of all trials are {side} {limit}"
    return _needed(samples, found.n, found.clusters, rule.slice, assumed, lambda size: f"{size} to show it")


def samples_for_floor(rule: Floor, found: stats.MeanEstimate, settings: ComparisonSettings) -> Needed:
    """Return the samples needed if the true value is better than the bound by the smallest difference that matters."""
    if rule.candidate.watched:
        return Needed(sentence=f" {ENDED}")
    bounds = rule.candidate.bounds(rule.metric)
    step = settings.matters(rule.metric, bounds)
    if step is None or not found.n:
        return Needed()
    truth = rule.bound + (-step if rule.ceiling else step)
    if bounds is not None:
        truth = min(max(truth, bounds[0]), bounds[1])
    if truth == rule.bound:
        return Needed()
    percent = is_verdict(rule.metric)
    name = "pass rate" if rule.metric == PASSED else rule.metric
    side = "at most" if rule.ceiling else "at least"
    limit = bound_text(rule.bound, percent=percent)
    worst = None if bounds is None else bounds[rule.ceiling]
    assumed = f"the true {name} is {mean_text(truth, percent=percent)}"
    if (column := rule.candidate.labels_of(rule.metric)) is not None:
        judge = mean_of(rule.candidate, rule.metric, "system", worst=worst, level=settings.level)
        needed = stats.labels_to_detect(
            column.count, found.se, judge.se, truth - rule.bound, level=settings.level, power=settings.power
        )
        show = f"labels to show {side} {limit}"
        return _needed_labels(needed, found.trials, assumed, show)
    scores = rule.candidate.scores(rule.metric, "system", worst=worst)
    if bounds == UNIT and scores.binary and found.effective_n and 0 < rule.bound < 1:
        trials = stats.samples_to_reach(truth, rule.bound, level=settings.level, power=settings.power)
        samples = (
            None if isinstance(trials, stats.Undefined) else -(-trials * found.n // max(1, int(found.effective_n)))
        )
    elif found.se:
        units = found.n if found.clusters is None else found.clusters
        excess = 0.0
        if bounds is None and found.interval is not None:
            excess = excess_width(found.interval.width / 2, found.se, units - 1, units, level=found.interval.level)
        counted = stats.samples_to_detect(
            found.n,
            found.se,
            truth - rule.bound,
            units=units,
            excess=excess,
            level=settings.level,
            power=settings.power,
        )
        samples = None if isinstance(counted, stats.Undefined) else counted
    else:
        samples = None
    return _needed(samples, found.n, found.clusters, rule.slice, assumed, lambda size: f"{size} to show {side} {limit}")


def samples_for_margin(rule: Margin, found: stats.PairedDifference, settings: ComparisonSettings) -> Needed:
    """Return the samples needed to show that the candidate keeps the margin, if both are equal."""
    if rule.pairs.watched:
        return Needed(sentence=f" {ENDED}")
    margin = margin_text(rule.margin, percent=is_verdict(rule.metric), relative=is_ratio(rule.metric))
    if found.test == stats.LABELS_TEST:
        labels = labels_needed(rule.pairs, rule.metric, found, rule.margin, settings)
        show = f"labels of each side to show that within {margin}"
        return _needed_labels(labels, rule.pairs.candidate.trials, "the two are truly equal", show)
    unequal = found.wins + found.losses
    if not rule.margin or unequal < FEW_UNEQUAL:
        return Needed()
    needed: int | stats.Undefined
    if is_mcnemar(found):
        # As many unequal pairs as were seen, half of them on each side: twice the pairs, so that halves are whole.
        needed = stats.pairs_to_clear(
            unequal, unequal, 2 * found.n, bound=-rule.margin, level=settings.level, power=settings.power
        )
    elif found.se:
        units = found.n if found.clusters is None else found.clusters
        ratio = is_ratio(rule.metric)
        needed = stats.samples_to_detect(
            found.n,
            found.se,
            math.log1p(rule.margin) if ratio else rule.margin,
            units=units,
            excess=excess_of(found, ratio=ratio),
            level=settings.level,
            power=settings.power,
        )
    else:
        return Needed()
    samples = None if isinstance(needed, stats.Undefined) else needed
    return _needed(
        samples, found.n, found.clusters, rule.slice, "the two are truly equal",
        lambda size: f"{size} to show that within {margin}",
    )  # fmt: skip


def _needed(
    samples: int | None,
    n: int,
    clusters: int | None,
    part: str | None,
    assumed: str,
    purpose: Callable[[str], str],
) -> Needed:
    """Format the number of samples as a sentence; empty if there are as many already."""
    if samples is None or samples <= n:
        return Needed()
    kind = "" if part is None else " of this slice"
    size = f"about {samples_text(samples)} samples{kind}"
    groups = None
    if clusters is not None:
        groups = max(clusters + 1, -(-samples * clusters // n))
        size = f"about {samples_text(groups)} clusters like these ({samples_text(samples)} samples{kind})"
    return Needed(samples, clusters=groups, assumed=assumed, sentence=f" If {assumed}, it takes {purpose(size)}.")


def _needed_labels(needed: int | stats.Undefined, trials: int, assumed: str, show: str) -> Needed:
    """Format the number of labels as a sentence."""
    if isinstance(needed, stats.Undefined) or needed > trials:
        return Needed(sentence=_MORE_SAMPLES)
    sentence = f" If {assumed}, it takes about {samples_text(needed)} {show}."
    return Needed(labels=needed, assumed=assumed, sentence=sentence)
