"""Signatures of types for cache keys: a dataset is read again if its type has changed."""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from typing import Any, TypeAliasType

from fairtrial.base.codec.fields import alias_value, field_types

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # Where a lambda happens to be in memory is no part of a type.


def signature_of(kind: Any) -> Any:
    """Describe a type, and every type in it, as JSON."""
    return _describe(kind, ())


def _describe(kind: Any, outer: tuple[Any, ...]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    base = origin or kind
    if any(kind is known for known in outer):
        return ["again", str(kind)]
    outer = (*outer, kind)
    if isinstance(base, TypeAliasType):
        return _describe(alias_value(base, args), outer)
    parts = [str(kind), *(_describe(arg, outer) for arg in args)]
    if not isinstance(base, type):
        return parts
    if hasattr(base, "model_json_schema"):
        return [*parts, base.model_json_schema()]
    if issubclass(base, enum.Enum):
        return [*parts, *(repr(member) for member in base)]
    if dataclasses.is_dataclass(base) or typing.is_typeddict(base) or hasattr(base, "_fields"):
        types = {name: _describe(field, outer) for name, field in field_types(base, args).items()}
        defaults = getattr(base, "_field_defaults", None) or getattr(base, "__dataclass_fields__", None)
        return [*parts, types, _ADDRESS.sub("", repr(defaults))]
    return parts
