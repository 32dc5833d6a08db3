"""What a store of rows answers about a run in a fraction of the time of its results, and the sessions that it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, text

from fairtrial import TokenUsage, open_store
from fairtrial.errors import StoreError
from fairtrial.store import Committed, RunStore
from fairtrial.store.commit import RunState
from fairtrial.store.rows import EXTRA_USAGE
from fairtrial.store.sql import SqlStore
from tests.store.build import result, run_record, samples


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, opened: Callable[[str], RunStore]) -> SqlStore:
    folder = request.getfixturevalue("tmp_path")
    url = f"sqlite:///{folder / 'runs.db'}" if request.param == "sqlite" else str(request.getfixturevalue("pg_url"))
    made = opened(url)
    assert isinstance(made, SqlStore)
    return made


def test_progress_and_blocks_of_a_run(store: SqlStore) -> None:
    run = store.create_run(run_record())  # 10 samples, 2 experiments, 2 repeats: 40 trials.
    assert (store.highest_ordinal("r1"), store.highest_sample("r1")) == (-1, -1)
    assert store.block_states("r1", 8, 0) == ({}, -1)
    assert tuple(store.progress("r1")) == (0, 0, 0)
    kept = [result(run, 0), result(run, 3, "task_error"), result(run, 9, attempt=2), result(run, 30)]
    store.commit("r1", kept, samples([0, 2, 7]))
    stored, errors, tokens = store.progress("r1")
    assert (stored, errors, tokens) == (4, 1, sum(one.usage.input_tokens + one.usage.output_tokens for one in kept))
    assert store.highest_ordinal("r1") == 30
    blocks, highest = store.block_states("r1", 8, 0)
    assert highest == 30
    assert {place: tuple(block) for place, block in blocks.items()} == {0: (2, 1, 2), 1: (1, 1, 2), 3: (1, 1, 1)}
    assert list(store.block_states("r1", 8, 1)[0]) == [1, 3]
    assert list(store.block_states("r1", 31, 0)[0]) == [0]
    assert list(store.block_states("r1", 30, 0)[0]) == [0, 1]
    known, complete = store.sample_state("r1")
    assert (known, complete) == (3, 3)
    assert store.highest_sample("r1") == 7
    assert [row[0] for row in store.sample_rows("r1", 0, 7)] == [0, 2]
    assert [row[0] for row in store.sample_rows("r1", 1, 8)] == [2, 7]
    assert store.sample_texts("r1", 3, 7) is None
    assert store.result_numbers("r1", 10, 30) is None
    assert store.result_numbers("r1", 9, 10) is not None


def test_sessions_are_replaced_expire_and_are_deleted(store: SqlStore) -> None:
    assert store.load_session("a") is None
    store.save_session("a", b"one")
    store.save_session("a", b"two")
    store.save_session("b", b"three")
    assert (store.load_session("a"), store.load_session("b")) == (b"two", b"three")
    store.delete_session("b")
    assert (store.load_session("a"), store.load_session("b")) == (b"two", None)
    store.delete_session("b")
    store.save_session("c", b"four", delete_before=0.0)
    assert store.load_session("a") == b"two"
    store.save_session("d", b"five", delete_before=time.time() + 60)
    assert (store.load_session("a"), store.load_session("c"), store.load_session("d")) == (None, None, b"five")


def test_another_connection_is_known_by_what_it_sees(pg_url: str, opened: Callable[[str], RunStore]) -> None:
    store = opened(pg_url)
    assert isinstance(store, SqlStore)

    def look(key: int) -> tuple[bool, int | None]:
        with psycopg.connect(pg_url, autocommit=True) as connection:
            free, table = connection.execute(
                "SELECT pg_try_advisory_xact_lock(%s), to_regclass('runs')::oid::bigint", [key]
            ).fetchone() or (True, None)
            return not free, table

    assert store.is_database_of(look)
    assert not store.is_database_of(lambda key: (False, look(key)[1]))
    assert not store.is_database_of(lambda key: (True, 1))
    keys: list[int] = []

    def remember(key: int) -> tuple[bool, int | None]:
        keys.append(key)
        return True, 0

    assert not store.is_database_of(remember)
    assert keys[0] < 1 << 62


def test_a_store_in_a_file_is_no_database_of_a_queue(
    tmp_path_factory: pytest.TempPathFactory, opened: Callable[[str], RunStore]
) -> None:
    store = opened(f"sqlite:///{tmp_path_factory.mktemp('store') / 'runs.db'}")
    assert isinstance(store, SqlStore)
    assert not store.is_database_of(lambda _key: (True, None))


def test_which_of_some_trials_are_stored(pg_url: str, opened: Callable[[str], RunStore]) -> None:
    store = opened(pg_url)
    assert isinstance(store, SqlStore)
    run = store.create_run(run_record())
    store.commit("r1", [result(run, 5), result(run, 2), result(run, 7, "not_run")], samples([0, 1]))
    assert store.stored_among("r1", [7, 5, 2, 9]) == [2, 5]
    assert store.stored_among("r1", []) == []


@pytest.mark.parametrize("name", [*EXTRA_USAGE, "unknown_endings"])
def test_a_number_that_most_runs_do_not_have_is_added_up_alone(name: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    run = store.create_run(run_record())
    usage, plain = TokenUsage(10, 5), result(run, 0)
    number: dict[str, Any] = {name: 3}
    if name == "unknown_endings":
        given = replace(plain, usage=usage, unknown_endings={"weird": 3})
    elif hasattr(usage, name):
        given = replace(plain, usage=replace(usage, **number))
    else:
        given = replace(plain, usage=usage, **number)
    store.commit("r1", [given], samples([0]))
    (totals,) = (found for found in store.totals("r1") if sum(found.outcomes.values()))
    counted = totals.unknown_endings.get("weird", 0) if name == "unknown_endings" else getattr(totals, name)
    assert counted == 3
    (grouped,) = (found for _, found in store.group_totals("r1", "topic"))
    assert grouped == totals
    store.close()


class _Companion:
    """Changes and checks of a caller, in the transaction of a commit."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.calls: list[object] = []

    def begin(self, connection: Connection) -> None:
        stored = connection.execute(text("SELECT count(*) FROM results")).scalar_one()
        self.calls.append(("begin", stored))
        connection.execute(text("INSERT INTO meta (name, value) VALUES ('companion', 'was here')"))

    def check(self, connection: Connection, committed: Committed, run: RunState) -> None:
        stored = connection.execute(text("SELECT count(*) FROM results")).scalar_one()
        self.calls.append(("check", stored, committed.new, run.status, run.owner, run.notes.stored["seen"]))
        if self.refusal is not None:
            raise self.refusal


def _companions(store: SqlStore) -> int:
    with store._engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM meta WHERE name = 'companion'")).scalar_one())


def test_other_changes_are_committed_with_the_results_or_not_at_all(store: SqlStore) -> None:
    run = store.create_run(run_record(notes={"seen": 3}))
    store.acquire_run("r1", "host:1", store.run_owner("r1"))
    refusing = _Companion(StoreError("the lease is lost"))
    with pytest.raises(StoreError, match="the lease is lost"):
        store.commit_with("r1", [result(run, 0), result(run, 4)], samples([0, 1]), refusing)
    assert refusing.calls == [("begin", 0), ("check", 2, 2, "running", "host:1", 3)]
    assert (list(store.results("r1")), _companions(store)) == ([], 0)
    companion = _Companion()
    assert store.commit_with("r1", [result(run, 0), result(run, 4)], samples([0, 1]), companion).new == 2
    assert companion.calls == refusing.calls
    assert ([one.ordinal for one in store.results("r1")], _companions(store)) == ([0, 4], 1)


def test_a_store_beside_a_queue_is_opened_but_never_created(pg_url: str, opened: Callable[[str], RunStore]) -> None:
    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(pg_url)

    with pytest.raises(StoreError, match="the queue's database is not a Fairtrial store"):
        SqlStore.beside_queue(connect, "the queue's database")
    opened(pg_url).create_run(run_record())
    beside = SqlStore.beside_queue(connect, "the queue's database")
    try:
        assert beside.get_run("r1").suite == "support"
        beside.update_run("r1", notes={"seen": True})
        assert beside.get_run("r1").notes["seen"] is True
    finally:
        beside.close()
