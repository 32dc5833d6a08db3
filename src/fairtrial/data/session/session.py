"""Sessions: the append-only record of a trial, safe to use from threads and tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from random import getrandbits
from threading import Lock
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from fairtrial.base.clock import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import to_json
from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.data.session.dispatcher import ControlDispatcher
from fairtrial.data.session.endings import CUT_OFF_REASONS, ending_of
from fairtrial.data.session.events import NO_USAGE, PromptExecuted, SpanClosed, TokenUsage
from fairtrial.data.session.snapshot import snapshot_bytes
from fairtrial.data.session.state import SliceMutator, SliceState, StateSlices, StateView
from fairtrial.data.session.trajectory import ChatMessage, Trajectory
from fairtrial.data.session.views import JUDGE, Envelope, RecordedView, SliceView, kind_of
from fairtrial.errors import CodecError, SessionError

_span: ContextVar[tuple[str | None, str | None]] = ContextVar("fairtrial_span", default=(None, None))


# The random bits of a version 4 UUID; the object itself is made only for those who ask.
_VERSION_BITS = ~((0xF << 76) | (0x3 << 62))
_VERSION_4 = (4 << 76) | (2 << 62)


_PROMPT_EXECUTED = kind_of(PromptExecuted)
_MAX_REASON = 60  # Characters of the name of an unknown ending.


class CallTotals(NamedTuple):
    """The token usage and cost of the model calls of a session.

    A call is unpriced if its cost is not known: its usage was not reported, or its model's price is not known.
    """

    usage: TokenUsage = NO_USAGE  # The task's.
    judge_cost_usd: float | None = None
    cache_hits: int = 0
    unpriced_calls: int = 0
    unpriced_judge_calls: int = 0
    cut_off_calls: int = 0  # Answers to the task that ended at a limit of tokens.
    refused_calls: int = 0  # Calls of the task that the model or a filter declined.
    unknown_endings: Mapping[str, int] = EMPTY  # Answers to the task by the unknown reason with which they ended.


NO_CALLS = CallTotals()


class Session:
    """The record of one trial.

    Events are copied into the record as JSON when they are recorded, so nothing that happens to the objects later
    changes it, and a live session reads exactly like its snapshot.
    """

    __slots__ = (
        "__attempt",
        "__clock",
        "__dispatcher",
        "__ended",
        "__envelopes",
        "__id_bits",
        "__late",
        "__lock",
        "__seq",
        "__slices",
        "__tags",
    )

    def __init__(
        self,
        *,
        session_id: UUID | None = None,
        tags: Mapping[str, str] = EMPTY,
        clock: Clock = SYSTEM_CLOCK,
        dispatcher: ControlDispatcher | None = None,
    ) -> None:
        if not all(isinstance(part, str) for part in (*tags, *tags.values())):
            raise SessionError(f"the names and values of a session's tags must be text (got {dict(tags)!r})")
        self.__id_bits = (getrandbits(128) & _VERSION_BITS | _VERSION_4) if session_id is None else session_id.int
        self.__tags: Mapping[str, str] = FrozenDict(tags) if tags else EMPTY
        self.__clock = clock
        self.__envelopes: list[Envelope] = []
        self.__seq = itertools.count()
        self.__lock = Lock()
        self.__attempt = 1
        self.__ended = False
        self.__dispatcher = dispatcher
        self.__slices: StateSlices | None = None
        self.__late: list[None] = []  # One entry per late event; shared by the sessions of all attempts.

    @property
    def session_id(self) -> UUID:
        """The unique id of the session."""
        return UUID(int=self.__id_bits)

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels such as the run and the sample."""
        return self.__tags

    @property
    def attempt(self) -> int:
        """The 1-based number of the attempt that this session records."""
        return self.__attempt

    @property
    def late_events(self) -> int:
        """The number of events recorded by an attempt that had already ended."""
        return len(self.__late)

    def next_attempt(self) -> Session:
        """End this attempt and return the session that records the next one into the same record.

        Code of the ended attempt, such as a thread that outlived its time limit, still holds this session: what it
        records is kept under its own attempt and never counts for the next one.
        """
        following: Session = Session.__new__(Session)
        following.__id_bits, following.__tags, following.__clock = self.__id_bits, self.__tags, self.__clock
        following.__envelopes, following.__seq, following.__lock = self.__envelopes, self.__seq, self.__lock
        following.__late = self.__late
        following.__dispatcher, following.__slices = self.__dispatcher, None  # The next attempt starts with no state.
        following.__ended = False
        with self.__lock:
            self.__ended = True
            following.__attempt = self.__attempt + 1
        return following

    def record(self, event: object, *, actor: str = "task") -> None:
        """Append an event: any frozen dataclass, pydantic model or other value that can be stored as JSON."""
        try:
            # Shares nothing with the event, and is frozen for whoever looks at it.
            data = event.to_record() if isinstance(event, ChatMessage) else to_json(event)
        except CodecError as error:
            raise SessionError(f"a {type(event).__name__} cannot be recorded: {error}") from None
        span_id, parent_id = _span.get()
        kind = kind_of(type(event))
        with self.__lock:  # One lock for number and place: the record is in the order of its numbers.
            self.__envelopes.append(
                Envelope(next(self.__seq), self.__clock.time(), actor, self.__attempt, span_id, parent_id, kind, data)
            )
            if self.__ended:
                self.__late.append(None)
        if self.__slices is not None:
            self.__slices.reduce(event)
        if self.__dispatcher is not None:
            self.__dispatcher.pass_on(event)

    def mutate[T](self, kind: type[T]) -> SliceMutator[T]:
        """Return the mutator of a state slice: `seed` sets its values, `register` adds a reducer for events.

        For example::

            session.mutate(Plan).seed(())
            session.mutate(Plan).register(StepDone, lambda plan, event: (*plan, event.step))
            session.query(Plan).all()
        """
        with self.__lock:
            if self.__slices is None:
                self.__slices = StateSlices()
                if self.__dispatcher is not None:
                    self.__dispatcher.attach(self.__slices)
        slices = self.__slices
        slices.seed_once(kind)

        return SliceMutator(slices, kind)

    def query[T](self, kind: type[T]) -> SliceView[T]:
        """Return the state of a slice or, if it has none, the recorded events of this type."""
        if self.__slices is not None and (values := self.__slices.get(kind)) is not None:
            return StateView(values)
        return self[kind]

    def __record_state(self) -> None:
        """Record changed states, so that views and snapshots contain them."""
        for kind, values in () if self.__slices is None else self.__slices.take_changed():
            self.record(SliceState(kind_of(kind), values), actor="framework")

    @contextmanager
    def span(self, name: str, *, actor: str = "task") -> Iterator[str]:
        """Group the events recorded inside; spans nest, and tasks and threads that copy the context inherit them."""
        span_id = uuid4().hex[:16]
        token = _span.set((span_id, _span.get()[0]))
        started = self.__clock.monotonic()
        problem: str | None = None
        try:
            yield span_id
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.record(SpanClosed(name, (self.__clock.monotonic() - started) * 1000, problem), actor=actor)
            _span.reset(token)

    def __len__(self) -> int:
        return len(self.__envelopes)

    def view(self, *, attempt: int | None = None) -> RecordedView:
        """Return a view of the task's events up to now."""
        self.__record_state()
        with self.__lock:
            record = tuple(self.__envelopes)
        return RecordedView(lambda: self.session_id, self.__tags, record, attempt=attempt)

    def everything(self) -> RecordedView:
        """Return a view of all events up to now, including those of judges."""
        return self.view().everything()

    def usage(self) -> TokenUsage:
        """Return the token usage of the task's model calls over all attempts, failed ones included."""
        return self.call_totals().usage

    def call_totals(self, *, judges_since: int = 0) -> CallTotals:
        """Sum the model calls over all attempts, separately for the task and for judges.

        Of the judges' calls, only events from number `judges_since` on count.
        """
        with self.__lock:
            envelopes = tuple(self.__envelopes)
        task, judges, hits, unpriced, cut_off, refused = NO_USAGE, NO_USAGE, 0, [0, 0], 0, 0
        unknown: dict[str, int] = {}
        for envelope in envelopes:
            if envelope.kind != _PROMPT_EXECUTED:
                continue
            judged = envelope.actor == JUDGE
            if judged and envelope.seq < judges_since:
                continue
            data = envelope.data
            usage = TokenUsage(**data["usage"]) if data["usage"] else NO_USAGE
            if data.get("cached"):
                hits += 1
            elif usage.cost_usd is None:
                unpriced[judged] += 1
            if judged:
                judges += usage
            else:
                task += usage
                reason = data.get("finish_reason")
                cut_off += reason in CUT_OFF_REASONS
                ending = ending_of(reason)
                refused += ending == "refused"
                if ending == "unknown":
                    name = reason[:_MAX_REASON]
                    unknown[name] = unknown.get(name, 0) + 1
        counts = (hits, unpriced[False], unpriced[True], cut_off, refused)
        return CallTotals(task, judges.cost_usd, *counts, unknown or EMPTY)

    @property
    def trajectory(self) -> Trajectory:
        """The messages recorded so far."""
        return self.view().trajectory

    def __getitem__[T](self, slice_type: type[T]) -> SliceView[T]:
        return self.view()[slice_type]

    def extend(self, envelopes: Iterable[Envelope], *, keep_attempts: bool = False) -> None:
        """Append events of this trial that were recorded elsewhere, with new sequence numbers.

        It belongs to the present attempt, unless the attempts it was made in are to be kept.
        """
        with self.__lock:
            for found in envelopes:
                if keep_attempts:
                    self.__attempt = max(self.__attempt, found.attempt)
                attempt = found.attempt if keep_attempts else self.__attempt
                self.__envelopes.append(found._replace(seq=next(self.__seq), attempt=attempt))
                if self.__ended:
                    self.__late.append(None)

    def snapshot(self) -> bytes:
        """Serialize the whole record; `restore_session` reads it."""
        self.__record_state()
        with self.__lock:
            envelopes = tuple(self.__envelopes)
        return snapshot_bytes(f"{self.__id_bits:032x}", self.__tags, envelopes)

    def __repr__(self) -> str:
        return f"<Session {self.session_id}: {len(self)} events>"

    def __reduce__(self) -> Any:
        raise SessionError("a live session cannot be pickled; send its snapshot()")
