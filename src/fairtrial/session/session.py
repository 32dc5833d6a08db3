"""The live record: append-only, safe under threads and tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from random import getrandbits
from threading import Lock
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from fairtrial.clock import SYSTEM_CLOCK, Clock
from fairtrial.codec import to_json
from fairtrial.errors import CodecError, SessionError
from fairtrial.frozen import EMPTY, FrozenDict
from fairtrial.session.events import PromptExecuted, SpanClosed, TokenUsage
from fairtrial.session.snapshot import snapshot_bytes
from fairtrial.session.trajectory import Trajectory
from fairtrial.session.views import JUDGE, Envelope, RecordedView, SliceView, kind_of

_span: ContextVar[tuple[str | None, str | None]] = ContextVar("fairtrial_span", default=(None, None))


# The random bits of a version 4 UUID; the object itself is made only for those who ask.
_VERSION_BITS = ~((0xF << 76) | (0x3 << 62))
_VERSION_4 = (4 << 76) | (2 << 62)


_NO_USAGE = TokenUsage()
_PROMPT_EXECUTED = kind_of(PromptExecuted)


class CallTotals(NamedTuple):
    """What the model calls of a session used and cost.

    A call is unpriced if its cost is not known: its usage was not reported, or its model's price is not known.
    """

    usage: TokenUsage = _NO_USAGE  # The task's.
    judge_cost_usd: float | None = None
    cache_hits: int = 0
    unpriced_calls: int = 0
    unpriced_judge_calls: int = 0


NO_CALLS = CallTotals()


class Session:
    """What happened in one trial.

    Events are copied into the record as JSON when they are recorded, so nothing that happens to the objects later
    changes it, and a live session reads exactly like its snapshot.
    """

    __slots__ = ("__attempt", "__clock", "__ended", "__envelopes", "__id_bits", "__late", "__lock", "__seq", "__tags")

    def __init__(
        self,
        *,
        session_id: UUID | None = None,
        tags: Mapping[str, str] = EMPTY,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not all(isinstance(part, str) for part in (*tags, *tags.values())):
            raise SessionError(f"a session's tags are text, names and values, not {dict(tags)!r}")
        self.__id_bits = (getrandbits(128) & _VERSION_BITS | _VERSION_4) if session_id is None else session_id.int
        self.__tags: Mapping[str, str] = FrozenDict(tags) if tags else EMPTY
        self.__clock = clock
        self.__envelopes: list[Envelope] = []
        self.__seq = itertools.count()
        self.__lock = Lock()
        self.__attempt = 1
        self.__ended = False
        self.__late: list[None] = []  # One entry per late event; shared by the sessions of all attempts.

    @property
    def session_id(self) -> UUID:
        """The session's own name."""
        return UUID(int=self.__id_bits)

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels such as the run and the sample."""
        return self.__tags

    @property
    def attempt(self) -> int:
        """Which attempt at the trial this session records, from 1."""
        return self.__attempt

    @property
    def late_events(self) -> int:
        """How many events were recorded by code of an attempt that had already ended."""
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
        following.__ended = False
        with self.__lock:
            self.__ended = True
            following.__attempt = self.__attempt + 1
        return following

    def record(self, event: object, *, actor: str = "task") -> None:
        """Append one event: any frozen dataclass, pydantic model or other value the codec knows."""
        try:
            data = to_json(event)  # Shares nothing with the event, and is frozen for whoever looks at it.
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

    @contextmanager
    def span(self, name: str, *, actor: str = "task") -> Iterator[str]:
        """Group what is recorded inside; spans nest, and follow tasks and threads that copy the context."""
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
        """The task's side of the record as it stands now; what is recorded later does not appear in it."""
        with self.__lock:
            record = tuple(self.__envelopes)
        return RecordedView(lambda: self.session_id, self.__tags, record, attempt=attempt)

    def everything(self) -> RecordedView:
        """The whole record as it stands now, judges included."""
        return self.view().everything()

    def usage(self) -> TokenUsage:
        """What the task's model calls used, over all attempts: failed ones were paid for too."""
        return self.call_totals().usage

    def call_totals(self, *, judges_since: int = 0) -> CallTotals:
        """Sum up the model calls over all attempts, those of judges apart.

        Of the judges' calls, only events from number `judges_since` on count.
        """
        with self.__lock:
            envelopes = tuple(self.__envelopes)
        task, judges, hits, unpriced = _NO_USAGE, _NO_USAGE, 0, [0, 0]
        for envelope in envelopes:
            if envelope.kind != _PROMPT_EXECUTED:
                continue
            judged = envelope.actor == JUDGE
            if judged and envelope.seq < judges_since:
                continue
            data = envelope.data
            usage = TokenUsage(**data["usage"]) if data["usage"] else _NO_USAGE
            if data.get("cached"):
                hits += 1
            elif usage.cost_usd is None:
                unpriced[judged] += 1
            if judged:
                judges += usage
            else:
                task += usage
        return CallTotals(task, judges.cost_usd, hits, *unpriced)

    @property
    def trajectory(self) -> Trajectory:
        """The messages recorded so far."""
        return self.view().trajectory

    def __getitem__[T](self, kind: type[T]) -> SliceView[T]:
        return self.view()[kind]

    def extend(self, envelopes: Iterable[Envelope], *, keep_attempts: bool = False) -> None:
        """Take over what was recorded for this trial elsewhere, renumbered behind what is here.

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
        """The whole record as bytes; `restore_session` reads it anywhere."""
        with self.__lock:
            envelopes = tuple(self.__envelopes)
        return snapshot_bytes(f"{self.__id_bits:032x}", self.__tags, envelopes)

    def __repr__(self) -> str:
        return f"<Session {self.session_id}: {len(self)} events>"

    def __reduce__(self) -> Any:
        raise SessionError("a live session cannot be pickled; send its snapshot()")
