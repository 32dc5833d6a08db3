"""A store with thousands of runs: its lists take as long as what they show, not as long as what there is."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fairtrial import open_store
from tests.viewer.conftest import Viewed, open_session, record, start_server, support_samples, trial

RUNS = 3_000
TRIALS = 10
SUITES = 30
LISTS = (("runs", "suite7"), ("store", "stats"), ("store", "prune", "--older-than", "1h", "--dry-run"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that the store made, and copies of its rows."""
    made = tmp_path_factory.mktemp("many") / "runs.db"
    store = open_store(made)
    run = store.create_run(replace(record("run1", "suite1", TRIALS // 2), status="finished", finished_at=2000.0))
    store.commit(run.run_id, [trial(run, number) for number in range(TRIALS)], support_samples(TRIALS // 2))
    store.close()
    counted = f"WITH RECURSIVE count(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM count WHERE n < {RUNS}) "
    changed = {
        "id": "n",
        "run_id": "'run' || n",
        "suite": f"'suite' || (n % {SUITES})",
        "number": f"n / {SUITES} + 2",
        "run": "n",
        "created_at": "1000.0 + n",
    }
    with closing(sqlite3.connect(made)) as connection, connection:
        for table in ("runs", "results"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(changed.get(name, f"old.{name}") for name in names)
            connection.execute(f"INSERT INTO {table} {counted} SELECT {values} FROM count, {table} AS old")
    return made


@pytest.fixture(scope="module")
def many(path: Path) -> Iterator[Viewed]:
    server, thread = start_server(path)
    store = open_store(path)
    yield Viewed(server, store, open_session(server))
    store.close()
    server.stop()
    thread.join(60)


@pytest.mark.parametrize("words", LISTS, ids=lambda words: " ".join(words[:2]))
def test_commands_list_them_within_seconds(path: Path, words: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", "fairtrial.cli", *words, "--store", str(path), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 5
    assert ("suite7" if "prune" not in words else f'"results": {RUNS * TRIALS},') in done.stdout


def test_the_viewer_lists_them_within_seconds(many: Viewed) -> None:
    started = time.process_time()
    answers = [many.get(), many.get("?q=suite7"), many.get("suite7@3")]
    assert time.process_time() - started < 5
    assert [answer.status for answer in answers] == [200] * 3
    assert all("suite7" in answer.text for answer in answers)
