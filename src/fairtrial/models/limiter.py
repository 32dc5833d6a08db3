"""Limits of calls: rates, retries, budgets."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, Protocol, runtime_checkable

import anyio

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock, longest_pause
from fairtrial.base.frozen import LruCache, first_is
from fairtrial.base.offload import loop_caller
from fairtrial.data.session.events import PromptExecuted, TokenUsage
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import kind_of
from fairtrial.errors import BudgetExceededError, ConfigurationError, ModelError, RateLimitedError


@first_is(int)
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When and how often a failed model call is retried. Only errors marked as `retryable` are.

    Attributes:
        attempts: The largest number of attempts. Rate-limit refusals are counted separately, with a higher limit,
            because they only mean that the call came too early.
        rate_limited_attempts: The largest number of rate-limit refusals before the call fails.
        timeout_attempts: The largest number of attempts that time out: each of them may have to be paid for, and an
            answer that takes longer than the time limit will do so again.
        base_seconds: The upper limit of the first pause; it doubles with every failure.
        max_seconds: The longest pause, unless the provider asks for a longer one.
    """

    attempts: int = 5
    rate_limited_attempts: int = 20
    timeout_attempts: int = 2
    base_seconds: float = 0.5
    max_seconds: float = 30.0
    random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        attempts = min(self.attempts, self.rate_limited_attempts, self.timeout_attempts)
        if attempts < 1 or self.base_seconds < 0 or self.max_seconds < 0:
            raise ConfigurationError("a retry policy needs at least one attempt and pauses of at least 0 seconds")

    def pause(self, error: ModelError, failures: int, refusals: int, timeouts: int = 0) -> float | None:
        """Return how long to wait after this many failures, rate-limit refusals and timeouts; None to give up.

        Timeouts are failures too.

        Pauses have full jitter, so that calls that failed together are not retried together.
        """
        if not error.retryable:
            return None
        if failures >= self.attempts or refusals >= self.rate_limited_attempts or timeouts >= self.timeout_attempts:
            return None
        count = refusals if isinstance(error, RateLimitedError) else failures
        drawn = self.random.uniform(0.0, longest_pause(count, first=self.base_seconds, longest=self.max_seconds))
        # After the time that the provider named, with jitter.
        return drawn if error.retry_after is None else error.retry_after + drawn


NO_RETRY = RetryPolicy(attempts=1, rate_limited_attempts=1)


_PROMPT_EXECUTED = kind_of(PromptExecuted)
_MAX_RUNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit of usage. It is checked before each call, so calls in progress may exceed it.

    Attributes:
        tokens: Input and output tokens together.
        requests: Model calls that were sent, also those that were lost on the way or timed out.
        cost_usd: Dollars, if prices are known. Calls with unknown cost do not count: this is logged once as a warning,
            and reports show the number of such calls.
        strict: Refuse further calls after one whose cost is not known, if `cost_usd` is set.
    """

    tokens: int | None = None
    requests: int | None = None
    cost_usd: float | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "requests", "cost_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"the {name} of a budget must be more than 0 (got {value!r})")

    def check(self, used: TokenUsage, requests: int, whose: str) -> None:
        """Raise `BudgetExceededError` if the budget is used up."""
        spent = (
            ("requests", requests, self.requests),
            ("tokens", used.total_tokens, self.tokens),
            ("dollars", used.cost_usd or 0.0, self.cost_usd),
        )
        for name, amount, limit in spent:
            if limit is not None and amount >= limit:
                raise BudgetExceededError(f"the {whose} budget of {limit:,} {name} is used up ({amount:,} so far)")


class SpendingLog(Protocol):
    """The usage of runs: of this process (`Spending`), or of a fleet (`fairtrial.fleet.FleetSpending`)."""

    async def refresh(self, run_id: str) -> None:
        """Read the usage of other processes."""
        ...

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """Return the known usage of a run and its number of requests."""
        ...

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        ...


class Spending:
    """The usage of the runs of this process, and of the other processes of the same run. Only the latest runs are kept.

    Attributes:
        name: What it is called in all of them.
    """

    def __init__(self) -> None:
        self.name = _name_of(self)
        self._lock = threading.Lock()
        self._runs: LruCache[str, tuple[TokenUsage, int]] = LruCache(_MAX_RUNS)

    def __reduce__(self) -> Any:
        return named_spending, (self.name,)

    async def refresh(self, run_id: str) -> None:
        """Read the usage of other processes, if there are any."""
        if _host is not None:
            spent = await _host.spent(self.name, run_id)
            with self._lock:
                self._runs.put(run_id, spent)

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """Return the usage of a run and its number of requests."""
        with self._lock:
            return self._runs.get(run_id) or (TokenUsage(), 0)

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        if _host is not None:
            _host.spend(self.name, run_id, usage)
        with self._lock:
            used, requests = self._runs.get(run_id) or (TokenUsage(), 0)
            self._runs.put(run_id, (used + (usage or TokenUsage()), requests + 1))


def spent_in(session: Session, actor: str) -> tuple[TokenUsage, int]:
    """Return the usage of one actor of a trial over all attempts, and its number of requests."""
    used, requests = TokenUsage(), 0
    for envelope in session.everything().envelopes:
        if envelope.kind == _PROMPT_EXECUTED and envelope.actor == actor:
            requests += 1
            if envelope.data["usage"]:
                used += TokenUsage(**envelope.data["usage"])
    return used, requests


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

    Attributes:
        name: What it is called in all processes of a run, which share it.

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
        self.name = _name_of(self)
        self.settings = {"initial": initial, "smallest": smallest, "largest": largest, "decrease": decrease}
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

    def __reduce__(self) -> Any:
        return named_limiter, (self.name, self.settings)

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
        if _host is not None:
            async with _host.slot(self) as permit:
                yield permit
            return
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
        if _host is not None:
            _host.report(self, permit, verdict, retry_after)
            return
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
        if _host is not None:
            _host.report(self, None, "rate_limited", retry_after)
            return
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
_shared_lock = threading.RLock()


def shared_limiter(provider: str, base_url: str, model: str) -> AdaptiveLimiter:
    """Return the limiter that all tasks of this process share for one model."""
    with _shared_lock:
        key = (provider, base_url, model)
        if key not in _shared:
            _shared[key] = named_limiter(" ".join(("shared", *key)), {})
        return _shared[key]


class LimitHost(Protocol):
    """The process that a process of a run asks instead of applying limits by itself."""

    def slot(self, limiter: AdaptiveLimiter) -> AbstractAsyncContextManager[Permit]:
        """Wait until one call may begin."""
        ...

    def report(
        self, limiter: AdaptiveLimiter, permit: Permit | None, verdict: Verdict, retry_after: float | None
    ) -> None:
        """Report the outcome of a call; without a permit, calls are only held back."""
        ...

    async def spent(self, name: str, run_id: str) -> tuple[TokenUsage, int]:
        """Return the usage of a run in all processes."""
        ...

    def spend(self, name: str, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        ...


_host: LimitHost | None = None
_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_made_at: Counter[str] = Counter()
_OWN_PACKAGE = __name__.partition(".")[0]


def set_limit_host(host: LimitHost) -> None:
    """Let another process apply the limits of this one."""
    global _host
    _host = host


def named_limiter(name: str, settings: Mapping[str, Any]) -> AdaptiveLimiter:
    """Return the limiter that has this name in all processes of a run."""
    return _found(name, lambda: AdaptiveLimiter(**settings))


def named_spending(name: str) -> Spending:
    """Return the usage that has this name in all processes of a run."""
    return _found(name, Spending)


def _found[T: (AdaptiveLimiter, Spending)](name: str, make: Callable[[], T]) -> T:
    with _shared_lock:
        found: T | None = _named.get(name)
        if found is None:
            found = _named[name] = make()
            found.name = name
        return found


def _name_of(made: AdaptiveLimiter | Spending) -> str:
    """Return a name that is the same in every process that executes the same code: where the object was made."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == _OWN_PACKAGE:
        frame = frame.f_back
    place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    with _shared_lock:
        _made_at[place] += 1
        name = f"{type(made).__name__} {_made_at[place]} of {place}"
        _named[name] = made
    return name
