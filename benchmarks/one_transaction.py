"""Kills workers at random moments while they store results in the transactions that acknowledge the requests.

python benchmarks/one_transaction.py [--kills 200] [--workers 4] [--seed 1] [--url postgresql://...]

Queue and store are one PostgreSQL database, a new one unless --url names an empty one. Triggers record in which
transaction each request was removed and each result stored; then SQL tells whether a result was stored twice, an
acknowledged request lacks its result, or a result was stored without its request being removed. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg

import fairtrial.store.sql  # noqa: F401 - loaded before workers are forked, so that they start at once
from fairtrial.fleet.worker.config import EvalLoopConfig
from fairtrial.mailbox import DLQPolicy, PostgresMailbox
from fairtrial.store import open_store
from fairtrial.suites.worker import run_worker
from tests.fleet.processes import SUITE, Processes, said
from tests.servers import PostgresServer

LEASE_SECONDS = 2.0
TRIALS_PER_KILL = 30
LIMIT_SECONDS = 1800.0

AUDIT = """
    CREATE TABLE removed (request bigint, ordinal bigint, transaction bigint);
    CREATE TABLE stored (ordinal bigint, transaction bigint);
    CREATE FUNCTION note_removed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO removed VALUES (
            OLD.id, (convert_from(OLD.body, 'UTF8')::jsonb ->> 'ordinal')::bigint, txid_current());
        RETURN NULL;
    END $$;
    CREATE FUNCTION note_stored() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO stored VALUES (NEW.ordinal, txid_current());
        RETURN NULL;
    END $$;
    CREATE TRIGGER removed AFTER DELETE ON mailbox_messages FOR EACH ROW EXECUTE FUNCTION note_removed();
    CREATE TRIGGER stored AFTER INSERT ON results FOR EACH ROW EXECUTE FUNCTION note_stored();
"""

CHECKS = {
    "results_stored_twice": """
        SELECT count(*) FROM (
            SELECT ordinal FROM stored GROUP BY ordinal HAVING count(*) > 1
            UNION SELECT ordinal FROM details GROUP BY ordinal HAVING count(*) > 1
        ) AS twice""",
    "acknowledged_without_result": """
        SELECT count(*) FROM removed WHERE NOT EXISTS (SELECT FROM results WHERE results.ordinal = removed.ordinal)""",
    "stored_without_removing_the_request": """
        SELECT count(*) FROM stored WHERE NOT EXISTS (
            SELECT FROM removed WHERE removed.ordinal = stored.ordinal AND removed.transaction = stored.transaction)""",
    "removed_before_the_result_was_stored": """
        SELECT count(*) FROM removed WHERE NOT EXISTS (
            SELECT FROM stored
            WHERE stored.ordinal = removed.ordinal AND stored.transaction <= removed.transaction)""",
    "requests_left": "SELECT count(*) FROM mailbox_messages",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = options.url or stack.enter_context(PostgresServer()).new_database()
        outcome = kill_workers(url, Path(folder), options.kills, options.workers, random.Random(options.seed))
    print(json.dumps(outcome))
    if any(outcome[name] for name in CHECKS) or outcome["stored"] != outcome["trials"]:
        raise SystemExit("a result was lost or stored twice")


def kill_workers(url: str, folder: Path, kills: int, workers: int, chance: random.Random) -> dict[str, Any]:
    """Execute a run on workers that are killed, and return what SQL and logs tell."""
    trials, log, said_by_workers = TRIALS_PER_KILL * kills, folder / "executed", folder / "workers"
    settings: dict[str, Any] = {"samples": trials, "log": log, "sleep": "0.01,0.05", "concurrency": 8}
    os.environ.update({f"FLEET_{name.upper()}": str(value) for name, value in settings.items()})
    prepare(url)
    began = time.monotonic()
    pids = [start_worker(url, said_by_workers) for _ in range(workers)]
    try:
        with Processes(folder, url, **settings) as fleet, psycopg.connect(url, autocommit=True) as connection:
            client = fleet.client(url)
            for place in sorted(chance.randrange(int(0.95 * trials)) for _ in range(kills)):
                while count(connection, "SELECT count(*) FROM results") < place:
                    if client.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                        raise SystemExit(f"the run does not go on\n{fleet.logs()}")
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.02))
                victim = chance.randrange(workers)
                end(pids[victim])
                pids[victim] = start_worker(url, said_by_workers)
            answer = said(client, LIMIT_SECONDS)
            checks = {name: count(connection, check) for name, check in CHECKS.items()}
            stored = count(connection, "SELECT count(*) FROM results")
            transactions = count(connection, "SELECT count(DISTINCT transaction) FROM stored")
    finally:
        for pid in pids:
            end(pid)
    lines = said_by_workers.read_text(errors="replace")
    return {
        "kills": kills,
        "workers": workers,
        "trials": trials,
        "status": answer["status"],
        "stored": stored,
        "transactions": transactions,
        "extra_executions": log.read_bytes().count(b"\n") - trials,
        "commits_refused": lines.count("is not stored by this worker"),
        "leases_lost": lines.count("lost the lease"),
        **checks,
        "seconds": round(time.monotonic() - began, 1),
    }


def prepare(url: str) -> None:
    """Create the tables of store and queue, and the triggers."""
    open_store(url).close()

    async def open_mailbox() -> None:
        async with PostgresMailbox("numbers", str, url):
            pass

    asyncio.run(open_mailbox())
    with psycopg.connect(url) as connection:
        connection.execute(AUDIT)


def start_worker(url: str, log: Path) -> int:
    """Start a worker in a copy of this process, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        logging.basicConfig(level=logging.INFO)
        config = EvalLoopConfig(
            concurrency=8, lease_seconds=LEASE_SECONDS, wait_seconds=1.0, dlq=DLQPolicy(suspect_after=1_000_000)
        )
        asyncio.run(run_worker(str(SUITE), url, config=config))
    finally:
        os._exit(1)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def count(connection: psycopg.Connection[Any], query: Any) -> int:
    """Return the number that a query finds."""
    return int((connection.execute(query).fetchone() or (0,))[0])


if __name__ == "__main__":
    main()
