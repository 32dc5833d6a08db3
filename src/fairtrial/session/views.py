"""Reading a session: nothing here can change it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable
from uuid import UUID

from fairtrial.codec import from_json
from fairtrial.errors import CodecError, SessionError
from fairtrial.session.trajectory import ChatMessage, Trajectory


class Envelope(NamedTuple):
    """One recorded event: when, by whom, in which attempt and span, and its data as JSON.

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
    """What evaluators see: the record of a trial, read-only."""

    @property
    def session_id(self) -> UUID:
        """The session's own name."""
        ...

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels such as the run and the sample."""
        ...

    @property
    def trajectory(self) -> Trajectory:
        """The recorded messages."""
        ...

    def __getitem__[T](self, kind: type[T]) -> SliceView[T]:
        """The events of this type."""
        ...


class RecordedSlice[T]:
    """Events decoded from the record each time they are not already known to be immutable."""

    __slots__ = ("_cached", "_envelopes", "_kind")

    def __init__(self, kind: type[T], envelopes: tuple[Envelope, ...]) -> None:
        self._kind = kind
        self._envelopes = envelopes
        self._cached: tuple[T, ...] | None = None

    def all(self) -> tuple[T, ...]:
        """All of them."""
        if self._cached is not None:
            return self._cached
        events = tuple(_decode(self._kind, envelope) for envelope in self._envelopes)
        if is_immutable(self._kind):
            self._cached = events
        return events

    def latest(self) -> T | None:
        """The last one, or None."""
        if self._cached is not None:
            return self._cached[-1] if self._cached else None
        return _decode(self._kind, self._envelopes[-1]) if self._envelopes else None

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Those for which the predicate is true."""
        return tuple(event for event in self.all() if predicate(event))

    def __len__(self) -> int:
        return len(self._envelopes)

    def __repr__(self) -> str:
        return f"<{len(self)} x {self._kind.__name__}>"


class RecordedView:
    """A session as it stood at one moment, from memory or from a snapshot: both read the same record."""

    __slots__ = ("__by_kind", "__envelopes", "__session_id", "__slices", "__tags")

    def __init__(
        self, session_id: UUID | Callable[[], UUID], tags: Mapping[str, str], envelopes: tuple[Envelope, ...]
    ) -> None:
        self.__session_id = session_id
        self.__tags = tags
        self.__envelopes = envelopes
        self.__by_kind: dict[str, list[Envelope]] | None = None
        self.__slices: dict[type, RecordedSlice[Any]] = {}

    @property
    def session_id(self) -> UUID:
        """The session's own name."""
        named = self.__session_id
        return named if isinstance(named, UUID) else named()

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels such as the run and the sample."""
        return self.__tags

    @property
    def envelopes(self) -> tuple[Envelope, ...]:
        """Every event with its circumstances, oldest first."""
        return self.__envelopes

    @property
    def trajectory(self) -> Trajectory:
        """The recorded messages."""
        return Trajectory(self[ChatMessage].all())

    def __getitem__[T](self, kind: type[T]) -> SliceView[T]:
        found = self.__slices.get(kind)
        if found is None:
            found = self.__slices[kind] = RecordedSlice(kind, self.__select(kind))
        return cast("SliceView[T]", found)

    def __select(self, kind: type) -> tuple[Envelope, ...]:
        if not self.__envelopes:
            return ()
        if self.__by_kind is None:
            self.__by_kind = {}
            for envelope in self.__envelopes:
                self.__by_kind.setdefault(envelope.kind, []).append(envelope)
        names = [name for name in self.__by_kind if same_kind(name, kind_of(kind))]
        chosen = [envelope for name in names for envelope in self.__by_kind[name]]
        return tuple(chosen if len(names) < 2 else sorted(chosen, key=lambda envelope: envelope.seq))

    def __repr__(self) -> str:
        return f"<SessionView {self.session_id}: {len(self.__envelopes)} events>"


@lru_cache(maxsize=1024)
def kind_of(kind: type) -> str:
    """The name under which events of a type are recorded."""
    module = kind.__module__
    if module == "__main__":  # A script is `__main__` here and an ordinary module in a worker.
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return f"{module}:{kind.__qualname__}"


def same_kind(one: str, other: str) -> bool:
    """True if both names mean one type: `evals.support:Step` is `support:Step` of a script run by hand."""
    if one == other:
        return True
    (module_a, _, name_a), (module_b, _, name_b) = one.partition(":"), other.partition(":")
    return name_a == name_b and (module_a.endswith("." + module_b) or module_b.endswith("." + module_a))


def is_immutable(kind: type) -> bool:
    """True if a decoded event of this type can be shared: nothing in it can be assigned."""
    if dataclasses.is_dataclass(kind):
        return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # set by @dataclass, not in the stubs
    return issubclass(kind, str | int | float | bytes | tuple | Enum)


def _decode[T](kind: type[T], envelope: Envelope) -> T:
    try:
        return from_json(kind, envelope.data, frozen=True)
    except CodecError as error:
        raise SessionError(
            f"event {envelope.seq} was recorded as {envelope.kind} and does not fit it now: {error}"
        ) from None
