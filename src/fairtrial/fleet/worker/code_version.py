"""Announces the code version of a worker to clients, and hands back requests made from other code."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Self

from fairtrial.errors import MailboxError
from fairtrial.fleet.messages import EvalRequest, new_id
from fairtrial.fleet.worker.config import EvalLoopConfig
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.mailbox.bulk import ANNOUNCEMENT_SECONDS, announce
from fairtrial.mailbox.protocol import Mailbox, Message

_log = logging.getLogger("fairtrial.fleet")
_ANNOUNCE_SECONDS = ANNOUNCEMENT_SECONDS / 3
_NAME_SHOWN = 60
_MAX_LOGGED = 1000


class FingerprintCheck:
    """Hands back requests with a different fingerprint, so that a matching worker can take them.

    Receiving backs off as such requests follow each other: if only requests for other code are queued, receiving them
    again at once is useless.

    Args:
        config: Settings.
        counters: The counters to update.
        pause: Stops receiving for this many seconds.
    """

    def __init__(self, config: EvalLoopConfig, counters: LoopCounters, pause: Callable[[float], None]) -> None:
        self._config = config
        self._counters = counters
        self._pause = pause
        self._in_a_row = 0
        self._logged: set[str] = set()

    def matches(self, request: EvalRequest) -> bool:
        """Return whether the fingerprints of request and worker match, if both have one."""
        here, there = self._config.fingerprint, request.fingerprint
        return not here or not there or here == there or self._config.allow_drift

    def accept(self) -> None:
        """Reset the backoff after a matching request."""
        self._in_a_row = 0

    async def refuse(self, message: Message[EvalRequest]) -> None:
        """Hand back a request for other code with a delay, and pause receiving."""
        self._counters.refused += 1
        self._log_once(message.body)
        self._in_a_row += 1
        self._pause(min(self._config.refuse_seconds, 0.05 * self._in_a_row))
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - a delay, not a secret
        await message.hand_back(self._config.refuse_seconds * jitter)

    def _log_once(self, request: EvalRequest) -> None:
        if request.fingerprint in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(request.fingerprint)
        _log.warning(
            "requests of run %s were made from other code than this worker's (fingerprint %s, here %s) and are "
            "handed back. Start workers with the submitter's code, or with --allow-drift "
            "(EvalLoopConfig.allow_drift)",
            request.key.run_id,
            request.fingerprint,
            self._config.fingerprint,
            extra={"run": request.key.run_id},
        )


class WorkerAnnouncement:
    """Announces a worker and its fingerprint to clients, also while it drains.

    Use it as an async context manager around the work. Announcements expire; the last one is withdrawn.
    """

    def __init__(self, requests: Mailbox[Any], worker: str, config: EvalLoopConfig) -> None:
        self._requests = requests
        self._worker = worker
        self._fingerprint = "" if config.allow_drift else config.fingerprint
        # The name is only displayed and not unique; it must not contain white space.
        self._id = f"{new_id()} {'-'.join(worker.split())[:_NAME_SHOWN]}"
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._repeat())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._announce(0)

    async def _repeat(self) -> None:
        while True:
            await self._announce(ANNOUNCEMENT_SECONDS)
            await asyncio.sleep(_ANNOUNCE_SECONDS)

    async def _announce(self, ttl_seconds: float) -> None:
        try:
            await announce(self._requests, self._id, self._fingerprint, ttl_seconds)
        except MailboxError as error:
            _log.debug("worker %s could not be announced: %s", self._worker, error)
