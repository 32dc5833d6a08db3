"""Cases of stores in a database: concurrent changes, and values without a column type."""

from __future__ import annotations

import gc
import sqlite3
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairtrial import Sample, TokenUsage
from fairtrial.errors import StoreError, StoreUnavailableError, UnknownRunError
from fairtrial.store import RunStore, commit, open_store
from fairtrial.store.batches import batch_table
from fairtrial.store.compress import compress, decompress
from fairtrial.store.rows import Entry
from fairtrial.store.sql import SqlStore
from tests.records import changeable
from tests.store.build import result, run_record, sample, samples

type Opener = Callable[[str], RunStore]


def test_a_value_the_database_has_no_type_for_is_found_by_halving(tmp_path: Path, opened: Opener) -> None:
    store = opened(str(tmp_path / "runs.db"))
    run = store.create_run(run_record())
    batch = [result(run, n) for n in range(40)]
    usage = TokenUsage()
    object.__setattr__(usage, "cost_usd", Decimal("0.5"))
    batch[17] = replace(batch[17], usage=usage)
    committed = store.commit("r1", batch, samples(range(10)))
    assert committed[:3] == (40, 0, ())
    [(key, why)] = committed.unstorable
    assert key == batch[17].key
    assert "the database refuses it" in why


def test_a_sample_the_database_refuses_takes_only_its_own_results_along(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(str(tmp_path / "runs.db"))
    run = store.create_run(run_record())

    def spoiled(place: int, given: Sample[Any, Any], _redactor: object) -> tuple[Any, ...]:
        return (place, given.id, object() if place == 3 else "1", None, None, None)

    monkeypatch.setattr(commit, "sample_row", spoiled)
    committed = store.commit("r1", [result(run, n) for n in range(40)], samples(range(10)))
    assert committed[:3] == (40, 0, ())
    assert {key.sample_id for key, _ in committed.unstorable} == {"s3"}
    assert list(store.ordinals("r1", ("task_error",))) == [12, 13, 14, 15]
    monkeypatch.undo()
    assert store.commit("r1", [result(run, 12)], {3: sample(3)}) == (1, 0, (), ())
    assert store.sample("r1", 3) == sample(3)


def test_a_run_deleted_by_another_process_is_unknown_from_then_on(database: str, opened: Opener) -> None:
    store, other = opened(database), opened(database)
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 0)], samples([0]))
    other.delete_run("r1")
    with pytest.raises(UnknownRunError, match="was deleted"):
        store.commit("r1", [result(run, 1)])
    other.create_run(run_record())
    assert store.commit("r1", [result(run, 1)], samples([0])) == (1, 0, (), ())
    assert [found.sample.id for found in store.results("r1")] == ["s0"]


def test_a_run_gets_samples_of_its_own_only_once(database: str, opened: Opener) -> None:
    store = opened(database)
    assert isinstance(store, SqlStore)
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 0)], samples([0]))
    for _ in range(2):  # As when two processes find at once that the order differs.
        store._own_dataset(1)
    assert store.sample("r1", 0).id == "s0"
    assert store.commit("r1", [result(run, 1)], samples([0])) == (1, 0, (), ())


def test_results_without_their_samples_are_reported_as_damage(tmp_path: Path, opened: Opener) -> None:
    store = opened(str(tmp_path / "runs.db"))
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 0)], samples([0]))
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection, connection:
        connection.execute("DELETE FROM samples")
    connection.close()
    with pytest.raises(StoreError, match="damaged"):
        list(store.results("r1"))


class TestRaces:
    """Another writer commits a trial between our look at it and our insert."""

    @pytest.fixture
    def racing(self, pg_url: str, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> RunStore:
        store = opened(pg_url)
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], samples([0]))
        looked = commit.BatchWriter._stored
        others = iter([1, 2])

        def look_then_lose(self: commit.BatchWriter, connection: Any, entries: Sequence[Entry]) -> Any:
            found = looked(self, connection, entries)
            for ordinal in others:
                with psycopg.connect(pg_url) as other:
                    other.execute(
                        "INSERT INTO results SELECT 1, %s, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, NULL, 1, NULL, 7, NULL",
                        (ordinal,),
                    )
                break
            return found

        monkeypatch.setattr(commit.BatchWriter, "_stored", look_then_lose)
        return store

    def test_the_commit_looks_again_until_it_is_right(self, racing: RunStore) -> None:
        run = racing.get_run("r1")
        assert racing.commit("r1", [result(run, n) for n in range(4)]) == (1, 3, (), ())

    def test_it_gives_up_in_the_end(self, racing: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commit, "_RACES", 1)
        run = racing.get_run("r1")
        with pytest.raises(StoreUnavailableError, match="keep changing"):
            racing.commit("r1", [result(run, n) for n in range(4)])


@pytest.mark.parametrize("size", [0, 10, 199, 200, 5000])
def test_what_is_compressed_comes_back_and_is_never_larger(size: int) -> None:
    for data in (b"ab" * size, bytes(range(256))[:size], b"\x28\xb5\x2f\xfd" + b"a" * size):
        packed = compress(data)
        assert decompress(packed) == data
        assert len(packed) <= max(len(data), 40)
    assert len(compress(b"ab" * 5000)) < 100


def test_a_store_nobody_closed_closes_itself(tmp_path: Path) -> None:
    store: Any = open_store(str(tmp_path / "runs.db"))
    store.runs()
    borrowed = store._engine.raw_connection()
    connection = borrowed.driver_connection
    borrowed.close()
    del store, borrowed
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


class TestWhoseFaultItIs:
    """Only data errors are errors of a trial; what else a database raises is an error of the store."""

    def test_a_row_that_sqlite_refuses_is_an_error_of_its_trial(self, tmp_path: Path, opened: Opener) -> None:
        store = opened(str(tmp_path / "runs.db"))
        run = store.create_run(run_record())
        _execute(
            store,
            "CREATE TRIGGER short BEFORE INSERT ON results WHEN NEW.outcome = 1 AND NEW.latency_ms = 102 "
            "BEGIN SELECT RAISE(ABORT, 'too short'); END",
        )
        committed = store.commit("r1", [result(run, n) for n in range(4)], samples(range(1)))
        assert committed[:3] == (4, 0, ())
        assert list(store.ordinals("r1", ("task_error",))) == [2]
        assert "too short" in committed.unstorable[0][1]

    def test_a_missing_table_is_an_error_of_the_store(self, database: str, opened: Opener) -> None:
        store = opened(database)
        run = store.create_run(run_record())
        _execute(store, "DROP TABLE details")
        with pytest.raises(StoreError, match="details"):
            store.commit("r1", [result(run, n) for n in range(4)], samples(range(1)))
        assert store.done("r1") == bytearray(5)

    def test_an_internal_error_of_postgresql_is_an_error_of_the_store(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        _execute(
            store,
            "CREATE FUNCTION fail() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'damaged' USING ERRCODE = 'XX002'; "
            "END $$ LANGUAGE plpgsql",
            "CREATE TRIGGER fail BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION fail()",
        )
        with pytest.raises(StoreError, match="damaged") as caught:
            store.commit("r1", [result(run, n) for n in range(4)], samples(range(1)))
        assert not isinstance(caught.value, StoreUnavailableError)

    def test_a_data_error_of_postgresql_is_an_error_of_its_trial(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        _execute(store, "ALTER TABLE results ADD CONSTRAINT short CHECK (outcome <> 1 OR latency_ms <> 102)")
        committed = store.commit("r1", [result(run, n) for n in range(4)], samples(range(1)))
        assert committed[:3] == (4, 0, ())
        assert [key for key, _ in committed.unstorable] == [result(run, 2).key]
        assert list(store.ordinals("r1", ("task_error",))) == [2]

    def test_a_trial_of_which_no_row_is_taken_is_refused(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        _execute(store, "ALTER TABLE results ADD CONSTRAINT short CHECK (ordinal <> 2)")
        committed = store.commit("r1", [result(run, n) for n in range(4)], samples(range(1)))
        assert committed[:2] == (3, 0)
        assert [key for key, _ in committed.refused] == [result(run, 2).key]
        assert committed.unstorable == ()

    def test_a_read_only_postgresql_is_waited_for(self, pg_url: str, opened: Opener) -> None:
        store = opened(pg_url)
        run = store.create_run(run_record())
        assert isinstance(store, SqlStore)
        with store._engine.connect() as connection:
            name = connection.engine.url.database
        _execute(store, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        store._engine.dispose()
        with pytest.raises(StoreUnavailableError, match="read-only"):
            store.commit("r1", [result(run, 0)], samples(range(1)))


def _execute(store: RunStore, *statements: str) -> None:
    assert isinstance(store, SqlStore)
    with store._engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def test_only_these_records_can_be_changed() -> None:
    assert changeable("store") == {"_StoredRun"}


def test_a_store_that_nobody_refers_to_is_closed_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    left = weakref.ref(store)
    gc.disable()
    try:
        del store
        assert left() is None
    finally:
        gc.enable()


def test_batches_of_an_older_store_need_an_upgrade(tmp_path: Path) -> None:
    open_store(tmp_path / "runs.db").close()
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = '4' WHERE name = 'schema'")
        connection.execute("DROP TABLE batch_intents")
    with pytest.raises(StoreError, match=r"has schema 4 and can only be read.*fairtrial store migrate"):
        batch_table(open_store(tmp_path / "runs.db")).intents("r1")
