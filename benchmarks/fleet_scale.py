"""Many trials through a fleet into PostgreSQL: queue, client and workers stay small, and a trial costs the same.

    python benchmarks/fleet_scale.py [--trials 2000000] [--workers 3] [--kill-seconds 60] [--client-kills 10]
                                     [--transcript-bytes 0] [--folder DIR [--resume | --delete]] [--minutes 180]

Starts its own redis-server and PostgreSQL. Without --transcript-bytes, no transcripts are stored. A worker is killed
every minute, but never the first one, and the client is killed and started again ten times in the first half: so there
are a worker and a client that live for long. Memory is the peak of each process while trials are missing; the client's
peak with its report, for which it imports numpy and reads every result, is a figure of its own (`client_mb_report`).
CPU time is that of client, workers and both servers.
With --folder, everything is kept: after --minutes, a signal or a crash, the same command with --resume continues.
With --delete, the run in the folder is deleted instead, and the space that each command returns is measured.

Prints one JSON line; fails if a trial is lost or wrong, if Redis used 60 MB or more, if the memory of client or workers
grew by more than 1.3 times after the first 100,000 trials (a tenth, if there are fewer than a million), or if a trial
cost more than 1.3 times the CPU time of those.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fleet.processes import Processes, end, said
from tests.redis_server import RedisServer
from tests.servers import PostgresServer

MB = 1024 * 1024
FLAT = 1.3
TABLES = ("results", "details", "samples")


@dataclass(frozen=True)
class Plan:
    """What is run, and what is killed meanwhile."""

    trials: int = 2_000_000
    workers: int = 3
    concurrency: int = 2000
    kill_seconds: float = 0.0  # 0: no worker is killed.
    client_kills: int = 0
    transcript_bytes: int = 0
    minutes: float = 180.0


@dataclass(frozen=True)
class Sample:
    """What was measured at one moment; the CPU time is that of all processes so far."""

    stored: int
    seconds: float
    cpu_seconds: float
    client_mb: float
    worker_mb: float
    redis_mb: float
    worker_kills: int
    client_kills: int


class Soak:
    """One run. If its folder is kept, it has everything that is needed to continue the run."""

    def __init__(self, folder: Path, plan: Plan, *, kept: bool = False) -> None:
        self.folder = folder
        self.plan = plan
        self.kept = kept
        self.file = folder / "samples.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.samples = [Sample(**json.loads(line)) for line in lines]
        before = self.samples[-1] if self.samples else Sample(0, 0, 0, 0, 0, 0, 0, 0)
        self.worker_kills, self.client_kills = before.worker_kills, before.client_kills
        self._seconds, self._cpu = before.seconds, before.cpu_seconds
        self._first_cpu = cpu_seconds()  # Of what this process has done before.
        self._began = time.monotonic()
        self._chance = random.Random(20261117)
        self.interrupted = False

    def run(self) -> dict[str, Any]:
        """Execute the plan; returns the figures."""
        postgres = _postgres(self.folder if self.kept else None)
        options: dict[str, Any] = {
            "samples": self.plan.trials,
            "concurrency": self.plan.concurrency,
            "transcript": self.plan.transcript_bytes,
            "log": self.folder / "executed",
        }
        redis = RedisServer(self.folder / "redis", "--auto-aof-rewrite-min-size", "32mb")
        with postgres, redis, Processes(self.folder, redis.url, **options) as fleet:
            store = postgres.url("test_1") if self.samples else postgres.new_database()
            finished = self._execute(fleet, redis, store)
            figures = {**self.figures(), "finished": finished, "executions": self._executions()}
            if finished:
                figures |= _check(store, self.plan)
                figures["redis_left"] = _left(redis)
            return figures

    def _execute(self, fleet: Processes, redis: RedisServer, store: str) -> bool:
        """Run client and workers until the run is complete or the time is over."""

        def worker() -> subprocess.Popen[str]:
            return fleet.worker("--lease", "30")

        workers = [worker() for _ in range(self.plan.workers)]
        client = fleet.client(store)
        kills = [(place + 1) / (2 * self.plan.client_kills) for place in range(self.plan.client_kills)]
        next_kill, next_line = time.monotonic() + self.plan.kill_seconds, 0.0
        with redis.client() as raw, psycopg.connect(store, autocommit=True) as database:
            while client.poll() is None:
                time.sleep(1.0)
                now = time.monotonic()
                if now >= next_line:
                    next_line = now + 5.0
                    self._look(client, workers, raw, database)
                if self.interrupted or now - self._began > 60 * self.plan.minutes:
                    end(client, number=signal.SIGINT)
                    return False
                if self.plan.kill_seconds and now >= next_kill:
                    next_kill = now + self.plan.kill_seconds
                    place = self._chance.randrange(1, self.plan.workers)
                    workers[place].kill()
                    workers[place].communicate()
                    workers[place] = worker()
                    self.worker_kills += 1
                due = kills[self.client_kills :]
                if due and self.samples[-1].stored >= due[0] * self.plan.trials:
                    client.kill()
                    client.communicate()
                    client = fleet.client(store)
                    self.client_kills += 1
            self._look(client, workers, raw, database)
        answer = said(client)
        for each in workers:
            end(each)
        if answer["successful"] != self.plan.trials:
            raise SystemExit(f"{answer['successful']} of {self.plan.trials} were scored\n{fleet.logs()}")
        return True

    def _look(self, client: Any, workers: Sequence[Any], redis: Any, database: psycopg.Connection[Any]) -> None:
        sample = Sample(
            _stored(database),
            round(self._seconds + time.monotonic() - self._began, 1),
            round(self._cpu + cpu_seconds() - self._first_cpu, 2),
            _peak_mb(client.pid),
            max(_peak_mb(worker.pid) for worker in workers),
            round(redis.info("memory")["used_memory"] / MB, 1),
            self.worker_kills,
            self.client_kills,
        )
        self.samples.append(sample)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(sample)) + "\n")
        if len(self.samples) % 12 == 0:
            cost = 1e6 * sample.cpu_seconds / max(sample.stored, 1)
            print(
                f"{sample.seconds:7.0f} s: {sample.stored:,} stored, {cost:.0f} us of CPU each; client "
                f"{sample.client_mb:.0f} MB, workers {sample.worker_mb:.0f} MB; killed: {sample.worker_kills} workers, "
                f"{sample.client_kills} clients",
                file=sys.stderr,
                flush=True,
            )

    def figures(self) -> dict[str, Any]:
        """What the samples come to."""
        mark = min(100_000, self.plan.trials // 10)
        last = self.samples[-1]
        place = next((place for place, sample in enumerate(self.samples) if sample.stored >= mark), -1)
        early, marked = self.samples[: place + 1] or self.samples, self.samples[place]
        running = [sample for sample in self.samples if sample.stored < self.plan.trials] or self.samples
        cost = 1e6 * marked.cpu_seconds / max(marked.stored, 1)
        return {
            "trials": self.plan.trials,
            "stored": last.stored,
            "seconds": last.seconds,
            "per_second": round(last.stored / last.seconds),
            "worker_kills": last.worker_kills,
            "client_kills": last.client_kills,
            "redis_peak_mb": max(sample.redis_mb for sample in self.samples),
            "first_trials": marked.stored,
            "client_mb_first": max(sample.client_mb for sample in early),
            "client_mb_peak": max(sample.client_mb for sample in running),
            "client_mb_report": max(sample.client_mb for sample in self.samples),
            "worker_mb_first": max(sample.worker_mb for sample in early),
            "worker_mb_peak": max(sample.worker_mb for sample in self.samples),
            "cpu_us_first": round(cost, 1),
            "cpu_us": round(1e6 * last.cpu_seconds / max(last.stored, 1), 1),
            "cpu_us_by_100_000": self._costs(100_000),
        }

    def _costs(self, step: int) -> list[int]:
        """Return the CPU time per trial of each 100,000 trials, in us."""
        costs, start = [], Sample(0, 0, 0, 0, 0, 0, 0, 0)
        for sample in self.samples:
            if sample.stored - start.stored >= step:
                costs.append(round(1e6 * (sample.cpu_seconds - start.cpu_seconds) / (sample.stored - start.stored)))
                start = sample
        return costs

    def _executions(self) -> int:
        with open(self.folder / "executed", "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(MB), b""))


def cpu_seconds() -> float:
    """Return the CPU time of all processes that were started from this one, also of those that have ended."""
    ticks, pids = 0, [os.getpid()]
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            continue  # It has just ended: its parent has its time.
        ticks += sum(map(int, fields[13:15] if pid == os.getpid() else fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        return round(int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024, 1)
    return 0.0  # It has just ended.


def _stored(database: psycopg.Connection[Any]) -> int:
    """Return about how many trials are stored, from the index alone; before the run there is no table yet."""
    try:
        found = database.execute("SELECT ordinal + 1 FROM results ORDER BY run DESC, ordinal DESC LIMIT 1").fetchone()
    except psycopg.errors.UndefinedTable:
        return 0
    return int(found[0]) if found else 0


def _postgres(folder: Path | None) -> PostgresServer:
    kept = None if folder is None else folder / "postgres"
    return PostgresServer(folder=kept, options=("fsync=on", "shared_buffers=128MB"))


def _check(store: str, plan: Plan) -> dict[str, Any]:
    """Check every stored result in SQL; returns what the database needs for each."""
    statement = """
        SELECT (SELECT count(*) FROM runs WHERE status = 'finished'), count(*), count(d.output), sum(r.passed),
            count(*) FILTER (WHERE d.output::bigint = 2 * r.ordinal), count(d.transcript)
        FROM results r LEFT JOIN details d USING (run, ordinal)
    """
    trials, transcripts = plan.trials, plan.trials if plan.transcript_bytes else 0
    with psycopg.connect(store, autocommit=True) as database:
        found = database.execute(statement).fetchone()
        if found != (1, trials, trials, trials, trials, transcripts):
            raise SystemExit(f"runs, results, outputs, passed, right and transcripts: {found}")
        return {"bytes_per_trial": {table: round(size / trials, 1) for table, size in _sizes(database).items()}}


def _sizes(database: psycopg.Connection[Any]) -> dict[str, int]:
    """Return the bytes of tables with their indexes."""
    return {table: database.execute("SELECT pg_total_relation_size(%s)", [table]).fetchall()[0][0] for table in TABLES}


def delete(folder: Path) -> dict[str, Any]:
    """Delete the run in a folder; returns the MB of the tables, and the seconds, after each command."""
    steps = {
        "delete": ("store", "delete", "fleet-test@1", "--yes"),
        "vacuum": ("store", "vacuum"),
        "vacuum --full": ("store", "vacuum", "--full"),
    }
    with _postgres(folder) as postgres, Processes(folder, "") as fleet:
        store = postgres.url("test_1")
        with psycopg.connect(store, autocommit=True) as database:
            rows = database.execute("SELECT count(*) FROM results").fetchall()[0][0]
            figures: dict[str, Any] = {"results": rows, "mb": _mb(database)}
            for name, words in steps.items():
                began = time.monotonic()
                process = fleet.command(*words, "--store", store)
                process.communicate()
                if process.returncode:
                    raise SystemExit(fleet.logs())
                figures[name] = {"seconds": round(time.monotonic() - began, 1), "mb": _mb(database)}
    return figures


def _mb(database: psycopg.Connection[Any]) -> dict[str, float]:
    return {table: round(size / MB, 1) for table, size in _sizes(database).items()}


def _left(redis: RedisServer) -> int:
    with redis.client() as raw:
        names = ("{fairtrial:fleet-test.requests}:dead", "{fairtrial:fleet-test.requests}:stream")
        return sum(map(raw.xlen, names))


def problems(figures: dict[str, Any]) -> list[str]:
    """Which targets were missed."""
    missed = []
    if figures["redis_peak_mb"] >= 60:
        missed.append(f"Redis used {figures['redis_peak_mb']} MB")
    for process in ("client", "worker"):
        first, peak = figures[f"{process}_mb_first"], figures[f"{process}_mb_peak"]
        if peak > FLAT * first:
            missed.append(f"the {process} grew from {first} to {peak} MB")
    if figures["cpu_us"] > FLAT * figures["cpu_us_first"]:
        missed.append(f"a trial cost {figures['cpu_us']} us of CPU time, the first {figures['cpu_us_first']} us")
    if figures.get("redis_left"):
        missed.append(f"{figures['redis_left']} messages were left in the queue")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill-seconds", type=float, default=60.0, help="0: no worker is killed")
    parser.add_argument("--client-kills", type=int, default=10)
    parser.add_argument("--transcript-bytes", type=int, default=0, help="store a conversation of this size with each")
    parser.add_argument("--minutes", type=float, default=180.0)
    parser.add_argument("--folder", type=Path, help="keep everything in this folder")
    parser.add_argument("--resume", action="store_true", help="continue what is in --folder")
    parser.add_argument("--delete", action="store_true", help="delete the run in --folder; measures the space")
    options = parser.parse_args()
    if options.delete:
        print(json.dumps(delete(options.folder)))
        return
    plan = Plan(
        options.trials,
        options.workers,
        kill_seconds=options.kill_seconds,
        client_kills=options.client_kills,
        transcript_bytes=options.transcript_bytes,
        minutes=options.minutes,
    )
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "samples.jsonl").exists() is not options.resume:
            raise SystemExit(f"{folder} must {'have a run to resume' if options.resume else 'be empty'}")
        soak = Soak(folder, plan, kept=options.folder is not None)

        def interrupt(*_: object) -> None:
            soak.interrupted = True

        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)
        figures = soak.run()
    print(json.dumps(figures))
    if not figures["finished"]:
        raise SystemExit(f"{figures['stored']} of {plan.trials} are stored; --resume continues")
    if missed := problems(figures):
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
