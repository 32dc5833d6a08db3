"""What administrators do to a database beside a run: every trial is stored once, and no command waits forever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from tests.fleet.processes import ROOT, Processes, end, environment, said, wait_for_lines

SAMPLES = 200


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Execute `fairtrial` in a process, which must end within a minute."""
    line = [sys.executable, "-m", "fairtrial.cli", *words]
    return subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def vacuum_fully_beside_a_long_transaction(url: str) -> None:
    """The transaction holds a lock that VACUUM FULL waits for, and everybody else waits for VACUUM FULL."""

    def vacuum() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM FULL mailbox_messages")
            connection.execute("VACUUM FULL results")

    with psycopg.connect(url) as reader:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM results, mailbox_messages")
        thread = threading.Thread(target=vacuum)
        thread.start()
        time.sleep(3)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("REINDEX TABLE results")


def empty_the_queue(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("DELETE FROM mailbox_messages").rowcount > 0
        connection.execute("DELETE FROM mailbox_queues")


def look_after_the_store(url: str) -> None:
    """Commands of upkeep, none of which may touch the run that is being executed."""
    lines = (
        ["store", "delete", "fleet-test@1", "--yes"],
        ["store", "prune", "--older-than", "0h", "--yes"],
    )  # And vacuum.
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda words: command(*words, "--store", url), lines))
    assert [one.returncode for one in done] == [2, 0], [one.stderr for one in done]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT status FROM runs").fetchall() == [("running",)]


# The action, and how long a trial takes, so that the run lasts longer than the action.
ACTIONS: dict[str, tuple[Callable[[str], None], str]] = {
    "VACUUM FULL beside a long transaction": (vacuum_fully_beside_a_long_transaction, "0.2,0.4"),
    "queue emptied": (empty_the_queue, "0.1,0.3"),
    "commands of upkeep": (look_after_the_store, "0.8,1.2"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ACTIONS)
def test_every_trial_is_stored_once_whatever_is_done_to_the_database(name: str, pg_url: str, tmp_path: Path) -> None:
    log = tmp_path / "executed"
    act, sleep = ACTIONS[name]
    with Processes(tmp_path, pg_url, samples=SAMPLES, log=log, sleep=sleep) as fleet:
        workers = [fleet.worker("--concurrency", "4", "--lease", "5") for _ in range(2)]
        client = fleet.client(pg_url)
        wait_for_lines(log, SAMPLES // 10)
        act(pg_url)
        answer = said(client, 120)
        assert (answer["status"], answer["successful"]) == ("finished", SAMPLES), fleet.logs()
        assert [end(worker) for worker in workers] == [0, 0], fleet.logs()
    with psycopg.connect(pg_url) as connection:
        stored = connection.execute(
            "SELECT count(*), count(DISTINCT ordinal), count(*) FILTER (WHERE passed = 1) FROM results"
        ).fetchone()
    assert stored == (SAMPLES, SAMPLES, SAMPLES)


def test_commands_end_on_postgresql_when_nobody_else_is_there(pg_url: str) -> None:
    for words in (["store", "migrate"], ["runs"], ["store", "vacuum"]):
        assert command(*words, "--store", pg_url).returncode == 0
