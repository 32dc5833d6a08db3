"""Make text from models, datasets and users safe to display."""

from __future__ import annotations

import codecs
import re
from typing import Any

from fairtrial.base.codec import dumps

# Control characters (escape sequences among them), the separators that break lines, marks that reorder text, and tags,
# which are invisible.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
_ESCAPES = re.compile(r"(?:\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)?|[@-Z\\-_]))++")
# Lone surrogates cannot be encoded; the others are non-characters, which XML rejects.
_NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def replace_each(pattern: re.Pattern[str], replacement: str, text: str) -> str:
    """Replace every character that a one-character pattern matches.

    `re.sub` takes a microsecond per match, and foreign text can be all matches; `str.replace` takes nanoseconds.
    """
    if pattern.search(text) is None:
        return text
    for character in pattern.findall("".join(set(text))):
        text = text.replace(character, replacement)
    return text


def whole(text: str) -> str:
    """Replace lone surrogates and non-characters."""
    return text if text.isascii() else replace_each(_NO_TEXT, "\ufffd", text)


def lines(text: str, *, limit: int | None = None) -> str:
    """Remove terminal escapes and control characters, keep lines, and cut to `limit` characters."""
    if limit is not None:
        text = text[: 4 * limit + 100]  # Do not search the part of a large output that is cut off anyway.
    clean = _ESCAPES.sub("", text) if "\x1b" in text else text
    clean = clean.replace("\r\n", "\n").replace("\r", "\n")
    clean = whole(replace_each(_UNSAFE, "", clean))
    return clean if limit is None or len(clean) <= limit else clean[: max(limit - 1, 0)] + "…"


def plain(text: str, *, limit: int | None = None) -> str:
    """Remove terminal escapes and control characters, join lines, and cut to `limit` characters."""
    return lines(text, limit=limit).replace("\n", " ").replace("\t", " ")


def shown(value: Any) -> str:
    """Format a value: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else dumps(value)


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
