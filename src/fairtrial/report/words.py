"""Differences and verdicts in words."""

from __future__ import annotations

from fairtrial.report.columns import is_verdict


def mean_text(metric: str, value: float | None) -> str:
    """A mean as people read it. Only an exact 0 or 1 reads as one: 9,999 of 10,000 is not "100.0%"."""
    if value is None:
        return "-"
    if not is_verdict(metric):
        return _plain(value, "")
    return "<0.1%" if 0 < value < 0.0005 else ">99.9%" if 0.9995 <= value < 1 else f"{value:.1%}"


def bound_text(metric: str, value: float) -> str:
    """A floor or a ceiling as it was asked for: 81.25% is not rounded."""
    if not is_verdict(metric):
        text = _plain(value, "")
        return text if _reads(text) == value else f"{value:,.10g}"
    text = f"{value:.1%}"
    return text if abs(_reads(text[:-1]) - 100 * value) < 1e-9 else f"{100 * value:.10g}%"


def end_text(metric: str, value: float, bound: float) -> str:
    """The end of an interval that is held against a bound: with as many digits as it takes to tell them apart."""
    text = mean_text(metric, value)
    if value == bound or text != mean_text(metric, bound):
        return text
    for digits in range(2, 12):
        kind = f".{digits}%" if is_verdict(metric) else f".{digits + 2}f"
        if f"{value:{kind}}" != f"{bound:{kind}}":
            return f"{value:{kind}}"
    return text


def margin_text(metric: str, value: float) -> str:
    """A margin as it was asked for."""
    text = size_text(metric, value)
    if not is_verdict(metric):
        return text if _reads(text) == value else f"{value:,.10g}"
    number = text.removesuffix(" points")
    return text if abs(_reads(number) - 100 * value) < 1e-9 else f"{100 * value:.10g} points"


def level_text(level: float) -> str:
    """A confidence level: "95%", "99.5%"."""
    return f"{100 * level:g}%"


def change_text(metric: str, value: float | None) -> str:
    """A difference as people read it: pass rates differ by points of a hundred."""
    if value is None:
        return "-"
    value += 0.0  # -0 is 0.
    if not is_verdict(metric):
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


def number_word(number: int) -> str:
    """Return a small number as a word."""
    return {2: "two", 3: "three", 4: "four"}.get(number, f"{number:,}")


def counted(count: int, noun: str) -> str:
    """ "1 sample", "2 samples"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _reads(text: str) -> float:
    return float(text.replace(",", ""))


def _plain(value: float, sign: str) -> str:
    size = abs(value)
    if size >= 1000:
        return f"{value:{sign},.0f}"
    if size >= 10:
        return f"{value:{sign}.1f}"
    return f"{value:{sign}.3f}" if size >= 0.001 or size == 0 else f"{value:{sign}.2g}"
