"""The messages that a worker is processing: their stage, their slots and their leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal

from fairtrial.base.offload import orphan
from fairtrial.errors import LeaseLostError
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.fleet.worker.lifecycle import WorkerLifecycle
from fairtrial.fleet.worker.settlement import MessageSettler, message_fields
from fairtrial.mailbox.lease import Lease, LeaseExtender
from fairtrial.mailbox.protocol import Message

_log = logging.getLogger("fairtrial.fleet")

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
    """The jobs in progress.

    Args:
        lifecycle: Notified when a job ends and when a slot is free.
        settler: Settles messages that their handler did not settle.
        counters: The counters to update.
        slots: Number of jobs executed at once.
        lease_seconds: The duration of each renewal.
        hold_seconds: How long leases are renewed by default; see `Job.keep_until`.
        stall_seconds: See `LeaseExtender`.
    """

    def __init__(
        self,
        lifecycle: WorkerLifecycle,
        settler: MessageSettler,
        counters: LoopCounters,
        *,
        slots: int,
        lease_seconds: float,
        hold_seconds: float,
        stall_seconds: float | None,
    ) -> None:
        self._lifecycle = lifecycle
        self._settler = settler
        self._counters = counters
        self._slots = slots
        self._lease_seconds = lease_seconds
        self._hold_seconds = hold_seconds
        self._stall_seconds = stall_seconds
        self._jobs: set[Job[T]] = set()
        self._executing = 0
        self._leases: LeaseExtender

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job[T]]:
        return iter(self._jobs)

    @property
    def free_slots(self) -> int:
        """Return the number of messages that may be received."""
        # Undelivered results are bounded too: they must not accumulate.
        return min(self._slots - self._executing, 2 * self._slots - len(self._jobs))

    def open(self) -> None:
        """Start renewing leases."""
        self._leases = LeaseExtender(lease_seconds=self._lease_seconds, stall_seconds=self._stall_seconds)

    async def close(self) -> None:
        """Stop renewing leases; abandon jobs that have not ended."""
        for job in self._jobs:
            orphan(job.task)
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
                self._settler.record_loss(message)
            elif not message.settled:
                await self._settler.hand_back(message)
        except LeaseLostError:
            self._settler.record_loss(message)
        except BaseException as error:  # User code may raise anything, SystemExit too.
            if not job.orphaned:
                await self._settler.fail(message, error)
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
            self._settler.record_loss(job.message)
        self._release(job, "ended")

    def orphan(self, job: Job[T]) -> None:
        """Abandon a job's task: free its slot and stop renewing its lease."""
        self._release(job, "orphaned")

    def _release(self, job: Job[T], stage: JobStage) -> None:
        self._leases.release(job.lease)
        self._jobs.discard(job)
        self._counters.in_flight -= 1
        if job.stage == "executing":
            self._executing -= 1
        job.stage = stage
        self._lifecycle.notify()


class OrphanedTasks[T]:
    """Abandons tasks that ignored their cancellation: each would occupy its slot for ever.

    Args:
        jobs: The jobs in progress.
        mailbox: The name of their mailbox, for the log.
        counters: The counters to update.
        handle: Settles the message of such a job, in a separate task.
    """

    def __init__(self, jobs: JobSet[T], mailbox: str, counters: LoopCounters, handle: Handler[T]) -> None:
        self._jobs = jobs
        self._mailbox = mailbox
        self._counters = counters
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self) -> None:
        """Orphan jobs that were already overdue at the last check.

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
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        self._counters.hung += 1
        self._jobs.orphan(job)
        if not message.settled:
            self._jobs.add([message], self._handle, stage="delivering")

    def close(self) -> None:
        """Let the event loop end without waiting for orphaned tasks."""
        for task in self._tasks:
            orphan(task)
