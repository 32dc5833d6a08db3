"""Trials that wait for a batch: memory of each, time to the first batch, and warnings about a blocked event loop.

    python benchmarks/waiting_batches.py [TRIALS] [MAX_REQUESTS]

The provider is a server in another process whose batches end when all trials wait. Memory is the growth of this process
between the start of the run and the moment when all trials wait, without what the dataset and the plan need.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from fairtrial import Dataset, EvalSuite, Sample, open_store
from fairtrial.integrations.model_server import BatchOptions
from fairtrial.integrations.model_server.server import ModelServerProcess, spawn_model_server
from fairtrial.models import Batching, OpenAIAdapter
from fairtrial.models.batches import openai_wire

TRIALS = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
LARGEST = int(sys.argv[2]) if len(sys.argv) > 2 else 20_000


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Warnings(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


async def measure(server: ModelServerProcess, store_url: str) -> dict[str, object]:
    """Run the suite and return the figures."""
    settings = Batching(max_requests=LARGEST, poll_seconds=1.0)
    model = OpenAIAdapter("m", base_url=f"{server.base_url}/v1", api_key="test", batch=settings)
    asked = 0
    created: list[tuple[float, float]] = []
    most = 0

    async def ask(number: int) -> str:
        nonlocal asked
        asked += 1
        return (await model.complete(f"question {number}")).text

    create = openai_wire.OpenAIBatches.create

    async def timed(self: openai_wire.OpenAIBatches, *given: object) -> object:
        nonlocal most
        created.append((time.monotonic() - began, time.process_time() - cpu))
        if asked == TRIALS:
            most = resident()
        return await create(self, *given)  # type: ignore[arg-type]

    openai_wire.OpenAIBatches.create = timed  # type: ignore[method-assign,assignment]
    dataset: Dataset[int, None] = Dataset([Sample(f"s{number}", number) for number in range(TRIALS)])
    suite = EvalSuite("waiting", dataset, ask, bool_of)
    await model.__aenter__()
    before, began, cpu = resident(), time.monotonic(), time.process_time()
    running = asyncio.create_task(suite.run(store=open_store(store_url)))
    while asked < TRIALS and not running.done():  # noqa: ASYNC110 - an event would be one more call for each trial
        await asyncio.sleep(0.2)
    started, started_cpu = time.monotonic() - began, time.process_time() - cpu
    await asyncio.sleep(2)
    most = max(most, resident())
    report = await running
    return {
        "trials": report.total,
        "passed": report.pass_rate,
        "kB_per_trial": round((most - before) / TRIALS / 1024, 1),
        "first_batch_s": round(created[0][0], 2),
        "first_batch_cpu_s": round(created[0][1], 2),
        "all_started_s": round(started, 2),
        "all_started_cpu_s": round(started_cpu, 2),
        "batches": len(created),
        "total_s": round(time.monotonic() - began, 1),
        "total_cpu_s": round(time.process_time() - cpu, 1),
    }


def bool_of(output: str) -> bool:
    """Pass every answer."""
    return bool(output)


def main() -> None:
    """Measure, and print JSON."""
    heard = Warnings()
    logging.getLogger("fairtrial").addHandler(heard)
    with (
        tempfile.TemporaryDirectory() as folder,
        spawn_model_server(batches=BatchOptions(20.0)) as server,
    ):
        found = asyncio.run(measure(server, f"sqlite:///{folder}/runs.db"))
    print(json.dumps({**found, "warnings": heard.texts}))


if __name__ == "__main__":
    main()
