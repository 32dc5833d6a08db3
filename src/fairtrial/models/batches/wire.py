"""What a provider's batches are to the sender: one protocol, with a module for each provider."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fairtrial.models.batches.recovery import Candidate
from fairtrial.store.batches import BatchIntent


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """A batch as the provider describes it.

    Attributes:
        id: The provider's id.
        ended: Whether there will be no further results.
        text: The provider's word for its state.
        requests: The number of its requests; None if the provider does not say.
        done: How many are finished; None if the provider does not report progress.
        failed: How many of them failed.
        problems: Why the batch as a whole was refused: (line number or None, code, message).
        files: The ids of its files: results first, then requests.
        input_file: The id of the file with the requests.
    """

    id: str
    ended: bool
    text: str
    requests: int | None = None
    done: int | None = None
    failed: int | None = None
    problems: tuple[tuple[int | None, str, str], ...] = ()
    files: tuple[str, ...] = ()
    input_file: str | None = None


class Line(NamedTuple):
    """The outcome of one request.

    `status` is an HTTP status: 200 with the answer in `body`, else the error. None if the provider did not come to it,
    with the reason in `body`, such as "expired".
    """

    custom_id: str
    status: int | None
    body: Any


class BatchWire(Protocol):
    """The batches of one provider. `client` is the SDK's; methods raise its errors."""

    max_requests: int
    max_bytes: int
    labelled: bool
    """Whether the provider's list shows the intent of each batch."""

    def endpoint(self, path: str) -> str:
        """Return the name of an endpoint in a batch."""
        ...

    def line(self, custom_id: str, endpoint: str, body: str) -> str:
        """Return one request as JSON, from the JSON of its body."""
        ...

    async def upload(self, client: Any, intent: BatchIntent, lines: Sequence[str]) -> str | None:
        """Upload the requests, if the provider takes them as a file; returns its id."""
        ...

    async def create(self, client: Any, intent: BatchIntent, lines: Sequence[str]) -> BatchStatus:
        """Make a batch, of the uploaded requests if they were."""
        ...

    async def get(self, client: Any, batch_id: str) -> BatchStatus:
        """Return the state of a batch."""
        ...

    def results(self, client: Any, status: BatchStatus) -> AsyncIterator[Line]:
        """Yield the outcomes of a batch that has ended, in any order."""
        ...

    async def listed(self, client: Any, since: float) -> list[Candidate]:
        """Return the batches of the account that were made since a time."""
        ...

    async def cancel(self, client: Any, batch_id: str) -> None:
        """Cancel a batch; what is finished is kept and paid."""
        ...

    async def delete(self, client: Any, intent: BatchIntent, status: BatchStatus | None) -> None:
        """Delete the requests and results of a batch at the provider; without a status, of one that was not made."""
        ...


def is_gone(error: BaseException | None) -> bool:
    """Return whether the provider does not have what was asked for any more."""
    return getattr(error, "status_code", None) in (404, 410)


def as_tree(record: Any) -> Mapping[str, Any]:
    """Return a record of an SDK as plain values."""
    tree = record if isinstance(record, Mapping) else record.model_dump(mode="json")
    if not isinstance(tree, Mapping):
        raise TypeError(f"a batch must be an object (got {type(tree).__name__})")
    return tree


def read_line(text: str, read: Callable[[Mapping[str, Any]], Line]) -> Line:
    """Parse a line of results. One that is damaged or cut off names no request, which then has no outcome."""
    try:
        return read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Line("", None, "unreadable")
