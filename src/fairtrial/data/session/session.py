"""Record what happens in a trial: the session, its listeners, its snapshots, its tokens."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import getrandbits
from threading import Lock
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from weakref import WeakSet

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import from_json, parse_json, to_json
from fairtrial.base.codec.encode import SPARSE, compact
from fairtrial.base.codec.escape import escape_text
from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.data.session import views
from fairtrial.data.session.events import CUT_OFF_REASONS, NO_USAGE, PromptExecuted, SpanClosed, TokenUsage, ending_of
from fairtrial.data.session.trajectory import ChatMessage, Trajectory
from fairtrial.errors import CodecError, SessionError

log = logging.getLogger("fairtrial.session")

type Handler[T] = Callable[[T], object]


class ControlDispatcher:
    """Dispatches events to the subscribers of their type, in the thread in which they happen.

        bus = ControlDispatcher()
        bus.subscribe(ToolInvoked, lambda call: print(call.name))
        session = Session(dispatcher=bus)               # or EvalSuite(...).run(bus=bus), for every trial's session

    As the bus of a run it hears what the trials record, as it is recorded, and the events of the run itself;
    `current_trial()` in a handler says which trial it is. What code in a child process records is not heard. A handler
    that raises is logged, and nothing else.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._handlers: tuple[tuple[type, Handler[Any]], ...] = ()
        self._slices: WeakSet[views.StateSlices] = WeakSet()  # Of sessions: a run's bus outlives those of its trials.

    def subscribe[T](self, kind: type[T], handler: Handler[T]) -> None:
        """Subscribe a handler to events of a type and its subtypes; `object` means all events."""
        with self._lock:
            self._handlers = (*self._handlers, (kind, handler))

    def unsubscribe[T](self, kind: type[T], handler: Handler[T]) -> None:
        """Remove a subscription, if there is one."""
        with self._lock:
            self._handlers = tuple(entry for entry in self._handlers if entry != (kind, handler))

    def publish(self, event: object) -> None:
        """Dispatch an event to the handlers and to the state slices of sessions that use this dispatcher."""
        self.pass_on(event)
        with self._lock:
            slices = tuple(self._slices)
        for one in slices:
            _call(((object, one.reduce),), event)

    dispatch = publish

    def __reduce__(self) -> tuple[type[ControlDispatcher], tuple[()]]:
        return ControlDispatcher, ()  # In a child process there is nobody to hear it.

    def pass_on(self, event: object) -> None:
        """Dispatch an event that a session has recorded; the state of other sessions does not change."""
        _call(self._handlers, event)

    def attach(self, slices: views.StateSlices) -> None:
        """Connect the slices of a session to events that no session recorded, while the session exists."""
        with self._lock:
            self._slices.add(slices)


def _call(handlers: tuple[tuple[type, Handler[Any]], ...], event: object) -> None:
    for kind, handler in handlers:
        if isinstance(event, kind):
            try:
                handler(event)
            except Exception:
                log.exception("a handler of %s events raised", type(event).__name__)


_VERSION = 1
_ACTOR = views.Envelope._fields.index("actor")
_ACTORS = frozenset(("task", "judge", "framework"))
_HEAD: Any = tuple[int, float, str, int, str | None, str | None, str]  # An envelope without its data.


def snapshot_bytes(session_id: str, tags: Mapping[str, str], envelopes: tuple[views.Envelope, ...]) -> bytes:
    """Serialize a record. The data of its events was escaped when it was recorded; the other texts rarely need it."""
    if escape_text(texts := "".join((*tags, *tags.values()))) is not texts:
        tags = {escape_text(name): escape_text(value) for name, value in tags.items()}
    for found in envelopes:
        if found[_ACTOR] not in _ACTORS:
            envelopes = tuple(found._replace(actor=escape_text(found.actor)) for found in envelopes)
            break
    return compact({"version": _VERSION, "session_id": session_id, "tags": tags, "events": envelopes}).encode("utf-8")


def restore_session(data: bytes) -> views.RecordedView:
    """Return the read-only view of a session from its snapshot."""
    try:
        tree = parse_json(data)
        if not isinstance(tree, dict):
            raise CodecError("an object was expected")
        if tree.get("version") != _VERSION:
            raise SessionError(
                f"the snapshot has format {tree.get('version')!r}, but this Fairtrial reads format {_VERSION}; upgrade "
                "the older of the two"
            )
        session_id = from_json(UUID, tree.get("session_id"))
        tags = from_json(dict[str, str], tree.get("tags"), frozen=True)
        events = tree.get("events")
        if not isinstance(events, list):
            raise CodecError("its events are missing")
        return views.RecordedView(session_id, tags, tuple(_envelope(fields) for fields in events))
    except CodecError as error:
        raise SessionError(f"not a session snapshot: {error}") from None


def _envelope(fields: Any) -> views.Envelope:
    if not isinstance(fields, list) or not fields:
        raise CodecError("an event is not an array")
    *head, data = fields  # The data stays as it is on the wire until someone asks for it with a type.
    seq, time, actor, attempt, span_id, parent_id, kind = from_json(_HEAD, head)
    return views.Envelope(seq, time, actor, attempt, span_id, parent_id, kind, data)


_span: ContextVar[tuple[str | None, str | None]] = ContextVar("fairtrial_span", default=(None, None))


# The random bits of a version 4 UUID; the object itself is made only for those who ask.
_VERSION_BITS = ~((0xF << 76) | (0x3 << 62))
_VERSION_4 = (4 << 76) | (2 << 62)


_PROMPT_EXECUTED = views.kind_of(PromptExecuted)
_MAX_REASON = 60  # Characters of the name of an unknown ending.


class CallTotals(NamedTuple):
    """The token usage and cost of the model calls of a session.

    A call is unpriced if its cost is not known: its usage was not reported, or its model's price is not known. What a
    simulated user costs is a cost of judging: it is paid to find out how good the task is.
    """

    usage: TokenUsage = NO_USAGE  # The task's.
    judge_cost_usd: float | None = None  # Of judges and simulated users.
    cache_hits: int = 0
    unpriced_calls: int = 0
    unpriced_judge_calls: int = 0
    cut_off_calls: int = 0  # Answers to the task that ended at a limit of tokens.
    refused_calls: int = 0  # Calls of the task that the model or a filter declined.
    unknown_endings: Mapping[str, int] = EMPTY  # Answers to the task by the unknown reason with which they ended.
    user: TokenUsage | None = None  # The part of simulated users; None if there was no call of one.


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
        try:
            "".join((*tags, *tags.values()))  # The quickest way to ask: this is done for every trial.
        except TypeError:
            raise SessionError(f"the names and values of a session's tags must be text (got {dict(tags)!r})") from None
        self.__id_bits = (getrandbits(128) & _VERSION_BITS | _VERSION_4) if session_id is None else session_id.int
        self.__tags: Mapping[str, str] = FrozenDict(tags) if tags else EMPTY
        self.__clock = clock
        self.__envelopes: list[views.Envelope] = []
        self.__seq = itertools.count()
        self.__lock = Lock()
        self.__attempt = 1
        self.__ended = False
        self.__dispatcher = dispatcher
        self.__slices: views.StateSlices | None = None
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
            # Shares nothing with the event, and is frozen for its readers.
            data = event.to_record() if isinstance(event, ChatMessage) else to_json(event)
        except CodecError as error:
            raise SessionError(f"a {type(event).__name__} cannot be recorded: {error}") from None
        span_id, parent_id = _span.get()
        kind = views.kind_of(type(event))
        with self.__lock:  # One lock for number and place: the record is in the order of its numbers.
            self.__envelopes.append(
                views.Envelope(
                    next(self.__seq), self.__clock.time(), actor, self.__attempt, span_id, parent_id, kind, data
                )
            )
            if self.__ended:
                self.__late.append(None)
        if self.__slices is not None:
            self.__slices.reduce(event)
        if self.__dispatcher is not None:
            self.__dispatcher.pass_on(event)

    def mutate[T](self, kind: type[T]) -> views.SliceMutator[T]:
        """Return the mutator of a state slice: `seed` sets its values, `register` adds a reducer for events.

        For example::

            session.mutate(Plan).seed(())
            session.mutate(Plan).register(StepDone, lambda plan, event: (*plan, event.step))
            session.query(Plan).all()
        """
        with self.__lock:
            if self.__slices is None:
                self.__slices = views.StateSlices()
                if self.__dispatcher is not None:
                    self.__dispatcher.attach(self.__slices)
        slices = self.__slices
        slices.seed_once(kind)

        return views.SliceMutator(slices, kind)

    def query[T](self, kind: type[T]) -> views.SliceView[T]:
        """Return the state of a slice or, if it has none, the recorded events of this type."""
        if self.__slices is not None and (values := self.__slices.get(kind)) is not None:
            return views.StateView(values)
        return self[kind]

    def __record_state(self) -> None:
        """Record changed states, so that views and snapshots contain them."""
        for kind, values in () if self.__slices is None else self.__slices.take_changed():
            self.record(views.SliceState(views.kind_of(kind), values), actor="framework")

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

    def view(self, *, attempt: int | None = None) -> views.RecordedView:
        """Return a view of the task's events up to now."""
        self.__record_state()
        with self.__lock:
            record = tuple(self.__envelopes)
        return views.RecordedView(lambda: self.session_id, self.__tags, record, attempt=attempt)

    def everything(self) -> views.RecordedView:
        """Return a view of all events up to now, including those of judges."""
        return self.view().everything()

    def usage(self) -> TokenUsage:
        """Return the token usage of the task's model calls over all attempts, failed ones included."""
        return self.call_totals().usage

    def call_totals(self, *, judges_since: int = 0) -> CallTotals:
        """Sum the model calls over all attempts, separately for the task and for judges and simulated users.

        Of the judges' calls, only events from number `judges_since` on count.
        """
        with self.__lock:
            envelopes = [envelope for envelope in self.__envelopes if envelope.kind == _PROMPT_EXECUTED]
        if not envelopes:
            return NO_CALLS
        task, judges, hits, unpriced, cut_off, refused = NO_USAGE, NO_USAGE, 0, [0, 0], 0, 0
        unknown: dict[str, int] = {}
        user: TokenUsage | None = None
        for envelope in envelopes:
            judged = envelope.actor in (views.JUDGE, views.USER)
            data = envelope.data
            usage = TokenUsage(**data["usage"]) if data["usage"] else NO_USAGE
            if envelope.actor == views.USER:
                user = (user or NO_USAGE) + usage
            if judged and envelope.seq < judges_since:
                continue
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
        return CallTotals(task, judges.cost_usd, *counts, unknown or EMPTY, user)

    @property
    def trajectory(self) -> Trajectory:
        """The messages recorded so far."""
        return self.view().trajectory

    def __getitem__[T](self, slice_type: type[T]) -> views.SliceView[T]:
        return self.view()[slice_type]

    def extend(self, envelopes: Iterable[views.Envelope], *, keep_attempts: bool = False) -> None:
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


POLICY = "task"
"""The actor whose tokens are trained. A simulated user, for example, has another one."""
_CLAMPED = -9999.0  # What vLLM reports for a log-probability that it does not have.


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """The tokens of one model call. `prompt_ids` has only what follows the first `prefix` tokens.

    Those are equal to the prompt and completion of the actor's previous call, so a conversation of many turns is stored
    once.

    Attributes:
        prefix: The number of leading tokens of the prompt that equal those of the previous call.
        prompt_ids: The rest of the prompt.
        completion_ids: The sampled tokens.
        logprobs: Their log-probabilities under the policy that sampled them.
        sampling: The sampling parameters of the call.
        actor: Who made the call; only the tokens of "task" are trained.
        model: The model that answered.
    """

    prefix: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: Mapping[str, Any] = EMPTY
    actor: str = field(default=POLICY, metadata=SPARSE)
    model: str = field(default="", metadata=SPARSE)


@dataclass(frozen=True, slots=True)
class TokensMissing:
    """The tokens of one model call were requested and cannot be trained on; `reason` says why."""

    reason: str


class TokenCall(NamedTuple):
    """One model call with its whole prompt."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    actor: str = POLICY
    model: str = ""
    sampling: Mapping[str, Any] = EMPTY


def record_tokens(
    session: Session,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    logprobs: Sequence[float],
    sampling: Mapping[str, Any] = EMPTY,
    *,
    actor: str = POLICY,
    model: str = "",
) -> None:
    """Record the tokens of a model call.

    Raises:
        ValueError: they cannot be trained on: ids that are no whole numbers, a log-probability that is missing, above
            0, not finite or clamped.
    """
    check_tokens(prompt_ids, completion_ids, logprobs)
    held: list[int] = []
    for event in session.view(attempt=session.attempt)[TokensSampled].all():
        if event.actor == actor:
            _append(held, event)
    prompt = tuple(prompt_ids)
    prefix = next(
        (at for at, (one, other) in enumerate(zip(held, prompt, strict=False)) if one != other),
        min(len(held), len(prompt)),
    )
    session.record(
        TokensSampled(prefix, prompt[prefix:], tuple(completion_ids), tuple(logprobs), sampling, actor, model),
        actor=actor,
    )


def check_tokens(prompt_ids: Sequence[Any], completion_ids: Sequence[Any], logprobs: Sequence[Any]) -> None:
    """Raise a ValueError for tokens that cannot be trained on."""
    for what, ids in (("prompt", prompt_ids), ("completion", completion_ids)):
        wrong = next((one for one in ids if type(one) is not int or one < 0), None)
        if wrong is not None:
            raise ValueError(f"the ids of the {what} must be whole numbers of at least 0 (got {wrong!r})")
    if len(logprobs) != len(completion_ids):
        raise ValueError(f"there must be a log-probability for each of {len(completion_ids)} ids (got {len(logprobs)})")
    for value in logprobs:
        known = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
        if not known or value > 0 or value <= _CLAMPED:
            raise ValueError(f"a log-probability must be a finite number of at most 0 (got {value!r})")


def token_calls(view: views.RecordedView) -> list[TokenCall]:
    """Return the model calls of a session whose tokens were recorded, with their whole prompts."""
    calls: list[TokenCall] = []
    by_actor: dict[str, list[int]] = {}
    for event in view[TokensSampled].all():
        held = by_actor.setdefault(event.actor, [])
        _append(held, event)
        sampled = tuple(event.completion_ids)
        prompt = tuple(held[: len(held) - len(sampled)])
        calls.append(
            TokenCall(prompt, sampled, tuple(event.logprobs), event.actor, event.model, to_json(event.sampling))
        )
    return calls


def _append(held: list[int], event: TokensSampled) -> None:
    """Change the tokens of one call into those of the next."""
    del held[event.prefix :]
    held += event.prompt_ids
    held += event.completion_ids
