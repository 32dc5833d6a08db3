"""Runs from synchronous code, with handling of Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

from fairtrial.base.sync_bridge import StopSignals, blocking_portal
from fairtrial.base.system import result_of
from fairtrial.runs.runner import Interrupt
from fairtrial.store.protocol import RunRecord
from fairtrial.store.redact import current

_SETTLE_SECONDS = 60.0


def _to_stderr(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())  # Not `print`: the handler may interrupt another write to the stream.


_announce: Callable[[str], None] = _to_stderr


@contextmanager
def announcing(say: Callable[[str], None]) -> Iterator[None]:
    """Announce interruptions with `say`, which is called in a signal handler; used by progress displays."""
    global _announce
    before, _announce = _announce, say
    try:
        yield
    finally:
        _announce = before


def run_interruptibly(call: Callable[[Interrupt], Awaitable[RunRecord]], *, durable: bool = True) -> RunRecord:
    """Execute a run from synchronous code. The first Ctrl-C drains it, the second cancels trials in flight.

    Either way the run can be resumed, and the text of the error, the last line that a script prints, says how; unless
    its store is not `durable`.
    """
    interrupt = Interrupt()
    ended = threading.Event()

    async def to_its_end() -> RunRecord:
        try:
            return await call(interrupt)
        finally:
            ended.set()

    started: list[Future[RunRecord]] = []

    def drain() -> None:
        interrupt()
        _announce("interrupted: finishing the trials in flight (once more to cancel them)")

    def cancel() -> None:
        for future in started:
            future.cancel()

    signals = StopSignals(drain, cancel)
    with signals.handled():  # Before the start, so that no signal can come in between.
        started.append(blocking_portal().start_task_soon(to_its_end))
        try:
            run = result_of(started[0])
        except CancelledError:
            ended.wait(_SETTLE_SECONDS)  # The future is done at once; closing and storing take a moment longer.
        except KeyboardInterrupt:  # From another handler.
            interrupt()
            signals.received.append(signal.SIGINT)
            ended.wait(_SETTLE_SECONDS)
        else:
            if not signals.received:
                return run
    if not durable:
        raise KeyboardInterrupt("the run was interrupted; it was kept in memory only, so it cannot be resumed")
    raise KeyboardInterrupt(f"the run was interrupted; its results are stored. Resume it with: {resume_command()}")


def resume_command() -> str:
    """Return the command that started this process and that resumes the run."""
    if not sys.argv or not sys.argv[0]:
        return "the same call again"
    program = [] if os.access(sys.argv[0], os.X_OK) and not sys.argv[0].endswith(".py") else ["python"]
    return shown_command([*program, *sys.argv])


def shown_command(words: Iterable[str]) -> str:
    """Return a command without passwords, and with a hint to insert them."""
    words = list(words)
    shown = [current().text(word) for word in words]
    hint = "" if shown == words else " (with the password in place of [redacted]; or set FAIRTRIAL_STORE)"
    return shlex.join(shown) + hint
