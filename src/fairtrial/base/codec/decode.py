"""Read typed values from JSON: one decoder per type, made once."""

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
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, TypeAliasType, TypeVar, cast

from fairtrial.base.codec.encode import canonical
from fairtrial.base.codec.escape import parse_json, restore, restore_text
from fairtrial.base.codec.scalars import SCALARS, Decoder, got, mismatch, name_of
from fairtrial.base.frozen import FrozenDict, FrozenList, freeze
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
        own = variables.get(owner, {})
        found.update((name, bound(kind, own)) for name, kind in _own_types(owner).items())
    return found


QUALIFIERS = tuple(
    getattr(typing, name) for name in ("Required", "NotRequired", "ReadOnly", "Final") if hasattr(typing, name)
)


def unqualified(kind: Any) -> tuple[Any, set[Any]]:
    """Return a type without its qualifiers, and the qualifiers."""
    qualifiers: set[Any] = set()
    while (origin := typing.get_origin(kind)) in QUALIFIERS:
        qualifiers.add(origin)
        kind = typing.get_args(kind)[0]
    return kind, qualifiers


def required_keys(base: Any, fields: dict[str, Any]) -> frozenset[str]:
    """Return the required keys of a TypedDict. The class itself does not know them if annotations are text."""

    def is_required(name: str) -> bool:
        _, qualifiers = unqualified(fields[name])
        return typing.NotRequired not in qualifiers and (
            typing.Required in qualifiers or name in base.__required_keys__
        )

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
    try:
        annotations = inspect.get_annotations(owner)  # From Python 3.14 on, they are evaluated now.
        if not annotations:
            return {}
        # Python 3.12 does not find type parameters in annotations kept as text.
        members = (*reversed(family), owner)
        parameters = {p.__name__: p for member in members for p in getattr(member, "__type_params__", ())}
        stand_in = type(owner.__name__, (), {"__annotations__": annotations, "__module__": owner.__module__})
        try:
            return typing.get_type_hints(stand_in, localns=parameters, include_extras=True)
        except NameError:  # Perhaps a class inside the class.
            return typing.get_type_hints(stand_in, localns={**vars(owner), **parameters}, include_extras=True)
    except NameError as error:
        raise CodecError(
            f"the annotations of {name_of(owner)} cannot be resolved ({error}); define what it names at module level"
        ) from None


def is_pydantic(base: type) -> bool:
    """True for models, pydantic dataclasses and types that bring a pydantic schema."""
    # Looked up by attribute: importing pydantic for people who do not use its models would cost them its start-up.
    return (
        hasattr(base, "__pydantic_core_schema__")
        or hasattr(base, "__get_pydantic_core_schema__")
        or base.__module__ == "ipaddress"
    )


def model(kind: Any) -> Decoder:
    """Read a model by its own rules."""
    adapter = _adapter(kind)
    strict = bool(getattr(kind, "model_config", {}).get("strict"))

    def decode_model(value: Any) -> Any:
        tree = restore(value)
        if strict:  # A strict model takes dates and the like as text, but only from JSON, which has no bytes.
            try:
                text = json.dumps(tree, ensure_ascii=False).encode("utf-8")
            except (TypeError, UnicodeEncodeError):
                pass
            else:
                return _validated(lambda: adapter().validate_json(text, by_alias=True, by_name=True))
        return _validated(lambda: adapter().validate_python(tree, strict=False, by_alias=True, by_name=True))

    return decode_model


def constrained(kind: Any, inner: Decoder) -> Decoder:
    """Read a value, then let pydantic check what `Annotated` says about it."""
    adapter = _adapter(kind)

    def decode_constrained(value: Any) -> Any:
        decoded = inner(value)
        return _validated(lambda: adapter().validate_python(decoded))

    return decode_constrained


def _adapter(kind: Any) -> Callable[[], Any]:
    @functools.cache
    def make() -> Any:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        try:
            return TypeAdapter(kind)
        except PydanticUserError as error:
            raise CodecError(f"pydantic cannot check {kind}: {error.message}") from None

    return make


def _validated(validate: Callable[[], Any]) -> Any:
    from pydantic import ValidationError

    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CodecError(first["msg"], tuple(first["loc"])) from None


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
