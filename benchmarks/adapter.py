"""How much of an SDK's own speed is left when it is called through `OpenAIAdapter`.

    python benchmarks/adapter.py [--calls 5000] [--concurrency 100] [--rounds 5] [--reasoning]

In one run, in interleaved rounds, against a model server with 50 ms of latency in a process of its own: the adapter,
the same SDK and transport in a bare loop (its typed method, and the raw door the adapter uses), and bare aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai

from fairtrial.data.session.session import Session
from fairtrial.data.session.trajectory import ChatMessage
from fairtrial.integrations.model_server import Reply, spawn_model_server
from fairtrial.models.openai import OpenAIAdapter

type Call = Callable[[], Awaitable[Any]]

QUESTION = "What is the capital of France, and why?"


async def round_of(call: Call, calls: int, concurrency: int) -> tuple[float, float]:
    """Calls per second, and milliseconds of processor time per call."""
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            await call()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return calls / (time.perf_counter() - wall), (time.process_time() - cpu) / calls * 1000


async def measure(
    base_url: str, calls: int, concurrency: int, rounds: int, *, only: str | None = None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The throughput and the processor time of every way, or only of one, round by round."""
    url = base_url + "/v1"
    sent: Any = [{"role": "user", "content": QUESTION}]
    messages = [ChatMessage("user", QUESTION)]
    client = openai.AsyncOpenAI(base_url=url, api_key="test", max_retries=0, http_client=openai.DefaultAioHttpClient())
    adapter = OpenAIAdapter("test-model", base_url=url, api_key="test")
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def through_adapter() -> None:
        # A session per call, as a trial has one.
        assert (await adapter.complete(messages, session=Session())).output

    async def bare_sdk() -> None:
        answer = await client.chat.completions.create(model="test-model", messages=sent)
        assert answer.choices[0].message.content

    async def bare_sdk_raw() -> None:
        body = {"model": "test-model", "messages": sent}
        response = await client.post("/chat/completions", cast_to=adapter._response_type(), body=body)
        assert json.loads(response.content)["choices"][0]["message"]["content"]

    async def bare_aiohttp() -> None:
        async with http.post(url + "/chat/completions", json={"model": "test-model", "messages": sent}) as response:
            assert (await response.json())["choices"][0]["message"]["content"]

    ways: dict[str, Call] = {
        "adapter": through_adapter,
        "sdk": bare_sdk,
        "sdk_raw": bare_sdk_raw,
        "aiohttp": bare_aiohttp,
    }
    if only is not None:
        ways = {only: ways[only]}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    each = max(1, calls // rounds)
    async with client, adapter, http:
        for call in ways.values():  # Connections, imports and caches are not what is measured.
            await round_of(call, concurrency, concurrency)
        for number in range(rounds):
            order = list(ways) if number % 2 == 0 else list(reversed(ways))
            for name in order:
                rate, cost = await round_of(ways[name], each, concurrency)
                rates[name].append(rate)
                costs[name].append(cost)
    return rates, costs


def ratio(rates: dict[str, list[float]], other: str) -> float:
    """The adapter's throughput as a share of another way's: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(rates["adapter"], rates[other], strict=True))


def main() -> None:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reasoning", action="store_true", help="answers come with reasoning, which is kept")
    given = parser.parse_args()
    reply = Reply("Paris.", reasoning="The question is about France. Its capital is Paris." if given.reasoning else "")
    with spawn_model_server(reply, latency=0.05) as server:
        rates, costs = asyncio.run(measure(server.base_url, given.calls, given.concurrency, given.rounds))
    for name in rates:
        print(
            f"{name:8} {statistics.median(rates[name]):7.0f} calls/s  {statistics.median(costs[name]):5.2f} ms CPU/call"
        )
    each = {name: statistics.median(values) * 1000 for name, values in costs.items()}
    what = f"calls through `OpenAIAdapter`, {given.concurrency} at once{', with reasoning' if given.reasoning else ''}"
    kept = True
    for other, name, limit in (("sdk", "the SDK's `create`", 0.9), ("aiohttp", "bare aiohttp", None)):
        cpu = {"cpu_us": each["adapter"], "bare_cpu_us": each[other]}
        kept &= figure(f"{what}, against {name}", ratio(rates, other), "x the throughput", at_least=limit, **cpu)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
