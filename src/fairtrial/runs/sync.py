"""Runs from ordinary code, and what Ctrl-C does to them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

from fairtrial.portal import portal
from fairtrial.runs.runner import Interrupt
from fairtrial.store.protocol import RunRecord
from fairtrial.store.redact import current

_SETTLE_SECONDS = 60.0


def _to_stderr(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())  # Not `print`: in a handler, the stream may be in the middle of something.


_announce: Callable[[str], None] = _to_stderr


@contextmanager
def announcing(say: Callable[[str], None]) -> Iterator[None]:
    """Have interruptions announced by `say`, which is called in a signal handler; a progress display shows them."""
    global _announce
    before, _announce = _announce, say
    try:
        yield
    finally:
        _announce = before


def run_interruptibly(call: Callable[[Interrupt], Awaitable[RunRecord]], *, durable: bool = True) -> RunRecord:
    """Run an evaluation from ordinary code. The first Ctrl-C lets it drain, the second cancels what is in flight.

    Either way the run is left resumable, and the error's text, the last line a script prints, says how to resume it;
    unless its store is not `durable` and ends with the process.
    """
    interrupt = Interrupt()
    ended = threading.Event()

    async def to_its_end() -> RunRecord:
        try:
            return await call(interrupt)
        finally:
            ended.set()

    future = portal().start_task_soon(to_its_end)
    requests = _Requests(interrupt, future)
    with requests.heard():
        try:
            run = future.result()
        except CancelledError:
            ended.wait(_SETTLE_SECONDS)  # The future is done at once; closing and storing take a moment longer.
        except KeyboardInterrupt:  # From a handler that is not ours.
            interrupt()
            requests.count += 1
            ended.wait(_SETTLE_SECONDS)
        else:
            if not requests.count:
                return run
    if not durable:
        raise KeyboardInterrupt("the run was interrupted; it was kept in memory only, so it cannot be resumed")
    raise KeyboardInterrupt(f"the run is stored as far as it got; go on with: {resume_command()}")


class _Requests:
    """Requests to end, by Ctrl-C or SIGTERM: counted by a handler, for an exception can come at any line."""

    def __init__(self, interrupt: Interrupt, future: Future[RunRecord]) -> None:
        self._interrupt = interrupt
        self._future = future
        self._previous: dict[int, Any] = {}
        self.count = 0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear them in here, where nobody else has asked to; only the main thread can."""
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        if threading.current_thread() is threading.main_thread():
            for number, handler in usual.items():
                if signal.getsignal(number) is handler or signal.getsignal(number) == handler:
                    self._previous[number] = signal.signal(number, self._hear)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _hear(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count == 1:
            self._interrupt()
            _announce("interrupted: finishing the trials in flight (once more to cancel them)")
        else:
            self._restore()  # A third time ends the process as it would any other.
            self._future.cancel()


def resume_command() -> str:
    """The command that started this process: run again, it resumes."""
    if not sys.argv or not sys.argv[0]:
        return "the same call again"
    program = [] if os.access(sys.argv[0], os.X_OK) and not sys.argv[0].endswith(".py") else ["python"]
    return shown_command([*program, *sys.argv])


def shown_command(words: Iterable[str]) -> str:
    """Return a command as it may be shown: without passwords, and then with what to put in their place."""
    words = list(words)
    shown = [current().text(word) for word in words]
    hint = "" if shown == words else " (with the password in place of [redacted]; or set FAIRTRIAL_STORE)"
    return shlex.join(shown) + hint
