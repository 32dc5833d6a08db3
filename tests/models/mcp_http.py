"""An MCP server for tests at an address of this machine, made with the SDK (streamable HTTP). It prints its port.

Requests must have the header `authorization: Bearer test`.
"""

from __future__ import annotations

import gzip
import os
import socket
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from tests.models.mcp_faults import png

server = MCPServer("shop")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def chart() -> Image:
    """Draw a chart."""
    return Image(data=png(), format="png")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such order")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await anyio.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def flood() -> str:
    """Answered by `application`, with a text that does not end for a GiB."""
    return ""


@server.tool()
def bomb() -> str:
    """Answered by `application`, with a text that grows when it is expanded."""
    return ""


FLOODS = {
    b'"name":"flood"': ([], b"x" * (1 << 20), 1024),
    b'"name":"bomb"': ([(b"content-encoding", b"gzip")], gzip.compress(bytes(64 << 20)), 16),
}


async def application(scope: Any, receive: Any, send: Any) -> None:
    request = await receive() if scope["type"] == "http" else None
    for call, (headers, chunk, count) in FLOODS.items():
        if request is not None and call in request.get("body", b""):
            headers = [(b"content-type", b"application/json"), *headers]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for _ in range(count):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
            return
    waiting = [] if request is None else [request]

    async def receive_all() -> Any:
        return waiting.pop() if waiting else await receive()

    if scope["type"] == "http" and (b"authorization", b"Bearer test") not in scope["headers"]:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body"})
        return
    await app(scope, receive_all, send)


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    app = server.streamable_http_app()
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listening])
