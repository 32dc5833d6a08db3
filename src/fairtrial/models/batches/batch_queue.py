"""Requests that wait for their batch: collected until there is a reason not to wait for more."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from fairtrial.models.batches.batching import Batching
from fairtrial.models.batches.calls import BatchCalls
from fairtrial.models.batches.requests import INTENT_DIGITS
from fairtrial.store.batches import BatchIntent, BatchRequest

_FIRST_SECONDS = 1.0
"""When the first batch is sent at the latest: what is wrong with all requests shows while others are being made."""


@dataclass(slots=True)
class PendingRequest:
    """A request that waits for its batch."""

    key: str
    text: str
    ordinal: int
    attempt: int
    tries: int
    future: asyncio.Future[BatchRequest]
    since: float


@dataclass(slots=True)
class BatchQueue:
    """The requests of adapters with the same model and the same terms.

    Attributes:
        calls: The adapter.
        settings: When they are sent.
        beside: The queues of the model and account, which share the provider's limits; this one is among them.
        pending: Those that wait.
        largest: The number of requests of a batch.
        sent: Whether there has been a batch in this process.
        under_way: The number of batches under way.
        blocked: Of those, the ones that were refused for lack of room and wait for it.
        room: Set when a batch has ended.
    """

    calls: BatchCalls
    settings: Batching
    beside: list[BatchQueue]
    pending: list[PendingRequest] = field(default_factory=list)
    largest: int = 0
    sent: bool = False
    under_way: int = 0
    blocked: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)
    _cost_usd: float = 0.0  # Of `_priced` replies.
    _priced: int = 0
    _before: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.largest = min(self.settings.max_requests, self.calls.wire.max_requests)
        self.beside.append(self)

    def estimate(self, text: str) -> float:
        """Return about what a request will cost: as those before it, or by its length."""
        return self._cost_usd / self._priced if self._priced else self.calls.estimate(len(text))

    def learn(self, rows: Sequence[BatchRequest]) -> None:
        """Let the costs of replies count for estimates."""
        costs = [row.cost_usd for row in rows if row.cost_usd is not None]
        self._cost_usd += sum(costs)
        self._priced += len(costs)

    def due(self, executing: int, waiting: int) -> bool:
        """Return whether a batch of what is pending should be sent even if it is not full.

        Args:
            executing: The number of trials that are being executed.
            waiting: The number of those that wait for batches.
        """
        now = (len(self.pending), executing)
        # Twice the same: between the wait of one trial and the start of the next, all seem to wait.
        idle = now == self._before and waiting >= executing
        self._before = now
        patience = self.settings.max_wait_seconds
        waited = asyncio.get_running_loop().time() - self.pending[0].since
        return idle or waited >= (patience if self.sent else min(patience, _FIRST_SECONDS))

    def fitting(self, largest: int) -> list[PendingRequest]:
        """Return the requests from the start that fit into one batch; at least one."""
        size = 0
        chunk: list[PendingRequest] = []
        for one in islice(self.pending, largest):
            size += len(one.text.encode()) + 200
            if chunk and size > self.calls.wire.max_bytes:
                break
            chunk.append(one)
        return chunk

    def new_intent(self, requests: int) -> BatchIntent:
        """Return the intent of a batch that is not stored yet."""
        calls = self.calls
        return BatchIntent(
            id=secrets.token_hex(INTENT_DIGITS // 2),
            provider=calls.provider,
            account=calls.account,
            base_url=calls.base_url,
            endpoint=calls.endpoint,
            model=calls.model,
            requests=requests,
            created_at=time.time(),
        )

    def make_room(self) -> None:
        """Let batches that wait for room go on, after one has ended."""
        self.under_way -= 1
        for one in self.beside:
            one.room.set()
            one.room = asyncio.Event()
