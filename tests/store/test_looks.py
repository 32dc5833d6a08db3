"""The ledger of looks: no number is used twice, even after a crash or with several writers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fairtrial.data.splits import SplitOrigin
from fairtrial.errors import StoreError
from fairtrial.store import RunStore, load_run, save_run
from fairtrial.store.notes import write_notes
from fairtrial.store.schema import meta
from fairtrial.store.sql import SqlStore
from tests.store.build import result, run_record

SHARED = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
"""The stores that several processes can open."""

_RECORDER = """
import sys
from fairtrial.store import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for place in range(15):
    known = store.record_looks("f0", [f"shared{place}", f"{sys.argv[2]}-{place}"])
    assert f"shared{place}" in known
store.close()
"""

# Exits inside the transaction, after the first of two pairs was inserted.
_CRASHING = """
import os, sys
from fairtrial.store import looks, open_store
def one_of_two(known, pairs):
    yield pairs[0]
    os._exit(9)
looks.new_looks = one_of_two
open_store(sys.argv[1]).record_looks("f0", ["a", "b"])
"""


def test_a_pair_keeps_its_number_and_each_split_has_its_own(store: RunStore) -> None:
    assert list(store.looks("f0")) == []
    assert list(store.record_looks("f0", ["a"])) == ["a"]
    assert list(store.record_looks("f0", ["b", "a", "b", "c"])) == ["a", "b", "c"]
    assert list(store.record_looks("f", ["c"])) == ["c"]
    assert list(store.record_looks("f%", ["d"])) == ["d"]
    many = [f"p{number}" for number in range(12)]
    assert list(store.record_looks("f0", many)) == list(store.looks("f0")) == ["a", "b", "c", *many]
    assert list(store.looks("f")) == ["c"]


def test_looks_stay_when_a_run_is_deleted_and_the_store_is_opened_again(
    url: str, opened: Callable[[str], RunStore]
) -> None:
    store = opened(url)
    run = store.create_run(run_record())
    store.record_looks("f0", ["a"])
    store.delete_run(run.run_id)
    assert list((store if url == "memory:" else opened(url)).looks("f0")) == ["a"]


def test_a_closed_store_has_no_looks(store: RunStore) -> None:
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.looks("f0")
    with pytest.raises(StoreError, match="closed"):
        store.record_looks("f0", ["a"])


@SHARED
def test_processes_that_record_at_once_lose_and_repeat_no_look(url: str, opened: Callable[[str], RunStore]) -> None:
    store = opened(url)
    command = [sys.executable, "-c", _RECORDER, url]
    processes = [
        subprocess.Popen([*command, str(who)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for who in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=50)
        assert process.returncode == 0
    known = list(store.looks("f0"))
    assert len(known) == 60
    assert set(known) == {f"{who}-{place}" for who in ("0", "1", "2") for place in range(15)} | {
        f"shared{place}" for place in range(15)
    }


@SHARED
def test_a_crash_in_the_middle_records_nothing_and_the_next_try_counts_once(
    url: str, opened: Callable[[str], RunStore]
) -> None:
    store = opened(url)
    assert subprocess.run([sys.executable, "-c", _CRASHING, url], check=False, timeout=50).returncode == 9
    assert list(store.looks("f0")) == []
    assert list(store.record_looks("f0", ["a", "b"])) == ["a", "b"]


def test_a_saved_run_takes_the_looks_at_its_split_along(store: RunStore, tmp_path: Path) -> None:
    run = store.create_run(run_record(size=1, notes=write_notes(split=SplitOrigin("test", "f0", 1, "f0", 1))))
    store.commit(run.run_id, [result(run, 0)])
    store.record_looks("f0", ["a", "b"])
    save_run(store, run.run_id, tmp_path / "saved.db")
    saved, _ = load_run(tmp_path / "saved.db")
    assert list(saved.looks("f0")) == ["a", "b"]
    saved.close()


def test_rows_of_other_programs_are_no_looks(tmp_path: Path) -> None:
    store = SqlStore.sqlite(tmp_path / "runs.db")
    store.record_looks("f0", ["a"])
    with store._write() as connection:
        connection.execute(meta.insert().values(name="look:f0:x", value="b"))
    assert store.looks("f0") == ["a"]
    store.close()
