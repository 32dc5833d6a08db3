"""What a trial knows while it runs: its key, its context, its traces."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from contextvars import ContextVar
from time import monotonic
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from fairtrial.base.offload import TimeLimit
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import Envelope
from fairtrial.errors import FairtrialError
from fairtrial.trials.config import Experiment
from fairtrial.trials.sample_types import TypeName, value_type_name
from fairtrial.trials.task import ApplicationCalls


class TrialKey(NamedTuple):
    """The identity of a trial: run, experiment, sample and repeat."""

    run_id: str
    experiment: str
    sample_id: str
    repeat: int = 0

    def __str__(self) -> str:
        return f"{self.run_id}/{self.experiment}/{self.sample_id}#{self.repeat}"


def trace_id_of(key: TrialKey, attempt: int) -> bytes:
    """Return the 16 bytes of the trace id of one attempt at a trial."""
    return _digest(f"{key.run_id}\0{key.experiment}\0{key.sample_id}\0{key.repeat}\0{attempt}", 16)


def trial_span_id(trace_id: bytes) -> bytes:
    """Return the 8 bytes of the id of the trial's own span, the root of its trace."""
    return hashlib.blake2b(trace_id, digest_size=8, person=b"trial").digest()


def event_span_id(trace_id: bytes, sequence: int) -> bytes:
    """Return the id of the span of a recorded event, by its number in the session."""
    return hashlib.blake2b(trace_id + sequence.to_bytes(8, "big"), digest_size=8, person=b"event").digest()


def traceparent_of(key: TrialKey, attempt: int) -> str:
    """Return the W3C `traceparent` that makes spans children of the trial's own span."""
    trace_id = trace_id_of(key, attempt)
    return f"00-{trace_id.hex()}-{trial_span_id(trace_id).hex()}-01"


def is_sampled(key: TrialKey, share: float) -> bool:
    """Decide by a hash of the key whether a trial belongs to a sample of this share of all trials."""
    if share >= 1.0:
        return True
    # Not the trace id: the decision must be the same for every attempt, and this costs a third.
    content = f"{key.run_id}\0{key.experiment}\0{key.sample_id}\0{key.repeat}"
    return crc32(content.encode("utf-8", "surrogatepass")) < share * 2**32


def _digest(content: str, size: int) -> bytes:
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=size).digest()


class CollectedTrace(NamedTuple):
    """The events of a trace, and why it is incomplete; None if it is complete."""

    envelopes: tuple[Envelope, ...]
    spans: int
    problem: str | None


class ExpectedTrace(Protocol):
    """The trace of one attempt at a trial, from before its task is called until it has been collected."""

    @property
    def wait_seconds(self) -> float:
        """How long `wait` may take."""
        ...

    async def wait(self) -> CollectedTrace:
        """Wait until the trace is complete, or for the longest time, and return it."""
        ...

    def collected(self) -> CollectedTrace:
        """Return what has arrived, without waiting."""
        ...

    def close(self) -> None:
        """Forget the trace; what arrives later is counted as late."""
        ...


class TraceSource(Protocol):
    """Collects the spans of applications by trial."""

    @property
    def endpoint(self) -> str:
        """The address that applications send to; "" if they run in this process."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Collect during the block."""
        ...

    def expect(self, key: TrialKey, attempt: int) -> ExpectedTrace:
        """Accept the spans of an attempt from now on."""
        ...


class ConcurrencySlot(Protocol):
    """The place of a trial among those that run at once, which it gives up while it only waits for spans."""

    def release(self) -> bool:
        """Let another trial run; False if too many trials wait already, and the place was kept."""
        ...

    async def acquire(self) -> None:
        """Take a place again."""
        ...


current_slot: ContextVar[ConcurrencySlot | None] = ContextVar("fairtrial_slot", default=None)


def slot_released() -> AbstractAsyncContextManager[None]:
    """Give up the trial's place among the running ones during the block, if its scheduler can use it."""
    return _ReleasedSlot()


class _ReleasedSlot:
    """A tenth of the size of a generator: tens of thousands of trials may wait in such blocks."""

    __slots__ = ("_slot",)

    async def __aenter__(self) -> None:
        slot = current_slot.get()
        self._slot = slot if slot is not None and slot.release() else None

    async def __aexit__(self, *_: object) -> None:
        if self._slot is not None:
            await self._slot.acquire()


_FOREVER = 1e8  # Seconds.

_current: ContextVar[TrialContext | None] = ContextVar("fairtrial_trial", default=None)
_making_calls = threading.Lock()


class TrialContext:
    """The context of a trial, passed to its task.

    Attributes:
        key: The key of the trial.
        sample: The sample.
        experiment: The experiment.
        attempt: The number of the attempt, from 1.
        session: The session to which events are recorded.
        deadline: The deadline of the attempt, on the clock `time.monotonic()`.
        shared: The resources that the suite's lifespan opened.
        environment: The environment of the task, if it sets one; passed to evaluators, still open.
        trace_endpoint: The OTLP/HTTP address to which the application sends its spans; "" if none are received.
        scoring: True while the output is scored.
    """

    __slots__ = (
        "_application_calls",
        "_calls",
        "_limit",
        "_resources",
        "_run_seed",
        "_waits",
        "_waits_since",
        "attempt",
        "deadline",
        "environment",
        "experiment",
        "key",
        "sample",
        "scoring",
        "session",
        "shared",
        "trace_endpoint",
        "waited_seconds",
    )

    def __init__(
        self,
        key: TrialKey,
        sample: Sample[Any, Any],
        experiment: Experiment,
        session: Session,
        *,
        run_seed: int = 0,
        attempt: int = 1,
        deadline: float = float("inf"),
        shared: Any = None,
        trace_endpoint: str = "",
        limit: TimeLimit | None = None,
    ) -> None:
        self.key = key
        self.sample = sample
        self.experiment = experiment
        self.session = session
        self._run_seed = run_seed
        self.attempt = attempt
        self.deadline = deadline
        self.shared = shared
        self.trace_endpoint = trace_endpoint
        self.environment: Any = None
        self._resources: AsyncExitStack | None = None
        self._calls: dict[str, int] = {}
        self._application_calls: ApplicationCalls | None = None
        self.scoring = False
        self.waited_seconds = 0.0  # For batches.
        self._limit = limit
        self._waits = 0
        self._waits_since = 0.0

    def begin_wait(self) -> None:
        """Stop the clock of the trial: from here on it only waits, for hours perhaps, for a batch."""
        self._waits += 1
        if self._waits == 1:
            self._waits_since = monotonic()
            self._extend(_FOREVER)

    def end_wait(self) -> None:
        """Let the clock of the trial go on."""
        self._waits -= 1
        if self._waits:
            return
        waited = monotonic() - self._waits_since
        self.waited_seconds += waited
        # Only if the step in which it began has not ended.
        if self._limit is None or self._limit.deadline > monotonic() + _FOREVER / 2:
            self._extend(waited - _FOREVER)

    def _extend(self, seconds: float) -> None:
        self.deadline += seconds
        if self._limit is not None:
            self._limit.extend(seconds)

    @property
    def seed(self) -> int:
        """The seed, derived from the run's seed, the sample and the repeat; the same in every experiment."""
        return trial_seed(self._run_seed, self.key.sample_id, self.key.repeat)

    @property
    def traceparent(self) -> str:
        """The W3C `traceparent` of the trial: spans of an application that gets it belong to the trial."""
        return traceparent_of(self.key, self.attempt)

    @property
    def trace_headers(self) -> dict[str, str]:
        """The HTTP headers that make an application's spans part of the trial."""
        return {"traceparent": self.traceparent}

    @property
    def trace_environment(self) -> dict[str, str]:
        """Environment variables for an application that is started for this trial: where and how to send its spans."""
        variables = {"TRACEPARENT": self.traceparent}
        if self.trace_endpoint:
            variables |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": self.trace_endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_BSP_SCHEDULE_DELAY": "100",  # Milliseconds; by default, spans are sent after 5 s.
                "OTEL_BLRP_SCHEDULE_DELAY": "100",
            }
        return variables

    async def enter[T](self, resource: AbstractAsyncContextManager[T]) -> T:
        """Open a resource for this attempt; it is always closed after scoring."""
        return await self.resources.enter_async_context(resource)

    @property
    def resources(self) -> AsyncExitStack:
        """Return the resources to close after scoring, in reverse order."""
        if self._resources is None:
            self._resources = AsyncExitStack()
        return self._resources

    def count_call(self, content: str) -> int:
        """Return the number of identical earlier model calls of this attempt, for the response cache."""
        count = self._calls.get(content, 0)
        self._calls[content] = count + 1
        return count

    @property
    def application_calls(self) -> ApplicationCalls:
        """The recorder of model calls that the task makes with its own client."""
        with _making_calls:
            if self._application_calls is None:
                self._application_calls = ApplicationCalls(self.session)
            return self._application_calls

    def end_task(self) -> None:
        """Record what is left of the task's own model calls, before its session is looked at."""
        if self._application_calls is not None:
            self._application_calls.finish()

    def parts(self, *, shared: bool) -> ContextParts:
        """Return the parts from which a child process builds its own context, optionally with the shared resources."""
        return ContextParts(
            self.key,
            self.sample,
            self.experiment,
            dict(self.session.tags),
            self._run_seed,
            self.attempt,
            self.deadline,
            self.shared if shared else None,
            self.trace_endpoint,
        )

    @property
    def has_resources(self) -> bool:
        """Whether any resource was opened."""
        return self._resources is not None


class ContextParts(NamedTuple):
    """The parts of a context that are sent to a child process."""

    key: TrialKey
    sample: Sample[Any, Any]
    experiment: Experiment
    tags: Mapping[str, str]
    run_seed: int
    attempt: int
    deadline: float
    shared: Any
    trace_endpoint: str = ""


def call_task_in_child(
    fn: Callable[..., Any], given: Any, parts: ContextParts, takes_context: bool
) -> tuple[Any, TypeName, tuple[Envelope, ...]]:
    """Call a task in a child process; returns its output, the name of its type and the recorded events."""
    session = Session(tags=parts.tags)
    context = TrialContext(
        parts.key,
        parts.sample,
        parts.experiment,
        session,
        run_seed=parts.run_seed,
        attempt=parts.attempt,
        deadline=parts.deadline,
        shared=parts.shared,
        trace_endpoint=parts.trace_endpoint,
    )
    token = _current.set(context)
    try:
        output = fn(given, context) if takes_context else fn(given)
    except BaseException as error:
        context.end_task()
        with contextlib.suppress(Exception):
            error.isolated_details = session.everything().envelopes  # type: ignore[attr-defined]  # see IsolatedError
        raise
    finally:
        _current.reset(token)
    context.end_task()
    return output, value_type_name(output), session.everything().envelopes


def running_trial() -> TrialContext | None:
    """Return the context of the running trial, if any."""
    return _current.get()


def current_trial() -> TrialContext:
    """Return the context of the running trial, for code to which no context is passed."""
    context = running_trial()
    if context is None:
        raise FairtrialError("no trial is running: current_trial() must be called by a task or an evaluator")
    return context


def trial_seed(run_seed: int, sample_id: str, repeat: int) -> int:
    """Return the seed of a trial: equal across experiments, so that they can be compared in pairs."""
    content = f"{run_seed}\0{sample_id}\0{repeat}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest())
