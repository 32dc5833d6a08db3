"""The tools of MCP servers: a server for each trial, or a shared one, and results that can be recorded and replayed."""

from __future__ import annotations

import asyncio
import atexit
import base64
import binascii
import contextlib
import contextvars
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import anyio

from fairtrial.base.codec import decode, digest, dumps
from fairtrial.base.frozen import EMPTY
from fairtrial.base.offload import finish, in_thread, require_asyncio
from fairtrial.data.pictures import PICTURES, read_picture
from fairtrial.data.sample import Attachment, BlobFolder
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import CodecError, ConfigurationError, MissingExtraError, ToolServerError
from fairtrial.models.adapter import ModelReply, ToolSpec
from fairtrial.models.cache import ResponseCache
from fairtrial.models.tools import LONGEST_ERROR, Tool, ToolCallError
from fairtrial.trials.context import running_trial

_MAX_PAGES = 100
_MAX_TOOLS = 1000
_MAX_RESULT_BYTES = 8 << 20
_MAX_ANSWER_BYTES = 64 << 20  # Over HTTP: a result with every character escaped.
_MAX_FILE_BYTES = 1 << 20  # Of a file whose content is part of the identity of a server.
_STOP_SECONDS = 8.0  # The SDK asks a process to end, terminates and then kills it, in at most 6.5 s.
_IDLE_SECONDS = 5.0  # A shared server outlives its last trial by this, for the next one.
_HTTP_SECONDS = 30.0
_LAST_WORDS = 1000
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")  # What the APIs of models do not accept in the name of a tool.
_log = logging.getLogger("fairtrial.models")


def mcp_tools(
    server: str | Sequence[str | Path],
    *,
    tools: Sequence[str] | None = None,
    prefix: str = "",
    env: Mapping[str, str] = EMPTY,
    cwd: str | Path | None = None,
    headers: Mapping[str, str] = EMPTY,
    shared: bool = False,
    blobs: BlobFolder | None = None,
    cache: ResponseCache | None = None,
    start_seconds: float = 30.0,
    call_seconds: float = 60.0,
) -> McpServer:
    """Return the tools of an MCP server, for `agent_task(tools=[...])`; needs `fairtrial[mcp]` and asyncio.

    Each trial has its own server, or its own session with a server at an address: it is started when the agent starts,
    within the time limit of the trial, and stopped when the agent ends, however it ends. A call that the server answers
    with an error, or not in time, is a failed call of the tool: the model is told. A server that cannot be started,
    dies or breaks the protocol is an error of the trial.

    Args:
        server: The command that starts a server which speaks over its standard input and output, as a text or as a
            list of its words; or the http(s) address of a server (streamable HTTP).
        tools: The names of the tools to offer; by default all.
        prefix: Put before the names of the tools, so that those of several servers differ. Characters that models do
            not accept in names become "_".
        env: Environment variables of the command. It inherits only HOME, LOGNAME, PATH, SHELL, TERM and USER.
        cwd: The working directory of the command.
        headers: HTTP headers of each request, such as an authorization.
        shared: Start one server for all trials of this process, for servers without a state. It ends five seconds
            after the last trial that used it; one that has died is started again by the next trial.
        blobs: The folder for pictures, sound and files in results, also needed by the adapter that sends them.
        cache: Record lists of tools and results there. "read-write" replays what is recorded and starts the server only
            for other calls, after repeating the replayed ones; "read" never starts it, and a call that is not recorded
            is an error of the trial; "refresh" replaces what is recorded. A result belongs to the sample, the repeat
            and the calls of the trial so far.
        start_seconds: The time limit of starting the server and listing its tools.
        call_seconds: The time limit of one call.
    """
    if importlib.util.find_spec("mcp") is None:
        raise MissingExtraError("mcp_tools()", "mcp")
    if not (start_seconds > 0 and call_seconds > 0):
        raise ConfigurationError(
            f"start_seconds and call_seconds must be more than 0 (got {start_seconds} and {call_seconds})"
        )
    address = server if isinstance(server, str) and server.startswith(("http://", "https://")) else None
    command: tuple[str, ...] = ()
    if address is None:
        command = tuple(shlex.split(server) if isinstance(server, str) else map(str, server))
        if not command or "://" in command[0]:
            raise ConfigurationError(
                f"an MCP server must be a command, such as 'python server.py', or an http(s) address (got {server!r})"
            )
        if headers:
            raise ConfigurationError("headers are for a server at an address: pass settings of a command in env")
    elif env or cwd is not None:
        raise ConfigurationError("env and cwd are for a server that is started by a command (got an address)")
    return McpServer(
        address=address,
        command=command,
        tools=None if tools is None else tuple(tools),
        prefix=prefix,
        env=dict(env),
        cwd=cwd,
        headers=dict(headers),
        shared=shared,
        blobs=blobs,
        cache=cache,
        start_seconds=start_seconds,
        call_seconds=call_seconds,
    )


@dataclass(frozen=True, eq=False, repr=False)
class McpServer:
    """The tools of an MCP server, which are opened for each trial; made by `mcp_tools`."""

    address: str | None
    command: tuple[str, ...]
    tools: tuple[str, ...] | None
    prefix: str
    env: Mapping[str, str]
    cwd: str | Path | None
    headers: Mapping[str, str]
    shared: bool
    blobs: BlobFolder | None
    cache: ResponseCache | None
    start_seconds: float
    call_seconds: float

    def __fairtrial_identity__(self) -> dict[str, Any]:
        return {**self.identity, "tools": self.tools, "prefix": self.prefix}

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __repr__(self) -> str:
        return f"<McpServer {self.label}>"

    @cached_property
    def _shared_servers(self) -> dict[asyncio.AbstractEventLoop, _SharedServer]:
        return {}

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Which server it is: its address or command, with the content of the files that the command names."""
        if self.address is not None:
            return {"address": self.label}
        # Not the path of the program, which differs between machines, and no environment, which may contain secrets.
        words = [os.path.basename(self.command[0]), *self.command[1:]]
        for at, word in enumerate(self.command[1:], 1):
            path = Path(self.cwd or ".", word)
            with contextlib.suppress(OSError, ValueError):
                if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                    words[at] = f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        return {"command": tuple(words)}

    @property
    def label(self) -> str:
        """The server in messages: its command, or its address without a password and a query."""
        if self.address is None:
            return shlex.join((os.path.basename(self.command[0]), *self.command[1:]))[:200]
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Sequence[Tool]]:
        """Return the tools for one trial; the server is stopped at the end of the block."""
        require_asyncio("mcp_tools()", "run the suite without trio")
        calls = _TrialCalls(self)
        try:
            yield await calls.tools()
        finally:
            await calls.close()

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[_Connection]:
        """Start a server, or use the shared one, for the block."""
        if self.shared:
            servers = self._shared_servers
            for ended in [loop for loop in servers if loop.is_closed()]:  # The tasks of a loop end with it.
                _running.discard(servers.pop(ended))
            loop = asyncio.get_running_loop()
            shared = servers.setdefault(loop, _SharedServer(self, loop))
            connection = await shared.acquire()
            try:
                yield connection
            finally:
                shared.release()
            return
        connection = _Connection(self)
        try:
            await connection.start()
            yield connection
        finally:
            await finish(connection.stop())


class _TrialCalls:
    """The calls of one trial: through the cache, if there is one, to a server that is started when it is needed."""

    def __init__(self, source: McpServer) -> None:
        self._source = source
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None
        self._unseen: list[tuple[str, Mapping[str, Any]]] = []  # Replayed calls, which the server does not know of.
        self._history: list[list[str]] = []  # The calls of each turn; calls of one turn have no order.
        self._in_flight = 0

    async def tools(self) -> list[Tool]:
        """Return the tools that are offered."""
        source = self._source
        reply, _ = await self._cached(digest(["mcp", source.identity, "tools/list"]), self._list)
        try:
            specs = decode(tuple[ToolSpec, ...], reply.message.text)
        except CodecError as error:
            raise self._broken(f"its list of tools cannot be read: {error}") from None
        if source.tools is not None:
            listed = {spec.name: spec for spec in specs}
            if missing := [name for name in source.tools if name not in listed]:
                raise ConfigurationError(
                    f"the MCP server {source.label} has no tool {missing[0]!r}; it has: {', '.join(listed) or 'none'}"
                )
            specs = tuple(listed[name] for name in source.tools)
        made = [self._tool(spec) for spec in specs]
        if len({tool.name for tool in made}) < len(made):
            raise self._broken("it lists several tools with the same name")
        return made

    async def close(self) -> None:
        """Stop the server of the trial."""
        await self._stack.aclose()

    def _tool(self, spec: ToolSpec) -> Tool:
        async def call(**arguments: Any) -> Any:
            return await self._call(spec.name, arguments)

        name = self._source.prefix + _NOT_IN_NAMES.sub("_", spec.name)
        try:
            tool = Tool(call, name=name, description=spec.description, parameters=spec.parameters)
            with contextlib.suppress(CodecError):
                tool.arguments({})  # Reports a schema that refers to itself without end.
        except Exception as error:
            raise self._broken(f"the tool {spec.name!r} has an unusable schema: {error}") from None
        return tool

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str | tuple[str | Attachment, ...]:
        if not self._in_flight:
            self._history.append([])
        content = digest([name, arguments])
        key = self._key(content)
        self._history[-1] = sorted((*self._history[-1], content))
        self._in_flight += 1
        try:
            reply, cached = await self._cached(key, partial(self._call_server, name, arguments))
        finally:
            self._in_flight -= 1
        if cached:
            self._unseen.append((name, arguments))
        if reply.message.failed:
            raise ToolCallError(reply.message.text)
        return reply.message.content

    def _key(self, content: str) -> str:
        """Return the key of a call: what a server answers depends on the earlier calls of its trial."""
        trial = running_trial()
        whose = (None, 0) if trial is None else (trial.key.sample_id, trial.key.repeat)
        *earlier, turn = self._history
        return digest(["mcp", self._source.identity, *whose, earlier, content, turn.count(content)])

    async def _cached(self, key: str, ask: Callable[[], Awaitable[ModelReply]]) -> tuple[ModelReply, bool]:
        cache = self._source.cache
        if cache is None or cache.policy == "off":
            return await ask(), False
        return await cache.get(key, self._not_recorded if cache.policy == "read" else ask, lambda _reply: True)

    async def _not_recorded(self) -> ModelReply:
        raise ToolServerError(
            f"a result of the MCP server {self._source.label} is not recorded in {self._source.cache}\n"
            'record it with the policy "read-write"'
        )

    async def _list(self) -> ModelReply:
        connection = await self._connected()
        specs = [ToolSpec(tool.name, tool.description or "", tool.input_schema) for tool in connection.listed]
        return ModelReply(ChatMessage("tool", dumps(specs)))

    async def _call_server(self, name: str, arguments: Mapping[str, Any]) -> ModelReply:
        connection = await self._connected()
        try:
            result = await connection.call(name, arguments)
            content = await self._content(name, result)
        except ToolCallError as error:
            return ModelReply(ChatMessage("tool", str(error), failed=True))
        if result.is_error:
            texts = [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
            text = "\n".join(texts)[:LONGEST_ERROR] or "the server gave no reason"
            return ModelReply(ChatMessage("tool", text, failed=True))
        return ModelReply(ChatMessage("tool", content))

    async def _connected(self) -> _Connection:
        """Return the connection, opened on first use, to a server that knows all calls of this trial so far."""
        async with self._lock:
            if self._connection is None:
                self._connection = await self._stack.enter_async_context(self._source.connect())
            while self._unseen:
                with contextlib.suppress(ToolCallError):
                    await self._connection.call(*self._unseen[0])
                del self._unseen[0]
            return self._connection

    async def _content(self, name: str, result: Any) -> str | tuple[str | Attachment, ...]:
        size = sum(len(getattr(block, "text", "") or getattr(block, "data", "")) for block in result.content)
        if size > _MAX_RESULT_BYTES:
            raise ToolCallError(f"its result must be at most {_MAX_RESULT_BYTES >> 20} MiB (got {size >> 20})")
        parts = [await self._part(name, block) for block in result.content]
        if not parts and result.structured_content is not None:
            return dumps(result.structured_content)
        if all(isinstance(part, str) for part in parts):
            return "\n".join(map(str, parts))
        return tuple(parts)

    async def _part(self, name: str, block: Any) -> str | Attachment:
        match block.type:
            case "text":
                return str(block.text)
            case "resource_link":
                return f"{block.title or block.name}: {block.uri}"
            case "resource" if hasattr(block.resource, "text"):
                return str(block.resource.text)
            case "resource":
                return await self._kept(name, block.resource.blob, block.resource.mime_type)
            case _:
                return await self._kept(name, block.data, block.mime_type)

    async def _kept(self, name: str, data: str, media_type: str | None) -> Attachment:
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self._broken(f"the tool {name!r} returned damaged base64: {error}") from None
        picture = read_picture(content)
        if picture is None and media_type in PICTURES:
            raise self._broken(f"the tool {name!r} returned {media_type} that is no picture")
        kind = picture.media_type if picture is not None else media_type or "application/octet-stream"
        blobs = self._source.blobs
        if blobs is None:
            raise ToolServerError(
                f"the tool {name!r} of the MCP server {self._source.label} returned {kind}, which needs a folder\n"
                "pass the same BlobFolder as mcp_tools(blobs=...) and as blobs=... of the adapter"
            )
        return await in_thread(partial(blobs.put, content, media_type=kind))

    def _broken(self, problem: str) -> ToolServerError:
        return ToolServerError(f"the MCP server {self._source.label}: {problem}"[:LONGEST_ERROR])


class _Connection:
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
        await in_thread(_import_sdk)
        # An empty context: a shared server belongs to no trial.
        self._holder = asyncio.create_task(self._hold(), context=contextvars.Context())
        seconds = self._source.start_seconds
        await asyncio.wait({self._holder, self._client}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            failed = "cannot be started" if self._source.address is None else "cannot be reached"
            raise self._error(failed if self._holder.done() else f"did not answer within {seconds:g} s of its start")
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
                self._words.wait()
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
        self._connection: _Connection | None = None
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None

    async def acquire(self) -> _Connection:
        """Return the connection to the running server."""
        self._users += 1
        try:
            if self._idle is not None:
                self._idle.cancel()
            async with self._lock:
                if self._connection is not None and not await self._answers(self._connection):
                    await self._stop()
                if self._connection is None:
                    connection = _Connection(self._source)
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

    async def _answers(self, connection: _Connection) -> bool:
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


_running: set[_SharedServer] = set()


@atexit.register
def _stop_at_exit() -> None:
    """Stop shared servers of event loops that run until the process ends, such as that of `run_sync`."""
    import concurrent.futures

    stopping = [future for shared in tuple(_running) if (future := shared.stop_soon()) is not None]
    concurrent.futures.wait(stopping, timeout=_STOP_SECONDS)


def _import_sdk() -> None:
    """Import the SDK, which takes seconds, before a time limit or the event loop waits for it."""
    import mcp.client.stdio
    import mcp.client.streamable_http  # noqa: F401


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error).strip()
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
