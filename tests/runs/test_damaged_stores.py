"""SQLite files that are damaged, cut off or full in the middle of a run: no run is finished unless it is stored."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match, open_store
from fairtrial.errors import StoreError

TRIALS = 60


def the_suite(happen: Callable[[], None] = lambda: None, at: int = -1) -> EvalSuite:
    async def same(number: int) -> int:
        if number == at:
            happen()
        return number

    data = Dataset.of({number: number for number in range(TRIALS)}, name="numbers")
    return EvalSuite("damaged", data, same, exact_match, version="1", config=EvalConfig(max_concurrent=1))


def stored(path: Path) -> int:
    store = open_store(str(path))
    try:
        return sum(len(list(store.results(run.run_id))) for run in store.runs())
    finally:
        store.close()


@pytest.mark.parametrize("damage", ["file truncated", "log deleted"])
def test_a_run_is_not_finished_unless_its_results_can_be_read_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "runs.db"

    def happen() -> None:
        if damage == "file truncated":
            os.truncate(path, 3 * 4096)
        else:
            for name in ("runs.db-wal", "runs.db-shm"):
                (tmp_path / name).unlink(missing_ok=True)

    store = open_store(str(path))
    try:
        status = the_suite(happen, at=20).run_sync(store=store).status
    except StoreError:
        return
    finally:
        store.close()
    assert (status, stored(path)) == ("finished", TRIALS)


def test_results_whose_log_was_lost_with_the_process_are_executed_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    process = os.fork()
    if process == 0:  # A process that ends without closing anything, as with a power cut.
        try:
            the_suite(lambda: os._exit(9), at=40).run_sync(store=str(path))
        finally:  # Whatever happens, it does not go on as a second process of the tests.
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    for name in ("runs.db-wal", "runs.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    report = the_suite().run_sync(store=str(path))
    assert (report.status, report.successful, stored(path)) == ("finished", TRIALS, TRIALS)


def test_a_damaged_page_ends_a_resumed_run_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    data = Dataset.of({number: number for number in range(TRIALS)}, name="numbers")
    failing = EvalSuite(
        "damaged",
        data,
        lambda number: number if number < 40 else 1 / 0,
        exact_match,
        version="1",
        config=EvalConfig(max_concurrent=1, stop_on_error=True),
    )
    assert failing.run_sync(store=str(path)).status == "interrupted"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'results'").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 64)
    with pytest.raises(StoreError, match="malformed"):
        the_suite().run_sync(store=str(path))


FULL = textwrap.dedent(
    """
    import logging, os, subprocess, sys
    import anyio
    from fairtrial import Dataset, EvalConfig, EvalSuite
    from fairtrial.errors import StoreError

    folder, waits = sys.argv[1], sys.argv[2] == "waits"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    executed, warnings = [], []

    def make_room():
        subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)

    class Watch(logging.Handler):
        def emit(self, record):
            if "disk is full" in record.getMessage():
                warnings.append(record.getMessage())
                waits and make_room()

    logging.getLogger("fairtrial").addHandler(Watch())

    async def large(number):
        executed.append(number)
        await anyio.sleep(0.03)
        return os.urandom(5000).hex()

    data = Dataset.of({number: number for number in range(300)}, name="numbers")
    config = EvalConfig(max_concurrent=5)
    suite = EvalSuite("full", data, large, lambda output, expected: True, version="1", config=config)
    try:
        report = suite.run_sync(store=f"{folder}/runs.db")
        print(report.status, report.total, len(executed))
    except StoreError as error:
        print(error)
    print(*warnings[:1])
    make_room()
    before = len(executed)
    report = suite.run_sync(store=f"{folder}/runs.db")
    print(report.status, report.total, len(executed) < 300 + before)
    """
)


def run_on_a_small_disk(tmp_path: Path, mode: str, patience: int) -> list[str]:
    folder = tmp_path / "small"
    folder.mkdir()
    alone = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*alone, sys.executable, "-c", FULL, str(folder), mode],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "FAIRTRIAL_PATIENCE_SECONDS": str(patience)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_is_waited_for_and_costs_no_result(tmp_path: Path) -> None:
    verdict, warning, _ = run_on_a_small_disk(tmp_path, "waits", 60)
    assert verdict == "finished 300 300"
    assert "committing results of run" in warning
    assert "; trying again for" in warning


def test_a_full_disk_ends_a_run_with_a_sentence_and_the_run_is_resumed_when_there_is_room(tmp_path: Path) -> None:
    sentence, _, verdict = run_on_a_small_disk(tmp_path, "gives up", 1)
    assert "the disk of the store is full" in sentence
    assert verdict == "finished 300 True"


@pytest.mark.postgres
def test_a_full_disk_of_postgresql_is_waited_for(pg_url: str) -> None:
    executed: list[int] = []
    with psycopg.connect(pg_url, autocommit=True) as admin, closing(open_store(pg_url)) as store:
        admin.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'No space left on device' "
            "USING ERRCODE = 'disk_full'; END $$ LANGUAGE plpgsql"
        )
        admin.execute("CREATE TRIGGER full_disk BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION full_disk()")

        def make_room(record: logging.LogRecord) -> bool:
            if "the disk of the store is full: No space left on device" in record.getMessage():
                admin.execute("DROP TRIGGER IF EXISTS full_disk ON results")
            return True

        logger = logging.getLogger("fairtrial.runs")
        logger.addFilter(make_room)
        try:
            report = the_suite(lambda: executed.append(0), at=0).run_sync(store=store)
        finally:
            logger.removeFilter(make_room)
        assert (report.status, report.total, executed) == ("finished", TRIALS, [0])
