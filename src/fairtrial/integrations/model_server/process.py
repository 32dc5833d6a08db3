"""The server in a child process, so that it does not slow down a process that is measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, Unpack
from urllib.parse import urlsplit

from fairtrial.base.frozen import first_is
from fairtrial.integrations.model_server.config import ServerConfig, ServerOptions
from fairtrial.integrations.model_server.rules import Replies
from fairtrial.integrations.model_server.stats import ServerStats, stats_from_json

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


@first_is(str)
@dataclass(frozen=True, slots=True)
class ModelServerProcess:
    """A model server in another process."""

    base_url: str
    pid: int

    def stats(self) -> ServerStats:
        """The counters now."""
        return stats_from_json(self._ask("GET", "/_stats"))

    def requests(self, *, after: int = 0) -> list[dict[str, Any]]:
        """The completion requests with a number above `after`, oldest first, as far as the log goes back."""
        found: list[dict[str, Any]] = self._ask("GET", f"/_requests?after={after}")["requests"]
        return found

    def reset(self) -> None:
        """Reset counters, log, scripts, attempts and quota."""
        self._ask("POST", "/_reset")

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        address = urlsplit(self.base_url)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=30)
        try:
            connection.request(method, path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()


@contextmanager
def spawn_model_server(
    replies: Replies = None, *, host: str = "127.0.0.1", port: int = 0, **options: Unpack[ServerOptions]
) -> Iterator[ModelServerProcess]:
    """Run a model server in a child process until the end of the block.

    Takes what `ModelServer` takes, except Python functions. The child stops at the end of the block, and also when
    this process dies in any way.
    """
    script = ServerConfig.of(replies, options).to_json()
    command = [
        sys.executable,
        "-m",
        "fairtrial.integrations.model_server",
        "--attached",
        "--host",
        host,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own module
    assert process.stdin is not None  # noqa: S101 - pipes were asked for
    assert process.stdout is not None  # noqa: S101
    # A child that never gets ready is killed, which ends the wait for its first line.
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        try:
            process.stdin.write(script + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended already; its message is on standard error.
        first_line = process.stdout.readline().decode().strip()
        watchdog.cancel()
        if not first_line:
            raise RuntimeError(f"the model server did not start (exit code {process.wait()}); see its message above")
        yield ModelServerProcess(first_line, process.pid)
    finally:
        watchdog.cancel()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        process.stdout.close()
