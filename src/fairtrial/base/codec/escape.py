"""Escape values that JSON, UTF-8 or a database would reject or change.

U+FDD0 is a Unicode noncharacter, set aside for a program's internal use. A text that begins with it and a letter
stands for a value JSON lacks; elsewhere it introduces four hex digits naming a code unit that cannot be stored.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Never, cast

from fairtrial.errors import CodecError

MARK = "\ufdd0"
_SPECIAL = re.compile("[\0\ufdd0\ud800-\udfff]")
_ESCAPED = re.compile("\ufdd0([0-9a-f]{4})")
_NAN, _INF, _MINUS_INF, _BYTES = MARK + "nan", MARK + "inf", MARK + "-inf", MARK + "bytes:"


def escape_text(text: str) -> str:
    """Escape the characters of `text` that cannot be stored."""
    if text.isascii() and "\0" not in text:
        return text
    return _SPECIAL.sub(lambda found: f"{MARK}{ord(found[0]):04x}", text)


def escape_float(value: float) -> str:
    """Return the text that represents NaN or an infinity."""
    return _NAN if math.isnan(value) else _INF if value > 0 else _MINUS_INF


def escape_bytes(value: bytes) -> str:
    """Return the text that represents bytes."""
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
    """Return a JSON value with all escaped texts restored."""
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise CodecError(f"{repeated!r} occurs twice in one object")
    return fields


class _LongNumberError(ValueError):
    """A number is too long to be one of a measurement."""


def _short_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise _LongNumberError(digits)
    return int(digits)


_MAX_DIGITS = 308  # Longer ones are no floats.
_MAX_DEPTH = 200  # Of foreign JSON, well below what recursive functions can take.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# For rows of datasets: of two values of one field, one would be ignored without a word.
_ROW_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
_FOREIGN_DECODER = json.JSONDecoder()
_DIGITS_DECODER = json.JSONDecoder(parse_int=_short_integer)  # Three times as slow.
_ZEROS, _LONG_NUMBER = bytes.maketrans(b"123456789", b"0" * 9), b"0" * (_MAX_DIGITS + 1)
_LONG = 1 << 18  # Characters of JSON from which on a parser is worth loading.
_SPACES = " \t\n\r"
_SPACE = re.compile(f"[{_SPACES}]*")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?+|([\[{])|([\]}])', re.DOTALL)


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse JSON text strictly: NaN and infinities are refused, and every problem is a `CodecError`."""
    decoder = _ROW_DECODER if unique_keys else _DECODER
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        try:  # What programs write begins with the value; looking for space takes longer than a small record.
            value, end = cast(Any, decoder).scan_once(text, 0)
            if end == len(text) or not text[end:].strip(_SPACES):
                return value
        except StopIteration:
            pass
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def parse_long_json(text: str) -> Any:
    """Return what `json.loads` returns: of a long text in a third of the time, by the parser of pydantic.

    What that parser refuses, such as half of a surrogate pair, is left to `json`.
    """
    if len(text) >= _LONG:
        from pydantic_core import from_json  # Takes as long to load as it saves on a megabyte.

        with suppress(TypeError, ValueError):
            return from_json(text, cache_strings="keys")
    return json.loads(text)


def parse_foreign_json(content: bytes) -> Any:
    """Parse JSON of another tool: NaN is allowed, numbers of more than 308 digits and 200 levels are not.

    Raises:
        CodecError: it is no such JSON; the message has the line, if there are several.
    """
    text, problem = "", None
    try:
        text = content.decode("utf-8-sig")
        has_long = _LONG_NUMBER in content.translate(_ZEROS)
        value = (_DIGITS_DECODER if has_long else _FOREIGN_DECODER).decode(text)
    except _LongNumberError as error:
        digits = str(error)
        place = _line(text, text.index(digits))
        raise CodecError(f"a number must have at most {_MAX_DIGITS} digits (got {len(digits)}{place})") from None
    except RecursionError as error:
        value, problem = None, _not_json(error)
    except ValueError as error:
        raise _not_json(error) from None
    if problem or _is_deep(value):
        depth = 0
        for bracket in _BRACKET.finditer(text):
            depth += (bracket[1] is not None) - (bracket[2] is not None)
            if depth > _MAX_DEPTH:
                raise CodecError(f"nested more than {_MAX_DEPTH} levels deep{_line(text, bracket.start())}")
    if problem:
        raise problem
    return value


def _line(text: str, position: int) -> str:
    return f" at line {text.count('\n', 0, position) + 1}" if "\n" in text.rstrip() else ""


def _is_deep(value: Any) -> bool:
    """Return whether a JSON value has too many levels; level by level, as recursion could not tell."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
    return bool(level)


def _not_json(error: ValueError | RecursionError) -> CodecError:
    match error:
        case CodecError():
            return error
        case json.JSONDecodeError():
            line = f"line {error.lineno} " if error.lineno > 1 else ""
            return CodecError(f"not JSON: {error.msg} at {line}column {error.colno}")
        case UnicodeDecodeError():
            return CodecError(f"not UTF-8: {error.reason} at byte {error.start}")
        case RecursionError():
            return CodecError("nested too deeply")
        case _:
            return CodecError(f"not supported as JSON: {error}")  # Integers of more than 4,300 digits.


def parse_json_array(text: bytes) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array one by one, each with the number of the line it begins on."""
    try:
        yield from _array_items(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _array_items(text: str) -> Iterator[tuple[int, Any]]:
    def after_space(position: int) -> int:
        return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing at all, too

    position = after_space(0)
    if not text.startswith("[", position):
        key = re.match(r'\{\s*"([^"]{1,40})"\s*:\s*\[', text[position:])
        found = f"; the file has an object: keep only the array under {key[1]!r}" if key else ""
        raise CodecError(f"an array of rows was expected{found}")
    position = after_space(position + 1)
    line, counted = 1, 0
    closed = text.startswith("]", position)
    while not closed:
        line, counted = line + text.count("\n", counted, position), position
        item, position = _ROW_DECODER.raw_decode(text, position)
        yield line, item
        position = after_space(position)
        closed = text.startswith("]", position)
        if not closed:
            if not text.startswith(",", position):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
            position = after_space(position + 1)
    if after_space(position + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, after_space(position + 1))
