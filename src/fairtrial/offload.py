"""User code that blocks, run where it cannot stop everything else: in daemon threads, or in a child process.

Daemon threads of our own, not a pool of the event loop's: a thread that hangs must keep neither the run nor the
interpreter from ending.
"""

from __future__ import annotations

import contextvars
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

from fairtrial.codec import decode, dumps
from fairtrial.errors import CodecError, FairtrialError

_MAX_HUNG = 256


class IsolatedError(FairtrialError):
    """User code failed in its child process; the message carries the original type and text."""


class ChildDiedError(IsolatedError):
    """The child process ended without an answer."""


def loop_caller() -> Callable[[Callable[[], Any]], Any]:
    """The function that runs something on the current event loop from another thread."""
    if on_trio():
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe


def on_trio() -> bool:
    """True if this runs on trio; nobody can be on it who has not imported it."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


class _Job:
    __slots__ = ("abandoned", "call", "context", "done", "error", "result", "wake")

    def __init__(self, call: Callable[[], Any], wake: Callable[[Callable[[], Any]], Any]) -> None:
        self.call = call
        self.context = contextvars.copy_context()
        self.wake = wake
        self.done = anyio.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False


class DaemonThreads:
    """Threads that are made as they are needed, reused, and never waited for at the end."""

    def __init__(self) -> None:
        self._idle: deque[queue.SimpleQueue[_Job | None]] = deque()
        self._lock = threading.Lock()
        self.hung = 0

    async def run(self, call: Callable[[], Any]) -> Any:
        """The call's result. A cancelled wait leaves the thread behind: nothing can stop a running thread."""
        if self.hung >= _MAX_HUNG:
            raise FairtrialError(
                f"{self.hung} threads hang in user code that does not return; mark it isolate=True, "
                "which runs it in a child process that can be killed"
            )
        job = _Job(call, loop_caller())
        self._queue().put(job)
        try:
            await job.done.wait()
        except BaseException:
            with self._lock:
                if not job.done.is_set():
                    job.abandoned = True
                    self.hung += 1
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # The traceback holds this frame: break the circle.
        return job.result

    def _queue(self) -> queue.SimpleQueue[_Job | None]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(jobs,), name="fairtrial user code", daemon=True).start()
        return jobs

    def _serve(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job.result = job.context.run(job.call)
            except BaseException as error:
                job.error = error
            with self._lock:
                self._idle.append(jobs)
                if job.abandoned:
                    self.hung -= 1
                    continue
            try:
                job.wake(job.done.set)
            except RuntimeError:
                return  # The event loop is gone; so is whoever waited.

    def close(self) -> None:
        """Let idle threads end; busy ones end with the process."""
        with self._lock:
            while self._idle:
                self._idle.pop().put(None)


async def run_isolated[T](call: Callable[[], Any], *, kind: type[T]) -> T:
    """The call's result from a forked child process, decoded as `kind`. A cancelled wait kills the child."""
    if not hasattr(os, "fork"):
        raise FairtrialError("isolate=True needs a system that can fork processes")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns that a forked child of a threaded process may meet a held lock; ours only runs the call,
        # writes to a pipe and leaves without cleaning up.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _child(call, reader, writer)
    os.close(writer)
    os.set_blocking(reader, False)
    received = bytearray()
    try:
        while True:
            await anyio.wait_readable(reader)
            piece = os.read(reader, 1 << 20)
            if not piece:
                break
            received += piece
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - it has been killed: there is nothing to wait for
    if not received:
        raise ChildDiedError(f"the child process ended without an answer ({_ended(status)})")
    said, _, text = bytes(received).decode("utf-8").partition("\n")
    if said == "ok":
        return decode(kind, text)
    raise IsolatedError(text)


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _child(call: Callable[[], Any], reader: int, writer: int) -> None:  # pragma: no cover - runs in the child
    try:
        os.close(reader)
        try:
            answer = "ok\n" + dumps(call())
        except CodecError as error:
            answer = f"error\nthe result cannot leave its process: {error}"
        except BaseException as error:
            shown = "".join(traceback.format_exception_only(error)).strip()
            answer = f"error\n{shown}"
        data = answer.encode("utf-8", "replace")
        while data:
            data = data[os.write(writer, data) :]
    finally:
        sys.stdout.flush()
        os._exit(0)
