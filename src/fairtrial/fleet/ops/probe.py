"""Health and metrics endpoints of a process: `/live`, `/ready`, `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from fairtrial._version import __version__
from fairtrial.base import metrics
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.ops.health import HealthServer, Page
from fairtrial.fleet.ops.metrics import (
    CONTENT_TYPE,
    Family,
    Reading,
    build_info,
    check_installed,
    exposition,
    process_families,
)
from fairtrial.fleet.ops.watchdog import Watchdog
from fairtrial.runs.events import EvalRunStarted, RunEvent

STALL_SECONDS = 30.0
HEALTH_HOST = "127.0.0.1"


class Probe:
    """Serves the endpoints of one process in a separate thread.

    Args:
        host: The interface to listen on.
        port: The port; 0 for a free one.
        watchdog: Detects a stuck event loop: `/live` and `/health` then fail. None disables this.
        not_ready: Returns why the process is not ready; empty if it is.
        render: Returns additional metrics of the process as text.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        watchdog: Watchdog | None,
        not_ready: Callable[[], str],
        render: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ConfigurationError(f"the health port must be between 0 and 65535 (got {port})")
        check_installed()
        self._watchdog = watchdog
        self._not_ready = not_ready
        self._render = render
        pages = {"/live": self._live, "/ready": self._ready, "/health": self._health, "/metrics": self._metrics}
        self._server = HealthServer(host, port, pages)
        self.start = self._server.start
        self.close = self._server.close

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens."""
        return self._server.address

    def _stuck(self) -> str:
        dog = self._watchdog
        stuck = dog is not None and dog.stalled
        return f"the event loop has been stuck for {dog.silence:.1f} s" if dog is not None and stuck else ""

    async def _live(self) -> Page:
        why = self._stuck()
        return Page.json({"live": False, "why": why}, 503) if why else Page.json({"live": True})

    async def _ready(self) -> Page:
        why = self._not_ready()
        return Page.json({"ready": True}) if not why else Page.json({"ready": False, "why": why}, 503)

    async def _health(self) -> Page:
        """Combine both for people: fails like `/live` and includes the text of `/ready`."""
        stuck, why = self._stuck(), self._not_ready()
        said = {"live": not stuck, "ready": not why, "why": stuck or why, "version": __version__}
        return Page.json(said, 503 if stuck else 200)

    async def _metrics(self) -> Page:
        own = "" if self._render is None else await self._render()
        dog = self._watchdog
        vitals = [build_info(), *process_families()]
        if dog is not None:
            vitals += [
                Family("fairtrial_event_loop_stalls_total", "counter", "Stalls so far.", (Reading(dog.stalls),)),
                Family(
                    "fairtrial_event_loop_silence_seconds",
                    "gauge",
                    "Time since the event loop last responded, beyond its usual interval.",
                    (Reading(dog.silence),),
                ),
            ]
        return Page(own + exposition(vitals, process=True), 200, CONTENT_TYPE)


class ClientProbe:
    """Serves the endpoints of a fleet client; register it as an observer of the run.

    Args:
        host: The interface to listen on.
        port: The port; 0 for a free one.
        stall_seconds: An event loop that does not respond for this long is stuck.
    """

    def __init__(self, host: str, port: int, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._watchdog = Watchdog(stall_seconds)
        self._probe = Probe(host, port, watchdog=self._watchdog, not_ready=self._not_ready)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens."""
        return self._probe.address

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve while the block runs."""
        self._probe.start()
        try:
            yield
        finally:
            self._probe.close()
            loop, self._loop = self._loop, None
            if loop is not None and loop.is_running():
                loop.call_soon_threadsafe(self._watchdog.stop)  # Its timer belongs to that loop.

    def publish(self, event: RunEvent) -> None:
        """Start watching the event loop when the run starts."""
        if isinstance(event, EvalRunStarted) and self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._watchdog.start()

    def _not_ready(self) -> str:
        if self._watchdog.stalled:
            return "the event loop is stuck"
        waiting = sorted(resource for (resource,), count in metrics.WAITING.read().items() if count > 0)
        if waiting:
            return f"waiting for the {' and the '.join(waiting)}"
        return "" if metrics.running() else "no run is in progress"
