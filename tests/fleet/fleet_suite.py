"""The suite of the fleet's tests and benchmarks, told what to do by its environment.

As a program it is the client: python fleet_suite.py STORE MAILBOX.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, overload

import anyio

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, ToolInvoked, TrialContext, exact_match

SAMPLES = int(os.environ.get("FLEET_SAMPLES", "100"))
LOG = os.environ.get("FLEET_LOG", "")
LEAST, MOST = map(float, os.environ.get("FLEET_SLEEP", "0,0").split(","))
CONCURRENCY = int(os.environ.get("FLEET_CONCURRENCY", "20"))
POISON = os.environ.get("FLEET_POISON", "")
STALL = os.environ.get("FLEET_STALL", "")
TIMEOUT = float(os.environ.get("FLEET_TIMEOUT", "30"))
VERSION = os.environ.get("FLEET_VERSION", "1")
FORMAT = os.environ.get("FLEET_FORMAT", "")
CLOCK = float(os.environ.get("FLEET_CLOCK", "0"))
CLOCK_FILE = os.environ.get("FLEET_CLOCK_FILE", "")
TRANSCRIPT = int(os.environ.get("FLEET_TRANSCRIPT", "0"))  # Bytes of four tool results that each trial records.
GATE = os.environ.get("FLEET_GATE", "")  # A file with the first number that has to wait.

if FORMAT:  # What a process of another version reads and writes.
    from fairtrial.fleet import message_fields, messages

    for module in (message_fields, messages):
        setattr(module, "VERSION", int(FORMAT))  # noqa: B010 - a constant, for the types
if CLOCK or CLOCK_FILE:  # This process's clock is wrong by CLOCK seconds, or by those in a file.
    _time = time.time
    time.time = lambda: _time() + (float(Path(CLOCK_FILE).read_text()) if CLOCK_FILE else CLOCK)

_log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if LOG else -1


class Numbers(Sequence[Sample[int, int]]):
    """As many samples as one likes, made when they are looked at."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sample[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample[int, int]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        assert isinstance(index, int)
        return Sample(f"s{index}", index, 2 * index)

    def __iter__(self) -> Iterator[Sample[int, int]]:
        return (self[index] for index in range(self._count))


def numbers(count: int) -> Dataset[int, int]:
    """A dataset whose samples are made when they are looked at: nothing of it is held."""
    dataset: Dataset[int, int] = Dataset((), name="numbers")
    dataset._samples = Numbers(count)
    dataset._fingerprint = f"numbers:{count}"
    dataset._order = "as counted"
    return dataset


@cache
def _words() -> list[str]:
    chance = random.Random(1)
    return ["".join(chance.choices("aaeeiioulnrstdmcpkgb", k=2 + place % 9)) for place in range(2_000)]


def _text(size: int) -> str:
    """Text that compresses about as well as what people and models write."""
    return " ".join(random.choices(_words(), k=size // 7 + 1))[:size]


async def double(given: int, ctx: TrialContext) -> int:
    if _log >= 0:
        os.write(_log, f"{given}\n".encode())
    if POISON and given == int(POISON):
        os._exit(9)
    while GATE and given >= int(Path(GATE).read_text()):  # noqa: ASYNC110, ASYNC240 - another process writes it
        await anyio.sleep(0.05)
    if STALL and given == int(STALL):
        ctypes.PyDLL(None).sleep(600)  # Holds the interpreter lock, as a regular expression does.
    for _ in range(4 if TRANSCRIPT else 0):
        ctx.session.record(ToolInvoked("read", {"number": given}, _text(TRANSCRIPT // 4)))
    if MOST:
        await anyio.sleep(random.uniform(LEAST, MOST))
    return 2 * given


suite = EvalSuite(
    "fleet-test",
    numbers(SAMPLES),
    double,
    exact_match,
    config=EvalConfig(max_concurrent=CONCURRENCY, timeout_seconds=TIMEOUT, close_seconds=1, grace_seconds=1),
    version=VERSION,
)


if __name__ == "__main__":
    PROFILE = os.environ.get("FLEET_PROFILE", "")
    began, used = time.monotonic(), time.process_time()
    if PROFILE:
        import asyncio
        import cProfile

        with cProfile.Profile() as profile:  # In this thread, where the event loop then is.
            report = asyncio.run(suite.run(store=sys.argv[1], mailbox=sys.argv[2]))
        profile.dump_stats(PROFILE)
    else:
        report = suite.run_sync(store=sys.argv[1], mailbox=sys.argv[2])
    said = {
        "status": report.status,
        "total": report.total,
        "successful": report.successful,
        "errors": dict(report.errors),
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - used,
        "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    print(json.dumps(said))
