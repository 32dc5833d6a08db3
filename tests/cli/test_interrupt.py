"""Ctrl-C in a real terminal: the run drains, the last line shows how to resume, and resuming gives the same report."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairtrial.cli.running import RunOptions
from fairtrial.reports.run_names import resume_command
from fairtrial.store import RunRecord, open_store
from fairtrial.store.notes import write_notes
from fairtrial.store.redact import current
from tests.cli.conftest import Cli
from tests.cli.test_screens import environment

SLOW = """
import asyncio

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match


async def wait(number: int) -> int:
    await asyncio.sleep(0.05)
    return number if number % 3 else -1


suite = EvalSuite(
    "slow",
    Dataset([Sample(f"s{number}", number, number) for number in range(60)]),
    wait,
    exact_match,
    config=EvalConfig(max_concurrent=2),
)
"""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fairtrial.cli", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=environment(COLUMNS="80", LINES="24", **variables),
        )  # fmt: skip
        os.close(theirs)

    def read_until(self, wanted: str, seconds: float = 60.0) -> str:
        deadline = time.monotonic() + seconds
        while wanted not in self.text and time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._ours, 65536).decode()
                except OSError:  # The other end is gone.
                    break
        return self.text

    def end(self) -> int:
        self.read_until("\0never", 60.0)
        code = self.process.wait(60)
        os.close(self._ours)
        return code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_a_run_goes_on_where_it_was_interrupted(cli: Cli, place: Path, number: signal.Signals) -> None:
    (place / "slow.py").write_text(SLOW)
    terminal = Terminal("run", "slow.py", "--resume", "never")
    terminal.read_until("passed ")
    terminal.process.send_signal(number)
    assert terminal.end() == 130
    lines = terminal.text.rstrip().splitlines()
    assert lines[-1].endswith("resume it with: fairtrial run slow.py")
    store = open_store()
    stored = sum(byte.bit_count() for byte in store.done(store.runs()[0].run_id))
    assert 0 < stored < 60
    assert f"interrupted: slow@1 has {stored} of 60 trials stored" in terminal.text
    again = Terminal("run", "slow.py")
    assert again.end() == 0
    assert f"): {stored} of 60 trials are stored" in again.text
    assert [run.number for run in store.runs()] == [1]
    resumed = cli("show", "slow", "--json").json
    cli("run", "slow.py", "--quiet")
    whole = cli("show", "slow", "--json").json
    for report in (resumed, whole):
        report["experiments"][0].pop("per_trial")
        report["experiments"][0].pop("latency_ms")
    assert resumed["experiments"] == whole["experiments"]


def test_an_interrupted_command_ends_with_the_one_that_goes_on(cli: Cli, place: Path) -> None:
    (place / "slow.py").write_text(
        SLOW.replace("import asyncio\n", "import asyncio\nimport os\nimport signal\n").replace(
            "    await asyncio", "    if number == 5:\n        os.kill(os.getpid(), signal.SIGINT)\n    await asyncio"
        )
    )
    done = cli("run", "slow.py", "--json", "--resume", "never")
    assert (done.code, done.out) == (130, "")
    *_, announced, interrupted, again = done.err.splitlines()
    assert announced == "interrupted: finishing the trials in flight (once more to cancel them)"
    assert interrupted.startswith("interrupted: slow@1 has ")
    assert again == "resume it with: fairtrial run slow.py --json"


@pytest.mark.long
def test_a_run_whose_process_was_killed_is_interrupted_and_says_how_to_go_on(cli: Cli) -> None:
    Path("evals.py").write_text(SLOW.replace("range(60)", "range(400)").replace("max_concurrent=2", "max_concurrent=4"))
    process = subprocess.Popen(
        [sys.executable, "-m", "fairtrial.cli", "run", "evals.py", "-q", "--repeats", "2"], env=environment()
    )
    store = open_store(None)
    deadline = time.monotonic() + 60
    while not (runs := store.runs()) or not any(store.done(runs[0].run_id)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "running" in cli("runs").out
    process.kill()
    process.wait(30)
    assert store.runs()[0].status == "running"  # What the killed process left.
    listed = cli("runs")
    assert "interrupted" in listed.out
    assert "resume it with: fairtrial run evals.py -q --repeats 2" in " ".join(listed.err.split())
    assert "fairtrial run evals.py -q --repeats 2   resume the run" in cli("show", "slow").out
    assert cli("runs", "--status", "running", "--json").json["runs"] == []
    assert cli("runs", "--status", "interrupted", "--json").json["runs"][0]["status"] == "interrupted"
    assert "interrupted" in cli("show", "slow").out
    assert cli("run", "evals.py", "-q", "--repeats", "2").code == 0
    assert "finished" in cli("runs").out
    assert len(store.runs()) == 1
    store.close()


def test_the_resume_command_has_the_options_of_the_run_but_no_password_and_one_limit() -> None:
    words = ["run", "evals.py", "--mailbox", "redis://user:s3cret@host", "--max-cost", "5", "--repeats", "2"]
    options = RunOptions(open_store("memory:"), words)
    shown = [current().text(word) for word in options.resume_words]
    run = RunRecord("r", "s", "d", "1", "f", 1, ("a",), 1, notes=write_notes(resume_words=shown))
    assert resume_command(run, max_cost=10) == (
        "fairtrial run evals.py --mailbox 'redis://user:[redacted]@host' --repeats 2 --max-cost 10"
        " (with the password in place of [redacted])"
    )
    earlier = RunRecord("r", "s", "d", "1", "f", 1, ("a",), 1, notes=write_notes(command_line=["evals.py"]))
    assert resume_command(earlier) == "fairtrial run evals.py"
