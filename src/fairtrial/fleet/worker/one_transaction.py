"""Stores a result and settles its request in one transaction, where the queue is in the database of the run's store.

    run still takes results?   lease still held?      ──> result stored, request gone, client notified
    store not found, run unknown, ended or executed
    by another process, result refused                ──> sent to the client, as on every other queue
    run continued with other code                     ──> request withdrawn
    lease lost                                        ──> nothing: another worker has the request

A worker that is killed before the transaction ends has stored nothing and holds only a lease. A trial may be executed
twice; its result is stored once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fairtrial.base import metrics
from fairtrial.base.offload import DaemonThreads, finish
from fairtrial.errors import LeaseLostError, StoreError, StoreUnavailableError, UnknownRunError
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.fleet.queues import committed_channel
from fairtrial.fleet.worker.config import LoopCounters
from fairtrial.fleet.worker.outbox import Delivery, ToMailbox, ToSender, ToStore
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.mailbox.server import ServerMailbox
from fairtrial.runs.events import trial_fields
from fairtrial.runs.run_lease import is_client_owner
from fairtrial.store.protocol import RESUMABLE, Committed, RunStore
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from fairtrial.mailbox.postgres import PostgresMailbox
    from fairtrial.store.commit import RunState
    from fairtrial.store.sql import SqlStore

_log = logging.getLogger("fairtrial.fleet")
_PAUSE_SECONDS = 60.0
"""After the database has shown no store that this worker can write to, results are sent to the client for this long."""

type _Batch = Sequence[tuple[Message[EvalRequest], EvalReply]]


class CommitRefusedError(Exception):
    """The run does not take this result from a worker."""


class OtherCodeError(CommitRefusedError):
    """The run has been continued with other code than this request's."""


class OneTransaction:
    """Stores the results of requests that allow it (`EvalRequest.commit`), and sends the others to their client.

    Args:
        requests: The mailbox of the requests.
        replies: Delivers results that are not stored here.
        counters: The counters to update.
    """

    needs_sample = False

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
            except (LeaseLostError, StoreUnavailableError):
                raise
            except OtherCodeError as error:
                self._note_refusal(reply, error)
                await message.acknowledge()
                return
            except (CommitRefusedError, StoreError) as error:
                self._note_refusal(reply, error)
        await self._replies.deliver(message, reply, death=death)

    async def deliver_all(self, batch: _Batch) -> None:
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
            except StoreUnavailableError:
                raise
            except StoreError as error:
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
        if isinstance(error, StoreError) and not isinstance(error, UnknownRunError):
            self._pause(error)

    async def _commit(self, store: SqlStore, run_id: str, batch: _Batch, death: str | None) -> None:
        """Store results of one run and settle their requests, or do neither. A cancellation does not interrupt it."""
        await finish(self._settle(store, run_id, batch, death))

    async def _settle(self, store: SqlStore, run_id: str, batch: _Batch, death: str | None) -> None:
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

    def __init__(self, run_id: str, batch: _Batch, death: str | None) -> None:
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
            raise LeaseLostError(f"{lost} of {len(receipts)} leases were lost: nothing is stored")

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
