"""Renews the leases of a process from a separate thread.

A task that computes for a minute without awaiting blocks the event loop. Renewals on the event loop would stop too, and
all messages of the process would be redelivered. Therefore a thread renews them, until the job's deadline or until the
event loop is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Self

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.metrics import FAILED_RENEWALS
from fairtrial.base.offload import finish, in_thread, loop_caller, require_asyncio
from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxError
from fairtrial.mailbox.protocol import Message, Renewer, validate_lease

_log = logging.getLogger(__name__)


class Lease:
    """The lease of one message that is being processed.

    Attributes:
        message: The message.
        deadline: The end of renewals, on the extender's monotonic clock.
        lost: Whether the lease was lost; the work is then cancelled.
    """

    __slots__ = ("_on_lost", "_pulse", "deadline", "lost", "message")

    def __init__(self, message: Message[Any], deadline: float, on_lost: Callable[[], Any], pulse: _Pulse) -> None:
        self.message = message
        self.deadline = deadline
        self.lost = False
        self._on_lost = on_lost
        self._pulse = pulse

    def _cancel(self) -> None:
        self.lost = True
        self._on_lost()


class _Cancellation:
    """Cancels the task that created it on request, like `asyncio.timeout` without a time."""

    def __init__(self) -> None:
        require_asyncio("a lease", "hold it in a program that runs under it")
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - the caller is a coroutine
        self._task = task
        self._before = task.cancelling()
        self._active = True
        self._requested = False

    def request(self) -> None:
        if self._active and not self._requested:
            self._requested = True
            self._task.cancel()

    def end(self) -> bool:
        """Disable the cancellation; returns whether the task was cancelled by `request` only."""
        self._active = False
        if not self._requested:
            return False
        self._requested = False
        return self._task.uncancel() <= self._before


class _Pulse:
    """The heartbeat of one event loop: whether it is open, and when it last responded."""

    def __init__(self, call: Callable[[Callable[[], Any]], Any], now: float) -> None:
        self.call = call
        self.thread = threading.current_thread()
        self.last = now
        self.gone = False
        self.holds = 0

    def ask(self, clock: Clock) -> None:
        """Request a heartbeat, and detect whether the event loop is closed."""

        def beat() -> None:
            self.last = clock.monotonic()

        if self.thread.is_alive():
            self.post(beat)
        else:
            self.gone = True

    def post(self, call: Callable[[], Any]) -> None:
        try:
            self.call(call)
        except RuntimeError:  # Raised by asyncio and trio if the event loop is closed.
            self.gone = True


class LeaseExtender:
    """Renews the leases of all messages that a process is handling.

    Args:
        lease_seconds: The duration of each renewal; receive with the same visibility timeout.
        interval_seconds: The interval between renewals; a third of the lease by default.
        stall_seconds: If given, leases are not renewed while the event loop has not responded for this long. Off by
            default: a task may block the event loop and still make progress.
        clock: The clock for deadlines.
    """

    def __init__(
        self,
        *,
        lease_seconds: float = 60.0,
        interval_seconds: float | None = None,
        stall_seconds: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.lease_seconds = validate_lease(lease_seconds)
        self.interval_seconds = lease_seconds / 3 if interval_seconds is None else interval_seconds
        if not 0 < self.interval_seconds <= lease_seconds / 2:
            raise ConfigurationError(
                f"interval_seconds must be at most half of lease_seconds={lease_seconds} (got {self.interval_seconds})"
            )
        if stall_seconds is not None and stall_seconds <= 0:
            raise ConfigurationError(f"stall_seconds must be more than 0 (got {stall_seconds})")
        self.stall_seconds = stall_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._pulses: dict[Any, _Pulse] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await finish(in_thread(self.close))  # It may wait for a server that does not respond.

    @property
    def held(self) -> int:
        """The number of leases being renewed."""
        return len(self._held)

    @contextmanager
    def hold(self, message: Message[Any], *, deadline: float) -> Iterator[Lease]:
        """Renew the message's lease while the block runs, at the latest until `deadline`.

        The block is cancelled if the lease is lost. At the deadline only the renewals end: the caller must end the
        work in time.

        Args:
            message: A message just received.
            deadline: When renewing ends, on the extender's monotonic clock.

        Raises:
            LeaseLostError: the lease was lost, and the block was cancelled.
        """
        cancellation = _Cancellation()
        lease = self.keep(message, deadline=deadline, on_lost=cancellation.request)
        try:
            yield lease
        except asyncio.CancelledError:
            if cancellation.end():
                lost = f"the lease of message {message.id} was lost while it was being processed"
                raise LeaseLostError(lost) from None
            raise
        finally:
            cancellation.end()
            self.release(lease)

    def keep(self, message: Message[Any], *, deadline: float, on_lost: Callable[[], Any]) -> Lease:
        """Renew the message's lease until `release`: `hold` for callers that cancel the work themselves.

        Args:
            message: A message just received.
            deadline: When renewing ends, on the extender's monotonic clock; `Lease.deadline` may be moved later.
            on_lost: Called once on the event loop if the lease is lost.
        """
        return self.keep_all([message], deadline=deadline, on_lost=[on_lost])[0]

    def keep_all(
        self, messages: Sequence[Message[Any]], *, deadline: float, on_lost: Sequence[Callable[[], Any]]
    ) -> Sequence[Lease]:
        """Call `keep` for several messages."""
        if not math.isfinite(deadline):
            raise ConfigurationError("deadline must be finite: a job that hangs must not keep its message forever")
        call = loop_caller()
        with self._lock:
            pulse = self._pulse(call)
            pulse.holds += len(messages)
            leases = [Lease(message, deadline, lost, pulse) for message, lost in zip(messages, on_lost, strict=True)]
            self._held.update(leases)
        return leases

    def close(self) -> None:
        """Stop renewing. Leases that are still held will expire."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=self.lease_seconds)

    def _pulse(self, call: Callable[[Callable[[], Any]], Any]) -> _Pulse:
        if self._stop.is_set():
            raise ConfigurationError("the lease extender is closed")
        pulse = self._pulses.get(call)
        if pulse is None:
            pulse = self._pulses[call] = _Pulse(call, self._clock.monotonic())
        if self._thread is None:
            within = copy_context().run  # So that log records of the thread name the worker.
            self._thread = threading.Thread(target=within, args=(self._run,), name="fairtrial leases", daemon=True)
            self._thread.start()
        return pulse

    def release(self, lease: Lease) -> None:
        """Stop renewing a lease of `keep`."""
        with self._lock:
            if lease in self._held:
                self._held.remove(lease)
                lease._pulse.holds -= 1
                if lease._pulse.holds == 0:
                    self._pulses.pop(lease._pulse.call, None)

    def _run(self) -> None:
        tick = self.interval_seconds
        if self.stall_seconds is not None:
            tick = min(tick, self.stall_seconds / 3)
        wait = tick
        while not self._stop.wait(wait):
            try:
                # The server may be back soon, and the leases are about to expire: retry earlier.
                wait = tick if self._renew() else min(1.0, tick / 4)
            except Exception:
                _log.exception("renewing leases failed; retrying")
                wait = min(1.0, tick / 4)

    def _renew(self) -> bool:
        """Renew all leases once; False if a server could not be reached."""
        reached = True
        for renewer, leases in self._due():
            try:
                kept = renewer.renew([lease.message.receipt for lease in leases], self.lease_seconds)
            except MailboxError as error:
                _log.warning("leases of %d messages could not be renewed: %s", len(leases), error)
                FAILED_RENEWALS.add(len(leases))
                reached = False
                continue
            for lease, ours in zip(leases, kept, strict=True):
                if not ours:
                    self._lose(lease)
        return reached

    def _lose(self, lease: Lease) -> None:
        with self._lock:
            if lease not in self._held or lease.message.settled:
                return  # Settled during the renewal, so the server no longer had it.
        self.release(lease)
        lease._pulse.post(lease._cancel)

    def _due(self) -> Sequence[tuple[Renewer, list[Lease]]]:
        now = self._clock.monotonic()
        with self._lock:
            for pulse in self._pulses.values():
                pulse.ask(self._clock)
            over = [lease for lease in self._held if lease._pulse.gone or lease.deadline <= now]
            stalled = {
                pulse
                for pulse in self._pulses.values()
                if self.stall_seconds is not None and now - pulse.last > self.stall_seconds
            }
            groups: dict[int, tuple[Renewer, list[Lease]]] = {}
            for lease in self._held.difference(over):
                if lease._pulse not in stalled and not lease.message.settled:
                    renewer = lease.message.receipt.renewer
                    groups.setdefault(id(renewer), (renewer, []))[1].append(lease)
        for lease in over:
            self.release(lease)
        return list(groups.values())
