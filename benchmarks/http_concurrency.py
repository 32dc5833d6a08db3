"""A task that waits for HTTP: is the concurrency that was asked for reached, and what does it cost?

    python benchmarks/http_concurrency.py [--trials 10000] [--concurrency 100]

A local model server answers after 50 ms. A bare aiohttp loop and a suite make the same calls, interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, TrialContext, exact_match
from fairtrial.integrations.model_server import FixedLatency, spawn_model_server

BODY = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


def client(concurrency: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency))


async def call(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(url, json=BODY) as response:
        answer: dict[str, Any] = await response.json()
        return str(answer["choices"][0]["message"]["content"])


async def bare(url: str, trials: int, concurrency: int) -> None:
    numbers = iter(range(trials))

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in numbers:
            await call(session, url)

    async with client(concurrency) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))


async def suite(url: str, dataset: Dataset[int, str], concurrency: int) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[aiohttp.ClientSession]:
        async with client(concurrency) as session:
            yield session

    async def task(number: int, ctx: TrialContext) -> str:
        return await call(ctx.shared, url)

    config = EvalConfig(max_concurrent=concurrency)
    report = await EvalSuite("http", dataset, task, exact_match, config=config, lifespan=lifespan).run(store="memory:")
    assert report.successful == len(dataset), report.errors


def main() -> None:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with spawn_model_server(latency=FixedLatency(0.05)) as server:
        url = f"{server.base_url}/v1/chat/completions"
        dataset = Dataset([Sample(f"s{i}", i, "hello") for i in range(options.trials)])
        times: dict[str, list[float]] = {"bare": [], "suite": []}
        cpu: dict[str, list[float]] = {"bare": [], "suite": []}
        reached = 0
        for _ in range(options.rounds):
            started, used = time.perf_counter(), time.process_time()
            asyncio.run(bare(url, options.trials, options.concurrency))
            times["bare"].append(time.perf_counter() - started)
            cpu["bare"].append((time.process_time() - used) / options.trials * 1e6)
            server.reset()
            started, used = time.perf_counter(), time.process_time()
            asyncio.run(suite(url, dataset, options.concurrency))
            times["suite"].append(time.perf_counter() - started)
            cpu["suite"].append((time.process_time() - used) / options.trials * 1e6)
            reached = max(reached, server.stats().max_in_flight)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["suite"] / medians["bare"]
    print(
        f"{options.trials} calls of 50 ms, {options.concurrency} at once: "
        f"bare {medians['bare']:.2f} s, suite {medians['suite']:.2f} s"
    )
    what = f"{options.trials:,} calls of 50 ms, {options.concurrency} at once"
    each = {"cpu_us": statistics.median(cpu["suite"]), "bare_cpu_us": statistics.median(cpu["bare"])}
    kept = figure(f"{what}, against bare aiohttp", ratio, "x the wall time", at_most=1.2, **each)
    kept &= figure(f"{what}: in flight at the server", reached, at_least=options.concurrency)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
