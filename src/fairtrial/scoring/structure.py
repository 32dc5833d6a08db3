"""Evaluators of numbers and of JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fairtrial.base.codec import from_json, parse_json, to_json
from fairtrial.base.codec.escape import restore
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import CodecError, ConfigurationError, MissingExtraError, NothingToScoreError
from fairtrial.scoring.evaluator import evaluator
from fairtrial.scoring.score import Metric, Score

_ROUNDING = 4  # Steps between neighbouring floating-point numbers.


def within_tolerance(tolerance: float, *, relative: bool = False) -> Callable[[object, object], Score]:
    """Passes if the output is within `tolerance` of expected; the value falls from 1 to 0 over that distance.

    Args:
        tolerance: The largest accepted difference.
        relative: Take it as a share of the expected value.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigurationError(f"a tolerance must be a finite number of at least 0 (got {tolerance})")

    @evaluator(inline=True, name="within_tolerance", needs_expected=True)
    def close(output: Any, expected: Any) -> Score:
        # Models answer in text: an answer that is not a number is wrong, but no error of the evaluator.
        wanted, number = _number(expected), _number(output)
        if wanted is None:
            raise TypeError(f"the expected value of within_tolerance must be a finite number (got {expected!r})")
        if number is None:
            return Score(0.0, False, f"not a number: {str(output)[:80]!r}")
        allowed = tolerance * abs(wanted) if relative else tolerance
        difference = abs(number - wanted)
        passed = is_within(number, wanted, allowed)
        # The difference of two finite numbers may overflow to infinity.
        value = max(0.0, 1.0 - difference / allowed) if 0 < allowed < math.inf else float(passed)
        return Score(value, passed, f"difference {difference:g}, allowed {allowed:g}")

    return close


def is_within(number: float, wanted: float, allowed: float) -> bool:
    """Return whether two numbers differ by at most `allowed`; rounding errors do not count: 0.8 is 0.1 above 0.7."""
    if not allowed:
        return number == wanted
    try:
        return abs(number - wanted) <= allowed + _ROUNDING * math.ulp(max(abs(float(number)), abs(float(wanted))))
    except OverflowError:  # An integer that no float holds.
        return number == wanted


def _number(output: Any) -> float | None:
    if isinstance(output, bool):
        return None
    try:
        number = float(output)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


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


def schema_check(schema: Mapping[str, Any], what: str) -> Callable[[Any], str]:
    """Return a function that returns the worst problem of a value under a JSON Schema; "" if it is valid.

    Raises:
        ConfigurationError: the schema is invalid; `what` says what needs it.
    """
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError, best_match
        from referencing import Registry
    except ImportError:
        raise MissingExtraError(what.removesuffix("()"), "text") from None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(f"{what}: invalid schema: {error.message}") from None
    validator = Draft202012Validator(schema, registry=Registry())  # An empty registry: a reference fetches nothing.

    def problem_of(value: Any) -> str:
        worst = best_match(validator.iter_errors(value))
        return "" if worst is None else f"{worst.json_path}: {worst.message}"[:500]

    return problem_of


def json_schema(schema: Mapping[str, Any]) -> Callable[[object, object], Score]:
    """Passes if the output is valid under a JSON Schema (draft 2020-12). Text is read as JSON first."""
    problem_of = schema_check(schema, "json_schema()")

    @evaluator(inline=True, name="json_schema")
    def valid(output: Any, expected: Any) -> Score:
        try:
            tree = as_json(output)
        except CodecError as error:
            return Score(0.0, False, f"the output is not JSON: {error.problem}")
        problem = problem_of(tree)
        return Score(0.0, False, problem) if problem else Score(1.0, True)

    return valid


def json_correctness(schema: Mapping[str, Any] | type | None = None) -> Callable[[object, object], Score]:
    """Passes if the output is JSON, all of it, and fits a JSON Schema or a Python type.

    JSON in a Markdown fence, or with a sentence before it, fails: the program that reads the output would fail, too.
    Whether the values are true is not checked, nor is `format` of a schema.

    Args:
        schema: A JSON Schema (draft 2020-12; extra `text`), or a type such as a dataclass or a pydantic model; `{}`
            accepts all JSON. By default each sample's `expected` is its schema.
    """
    check = _json_check({} if schema is None else schema)  # A missing extra is an error now, not of each trial.

    @evaluator(inline=True, name="json_correctness", needs_expected=schema is None)
    def correct(output: Any, expected: Any) -> Score:
        if schema is not None:
            return check(output, None)
        if not isinstance(expected, Mapping):
            raise TypeError(f"the expected value of json_correctness() must be a JSON Schema (got {expected!r})")
        return _json_check(expected)(output, None)

    return correct


def _json_check(schema: Mapping[str, Any] | type) -> Callable[[object, object], Score]:
    if isinstance(schema, Mapping):
        return json_schema(schema)

    def typed(output: Any, expected: Any) -> Score:
        try:
            from_json(schema, to_json(as_json(output)))
        except CodecError as error:
            return Score(0.0, False, str(error)[:500])
        return Score(1.0, True)

    return typed


_INDEX = re.compile(r"\[\d+\]")
_SHOWN = 5
_KINDS: tuple[Literal["wrong", "missing", "unexpected"], ...] = ("wrong", "missing", "unexpected")


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of either side. `kind` is empty if both sides agree."""

    path: str
    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Rules:
    tolerance: float
    relative: bool
    tolerances: Mapping[str, float]
    ignore: frozenset[str]
    unordered: frozenset[str]

    def fields(self, output: Any, expected: Any, path: str = "$") -> Iterator[_Field]:
        """Compare two trees; yields one item for every field of either."""
        general = _INDEX.sub("[*]", path)
        if path in self.ignore or general in self.ignore:
            return
        if isinstance(expected, dict) and isinstance(output, dict):
            for key in [*expected, *(key for key in output if key not in expected)]:
                yield from self.fields(output.get(key, _MISSING), expected.get(key, _MISSING), f"{path}.{key}")
        elif isinstance(expected, list) and isinstance(output, list):
            if path in self.unordered or general in self.unordered:
                output = self._aligned(output, expected, path)
            for place in range(max(len(expected), len(output))):
                ours = output[place] if place < len(output) else _MISSING
                theirs = expected[place] if place < len(expected) else _MISSING
                yield from self.fields(ours, theirs, f"{path}[{place}]")
        elif expected is _MISSING:
            yield from (_Field(leaf, "unexpected", f"unexpected: {leaf}") for leaf in self._leaves(output, path))
        elif output is _MISSING:
            yield from (_Field(leaf, "missing", f"missing: {leaf}") for leaf in self._leaves(expected, path))
        elif isinstance(expected, dict | list) and expected:
            # A container in place of which there is something else: all its fields are wrong.
            yield from (_Field(leaf, "wrong", f"wrong: {leaf}") for leaf in self._leaves(expected, path))
        elif self._same(output, expected, self.tolerances.get(path, self.tolerances.get(general))):
            yield _Field(path, "")
        else:
            yield _Field(path, "wrong", f"wrong: {path} is {_short(output)}, expected {_short(expected)}")

    def _leaves(self, tree: Any, path: str) -> Iterator[str]:
        if path in self.ignore or _INDEX.sub("[*]", path) in self.ignore:
            return
        if isinstance(tree, dict) and tree:
            for key, item in tree.items():
                yield from self._leaves(item, f"{path}.{key}")
        elif isinstance(tree, list) and tree:
            for place, item in enumerate(tree):
                yield from self._leaves(item, f"{path}[{place}]")
        else:
            yield path

    def _same(self, output: Any, expected: Any, tolerance: float | None) -> bool:
        if _is_number(output) and _is_number(expected):
            allowed = self.tolerance if tolerance is None else tolerance
            return is_within(output, expected, allowed * abs(expected) if self.relative else allowed)
        return same_json(output, expected)

    def _aligned(self, output: list[Any], expected: list[Any], path: str) -> list[Any]:
        """Return the items of the output, those that equal an expected item in its place."""
        rest = list(output)
        places: list[Any] = []
        for place, item in enumerate(expected):
            at = f"{path}[{place}]"
            match = next(
                (i for i, ours in enumerate(rest) if not any(f.kind for f in self.fields(ours, item, at))), None
            )
            places.append(_MISSING if match is None else rest.pop(match))
        filled = [rest.pop(0) if item is _MISSING and rest else item for item in places]
        return [*filled, *rest]


def json_diff(
    *,
    tolerance: float = 0.0,
    relative: bool = False,
    tolerances: Mapping[str, float] = EMPTY,
    ignore: Collection[str] = (),
    unordered: Collection[str] = (),
    pass_at: float = 1.0,
) -> Callable[[object, object], Score]:
    """The share of JSON fields that agree, of all fields of the output and of expected. Text is read as JSON first.

    Paths are written as in "$.items[0].price" (RFC 9535); "$.items[*].price" stands for all items. Metrics: the number
    of `wrong`, `missing` and `unexpected` fields.

    Args:
        tolerance: The largest accepted difference of numbers.
        relative: Take tolerances as shares of the expected number.
        tolerances: Tolerances of single paths, instead of `tolerance`.
        ignore: Paths that are not compared, with everything under them.
        unordered: Paths of arrays whose order does not matter.
        pass_at: The share from which it passes.
    """
    for number in (tolerance, *tolerances.values()):
        if not (math.isfinite(number) and number >= 0):
            raise ConfigurationError(f"a tolerance must be a finite number of at least 0 (got {number})")
    if not 0.0 < pass_at <= 1.0:
        raise ConfigurationError(f"pass_at of json_diff must be above 0 and at most 1 (got {pass_at})")
    if wrong := [path for path in (*tolerances, *ignore, *unordered) if not path.startswith("$")]:
        raise ConfigurationError(f"a path of json_diff must begin with $ (got {wrong[0]!r})")
    rules = _Rules(tolerance, relative, dict(tolerances), frozenset(ignore), frozenset(unordered))

    @evaluator(inline=True, name="json_diff", needs_expected=True)
    def score(output: Any, expected: Any) -> Score:
        try:
            found = to_json(as_json(output))
        except CodecError as error:
            return Score(0.0, False, f"the output is not JSON: {error.problem}")
        wanted = to_json(as_json(expected))
        fields = list(rules.fields(found, wanted))
        if not fields and not same_json(found, wanted):
            raise NothingToScoreError("json_diff: every field is ignored, so nothing was compared")
        different = [field for field in fields if field.kind]
        value = 1 - len(different) / len(fields) if fields else 1.0
        counts = {kind: sum(field.kind == kind for field in different) for kind in _KINDS}
        reason = "; ".join(field.text for field in different[:_SHOWN])
        if len(different) > _SHOWN:
            reason += f"; and {len(different) - _SHOWN} more"
        metrics = [Metric(kind, count, higher_is_better=False) for kind, count in counts.items()]
        return Score(value, value >= pass_at, reason, metrics)

    return score


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
