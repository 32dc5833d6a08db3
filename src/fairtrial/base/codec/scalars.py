"""Decode single values, strictly: a value must have the JSON form in which its type is written."""

from __future__ import annotations

import base64
import binascii
import json
import re
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from fairtrial.base.codec.escape import restore_text
from fairtrial.errors import CodecError

type Decoder = Callable[[Any], Any]


def name_of(kind: Any) -> str:
    """Return the name of a type in messages."""
    if kind is type(None):
        return "null"
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def got(value: Any) -> str:
    """Return the text of a wrong value in messages."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, dict):
        return "an object"
    shown = json.dumps(value) if isinstance(value, str | bool) else repr(value)
    return f"{type(value).__name__} ({shown if len(shown) <= 40 else shown[:37] + '...'})"


def mismatch(wanted: str, value: Any) -> CodecError:
    """Return the error for a value of the wrong type."""
    return CodecError(f"expected {wanted}, got {got(value)}")


def _str(value: Any) -> str:
    if type(value) is str:
        restored = restore_text(value)
        if type(restored) is str:
            return restored
    raise mismatch("str", value)


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    raise mismatch("int", value)


def _float(value: Any) -> float:
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise CodecError("the integer is too large for a float") from None
    restored = restore_text(value) if type(value) is str else value
    if type(restored) is float:
        return restored
    raise mismatch("float", value)


def _bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise mismatch("bool", value)


def _none(value: Any) -> None:
    if value is not None:
        raise mismatch("null", value)


def _bytes(value: Any) -> bytes:
    restored = restore_text(value) if type(value) is str else value
    if isinstance(restored, bytes):
        return restored
    if isinstance(restored, str):  # Files written by people carry plain base64.
        try:
            return base64.b64decode(restored, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise mismatch("bytes as base64", value)


def _decimal(value: Any) -> Decimal:
    # A number in a file means the digits that are written there; repr gives them back.
    if type(value) is str or type(value) is int or type(value) is float:
        try:
            return Decimal(value if type(value) is not float else repr(value))
        except InvalidOperation:
            pass
    raise mismatch("Decimal as text", value)


_DURATION = re.compile(r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,6}))?S)?)?", re.ASCII)


def write_duration(value: timedelta) -> str:
    """A duration in the ISO 8601 form `P1DT2.5S`, exact to the microsecond."""
    sign, value = ("-", -value) if value < timedelta() and value != timedelta.min else ("", value)
    if value == timedelta.min:  # It alone has no positive twin.
        return f"-P{-value.days}D"
    fraction = f".{value.microseconds:06d}" if value.microseconds else ""
    return f"{sign}P{value.days}DT{value.seconds}{fraction}S"


def _duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if found is None or text.endswith(("P", "T")):
        raise ValueError(text)
    sign, days, hours, minutes, seconds, fraction = found.groups(default="0")
    parts = [int(part) for part in (days, hours, minutes, seconds, fraction.ljust(6, "0"))]
    factor = -1 if sign == "-" else 1
    day, hour, minute, second, microsecond = (factor * part for part in parts)
    return timedelta(days=day, hours=hour, minutes=minute, seconds=second, microseconds=microsecond)


def parsed(kind: type, parse: Callable[[str], Any]) -> Decoder:
    """The decoder of a type that is written as text."""

    def decode_text(value: Any) -> Any:
        if type(value) is str:
            try:
                return parse(value)
            except (ValueError, OverflowError):
                pass
        raise mismatch(f"{kind.__name__} as text", value)

    return decode_text


SCALARS: dict[Any, Decoder] = {
    str: _str,
    int: _int,
    float: _float,
    bool: _bool,
    type(None): _none,
    None: _none,
    bytes: _bytes,
    Decimal: _decimal,
    datetime: parsed(datetime, datetime.fromisoformat),
    date: parsed(date, date.fromisoformat),
    time: parsed(time, time.fromisoformat),
    timedelta: parsed(timedelta, _duration),
    UUID: parsed(UUID, UUID),
}
