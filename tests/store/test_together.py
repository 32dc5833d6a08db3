"""Several concurrent readers and writers, and a server that restarts."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from fairtrial.errors import StoreError, StoreUnavailableError, UnknownRunError
from fairtrial.store import Label, RunStore, open_store
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult
from tests.servers import PostgresServer
from tests.store.build import result, run_record, sample, samples

type Opener = Callable[[str], RunStore]

# What each of several processes runs: commit every result of a run, all at the same time as the others.
_COMMITTER = """
import json, sys
from dataclasses import replace
from fairtrial.store import open_store
from tests.store.build import result, samples

url, who, backwards = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
store = open_store(url)
run = store.get_run("r1")
print("ready", flush=True)
sys.stdin.readline()
new = duplicate = 0
starts = range(0, run.planned, 100)
for start in reversed(starts) if backwards else starts:
    ordinals = range(start, start + 100)
    batch = [result(run, n, execution=who * 10_000 + n, output=f"by {who}") for n in ordinals]
    if backwards:
        batch.reverse()
    committed = store.commit("r1", batch, samples({run.split(n)[0] for n in ordinals}))
    assert not committed.refused, committed.refused
    new, duplicate = new + committed.new, duplicate + committed.duplicate
store.close()
print(json.dumps([new, duplicate]))
"""

_OPENER = """
import sys
from fairtrial.store import open_store
print("ready", flush=True)
sys.stdin.readline()
store = open_store(sys.argv[1])
print(store.runs())
store.close()
"""


def start_together(script: str, *arguments: tuple[str, ...]) -> list[str]:
    """Run a script in several processes that set off at the same moment; returns the last line of each."""
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for given in arguments
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=60)[1]
    lines = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, problem = process.communicate(timeout=120)
        assert process.returncode == 0, problem
        lines.append(out.strip().splitlines()[-1])
    return lines


@pytest.mark.proves("R108")
def test_two_processes_that_commit_the_same_results_keep_each_exactly_once(database: str, opened: Opener) -> None:
    store = opened(database)
    run = store.create_run(run_record(size=300))
    # In opposite directions: they meet in the middle, and must not wait for each other in a circle.
    lines = start_together(_COMMITTER, (database, "1", "False"), (database, "2", "True"))
    counts = [json.loads(line) for line in lines]
    assert sum(new for new, _ in counts) == run.planned
    assert sum(duplicate for _, duplicate in counts) == run.planned
    found = list(store.results("r1"))
    assert [each.ordinal for each in found] == list(range(run.planned))
    # Each result has the details of its own execution.
    assert all(each.output == f"by {each.execution // 10_000}" for each in found)


def test_processes_that_open_a_new_store_at_once_all_get_it(database: str) -> None:
    assert start_together(_OPENER, *[(database,)] * 4) == ["[]"] * 4


@pytest.mark.proves("R89")
def test_readers_see_partial_results_while_a_writer_goes_on(database: str, opened: Opener) -> None:
    writer, reader = opened(database), opened(database)
    run = writer.create_run(run_record(size=300))
    seen: list[int] = []
    writing = threading.Event()
    halfway = threading.Event()

    def write() -> None:
        for start in range(0, run.planned, 100):
            places = {run.split(n)[0] for n in range(start, start + 100)}
            writer.commit("r1", [result(run, n) for n in range(start, start + 100)], samples(places))
            writing.set()
            if start == 500:
                halfway.wait(60)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert writing.wait(60)
        while thread.is_alive():
            count = sum(sum(totals.outcomes.values()) for totals in reader.totals("r1"))
            assert len(list(reader.results("r1", outputs=False))) >= count
            seen.append(count)
            if count >= 600:
                halfway.set()
    finally:
        halfway.set()
        thread.join(60)
    assert not thread.is_alive()
    assert seen == sorted(seen)
    assert all(count % 100 == 0 for count in seen)  # A batch is seen whole or not at all.
    assert 0 < seen[0] <= 600
    assert 600 in seen
    assert len(list(reader.results("r1"))) == run.planned


@pytest.mark.proves("R89")
def test_a_reader_that_takes_its_time_never_blocks_the_writer(tmp_path: Path, opened: Opener) -> None:
    path = tmp_path / "runs.db"
    store = opened(str(path))
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 0)], samples([0]))
    reader = sqlite3.connect(path, isolation_level=None)
    try:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM results").fetchone() == (1,)
        slow = store.results("r1")
        next(slow)
        assert store.commit("r1", [result(run, n) for n in range(1, 9)], samples(range(3))) == (8, 0, (), ())
        assert reader.execute("SELECT count(*) FROM results").fetchone() == (1,)
    finally:
        reader.close()


@pytest.mark.proves("R89")
def test_a_writer_that_takes_its_time_never_blocks_readers(tmp_path: Path, opened: Opener) -> None:
    path = tmp_path / "runs.db"
    store = opened(str(path))
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 0)], samples([0]))
    writer = sqlite3.connect(path, isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM results")
        assert len(list(store.results("r1"))) == 1
        assert store.totals("r1")[0].outcomes == {"scored": 1}
    finally:
        writer.close()


def test_a_run_forked_by_another_process_is_noticed(database: str, opened: Opener) -> None:
    one, other = opened(database), opened(database)
    run = one.create_run(run_record("r1"))
    shuffled = one.create_run(run_record("r2"))
    one.commit("r1", [result(run, 0)], samples([0]))

    def turned(ordinal: int) -> EvalResult:
        made = result(shuffled, ordinal)
        return replace(made, key=made.key._replace(sample_id=f"s{9 - shuffled.split(ordinal)[0]}"))

    # The second store knows the run's samples as the shared ones, then the first gives the run its own.
    assert other.commit("r2", [turned(4)], {1: sample(8)}).new == 1
    assert one.commit("r2", [turned(0)], {0: sample(9)}).new == 1
    assert other.commit("r2", [turned(5)], {1: sample(8)}).new == 1
    assert other.commit("r2", [turned(1)], {0: sample(9)}).new == 1
    assert [found.sample.id for found in other.results("r2")] == ["s9", "s9", "s8", "s8"]


class TestServer:
    def test_a_restarted_server_is_found_again(self, pg_server: PostgresServer, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], samples([0]))
        for crash in (False, True):
            pg_server.restart(crash=crash)
            assert store.commit("r1", [result(run, 0), result(run, 1 + crash)]) == (1, 1, (), ())
        assert [found.ordinal for found in store.results("r1")] == [0, 1, 2]

    def test_samples_that_a_failover_lost_are_stored_again(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], samples([0]))
        with psycopg.connect(pg_url, autocommit=True) as admin:  # The standby that takes over was behind.
            for table in ("details", "results", "samples"):
                admin.execute(f"DELETE FROM {table}".encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'fairtrial'")
        assert store.commit("r1", [result(run, 0)], samples([0])).new == 1
        assert [found.sample for found in store.results("r1")] == [sample(0, topic="even")]

    def test_a_server_that_is_away_is_unavailable_and_the_commit_can_be_repeated(
        self, pg_server: PostgresServer, pg_url: str, opened: Opener
    ) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        batch = [result(run, n) for n in range(8)]
        pg_server.stop()
        try:
            with pytest.raises(StoreUnavailableError) as raised:
                store.commit("r1", batch, samples([0, 1]))
            with pytest.raises(StoreUnavailableError):
                store.totals("r1")
            with pytest.raises(StoreUnavailableError):
                open_store(pg_url)
        finally:
            pg_server.start()
        assert pg_server.password not in str(raised.value)
        assert store.commit("r1", batch, samples([0, 1])) == (8, 0, (), ())

    def test_a_connection_lost_in_the_middle_of_a_commit_loses_nothing(
        self, pg_server: PostgresServer, pg_url: str, opened: Opener
    ) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        batch = [result(run, n) for n in range(8)]
        problems: list[BaseException] = []

        def commit() -> None:
            try:
                store.commit("r1", batch, samples([0, 1]))
            except StoreUnavailableError as error:
                problems.append(error)

        with psycopg.connect(pg_url) as blocker:
            # Someone else holds a row the commit must insert, so it waits half-way through.
            blocker.execute(
                "INSERT INTO results SELECT 1, 5, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, NULL, 1, NULL, 0, NULL"
            )
            thread = threading.Thread(target=commit)
            thread.start()
            with psycopg.connect(pg_server.url("postgres"), autocommit=True) as admin:
                for _ in range(2000):
                    ended = admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE wait_event_type = 'Lock' AND application_name = 'fairtrial'"
                    ).fetchall()
                    if ended:
                        break
                    thread.join(0.01)
            thread.join(60)
            blocker.rollback()
        assert [type(problem) for problem in problems] == [StoreUnavailableError]
        assert list(store.results("r1")) == []
        assert store.commit("r1", batch, samples([0, 1])) == (8, 0, (), ())

    def test_results_committed_by_another_at_the_same_moment_are_duplicates(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        counts: list[object] = []
        batch = [result(run, n) for n in range(8)]
        with psycopg.connect(pg_url) as other:
            other.execute(
                "INSERT INTO results SELECT 1, n, 0, 1, 1, 2, 1, NULL, NULL, 0, 0, 0, 0, 0, NULL, 1, 2, 77, NULL"
                " FROM unnest(ARRAY[4, 5]) AS n"
            )
            other.execute("UPDATE results SET outcome = 1, passed = 1, value = 1, stage = NULL WHERE ordinal = 5")
            thread = threading.Thread(target=lambda: counts.append(store.commit("r1", batch, samples([0, 1]))))
            thread.start()
            with psycopg.connect(pg_url, autocommit=True) as watcher:
                for _ in range(2000):
                    if watcher.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchall():
                        break
                    thread.join(0.01)
            other.commit()
            thread.join(60)
        # Ordinal 5 was scored by the other; 4 had only failed, so ours took its place.
        assert counts == [(7, 1, (), ())]
        assert [found.execution for found in store.results("r1")] == [1, 2, 3, 4, 5, 77, 7, 8]

    def test_a_label_of_a_run_that_is_deleted_meanwhile_leaves_nothing(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        store.create_run(run_record())
        problems: list[StoreError] = []

        def label() -> None:
            try:
                store.label(Label(TrialKey("r1", "baseline", "s0"), "~comment", {"id": "1", "text": "private"}, "ann"))
            except StoreError as error:
                problems.append(error)

        with psycopg.connect(pg_url) as other:
            other.execute("DELETE FROM labels")
            other.execute("DELETE FROM runs")
            thread = threading.Thread(target=label)
            thread.start()
            with psycopg.connect(pg_url, autocommit=True) as watcher:
                for _ in range(2000):
                    if watcher.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchall():
                        break
                    thread.join(0.01)
            other.commit()
            thread.join(60)
            assert [type(problem) for problem in problems] == [UnknownRunError]
            assert other.execute("SELECT * FROM labels").fetchall() == []
