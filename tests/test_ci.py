"""`.ci/run` chooses the second version of Python: 3.14, and 3.13 where no environment of 3.14 can be made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FALLBACK = "== no environment of Python 3.14 could be made here: 3.13 is tested instead\n"
SECOND_CHECK = "check --tests-only --reproducible --venv .venv-"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with `.ci/run`, and in place of each script one that writes down its call and succeeds."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name in ("setup", "newer-parts", "check"):
        write_program(tmp_path / "scripts" / name, f'echo "{name} $*" >> calls')
    return tmp_path


def write_program(path: Path, lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def run_ci(checkout: Path, *, python: str) -> tuple[int, list[str], str]:
    """Run CI with a python3.14 of these lines; returns its exit status, the calls of scripts and what it printed."""
    write_program(checkout / "programs" / "python3.14", python)
    environment = {**os.environ, "PATH": f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", checkout / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, (checkout / "calls").read_text().splitlines(), done.stdout


def test_the_newest_python_of_the_machine_is_tested_and_nothing_is_unpacked(checkout: Path) -> None:
    status, calls, printed = run_ci(checkout, python="exit 0")
    assert status == 0
    assert sorted(calls[:2]) == ["setup 3.12", "setup 3.14"]
    assert calls[2:] == ["check --all --reproducible", f"{SECOND_CHECK}3.14"]
    assert FALLBACK not in printed
    assert printed.endswith(" minutes in all, on Python 3.12 and 3.14\n")


def test_a_machine_without_the_newest_python_gets_that_of_debian(checkout: Path) -> None:
    status, calls, _ = run_ci(checkout, python="exit 127")
    assert status == 0
    unpacked = calls.index("newer-parts build/parts python3.14-venv")
    assert unpacked < calls.index("setup 3.14")
    assert calls[-1] == f"{SECOND_CHECK}3.14"


@pytest.mark.parametrize("missing", ["newer-parts", "setup"])
def test_ci_falls_back_and_says_so_if_debian_or_the_index_of_packages_does_not_answer(
    checkout: Path, missing: str
) -> None:
    write_program(checkout / "scripts" / missing, f'echo "{missing} $*" >> calls; case "$*" in *3.14*) exit 1; esac')
    status, calls, printed = run_ci(checkout, python="exit 127")
    assert status == 0
    assert "setup 3.13" in calls
    assert calls[-1] == f"{SECOND_CHECK}3.13"
    assert FALLBACK in printed
    assert printed.endswith(" minutes in all, on Python 3.12 and 3.13\n")


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_ci_fails_if_an_environment_that_it_needs_cannot_be_made(checkout: Path, version: str) -> None:
    write_program(checkout / "scripts" / "newer-parts", "exit 1")
    write_program(checkout / "scripts" / "setup", f'echo "setup $*" >> calls; [ "$*" != {version} ]')
    status, calls, _ = run_ci(checkout, python="exit 127")
    assert status != 0
    assert not any(call.startswith("check") for call in calls)
