"""JSON Schemas of types, and replies in their form."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, TypeAliasType, TypeVar
from uuid import UUID

from fairtrial.base.codec import from_json, parse_json, to_json
from fairtrial.base.codec.decode import QUALIFIERS, alias_value, field_types, is_pydantic, required_keys
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.codec.scalars import name_of
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import CodecError, ConfigurationError

type Schema = dict[str, Any]

_SCALARS: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    timedelta: {"type": "string", "format": "duration"},
    UUID: {"type": "string", "format": "uuid"},
    Decimal: {"type": "string"},
}
# The keywords of pydantic's schema of an annotated type that are passed on to models.
_CONSTRAINTS = (
    "description", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "minItems", "maxItems",
)  # fmt: skip
# Keywords that the strict modes of providers refuse.
# What OpenAI documents for strict schemas. The lengths of texts are accepted by all but fine-tuned models.
_STRICT = frozenset(
    {
        "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs",
        "description", "title", "pattern", "format", "multipleOf", "maximum", "exclusiveMaximum", "minimum",
        "exclusiveMinimum", "minItems", "maxItems", "minLength", "maxLength",
    }
)  # fmt: skip
_STRICT_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """The schema of an answer. `wrapped`: the value is under "value", because providers require an object."""

    name: str
    schema: Mapping[str, Any]
    wrapped: bool
    strict: bool


def schema_of(kind: Any, *, all_required: bool = False) -> Schema:
    """Return the JSON Schema of any type that can be read from JSON.

    Args:
        kind: The type.
        all_required: Require every field, including those with a default, as the strict modes of providers do.
    """
    builder = _Builder(all_required)
    try:
        schema = builder.build(kind)
    except CodecError as error:
        raise ConfigurationError(f"{name_of(kind)} has no JSON Schema: {error}") from None
    if "$ref" in schema:  # The type contains itself; the top level must still be the object itself.
        schema = dict(builder.definitions[schema["$ref"].rpartition("/")[2]])
    return {**schema, "$defs": builder.definitions} if builder.definitions else schema


@functools.lru_cache(maxsize=1024)
def _cached_output_schema(kind: Any) -> OutputSchema:
    schema = _inlined(schema_of(kind, all_required=True))
    wrapped = schema.get("type") != "object"
    if wrapped:
        definitions = schema.pop("$defs", None)
        schema = object_schema({"value": schema}, ["value"]) | ({"$defs": definitions} if definitions else {})
    name = "".join(mark if mark.isalnum() and mark.isascii() else "_" for mark in name_of(kind))[:64] or "answer"
    return OutputSchema(name, schema, wrapped, _is_strict(schema))


def output_schema(kind: Any) -> OutputSchema | None:
    """Return the schema of an output type; None for text."""
    if kind is str:
        return None
    try:
        return _cached_output_schema(kind)
    except TypeError:  # An unhashable annotation.
        return _cached_output_schema.__wrapped__(kind)


def hints_of(thing: Any) -> dict[str, Any]:
    """Return the resolved annotations of a function."""
    parameters = {param.__name__: param for param in getattr(thing, "__type_params__", ())}
    try:
        return typing.get_type_hints(thing, localns=parameters, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of {name_of(thing)} cannot be resolved ({error}); define what it names at module level"
        ) from None


class _Builder:
    def __init__(self, all_required: bool) -> None:
        self.all_required = all_required
        self.definitions: dict[str, Schema] = {}
        self._under_way: list[Any] = []
        self._recursive: dict[Any, str] = {}

    def build(self, kind: Any) -> Schema:
        if isinstance(kind, TypeVar) or kind in (Any, object, inspect.Parameter.empty):
            return {}
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:  # Before anything hashes it: its metadata need not be hashable.
            return {**self.build(args[0]), **_constraints(kind, args[1:])}
        if kind in _SCALARS:
            return dict(_SCALARS[kind])
        if isinstance(kind, TypeAliasType) or isinstance(origin, TypeAliasType):
            return self._named(kind, lambda: self.build(alias_value(origin or kind, args)))
        if origin in QUALIFIERS:
            return self.build(args[0])
        if origin in (typing.Union, types.UnionType):
            return self._union(args)
        if origin is typing.Literal:
            return _choices([to_json(arg) for arg in args])
        if isinstance(kind, typing.NewType):
            return self.build(kind.__supertype__)
        base = origin or kind
        if isinstance(base, type):
            return self._class(base, kind, args)
        raise ConfigurationError(f"{name_of(kind)} has no JSON Schema")

    def _class(self, base: type, kind: Any, args: tuple[Any, ...]) -> Schema:
        if issubclass(base, enum.Enum):
            return _choices([to_json(member) for member in base])
        if is_pydantic(base):
            return self._by_pydantic(kind)
        if dataclasses.is_dataclass(base):
            return self._named(kind, lambda: self._dataclass(base, args))
        if typing.is_typeddict(base):
            return self._named(kind, lambda: self._typed_dict(base, args))
        if issubclass(base, tuple):
            return self._tuple(base, args)
        if issubclass(base, list) or base in (collections.abc.Sequence, collections.abc.Iterable):
            return {"type": "array", "items": self._item(args)}
        if issubclass(base, set | frozenset) or base in (collections.abc.Set, collections.abc.MutableSet):
            return {"type": "array", "items": self._item(args), "uniqueItems": True}
        if issubclass(base, dict) or base in (collections.abc.Mapping, collections.abc.MutableMapping):
            value = self.build(args[1]) if len(args) == 2 else {}
            return {"type": "object", "additionalProperties": value or True}
        if issubclass(base, PurePath):
            return {"type": "string"}
        return self._by_pydantic(kind)

    def _item(self, args: tuple[Any, ...]) -> Schema:
        return self.build(args[0]) if args else {}

    def _union(self, args: tuple[Any, ...]) -> Schema:
        members = [self.build(arg) for arg in args]
        if {} in members:
            return {}
        return {"anyOf": members}

    def _tuple(self, base: type, args: tuple[Any, ...]) -> Schema:
        names = getattr(base, "_fields", None)
        if names is not None:
            hints = field_types(base, args)
            args = tuple(hints.get(name, Any) for name in names)
        elif not args or (len(args) == 2 and args[1] is Ellipsis):
            return {"type": "array", "items": self._item(args)}
        members = [self.build(arg) for arg in args if arg != ()]
        return {"type": "array", "prefixItems": members, "minItems": len(members), "maxItems": len(members)}

    def _named(self, kind: Any, build: collections.abc.Callable[[], Schema]) -> Schema:
        """Build the schema of a type; if it contains itself, as a definition with references."""
        if kind in self._under_way:
            name = self._recursive.setdefault(kind, self._free_name(name_of(kind)))
            return {"$ref": f"#/$defs/{name}"}
        self._under_way.append(kind)
        try:
            schema = build()
        finally:
            self._under_way.pop()
        if kind in self._recursive:
            self.definitions[self._recursive[kind]] = schema
            return {"$ref": f"#/$defs/{self._recursive[kind]}"}
        return schema

    def _free_name(self, name: str) -> str:
        taken = {*self.definitions, *self._recursive.values()}
        return next(free for free in (name, *(f"{name}{n}" for n in range(2, 10_000))) if free not in taken)

    def _dataclass(self, base: type, args: tuple[Any, ...]) -> Schema:
        hints = field_types(base, args)
        parameters = inspect.signature(base).parameters
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for field in dataclasses.fields(base):
            if not field.init:
                continue
            properties[field.name] = self.build(hints[field.name])
            if isinstance(description := field.metadata.get("description"), str):
                properties[field.name] = {**properties[field.name], "description": description}
            if self.all_required or parameters[field.name].default is inspect.Parameter.empty:
                required.append(field.name)
        return object_schema(properties, required)

    def _typed_dict(self, base: Any, args: tuple[Any, ...]) -> Schema:
        hints = field_types(base, args)
        properties = {name: self.build(hint) for name, hint in hints.items()}
        required = required_keys(base, hints)
        return object_schema(properties, [name for name in properties if self.all_required or name in required])

    def _by_pydantic(self, kind: Any) -> Schema:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

        try:
            schema = TypeAdapter(kind).json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError):
            raise ConfigurationError(f"{name_of(kind)} has no JSON Schema") from None
        definitions = schema.pop("$defs", {})
        names = {name: self._free_name(name) for name in definitions}
        for name, definition in definitions.items():
            self.definitions[names[name]] = self._adapted(definition, names)
        adapted: Schema = self._adapted(schema, names)
        return adapted

    def _adapted(self, schema: Any, names: Mapping[str, str]) -> Any:
        """Adapt pydantic's schema: rename definitions, and forbid other properties unless the model allows them."""
        if isinstance(schema, list):
            return [self._adapted(item, names) for item in schema]
        if not isinstance(schema, dict):
            return schema
        adapted: Schema = {}
        for key, item in schema.items():
            if key == "$ref":
                adapted[key] = f"#/$defs/{names[item.rpartition('/')[2]]}"
            elif key == "properties":
                adapted[key] = {name: self._adapted(value, names) for name, value in item.items()}
            elif key not in ("title", "discriminator") and not (key == "default" and self.all_required):
                adapted[key] = self._adapted(item, names) if key != "default" else item
        if "properties" in adapted:
            adapted.setdefault("additionalProperties", False)
            if self.all_required:
                adapted["required"] = list(adapted["properties"])
        if "oneOf" in adapted and "anyOf" not in adapted:  # A discriminated union; providers only support `anyOf`.
            adapted["anyOf"] = adapted.pop("oneOf")
        return adapted


def object_schema(properties: dict[str, Schema], required: list[str]) -> Schema:
    """Return the schema of an object that has no other properties."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def _choices(values: list[Any]) -> Schema:
    kinds = {_JSON_TYPES.get(type(value)) for value in values}
    named = {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}
    return {**named, "enum": values}


def _constraints(kind: Any, metadata: tuple[Any, ...]) -> Schema:
    notes = [note for note in metadata if isinstance(note, str)]
    base: Schema = {"description": notes[-1]} if notes else {}
    if len(notes) == len(metadata):
        return base
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

    try:
        full = TypeAdapter(kind).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, CodecError):
        return base
    return {**base, **{key: full[key] for key in _CONSTRAINTS if key in full}}


def _is_strict(schema: Any) -> bool:
    """Return whether strict modes accept the schema: closed objects, all properties required, no other keywords."""
    if isinstance(schema, list):
        return all(_is_strict(item) for item in schema)
    if not isinstance(schema, dict):
        return True
    if not schema or not schema.keys() <= _STRICT or schema.get("format", "date") not in _STRICT_FORMATS:
        return False
    if "$ref" in schema and len(schema) > 1:
        return False
    if schema.get("type") == "object" and (
        schema.get("additionalProperties") is not False or set(schema.get("required", ())) != set(schema["properties"])
    ):
        return False
    for key, item in schema.items():
        if key in ("properties", "$defs"):
            if not all(_is_strict(value) for value in item.values()):
                return False
        elif key not in ("enum", "const", "required") and not _is_strict(item):
            return False
    return True


def _inlined(schema: Schema) -> Schema:
    """Return the schema without keywords beside references, which strict modes refuse: such references are inlined.

    A reference inside its own definition cannot be; it loses its keywords.
    """
    definitions = schema.get("$defs", {})

    def inline(part: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [inline(item, inside) for item in part]
        if not isinstance(part, dict):
            return part
        if isinstance(ref := part.get("$ref"), str):
            name = ref.rpartition("/")[2]
            if len(part) == 1 or name in inside:
                return {"$ref": ref}
            own = {key: item for key, item in part.items() if key != "$ref"}
            return {**inline(definitions[name], (*inside, name)), **own}
        return {
            key: item if key in ("enum", "const", "required") else inline(item, inside) for key, item in part.items()
        }

    root = {key: item for key, item in schema.items() if key != "$defs"}
    found: Schema = inline(root, ())
    kept = {name: inline(definition, (name,)) for name, definition in definitions.items()}
    used: set[str] = set()

    def collect(part: Any) -> None:
        for item in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            collect(item)
        if isinstance(part, dict) and isinstance(ref := part.get("$ref"), str):
            name = ref.rpartition("/")[2]
            if name not in used:
                used.add(name)
                collect(kept[name])

    collect(found)
    return {**found, "$defs": {name: kept[name] for name in kept if name in used}} if used else found


def is_recursive(schema: Mapping[str, Any]) -> bool:
    """Return whether a definition of the schema refers to itself, directly or indirectly."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})

    def refers(part: Any, seen: tuple[str, ...]) -> bool:
        if isinstance(part, list):
            return any(refers(item, seen) for item in part)
        if not isinstance(part, Mapping):
            return False
        if isinstance(ref := part.get("$ref"), str):
            name = ref.rpartition("/")[2]
            return name in seen or refers(definitions[name], (*seen, name))
        return any(refers(item, seen) for item in part.values())

    return any(refers(definition, (name,)) for name, definition in definitions.items())


_FENCE = "```"


@dataclass(frozen=True, slots=True)
class OutputRepaired:
    """A reply did not match the requested type, and the model was asked to repair it. `repaired`: whether it did."""

    prompt_name: str
    problem: str
    raw: str
    repaired: bool


def parse_output(kind: Any, text: str, *, wrapped: bool = False) -> Any:
    """Parse a reply as a `kind`; text is returned as it is.

    Args:
        kind: Any type the codec knows.
        text: The answer.
        wrapped: The schema was an object with the value under "value"; a model that ignored it may have answered with
            the value itself.

    Raises:
        CodecError: the reply does not match the type.
    """
    if kind is str:
        return text
    # A key that comes twice says two things, and choosing one would be a guess.
    tree = _escaped(parse_json(_without_fence(text), unique_keys=True))
    if wrapped and isinstance(tree, dict) and set(tree) == {"value"}:
        tree = tree["value"]
    return from_json(kind, tree)


def _without_fence(text: str) -> str:
    """Return the content if the whole answer is a Markdown code block, else the answer.

    Models often wrap JSON in a code block. This does not use a regular expression: an answer can be a megabyte of
    newlines, and backtracking over those blocks the interpreter.
    """
    block = text.strip()
    first_line, newline, rest = block.partition("\n")
    language = first_line.removeprefix(_FENCE).strip()
    if not newline or not first_line.startswith(_FENCE) or not rest.endswith(_FENCE):
        return text
    if language and not language.replace("-", "_").isidentifier():
        return text
    return rest.removesuffix(_FENCE)


def repair_messages(problem: str, reply: ChatMessage) -> tuple[ChatMessage, ChatMessage]:
    """Return the messages to add after an invalid answer: the answer, and the request to repair it."""
    request = (
        f"That answer could not be read: {problem}.\n"
        "Answer again with JSON only, in exactly the form asked for, with no text around it."
    )
    return reply if reply.text else ChatMessage("assistant", "(nothing)"), ChatMessage("user", request)


def _escaped(tree: Any) -> Any:
    """Escape keys that look like marks of the codec: in the output of a model they are ordinary text."""
    if isinstance(tree, str):
        return escape_text(tree)
    if isinstance(tree, list):
        return [_escaped(item) for item in tree]
    if isinstance(tree, dict):
        return {escape_text(key): _escaped(item) for key, item in tree.items()}
    return tree
