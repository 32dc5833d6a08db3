"""Time: clocks, and pauses between attempts."""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, Self

import anyio

from fairtrial.base.metrics import WAITING
from fairtrial.errors import ConfigurationError, MailboxConnectionError, MailboxFullError, StoreUnavailableError


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


PATIENCE_VARIABLE = "FAIRTRIAL_PATIENCE_SECONDS"
DEFAULT_PATIENCE_SECONDS = 600.0
UNAVAILABLE = (StoreUnavailableError, MailboxConnectionError, MailboxFullError)
"""Errors of a store or a queue that cannot be reached just now: repeating the call may help."""

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_LOG_SECONDS = 30.0


def patience_seconds() -> float:
    """How long to wait for a store or a queue that is unavailable: FAIRTRIAL_PATIENCE_SECONDS, 600 unless it is set.

    One setting for everything that waits: local runs, a fleet's client and its workers.
    """
    text = os.environ.get(PATIENCE_VARIABLE)
    if not text:
        return DEFAULT_PATIENCE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{PATIENCE_VARIABLE} must be a number of seconds of at least 0 (got {text!r})")
    return seconds


def backoff(failures: int, *, first: float, longest: float, draw: Callable[[], float] = random.random) -> float:
    """Seconds to pause after `failures` consecutive failures: doubled each time up to `longest`, and half of it random.

    Random, so that processes which failed together do not come back together.
    """
    return longest_pause(failures, first=first, longest=longest) * (0.5 + 0.5 * draw())


def longest_pause(failures: int, *, first: float, longest: float) -> float:
    """The longest pause after `failures` consecutive failures, in seconds: doubled each time up to `longest`."""
    return min(longest, first * 2.0 ** min(failures - 1, 64))


class _Attempts:
    """What happened to one call so far."""

    def __init__(self, doing: str, log: logging.Logger, seconds: float | None) -> None:
        self._doing = doing
        self._log = log
        self._end = time.monotonic() + (patience_seconds() if seconds is None else seconds)
        self._logged = -math.inf
        self._failures = 0
        self._waiting_for: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait_for(None)

    def _wait_for(self, resource: str | None) -> None:
        before, self._waiting_for = self._waiting_for, resource
        for amount, waited_for in ((-1, before), (1, resource)):
            if waited_for is not None:
                WAITING.add(amount, waited_for)

    def pause(self, error: Exception) -> float | None:
        """How long to pause after a failure; None if patience has ended."""
        now = time.monotonic()
        if now >= self._end:
            return None
        self._failures += 1
        self._wait_for("store" if isinstance(error, StoreUnavailableError) else "queue")
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            self._log.warning("%s: %s; trying again for %.0f s", self._doing, error, self._end - now)
        return backoff(self._failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)


def retry_while_unavailable_sync[T](
    call: Callable[[], T],
    doing: str,
    log: logging.Logger,
    *,
    seconds: float | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> T:
    """`retry_while_unavailable` for a thread that may block; `on_failure` is called after each failure."""
    with _Attempts(doing, log, seconds) as attempts:
        while True:
            try:
                return call()
            except UNAVAILABLE as error:
                on_failure()
                pause = attempts.pause(error)
                if pause is None:
                    raise
            time.sleep(pause)


async def retry_while_unavailable[T](
    call: Callable[[], Awaitable[T]],
    doing: str,
    log: logging.Logger,
    *,
    seconds: float | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> T:
    """The result of a call to a store or a queue; repeated while that is unavailable or full.

    Only for calls that may be made twice.

    Args:
        call: Makes the call.
        doing: What it does, for the log.
        log: Where waiting is logged, at the start and every 30 seconds.
        seconds: How long to repeat it; by default `patience_seconds()`.
        enough: When this is true, the next failure is raised.
    """
    with _Attempts(doing, log, seconds) as attempts:
        while True:
            try:
                return await call()
            except UNAVAILABLE as error:
                if enough():
                    raise
                pause = attempts.pause(error)
                if pause is None:
                    raise
            await anyio.sleep(pause)
