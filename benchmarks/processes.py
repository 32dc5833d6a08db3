"""What several processes gain: an evaluator that computes, and many calls that wait for HTTP.

    python benchmarks/processes.py [--processes 2] [--rounds 3] [--trials 2000] [--calls 10000]

One process and several take turns. On a machine that others use, wall times say little; so the processor time of the
busiest process is printed beside them: a run cannot be faster than that, and is not much slower on a calm machine
with a processor for each process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, TrialContext, exact_match
from fairtrial.integrations.model_server import FixedLatency, spawn_model_server

BODY = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
_LOOK_SECONDS = 0.05
_TICK = os.sysconf("SC_CLK_TCK")


def computed(output: int, expected: int) -> bool:
    total = 0
    for number in range(150_000):
        total += number * number
    return output == expected and total > 0


def same(number: int) -> int:
    return number


def scored(trials: int, processes: int) -> None:
    dataset = Dataset([Sample(f"s{number}", number, number) for number in range(trials)], name="numbers")
    suite = EvalSuite("computed", dataset, same, computed, config=EvalConfig(processes=processes))
    report = suite.run_sync(store="memory:")
    assert report.pass_rate == 1.0, report.errors


def client(concurrency: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency))


async def call(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(url, json=BODY) as response:
        answer: dict[str, Any] = await response.json()
        return str(answer["choices"][0]["message"]["content"])


async def bare(url: str, calls: int, concurrency: int) -> None:
    numbers = iter(range(calls))

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in numbers:
            await call(session, url)

    async with client(concurrency) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))


def called(url: str, calls: int, processes: int, concurrency: int) -> None:
    dataset = Dataset([Sample(f"s{number}", number, "hello") for number in range(calls)], name="calls")

    async def task(number: int, ctx: TrialContext) -> str:
        return await call(ctx.shared, url)

    config = EvalConfig(max_concurrent=concurrency, processes=processes)
    suite = EvalSuite("http", dataset, task, exact_match, config=config, lifespan=partial(client, concurrency))
    report = suite.run_sync(store="memory:")
    assert report.successful == calls, report.errors


@dataclass
class Spent:
    """The wall time of a piece of work, and the processor time of each process that did it."""

    wall: float
    cpu: list[float]

    @property
    def busiest(self) -> float:
        return max(self.cpu)


def measured(work: Callable[[], None]) -> Spent:
    """Measure a piece of work with the child processes that it starts."""
    seen: dict[int, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            for process in children():
                seen[process] = cpu_of(process) or seen.get(process, 0.0)

    before = {process: cpu_of(process) for process in children()}
    watching = threading.Thread(target=watch)
    watching.start()
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    wall, own = time.perf_counter() - began, time.process_time() - began_cpu
    ended.set()
    watching.join()
    return Spent(wall, [own, *(cpu for process, cpu in seen.items() if process not in before)])


def children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def median(values: list[float]) -> float:
    return statistics.median(values)


def compared(title: str, rounds: int, contestants: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Let contestants take turns; print each against the first one, and return the ratios of their wall times."""
    spent: dict[str, list[Spent]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            spent[name].append(measured(work))
    print(title)
    ratios = {}
    first = next(iter(contestants))
    for name, times in spent.items():
        wall, busiest = median([one.wall for one in times]), median([one.busiest for one in times])
        total = median([sum(one.cpu) for one in times])
        by_wall = wall / median([one.wall for one in spent[first]])
        by_cpu = busiest / median([one.busiest for one in spent[first]])
        ratios[name] = by_wall
        print(
            f"  {name:12} {wall:6.2f} s ({by_wall:.2f} x {first}); processor time {total:6.2f} s, of the busiest "
            f"process {busiest:6.2f} s ({by_cpu:.2f} x {first})"
        )
    return ratios


def main() -> int:
    from figures import figure  # beside this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=100)
    options = parser.parse_args()
    many = f"{options.processes} processes"
    trials = f"{options.trials} trials with an evaluator that computes"
    ratios = compared(
        trials,
        options.rounds,
        {"1 process": partial(scored, options.trials, 1), many: partial(scored, options.trials, options.processes)},
    )
    two = options.processes == 2
    kept = figure(f"{trials}, {many}", 1 / ratios[many], "x the speed of one", at_least=1.8 if two else None)
    with spawn_model_server(latency=FixedLatency(0.05)) as server:
        url = f"{server.base_url}/v1/chat/completions"
        calls = f"{options.calls} calls of 50 ms, {options.concurrency} at once"
        ratios = compared(
            calls,
            options.rounds,
            {
                "bare": lambda: asyncio.run(bare(url, options.calls, options.concurrency)),
                "1 process": partial(called, url, options.calls, 1, options.concurrency),
                many: partial(called, url, options.calls, options.processes, options.concurrency),
            },
        )
    bare_time = "x the time of a bare aiohttp loop"
    figure(f"{calls}, 1 process", ratios["1 process"], bare_time)
    kept &= figure(f"{calls}, {many}", ratios[many], bare_time, at_most=1.05 if two else None)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
