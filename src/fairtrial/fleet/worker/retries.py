"""Backoff of a worker, and retries of the delivery of one result."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from fairtrial.base.backoff import UNAVAILABLE
from fairtrial.base.backoff import backoff as growing_pause
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import FairtrialError
from fairtrial.fleet.worker.config import LoopConfig
from fairtrial.fleet.worker.counters import LoopCounters
from fairtrial.fleet.worker.jobs import Job

_log = logging.getLogger("fairtrial.fleet")
_MAX_BACKOFF = 10.0


def backoff(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row: capped, and half of it random."""
    return growing_pause(failures, first=0.1, longest=_MAX_BACKOFF)


class DeliveryAttempts:
    """Retries the delivery of one result with backoff, and renews the lease meanwhile.

    If the receiver rejects the result, delivery is retried until `give_up_at`. If the receiver is unavailable, the
    result is kept as long as this process lives, because it was paid for.
    """

    def __init__(self, job: Job[Any], config: LoopConfig, counters: LoopCounters) -> None:
        self._job = job
        self._config = config
        self._counters = counters
        self._failures = 0
        self.give_up_at = time.monotonic() + config.delivery_seconds

    async def pause(self, error: FairtrialError, what: str, fields: Mapping[str, Any] = EMPTY) -> bool:
        """Pause before the next attempt; False if there is none."""
        self._failures += 1
        if time.monotonic() >= self.give_up_at and not isinstance(error, UNAVAILABLE):
            return False
        self._counters.delivery_retries += 1
        delay = backoff(self._failures)
        self._job.keep_until(max(self.give_up_at, time.monotonic() + delay) + self._config.buffer_seconds)
        _log.warning("retrying the delivery of %s in %.1f s: %s", what, delay, error, extra=fields)
        await asyncio.sleep(delay)
        return True
