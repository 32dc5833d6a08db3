"""The server in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, Self, Unpack
from urllib.parse import urlsplit

from fairtrial.base.frozen import first_is
from fairtrial.errors import MissingExtraError
from fairtrial.integrations.model_server.batches import BatchLedger
from fairtrial.integrations.model_server.config import ServerConfig, ServerOptions
from fairtrial.integrations.model_server.reply import ParsedRequest
from fairtrial.integrations.model_server.rules import Replies
from fairtrial.integrations.model_server.stats import ServerStats, stats_from_json

if TYPE_CHECKING:
    from aiohttp import web

    from fairtrial.integrations.model_server.batch_account import BatchHost
    from fairtrial.integrations.model_server.service import Service


# How long requests in progress may take to finish when the server stops, before they are cancelled.
_GRACE_SECONDS = 0.05


class ModelServer:
    """A model server on loopback, speaking OpenAI's chat completions and Responses and Anthropic's messages.

        with ModelServer(["first", "second"], latency=0.05) as server:     # a thread of its own
            client = OpenAI(base_url=server.base_url + "/v1", api_key="test")

        async with ModelServer(faults=FaultRule(RateLimited(), 0.3), seed=7) as server:     # the running loop
            client = AsyncAnthropic(base_url=server.base_url, api_key="test")

    `replies` may be one reply, a list of replies, a list of rules, a function, or None for an echo of the last user
    message; the options are those of `ServerConfig`. All random choices depend on `seed`.
    """

    def __init__(
        self, replies: Replies = None, *, host: str = "127.0.0.1", port: int = 0, **options: Unpack[ServerOptions]
    ) -> None:
        self._config = ServerConfig.of(replies, options)
        try:
            import aiohttp  # noqa: F401 - asked here so that a missing extra is known before anything starts
        except ImportError:
            raise MissingExtraError("the model server", "testing") from None
        self._host = host
        self._wanted_port = port
        self._service: Service | None = None
        self._runner: web.ServerRunner | None = None
        self._port: int | None = None
        self._thread: threading.Thread | None = None
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @classmethod
    def from_config(cls, config: ServerConfig, *, host: str = "127.0.0.1", port: int = 0) -> Self:
        """Create a server from a configuration, such as that of a script file."""
        server = cls(host=host, port=port)
        server._config = config
        return server

    @property
    def port(self) -> int:
        """The port the server listens on."""
        if self._port is None:
            raise RuntimeError("the model server is not running: use it in a with or an async with block")
        return self._port

    @property
    def base_url(self) -> str:
        """The address of the server without a path: complete for Anthropic's client; OpenAI's needs `/v1` after it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def stats(self) -> ServerStats:
        """The counters now. They can still be read after the server has stopped."""
        return self._running_service().ledger.stats()

    def requests(self) -> tuple[ParsedRequest, ...]:
        """Return the completion requests that are in the log, oldest first."""
        return self._running_service().ledger.log()

    def reset(self) -> None:
        """Reset counters, log, scripts, attempts and quota."""
        self._running_service().reset()

    def advance(self, seconds: float) -> None:
        """Move the clock of the batches forward; what is due is executed by the next request."""
        self._batch_account().clock.advance(seconds)

    def batches(self) -> BatchLedger:
        """Return what the provider of batches knows, as of the last request."""
        return self._batch_account().ledger()

    def _batch_account(self) -> BatchHost:
        if (account := self._running_service().batches) is None:
            raise RuntimeError("the model server has no batches: pass batches=BatchOptions()")
        return account

    def _running_service(self) -> Service:
        if self._service is None:
            raise RuntimeError("the model server has not been started: use it in a with or an async with block")
        return self._service

    async def __aenter__(self) -> Self:
        from aiohttp import web

        from fairtrial.integrations.model_server.service import CountingServer, Service

        if self._runner is not None:
            raise RuntimeError("the model server is running already")
        self._service = Service(self._config)
        self._runner = web.ServerRunner(CountingServer(self._service), shutdown_timeout=_GRACE_SECONDS)
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, self._host, self._wanted_port, backlog=1024).start()
        except BaseException:
            await self._close()
            raise
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._close()

    async def _close(self) -> None:
        service, runner = self._service, self._runner
        self._runner = self._port = None
        if service is not None:
            service.close()
        if runner is not None:
            await runner.cleanup()

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("the model server is running already")
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="model-server", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            self._thread = None
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._stop is not None and self._thread is not None:
            loop, event = self._stop
            loop.call_soon_threadsafe(event.set)
            self._thread.join()
            self._thread = self._stop = None

    def _run(self, started: Future[None]) -> None:
        async def live() -> None:
            event = asyncio.Event()
            try:
                await self.__aenter__()
            except BaseException as problem:
                started.set_exception(problem)
                return
            self._stop = (asyncio.get_running_loop(), event)
            started.set_result(None)
            await event.wait()
            await self._close()

        asyncio.run(live())


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

    def advance(self, seconds: float) -> None:
        """Move the clock of the batches forward, and execute what is due."""
        self._ask("POST", f"/_batches?advance={seconds!r}")

    def batches(self) -> BatchLedger:
        """Return what the provider of batches knows now."""
        return BatchLedger.from_json(self._ask("GET", "/_batches"))

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
    module = "fairtrial.integrations.model_server"
    command = [sys.executable, "-m", module, "--attached", "--host", host, "--port", str(port)]
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
