"""What a call in a child process costs, as ratios to a bare round trip through a pipe of `multiprocessing`.

    python benchmarks/isolation.py [--calls 300] [--rounds 5]

Start-up is compared with an interpreter that starts and imports nothing. Rounds are interleaved, medians of wall-clock
time: the machine may be shared, the ratios hold anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from fairtrial.base.isolation import IsolatedRunner


def echo(value: int) -> int:
    return value


def _serve(connection: Connection) -> None:
    while (value := connection.recv()) is not None:
        connection.send(echo(value))


def pipe_calls(connection: Connection, calls: int) -> float:
    started = time.perf_counter()
    for number in range(calls):
        connection.send(number)
        assert connection.recv() == number
    return (time.perf_counter() - started) / calls


async def isolated_calls(runner: IsolatedRunner, calls: int) -> float:
    started = time.perf_counter()
    for number in range(calls):
        assert await runner.run(echo, number, kind=int) == number
    return (time.perf_counter() - started) / calls


def bare_start() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


async def isolated_start() -> float:
    runner = IsolatedRunner()
    started = time.perf_counter()
    await runner.run(echo, 1, kind=int)
    took = time.perf_counter() - started
    runner.close()
    return took


async def measure(calls: int, rounds: int) -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    pipe_calls(ours, 10)
    runner = IsolatedRunner()
    await isolated_calls(runner, 10)
    seen: dict[str, list[float]] = {"pipe": [], "isolated": [], "bare start": [], "isolated start": []}
    for _ in range(rounds):
        seen["pipe"].append(pipe_calls(ours, calls))
        seen["isolated"].append(await isolated_calls(runner, calls))
        seen["bare start"].append(bare_start())
        seen["isolated start"].append(await isolated_start())
    ours.send(None)
    runner.close()
    found = {name: statistics.median(times) for name, times in seen.items()}
    for name, seconds in found.items():
        print(f"  {name:16} {seconds * 1e6:10.0f} us")
    from figures import figure  # beside this file

    for name, ours, bare in (
        ("call in a child process, against a round trip through a bare pipe", "isolated", "pipe"),
        ("first call in a child process, against the start of an interpreter", "isolated start", "bare start"),
    ):
        figure(name, found[ours] / found[bare], "x the wall time")
        figure(name.partition(",")[0], found[ours] * 1000, "ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.calls, options.rounds))
