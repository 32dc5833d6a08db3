"""Receive traces over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import anyio

from fairtrial.base.foreign import BODY_SECONDS, HEAD_SECONDS, ExpansionBudget, Method, expand
from fairtrial.base.offload import in_thread, loop_caller
from fairtrial.errors import ConfigurationError, DataError, LimitExceededError, MissingExtraError
from fairtrial.integrations.tracing.mapping import collected_trace
from fairtrial.integrations.tracing.received import ReceivedLog, ReceivedSpan, otlp_messages, parse_logs, parse_traces
from fairtrial.trials.context import CollectedTrace, TrialKey, trace_id_of, trial_span_id

try:
    from aiohttp import web
except ImportError:
    raise MissingExtraError("receiving traces", "otel") from None


class ReceiverServer(web.Server):
    """Closes connections on which no whole head of a request arrives in time.

    aiohttp limits the time after each answer (`keepalive_timeout`), and only its latest versions the time before the
    first one.
    """

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(self._begin, auto_decompress=False, access_log=None, keepalive_timeout=HEAD_SECONDS)
        self._answer = answer
        self._first_heads: dict[Any, asyncio.TimerHandle] = {}

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Begin to wait for the first head."""
        super().connection_made(handler, transport)
        self._first_heads[handler] = asyncio.get_running_loop().call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Stop to wait."""
        self._stop_waiting(handler)
        super().connection_lost(handler, exc)

    async def _begin(self, request: web.BaseRequest) -> web.StreamResponse:
        self._stop_waiting(request.protocol)
        return await self._answer(request)

    def _stop_waiting(self, handler: Any) -> None:
        timer = self._first_heads.pop(handler, None)
        if timer is not None:
            timer.cancel()


_NOT_USED = "the application did not use the traceparent it was given"
_REMEMBERED = 10_000  # Closed traces that are told from unknown ones.


@dataclass(slots=True)
class TraceCounts:
    """What arrived: spans by what became of them."""

    spans: int = 0
    duplicates: int = 0  # Sent twice: exporters repeat a request that was not answered in time.
    late: int = 0  # For a trace that was collected already.
    unknown: int = 0  # For a trace of no trial.
    surplus: int = 0  # Beyond the largest number of spans of a trace.


class PendingTrace:
    """The spans of one trace. Complete: every parent is known, and a span directly below the trial's has ended."""

    def __init__(self, buffer: TraceBuffer, trace_id: str, root_id: str) -> None:
        self._buffer = buffer
        self.trace_id = trace_id
        self.root_id = root_id
        self.spans: dict[str, ReceivedSpan] = {}
        self.logs: dict[str, ReceivedLog] = {}  # By all that they contain: they have no ids.
        self.changed_at = -math.inf  # On the clock `time.monotonic()`.
        self.cut_off = False
        self._notify: Callable[[], object] | None = None

    @property
    def wait_seconds(self) -> float:
        """How long `wait` may take."""
        return self._buffer.wait_seconds

    def problem(self) -> str | None:
        """Return why the trace is incomplete; None if it is complete."""
        spans = dict(self.spans)
        if self.cut_off:
            return f"it has more than {self._buffer.max_spans:,} spans"
        if not spans:
            others = self._buffer.counts.unknown
            return "no span arrived" + (f", but {others:,} of unknown traces: {_NOT_USED}" if others else "")
        missing = {span.parent_id for span in spans.values() if span.parent_id} - spans.keys() - {self.root_id}
        if missing:
            names = sorted(span.name for span in spans.values() if span.parent_id in missing)
            return f"{len(missing)} parent span(s) did not arrive, such as that of {names[0]!r}"
        if not any(span.parent_id == self.root_id for span in spans.values()):
            return f"no span is a child of the trial's: {_NOT_USED}"
        return None

    async def wait(self) -> CollectedTrace:
        """Wait until the trace is complete and nothing has arrived for a moment, or for the longest time."""
        silence, deadline = self._buffer.silence_seconds, time.monotonic() + self._buffer.wait_seconds
        call = loop_caller()
        while True:
            arrived = anyio.Event()
            self._notify = lambda event=arrived: call(event.set)
            now = time.monotonic()
            remaining = deadline - now
            if self.problem() is None:
                quiet = self.changed_at + silence - now
                if quiet <= 0:
                    break
                remaining = min(remaining, quiet)
            if remaining <= 0:
                break
            with anyio.move_on_after(remaining):
                await arrived.wait()
        self._notify = None
        return self.collected()

    def collected(self) -> CollectedTrace:
        """Return what has arrived."""
        with self._buffer.lock:
            spans, logs = list(self.spans.values()), list(self.logs.values())
        return collected_trace(spans, logs, root_id=self.root_id, problem=self.problem())

    def close(self) -> None:
        """Forget the trace."""
        self._notify = None
        self._buffer.close(self.trace_id)

    def wake(self) -> None:
        """Wake the waiting task; called from the thread that receives."""
        self.changed_at = time.monotonic()
        notify = self._notify
        if notify is not None:
            try:
                notify()
            except RuntimeError:
                pass  # Its event loop has ended.


class TraceBuffer:
    """The traces that are expected, by id. Safe to use from threads.

    Args:
        wait_seconds: How long a trial waits for its spans at most.
        silence_seconds: How long nothing must arrive before a trace counts as complete.
        max_spans: The largest number of spans of one trace.
    """

    def __init__(self, *, wait_seconds: float, silence_seconds: float, max_spans: int) -> None:
        self.wait_seconds = wait_seconds
        self.silence_seconds = silence_seconds
        self.max_spans = max_spans
        self.lock = threading.Lock()
        self.counts = TraceCounts()
        self._pending: dict[str, PendingTrace] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def expect(self, trace_id: str, root_id: str) -> PendingTrace:
        """Accept the spans of a trace from now on."""
        trace = PendingTrace(self, trace_id, root_id)
        with self.lock:
            self._pending[trace_id] = trace
            self._closed.pop(trace_id, None)
        return trace

    def close(self, trace_id: str) -> None:
        """Stop accepting the spans of a trace."""
        with self.lock:
            self._pending.pop(trace_id, None)
            self._closed[trace_id] = None
            while len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)

    def add(self, spans: Iterable[ReceivedSpan] = (), logs: Iterable[ReceivedLog] = ()) -> None:
        """Add what arrived to the traces that it belongs to."""
        touched: set[PendingTrace] = set()
        with self.lock:
            for span in spans:
                trace = self._add_span(span)
                if trace is not None:
                    touched.add(trace)
            for log in logs:
                trace = self._pending.get(log.trace_id)
                if trace is not None and len(trace.logs) < self.max_spans:
                    trace.logs.setdefault(repr(log), log)
                    touched.add(trace)
        for trace in touched:
            trace.wake()

    def _add_span(self, span: ReceivedSpan) -> PendingTrace | None:
        """Add and count a span; returns its trace if that has changed."""
        counts = self.counts
        counts.spans += 1
        trace = self._pending.get(span.trace_id)
        if trace is None:
            if span.trace_id in self._closed:
                counts.late += 1
            else:
                counts.unknown += 1
            return None
        if span.span_id in trace.spans:
            counts.duplicates += 1
            return None
        if len(trace.spans) >= self.max_spans:
            counts.surplus += 1
            trace.cut_off = True
            return None
        trace.spans[span.span_id] = span
        return trace


_START_SECONDS = 30.0
# The last two are names of this machine inside a container.
_LOOPBACK = ("127.0.0.1", "::1", "localhost", "host.docker.internal", "host.containers.internal")
RETRY_AFTER = "5"
"""Seconds after which a sender may try again that was refused because of overload."""
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_ENCODINGS: dict[str, Method] = {"": "stored", "identity": "stored", "gzip": "gzip", "deflate": "zlib"}


class TraceReceiver:
    """A server that applications send their spans to, and the source of traces of a suite.

        suite = EvalSuite(..., evaluator=tool_called("weather"), traces=TraceReceiver(port=4318))

    Every trial hands its `ctx.trace_headers` to the application, whose spans then become events of the trial's session.
    It takes OTLP over HTTP, as protobuf or JSON, at any path that ends in `/v1/traces` or `/v1/logs`, and runs while a
    run does, or as a context manager.

    Args:
        host: The interface; other machines cannot reach the default.
        port: The port; 0 for any free one.
        trace_wait_seconds: How long a trial waits for its spans after the task has ended. Exporters send every 5 s
            unless OTEL_BSP_SCHEDULE_DELAY says otherwise.
        max_body_bytes: The size limit of a request, before and after decompression.
        max_spans: The largest number of spans of one trace.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        trace_wait_seconds: float = 6.0,
        max_body_bytes: int = 16 * 1024 * 1024,
        max_spans: int = 10_000,
    ) -> None:
        otlp_messages("receiving traces")
        if not 0 < trace_wait_seconds < 3600:
            raise ConfigurationError(f"trace_wait_seconds must be from 0 to 3600 (got {trace_wait_seconds!r})")
        self._host = host
        self._wanted_port = port
        self._port: int | None = None
        self._limit = max_body_bytes
        self._buffer = TraceBuffer(wait_seconds=trace_wait_seconds, silence_seconds=0.05, max_spans=max_spans)
        self._thread: threading.Thread | None = None
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._users = 0
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """The address to send to, for OTEL_EXPORTER_OTLP_ENDPOINT; "" while it does not run."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return "" if self._port is None or self._stop is None else f"http://{host}:{self._port}"

    @property
    def counts(self) -> TraceCounts:
        """What has arrived."""
        return self._buffer.counts

    def expect(self, key: TrialKey, attempt: int) -> PendingTrace:
        """Accept the spans of an attempt at a trial from now on."""
        trace_id = trace_id_of(key, attempt)
        return self._buffer.expect(trace_id.hex(), trial_span_id(trace_id).hex())

    def start(self) -> None:
        """Start the server. Raises `ConfigurationError` if the port is taken."""
        ready = threading.Event()
        problem: list[BaseException] = []

        def work() -> None:
            try:
                asyncio.run(self._serve(ready))
            except BaseException as error:
                problem.append(error)
            finally:
                ready.set()

        self._thread = threading.Thread(target=work, name="fairtrial trace receiver", daemon=True)
        self._thread.start()
        if not ready.wait(_START_SECONDS) or problem:
            self._thread = None
            raise ConfigurationError(
                f"traces cannot be received on {self._host}:{self._wanted_port} "
                f"({problem[0] if problem else 'the server did not start'})\nchoose another port"
            )

    def stop(self) -> None:
        """Stop the server; the traces of running trials are kept, and it can be started again on the same port."""
        stop, thread = self._stop, self._thread
        self._stop = self._thread = None
        if stop is not None:
            with contextlib.suppress(RuntimeError):
                stop[0].call_soon_threadsafe(stop[1].set)
        if thread is not None:
            thread.join(_START_SECONDS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Receive during the block; several runs may share the receiver."""
        with self._lock:
            self._users += 1
            if self._users == 1 and self._thread is None:
                try:
                    self.start()
                except BaseException:
                    self._users -= 1
                    raise
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self.stop()

    def __enter__(self) -> Self:
        self._entered = self.running()
        self._entered.__enter__()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._entered.__exit__(None, None, None)

    async def _serve(self, ready: threading.Event) -> None:
        runner = web.ServerRunner(ReceiverServer(self._answer))
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port or self._wanted_port)
            await site.start()
            self._port = runner.addresses[0][1]
            ended = asyncio.Event()
            self._stop = (asyncio.get_running_loop(), ended)
            ready.set()
            await ended.wait()
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # Pages in a browser, which could reach this machine by DNS rebinding. Applications send no Origin.
        if "Origin" in request.headers:
            return web.Response(status=403, text="requests of web pages are refused\n")
        if self._host in _LOOPBACK and _name_of(request.host) not in _LOOPBACK:
            return web.Response(status=421, text="this receiver answers to this machine only\n")
        path = request.path.rstrip("/")
        if not path.endswith(("/v1/traces", "/v1/logs")):
            return web.Response(status=404, text="spans are received at /v1/traces, log records at /v1/logs\n")
        if request.method != "POST":
            return web.Response(status=405, headers={"Allow": "POST"})
        kind = request.content_type
        if kind not in (_JSON, _PROTOBUF):
            return web.Response(status=415, text=f"the content type must be {_PROTOBUF} or {_JSON}\n")
        try:
            body = await self._body(request)
            is_json = kind == _JSON
            if path.endswith("/v1/traces"):
                busy = await self._accept(parse_traces(body, is_json=is_json), ())
            else:
                busy = await self._accept((), parse_logs(body, is_json=is_json))
        except TimeoutError:
            return web.Response(status=408, text="the request did not arrive in time\n")
        except LimitExceededError as error:
            return web.Response(status=413, text=f"{error}\n")
        except DataError as error:
            return web.Response(status=400, text=f"{error}\n")
        if busy:
            return web.Response(status=503, headers={"Retry-After": RETRY_AFTER}, text=f"{busy}\n")
        return web.Response(body=b"{}" if kind == _JSON else b"", content_type=kind)

    async def _accept(self, spans: Sequence[ReceivedSpan], logs: Sequence[ReceivedLog]) -> str:
        """Take what a request contains; returns why it has to be sent again later, or nothing."""
        self._buffer.add(spans, logs)
        return ""

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Read the body, which must stay within the limit, also while it is decompressed."""
        budget = ExpansionBudget("the body", self._limit, "TraceReceiver(max_body_bytes=...)")
        budget.check(request.content_length or 0)
        body = bytearray()
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.content.iter_chunked(65_536):
                body += part
                budget.check(len(body))
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise DataError(f"the content encoding must be gzip, deflate or none (got {encoding[:40]!r})")
        # In a thread: other senders are answered meanwhile.
        return await in_thread(lambda: expand(bytes(body), _ENCODINGS[encoding], budget))


def _name_of(host: str) -> str:
    """Return the name or address in a `Host`, in lower case and without its port."""
    name, separator, port = host.lower().rpartition(":")
    return (name if separator and port.isdecimal() else host.lower()).strip("[]")
