"""Verdicts on differences: adjustment for several tests, detectable differences, and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairtrial import stats
from fairtrial.base.formatting import change_text, count, level, mean_text, p_text, range_text, samples_text, size_text
from fairtrial.reports.compare.comparison import Verdict
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.metrics import OVERSTATED, is_ratio, is_verdict
from fairtrial.stats.differences import FARTHER_OUT
from fairtrial.stats.power import excess_width

FEW_UNEQUAL = 10
"""Below this many unequal pairs nothing tells how often two systems disagree, so no number of samples is named."""


@dataclass(slots=True)
class AdjustedDifference:
    """A difference, its p-value adjusted for all tests made together, and their number."""

    difference: stats.PairedDifference
    adjusted: float | None = None
    tests: int = 1


def adjust(found: Sequence[AdjustedDifference], how: Literal["holm", "bh"], *, others: int = 0) -> int:
    """Adjust p-values for all these tests; returns their number. Differences without a p-value are no tests.

    `others` are made with them that have no p-value to be sorted by; they count as if it were 1.
    """
    tested = [one for one in found if one.difference.p_value is not None]
    p_values = [one.difference.p_value or 0.0 for one in tested] + [1.0] * others
    adjusted = (stats.holm if how == "holm" else stats.benjamini_hochberg)(p_values)
    for one, p in zip(tested, adjusted.tolist(), strict=False):
        one.adjusted, one.tests = p, len(tested)
    return len(tested)


def verdict_of(
    found: AdjustedDifference, settings: ComparisonSettings, lower: bool | None, matters: float | None = None
) -> Verdict:
    """Return the verdict from the interval; among several tests, at the level required by Holm.

    A p-value is the largest 1 - level at which its interval still holds 0, so an adjusted one of at most alpha says
    that the interval at the adjusted level leaves out 0. Too few clusters have no verdict, whatever the interval.
    """
    interval = found.difference.interval
    if interval is None or has_few_clusters(found.difference) or found.difference.heavy_tail:
        return "unknown"
    if interval.contains(0.0) or not _holds_among_others(found, settings):
        # Two one-sided tests: an interval inside the difference that matters rules out both (Schuirmann 1987).
        if matters is not None and -matters < interval.low <= interval.high < matters:
            return "as good as"
        return "no detectable difference"
    return _word(lower, rises=interval.low > 0)


def _word(lower: bool | None, *, rises: bool) -> Verdict:
    """Return the verdict for a direction; without a declared direction it is higher or lower."""
    if lower is None:
        return "higher" if rises else "lower"
    return "better" if rises is not lower else "worse"


def has_few_clusters(found: stats.PairedDifference | stats.MeanEstimate | stats.QuantileEstimate) -> bool:
    """True if the effective number of clusters is too small for a verdict."""
    return found.effective_clusters is not None and found.effective_clusters < stats.FEW_CLUSTERS


def _holds_among_others(found: AdjustedDifference, settings: ComparisonSettings) -> bool:
    return found.tests == 1 or (found.adjusted is not None and found.adjusted <= settings.alpha)


def detectable(
    found: stats.PairedDifference, tests: int, settings: ComparisonSettings, bounds: tuple[float, float] | None
) -> float | None:
    """Return the true difference that is detected with the given power among this many tests.

    The first of m tests must reach alpha/m (Holm): so does the level here, exactly for pass/fail pairs, elsewhere by
    the ratio of what tests at the two levels detect.
    """
    if found.mde is None or tests <= 1:
        return None if found.mde is None else float(found.mde)
    level = 1 - settings.alpha / tests
    if is_mcnemar(found):
        exact = stats.binary_mde(found.wins, found.losses, found.n, level=level, power=settings.power)
        return None if isinstance(exact, stats.Undefined) else exact
    units = found.n if found.clusters is None else found.clusters
    stricter, usual = (
        stats.detectable_shift(math.inf if found.df is None else found.df, units=units, level=one, power=settings.power)
        for one in (level, settings.level)
    )
    effect = float(found.mde) * stricter / usual
    return None if bounds is not None and effect > bounds[1] - bounds[0] else effect


def added_variance(difference: float, repeats: int) -> float:
    """Return the variance that a true difference adds to pass/fail scores; half of it is assumed to flip samples.

    Where a sample flips in every repeat, more repeats do not average it out; where it passes a little more often, they
    do.
    """
    return difference * (1 + 1 / repeats) / 2


def samples_needed(
    found: stats.PairedDifference,
    tests: int,
    settings: ComparisonSettings,
    matters: float | None,
    repeats: int | None = None,
    *,
    ratio: bool = False,
) -> int | None:
    """Return the samples needed to detect the smallest difference that matters with the given power.

    Only how often the two disagree, or the error of the difference, is taken from the data: what was observed of the
    difference itself is mostly noise. None while fewer than 10 pairs are unequal, for a run that looked at its own
    results, for which the arithmetic of a fixed number of samples does not hold, and where labels correct a judge: then
    it is not samples alone that are missing.

    `repeats` is the number of repeats of pass/fail scores, to which a true difference brings variance of its own. Of a
    `ratio`, errors are those of logarithms.
    """
    if (
        matters is None
        or found.difference is None
        or found.heavy_tail
        or found.test in (stats.BETTING_TEST, stats.LABELS_TEST)
    ):
        return None
    if found.wins + found.losses < FEW_UNEQUAL:
        return None
    level = 1 - settings.alpha / max(1, tests)
    needed: int | stats.Undefined
    if is_mcnemar(found):
        unequal = (found.wins + found.losses) / found.n
        needed = stats.pairs_to_detect(unequal, matters, level=level, power=settings.power)
    elif found.se:
        units = found.n if found.clusters is None else found.clusters
        extra = 0.0 if repeats is None else added_variance(matters, repeats) / found.n
        error = math.sqrt(found.se**2 + extra)
        needed = stats.samples_to_detect(
            found.n,
            error,
            math.log1p(matters) if ratio else matters,
            units=units,
            df=found.df,
            excess=excess_of(found, ratio=ratio),
            level=level,
            power=settings.power,
        )
    else:
        return None
    return None if isinstance(needed, stats.Undefined) else needed


def excess_of(found: stats.PairedDifference, *, ratio: bool) -> float:
    """Return how much wider than t the interval of a difference without bounds is, for `samples_to_detect`."""
    ends = found.interval
    if ends is None or found.se is None or FARTHER_OUT not in ends.method:
        return 0.0
    low, high = (math.log1p(end) if ratio else end for end in (ends.low, ends.high))
    units = found.n if found.clusters is None else found.clusters
    df = max(1.0, units - 1.0 if found.df is None else found.df)
    return excess_width((high - low) / 2, found.se, df, units, level=ends.level)


def is_mcnemar(found: stats.PairedDifference) -> bool:
    """True for single pass/fail outcomes of independent samples."""
    return found.test is not None and "McNemar" in found.test


def sentences(
    metric: str,
    names: tuple[str, str],
    found: AdjustedDifference,
    verdict: Verdict,
    mde: float | None,
    needed: int | None,
    notes: Sequence[str],
    settings: ComparisonSettings,
    matters: float | None = None,
    labels: tuple[int, int] | None = None,
    drawn: bool | None = None,
) -> tuple[str, str]:
    """Return the verdict on one metric as a sentence, and what more there is to say of it."""
    candidate, baseline = names
    one, percent, relative = found.difference, is_verdict(metric), is_ratio(metric)
    if one.difference is None or one.interval is None:
        why = " ".join(notes) or "there is no interval."
        return f"{metric}: {candidate} and {baseline} cannot be compared: {why}", ""
    among = f", adjusted for {found.tests} tests" if found.tests > 1 else ""
    figures = (
        f"{mean_text(one.mean_a, percent=percent)} against {mean_text(one.mean_b, percent=percent)}, "
        f"{change_text(one.difference, percent=percent, relative=relative)} ({level(settings.level)} interval "
        f"{range_text(one.interval.low, one.interval.high, percent=percent, relative=relative)})"
    )
    if verdict != "unknown":  # Where nothing is decided, a p-value would only seem to decide.
        figures += f", {p_text(one.p_value if found.adjusted is None else found.adjusted)}{among}"
    if labels is not None:
        figures += f", by {count(labels[0], 'label')} of {candidate} and {labels[1]:,} of {baseline}"
        figures += "" if drawn else ", if these were drawn at random"
    if verdict == "unknown":
        return f"{metric}: no verdict on {candidate} and {baseline}: {figures}. {' '.join(one.notes)}", ""
    size_that_matters = "" if matters is None else size_text(matters, percent=percent, relative=relative)
    if verdict in ("higher", "lower"):
        return (
            f"{metric}: {candidate} is {verdict} than {baseline}: {figures}.",
            "Declare which way is better with lower_is_better or higher_is_better (--lower-is-better, "
            "--higher-is-better).",
        )
    if verdict in ("better", "worse"):
        text = f"{metric}: {candidate} is {verdict} than {baseline}: {figures}."
        if one.test == stats.BETTING_TEST:
            return f"{text} {OVERSTATED}", ""
        if matters is not None and max(abs(one.interval.low), abs(one.interval.high)) < matters:
            text += f" That is less than the {size_that_matters} that matter."
        return text, ""
    if verdict == "as good as":
        return f"{metric}: {candidate} is as good as {baseline}, within {size_that_matters}: {figures}.", ""
    opening = f"no detectable difference between {candidate} and {baseline}"
    if one.test != stats.BETTING_TEST and (mde is None or abs(one.difference) >= mde):
        # The difference is large enough, but there are too few samples.
        opening = f"too few samples to tell {candidate} from {baseline}"
    first = f"{metric}: {opening}: {figures}."
    if not one.interval.contains(0.0):
        first += f" On its own this would count as a difference; among {found.tests} tests it may be chance."
    if one.test == stats.BETTING_TEST:
        return first, "The run used its own results to decide when to stop, so only strong evidence counts."
    parts: list[str] = []
    size = count(one.n, "sample") + ("" if labels is None else " and these labels")
    if not one.wins + one.losses:
        parts.append("Every pair is equal.")
    if mde is None:
        parts.append(f"With {size}, even the largest possible difference might be missed.")
    else:
        least = size_text(mde, percent=percent, relative=relative)
        parts.append(f"With {size}, differences below {least} would probably not be detected.")
    if needed is not None and needed > one.n:
        enough = f"{samples_text(needed)} samples"
        if one.clusters is not None:
            enough = f"{samples_text(-(-needed * one.clusters // one.n))} clusters like these ({enough})"
        parts.append(f"Detecting a difference of {size_that_matters} four times in five takes about {enough}.")
    return first, " ".join(parts)
