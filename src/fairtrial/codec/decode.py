"""From JSON to the type that is asked for: a decoder is compiled once per type, then reused."""

from __future__ import annotations

import base64
import binascii
import collections.abc
import dataclasses
import enum
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable
from datetime import date, datetime, time
from difflib import get_close_matches
from typing import Any, TypeAliasType, TypeVar, cast
from uuid import UUID

from fairtrial.codec.escape import parse_json, restore, restore_text
from fairtrial.errors import CodecError
from fairtrial.frozen import FrozenDict, FrozenList, freeze

type Decoder = Callable[[Any], Any]


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
def _cached_decoder(kind: Any, frozen: bool) -> Decoder:
    return _Compiler(frozen).compile(kind)


def _decoder(kind: Any, frozen: bool) -> Decoder:
    try:
        return _cached_decoder(kind, frozen)
    except TypeError:  # An unhashable annotation, such as Annotated with a list in it.
        return _Compiler(frozen).compile(kind)


def name_of(kind: Any) -> str:
    """How a type is called in a message to a person."""
    if kind is type(None):
        return "null"
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _got(value: Any) -> str:
    kind = "null" if value is None else type(value).__name__
    shown = json.dumps(value, default=str)
    if isinstance(value, list | dict) or value is None:
        return {"list": "an array", "dict": "an object"}.get(kind, kind)
    return f"{kind} ({shown if len(shown) <= 40 else shown[:37] + '...'})"


def _mismatch(wanted: str, value: Any) -> CodecError:
    return CodecError(f"expected {wanted}, got {_got(value)}")


def _str(value: Any) -> str:
    if type(value) is str:
        restored = restore_text(value)
        if type(restored) is str:
            return restored
    raise _mismatch("str", value)


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    raise _mismatch("int", value)


def _float(value: Any) -> float:
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise CodecError("the integer is too large for a float") from None
    restored = restore_text(value) if type(value) is str else value
    if type(restored) is float:
        return restored
    raise _mismatch("float", value)


def _bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise _mismatch("bool", value)


def _none(value: Any) -> None:
    if value is not None:
        raise _mismatch("null", value)


def _bytes(value: Any) -> bytes:
    restored = restore_text(value) if type(value) is str else value
    if isinstance(restored, bytes):
        return restored
    if isinstance(restored, str):  # Files written by people carry plain base64.
        try:
            return base64.b64decode(restored, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise _mismatch("bytes as base64", value)


def _parsed(kind: type, parse: Callable[[str], Any]) -> Decoder:
    def decode_text(value: Any) -> Any:
        if type(value) is str:
            try:
                return parse(value)
            except ValueError:
                pass
        raise _mismatch(f"{kind.__name__} as text", value)

    return decode_text


_SCALARS: dict[Any, Decoder] = {
    str: _str,
    int: _int,
    float: _float,
    bool: _bool,
    type(None): _none,
    None: _none,
    bytes: _bytes,
    datetime: _parsed(datetime, datetime.fromisoformat),
    date: _parsed(date, date.fromisoformat),
    time: _parsed(time, time.fromisoformat),
    UUID: _parsed(UUID, UUID),
}


_QUALIFIERS = tuple(
    getattr(typing, name) for name in ("Required", "NotRequired", "ReadOnly", "Final") if hasattr(typing, name)
)


class _Compiler:
    """Turns one type, and the types inside it, into a decoder."""

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen
        self.under_way: dict[Any, list[Decoder]] = {}

    def compile(self, kind: Any, variables: dict[Any, Any] | None = None) -> Decoder:
        variables = variables or {}
        if isinstance(kind, TypeVar):
            return self.compile(variables[kind]) if kind in variables else self.anything
        if kind in (Any, object, inspect.Parameter.empty):
            return self.anything
        if kind in _SCALARS:
            return _SCALARS[kind]
        if kind in self.under_way:  # A type that contains itself: refer to the decoder that is still being made.
            late = self.under_way[kind]
            return lambda value: late[0](value)
        self.under_way[kind] = late = []
        try:
            late.append(self._structure(kind, variables))
        finally:
            del self.under_way[kind]
        return late[0]

    def anything(self, value: Any) -> Any:
        restored = restore(value)
        return freeze(restored) if self.frozen else restored

    def _structure(self, kind: Any, variables: dict[Any, Any]) -> Decoder:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if isinstance(kind, TypeAliasType):
            return self.compile(kind.__value__, variables)
        if isinstance(origin, TypeAliasType):
            return self.compile(origin.__value__, self._bind(origin.__type_params__, args, variables))
        if origin is typing.Annotated:
            return self._annotated(kind, args, variables)
        if origin in _QUALIFIERS:
            return self.compile(args[0], variables)
        if origin in (typing.Union, types.UnionType):
            return self._union(kind, args, variables)
        if origin is typing.Literal:
            return self._literal(kind, args)
        if isinstance(kind, typing.NewType):
            return self.compile(kind.__supertype__, variables)
        base = origin or kind
        if isinstance(base, type):
            return self._class(base, kind, args, variables)
        raise CodecError(f"{name_of(kind)} is not a type that can be read from JSON")

    def _class(self, base: type, kind: Any, args: tuple[Any, ...], variables: dict[Any, Any]) -> Decoder:
        if issubclass(base, enum.Enum):
            return self._enum(base)
        if _is_pydantic(base):
            return _model(kind)
        if dataclasses.is_dataclass(base):
            return self._dataclass(base, self._bind(getattr(base, "__parameters__", ()), args, variables))
        if typing.is_typeddict(base):
            return self._typed_dict(base, self._bind(getattr(base, "__parameters__", ()), args, variables))
        if issubclass(base, tuple):
            return self._tuple(base, args, variables)
        if issubclass(base, list) or base in (collections.abc.Sequence, collections.abc.Iterable):
            return self._array(FrozenList if self.frozen else list, args, variables)
        if issubclass(base, set | frozenset) or base in (collections.abc.Set, collections.abc.MutableSet):
            as_frozen = self.frozen or issubclass(base, frozenset) or base is collections.abc.Set
            return self._array(frozenset if as_frozen else set, args, variables)
        if issubclass(base, dict) or base in (collections.abc.Mapping, collections.abc.MutableMapping):
            return self._mapping(args, variables)
        return _by_pydantic(kind)

    def _bind(self, parameters: Any, args: tuple[Any, ...], outer: dict[Any, Any]) -> dict[Any, Any]:
        return dict(
            zip(parameters, (outer.get(arg, arg) if isinstance(arg, TypeVar) else arg for arg in args), strict=False)
        )

    def _annotated(self, kind: Any, args: tuple[Any, ...], variables: dict[Any, Any]) -> Decoder:
        inner = self.compile(args[0], variables)
        check = _adapter(kind)

        def decode_annotated(value: Any) -> Any:
            decoded = inner(value)
            return _validated(lambda: check().validate_python(decoded))

        return decode_annotated

    def _union(self, kind: Any, args: tuple[Any, ...], variables: dict[Any, Any]) -> Decoder:
        exact = {arg: _SCALARS[arg] for arg in args if arg in (str, int, float, bool, type(None))}
        members = [(arg, self.compile(arg, variables)) for arg in args]

        def decode_union(value: Any) -> Any:
            if type(value) in exact:
                try:
                    return exact[type(value)](value)
                except CodecError:
                    pass
            problems: list[tuple[Any, CodecError]] = []
            for arg, decoder in members:
                try:
                    return decoder(value)
                except CodecError as error:
                    problems.append((arg, error))
            # The member that got furthest is the one that was meant.
            meant, deepest = max(problems, key=lambda problem: len(problem[1].path))
            if deepest.path:
                raise CodecError(f"as {name_of(meant)}: {deepest.problem}", deepest.path)
            raise _mismatch(" or ".join(name_of(arg) for arg in args), value)

        return decode_union

    def _literal(self, kind: Any, args: tuple[Any, ...]) -> Decoder:
        allowed = {(type(_plain(arg)), _plain(arg)): arg for arg in args}

        def decode_literal(value: Any) -> Any:
            restored = restore_text(value) if type(value) is str else value
            try:
                return allowed[type(restored), restored]
            except (KeyError, TypeError):
                choices = ", ".join(json.dumps(_plain(arg), default=str) for arg in args)
                raise CodecError(f"expected one of {choices}, got {_got(value)}") from None

        return decode_literal

    def _enum(self, base: type[enum.Enum]) -> Decoder:
        from fairtrial.codec.encode import canonical

        members = {canonical(member.value): member for member in base}

        def decode_enum(value: Any) -> Any:
            member = members.get(canonical(restore(value)))
            if member is None:
                choices = ", ".join(key.decode() for key in members)
                raise CodecError(f"expected one of {choices} ({base.__name__}), got {_got(value)}")
            return member

        return decode_enum

    def _dataclass(self, base: type, variables: dict[Any, Any]) -> Decoder:
        hints = _hints(base)
        names = [field.name for field in dataclasses.fields(base) if field.init]
        # The signature, not the fields: a record with an __init__ of its own has its own defaults.
        parameters = inspect.signature(base).parameters
        required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
        build = self._object(base.__name__, {name: self.compile(hints[name], variables) for name in names}, required)

        def decode_dataclass(value: Any) -> Any:
            values = build(value)
            try:
                return base(**values)
            except (TypeError, ValueError) as error:
                raise CodecError(f"not a {base.__name__}: {error}") from None

        return decode_dataclass

    def _typed_dict(self, base: Any, variables: dict[Any, Any]) -> Decoder:
        hints = _hints(base)
        decoders = {name: self.compile(hint, variables) for name, hint in hints.items()}
        build = self._object(base.__name__, decoders, required_keys(base, hints))
        return (lambda value: FrozenDict(build(value))) if self.frozen else build

    def _object(self, name: str, decoders: dict[str, Decoder], required: list[str]) -> Callable[[Any], dict[str, Any]]:
        def decode_object(value: Any) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise _mismatch(f"an object ({name})", value)
            values: dict[str, Any] = {}
            for key, item in value.items():
                decoder = decoders.get(key)
                if decoder is None:
                    near = get_close_matches(key, decoders, n=1)
                    hint = (
                        f"; did you mean {near[0]!r}?" if near else f"; {name} has {', '.join(decoders) or 'no fields'}"
                    )
                    raise CodecError(f"{name} has no field {key!r}{hint}")
                try:
                    values[key] = decoder(item)
                except CodecError as error:
                    raise error.under(key) from None
            for key in required:
                if key not in values:
                    raise CodecError(f"{name} needs the field {key!r}")
            return values

        return decode_object

    def _array(self, container: type, args: tuple[Any, ...], variables: dict[Any, Any]) -> Decoder:
        item = self.compile(args[0], variables) if args else self.anything

        def decode_array(value: Any) -> Any:
            if not isinstance(value, list):
                raise _mismatch("an array", value)
            return container(_items(value, item))

        return decode_array

    def _tuple(self, base: type, args: tuple[Any, ...], variables: dict[Any, Any]) -> Decoder:
        names = getattr(base, "_fields", None)
        if names is not None:
            hints = _hints(base)
            args = tuple(hints.get(name, Any) for name in names)
        if names is None and (not args or (len(args) == 2 and args[1] is Ellipsis)):
            return self._array(tuple, args[:1], variables)
        decoders = [self.compile(arg, variables) for arg in args if arg != ()]

        def decode_tuple(value: Any) -> Any:
            if not isinstance(value, list) or len(value) != len(decoders):
                raise _mismatch(f"an array of {len(decoders)}", value)
            items: list[Any] = []
            for decoder, item in zip(decoders, value, strict=True):
                try:
                    items.append(decoder(item))
                except CodecError as error:
                    raise error.under(len(items)) from None
            return base(*items) if names is not None else tuple(items)

        return decode_tuple

    def _mapping(self, args: tuple[Any, ...], variables: dict[Any, Any]) -> Decoder:
        key_type, value_type = args if len(args) == 2 else (str, Any)
        from_text = self._key(key_type, variables)
        decoder = self.compile(value_type, variables)
        container: Any = FrozenDict if self.frozen else dict

        def decode_mapping(value: Any) -> Any:
            if not isinstance(value, dict):
                raise _mismatch("an object", value)
            decoded: dict[Any, Any] = {}
            for key, item in value.items():
                try:
                    decoded[from_text(key)] = decoder(item)
                except CodecError as error:
                    raise error.under(key) from None
            return container(decoded)

        return decode_mapping

    def _key(self, kind: Any, variables: dict[Any, Any]) -> Decoder:
        decoder = self.compile(kind, variables)

        def decode_key(key: str) -> Any:
            try:
                return decoder(key)
            except CodecError:
                try:
                    return decoder(int(key))  # JSON writes the key 1 as "1".
                except ValueError:
                    raise _mismatch(f"{name_of(kind)} as a key", key) from None

        return decode_key


def _items(value: list[Any], decoder: Decoder) -> list[Any]:
    items: list[Any] = []
    for item in value:
        try:
            items.append(decoder(item))
        except CodecError as error:
            raise error.under(len(items)) from None
    return items


def required_keys(base: Any, hints: dict[str, Any]) -> list[str]:
    """The keys a TypedDict must have, in its own order.

    Python itself misses `NotRequired` in annotations kept as text; the resolved ones say it.
    """
    marked = {name: typing.get_origin(hint) for name, hint in hints.items()}
    return [
        name
        for name, mark in marked.items()
        if mark is typing.Required or (mark is not typing.NotRequired and name in base.__required_keys__)
    ]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _hints(kind: Any) -> dict[str, Any]:
    # Python 3.12 does not find a class's own type parameters in annotations kept as text.
    parameters = {param.__name__: param for base in kind.__mro__ for param in getattr(base, "__type_params__", ())}
    try:
        return typing.get_type_hints(kind, localns=parameters, include_extras=True)
    except NameError as error:
        raise CodecError(
            f"the annotations of {name_of(kind)} cannot be resolved ({error}); define what it names at module level"
        ) from None


def _is_pydantic(base: type) -> bool:
    # Looked up by attribute: importing pydantic for people who do not use its models would cost them its start-up.
    return hasattr(base, "__pydantic_core_schema__") or hasattr(base, "__get_pydantic_core_schema__")


def _adapter(kind: Any) -> Callable[[], Any]:
    @functools.cache
    def make() -> Any:
        from pydantic import TypeAdapter

        return TypeAdapter(kind)

    return make


def _validated(validate: Callable[[], Any]) -> Any:
    from pydantic import ValidationError

    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CodecError(first["msg"], tuple(first["loc"])) from None


def _model(kind: Any) -> Decoder:
    adapter = _adapter(kind)
    strict = bool(getattr(kind, "model_config", {}).get("strict"))

    def decode_model(value: Any) -> Any:
        tree = restore(value)
        if strict:  # A strict model takes dates and the like as text only from JSON.
            return _validated(lambda: adapter().validate_json(json.dumps(tree)))
        return _validated(lambda: adapter().validate_python(tree))

    return decode_model


def _by_pydantic(kind: Any) -> Decoder:
    """Leaves we have no rule for (Decimal, Path, timedelta, ...): pydantic's strict JSON rules."""
    adapter = _adapter(kind)

    def decode_leaf(value: Any) -> Any:
        from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

        try:
            check = adapter()
        except (PydanticSchemaGenerationError, PydanticUserError):
            raise CodecError(f"{name_of(kind)} is not a type that can be read from JSON") from None
        return _validated(lambda: check.validate_json(json.dumps(restore(value)), strict=True))

    return decode_leaf
