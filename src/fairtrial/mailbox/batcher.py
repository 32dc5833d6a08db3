"""Operations that are executed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairtrial.errors import MailboxClosedError, MailboxConnectionError, MailboxError


class OpenBatch:
    """Operations with the same key, and the futures of their answers."""

    __slots__ = ("futures", "items", "key", "size")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.items: list[Any] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.size = 0


class Batcher:
    """Collects operations and executes them together: those of one iteration of the event loop, then what came since.

    Args:
        server: The server's name in messages.
        run: Executes batches; returns for each the answers to its operations, or its error.
        most: The number of operations in a batch.
        most_bytes: The size at which a batch is full.
    """

    def __init__(
        self, server: str, run: Callable[[Sequence[OpenBatch]], Awaitable[Sequence[Any]]], most: int, most_bytes: int
    ) -> None:
        self._server = server
        self._run = run
        self._most = most
        self._most_bytes = most_bytes
        self._open: dict[Any, OpenBatch] = {}
        self._full: list[OpenBatch] = []
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, key: Any, item: Any, size: int = 0) -> asyncio.Future[Any]:
        """Add one operation to the next batch with this key; the future gets its answer, or the error of its batch."""
        if self._closed:
            raise MailboxClosedError(f"the connection to {self._server} is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = OpenBatch(key)
        batch.items.append(item)
        batch.futures.append(future)
        batch.size += size
        if len(batch.items) >= self._most or batch.size >= self._most_bytes:
            self._full.append(self._open.pop(key))
        if self._running is None:
            # The task starts in the next iteration of the event loop, after all operations of this one were added.
            self._running = loop.create_task(self._execute(), name="fairtrial mailbox operations")
        return future

    async def _execute(self) -> None:
        batches: list[OpenBatch] = []
        try:
            while self._full or self._open:
                batches = [*self._full, *self._open.values()]
                self._full, self._open = [], {}
                for batch, answers in zip(batches, await self._run(batches), strict=True):
                    _deliver(batch, answers)
        except BaseException as error:  # Waiting callers must receive any error.
            # A cancelled task means that the connection is being closed; other errors may be retried.
            kind = MailboxConnectionError if isinstance(error, Exception) else MailboxClosedError
            failure = error if isinstance(error, MailboxError) else kind(f"the operation was not run: {error!r}")
            for batch in [*batches, *self._full, *self._open.values()]:
                _deliver(batch, failure)
            self._full, self._open = [], {}
            if not isinstance(error, Exception):
                raise
        finally:
            self._running = None

    async def close(self) -> None:
        """Execute the pending operations, then refuse more."""
        self._closed = True
        while self._running is not None:
            await asyncio.wait([self._running])


def _deliver(batch: OpenBatch, answers: Any) -> None:
    if isinstance(answers, BaseException):
        for future in batch.futures:
            fail(future, answers)
        return
    for future, answer in zip(batch.futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Let a future raise an error, unless its caller was cancelled."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # Mark as retrieved: a cancelled caller will not do so.
