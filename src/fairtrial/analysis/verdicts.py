"""From a difference to a verdict: several tests at once, what could have shown, and how it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats as scipy_stats

from fairtrial.analysis.anytime import E_PROCESS
from fairtrial.analysis.comparison import Verdict
from fairtrial.analysis.metrics import is_verdict
from fairtrial.analysis.pairing import ComparisonSettings
from fairtrial.formatting import change_text, count, level, mean_text, p_text, range_text, samples_text, size_text
from fairtrial.stats import (
    PairedDifference,
    Undefined,
    benjamini_hochberg,
    binary_mde,
    holm,
    pairs_to_clear,
    samples_to_detect,
)


@dataclass(slots=True)
class AdjustedDifference:
    """A difference, its p-value allowing for the tests made with it, and how many those are."""

    difference: PairedDifference
    adjusted: float | None = None
    tests: int = 1


def adjust(found: Sequence[AdjustedDifference], how: Literal["holm", "bh"], *, others: int = 0) -> int:
    """Allow for all these tests being made together, and say how many there are; without a p there is no test.

    `others` are made with them that have no p-value to be sorted by; they count as if it were 1.
    """
    tested = [one for one in found if one.difference.p_value is not None]
    p_values = [one.difference.p_value or 0.0 for one in tested] + [1.0] * others
    adjusted = (holm if how == "holm" else benjamini_hochberg)(p_values)
    for one, p in zip(tested, adjusted.tolist(), strict=False):
        one.adjusted, one.tests = p, len(tested)
    return len(tested)


def verdict_of(found: AdjustedDifference, settings: ComparisonSettings, lower: bool) -> Verdict:
    """The verdict is the interval's; among several tests the adjusted p-value must agree.

    Where a run looked at its own results it is the e-process that decides: its interval is the more cautious one.
    """
    interval = found.difference.interval
    if interval is None:
        return "unknown"
    if found.difference.test == E_PROCESS:
        p = found.difference.p_value if found.adjusted is None else found.adjusted
        if p is None or p > settings.alpha * (1 + 1e-9):
            return "no detectable difference"
        return "better" if (found.difference.wins > found.difference.losses) is not lower else "worse"
    if interval.contains(0.0) or not _holds_among_others(found, settings):
        return "no detectable difference"
    return "better" if (interval.low > 0) is not lower else "worse"


def _holds_among_others(found: AdjustedDifference, settings: ComparisonSettings) -> bool:
    return found.tests == 1 or (found.adjusted is not None and found.adjusted <= settings.alpha)


def detectable(
    found: PairedDifference, tests: int, settings: ComparisonSettings, bounds: tuple[float, float] | None
) -> float | None:
    """The true difference found with the power asked for, when it has to show among so many tests.

    The first of m tests must reach alpha/m (Holm): so does the level here, exactly for pass/fail pairs, elsewhere by
    the ratio of normal quantiles.
    """
    if found.mde is None or tests <= 1:
        return None if found.mde is None else float(found.mde)
    level = 1 - settings.alpha / tests
    if is_mcnemar(found):
        exact = binary_mde(found.wins, found.losses, found.n, level=level, power=settings.power)
        return None if isinstance(exact, Undefined) else exact
    effect = float(found.mde) * _reach(level, settings.power) / _reach(settings.level, settings.power)
    return None if bounds is not None and effect > bounds[1] - bounds[0] else effect


def samples_needed(found: PairedDifference, tests: int, settings: ComparisonSettings) -> int | None:
    """How many samples would show a true difference as large as the observed one."""
    if found.difference is None:
        return None
    return samples_beyond(found, 0.0, level=1 - settings.alpha / max(1, tests), settings=settings)


def samples_beyond(found: PairedDifference, bound: float, *, level: float, settings: ComparisonSettings) -> int | None:
    """How many samples would tell a true difference as large as the observed one from `bound`.

    None where there is no number: the observed difference is the bound, or the run looked at its own results, for
    which the arithmetic of a fixed number of samples does not hold.
    """
    if found.difference is None or found.test == E_PROCESS:
        return None
    needed: int | Undefined
    if is_mcnemar(found) and found.wins + found.losses:
        needed = pairs_to_clear(found.wins, found.losses, found.n, bound=bound, level=level, power=settings.power)
    else:
        error = found.se
        if not error and bound and found.interval is not None:
            # Pairs that are all equal have no error of their own; the interval's width stands in for it.
            error = found.interval.width / (2 * float(scipy_stats.norm.ppf((1 + found.interval.level) / 2)))
        if not error:
            return None
        units = found.n if found.clusters is None else found.clusters
        distance = found.difference - bound
        needed = samples_to_detect(found.n, error, distance, units=units, level=level, power=settings.power)
    return None if isinstance(needed, Undefined) else needed


def is_mcnemar(found: PairedDifference) -> bool:
    """Whether these are single pass/fail outcomes of independent samples."""
    return found.test is not None and "McNemar" in found.test


def _reach(level: float, power: float) -> float:
    return float(scipy_stats.norm.ppf((1 + level) / 2) + scipy_stats.norm.ppf(power))


def sentence(
    metric: str,
    names: tuple[str, str],
    found: AdjustedDifference,
    verdict: Verdict,
    mde: float | None,
    needed: int | None,
    notes: Sequence[str],
    settings: ComparisonSettings,
) -> str:
    """The verdict on one metric in words."""
    candidate, baseline = names
    one, percent = found.difference, is_verdict(metric)
    if one.difference is None or one.interval is None:
        why = " ".join(notes) or "there is no interval."
        return f"{metric}: nothing can be said about {candidate} and {baseline}: {why}"
    among = f", {p_text(found.adjusted)} allowing for {found.tests} tests" if found.tests > 1 else ""
    figures = (
        f"{mean_text(one.mean_a, percent=percent)} against {mean_text(one.mean_b, percent=percent)}, "
        f"{change_text(one.difference, percent=percent)} "
        f"({level(settings.level)} interval {range_text(one.interval.low, one.interval.high, percent=percent)}), "
        f"{p_text(one.p_value)}{among}"
    )
    if verdict in ("better", "worse"):
        return f"{metric}: {candidate} is {verdict} than {baseline}: {figures}."
    parts = [f"{metric}: no detectable difference between {candidate} and {baseline}: {figures}."]
    if not one.interval.contains(0.0) and one.test != E_PROCESS:
        parts.append(f"Alone it would count as a difference; as one of {found.tests} tests it may be chance.")
    if one.test == E_PROCESS:
        parts.append("The run looked at its own results to know when to end, so only strong evidence counts.")
        return " ".join(parts)
    size = count(one.n, "sample")
    if not one.wins + one.losses:
        parts.append("Every pair is equal.")
    if mde is None:
        parts.append(f"With {size}, even the largest possible difference might be missed.")
    else:
        parts.append(f"With {size}, a true difference below {size_text(mde, percent=percent)} may well go unseen.")
    if needed is not None and needed > one.n:
        parts.append(f"About {samples_text(needed)} samples would settle one as small as this.")
    return " ".join(parts)
