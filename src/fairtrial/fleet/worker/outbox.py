"""Results of a worker that are not delivered yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from fairtrial.base.offload import DaemonThreads
from fairtrial.errors import (
    BodyError,
    FairtrialError,
    LeaseLostError,
    MailboxConnectionError,
    MessageTooLargeError,
    ReplyNotAvailableError,
    StoreError,
)
from fairtrial.fleet.messages import EvalReply, EvalRequest, by_run, without_payload
from fairtrial.fleet.worker.config import EvalLoopConfig, LoopCounters
from fairtrial.fleet.worker.execution import failed
from fairtrial.fleet.worker.jobs import DeliveryAttempts, Job, backoff
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.mailbox.server import acknowledge_all, reply_all, send_all
from fairtrial.runs.events import trial_fields
from fairtrial.runs.writer import size_of, split_batches
from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult

_log = logging.getLogger("fairtrial.fleet")


class Delivery(Protocol):
    """The destination of results. When `deliver` returns, the result is durable and its request may be settled.

    A delivery that has settled the request itself says so by `message.settled`.
    """

    needs_sample: bool

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """Deliver one result.

        Args:
            message: The request.
            reply: The result.
            death: The type of the error because of which the request will be a dead letter; None if it will be
                acknowledged.

        Raises:
            BodyError: this result can never be delivered.
            FairtrialError: delivery failed for now; retrying may help.
        """
        ...

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """Deliver many results whose requests will be acknowledged.

        Raises if any fails, and the caller must then deliver each one whose request is not settled separately.
        """
        ...

    def close(self) -> None:
        """Close connections; a later delivery opens them again."""
        ...


class ToSender:
    """Replies to the `reply_to` of each request."""

    needs_sample = False

    def __init__(self, requests: Mailbox[EvalRequest]) -> None:
        self._requests = requests

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        await message.reply(reply)

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """See `Delivery`."""
        await reply_all(self._requests, batch)

    def close(self) -> None:
        """See `Delivery`."""


class ToMailbox:
    """Sends everything to one mailbox."""

    needs_sample = False

    def __init__(self, mailbox: Mailbox[Any]) -> None:
        self._mailbox = mailbox

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        await self._mailbox.send(reply)

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """See `Delivery`."""
        await send_all(self._mailbox, [reply for _, reply in batch])

    def close(self) -> None:
        """See `Delivery`."""


class ToStore:
    """Commits to a store. Results that arrive during a commit form the next batch."""

    needs_sample = True

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._threads = DaemonThreads()
        self._waiting: list[tuple[EvalReply, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((reply, done))
        if self._committing is None:
            self._committing = loop.create_task(self._commit_all())
        await done

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """See `Delivery`."""
        await asyncio.gather(*(self.deliver(message, reply) for message, reply in batch))

    def close(self) -> None:
        """See `Delivery`."""

    async def _commit_all(self) -> None:
        try:
            while self._waiting:
                batch = next(split_batches(self._waiting, _size))
                self._waiting = self._waiting[len(batch) :]
                problems: dict[int, Exception] = {}
                for run_id, (results, samples) in by_run(reply for reply, _ in batch).items():
                    try:
                        committed = await self._threads.run(partial(self._store.commit, run_id, results, samples))
                        refused = dict(committed.refused)
                    except Exception as error:
                        problems.update({id(result): _shared(error) for result in results})
                        continue
                    for result in results:
                        if result.key in refused:
                            problems[id(result)] = BodyError(f"the store refuses it: {refused[result.key]}")
                _settle(batch, problems)
        finally:
            self._committing = None


def _size(waiting: tuple[EvalReply, asyncio.Future[None]]) -> int:
    reply = waiting[0]
    return size_of((reply.result, reply.sample_ordinal, reply.sample))


def _shared(error: Exception) -> Exception:
    return error if isinstance(error, StoreError) else StoreError(f"committing failed: {error!r}")


def _settle(batch: Sequence[tuple[EvalReply, asyncio.Future[None]]], problems: dict[int, Exception]) -> None:
    for reply, done in batch:
        if done.done():
            continue  # The waiting task was cancelled; the result is committed anyway.
        problem = problems.get(id(reply.result))
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)


_MAX_SENDERS = 2
_MAX_BATCH = 500
_REOPEN_SECONDS = 5.0  # How long to wait for a reply mailbox that does not exist.


class ResultDelivery:
    """Delivers one result at a time, with retries, and settles its request.

    Args:
        delivery: The destination of results.
        requests: The name of the request mailbox, for the log.
        worker: The name of this worker in results.
        config: Settings.
        counters: The counters to update.
    """

    def __init__(
        self, delivery: Delivery, requests: str, worker: str, config: EvalLoopConfig, counters: LoopCounters
    ) -> None:
        self._delivery = delivery
        self._requests = requests
        self._worker = worker
        self._config = config
        self._counters = counters
        self._unreachable: dict[str, float] = {}  # Reply address -> deadline; grows only with invalid addresses.

    def reply(self, request: EvalRequest, result: EvalResult) -> EvalReply:
        """Build the reply with a result."""
        sample = request.sample if request.echo or self._delivery.needs_sample else None
        return EvalReply(result, request.sample_ordinal, sample, request.request_id, self._worker)

    async def finish(self, job: Job[EvalRequest], *, reply: EvalReply) -> None:
        """Deliver a result, then acknowledge its request."""
        if await self._deliver(job, reply):
            await self.acknowledge(job)

    async def acknowledge(self, job: Job[EvalRequest]) -> None:
        """Acknowledge a request whose result is delivered."""
        await self._settle(job, job.message.acknowledge)

    async def dead_letter(self, job: Job[EvalRequest], reason: str, error: BaseException) -> None:
        """Make a request a dead letter; its outcome is delivered first, so that the run can end."""
        request = job.message.body
        fields = trial_fields(request.key, request.attempt)
        _log.error("dead-lettering trial %s: %s", request.key, reason, extra=fields)
        job.executed()
        reply, name = self.reply(request, failed(request, "dead_letter", "task", reason)), type(error).__name__
        if await self._deliver(job, reply, death=name):
            await self._settle(job, lambda: job.message.dead_letter(reason, error=name))
            self._counters.dead_lettered += 1

    async def set_aside(self, message: Message[EvalRequest], reason: str, error: str = "") -> None:
        """Make a request whose outcome cannot be delivered a dead letter."""
        fields = trial_fields(message.body.key, message.body.attempt)
        _log.error("dead-lettering request %s of %s: %s", message.id, self._requests, reason, extra=fields)
        await message.dead_letter(reason, error=error)
        self._counters.dead_lettered += 1
        self._counters.finished += 1

    async def _deliver(self, job: Job[EvalRequest], reply: EvalReply, *, death: str | None = None) -> bool:
        """Deliver a result; False if that failed, and its message is a dead letter."""
        message = job.message
        attempts = DeliveryAttempts(job, self._config, self._counters)
        address = message.reply_to or ""
        fields = trial_fields(reply.result.key, reply.result.attempt)
        replaced = False
        while True:
            try:
                await self._delivery.deliver(message, reply, death=death)
            except LeaseLostError:
                raise
            except BodyError as error:
                if isinstance(error, MessageTooLargeError) and (smaller := without_payload(reply)) is not None:
                    _log.warning("delivering a part of the result of %s: %s", reply.result.key, error, extra=fields)
                    reply = smaller
                    continue
                if replaced:
                    raise
                replaced = True
                text = f"the result cannot be delivered: {error}"
                reply = self.reply(message.body, failed(message.body, "task_error", "delivery", text))
            except FairtrialError as error:
                if isinstance(error, ReplyNotAvailableError):
                    # After a data loss of Redis a client reopens its mailbox within seconds. Otherwise it is gone, and
                    # its requests must not block this worker.
                    limit = self._unreachable.setdefault(address, time.monotonic() + _REOPEN_SECONDS)
                    attempts.give_up_at = min(attempts.give_up_at, limit)
                if not await attempts.pause(error, f"the result of {reply.result.key}", fields):
                    await self.set_aside(message, f"the result could not be delivered: {error}", type(error).__name__)
                    return False
            else:
                self._unreachable.pop(address, None)
                self._counters.outcomes[reply.result.outcome] += 1
                return True

    async def _settle(self, job: Job[EvalRequest], settle: Callable[[], Awaitable[None]]) -> None:
        """Settle a message whose result is delivered, unless the delivery has; with retries while the lease lasts."""
        failures = 0
        while True:
            try:
                if not job.message.settled:
                    await settle()
            except MailboxConnectionError as error:
                failures += 1
                _log.warning("settling message %s again: %s", job.message.id, error)
                await asyncio.sleep(backoff(failures))
            else:
                self._counters.finished += 1
                return


class Outbox:
    """Delivers the results of jobs in batches: all that are ready in one iteration of the event loop, or meanwhile.

    Args:
        delivery: The destination of results.
        requests: The request mailbox.
        worker: The name of this worker in results.
        config: Settings.
        counters: The counters to update.

    Attributes:
        single: Delivers results one by one, when a batch fails.
    """

    def __init__(
        self,
        delivery: Delivery,
        requests: Mailbox[EvalRequest],
        worker: str,
        config: EvalLoopConfig,
        counters: LoopCounters,
    ) -> None:
        self._delivery = delivery
        self._requests = requests
        self.single = ResultDelivery(delivery, requests.name, worker, config, counters)
        self._counters = counters
        self._waiting: list[tuple[Job[EvalRequest], EvalReply]] = []
        self._senders: set[asyncio.Task[None]] = set()

    def put(self, job: Job[EvalRequest], result: EvalResult) -> None:
        """Queue a job's result for the next batch; the job is detached until then."""
        job.detach()
        self._waiting.append((job, self.single.reply(job.message.body, result)))
        if len(self._senders) < _MAX_SENDERS:
            sender = asyncio.get_running_loop().create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            try:
                await self._delivery.deliver_all([(job.message, reply) for job, reply in batch])
            except BaseException as error:
                self._end_settled(batch)
                for job, reply in batch:
                    if not job.message.settled:
                        self._counters.delivery_retries += 1
                        job.schedule(partial(self.single.finish, reply=reply))
                if not isinstance(error, Exception):
                    raise
                continue
            self._end_settled(batch)
            unsettled = [(job, reply) for job, reply in batch if not job.message.settled]
            for _, reply in unsettled:
                self._counters.outcomes[reply.result.outcome] += 1
            if unsettled:
                await self._acknowledge([job for job, _ in unsettled])

    def _end_settled(self, batch: list[tuple[Job[EvalRequest], EvalReply]]) -> None:
        """End the jobs whose requests were settled with the delivery of their results."""
        for job, reply in batch:
            if job.message.settled:
                self._counters.outcomes[reply.result.outcome] += 1
                self._counters.finished += 1
                job.end()

    async def _acknowledge(self, jobs: list[Job[EvalRequest]]) -> None:
        try:
            acknowledged = await acknowledge_all(self._requests, [job.message for job in jobs])
        except BaseException as error:
            for job in jobs:
                job.schedule(self.single.acknowledge)
            if not isinstance(error, Exception):
                raise
            return
        for job, ours in zip(jobs, acknowledged, strict=True):
            self._counters.finished += ours
            job.end(lost=not ours)
