"""The phases of a worker's `run`, and the request to stop it."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from fairtrial.errors import ConfigurationError

type WorkerPhase = Literal["idle", "receiving", "draining", "handing_back"]


class WorkerLifecycle:
    """The state machine of a worker: idle -> receiving -> draining -> handing_back -> idle.

    A stop may be requested in any phase, also before `run`, and from any thread. It ends `receiving` and limits the
    duration of `draining`; a request to hurry ends draining too. Tasks that wait for a free slot, for jobs to end or
    for a pause to be over wait for a change here.
    """

    def __init__(self) -> None:
        self.phase: WorkerPhase = "idle"
        self.stop_requested = False
        self.hurry_requested = False
        self.stopped: asyncio.Future[None]  # Done once a stop is requested, for `asyncio.wait`.
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        """Whether `run` is in progress."""
        return self.phase != "idle"

    def start(self) -> None:
        """Start receiving. A stop that was requested earlier still applies."""
        if self.running:
            raise ConfigurationError("this loop is already running")
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.stopped = self._loop.create_future()
        self.phase = "receiving"

    def drain(self) -> None:
        """Stop receiving; jobs in progress may finish."""
        self.phase = "draining"

    def hand_back(self) -> None:
        """Cancel jobs in progress; their messages are handed back."""
        self.phase = "handing_back"

    def end(self) -> None:
        """Clear the request to stop, so that the worker can run again."""
        self.phase = "idle"
        self.stop_requested = self.hurry_requested = False
        self._loop = None

    def request_stop(self) -> None:
        """Request the worker to end, from any thread or a signal handler."""
        self.stop_requested = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._announce_stop)
            except RuntimeError:
                pass  # The event loop is closed: there is nothing left to stop.

    def request_hurry(self) -> None:
        """Request the worker to end without waiting for jobs in progress, from any thread or a signal handler."""
        self.hurry_requested = True
        self.request_stop()

    def _announce_stop(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)
        self.notify()

    def notify(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()

    async def wait_for_change(self, deadline: float | None = None) -> bool:
        """Wait until a job ends, a slot is free or a stop is requested; False if `deadline` passes first."""
        self._changed.clear()
        if deadline is None:
            await self._changed.wait()
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
        except TimeoutError:
            return False
        return True

    async def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a stop is requested."""
        deadline = time.monotonic() + seconds
        while not self.stop_requested and time.monotonic() < deadline:
            if not await self.wait_for_change(deadline):
                return
