"""No message for a deliberate mistake is bad: each names the place or the remedy, or the thing simply works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.first_hour.mistakes.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
AT_LEAST = 123 + 40  # Those of the first trial, and new ones.


def judge(*arguments: str) -> str:
    """Judge them in a process of their own, which forks; this one has threads."""
    command = [sys.executable, "-m", "tests.first_hour.mistakes", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    return done.stdout.splitlines()[-1]


def test_the_cases_are_many_have_a_name_each_and_a_reason() -> None:
    assert len(CASES) >= AT_LEAST
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.why and (case.says or case.never or case.verdict == "good") for case in CASES)
    assert sum(case.verdict == "acceptable" for case in CASES) <= 10


@pytest.mark.timeout(900)
def test_no_message_is_bad() -> None:
    assert ", 0 bad" in judge("--quick")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_message_is_bad_where_a_new_python_starts() -> None:
    assert ", 0 bad" in judge("--slow")
