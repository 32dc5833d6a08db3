"""Health and metrics of a process over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from fairtrial._version import __version__
from fairtrial.base import metrics
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.ops.watchdog import Watchdog
from fairtrial.mailbox.protocol import MailboxDepth
from fairtrial.runs.events import EvalRunStarted, RunEvent

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_STATES = ("waiting", "delayed", "in_flight", "dead")


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a metric: its value, its labels, and an optional suffix of its name."""

    value: float
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family: samples of one type under one name.

    Attributes:
        name: Letters, digits and underscores; anything else in it becomes an underscore.
        kind: "counter" only grows, "gauge" goes up and down.
        help: The description.
        readings: The samples.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    readings: tuple[Reading, ...]


def metric_name(text: str) -> str:
    """Return a valid Prometheus metric name: loops may name their counters freely."""
    name = _NOT_IN_NAMES.sub("_", text)
    return f"_{name}" if not name or name[0].isdigit() else name


def exposition(families: Iterable[Family], *, process: bool = False) -> str:
    """Return the metrics in the Prometheus text format; with `process`, including CPU time and memory."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    class Collected:
        def collect(self) -> Iterator[Metric]:
            return map(_metric, families)

    registry = CollectorRegistry()
    registry.register(Collected())
    if process:
        ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


def _metric(family: Family) -> Metric:
    from prometheus_client.metrics_core import Metric

    name = metric_name(family.name)
    # The writer adds the ending of counters itself.
    metric = Metric(name.removesuffix("_total") if family.kind == "counter" else name, family.help, family.kind)
    for reading in family.readings:
        # Half a surrogate pair cannot be sent as UTF-8.
        labels = {
            metric_name(key): str(text).encode("utf-8", "replace").decode() for key, text in reading.labels.items()
        }
        metric.add_sample(name + reading.suffix, labels, reading.value)
    return metric


def build_info() -> Family:
    """Return the version as a metric."""
    return Family("fairtrial_build_info", "gauge", "The version that runs.", (Reading(1, {"version": __version__}),))


def families_of(histograms: Iterable[metrics.Histogram], measures: Iterable[metrics.Measure]) -> list[Family]:
    """Return what was counted as metrics."""
    found = [_histogram(histogram) for histogram in histograms]
    for measure in measures:
        values = measure.read().items()
        readings = tuple(Reading(value, dict(zip(measure.labels, labels, strict=True))) for labels, value in values)
        found.append(Family(measure.name, measure.kind, measure.help, readings))
    return found


def process_families() -> list[Family]:
    """Return the metrics of this process: durations, waiting, and the runs of which it is the client."""
    found = families_of(metrics.HISTOGRAMS, metrics.MEASURES)
    runs = metrics.running()
    trials: list[Reading] = []
    costs: list[Reading] = []
    depths: dict[str, MailboxDepth] = {}
    for run in runs:
        named = {"run": run.run_id, "suite": run.suite}
        for state in ("planned", "stored", "outstanding"):
            trials.append(Reading(getattr(run, state), {**named, "state": state}))
        costs.append(Reading(run.cost_usd, named))
        depths |= run.depths
    return [
        *found,
        Family("fairtrial_run_trials", "gauge", "Trials of a run by state.", tuple(trials)),
        Family("fairtrial_run_cost_usd", "gauge", "What a run has cost so far, in US dollars.", tuple(costs)),
        *depth_families(depths),
    ]


def depth_families(depths: Mapping[str, MailboxDepth]) -> list[Family]:
    """Return the depth of mailboxes as metrics."""
    readings = tuple(
        Reading(getattr(depth, state), {"mailbox": name, "state": state})
        for name, depth in depths.items()
        for state in _STATES
    )
    return [Family("fairtrial_mailbox_messages", "gauge", "Messages by where they are.", readings)] if readings else []


def _histogram(histogram: metrics.Histogram) -> Family:
    readings: list[Reading] = []
    bounds = [*(f"{bound:g}" for bound in histogram.buckets), "+Inf"]
    for labels, (counts, total) in histogram.read().items():
        named = dict(zip(histogram.labels, labels, strict=True))
        for bound, count in zip(bounds, accumulate(counts), strict=True):
            readings.append(Reading(count, {**named, "le": bound}, "_bucket"))
        readings += [Reading(sum(counts), named, "_count"), Reading(total, named, "_sum")]
    return Family(histogram.name, "histogram", histogram.help, tuple(readings))


_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 64
TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered to one request."""

    body: str
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def json(cls, tree: Mapping[str, Any], status: int = 200) -> Page:
        """A page of JSON."""
        return cls(json.dumps(tree) + "\n", status, "application/json")


type Pages = Mapping[str, Callable[[], Awaitable[Page]]]


class HealthServer:
    """Serves pages by path for GET and HEAD, one request per connection.

    Requests that are not HTTP, too long or too slow are turned away. At more than `MAX_CONNECTIONS` the one that has
    kept us waiting longest is closed: a probe, which sends its request at once, is answered beside any number of slow
    clients.

    Args:
        host: The interface to listen on.
        port: The port; 0 for a free one.
        pages: What to answer, by path. Called in the server's thread.
    """

    def __init__(self, host: str, port: int, pages: Pages, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._host = host
        self._port = port
        self._pages = pages
        self._timeout = timeout_seconds
        self._silent: dict[asyncio.StreamWriter, None] = {}  # Connections without a whole request yet, oldest first.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self.address: tuple[str, int] | None = None

    def start(self) -> None:
        """Listen from now on.

        Raises:
            ConfigurationError: the port cannot be had.
        """
        ready: Future[tuple[str, int]] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="fairtrial health", daemon=True)
        self._thread.start()
        try:
            self.address = ready.result()
        except OSError as error:
            self._thread.join()
            self._thread = None
            raise ConfigurationError(f"the health port {self._host}:{self._port} cannot be used: {error}") from None

    def close(self) -> None:
        """Stop listening; requests that are being answered are cut off."""
        thread, self._thread = self._thread, None
        if thread is not None and self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join()
        self.address = None

    def _main(self, ready: Future[tuple[str, int]]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except Exception as error:
            if ready.done():
                _log.exception("the health server failed; probes are not answered any more")
            else:
                ready.set_exception(error)

    async def _serve(self, ready: Future[tuple[str, int]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._answer, self._host, self._port, limit=MAX_HEAD_BYTES)
        host, port = server.sockets[0].getsockname()[:2]
        ready.set_result((host, port))
        try:
            await self._over.wait()
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._silent) >= MAX_CONNECTIONS:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        self._silent[writer] = None
        try:
            async with asyncio.timeout(self._timeout):
                page, head_only = await self._page(reader)
                self._silent.pop(writer, None)
                writer.write(_rendered(page, head_only=head_only))
                await writer.drain()
        except (TimeoutError, OSError):
            writer.transport.abort()  # The client is too slow or gone.
        finally:
            self._silent.pop(writer, None)
            writer.close()

    async def _page(self, reader: asyncio.StreamReader) -> tuple[Page, bool]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Page("the request is too long\n", 431), False
        except asyncio.IncompleteReadError:
            return Page("this is not HTTP\n", 400), False
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
            return Page("this is not HTTP\n", 400), False
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return Page("only GET and HEAD are answered\n", 405), False
        find = self._pages.get(target.partition("?")[0])
        if find is None:
            return Page(f"there is {', '.join(self._pages)}\n", 404), method == "HEAD"
        try:
            return await find(), method == "HEAD"
        except Exception:
            _log.exception("the page %s failed", target)
            return Page("this page failed; the log says how\n", 500), method == "HEAD"


def _rendered(page: Page, *, head_only: bool) -> bytes:
    body = page.body.encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + (b"" if head_only else body)


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
        details: Returns what `/health` says besides.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        watchdog: Watchdog | None,
        not_ready: Callable[[], str],
        render: Callable[[], Awaitable[str]] | None = None,
        details: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ConfigurationError(f"the health port must be between 0 and 65535 (got {port})")
        self._watchdog = watchdog
        self._not_ready = not_ready
        self._render = render
        self._details = details
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
        answer = {"live": not stuck, "ready": not why, "why": stuck or why, "version": __version__, **self._details()}
        return Page.json(answer, 503 if stuck else 200)

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
