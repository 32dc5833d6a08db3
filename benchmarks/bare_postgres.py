"""A bare psycopg loop that makes the hops of a fleet, and the server that it and the fleet use.

Two tables as queues, rows claimed in batches with SKIP LOCKED and deleted when they are done: the same transactions as
a mailbox has, about as many of them (the client's are of up to 500 messages, a worker's of half as many), on the same
number of processes, with bodies as long, on a server with the same settings, and with the same durability of SQLite; no
leases, fences, dead letters, checks or wake-ups.

As a program: python benchmarks/bare_postgres.py work URL, or: client URL TRIALS DATABASE
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bare_messages import WINDOW, make_reply, make_request, row_of
from tests.servers import PostgresServer

BATCH = 500
TABLE = """
    CREATE TABLE {name} (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, taken boolean NOT NULL DEFAULT false, body bytea NOT NULL
    ) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0)
"""
INDEX = "CREATE INDEX {name}_waiting ON {name} (id) WHERE NOT taken"
SEND = "INSERT INTO {name} (body) SELECT unnest(%b::bytea[])"
CLAIM = """
    WITH due AS MATERIALIZED (SELECT id FROM {name} WHERE NOT taken ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
    UPDATE {name} AS message SET taken = true FROM due WHERE message.id = due.id RETURNING message.id, message.body
"""
DELETE = "DELETE FROM {name} WHERE id = ANY(%b)"


@contextmanager
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server of our own, as tests use it."""
    with PostgresServer() as started:
        yield started


async def connect(url: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=3)


def create(url: str, *names: str) -> None:
    """Create tables for queues."""
    with psycopg.connect(url, autocommit=True) as connection:
        for name in names:
            connection.execute(TABLE.format(name=name))
            connection.execute(INDEX.format(name=name))


async def send(connection: psycopg.AsyncConnection[Any], name: str, bodies: Sequence[bytes]) -> None:
    await connection.execute(SEND.format(name=name), [list(bodies)])


async def claim(connection: psycopg.AsyncConnection[Any], name: str, most: int) -> list[tuple[int, bytes]]:
    cursor = await connection.execute(CLAIM.format(name=name), [most], binary=True)
    rows: list[tuple[int, bytes]] = await cursor.fetchall()
    return rows


async def delete(connection: psycopg.AsyncConnection[Any], name: str, ids: Sequence[int]) -> None:
    await connection.execute(DELETE.format(name=name), [list(ids)])


async def work(url: str) -> None:
    connection = await connect(url)
    name = str(os.getpid())
    print("ready", flush=True)
    while True:
        rows = await claim(connection, "requests", BATCH // 2)
        if not rows:
            await asyncio.sleep(0.002)
            continue
        replies = [json.dumps(make_reply(json.loads(body), name)).encode() for _, body in rows]
        await send(connection, "results", replies)
        await delete(connection, "requests", [id for id, _ in rows])


async def client(url: str, trials: int, database: Path) -> float:
    sender, reader = await connect(url), await connect(url)
    stored = sqlite3.connect(database, check_same_thread=False)
    stored.execute("PRAGMA journal_mode=WAL")
    stored.execute("PRAGMA synchronous=NORMAL")
    stored.execute(
        "CREATE TABLE results (ordinal INTEGER PRIMARY KEY, sample TEXT, outcome TEXT, value REAL, output TEXT)"
    )
    done = 0
    began = time.perf_counter()

    async def send_requests() -> None:
        for start in range(0, trials, BATCH):
            while start - done > WINDOW:  # noqa: ASYNC110 - as bare as can be
                await asyncio.sleep(0.001)
            numbers = range(start, min(start + BATCH, trials))
            await send(sender, "requests", [json.dumps(make_request(number)).encode() for number in numbers])

    sending = asyncio.create_task(send_requests())
    while done < trials:
        rows = await claim(reader, "results", BATCH)
        if not rows:
            await asyncio.sleep(0.002)
            continue
        values = [row_of(json.loads(body)) for _, body in rows]

        def write(values: Sequence[Any] = values) -> None:
            with stored:
                stored.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)", values)

        await asyncio.to_thread(write)
        await delete(reader, "results", [id for id, _ in rows])
        done += len(rows)
    seconds = time.perf_counter() - began
    await sending
    stored.close()
    await sender.close()
    await reader.close()
    return seconds


def count_transactions(url: str) -> int:
    """The transactions that a database has committed."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        ((count,),) = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchall()
        return int(count)


def measure(folder: Path, trials: int, workers: int) -> tuple[float, int]:
    """Trials per second of the bare loop, and its transactions."""
    with server() as postgres:
        url = postgres.new_database()
        create(url, "requests", "results")
        started = [
            subprocess.Popen([sys.executable, __file__, "work", url], stdout=subprocess.PIPE) for _ in range(workers)
        ]
        try:
            for worker in started:
                assert worker.stdout is not None
                worker.stdout.readline()
            command = [sys.executable, __file__, "client", url, str(trials), str(folder / "bare.db")]
            seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        finally:
            for worker in started:
                worker.kill()
                worker.communicate()
        return trials / seconds, count_transactions(url)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        asyncio.run(work(sys.argv[2]))
    else:
        print(asyncio.run(client(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))
