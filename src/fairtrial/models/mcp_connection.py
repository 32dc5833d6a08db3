"""Connections to MCP servers: one for a trial, or one that the trials of an event loop share."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO, TYPE_CHECKING, Any

import anyio

from fairtrial.base.offload import finish, in_thread
from fairtrial.errors import ToolServerError
from fairtrial.models.tools import LONGEST_ERROR, ToolCallError

if TYPE_CHECKING:
    from fairtrial.models.mcp import McpServer

_MAX_PAGES = 100
_MAX_TOOLS = 1000
_MAX_ANSWER_BYTES = 64 << 20  # Over HTTP: a result with every character escaped.
_STOP_SECONDS = 8.0  # The SDK asks a process to end, terminates and then kills it, in at most 6.5 s.
_IDLE_SECONDS = 5.0  # A shared server outlives its last trial by this, for the next one.
_HTTP_SECONDS = 30.0
_LAST_WORDS = 1000
_log = logging.getLogger("fairtrial.models")


@asynccontextmanager
async def connect(source: McpServer) -> AsyncGenerator[Connection]:
    """Start a server, or use the shared one, for the block."""
    if source.shared:
        servers = source.shared_servers
        for ended in [loop for loop in servers if loop.is_closed()]:  # The tasks of a loop end with it.
            _running.discard(servers.pop(ended))
        loop = asyncio.get_running_loop()
        shared = servers.setdefault(loop, _SharedServer(source, loop))
        connection = await shared.acquire()
        try:
            yield connection
        finally:
            shared.release()
        return
    connection = Connection(source)
    try:
        await connection.start()
        yield connection
    finally:
        await finish(connection.stop())


class Connection:
    """A connection to a server, held open by a task of its own.

    The SDK opens a group of tasks, which one task must enter and leave. The task of a trial would be cancelled by it if
    the server fails, and its own cancellation at a time limit could interrupt the end of the server.
    """

    def __init__(self, source: McpServer) -> None:
        self._source = source
        self._leave = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder: asyncio.Task[None] | None = None
        self._problem: BaseException | None = None
        self.listed: list[Any] = []
        self._words = _LastWords()

    async def start(self) -> None:
        """Start the server, agree on a version of the protocol, and list its tools."""
        await in_thread(import_sdk)
        # An empty context: a shared server belongs to no trial.
        self._holder = asyncio.create_task(self._hold(), context=contextvars.Context())
        seconds = self._source.start_seconds
        await asyncio.wait({self._holder, self._client}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            if not self._holder.done():
                raise self._error(f"did not answer within {seconds:g} s of its start")
            await in_thread(self._words.wait)
            raise self._error("cannot be started" if self._source.address is None else "cannot be reached")
        await self.list_tools()

    async def stop(self) -> None:
        """End the connection, and the process of the server; takes at most twice `_STOP_SECONDS`."""
        if self._holder is None:
            return
        self._leave.set()
        if not self._client.done():
            self._holder.cancel()
        for _ in range(2):
            ended, _ = await asyncio.wait({self._holder}, timeout=_STOP_SECONDS)
            if ended:
                break
            self._holder.cancel()
        else:
            _log.warning("the connection to the MCP server %s did not end", self._source.label)
        self._words.close()

    async def list_tools(self) -> None:
        """Read the list of tools, page by page."""
        client, cursor, listed = self._client.result(), None, []
        with anyio.move_on_after(self._source.start_seconds) as scope:
            try:
                for _ in range(_MAX_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    listed += page.tools
                    cursor = page.next_cursor
                    if not cursor or len(listed) > _MAX_TOOLS:
                        break
            except Exception as error:
                raise self._error(f"cannot list its tools: {_first_line(error)}") from None
        if scope.cancelled_caught:
            raise self._error(f"did not list its tools within {self._source.start_seconds:g} s")
        if cursor or len(listed) > _MAX_TOOLS:
            raise self._error(f"lists more than {_MAX_TOOLS} tools or {_MAX_PAGES} pages of them")
        self.listed = listed

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; raises `ToolCallError` for what the model is told."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        seconds = self._source.call_seconds
        try:
            return await self._client.result().call_tool(name, dict(arguments), read_timeout_seconds=seconds)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise ToolCallError(f"the server did not answer within {seconds:g} s") from None
            if error.code == CONNECTION_CLOSED:
                await in_thread(self._words.wait)
                raise self._error(f"ended the connection at a call of {name!r}") from None
            raise ToolCallError(str(error)[:LONGEST_ERROR]) from None
        except Exception as error:
            raise self._error(f"broke the protocol at a call of {name!r}: {_first_line(error)}") from None

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = Client(transport, cache=None, read_timeout_seconds=self._source.call_seconds)
                await stack.enter_async_context(client)
                self._client.set_result(client)
                await self._leave.wait()
        except BaseException as error:
            self._problem = error
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise

    async def _transport(self, stack: AsyncExitStack) -> Any:
        source = self._source
        if source.address is not None:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            limit = httpx2.Timeout(_HTTP_SECONDS, read=source.call_seconds + _HTTP_SECONDS)
            http = httpx2.AsyncClient(
                headers={"accept-encoding": "identity", **source.headers},
                timeout=limit,
                event_hooks={"response": [self._limit_size]},
            )
            await stack.enter_async_context(http)
            return streamable_http_client(source.address, http_client=http)
        from mcp.client.stdio import StdioServerParameters, stdio_client

        program, *words = source.command
        parameters = StdioServerParameters(command=program, args=words, env=dict(source.env), cwd=source.cwd)
        errors = stack.enter_context(self._words.collect())
        return stdio_client(parameters, errlog=errors)

    async def _limit_size(self, response: Any) -> None:
        """Let an answer fail when it is too large: the SDK would read all of it. A stream of events has no end."""
        import httpx2

        def refuse(why: str) -> httpx2.ReadError:
            self._problem = httpx2.ReadError(why)  # The SDK only says that the connection has ended.
            return self._problem

        class Limited(httpx2.AsyncByteStream):
            def __init__(self, stream: Any) -> None:
                self._stream = stream

            async def __aiter__(self) -> AsyncGenerator[bytes]:
                size = 0
                async for chunk in self._stream:
                    size += len(chunk)
                    if size > _MAX_ANSWER_BYTES:
                        raise refuse(f"it sent more than {_MAX_ANSWER_BYTES >> 20} MiB in one answer")
                    yield chunk

            async def aclose(self) -> None:
                await self._stream.aclose()

        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise refuse(f"it sent a compressed answer ({encoding[:20]}), which was not asked for")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = Limited(response.stream)

    def _error(self, problem: str) -> ToolServerError:
        cause = "" if self._problem is None else _first_line(self._problem)
        details = "".join(f"\n{part}" for part in (cause, self._words.text) if part)
        return ToolServerError(f"the MCP server {self._source.label} {problem}{details}"[:LONGEST_ERROR])


class _LastWords:
    """The end of what a server wrote to its standard error, which is read as fast as it is written."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=2)
        self._thread: threading.Thread | None = None
        self._file: IO[str] | None = None

    @contextlib.contextmanager
    def collect(self) -> Any:
        """Return the file that the server writes to."""
        reading, writing = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(reading,), name="MCP server errors", daemon=True)
        self._thread.start()
        with open(writing, "w", encoding="utf-8") as self._file:
            yield self._file

    def _read(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as file:
            while chunk := file.read(1 << 16):
                self._chunks.append(chunk[-_LAST_WORDS:])

    @property
    def text(self) -> str:
        """The text, once the server has ended."""
        return b"".join(self._chunks).decode("utf-8", "replace")[-_LAST_WORDS:].strip()

    def wait(self) -> None:
        """Wait until all is read that a server wrote before it ended; not for others that have its standard error."""
        if self._file is not None and self._thread is not None:
            self._file.close()  # The server has its own: no other process writes any more.
            self._thread.join(1)

    def close(self) -> None:
        """Forget the thread, which ends when no process writes any more."""
        if self._thread is not None:
            self._thread.join(0.1)


class _SharedServer:
    """One server for all trials of an event loop, from the first trial until no trial has used it for a while."""

    def __init__(self, source: McpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None

    async def acquire(self) -> Connection:
        """Return the connection to the running server."""
        self._users += 1
        try:
            if self._idle is not None:
                self._idle.cancel()
            async with self._lock:
                if self._connection is not None and not await self._answers(self._connection):
                    await self._stop()
                if self._connection is None:
                    connection = Connection(self._source)
                    try:
                        await connection.start()
                    except BaseException:
                        await finish(connection.stop())
                        raise
                    self._connection = connection
                    _running.add(self)
                return self._connection
        except BaseException:
            self.release()
            raise

    async def _answers(self, connection: Connection) -> bool:
        try:
            await connection.list_tools()
        except ToolServerError:
            return False
        return True

    def release(self) -> None:
        """Stop the server soon if no other trial uses it."""
        self._users -= 1
        if self._users == 0:
            self._idle = self._loop.call_later(_IDLE_SECONDS, self._end)

    def _end(self) -> None:
        if self._users == 0:
            self._ending = self._loop.create_task(self.stop(), context=contextvars.Context())

    async def stop(self) -> None:
        """Stop the server if no trial uses it."""
        async with self._lock:
            if self._users == 0:
                await self._stop()

    async def _stop(self) -> None:
        connection, self._connection = self._connection, None
        _running.discard(self)
        if connection is not None:
            await finish(connection.stop())

    def stop_soon(self) -> Any:
        """Stop the server from another thread; None if its event loop does not run."""
        return asyncio.run_coroutine_threadsafe(self._stop(), self._loop) if self._loop.is_running() else None


type SharedServers = dict[asyncio.AbstractEventLoop, _SharedServer]

_running: set[_SharedServer] = set()


@atexit.register
def _stop_at_exit() -> None:
    """Stop shared servers of event loops that run until the process ends, such as that of `run_sync`."""
    import concurrent.futures

    stopping = [future for shared in tuple(_running) if (future := shared.stop_soon()) is not None]
    concurrent.futures.wait(stopping, timeout=_STOP_SECONDS)


def import_sdk() -> None:
    """Import the SDK, which takes seconds, before a time limit or the event loop waits for it."""
    import mcp.client.stdio
    import mcp.client.streamable_http  # noqa: F401


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error).strip()
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
