"""Time as something that is handed in, so tests can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where code that measures or waits gets its time from."""

    def time(self) -> float:
        """Seconds since the epoch: for records people read."""
        ...

    def monotonic(self) -> float:
        """Seconds that never run backwards: for durations and deadlines."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


SYSTEM_CLOCK = SystemClock()
