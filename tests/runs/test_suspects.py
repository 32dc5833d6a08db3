"""A trial that crashes the process of a local run is found and stored as an error; other trials keep their results."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fairtrial import EvalResult, open_store
from fairtrial.store.notes import CrashNote

SCRIPT = """
import os, signal, socket, sys
from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match, open_store

LOG, STORE, HOW = sys.argv[1:4]
CONNECTION = socket.socket()

def work(x):
    with open(LOG, "a") as file:
        file.write(f"{x} {os.getpid()}\\n")
    if x == 13:
        if HOW == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return x

def cannot_be_sent(x):
    return work(x) if CONNECTION else None

OPENED = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def needs_this_process(x):
    os.write(OPENED, f"{x} {os.getpid()}\\n".encode())  # A descriptor that no child has.
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


@dataclass
class History:
    """What a run that was started again and again left behind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    results: list[EvalResult] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    executed: list[tuple[int, int]] = field(default_factory=list)  # Sample and process, in this order.
    notes: list[CrashNote] = field(default_factory=list)  # After each crash.
    missing: list[set[int]] = field(default_factory=list)  # Ordinals without a result after each crash.
    said: str = ""

    @property
    def deaths(self) -> int:
        return len(self.notes)

    def times(self, sample: int) -> int:
        return [executed for executed, _process in self.executed].count(sample)

    @property
    def isolated(self) -> set[int]:
        return {sample for sample, process in self.executed if process not in self.processes}


def run_until_it_ends(folder: Path, how: str) -> History:
    """Start the script again and again, as a person would."""
    (folder / "script.py").write_text(SCRIPT)
    log, store = folder / "log", f"sqlite:///{folder}/runs.db"
    found = History()
    while True:
        command = [sys.executable, "script.py", str(log), store, how]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            said, _ = run.communicate(timeout=120)
        found.said += said
        found.processes.append(run.pid)
        with closing(open_store(store)) as opened:
            (stored,) = opened.runs(suite="deadly")
            found.results = list(opened.results(stored.run_id))
        if run.returncode == 0:
            break
        assert run.returncode in (3, -9), said
        found.notes.append(stored.noted.crashes)
        found.missing.append(set(range(40)) - {result.ordinal for result in found.results})
        assert found.deaths < 6
    culprit = next(result for result in found.results if result.sample_id == found.results[13].sample_id)
    assert how == "state" or "process" in (culprit.error or "")
    assert stored.status == "finished"
    assert stored.noted.crashes == CrashNote()
    found.outcomes.update(result.outcome for result in found.results)
    for line in log.read_text().splitlines():
        sample, process = line.split()
        found.executed.append((int(sample), int(process)))
    return found


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_trial_that_ends_its_process_twice_is_isolated_and_stored_as_an_error(tmp_path: Path, how: str) -> None:
    found = run_until_it_ends(tmp_path, how)
    assert (found.deaths, found.outcomes) == (2, {"scored": 39, "task_error": 1})
    assert found.times(13) == 3  # Twice in a process that others shared, once in one of its own.
    first, second = found.notes
    assert first == CrashNote()  # Nothing is written until a run has crashed once.
    assert second.count == 1
    assert 13 <= second.started < 13 + 2 * 3
    # What was in flight at the second crash, or finished and not yet stored, and nothing else.
    assert found.isolated == {ordinal for ordinal in found.missing[1] if ordinal <= second.started}
    assert f"the {len(found.isolated)} trials that were in flight are executed in child processes first" in found.said
    # The innocent ones keep the results of their child processes.
    assert not {sample for sample, process in found.executed if process == found.processes[-1]} & found.isolated


@pytest.mark.long
def test_a_suspect_that_cannot_be_isolated_is_executed_alone_and_blamed_after_three_deaths(tmp_path: Path) -> None:
    found = run_until_it_ends(tmp_path, "alone")
    assert (found.deaths, found.outcomes) == (5, {"scored": 39, "task_error": 1})
    assert found.times(13) == 5
    assert [note.alone_deaths for note in found.notes if note.alone == 13] == [0, 1, 2]
    assert "executing suspected trial" in found.said


def test_an_innocent_suspect_that_fails_in_a_child_is_scored_in_the_process_of_the_run(tmp_path: Path) -> None:
    """Somebody else killed the process twice, and the task needs what only that process has opened."""
    found = run_until_it_ends(tmp_path, "state")
    assert (found.deaths, found.outcomes) == (2, {"scored": 40})
