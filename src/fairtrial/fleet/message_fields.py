"""Fast serialization of message bodies, with validation of everything that is read.

A worker handles ten thousand bodies a second, so they are written by the C encoder in one go wherever their values
are plain JSON, and read by a table of fields with a check of the exact type. The output is identical to the codec's:
values that are not plain JSON are encoded by the codec itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from fairtrial.base.codec import decode, dumps
from fairtrial.base.codec.encode import compact
from fairtrial.base.codec.escape import MARK, parse_json, restore
from fairtrial.base.frozen import EMPTY, FrozenDict, freeze
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import CodecError, ConfigurationError, NewerFormatError
from fairtrial.scoring.score import Metric, Score
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TrialKey
from fairtrial.trials.sample_types import TypeName

VERSION: Final = 1
MAX_INT: Final = (1 << 62) - 1
REQUIRED: Final[Any] = object()
_SPECIAL = re.compile("\\\\u0000|[\ufdd0\ud800-\udfff]")
_MARK = "\ufdd0".encode()


def write(tree: dict[str, Any]) -> bytes:
    """Return a body as JSON: the same text as the codec's, but faster where nothing needs escaping."""
    try:
        text = compact(tree)
    except (TypeError, ValueError, RecursionError):
        return dumps(tree).encode("utf-8")
    if text.isascii():
        if "\\u0000" not in text:
            return text.encode("ascii")
    elif _SPECIAL.search(text) is None:
        return text.encode("utf-8")
    return dumps(tree).encode("utf-8")


def read(data: bytes, what: str) -> dict[str, Any]:
    """Parse a body and check its format version.

    A body states the oldest format whose readers understand it, and fields that a reader does not know are ignored:
    clients and workers of two versions work together.

    Raises:
        NewerFormatError: only newer versions can read it. A mailbox hands such a message back.
        CodecError: the data is not a message body.
    """
    tree: dict[str, Any] = parse_json(data)
    if type(tree) is not dict:
        raise CodecError(f"{what} must be an object (got {type(tree).__name__})")
    # Escaped text is rare, so the whole body is traversed only if the escape marker occurs in it.
    if _MARK in data or b"\\u" in data:
        try:
            tree = restore(tree)
        except RecursionError:
            raise CodecError("nested too deeply") from None
    version = tree.pop("v", None)
    if type(version) is not int or version < 1:
        raise CodecError(f"the format of {what} must be a whole number from 1 (got {version!r})")
    if version > VERSION:
        raise NewerFormatError(f"{what} has format {version}, this version reads up to {VERSION}")
    return tree


class Field(NamedTuple):
    """The specification of one field of a body.

    Attributes:
        name: Its name.
        kind: The exact type it must have; `object` for any.
        least: The least number it may be; None for what is not a number.
        convert: Converts the JSON value. Raises ValueError, TypeError or `CodecError` if the value is invalid.
        expected: A description of valid values, for error messages.
        default: Its value when it is left out; without one it is required.
    """

    name: str
    kind: type
    least: int | None
    convert: Callable[[Any], Any] | None
    expected: str
    default: Any = REQUIRED


class BodyReader:
    """Reads the bodies of one type: checks the fields that it knows and ignores all others."""

    def __init__(self, what: str, *fields: Field) -> None:
        self._what = what
        self._fields: dict[str, tuple[Any, ...]] = {
            field.name: (place, *field[1:5]) for place, field in enumerate(fields)
        }
        self._defaults = [field.default for field in fields]
        self._required = {field.name for field in fields if field.default is REQUIRED}

    def read(self, data: bytes) -> list[Any]:
        """Return the values of the fields, in the order in which they were declared.

        Raises:
            CodecError: a field is missing or invalid. Null is accepted where it is the default.
        """
        tree = read(data, self._what)
        if not self._required <= tree.keys():
            name = next(name for name in self._fields if name in self._required and name not in tree)
            raise CodecError(f"{self._what} needs {name!r}, {self._fields[name][4]}")
        values = self._defaults.copy()
        known = self._fields.get
        for name, value in tree.items():
            if (field := known(name)) is None:
                continue
            place, kind, least, convert, expected = field
            if type(value) is kind and (least is None or least <= value <= MAX_INT):
                if convert is not None:
                    try:
                        value = convert(value)
                    except CodecError as error:
                        raise error.under(name) from None
                    except (TypeError, ValueError):
                        raise _mismatch(name, expected, value) from None
            elif kind is float and type(value) is int and 0 <= value <= MAX_INT:
                value = float(value)
            elif kind is not object and (value is not None or values[place] is not None):
                raise _mismatch(name, expected, value)
            values[place] = value
        return values


def _mismatch(name: str, expected: str, value: Any) -> CodecError:
    return CodecError(f"must be {expected} (got {repr(value)[:100]})").under(name)


def anything(name: str, default: Any = None) -> Field:
    """Declare a field of any JSON type; the default if absent."""
    return Field(name, object, None, None, "a value", default)


def text(name: str, default: str | None = REQUIRED, convert: Callable[[str], Any] | None = None) -> Field:
    """Declare a text field, optionally converted by a function."""
    return Field(name, str, None, convert, "text", default)


def flag(name: str) -> Field:
    """Declare a boolean field; False if absent."""
    return Field(name, bool, None, None, "true or false", False)


def whole(name: str, default: int = REQUIRED, *, least: int = 0) -> Field:
    """Declare an integer field of at least `least` that fits a database column."""
    return Field(name, int, least, None, f"a whole number of at least {least}", default)


def number(name: str, default: float | None = REQUIRED) -> Field:
    """Declare a field with a finite number of at least 0."""
    return Field(name, float, 0, None, "a finite number that is not negative", default)


def mapping(name: str, convert: Callable[[dict[str, Any]], Any] = freeze) -> Field:
    """Declare an object field, frozen when read; empty if absent."""
    return Field(name, dict, None, convert, "an object", EMPTY)


def array(name: str, expected: str, convert: Callable[[list[Any]], Any], default: Any = REQUIRED) -> Field:
    """Declare an array field, converted by a function."""
    return Field(name, list, None, convert, expected, default)


def check_count(value: Any) -> int:
    """Return the value if it is an integer of at least 0 that fits a database column."""
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError(value)
    return value


def check_cost(value: Any) -> float | None:
    """Return the value if it is None or a finite number of at least 0."""
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= MAX_INT:
        raise ValueError(value)
    return float(value)


def score_tree(score: Score) -> list[Any]:
    """Return a score as JSON."""
    metrics = [_metric_tree(metric) for metric in score.metrics]
    return [score.value, score.passed, score.reason, metrics, score.name]


def _metric_tree(metric: Metric) -> list[Any]:
    tree: list[Any] = [metric.name, metric.value, metric.weight, metric.metadata]
    if metric.bounds is not None:
        return [*tree, metric.passed, metric.reason, metric.higher_is_better, list(metric.bounds)]
    if metric.higher_is_better is not None:
        return [*tree, metric.passed, metric.reason, metric.higher_is_better]
    return tree if metric.passed is None and not metric.reason else [*tree, metric.passed, metric.reason]


def read_score(tree: list[Any]) -> Score:
    """Read a score."""
    value, passed, reason, metrics, name = tree
    if type(value) not in (int, float) or type(passed) is not bool or type(metrics) is not list:
        raise ValueError(tree)
    return Score(value, passed, reason, [_read_metric(metric) for metric in metrics] if metrics else (), name=name)


def _read_metric(tree: Any) -> Metric:
    name, value, weight, metadata, *verdict = tree
    if type(name) is not str or not {type(value), type(weight)} <= {int, float} or type(metadata) is not dict:
        raise ValueError(tree)
    return Metric(name, value, weight, metadata, *verdict)


def read_output(text: str) -> Any:
    """Check that the output is valid JSON: it is stored as it is."""
    try:
        return decode(object, text) if MARK in text else parse_json(text)
    except CodecError as error:
        raise error.under("output") from None


def read_key(tree: list[Any]) -> TrialKey:
    """Read the key of a trial."""
    run_id, experiment, sample_id, repeat = tree
    if type(run_id) is type(experiment) is type(sample_id) is str and sample_id:
        return TrialKey(run_id, read_experiment(experiment), sample_id, check_count(repeat))
    raise ValueError(tree)


def read_sample(tree: list[Any]) -> list[Any]:
    """Read input, expected value and metadata of a sample, and whether it has an expected value."""
    given, expected, metadata, *rest = tree
    has_expected = rest[0] if rest else True
    if type(metadata) is not dict or type(has_expected) is not bool or len(rest) > 1:
        raise ValueError(tree)
    return [given, expected, metadata, has_expected]


def read_usage(tree: list[Any]) -> TokenUsage:
    """Read what model calls used."""
    given, made, cached, cost, *others = tree
    reasoned, written = others or (0, 0)
    counts = (check_count(given), check_count(made), check_count(cached))
    return TokenUsage(*counts, check_cost(cost), check_count(reasoned), check_count(written))


def read_calls(tree: list[Any]) -> tuple[float | None, int, int, int, int]:
    """Read the cost of judges and four counts of calls."""
    cost, hits, unpriced, unpriced_judges, cut_off = tree
    counts = (check_count(hits), check_count(unpriced), check_count(unpriced_judges), check_count(cut_off))
    return check_cost(cost), *counts


def read_endings(tree: list[Any]) -> tuple[int, Mapping[str, int]]:
    """Read the number of refused calls and the unknown endings by name."""
    refused, unknown = tree
    if type(unknown) is not dict:
        raise ValueError(tree)
    return check_count(refused), {name: check_count(count) for name, count in unknown.items()}


def read_types(tree: list[Any]) -> tuple[TypeName, TypeName]:
    """Read the names of the types of input and expected value."""
    given, expected = tree
    return read_type_name(given), read_type_name(expected)


def read_type_name(tree: Any) -> TypeName:
    """Check the name of a type."""
    if type(tree) is not str and not (type(tree) is list and tree and type(tree[0]) is str):
        raise ValueError(tree)
    return tree


def read_tags(tree: dict[str, Any]) -> Mapping[str, str]:
    """Read labels."""
    if not all(type(value) is str for value in tree.values()):
        raise ValueError(tree)
    return FrozenDict(tree)


def one_of(allowed: frozenset[Any]) -> Callable[[str], str]:
    """Return a function that checks that a text is one of these."""

    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(value)
        return value

    return check


def usage_tree(usage: TokenUsage) -> list[Any]:
    """Return usage as JSON."""
    tree = [usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.cost_usd]
    if usage.reasoning_tokens or usage.cache_write_tokens:
        tree += [usage.reasoning_tokens, usage.cache_write_tokens]
    return tree


def snapshot_bytes(text: str) -> bytes:
    """Return the snapshot of a session."""
    return text.encode("utf-8", "surrogatepass")


def snapshot_text(snapshot: bytes) -> str:
    """Return the snapshot of a session as text."""
    try:
        return snapshot.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CodecError(f"a session snapshot must be valid UTF-8: {error.reason}").under("snapshot") from None


@functools.lru_cache(maxsize=1024)
def read_experiment(name: str) -> str:
    """Check the name of an experiment."""
    try:
        return Experiment(name).name
    except ConfigurationError as error:
        raise CodecError(str(error)[:200]) from None
