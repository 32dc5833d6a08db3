"""Text that came from a model, a dataset or a user, made safe to show."""

from __future__ import annotations

import codecs
import re
from typing import Any

from fairtrial.codec import dumps

# Control characters (escape sequences among them), the separators that break lines, marks that reorder text, and tags,
# which are invisible.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
_ESCAPES = re.compile(r"(?:\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)?|[@-Z\\-_]))++")
# Half a character: no encoding of files or terminals takes it. The others mean nothing and XML refuses them.
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
    """`text` in which every character is one: halves and non-characters are replaced."""
    return text if text.isascii() else replace_each(_NO_TEXT, "\ufffd", text)


def lines(text: str, *, limit: int | None = None) -> str:
    """`text` without terminal escapes and control characters, its lines kept, cut to `limit` characters."""
    if limit is not None:
        text = text[: 4 * limit + 100]  # A giant output is not searched to its end for what is cut off anyway.
    clean = _ESCAPES.sub("", text) if "\x1b" in text else text
    clean = clean.replace("\r\n", "\n").replace("\r", "\n")
    clean = whole(replace_each(_UNSAFE, "", clean))
    return clean if limit is None or len(clean) <= limit else clean[: max(limit - 1, 0)] + "…"


def plain(text: str, *, limit: int | None = None) -> str:
    """`text` without terminal escapes and control characters, on one line, cut to `limit` characters."""
    return lines(text, limit=limit).replace("\n", " ").replace("\t", " ")


def shown(value: Any) -> str:
    """A value as text: itself, or its JSON."""
    return value if isinstance(value, str) else dumps(value)


AS_WIDE = "fairtrial-as-wide"
"""The error handler of encodings that lack a character: question marks as wide as it is, so that no table breaks."""
_STAND_INS = {"…": "~"}  # What a cut cell ends in.


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    from rich.cells import cell_len  # Few screens lack a character: the others do not wait for rich.

    text = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(one) or "?" * cell_len(one) for one in text), error.end


codecs.register_error(AS_WIDE, _replaced)
