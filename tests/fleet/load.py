"""A fleet under load for a given time, with a fault every few seconds: for benchmarks/fleet_soak.py.

Runs follow one another, each by `fairtrial run --once`, so that a client that is killed resumes its run. Afterwards
plain SQL compares every row of the store with what the suite must give; the project's own reader is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psycopg

from tests.fleet.chaos import QueueServer, left_in_queue, queue_server
from tests.fleet.processes import SUITE, Processes
from tests.servers import PostgresServer

_POLL_SECONDS = 0.05
_LAST_RUN_SECONDS = 600.0  # For the run that is under way when the time is over.

type LoadEngine = Literal["one-transaction", "redis", "postgresql", "sqs"]

JUDGEMENTS = {
    "unfinished runs": "SELECT count(*) FROM runs WHERE status <> 'finished'",
    "incomplete runs": """
        SELECT count(*) FROM runs r WHERE dataset_size <> (SELECT count(*) FROM results WHERE run = r.id)""",
    "trials stored twice": """
        SELECT count(*) FROM (SELECT 1 FROM results GROUP BY run, sample HAVING count(*) > 1) q""",
    "wrong results": """
        SELECT count(*) FROM results x LEFT JOIN details d USING (run, ordinal, execution)
        WHERE d.output IS DISTINCT FROM (2 * x.ordinal)::text OR d.transcript IS NULL
        OR x.passed IS DISTINCT FROM 1 OR x.value IS DISTINCT FROM 1""",
    "wrong samples": """
        SELECT count(*) FROM results x JOIN runs r ON r.id = x.run
        LEFT JOIN samples s ON s.dataset = r.dataset AND s.ordinal = x.sample
        WHERE x.sample <> x.ordinal OR s.id IS DISTINCT FROM 's' || x.ordinal
        OR s.input IS DISTINCT FROM x.ordinal::text OR s.expected IS DISTINCT FROM (2 * x.ordinal)::text""",
    "trials with details twice": """
        SELECT count(*) FROM (SELECT 1 FROM details GROUP BY run, ordinal HAVING count(*) > 1) q""",
    "details without a result": """
        SELECT count(*) FROM details LEFT JOIN results x USING (run, ordinal) WHERE x.run IS NULL""",
}
"""What must be 0 in the database of a fleet whose trials record a transcript."""


def judge(database: psycopg.Connection[Any]) -> dict[str, int]:
    """Count in plain SQL what must not be in a store."""
    return {name: _number(database, query) for name, query in JUDGEMENTS.items()}


def _number(database: psycopg.Connection[Any], query: str) -> int:
    row = database.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


@dataclass(frozen=True)
class LoadPlan:
    """The load, and how often something fails."""

    engine: LoadEngine = "one-transaction"
    minutes: float = 60.0
    fault_seconds: float = 6.0
    trials: int = 10_000  # Of each run.
    workers: int = 2  # That are killed and frozen, beside the one that is not.
    concurrency: int = 20
    sleep: str = "0.5,1.5"
    transcript_bytes: int = 2_000
    lease_seconds: float = 6.0
    seed: int = 20261117


@dataclass
class LoadOutcome:
    """What happened, and what the store has."""

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)  # Of clients that were not killed.
    workers_ended: Counter[int] = field(default_factory=Counter)  # Exit codes of workers that ended by themselves.
    memory: list[dict[str, float]] = field(default_factory=list)
    runs: int = 0
    stored: int = 0
    executions: int = 0
    dead_letters: int = 0
    left_in_requests: int = 0
    judged: dict[str, int] = field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """What is not as it must be."""
        problems = [f"{count} {name}" for name, count in self.judged.items() if count]
        problems += [f"{self.dead_letters} dead letters"] if self.dead_letters else []
        if self.runs != self.exit_codes[0]:
            problems.append(f"{self.runs} runs for {self.exit_codes[0]} successful commands")
        return problems


class Load:
    """A fleet whose processes and servers fail by turns."""

    def __init__(
        self,
        plan: LoadPlan,
        fleet: Processes,
        queue: QueueServer,
        store: PostgresServer,
        store_url: str,
        tell: Callable[[str], None],
    ) -> None:
        self.plan, self.fleet, self.queue, self.store, self.store_url = plan, fleet, queue, store, store_url
        self.tell = tell
        self.outcome = LoadOutcome()
        self.chance = random.Random(plan.seed)
        self.run_number = 1
        self.frozen: list[tuple[float, subprocess.Popen[str]]] = []
        self.began = time.monotonic()
        self.lasting_worker = self.start_worker()  # Never killed: its memory is measured.
        self.workers = [self.start_worker() for _ in range(plan.workers)]
        self.client = self.start_client()
        self.faults: list[tuple[str, Callable[[], None]]] = [
            *[("worker killed", self.kill_worker)] * 3,
            ("worker frozen beyond its lease", self.freeze_worker),
            ("client killed", self.kill_client),
            ("three connections terminated", self.terminate_connections),
            ("store killed with all its children", self.kill_store),
            *([] if queue.url == store_url else [("queue killed", queue.kill)]),
        ]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def start_worker(self) -> subprocess.Popen[str]:
        lease, concurrency = str(self.plan.lease_seconds), str(self.plan.concurrency)
        return self.fleet.worker("--lease", lease, "--concurrency", concurrency, "--quiet")

    def start_client(self) -> subprocess.Popen[str]:
        servers = ("--store", self.store_url, "--mailbox", self.queue.url)
        return self.fleet.command("run", str(SUITE), *servers, "--once", f"load-{self.run_number}", "--quiet")

    # Faults

    def kill_worker(self) -> None:
        place = self.chance.randrange(len(self.workers))
        _kill(self.workers[place])
        self.workers[place] = self.start_worker()

    def freeze_worker(self) -> None:
        worker = self.chance.choice(self.workers)
        if worker.poll() is None:
            worker.send_signal(signal.SIGSTOP)
            self.frozen.append((time.monotonic() + self.plan.lease_seconds + 2, worker))

    def kill_client(self) -> None:
        _kill(self.client)
        self.client = self.start_client()

    def terminate_connections(self) -> None:
        others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with psycopg.connect(self.store_url, autocommit=True) as database:
            database.execute(f"SELECT pg_terminate_backend(pid) FROM ({others} ORDER BY random() LIMIT 3) q".encode())

    def kill_store(self) -> None:
        self.store.kill()
        time.sleep(self.chance.uniform(0.0, 1.0))
        self.store.start()

    # The load

    def run(self) -> None:
        """Keep the fleet busy until the time is over and the last run has ended."""
        end = 60 * self.plan.minutes
        next_fault, next_look = self.plan.fault_seconds, 60.0
        while not (self._collect_client() and self.seconds > end):
            assert self.seconds < end + _LAST_RUN_SECONDS, f"the last run has not ended\n{self.fleet.logs()}"
            self._thaw(time.monotonic())
            self._replace_workers()
            if next_fault < self.seconds < end:
                next_fault += self.plan.fault_seconds
                name, happen = self.chance.choice(self.faults)
                self.outcome.faults[name] += 1
                happen()
            if self.seconds > next_look:
                next_look += 60.0
                self._look()
            time.sleep(_POLL_SECONDS)
        self.outcome.seconds = self.seconds
        self._look()

    def _collect_client(self) -> bool:
        """Start the next client if there is none; True if a run has just ended."""
        code = self.client.poll()
        if code is None:
            return False
        self.outcome.exit_codes[code] += 1
        self.client.communicate()
        ended = code == 0
        if ended and self.seconds > 60 * self.plan.minutes:
            return True
        self.run_number += ended
        self.client = self.start_client()
        return False

    def _thaw(self, now: float) -> None:
        for until, worker in list(self.frozen):
            if now > until:
                worker.send_signal(signal.SIGCONT)
                self.frozen.remove((until, worker))

    def _replace_workers(self) -> None:
        assert self.lasting_worker.poll() is None, f"a worker ended by itself\n{self.fleet.logs()}"
        for place, worker in enumerate(self.workers):
            if (code := worker.poll()) is not None:
                self.outcome.workers_ended[code] += 1
                worker.communicate()
                self.workers[place] = self.start_worker()

    def _look(self) -> None:
        with contextlib.suppress(psycopg.Error), psycopg.connect(self.store_url, connect_timeout=5) as database:
            self.outcome.stored = _number(database, "SELECT count(*) FROM results")
        sizes: dict[str, float] = {"minute": round(self.seconds / 60), "stored": self.outcome.stored}
        sizes["worker_mb"] = resident_mb(self.lasting_worker.pid)
        if self.client.poll() is None:
            sizes["client_mb"] = resident_mb(self.client.pid)
        self.outcome.memory.append(sizes)
        self.tell(f"{sizes}, {self.outcome.faults.total()} faults, run {self.run_number}")


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def resident_mb(pid: int) -> float:
    """The resident memory of a process."""
    return round(int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024, 1)


def run_load(folder: Path, plan: LoadPlan, tell: Callable[[str], None] = lambda line: None) -> LoadOutcome:
    """Keep a fleet busy while its parts fail, then compare its store with what it must have."""
    executed = folder / "executed"
    executed.touch()
    settings: dict[str, Any] = {"samples": plan.trials, "sleep": plan.sleep, "transcript": plan.transcript_bytes}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(PostgresServer())
        store_url = store.new_database()
        if plan.engine == "one-transaction":
            queue = QueueServer(store_url, store.kill, store.restart)
        else:
            queue = stack.enter_context(queue_server(folder, plan.engine))
        fleet = stack.enter_context(Processes(folder, queue.url, log=executed, **settings))
        load = Load(plan, fleet, queue, store, store_url, tell)
        load.run()
        outcome = load.outcome
        outcome.dead_letters, outcome.left_in_requests = asyncio.run(left_in_queue(queue.url))
        with psycopg.connect(store_url) as database:
            outcome.runs = _number(database, "SELECT count(*) FROM runs")
            outcome.stored = _number(database, "SELECT count(*) FROM results")
            outcome.judged = judge(database)
        outcome.executions = executed.read_bytes().count(b"\n")
    return outcome
