"""A trial that crashes the process of a local run is found and stored as an error; other trials keep their results."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fairtrial import open_store
from fairtrial.store.notes import CrashNote

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

OPENED = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def needs_this_process(x):
    os.write(OPENED, f"{x}\\n".encode())  # A descriptor that no child has.
    if x == 13 and HOW == "state" and not os.path.exists(LOG + ".died-twice"):
        died = os.path.exists(LOG + ".died")
        open(LOG + (".died-twice" if died else ".died"), "w").close()
        os._exit(3)
    return x

task = {"alone": cannot_be_sent, "state": needs_this_process}.get(HOW, work)
suite = EvalSuite(
    "deadly", Dataset.of({i: i for i in range(40)}), task, exact_match,
    config=EvalConfig(max_concurrent=3, max_retries=0), version="1",
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
    assert how == "state" or "process" in (culprit.error or "")
    assert run.status == "finished"
    assert run.noted.crashes == CrashNote()
    outcomes = Counter[str](result.outcome for result in results)
    executed = [int(line) for line in log.read_text().split()]
    return deaths, executed, outcomes


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_trial_that_ends_its_process_twice_is_isolated_and_stored_as_an_error(tmp_path: Path, how: str) -> None:
    deaths, executed, outcomes = run_until_it_ends(tmp_path, how)
    assert (deaths, outcomes) == (2, {"scored": 39, "task_error": 1})
    assert executed.count(13) == 3  # Twice in a process that others shared, once in one of its own.


@pytest.mark.long
def test_a_suspect_that_cannot_be_isolated_is_executed_alone_and_blamed_after_three_deaths(tmp_path: Path) -> None:
    deaths, executed, outcomes = run_until_it_ends(tmp_path, "alone")
    assert (deaths, outcomes) == (5, {"scored": 39, "task_error": 1})
    assert executed.count(13) == 5


def test_an_innocent_suspect_that_fails_in_a_child_is_scored_in_the_process_of_the_run(tmp_path: Path) -> None:
    """Somebody else killed the process twice, and the task needs what only that process has opened."""
    deaths, _executed, outcomes = run_until_it_ends(tmp_path, "state")
    assert (deaths, outcomes) == (2, {"scored": 40})
