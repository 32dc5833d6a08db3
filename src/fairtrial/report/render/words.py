"""Numbers as people read them. What is undefined is "-", never 0."""

from __future__ import annotations

import math

UNDEFINED = "-"


def rate(value: float | None) -> str:
    """A share in percent. Only an exact 0 or 1 reads as one: 9,999 of 10,000 is not "100.0%"."""
    if value is None:
        return UNDEFINED
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < 1:
        return ">99.9%"
    return f"{value:.1%}"


def number(value: float | None) -> str:
    """A mean or a measured quantity, to about three digits after the point or four in all."""
    if value is None:
        return UNDEFINED
    size = abs(value)
    if size >= 1e7 or 0 < size < 0.0005:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 10_000 else f"{value:,.1f}" if size >= 100 else f"{value:.3f}"


def signed(value: float | None, *, percent: bool) -> str:
    """A difference, with its sign; shares in percentage points."""
    if value is None:
        return UNDEFINED
    size = abs(value)
    if percent:
        # An end of an interval that is just beyond 0 must not read as 0, unless it is so by rounding alone.
        text = f"{100 * value:+.1g}" if 1e-8 < size < 0.0005 else f"{100 * value:+.1f}"
    elif size >= 1e7 or 0 < size < 0.0005:
        text = f"{value:+.2e}"
    else:
        text = f"{value:+,.0f}" if size >= 1000 else f"{value:+.1f}" if size >= 10 else f"{value:+.3f}"
    return text[1:] if not text.strip("+-0.") else text


def p_value(value: float | None) -> str:
    """A p-value, never rounded to 0."""
    if value is None:
        return UNDEFINED
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def duration(milliseconds: float | None) -> str:
    """A time in the unit that suits it."""
    if milliseconds is None:
        return UNDEFINED
    if milliseconds < 0.5:
        return "<1 ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.1f} s" if milliseconds < 120_000 else f"{milliseconds / 60_000:.1f} min"


def money(value: float | None) -> str:
    """An amount in US dollars, with two digits that are not 0 however small it is; "-" where there is none."""
    if value is None:
        return UNDEFINED
    if not value:
        return "$0"
    # Rounded up to four digits: a small cost must not read as none.
    digits = 2 if value >= 1 else max(4, 1 - math.floor(math.log10(value)))
    return f"${value:,.{digits}f}"


def cost(value: float | None, unpriced: int) -> str:
    """The cost of model calls, `unpriced` of which have no known price; "-" where there were no calls."""
    if not unpriced:
        return money(value)
    return f"at least {money(value)}" if value else "unknown"


def level(value: float) -> str:
    """A confidence level: "95%"."""
    return f"{100 * value:g}%"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number of things: "1 sample", "2,000 samples"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
