"""The engine of every loop: receive as much as there is room for, work on it, keep the leases, drain.

    receive(all free slots) ──> one task per message ──> handle(job) ──> settled
                                     │
                                     └── lease renewed from a thread; lost: the task is cancelled

Nothing that a message, user code or the mailbox does ends the engine: a receive that fails is repeated with backoff,
and a handler that raises is that message's affair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairtrial.backoff import backoff as growing_pause
from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxAccessError, MailboxClosedError, MailboxError
from fairtrial.fleet.counters import LoopCounters
from fairtrial.logs import trial_fields
from fairtrial.mailbox.dead_letters import DLQPolicy
from fairtrial.mailbox.lease import Lease, LeaseExtender
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.metrics import QUEUE_DELAY_SECONDS
from fairtrial.offload import orphan
from fairtrial.portal import portal
from fairtrial.trials.keys import TrialKey

_log = logging.getLogger("fairtrial.fleet")
_BEAT_SECONDS = 1.0
_CANCEL_SECONDS = 20.0
_DELIVER_SECONDS = 5.0
_EMPTY_WAIT = 0.2
_MAX_BACKOFF = 10.0


class Job[T]:
    """One message being worked on."""

    __slots__ = (
        "_worker", "abandoned", "detached", "executing", "late", "lease", "message", "orphaned", "started", "task"
    )  # fmt: skip

    def __init__(self, worker: Worker[T], message: Message[T]) -> None:
        self._worker = worker
        self.message = message
        self.executing = True
        self.started = False
        self.abandoned = False
        self.detached = False
        self.late = False
        self.orphaned = False  # The task ignored its cancellation; its result is discarded.
        self.lease: Lease
        self.task: asyncio.Task[None]

    def executed(self) -> None:
        """The work is done and only its result is on its way: the next message may come."""
        if self.executing:
            self.executing = False
            self._worker._executing -= 1
            self._worker._wake()

    def detach(self) -> None:
        """The task may end, and the job goes on: until `end`, or until `resume` gives it another task."""
        self.detached = True

    def end(self, *, lost: bool = False) -> None:
        """A detached job is done."""
        if lost:
            self._worker._lost(self.message)
        self._worker._end(self)

    def resume(self, handle: Callable[[Job[T]], Awaitable[None]]) -> None:
        """Go on with a detached job in a task of its own."""
        self.detached = False
        self.task = asyncio.get_running_loop().create_task(self._worker._work(self, handle))

    def keep_until(self, deadline: float) -> None:
        """Renew the lease until then, on the clock `time.monotonic()`."""
        self.lease.deadline = deadline

    def cancel(self) -> None:
        """End the work. A task cancelled before its first step would never get to hand its message back."""
        if self.started and not self.detached:
            self.task.cancel()
        else:  # Not begun, or its result is on its way with others: heard when there is a task again.
            self.abandoned = True


class Worker[T]:
    """Receives from one mailbox and hands each message to `handle`.

    Args:
        mailbox: Where the work comes from.
        handle: Does it, and settles the message. What it raises is settled by `policy`.
        concurrency: How many messages are executed at once.
        lease_seconds: The lease to receive with; renewed from a thread.
        hold_seconds: How long a message may be held in all.
        wait_seconds: How long one receive waits.
        drain_seconds: How long work in flight may go on after `stop`.
        stall_seconds: See `LeaseExtender`.
        policy: What to do with a message whose handling failed.
        counters: Where to count.
        handle_late: Settles a message whose handling has not ended after `hold_seconds`, though it was cancelled by
            then: user code that catches its own cancellation. Unless given, it has failed.
    """

    def __init__(
        self,
        mailbox: Mailbox[T],
        handle: Callable[[Job[T]], Awaitable[None]],
        *,
        concurrency: int,
        lease_seconds: float,
        hold_seconds: float,
        wait_seconds: float,
        drain_seconds: float,
        stall_seconds: float | None,
        policy: DLQPolicy,
        counters: LoopCounters,
        handle_late: Callable[[Job[T]], Awaitable[None]] | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.policy = policy
        self.counters = counters
        self.beat = 0.0
        self._handle = handle
        self._concurrency = concurrency
        self._lease_seconds = lease_seconds
        self._hold_seconds = hold_seconds
        self._wait_seconds = wait_seconds
        self._drain_seconds = drain_seconds
        self._stall_seconds = stall_seconds
        self._handle_late = handle_late or self._too_late
        self._jobs: set[Job[T]] = set()
        self._hung: set[asyncio.Task[None]] = set()
        self._executing = 0
        self._paused_until = 0.0
        self._leases: LeaseExtender
        self._stopped: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._stopping = False
        self.reached = False

    @property
    def running(self) -> bool:
        """Whether `run` is under way."""
        return self._loop is not None

    def stop(self) -> None:
        """Receive no more, finish what is in flight, end. From any thread, or a signal handler."""
        self._stopping = True
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._hear_stop)
            except RuntimeError:
                pass  # The event loop is closed: there is nothing left to stop.

    def _hear_stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)
        self._changed.set()

    def pause(self, seconds: float) -> None:
        """Receive nothing for a while."""
        self._paused_until = time.monotonic() + seconds

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Work until stopped, for so many receives, or until the mailbox is empty; then finish what is in flight."""
        if self._loop is not None:
            raise ConfigurationError("this loop is running already")
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._stopped = self._loop.create_future()
        self._leases = LeaseExtender(lease_seconds=self._lease_seconds, stall_seconds=self._stall_seconds)
        beating = self._loop.create_task(self._beat())
        try:
            try:
                await self._receive_all(max_iterations, until_empty)
                await self._drain()
            except BaseException:
                await self._abandon()
                raise
        finally:
            beating.cancel()
            self._loop = None
            self._stopping = False
            for task in (*self._hung, *(job.task for job in self._jobs)):
                orphan(task)
            await self._leases.__aexit__()

    async def _receive_all(self, max_iterations: int | None, until_empty: bool) -> None:
        receives = failures = 0
        opened = False
        try:
            await self.mailbox.approximate_count()  # An idle worker is ready too, and its first receive waits for long.
            self.reached = True
        except MailboxError as error:
            _log.warning("%s cannot be reached yet: %s", self.mailbox.name, error)
        while not self._stopping and (max_iterations is None or receives < max_iterations):
            free = await self._room()
            if not free:
                return  # Asked to stop.
            receives += 1
            wait = min(self._wait_seconds, _EMPTY_WAIT) if until_empty else self._wait_seconds
            try:
                messages = await self._receive(free, wait)
                failures = 0
                opened = self.reached = True
                if until_empty and not messages and not self._jobs and await self.mailbox.approximate_count() == 0:
                    return
            except MailboxClosedError:
                raise  # Its owner closed it: there is nothing to receive from any more.
            except Exception as error:
                if not opened and isinstance(error, ConfigurationError | MailboxAccessError):
                    raise  # It never worked: that is for the person who set it up.
                failures += 1
                self.counters.receive_errors += 1
                delay = backoff(failures)
                _log.warning("receiving from %s failed (%r); trying again in %.1f s", self.mailbox.name, error, delay)
                await self._sleep(delay)

    async def _room(self) -> int:
        """How many messages there is room for; waits until there is some."""
        while not self._stopping:
            pause = self._paused_until - time.monotonic()
            if pause > 0:
                await self._sleep(pause)
                continue
            # Results on their way are bounded too: what cannot be delivered must not pile up.
            free = min(self._concurrency - self._executing, 2 * self._concurrency - len(self._jobs))
            if free > 0:
                return free
            self._changed.clear()
            await self._changed.wait()
        return 0

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not through a request to stop."""
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    async def _receive(self, count: int, wait: float) -> Sequence[Message[T]]:
        """Receive and start; a request to stop ends the wait, and loses nothing that was just received."""
        loop = asyncio.get_running_loop()
        receiving = loop.create_task(self._messages(count, wait))
        try:
            await asyncio.wait((receiving, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not receiving.done():
                receiving.cancel()
                await asyncio.wait([receiving])
            messages: Sequence[Message[T]] = ()
            if not receiving.cancelled() and receiving.exception() is None:
                messages = receiving.result()
                self.counters.received += len(messages)
                self._start(messages, loop)  # Also when we are being cancelled: only a job is handed back.
        if not receiving.cancelled():
            receiving.result()  # Raises what kept us from receiving.
        return messages

    async def _messages(self, count: int, wait: float) -> Sequence[Message[T]]:
        return await self.mailbox.receive(count, self._lease_seconds, wait)

    def _start(self, messages: Sequence[Message[T]], loop: asyncio.AbstractEventLoop) -> None:
        for message in messages:
            if message.waited_seconds is not None:
                QUEUE_DELAY_SECONDS.observe(message.waited_seconds, self.mailbox.name)
        jobs = [Job(self, message) for message in messages]
        deadline = time.monotonic() + self._hold_seconds
        leases = self._leases.keep_all(messages, deadline=deadline, on_lost=[job.cancel for job in jobs])
        self._executing += len(jobs)
        self._jobs.update(jobs)
        self.counters.in_flight += len(jobs)
        for job, lease in zip(jobs, leases, strict=True):
            job.lease = lease
            job.task = loop.create_task(self._work(job, self._handle))

    async def _work(self, job: Job[T], handle: Callable[[Job[T]], Awaitable[None]]) -> None:
        message = job.message
        job.started = True
        try:
            if job.abandoned:
                raise asyncio.CancelledError
            await handle(job)
        except asyncio.CancelledError:
            if job.orphaned:
                pass
            elif job.lease.lost:
                self._lost(message)
            elif not message.settled:
                self.counters.handed_back += 1
                await self._quietly(message.hand_back())
        except LeaseLostError:
            self._lost(message)
        except BaseException as error:  # User code may raise anything, SystemExit too.
            if not job.orphaned:
                await self.fail(message, error)
        finally:
            if not job.detached and not job.orphaned:
                self._end(job)

    def _end(self, job: Job[T]) -> None:
        self._leases.release(job.lease)
        self._jobs.discard(job)
        self.counters.in_flight -= 1
        if job.executing:
            self._executing -= 1
        self._wake()

    def _look_for_late(self) -> None:
        """Find jobs whose code goes on although its time is over: each would keep its slot for ever."""
        now = time.monotonic()
        late = [job for job in self._jobs if job.executing and job.started and job.lease.deadline <= now]
        for job in late:
            if job.late:
                self._orphan(job)
            job.late = (
                True  # Once more round: an event loop that was stuck has yet to tell the others their time is up.
            )

    def _orphan(self, job: Job[T]) -> None:
        """Go on without a job's task: its slot is free, and its message is settled by another one."""
        message = job.message
        _log.error(
            "message %s of %s is given up on: its code has been cancelled and goes on. Code that catches every "
            "exception must let CancelledError through, or be run with isolate=True",
            message.id,
            self.mailbox.name,
            extra=_fields(message),
        )
        job.orphaned = True
        self._hung.add(job.task)
        job.task.add_done_callback(self._hung.discard)
        self.counters.hung += 1
        self._end(job)
        if message.settled or self._loop is None:
            return
        instead = Job(self, message)
        instead.executing = False
        deadline = time.monotonic() + self._hold_seconds
        (instead.lease,) = self._leases.keep_all([message], deadline=deadline, on_lost=[instead.cancel])
        self._jobs.add(instead)
        self.counters.in_flight += 1
        instead.task = self._loop.create_task(self._work(instead, self._handle_late))

    async def _too_late(self, job: Job[T]) -> None:
        raise TimeoutError("its code does not end although it was cancelled")

    def _lost(self, message: Message[T]) -> None:
        self.counters.lease_losses += 1
        _log.warning("message %s of %s went to someone else", message.id, self.mailbox.name, extra=_fields(message))

    async def fail(self, message: Message[T], error: BaseException) -> None:
        """Give a message back, or set it aside, because handling it failed."""
        named, fields = (message.id, self.mailbox.name), _fields(message)
        if message.settled:
            _log.error("after message %s of %s was settled: %r", *named, error, extra=fields)
        elif self.policy.verdict(error, message.delivery_count) == "dead_letter":
            self.counters.dead_lettered += 1
            _log.error("message %s of %s is set aside: %r", *named, error, extra=fields)
            await self._quietly(message.dead_letter(str(error), error=type(error).__name__))
        else:
            self.counters.retried += 1
            delay = self.policy.delay(message.delivery_count)
            _log.warning("message %s of %s comes back in %.1f s: %r", *named, delay, error, extra=fields)
            await self._quietly(message.nack(delay))

    async def _quietly(self, settling: Awaitable[None]) -> None:
        try:
            await settling
        except Exception as error:
            _log.warning("a message of %s comes back when its lease ends: %s", self.mailbox.name, error)

    async def _drain(self) -> None:
        """Let what is in flight end; hand back what does not in time."""
        limit = self._drain_seconds if self._stopping else None
        if limit is not None and self._jobs:
            _log.info("what is in flight (%d) may take %g s to finish", len(self._jobs), limit)
        end = None if limit is None else time.monotonic() + limit
        while self._jobs:
            if self._stopping and end is None:  # Stopped while it was finishing its last messages.
                end = time.monotonic() + self._drain_seconds
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        await self._abandon()

    async def _abandon(self) -> None:
        """Cancel what is being executed; each message is handed back. Results on their way get a moment more."""
        for job in self._jobs:
            if job.executing:
                job.cancel()
        if await self._ended(_DELIVER_SECONDS):
            for job in self._jobs:
                job.cancel()
            if left := await self._ended(_CANCEL_SECONDS):
                _log.error("%d jobs do not end although they were cancelled; their leases run out", left)

    async def _ended(self, seconds: float) -> int:
        """Wait for the jobs to end; returns how many have not."""
        end = time.monotonic() + seconds
        while self._jobs and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        return len(self._jobs)

    async def _beat(self) -> None:
        while True:
            self.beat = time.monotonic()
            self._look_for_late()
            await asyncio.sleep(_BEAT_SECONDS)

    def _wake(self) -> None:
        self._changed.set()


def _fields(message: Message[Any]) -> dict[str, Any]:
    """The trial a message asks for, as fields of a log record; bodies may be anything."""
    key = getattr(message.body, "key", None)
    return trial_fields(key, getattr(message.body, "attempt", None)) if isinstance(key, TrialKey) else {}


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row: capped, and half of it drawn at random."""
    return growing_pause(failures, first=0.1, longest=_MAX_BACKOFF)


def run_interruptibly(call: Callable[[], Awaitable[None]], stop: Callable[[], None], drain_seconds: float) -> None:
    """Run a loop from ordinary code; Ctrl-C lets it drain, a second one cancels what is in flight."""
    future = portal().start_task_soon(call)
    try:
        future.result()
    except KeyboardInterrupt:
        stop()
        try:
            future.result(drain_seconds + 2 * _CANCEL_SECONDS)
        except BaseException:  # A second Ctrl-C, or it does not end.
            future.cancel()
        raise
