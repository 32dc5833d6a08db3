"""Run a model server from the shell: `python -m fairtrial.integrations.model_server --port 0 --script FILE`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fairtrial.base.system import handle_signal
from fairtrial.integrations.model_server.config import ServerConfig
from fairtrial.integrations.model_server.reply import FixedLatency
from fairtrial.integrations.model_server.server import ModelServer


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fairtrial.integrations.model_server",
        description="A model server for tests and demos: OpenAI chat completions and Responses, Anthropic messages, "
        "with faults. Its first line of output is its base URL. Without a script it echoes the last user message.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on (default: a free one)")
    parser.add_argument("--script", type=Path, help="a JSON file with replies, faults and any other setting")
    parser.add_argument("--latency", type=float, metavar="SECONDS", help="how long every answer takes")
    parser.add_argument("--max-concurrent", type=int, metavar="N", help="answer 429 above this many in flight")
    parser.add_argument("--requests-per-second", type=float, metavar="N", help="answer 429 above this rate")
    parser.add_argument("--seed", type=int, help="the seed of all random choices")
    parser.add_argument(
        "--attached",
        action="store_true",
        help="read the script as one line from standard input, and stop when standard input is closed",
    )
    return parser.parse_args(arguments)


def _config(arguments: argparse.Namespace) -> ServerConfig:
    if arguments.attached:
        config = ServerConfig.from_json(sys.stdin.buffer.readline())
    elif arguments.script is not None:
        config = ServerConfig.load(arguments.script)
    else:
        config = ServerConfig()
    if arguments.latency is not None:
        config = dataclasses.replace(config, latency=FixedLatency(arguments.latency))
    for name in ("max_concurrent", "requests_per_second", "seed"):
        if (value := getattr(arguments, name)) is not None:
            config = dataclasses.replace(config, **{name: value})
    return config


async def _serve(server: ModelServer, *, attached: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        handle_signal(loop, number, stop.set)
    if attached:
        # Standard input closes when the parent process ends, even if it is killed: the server ends with it.
        threading.Thread(target=_await_end_of_input, args=(loop, stop), daemon=True).start()
    async with server:
        print(server.base_url, flush=True)
        await stop.wait()


def _await_end_of_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # The loop has ended.
        loop.call_soon_threadsafe(stop.set)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    given = _arguments(arguments)
    try:
        server = ModelServer.from_config(_config(given), host=given.host, port=given.port)
        asyncio.run(_serve(server, attached=given.attached))
    except (ValueError, OSError) as problem:
        print(f"model server: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
