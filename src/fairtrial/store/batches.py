"""Batches of model calls at providers, as a store keeps them: what was sent, and the replies.

Every change carries the epoch of its writer and is refused once another process has taken the run over. All changes may
be repeated, so that a commit whose answer was lost is simply made again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from fairtrial.errors import ConfigurationError
from fairtrial.store.protocol import RunStore

type IntentState = Literal["planned", "submitting", "submitted", "collected", "abandoned"]
"""`planned`: stored, nothing was sent. `submitting`: it may have been sent. `submitted`: the provider's id is known.
`collected`: all replies are stored. `abandoned`: it turned out that the provider never made the batch."""

OPEN: tuple[IntentState, ...] = ("planned", "submitting", "submitted")

SENT, SUCCEEDED, INVALID, AGAIN = range(4)
"""The states of a request: without an outcome, answered, refused by the provider, to be sent in another batch."""


@dataclass(frozen=True, slots=True)
class BatchIntent:
    """One batch, from before it is sent.

    Attributes:
        id: 12 hexadecimal digits, with which all its requests begin.
        provider: The provider.
        account: A digest of the address and the key it is sent with.
        base_url: The address.
        endpoint: What all its requests are for.
        model: The model.
        requests: The number of its requests.
        created_at: When it was stored, by the clock of the machine that sends it.
        state: How far it has come.
        batch_id: The provider's id.
        file_id: The provider's id of the file with the requests, where there is one.
        done: Finished requests, as the provider reported; None if it did not.
        failed: Failed ones among them.
    """

    id: str
    provider: str
    account: str
    base_url: str
    endpoint: str
    model: str
    requests: int
    created_at: float
    state: IntentState = "planned"
    batch_id: str | None = None
    file_id: str | None = None
    done: int | None = None
    failed: int | None = None


class BatchRequest(NamedTuple):
    """One model call in a batch."""

    key: str
    intent: str
    ordinal: int
    state: int = SENT
    tries: int = 0  # How often a batch came back without an outcome for it.
    used: int = 0
    attempt: int = 1  # Of its trial.
    cost_usd: float | None = None
    reply: bytes | None = None


class BatchFigures(NamedTuple):
    """What the batches of a run came to."""

    requests: int = 0
    replies: int = 0
    cost_usd: float | None = None
    unused: int = 0
    unused_cost_usd: float | None = None


class BatchTable(Protocol):
    """The batches of a store."""

    def begin(self, run_id: str, *, epoch: int | None) -> tuple[list[BatchIntent], list[BatchRequest]]:
        """Return the intents of a run, and the requests of attempts without a result, without their replies.

        Those replies count as unused until their trials ask for them again.
        """
        ...

    def plan(
        self, run_id: str, intent: BatchIntent, requests: Sequence[BatchRequest], *, epoch: int | None = None
    ) -> None:
        """Store an intent and its requests, which are then in no other one."""
        ...

    def change(self, run_id: str, intent: BatchIntent, *, epoch: int | None = None) -> None:
        """Store the state of an intent."""
        ...

    def abandon(self, run_id: str, intent: BatchIntent, *, epoch: int | None = None) -> None:
        """Mark an intent as abandoned, and forget the requests that have no outcome."""
        ...

    def settle(self, run_id: str, requests: Sequence[BatchRequest], *, epoch: int | None = None) -> None:
        """Store the outcomes of requests, with the replies."""
        ...

    def use(self, run_id: str, keys: Iterable[str], *, epoch: int | None = None) -> None:
        """Record that the replies with these keys were asked for."""
        ...

    def replies(self, run_id: str, keys: Sequence[str]) -> dict[str, BatchRequest]:
        """Return stored requests with their replies."""
        ...

    def intents(self, run_id: str) -> list[BatchIntent]:
        """Return all intents of a run, the oldest first."""
        ...

    def figures(self, run_id: str) -> BatchFigures:
        """Return what the batches of a run came to."""
        ...

    def answered(self, run_id: str) -> dict[str, tuple[int, float | None]]:
        """Return the number of stored answers of each intent, and what they cost."""
        ...

    def forget_replies(self, run_id: str, *, epoch: int | None = None) -> None:
        """Delete the replies of stored attempts, which have them in their transcripts."""
        ...


def batch_table(store: RunStore) -> BatchTable:
    """Return the batches of a store. Raises `ConfigurationError` if it cannot keep any."""
    table: BatchTable | None = getattr(store, "batches", None)
    if table is None:
        raise ConfigurationError(
            f"batches need a store in SQLite, PostgreSQL or memory (got {type(store).__name__}): what was sent to the "
            "provider is stored before it is sent"
        )
    return table


class MemoryBatches:
    """The batches of a store in memory, which last as long as the process.

    Args:
        stored: Returns the attempts of the stored results of a run, by ordinal.
    """

    def __init__(self, stored: Callable[[str], Mapping[int, int]]) -> None:
        self._stored = stored
        self._lock = threading.Lock()
        self._intents: dict[str, dict[str, BatchIntent]] = {}
        self._requests: dict[str, dict[str, BatchRequest]] = {}

    def begin(self, run_id: str, *, epoch: int | None) -> tuple[list[BatchIntent], list[BatchRequest]]:
        """Return the intents of a run, and the requests of attempts without a result."""
        stored = self._stored(run_id)
        with self._lock:
            requests = self._requests.get(run_id, {})
            missing = {
                key: one._replace(used=0) for key, one in requests.items() if stored.get(one.ordinal, 0) < one.attempt
            }
            requests |= missing
            intents = list(self._intents.get(run_id, {}).values())
            return intents, [one._replace(reply=None) for one in missing.values()]

    def plan(
        self, run_id: str, intent: BatchIntent, requests: Sequence[BatchRequest], *, epoch: int | None = None
    ) -> None:
        """Store an intent and its requests."""
        self.change(run_id, intent)
        self.settle(run_id, requests)

    def change(self, run_id: str, intent: BatchIntent, *, epoch: int | None = None) -> None:
        """Store the state of an intent."""
        with self._lock:
            self._intents.setdefault(run_id, {})[intent.id] = intent

    def abandon(self, run_id: str, intent: BatchIntent, *, epoch: int | None = None) -> None:
        """Mark an intent as abandoned, and forget the requests that have no outcome."""
        self.change(run_id, replace(intent, state="abandoned"))
        with self._lock:
            requests = self._requests.get(run_id, {})
            for key in [one.key for one in requests.values() if (one.intent, one.state) == (intent.id, SENT)]:
                del requests[key]

    def settle(self, run_id: str, requests: Sequence[BatchRequest], *, epoch: int | None = None) -> None:
        """Store the outcomes of requests, with the replies."""
        with self._lock:
            self._requests.setdefault(run_id, {}).update((one.key, one) for one in requests)

    def use(self, run_id: str, keys: Iterable[str], *, epoch: int | None = None) -> None:
        """Record that the replies with these keys were asked for."""
        with self._lock:
            requests = self._requests.get(run_id, {})
            requests |= {key: requests[key]._replace(used=1) for key in keys if key in requests}

    def replies(self, run_id: str, keys: Sequence[str]) -> dict[str, BatchRequest]:
        """Return stored requests with their replies."""
        with self._lock:
            requests = self._requests.get(run_id, {})
            return {key: requests[key] for key in keys if key in requests}

    def intents(self, run_id: str) -> list[BatchIntent]:
        """Return all intents of a run, the oldest first."""
        with self._lock:
            return list(self._intents.get(run_id, {}).values())

    def figures(self, run_id: str) -> BatchFigures:
        """Return what the batches of a run came to."""
        with self._lock:
            requests = list(self._requests.get(run_id, {}).values())
        answered = [one for one in requests if one.state == SUCCEEDED]
        unused = [one for one in answered if not one.used]
        return BatchFigures(len(requests), len(answered), _sum(requests), len(unused), _sum(unused))

    def answered(self, run_id: str) -> dict[str, tuple[int, float | None]]:
        """Return the number of stored answers of each intent, and what they cost."""
        with self._lock:
            requests = [one for one in self._requests.get(run_id, {}).values() if one.state == SUCCEEDED]
        by_intent: dict[str, list[BatchRequest]] = {}
        for one in requests:
            by_intent.setdefault(one.intent, []).append(one)
        return {intent: (len(found), _sum(found)) for intent, found in by_intent.items()}

    def forget_replies(self, run_id: str, *, epoch: int | None = None) -> None:
        """Do nothing: the store ends with its process."""

    def delete(self, run_id: str) -> None:
        """Forget the batches of a run."""
        with self._lock:
            self._intents.pop(run_id, None)
            self._requests.pop(run_id, None)


def _sum(requests: Sequence[BatchRequest]) -> float | None:
    costs: list[Any] = [one.cost_usd for one in requests if one.cost_usd is not None]
    return sum(costs) if costs else None
