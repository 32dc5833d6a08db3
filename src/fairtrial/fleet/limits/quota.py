"""Quotas and budgets that workers share."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

from fairtrial.base.backoff import UNAVAILABLE, backoff
from fairtrial.base.codec import digest
from fairtrial.base.frozen import LruCache
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import ConfigurationError, FairtrialError, MailboxAccessError, MailboxError
from fairtrial.fleet.limits.connections import LimitSource, LoopConnections, running_loop
from fairtrial.fleet.limits.servers import LONGEST_COOLDOWN, CooldownState, LimitServer, Quota
from fairtrial.mailbox.protocol import validate_name
from fairtrial.models.limiter import Permit, Verdict

_log = logging.getLogger(__name__)

BLOCK_SECONDS: Final = 0.05
"""A block is this much of the fleet's rate, at least one call: small, so that all processes are served in turn."""
FRESH_SECONDS: Final = 0.5
"""A call that begins this long after the last answer of the server first checks for new refusals."""
_LATE_SECONDS = 0.1
_LATE_GAPS = 5
_INEXACT = 0.01  # Seconds by which two answers of the server about the same time may differ in this process.
_MOST_AT_ONCE = 100_000.0
_LONGEST_BACKOFF = 5.0


@dataclass(slots=True)
class FleetPermit(Permit):
    """The permission for one call; `tokens` is its expected usage."""

    tokens: float = 0.0


class FleetLimiter:
    """Limits the rate of calls to one model across all processes that use the same limiter name.

    Each process reserves blocks of start times on the server, one per waiting call and at most a twentieth of a
    second's worth, so one round trip serves many calls and all processes are served in turn. A `retry-after` that one
    call receives holds back the whole fleet within half a second. A process that crashes loses its block: a moment of
    the rate, and nothing else.

    While the server is unavailable, calls wait for it, within their own deadlines: a worker without its queue has no
    work anyway. With `share_without_server` they continue at that share of the rate instead.

    Args:
        source: The URL of a Redis server or a PostgreSQL database, or a `RedisConnection` or `PostgresConnection`.
        name: The name of the quota, such as "openai:gpt-6.1-sol". Processes that use the same name share it.
        requests_per_second: Maximum rate of calls. Alternatively `requests_per_minute`.
        requests_per_minute: The same per minute, as most providers state it.
        tokens_per_minute: Maximum rate of tokens, input and output together. The usage of a call is estimated from
            earlier calls and corrected when the call has finished.
        adaptive: Learn the rate from refusals, for the whole fleet. It starts with `initial` requests per second and
            never exceeds the given rate, if any.
        initial: The initial rate if adaptive.
        fill: The share of the quota to use: clocks and networks are inexact, and refusals cost more than short waits.
        tokens_per_call: The expected usage of the first calls.
        share_without_server: The share of the rate that this process may use while the server is unavailable.
        options: Options of the connection, as `RedisConnection` or `PostgresConnection` takes them.
    """

    def __init__(
        self,
        source: LimitSource,
        name: str,
        *,
        requests_per_second: float | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        adaptive: bool = False,
        initial: float = 5.0,
        fill: float = 0.97,
        tokens_per_call: float = 1000.0,
        share_without_server: float | None = None,
        **options: Any,
    ) -> None:
        if requests_per_second is not None and requests_per_minute is not None:
            raise ConfigurationError("requests_per_second and requests_per_minute are mutually exclusive")
        rate = requests_per_minute / 60 if requests_per_minute is not None else requests_per_second
        if rate is None and tokens_per_minute is None and not adaptive:
            raise ConfigurationError("FleetLimiter requires a rate of requests or of tokens, or adaptive=True")
        numbers = {"rate": rate, "tokens_per_minute": tokens_per_minute, "initial": initial}
        numbers |= {"tokens_per_call": tokens_per_call, "share_without_server": share_without_server}
        for what, number in numbers.items():
            if number is not None and not 0 < number < float("inf"):
                raise ConfigurationError(f"{what} must be a finite number more than 0 (got {number})")
        if not 0 < fill <= 1:
            raise ConfigurationError(f"fill must be more than 0 and at most 1 (got {fill})")
        used = min(_MOST_AT_ONCE, _MOST_AT_ONCE if rate is None else rate * fill)
        per_second = 0.0 if tokens_per_minute is None else tokens_per_minute * fill / 60
        self.name = validate_name(name)
        self._quota = Quota(
            name=self.name,
            cost_us=1e6 / used,
            burst=max(1.0, used * BLOCK_SECONDS),
            token_cost_us=1e6 / per_second if per_second else 0.0,
            token_burst=per_second,
            first=min(initial, used) if adaptive else 0.0,
            largest=used,
        )
        self._share = share_without_server
        self._tokens_per_call = tokens_per_call
        self._connections = LoopConnections(source, **options)
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopLimiter] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"FleetLimiter({self.name!r}, {self._connections!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection of this event loop; it is reopened on next use."""
        limiter = self._by_loop.pop(running_loop(), None)
        if limiter is not None:
            await limiter.close()
        await self._connections.aclose()

    @property
    def counters(self) -> dict[str, float]:
        """Metrics of this process: admitted calls, reserved blocks, refusals."""
        limiters = list(self._by_loop.values())
        return {
            "limiter_admitted": sum(limiter.admitted for limiter in limiters),
            "limiter_blocks": sum(limiter.blocks for limiter in limiters),
            "limiter_refused": sum(limiter.refusals for limiter in limiters),
        }

    @property
    def rate(self) -> float:
        """Last known rate of the whole fleet in requests per second; 0 at the start."""
        return max((limiter.rate for limiter in self._by_loop.values()), default=0.0)

    @property
    def episodes(self) -> int:
        """Last known number of episodes in which the provider refused calls."""
        return max((limiter.epoch for limiter in self._by_loop.values()), default=0)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Wait until one call may begin."""
        yield await self._for_this_loop().admission()

    def report(self, permit: Permit, verdict: Verdict, *, retry_after: float | None = None) -> None:
        """Publish a refusal to the fleet; other verdicts have no effect."""
        if verdict == "rate_limited":
            self._for_this_loop().refused(permit, retry_after)

    def used(self, permit: Permit, tokens: int) -> None:
        """Report the actual token usage of a finished call."""
        self._for_this_loop().settle(permit, tokens)

    def _for_this_loop(self) -> _LoopLimiter:
        loop = running_loop()
        limiter = self._by_loop.get(loop)
        if limiter is None:
            limiter = self._by_loop[loop] = _LoopLimiter(
                self._quota, self._connections, self._tokens_per_call, self._share
            )
        return limiter


class _LoopLimiter:
    """The state of the limiter in one event loop: waiting calls, and the start times reserved for them."""

    def __init__(self, quota: Quota, connections: LoopConnections, tokens: float, share: float | None) -> None:
        self._quota = quota
        self._connections = connections
        self._share = share
        self._waiting: deque[asyncio.Future[FleetPermit]] = deque()
        self._slots: deque[float] = deque()
        self._expected = tokens if quota.token_cost_us else 0.0  # Tokens of one call.
        self._slot_tokens = self._expected  # The tokens per call for which the start times were reserved.
        self._debt = 0.0
        self._not_before = 0.0
        self._heard_at = 0.0
        self._own_turn = 0.0  # When the next call may begin while the server is unavailable.
        self._away = 0
        self._pump: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._settling: asyncio.Task[None] | None = None
        self.epoch = 0
        self.rate = 0.0
        self.admitted = 0
        self.blocks = 0
        self.refusals = 0

    async def admission(self) -> FleetPermit:
        """Wait until a call may begin."""
        future: asyncio.Future[FleetPermit] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._pump is None:
            self._pump = self._task(self._run(), "fairtrial limiter")
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                try:
                    self._waiting.remove(future)
                except ValueError:
                    pass
            raise

    def refused(self, permit: Permit, retry_after: float | None) -> None:
        """Hold back this process at once, and the others through the server."""
        self.refusals += 1
        if isinstance(permit, FleetPermit):
            self._debt -= permit.tokens  # A refused call has used none.
        if retry_after:
            until = time.monotonic() + min(retry_after, LONGEST_COOLDOWN)
            self._not_before = max(self._not_before, until)
        chore = self._task(self._tell(permit.epoch, retry_after), "fairtrial limiter refusal")
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    def settle(self, permit: Permit, tokens: int) -> None:
        """Correct the expected usage of a call to the actual one."""
        if not self._quota.token_cost_us or not isinstance(permit, FleetPermit):
            return
        self._debt += tokens - permit.tokens
        self._expected += 0.1 * (tokens - self._expected)
        if self._settling is None:
            self._settling = self._task(self._settle_soon(), "fairtrial limiter tokens")

    async def close(self) -> None:
        """Cancel all tasks and waiting calls."""
        tasks = [task for task in (self._pump, self._settling, *self._chores) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for future in self._waiting:
            future.cancel()

    def _task(self, work: Any, name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    async def _run(self) -> None:
        try:
            while self._waiting:
                if self._chores:  # Publish refusals before further calls are admitted.
                    await asyncio.wait(list(self._chores))
                self._forget_old()
                if not self._slots:
                    await self._reserve(min(len(self._waiting), self._block()))
                    continue
                pause = self._slots[0] - time.monotonic()
                if pause > 0:
                    await asyncio.sleep(pause)
                if time.monotonic() - self._heard_at > FRESH_SECONDS and not self._away:
                    await self._listen()
                elif not self._chores and self._slots and self._slots[0] >= self._not_before - _INEXACT:
                    self._slots.popleft()
                    self._admit()
        except Exception as error:  # Waiting calls must receive any error.
            raised = error
            if not isinstance(error, FairtrialError):
                _log.exception("the limiter %s failed", self._quota.name)
                raised = MailboxError(f"the limiter {self._quota.name}: {error!r}")
            for future in self._waiting:
                if not future.done():
                    future.set_exception(raised)
            self._waiting.clear()
        finally:
            self._pump = None

    def _forget_old(self) -> None:
        """Discard start times that were missed or that fall into a cool-down.

        Otherwise a process that was stuck, or the whole fleet, would make all these calls at once.
        """
        late = max(_LATE_SECONDS, _LATE_GAPS / (self.rate or self._quota.largest))
        end = max(time.monotonic() - late, self._not_before - _INEXACT)
        while self._slots and self._slots[0] < end:
            self._slots.popleft()
            self._debt -= self._slot_tokens

    def _admit(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                self.admitted += 1
                future.set_result(FleetPermit(self.epoch, self._slot_tokens))
                return
        self._debt -= self._slot_tokens  # The call for this slot was cancelled.

    def _block(self) -> int:
        rate = self.rate if self._quota.first and self.rate else self._quota.largest
        return max(1, int(rate * BLOCK_SECONDS)) if self.rate or not self._quota.first else 1

    async def _reserve(self, count: int) -> None:
        debt, self._debt = self._debt, 0.0
        expected = self._expected
        try:
            block = await self._ask(lambda server: server.reserve(self._quota, count, expected, debt))
        except BaseException:
            self._debt += debt
            raise
        if block is None:
            self._debt += debt
            if count:
                await self._without_server()
            return
        self.epoch, self.rate = block.epoch, block.rate
        self.blocks += 1
        self._slot_tokens = expected
        self._slots.extend(self._heard_at + offset / 1e6 for offset in block.offsets_us)
        if not block.offsets_us and count:
            await asyncio.sleep(block.wait_us / 1e6 * (1 + 0.1 * random.random()))  # noqa: S311 - only to spread them

    async def _listen(self) -> None:
        state = await self._ask(lambda server: server.listen(self._quota))
        if state is not None:
            self._learn(state)
        else:
            self._heard_at = time.monotonic()  # Reserved start times remain valid.

    async def _tell(self, epoch: int, retry_after: float | None) -> None:
        wait_us = -1.0 if retry_after is None else retry_after * 1e6
        try:
            state = await self._ask(lambda server: server.refuse(self._quota, epoch, wait_us))
        except FairtrialError as error:
            _log.warning("a refusal could not be published to the fleet: %s", error)
            return
        if state is not None:
            self._learn(state)

    def _learn(self, state: CooldownState) -> None:
        if state.epoch != self.epoch:
            self.epoch = state.epoch
            self._debt -= len(self._slots) * self._slot_tokens
            self._slots.clear()  # Reserved before the refusal: reserve new ones.
        if state.wait_us > 0:
            self._not_before = max(self._not_before, time.monotonic() + state.wait_us / 1e6)

    async def _settle_soon(self) -> None:
        # Usually sent with the next block; otherwise send it soon, so that others can use the unused tokens.
        await asyncio.sleep(FRESH_SECONDS)
        try:
            if self._debt:
                await self._reserve(0)
        except FairtrialError as error:
            _log.warning("token usage could not be published to the fleet: %s", error)
        finally:
            self._settling = None

    async def _ask[Answer](self, operation: Callable[[LimitServer], Awaitable[Answer]]) -> Answer | None:
        """Ask the server and return its answer; None while it is unavailable.

        Raises:
            FairtrialError: any other error, such as denied access: waiting would not help.
        """
        try:
            answer = await operation(await self._connections.get())
        except UNAVAILABLE as error:
            if not self._away:
                _log.warning("the limiter waits for %s: %s", self._connections.server, error)
            self._away += 1
            return None
        if self._away:
            _log.warning("the limiter reaches %s again", self._connections.server)
        self._away = 0
        self._heard_at = time.monotonic()
        return answer

    async def _without_server(self) -> None:
        pause = backoff(self._away + 1, first=0.05, longest=_LONGEST_BACKOFF)
        if self._share is None:
            await asyncio.sleep(pause)
            return
        # A local block at this process's share of the rate; then the server is asked again.
        gap = 1 / (self._share * (self.rate or self._quota.first or self._quota.largest))
        now = time.monotonic()
        turn = max(self._own_turn, now, self._not_before)
        count = max(1, round(pause / gap))
        self._slots.extend(turn + number * gap for number in range(count))
        self._own_turn = turn + count * gap


_MAX_RUNS = 256
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


@dataclass(slots=True)
class _RunSpending:
    known: TokenUsage = field(default_factory=TokenUsage)  # The last total of all processes from the server.
    known_requests: int = 0
    own: TokenUsage = field(default_factory=TokenUsage)  # Usage of this process not yet sent to the server.
    own_requests: int = 0
    sending: TokenUsage = field(default_factory=TokenUsage)  # Usage that is being sent.
    sending_requests: int = 0
    heard_at: float = float("-inf")
    asking: asyncio.Task[None] | None = None


class FleetSpending:
    """Counts the usage of runs for all processes that share a server. Pass it to adapters as `spending`.

    Each process publishes its usage once per `refresh_seconds`; its own usage counts locally at once. A budget can
    therefore be exceeded by the usage of the fleet in that time and by calls in progress. While the server is
    unavailable, each process continues from the last known total.

    Args:
        source: The URL of a Redis server or a PostgreSQL database, or a `RedisConnection` or `PostgresConnection`.
        refresh_seconds: Maximum age of the usage of other processes.
        options: Options of the connection, as `RedisConnection` or `PostgresConnection` takes them.
    """

    def __init__(self, source: LimitSource, *, refresh_seconds: float = 1.0, **options: Any) -> None:
        if not refresh_seconds > 0:
            raise ConfigurationError(f"refresh_seconds must be more than 0 (got {refresh_seconds})")
        self._connections = LoopConnections(source, **options)
        self._refresh_seconds = refresh_seconds
        self._runs: LruCache[str, _RunSpending] = LruCache(_MAX_RUNS)
        self._later: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"FleetSpending({self._connections!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Publish the remaining usage and close the connection of this event loop."""
        for task in list(self._later):
            task.cancel()
        for run_id, run in self._runs.items():
            if run.own_requests:
                await self._exchanged(run_id, run)
        await self._connections.aclose()

    async def refresh(self, run_id: str) -> None:
        """Read the usage of other processes unless it is recent.

        Raises:
            MailboxAccessError: the server denies access; the budget could not be enforced.
        """
        run = self._run(run_id)
        if time.monotonic() - run.heard_at >= self._refresh_seconds:
            await self._exchanged(run_id, run)

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """Return the known usage of a run and its number of requests."""
        run = self._run(run_id)
        return run.known + run.sending + run.own, run.known_requests + run.sending_requests + run.own_requests

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        run = self._run(run_id)
        if run.own_requests == 0:  # The first since the last exchange: publish it even if it remains the only one.
            task = asyncio.get_running_loop().create_task(self._tell_later(run_id, run))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
        run.own += usage or TokenUsage()
        run.own_requests += 1

    def _run(self, run_id: str) -> _RunSpending:
        run = self._runs.get(run_id)
        if run is None:
            run = _RunSpending()
            self._runs.put(run_id, run)
        return run

    async def _tell_later(self, run_id: str, run: _RunSpending) -> None:
        await asyncio.sleep(self._refresh_seconds)
        if run.own_requests:
            try:
                await self._exchanged(run_id, run)
            except FairtrialError as error:
                _log.warning("the usage of run %s could not be published: %s", run_id, error)

    async def _exchanged(self, run_id: str, run: _RunSpending) -> None:
        """Exchange usage with the server, one exchange per run at a time."""
        if run.asking is None or run.asking.done():
            run.asking = asyncio.get_running_loop().create_task(self._exchange(run_id, run))
        await asyncio.shield(run.asking)

    async def _exchange(self, run_id: str, run: _RunSpending) -> None:
        usage, requests = run.own, run.own_requests
        run.sending, run.sending_requests = usage, requests
        run.own, run.own_requests = TokenUsage(), 0
        try:
            server = await self._connections.get()
            known, known_requests = await server.spend(_name(run_id), usage, requests)
        except BaseException as error:
            # It is unknown whether the usage arrived: rather count it twice than not at all.
            run.own, run.own_requests = usage + run.own, requests + run.own_requests
            if not isinstance(error, MailboxError) or isinstance(error, MailboxAccessError):
                raise
            _log.warning("%s; this process continues with the last known total", error)
        else:
            run.known, run.known_requests = known, known_requests
        finally:
            run.sending, run.sending_requests = TokenUsage(), 0
        run.heard_at = time.monotonic()


def _name(run_id: str) -> str:
    # Calls outside any run have an empty run id. Others are escaped, so that they cannot leave our key prefix.
    return run_id if _PLAIN.fullmatch(run_id) else digest([run_id])
