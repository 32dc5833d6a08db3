"""Types of samples that are sent as JSON: named by the client and resolved by the worker, never imported.

A request has the type names of its input and its expected value. A worker resolves them among the types that its loop,
task and evaluator mention in their annotations. If there is none, the trial is an error: compared as plain JSON, a
correct answer could silently be scored as wrong.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError
from fairtrial.frozen import FrozenDict, FrozenList

_JSON_SCALARS = frozenset({str, int, float, bool, type(None)})
_SEQUENCES = frozenset({list, FrozenList, tuple})
_MAPPINGS = frozenset({dict, FrozenDict})
_STANDARD = {
    kind.__qualname__: kind for kind in (tuple, set, frozenset, bytes, Decimal, UUID, datetime, date, time, timedelta)
}


class UnknownTypeError(ConfigurationError):
    """The type of a value that was sent as JSON cannot be resolved."""


def value_type_name(value: Any) -> str:
    """Return the name of a value's type; empty if JSON preserves the value."""
    kind = type(value)
    if kind in _JSON_SCALARS:
        return ""
    if kind in _SEQUENCES:
        inner = _shared(value)
        if kind is tuple:
            return f"tuple[{inner}, ...]" if inner else "tuple"
        return f"list[{inner}]" if inner else ""
    if kind in _MAPPINGS:
        inner = _shared(value.values())
        return f"dict[str, {inner}]" if inner else ""
    return str(kind.__qualname__)


def sample_type_names(samples: Iterable[Sample[Any, Any]]) -> tuple[str, str]:
    """Return the type names of the inputs and of the expected values of samples; `...` if they differ."""
    inputs, expected = set(), set()
    for sample in samples:
        inputs.add(value_type_name(sample.input))
        expected.add("" if sample.expected is None else value_type_name(sample.expected))
    return _only(inputs), _only(expected)


def _only(names: set[str]) -> str:
    return next(iter(names), "") if len(names) < 2 else "..."


def _shared(values: Iterable[Any]) -> str:
    """Return the type name of all values; `...` if they differ."""
    return _only({value_type_name(value) for value in values})


def type_name(kind: Any) -> str:
    """Return the type name to send for a value of this type; empty for plain JSON."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # A value has one of the types, and the codec tells which.
        return next(filter(None, map(type_name, args)), "")
    if origin is not None and args:
        inner = type_name(args[-1] if args[-1] is not Ellipsis else args[0])
        if origin is tuple:
            return f"tuple[{inner}, ...]" if inner else "tuple"
        if origin in (list, dict) or (isinstance(origin, type) and not hasattr(origin, "__dataclass_fields__")):
            shape = "dict[str, {}]" if isinstance(origin, type) and issubclass(origin, Mapping) else "list[{}]"
            return shape.format(inner) if inner else ""
        kind = origin
    if kind in _JSON_SCALARS or kind in _SEQUENCES - {tuple} or kind in _MAPPINGS or kind is object:
        return ""
    return str(getattr(kind, "__qualname__", ""))


class KnownTypes:
    """The types that a worker's loop, task and evaluator mention, by name.

    Args:
        sources: Functions and objects whose annotations count, and types themselves.
    """

    def __init__(self, *sources: Any) -> None:
        self._types: dict[str, Any] = dict(_STANDARD)
        for source in sources:
            for kind in _mentioned(source):
                if name := type_name(kind):
                    self._types.setdefault(name, kind)

    def find(self, name: str, what: str, option: str) -> Any:
        """Return the type with this name; `object`, plain JSON, for an empty one.

        Raises:
            UnknownTypeError: the name cannot be resolved.
        """
        if not name:
            return object
        if name not in self._types:
            raise UnknownTypeError(
                f"{what} of the sample has type {name}, which this worker cannot resolve: pass "
                f"{option}={name}, or annotate the task"
            )
        return self._types[name]


def input_type_of(task: Any) -> Any:
    """Return the annotated input type of a task if it is not plain JSON; else `object`."""
    try:
        first = next(iter(inspect.signature(task).parameters), "")
    except (TypeError, ValueError):
        return object  # A built-in without a signature.
    kind = _hints(task).get(first, object)
    return kind if type_name(kind) else object


def _mentioned(source: Any) -> Iterator[Any]:
    if source is None or source is object:
        return
    if isinstance(source, type) or typing.get_origin(source) is not None:
        yield source
        return
    yield from _hints(source).values()


def _hints(fn: Any) -> dict[str, Any]:
    """Return the annotated types of a callable, by parameter name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004 - its annotations, not a test
    try:
        return typing.get_type_hints(target)
    except Exception:
        return {}  # Annotations that cannot be read say nothing.
