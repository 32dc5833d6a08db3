"""Suites as tests, alone and under pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Experiment, TrialContext, exact_match, open_store
from fairtrial.runs.events import ResumeWarning
from fairtrial.testing import assert_eval, eval_test
from fairtrial.trials import EvalConfig


def answer(question: str, ctx: TrialContext) -> str:
    """Right but for a share of the questions that the experiment sets."""
    wrong = ctx.experiment.params.get("wrong", 0)
    return "no" if int(question) < int(str(wrong)) else question


def make(samples: int = 100, experiments: tuple[Experiment, ...] = (), config: EvalConfig | None = None) -> EvalSuite:
    dataset = Dataset.of({str(number): str(number) for number in range(samples)}, name="numbers")
    return EvalSuite("numbers", dataset, answer, exact_match, experiments=experiments, config=config)


def test_a_suite_whose_whole_interval_is_above_the_floor_passes_and_gives_its_report() -> None:
    assert assert_eval(make(), floor=0.9).pass_rate == 1.0


def test_a_suite_below_its_floor_fails_with_the_numbers_and_samples_that_failed() -> None:
    suite = make(experiments=(Experiment("bad", params={"wrong": 60}),))
    with pytest.raises(AssertionError) as caught:
        assert_eval(suite, floor=0.9)
    message = str(caught.value)
    assert message.startswith("suite 'numbers' [bad] did not pass\n  pass rate 40")
    assert "all of the interval is below" in message
    assert message.count("  failed ") == 5
    assert message.endswith("and 55 more")


def test_too_few_samples_to_decide_fail_and_say_what_it_takes_unless_told_otherwise() -> None:
    suite = make(10)
    with pytest.raises(AssertionError, match=r"is not decided\n.*it takes about 250 samples to show at least 90.0%"):
        assert_eval(suite, floor=0.9)
    assert assert_eval(suite, floor=0.9, inconclusive="pass").pass_rate == 1.0


def test_an_experiment_can_be_compared_with_another() -> None:
    suite = make(200, (Experiment("now"), Experiment("next", params={"wrong": 40})))
    with pytest.raises(AssertionError, match=r"\[next\] did not pass\n  passed of .* worse"):
        assert_eval(suite, rules={"margin": 0.02}, baseline="now")
    better = assert_eval(suite, rules={"margin": 0.02}, baseline="next", experiment="now")
    assert better.experiments == ("now", "next")


def test_errors_of_the_task_are_counted_in_the_message() -> None:
    def crash(question: str) -> str:
        raise RuntimeError("no")

    suite = EvalSuite("crashing", Dataset.of({str(n): "x" for n in range(50)}), crash, exact_match)
    with pytest.raises(AssertionError, match="errors: 50 task_error"):
        assert_eval(suite, floor=0.5)


def test_neither_and_both_of_floor_and_rules_are_refused() -> None:
    for wanted in ({}, {"floor": 0.5, "rules": {"min_pass_rate": 0.5}}):
        with pytest.raises(ConfigurationError, match="one of the two"):
            assert_eval(make(), **wanted)  # type: ignore[arg-type]  # the mistake under test


def test_fewer_samples_can_be_asked_for(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/runs.db"
    assert assert_eval(make(100), floor=0.5, max_samples=20, store=store).total == 20
    assert assert_eval(make(config=EvalConfig(max_samples=10)), floor=0.5, max_samples=20).total == 10


@pytest.fixture
def counted() -> tuple[EvalSuite, Counter[str]]:
    calls: Counter[str] = Counter()

    def count(question: str, ctx: TrialContext) -> str:
        calls[ctx.experiment.name] += 1
        return answer(question, ctx)

    dataset = Dataset.of({str(number): str(number) for number in range(60)}, name="numbers")
    experiments = (Experiment("now"), Experiment("next", params={"wrong": 30}), Experiment("other"))
    return EvalSuite("counted", dataset, count, exact_match, experiments=experiments), calls


def test_tests_of_one_suite_share_runs_and_run_only_what_they_ask_for(
    counted: tuple[EvalSuite, Counter[str]], tmp_path: Path
) -> None:
    suite, calls = counted
    first = assert_eval(suite, floor=0.5, experiment="now")
    assert (calls, first.experiments) == ({"now": 60}, ("now",))
    with pytest.raises(AssertionError, match=r"\[next\] did not pass"):
        assert_eval(suite, rules={"margin": 0.02}, baseline="now", experiment="next")
    assert calls == {"now": 60, "next": 60}
    assert assert_eval(suite, rules={"margin": 0.02}, baseline="next", experiment="now").run_id == first.run_id
    assert assert_eval(suite, floor=0.5, experiment="now", max_samples=20, inconclusive="pass").total == 20
    assert calls == {"now": 80, "next": 60}
    store = f"sqlite:///{tmp_path}/runs.db"  # Asked for a store: it must be there.
    assert assert_eval(suite, floor=0.5, experiment="now", store=store).run_id != first.run_id
    assert assert_eval(suite, floor=0.5, experiment="now", fresh=True).run_id != first.run_id
    assert calls == {"now": 200, "next": 60}
    whole = assert_eval(suite, rules={"min_pass_rate": 0.1})
    assert whole.experiments == ("now", "next", "other")
    assert assert_eval(suite, rules={"min_pass_rate": 0.1}).run_id == whole.run_id
    assert calls == {"now": 260, "next": 120, "other": 60}


def test_an_experiment_that_the_suite_lacks_is_named(counted: tuple[EvalSuite, Counter[str]]) -> None:
    with pytest.raises(ConfigurationError, match="has no experiment 'nxt'; it has now, next, other"):
        assert_eval(counted[0], floor=0.5, experiment="nxt")


def test_a_run_of_other_experiments_that_was_broken_off_in_a_lasting_store_is_left_alone(
    counted: tuple[EvalSuite, Counter[str]], tmp_path: Path
) -> None:
    suite, _ = counted
    store = open_store(f"{tmp_path}/runs.db")
    part = EvalSuite(
        suite.name, suite.dataset, lambda question: 1 / 0, exact_match, config=EvalConfig(stop_on_error=True)
    )
    assert part.run_sync(store=store).status == "interrupted"
    with pytest.warns(ResumeWarning, match="did not resume"):
        assert assert_eval(suite, floor=0.5, experiment="now", store=store).status == "finished"


def test_a_suite_becomes_a_test_function() -> None:
    eval_test(make(), floor=0.9)()
    with pytest.raises(AssertionError):
        eval_test(make(experiments=(Experiment("bad", params={"wrong": 60}),)), floor=0.9)()


TESTS = """
from fairtrial import Dataset, EvalSuite, exact_match
from fairtrial.testing import assert_eval, eval_test

suite = EvalSuite("echo", Dataset.of({str(n): str(n % 50) for n in range(100)}), lambda q: q, exact_match)
test_low = eval_test(suite, floor=0.3)

def test_high():
    assert_eval(suite, floor=0.9)

def test_nothing_of_ours():
    assert True
"""


def run_pytest(folder: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_evals.py").write_text(TESTS)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    # The plugin by name, installed or not.
    plugin = ["-p", "no:fairtrial", "-p", "pytest_fairtrial", "-p", "no:randomly", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "--rootdir", str(folder), *args, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["alone", "in parallel"])
def test_pytest_lists_every_eval_at_the_end_and_writes_a_step_summary(tmp_path: Path, args: tuple[str, ...]) -> None:
    summary = tmp_path / "summary.md"
    done = run_pytest(tmp_path, *args, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    section = done.stdout.split(" evals ")[1]
    assert "pass         echo [baseline]  pass rate 50" in section
    assert "fail         echo [baseline]  pass rate 50" in section
    assert "def assert_eval" not in done.stdout  # The failure is the user's line and our message, not our code.
    written = summary.read_text()
    assert written.count("### gate: baseline") == 2
    assert "**pass**" in written
    assert "**fail**" in written


def test_options_of_the_session_reach_every_eval(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--eval-store", f"sqlite:///{tmp_path}/kept.db", "--eval-max-samples", "60")
    assert "60 samples" in done.stdout, done.stdout
    assert [run.planned for run in open_store(f"{tmp_path}/kept.db").runs()] == [60]  # Both tests share one run.


def test_a_session_without_evals_says_nothing_and_loads_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test():\n    assert not [name for name in sys.modules if name.startswith('fairtrial')]\n"
    )
    done = run_pytest(tmp_path, "-k", "test_plain", "--ignore", str(tmp_path / "test_evals.py"))
    assert done.returncode == 0, done.stdout
    assert "evals" not in done.stdout
