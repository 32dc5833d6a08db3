"""Encode records as JSON."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from types import MappingProxyType
from typing import Any
from uuid import UUID

from fairtrial.base.codec.escape import escape_bytes, escape_float, escape_text
from fairtrial.base.codec.scalars import write_duration
from fairtrial.errors import CodecError


def _compact_encoder(*, sort_keys: bool) -> Callable[[Any], str]:
    """`json.dumps` without spaces and without escaping what UTF-8 can carry; NaN is refused."""
    made = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys)
    build = getattr(json.encoder, "c_make_encoder", None)
    if build is None:  # An interpreter without the C encoder.
        return made.encode
    # JSONEncoder creates its C encoder for every call, which takes longer than encoding a small record.
    encode = build(None, made.default, json.encoder.encode_basestring, None, ":", ",", sort_keys, False, False)
    return lambda value: "".join(encode(value, 0))


compact = _compact_encoder(sort_keys=False)
_sorted_text = _compact_encoder(sort_keys=True)
quoted = json.encoder.encode_basestring
"""Write a text as `compact` does, at a fifth of its cost."""


_INT64 = (1 << 63) - 1
_SAFE_BITS = 2_000  # Python prints any integer of this size, whatever its limit on digits is set to.


def to_json(value: Any) -> Any:
    """Convert `value` to new JSON containers and scalars that share nothing mutable with it.

    Raises:
        CodecError: a value in it cannot be encoded as JSON; the error names the place and the reason.
    """
    try:
        return _encode(value)
    except RecursionError:
        raise CodecError("nested too deeply, or it contains itself") from None


def dumps(value: Any) -> str:
    """Convert `value` to compact JSON text; keys keep their order."""
    if type(value) is str:
        return quoted(escape_text(value))
    if type(value) is int and -_INT64 <= value <= _INT64:
        return str(value)
    return compact(to_json(value))


def canonical(value: Any) -> bytes:
    """Convert `value` to its canonical JSON text: sorted keys, no spaces, UTF-8."""
    return _sorted_text(to_json(value)).encode("utf-8")


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical form in hex, which identifies the content."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _encode(value: Any) -> Any:
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        encoder = _ENCODERS[type(value)] = _encoder_for(type(value))
    return encoder(value)


def _float(value: float) -> Any:
    return value if math.isfinite(value) else escape_float(value)


def _int(value: int) -> int:
    if value.bit_length() > _SAFE_BITS:
        try:
            str(value)
        except ValueError:
            limit = sys.get_int_max_str_digits()
            raise CodecError(f"an integer of more than {limit} digits cannot be written as JSON") from None
    return value


def _list(value: Any) -> list[Any]:
    items: list[Any] = []
    for item in value:
        try:
            items.append(_encode(item))
        except CodecError as error:
            raise error.under(len(items)) from None
    return items


def _set(value: Any) -> list[Any]:
    return sorted(_list(value), key=lambda item: _sorted_text(item))


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, item in value.items():
        name = escape_text(key) if type(key) is str else _key(key)
        if name in tree:
            raise CodecError(f"the keys of a mapping must differ as JSON text (got {name!r} twice)")
        try:
            tree[name] = _encode(item)
        except CodecError as error:
            raise error.under(name) from None
    return tree


def _key(key: Any) -> str:
    encoded = _encode(key) if isinstance(key, str | int | enum.Enum | UUID | date) else None
    if isinstance(encoded, str):
        return encoded
    if isinstance(encoded, int) and not isinstance(encoded, bool):
        return str(encoded)
    raise CodecError(f"a {type(key).__name__} cannot be a key in JSON; use text or an int")


PRIVATE: Mapping[str, Any] = MappingProxyType({"codec": "private"})
"""Metadata of a dataclass field that is not written by default: a record that needs it writes it by name."""
SPARSE: Mapping[str, Any] = MappingProxyType({"codec": "sparse"})
"""Metadata of a dataclass field that is written only where it differs from its default."""


def _dataclass_encoder(kind: type) -> Callable[[Any], Any]:
    written = [f for f in dataclasses.fields(kind) if f.init and f.metadata.get("codec") != "private"]
    names = tuple(field.name for field in written)
    sparse = {field.name: field.default for field in written if field.metadata.get("codec") == "sparse"}
    if sparse:
        return lambda value: _sparse_fields(names, sparse, value)
    if len(names) < 2:  # attrgetter gives a tuple only for two names or more.
        return lambda value: _fields(names, [getattr(value, name) for name in names])
    fetch = operator.attrgetter(*names)
    return lambda value: _fields(names, fetch(value))


def _sparse_fields(names: Sequence[str], sparse: Mapping[str, Any], value: Any) -> dict[str, Any]:
    present = [name for name in names if name not in sparse or getattr(value, name) != sparse[name]]
    return _fields(present, [getattr(value, name) for name in present])


def _fields(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    name = ""
    try:
        for name, item in zip(names, values, strict=True):
            kind = type(item)
            # The commonest cases first: records are mostly short text, numbers and nothing.
            if kind is str:
                tree[name] = item if item.isascii() and "\0" not in item else escape_text(item)
            elif item is None or kind is bool or (kind is int and item.bit_length() < _SAFE_BITS):
                tree[name] = item
            else:
                tree[name] = _encode(item)
    except CodecError as error:
        raise error.under(name) from None
    return tree


def _refuse(value: Any) -> Any:
    kind = type(value)
    if inspect.isawaitable(value):
        raise CodecError(
            f"a {kind.__qualname__} cannot be encoded as JSON: it was never awaited; write `await` before the call "
            "that returned it"
        )
    raise CodecError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be encoded as JSON; use plain values, dataclasses or models"
    )


def _encoder_for(kind: type) -> Callable[[Any], Any]:
    """Pick the encoder of a type met for the first time; the order matters: an enum may also be a str."""
    if issubclass(kind, enum.Enum):
        return lambda value: _encode(value.value)
    pydantic = sys.modules.get("pydantic")  # A model cannot exist before pydantic does.
    if pydantic is not None and issubclass(kind, pydantic.BaseModel):
        return lambda value: _encode(value.model_dump(round_trip=True))
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(kind)
    for base, encoder in _BY_BASE:
        if issubclass(kind, base):
            return encoder
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return lambda value: _encode(value.tolist())
    if kind.__module__ in ("ipaddress", "pydantic.networks"):  # What models hold for addresses.
        return lambda value: escape_text(str(value))
    return _refuse


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    str: escape_text,
    int: _int,
    bool: lambda value: value,
    type(None): lambda value: value,
    float: _float,
    list: _list,
    tuple: _list,
    dict: _mapping,
}
_BY_BASE: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, lambda value: escape_text(str.__str__(value))),
    (int, lambda value: _int(int(value))),
    (float, lambda value: _float(float(value))),
    ((bytes, bytearray, memoryview), lambda value: escape_bytes(bytes(value))),
    ((datetime, date, time), lambda value: value.isoformat()),
    ((UUID, Decimal), str),
    (timedelta, write_duration),
    (PurePath, lambda value: escape_text(str(value))),
    ((list, tuple), _list),
    ((set, frozenset), _set),
    (Mapping, _mapping),
)
