"""How many no-op trials a second go through submission, a queue, two workers, collection and SQLite.

python benchmarks/fleet_throughput.py [--mailbox redis|postgres] [--trials N] [--rounds 3] [--floor RATIO]

Beside it, in the same run and turn by turn, a bare redis-py loop that makes the same two hops (request, result) with
the same number of processes: pipelines of a hundred, bodies of the same size read and written with `json`, one XACK
and one XDEL per batch, results written to SQLite by `executemany`; no leases, no fences, no checks, no resuming.
On PostgreSQL the bare loop is that of `bare_postgres.py`; with --snapshot, a transaction that reads is open meanwhile.
Prints one JSON line; fails under the floor. With --profile, the client and one worker are profiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import bare_postgres  # noqa: E402 - found by the line above
from benchmarks.bare_messages import BATCH, WINDOW, make_reply, make_request, row_of  # noqa: E402
from benchmarks.figures import ENGINES, figure  # noqa: E402


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    """A redis-server of our own (AOF everysec): its port and process."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "yes", "--dir", str(folder)]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


# The bare loop: `client` sends requests and collects results, `work` turns one into the other.


async def _bare_work(port: int) -> None:
    import redis.asyncio

    client: Any = redis.asyncio.Redis(port=port, protocol=2)
    name = str(os.getpid())
    print("ready", flush=True)
    while True:
        command = ("XREADGROUP", "GROUP", "g", name, "COUNT", BATCH, "BLOCK", 1000, "STREAMS", "requests", ">")
        answer = await client.execute_command(*command)
        if not answer:
            continue
        entries = answer[0][1]
        pipeline = client.pipeline(transaction=False)
        for _, fields in entries:
            reply = make_reply(json.loads(fields[b"b"]), name)
            pipeline.execute_command("XADD", "results", "*", "b", json.dumps(reply))
        ids = [entry for entry, _ in entries]
        pipeline.execute_command("XACK", "requests", "g", *ids)
        pipeline.execute_command("XDEL", "requests", *ids)
        await pipeline.execute()


async def _bare_client(port: int, trials: int, database: Path) -> float:
    import asyncio

    import redis.asyncio

    client: Any = redis.asyncio.Redis(port=port, protocol=2)
    reader: Any = redis.asyncio.Redis(port=port, protocol=2)
    rows = sqlite3.connect(database, check_same_thread=False)
    rows.execute("PRAGMA journal_mode=WAL")
    rows.execute("PRAGMA synchronous=NORMAL")
    rows.execute(
        "CREATE TABLE results (ordinal INTEGER PRIMARY KEY, sample TEXT, outcome TEXT, value REAL, output TEXT)"
    )
    done = 0
    began = time.perf_counter()

    async def send() -> None:
        for start in range(0, trials, BATCH):
            while start - done > WINDOW:  # noqa: ASYNC110 - as bare as can be
                await asyncio.sleep(0.001)
            pipeline = client.pipeline(transaction=False)
            for number in range(start, min(start + BATCH, trials)):
                request = make_request(number)
                pipeline.execute_command("XADD", "requests", "*", "b", json.dumps(request), "r", "results")
            await pipeline.execute()

    sending = asyncio.create_task(send())
    while done < trials:
        command = ("XREADGROUP", "GROUP", "g", "c", "COUNT", 500, "BLOCK", 1000, "STREAMS", "results", ">")
        answer = await reader.execute_command(*command)
        if not answer:
            continue
        entries = answer[0][1]
        values = [row_of(json.loads(fields[b"b"])) for _, fields in entries]

        def write(values: Sequence[Any] = values) -> None:
            with rows:
                rows.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)", values)

        await asyncio.to_thread(write)
        ids = [entry for entry, _ in entries]
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("XACK", "results", "g", *ids)
        pipeline.execute_command("XDEL", "results", *ids)
        await pipeline.execute()
        done += len(entries)
    seconds = time.perf_counter() - began
    await sending
    rows.close()
    return seconds


def bare(folder: Path, trials: int, workers: int) -> float:
    """Trials per second of the bare loop."""
    import redis

    with server(folder) as (port, _):
        setup = redis.Redis(port=port)
        for stream in ("requests", "results"):
            setup.xgroup_create(stream, "g", "0", mkstream=True)
        started = [
            subprocess.Popen([sys.executable, __file__, "--bare-worker", str(port)], stdout=subprocess.PIPE)
            for _ in range(workers)
        ]
        try:
            for worker in started:
                assert worker.stdout is not None
                worker.stdout.readline()
            command = [sys.executable, __file__, "--bare-client", str(port), str(trials), str(folder / "bare.db")]
            seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        finally:
            for worker in started:
                worker.kill()
                worker.communicate()
    return trials / seconds


@dataclass(frozen=True)
class Measured:
    """What a suite on a fleet took, from when its workers were ready."""

    per_second: float
    cpu_seconds: float  # Of the client, the workers and the server of the queue.
    transactions: int | None = None  # Of PostgreSQL.


def _cpu_seconds(*processes: int) -> float:
    """What running processes have used so far."""
    used = 0.0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


@contextmanager
def queue(folder: Path, engine: str, *, snapshot: bool = False) -> Iterator[tuple[str, Callable[[], Sequence[int]]]]:
    """A server for a fleet: its address, and a function that returns its processes."""
    if engine == "redis":
        with server(folder) as (port, process):
            yield f"redis://127.0.0.1:{port}", lambda: [process]
        return
    import psycopg

    with bare_postgres.server() as postgres:
        url = postgres.new_database()
        if not snapshot:
            yield url, postgres.pids
            return
        with psycopg.connect(url) as reader:
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT txid_current()")  # As a long report or pg_dump: nothing newer can be vacuumed.
            yield url, postgres.pids


def ours(
    folder: Path,
    trials: int,
    workers: int,
    *,
    engine: str = "redis",
    profile: bool = False,
    snapshot: bool = False,
) -> Measured:
    """A suite on a fleet."""
    from tests.fleet.processes import SUITE, Processes, end, environment, said

    with (
        queue(folder, engine, snapshot=snapshot) as (url, servers),
        Processes(folder, url, samples=trials, concurrency=500) as fleet,
    ):
        started = [fleet.worker() for _ in range(workers)]
        if profile:
            started.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "cProfile", "-o", str(folder / "worker.prof")),
                        *("-m", "fairtrial.cli", "worker", str(SUITE), "--mailbox", fleet.mailbox),
                    ],
                    cwd=ROOT,
                    env=environment(samples=trials, concurrency=500),
                    text=True,
                )
            )
        logs = sorted(folder.glob("worker-*.log"))
        while not all("takes work" in log.read_text() for log in logs):
            if any(worker.poll() is not None for worker in started):
                raise SystemExit(f"a worker ended before it took work\n{fleet.logs()}")
            time.sleep(0.05)
        before = _cpu_seconds(*servers(), *(worker.pid for worker in started))
        answer = said(
            fleet.client(str(folder / "ours.db"), **({"profile": folder / "client.prof"} if profile else {})), 600
        )
        if answer["successful"] != trials:
            raise SystemExit(f"{answer['successful']} of {trials} were scored\n{fleet.logs()}")
        after = _cpu_seconds(*servers(), *(worker.pid for worker in started))
        for worker in started:
            end(worker)
        transactions = bare_postgres.count_transactions(url) if engine == "postgres" else None
    return Measured(trials / float(answer["seconds"]), float(answer["cpu_seconds"]) + after - before, transactions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, help="20,000 on Redis and 50,000 on PostgreSQL by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--floor", type=float, help="0.6 on Redis and 0.5 on PostgreSQL by default")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--mailbox", choices=["redis", "postgres"], default="redis")
    parser.add_argument("--snapshot", action="store_true", help="PostgreSQL: hold a snapshot open meanwhile")
    parser.add_argument("--bare-worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare-client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trials is None:
        options.trials = 50_000 if options.mailbox == "postgres" else 20_000
    if options.floor is None:
        options.floor = 0.5 if options.mailbox == "postgres" else 0.6
    import asyncio

    if options.bare_worker:
        asyncio.run(_bare_work(options.bare_worker))
    if options.bare_client:
        port, trials, database = options.bare_client
        print(asyncio.run(_bare_client(int(port), int(trials), Path(database))))
        return
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    transactions: dict[str, list[int]] = {"ours": [], "bare": []}
    cpu_us: list[float] = []
    for _ in range(options.rounds):  # Turn by turn, so that a busy neighbour troubles both.
        with tempfile.TemporaryDirectory() as folder:
            engine, snapshot = options.mailbox, options.snapshot
            measured = ours(Path(folder), options.trials, options.workers, engine=engine, snapshot=snapshot)
            rates["ours"].append(measured.per_second)
            cpu_us.append(measured.cpu_seconds / options.trials * 1e6)
        with tempfile.TemporaryDirectory() as folder:
            if engine == "redis":
                rates["bare"].append(bare(Path(folder), options.trials, options.workers))
                continue
            rate, count = bare_postgres.measure(Path(folder), options.trials, options.workers)
            rates["bare"].append(rate)
            transactions["bare"].append(count)
            transactions["ours"].append(measured.transactions or 0)
    ratio = statistics.median(mine / other for mine, other in zip(rates["ours"], rates["bare"], strict=True))
    print(
        json.dumps(
            {
                "mailbox": options.mailbox,
                "trials": options.trials,
                "ours_per_s": [round(rate) for rate in rates["ours"]],
                "bare_per_s": [round(rate) for rate in rates["bare"]],
                "ratio": round(ratio, 3),
                **{f"{name}_transactions": counts for name, counts in transactions.items() if counts},
            }
        )
    )
    what = f"no-op trials through {options.workers} workers on {ENGINES[options.mailbox]}"
    what += ", a snapshot open" if options.snapshot else ""
    name, used = f"{what}, against the bare client", statistics.median(cpu_us)
    figure(name, ratio, "x the throughput", at_least=options.floor or None, cpu_us=used)
    figure(what, statistics.median(rates["ours"]), "per second")
    if options.profile:
        _profile(options.trials, options.workers, options.mailbox)
    if ratio < options.floor:
        raise SystemExit(f"{ratio:.3f} of the bare loop is under {options.floor}")


def _profile(trials: int, workers: int, engine: str) -> None:
    import pstats

    with tempfile.TemporaryDirectory() as folder:
        ours(Path(folder), trials, workers - 1, engine=engine, profile=True)
        for part in ("client", "worker"):
            print(f"== {part}")
            pstats.Stats(str(Path(folder) / f"{part}.prof")).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
