"""The requests of a run's batches: what the store has of them, which trials wait for them, and what they cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.offload import in_thread
from fairtrial.errors import ModelError
from fairtrial.store.batches import AGAIN, OPEN, BatchIntent, BatchRequest, BatchTable

log = logging.getLogger("fairtrial.models")

PIECE = 500
"""How many replies are stored or read in one transaction."""


async def ask_table[T](call: Callable[[], T], doing: str) -> T:
    """Call a table of batches in a thread, until its database is available."""
    return await retry_while_unavailable(lambda: in_thread(call), doing, log)


class RequestBook:
    """The requests of a run. Everything that changes them is stored first.

    Args:
        table: Where they are stored.
        run_id: The run.
        epoch: The fencing token of the run's owner.
        start: Starts a task that ends with the run, and whose errors end the run.

    Attributes:
        open_intents: Batches of an earlier process that were not read to their end, until they are continued.
        taken: The provider's ids of batches whose intent is known.
    """

    def __init__(
        self,
        table: BatchTable,
        run_id: str,
        epoch: int | None,
        start: Callable[[Callable[[], Coroutine[Any, Any, None]]], object],
    ) -> None:
        self._table, self._run_id, self._epoch, self._start = table, run_id, epoch, start
        self.open_intents: dict[str, BatchIntent] = {}
        self.taken: set[str] = set()
        self._rows: dict[str, BatchRequest] = {}  # By key, without their replies.
        self._waiters: dict[str, asyncio.Future[BatchRequest]] = {}
        self._loading: dict[str, asyncio.Future[BatchRequest]] = {}
        self._owed: dict[int, float] = {}  # By ordinal: what was paid, or is estimated, for trials without a result.
        self._estimates: dict[str, float] = {}  # The parts of that which are estimates, by request.
        self._had: dict[int, float] = {}  # By ordinal: the part that is in its trial's hands.
        self._wasted = 0.0  # What trials with a result have cost beyond what they had of it.

    async def read(self) -> None:
        """Read what earlier processes have left."""
        begin = await ask_table(lambda: self._table.begin(self._run_id, epoch=self._epoch), "reading the batches")
        figures = await ask_table(lambda: self._table.figures(self._run_id), "reading the batches")
        intents, requests = begin
        self.open_intents = {one.id: one for one in intents if one.state in OPEN}
        self.taken = {one.batch_id for one in intents if one.batch_id is not None}
        self._rows = {one.key: one for one in requests}
        for one in requests:
            self._owed[one.ordinal] = self._owed.get(one.ordinal, 0.0) + (one.cost_usd or 0.0)
        self._wasted = max((figures.unused_cost_usd or 0.0) - self.owed_usd, 0.0)  # All that is owed is unused yet.

    def get(self, key: str) -> BatchRequest | None:
        """Return what is known of a request."""
        return self._rows.get(key)

    def of(self, intent: BatchIntent, state: int) -> list[BatchRequest]:
        """Return the requests of a batch that have this state."""
        return [one for one in self._rows.values() if (one.intent, one.state) == (intent.id, state)]

    # Changes.

    async def plan(self, intent: BatchIntent, rows: Sequence[BatchRequest]) -> None:
        """Store a batch before it is sent."""
        await ask_table(lambda: self._table.plan(self._run_id, intent, rows, epoch=self._epoch), "storing a batch")

    async def change(self, intent: BatchIntent, **values: Any) -> BatchIntent:
        """Store a change of a batch, and return it."""
        intent = replace(intent, **values)
        await ask_table(lambda: self._table.change(self._run_id, intent, epoch=self._epoch), "storing a batch")
        return intent

    async def abandon(self, intent: BatchIntent, rows: Sequence[BatchRequest], error: ModelError | None = None) -> None:
        """Forget a batch that the provider has not made; its requests go to the next one, or end with the error."""
        await ask_table(lambda: self._table.abandon(self._run_id, intent, epoch=self._epoch), "storing a batch")
        for row in rows:
            self._owe(row)
            self._rows.pop(row.key, None)
            if row.tries:
                self._rows[row.key] = row._replace(state=AGAIN)
            future = self._waiters.pop(row.key, None)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(row._replace(state=AGAIN))
            else:
                future.set_exception(error)

    async def settle(self, rows: Sequence[BatchRequest]) -> list[BatchRequest]:
        """Store outcomes, and return them for `wake`."""
        used = [
            row._replace(used=1) if (future := self._waiters.get(row.key)) is not None and not future.done() else row
            for row in rows
        ]
        if used:
            await ask_table(
                lambda: self._table.settle(self._run_id, used, epoch=self._epoch), "storing replies of a batch"
            )
        return used

    async def wake(self, rows: Sequence[BatchRequest]) -> None:
        """Wake the trials that wait for outcomes which are stored."""
        late: list[str] = []  # They were asked for meanwhile.
        for row in rows:
            self._owe(row)
            self._rows[row.key] = row._replace(reply=None)
            future = self._waiters.pop(row.key, None)
            if future is not None and not future.done():
                future.set_result(row)
                if not row.used:
                    late.append(row.key)
        if late:
            await self.use(late)

    async def use(self, keys: Sequence[str]) -> None:
        """Store that replies were asked for."""
        await ask_table(lambda: self._table.use(self._run_id, keys, epoch=self._epoch), "storing replies of batches")

    # Trials.

    def send(self, row: BatchRequest, future: asyncio.Future[BatchRequest], estimate: float) -> None:
        """Count a request as sent, and wake a future with its outcome."""
        self._rows[row.key] = row
        self._waiters[row.key] = future
        self.expect(row.key, row.ordinal, estimate)

    def has_estimate(self, key: str) -> bool:
        """Return whether what a request will cost is counted."""
        return key in self._estimates

    async def wait(self, key: str) -> BatchRequest:
        """Wait for the outcome of a request that was sent."""
        future = self._waiters.get(key)
        if future is None or future.done():
            future = self._waiters[key] = asyncio.get_running_loop().create_future()
        return await future

    async def load(self, key: str) -> BatchRequest:
        """Read a stored reply, together with those that others ask for meanwhile."""
        future: asyncio.Future[BatchRequest] = asyncio.get_running_loop().create_future()
        if not self._loading:
            self._start(self._load_all)
        self._loading[key] = future
        return await future

    async def _load_all(self) -> None:
        while self._loading:
            await asyncio.sleep(0)
            keys = list(islice(self._loading, PIECE))
            futures = [self._loading[key] for key in keys]

            def read(keys: Sequence[str] = keys) -> dict[str, BatchRequest]:
                found = self._table.replies(self._run_id, keys)
                self._table.use(self._run_id, keys, epoch=self._epoch)
                return found

            found = await ask_table(read, "reading replies of batches")
            for key, future in zip(keys, futures, strict=True):
                if not future.done():
                    future.set_result(found[key])
                del self._loading[key]

    def take(self, key: str) -> None:
        """Forget a request whose outcome its trial has."""
        row = self._rows.pop(key, None)
        if row is not None and row.cost_usd:
            self._had[row.ordinal] = self._had.get(row.ordinal, 0.0) + row.cost_usd

    # Costs.

    def expect(self, key: str, ordinal: int, estimate: float) -> None:
        """Count about what a request will cost."""
        self._estimates[key] = estimate
        self._owed[ordinal] = self._owed.get(ordinal, 0.0) + estimate

    def _owe(self, row: BatchRequest) -> None:
        """Count what a request has cost in place of its estimate."""
        more = (row.cost_usd or 0.0) - self._estimates.pop(row.key, 0.0)
        if row.ordinal in self._owed:
            self._owed[row.ordinal] += more
        else:  # Its trial did not wait for it.
            self._wasted += more

    def has_result(self, ordinal: int) -> None:
        """Forget what a trial has cost that its result says; calls that it did not wait for are paid all the same."""
        self._wasted += self._owed.pop(ordinal, 0.0) - self._had.pop(ordinal, 0.0)

    @property
    def owed_usd(self) -> float:
        """What was paid that no result says, by estimate until the replies are there."""
        return sum(self._owed.values()) + self._wasted
