"""How long a request to a MainLoop takes from being sent to being answered, one at a time.

python benchmarks/fleet_latency.py [--mailbox redis|postgres] [--requests 1000] [--limit-ms 5]

Starts its own server on the loopback, and the MainLoop in a process of its own. Prints one JSON line per figure. With
--limit-ms it fails when the median is above it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairtrial import Session, exact_match
from fairtrial.data import Sample
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoop, MainLoopRequest, MainLoopResult
from fairtrial.mailbox import PostgresConnection, PostgresMailbox, RedisConnection, RedisMailbox
from fairtrial.trials import TrialContext, TrialKey
from fairtrial.trials.config import Experiment


async def answer(input: str) -> str:
    return input


def connect(url: str) -> RedisConnection | PostgresConnection:
    return PostgresConnection(url) if url.startswith("postgresql") else RedisConnection(url)


def mailbox_of(connection: RedisConnection | PostgresConnection, name: str, body_type: type[Any]) -> Any:
    if isinstance(connection, PostgresConnection):
        return PostgresMailbox(name, body_type, connection)
    return RedisMailbox(name, body_type, connection)


async def serve(url: str) -> None:
    async with connect(url) as connection, mailbox_of(connection, "main", MainLoopRequest) as requests:
        await MainLoop(answer, requests=requests).run()


@contextmanager
def served(url: str) -> Iterator[None]:
    """A MainLoop in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, __file__, "--serve", url], env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def main_loop(connection: RedisConnection | PostgresConnection, count: int) -> list[float]:
    """Request to reply, in milliseconds."""
    from fairtrial.fleet.worker.config import EvalLoopConfig
    from fairtrial.fleet.worker.remote import RemoteMainLoop

    requests = mailbox_of(connection, "main", MainLoopRequest)
    async with requests, requests.for_replies("main.replies.bench", MainLoopResult, 60) as replies:
        key = TrialKey("run", "baseline", "s")
        context = TrialContext(key, Sample("s", "x"), Experiment(), Session())
        took = []
        async with RemoteMainLoop(requests, replies, EvalLoopConfig(mainloop_timeout=60)) as remote:
            for _ in range(count):
                began = time.perf_counter()
                await remote.ask("x" * 500, context)
                took.append((time.perf_counter() - began) * 1000)
        return took


async def two_hops(connection: RedisConnection | PostgresConnection, count: int) -> list[float]:
    """A trial through EvalLoop and MainLoop and back, in milliseconds."""
    async with (
        mailbox_of(connection, "requests", EvalRequest) as requests,
        mailbox_of(connection, "results", EvalReply) as results,
        mailbox_of(connection, "main", MainLoopRequest) as main,
    ):
        config = EvalLoopConfig(concurrency=1)
        loop = EvalLoop(
            requests=requests, evaluator=exact_match, mainloop_requests=main, results=results, config=config
        )
        running = asyncio.create_task(loop.run())
        took = []
        for number in range(count):
            began = time.perf_counter()
            key = TrialKey("run", "baseline", f"s{number}")
            await requests.send(EvalRequest(key, Sample(key.sample_id, "x" * 500, "x" * 500), number, number))
            (reply,) = await results.receive(1, 60, 20)
            took.append((time.perf_counter() - began) * 1000)
            await reply.acknowledge()
        loop.stop()
        await running
        return took


async def measure(url: str, count: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    with served(url):
        async with connect(url) as connection:
            for name, way in (("request_to_reply", main_loop), ("trial_over_two_hops", two_hops)):
                await way(connection, 20)  # Connections and scripts are there.
                used = time.process_time()
                took = sorted(await way(connection, count))
                figures[f"{name}_cpu_us"] = round((time.process_time() - used) / count * 1e6, 1)
                figures[f"{name}_p50_ms"] = round(took[len(took) // 2], 2)
                figures[f"{name}_p99_ms"] = round(took[int(len(took) * 0.99)], 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mailbox", choices=["redis", "postgres"], default="redis")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--limit-ms", type=float, default=0.0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.figures import ENGINES, figure
    from benchmarks.fleet_throughput import queue

    with tempfile.TemporaryDirectory() as folder, queue(Path(folder), options.mailbox) as (url, _):
        figures = asyncio.run(measure(url, options.requests))
    for name, value in figures.items():
        print(json.dumps({"figure": name, "value": value}))
    kept = True
    for key, what, limit in (
        ("request_to_reply", "a request to a `MainLoop` in another process and its reply", options.limit_ms or None),
        ("trial_over_two_hops", "a trial over two hops", None),
    ):
        name, cpu_us = f"{what}, on {ENGINES[options.mailbox]}", figures[f"{key}_cpu_us"]
        kept &= figure(f"{name}, p50", figures[f"{key}_p50_ms"], "ms", at_most=limit, cpu_us=cpu_us)
        figure(f"{name}, p99", figures[f"{key}_p99_ms"], "ms")
    if not kept:
        raise SystemExit(f"the median is above {options.limit_ms} ms")


if __name__ == "__main__":
    main()
