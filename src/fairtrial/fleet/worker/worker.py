"""The worker behind every loop: receives messages, handles them concurrently, renews their leases, drains.

    MessageReceiver: all free slots ──> JobSet: one task per message ──> handle(job) ──> settled
                                     │
                                     └── lease renewed from a thread; lost: the task is cancelled

No error in a message, user code or the mailbox ends the worker: failed receives are retried with backoff, and the error
of a handler only affects its message.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import Any

from fairtrial.base.sync_bridge import StopSignals, blocking_portal
from fairtrial.fleet.worker.config import LoopConfig
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.fleet.worker.jobs import Handler, Job, JobSet, OrphanedTasks
from fairtrial.fleet.worker.lifecycle import WorkerLifecycle
from fairtrial.fleet.worker.receiver import MessageReceiver
from fairtrial.fleet.worker.settlement import MessageSettler
from fairtrial.mailbox.dead_letters import DLQPolicy
from fairtrial.mailbox.protocol import Mailbox

_log = logging.getLogger("fairtrial.fleet")
_BEAT_SECONDS = 1.0
_CANCEL_SECONDS = 20.0
_DELIVER_SECONDS = 5.0


class Worker[T]:
    """Receives from one mailbox and passes each message to `handle`.

    Args:
        mailbox: The mailbox to receive from.
        handle: Handles and settles a message. If it raises, `policy` decides.
        concurrency: Number of messages handled at once.
        lease_seconds: The lease of received messages; renewed from a thread.
        hold_seconds: Maximum time for which a message may be leased.
        wait_seconds: How long one receive waits.
        empty_seconds: How long the mailbox must have been empty to end `run(until_empty=True)`.
        drain_seconds: How long work in flight may continue after `stop`.
        stall_seconds: See `LeaseExtender`.
        policy: What to do with a message whose handler failed.
        counters: The counters to update.
        handle_late: Settles a message whose handler has not ended after `hold_seconds` although it was cancelled: user
            code that ignores its cancellation. By default, the message counts as failed.
    """

    def __init__(
        self,
        mailbox: Mailbox[T],
        handle: Handler[T],
        *,
        concurrency: int,
        lease_seconds: float,
        hold_seconds: float,
        wait_seconds: float,
        empty_seconds: float = 0.0,
        drain_seconds: float,
        stall_seconds: float | None,
        policy: DLQPolicy,
        counters: LoopCounters,
        handle_late: Handler[T] | None = None,
    ) -> None:
        self.beat = 0.0
        self._drain_seconds = drain_seconds
        self._lifecycle = WorkerLifecycle()
        self._jobs: JobSet[T] = JobSet(
            self._lifecycle,
            MessageSettler(mailbox.name, policy, counters),
            counters,
            slots=concurrency,
            lease_seconds=lease_seconds,
            hold_seconds=hold_seconds,
            stall_seconds=stall_seconds,
        )
        self._orphans = OrphanedTasks(self._jobs, mailbox.name, counters, handle_late or _fail_late)
        self._receiver = MessageReceiver(
            mailbox,
            self._jobs,
            handle,
            self._lifecycle,
            counters,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
            empty_seconds=empty_seconds,
        )
        self.stop = self._lifecycle.request_stop
        self.hurry = self._lifecycle.request_hurry
        self.pause = self._receiver.pause

    @property
    def running(self) -> bool:
        """Whether `run` is in progress."""
        return self._lifecycle.running

    @property
    def ready(self) -> bool:
        """Whether `run` is in progress and has reached its mailbox."""
        return self.running and self._receiver.reached

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Work until stopped, for this many iterations, or until the mailbox is empty; then finish work in flight."""
        self._lifecycle.start()
        self._jobs.open()
        beating = asyncio.get_running_loop().create_task(self._beat())
        try:
            try:
                await self._receiver.run(max_iterations, until_empty)
                await self._drain()
                await self._hand_back()
            except BaseException:  # Cancelled, perhaps while handing back: hand back the rest first.
                await self._hand_back()
                raise
        finally:
            beating.cancel()
            self._lifecycle.end()
            self._orphans.close()
            await self._jobs.close()

    async def _drain(self) -> None:
        """Let jobs in progress finish: for `drain_seconds` after a request to stop, or until a request to hurry."""
        lifecycle = self._lifecycle
        lifecycle.drain()
        deadline: float | None = None
        while self._jobs and not lifecycle.hurry_requested:
            if deadline is None and lifecycle.stop_requested:  # Also while the last messages are being finished.
                _log.info("waiting up to %g s for %d jobs in flight", self._drain_seconds, len(self._jobs))
                deadline = time.monotonic() + self._drain_seconds
            if not await lifecycle.wait_for_change(deadline):
                return

    async def _hand_back(self) -> None:
        """Cancel executing jobs, whose messages are handed back; undelivered results get a moment more."""
        self._lifecycle.hand_back()
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
            self._orphans.check()
            await asyncio.sleep(_BEAT_SECONDS)


def worker_from_config[T](
    mailbox: Mailbox[T],
    handle: Handler[T],
    config: LoopConfig,
    counters: LoopCounters,
    *,
    hold_seconds: float,
    handle_late: Handler[T] | None = None,
) -> Worker[T]:
    """Create a worker with the settings of a loop."""
    return Worker(
        mailbox,
        handle,
        concurrency=config.concurrency,
        lease_seconds=config.lease_seconds,
        hold_seconds=hold_seconds,
        wait_seconds=config.wait_seconds,
        empty_seconds=config.empty_seconds,
        drain_seconds=config.drain_seconds,
        stall_seconds=config.stall_seconds,
        policy=config.dlq,
        counters=counters,
        handle_late=handle_late,
    )


async def _fail_late(job: Job[Any]) -> None:
    raise TimeoutError("the code ignored its cancellation")


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
