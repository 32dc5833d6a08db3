"""Sends OTLP over HTTP: protobuf, gzip, retries where the protocol allows them."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from fairtrial.errors import TraceSendError
from fairtrial.integrations.tracing.endpoint import OtlpEndpoint
from fairtrial.integrations.tracing.posting import HttpPoster
from fairtrial.integrations.tracing.protocol_buffers import otlp_messages
from fairtrial.integrations.tracing.requests import logs_request, traces_request

if TYPE_CHECKING:
    from fairtrial.integrations.tracing.spans import ConvertedTrial

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
        self._poster = HttpPoster(
            "sending traces",
            _RETRIED_STATUSES,
            timeout_seconds=endpoint.timeout_seconds,
            patience_seconds=patience_seconds,
        )
        self.totals = SendTotals()

    async def __aenter__(self) -> Self:
        await self._poster.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._poster.__aexit__(kind, error, trace)

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
