"""Batches single operations into pipelines.

A thousand jobs that each await their own acknowledgement would need a thousand round trips. Here the operations of one
iteration of the event loop, or those submitted while the last pipeline is running, are sent as a few script calls in
one pipeline; each caller still gets its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairtrial.errors import MailboxClosedError, MailboxConnectionError, MailboxError
from fairtrial.mailbox.redis.scripts import SEND, LuaScript

MAX_OPERATIONS = 200
MAX_BYTES = 4 * 1024 * 1024


class Call:
    """One call of one script, with the operations that it combines."""

    __slots__ = ("args", "futures", "keys", "script", "size")

    def __init__(self, script: LuaScript, keys: tuple[str, ...], args: list[Any]) -> None:
        self.script = script
        self.keys = keys
        self.args = args
        self.futures: list[asyncio.Future[Any]] = []
        self.size = 0

    def command(self) -> tuple[Any, ...]:
        """Return the command to send."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)


class Coalescer:
    """Collects operations and sends them together.

    Args:
        run: Runs calls in one round trip and returns an answer or an error for each.
    """

    def __init__(self, run: Callable[[Sequence[Call]], Awaitable[list[Any]]]) -> None:
        self._run = run
        self._open: dict[tuple[Any, ...], Call] = {}
        self._full: list[Call] = []
        self._sender: asyncio.Task[None] | None = None
        self._closed = False

    def submit(
        self, script: LuaScript, keys: tuple[str, ...], head: tuple[Any, ...], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """Add one operation to the next pipeline; the future gets its answer, or the error of its call."""
        if self._closed:
            raise MailboxClosedError("the connection to Redis is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        slot = (script.sha, keys, head)
        call = self._open.get(slot)
        if call is None:
            call = self._open[slot] = Call(script, keys, list(head))
        call.args.extend(args)
        call.futures.append(future)
        if script is SEND:
            call.size += len(args[1])
        if len(call.futures) >= MAX_OPERATIONS or call.size >= MAX_BYTES:
            self._full.append(self._open.pop(slot))
        if self._sender is None:
            # The task starts in the next iteration of the event loop, after all operations of this one were added.
            self._sender = loop.create_task(self._send(), name="fairtrial mailbox operations")
        return future

    async def _send(self) -> None:
        calls: list[Call] = []
        try:
            while self._full or self._open:
                calls = [*self._full, *self._open.values()]
                self._full, self._open = [], {}
                for call, answer in zip(calls, await self._run(calls), strict=True):
                    _deliver(call, answer)
        except BaseException as error:  # Waiting callers must receive any error.
            # A cancelled sender means that the connection is being closed; other errors may be retried.
            kind = MailboxConnectionError if isinstance(error, Exception) else MailboxClosedError
            told = error if isinstance(error, MailboxError) else kind(f"the operation was not run: {error!r}")
            for call in [*calls, *self._full, *self._open.values()]:
                _deliver(call, told)
            self._full, self._open = [], {}
            if not isinstance(error, Exception):
                raise
        finally:
            self._sender = None

    async def close(self) -> None:
        """Send the pending operations, then refuse more."""
        self._closed = True
        while self._sender is not None:
            await asyncio.wait([self._sender])


def _deliver(call: Call, answer: Any) -> None:
    if isinstance(answer, BaseException):
        for future in call.futures:
            if not future.done():
                future.set_exception(answer)
                future.exception()  # Mark as retrieved: a cancelled caller will not do so.
        return
    for future, own in zip(call.futures, answer, strict=True):
        if not future.done():
            future.set_result(own)
