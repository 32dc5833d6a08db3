"""Counts the usage of a run across all workers, so that one budget applies to the whole fleet."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any, Self

from fairtrial.base.codec import digest
from fairtrial.base.lru import LruCache
from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import ConfigurationError, FairtrialError, MailboxAccessError, MailboxError
from fairtrial.fleet.limits.connections import LimitSource, LoopConnections

_log = logging.getLogger(__name__)

_MAX_RUNS = 256
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


@dataclass(slots=True)
class _RunSpending:
    known: TokenUsage = field(default_factory=TokenUsage)  # The last total of all processes from the server.
    known_requests: int = 0
    own: TokenUsage = field(default_factory=TokenUsage)  # Usage of this process not yet sent to the server.
    own_requests: int = 0
    told: TokenUsage = field(default_factory=TokenUsage)  # Usage that is being sent.
    told_requests: int = 0
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
        return run.known + run.told + run.own, run.known_requests + run.told_requests + run.own_requests

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
        told, requests = run.own, run.own_requests
        run.told, run.told_requests = told, requests
        run.own, run.own_requests = TokenUsage(), 0
        try:
            server = await self._connections.get()
            known, known_requests = await server.spend(_name(run_id), told, requests)
        except BaseException as error:
            # It is unknown whether the usage arrived: rather count it twice than not at all.
            run.own, run.own_requests = told + run.own, requests + run.own_requests
            if not isinstance(error, MailboxError) or isinstance(error, MailboxAccessError):
                raise
            _log.warning("%s; this process continues with the last known total", error)
        else:
            run.known, run.known_requests = known, known_requests
        finally:
            run.told, run.told_requests = TokenUsage(), 0
        run.heard_at = time.monotonic()


def _name(run_id: str) -> str:
    # Calls outside any run have an empty run id. Others are escaped, so that they cannot leave our key prefix.
    return run_id if _PLAIN.fullmatch(run_id) else digest([run_id])
