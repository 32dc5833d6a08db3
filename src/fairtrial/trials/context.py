"""What a task can reach while it works on one trial."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

from fairtrial.data.sample import Sample
from fairtrial.errors import FairtrialError
from fairtrial.session.session import Session
from fairtrial.session.views import Envelope
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey

_current: ContextVar[TrialContext | None] = ContextVar("fairtrial_trial", default=None)


class TrialContext:
    """One trial as its task sees it.

    Attributes:
        key: The trial's identity.
        sample: The sample, whole.
        experiment: The variant being tried.
        attempt: Which attempt this is, from 1.
        session: The record to write to.
        deadline: When the attempt times out, on the clock `time.monotonic()`.
        shared: What the suite's lifespan opened.
    """

    __slots__ = (
        "_calls",
        "_resources",
        "_run_seed",
        "attempt",
        "deadline",
        "experiment",
        "key",
        "sample",
        "session",
        "shared",
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
    ) -> None:
        self.key = key
        self.sample = sample
        self.experiment = experiment
        self.session = session
        self._run_seed = run_seed
        self.attempt = attempt
        self.deadline = deadline
        self.shared = shared
        self._resources: AsyncExitStack | None = None
        self._calls: dict[str, int] = {}

    @property
    def seed(self) -> int:
        """Depends on the run's seed, the sample and the repeat, and is the same in every experiment."""
        return trial_seed(self._run_seed, self.key.sample_id, self.key.repeat)

    async def enter[T](self, resource: AbstractAsyncContextManager[T]) -> T:
        """Open something for this attempt; it is closed after scoring, whatever happens."""
        return await self.resources.enter_async_context(resource)

    @property
    def resources(self) -> AsyncExitStack:
        """What will be closed after scoring, in reverse order."""
        if self._resources is None:
            self._resources = AsyncExitStack()
        return self._resources

    def count_call(self, content: str) -> int:
        """How many identical model calls this attempt has made before this one; counted for the response cache."""
        count = self._calls.get(content, 0)
        self._calls[content] = count + 1
        return count

    def parts(self, *, shared: bool) -> ContextParts:
        """What a child process makes its own context of; with what the lifespan opened, if that is asked for."""
        return ContextParts(
            self.key,
            self.sample,
            self.experiment,
            dict(self.session.tags),
            self._run_seed,
            self.attempt,
            self.deadline,
            self.shared if shared else None,
        )

    @property
    def has_resources(self) -> bool:
        """True if anything was opened."""
        return self._resources is not None


class ContextParts(NamedTuple):
    """A context on its way to a child process."""

    key: TrialKey
    sample: Sample[Any, Any]
    experiment: Experiment
    tags: Mapping[str, str]
    run_seed: int
    attempt: int
    deadline: float
    shared: Any


def call_task_in_child(
    fn: Callable[..., Any], given: Any, parts: ContextParts, takes_context: bool
) -> tuple[Any, tuple[Envelope, ...]]:
    """Call a task in a child process; returns its output and what it recorded."""
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
    )
    token = _current.set(context)
    try:
        output = fn(given, context) if takes_context else fn(given)
    except BaseException as error:
        with contextlib.suppress(Exception):
            error.isolated_details = session.everything().envelopes  # type: ignore[attr-defined]  # see IsolatedError
        raise
    finally:
        _current.reset(token)
    return output, session.everything().envelopes


def running_trial() -> TrialContext | None:
    """The trial that is running here, if any."""
    return _current.get()


def current_trial() -> TrialContext:
    """The trial whose task is running here; for code too deep to be handed a context."""
    context = running_trial()
    if context is None:
        raise FairtrialError("no trial is running here: current_trial() works inside a task and what it calls")
    return context


def trial_seed(run_seed: int, sample_id: str, repeat: int) -> int:
    """The seed of a trial: equal across experiments, so that they can be compared pair by pair."""
    content = f"{run_seed}\0{sample_id}\0{repeat}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest())
