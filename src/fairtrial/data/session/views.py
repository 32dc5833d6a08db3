"""Read what a session recorded: state, slices, views."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath
from threading import RLock
from typing import Any, NamedTuple, Protocol, cast, get_origin, runtime_checkable
from uuid import UUID

from fairtrial.base.codec import from_json, to_json
from fairtrial.base.codec.scalars import name_of
from fairtrial.base.frozen import FrozenDict, freeze
from fairtrial.data.session.trajectory import ChatMessage, Trajectory
from fairtrial.errors import CodecError, SessionError


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


JUDGE = "judge"
"""The actor under which judges record what they do."""

USER = "user"
"""The actor under which the simulated user of a conversation records what it says and does."""

# What a simulated user does for itself: evaluators of calls and tools judge the agent.
_OWN_WORK = frozenset(
    f"fairtrial:{name}" for name in ("PromptExecuted", "ToolInvoked", "ModelCallFailed", "OutputRepaired", "Retrieved")
)


def _is_of_task(envelope: Envelope) -> bool:
    """Return whether evaluators see an event: not what judges did, and of a simulated user what it said."""
    return envelope.actor != JUDGE and (envelope.actor != USER or envelope.kind not in _OWN_WORK)


class Envelope(NamedTuple):
    """One recorded event: its time, actor, attempt and span, and its data as immutable JSON.

    `kind` names the event's type as `module:qualified name`; it is compared, never imported.
    """

    seq: int
    time: float
    actor: str
    attempt: int
    span_id: str | None
    parent_id: str | None
    kind: str
    data: Any


@runtime_checkable
class SliceView[T](Protocol):
    """The events of one type, oldest first."""

    def all(self) -> tuple[T, ...]:
        """All of them."""
        ...

    def latest(self) -> T | None:
        """The last one, or None."""
        ...

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Those for which the predicate is true."""
        ...


@runtime_checkable
class SessionView(Protocol):
    """The read-only record of a trial, as evaluators see it."""

    @property
    def session_id(self) -> UUID:
        """The unique id of the session."""
        ...

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels such as the run and the sample."""
        ...

    @property
    def trajectory(self) -> Trajectory:
        """The recorded messages."""
        ...

    def __getitem__[T](self, slice_type: type[T]) -> SliceView[T]:
        """The events of this type."""
        ...


class RecordedSlice[T]:
    """The events of one type in a record: decoded once where nothing in them can change, else each time."""

    __slots__ = ("__cached", "__envelopes", "__kind")

    def __init__(self, kind: type[T], envelopes: tuple[Envelope, ...]) -> None:
        self.__kind = kind
        self.__envelopes = envelopes
        self.__cached: tuple[T, ...] | None = None

    def all(self) -> tuple[T, ...]:
        """All of them."""
        if self.__cached is not None:
            return self.__cached
        events = tuple(_decode(self.__kind, envelope) for envelope in self.__envelopes)
        if all(is_immutable(event) for event in events):
            self.__cached = events
        return events

    def latest(self) -> T | None:
        """The last one, or None."""
        return _decode(self.__kind, self.__envelopes[-1]) if self.__envelopes else None

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Those for which the predicate is true."""
        return tuple(event for event in self.all() if predicate(event))

    def __len__(self) -> int:
        return len(self.__envelopes)

    def __repr__(self) -> str:
        return f"<{len(self)} x {name_of(self.__kind)}>"


class RecordedView:
    """A session as it stood at one moment, from memory or from a snapshot: both read the same record.

    It shows what the task did, and what a simulated user said to it. The work of judges and the model calls and tool
    calls of a simulated user are in the record too, and `everything()` shows them: evaluators judge the task, and must
    find the same whether or not it has been judged before.
    """

    __slots__ = ("__by_kind", "__envelopes", "__record", "__session_id", "__slices", "__tags")

    def __init__(
        self,
        session_id: UUID | Callable[[], UUID],
        tags: Mapping[str, str],
        record: tuple[Envelope, ...],
        *,
        attempt: int | None = None,
        judges: bool = False,
    ) -> None:
        self.__session_id = session_id
        self.__tags = tags
        self.__record = record
        self.__envelopes = tuple(
            envelope
            for envelope in record
            if (judges or _is_of_task(envelope)) and (attempt is None or envelope.attempt == attempt)
        )
        self.__by_kind: dict[str, list[Envelope]] | None = None
        self.__slices: dict[type, RecordedSlice[Any]] = {}

    @property
    def session_id(self) -> UUID:
        """The unique id of the session."""
        named = self.__session_id
        return named if isinstance(named, UUID) else named()

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels such as the run and the sample."""
        return self.__tags

    @property
    def envelopes(self) -> tuple[Envelope, ...]:
        """Every event in view with its circumstances, oldest first."""
        return tuple(found._replace(data=freeze(found.data)) for found in self.__envelopes)

    @property
    def trajectory(self) -> Trajectory:
        """The recorded messages."""
        return Trajectory(self[ChatMessage].all())

    def view(self, *, attempt: int | None = None) -> RecordedView:
        """The task's side of the record, of one attempt if one is named."""
        return RecordedView(self.__session_id, self.__tags, self.__record, attempt=attempt)

    def everything(self) -> RecordedView:
        """The whole record, judges included."""
        return RecordedView(self.__session_id, self.__tags, self.__record, judges=True)

    def __getitem__[T](self, slice_type: type[T]) -> SliceView[T]:
        found = self.__slices.get(slice_type)
        if found is None:
            found = self.__slices[slice_type] = RecordedSlice(slice_type, self.__select(slice_type))
        return cast("SliceView[T]", found)

    def query[T](self, kind: type[T]) -> SliceView[T]:
        """The state of a slice as the session had it; where it had none, the recorded events of this type."""
        wanted = kind_of(get_origin(kind) or kind)
        for found in reversed(self[SliceState].all()):
            if same_kind(found.kind, wanted):
                return StateView(from_json(tuple[kind, ...], to_json(found.values), frozen=True))  # type: ignore[valid-type]
        return self[kind]

    def __select(self, kind: type) -> tuple[Envelope, ...]:
        if self.__by_kind is None:
            by_kind: dict[str, list[Envelope]] = {}
            for envelope in self.__envelopes:
                by_kind.setdefault(envelope.kind, []).append(envelope)
            self.__by_kind = by_kind
        wanted = kind_of(get_origin(kind) or kind)  # Events of Box[int] are recorded as Box.
        chosen = [envelope for name, group in self.__by_kind.items() if same_kind(name, wanted) for envelope in group]
        return tuple(sorted(chosen, key=lambda envelope: envelope.seq))

    def __reduce__(self) -> Any:
        return _view_in_child, (self.session_id, dict(self.__tags), self.__record, self.__envelopes)

    def __repr__(self) -> str:
        return f"<SessionView {self.session_id}: {len(self.__envelopes)} events>"


def _view_in_child(
    session_id: UUID, tags: Mapping[str, str], record: tuple[Envelope, ...], envelopes: tuple[Envelope, ...]
) -> RecordedView:
    view = RecordedView(session_id, FrozenDict(tags), record)
    view._RecordedView__envelopes = envelopes  # type: ignore[attr-defined]  # as it was filtered where it came from
    return view


_KINDS: dict[type, str] = {}


def kind_of(kind: type) -> str:
    """Return the name under which events of a type are recorded."""
    name = _KINDS.get(kind)
    if name is None:
        name = _KINDS[kind] = _name_of(kind)
    return name


def _name_of(kind: type) -> str:
    """A script is `__main__` here and an ordinary module in a worker, under a package nobody knows here: its types are
    recorded as `*.script:Type`. Types of this library are recorded as `fairtrial:Type`, wherever they are defined.
    """
    module = kind.__module__
    if module.startswith("fairtrial."):
        return f"fairtrial:{kind.__qualname__}"
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec is not None else f"*.{Path(getattr(main, '__file__', None) or '__main__').stem}"
    return f"{module}:{kind.__qualname__}"


def same_kind(one: str, other: str) -> bool:
    """Return whether two names denote one type: `evals.support:Step` is `*.support:Step` of a script.

    A script's types are `*.__main__:Step` in the child process of an isolated call, which does not know its file.
    """
    return one == other or _is_script_type(one, other) or _is_script_type(other, one)


def _is_script_type(script: str, name: str) -> bool:
    if not script.startswith("*."):
        return False
    module, _, kind = script.partition(":")
    unnamed = module == "*.__main__" and name.startswith("*.") and name.endswith(f":{kind}")
    return name == script[2:] or name.endswith(script[1:]) or unnamed


_IMMUTABLE = (str, int, float, bytes, type(None), date, time, timedelta, Decimal, UUID, PurePath, Enum)


def is_immutable(value: object) -> bool:
    """Return whether a value is deeply immutable, so that it can be shared.

    Frozen lists do not count: they refuse to change, but some functions written in C (those of heapq) do not ask.
    """
    if isinstance(value, _IMMUTABLE):
        return True
    if isinstance(value, FrozenDict):
        return all(is_immutable(item) for item in value.values())
    if isinstance(value, tuple | frozenset):
        return all(is_immutable(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        frozen: bool = value.__dataclass_params__.frozen  # type: ignore[attr-defined]  # set by @dataclass
        return frozen and all(is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _decode[T](kind: type[T], envelope: Envelope) -> T:
    try:
        return from_json(kind, envelope.data, frozen=True)
    except CodecError as error:
        raise SessionError(
            f"event {envelope.seq} was recorded as {envelope.kind} and does not fit it now: {error}"
        ) from None
