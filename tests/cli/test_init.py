"""`fairtrial init`: the first five minutes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairtrial import open_store
from tests.cli.conftest import Cli

# Every connection except to the loopback raises an error.
NO_NETWORK = """
import socket

def closed(self, address, *rest):
    raise OSError(f"the network is unreachable: {address}")

socket.socket.connect = socket.socket.connect_ex = closed
socket.getaddrinfo = lambda *args, **kwargs: closed(None, args)
"""


def test_init_creates_a_project_that_runs(cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("init", "demo")
    assert done.code == 0
    assert done.out == (
        "created README.md, agent.py, evals.py, questions.jsonl, pyproject.toml, .gitignore in demo\n"
        "\n"
        "next\n"
        "  cd demo && fairtrial run   40 questions, 2 experiments\n"
    )
    monkeypatch.chdir(place / "demo")
    assert cli("run").code == 0
    store = open_store()
    run = store.runs()[0]
    assert {part.experiment: part.outcomes for part in store.totals(run.run_id)} == {
        "baseline": {"scored": 39, "task_error": 1},
        "careful": {"scored": 39, "task_error": 1},
    }
    slowest = {part.slowest for part in store.totals(run.run_id)}
    assert slowest == {"q17"}
    compared = cli("compare", "support:baseline", "support:careful")
    assert compared.code == 0
    words = " ".join(compared.out.split())
    assert "no detectable difference between careful and baseline: 87.5% against 75.0%, +12.5 points" in words
    assert "95% interval -5.8 to +29.6 points" in words
    assert "Detecting a difference of 5.0 points four times in five takes about 1,500 samples." in words


def run_without_network(place: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    (place / "sitecustomize.py").write_text(NO_NETWORK)
    path = [str(place), *(str(Path(entry).resolve()) for entry in sys.path if entry)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path), "HOME": str(place)}
    command = [sys.executable, "-m", "fairtrial.cli"]
    subprocess.run([*command, "init", "demo"], check=True, env=environment, cwd=place, capture_output=True)
    before = time.monotonic()
    done = subprocess.run(
        [*command, "run"], check=False, env=environment, cwd=place / "demo", capture_output=True, text=True
    )
    return done, time.monotonic() - before


def test_the_demo_project_needs_no_key_and_no_network(place: Path) -> None:
    done, _ = run_without_network(place)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no detectable difference between careful and baseline" in done.stdout


@pytest.mark.measured
def test_its_first_run_takes_less_than_ten_seconds(place: Path) -> None:
    done, took = run_without_network(place)
    print(f"the first run took {took:.1f} s")
    assert done.returncode == 0
    assert took < 10


def test_a_second_time_it_refuses_and_changes_nothing(cli: Cli, place: Path) -> None:
    cli("init", "demo")
    (place / "demo" / "evals.py").write_text("# mine\n")
    done = cli("init", "demo")
    assert done.code == 2
    assert done.err == (
        "error: demo already has evals.py; existing files are not overwritten\n"
        "  run it: cd demo && fairtrial run evals.py; or create another: fairtrial init demo2\n"
    )
    assert (place / "demo" / "evals.py").read_text() == "# mine\n"


def test_a_project_keeps_its_own_settings(cli: Cli, place: Path) -> None:
    (place / "pyproject.toml").write_text("[project]\nname = 'mine'\n\n[tool.fairtrial]\nstore = 'x.db'\n")
    done = cli("init")
    assert done.code == 0
    assert 'add to your pyproject.toml: [tool.fairtrial] suites = ["evals.py"]' in done.out
    assert done.out.splitlines()[-1] == "  fairtrial run evals.py   40 questions, 2 experiments"
    assert (place / "pyproject.toml").read_text().endswith("[tool.fairtrial]\nstore = 'x.db'\n")


def test_facts_and_a_file_in_the_way(cli: Cli, place: Path) -> None:
    facts = cli("init", "demo", "--json").json
    assert (facts["format"], facts["folder"], len(facts["files"])) == ("fairtrial.init/1", "demo", 6)
    (place / "taken").write_text("")
    assert cli("init", "taken").err == "error: taken is a file, not a folder\n  name a folder: fairtrial init demo\n"
