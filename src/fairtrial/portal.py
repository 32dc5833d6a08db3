"""Calling async code from code that is not: one event loop in a thread of its own, for the whole process.

One loop, so that clients and connections opened in one call still work in the next; a daemon thread, so that nothing
keeps the interpreter from ending; no loop inside a loop, so that it works in notebooks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import anyio
from anyio.from_thread import BlockingPortal

_lock = threading.Lock()
_portal: BlockingPortal | None = None
_owner = 0


def portal() -> BlockingPortal:
    """The process-wide way into the event loop thread."""
    global _portal, _owner
    with _lock:
        if _portal is None or _owner != os.getpid():  # A forked child inherits the variable, not the thread.
            _portal, _owner = _start(), os.getpid()
        return _portal


def _start() -> BlockingPortal:
    ready: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as opened:
            ready.set_result(opened)
            await opened.sleep_until_stopped()

    # Nothing stops it: at the interpreter's end no thread can be started any more, which an orderly stop may need.
    threading.Thread(target=anyio.run, args=(serve,), name="fairtrial event loop", daemon=True).start()
    return ready.result()


def call_sync[T](call: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end from ordinary code."""
    future = portal().start_task_soon(call)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
