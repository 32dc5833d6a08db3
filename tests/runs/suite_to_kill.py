"""A suite that is run as a program, and killed: python suite_to_kill.py STORE LOG SAMPLES [MODE]."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from fairtrial import ChatMessage, Dataset, EvalConfig, EvalSuite, Sample, TrialContext, exact_match

STORE, LOG, SAMPLES = sys.argv[1], sys.argv[2], int(sys.argv[3])
MODE = sys.argv[4] if len(sys.argv) > 4 else ""


def note(line: str) -> None:
    with open(LOG, "ab", buffering=0) as log:  # Opened here: a trial may be executed in a child process.
        log.write(f"{line}\n".encode())


@asynccontextmanager
async def environment(name: str) -> AsyncIterator[None]:
    note(f"open {name}")
    try:
        yield
    finally:
        await anyio.sleep(0.01)
        note(f"close {name}")


async def double(given: int, ctx: TrialContext) -> int:
    if MODE:
        await ctx.enter(environment(ctx.key.sample_id))
    note(f"call {ctx.key.sample_id}")
    ctx.session.record(ChatMessage("user", str(given)))
    await anyio.sleep(30 if MODE == "slow" and given % 3 == 0 else random.uniform(0.005, 0.02))
    if given % 50 == 7:
        raise ValueError(f"sample {given} always fails")
    return 2 * given if given % 10 else 0


dataset = Dataset([Sample(f"s{i}", i, 2 * i) for i in range(SAMPLES)], name="doubles")
config = EvalConfig(max_concurrent=8, grace_seconds=0.5)
report = EvalSuite("to-kill", dataset, double, exact_match, config=config, version="1").run_sync(store=STORE)
note("finished")
print(report.status, report.total)
