"""The model server is a yardstick, so it must be quicker than what is measured with it."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from fairtrial.testing.model_server import spawn_model_server


@pytest.mark.measured
def test_it_serves_two_thousand_requests_a_second_over_a_hundred_connections() -> None:
    count, connections = 6000, 100
    body = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}

    async def rate(url: str) -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:
            numbers = iter(range(count))

            async def worker() -> None:
                for _ in numbers:
                    async with session.post(url, json=body) as answer:
                        assert answer.status == 200
                        await answer.read()

            started = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(connections)))
            return count / (time.perf_counter() - started)

    with spawn_model_server() as server:
        # The better of three: the first opens the connections and warms both interpreters.
        best = max(asyncio.run(rate(server.base_url + "/v1/chat/completions")) for _ in range(3))
        assert server.stats().requests == 3 * count
    print(f"{best:.0f} requests per second")
    assert best > 2000
