"""How many trials one worker process holds at once, with all leases kept, and in how much memory.

python benchmarks/fleet_hold.py [--trials 2000] [--seconds 5] [--lease 3] [--limit-mb 300]

Starts its own redis-server on the loopback and one worker process whose trials sleep for longer than their lease.
Prints one JSON line per figure. Fails when a lease was lost, a trial came twice, or memory went over the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fairtrial import exact_match
from fairtrial.data import Sample
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest
from fairtrial.mailbox import RedisConnection, RedisMailbox
from fairtrial.trials import TrialKey

TEXT = "x" * 400


def resident_mb() -> float:
    """The most memory this process ever had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system does not say how much memory a process has")


async def work(url: str, trials: int, seconds: float, lease: float) -> dict[str, Any]:
    most = 0

    async def wait(input: str) -> str:
        nonlocal most
        most = max(most, loop.counters.in_flight)
        await asyncio.sleep(seconds)
        return input

    async with (
        RedisConnection(url) as connection,
        RedisMailbox("requests", EvalRequest, connection) as requests,
        RedisMailbox("results", EvalReply, connection) as results,
    ):
        config = EvalLoopConfig(concurrency=trials, lease_seconds=lease)
        loop = EvalLoop(requests=requests, evaluator=exact_match, loop=wait, results=results, config=config)
        began, used = time.monotonic(), time.process_time()
        await loop.run(until_empty=True)
        counters = loop.counters
        return {
            "seconds": round(time.monotonic() - began, 2),
            "cpu_seconds": round(time.process_time() - used, 2),
            "at_once": most,
            "received": counters.received,
            "scored": counters.outcomes["scored"],
            "lease_losses": counters.lease_losses,
            "peak_mb": round(resident_mb(), 1),
        }


async def fill(url: str, trials: int) -> None:
    async with (
        RedisConnection(url) as connection,
        RedisMailbox("requests", EvalRequest, connection) as requests,
        RedisMailbox("results", EvalReply, connection),
    ):
        keys = [TrialKey("run", "baseline", f"s{number}") for number in range(trials)]
        await asyncio.gather(
            *(
                requests.send(EvalRequest(key, Sample(key.sample_id, TEXT, TEXT), number, number))
                for number, key in enumerate(keys)
            )
        )


def measure(url: str, trials: int, seconds: float, lease: float) -> dict[str, Any]:
    """What one worker process says after it has done all of them."""
    asyncio.run(fill(url, trials))
    command = [sys.executable, __file__, "--worker", url, "--trials", str(trials)]
    command += ["--seconds", str(seconds), "--lease", str(lease)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--lease", type=float, default=3.0)
    parser.add_argument("--limit-mb", type=float, default=300.0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(asyncio.run(work(options.worker, options.trials, options.seconds, options.lease))))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.figures import figure
    from benchmarks.mailbox import server

    with server() as url:
        figures = measure(url, options.trials, options.seconds, options.lease)
    for name, value in figures.items():
        print(json.dumps({"figure": name, "value": value}))
    what = f"{options.trials:,} trials of {options.seconds:g} s at once in one worker"
    figure(f"{what}: memory", figures["peak_mb"], "MB", at_most=options.limit_mb)
    figure(f"{what}: leases lost", figures["lease_losses"], at_most=0)
    whole = figures["received"] == figures["scored"] == figures["at_once"] == options.trials
    if not whole or figures["lease_losses"] or figures["peak_mb"] > options.limit_mb:
        raise SystemExit("not all of them were held, or memory went over the limit")


if __name__ == "__main__":
    main()
