"""A fleet whose processes and servers are killed, for a test and for the soak in benchmarks/."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fairtrial import open_store
from fairtrial.fleet import connect_broker
from tests.fleet.processes import Processes, said
from tests.redis_server import RedisServer
from tests.servers import PostgresServer
from tests.sqs_server import CREDENTIALS, SqsServer

_PAUSE_SECONDS = 5.0


type Engine = Literal["redis", "postgresql", "sqs"]


@dataclass(frozen=True)
class Plan:
    """What happens, at which share of the trials begun."""

    trials: int = 20_000
    queue: Engine = "redis"
    workers: int = 4
    concurrency: int = 40
    kill_every_seconds: float = 3.0
    lease_seconds: float = 5.0
    sleep: str = "0.1,0.7"
    queue_kill_at: tuple[float, ...] = (0.15,)
    queue_restart_at: tuple[float, ...] = (0.55,)
    client_kill_at: tuple[float, ...] = (0.3, 0.7)
    store_restart_at: tuple[float, ...] = (0.45,)
    limit_seconds: float = 540.0
    seed: int = 20261115


@dataclass
class Outcome:
    """What came of it."""

    seconds: float = 0.0
    executions: int = 0
    worker_kills: int = 0
    client_kills: int = 0
    queue_restarts: int = 0
    store_restarts: int = 0
    resent: int = 0  # Requests that a queue had lost, or that a client had not sent before it was killed.
    runs: int = 0
    stored: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    missing: int = 0
    dead_letters: int = 0
    left_in_requests: int = 0
    status: str = ""


@dataclass(frozen=True)
class QueueServer:
    """The server of the queue: its address, how it is killed and how it is restarted.

    The emulator of SQS keeps everything in memory, so it is paused instead.
    """

    url: str
    kill: Callable[[], None]
    restart: Callable[[], None]


@contextmanager
def queue_server(folder: Path, engine: str) -> Iterator[QueueServer]:
    """Start the server of the queue."""
    if engine == "redis":
        with RedisServer(folder / "redis") as redis:

            def kill_redis() -> None:
                redis.kill()
                time.sleep(0.5)
                redis.start()

            yield QueueServer(redis.url, kill_redis, redis.restart)
        return
    if engine == "sqs":
        with SqsServer() as sqs, pytest.MonkeyPatch.context() as patch:
            for name, value in CREDENTIALS.items():
                patch.setenv(name, value)

            def pause() -> None:
                sqs.pause()
                time.sleep(_PAUSE_SECONDS)
                sqs.resume()

            yield QueueServer(sqs.url("chaos"), pause, pause)
        return
    with PostgresServer() as postgres:
        url = postgres.new_database()

        def kill_postgres() -> None:
            postgres.stop(crash=True)
            time.sleep(0.5)
            postgres.start()

        yield QueueServer(url, kill_postgres, postgres.restart)


async def left_in_queue(url: str) -> tuple[int, int]:
    """Return how many dead letters and how many other requests a queue has."""
    broker = connect_broker(url)
    try:
        requests = await broker.requests("fleet-test")
        depth = await requests.depth()
        return depth.dead, depth.waiting + depth.in_flight + depth.delayed
    finally:
        await broker.close()


def run_chaos(folder: Path, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Outcome:
    """Run a suite while its workers, its client, its queue and its database are killed."""
    chance = random.Random(plan.seed)
    outcome = Outcome()
    executed = folder / "executed"
    executed.touch()
    postgres = PostgresServer()
    settings: dict[str, Any] = {
        "samples": plan.trials,
        "log": executed,
        "sleep": plan.sleep,
        "concurrency": plan.concurrency,
    }
    try:
        postgres.start()
        store_url = postgres.new_database()
        with queue_server(folder, plan.queue) as queue, Processes(folder, queue.url, **settings) as fleet:
            began = time.monotonic()
            client = fleet.client(store_url)

            def begun() -> int:
                return executed.stat().st_size and executed.read_bytes().count(b"\n")

            def worker() -> subprocess.Popen[str]:
                return fleet.worker("--lease", str(plan.lease_seconds))

            def kill_client() -> None:
                nonlocal client
                client.kill()
                client.communicate()
                client = fleet.client(store_url)
                outcome.client_kills += 1

            def kill_queue() -> None:
                queue.kill()
                outcome.queue_restarts += 1

            def restart_queue() -> None:
                queue.restart()
                outcome.queue_restarts += 1

            def restart_store() -> None:
                postgres.restart()
                outcome.store_restarts += 1

            events: list[tuple[float, str, Callable[[], None]]] = [
                *((share, "the queue is killed", kill_queue) for share in plan.queue_kill_at),
                *((share, "the queue is restarted", restart_queue) for share in plan.queue_restart_at),
                *((share, "the client is killed", kill_client) for share in plan.client_kill_at),
                *((share, "the store is restarted", restart_store) for share in plan.store_restart_at),
            ]
            schedule = sorted(events, key=lambda event: event[0])
            workers = [worker() for _ in range(plan.workers)]
            next_kill = time.monotonic() + plan.kill_every_seconds
            while client.poll() is None:
                assert time.monotonic() - began < plan.limit_seconds, f"not done in time\n{fleet.logs()}"
                if schedule and begun() >= schedule[0][0] * plan.trials:
                    _, what, happen = schedule.pop(0)
                    tell(f"{time.monotonic() - began:6.1f} s, {begun()} begun: {what}")
                    happen()
                if time.monotonic() >= next_kill:
                    next_kill += plan.kill_every_seconds
                    which = chance.randrange(len(workers))
                    workers[which].kill()
                    workers[which].communicate()
                    workers[which] = worker()
                    outcome.worker_kills += 1
                time.sleep(0.05)
            answer = said(client)
            assert not schedule, f"the run ended before {schedule[0][1]}: give it more trials"
            outcome.seconds = time.monotonic() - began
            outcome.status = answer["status"]
            outcome.dead_letters, outcome.left_in_requests = asyncio.run(left_in_queue(queue.url))
            logs = "".join(path.read_text() for path in folder.glob("client-*.log"))
            outcome.resent = sum(map(int, re.findall(r"(\d+) requests were lost or never sent", logs)))
        outcome.executions = begun()
        _look_into(store_url, outcome)
    finally:
        postgres.close()
    return outcome


def _look_into(store_url: str, outcome: Outcome) -> None:
    store = open_store(store_url)
    runs = store.runs()
    outcome.runs = len(runs)
    (totals,) = store.totals(runs[0].run_id)
    outcome.outcomes = {str(name): count for name, count in totals.outcomes.items()}
    seen = set()
    for result in store.results(runs[0].run_id, outputs=True):
        assert result.ordinal not in seen
        assert result.output == 2 * result.ordinal
        seen.add(result.ordinal)
    outcome.stored = len(seen)
    outcome.missing = runs[0].planned - len(seen)
    store.close()
