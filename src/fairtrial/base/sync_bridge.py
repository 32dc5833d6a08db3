"""Calling async code from code that is not: one event loop in a thread of its own, for the whole process.

One loop, so that clients and connections opened in one call still work in the next; a daemon thread, so that nothing
keeps the interpreter from ending; no loop inside a loop, so that it works in notebooks.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

from fairtrial.base.system import result_of

_lock = threading.Lock()
_portal: BlockingPortal | None = None
_thread: threading.Thread | None = None


def blocking_portal() -> BlockingPortal:
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
            pass  # Raised by a call, whose caller has received it; it ends the event loop.

    # Nothing stops it: at the interpreter's end no thread can be started any more, which an orderly stop may need.
    thread = threading.Thread(target=run, name="fairtrial event loop", daemon=True)
    thread.start()
    return ready.result(), thread


def call_sync[T](call: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end, from code without an event loop."""
    future = blocking_portal().start_task_soon(call)
    try:
        return result_of(future)
    except KeyboardInterrupt:
        future.cancel()
        raise


def make_sync[**P, T](call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the blocking version of an async function: `name_sync`, with the same parameters."""

    @functools.wraps(call)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
        return call_sync(lambda: call(*args, **kwargs))

    blocking.__name__ = blocking.__qualname__ = f"{call.__name__}_sync"
    blocking.__doc__ = f"Blocking version of `{call.__name__}`."
    return blocking


class StopSignals:
    """Ctrl-C and SIGTERM while blocking code waits for async code.

    Handled by a handler and not by an exception, which can come at any line.

    Args:
        first: Called at the first signal, in the handler.
        second: Called at the second. A third ends the process as it would any other.

    Attributes:
        received: The signals so far.
    """

    def __init__(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        self._first = first
        self._second = second
        self._previous: dict[int, Any] = {}
        self.received: list[int] = []

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals in this block that nobody else handles; only the main thread can."""
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        if threading.current_thread() is threading.main_thread():
            for number, handler in usual.items():
                if signal.getsignal(number) == handler:
                    self._previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, number: int, frame: object) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            self._first()
        else:
            self._restore()
            self._second()
