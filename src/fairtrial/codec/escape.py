"""Text that JSON, UTF-8 or a database would refuse or change, carried inside ordinary text.

U+FDD0 is a Unicode noncharacter, set aside for a program's internal use. A text that begins with it and a letter
stands for a value JSON lacks; elsewhere it introduces four hex digits naming a code unit that cannot be stored.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from typing import Any, Never

from fairtrial.errors import CodecError

MARK = "\ufdd0"
_SPECIAL = re.compile("[\0\ufdd0\ud800-\udfff]")
_ESCAPED = re.compile("\ufdd0([0-9a-f]{4})")
_NAN, _INF, _MINUS_INF, _BYTES = MARK + "nan", MARK + "inf", MARK + "-inf", MARK + "bytes:"


def escape_text(text: str) -> str:
    """`text` with everything that cannot be stored replaced reversibly."""
    if text.isascii() and "\0" not in text:
        return text
    return _SPECIAL.sub(lambda found: f"{MARK}{ord(found[0]):04x}", text)


def escape_float(value: float) -> str:
    """The text that stands for a NaN or an infinity."""
    return _NAN if math.isnan(value) else _INF if value > 0 else _MINUS_INF


def escape_bytes(value: bytes) -> str:
    """The text that stands for bytes."""
    return _BYTES + base64.b64encode(value).decode("ascii")


def restore_text(text: str) -> str | float | bytes:
    """Undo the three functions above."""
    if MARK not in text:
        return text
    if text == _NAN:
        return math.nan
    if text == _INF:
        return math.inf
    if text == _MINUS_INF:
        return -math.inf
    if text.startswith(_BYTES):
        try:
            return base64.b64decode(text[len(_BYTES) :], validate=True)
        except binascii.Error as error:
            raise CodecError(f"damaged bytes: {error}") from None
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def restore(tree: Any) -> Any:
    """A JSON value with every escaped text in it restored."""
    if isinstance(tree, str):
        return restore_text(tree)
    if isinstance(tree, list):
        return [restore(item) for item in tree]
    if isinstance(tree, dict):
        return {_restore_key(key): restore(item) for key, item in tree.items()}
    return tree


def _restore_key(key: str) -> str:
    restored = restore_text(key)
    if not isinstance(restored, str):
        raise CodecError(f"{key!r} is not a key")
    return restored


def _refuse_constant(name: str) -> Never:
    raise CodecError(f"{name} is not JSON; write null, or leave the field out")


_parse = json.JSONDecoder(parse_constant=_refuse_constant).decode


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text strictly: NaN and infinities are refused, and every problem is a `CodecError`."""
    try:
        return _parse(text.decode("utf-8") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise CodecError(f"not JSON: {error.msg} at {line}column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise CodecError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise CodecError("nested too deeply") from None
    except ValueError as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not JSON we can hold: {error}") from None  # Integers of more than 4,300 digits.
