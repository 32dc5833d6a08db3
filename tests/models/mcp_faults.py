"""An MCP server for tests, over standard input and output: quick to start, and broken in many ways.

    python mcp_faults.py FOLDER [FAULT]

Written without the SDK, which starts slowly and prevents some of the faults. It leaves a file in the
folder that is named by its process id.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

FOLDER, FAULT = Path(*sys.argv[1:2]), "".join(sys.argv[2:3])
OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TEXT_OUTPUT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NAMES = [
    "pid",
    "count",
    "fail",
    "refuse",
    "hang",
    "die",
    "notify",
    "line",
    "big",
    "errors",
    "picture",
    "wrong_type",
    "fake",
    "damaged",
    "file",
    "nothing",
    "data",
    "lie",
]


def png() -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(4))) + chunk(b"IEND", b"")


def send(message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def tools(cursor: str | None) -> dict[str, Any]:
    listed: list[dict[str, Any]] = [{"name": name, "inputSchema": OBJECT} for name in NAMES]
    listed.append({"name": "add.numbers", "description": "Add two numbers.", "inputSchema": NUMBERS})
    listed[NAMES.index("lie")]["outputSchema"] = TEXT_OUTPUT
    if FAULT == "schema":
        listed.append({"name": "odd", "inputSchema": {"type": "object", "properties": {"a": {"type": "numbr"}}}})
    if FAULT == "circle":
        listed.append({"name": "odd", "inputSchema": {"type": "object", "allOf": [{"$ref": "#"}]}})
    if FAULT == "shape":
        return {"tools": [{"title": "no name"}]}
    if FAULT == "twice":
        listed.append(listed[0])
    if FAULT == "pages":
        return {"tools": [], "nextCursor": f"{cursor}x"}
    if FAULT == "split":
        return {"tools": listed[:3], "nextCursor": "rest"} if cursor is None else {"tools": listed[3:]}
    return {"tools": listed}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], **more}


def image(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": kind}


class Refused(Exception):
    pass


calls = 0


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    global calls
    calls += 1
    with (FOLDER / "calls").open("a") as file:
        file.write(f"{name}\n")
    match name:
        case "add.numbers":
            return text(str(arguments["a"] + arguments["b"]))
        case "pid":
            return text(str(os.getpid()))
        case "count":
            return text(str(calls))
        case "fail":
            return text("no such order", isError=True)
        case "refuse":
            raise Refused
        case "hang":
            time.sleep(600)
        case "die":
            print("cannot go on: disk full", file=sys.stderr, flush=True)
            os._exit(3)
        case "notify":
            while True:
                send({"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
        case "line":
            while True:
                sys.stdout.write("x" * 65536)
        case "big":
            return text("x" * (2 << 20))
        case "errors":
            for _ in range(200):
                sys.stderr.write("e" * 65536)
            return text("written")
        case "picture":
            return {"content": [{"type": "text", "text": "a chart"}, image(png())]}
        case "wrong_type":
            return {"content": [image(png(), "image/jpeg")]}
        case "fake":
            return {"content": [image(b"no picture")]}
        case "damaged":
            return {"content": [{"type": "image", "data": "%%%", "mimeType": "image/png"}]}
        case "file":
            resource = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "in a file"}
            link = {"type": "resource_link", "name": "more", "uri": "file:///b.txt"}
            return {"content": [{"type": "resource", "resource": resource}, link]}
        case "nothing":
            return {"content": []}
        case "data":
            return {"content": [], "structuredContent": {"price": 2.5}}
        case "lie":
            return text("{}", structuredContent={"text": 7})
    raise AssertionError(name)


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    match method:
        case "initialize":
            info = {"name": "faults", "version": "1"}
            capabilities: dict[str, Any] = {"tools": {}}
            version = "1999-01-01" if FAULT == "version" else params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
        case "tools/list":
            return tools(params.get("cursor"))
        case "tools/call":
            return call(params["name"], params.get("arguments") or {})
    return None


def main() -> None:
    (FOLDER / f"{os.getpid()}.pid").touch()
    if FAULT == "ends":
        sys.exit("cannot start: no database")
    if FAULT == "silent":
        time.sleep(600)
    if FAULT == "garbage":
        while True:
            print("Starting ...", flush=True)
            time.sleep(0.01)
    if FAULT == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        helper = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)  # In the group of this process.
        (FOLDER / f"{helper.pid}.pid").touch()
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        try:
            result = answer(message["method"], message.get("params") or {})
        except Refused:
            send({"id": message["id"], "error": {"code": -32602, "message": "not today"}})
            continue
        if result is None:
            send({"id": message["id"], "error": {"code": -32601, "message": "unknown method"}})
        else:
            send({"id": message["id"], "result": result})
    if FAULT == "stubborn":
        time.sleep(600)


if __name__ == "__main__":
    main()
