"""One test per sample, and the gate over all of them at the end of a pytest session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Experiment, exact_match
from fairtrial.testing import eval_cases

# 38 of 40 samples pass: all of the 95% interval is above 0.8, and not above 0.9.
TESTS = """
from pathlib import Path
from fairtrial import Dataset, EvalSuite, Sample, exact_match
from fairtrial.testing import eval_cases

def answer(number):
    with Path(__file__).with_name("asked").open("a") as file:
        file.write(f"{number}\\n")
    if number == 7 and not Path(__file__).with_name("fixed").exists():
        raise RuntimeError("out of order")
    return 0 if number == 20 else number

suite = EvalSuite("echo", Dataset([Sample(f"q{n}", n, n) for n in range(40)], name="numbers"), answer, exact_match)
test_echo = eval_cases(suite, floor=FLOOR)
MORE
"""


def run_pytest(folder: Path, *args: str, floor: float = 0.8, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_evals.py").write_text(TESTS.replace("FLOOR", str(floor)).replace("MORE", more))
    (folder / "asked").unlink(missing_ok=True)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    plugin = ["-p", "no:fairtrial", "-p", "pytest_fairtrial", "-p", "no:randomly"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "--rootdir", str(folder), *args, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=200,
        check=False,
    )


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().split()


@pytest.mark.proves("R160")
@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["alone", "in parallel"])
def test_a_gate_that_passes_accepts_samples_that_failed(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = run_pytest(tmp_path, *args)
    assert "2 failed, 38 passed" in done.stdout, done.stdout + done.stderr
    assert "q20 failed with 0: expected 20, got 0" in done.stdout
    assert "q7 ended in an error: RuntimeError: out of order" in done.stdout
    assert "pass         echo [baseline]  pass rate 95.0%" in done.stdout
    assert sorted(asked(tmp_path), key=int) == [str(n) for n in range(40)]
    assert done.returncode == 0


@pytest.mark.proves("R160")
def test_a_gate_that_does_not_pass_fails_the_session(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, floor=0.95)
    assert "inconclusive echo [baseline]" in done.stdout
    assert done.returncode == 1


def test_another_test_that_fails_is_not_accepted(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, more="def test_other():\n    assert False\n")
    assert "pass         echo [baseline]" in done.stdout
    assert done.returncode == 1


@pytest.mark.proves("R160")
def test_one_sample_the_failed_ones_and_a_session_that_stops_are_decided_by_their_items(tmp_path: Path) -> None:
    one = run_pytest(tmp_path, "-k", "q20")
    assert (one.returncode, asked(tmp_path)) == (1, ["20"])
    assert "not decided  echo [baseline]  1 of 40 samples had a test." in one.stdout
    stopped = run_pytest(tmp_path, "-x")
    assert (stopped.returncode, len(asked(tmp_path))) == (1, 8)
    run_pytest(tmp_path)
    (tmp_path / "fixed").touch()
    again = run_pytest(tmp_path, "--lf")
    assert (again.returncode, sorted(asked(tmp_path))) == (1, ["20", "7"])
    assert "1 failed, 1 passed" in again.stdout


def test_of_a_sample_that_was_tested_again_the_first_result_counts() -> None:
    from fairtrial.base.codec import dumps
    from fairtrial.reports.figures.rules import GateRules
    from fairtrial.scoring.score import Score
    from fairtrial.testing.cases import CaseRecord, decide_cases

    def record(sample_id: str, value: float) -> str:
        rules = dumps(GateRules(min_pass_rate=0.5))
        return dumps(CaseRecord("s", "e", sample_id, 30, rules, "fail", ((Score(value), None),)))

    first = [record(f"q{n}", 0.0) for n in range(30)]
    reruns = [record(f"q{n}", 1.0) for n in range(30)]
    (decision,) = decide_cases([*first, *reruns])
    assert (decision.status, decision.accepted) == ("fail", False)


def suite(**options: Any) -> EvalSuite:
    return EvalSuite("double", Dataset.of({n: n for n in range(3)}, name="n"), lambda n: n, exact_match, **options)


def test_experiments_have_items_of_their_own() -> None:
    both = suite(experiments=[Experiment("one"), Experiment("two")])
    marks = eval_cases(both, floor=0.5).pytestmark  # type: ignore[attr-defined]
    ids = [case.id for case in marks[0].args[1]]
    assert len(ids) == 6
    assert ids[0].startswith("one-")
    only = eval_cases(both, floor=0.5, experiment="two").pytestmark  # type: ignore[attr-defined]
    assert len(only[0].args[1]) == 3


def test_what_cannot_be_decided_at_the_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use assert_eval"):
        eval_cases(suite(), rules={"margin": 0.1})
    with pytest.raises(ConfigurationError, match="no experiment 'three'"):
        eval_cases(suite(), floor=0.5, experiment="three")
