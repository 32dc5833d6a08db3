"""Field types of classes, with type parameters substituted."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any, TypeAliasType, TypeVar

from fairtrial.base.codec.scalars import name_of
from fairtrial.errors import CodecError


def bound(kind: Any, variables: dict[Any, Any]) -> Any:
    """Return a type with its type variables substituted; unbound variables become Any."""
    if isinstance(kind, TypeVar):
        return variables.get(kind, Any)
    parameters = getattr(kind, "__parameters__", ())
    if not parameters or isinstance(kind, type | TypeAliasType):
        return kind
    return kind[tuple(variables.get(parameter, Any) for parameter in parameters)]


def alias_value(alias: Any, args: tuple[Any, ...]) -> Any:
    """Return the value of a type alias."""
    return bound(alias.__value__, dict(zip(alias.__type_params__, args, strict=False)))


def field_types(base: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the type of every field of a dataclass, TypedDict or NamedTuple, including its bases."""
    variables = _variables(base, args)
    if typing.is_typeddict(base):  # Its bases are gone; their annotations were copied into it.
        merged = {name: kind for known in reversed(variables.values()) for name, kind in known.items()}
        return {name: bound(kind, merged) for name, kind in _own_types(base, *variables).items()}
    found: dict[str, Any] = {}
    for owner in reversed(base.__mro__):
        if "__annotations__" in owner.__dict__:
            own = variables.get(owner, {})
            found.update((name, bound(kind, own)) for name, kind in _own_types(owner).items())
    return found


QUALIFIERS = tuple(
    getattr(typing, name) for name in ("Required", "NotRequired", "ReadOnly", "Final") if hasattr(typing, name)
)


def unqualified(kind: Any) -> tuple[Any, set[Any]]:
    """Return a type without its qualifiers, and the qualifiers."""
    said: set[Any] = set()
    while (origin := typing.get_origin(kind)) in QUALIFIERS:
        said.add(origin)
        kind = typing.get_args(kind)[0]
    return kind, said


def required_keys(base: Any, fields: dict[str, Any]) -> frozenset[str]:
    """Return the required keys of a TypedDict. The class itself does not know them if annotations are text."""

    def is_required(name: str) -> bool:
        _, said = unqualified(fields[name])
        return typing.NotRequired not in said and (typing.Required in said or name in base.__required_keys__)

    return frozenset(filter(is_required, fields))


def _variables(base: Any, args: tuple[Any, ...]) -> dict[Any, dict[Any, Any]]:
    """For each class in the family, what its own type parameters stand for."""
    own = dict(zip(getattr(base, "__parameters__", ()), args, strict=False))
    found = {base: own}
    for parent in types.get_original_bases(base) if isinstance(base, type) else ():
        origin = typing.get_origin(parent)
        given = tuple(bound(arg, own) for arg in typing.get_args(parent))
        found.update((owner, known) for owner, known in _variables(origin or parent, given).items())
    return found


def _own_types(owner: Any, *family: Any) -> dict[str, Any]:
    annotations = inspect.get_annotations(owner)
    # Python 3.12 does not find type parameters in annotations kept as text.
    members = (*reversed(family), owner)
    parameters = {p.__name__: p for member in members for p in getattr(member, "__type_params__", ())}
    stand_in = type(owner.__name__, (), {"__annotations__": annotations, "__module__": owner.__module__})
    try:
        try:
            return typing.get_type_hints(stand_in, localns=parameters, include_extras=True)
        except NameError:  # Perhaps a class inside the class.
            return typing.get_type_hints(stand_in, localns={**vars(owner), **parameters}, include_extras=True)
    except NameError as error:
        raise CodecError(
            f"the annotations of {name_of(owner)} cannot be resolved ({error}); define what it names at module level"
        ) from None
