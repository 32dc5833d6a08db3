"""Combines single operations into the batch requests of SQS, which have up to ten entries and 1 MiB.

SQS bills requests, so a request that is not full waits a moment for more entries, and until no other request of the
same kind to the same queue is under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from fairtrial.errors import MailboxClosedError, MailboxConnectionError
from fairtrial.mailbox.sqs.errors import FAILURES, translated

MAX_ENTRIES: Final = 10
MAX_BYTES: Final = 1024 * 1024
_PARALLEL: Final = 16
_DOING: Final = {
    "send_message_batch": "sending",
    "delete_message_batch": "acknowledging",
    "change_message_visibility_batch": "renewing leases",
}

type Run = Callable[[str, str, list[dict[str, Any]], int], Awaitable[Any]]


@dataclass(slots=True)
class _Entry:
    content: dict[str, Any]
    size: int
    future: asyncio.Future[dict[str, Any] | None]


@dataclass(slots=True)
class _Lane:
    """The operations of one kind on one queue."""

    waiting: deque[_Entry] = field(default_factory=deque)
    under_way: int = 0
    timer: asyncio.Handle | None = None
    due: bool = False

    def take(self) -> list[_Entry]:
        """Return the entries of the next request, or nothing if it should wait for more entries."""
        count = size = 0
        for entry in self.waiting:
            if count == MAX_ENTRIES or (count and size + entry.size > MAX_BYTES):
                break
            count += 1
            size += entry.size
        full = count == MAX_ENTRIES or count < len(self.waiting)
        if not count or self.under_way >= _PARALLEL or (not full and (self.under_way or not self.due)):
            return []
        self.due = self.due and full  # The entries that stay were added later, or leave with the next request.
        return [self.waiting.popleft() for _ in range(count)]


class RequestBatcher:
    """Collects operations and sends them in batches.

    Args:
        run: Sends one batch: operation, queue, entries and their total size.
        linger_seconds: How long a request that is not full waits for more entries.
    """

    def __init__(self, run: Run, linger_seconds: float) -> None:
        self._run = run
        self._linger = linger_seconds
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(
        self, operation: str, url: str, content: dict[str, Any], size: int = 0
    ) -> asyncio.Future[dict[str, Any] | None]:
        """Add one operation to the next batch.

        The future gets None, or the failure that SQS reports for this entry alone, or the error of the whole request.
        """
        if self._closed:
            raise MailboxClosedError("the connection to SQS is closed")
        loop = asyncio.get_running_loop()
        entry = _Entry(content, size, loop.create_future())
        lane = self._lanes.setdefault((operation, url), _Lane())
        lane.waiting.append(entry)
        if lane.timer is None:
            # Without lingering: after all operations of this iteration of the event loop were added.
            lane.timer = loop.call_later(self._linger, self._end_linger, operation, url, lane)
        if len(lane.waiting) >= MAX_ENTRIES:
            self._flush(operation, url, lane)
        return entry.future

    async def close(self) -> None:
        """Send the pending operations, then refuse more."""
        self._closed = True
        for (operation, url), lane in list(self._lanes.items()):
            self._end_linger(operation, url, lane)
        while self._tasks or any(lane.waiting for lane in self._lanes.values()):
            await asyncio.sleep(0)
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _end_linger(self, operation: str, url: str, lane: _Lane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
        lane.timer = None
        lane.due = True
        self._flush(operation, url, lane)

    def _flush(self, operation: str, url: str, lane: _Lane) -> None:
        while entries := lane.take():
            lane.under_way += 1
            task = asyncio.ensure_future(self._send(operation, url, lane, entries))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not lane.under_way and not lane.waiting and lane.timer is None:
            self._lanes.pop((operation, url), None)

    async def _send(self, operation: str, url: str, lane: _Lane, entries: list[_Entry]) -> None:
        contents = [{"Id": str(at), **entry.content} for at, entry in enumerate(entries)]
        try:
            answer = await self._run(operation, url, contents, sum(entry.size for entry in entries))
            self._deliver(operation, entries, answer)
        except BaseException as error:  # Waiting callers must receive any error.
            told = error
            if isinstance(error, asyncio.CancelledError):
                told = MailboxClosedError("the connection to SQS is being closed")
            elif not isinstance(error, FAILURES):
                told = translated(error, _DOING[operation])
            for entry in entries:
                _fail(entry.future, told)
            if not isinstance(error, Exception):
                raise
        finally:
            lane.under_way -= 1
            self._flush(operation, url, lane)

    def _deliver(self, operation: str, entries: list[_Entry], answer: Any) -> None:
        failed = {str(failure["Id"]): failure for failure in answer.get("Failed") or ()}
        succeeded = {str(success["Id"]) for success in answer.get("Successful") or ()}
        for at, entry in enumerate(entries):
            if entry.future.done():
                continue
            if str(at) in succeeded or str(at) in failed:
                entry.future.set_result(failed.get(str(at)))
            else:
                _fail(entry.future, MailboxConnectionError(f"{_DOING[operation]}: SQS did not confirm an entry"))


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # Mark as retrieved: a cancelled caller will not do so.
