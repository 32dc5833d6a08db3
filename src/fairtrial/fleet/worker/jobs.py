"""The jobs of a worker: started, leased, settled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fairtrial.base.backoff import UNAVAILABLE, retry_while_unavailable
from fairtrial.base.backoff import backoff as growing_pause
from fairtrial.base.frozen import EMPTY
from fairtrial.base.offload import orphan
from fairtrial.errors import ConfigurationError, FairtrialError, LeaseLostError
from fairtrial.fleet.worker.config import LoopConfig, LoopCounters
from fairtrial.mailbox.lease import Lease, LeaseExtender
from fairtrial.mailbox.protocol import Message
from fairtrial.mailbox.receive import RETURN_SECONDS
from fairtrial.runs.events import trial_fields
from fairtrial.store.redact import current
from fairtrial.trials.context import TrialKey

_log = logging.getLogger("fairtrial.fleet")


def message_fields(message: Message[Any]) -> dict[str, Any]:
    """Return the trial that a message asks for, as fields of a log record; bodies may have any type."""
    key = getattr(message.body, "key", None)
    return trial_fields(key, getattr(message.body, "attempt", None)) if isinstance(key, TrialKey) else {}


class WorkerLifecycle:
    """Whether a worker runs, and whether it was requested to end.

    A stop may be requested at any time, also before `run`, and from any thread. It ends receiving and limits the
    duration of draining; a request to hurry ends draining too. Tasks that wait for a free slot, for jobs to end or
    for a pause to be over wait for a change here.
    """

    def __init__(self) -> None:
        self.running = False
        self.stop_requested = False
        self.hurry_requested = False
        self.stopped: asyncio.Future[None]  # Done once a stop is requested, for `asyncio.wait`.
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start receiving. A stop that was requested earlier still applies."""
        if self.running:
            raise ConfigurationError("this loop is already running")
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.stopped = self._loop.create_future()
        self.running = True

    def end(self) -> None:
        """Clear the request to stop, so that the worker can run again."""
        self.running = self.stop_requested = self.hurry_requested = False
        self._loop = None

    def request_stop(self) -> None:
        """Request the worker to end, from any thread or a signal handler."""
        self.stop_requested = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._announce_stop)
            except RuntimeError:
                pass  # The event loop is closed: there is nothing left to stop.

    def request_hurry(self) -> None:
        """Request the worker to end without waiting for jobs in progress, from any thread or a signal handler."""
        self.hurry_requested = True
        self.request_stop()

    def _announce_stop(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)
        self.notify()

    def notify(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()

    async def wait_for_change(self, deadline: float | None = None) -> bool:
        """Wait until a job ends, a slot is free or a stop is requested; False if `deadline` passes first."""
        self._changed.clear()
        if deadline is None:
            await self._changed.wait()
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
        except TimeoutError:
            return False
        return True

    async def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a stop is requested."""
        deadline = time.monotonic() + seconds
        while not self.stop_requested and time.monotonic() < deadline:
            if not await self.wait_for_change(deadline):
                return


type JobStage = Literal["executing", "delivering", "orphaned", "ended"]
type TaskState = Literal["scheduled", "running", "detached"]
type Handler[T] = Callable[[Job[T]], Awaitable[None]]


class Job[T]:
    """One message that is being processed.

        executing ──> delivering ──> ended          executing ──> orphaned: its task ignored its cancellation

    A job that is executing occupies one of the worker's slots. Its task is scheduled, then running; a detached job has
    no task, because its result is delivered together with others.
    """

    __slots__ = (
        "_jobs", "cancel_requested", "is_overdue", "lease", "message", "stage", "task", "task_state"
    )  # fmt: skip

    def __init__(self, jobs: JobSet[T], message: Message[T], stage: JobStage) -> None:
        self._jobs = jobs
        self.message = message
        self.stage = stage
        self.task_state: TaskState = "scheduled"
        self.cancel_requested = False
        self.is_overdue = False
        self.lease: Lease
        self.task: asyncio.Task[None]

    @property
    def orphaned(self) -> bool:
        """Whether the worker has abandoned this job's task; its result is discarded."""
        return self.stage == "orphaned"

    def schedule(self, handle: Handler[T]) -> None:
        """Handle the message in a new task: the first one, or a further one of a detached job."""
        self.task_state = "scheduled"
        self.task = asyncio.get_running_loop().create_task(self._jobs.work(self, handle))

    def begin(self) -> None:
        """Mark the task as running."""
        self.task_state = "running"
        if self.cancel_requested:
            raise asyncio.CancelledError

    def detach(self) -> None:
        """Keep the job after its task has ended, until `end` or until `schedule` starts another task."""
        self.task_state = "detached"

    def executed(self) -> None:
        """Mark the work as done, with only the result to be delivered, and free the slot."""
        if self.stage == "executing":
            self._jobs.free_slot(self)

    def end(self, *, lost: bool = False) -> None:
        """End a detached job."""
        self._jobs.end(self, lost=lost)

    def keep_until(self, deadline: float) -> None:
        """Renew the lease until this time on the clock `time.monotonic()`."""
        self.lease.deadline = deadline

    def cancel(self) -> None:
        """Cancel the work. A task cancelled before its first step could not hand its message back."""
        if self.task_state == "running":
            self.task.cancel()
        else:  # Not begun, or its result is being delivered: takes effect when there is a task again.
            self.cancel_requested = True


class JobSet[T]:
    """The jobs in progress. Messages that their handler did not settle are settled here, which never raises.

    Args:
        mailbox: The name of the mailbox of their messages, for the log.
        lifecycle: Notified when a job ends and when a slot is free.
        config: Settings.
        counters: The counters to update.
        hold_seconds: How long leases are renewed by default; see `Job.keep_until`.
        handle_late: Settles the message of a job whose task ignored its cancellation, in a separate task.
    """

    def __init__(
        self,
        mailbox: str,
        lifecycle: WorkerLifecycle,
        config: LoopConfig,
        counters: LoopCounters,
        hold_seconds: float,
        handle_late: Handler[T],
    ) -> None:
        self._mailbox = mailbox
        self._lifecycle = lifecycle
        self._config = config
        self._counters = counters
        self._hold_seconds = hold_seconds
        self._handle_late = handle_late
        self._jobs: set[Job[T]] = set()
        self._executing = 0
        self._orphaned: set[asyncio.Task[None]] = set()
        self._leases: LeaseExtender

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job[T]]:
        return iter(self._jobs)

    @property
    def free_slots(self) -> int:
        """Return the number of messages that may be received."""
        # Undelivered results are bounded too: they must not accumulate.
        slots = self._config.concurrency
        return min(slots - self._executing, 2 * slots - len(self._jobs))

    def open(self) -> None:
        """Start renewing leases."""
        config = self._config
        self._leases = LeaseExtender(lease_seconds=config.lease_seconds, stall_seconds=config.stall_seconds)

    async def close(self) -> None:
        """Stop renewing leases; abandon jobs that have not ended."""
        for task in (*(job.task for job in self._jobs), *self._orphaned):
            orphan(task)
        await self._leases.__aexit__()

    def add(self, messages: Sequence[Message[T]], handle: Handler[T], stage: JobStage = "executing") -> None:
        """Start processing messages: renew their leases and handle each in a task."""
        jobs = [Job(self, message, stage) for message in messages]
        deadline = time.monotonic() + self._hold_seconds
        leases = self._leases.keep_all(messages, deadline=deadline, on_lost=[job.cancel for job in jobs])
        if stage == "executing":
            self._executing += len(jobs)
        self._jobs.update(jobs)
        self._counters.in_flight += len(jobs)
        for job, lease in zip(jobs, leases, strict=True):
            job.lease = lease
            job.schedule(handle)

    async def work(self, job: Job[T], handle: Handler[T]) -> None:
        """Handle a job's message; settle it if the handler does not."""
        message = job.message
        try:
            job.begin()
            await handle(job)
        except asyncio.CancelledError:
            if job.orphaned:
                pass
            elif job.lease.lost:
                self._record_loss(message)
            elif not message.settled:
                self._counters.handed_back += 1
                await self._settle(message.hand_back)  # So that another worker receives it at once.
        except LeaseLostError:
            self._record_loss(message)
        except BaseException as error:  # User code may raise anything, SystemExit too.
            if not job.orphaned:
                await self._fail(message, error)
        finally:
            if job.task_state != "detached" and not job.orphaned:
                self._release(job, "ended")

    def free_slot(self, job: Job[T]) -> None:
        """Free the slot of a job that only has its result to deliver."""
        job.stage = "delivering"
        self._executing -= 1
        self._lifecycle.notify()

    def end(self, job: Job[T], *, lost: bool) -> None:
        """End a detached job."""
        if lost:
            self._record_loss(job.message)
        self._release(job, "ended")

    def orphan_overdue(self) -> None:
        """Abandon the tasks of jobs that were already overdue at the last call: each would occupy its slot forever.

        Not at the first one: an event loop that was stuck has yet to cancel the overdue tasks.
        """
        now = time.monotonic()
        overdue = [
            job
            for job in self._jobs
            if job.stage == "executing" and job.task_state == "running" and job.lease.deadline <= now
        ]
        for job in overdue:
            if job.is_overdue:
                self._orphan(job)
            job.is_overdue = True

    def _orphan(self, job: Job[T]) -> None:
        message = job.message
        _log.error(
            "abandoning message %s of %s: its code ignored the cancellation. Code that catches every "
            "exception must re-raise CancelledError, or be run with isolate=True",
            message.id,
            self._mailbox,
            extra=message_fields(message),
        )
        self._orphaned.add(job.task)
        job.task.add_done_callback(self._orphaned.discard)
        self._counters.hung += 1
        self._release(job, "orphaned")
        if not message.settled:
            self.add([message], self._handle_late, stage="delivering")

    def _release(self, job: Job[T], stage: JobStage) -> None:
        self._leases.release(job.lease)
        self._jobs.discard(job)
        self._counters.in_flight -= 1
        if job.stage == "executing":
            self._executing -= 1
        job.stage = stage
        self._lifecycle.notify()

    def _record_loss(self, message: Message[T]) -> None:
        """Count a message whose lease was lost; this worker can no longer settle it."""
        self._counters.lease_losses += 1
        _log.warning("lost the lease of message %s of %s", message.id, self._mailbox, extra=message_fields(message))

    async def _fail(self, message: Message[T], error: BaseException) -> None:
        """Return a message for a retry, or make it a dead letter, after its handler failed."""
        named, fields, policy = (message.id, self._mailbox), message_fields(message), self._config.dlq
        if message.settled:
            _log.error("error after message %s of %s was settled: %r", *named, error, extra=fields)
        elif policy.verdict(error, message.delivery_count) == "dead_letter":
            self._counters.dead_lettered += 1
            _log.error("dead-lettering message %s of %s: %r", *named, error, extra=fields)
            reason = current().text(str(error))
            await self._settle(lambda: message.dead_letter(reason, error=type(error).__name__))
        else:
            self._counters.retried += 1
            delay = policy.delay(message.delivery_count)
            _log.warning("message %s of %s will be redelivered in %.1f s: %r", *named, delay, error, extra=fields)
            await self._settle(lambda: message.nack(delay))

    async def _settle(self, settle: Callable[[], Awaitable[None]]) -> None:
        doing = f"settling a message of {self._mailbox}"
        try:
            await retry_while_unavailable(settle, doing, _log, seconds=RETURN_SECONDS)
        except Exception as error:
            _log.warning("a message of %s will be redelivered when its lease expires: %s", self._mailbox, error)


_MAX_BACKOFF = 10.0


def backoff(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row: capped, and half of it random."""
    return growing_pause(failures, first=0.1, longest=_MAX_BACKOFF)


class DeliveryAttempts:
    """Retries the delivery of one result with backoff, and renews the lease meanwhile.

    If the receiver rejects the result, delivery is retried until `give_up_at`. If the receiver is unavailable, the
    result is kept as long as this process lives, because it was paid for.
    """

    def __init__(self, job: Job[Any], config: LoopConfig, counters: LoopCounters) -> None:
        self._job = job
        self._config = config
        self._counters = counters
        self._failures = 0
        self.give_up_at = time.monotonic() + config.delivery_seconds

    async def pause(self, error: FairtrialError, what: str, fields: Mapping[str, Any] = EMPTY) -> bool:
        """Pause before the next attempt; False if there is none."""
        self._failures += 1
        if time.monotonic() >= self.give_up_at and not isinstance(error, UNAVAILABLE):
            return False
        self._counters.delivery_retries += 1
        delay = backoff(self._failures)
        self._job.keep_until(max(self.give_up_at, time.monotonic() + delay) + self._config.buffer_seconds)
        _log.warning("retrying the delivery of %s in %.1f s: %s", what, delay, error, extra=fields)
        await asyncio.sleep(delay)
        return True
