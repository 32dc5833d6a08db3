"""A run on a fleet, its settings, and whether queue and store are one database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fairtrial.base.backoff import patience_seconds, retry_while_unavailable
from fairtrial.base.offload import in_thread
from fairtrial.errors import MailboxError, RunBusyError
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.fleet.queues import Broker, PostgresBroker
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.runs import run_lease
from fairtrial.runs.runner import OpenRun
from fairtrial.runs.writer import ask_store, call_store
from fairtrial.store.protocol import RunStore

if TYPE_CHECKING:
    from fairtrial.mailbox.postgres import PostgresConnection
    from fairtrial.store.sql import SqlStore

log = logging.getLogger("fairtrial.fleet")
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SharedDatabase:
    """The one database of a queue and a store."""

    connection: PostgresConnection
    store: SqlStore


async def find_shared_database(broker: Broker, store: RunStore) -> SharedDatabase | None:
    """Return the database that the queue and the store share; None if they are in different ones."""
    compare = getattr(store, "is_database_of", None)
    if compare is None or not isinstance(broker, PostgresBroker):
        return None
    connection: PostgresConnection = broker.connection
    loop = asyncio.get_running_loop()

    def look(key: int) -> tuple[bool, int | None]:
        statement = f"SELECT NOT pg_try_advisory_xact_lock({int(key)}), to_regclass('runs')::oid::bigint"
        asked = asyncio.run_coroutine_threadsafe(connection.ask("comparing queue and store", statement), loop)
        ((locked, table),) = asked.result(_ANSWER_SECONDS)
        return locked, table

    try:
        same = await ask_store(lambda: bool(compare(look)), "comparing queue and store")
    except (MailboxError, TimeoutError) as error:
        log.debug("workers will not store results themselves: %s", error)
        return None
    if not same:
        return None
    log.info("queue and store are in the same database: workers store results themselves")
    found: Any = store
    return SharedDatabase(connection, found)


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Settings of a client that submits a run to a fleet.

    Attributes:
        batch: Maximum number of requests to send, or results to commit, at once.
        receivers: Number of tasks that receive and commit batches of results concurrently.
        floor: Minimum number of requests to keep in the mailbox, however few workers there seem to be.
        batch_seconds: How long a batch of results is held by this client, before another collector may receive it.
        poll_seconds: Interval at which the depth of the request mailbox is read.
        recovery_seconds: Time without a result after which the client checks for lost requests.
        hint_seconds: Time without a result and without a worker after which the client logs a hint.
        worker_seconds: Time without a worker with this run's code after which the run ends as `incomplete`.
        ahead: With adaptive stopping, how far trials may be sent ahead of the first one without a result.
        max_rounds: How often lost requests are resent without a single result in between before they are given up.
        open_seconds: How long to wait at the start for the mailbox server.
        one_transaction: Whether workers store results themselves if the queue is in the store's own database.
    """

    batch: int = 500
    receivers: int = 2
    floor: int = 100
    batch_seconds: float = 15.0
    poll_seconds: float = 0.1
    recovery_seconds: float = 2.0
    hint_seconds: float = 10.0
    worker_seconds: float = field(default_factory=patience_seconds)
    ahead: int = 10_000
    max_rounds: int = 3
    open_seconds: float = field(default_factory=lambda: min(30.0, patience_seconds()))
    one_transaction: bool = True


class FleetRun:
    """One run, its store and its two mailboxes. Calls are retried while the store or mailbox is unavailable."""

    def __init__(
        self,
        work: OpenRun,
        requests: Mailbox[EvalRequest],
        results: Mailbox[EvalReply],
        fingerprint: str,
        config: DispatchConfig,
        shared: SharedDatabase | None = None,
    ) -> None:
        """Initialize; `shared` is the database of queue and store, if that is one and the same."""
        self.shared = shared
        self.work = work
        self.run = work.run
        self.run_id = work.run.run_id
        self.store = work.request.store
        self.observers = work.request.observers
        self.stop = work.stop
        self.requests = requests
        self.results = results
        self.fingerprint = fingerprint
        self.config = config
        self._store_failed = False

    async def ask_store[T](self, call: Callable[[], T]) -> T:
        """Call the store in a thread and return the result."""
        return await in_thread(lambda: call_store(call, f"reading run {self.run_id}", self.note_store_failure))

    async def ask_mailbox[T](self, call: Callable[[], Awaitable[T]], doing: str) -> T:
        """Call a mailbox and return the result; once the run is stopped, failures are raised instead of retried."""
        return await retry_while_unavailable(call, doing, log, enough=self.is_stopped)

    def is_stopped(self) -> bool:
        """Whether the run was stopped before the end of its plan."""
        return self.stop.reason is not None

    def note_store_failure(self) -> None:
        """Remember that the store was unavailable: it may have lost commits, see `StoredResults.find_vanished`."""
        self._store_failed = True

    def clear_store_failure(self) -> bool:
        """Return whether the store was unavailable since the last call, and reset the flag."""
        failed, self._store_failed = self._store_failed, False
        return failed


class RunOwnership:
    """The ownership of a run, held by one of its clients. Further clients may join without it.

    A client never takes a run from a process that executes it locally, and such a process never takes one from a
    client.
    """

    def __init__(self, fleet: FleetRun) -> None:
        self._fleet = fleet
        self._joined = False  # Another client owns the run.
        self._checked = time.monotonic()

    async def acquire(self, *, ending: bool = False) -> None:
        """Acquire the run, or join the client that holds it.

        A client that joined takes over when the other one is gone, unless it is `ending`.

        Raises:
            RunBusyError: a process executes the run locally.
        """
        fleet, work, run_id = self._fleet, self._fleet.work, self._fleet.run_id
        if work.lease is not None:
            try:
                await fleet.ask_store(work.lease.heartbeat)
                return
            except RunBusyError:
                work.lease.stop()
                work.lease = None  # The run was taken over while this process was frozen.
        owner = await fleet.ask_store(lambda: run_lease.active_owner(fleet.store, run_id))
        if ending and owner is None:
            return
        if owner is None or not await fleet.ask_store(lambda: run_lease.is_client(fleet.store, run_id)):
            work.lease = await run_lease.acquire(fleet.store, run_id, client=True)
        elif not self._joined:
            self._joined = True
            log.warning("run %s already has an active client (%s); duplicate results count once", run_id, owner)

    async def renew_if_due(self, now: float) -> None:
        """Call `acquire` again once per heartbeat interval."""
        if now - self._checked >= run_lease.HEARTBEAT_SECONDS:
            self._checked = now
            await self.acquire()


class Wakeup:
    """Lets one task end the pause of another."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """End the current pause, if any."""
        self._event.set()
        self._event = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        """Wait until `wake` is called, at most for this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            pass


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled earlier.

    asyncio delivers a cancellation once: a loop over mailbox calls that swallowed it would run forever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
