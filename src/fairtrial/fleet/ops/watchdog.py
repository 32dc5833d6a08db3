"""Watchdogs: a thread that detects a stuck event loop, and a process that detects a stalled interpreter."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

from fairtrial.base.system import IS_POSIX
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.ops.stall_watcher import RunQueue

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
        is_logged = False
        queue, looked = RunQueue(os.getpid()), time.monotonic()
        while not self._end.wait(self._interval):
            looked, before = time.monotonic(), looked
            self._starved += queue.starved_seconds(looked - before)
            if not self.stalled:
                if is_logged:
                    _log.warning("the event loop responds again")
                is_logged = False
            elif not is_logged:
                is_logged = True
                self.stalls += 1
                self._log_stall()

    def _log_stall(self) -> None:
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
    The first process of a container cannot be killed from inside, and on Windows no pipe is inherited: there a thread
    outside the interpreter ends the process, which counts all time and waits three times as long.

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
        if os.getpid() != 1 and IS_POSIX:
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
            if not faulthandler.is_enabled():  # It may write to a file that somebody chose.
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
