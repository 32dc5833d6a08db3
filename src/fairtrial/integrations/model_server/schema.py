"""The smallest value that a JSON schema allows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fairtrial.integrations.model_server.request import InvalidRequestError

# Deep enough for any hand-written schema; one that needs more refers to itself without end.
_MAX_DEPTH = 24

_FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "duration": "P0D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "http://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}

# Patterns are not solved; these values are tried, which match most patterns in tests.
_TRIALS = ("", "a", "A", "0", "1", "aa", "AA", "00", "aaa", "AAA", "000", "0000", "00000", "a1", "A1", "A-1", "a_a")


class UnsatisfiedSchemaError(InvalidRequestError):
    """No value was found for the schema; the test must define a reply."""


class _Dead(Exception):
    """This branch of the schema has no value within the depth allowed."""


def minimal_instance(schema: Mapping[str, Any]) -> Any:
    """Return the smallest value that the schema allows: only required properties, first possible branch, least numbers.

    The same schema gives the same value. Raises `UnsatisfiedSchemaError` if no value is found.
    """
    try:
        return _instance(schema, schema, 0)
    except _Dead as reason:
        raise UnsatisfiedSchemaError(
            f"no value found for the output schema ({reason}); add a rule to the server"
        ) from None


def _instance(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _Dead("it refers to itself without end")
    if schema is True:
        return None
    if not isinstance(schema, Mapping):
        raise _Dead(f"not a schema: {schema!r}")
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        if not schema["enum"]:
            raise _Dead("an enum without values")
        return schema["enum"][0]
    if "$ref" in schema:
        siblings = {name: value for name, value in schema.items() if name != "$ref"}
        return _instance(_merged([_resolve(schema["$ref"], root), siblings], root, depth), root, depth + 1)
    if "allOf" in schema:
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        return _instance(_merged([*schema["allOf"], rest], root, depth), root, depth + 1)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            rest = {key: value for key, value in schema.items() if key != name}
            return _first([_merged([branch, rest], root, depth) for branch in schema[name]], root, depth)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _first([{**schema, "type": one} for one in kind], root, depth)
    return _typed(kind or _implied_type(schema), schema, root, depth)


def _first(branches: list[Mapping[str, Any]], root: Mapping[str, Any], depth: int) -> Any:
    """Return the value of the first branch that has one, so that recursion ends in a branch without it."""
    reason = "no branch"
    for branch in branches:
        try:
            return _instance(branch, root, depth + 1)
        except _Dead as dead:
            reason = str(dead)
    raise _Dead(reason)


def _typed(kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _instance(properties.get(name, True), root, depth + 1) for name in schema.get("required", ())}
        case "array":
            prefix = schema.get("prefixItems", ())
            count = schema.get("minItems", 0)
            items = [prefix[i] if i < len(prefix) else schema.get("items", True) for i in range(count)]
            values = [_instance(item, root, depth + 1) for item in items]
            if schema.get("uniqueItems") and len(values) > 1:
                raise _Dead("it requires several different items")
            return values
        case "string":
            return _string(schema)
        case "integer" | "number":
            return _number(schema, whole=kind == "integer")
        case "boolean":
            return False
        case "null":
            return None
    raise _Dead(f"unknown type {kind!r}")


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema or "minItems" in schema:
        return "array"
    if "pattern" in schema or "minLength" in schema:
        return "string"
    if "minimum" in schema or "maximum" in schema:
        return "number"
    return "null"


def _string(schema: Mapping[str, Any]) -> str:
    shortest: int = schema.get("minLength", 0)
    pattern = schema.get("pattern")
    if "format" in schema and schema["format"] in _FORMATS:
        return _FORMATS[str(schema["format"])]
    if pattern is None:
        return "a" * shortest
    longest = schema.get("maxLength", math.inf)
    given = [text for text in (schema.get("default"), *schema.get("examples", ())) if isinstance(text, str)]
    for text in (*given, *_TRIALS, "a" * shortest):
        if shortest <= len(text) <= longest and re.search(pattern, text):
            return text
    raise _Dead(f"a string of pattern {pattern!r}")


def _number(schema: Mapping[str, Any], *, whole: bool) -> int | float:
    least: float = schema.get("minimum", -math.inf)
    above: float = schema.get("exclusiveMinimum", -math.inf)
    most: float = schema.get("maximum", math.inf)
    below: float = schema.get("exclusiveMaximum", math.inf)
    step = schema.get("multipleOf", 1 if whole else None)

    def fits(value: float) -> bool:
        return least <= value <= most and above < value < below

    if fits(0):
        return 0
    # Zero is not allowed, so the range lies on one side of it: return its end nearer to zero.
    low, high = max(least, above), min(most, below)
    positive = low >= 0
    edge = low if positive else high
    if step is not None:
        start = math.ceil(edge / step) if positive else math.floor(edge / step)
        for value in (start * step, (start + (1 if positive else -1)) * step):
            if fits(value):
                return int(value) if float(value).is_integer() else value
        raise _Dead("no number in the range")
    far = high if positive else low
    middle = (edge + far) / 2 if math.isfinite(far) else edge + (1 if positive else -1)
    for value in (edge, middle):
        if fits(value):
            return value
    raise _Dead("no number in the range")


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#"):
        raise _Dead(f"a reference outside the schema: {reference!r}")
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise _Dead(f"a reference to nothing: {reference!r}")
        found = found[name]
    return found


def _merged(schemas: list[Any], root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """Merge schemas that must all hold: properties and required names of all, other keywords of the last."""
    if depth > _MAX_DEPTH:
        raise _Dead("it refers to itself without end")
    filled = [schema for schema in schemas if schema is not True and schema != {}]
    merged: dict[str, Any] = {}
    for schema in filled:
        if not isinstance(schema, Mapping):
            raise _Dead(f"not a schema: {schema!r}")
        if "$ref" in schema and len(filled) > 1:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            schema = _merged([_resolve(schema["$ref"], root), rest], root, depth + 1)
        for name, value in schema.items():
            if name == "properties":
                merged[name] = {**merged.get(name, {}), **value}
            elif name == "required":
                merged[name] = [*merged.get(name, ()), *(one for one in value if one not in merged.get(name, ()))]
            else:
                merged[name] = value
    return merged
