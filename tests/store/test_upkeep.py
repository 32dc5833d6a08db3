"""The disk space of a database, reclaiming it, and backups during use."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select

from fairtrial import Attachment, ChatMessage, Label, Sample, open_store
from fairtrial.errors import StoreError
from fairtrial.models import ModelReply, ResponseCache
from fairtrial.store import RunStore, upkeep
from fairtrial.store.schema import datasets, details, results, samples
from fairtrial.store.sql import SqlStore
from fairtrial.testing import FakeClock
from tests.store.build import result, run_record


def sql(store: RunStore) -> SqlStore:
    assert isinstance(store, SqlStore)
    return store


def fill(store: RunStore, run_id: str, trials: int = 40) -> None:
    run = store.create_run(run_record(run_id=run_id, size=trials, dataset_fingerprint=f"{trials} samples"))
    places = range(0, 4 * trials, 4)
    batch = [result(run, place, output=os.urandom(20_000).hex()) for place in places]
    store.commit(run_id, batch, {place: Sample(f"s{place}", place) for place in range(trials)})
    store.update_run(run_id, status="finished", finished_at=1.0)


def test_a_sqlite_file_shrinks_when_it_is_vacuumed_after_a_run_was_deleted(tmp_path: Path) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    fill(store, "old")
    full = store.size()
    assert full > 1_000_000
    store.delete_run("old")
    store.vacuum()
    assert store.size() < full / 5
    store.create_run(run_record(run_id="new"))
    store.close()


def test_labels_of_a_deleted_run_are_not_kept(tmp_path: Path) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    run = store.create_run(run_record())
    store.label(Label(result(run, 0).key, "good", "somebody's words"))
    store.delete_run(run.run_id)
    store.close()
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection:
        assert connection.execute("SELECT count(*) FROM labels").fetchone() == (0,)


def test_a_postgresql_store_uses_the_space_of_a_deleted_run_again(pg_url: str) -> None:
    store = sql(open_store(pg_url))
    fill(store, "old")
    full = store.size()
    store.delete_run("old")
    store.vacuum()
    fill(store, "new")
    assert store.size() < full * 1.3
    store.close()


def test_a_full_vacuum_returns_the_space_that_a_run_had_in_postgresql(pg_url: str) -> None:
    store = sql(open_store(pg_url))
    fill(store, "old", trials=60)
    fill(store, "kept", trials=2)
    full = store.size()
    store.delete_run("old")
    store.vacuum()
    assert store.size() > full / 2  # The rows of the other run are at the end of the files.
    store.vacuum(full=True)
    assert store.size() < full / 5
    assert len(list(store.results("kept"))) == 2
    store.close()


def test_a_vacuum_leaves_no_connection_without_a_time_limit(pg_url: str) -> None:
    store = sql(open_store(pg_url))

    def limits() -> list[str]:
        with store._engine.connect() as one, store._engine.connect() as two:
            return [str(each.exec_driver_sql("SHOW statement_timeout").scalar_one()) for each in (one, two)]

    before = limits()
    store.vacuum()
    assert limits() == before
    assert "0" not in before
    store.close()


def counts(store: SqlStore) -> list[int]:
    with store._engine.connect() as connection:
        tables = (details, results, samples, datasets)
        return [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]


def test_a_run_is_deleted_in_parts_and_vacuum_completes_a_deletion_that_was_interrupted(
    database: str, opened: Callable[[str], RunStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sql(opened(database))
    monkeypatch.setattr(upkeep, "_DELETED_AT_ONCE", 16)  # Four trials: there are four repeats of a sample.
    fill(store, "whole", trials=10)
    store.delete_run("whole")
    assert counts(store) == [0, 0, 0, 0]
    fill(store, "kept", trials=3)
    fill(store, "cut", trials=10)
    write, transactions = store._write, 0

    def failing() -> AbstractContextManager[Connection]:
        nonlocal transactions
        transactions += 1
        if transactions == 3:
            raise StoreError("the connection is lost")
        return write()

    monkeypatch.setattr(store, "_write", failing)
    with pytest.raises(StoreError, match="lost"):
        store.delete_run("cut")
    monkeypatch.undo()
    assert [run.run_id for run in store.runs()] == ["kept"]  # It is gone for everyone,
    assert counts(store) == [3 + 6, 3 + 10, 3 + 10, 1]  # though most of its rows are still there.
    fill(store, "cut", trials=10)
    store.vacuum()
    assert counts(store) == [3 + 10, 3 + 10, 3 + 10, 2]
    assert [found.ordinal for found in store.results("kept")] == [0, 4, 8]
    assert len(list(store.samples("cut"))) == 10


def test_attachments_that_nothing_names_are_deleted_and_others_are_kept(
    database: str, opened: Callable[[str], RunStore]
) -> None:
    store = sql(opened(database))
    named, in_output, unnamed = (store.put_blob(data * 100) for data in (b"named", b"in an output", b"nothing"))
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 0, output=Attachment(in_output))], {0: Sample("s0", Attachment(named))})
    assert store.delete_unnamed_blobs() == (0, 0)  # The run is being executed.
    store.update_run("r1", status="finished", finished_at=1.0)
    deleted, size = store.delete_unnamed_blobs()
    assert (deleted, size > 0) == (1, True)
    assert store.get_blob(named) == b"named" * 100
    assert store.get_blob(in_output) == b"in an output" * 100
    with pytest.raises(StoreError):
        store.get_blob(unnamed)


def test_a_backup_under_load_is_one_moment_of_the_store(tmp_path: Path) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    run = store.create_run(run_record(size=3_000))
    written = threading.Event()
    stop = threading.Event()

    def write() -> None:
        for first in range(0, 3_000, 10):
            store.commit("r1", [result(run, place) for place in range(first, first + 10)])
            if first == 50:
                written.set()
            if stop.is_set():
                break

    writer = threading.Thread(target=write)
    writer.start()
    assert written.wait(60)
    sizes = []
    for number in range(3):
        copy = tmp_path / f"backup-{number}.db"
        store.backup(copy)
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        restored = open_store(copy)
        stored = [found.ordinal for found in restored.results("r1")]
        assert stored == list(range(len(stored)))  # Whole commits, none of them torn.
        assert len(stored) % 10 == 0
        sizes.append(len(stored))
        restored.close()
    stop.set()
    writer.join(60)
    assert 50 <= sizes[0] <= sizes[1] <= sizes[2]
    store.close()


def test_nobody_executes_the_runs_of_a_backup(tmp_path: Path) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    store.create_run(run_record())
    assert store.acquire_run("r1", "someone", store.run_owner("r1")) == 1
    store.backup(tmp_path / "backup.db")
    copy = open_store(tmp_path / "backup.db")
    assert (copy.run_owner("r1").owner, copy.run_owner("r1").epoch) == (None, 1)
    assert store.run_owner("r1").owner == "someone"
    copy.close()
    store.close()


def test_a_backup_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    fill(store, "r1", 2)

    def refuse(_source: object, _target: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.backup(tmp_path / "backup.db")
    store.close()
    copy = open_store(tmp_path / "backup.db")
    assert copy.get_run("r1").suite == "support"
    copy.close()
    assert sorted(found.name for found in tmp_path.glob("*.db")) == ["backup.db", "runs.db"]


def test_a_store_tells_how_many_results_its_runs_have(tmp_path: Path) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    for run_id, trials in (("r1", 2), ("r2", 3)):
        fill(store, run_id, trials)
    store.create_run(run_record("empty"))
    assert store.result_counts() == {"r1": 2, "r2": 3}
    store.close()


def test_a_backup_replaces_no_file_and_a_damaged_store_is_not_backed_up(tmp_path: Path) -> None:
    store = sql(open_store(tmp_path / "runs.db"))
    fill(store, "r1", 4)
    (tmp_path / "taken.db").write_text("mine")
    with pytest.raises(StoreError, match="must be a new file"):
        store.backup(tmp_path / "taken.db")
    assert (tmp_path / "taken.db").read_text() == "mine"
    with pytest.raises(StoreError, match="cannot write the backup"):
        store.backup(tmp_path / "nowhere" / "b.db")
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection, connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with (tmp_path / "runs.db").open("r+b") as file:
        for page in range(6, 20):
            file.seek(page * 4096)
            file.write(b"\xff" * 4096)
    with pytest.raises(StoreError, match="cannot back"):
        store.backup(tmp_path / "b.db")
    assert not (tmp_path / "b.db").exists()
    store.close()


async def test_old_answers_of_the_response_cache_are_pruned(tmp_path: Path) -> None:
    clock = FakeClock()
    cache = ResponseCache(tmp_path / "responses.db", clock=clock)

    async def ask() -> ModelReply:
        return ModelReply(ChatMessage("assistant", "x" * 200_000))

    await cache.get("old", ask, lambda _reply: True)
    clock.advance(100)
    await cache.get("new", ask, lambda _reply: True)
    assert cache.prune(50) == 1
    assert len(cache) == 1
    assert (tmp_path / "responses.db").stat().st_size < 300_000
    cache.close()
