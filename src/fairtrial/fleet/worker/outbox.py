"""Delivers the results of a worker: to the sender of the request, to a mailbox, or into a store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fairtrial import errors
from fairtrial.base import metrics
from fairtrial.base.offload import DaemonThreads, finish
from fairtrial.fleet.messages import EvalReply, EvalRequest, by_run, without_payload, without_secrets
from fairtrial.fleet.queues import committed_channel
from fairtrial.fleet.worker.config import EvalLoopConfig, LoopCounters
from fairtrial.fleet.worker.execution import failed
from fairtrial.fleet.worker.jobs import DeliveryAttempts, Job, backoff
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.mailbox.server import ServerMailbox, acknowledge_all, reply_all, send_all
from fairtrial.runs.events import trial_fields
from fairtrial.runs.run_lease import is_client_owner
from fairtrial.runs.writer import size_of, split_batches
from fairtrial.store.protocol import RESUMABLE, Committed, RunStore
from fairtrial.store.redact import current
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from fairtrial.mailbox.postgres import PostgresMailbox
    from fairtrial.store.commit import RunState
    from fairtrial.store.sql import SqlStore

_log = logging.getLogger("fairtrial.fleet")
_PAUSE_SECONDS = 60.0
"""After the database has shown no store that this worker can write to, results are sent to the client for this long."""

type Batch = Sequence[tuple[Message[EvalRequest], EvalReply]]


class Delivery:
    """The destination of results. When `deliver` returns, the result is durable and its request may be settled.

    A delivery that has settled the request itself says so by `message.settled`.
    """

    needs_sample = False

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
        raise NotImplementedError

    async def deliver_all(self, batch: Batch) -> None:
        """Deliver many results whose requests will be acknowledged.

        Raises if any fails, and the caller must then deliver each one whose request is not settled separately.
        """
        await asyncio.gather(*(self.deliver(message, reply) for message, reply in batch))

    def close(self) -> None:
        """Close connections; a later delivery opens them again."""


class ToSender(Delivery):
    """Replies to the `reply_to` of each request."""

    def __init__(self, requests: Mailbox[EvalRequest]) -> None:
        self._requests = requests

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        await message.reply(without_secrets(reply))

    async def deliver_all(self, batch: Batch) -> None:
        """See `Delivery`."""
        await reply_all(self._requests, [(message, without_secrets(reply)) for message, reply in batch])


class ToMailbox(Delivery):
    """Sends everything to one mailbox."""

    def __init__(self, mailbox: Mailbox[Any]) -> None:
        self._mailbox = mailbox

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        await self._mailbox.send(without_secrets(reply))

    async def deliver_all(self, batch: Batch) -> None:
        """See `Delivery`."""
        await send_all(self._mailbox, [without_secrets(reply) for _, reply in batch])


class ToStore(Delivery):
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
                            problems[id(result)] = errors.BodyError(f"the store refuses it: {refused[result.key]}")
                _settle(batch, problems)
        finally:
            self._committing = None


def _size(waiting: tuple[EvalReply, asyncio.Future[None]]) -> int:
    reply = waiting[0]
    return size_of((reply.result, reply.sample_ordinal, reply.sample))


def _shared(error: Exception) -> Exception:
    return error if isinstance(error, errors.StoreError) else errors.StoreError(f"committing failed: {error!r}")


def _settle(batch: Sequence[tuple[EvalReply, asyncio.Future[None]]], problems: dict[int, Exception]) -> None:
    for reply, done in batch:
        if done.done():
            continue  # The waiting task was cancelled; the result is committed anyway.
        problem = problems.get(id(reply.result))
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)


class CommitRefusedError(Exception):
    """The run does not take this result from a worker."""


class OtherCodeError(CommitRefusedError):
    """The run has been continued with other code than this request's."""


class OneTransaction(Delivery):
    """Stores a result and settles its request in one transaction, if the queue is in the database of the run's store.

        run still takes results?   lease still held?      ──> result stored, request gone, client notified
        store not found, run unknown, ended or executed
        by another process, result refused                ──> sent to the client, as on every other queue
        run continued with other code                     ──> request withdrawn
        lease lost                                        ──> nothing: another worker has the request

    A worker that is killed before the transaction ends has stored nothing and holds only a lease. A trial may be
    executed twice; its result is stored once.

    Only for requests that allow it (`EvalRequest.commit`): the results of others are sent to their client.

    Args:
        requests: The mailbox of the requests.
        replies: Delivers results that are not stored here.
        counters: The counters to update.
    """

    def __init__(self, requests: PostgresMailbox[EvalRequest], replies: Delivery, counters: LoopCounters) -> None:
        self._requests = requests
        self._replies = replies
        self._counters = counters
        self._threads = DaemonThreads()
        self._store: SqlStore | None = None
        self._paused_until = 0.0

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        store = await self._open() if message.body.commit else None
        if store is not None:
            try:
                await self._commit(store, message.body.key.run_id, [(message, reply)], death)
                return
            except (errors.LeaseLostError, errors.StoreUnavailableError):
                raise
            except OtherCodeError as error:
                self._note_refusal(reply, error)
                await message.acknowledge()
                return
            except (CommitRefusedError, errors.StoreError) as error:
                self._note_refusal(reply, error)
        await self._replies.deliver(message, reply, death=death)

    async def deliver_all(self, batch: Batch) -> None:
        """See `Delivery`."""
        runs: dict[str, list[tuple[Message[EvalRequest], EvalReply]]] = {}
        others: list[tuple[Message[EvalRequest], EvalReply]] = []
        for message, reply in batch:
            (runs.setdefault(message.body.key.run_id, []) if message.body.commit else others).append((message, reply))
        store = await self._open() if runs else None
        for run_id, part in runs.items():
            if store is None:
                others += part
            else:
                await self._commit(store, run_id, part, None)
        if others:
            await self._replies.deliver_all(others)

    def close(self) -> None:
        """See `Delivery`."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    async def _open(self) -> SqlStore | None:
        """Return the store in the queue's database; None if there is none that this worker can use."""
        if self._store is None and time.monotonic() >= self._paused_until:
            try:
                self._store = await self._threads.run(self._open_store)
            except errors.StoreUnavailableError:
                raise
            except errors.StoreError as error:
                self._pause(error)
        return None if time.monotonic() < self._paused_until else self._store

    def _open_store(self) -> SqlStore:
        from fairtrial.store.sql import SqlStore

        connection = self._requests.connection
        store = SqlStore.beside_queue(connection.connect_blocking, connection.address)
        _log.info("results are stored in %s, in the transactions that settle their requests", connection.address)
        return store

    def _pause(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        _log.warning("results are sent to the client, because they cannot be stored in the queue's database: %s", error)

    def _note_refusal(self, reply: EvalReply, error: Exception) -> None:
        self._counters.commits_refused += 1
        key = reply.result.key
        _log.info("the result of %s is not stored by this worker: %s", key, error, extra=trial_fields(key))
        if isinstance(error, errors.StoreError) and not isinstance(error, errors.UnknownRunError):
            self._pause(error)

    async def _commit(self, store: SqlStore, run_id: str, batch: Batch, death: str | None) -> None:
        """Store results of one run and settle their requests, or do neither. A cancellation does not interrupt it."""
        await finish(self._settle(store, run_id, batch, death))

    async def _settle(self, store: SqlStore, run_id: str, batch: Batch, death: str | None) -> None:
        results = [_with_code(reply.result, message.body.code) for message, reply in batch]
        samples = {reply.sample_ordinal: message.body.sample for message, reply in batch}
        for message, _ in batch:
            message.settled = True  # Set before sending: a concurrent renewal must not report the lease as lost.
        began = time.monotonic()
        try:
            settling = _Settling(run_id, batch, death)
            committed: Committed = await self._threads.run(
                partial(store.commit_with, run_id, results, samples, settling)
            )
        except BaseException:
            for message, _ in batch:
                message.settled = False
            raise
        metrics.COMMIT_SECONDS.observe(time.monotonic() - began)
        self._counters.committed += len(batch)
        for key, problem in committed.unstorable:
            _log.error("the result of trial %s is stored as an error: %s", key, problem, extra=trial_fields(key))


def _with_code(result: EvalResult, code: int) -> EvalResult:
    return replace(result, code=code) if code else result


class _Settling:
    """The part of the queue in a transaction: settles requests of one run if their leases are valid."""

    def __init__(self, run_id: str, batch: Batch, death: str | None) -> None:
        self._run_id = run_id
        self._batch = batch
        self._death = death
        self._fingerprints = {message.body.fingerprint for message, _ in batch}

    def begin(self, connection: Connection) -> None:
        """Acknowledge the requests, or make them dead letters."""
        from fairtrial.mailbox.postgres.receive import settle_within

        reasons = None if self._death is None else [(reply.result.error or "", self._death) for _, reply in self._batch]
        receipts = [cast(Any, message.receipt) for message, _ in self._batch]
        lost = len(receipts) - settle_within(connection.exec_driver_sql, receipts, reasons)
        if lost:
            raise errors.LeaseLostError(f"{lost} of {len(receipts)} leases were lost: nothing is stored")

    def check(self, connection: Connection, committed: Committed, run: RunState) -> None:
        """Refuse results that the store or the run does not take; notify the run's clients of the others."""
        if committed.refused:
            raise CommitRefusedError(f"the store refuses it: {committed.refused[0][1]}")
        if run.status != "running" and run.status not in RESUMABLE:
            raise CommitRefusedError(f"the run is {run.status}")
        if run.owner is not None and not is_client_owner(run.owner):
            raise CommitRefusedError("another process executes the run without a fleet")
        sent = run.notes.fleet
        if sent is None or self._fingerprints != {sent.fingerprint}:
            raise OtherCodeError("the run has been continued with other code since it was requested")
        connection.exec_driver_sql("SELECT pg_notify(%s, '')", (committed_channel(self._run_id),))


def delivery_to(
    results: Mailbox[Any] | RunStore | None, requests: Mailbox[EvalRequest], counters: LoopCounters
) -> Delivery:
    """Return the delivery to `results`, or by default to the senders of the requests and to their store."""
    if results is not None:
        return ToStore(cast(RunStore, results)) if hasattr(results, "commit") else ToMailbox(cast(Any, results))
    replies = ToSender(requests)
    if isinstance(requests, ServerMailbox) and requests.server == "PostgreSQL":
        return OneTransaction(cast(Any, requests), replies, counters)
    return replies


_MAX_SENDERS = 2
_MAX_BATCH = 500
_REOPEN_SECONDS = 5.0  # How long to wait for a reply mailbox that does not exist.


class Outbox:
    """Delivers the results of jobs and settles their requests.

    Results are delivered in batches: all that are ready in one iteration of the event loop, or meanwhile. The results
    of a batch that fails are delivered one by one, with retries.

    Args:
        delivery: The destination of results.
        requests: The request mailbox.
        worker: The name of this worker in results.
        config: Settings.
        counters: The counters to update.
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
        self._worker = worker
        self._config = config
        self._counters = counters
        self._waiting: list[tuple[Job[EvalRequest], EvalReply]] = []
        self._senders: set[asyncio.Task[None]] = set()
        self._unreachable: dict[str, float] = {}  # Reply address -> deadline; grows only with invalid addresses.

    def put(self, job: Job[EvalRequest], result: EvalResult) -> None:
        """Queue a job's result for the next batch; the job is detached until then."""
        job.detach()
        self._waiting.append((job, self._reply(job.message.body, result)))
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
                        job.schedule(partial(self._finish, reply=reply))
                if not isinstance(error, Exception):
                    raise
                continue
            self._end_settled(batch)
            unsettled = [(job, reply) for job, reply in batch if not job.message.settled]
            for _, reply in unsettled:
                self._counters.outcomes[reply.result.outcome] += 1
            if unsettled:
                await self._acknowledge_all([job for job, _ in unsettled])

    def _end_settled(self, batch: list[tuple[Job[EvalRequest], EvalReply]]) -> None:
        """End the jobs whose requests were settled with the delivery of their results."""
        for job, reply in batch:
            if job.message.settled:
                self._counters.outcomes[reply.result.outcome] += 1
                self._counters.finished += 1
                job.end()

    async def _acknowledge_all(self, jobs: list[Job[EvalRequest]]) -> None:
        try:
            acknowledged = await acknowledge_all(self._requests, [job.message for job in jobs])
        except BaseException as error:
            for job in jobs:
                job.schedule(self._acknowledge_one)
            if not isinstance(error, Exception):
                raise
            return
        for job, ours in zip(jobs, acknowledged, strict=True):
            self._counters.finished += ours
            job.end(lost=not ours)

    def _reply(self, request: EvalRequest, result: EvalResult) -> EvalReply:
        """Build the reply with a result."""
        sample = request.sample if request.echo or self._delivery.needs_sample else None
        return EvalReply(result, request.sample_ordinal, sample, request.request_id, self._worker)

    async def _finish(self, job: Job[EvalRequest], *, reply: EvalReply) -> None:
        """Deliver a result, then acknowledge its request."""
        if await self._deliver(job, reply):
            await self._acknowledge_one(job)

    async def _acknowledge_one(self, job: Job[EvalRequest]) -> None:
        """Acknowledge a request whose result is delivered."""
        await self._settle(job, job.message.acknowledge)

    async def dead_letter(self, job: Job[EvalRequest], reason: str, error: BaseException) -> None:
        """Make a request a dead letter; its outcome is delivered first, so that the run can end."""
        request, reason = job.message.body, current().text(reason)
        fields = trial_fields(request.key, request.attempt)
        _log.error("dead-lettering trial %s: %s", request.key, reason, extra=fields)
        job.executed()
        reply, name = self._reply(request, failed(request, "dead_letter", "task", reason)), type(error).__name__
        if await self._deliver(job, reply, death=name):
            await self._settle(job, lambda: job.message.dead_letter(reason, error=name))
            self._counters.dead_lettered += 1

    async def set_aside(self, message: Message[EvalRequest], reason: str, error: str = "") -> None:
        """Make a request whose outcome cannot be delivered a dead letter."""
        fields = trial_fields(message.body.key, message.body.attempt)
        _log.error("dead-lettering request %s of %s: %s", message.id, self._requests.name, reason, extra=fields)
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
            except errors.LeaseLostError:
                raise
            except errors.BodyError as error:
                if isinstance(error, errors.MessageTooLargeError) and (smaller := without_payload(reply)) is not None:
                    _log.warning("delivering a part of the result of %s: %s", reply.result.key, error, extra=fields)
                    reply = smaller
                    continue
                if replaced:
                    raise
                replaced = True
                text = f"the result cannot be delivered: {error}"
                reply = self._reply(message.body, failed(message.body, "task_error", "delivery", text))
            except errors.FairtrialError as error:
                if isinstance(error, errors.ReplyNotAvailableError):
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
            except errors.MailboxConnectionError as error:
                failures += 1
                _log.warning("settling message %s again: %s", job.message.id, error)
                await asyncio.sleep(backoff(failures))
            else:
                self._counters.finished += 1
                return
