"""Receives as many messages as a worker has free slots."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence

from fairtrial.base.metrics import QUEUE_DELAY_SECONDS
from fairtrial.errors import ConfigurationError, MailboxAccessError, MailboxClosedError, MailboxError
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.fleet.worker.jobs import Handler, JobSet
from fairtrial.fleet.worker.lifecycle import WorkerLifecycle
from fairtrial.fleet.worker.retries import backoff
from fairtrial.mailbox.protocol import Mailbox, Message

_log = logging.getLogger("fairtrial.fleet")
_EMPTY_WAIT = 0.2
_EMPTY_LOOKS = 5  # How often the queue is looked at in `empty_seconds`.
_FULL_BATCH = 10  # Of mailboxes that bill requests.


class MessageReceiver[T]:
    """Receives messages and starts a job for each; failed receives are retried with backoff.

    Args:
        mailbox: The mailbox to receive from.
        jobs: The jobs in progress, which determine the number of free slots.
        handle: Handles a message.
        lifecycle: Tells when to stop.
        counters: The counters to update.
        lease_seconds: The lease of received messages.
        wait_seconds: How long one receive waits.
        empty_seconds: With `until_empty`, how long the mailbox must have been empty.

    Attributes:
        reached: Whether the mailbox has answered.
    """

    def __init__(
        self,
        mailbox: Mailbox[T],
        jobs: JobSet[T],
        handle: Handler[T],
        lifecycle: WorkerLifecycle,
        counters: LoopCounters,
        *,
        lease_seconds: float,
        wait_seconds: float,
        empty_seconds: float = 0.0,
    ) -> None:
        self._mailbox = mailbox
        self._jobs = jobs
        self._handle = handle
        self._lifecycle = lifecycle
        self._counters = counters
        self._lease_seconds = lease_seconds
        self._wait_seconds = wait_seconds
        self._empty_seconds = empty_seconds
        self._empty_since: float | None = None
        self._paused_until = 0.0
        self.reached = False

    def pause(self, seconds: float) -> None:
        """Receive nothing for a while."""
        self._paused_until = time.monotonic() + seconds

    async def run(self, max_iterations: int | None, until_empty: bool) -> None:
        """Receive until stopped, for this many iterations, or until the mailbox is empty."""
        iterations = failures = 0
        left = 0  # Number of messages of this iteration still to be received.
        opened = False
        self._empty_since = None
        await self._reach()
        while left or max_iterations is None or iterations < max_iterations:
            free = await self._wait_for_room()
            if not free:
                return  # Stop requested.
            wait = min(self._wait_seconds, self._look_seconds) if until_empty else self._wait_seconds
            iterations += not left
            try:
                messages = await self._receive(min(free, left) if left else free, 0 if left else wait)
                failures = 0
                opened = self.reached = True
                if max_iterations is None or not messages:
                    left = 0
                else:
                    left = max(0, left - len(messages)) if left else await self._backlog()
                if until_empty and await self._has_been_empty(messages):
                    return
            except MailboxClosedError:
                raise  # The mailbox was closed by its owner.
            except Exception as error:
                if not opened and isinstance(error, ConfigurationError | MailboxAccessError):
                    raise  # It never worked: a configuration error.
                failures += 1
                self._empty_since = None  # Nobody knows what was sent meanwhile.
                self._counters.receive_errors += 1
                pause = backoff(failures)
                _log.warning("receiving from %s failed (%r); retrying in %.1f s", self._mailbox.name, error, pause)
                await self._lifecycle.sleep(pause)

    @property
    def _look_seconds(self) -> float:
        return max(_EMPTY_WAIT, self._empty_seconds / _EMPTY_LOOKS)

    async def _has_been_empty(self, received: Sequence[Message[T]]) -> bool:
        """Return whether nothing has been waiting, delayed or in flight on any worker for `empty_seconds`."""
        if received or self._jobs or await self._mailbox.approximate_count() > 0:
            self._empty_since = None
            return False
        now = time.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        return now - self._empty_since >= self._empty_seconds

    async def _backlog(self) -> int:
        """Return the number of messages in the mailbox beside those in progress; unlimited if unknown."""
        try:
            return max(0, await self._mailbox.approximate_count() - len(self._jobs))
        except MailboxError as error:
            _log.warning("the depth of %s cannot be read: %s", self._mailbox.name, error)
            return sys.maxsize

    async def _reach(self) -> None:
        """Check that the mailbox is reachable, so that an idle worker is ready before its first receive returns."""
        try:
            await self._mailbox.approximate_count()
            self.reached = True
        except MailboxError as error:
            _log.warning("%s is not reachable yet: %s", self._mailbox.name, error)

    async def _wait_for_room(self) -> int:
        """Wait for free slots; returns their number, or 0 if a stop is requested."""
        gathered = False
        while not self._lifecycle.stop_requested:
            pause = self._paused_until - time.monotonic()
            if pause > 0:
                await self._lifecycle.sleep(pause)
            elif (free := self._jobs.free_slots) > 0:
                gather = getattr(self._mailbox, "gather_seconds", 0.0)
                if gathered or not gather or free >= _FULL_BATCH:
                    return free
                # Each request costs money there: let more slots become free, and fill them with one request.
                gathered = True
                await self._lifecycle.sleep(gather)
            else:
                await self._lifecycle.wait_for_change()
        return 0

    async def _receive(self, count: int, wait: float) -> Sequence[Message[T]]:
        """Receive messages and start their jobs; a stop ends the wait without losing messages just received."""
        receiving = asyncio.get_running_loop().create_task(self._messages(count, wait))
        messages: Sequence[Message[T]] = ()
        try:
            await asyncio.wait((receiving, self._lifecycle.stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not receiving.done():
                receiving.cancel()
                await asyncio.wait([receiving])
            if not receiving.cancelled() and receiving.exception() is None:
                messages = receiving.result()
                self._start(messages)  # Also when cancelled: only a job is handed back.
        if not receiving.cancelled():
            receiving.result()  # Raises the error of the receive.
        return messages

    async def _messages(self, count: int, wait: float) -> Sequence[Message[T]]:
        return await self._mailbox.receive(count, self._lease_seconds, wait)

    def _start(self, messages: Sequence[Message[T]]) -> None:
        self._counters.received += len(messages)
        for message in messages:
            if message.waited_seconds is not None:
                QUEUE_DELAY_SECONDS.observe(message.waited_seconds, self._mailbox.name)
        self._jobs.add(messages, self._handle)
