"""The types of values that cross a boundary as JSON: named where a value is written, restored where it is read.

A value is named by what it is made of: module and qualified name of its class, and the names of its parts, so that
`Box(Colour.RED)` and `Box("red")` have different names. The reader tries the annotation of the place first, then the
types that its code mentions, and accepts only a value that has the name it was sent with. No type is imported because
a message names it. A name that nothing or more than one thing fits is an error: compared as plain JSON, a correct
answer could silently be scored as wrong.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, Literal
from uuid import UUID

from fairtrial.base.codec import from_json, to_json
from fairtrial.base.frozen import FrozenDict, FrozenList
from fairtrial.data.sample import Sample
from fairtrial.data.session.views import kind_of, same_kind
from fairtrial.errors import CodecError, ConfigurationError

type TypeName = str | list[Any]
"""The name of a value's type: empty for plain JSON, `module:Name` for a class whose parts are plain JSON, else a list
with the name and those of the parts: one for all of them, one for each, or an object of those that are not plain."""
type Place = Literal["input", "expected", "output"]
"""Where a value stands in a trial."""

PLAIN: tuple[TypeName, TypeName] = ("", "")
"""The names of a sample with plain JSON values."""
OUTPUT_TYPE = "output_type"
"""The key in a result's metadata of the name of its output, where the output type of the task would not restore it."""
VARIOUS = "..."
"""The name for samples whose types differ: no value has it."""

_JSON_SCALARS = frozenset({str, int, float, bool, type(None)})
_STANDARD: tuple[type, ...] = (
    *(bytes, Decimal, UUID, datetime, date, time, timedelta),
    *(Path, PosixPath, PurePosixPath, PureWindowsPath),
)
_PLACES: Mapping[Place, tuple[str, str]] = {
    "input": ("the input of the sample", "input_type"),
    "expected": ("the expected value of the sample", "expected_type"),
    "output": ("the output", "output_type"),
}
_BY_POSITION: tuple[Place, ...] = ("output", "expected")  # The parameters of an evaluator that names no place.


class UnknownTypeError(ConfigurationError):
    """The type of a value that was sent as JSON cannot be resolved."""


def value_type_name(value: Any) -> TypeName:
    """Return the name of a value's type; empty if JSON preserves the value."""
    try:
        return _name(value)
    except RecursionError:
        raise CodecError("nested too deeply, or it contains itself") from None


def _name(value: Any) -> TypeName:
    kind: Any = type(value)
    if kind in _JSON_SCALARS:
        return ""
    if issubclass(kind, enum.Enum) or kind in _STANDARD:
        return _class_name(kind)
    if isinstance(value, list):
        name = "list" if kind in (list, FrozenList) else _class_name(kind)
        return _with_parts(name, [_name(item) for item in value], plain="list")
    if isinstance(value, dict):
        return _mapping_name(value, "dict" if kind in (dict, FrozenDict) else _class_name(kind))
    if isinstance(value, set | frozenset):
        texts = {json.dumps(_name(item)) for item in value}
        return _with_parts(_class_name(kind), [json.loads(text) for text in sorted(texts)])
    if kind is tuple:
        return _with_parts("tuple", [_name(item) for item in value])
    names = _field_names(kind)
    fields = {name: part for name in names if (part := _name(getattr(value, name, None)))}
    return [_class_name(kind), fields] if fields else _class_name(kind)


def _mapping_name(value: Mapping[Any, Any], name: str) -> TypeName:
    names = [_name(item) for item in value.values()]
    if not any(names) and all(type(key) is str for key in value):
        return "" if name == "dict" else name
    parts = dict(zip((key if type(key) is str else str(to_json(key)) for key in value), names, strict=True))
    keys = {"" if type(key) is str else _key_name(key) for key in value}
    key_name: TypeName = next(iter(keys), "") if len(keys) < 2 else sorted(keys)
    shared = names[0]
    if any(part != shared for part in names):
        return [name, key_name, {key: part for key, part in parts.items() if part}]
    return [name, key_name, shared]


def _with_parts(name: str, parts: list[TypeName], plain: str = "") -> TypeName:
    if not any(parts):
        return "" if name == plain else name
    return [name, *parts] if any(part != parts[0] for part in parts) else [name, parts[0]]


def _key_name(key: Any) -> str:
    kind: Any = type(key)
    return _class_name(kind)


@functools.lru_cache(maxsize=4096)
def _class_name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    # Paths are defined in `pathlib._local` in one version of Python and in `pathlib` in others.
    return f"{kind.__module__.partition('.')[0]}:{kind.__qualname__}" if kind in _STANDARD else kind_of(kind)


@functools.lru_cache(maxsize=4096)
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of the fields that the codec writes."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    if issubclass(kind, tuple):
        return tuple(getattr(kind, "_fields", ()))
    return tuple(getattr(kind, "model_fields", ()))


def sample_type_names(samples: Iterable[Sample[Any, Any]]) -> tuple[TypeName, TypeName]:
    """Return the names of the inputs and of the expected values of samples; `...` if they differ."""
    inputs, expected = set(), set()
    for sample in samples:
        inputs.add(json.dumps(value_type_name(sample.input)))
        if sample.expected is not None:  # Nothing has no type.
            expected.add(json.dumps(value_type_name(sample.expected)))
    return _only(inputs), _only(expected)


def _only(names: set[str]) -> TypeName:
    return VARIOUS if len(names) > 1 else json.loads(next(iter(names), '""'))


def shown(name: TypeName) -> str:
    """Return a name as text for messages: `list[module.Problem]`."""
    if isinstance(name, str):
        return name.removeprefix("*.").replace(":", ".") or "JSON"
    head, *parts = name
    if parts and isinstance(parts[-1], dict):
        inner = ", ".join(f"{key}: {shown(part)}" for key, part in parts[-1].items())
    else:
        inner = ", ".join(shown(part) for part in parts)
    return f"{shown(head)}[{inner}]"


def same_name(one: Any, other: Any) -> bool:
    """Return whether two names denote one type. A script is `__main__` in one process and a module in another."""
    if isinstance(one, str) and isinstance(other, str):
        return same_kind(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_name, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_name(part, other[key]) for key, part in one.items())
    return False


def changes_parts(sent: TypeName, read: TypeName) -> bool:
    """Return whether a value was read as plain JSON, or as its own class with parts of other types."""
    roots = [name if isinstance(name, str) else name[0] for name in (sent, read)]
    return not same_name(sent, read) and (not read or same_name(*roots))


def restores(kind: Any, name: TypeName, output: Any) -> bool:
    """Return whether an output with this name, written as JSON and read as this type, has its name again."""
    if kind is object or kind is Any:
        return not name
    if isinstance(kind, type) and kind in _JSON_SCALARS:
        return type(output) is kind
    try:
        cached = (kind, json.dumps(name))
        known = _RESTORED.get(cached)
    except TypeError:  # Such as Annotated with a list in it.
        return _read_as(kind, to_json(output), name) is not _REFUSED
    if known is None:
        if len(_RESTORED) >= _MOST_RESTORED:
            _RESTORED.clear()
        known = _RESTORED[cached] = _read_as(kind, to_json(output), name) is not _REFUSED
    return known


_RESTORED: dict[Any, bool] = {}
_MOST_RESTORED = 1024
_REFUSED = object()


def _read_as(kind: Any, tree: Any, name: TypeName) -> Any:
    """Return JSON read as a type if it then has this name."""
    try:
        value = from_json(kind, tree)
    except CodecError:
        return _REFUSED
    return value if same_name(value_type_name(value), name) else _REFUSED


class KnownTypes:
    """The types by which the code of a task and its evaluator can read values.

    Args:
        task: The task, whose first parameter is the place of the input and whose result that of the output.
        evaluator: The evaluator, with the places `output`, `expected` and `input`, by name or in this order.
        input: Declared types of inputs; an `object` declares nothing.
        expected: Declared types of expected values.
        output: Declared types of outputs.
        values: Values of the process whose classes count too, such as those of its own dataset.
    """

    def __init__(
        self,
        task: Any = None,
        evaluator: Any = None,
        *,
        input: Any = None,
        expected: Any = None,
        output: Any = None,
        values: Iterable[Any] = (),
    ) -> None:
        hints, judged = hints_of(task), hints_of(evaluator)
        given = _parameters(evaluator)
        by_place = {place: judged.get(place) for place in _PLACES}
        if not set(given) & set(_PLACES):  # Bound by position, not by name.
            for place, parameter in zip(_BY_POSITION, given, strict=False):
                by_place[place] = judged.get(parameter)
        first = next(iter(_parameters(task)), "")
        returned = hints.get("return")
        self._places: Mapping[Place, tuple[Any, ...]] = {
            "input": _declared(input, hints.get(first), by_place["input"]),
            "expected": _declared(expected, by_place["expected"], output, returned, by_place["output"]),
            "output": _declared(output, returned, by_place["output"], by_place["expected"]),
        }
        self.evaluator_reads_input = bool({"input", "sample"} & set(given))
        mentioned = [kind for kinds in self._places.values() for kind in kinds]
        mentioned += [*hints.values(), *judged.values()]
        self._types: dict[str, list[Any]] = {}
        for kind in (*_STANDARD, *mentioned, *(kind for value in values for kind in _classes(value))):
            for part in _parts(kind):
                for root in _roots(part):
                    same = self._types.setdefault(root, [])
                    if part not in same:
                        same.append(part)

    def read(self, name: TypeName, value: Any, place: Place) -> Any:
        """Return a value that was sent as JSON under this name; the value itself for an empty name.

        Raises:
            UnknownTypeError: no type is known by which it has this name, or several are that disagree.
        """
        if not name or value is None:
            return value
        tree = to_json(value)
        for kind in self._places[place]:
            if (found := _read_as(kind, tree, name)) is not _REFUSED:
                return found
        found = self._assembled(name, tree, place)
        if same_name(value_type_name(found), name):
            return found
        raise _unknown(name, place)

    def _assembled(self, name: TypeName, tree: Any, place: Place) -> Any:
        """Build a container from its parts; read a class as the one type that fits."""
        if not name:
            return from_json(object, tree)
        root, parts = (name, []) if isinstance(name, str) else (name[0], name[1:])
        if root in ("list", "tuple", "set", "frozenset") and isinstance(tree, list):
            sequence = [
                self._assembled(part, item, place) for part, item in zip(_spread(parts, tree, root), tree, strict=True)
            ]
            return _CONTAINERS[root](sequence)
        if root == "dict" and isinstance(tree, dict) and len(parts) == 2:
            key_name, shared = parts
            return {
                self._key(key_name, key, place): self._assembled(
                    shared.get(key, "") if isinstance(shared, dict) else shared, item, place
                )
                for key, item in tree.items()
            }
        readings: list[Any] = []
        for kind in self._named(root):
            value = _read_as(kind, tree, name)
            if value is _REFUSED and parts:
                value = self._from_fields(kind, parts[0], tree, name, place)
            if value is not _REFUSED and not any(_is_same(value, other) for other in readings):
                readings.append(value)
        if len(readings) == 1:
            return readings[0]
        raise _unknown(name, place) if not readings else _ambiguous(name, place)

    def _from_fields(self, kind: Any, parts: Any, tree: Any, name: TypeName, place: Place) -> Any:
        """Build a record from fields whose annotations do not say what they hold, such as a bare type parameter."""
        if not (dataclasses.is_dataclass(kind) and isinstance(parts, dict) and isinstance(tree, dict)):
            return _REFUSED
        try:
            value: Any = dataclasses.replace(
                from_json(typing.cast(Any, kind), tree),
                **{field: self._assembled(part, tree[field], place) for field, part in parts.items()},
            )
        except (CodecError, UnknownTypeError, KeyError, TypeError, ValueError):
            return _REFUSED
        return value if same_name(value_type_name(value), name) else _REFUSED

    def _named(self, root: TypeName) -> list[Any]:
        return [kind for known, kinds in self._types.items() if same_name(known, root) for kind in kinds]

    def _key(self, name: TypeName, key: str, place: Place) -> Any:
        if name == "":
            return from_json(str, key)
        for kind in [int] if name == "int" else self._named(name):
            try:
                return next(iter(from_json(dict[kind, object], {key: None})))  # type: ignore[valid-type]
            except CodecError:
                continue
        raise _unknown(name, place)


_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _spread(parts: list[TypeName], tree: list[Any], root: str) -> list[TypeName]:
    """Return a name for each item of a container."""
    if len(parts) < 2:
        return (parts or [""]) * len(tree)
    if len(parts) != len(tree) or root in ("set", "frozenset"):
        return [VARIOUS] * len(tree)  # The items of a set have no order, so their names say nothing of one of them.
    return parts


def _is_same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        return False  # Comparing calls user code.


def _unknown(name: TypeName, place: Place) -> UnknownTypeError:
    what, option = _PLACES[place]
    return UnknownTypeError(
        f"{what} has type {shown(name)}, which cannot be resolved here: pass {option}=..., or annotate the task"
    )


def _ambiguous(name: TypeName, place: Place) -> UnknownTypeError:
    what, option = _PLACES[place]
    return UnknownTypeError(
        f"{what} has type {shown(name)}, and several types of this name fit it: pass {option}=..., or annotate the task"
    )


def _declared(*kinds: Any) -> tuple[Any, ...]:
    return tuple(kind for kind in kinds if kind is not None and kind is not object and kind is not Any)


def _parts(kind: Any) -> Iterator[Any]:
    """Return a type, the members of a union, and the type arguments."""
    if isinstance(kind, typing.TypeAliasType):
        kind = kind.__value__
    if isinstance(kind, type) or typing.get_origin(kind) not in (None, typing.Union, types.UnionType):
        yield kind
    for argument in typing.get_args(kind):
        yield from _parts(argument)


def _roots(kind: Any) -> Iterator[str]:
    base = typing.get_origin(kind) or kind
    if isinstance(base, type) and base not in _JSON_SCALARS:
        yield _class_name(base)


def _classes(value: Any) -> Iterator[type]:
    """Return the classes of a value and of its parts."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield type(key)
            yield from _classes(item)
    elif isinstance(value, list | set | frozenset) or type(value) is tuple:
        for item in value:
            yield from _classes(item)
    elif type(value) not in _JSON_SCALARS:
        kind: Any = type(value)
        yield kind
        for name in _field_names(kind):
            yield from _classes(getattr(value, name, None))


def input_type_of(task: Any) -> Any:
    """Return the annotated input type of a task if it is not plain JSON; else `object`."""
    kind = hints_of(task).get(next(iter(_parameters(task)), ""), object)
    return object if _is_plain(kind) else kind


def _is_plain(kind: Any) -> bool:
    """Return whether JSON preserves the values of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any, list, dict) or kind in _JSON_SCALARS or origin is typing.Literal:
        return True
    if origin is dict and args[0] is not str:
        return False
    return origin in (list, dict, typing.Union, types.UnionType) and all(map(_is_plain, args))


def _parameters(fn: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return ()  # Nothing, or a built-in without a signature.


def hints_of(fn: Any) -> dict[str, Any]:
    """Return the annotated types of a callable, by parameter name."""
    if fn is None:
        return {}
    while isinstance(fn, functools.partial):
        fn = fn.func
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004 - its annotations, not a test
    try:
        return typing.get_type_hints(target)
    except Exception:
        return {}  # Annotations that cannot be read say nothing.
