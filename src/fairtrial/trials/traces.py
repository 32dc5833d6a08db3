"""What a trial needs of a source of traces: spans that the application under test sends while its task runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from fairtrial.data.session.views import Envelope
from fairtrial.trials.keys import TrialKey


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


@asynccontextmanager
async def slot_released() -> AsyncIterator[None]:
    """Give up the trial's place among the running ones during the block, if its scheduler can use it."""
    slot = current_slot.get()
    if slot is None or not slot.release():
        yield
        return
    try:
        yield
    finally:
        await slot.acquire()
