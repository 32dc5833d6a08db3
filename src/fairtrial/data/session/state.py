"""State slices of a session, changed by events through reducers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import RLock
from typing import Any


@dataclass(frozen=True, slots=True)
class SliceState:
    """The state of a slice when the session was read: the name of its type, and its values."""

    kind: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StateView[T]:
    """The values of a slice, oldest first."""

    values: tuple[T, ...]

    def all(self) -> tuple[T, ...]:
        """All of them."""
        return self.values

    def latest(self) -> T | None:
        """The last one, or None."""
        return self.values[-1] if self.values else None

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Those for which the predicate is true."""
        return tuple(value for value in self.values if predicate(value))


class StateSlices:
    """The states of a session's slices and their reducers."""

    __slots__ = ("__weakref__", "_changed", "_lock", "_reducers", "_states")

    def __init__(self) -> None:
        self._lock = RLock()  # A reducer may ask for a state.
        self._states: dict[type, tuple[Any, ...]] = {}
        self._reducers: list[tuple[type, type, Any]] = []
        self._changed: dict[type, None] = {}

    def seed_once(self, kind: type) -> None:
        """Give a slice an empty state, unless it has one."""
        with self._lock:
            self._states.setdefault(kind, ())

    def set(self, kind: type, values: Iterable[Any]) -> None:
        """Replace the state of a slice."""
        with self._lock:
            self._states[kind] = tuple(values)
            self._changed[kind] = None

    def get(self, kind: type) -> tuple[Any, ...] | None:
        """Return the state of a slice; None if it has none."""
        with self._lock:
            return self._states.get(kind)

    def register(self, kind: type, event: type, reducer: Any) -> None:
        """Add a reducer that changes the state of a slice for events of a type."""
        with self._lock:
            self._reducers.append((kind, event, reducer))

    def reduce(self, event: object) -> None:
        """Apply the reducers of an event."""
        for kind, wanted, reducer in tuple(self._reducers):
            if isinstance(event, wanted):
                with self._lock:
                    self.set(kind, reducer(self._states.get(kind, ()), event))

    def take_changed(self) -> list[tuple[type, tuple[Any, ...]]]:
        """Return the states that have changed since this was last called."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return [(kind, self._states[kind]) for kind in changed]


class SliceMutator[T]:
    """Changes the state of one slice; returned by `session.mutate(kind)`."""

    __slots__ = ("_kind", "_slices")

    def __init__(self, slices: StateSlices, kind: type[T]) -> None:
        self._slices = slices
        self._kind = kind

    def seed(self, values: Iterable[T] = ()) -> None:
        """Replace the state."""
        self._slices.set(self._kind, values)

    def register[E](self, event: type[E], reducer: Callable[[tuple[T, ...], E], Iterable[T]]) -> None:
        """Add a reducer for events of a type: `reducer(state, event)` returns the next state.

        Events are those that this session records, and those that others publish on its dispatcher. A reducer that
        raises on a recorded event raises where it was recorded.
        """
        self._slices.register(self._kind, event, reducer)
