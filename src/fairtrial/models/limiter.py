"""Limit the number of concurrent calls to one model adaptively.

A provider's limit is unknown and changes. The adaptive limiter starts small and doubles until the first refusal. Then
it reduces its limit, and increases it in small steps, which are smallest near the limit at which calls were refused.
All tasks of a process share one limiter per (provider, base URL, model). Any object with the two methods of `Limiter`
can replace it, such as one that a fleet shares.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import anyio

from fairtrial.base.clock import SYSTEM_CLOCK, Clock
from fairtrial.base.offload import loop_caller
from fairtrial.errors import ConfigurationError

type Verdict = Literal["answered", "rate_limited", "failed"]
"""The outcome of a call for the limiter: an answer of any kind, a rate-limit refusal, or nothing to learn from."""

_LONGEST_COOLDOWN = 120.0


@dataclass(slots=True)
class Permit:
    """The permission for one call."""

    epoch: int = 0


class Limiter(Protocol):
    """Admits calls to one model. `async with limiter.slot() as permit: ...; limiter.report(permit, verdict)`."""

    def slot(self) -> AbstractAsyncContextManager[Permit]:
        """Wait until one call may begin; the slot is released at the end of the block."""
        ...

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Report the outcome of a call, before its slot is released."""
        ...


@runtime_checkable
class TokenLimiter(Limiter, Protocol):
    """A limiter that also limits tokens."""

    def used(self, permit: Permit, tokens: int) -> None:
        """Report the token usage of a finished call, before its slot is released."""
        ...


class _Waiter:
    __slots__ = ("admitted", "event", "wake")

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.wake: Callable[[Callable[[], Any]], Any] = loop_caller()
        self.admitted = False


class AdaptiveLimiter:
    """Slow start, then additive increase and multiplicative decrease, once per episode of refusals.

    Args:
        initial: The limit at the start.
        smallest: The lowest limit.
        largest: The highest limit.
        decrease: The factor by which an episode reduces the limit.
        clock: The source of time.

    Calls that were in progress when the limit was reduced belong to the previous episode: only the refusal of a call
    that started later begins a new one. A `retry-after` delays all calls, not only the refused one.
    """

    def __init__(
        self,
        *,
        initial: int = 16,
        smallest: int = 1,
        largest: int = 1000,
        decrease: float = 0.8,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not 1 <= smallest <= initial <= largest or not 0 < decrease < 1:
            raise ConfigurationError(
                "a limiter must have 1 <= smallest <= initial <= largest and 0 < decrease < 1 "
                f"(got smallest={smallest}, initial={initial}, largest={largest}, decrease={decrease})"
            )
        self._limit = float(initial)
        self._smallest = smallest
        self._largest = largest
        self._decrease = decrease
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = 0
        self._waiters: deque[_Waiter] = deque()
        self._epoch = 0
        self._ceiling: float | None = None  # The limit at which the last episode began; None before the first one.
        self._before = 0.0  # The limit when the last episode began, and how many were refused in it.
        self._refusals = 0
        self._not_before = 0.0

    @property
    def limit(self) -> int:
        """The current limit of concurrent calls."""
        return int(self._limit)

    @property
    def in_flight(self) -> int:
        """The number of calls in progress."""
        return self._in_flight

    @property
    def episodes(self) -> int:
        """The number of episodes in which the provider refused calls."""
        return self._epoch

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Wait until one call may begin, in order of arrival."""
        await self._admitted()
        try:
            yield Permit(self._epoch)
        finally:
            with self._lock:
                self._in_flight -= 1
                self._admit()

    async def _admitted(self) -> None:
        await self._cool_down()
        with self._lock:
            if self._in_flight < self.limit and not self._waiters:
                self._in_flight += 1
                return
            waiter = _Waiter()
            self._waiters.append(waiter)
        try:
            await waiter.event.wait()
            await self._cool_down()
        except BaseException:
            with self._lock:
                if waiter.admitted:  # It was admitted and cancelled at the same time: release its slot.
                    self._in_flight -= 1
                    self._admit()
                elif waiter in self._waiters:
                    self._waiters.remove(waiter)
            raise

    async def _cool_down(self) -> None:
        while (pause := self._not_before - self._clock.monotonic()) > 0:  # noqa: ASYNC110 - for a time, not an event
            await anyio.sleep(pause)

    def _admit(self) -> None:
        """Admit as many waiting calls as the limit allows; the lock must be held."""
        while self._waiters and self._in_flight < self.limit:
            waiter = self._waiters.popleft()
            try:
                waiter.wake(waiter.event.set)
            except RuntimeError:
                continue  # Its event loop has ended, and the waiting call with it.
            waiter.admitted = True
            self._in_flight += 1

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Adapt the limit to the outcome of a call."""
        with self._lock:
            if verdict == "rate_limited":
                self._hold_back(retry_after)
                self._refused(permit)
            elif verdict == "answered" and permit.epoch == self._epoch and self._in_flight + 1 >= self.limit:
                # The limit is only increased while it is fully used.
                self._limit = min(float(self._largest), self._limit + self._step())
                self._admit()

    def hold_back(self, retry_after: float | None) -> None:
        """Admit no call for this many seconds; the limit is unchanged."""
        with self._lock:
            self._hold_back(retry_after)

    def _hold_back(self, retry_after: float | None) -> None:
        if retry_after:
            until = self._clock.monotonic() + min(retry_after, _LONGEST_COOLDOWN)
            self._not_before = max(self._not_before, until)

    def _refused(self, permit: Permit) -> None:
        if permit.epoch == self._epoch:
            self._epoch += 1
            self._refusals = 1
            self._before = self._ceiling = self._limit
            self._limit = max(float(self._smallest), self._limit * self._decrease)
        elif permit.epoch == self._epoch - 1:
            # The old limit less the number of refusals estimates the provider's limit, which slow
            # start may have exceeded by far. At least half of the old limit remains: a provider that refuses all calls
            # gives no estimate.
            self._refusals += 1
            room = max(self._before - self._refusals, self._before * 0.5)
            self._ceiling = room + 1.0
            self._limit = max(float(self._smallest), min(self._limit, room))

    def _step(self) -> float:
        if self._ceiling is None:
            return 1.0  # Each answer adds one, so that the limit doubles with each round.
        if self._limit < self._ceiling - 1:
            return 1.0 / self._limit  # One more with each round.
        return 0.1 / self._limit  # Near the limit at which calls were refused: one more in ten rounds.


class FixedLimiter:
    """A fixed number of concurrent calls; a `retry-after` still delays all calls."""

    def __init__(self, limit: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._inner = AdaptiveLimiter(initial=limit, largest=limit, clock=clock)

    def slot(self) -> AbstractAsyncContextManager[Permit]:
        """Wait for the right to make one call."""
        return self._inner.slot()

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Apply a `retry-after`; other verdicts have no effect."""
        if verdict == "rate_limited":
            self._inner.hold_back(retry_after)


class Unlimited:
    """No limit."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Admit immediately."""
        yield Permit()

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Do nothing."""


_shared: dict[tuple[str, str, str], AdaptiveLimiter] = {}
_shared_lock = threading.Lock()


def shared_limiter(provider: str, base_url: str, model: str) -> AdaptiveLimiter:
    """Return the limiter that all tasks of this process share for one model."""
    with _shared_lock:
        return _shared.setdefault((provider, base_url, model), AdaptiveLimiter())
