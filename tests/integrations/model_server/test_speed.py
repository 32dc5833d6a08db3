"""The model server costs little more than its HTTP server, so that measurements with it are valid."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest

from fairtrial.integrations.model_server import spawn_model_server
from tests.figures import Figure

_REQUESTS = 5000
_CONNECTIONS = 100
_ROUNDS = 4
_BODY = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}

# The least that aiohttp can do with such a request: read its JSON and send an answer of the same shape.
_BARE_SERVER = """
import asyncio
from aiohttp import web

async def complete(request):
    body = await request.json()
    message = {"role": "assistant", "content": body["messages"][-1]["content"]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return web.json_response({"id": "1", "model": body["model"], "choices": [choice], "usage": usage})

async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@contextmanager
def _bare_server() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", _BARE_SERVER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def _rate(base_url: str) -> float:
    """Requests per second over many connections."""
    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:
        numbers = iter(range(_REQUESTS))

        async def worker() -> None:
            for _ in numbers:
                async with session.post(base_url + "/v1/chat/completions", json=_BODY) as answer:
                    assert answer.status == 200
                    await answer.read()

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(_CONNECTIONS)))
        return _REQUESTS / (time.perf_counter() - started)


@pytest.mark.measured
def test_over_a_hundred_connections_it_serves_two_thirds_of_what_a_bare_server_does(figure: Figure) -> None:
    ours, bare = [], []
    with spawn_model_server() as server, _bare_server() as bare_url:
        # In turns, and the best of each: the first round warms the interpreters, and neighbours come and go.
        for _ in range(_ROUNDS):
            bare.append(asyncio.run(_rate(bare_url)))
            ours.append(asyncio.run(_rate(server.base_url)))
        assert server.stats().requests == _ROUNDS * _REQUESTS
    figure("model server: requests a second, x a bare server", max(ours) / max(bare), at_least=2 / 3)
