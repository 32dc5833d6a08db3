"""Regular expressions that take too long end as an error of their trial, and the others stay quick."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, Sample, all_of, contains, evaluate_sync, matches
from fairtrial.scoring import adapt
from fairtrial.scoring.text import may_take_long

CATASTROPHIC = "a" * 40 + "!"


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(a+)+$",
        r"(a|a)*$",
        r"(a|aa)+$",
        r"(.*)*x",
        r"(?:a{1,30}){1,30}$",
        r"(\w+\s?)*$",
        "a?" * 30 + "a" * 30,
        "(?:ab|a)" * 40 + "c",
        r"(?=(a+)+$)a",
        r"(?>(a+)+)$",
        r"a*a*a*a*a*a*$",
        r"(a*)(b*)\1\2\1\2$",
    ],
)
def test_expressions_that_may_backtrack_for_long_are_recognised(pattern: str) -> None:
    assert may_take_long(pattern, 0, "a" * 200)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bParis\b",
        r"^\s*(yes|no)\b",
        r"\d+(\.\d+)?",
        r"answer:\s*(\w+)",
        r"^.*$",
        "colou?r",
        r"[A-Z]{2}\d{4}",
        r"(?i)error",
    ],
)
def test_ordinary_expressions_on_ordinary_outputs_are_searched_at_once(pattern: str) -> None:
    assert not may_take_long(pattern, 0, "x" * 200)
    assert may_take_long(r"x*y", 0, "x" * 10_000_000)  # Any repeat is too much for a text that is long enough.


def test_an_expression_that_is_none_counts_as_one_that_may_take_long() -> None:
    assert may_take_long("(", 0, "x")


def run(judge: Any, expected: str | None = None) -> dict[str, tuple[str, str]]:
    samples = [Sample(str(i), i, expected) for i in range(6)]
    config = EvalConfig(timeout_seconds=1.0, close_seconds=0.5, max_retries=0, max_concurrent=2)

    def answer(number: int) -> str:
        return CATASTROPHIC if number == 3 else "aaaa"

    report = evaluate_sync(Dataset(samples), answer, judge, config)
    return {result.sample_id: (result.outcome, result.error or "") for result in report.results}


@pytest.mark.parametrize("way", ["fixed", "expected", "combined", "adapted"])
def test_a_catastrophic_expression_is_the_scorer_error_of_its_trial_within_the_limit(way: str) -> None:
    fixed = matches(r"^(a+)+$")
    judge: Any = {
        "fixed": fixed,
        "expected": matches(),
        "combined": all_of(contains, fixed) if way == "combined" else None,
        "adapted": adapt(fixed),
    }[way]
    started = time.monotonic()
    outcomes = run(judge, "a" if way == "combined" else r"^(a+)+$")
    assert time.monotonic() - started < 40
    assert outcomes.pop("3") == ("scorer_error", "scoring did not finish within 1 s")
    assert set(outcomes.values()) == {("scored", "")}


def test_ordinary_expressions_need_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    outcomes = run(matches(r"a+", flags=re.IGNORECASE))
    assert set(outcomes.values()) == {("scored", "")}


def test_ctrl_c_ends_a_run_with_a_catastrophic_expression(tmp_path: Path) -> None:
    code = """
import os, signal, threading, time
from fairtrial import Dataset, EvalConfig, evaluate_sync, matches

def interrupt():
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
evaluate_sync(Dataset.of({"a" * 40 + "!": None}), lambda x: x, matches("^(a+)+$"), EvalConfig(grace_seconds=0.1))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=45, check=False, cwd=tmp_path
    )
    assert "KeyboardInterrupt" in ended.stderr
