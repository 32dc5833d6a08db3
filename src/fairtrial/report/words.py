"""Differences and verdicts in words."""

from __future__ import annotations

from fairtrial.report.columns import PASSED


def mean_text(metric: str, value: float | None) -> str:
    """A mean as people read it."""
    if value is None:
        return "-"
    return f"{value:.1%}" if metric == PASSED else _plain(value, "")


def change_text(metric: str, value: float | None) -> str:
    """A difference as people read it: pass rates differ by points of a hundred."""
    if value is None:
        return "-"
    if metric != PASSED:
        return _plain(value, "+")
    # An end of an interval that is just beyond 0 must not read as 0.
    return f"{100 * value:+.1f} points" if abs(value) >= 0.0005 or not value else f"{100 * value:+.1g} points"


def size_text(metric: str, value: float) -> str:
    """The size of a difference, without a sign."""
    return change_text(metric, abs(value)).lstrip("+")


def range_text(metric: str, low: float | None, high: float | None) -> str:
    """An interval of differences."""
    if low is None or high is None:
        return "-"
    return f"{change_text(metric, low).removesuffix(' points')} to {change_text(metric, high)}"


def p_text(p: float | None) -> str:
    """A p-value."""
    if p is None:
        return "p undefined"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def samples_text(count: int) -> str:
    """A number of samples that nobody should take to the last digit."""
    if count < 100:
        return f"{count}"
    scale = 10 ** (len(str(count)) - 2)
    return f"{-(-count // scale) * scale:,}"


def counted(count: int, noun: str) -> str:
    """ "1 sample", "2 samples"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _plain(value: float, sign: str) -> str:
    size = abs(value)
    if size >= 1000:
        return f"{value:{sign},.0f}"
    if size >= 10:
        return f"{value:{sign}.1f}"
    return f"{value:{sign}.3f}" if size >= 0.001 or size == 0 else f"{value:{sign}.2g}"
