"""What a run has used on all workers together, so that one budget holds for a fleet."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, Self

from redis.exceptions import RedisError

from fairtrial.codec import digest
from fairtrial.errors import ConfigurationError, MailboxAccessError, MailboxError
from fairtrial.fleet.connections import LoopConnections
from fairtrial.fleet.limit_scripts import SPEND
from fairtrial.mailbox.redis import RedisConnection
from fairtrial.mailbox.redis.errors import translated
from fairtrial.session.events import TokenUsage

_log = logging.getLogger(__name__)

REMEMBERED_DAYS: Final = 30
_MAX_RUNS = 256
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


@dataclass(slots=True)
class _Run:
    known: TokenUsage = field(default_factory=TokenUsage)  # What Redis last said, of all processes.
    known_requests: int = 0
    own: TokenUsage = field(default_factory=TokenUsage)  # What Redis has not been told yet.
    own_requests: int = 0
    told: TokenUsage = field(default_factory=TokenUsage)  # What it is being told.
    told_requests: int = 0
    heard_at: float = float("-inf")
    asking: asyncio.Task[None] | None = None


class FleetSpending:
    """Counts what runs use, for all processes that share a Redis. Give it to adapters as `spending`.

    Each process tells the others once per `refresh_seconds`, and what it has not told yet counts here at once. So a
    budget is overrun by what the fleet uses in that time and by calls under way, and by nothing else. While Redis is
    away, each process counts on from what it last heard.

    Args:
        source: The address of a Redis, or a `RedisConnection`.
        refresh_seconds: How old what is known of the others may be.
        options: Options of the connection, as `RedisConnection` takes them.
    """

    def __init__(self, source: str | RedisConnection, *, refresh_seconds: float = 1.0, **options: Any) -> None:
        if not refresh_seconds > 0:
            raise ConfigurationError(f"refresh_seconds is more than 0, not {refresh_seconds}")
        self._connections = LoopConnections(source, **options)
        self._refresh_seconds = refresh_seconds
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._later: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"FleetSpending({self._connections!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Tell the others what is left to tell, and let go of this event loop's connection."""
        for task in list(self._later):
            task.cancel()
        for run_id, run in list(self._runs.items()):
            if run.own_requests:
                await self._exchanged(run_id, run)
        await self._connections.aclose()

    async def refresh(self, run_id: str) -> None:
        """Find out what others have used, if that was not done just now.

        Raises:
            MailboxAccessError: Redis refuses us. A budget nobody counts is none.
        """
        run = self._run(run_id)
        if time.monotonic() - run.heard_at >= self._refresh_seconds:
            await self._exchanged(run_id, run)

    def of(self, run_id: str) -> tuple[TokenUsage, int]:
        """What a run has used, in how many requests, as far as is known here."""
        run = self._run(run_id)
        return run.known + run.told + run.own, run.known_requests + run.told_requests + run.own_requests

    def add(self, run_id: str, usage: TokenUsage | None) -> None:
        """Count one more request of a run."""
        run = self._run(run_id)
        if run.own_requests == 0:  # The first since others were last told: they hear of it even if it is the last.
            task = asyncio.get_running_loop().create_task(self._tell_later(run_id, run))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
        run.own += usage or TokenUsage()
        run.own_requests += 1

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _Run()
            if len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
        else:
            self._runs.move_to_end(run_id)
        return run

    async def _tell_later(self, run_id: str, run: _Run) -> None:
        await asyncio.sleep(self._refresh_seconds)
        if run.own_requests:
            try:
                await self._exchanged(run_id, run)
            except MailboxError as error:
                _log.warning("what run %s uses could not be told: %s", run_id, error)

    async def _exchanged(self, run_id: str, run: _Run) -> None:
        """One exchange at a time for each run, whoever asks for it."""
        if run.asking is None or run.asking.done():
            run.asking = asyncio.get_running_loop().create_task(self._exchange(run_id, run))
        await asyncio.shield(run.asking)

    async def _exchange(self, run_id: str, run: _Run) -> None:
        told, requests = run.own, run.own_requests
        run.told, run.told_requests = told, requests
        run.own, run.own_requests = TokenUsage(), 0
        dollars = "" if told.cost_usd is None else repr(told.cost_usd)
        args = (requests, told.input_tokens, told.output_tokens, told.cached_tokens, dollars)
        try:
            connection = await self._connections.get()
            said = await connection.script(SPEND, (_key(run_id),), (*args, REMEMBERED_DAYS * 86_400_000))
        except BaseException as problem:
            # Whether it arrived is not known; a budget rather counts twice than not at all.
            run.own, run.own_requests = told + run.own, requests + run.own_requests
            if not isinstance(problem, RedisError | OSError | MailboxError):
                raise
            error = translated(problem, f"counting what run {run_id} uses")
            if isinstance(error, MailboxAccessError):
                raise error from None
            _log.warning("%s; this process counts on from what it knows", error)
        else:
            counts = [int(number or 0) for number in said[:4]]
            cost = None if said[4] is None else float(said[4])
            run.known, run.known_requests = TokenUsage(counts[1], counts[2], counts[3], cost), counts[0]
        finally:
            run.told, run.told_requests = TokenUsage(), 0
        run.heard_at = time.monotonic()


def _key(run_id: str) -> str:
    # A run without a name is that of calls outside any run; an odd name must not leave our part of the keys.
    name = run_id if _PLAIN.fullmatch(run_id) else digest([run_id])
    return f"{{fairtrial:spent:{name}}}:run"
