"""How many requests a trial needs on SQS, and what 10^8 trials cost, measured against the emulator.

python benchmarks/sqs_cost.py [--trials 2000] [--workers 4] [--concurrency 32] [--seconds 1.0] [--linger 0.2]
                              [--lease 60] [--price 0.40] [--count 100000000]

Client and workers run in this process, each with connections of its own, and count their requests by kind. SQS bills
every 64 KB of a request as one request. Prices are parameters: the default is the list price of standard queues in most
regions after the free tier. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from sys import path
from typing import Any

path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match
from fairtrial.fleet import EvalLoopConfig, SqsBroker
from fairtrial.store.memory import MemoryStore
from fairtrial.suites.worker import run_worker
from tests.sqs_server import CREDENTIALS, SqsServer


async def measure(options: argparse.Namespace, url: str) -> dict[str, object]:
    async def task(input: int) -> int:
        await asyncio.sleep(options.seconds)
        return 2 * input

    suite = EvalSuite(
        name="cost",
        dataset=Dataset([Sample(f"s{number}", number, 2 * number) for number in range(options.trials)]),
        task=task,
        evaluator=exact_match,
        config=EvalConfig(max_concurrent=options.concurrency),
    )
    brokers = [SqsBroker(url) for _ in range(options.workers + 1)]
    config = EvalLoopConfig(concurrency=options.concurrency, lease_seconds=options.lease)
    workers = [asyncio.create_task(run_worker(suite, broker, config=config)) for broker in brokers[1:]]
    began = time.monotonic()
    report = await suite.run(mailbox=brokers[0], store=MemoryStore())
    seconds = time.monotonic() - began
    assert report.total == options.trials
    billed: Counter[str] = Counter()
    for broker in brokers:  # Before the workers stop: an idle fleet is another figure.
        billed += broker.connection.billed
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    for broker in brokers:
        await broker.close()
    per_trial = {kind: round(count / options.trials, 4) for kind, count in sorted(billed.items())}
    total = billed.total() / options.trials
    return {
        "trials": options.trials,
        "seconds": round(seconds, 1),
        "requests_per_trial": per_trial,
        "total_per_trial": round(total, 3),
        "dollars": round(total * options.count / 1e6 * options.price, 2),
        "for_trials": options.count,
        "dollars_per_million_requests": options.price,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--linger", type=float, default=0.2)
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument("--price", type=float, default=0.40, help="dollars per million requests")
    parser.add_argument("--count", type=int, default=10**8)
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    with SqsServer() as server:
        found: dict[str, Any] = asyncio.run(measure(options, server.url(linger=options.linger)))
    print(json.dumps(found))
    what = f"billed requests to SQS per trial of {options.seconds:g} s (emulator)"
    figure(what, found["total_per_trial"])
    for kind, count in found["requests_per_trial"].items():
        if count >= 0.01:
            figure(f"{what}: `{kind}`", count)


if __name__ == "__main__":
    main()
