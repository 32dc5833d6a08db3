"""Kills a run with batches at every commit and at every request to the provider, and resumes it, in forked processes.

    python -m tests.models.batches.kills STORE PROVIDER [SERVER] [--second N] [--only A,B,C]
    python -m tests.models.batches.kills STORE PROVIDER [SERVER] --random KILLS [--trials N] [--turns N]

STORE is the address of an empty SQLite or PostgreSQL database, SERVER that of a model server with batches; without it,
one is started. A point is the moment before or after a transaction of the store or a request of HTTP. They are counted
in a run that nobody kills; then one run is killed at each of them, and with `--second` once more at the N-th point of
its continuation, or at one drawn at random (`--second drawn`). With `--random`, one run is killed that often at moments
drawn at random. Prints one JSON object. Every request must be answered, used and paid for exactly once: by the store,
and by the provider's ledger; and no batch or file may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import anthropic.resources.messages.batches  # noqa: F401 - here, not in each forked process
import openai.resources.batches
import openai.resources.chat.completions
import openai.resources.files  # noqa: F401
import sqlalchemy as sa
import trio  # noqa: F401

from fairtrial import Dataset, EvalSuite, Sample, open_store
from fairtrial.integrations.model_server import BatchLedger, BatchOptions
from fairtrial.integrations.model_server.server import spawn_model_server
from fairtrial.models import AnthropicAdapter, Batching, OpenAIAdapter
from fairtrial.models.batches import sender  # noqa: F401
from fairtrial.models.pricing import is_known
from fairtrial.runs import run_lease
from fairtrial.runs.code import is_library
from fairtrial.store.batches import OPEN, SUCCEEDED
from fairtrial.store.schema import batch_intents, batch_requests, results, runs
from fairtrial.store.sql import SqlStore

TRIALS, TURNS = 3, 2
SETTINGS: dict[str, Any] = {"poll_seconds": 0.03, "list_lag_seconds": 0.3, "max_requests": 1000}
OPTIONS = BatchOptions(0.05, list_lag=0.15, foreign=1)


def answered(output: list[str]) -> bool:
    return len(output) > 0


class Points:
    """Counts the points of a process, and kills it at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.count = 0
        self._kill_at = kill_at

    def point(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        write, request = SqlStore._write, aiohttp.ClientSession._request

        @contextmanager
        def counted(store: SqlStore) -> Iterator[sa.Connection]:
            with write(store) as connection:
                yield connection
                self.point()  # Before the commit.
            self.point()

        async def asked(session: Any, *args: Any, **given: Any) -> Any:
            self.point()
            answer = await request(session, *args, **given)
            self.point()
            return answer

        setattr(SqlStore, "_write", counted)  # noqa: B010
        setattr(aiohttp.ClientSession, "_request", asked)  # noqa: B010


def run_suite(name: str, store_url: str, base_url: str, provider: str, trials: int = TRIALS, turns: int = TURNS) -> str:
    """Run the suite, or resume it; returns the status of the run."""
    batch = Batching(**SETTINGS)
    model: Any = (
        OpenAIAdapter("m", base_url=f"{base_url}/v1", api_key="test", batch=batch)
        if provider == "openai"
        else AnthropicAdapter("m", base_url=base_url, api_key="test", batch=batch)
    )

    async def ask(question: str) -> list[str]:
        return [(await model.complete(f"{question}, turn {turn}")).text for turn in range(turns)]

    async def evaluate() -> str:
        dataset: Dataset[str, None] = Dataset(
            [Sample(f"s{number}", f"{name} question {number}") for number in range(trials)]
        )
        report = await EvalSuite(name, dataset, ask, answered).run(store=open_store(store_url), once=name)
        return str(report.status)

    return asyncio.run(evaluate())


def prepare() -> None:
    """Do what every forked process would do again: read the price list, and find out whose the loaded files are."""
    is_known("m", "openai", None)
    for module in list(sys.modules.values()):
        if isinstance(file := getattr(module, "__file__", None), str):
            is_library(file)
    gc.collect()
    gc.freeze()


def forked(work: Callable[[], Any], kill_at: int) -> tuple[int, Any]:
    """Do work in a forked process that is killed at a point; returns its exit status, and its result and its points."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            points = Points(kill_at)
            points.install()
            result = work()
            os.write(writing, json.dumps([result, points.count]).encode())
            os._exit(0)
        except BaseException as error:
            os.write(writing, json.dumps(["".join(traceback.format_exception(error)[-6:]), 0]).encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, json.loads(text) if text else None


def stored(store_url: str, suite: str) -> tuple[int, int, int, int]:
    """Return from SQL: the answered requests of a run that were used, the others, its results, and its open batches."""
    store = open_store(store_url)
    assert isinstance(store, SqlStore)
    with store._engine.connect() as connection:
        number = connection.execute(sa.select(runs.c.id).where(runs.c.suite == suite)).scalar_one()
        columns = batch_requests.c
        states = sa.select(columns.state, columns.tries, columns.used).where(columns.run == number)
        rows = connection.execute(states).all()
        batches = sa.select(batch_intents.c.state).where(batch_intents.c.run == number)
        under_way = [state for (state,) in connection.execute(batches) if state in OPEN]
        done = connection.execute(
            sa.select(sa.func.count()).select_from(results).where(results.c.run == number, results.c.passed == 1)
        ).scalar_one()
    store.close()
    good = sum(tuple(row) == (SUCCEEDED, 0, 1) for row in rows)
    return good, len(rows) - good, done, len(under_way)


def files_left(ledger: BatchLedger) -> int:
    """Return how many files of ours the provider still has; a batch of others at OpenAI has one, with its results."""
    others = sum(one.foreign for one in ledger.created)
    return len(ledger.files) - (others if ledger.files else 0)


def progress(store_url: str) -> tuple[int, ...]:
    """Return numbers that change when a run gets further."""
    store = open_store(store_url)
    assert isinstance(store, SqlStore)
    count = sa.func.count()
    with store._engine.connect() as connection:
        answered = connection.execute(sa.select(count).where(batch_requests.c.state == SUCCEEDED)).scalar_one()
        changes = sa.select(batch_intents.c.state, count).group_by(batch_intents.c.state).order_by("state")
        states = [number for _, number in connection.execute(changes)]
        done = connection.execute(sa.select(count).select_from(results)).scalar_one()
    store.close()
    return (answered, done, *states)


def killed_at_random(
    store_url: str, base_url: str, provider: str, kills: int, trials: int, turns: int
) -> dict[str, Any]:
    """Kill one run again and again, let it end, and return what was found."""
    chance = random.Random(142)
    killed, advanced = 0, 0
    longest = 1.0 + trials / 1000  # As long as a process needs to get further: it depends on the machine.
    before: tuple[int, ...] = ()
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            try:
                run_suite("random", store_url, base_url, provider, trials, turns)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.2, longest))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        after = progress(store_url)
        advanced += after != before
        longest = max(longest / 1.3, 1.0) if after != before else min(longest * 1.3, 60.0)
        before = after
    status, result = forked(lambda: run_suite("random", store_url, base_url, provider, trials, turns), 0)
    wrong = [] if status == 0 and result[0] == "finished" else [f"the run ended with {status}: {result}"]
    wrong.extend(deviations(stored(store_url, "random"), trials, turns))
    with urlopen(f"{base_url}/_batches") as answer:
        ledger = BatchLedger.from_json(json.load(answer))
    if len(ledger.executed) != trials * turns or ledger.paid_twice():
        wrong.append(f"{len(ledger.executed)} requests were paid for")
    if left := files_left(ledger):
        wrong.append(f"{left} files were left")
    return {
        "killed": killed,
        "advanced": advanced,  # How many of these processes got further.
        "batches": sum(not one.foreign for one in ledger.created),
        "requests": len(ledger.executed),
        "paid_twice": len(ledger.paid_twice()),
        "wrong": wrong,
    }


def deviations(counts: tuple[int, int, int, int], trials: int, turns: int) -> list[str]:
    """Return what differs from a run in which every request was answered once and used."""
    good, others, done, under_way = counts
    if counts == (trials * turns, 0, trials, 0):
        return []
    return [f"{good} answered and used requests, {others} others, {done} results, {under_way} open batches"]


def killed_everywhere(store_url: str, base_url: str, provider: str, second: str, only: str) -> dict[str, Any]:
    """Kill a run at every point, let each end, and return what was found."""
    wrong: list[str] = []
    killed = 0
    chance = random.Random(142)
    status, result = forked(partial(run_suite, "unharmed", store_url, base_url, provider), 0)
    assert status == 0, result
    assert result[0] == "finished"
    points = result[1]
    chosen = [int(one) for one in only.split(",")] if only else list(range(1, points + 1))
    chosen = [one for one in chosen if one <= points]  # The providers differ in the number of requests.
    for point in chosen:
        name = f"killed-{point}"
        work = partial(run_suite, name, store_url, base_url, provider)
        statuses = [forked(work, point)[0]]
        if second:
            # What is left to do gets less, but there is more to look for.
            most = max(points - point, 0) + 20
            statuses.append(forked(work, chance.randint(1, most) if second == "drawn" else int(second))[0])
        status, result = forked(work, 0)
        killed += statuses.count(-signal.SIGKILL)
        if status != 0 or result[0] != "finished":
            wrong.append(f"{name}: {statuses} then {status} {result}")
    with urlopen(f"{base_url}/_batches") as answer:
        ledger = BatchLedger.from_json(json.load(answer))
    for point in chosen:
        name = f"killed-{point}"
        try:
            counts = stored(store_url, name)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        wrong.extend(f"{name}: {deviation}" for deviation in deviations(counts, TRIALS, TURNS))
    wrong.extend(f"paid twice: {digest}" for digest in ledger.paid_twice())
    if len(ledger.executed) != TRIALS * TURNS * (len(chosen) + 1):
        wrong.append(f"{len(ledger.executed)} requests were paid for")
    if left := files_left(ledger):
        wrong.append(f"{left} files were left")
    return {
        "points": points,
        "runs": len(chosen) + 1,
        "killed": killed,
        "requests": len(ledger.executed),
        "paid_twice": len(ledger.paid_twice()),
        "wrong": wrong,
    }


def main() -> None:
    """Kill as the arguments say, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("provider", choices=["openai", "anthropic"])
    parser.add_argument("server", nargs="?")
    parser.add_argument("--second", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args()
    run_lease._POLL_SECONDS = 0.02
    prepare()
    began = time.monotonic()
    with ExitStack() as stack:
        url = given.server or stack.enter_context(spawn_model_server(batches=OPTIONS)).base_url
        found = (
            killed_at_random(given.store, url, given.provider, given.random, given.trials, given.turns)
            if given.random
            else killed_everywhere(given.store, url, given.provider, given.second, given.only)
        )
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main()
