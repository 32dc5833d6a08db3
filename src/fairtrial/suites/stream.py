"""Iterate over the results of a run as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread

from fairtrial.base.offload import loop_caller, on_trio
from fairtrial.runs.events import log
from fairtrial.runs.runner import OnResult
from fairtrial.trials.result import EvalResult

_tasks: set[asyncio.Task[None]] = set()  # The event loop keeps only weak references.


class ResultStream(AsyncIterator[EvalResult]):
    """An async iterator over the results of a run that is executed in a task of its own.

    Not an async generator: one that is left with `break` is finalized in another task, where cancel scopes cannot be
    exited (PEP 789). An iterator that is left early, by `break`, an exception or `aclose`, stops its run; the run can
    be resumed.
    """

    def __init__(self, execute: Callable[[OnResult], Awaitable[object]], feeds: set[Feed]) -> None:
        self._execute = execute
        self._feeds = feeds
        self._feed: Feed | None = None

    async def __anext__(self) -> EvalResult:
        if self._feed is None:
            self._feed = Feed(self._execute, self._feeds)
        return await self._feed.next()

    async def aclose(self) -> None:
        """Stop the run and wait until its results are stored."""
        if self._feed is not None:
            self._feed.leave()
            with anyio.CancelScope(shield=True):
                await self._feed.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<ResultStream: {'not started' if self._feed is None else 'started'}>"

    def __del__(self) -> None:
        if self._feed is not None:
            self._feed.leave_from_anywhere()


class Feed:
    """The run behind a stream. It has no reference to the stream, which is finalized as soon as nobody uses it."""

    def __init__(self, execute: Callable[[OnResult], Awaitable[object]], feeds: set[Feed]) -> None:
        self._scope = anyio.CancelScope()
        self._send, self._receive = anyio.create_memory_object_stream[EvalResult]()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._feeds = feeds
        self.left = False
        feeds.add(self)
        self._call_soon = loop_caller()
        _spawn(lambda: self._run(execute))

    async def next(self) -> EvalResult:
        """Return the next result; raises the error that ended the run, or StopAsyncIteration."""
        try:
            return await self._receive.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._receive.close()
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise StopAsyncIteration from None

    def leave(self) -> None:
        """Stop the run; must be called in its event loop."""
        self.left = True
        self._receive.close()
        self._scope.cancel()

    def leave_from_anywhere(self) -> None:
        """Stop the run from any thread: an object is finalized in the thread that drops the last reference."""
        self.left = True
        if self._done.is_set():
            self._receive.close()
            return
        with contextlib.suppress(RuntimeError):  # The event loop has ended, and the run with it.
            self._call_soon(self.leave)

    async def ended(self) -> None:
        """Wait until the run has ended; can be called in any event loop."""
        if not self._done.is_set():
            await anyio.to_thread.run_sync(self._done.wait, abandon_on_cancel=True)

    async def _run(self, execute: Callable[[OnResult], Awaitable[object]]) -> None:
        try:
            with self._scope:
                await execute(self._send.send)
        except BaseException as error:
            self._error = error
            if isinstance(error, anyio.get_cancelled_exc_class()):
                raise
            if self.left and not isinstance(error, anyio.BrokenResourceError):
                log.warning("a run whose stream was closed early ended with %s: %s", type(error).__name__, error)
        finally:
            self._send.close()
            if self.left:
                self._receive.close()
            self._feeds.discard(self)
            self._done.set()


async def wait_for_left(feeds: Iterable[Feed]) -> None:
    """Wait until runs whose streams were left early have ended, so that no run is executed twice at the same time."""
    for feed in [feed for feed in feeds if feed.left]:
        await feed.ended()


def _spawn(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start a task outside any task group."""
    if on_trio():
        import trio

        trio.lowlevel.spawn_system_task(run, name="fairtrial stream")
        return
    task = asyncio.get_running_loop().create_task(run(), name="fairtrial stream")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
