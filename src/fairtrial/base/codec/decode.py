"""Decode JSON to typed values. A decoder is compiled once per type and reused."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable
from datetime import datetime
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, TypeAliasType, TypeVar, cast

from fairtrial.base.codec.encode import canonical
from fairtrial.base.codec.escape import parse_json, restore, restore_text
from fairtrial.base.codec.fields import QUALIFIERS, alias_value, field_types, required_keys
from fairtrial.base.codec.models import constrained, is_pydantic, model
from fairtrial.base.codec.scalars import SCALARS, Decoder, got, mismatch, name_of
from fairtrial.base.codec.shapes import Shape, plain, shape_of
from fairtrial.base.frozen import FrozenDict, FrozenList, freeze
from fairtrial.errors import CodecError


def decode[T](kind: type[T], text: str | bytes, *, frozen: bool = False) -> T:
    """Read JSON text as a `kind`. `frozen` gives every list and dict in it as one that refuses to change."""
    return from_json(kind, parse_json(text), frozen=frozen)


def from_json[T](kind: type[T], tree: Any, *, frozen: bool = False) -> T:
    """Read parsed JSON as a `kind`.

    Raises:
        CodecError: it is not one; the error leads to the place.
    """
    try:
        return cast(T, _decoder(kind, frozen)(tree))
    except RecursionError:
        raise CodecError("nested too deeply") from None


@functools.lru_cache(maxsize=4096)
def _cached_decoder(kind: Any, frozen: bool, _spelling: str = "") -> Decoder:
    return _Compiler(frozen).compile(kind)


def _decoder(kind: Any, frozen: bool) -> Decoder:
    if isinstance(kind, type):
        return _cached_decoder(kind, frozen)
    # `int | str` equals `str | int`, and the order of a union may decide: the spelling tells them apart.
    return _cached_decoder(kind, frozen, repr(kind)) if _hashable(kind) else _Compiler(frozen).compile(kind)


def _hashable(kind: Any) -> bool:
    try:
        hash(kind)
    except TypeError:  # Such as Annotated with a list in it.
        return False
    return True


_ABSTRACT: dict[Any, type] = {
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Set: frozenset,
    collections.abc.MutableSet: set,
    collections.abc.Mapping: dict,
    collections.abc.MutableMapping: dict,
}


class _Compiler:
    """Compiles a type, and the types inside it, to a decoder."""

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen
        self.under_way: dict[Any, list[Decoder]] = {}

    def compile(self, kind: Any) -> Decoder:
        if kind is Any or kind is object or isinstance(kind, TypeVar):
            return self.anything
        if not _hashable(kind):
            return self._structure(kind)
        if kind in SCALARS:
            return SCALARS[kind]
        if kind in self.under_way:  # A type that contains itself: refer to the decoder that is still being made.
            late = self.under_way[kind]
            return lambda value: late[0](value)
        self.under_way[kind] = late = []
        try:
            late.append(self._structure(kind))
        finally:
            del self.under_way[kind]
        return late[0]

    def anything(self, value: Any) -> Any:
        restored = restore(value)
        return freeze(restored) if self.frozen else restored

    def _structure(self, kind: Any) -> Decoder:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        alias = origin or kind
        if isinstance(alias, TypeAliasType):
            return self.compile(alias_value(alias, args))
        if origin is typing.Annotated:
            return self._annotated(kind, args)
        if origin in QUALIFIERS:
            return self.compile(args[0])
        if origin in (typing.Union, types.UnionType):
            return self._union(args)
        if origin is typing.Literal:
            return self._literal(args)
        if isinstance(kind, typing.NewType):
            return self.compile(kind.__supertype__)
        base = origin or kind
        if isinstance(base, type):
            return self._class(base, kind, args)
        raise CodecError(f"{name_of(kind)} is not a type that can be read from JSON")

    def _class(self, base: type, kind: Any, args: tuple[Any, ...]) -> Decoder:
        if issubclass(base, enum.Enum):
            return self._enum(base)
        if is_pydantic(base):
            return model(kind)
        if dataclasses.is_dataclass(base):
            return self._dataclass(base, args)
        if typing.is_typeddict(base):
            return self._typed_dict(base, args)
        if issubclass(base, tuple):
            return self._tuple(base, kind, args)
        concrete = _ABSTRACT.get(base, base)
        if issubclass(concrete, list):
            return self._array(FrozenList if self.frozen else concrete, args)
        if issubclass(concrete, set | frozenset):
            return self._array(frozenset if self.frozen else concrete, args)
        if issubclass(concrete, dict):
            return self._mapping(FrozenDict if self.frozen else concrete, args)
        if issubclass(base, PurePath):
            return lambda value: base(SCALARS[str](value))
        raise CodecError(f"{name_of(kind)} is not a type that can be read from JSON")

    def _annotated(self, kind: Any, args: tuple[Any, ...]) -> Decoder:
        inner = self.compile(args[0])
        if all(isinstance(note, str) for note in args[1:]):  # Text annotations are no constraints.
            return inner
        checked = constrained(kind, inner)
        return (lambda value: freeze(checked(value))) if self.frozen else checked

    def _union(self, args: tuple[Any, ...]) -> Decoder:
        exact = {arg: SCALARS[arg] for arg in args if arg in (str, int, float, bool, type(None))}
        members: list[tuple[Any, Decoder, Shape | None]] = [(arg, self.compile(arg), shape_of(arg)) for arg in args]
        # A date is read as the datetime of its midnight too, so the narrower one goes first.
        members.sort(key=lambda member: member[0] is datetime)

        def candidates(value: Any) -> list[tuple[Any, Decoder, Shape | None]]:
            if not isinstance(value, dict):
                return members
            fitting = [member for member in members if member[2] is None or member[2].fits(value)]
            if all(shape is None for _, _, shape in fitting):
                return members  # Perhaps misspelt: let each say what is wrong.
            # Records are written with all their fields, so the one with exactly these fields was written.
            return sorted(fitting, key=lambda member: member[2] is None or not member[2].is_complete(value))

        def decode_union(value: Any) -> Any:
            if type(value) in exact:
                try:
                    return exact[type(value)](value)
                except CodecError:
                    pass
            problems: list[tuple[Any, CodecError]] = []
            for arg, decoder, shape in candidates(value):
                try:
                    return decoder(value)
                except CodecError as error:
                    if error.path or (shape is not None and isinstance(value, dict)):
                        problems.append((arg, error))
            if problems:  # The member that got furthest is the one that was meant.
                meant, deepest = max(problems, key=lambda problem: len(problem[1].path))
                raise CodecError(f"as {name_of(meant)}: {deepest.problem}", deepest.path)
            raise mismatch(" or ".join(name_of(arg) for arg in args), value)

        return decode_union

    def _literal(self, args: tuple[Any, ...]) -> Decoder:
        allowed = {(type(plain(arg)), plain(arg)): arg for arg in args}

        def decode_literal(value: Any) -> Any:
            restored = restore_text(value) if type(value) is str else value
            try:
                return allowed[type(restored), restored]
            except (KeyError, TypeError):
                choices = ", ".join(json.dumps(plain(arg), default=str) for arg in args)
                raise CodecError(f"expected one of {choices}, got {got(value)}") from None

        return decode_literal

    def _enum(self, base: type[enum.Enum]) -> Decoder:
        members = {canonical(member.value): member for member in base}

        def decode_enum(value: Any) -> Any:
            member = members.get(canonical(restore(value)))
            if member is not None:
                return member
            if issubclass(base, enum.Flag) and type(value) is int:
                try:
                    return base(value)  # Several flags at once are no member of their own.
                except ValueError:
                    pass
            choices = ", ".join(key.decode() for key in members)
            raise CodecError(f"expected one of {choices} ({base.__name__}), got {got(value)}")

        return decode_enum

    def _dataclass(self, base: type, args: tuple[Any, ...]) -> Decoder:
        hints = field_types(base, args)
        names = [field.name for field in dataclasses.fields(base) if field.init]
        # The signature, not the fields: a record with an __init__ of its own has its own defaults.
        parameters = inspect.signature(base).parameters
        for name in names:
            if name not in parameters:
                raise CodecError(f"{base.__name__} cannot be made from its fields: its __init__ takes no {name!r}")
        required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
        build = self._object(base.__name__, {name: self.compile(hints[name]) for name in names}, required)

        def decode_dataclass(value: Any) -> Any:
            values = build(value)
            try:
                return base(**values)
            except (TypeError, ValueError) as error:
                raise CodecError(f"not a {base.__name__}: {error}") from None

        return decode_dataclass

    def _typed_dict(self, base: Any, args: tuple[Any, ...]) -> Decoder:
        hints = field_types(base, args)
        decoders = {name: self.compile(hint) for name, hint in hints.items()}
        build = self._object(base.__name__, decoders, sorted(required_keys(base, hints)))
        return (lambda value: FrozenDict(build(value))) if self.frozen else build

    def _object(self, name: str, decoders: dict[str, Decoder], required: list[str]) -> Callable[[Any], dict[str, Any]]:
        def decode_object(value: Any) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise mismatch(f"an object ({name})", value)
            values: dict[str, Any] = {}
            for key, item in value.items():
                decoder = decoders.get(key)
                if decoder is None:
                    near = get_close_matches(key, decoders)
                    known = ", ".join(decoders) or "no fields"
                    hint = f"did you mean {near[0]!r}?" if near else f"{name} has {known}"
                    raise CodecError(f"{name} has no field {key!r}; {hint}")
                try:
                    values[key] = decoder(item)
                except CodecError as error:
                    raise error.under(key) from None
            for key in required:
                if key not in values:
                    raise CodecError(f"{name} needs the field {key!r}")
            return values

        return decode_object

    def _array(self, container: type, args: tuple[Any, ...]) -> Decoder:
        item = self.compile(args[0]) if args else self.anything

        def decode_array(value: Any) -> Any:
            if not isinstance(value, list):
                raise mismatch("an array", value)
            return _made(container, _items(value, item))

        return decode_array

    def _tuple(self, base: type, kind: Any, args: tuple[Any, ...]) -> Decoder:
        names: tuple[str, ...] | None = getattr(base, "_fields", None)
        if names is not None:
            hints = field_types(base, args)
            args = tuple(hints.get(name, Any) for name in names)
        elif kind is tuple or (len(args) == 2 and args[1] is Ellipsis):
            return self._array(tuple, args)
        decoders = [self.compile(arg) for arg in args]

        def decode_tuple(value: Any) -> Any:
            if not isinstance(value, list) or len(value) != len(decoders):
                raise mismatch(f"an array of {len(decoders)}", value)
            items: list[Any] = []
            for decoder, item in zip(decoders, value, strict=True):
                try:
                    items.append(decoder(item))
                except CodecError as error:
                    raise error.under(len(items)) from None
            return base(*items) if names is not None else tuple(items)

        return decode_tuple

    def _mapping(self, container: type, args: tuple[Any, ...]) -> Decoder:
        key_type, value_type = args if len(args) == 2 else (str, Any)
        from_text = self._key(key_type)
        decoder = self.compile(value_type)

        def decode_mapping(value: Any) -> Any:
            if not isinstance(value, dict):
                raise mismatch("an object", value)
            decoded: dict[Any, Any] = {}
            for key, item in value.items():
                try:
                    decoded[from_text(key)] = decoder(item)
                except CodecError as error:
                    raise error.under(key) from None
            return _made(container, decoded)

        return decode_mapping

    def _key(self, kind: Any) -> Decoder:
        decoder = self.compile(kind)

        def decode_key(key: str) -> Any:
            try:
                return decoder(key)
            except CodecError:
                try:
                    number = int(key)  # JSON writes the key 1 as "1".
                    if str(number) == key:
                        return decoder(number)
                except ValueError:
                    pass
                raise mismatch(f"{name_of(kind)} as a key", key) from None

        return decode_key


def _made(container: Any, content: Any) -> Any:
    try:
        return container(content)
    except TypeError as error:  # Such as a list in a set, or a subclass with a constructor of its own.
        raise CodecError(f"not a {container.__name__}: {error}") from None


def _items(value: list[Any], decoder: Decoder) -> list[Any]:
    items: list[Any] = []
    for item in value:
        try:
            items.append(decoder(item))
        except CodecError as error:
            raise error.under(len(items)) from None
    return items
