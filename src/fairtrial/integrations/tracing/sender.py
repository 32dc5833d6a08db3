"""Send traces over HTTP, or write them to files."""

from __future__ import annotations

import asyncio
import gzip
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TextIO, cast
from urllib.parse import unquote, urlsplit

from fairtrial._version import __version__
from fairtrial.base.backoff import backoff
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import ConfigurationError, MissingExtraError, TraceSendError
from fairtrial.integrations.tracing.received import otlp_messages
from fairtrial.integrations.tracing.spans import logs_request, traces_request
from fairtrial.store.export import opened
from fairtrial.store.redact import register_guess

if TYPE_CHECKING:
    import aiohttp

    from fairtrial.integrations.tracing.spans import ConvertedTrial


FROM_ENVIRONMENT = "env"
"""The address that stands for the one in OTEL_EXPORTER_OTLP_ENDPOINT."""

_PATHS = {"traces": "/v1/traces", "logs": "/v1/logs"}
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """The addresses of traces and logs, with headers for each; `compress` for gzip."""

    traces: str
    logs: str
    trace_headers: Mapping[str, str] = EMPTY
    log_headers: Mapping[str, str] = EMPTY
    timeout_seconds: float = 10.0
    compress: bool = True


def resolve_endpoint(url: str, environ: Mapping[str, str] = os.environ) -> OtlpEndpoint:
    """Return the endpoint for an address, or for that of the environment if it is "env".

    `http://host:4318` stands for `/v1/traces` and `/v1/logs` below it; an address that ends in `/v1/traces` is used as
    it is. Headers, time limit and compression come from the OTEL_EXPORTER_OTLP_ variables. The values of headers are
    secrets from then on.
    """
    if url == FROM_ENVIRONMENT:
        base = environ.get(_ENDPOINT, "")
        traces = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (base and _join(base, "traces"))
        logs = environ.get("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT") or (base and _join(base, "logs"))
        if not traces:
            raise ConfigurationError(
                f"{_ENDPOINT} must be set to send traces to the address of the environment (it is not set)\n"
                f"set it, as in {_ENDPOINT}=http://127.0.0.1:4318, or name the address"
            )
        logs = logs or _sibling(traces)
    else:
        traces = url if url.endswith(_PATHS["traces"]) else _join(url, "traces")
        logs = _sibling(traces)
    for address in (traces, logs):
        _check_address(address)
    shared = _headers(environ, "OTEL_EXPORTER_OTLP_HEADERS")
    return OtlpEndpoint(
        traces,
        logs,
        shared | _headers(environ, "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
        shared | _headers(environ, "OTEL_EXPORTER_OTLP_LOGS_HEADERS"),
        _timeout(environ),
        environ.get("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip").strip().lower() != "none",
    )


def _join(base: str, signal: str) -> str:
    return base.rstrip("/") + _PATHS[signal]


def _sibling(traces: str) -> str:
    if traces.endswith(_PATHS["traces"]):
        return traces.removesuffix(_PATHS["traces"]) + _PATHS["logs"]
    return traces  # An address of its own, which tells the two apart by their content.


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"the address of traces must be an http:// or https:// URL (got {address!r})\n"
            "as in http://127.0.0.1:4318; gRPC is not supported"
        )


def _headers(environ: Mapping[str, str], variable: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in environ.get(variable, "").split(","):
        if not entry.strip():
            continue
        name, equals, value = entry.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(
                f"{variable} must be a list of NAME=VALUE separated by commas (its entry {len(found) + 1} is not)"
            )
        value = unquote(value.strip())
        found[name.strip().lower()] = value
        for secret in (value, value.rpartition(" ")[2]):  # `Basic abc`: the value without its scheme.
            register_guess(secret, "key", f"a header of {variable}")
    return found


def _timeout(environ: Mapping[str, str]) -> float:
    text = environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", "")
    if not text.strip():
        return 10.0
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ConfigurationError(f"OTEL_EXPORTER_OTLP_TIMEOUT must be a number of milliseconds above 0 (got {text!r})")
    return milliseconds / 1000


def write_whole(target: Path | TextIO, write: Callable[[TextIO], int]) -> int:
    """Call `write` with an open file and return its result; a path gets its file when that is complete."""
    with opened(target, binary=False) as file:
        return write(cast("TextIO", file))


_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 8.0
_EXPLANATION = 300  # Characters of an answer that are quoted.
_MAX_ANSWER = 65_536


class HttpAnswer(NamedTuple):
    """What the server answered in the end, and after how many attempts."""

    status: int
    body: bytes
    attempts: int

    @property
    def accepted(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300

    def __str__(self) -> str:
        text = self.body.decode("utf-8", "replace").strip()[:_EXPLANATION]
        return f"the server answered {self.status}{': ' + text if text else ''}"


@dataclass(slots=True)
class HttpPoster:
    """Posts bodies to one server. To be used as `async with`, on asyncio.

    Args:
        purpose: What it is used for, for the error message if aiohttp is missing.
        retried: The statuses of a server that is busy.
        timeout_seconds: The time limit of one attempt.
        patience_seconds: For how long a request is repeated.
    """

    purpose: str
    retried: Collection[int]
    timeout_seconds: float
    patience_seconds: float
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtraError(self.purpose, "otel") from None
        timeout = aiohttp.ClientTimeout(total=self.timeout_seconds)
        agent = {"User-Agent": f"fairtrial/{__version__}"}
        self._session = aiohttp.ClientSession(timeout=timeout, headers=agent)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, what: str, url: str, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Return the server's answer, whatever its status. Raises `TraceSendError` if it stays busy or away.

        Args:
            what: What is sent, in the plural, for error messages.
            url: Where to.
            body: The body of the request.
            headers: Its headers.
        """
        deadline = time.monotonic() + self.patience_seconds
        attempts = pauses = 0
        while True:
            attempts += 1
            wanted: float | None = None
            outcome = await self._attempt(url, body, headers)
            if isinstance(outcome, str):
                problem = outcome
            else:
                status, content, wanted = outcome
                answer = HttpAnswer(status, content, attempts)
                if status not in self.retried:
                    return answer
                problem = str(answer)
            if wanted is None:
                pauses += 1
                wanted = backoff(pauses, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
            if time.monotonic() + wanted > deadline:
                raise TraceSendError(f"{what} could not be sent within {self.patience_seconds:g} s: {problem}")
            await asyncio.sleep(wanted)

    async def _attempt(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes, float | None] | str:
        """Send once; return status, body and the pause that the server asks for, or why there is no answer."""
        import aiohttp

        if self._session is None:
            raise RuntimeError("the poster must be entered before it is used")
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                content = await _read(response.content)
                return response.status, content, _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")


async def _read(stream: aiohttp.StreamReader) -> bytes:
    """Return the start of an answer, up to the limit."""
    found = b""
    while len(found) < _MAX_ANSWER and (part := await stream.read(_MAX_ANSWER - len(found))):
        found += part
    return found


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None  # A date, which is rare.


_RETRIED_STATUSES = (429, 502, 503, 504)
_NO_SUCH_SIGNAL = (404, 405, 501)
_REMARK = 300  # Characters of a server's remark that are kept.


@dataclass(slots=True)
class SendTotals:
    """What was sent, and what the server said about it."""

    trials: int = 0
    spans: int = 0
    logs: int = 0
    rejected: int = 0  # Spans and log records that the server refused while it accepted their request.
    remark: str = ""  # What the server said last.
    takes_logs: bool = True  # False: the server has traces only, and scores are in the attributes of their spans.


class OtlpSender:
    """Sends converted trials to an endpoint. To be used as `async with`, on asyncio.

    Args:
        endpoint: Where to.
        patience_seconds: For how long a batch is retried.
    """

    def __init__(self, endpoint: OtlpEndpoint, *, patience_seconds: float = 30.0) -> None:
        self._endpoint = endpoint
        self._poster = HttpPoster("sending traces", _RETRIED_STATUSES, endpoint.timeout_seconds, patience_seconds)
        self.totals = SendTotals()

    async def __aenter__(self) -> Self:
        await self._poster.__aenter__()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._poster.__aexit__()

    async def send(self, trials: Sequence[ConvertedTrial], suite: str) -> None:
        """Send the spans and log records of trials. Raises `TraceSendError` if that fails for good."""
        spans = [span for trial in trials for span in trial.spans]
        logs = [log for trial in trials for log in trial.logs]
        totals = self.totals
        await self._post("traces", traces_request(spans, suite).SerializeToString())
        totals.spans += len(spans)
        totals.trials += len(trials)
        if logs and totals.takes_logs:
            totals.takes_logs = await self._post("logs", logs_request(logs, suite).SerializeToString())
            totals.logs += len(logs) if totals.takes_logs else 0

    async def _post(self, signal: Literal["traces", "logs"], body: bytes) -> bool:
        """Send one request; False if the server has no place for log records."""
        endpoint = self._endpoint
        url = endpoint.traces if signal == "traces" else endpoint.logs
        headers = {"Content-Type": "application/x-protobuf"}
        headers |= endpoint.trace_headers if signal == "traces" else endpoint.log_headers
        if endpoint.compress:
            body = gzip.compress(body, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        answer = await self._poster.post(signal, url, body, headers)
        if signal == "logs" and answer.status in _NO_SUCH_SIGNAL:
            self.totals.remark = "the server takes no log records: scores are in the attributes of spans only"
            return False
        if not answer.accepted:
            raise TraceSendError(f"{signal} were refused: {answer}")
        self._read_answer(signal, answer.body)
        return True

    def _read_answer(self, signal: Literal["traces", "logs"], answer: bytes) -> None:
        messages = otlp_messages()
        kind: Any = messages.traces_response if signal == "traces" else messages.logs_response
        try:
            partial = kind.FromString(answer).partial_success
        except Exception:
            return  # Some servers answer with text or JSON: accepted is accepted.
        self.totals.rejected += partial.rejected_spans if signal == "traces" else partial.rejected_log_records
        if partial.error_message:
            self.totals.remark = partial.error_message[:_REMARK]
