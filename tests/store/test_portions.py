"""How much a store reads, writes, deletes and remembers at once, and how long it waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sqlalchemy import Engine, event

from fairtrial.errors import StoreError, StoreUnavailableError
from fairtrial.store import RunStore, load_run, open_store, save_run
from fairtrial.store.column_cache import ArrayPlace
from fairtrial.store.compress import compress, decompress
from fairtrial.store.sql import SqlStore
from tests.store.build import result, run_record, samples

type Opener = Callable[[str], RunStore]


@pytest.fixture
def store(tmp_path: Path, opened: Opener) -> SqlStore:
    made = opened(str(tmp_path / "runs.db"))
    assert isinstance(made, SqlStore)
    return made


@contextmanager
def statements(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    """Record the statements that a database gets, with their values."""
    seen: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_rest: Any) -> None:
        seen.append((statement, values))

    event.listen(engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine, "before_cursor_execute", note)


def limits(seen: list[tuple[str, Any]]) -> list[int]:
    """The rows that each statement asks for at most."""
    return [values[-2] for statement, values in seen if re.search(r"LIMIT \? OFFSET \?", statement)]


def test_results_are_read_in_pages(store: SqlStore) -> None:
    run = store.create_run(run_record(size=300, experiments=("baseline",), repeats=1))
    store.commit("r1", [result(run, place) for place in range(257)], samples(range(257)))
    with statements(store._engine) as seen:
        assert len(list(store.results("r1"))) == 257
        assert len(list(store.samples("r1"))) == 257
    assert limits(seen) == [256] * 4
    with statements(store._engine) as seen:
        assert len(list(store.scores("r1", experiment="baseline"))) == 257
        assert len(list(store.ordinals("r1", ("scored",)))) == 257
    assert limits(seen) == [5_000] * 2
    with statements(store._engine) as seen:
        assert len(store.previews("r1", range(300))) == 257
        assert len(list(store.results("r1", sample_ids=[f"s{place}" for place in range(501)]))) == 257
    listed = [found.count("?") for statement, _ in seen for found in re.findall(r"IN \(([?, ]+)\)", statement)]
    assert listed == [256, 44, 500, 1, 256, 256, 1]


def test_a_large_plan_is_looked_at_in_blocks(store: SqlStore) -> None:
    run = store.create_run(run_record(size=70_000, experiments=("baseline",), repeats=1))
    store.commit("r1", [result(run, 65_535), result(run, 65_536)])
    with statements(store._engine) as seen:
        done = store.done("r1")
    assert [values[1:3] for statement, values in seen if "count(*)" in statement] == [(0, 65_536), (65_536, 70_000)]
    assert [place for place, bits in enumerate(done) if bits] == [8_191, 8_192]
    assert (done[8_191], done[8_192]) == (128, 1)


def test_a_run_is_deleted_in_short_transactions(store: SqlStore) -> None:
    run = store.create_run(run_record(size=70_000, experiments=("baseline",), repeats=1))
    store.commit("r1", [result(run, place) for place in (5, 10_004, 10_005, 40_000)])
    with statements(store._engine) as seen:
        store.delete_run("r1")
    deleted = [values for statement, values in seen if statement.startswith("DELETE FROM results")]
    assert deleted == [(1, 5, 10_005), (1, 10_005, 20_005), (1, 40_000, 50_000)]


def test_a_run_is_copied_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory:")
    run = store.create_run(run_record(size=300, experiments=("baseline",), repeats=1))
    store.commit("r1", [result(run, place) for place in range(257)], samples(range(258)))
    commit, sizes = SqlStore.commit, []

    def note(self: SqlStore, run_id: str, results: Any, samples: Any = None, **options: Any) -> Any:
        sizes.append((len(results), len(samples or {})))
        return commit(self, run_id, results, samples or {}, **options)

    monkeypatch.setattr(SqlStore, "commit", note)
    save_run(store, "r1", tmp_path / "saved.db")
    assert sizes == [(0, 256), (0, 2), (256, 0), (1, 0)]


def test_an_error_names_the_first_five_runs(store: SqlStore, tmp_path: Path) -> None:
    for number in range(5):
        store.create_run(run_record(f"r{number}"))
    with pytest.raises(StoreError, match=r"it has (support@\d, ){4}support@1\nname one"):
        load_run(tmp_path / "runs.db")
    for number in range(5, 7):
        store.create_run(run_record(f"r{number}"))
    with pytest.raises(StoreError, match=r"it has support@7, (support@\d, ){3}support@3 and 2 more\nname one"):
        load_run(tmp_path / "runs.db")


def samples_written(store: SqlStore, run_id: str, place: int) -> bool:
    """Whether a commit of this sample writes it: what is known to be stored is not written again."""
    with statements(store._engine) as seen:
        store.commit(run_id, (), samples([place]))
    return any(statement.startswith("INSERT INTO samples") for statement, _ in seen)


def test_five_thousand_samples_are_known_to_be_stored(store: SqlStore) -> None:
    store.create_run(run_record(size=6_000))
    store.commit("r1", (), samples(range(4_999)))
    store.commit("r1", (), samples([4_999]))
    assert not samples_written(store, "r1", 17)
    assert samples_written(store, "r1", 0)  # There were too many to add another one.
    assert not samples_written(store, "r1", 17)


def test_the_samples_of_eight_datasets_are_known(store: SqlStore) -> None:
    for number in range(9):
        store.create_run(run_record(f"r{number}", dataset_fingerprint=f"{number}" * 32))
        store.commit(f"r{number}", (), samples([0]))
    assert not samples_written(store, "r1", 0)
    assert samples_written(store, "r0", 0)


def test_a_store_keeps_four_connections_and_has_at_most_thirty_two(store: SqlStore) -> None:
    pool: Any = store._engine.pool
    pool._timeout = 0.01
    with ExitStack() as taken:
        for _ in range(32):
            taken.enter_context(store._engine.connect())
        with pytest.raises(StoreUnavailableError, match="no free connection"):
            store.get_run("r1")
    assert pool.checkedin() == 4


def test_a_connection_to_a_file_waits_half_a_minute_for_its_lock(store: SqlStore) -> None:
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1


@pytest.mark.postgres
def test_writers_have_less_time_than_readers(pg_url: str, opened: Opener) -> None:
    store = opened(pg_url)
    assert isinstance(store, SqlStore)
    found = []
    for use in (store._read, store._write):
        with use() as connection:
            driver: Any = connection.connection.driver_connection
            names = ("statement_timeout", "idle_in_transaction_session_timeout")
            limits = [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]
            found.append((*limits, driver.answer_seconds))
    assert found == [("5min", "0", 310.0), ("1min", "1min", 70.0)]
    assert store._engine.pool.size() == 4  # type: ignore[attr-defined]


def test_what_is_worth_it_is_compressed_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    words = b"the same words, " * 20
    assert compress(words[:199]) == words[:199]
    assert compress(words[:200]) == zstandard.ZstdCompressor(level=1).compress(words[:200])
    packed = compress(b"x" * 269)
    monkeypatch.setenv("FAIRTRIAL_FILE_LIMITS", "0.000001")
    assert decompress(compress(b"x" * 268)) == b"x" * 268
    with pytest.raises(StoreError, match="a stored transcript must have at most 268 bytes"):
        decompress(packed)


@pytest.mark.parametrize(
    ("dtype", "size"), [("i1", 1), ("u1", 1), ("u2", 2), ("i4", 4), ("u4", 4), ("i8", 8), ("f8", 8)]
)
def test_an_array_of_a_column_file_takes_its_bytes(dtype: str, size: int) -> None:
    assert ArrayPlace(dtype, 64, 3, 0).size == 3 * size
