"""Notices an event loop that is stuck: from a thread, because a stuck loop notices nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback

from fairtrial.errors import ConfigurationError

_log = logging.getLogger(__name__)

EXIT_STALLED = 70
"""What a process ends with that was told to end when it is stuck."""


class Watchdog:
    """Expects a sign of life from an event loop every so often.

    Whoever is stuck is shown: the stack of the loop's thread goes to the log, once per stall. Code that holds the
    interpreter lock stops this thread too; then nothing answers at all, which a probe's own timeout notices.

    Args:
        stall_seconds: Silence of this length is a stall.
        exit_on_stall: End the process at once when it happens. Its leases run out and others do its work.
    """

    def __init__(self, stall_seconds: float, *, exit_on_stall: bool = False) -> None:
        if not stall_seconds > 0:
            raise ConfigurationError(f"stall_seconds is more than 0, not {stall_seconds}")
        self.stall_seconds = stall_seconds
        self.exit_on_stall = exit_on_stall
        self.stalls = 0
        self._interval = min(1.0, stall_seconds / 4)
        self._beat = 0.0
        self._thread_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life, beyond what is usual."""
        return 0.0 if self._thread is None else max(0.0, time.monotonic() - self._beat - self._interval)

    @property
    def stalled(self) -> bool:
        """Whether the loop is stuck just now."""
        return self.silence >= self.stall_seconds

    def start(self) -> None:
        """Watch the running event loop, which must be that of this thread."""
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
        self._beat = time.monotonic()
        self._timer = loop.call_later(self._interval, self._live, loop)

    def _watch(self) -> None:
        told = False
        while not self._end.wait(self._interval):
            if not self.stalled:
                if told:
                    _log.warning("the event loop is alive again")
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
            _log.critical("this process ends, as it was told to; its messages go to others when their leases run out")
            for handler in logging.getLogger().handlers:
                handler.flush()
            os._exit(EXIT_STALLED)
