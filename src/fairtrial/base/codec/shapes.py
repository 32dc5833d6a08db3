"""Determine from its keys which member of a union a JSON object can be."""

from __future__ import annotations

import dataclasses
import enum
import typing
from dataclasses import dataclass
from typing import Any

from fairtrial.base.codec.escape import restore_text
from fairtrial.base.codec.fields import field_types, required_keys, unqualified


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys a record may and must have, and the values some of them are limited to."""

    fields: frozenset[str]
    required: frozenset[str]
    literals: dict[str, frozenset[tuple[type, Any]]]

    def fits(self, value: dict[str, Any]) -> bool:
        """True unless the keys or the fixed values show that it is another record."""
        return self.required <= value.keys() <= self.fields and all(
            self._allowed(name, value[name]) for name in self.literals if name in value
        )

    def is_complete(self, value: dict[str, Any]) -> bool:
        """True if it has every field."""
        return len(value) == len(self.fields)

    def _allowed(self, name: str, item: Any) -> bool:
        if isinstance(item, list | dict):
            return False
        known = restore_text(item) if isinstance(item, str) else item
        return (type(known), known) in self.literals[name]


def shape_of(kind: Any) -> Shape | None:
    """The shape of a record type; None for what can have any keys."""
    base, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if not isinstance(base, type):
        return None
    if typing.is_typeddict(base):
        types = field_types(base, args)
        return _shape(types, frozenset(types), required_keys(base, types))
    models = getattr(base, "model_fields", None)
    if isinstance(models, dict):
        if getattr(base, "model_config", {}).get("extra") == "allow" or "root" in models:
            return None
        types = {name: field.annotation for name, field in models.items()}
        return _shape(types, frozenset(types), frozenset())
    if dataclasses.is_dataclass(base):
        fields = [field for field in dataclasses.fields(base) if field.init]
        needed = (f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING)
        return _shape(field_types(base, args), frozenset(f.name for f in fields), frozenset(needed))
    return None


def _shape(types: dict[str, Any], fields: frozenset[str], required: frozenset[str]) -> Shape:
    plain_types = {name: unqualified(kind)[0] for name, kind in types.items()}
    literals = {
        name: frozenset((type(value), value) for value in map(plain, typing.get_args(kind)))
        for name, kind in plain_types.items()
        if typing.get_origin(kind) is typing.Literal
    }
    return Shape(fields, required, literals)


def plain(value: Any) -> Any:
    """What a member of a `Literal` looks like in JSON."""
    return value.value if isinstance(value, enum.Enum) else value
