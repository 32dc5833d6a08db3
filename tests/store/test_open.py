from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import inspect
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fairtrial import Dataset, EvalReport, EvalSuite, exact_match
from fairtrial.errors import ConfigurationError, MissingExtraError, StoreError, StoreUnavailableError, StoreVersionError
from fairtrial.store import RunStore, default_store, engine, open_store, schema
from fairtrial.store import bulk as postgres_options
from fairtrial.store.batches import batch_table
from fairtrial.store.engine import translated
from fairtrial.store.memory import MemoryStore
from fairtrial.store.open import find_database, migrate_store
from fairtrial.store.sql import SqlStore
from tests.servers import PgBouncer, PostgresServer, free_port
from tests.store.build import large_snapshot, result, run_record, samples

type Opener = Callable[[str], RunStore]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


class TestAddresses:
    @pytest.mark.parametrize("form", ["sqlite:///{}/new/runs.db", "{}/new/runs.db", "{}/new/runs.sqlite"])
    def test_an_sqlite_file_is_created_with_its_folder(self, tmp_path: Path, opened: Opener, form: str) -> None:
        store = opened(form.format(tmp_path))
        assert isinstance(store, SqlStore)
        assert {path.parent.name for path in tmp_path.rglob("runs.*")} == {"new"}
        assert str(tmp_path) in repr(store)

    def test_a_relative_sqlite_url_is_relative(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opener
    ) -> None:
        monkeypatch.chdir(tmp_path)
        opened("sqlite:///odd name?#%41.db").create_run(run_record())
        assert (tmp_path / "odd name?#%41.db").is_file()

    def test_a_path_object_is_an_address(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "x.db")
        store.close()
        assert (tmp_path / "x.db").exists()

    @pytest.mark.parametrize("where", ["memory:", "memory://"])
    def test_memory_is_a_new_store_each_time(self, where: str) -> None:
        store = open_store(where)
        assert isinstance(store, MemoryStore)
        store.create_run(run_record())
        assert open_store(where).runs() == []
        assert repr(store) == "<MemoryStore: 1 runs>"

    @pytest.mark.parametrize("form", ["postgresql", "postgres", "postgresql+psycopg"])
    def test_a_postgresql_url_is_an_address(self, pg_url: str, opened: Opener, form: str) -> None:
        store = opened(pg_url.replace("postgresql", form, 1))
        assert store.create_run(run_record()).number == 1
        assert "store-test-password" not in repr(store)

    @pytest.mark.parametrize(
        "where",
        ["", "runs.txt", "mysql://u:secret@h/d", "sqlite:", "sqlite:///", "memory:x", "postgresql://u:secret@h:port/d"],
    )
    def test_anything_else_is_refused_without_repeating_it(self, where: str) -> None:
        with pytest.raises(ConfigurationError, match=r"invalid (store|database) URL") as raised:
            open_store(where)
        assert "secret" not in str(raised.value)

    def test_an_address_leads_to_a_file_a_database_or_nothing(self) -> None:
        assert find_database("memory:") is None
        assert find_database("sqlite:///runs.db") == find_database("runs.db") == Path("runs.db")
        assert find_database("postgres://db/evals") == "postgresql://db/evals"

    def test_no_server_at_all_is_unavailable(self) -> None:
        with pytest.raises(StoreUnavailableError) as raised:
            open_store(f"postgresql://u:very-secret-word@127.0.0.1:{free_port()}/d")
        assert "very-secret-word" not in str(raised.value)

    def test_postgresql_without_its_driver_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(MissingExtraError, match=r"fairtrial\[postgres\]"):
            open_store("postgresql://u:p@127.0.0.1/d")

    def test_runs_are_kept_in_the_current_folder_unless_told_otherwise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("FAIRTRIAL_STORE", raising=False)
        assert default_store() == os.path.join(".fairtrial", "runs.db")
        open_store().close()
        assert (tmp_path / ".fairtrial" / "runs.db").is_file()
        monkeypatch.setenv("FAIRTRIAL_STORE", "memory:")
        assert isinstance(open_store(), MemoryStore)

    def test_importing_fairtrial_and_its_store_loads_no_database(self) -> None:
        heavy = ("sqlalchemy", "backports", "psycopg", "pyarrow")
        code = f"import sys, fairtrial, fairtrial.store; print([m for m in {heavy} if m in sys.modules])"
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
        assert out.stdout == "[]\n"


class TestFiles:
    @pytest.mark.usefixtures("open_umask")
    def test_the_files_of_a_store_are_for_their_owner_alone(self, tmp_path: Path, opened: Opener) -> None:
        store = opened(str(tmp_path / "new" / "runs.db"))
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], samples([0]))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
        assert modes == {"runs.db": 0o600, "runs.db-wal": 0o600, "runs.db-shm": 0o600}
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700

    def test_a_store_keeps_what_it_has_when_it_is_opened_again(self, database: str, opened: Opener) -> None:
        store = opened(database)
        run = store.create_run(run_record())
        store.commit("r1", [result(run, 0)], samples([0]))
        store.close()
        assert list(opened(database).results("r1")) == [result(run, 0)]

    def test_a_folder_that_cannot_be_made_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot open the store"):
            open_store(tmp_path / "file" / "runs.db")

    def test_a_file_that_is_no_database_is_an_error_and_stays_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.db"
        path.write_text("my notes, which are quite precious to me\n" * 100)
        with pytest.raises(StoreError, match="not a database"):
            open_store(path)
        assert path.read_text().startswith("my notes")

    def test_a_new_file_that_another_process_prepares_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opener
    ) -> None:
        path = tmp_path / "runs.db"
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            waited: list[float] = []

            def wait(seconds: float) -> None:
                waited.append(seconds)
                if len(waited) == 3:
                    other.execute("COMMIT")

            other.execute("BEGIN EXCLUSIVE")
            monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=wait, monotonic=lambda: len(waited) / 64))
            monkeypatch.setattr(engine, "_BUSY_SECONDS", 3 / 64)
            opened(str(path)).create_run(run_record())
            assert waited == [0.01] * 3

    def test_a_new_file_is_not_waited_for_longer_than_for_a_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited: list[float] = []
        clock = SimpleNamespace(sleep=waited.append, monotonic=lambda: len(waited) / 64)
        with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            monkeypatch.setattr(engine, "time", clock)
            monkeypatch.setattr(engine, "_BUSY_SECONDS", 3 / 64)
            with pytest.raises(StoreUnavailableError, match="locked"):
                open_store(tmp_path / "runs.db")
        assert len(waited) == 4  # The time is not over while it ends.

    def test_a_locked_file_is_unavailable_rather_than_broken(self) -> None:
        with pytest.raises(StoreUnavailableError), translated():
            raise OperationalError("", {}, sqlite3.OperationalError("database is locked"))
        with pytest.raises(StoreError) as raised, translated():
            raise OperationalError("", {}, sqlite3.OperationalError("disk I/O error"))
        assert type(raised.value) is StoreError

    def test_running_out_of_connections_may_pass(self) -> None:
        with pytest.raises(StoreUnavailableError, match="too many are in use"), translated():
            raise PoolTimeoutError
        with pytest.raises(StoreError, match="the database reports an error"), translated():
            raise SQLAlchemyError("odd")


class TestVersions:
    def change(self, database: str, statement: str) -> None:
        if database.startswith("postgresql"):
            with psycopg.connect(database) as server:
                server.execute(statement.encode())
        else:
            with closing(sqlite3.connect(database)) as file, file:
                file.execute(statement)
            file.close()

    def test_a_store_of_a_newer_version_is_refused_politely(self, database: str) -> None:
        open_store(database).close()
        self.change(database, "UPDATE meta SET value = '7' WHERE name = 'schema'")
        with pytest.raises(StoreVersionError) as raised:
            open_store(database)
        message = str(raised.value)
        assert "schema 7" in message
        assert f"up to {schema.VERSION}" in message
        assert "pip install --upgrade fairtrial" in message
        with pytest.raises(StoreVersionError) as refused:
            migrate_store(database)
        assert "store-test-password" not in message + str(refused.value)

    @pytest.fixture
    def older(self, database: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
        """A store from before two columns and a table were added, and the id of its run."""
        store = open_store(database)
        run = store.create_run(run_record(repeats=1))
        store.commit(run.run_id, [result(run, 0), result(run, 2), result(run, 4, "timeout")], samples(range(3)))
        store.close()
        added = (schema.session_snapshots, schema.results.c.refused_calls, schema.runs.c.revision)
        monkeypatch.setitem(schema.ADDED, schema.VERSION, added)
        self.change(database, "DROP TABLE session_snapshots")
        self.change(database, "ALTER TABLE results DROP COLUMN refused_calls")
        self.change(database, "ALTER TABLE runs DROP COLUMN revision")
        self.change(database, f"UPDATE meta SET value = '{schema.VERSION - 1}' WHERE name = 'schema'")
        return database, run.run_id

    def test_an_older_store_is_read_without_being_changed(self, older: tuple[str, str]) -> None:
        database, run_id = older
        for _ in range(2):
            store = open_store(database)
            assert [(row.value, row.outcome) for row in store.scores(run_id, experiment="baseline")] == [
                (0.75, "scored"), (0.75, "scored"), (None, "timeout"),
            ]  # fmt: skip
            report = EvalReport(store, store.get_run(run_id))["baseline"]
            assert (report.pass_rate, report.pass_rate_all) == (1.0, 2 / 3)
            with pytest.raises(StoreVersionError, match="fairtrial store migrate"):
                store.update_run(run_id, status="running")
            store.close()
        assert migrate_store(database) == (schema.VERSION - 1, schema.VERSION)

    def test_a_migrated_store_reads_as_before_and_has_the_columns_of_a_new_one(self, older: tuple[str, str]) -> None:
        database, run_id = older
        assert migrate_store(database) == (schema.VERSION - 1, schema.VERSION)
        assert migrate_store(database) == (schema.VERSION, schema.VERSION)
        store = open_store(database)
        assert isinstance(store, SqlStore)
        assert [row.value for row in store.scores(run_id, experiment="baseline")] == [0.75, 0.75, None]
        store.update_run(run_id, notes={"seen": True})
        assert store.get_run(run_id).notes["seen"] is True
        found = inspect(store._engine)
        for table in schema.metadata.tables.values():
            assert {column["name"] for column in found.get_columns(table.name)} == set(table.c.keys())
        store.close()

    def test_a_store_of_the_first_release_gets_the_tables_of_batches(self, database: str) -> None:
        store = open_store(database)
        run = store.create_run(run_record(repeats=1))
        store.close()
        for table in ("batch_intents", "batch_requests", "received_spans"):
            self.change(database, f"DROP TABLE {table}")
        self.change(database, "UPDATE meta SET value = '4' WHERE name = 'schema'")
        older = open_store(database)
        assert older.get_run(run.run_id).run_id == run.run_id
        older.close()
        assert migrate_store(database) == (4, schema.VERSION)
        store = open_store(database)
        assert batch_table(store).intents(run.run_id) == []
        store.close()

    def test_a_store_of_the_first_release_gets_runs_with_segments(
        self, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: dict[str, list[bytes | None]] = {}
        place = tmp_path / "transcripts"
        for run_id in ("old", "new"):
            if run_id == "new":
                assert migrate_store(database) == (4, schema.VERSION)
            store = open_store(database, transcripts=place if run_id == "new" else None)
            run = store.create_run(run_record(run_id, repeats=1))
            kept[run_id] = [large_snapshot() for _ in range(3)]
            made = [result(run, at, snapshot=snapshot) for at, snapshot in enumerate(kept[run_id])]
            store.commit(run_id, made, samples(range(3)))
            store.close()
            if run_id == "old":
                for table in ("batch_intents", "batch_requests", "received_spans"):
                    self.change(database, f"DROP TABLE {table}")
                self.change(database, "UPDATE meta SET value = '4' WHERE name = 'schema'")
                older = open_store(database, transcripts=place)
                assert [older.snapshot("old", at) for at in range(3)] == kept["old"]
                with pytest.raises(StoreVersionError, match="fairtrial store migrate"):
                    older.create_run(run_record("early"))
                older.close()
        store = open_store(database)
        assert isinstance(store, SqlStore)
        for where in ({"old": None, "new": place.as_uri()}, {"old": place.as_uri(), "new": None}):
            assert {run.run_id: run.noted.transcripts for run in store.runs()} == where
            for run_id, snapshots in kept.items():
                assert [store.snapshot(run_id, at) for at in range(3)] == snapshots
                store.move_transcripts(run_id, None if where[run_id] else str(place))
        store.close()
        # The first release supports up to schema 4.
        monkeypatch.setattr(schema, "VERSION", 4)
        monkeypatch.setattr(schema, "ADDED", {})
        for use in (open_store, migrate_store):
            with pytest.raises(StoreVersionError, match="it has schema 6, this version supports up to 4"):
                use(database)

    def test_a_store_from_before_the_first_release_is_refused(self, database: str) -> None:
        open_store(database).close()
        self.change(database, f"UPDATE meta SET value = '{min(schema.ADDED) - 2}' WHERE name = 'schema'")
        for use in (open_store, migrate_store):
            with pytest.raises(StoreVersionError, match="before the first release"):
                use(database)

    def test_a_database_with_tables_of_the_same_names_is_left_alone(self, database: str) -> None:
        self.change(database, "CREATE TABLE runs (x TEXT)")
        with pytest.raises(StoreError, match="tables of other programs with the names runs"):
            open_store(database)

    def test_a_table_of_versions_that_is_not_ours_is_left_alone(self, database: str) -> None:
        self.change(database, "CREATE TABLE meta (name TEXT, value TEXT)")
        with pytest.raises(StoreError, match="not of a Fairtrial store"):
            open_store(database)

    def test_a_store_that_can_only_be_read_must_have_the_schema_already(self, tmp_path: Path) -> None:
        sqlite3.connect(tmp_path / "empty.db").close()
        with pytest.raises(StoreError, match="not a Fairtrial store"):
            SqlStore.sqlite(tmp_path / "empty.db", read_only=True)
        with pytest.raises(StoreError, match="there is no store"):
            SqlStore.sqlite(tmp_path / "absent.db", read_only=True)

    def test_a_store_opened_to_be_read_cannot_be_written(self, tmp_path: Path) -> None:
        open_store(tmp_path / "runs.db").close()
        store = SqlStore.sqlite(tmp_path / "runs.db", read_only=True)
        try:
            assert store.runs() == []
            with pytest.raises(StoreError, match="is read-only here"):
                store.create_run(run_record())
        finally:
            store.close()


class TestTimeLimits:
    """Every connection to PostgreSQL has time limits, and the URL can set others."""

    def test_a_connection_has_time_limits(self, pg_url: str, opened: Callable[[str], RunStore]) -> None:
        store = opened(pg_url)
        assert isinstance(store, SqlStore)
        with store._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            settings = driver.info.get_parameters()
            timeout = connection.exec_driver_sql("SHOW statement_timeout").scalar()
        assert timeout == "5min"
        limits = {"connect_timeout": "10", "keepalives_idle": "15", "keepalives_interval": "5"}
        limits |= {"keepalives_count": "3", "tcp_user_timeout": "30000"}
        assert {name: settings.get(name) for name in limits} == limits

    def test_parameters_of_the_url_come_first(self, pg_url: str, opened: Callable[[str], RunStore]) -> None:
        mark = "&" if "?" in pg_url else "?"
        store = opened(f"{pg_url}{mark}tcp_user_timeout=1000&options=-c%20statement_timeout%3D7000")
        assert isinstance(store, SqlStore)
        with store._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            assert driver.info.get_parameters()["tcp_user_timeout"] == "1000"
            assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "7s"


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("postgresql://u:p@db.example/evals", True),
        ("postgresql://u:p@10.0.0.5/evals", True),
        ("postgresql://u:p@db.example/evals?sslmode=verify-full", False),
        ("postgresql://u:p@db.example/evals?sslmode=disable", False),
        ("postgresql://u:p@localhost/evals", False),
        ("postgresql://u:p@127.0.0.1:5433/evals", False),
        ("postgresql://u@/evals?host=/var/run/postgresql", False),
    ],
)
def test_a_connection_to_another_host_without_sslmode_is_warned_about_once(
    url: str, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_options, "_warned", set())
    monkeypatch.delenv("PGSSLMODE", raising=False)
    for _ in range(2):
        engine.postgres_engine(url).dispose()
    messages = [record.getMessage() for record in caplog.records if "sslmode" in record.getMessage()]
    assert len(messages) == warned
    assert not warned or "?sslmode=verify-full" in messages[0]


class TestPgBouncer:
    def test_a_run_is_stored_behind_one_in_transaction_mode(self, pg_server: PostgresServer) -> None:
        url = pg_server.new_database()
        with PgBouncer(pg_server) as pooler, closing(open_store(f"{pooler.url(url)}?pgbouncer=true")) as store:
            suite = EvalSuite("pooled", Dataset.of({n: n for n in range(40)}, name="n"), lambda n: n, exact_match)
            reports = [suite.run_sync(store=store, resume="never") for _ in range(8)]
            assert isinstance(store, SqlStore)
            with store._engine.connect() as connection:  # A prepared statement would be on somebody else's connection.
                assert getattr(connection.connection.driver_connection, "prepare_threshold", 0) is None
            assert [sum(1 for _ in store.results(report.run_id)) for report in reports] == [40] * 8

    def test_an_address_without_the_parameter_is_explained(self, pg_server: PostgresServer) -> None:
        url = pg_server.new_database()
        with PgBouncer(pg_server) as pooler, pytest.raises(ConfigurationError, match=r"add \?pgbouncer=true"):
            open_store(pooler.url(url))
        with pytest.raises(ConfigurationError, match="must be true or false"):
            open_store(f"{url}?pgbouncer=maybe")
