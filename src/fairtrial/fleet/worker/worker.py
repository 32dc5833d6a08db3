"""A worker: it receives requests, runs jobs and stops in order."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fairtrial.base.metrics import QUEUE_DELAY_SECONDS
from fairtrial.base.sync_bridge import StopSignals, blocking_portal
from fairtrial.errors import ConfigurationError, MailboxAccessError, MailboxClosedError, MailboxError
from fairtrial.fleet.worker.config import LoopConfig, LoopCounters
from fairtrial.fleet.worker.jobs import Handler, Job, JobSet, WorkerLifecycle, backoff
from fairtrial.mailbox.protocol import Mailbox, Message

_log = logging.getLogger("fairtrial.fleet")
_EMPTY_WAIT = 0.2
_EMPTY_LOOKS = 5  # How often the queue is looked at in `empty_seconds`.
_FULL_BATCH = 10  # Of mailboxes that bill requests.
_BEAT_SECONDS = 1.0
_CANCEL_SECONDS = 20.0
_DELIVER_SECONDS = 5.0
_COMPLAIN_SECONDS = 60.0


class Worker[T]:
    """Receives from one mailbox and passes each message to `handle`; failed receives are retried with backoff.

    Args:
        mailbox: The mailbox to receive from.
        handle: Handles and settles a message. If it raises, `config.dlq` decides.
        config: Settings.
        counters: The counters to update.
        hold_seconds: Maximum time for which a message may be leased.
        handle_late: Settles a message whose handler has not ended after `hold_seconds` although it was cancelled: user
            code that ignores its cancellation. By default, the message counts as failed.
    """

    def __init__(
        self,
        mailbox: Mailbox[T],
        handle: Handler[T],
        config: LoopConfig,
        counters: LoopCounters,
        *,
        hold_seconds: float,
        handle_late: Handler[T] | None = None,
    ) -> None:
        self.beat = 0.0
        self._mailbox = mailbox
        self._handle = handle
        self._config = config
        self._counters = counters
        self._lifecycle = WorkerLifecycle()
        self._jobs: JobSet[T] = JobSet(
            mailbox.name, self._lifecycle, config, counters, hold_seconds, handle_late or _fail_late
        )
        self._empty_since: float | None = None
        self._paused_until = 0.0
        self._complained = -math.inf  # When an unreachable mailbox was last logged.
        self._reached = False  # Whether the mailbox has answered.
        self.stop = self._lifecycle.request_stop
        self.hurry = self._lifecycle.request_hurry

    @property
    def running(self) -> bool:
        """Whether `run` is in progress."""
        return self._lifecycle.running

    @property
    def ready(self) -> bool:
        """Whether `run` is in progress and has reached its mailbox."""
        return self.running and self._reached

    def pause(self, seconds: float) -> None:
        """Receive nothing for a while."""
        self._paused_until = time.monotonic() + seconds

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Work until stopped, for this many iterations, or until the mailbox is empty; then finish work in flight."""
        self._lifecycle.start()
        self._jobs.open()
        beating = asyncio.get_running_loop().create_task(self._beat())
        try:
            try:
                await self._receive_all(max_iterations, until_empty)
                await self._drain()
                await self._hand_back()
            except BaseException:  # Cancelled, perhaps while handing back: hand back the rest first.
                await self._hand_back()
                raise
        finally:
            beating.cancel()
            self._lifecycle.end()
            await self._jobs.close()

    async def _receive_all(self, max_iterations: int | None, until_empty: bool) -> None:
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
            wait = self._config.wait_seconds
            if until_empty:
                wait = min(wait, max(_EMPTY_WAIT, self._config.empty_seconds / _EMPTY_LOOKS))
            iterations += not left
            try:
                messages = await self._receive(min(free, left) if left else free, 0 if left else wait)
                if failures:
                    _log.info("%s is reachable again", self._mailbox.name)
                    failures, self._complained = 0, -math.inf
                opened = self._reached = True
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
                self._complain(error)
                await self._lifecycle.sleep(backoff(failures))

    async def _has_been_empty(self, received: Sequence[Message[T]]) -> bool:
        """Return whether nothing has been waiting, delayed or in flight on any worker for `empty_seconds`."""
        if received or self._jobs or await self._mailbox.approximate_count() > 0:
            self._empty_since = None
            return False
        now = time.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        return now - self._empty_since >= self._config.empty_seconds

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
            self._reached = True
        except MailboxError as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Log a failed receive: the first, and then one a minute."""
        now = time.monotonic()
        if now - self._complained < _COMPLAIN_SECONDS:
            return
        self._complained = now
        what = str(error) if isinstance(error, MailboxError) else repr(error)
        _log.warning(
            "receiving from %s failed: %s; trying again until it works (is the server running, and --mailbox right?)",
            self._mailbox.name,
            what,
        )

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
        receiving = asyncio.ensure_future(self._mailbox.receive(count, self._config.lease_seconds, wait))
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

    def _start(self, messages: Sequence[Message[T]]) -> None:
        self._counters.received += len(messages)
        for message in messages:
            if message.waited_seconds is not None:
                QUEUE_DELAY_SECONDS.observe(message.waited_seconds, self._mailbox.name)
        self._jobs.add(messages, self._handle)

    async def _drain(self) -> None:
        """Let jobs in progress finish: for `drain_seconds` after a request to stop, or until a request to hurry."""
        lifecycle = self._lifecycle
        deadline: float | None = None
        while self._jobs and not lifecycle.hurry_requested:
            if deadline is None and lifecycle.stop_requested:  # Also while the last messages are being finished.
                seconds = self._config.drain_seconds
                _log.info("waiting up to %g s for %d jobs in flight", seconds, len(self._jobs))
                deadline = time.monotonic() + seconds
            if not await lifecycle.wait_for_change(deadline):
                return

    async def _hand_back(self) -> None:
        """Cancel executing jobs, whose messages are handed back; undelivered results get a moment more."""
        for job in self._jobs:
            if job.stage == "executing":
                job.cancel()
        if await self._wait_for_jobs(_DELIVER_SECONDS):
            for job in self._jobs:
                job.cancel()
            if left := await self._wait_for_jobs(_CANCEL_SECONDS):
                _log.error("%d jobs ignored their cancellation; their leases will expire", left)

    async def _wait_for_jobs(self, seconds: float) -> int:
        """Wait for the jobs to end; returns the number of those that have not."""
        deadline = time.monotonic() + seconds
        while self._jobs and await self._lifecycle.wait_for_change(deadline):
            pass
        return len(self._jobs)

    async def _beat(self) -> None:
        while True:
            self.beat = time.monotonic()
            self._jobs.orphan_overdue()
            await asyncio.sleep(_BEAT_SECONDS)


async def _fail_late(job: Job[Any]) -> None:
    raise TimeoutError("the code ignored its cancellation")


class WorkerLoop:
    """A loop that serves a mailbox: what `EvalLoop` and `MainLoop` have in common.

    Attributes:
        config: Settings.
        counters: What the loop has done.
    """

    config: LoopConfig
    counters: LoopCounters
    _worker: Worker[Any] | None

    @property
    def beat(self) -> float:
        """The time of the last heartbeat on the clock `time.monotonic()`: about once a second while the loop runs."""
        return 0.0 if self._worker is None else self._worker.beat

    @property
    def running(self) -> bool:
        """Whether `run` is in progress."""
        return self._worker is not None and self._worker.running

    @property
    def ready(self) -> bool:
        """Whether `run` is in progress and has reached its mailbox."""
        return self._worker is not None and self._worker.ready

    def stop(self) -> None:
        """Receive no more and end: work in flight may finish within `drain_seconds`, the rest is handed back.

        May be called from any thread, and from a signal handler.
        """
        if self._worker is not None:
            self._worker.stop()

    def hurry(self) -> None:
        """Receive no more and end now: work in flight is cancelled and handed back, as after a second signal."""
        if self._worker is not None:
            self._worker.hurry()

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Work until stopped.

        Args:
            max_iterations: End after this many iterations. An iteration waits up to `wait_seconds` for work, executes
                all messages that are in the mailbox by then, `concurrency` at a time, and leaves later messages to the
                next iteration. So `max_iterations=1` after `submit_dataset` executes the whole dataset.
            until_empty: End when the mailbox is empty and no message is in flight or waiting for a retry, on any
                worker, and this has been so for `empty_seconds`. Unlike an iteration, this includes messages sent
                meanwhile and does not wait for the first one.
        """
        if self._worker is None:
            raise ConfigurationError(f"{type(self).__name__}.run requires a mailbox: pass requests=...")
        async with AsyncExitStack() as stack:
            await self._open_resources(stack)
            await self._worker.run(max_iterations=max_iterations, until_empty=until_empty)

    def run_sync(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Call `run` from synchronous code. SIGTERM and Ctrl-C call `stop`, a second signal `hurry`; then this returns.

        Signals are handled only in the main thread, and only if the program has no handlers of its own. After Ctrl-C
        this raises KeyboardInterrupt.
        """
        call = partial(self.run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.hurry, self.config.drain_seconds)

    async def _open_resources(self, stack: AsyncExitStack) -> None:
        """Open what `run` needs; the stack closes it."""
        raise NotImplementedError


def run_interruptibly(
    call: Callable[[], Awaitable[None]], stop: Callable[[], None], hurry: Callable[[], None], drain_seconds: float
) -> None:
    """Run a loop from synchronous code; SIGTERM and Ctrl-C drain it, a second signal cancels its work.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, and the loop has ended. After a SIGTERM this returns.
    """
    signals = StopSignals(stop, hurry)
    deadline = math.inf
    with signals.handled():  # Before the start, so that no signal can come in between.
        future = blocking_portal().start_task_soon(call)
        while not wait([future], _BEAT_SECONDS).done:
            if signals.received:
                deadline = min(deadline, time.monotonic() + drain_seconds + 2 * _CANCEL_SECONDS)
            if time.monotonic() > deadline:
                _log.error("the loop did not end when stopped; the leases of its messages will expire")
                break
        else:
            future.result()
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
