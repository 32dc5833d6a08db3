"""An HTTP proxy on the loopback interface before a server of objects, which fails in the ways a test asks for."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

SLOW_DOWN = (503, "SlowDown", "Please reduce your request rate.")
DENIED = (403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>{}</Message></Error>'


class Answer(NamedTuple):
    """What the server answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class BucketProxy:
    """Forwards requests to a port of the loopback interface; its attributes may be changed at any time.

    Attributes:
        refusal: Status, code and message with which requests are answered instead of the server.
        away: Connections are closed without an answer.
        unanswered: Requests arrive, and their connections are closed without an answer.
        delay: Seconds by which every answer is late.
        chooses: Which requests these faults meet, by method and path; all by default.
        after: Called with method and path when the server has answered, before the answer is sent.
        requests: The requests by method.
        sent: The bytes of the bodies of requests.
        received: The bytes of the bodies of answers.
        signed: What the signatures of requests with a body say of its hash.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.refusal: tuple[int, str, str] | None = None
        self.away = False
        self.unanswered = False
        self.delay = 0.0
        self.chooses: Callable[[str, str], bool] = lambda _method, _path: True
        self.after: Callable[[str, str], None] = lambda _method, _path: None
        self.requests: Counter[str] = Counter()
        self.sent = self.received = 0
        self.signed: set[str] = set()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def _answer(self) -> None:
                proxy._answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def calm(self) -> None:
        """Forward everything again."""
        self.refusal, self.away, self.unanswered, self.delay = None, False, False, 0.0
        self.chooses = lambda _method, _path: True
        self.after = lambda _method, _path: None

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self._lock:
            self.requests[request.command] += 1
            self.sent += len(body)
            self.signed.update([request.headers.get("x-amz-content-sha256", "")] if body else [])
        met = self.chooses(request.command, request.path)
        if met and self.delay:
            time.sleep(self.delay)
        if met and self.away:
            request.close_connection = True
            return
        if met and self.refusal is not None:
            status, code, message = self.refusal
            answer = Answer(status, [("Content-Type", "application/xml")], _ERROR.format(code, message).encode())
        else:
            answer = self._forward(request, body)
            self.after(request.command, request.path)
        if met and self.unanswered:
            request.close_connection = True
            return
        with self._lock:
            self.received += len(answer.body)
        request.send_response_only(answer.status)
        for name, value in answer.headers:
            request.send_header(name, value)
        length = len(answer.body)
        if request.command == "HEAD":
            length = next((int(value) for name, value in answer.headers if name.lower() == "content-length"), 0)
        request.send_header("Content-Length", str(length))
        request.end_headers()
        request.wfile.write(answer.body)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
            connection.request(request.command, request.path, body or None, headers)
            response = connection.getresponse()
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP]
            return Answer(response.status, kept, response.read())
        finally:
            connection.close()
