"""The tools of MCP servers: a server for each trial, or a shared one, and results that can be recorded and replayed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fairtrial.base.codec import decode, digest, dumps
from fairtrial.base.frozen import EMPTY
from fairtrial.base.offload import in_thread, require_asyncio
from fairtrial.data.pictures import PICTURES, read_picture
from fairtrial.data.sample import Attachment, BlobFolder
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.errors import CodecError, ConfigurationError, MissingExtraError, ToolServerError
from fairtrial.models.adapter import ModelReply, ToolSpec
from fairtrial.models.cache import ResponseCache
from fairtrial.models.mcp_connection import Connection, SharedServers, connect
from fairtrial.models.tools import LONGEST_ERROR, Tool, ToolCallError
from fairtrial.trials.context import running_trial

_MAX_RESULT_BYTES = 8 << 20
_MAX_FILE_BYTES = 1 << 20  # Of a file whose content is part of the identity of a server.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")  # What the APIs of models do not accept in the name of a tool.


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
    def shared_servers(self) -> SharedServers:
        """The server of each event loop, if trials share one."""
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


class _TrialCalls:
    """The calls of one trial: through the cache, if there is one, to a server that is started when it is needed."""

    def __init__(self, source: McpServer) -> None:
        self._source = source
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None
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

    async def _connected(self) -> Connection:
        """Return the connection, opened on first use, to a server that knows all calls of this trial so far."""
        async with self._lock:
            if self._connection is None:
                self._connection = await self._stack.enter_async_context(connect(self._source))
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
