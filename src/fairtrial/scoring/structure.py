"""Evaluators of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fairtrial.base.codec import parse_json, to_json
from fairtrial.base.codec.escape import restore
from fairtrial.errors import CodecError, ConfigurationError, MissingExtraError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Score

_MISSING = object()


@evaluator(inline=True, needs_expected=True)
def json_subset(output: object, expected: object) -> Score:
    """Passes if the output contains everything in expected; it may contain more.

    Objects are compared key by key at every depth, arrays item by item. An output that is text is read as JSON first.
    """
    try:
        found = to_json(as_json(output))
    except CodecError as error:
        return Score(0.0, False, f"the output is not JSON: {error.problem}")
    difference = _first_difference(found, to_json(expected), "$")
    return Score(0.0 if difference else 1.0, not difference, difference)


def as_json(output: Any) -> Any:
    """Return a value as JSON; text is parsed."""
    return parse_json(output) if isinstance(output, str) else restore(to_json(output))


def same_json(one: Any, other: Any) -> bool:
    """Compare two values as JSON: 1 equals 1.0, and true does not equal 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(item, other[key]) for key, item in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _first_difference(found: Any, wanted: Any, path: str) -> str:
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, item in wanted.items():
            value = found.get(key, _MISSING)
            difference = (
                f"missing: {path}.{key}" if value is _MISSING else _first_difference(value, item, f"{path}.{key}")
            )
            if difference:
                return difference
        return ""
    if isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found):
            return f"wrong: {path} has {len(found)} items, expected {len(wanted)}"
        differences = (
            _first_difference(f, w, f"{path}[{i}]") for i, (f, w) in enumerate(zip(found, wanted, strict=True))
        )
        return next((difference for difference in differences if difference), "")
    return "" if same_json(found, wanted) else f"wrong: {path}"


def json_schema(schema: Mapping[str, Any]) -> Callable[[object, object], Score]:
    """Passes if the output is valid under a JSON Schema (draft 2020-12). Text is read as JSON first."""
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError, best_match
        from referencing import Registry
    except ImportError:
        raise MissingExtraError("json_schema", "schema") from None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(f"json_schema(): invalid schema: {error.message}") from None
    validator = Draft202012Validator(schema, registry=Registry())  # An empty registry: a reference fetches nothing.

    @evaluator(inline=True, name="json_schema")
    def valid(output: Any, expected: Any) -> Score:
        try:
            tree = as_json(output)
        except CodecError as error:
            return Score(0.0, False, f"the output is not JSON: {error.problem}")
        worst = best_match(validator.iter_errors(tree))
        return Score(1.0, True) if worst is None else Score(0.0, False, f"{worst.json_path}: {worst.message}"[:500])

    return valid
