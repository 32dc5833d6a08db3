"""Counters and log of the server's requests."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.reply import ParsedRequest, Usage


@first_is(int)
@dataclass(frozen=True, slots=True)
class ServerStats:
    """A snapshot of the counters. All but `in_flight` and `connections` count since the start or the last reset.

    `requests` counts every completion request, including refused ones. `refused` counts requests that got status 429
    because of the concurrency cap or the quota and were never in flight. `abandoned` counts requests that the client
    gave up before the answer was complete. `by_status` counts answers by their status; reset and hanging connections
    have none. `by_fault` counts faults by kind, and `concurrency_cap`, `quota`, `invalid_request` and `reply_error`.
    """

    requests: int
    in_flight: int
    max_in_flight: int
    refused: int
    abandoned: int
    connections: int
    input_tokens: int
    output_tokens: int
    by_status: dict[int, int]
    by_model: dict[str, int]
    by_fault: dict[str, int]


class RequestLog:
    """The counters and the log of requests. Written by the server's event loop, read from any thread."""

    def __init__(self, *, log_limit: int, log_bytes: int) -> None:
        self._lock = threading.Lock()
        self._log_limit = log_limit
        self._log_bytes = log_bytes
        self.in_flight = 0
        self._connections = 0
        self._clear()

    def _clear(self) -> None:
        self._requests = self._refused = self._abandoned = self._input_tokens = self._output_tokens = 0
        self._max_in_flight = self.in_flight
        self._by_status: Counter[int] = Counter()
        self._by_model: Counter[str] = Counter()
        self._by_fault: Counter[str] = Counter()
        self._log: deque[ParsedRequest] = deque()
        self._logged_bytes = 0

    def reset(self) -> None:
        """Reset the counters and empty the log."""
        with self._lock:
            self._clear()

    def connected(self, change: int) -> None:
        """Count a connection that was opened (+1) or closed (-1)."""
        with self._lock:
            self._connections += change

    def next_number(self) -> int:
        """Count a completion request; returns its number."""
        with self._lock:
            self._requests += 1
            return self._requests

    def received(self, request: ParsedRequest) -> None:
        """Add a valid request to the log, and drop the oldest ones beyond its limits."""
        with self._lock:
            self._by_model[request.model] += 1
            self._log.append(request)
            self._logged_bytes += request.size
            while len(self._log) > self._log_limit or (self._logged_bytes > self._log_bytes and len(self._log) > 1):
                self._logged_bytes -= self._log.popleft().size

    def began(self) -> None:
        """Count a request that was admitted."""
        with self._lock:
            self.in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self.in_flight)

    def ended(self) -> None:
        """Count the end of an admitted request, successful or not."""
        with self._lock:
            self.in_flight -= 1

    def answered(self, status: int, usage: Usage | None = None) -> None:
        """Count an answer with this status."""
        with self._lock:
            self._by_status[status] += 1
            if usage is not None:
                self._input_tokens += usage.input_tokens
                self._output_tokens += usage.output_tokens

    def faulted(self, kind: str) -> None:
        """Count a fault of this kind."""
        with self._lock:
            self._by_fault[kind] += 1

    def refused(self, reason: str) -> None:
        """Count a request that a limit refused."""
        with self._lock:
            self._refused += 1
            self._by_fault[reason] += 1

    def abandoned(self) -> None:
        """Count a request whose client disconnected before the answer was complete."""
        with self._lock:
            self._abandoned += 1

    def stats(self) -> ServerStats:
        """Return the current counters."""
        with self._lock:
            return ServerStats(
                requests=self._requests,
                in_flight=self.in_flight,
                max_in_flight=self._max_in_flight,
                refused=self._refused,
                abandoned=self._abandoned,
                connections=self._connections,
                input_tokens=self._input_tokens,
                output_tokens=self._output_tokens,
                by_status=dict(self._by_status),
                by_model=dict(self._by_model),
                by_fault=dict(self._by_fault),
            )

    def log(self) -> tuple[ParsedRequest, ...]:
        """Return the requests in the log, oldest first."""
        with self._lock:
            return tuple(self._log)


def stats_to_json(stats: ServerStats) -> dict[str, Any]:
    """Return the counters as `GET /_stats` returns them."""
    return asdict(stats)


def stats_from_json(data: dict[str, Any]) -> ServerStats:
    """Parse the answer of `GET /_stats`; the statuses are text in JSON."""
    return ServerStats(**{**data, "by_status": {int(status): n for status, n in data["by_status"].items()}})


def request_to_json(request: ParsedRequest) -> dict[str, Any]:
    """Return a logged request as `GET /_requests` returns it."""
    return {
        "number": request.number,
        "attempt": request.attempt,
        "protocol": request.protocol,
        "model": request.model,
        "messages": [{"role": message.role, "text": message.text} for message in request.messages],
        "headers": dict(request.headers),
        "body": request.body,
    }
