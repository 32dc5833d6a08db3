"""Processes that make no progress are ended."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

from fairtrial.errors import ConfigurationError


def main() -> None:
    """Kill the process that started this one when its heartbeats stop for the given time."""
    descriptor, pid, limit = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tick = min(1.0, limit / 4)
    silence = 0.0
    queue = RunQueue(pid)
    while silence < limit:
        began = time.monotonic()
        is_ready = select.select([descriptor], [], [], tick)[0]
        waited = time.monotonic() - began
        starved = queue.starved_seconds(waited)
        if is_ready:
            if not os.read(descriptor, 65536):
                return  # The process ended or stopped being watched.
            silence = 0.0
        elif waited > 2 * tick + 1 or _is_stopped(pid):
            silence = 0.0  # A machine or a process that was suspended is not stalled.
        else:
            silence += waited - starved
        if os.getppid() != pid:
            return
    sys.stderr.write(
        f"CRITICAL killing worker process {pid}: its interpreter has been stalled for {silence:.1f} s by code that "
        "holds the interpreter lock; its messages will be redelivered\n"
    )
    sys.stderr.flush()
    os.kill(pid, signal.SIGABRT)  # Its fault handler writes the stack of every thread.
    time.sleep(1)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


class RunQueue:
    """How long the threads of a process wait for a processor, by the scheduler of Linux; elsewhere it is not known.

    A process that gets no processor is not stalled: code that holds the interpreter lock uses one, or sleeps.
    """

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._before: dict[str, tuple[int, int]] = {}
        self.starved_seconds(0.0)

    def starved_seconds(self, elapsed: float) -> float:
        """Return for how many of the seconds since the last call a thread was ready and had no processor."""
        try:
            threads = os.listdir(self._folder)
        except OSError:
            return 0.0
        return min(elapsed, max((self._starved(thread, elapsed) for thread in threads), default=0.0))

    def _starved(self, thread: str, elapsed: float) -> float:
        try:
            with open(f"{self._folder}/{thread}/schedstat") as file:
                ran, delayed = map(int, file.read().split()[:2])
            state = _state(f"{self._folder}/{thread}")
        except (OSError, ValueError):
            return 0.0  # The thread has ended, or this kernel does not count.
        ran_before, delayed_before = self._before.get(thread, (ran, delayed))
        self._before[thread] = ran, delayed
        if ran == ran_before and state == "R":
            return elapsed  # The scheduler adds a delay when it is over.
        return (delayed - delayed_before) / 1e9


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; always False outside Linux."""
    try:
        return _state(f"/proc/{pid}") in "Tt"
    except OSError:
        return False


def _state(folder: str) -> str:
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    main()


_log = logging.getLogger(__name__)

EXIT_STALLED = 70
"""The exit code of a process that ends because it is stuck."""
_CONTAINED_FACTOR = 3


class Watchdog:
    """Detects an event loop that has stopped responding.

    The stack of the loop's thread is logged once per stall. Code that holds the interpreter lock stops this thread too:
    `InterpreterWatchdog` detects that.

    Args:
        stall_seconds: Time without a heartbeat that counts as a stall, not counting that without a processor (Linux).
        exit_on_stall: Whether to end the process at once. Its leases expire, and other workers receive its messages.
    """

    def __init__(self, stall_seconds: float, *, exit_on_stall: bool = False) -> None:
        if not stall_seconds > 0:
            raise ConfigurationError(f"stall_seconds must be more than 0 (got {stall_seconds})")
        self.stall_seconds = stall_seconds
        self.exit_on_stall = exit_on_stall
        self.stalls = 0
        self._interval = min(1.0, stall_seconds / 4)
        self._beat = 0.0
        self._starved = 0.0  # Since the last heartbeat.
        self._thread_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat, beyond the usual interval."""
        if self._thread is None:
            return 0.0
        return max(0.0, time.monotonic() - self._beat - self._starved - self._interval)

    @property
    def stalled(self) -> bool:
        """Whether the loop is stuck."""
        return self.silence >= self.stall_seconds

    def start(self) -> None:
        """Start watching the running event loop of this thread."""
        self._thread_id = threading.get_ident()
        self._end.clear()
        self._live(asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._watch, name="fairtrial watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        thread, self._thread = self._thread, None
        self._end.set()
        if self._timer is not None:
            self._timer.cancel()
        if thread is not None:
            thread.join()

    def _live(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat, self._starved = time.monotonic(), 0.0
        self._timer = loop.call_later(self._interval, self._live, loop)

    def _watch(self) -> None:
        told = False
        queue, looked = RunQueue(os.getpid()), time.monotonic()
        while not self._end.wait(self._interval):
            looked, before = time.monotonic(), looked
            self._starved += queue.starved_seconds(looked - before)
            if not self.stalled:
                if told:
                    _log.warning("the event loop responds again")
                told = False
            elif not told:
                told = True
                self.stalls += 1
                self._tell()

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "its thread is gone\n"
        _log.error("the event loop has been stuck for %.1f s, in:\n%s", self.silence, stack)
        if self.exit_on_stall:
            _log.critical("ending this process (exit_on_stall); its messages are redelivered when their leases expire")
            for handler in logging.getLogger().handlers:
                handler.flush()
            os._exit(EXIT_STALLED)


class InterpreterWatchdog:
    """Kills this process when its interpreter is stalled by code that holds the interpreter lock.

    A regular expression or a C extension can hold it for hours. Then no thread of this process runs, its leases expire
    and its messages are redelivered, while the process remains. Therefore a thread writes heartbeats to a pipe, and a
    small process at the other end kills this one after `stall_seconds` without a heartbeat, not counting the time in
    which it was suspended or (on Linux) got no processor. The stack of every thread is written to standard error first.
    The first process of a container cannot be killed from inside: there a thread outside the interpreter ends it, which
    counts all time and waits three times as long.

    Use it as a context manager around the work of the process.
    """

    def __init__(self, stall_seconds: float) -> None:
        if not stall_seconds > 0:
            raise ConfigurationError(f"stall_seconds must be more than 0 (got {stall_seconds})")
        self._stall_seconds = stall_seconds
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def __enter__(self) -> Self:
        beat = self._rearm
        if os.getpid() != 1:
            beat = self._write
            self._start_watcher()
        self._thread = threading.Thread(target=self._run, args=(beat,), name="fairtrial heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if self._watcher is None:
            faulthandler.cancel_dump_traceback_later()
            return
        os.close(self._pipe)
        try:
            self._watcher.wait(5)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()

    def _start_watcher(self) -> None:
        try:
            faulthandler.enable()
        except (AttributeError, OSError, RuntimeError, ValueError) as error:
            _log.debug("the stack of a stalled interpreter will not be shown: %s", error)
        ours, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        script = str(Path(__file__).with_name("stall_watcher.py"))
        command = [sys.executable, "-I", "-S", script, str(ours), str(os.getpid()), str(self._stall_seconds)]
        try:
            self._watcher = subprocess.Popen(  # noqa: S603 - our own script
                command, stdin=subprocess.DEVNULL, pass_fds=(ours,), start_new_session=True
            )
        finally:
            os.close(ours)

    def _run(self, beat: Callable[[], None]) -> None:
        interval = min(1.0, self._stall_seconds / 5)
        try:
            beat()
            while not self._end.wait(interval):
                beat()
        except OSError as error:
            _log.warning("a stalled interpreter will no longer be detected: %s", error)

    def _write(self) -> None:
        try:
            os.write(self._pipe, b".")
        except BlockingIOError:
            pass  # The watcher is suspended and has enough heartbeats in the pipe.

    def _rearm(self) -> None:
        faulthandler.dump_traceback_later(_CONTAINED_FACTOR * self._stall_seconds, exit=True)
