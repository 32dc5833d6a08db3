"""Calling async code from code that is not: one event loop in a thread of its own, for the whole process.

One loop, so that clients and connections opened in one call still work in the next; a daemon thread, so that nothing
keeps the interpreter from ending; no loop inside a loop, so that it works in notebooks.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import anyio
from anyio.from_thread import BlockingPortal

from fairtrial.runs.runner import Interrupt
from fairtrial.store.protocol import RunRecord

_SETTLE_SECONDS = 60.0

_lock = threading.Lock()
_portal: BlockingPortal | None = None
_owner = 0
_ending = False


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

    def run() -> None:
        try:
            anyio.run(serve)
        except RuntimeError:
            # The last thing a closing loop does is to wait, in a new thread, for the threads it looked up addresses
            # in; an interpreter that is ending starts no thread. All else has been closed by then.
            if not _ending:
                raise

    thread = threading.Thread(target=run, name="fairtrial event loop", daemon=True)
    thread.start()
    opened = ready.result()
    atexit.register(_stop, opened, thread)
    return opened


def _stop(opened: BlockingPortal, thread: threading.Thread) -> None:
    """Let the loop close its connections; for a moment only, the interpreter is ending."""
    global _ending
    _ending = True
    if not thread.is_alive():
        return
    opened.start_task_soon(opened.stop, True)
    thread.join(1.0)


def call_sync[T](call: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end from ordinary code."""
    future = portal().start_task_soon(call)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


def run_interruptibly(call: Callable[[Interrupt], Awaitable[RunRecord]]) -> RunRecord:
    """Run an evaluation from ordinary code. The first Ctrl-C lets it drain, the second cancels what is in flight.

    Either way the run is left resumable, and the error's text, the last line a script prints, says how to go on.
    """
    interrupt = Interrupt()
    ended = threading.Event()

    async def to_its_end() -> RunRecord:
        try:
            return await call(interrupt)
        finally:
            ended.set()

    with _terminate_as_interrupt():
        future = portal().start_task_soon(to_its_end)
        try:
            return future.result()
        except KeyboardInterrupt:
            interrupt()
            print("\ninterrupted: finishing the trials in flight (once more to cancel them)", file=sys.stderr)
        try:
            future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(_SETTLE_SECONDS)  # The future is done at once; closing and storing take a moment longer.
    raise KeyboardInterrupt(f"the run is stored as far as it got; go on with: {resume_command()}")


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """A polite request to end (SIGTERM) drains the run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def resume_command() -> str:
    """The command that started this process: run again, it resumes."""
    if not sys.argv or not sys.argv[0]:
        return "the same call again"
    program = [] if os.access(sys.argv[0], os.X_OK) and not sys.argv[0].endswith(".py") else ["python"]
    return shlex.join([*program, *sys.argv])
