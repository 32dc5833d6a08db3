"""A real OTLP/HTTP collector on loopback, which keeps what it received and answers as it is told."""

from __future__ import annotations

import gzip
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fairtrial.integrations.tracing.received import plain_attributes


@dataclass(frozen=True, slots=True)
class Answer:
    """What the collector says to one request."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """One request: its path, headers and decompressed body."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Collector:
    """Use as a context manager; `answers` are given in order, then 200. `gate` holds answers back until it is set."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = deque(answers)
        self.requests: list[Received] = []
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.requests.append(Received(self.path, headers, body))
                collector.gate.wait(60)
                answer = collector.answers.popleft() if collector.answers else Answer()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            if request.path.endswith("/v1/traces")
            for group in ExportTraceServiceRequest.FromString(request.body).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def logs(self) -> list[Any]:
        return [
            log
            for request in self.requests
            if request.path.endswith("/v1/logs")
            for group in ExportLogsServiceRequest.FromString(request.body).resource_logs
            for scope in group.scope_logs
            for log in scope.log_records
        ]

    @property
    def everything(self) -> bytes:
        return b"\n".join(request.body for request in self.requests)


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a span or a log record."""
    return plain_attributes(message.attributes)
