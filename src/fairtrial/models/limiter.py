"""How many calls to one model may be under way at once, found out while calling.

A provider's limit is not known and changes. The adaptive limiter starts small and doubles while all goes well; after
the first refusal it holds back, and then approaches the limit it has seen in small steps, going beyond it only now
and then. All tasks of a process share one limiter per (provider, base URL, model). Anything that has the two methods
of `Limiter` can replace it, such as one that a fleet shares.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import anyio

from fairtrial.clock import SYSTEM_CLOCK, Clock
from fairtrial.errors import ConfigurationError
from fairtrial.offload import loop_caller

type Verdict = Literal["answered", "rate_limited", "failed"]
"""What the provider made of a call: an answer of any kind, a refusal for its rate, or nothing to learn from."""

_LONGEST_COOLDOWN = 120.0


@dataclass(slots=True)
class Permit:
    """The right to make one call."""

    epoch: int = 0


class Limiter(Protocol):
    """Admits calls to one model. `async with limiter.slot() as permit: ...; limiter.report(permit, verdict)`."""

    def slot(self) -> AbstractAsyncContextManager[Permit]:
        """Wait for the right to make one call, and give it back at the end."""
        ...

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Say what became of a call, while its slot is still held."""
        ...


@runtime_checkable
class TokenLimiter(Limiter, Protocol):
    """A limiter that also limits tokens, and so wants to know how many a call took."""

    def used(self, permit: Permit, tokens: int) -> None:
        """Say how many tokens an answered call took, while its slot is still held."""
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
        initial: How many calls at first.
        smallest: How few at least.
        largest: How many at most.
        decrease: What is left of the limit after an episode.
        clock: Where time comes from.

    Calls that were under way when the limit went down belong to the episode that is over: only the refusal of a call
    that began after it starts another. A `retry-after` holds back everyone, not only the call that was told.
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
            raise ConfigurationError("a limiter needs 1 <= smallest <= initial <= largest and 0 < decrease < 1")
        self._limit = float(initial)
        self._smallest = smallest
        self._largest = largest
        self._decrease = decrease
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = 0
        self._waiters: deque[_Waiter] = deque()
        self._epoch = 0
        self._ceiling: float | None = None  # Where the last episode began; None while everything went well.
        self._before = 0.0  # The limit when the last episode began, and how many were refused in it.
        self._refusals = 0
        self._not_before = 0.0

    @property
    def limit(self) -> int:
        """How many calls may be under way now."""
        return int(self._limit)

    @property
    def in_flight(self) -> int:
        """How many are."""
        return self._in_flight

    @property
    def episodes(self) -> int:
        """How often the provider has asked to slow down."""
        return self._epoch

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Wait for the right to make one call, in order of arrival."""
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
                if waiter.admitted:  # It was let in and leaves at once: the place is free for the next.
                    self._in_flight -= 1
                    self._admit()
                elif waiter in self._waiters:
                    self._waiters.remove(waiter)
            raise

    async def _cool_down(self) -> None:
        while (pause := self._not_before - self._clock.monotonic()) > 0:  # noqa: ASYNC110 - for a time, not an event
            await anyio.sleep(pause)

    def _admit(self) -> None:
        """Let in as many as there is room for; the lock is held."""
        while self._waiters and self._in_flight < self.limit:
            waiter = self._waiters.popleft()
            try:
                waiter.wake(waiter.event.set)
            except RuntimeError:
                continue  # Its event loop is gone, and so is whoever waited.
            waiter.admitted = True
            self._in_flight += 1

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Learn from what became of a call."""
        with self._lock:
            if verdict == "rate_limited":
                self._hold_back(retry_after)
                self._refused(permit)
            elif verdict == "answered" and permit.epoch == self._epoch and self._in_flight + 1 >= self.limit:
                # Only a limit that is used to the full has been tested.
                self._limit = min(float(self._largest), self._limit + self._step())
                self._admit()

    def hold_back(self, retry_after: float | None) -> None:
        """Admit nobody for so many seconds; the limit stays as it is."""
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
            # Of those that were under way together, so many were too many: that is where the limit was. Slow start
            # may have gone far beyond it. Down to a half at most: a provider that refuses all says nothing about it.
            self._refusals += 1
            room = max(self._before - self._refusals, self._before * 0.5)
            self._ceiling = room + 1.0
            self._limit = max(float(self._smallest), min(self._limit, room))

    def _step(self) -> float:
        if self._ceiling is None:
            return 1.0  # Every answer makes room for one more: the limit doubles with each round.
        if self._limit < self._ceiling - 1:
            return 1.0 / self._limit  # One more with each round.
        return 0.1 / self._limit  # Near the place where it went wrong: one more in ten rounds.


class FixedLimiter:
    """At most this many calls at once, whatever happens; a `retry-after` still holds back everyone."""

    def __init__(self, limit: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._inner = AdaptiveLimiter(initial=limit, largest=limit, clock=clock)

    def slot(self) -> AbstractAsyncContextManager[Permit]:
        """Wait for the right to make one call."""
        return self._inner.slot()

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Heed a `retry-after`; nothing else matters."""
        if verdict == "rate_limited":
            self._inner.hold_back(retry_after)


class Unlimited:
    """Any number of calls at once."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Come in."""
        yield Permit()

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Nothing is learned."""


_shared: dict[tuple[str, str, str], AdaptiveLimiter] = {}
_shared_lock = threading.Lock()


def shared_limiter(provider: str, base_url: str, model: str) -> AdaptiveLimiter:
    """The limiter all tasks of this process share for one model."""
    with _shared_lock:
        return _shared.setdefault((provider, base_url, model), AdaptiveLimiter())
