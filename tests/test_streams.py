"""A stream of the tests that is closed fails one test, not all that follow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import gc
import sys

def test_first():
    print("one")

def test_closes():
    {closes}

def test_next(capfd):
    print("two")
    assert capfd.readouterr().out == "two\\n"

def test_last():
    print("three")
    assert False
"""


def outcome_of(folder: Path, closes: str) -> str:
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_it.py").write_text(TESTS.format(closes=closes))
    options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-c", "/dev/null", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return f"{done.stdout}{done.stderr}"


def test_the_test_that_closes_a_stream_fails_and_those_after_it_run(tmp_path: Path) -> None:
    said = outcome_of(tmp_path, "sys.stdout.close()")
    assert "2 failed, 2 passed" in said
    assert "in test_closes\n    sys.stdout.close()" in said  # Who closed it.
    assert "before the teardown of test_it.py::test_closes, out of the tests had been closed" in said
    assert "three" in said  # The output of a later test is shown.


def test_a_buffer_that_is_closed_is_found_too(tmp_path: Path) -> None:
    said = outcome_of(tmp_path, "sys.stderr.buffer.close()")
    assert "2 failed, 2 passed" in said
    assert "before the teardown of test_it.py::test_closes, err of the tests had been closed" in said
