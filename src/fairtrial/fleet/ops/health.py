"""A few pages over HTTP for probes and Prometheus, from a thread of their own.

Of their own, because a stuck event loop could not say that it is stuck. The pages are read-only, small, and tell no
secrets; still the port is off unless asked for, and on the loopback interface unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fairtrial.errors import ConfigurationError

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
