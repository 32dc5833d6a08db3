"""Runs from ordinary code, and what Ctrl-C does to them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from fairtrial.portal import portal
from fairtrial.runs.runner import Interrupt
from fairtrial.store.protocol import RunRecord

_SETTLE_SECONDS = 60.0


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
