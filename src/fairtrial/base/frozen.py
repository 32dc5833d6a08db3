"""Immutable mappings, the type of JSON, and a bounded cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, Never, Self

type JSON = bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None
"""What JSON can say, and nothing else."""


def _refuses(kind: str) -> Callable[..., Never]:
    def refuse(self: object, *_args: object, **_kwargs: object) -> Never:
        raise TypeError(f"this {kind} belongs to a frozen record and cannot be changed; copy it with {kind}(...) first")

    return refuse


class FrozenDict[K, V](dict[K, V]):
    """A dict whose content is fixed when it is made."""

    __slots__ = ()

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuses("dict")
    __ior__ = _refuses("dict")

    def __hash__(self) -> int:  # type: ignore[override]  # dict has none; what cannot change can have one
        return hash(frozenset(self.items()))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[K, V]:
        return {deepcopy(key, memo): deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (dict(self),))


class FrozenList[T](list[T]):
    """A list whose content is fixed when it is made."""

    __slots__ = ()

    __setitem__ = __delitem__ = append = clear = extend = insert = _refuses("list")
    pop = remove = reverse = sort = _refuses("list")
    __iadd__ = __imul__ = _refuses("list")

    def __hash__(self) -> int:  # type: ignore[override]  # list has none; what cannot change can have one
        return hash(tuple(self))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return [deepcopy(item, memo) for item in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (list(self),))


EMPTY: FrozenDict[str, Any] = FrozenDict()


def first_is[T: type](*kinds: type) -> Callable[[T], T]:
    """Let a dataclass refuse a first field of another type: fields in a wrong order must not mean something else.

    A field that it does not have is answered with the nearest one.
    """

    def checked(record: T) -> T:
        make = record.__init__  # type: ignore[misc]
        names = list(signature(make).parameters)[1:]
        name = next((one.name for one in fields(record) if one.init and not one.kw_only), "")

        @wraps(make)
        def init(self: Any, *args: Any, **named: Any) -> None:
            if args and kinds and not isinstance(args[0], kinds):
                expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise TypeError(f"{name} of {record.__name__} must be {expected} (got {args[0]!r})")
            try:
                make(self, *args, **named)
            except TypeError:
                unknown = next((one for one in named if one not in names), None)
                if unknown is None:
                    raise
                near = get_close_matches(unknown, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
                raise TypeError(f"{record.__name__} has no {unknown!r}; {hint}") from None

        record.__init__ = init  # type: ignore[misc]
        return record

    return checked


def allow_type_arguments(kind: type) -> None:
    """Let a frozen generic dataclass with slots be made as `Kind[int](...)`, which Python 3.12 cannot by itself.

    What `dataclass` generates there raises a TypeError when `typing` notes the type arguments on the new object, and
    `typing` expects an AttributeError.
    """

    def refuse(record: object, name: str, _value: Any = None) -> Never:
        raise FrozenInstanceError(f"cannot assign to field {name!r} of a {kind.__name__}")

    kind.__setattr__ = refuse  # type: ignore[method-assign]  # the class is complete only now
    kind.__delattr__ = refuse  # type: ignore[assignment,method-assign]


_PLAIN = frozenset({str, int, float, bool, type(None)})


def freeze(value: Any) -> Any:
    """The same value with every dict, list and set in it frozen."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list):
        return FrozenList([freeze(item) for item in value])
    if type(value) is tuple:
        return tuple(freeze(item) for item in value)
    return frozenset(value) if type(value) is set else value


class LruCache[K, V]:
    """The `limit` entries used last. Not thread-safe; callers that share one must lock it."""

    __slots__ = ("_entries", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """The value of a key, which counts as used; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Store a value and evict the least recently used one."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def items(self) -> list[tuple[K, V]]:
        """Every entry, the one used longest ago first."""
        return list(self._entries.items())

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
