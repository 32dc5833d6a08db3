"""Numbers as people read them, in tables and in sentences. What is undefined is "-", never 0.

A table has room for more digits than a sentence: `number` and `signed` are for tables, what ends in `_text` is for
sentences. `percent` says that a value is a share: a rate in percent, a difference in points of a hundred. Streams that
lack a character print another.
"""

from __future__ import annotations

import codecs
import io
import math
import time
from collections.abc import Iterable
from typing import IO

UNDEFINED = "-"


def rate(value: float | None) -> str:
    """A share in percent. Only an exact 0 or 1 reads as one: 9,999 of 10,000 is not "100.0%"."""
    if value is None:
        return UNDEFINED
    value = round(value, 12)  # 71 of 80 is 88.8%, however it was added up.
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


def coefficient(value: float | None) -> str:
    """A number that means little beyond its third decimal, such as a correlation."""
    return UNDEFINED if value is None else f"{value:.3f}"


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


def open_range(low: str | None, high: str | None) -> str:
    """An interval of which an end may be unknown: "2 to 5", "at least 2", "at most 5"."""
    if low is None or high is None:
        return UNDEFINED if low is high else f"at most {high}" if low is None else f"at least {low}"
    return f"{low} to {high}"


def level(value: float) -> str:
    """A level of confidence or error, with three digits of the error: "95%", "99.5%", "99.167%", "0.833%"."""
    error = float(f"{100 * min(value, 1 - value):.3g}")
    return f"{error if value < 0.5 else 100 - error:g}%"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number of things: "1 sample", "2,000 samples"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listed(names: Iterable[str]) -> str:
    """Return names as a list in words: "a", "a and b", "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def ago(moment: float, now: float | None = None) -> str:
    """A time as an age, such as "5 min ago"; a date if it is 60 days ago or more."""
    seconds = max((time.time() if now is None else now) - moment, 0)
    if seconds >= 60 * 86_400:
        return time.strftime("%Y-%m-%d", time.localtime(moment))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def number_word(number: int) -> str:
    """A small number as a word."""
    return {2: "two", 3: "three", 4: "four"}.get(number, f"{number:,}")


def mean_text(value: float | None, *, percent: bool) -> str:
    """A mean in a sentence."""
    if value is None:
        return UNDEFINED
    return rate(value) if percent else _short(value, "")


def bound_text(value: float, *, percent: bool) -> str:
    """A floor or a ceiling as it was asked for: 81.25% is not rounded."""
    if not percent:
        text = _short(value, "")
        return text if _reads(text) == value else f"{value:,.10g}"
    text = f"{value:.1%}"
    return text if abs(_reads(text[:-1]) - 100 * value) < 1e-9 else f"{100 * value:.10g}%"


def end_text(value: float, bound: float, *, percent: bool) -> str:
    """Format the end of an interval with enough digits to distinguish it from a bound."""
    text = mean_text(value, percent=percent)
    if value == bound or text != mean_text(bound, percent=percent):
        return text
    for digits in range(2, 12):
        form = f".{digits}%" if percent else f".{digits + 2}f"
        if f"{value:{form}}" != f"{bound:{form}}":
            return f"{value:{form}}"
    return text


def margin_text(value: float, *, percent: bool, relative: bool = False) -> str:
    """A margin as it was asked for."""
    if relative:
        return bound_text(value, percent=True)
    text = size_text(value, percent=percent)
    if not percent:
        return text if _reads(text) == value else f"{value:,.10g}"
    points = text.removesuffix(" points")
    return text if abs(_reads(points) - 100 * value) < 1e-9 else f"{100 * value:.10g} points"


def change_text(value: float | None, *, percent: bool, relative: bool = False) -> str:
    """A difference in a sentence: pass rates differ by points of a hundred, and what is `relative` by a share."""
    if value is None:
        return UNDEFINED
    value += 0.0  # -0 is 0.
    if relative:
        return f"{value:+.1%}"
    if not percent:
        return _short(value, "+")
    # An end of an interval that is just beyond 0 must not read as 0.
    return f"{100 * value:+.1f} points" if abs(value) >= 0.0005 or not value else f"{100 * value:+.1g} points"


def size_text(value: float, *, percent: bool, relative: bool = False) -> str:
    """The size of a difference, without a sign."""
    return change_text(abs(value), percent=percent, relative=relative).lstrip("+")


def range_text(low: float | None, high: float | None, *, percent: bool, relative: bool = False) -> str:
    """An interval of differences in a sentence."""
    if low is None or high is None:
        return UNDEFINED
    ends = [change_text(end, percent=percent, relative=relative) for end in (low, high)]
    return f"{ends[0].removesuffix(' points')} to {ends[1]}"


def p_text(p: float | None) -> str:
    """A p-value in a sentence."""
    if p is None:
        return "p undefined"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def round_samples(count: int) -> int:
    """A number of samples, rounded up to two digits: nobody should take it to the last one."""
    scale: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // scale) * scale


def samples_text(count: int) -> str:
    """A number of samples in words, rounded up to two digits."""
    return f"{round_samples(count):,}"


def _reads(text: str) -> float:
    return float(text.replace(",", ""))


def _short(value: float, sign: str) -> str:
    size = abs(value)
    if size >= 1e15:
        return f"{value:{sign}.3g}"
    if size >= 1000:
        return f"{value:{sign},.0f}"
    if size >= 10:
        return f"{value:{sign}.1f}"
    return f"{value:{sign}.3f}" if size >= 0.001 or size == 0 else f"{value:{sign}.2g}"


AS_WIDE = "fairtrial-as-wide"
"""The error handler of encodings that lack a character: question marks as wide as it is, so that no table breaks."""
_STAND_INS = {"…": "~"}  # The end of a cut cell.


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    from rich.cells import cell_len  # Import rich only if a character is missing, which is rare.

    text = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(character) or "?" * cell_len(character) for character in text), error.end


codecs.register_error(AS_WIDE, _replaced)


def make_printable(stream: IO[str]) -> None:
    """Print characters that a stream cannot encode as question marks of the same width, so that tables stay aligned."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=AS_WIDE)
