"""Batches single operations into statements.

A thousand jobs that each await their own acknowledgement would need a thousand transactions. Here the operations of one
iteration of the event loop, or those submitted while the last statement is running, are sent together; each caller
still gets its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairtrial.errors import MailboxClosedError, MailboxError

MAX_OPERATIONS = 500
MAX_BYTES = 4 * 1024 * 1024

type Operation = Callable[[str, Sequence[Any]], Awaitable[Sequence[Any]]]
"""Executes a batch on one mailbox and returns an answer for each item."""


class _Batch:
    __slots__ = ("futures", "items", "size")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.size = 0


class StatementBatcher:
    """Collects operations and executes them together."""

    def __init__(self) -> None:
        self._open: dict[tuple[Operation, str], _Batch] = {}
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, operation: Operation, mailbox: str, item: Any, size: int = 0) -> Any:
        """Execute an operation in the next batch for this mailbox and return its answer."""
        if self._closed:
            raise MailboxClosedError("the connection to PostgreSQL is closed")
        loop = asyncio.get_running_loop()
        batch = self._open.setdefault((operation, mailbox), _Batch())
        future: asyncio.Future[Any] = loop.create_future()
        batch.items.append(item)
        batch.futures.append(future)
        batch.size += size
        if self._running is None:
            # The task starts in the next iteration of the event loop, after all operations of this one were added.
            self._running = loop.create_task(self._run(), name="fairtrial mailbox operations")
        return await future

    async def _run(self) -> None:
        try:
            while self._open:
                batches, self._open = self._open, {}
                parts = [
                    (operation, mailbox, part)
                    for (operation, mailbox), batch in batches.items()
                    for part in _parts(batch)
                ]
                await asyncio.gather(*(_execute(*part) for part in parts))
        finally:
            self._running = None

    async def close(self) -> None:
        """Execute the pending operations, then refuse more."""
        self._closed = True
        while self._running is not None:
            await asyncio.wait([self._running])


def _parts(batch: _Batch) -> list[_Batch]:
    """Split a batch that is too large for one statement."""
    if len(batch.items) <= MAX_OPERATIONS and batch.size <= MAX_BYTES:
        return [batch]
    count = MAX_OPERATIONS if batch.size <= MAX_BYTES else max(1, MAX_BYTES * len(batch.items) // batch.size)
    parts = []
    for start in range(0, len(batch.items), min(count, MAX_OPERATIONS)):
        part = _Batch()
        part.items = batch.items[start : start + min(count, MAX_OPERATIONS)]
        part.futures = batch.futures[start : start + min(count, MAX_OPERATIONS)]
        parts.append(part)
    return parts


async def _execute(operation: Operation, mailbox: str, batch: _Batch) -> None:
    try:
        answers = await operation(mailbox, batch.items)
    except BaseException as error:  # Waiting callers must receive any error.
        told: BaseException = error
        if not isinstance(error, Exception):
            told = MailboxClosedError("the connection to PostgreSQL was closed before the operation was executed")
        for future in batch.futures:
            if not future.done():
                future.set_exception(told)
                future.exception()  # Mark as retrieved: a cancelled caller will not do so.
        if not isinstance(error, MailboxError | Exception):
            raise
        return
    for future, answer in zip(batch.futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)
