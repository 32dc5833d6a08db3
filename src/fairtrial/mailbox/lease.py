"""Keeps the leases of a process alive from a thread of its own.

A task that computes for a minute without awaiting stops the event loop; renewals that ran on it would stop too, and
every message of the process would be handed to someone else. So a thread renews them, for as long as there is
somebody to work for: until the job's deadline, or until the event loop is gone.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Self

import anyio
import anyio.to_thread

from fairtrial.clock import SYSTEM_CLOCK, Clock
from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxError
from fairtrial.mailbox.protocol import Message, Renewer, checked_lease
from fairtrial.metrics import FAILED_RENEWALS
from fairtrial.offload import loop_caller

_log = logging.getLogger(__name__)


class Lease:
    """One message that is being worked on.

    Attributes:
        message: The message.
        deadline: When renewing ends, on the extender's monotonic clock.
        lost: Whether the message went to someone else; the work is cancelled when this becomes true.
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


class _Pulse:
    """Whether one event loop is there, and when it last turned."""

    def __init__(self, call: Callable[[Callable[[], Any]], Any], now: float) -> None:
        self.call = call
        self.thread = threading.current_thread()
        self.last = now
        self.gone = False
        self.holds = 0

    def ask(self, clock: Clock) -> None:
        """Ask for a beat, and find out whether there is still an event loop to ask."""

        def beat() -> None:
            self.last = clock.monotonic()

        if self.thread.is_alive():
            self.post(beat)
        else:
            self.gone = True

    def post(self, call: Callable[[], Any]) -> None:
        try:
            self.call(call)
        except RuntimeError:  # The event loop is closed; asyncio and trio both say so like this.
            self.gone = True


class LeaseExtender:
    """Renews the leases of everything a process is working on.

    Args:
        lease_seconds: How long each renewal makes a lease last; receive with the same visibility timeout.
        interval_seconds: How often to renew; a third of the lease unless given.
        stall_seconds: When given, an event loop that has not turned for this long gets nothing renewed until it does.
            Off unless asked for: waiting half an hour for a model is not a stall, but a task that blocks is not dead.
        clock: What deadlines are measured with.
    """

    def __init__(
        self,
        *,
        lease_seconds: float = 60.0,
        interval_seconds: float | None = None,
        stall_seconds: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.lease_seconds = checked_lease(lease_seconds)
        self.interval_seconds = lease_seconds / 3 if interval_seconds is None else interval_seconds
        if not 0 < self.interval_seconds <= lease_seconds / 2:
            raise ConfigurationError(
                f"renew at least twice per lease: every {self.interval_seconds} s is too seldom for {lease_seconds} s"
            )
        if stall_seconds is not None and stall_seconds <= 0:
            raise ConfigurationError(f"stall_seconds is more than 0, not {stall_seconds}")
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
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)  # It may have to wait for a server that does not answer.

    @property
    def held(self) -> int:
        """How many leases are being renewed."""
        return len(self._held)

    @contextmanager
    def hold(self, message: Message[Any], *, deadline: float) -> Iterator[Lease]:
        """Keep the message's lease while the block runs, until `deadline` at the latest.

        The block is cancelled when the lease is lost. When the deadline passes renewing ends, and that is all: ending
        the work in time is the caller's.

        Args:
            message: A message just received.
            deadline: When renewing ends, on the extender's monotonic clock.

        Raises:
            LeaseLostError: the lease was lost, and the block was cancelled.
        """
        with anyio.CancelScope() as scope:
            lease = self.keep(message, deadline=deadline, on_lost=scope.cancel)
            try:
                yield lease
            finally:
                self.release(lease)
        if lease.lost and scope.cancelled_caught:
            raise LeaseLostError(f"message {message.id} went to someone else while it was being worked on")

    def keep(self, message: Message[Any], *, deadline: float, on_lost: Callable[[], Any]) -> Lease:
        """Keep the message's lease until `release`: `hold` for loops with a way of their own to cancel a job.

        Args:
            message: A message just received.
            deadline: When renewing ends, on the extender's monotonic clock; `Lease.deadline` may be moved later.
            on_lost: Called on the event loop, once, when the lease is lost.
        """
        return self.keep_all([message], deadline=deadline, on_lost=[on_lost])[0]

    def keep_all(
        self, messages: Sequence[Message[Any]], *, deadline: float, on_lost: Sequence[Callable[[], Any]]
    ) -> Sequence[Lease]:
        """`keep`, for many messages received together."""
        if not math.isfinite(deadline):
            raise ConfigurationError("a lease needs a deadline: a job that hangs must not keep its message for ever")
        call = loop_caller()
        with self._lock:
            pulse = self._pulse(call)
            pulse.holds += len(messages)
            leases = [Lease(message, deadline, lost, pulse) for message, lost in zip(messages, on_lost, strict=True)]
            self._held.update(leases)
        return leases

    def close(self) -> None:
        """Stop renewing. Leases that are still held run out by themselves."""
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
            within = copy_context().run  # What the thread logs names the worker.
            self._thread = threading.Thread(target=within, args=(self._run,), name="fairtrial leases", daemon=True)
            self._thread.start()
        return pulse

    def release(self, lease: Lease) -> None:
        """Stop renewing one lease; the other half of `keep`."""
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
                # A server that is away may be back in a moment, and the leases are running: ask again sooner.
                wait = tick if self._renew() else min(1.0, tick / 4)
            except Exception:
                _log.exception("renewing leases failed; trying again")
                wait = min(1.0, tick / 4)

    def _renew(self) -> bool:
        """Renew everything once; False when a server could not be reached."""
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
                return  # Settled while we asked: that is why the server no longer knew it.
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
