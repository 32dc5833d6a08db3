"""Returns due messages to the queue: delays that have passed and leases that have expired. One process at a time.

Which process sweeps is decided in Redis, by a lock that expires on the server's clock. Every process that
receives from the mailbox competes for this lock.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from redis.exceptions import RedisError

from fairtrial.errors import MailboxError
from fairtrial.mailbox.redis.coalesce import Call
from fairtrial.mailbox.redis.errors import is_gone, translated
from fairtrial.mailbox.redis.queue import RedisQueue
from fairtrial.mailbox.redis.scripts import LATE, RECLAIM, SWEEP, LuaScript

_log = logging.getLogger(__name__)
_MOST = 200
_STRAY_MS = 10 * 60 * 1000
_SECONDS_PER_LEASE = 25e-6
"""Checking a lease takes the server 0.1 to 1.2 us: with this pause for each, sweeping uses at most a twentieth."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of one sweep: the number of messages returned, and the seconds until the next sweep."""

    moved: int
    pause: float


class Sweeper:
    """Sweeps one mailbox while it holds the sweeper lock.

    Args:
        mailbox: The mailbox to sweep.
        interval: Seconds between sweeps; longer with very many leases.
    """

    def __init__(self, mailbox: RedisQueue[object], interval: float) -> None:
        self._mailbox = mailbox
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start competing for the sweeper lock."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="fairtrial mailbox sweeper")

    async def stop(self) -> None:
        """Stop sweeping."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def sweep(self) -> Sweep | None:
        """Return all due messages to the queue; None if another process holds the lock.

        Raises:
            MailboxError: Redis is unavailable.
        """
        moved = 0
        keys = self._mailbox.keys
        lock_ms = round(max(1.0, 4 * self._interval) * 1000)
        try:
            while True:
                answer = await self._mailbox.connection.script(
                    SWEEP,
                    (keys.stream, keys.delayed, keys.sweeper),
                    (self._mailbox.consumers.token, lock_ms, _MOST, _STRAY_MS),
                )
                if not answer:
                    return None
                promoted, wait, held, names = answer
                reclaimed = await self._reclaim(names)
                moved += promoted + sum(reclaimed)
                if promoted < _MOST and max(reclaimed, default=0) < _MOST:
                    pause = max(self._interval, held * _SECONDS_PER_LEASE)
                    return Sweep(moved, pause if wait < 0 else min(pause, wait / 1000 + 0.002))
        except (RedisError, OSError) as error:
            if is_gone(error):
                return Sweep(moved, self._interval)
            raise translated(error, f"sweeping {self._mailbox.name}") from None

    async def _reclaim(self, names: list[bytes]) -> list[int]:
        # One call per consumer, so that the server can serve other clients in between.
        consumers = [(name, int(lease)) for name in names if (lease := name.rpartition(b"/")[2]).isdigit()]
        found = await self._each(LATE, consumers)
        late = [consumer for consumer, is_late in zip(consumers, found, strict=True) if is_late]
        # If the leases of several workers expire together, the cause is an outage of the server or of machines, and
        # not a message that crashes its worker.
        workers = {name.rpartition(b"/")[0] for name, _ in late}
        return await self._each(RECLAIM, late, _MOST, int(len(workers) > 1))

    async def _each(self, script: LuaScript, consumers: list[tuple[bytes, int]], *args: int) -> list[int]:
        calls = [Call(script, (self._mailbox.keys.stream,), [name, lease, *args]) for name, lease in consumers]
        answers = await self._mailbox.connection.run(calls) if calls else []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [int(answer) for answer in answers]

    async def _run(self) -> None:
        while True:
            pause = self._interval
            try:
                done = await self.sweep()
            except MailboxError as error:
                _log.debug("sweeping %s failed: %s", self._mailbox.name, error)
            except Exception:
                _log.exception("sweeping %s failed; retrying", self._mailbox.name)
            else:
                # Random pauses spread the candidates.
                pause = pause * (1 + random.random()) if done is None else done.pause  # noqa: S311
            await asyncio.sleep(pause)
