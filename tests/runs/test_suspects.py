"""A trial that kills the process of a local run is found, stored as an error, and costs no other trial its result."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fairtrial import open_store
from fairtrial.runs.suspects import CrashNote

SCRIPT = """
import os, signal, socket, sys
from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match, open_store

LOG, STORE, HOW = sys.argv[1:4]
CONNECTION = socket.socket()

def work(x):
    with open(LOG, "a") as file:
        file.write(f"{x}\\n")
    if x == 13:
        if HOW == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return x

def cannot_be_sent(x):
    return work(x) if CONNECTION else None

task = cannot_be_sent if HOW == "alone" else work
suite = EvalSuite(
    "deadly", Dataset.of({i: i for i in range(40)}), task, exact_match,
    config=EvalConfig(max_concurrent=5, max_retries=0), version="1",
)
report = suite.run_sync(store=open_store(STORE))
print(report.run.status)
"""


def run_until_it_ends(folder: Path, how: str) -> tuple[int, list[int], Counter[str]]:
    """Start the script again and again, as a person would; returns how often it died."""
    (folder / "script.py").write_text(SCRIPT)
    log, store = folder / "log", f"sqlite:///{folder}/runs.db"
    deaths = 0
    while True:
        done = subprocess.run(
            [sys.executable, "script.py", str(log), store, how],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode == 0:
            break
        assert done.returncode in (3, -9), done.stderr
        deaths += 1
        assert deaths < 6
    opened = open_store(store)
    try:
        (run,) = opened.runs(suite="deadly")
        results = list(opened.results(run.run_id))
    finally:
        opened.close()
    culprit = next(result for result in results if result.sample_id == results[13].sample_id)
    assert "process" in (culprit.error or "")
    assert run.status == "finished"
    assert CrashNote.of(run.notes) == CrashNote()
    outcomes = Counter[str](result.outcome for result in results)
    executed = [int(line) for line in log.read_text().split()]
    return deaths, executed, outcomes


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_trial_that_ends_its_process_twice_is_isolated_and_stored_as_an_error(tmp_path: Path, how: str) -> None:
    deaths, executed, outcomes = run_until_it_ends(tmp_path, how)
    assert (deaths, outcomes) == (2, {"scored": 39, "task_error": 1})
    assert executed.count(13) == 3  # Twice in a process that others shared, once in one of its own.


def test_a_suspect_that_cannot_be_isolated_is_executed_alone_and_convicted_by_the_next_death(tmp_path: Path) -> None:
    deaths, executed, outcomes = run_until_it_ends(tmp_path, "alone")
    assert (deaths, outcomes) == (3, {"scored": 39, "task_error": 1})
    assert executed.count(13) == 3


def test_a_note_that_is_none_is_read_as_no_crashes() -> None:
    assert CrashNote.of({}) == CrashNote.of({"crashes": "x"}) == CrashNote.of({"crashes": [1, "a", 2]}) == CrashNote()
    assert CrashNote.of(CrashNote(2, 7, 3).to_notes()) == CrashNote(2, 7, 3)
