"""Calling async code from code that is not: one event loop in a thread of its own, for the whole process.

One loop, so that clients and connections opened in one call still work in the next; a daemon thread, so that nothing
keeps the interpreter from ending; no loop inside a loop, so that it works in notebooks.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import anyio
from anyio.from_thread import BlockingPortal

_lock = threading.Lock()
_portal: BlockingPortal | None = None
_thread: threading.Thread | None = None


def portal() -> BlockingPortal:
    """The process-wide way into the event loop thread."""
    global _portal, _thread
    with _lock:
        # A forked child inherits the variables, not the thread; and a call may have brought the thread down.
        if _portal is None or _thread is None or not _thread.is_alive():
            _portal, _thread = _start()
        return _portal


def _start() -> tuple[BlockingPortal, threading.Thread]:
    ready: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as opened:
            ready.set_result(opened)
            await opened.sleep_until_stopped()

    def run() -> None:
        try:
            anyio.run(serve)
        except KeyboardInterrupt:
            pass  # Raised by a call, which brings an event loop down. Whoever made the call has got it.

    # Nothing stops it: at the interpreter's end no thread can be started any more, which an orderly stop may need.
    thread = threading.Thread(target=run, name="fairtrial event loop", daemon=True)
    thread.start()
    return ready.result(), thread


def call_sync[T](call: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end from ordinary code."""
    future = portal().start_task_soon(call)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
