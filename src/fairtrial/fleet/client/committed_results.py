"""Follows the results that workers store themselves: woken by a notification, and at intervals without one."""

from __future__ import annotations

import asyncio

from fairtrial.fleet.client.batches import LINGER_SECONDS
from fairtrial.fleet.client.fleet_run import FleetRun, Wakeup, raise_if_cancelled
from fairtrial.fleet.client.stored_results import StoredResults
from fairtrial.fleet.queues import committed_channel

_LISTENING_SECONDS = 2.0
_FIRST_POLL = 0.02
_LONGEST_POLL = 0.25


class CommittedResults:
    """Counts and publishes results that workers have stored, in a task; does nothing without a shared database."""

    def __init__(self, fleet: FleetRun, stored: StoredResults, wakeup: Wakeup) -> None:
        self._fleet = fleet
        self._stored = stored
        self._wakeup = wakeup
        self._event = asyncio.Event()
        self._closing = False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the task in a task group."""
        if self._fleet.shared is not None:
            group.create_task(self._follow())

    def close(self) -> None:
        """End the task, after a last look."""
        self._closing = True
        self._event.set()

    async def _follow(self) -> None:
        shared = self._fleet.shared
        assert shared is not None  # noqa: S101 - see `start`
        listener, channel = shared.connection.listener, committed_channel(self._fleet.run_id)
        if not shared.connection.pooled:
            self._event = listener.subscribe(channel)
        poll = _FIRST_POLL
        try:
            while True:
                raise_if_cancelled()
                last = self._closing
                self._event.clear()
                found = await self._stored.read_committed()
                if found:
                    self._wakeup.wake()
                if last:
                    return
                poll = _FIRST_POLL if found else min(1.5 * poll, _LONGEST_POLL)
                await self._wait(_LISTENING_SECONDS if listener.listens(channel) else poll)
        finally:
            listener.unsubscribe(channel, self._event)
            listener.forget(channel)

    async def _wait(self, seconds: float) -> None:
        """Wait for a notification; then a moment longer, because more results follow."""
        if self._closing:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return
        if not self._closing:
            await asyncio.sleep(LINGER_SECONDS)
