"""One process at a time brings back what is due: delays that are over, leases that ran out.

Which process is decided in Redis, by a key that expires on the server's clock. Whoever receives from the mailbox stands
for the office.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from fairtrial.errors import MailboxError
from fairtrial.mailbox.redis.coalesce import Call
from fairtrial.mailbox.redis.errors import is_gone, translated
from fairtrial.mailbox.redis.scripts import LATE, RECLAIM, SWEEP, Script

if TYPE_CHECKING:
    from fairtrial.mailbox.redis.mailbox import RedisMailbox

_log = logging.getLogger(__name__)
_MOST = 200
_STRAY_MS = 10 * 60 * 1000
_SECONDS_PER_LEASE = 25e-6
"""Looking at a lease costs the server 0.1 to 1.2 us: with this pause for each, sweeping takes at most a twentieth."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one sweep did: messages brought back, seconds until it should be done again."""

    moved: int
    pause: float


class Sweeper:
    """Sweeps one mailbox, when it holds the office.

    Args:
        mailbox: Whose messages to bring back.
        interval: Seconds between sweeps; longer when there are very many leases to look at.
    """

    def __init__(self, mailbox: RedisMailbox[object], interval: float) -> None:
        self._mailbox = mailbox
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Stand for the office from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="fairtrial mailbox sweeper")

    async def stop(self) -> None:
        """Leave the office."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def sweep(self) -> Sweep | None:
        """Bring back everything that is due now; None when another process sweeps.

        Raises:
            MailboxError: Redis cannot be asked.
        """
        moved = 0
        keys = self._mailbox.keys
        office_ms = round(max(1.0, 4 * self._interval) * 1000)
        try:
            while True:
                answer = await self._mailbox.connection.script(
                    SWEEP,
                    (keys.stream, keys.delayed, keys.sweeper),
                    (self._mailbox.consumers.token, office_ms, _MOST, _STRAY_MS),
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
        # One call per consumer: the server answers others in between, however many leases there are.
        consumers = [(name, int(lease)) for name in names if (lease := name.rpartition(b"/")[2]).isdigit()]
        found = await self._each(LATE, consumers)
        late = [consumer for consumer, is_late in zip(consumers, found, strict=True) if is_late]
        # Leases of several workers that end together tell of a server that was away, or of machines that were taken
        # away, and not of a message that ends its worker.
        workers = {name.rpartition(b"/")[0] for name, _ in late}
        return await self._each(RECLAIM, late, _MOST, int(len(workers) > 1))

    async def _each(self, script: Script, consumers: list[tuple[bytes, int]], *args: int) -> list[int]:
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
                _log.debug("%s could not be swept: %s", self._mailbox.name, error)
            except Exception:
                _log.exception("sweeping %s failed; trying again", self._mailbox.name)
            else:
                # Candidates ask now and then, not all at once.
                pause = pause * (1 + random.random()) if done is None else done.pause  # noqa: S311
            await asyncio.sleep(pause)
