"""Sends OTLP over HTTP: protobuf, gzip, retries where the protocol allows them."""

from __future__ import annotations

import asyncio
import gzip
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from fairtrial._version import __version__
from fairtrial.errors import MissingExtraError, TraceSendError
from fairtrial.tracing.endpoint import OtlpEndpoint
from fairtrial.tracing.protocol_buffers import otlp_messages
from fairtrial.tracing.requests import logs_request, traces_request

if TYPE_CHECKING:
    import aiohttp

    from fairtrial.tracing.spans import ConvertedTrial

_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 8.0
_EXPLANATION = 300  # Characters of a refusal that are reported.


@dataclass(slots=True)
class SendTotals:
    """What was sent, and what the server said about it."""

    trials: int = 0
    spans: int = 0
    logs: int = 0
    rejected: int = 0  # Spans and log records that the server accepted the request of, but not them.
    remark: str = ""  # What the server said last.


class OtlpSender:
    """Sends converted trials to an endpoint. To be used as `async with`, on asyncio.

    Args:
        endpoint: Where to.
        patience_seconds: For how long a batch is retried.
    """

    def __init__(self, endpoint: OtlpEndpoint, *, patience_seconds: float = 30.0) -> None:
        self._endpoint = endpoint
        self._patience = patience_seconds
        self._session: aiohttp.ClientSession | None = None
        self.totals = SendTotals()

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtraError("sending traces", "otel") from None
        timeout = aiohttp.ClientTimeout(total=self._endpoint.timeout_seconds)
        agent = {"User-Agent": f"fairtrial/{__version__}"}
        self._session = aiohttp.ClientSession(timeout=timeout, headers=agent)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, trials: Sequence[ConvertedTrial], suite: str) -> None:
        """Send the spans and log records of trials. Raises `TraceSendError` if that fails for good."""
        spans = [span for trial in trials for span in trial.spans]
        logs = [log for trial in trials for log in trial.logs]
        totals = self.totals
        await self._post("traces", traces_request(spans, suite).SerializeToString())
        totals.spans += len(spans)
        totals.trials += len(trials)
        if logs:
            await self._post("logs", logs_request(logs, suite).SerializeToString())
            totals.logs += len(logs)

    async def _post(self, signal: Literal["traces", "logs"], body: bytes) -> None:
        endpoint = self._endpoint
        url = endpoint.traces if signal == "traces" else endpoint.logs
        headers = {"Content-Type": "application/x-protobuf"}
        headers |= endpoint.trace_headers if signal == "traces" else endpoint.log_headers
        if endpoint.compress:
            body = gzip.compress(body, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        deadline = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            wanted, problem = await self._attempt(signal, url, body, headers)
            if problem is None:
                return
            if wanted is None:
                wanted = random.uniform(pause / 2, pause)  # noqa: S311 - a delay, not a secret
                pause = min(pause * 2, _LONGEST_PAUSE)
            if time.monotonic() + wanted > deadline:
                raise TraceSendError(f"{signal} could not be sent within {self._patience:g} s: {problem}")
            await asyncio.sleep(wanted)

    async def _attempt(
        self, signal: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[float | None, str | None]:
        """Send once; return the pause that the server wants, and the problem. Raises if it refuses for good."""
        import aiohttp

        if self._session is None:
            raise RuntimeError("the sender must be entered before it is used")
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                answer = await response.content.read(65_536)
                status = response.status
                wanted = _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return None, f"{type(error).__name__}: {error}".rstrip(": ")
        if 200 <= status < 300:
            self._read_answer(signal, answer)
            return None, None
        text = answer.decode("utf-8", "replace").strip()[:_EXPLANATION]
        problem = f"the server answered {status}{': ' + text if text else ''}"
        if status not in _RETRIED_STATUSES:
            raise TraceSendError(f"{signal} were refused: {problem}")
        return wanted, problem

    def _read_answer(self, signal: str, answer: bytes) -> None:
        messages = otlp_messages()
        kind: Any = messages.traces_response if signal == "traces" else messages.logs_response
        try:
            partial = kind.FromString(answer).partial_success
        except Exception:
            return  # Some servers answer with text or JSON: accepted is accepted.
        self.totals.rejected += partial.rejected_spans if signal == "traces" else partial.rejected_log_records
        if partial.error_message:
            self.totals.remark = partial.error_message[:_EXPLANATION]


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None  # A date, which is rare.
