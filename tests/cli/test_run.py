"""`fairtrial run`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, EvalReport, open_store
from fairtrial.integrations.model_server import ModelServer
from tests.cli.conftest import BROKEN, EVALS, TWO, Cli


@pytest.mark.proves("R91")
def test_a_suite_runs_and_ends_in_its_report_and_the_next_commands(cli: Cli, evals: Path) -> None:
    done = cli("run", "evals.py")
    assert done.code == 0
    assert "doubles  run " in done.out
    assert "75.0%" in done.out
    assert done.out.splitlines()[-3:] == [
        "  fairtrial show doubles --full          criteria, means, quantiles, slices",
        "  fairtrial trials doubles --failed      all failed trials, and why",
        "  fairtrial show doubles --sample four   one trial in full",
    ]
    assert open_store().runs(suite="doubles")[0].status == "finished"


@pytest.mark.parametrize("where", ["evals.py:suite", "evals", "evals:suite"])
def test_a_suite_is_named_by_path_or_module(cli: Cli, evals: Path, where: str) -> None:
    assert cli("run", where, "--quiet").code == 0


def test_several_suites_run_one_after_the_other(cli: Cli, evals: Path) -> None:
    Path("other.py").write_text(EVALS.replace('"doubles"', '"others"'))
    done = cli("run", "evals.py", "other.py", "--quiet")
    assert done.code == 0
    assert [line.split(":")[0] for line in done.out.splitlines()] == ["doubles@1", "others@1"]


def test_without_a_suite_the_projects_own_are_run(cli: Cli, evals: Path) -> None:
    Path("pyproject.toml").write_text('[tool.fairtrial]\nsuites = ["evals.py"]\n')
    assert cli("run", "--quiet").out.startswith("doubles@1:baseline  pass rate 75.0%, 4 scored, 0 errors")


class TestParts:
    def test_a_part_runs_under_a_name_of_its_own(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--quiet")
        assert cli("run", "evals.py", "--max-samples", "2", "--quiet").out.startswith("doubles+part@1:")
        assert cli("show", "doubles", "--json").json["run"]["samples"] == 4

    @pytest.mark.parametrize(
        ("words", "ids"),
        [
            (["--sample", "three", "--sample", "one"], {"one", "three"}),
            (["--filter", "level=hard"], {"three", "four"}),
            (["--filter", "rank=2"], {"two"}),
            (["--filter", "level=hard", "--filter", "rank=4"], {"four"}),
            (["--filter", "level=easy", "--max-samples", "1"], {"one"}),
        ],
    )
    def test_samples_are_chosen_by_id_metadata_and_number(
        self, cli: Cli, evals: Path, words: list[str], ids: set[str]
    ) -> None:
        assert cli("run", "evals.py", "--quiet", *words).code == 0
        store = open_store()
        assert {result.sample_id for result in store.results(store.runs()[0].run_id)} == ids

    def test_another_part_does_not_wait_for_an_unfinished_one(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--sample", "one", "--quiet")
        store = open_store()
        store.update_run(store.runs()[0].run_id, status="interrupted")
        assert cli("run", "evals.py", "--sample", "two", "--quiet").code == 0
        assert [run.number for run in store.runs(suite="doubles+part")] == [2, 1]


class TestSettingsOfARun:
    def test_repeats_seed_concurrency_experiments_params_and_tags(self, cli: Cli, two: Path) -> None:
        done = cli(
            *("run", "evals.py", "--repeats", "3", "--seed", "7", "--concurrency", "2", "--experiment", "triple"),
            *("--set", "factor=2", "--set", "mood=calm", "--tag", "branch=main", "--quiet"),
        )
        assert done.out == "doubles@1:triple  pass rate 75.0%, 12 scored, 0 errors\n"
        run = open_store().runs()[0]
        assert run.experiments == ("triple",)
        assert run.repeats == 3
        assert (run.config["seed"], run.config["max_concurrent"]) == (7, 2)
        assert dict(run.params["triple"]) == {"factor": 2, "mood": "calm"}  # type: ignore[arg-type]
        assert dict(run.tags) == {"branch": "main"}

    def test_a_suite_without_experiments_takes_parameters_too(self, cli: Cli, evals: Path) -> None:
        assert cli("run", "evals.py", "--set", "factor=3", "--quiet").out.startswith(
            "doubles@1:baseline  pass rate 0.0%"
        )

    def test_the_store_is_an_option(self, cli: Cli, evals: Path) -> None:
        assert cli("run", "evals.py", "--store", "elsewhere.db", "--quiet").code == 0
        assert not Path(".fairtrial").exists()
        assert len(open_store("elsewhere.db").runs()) == 1


class TestResuming:
    def test_a_store_that_fails_in_the_middle_ends_the_run_early_and_names_the_command(
        self, cli: Cli, evals: Path
    ) -> None:
        deleting = "    Path('runs.db').unlink(missing_ok=True)\n    return number *"
        evals.write_text("from pathlib import Path\n" + EVALS.replace("    return number *", deleting))
        done = cli("run", "evals.py", "--store", "runs.db", "--quiet")
        assert done.code == 3
        assert "was deleted or replaced" in done.err
        assert done.err.splitlines()[-1] == "  the run ended early: the same command resumes it"

    def _interrupted(self, cli: Cli) -> Any:
        """A finished run with the last two results taken away, as if it had been interrupted before them."""
        cli("run", "evals.py", "--quiet")
        store = open_store()
        run = store.runs()[0]
        kept = list(store.results(run.run_id))[:2]
        samples = dict(store.samples(run.run_id))
        store.delete_run(run.run_id)
        store.create_run(run)
        store.commit(run.run_id, kept, samples)
        store.update_run(run.run_id, status="interrupted")
        return run

    def test_an_unfinished_run_is_resumed_with_a_note(self, cli: Cli, evals: Path) -> None:
        run = self._interrupted(cli)
        done = cli("run", "evals.py")
        assert done.code == 0
        assert done.err == f"resuming doubles@1 ({run.run_id}): 2 of 4 trials are stored\n"
        assert [run.number for run in open_store().runs()] == [1]
        assert cli("run", "evals.py", "--json").json["runs"][0]["resumed"] is False

    def test_a_run_that_is_not_to_be_resumed_stays_and_a_new_one_starts(self, cli: Cli, evals: Path) -> None:
        self._interrupted(cli)
        assert cli("run", "evals.py", "--resume", "never").err == ""
        assert [run.status for run in open_store().runs()] == ["finished", "interrupted"]

    def test_changed_code_starts_a_new_run_unless_a_named_one_is_forced(self, cli: Cli, evals: Path) -> None:
        old = self._interrupted(cli)
        evals.write_text(EVALS + "\n# another thought\n")
        done = cli("run", "evals.py", "--resume", "doubles@1")
        assert (done.code, done.out) == (2, "")
        assert " ".join(done.err.split()) == (
            f"error: run {old.run_id} of suite 'doubles' cannot be resumed: its code has changed (evals.py) "
            f"resume it anyway with --resume {old.run_id} --allow-changed-code: its results then come from two code "
            "versions"
        )
        done = cli("run", "evals.py", "--quiet")
        assert done.code == 0
        said = " ".join(done.err.split())
        assert f"and did not resume run {old.run_id} (interrupted): its code has changed" in said
        done = cli("run", "evals.py", "--resume", "doubles@1", "--allow-changed-code")
        assert done.code == 0
        assert "has results of two code versions" in " ".join(done.err.split())
        assert "results of two code versions" in " ".join(done.out.split())
        assert [(run.number, run.status) for run in open_store().runs()] == [(2, "finished"), (1, "finished")]

    def test_another_evaluator_is_sent_to_rescore(self, cli: Cli, evals: Path) -> None:
        old = self._interrupted(cli)
        evals.write_text(EVALS.replace("exact_match", "contains"))
        done = cli("run", "evals.py", "--resume", "doubles")
        assert done.code == 2
        assert f"score its stored outputs with this evaluator: fairtrial rescore {old.run_id} evals.py" in done.err

    def test_outputs_that_could_not_be_scored_have_one_remedy(self, cli: Cli, evals: Path) -> None:
        evals.write_text(EVALS.replace("double, exact_match)", "double, lambda output, expected: 1 / 0)"))
        done = cli("run", "evals.py")
        assert done.code == 4
        said = " ".join((done.out + done.err).split())
        assert "--resume errors" not in said
        run = open_store().runs()[0].run_id
        assert (
            f"the same command scores them; if you change the evaluator, use: fairtrial rescore {run} evals.py" in said
        )
        evals.write_text(EVALS)
        assert cli("rescore", run, "evals.py").code == 0

    def test_resume_needs_one_suite_and_an_old_run(self, cli: Cli, evals: Path) -> None:
        self._interrupted(cli)
        assert "needs exactly one suite" in cli("run", "evals.py", "evals.py", "--resume", "doubles").err
        assert "resume must be 'auto', 'never', 'errors' or the id" in cli("run", "evals.py", "--resume", "").err
        assert "there is no run 'nothing'" in cli("run", "evals.py", "--resume", "nothing").err

    def test_errors_are_tried_again_when_asked_and_code_may_change_for_it(self, cli: Cli, place: Path) -> None:
        file = place / "evals.py"
        file.write_text(BROKEN)
        assert cli("run", "evals.py", "--quiet").code == 4
        file.write_text(BROKEN.replace('raise ValueError("that is too hard")', "pass"))
        store = open_store()
        run = store.runs()[0]
        store.update_run(run.run_id, finished_at=run.created_at + 9_000, notes={"executed_seconds": 7_200.0})
        done = cli("run", "evals.py", "--resume", "errors")
        assert done.code == 0
        assert f"\nretrying 1 trial of doubles@1 ({run.run_id}): the others are stored\n" in done.err
        assert re.search(r"\nretried 1 trial in [\d.]+ m?s\n", done.err)
        assert re.match(rf"doubles  run {run.run_id}, finished in 120\.\d min: 4 samples", done.out)
        assert [run.number for run in open_store().runs()] == [1]
        assert cli("trials", "doubles", "--failed", "--kind", "task_error").out == ""

    def test_a_run_that_no_longer_fits_is_followed_by_a_new_one_with_a_way_back(self, cli: Cli, evals: Path) -> None:
        old = self._interrupted(cli)
        done = cli("run", "evals.py", "--repeats", "2")
        assert done.code == 0
        said = " ".join(done.err.split())
        assert "its repeats were 1, now 2" in said
        assert f"Undo the change and resume it with --resume {old.run_id}" in said


class TestVerdicts:
    @pytest.mark.proves("R103")
    def test_a_floor_that_is_not_met_exits_1(self, cli: Cli, evals: Path) -> None:
        assert cli("run", "evals.py", "--fail-under", "0.75", "--quiet").code == 0
        done = cli("run", "evals.py", "--fail-under", "0.8", "--quiet")
        assert done.code == 1
        assert done.err == "exit 1: 75.0% passed, under the floor of 80.0% (--fail-under; errors count as failures)\n"

    def test_a_dataset_without_samples_is_a_mistake_and_nothing_is_run(self, cli: Cli, place: Path) -> None:
        (place / "evals.py").write_text(EVALS.replace("Dataset(samples,", "Dataset([],"))
        for words in ((), ("--fail-under", "0.5"), ("--json",)):
            done = cli("run", "evals.py", *words)
            assert done.code == 2
            assert "dataset 'numbers' of suite 'doubles' has no samples, so nothing was run" in done.err + done.out
        assert cli("runs", "--json").json["runs"] == []

    def test_every_experiment_with_too_many_errors_is_named(self, cli: Cli, place: Path) -> None:
        params = 'Experiment("{}", params={{"breaks_at": {}}})'
        several = ", ".join([params.format("a", 3), params.format("b", 2), 'Experiment("c")'])
        (place / "evals.py").write_text(
            EVALS.replace("double, exact_match)", f"double, exact_match, experiments=[{several}])")
        )
        done = cli("run", "evals.py", "--quiet")
        assert done.code == 4
        assert done.err.startswith(
            "exit 4: 1 of 4 trials in experiment a, 1 of 4 trials in experiment b ended in an error, more than the "
        )

    def test_too_many_errors_exit_4_before_any_floor(self, cli: Cli, place: Path) -> None:
        (place / "evals.py").write_text(BROKEN)
        done = cli("run", "evals.py", "--fail-under", "0.9", "--quiet")
        assert done.code == 4
        assert done.err == (
            "exit 4: 1 of 4 trials ended in an error, more than the allowed 10% (--max-error-share)\n"
            "  1 x ValueError: that is too hard (evals.py:15 in double)\n"
            "  once that is fixed, retry them with --resume errors\n"
        )
        assert cli("run", "evals.py", "--max-error-share", "0.25", "--quiet").code == 0

    def test_a_run_that_ended_early_exits_3(self, cli: Cli, place: Path) -> None:
        (place / "evals.py").write_text(
            BROKEN.replace(
                '"breaks_at": 3})])',
                '"breaks_at": 3})], config=EvalConfig(max_concurrent=1, stop_on_error=True))',
            ).replace("import Dataset", "import EvalConfig, Dataset")
        )
        done = cli("run", "evals.py", "--max-error-share", "1")
        assert done.code == 3
        assert "exit 3: the run ended early and can be resumed" in done.err
        assert "  fairtrial run evals.py" in done.out

    def test_the_worst_of_several_suites_counts(self, cli: Cli, evals: Path) -> None:
        Path("other.py").write_text(BROKEN.replace('"doubles"', '"others"'))
        assert cli("run", "evals.py", "other.py", "--fail-under", "0.9", "--quiet").code == 4


def test_facts_for_programs(cli: Cli, two: Path) -> None:
    two.write_text('print("hello from the suite")\n' + TWO)
    done = cli("run", "evals.py", "--json")
    facts = done.json
    assert set(facts) == {"format", "exit_code", "runs"}
    assert (facts["format"], facts["exit_code"]) == ("fairtrial.run/1", 0)
    (run,) = facts["runs"]
    assert set(run) == {"name", "resumed", "exit_code", "reason", "report", "comparison"}
    assert (run["name"], run["resumed"], run["reason"], run["comparison"]) == ("doubles@1", False, None, None)
    assert run["report"]["format"] == "fairtrial.report/1"
    assert [part["name"] for part in run["report"]["experiments"]] == ["plain", "triple"]
    assert "hello from the suite" in done.err


ASK = """
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter

ask = PromptTemplate(name="ask", sections=[MarkdownSection("", "What is the capital of $country?", "question")])
parrot = ScriptedAdapter(lambda messages: "Paris")
"""


@pytest.fixture
def prompts(place: Path) -> Path:
    (place / "prompts.py").write_text(ASK)
    rows = [
        {"id": "f", "input": {"country": "France"}, "expected": "Paris"},
        {"id": "j", "input": {"country": "Japan"}, "expected": "Tokyo"},
    ]
    (place / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


class TestAdHoc:
    WORDS = ("try", "prompts.py:ask", "--dataset", "capitals.jsonl", "--evaluator", "exact_match")

    @pytest.mark.proves("R91", "R92")
    def test_models_side_by_side_end_in_a_comparison(
        self, cli: Cli, prompts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ModelServer(lambda request: "Tokyo" if request.model == "wise" else "Paris") as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
            done = cli(*self.WORDS, "--model", "openai:plain", "--model", "openai:wise")
            facts = cli(*self.WORDS, "--model", "openai:plain", "--model", "openai:wise", "--json").json
        assert done.code == 0
        assert "openai-wise against openai-plain" in done.out
        assert "too few samples to tell" in " ".join(done.out.split())
        assert facts["runs"][0]["comparison"]["format"] == "fairtrial.comparison/1"
        run = open_store().runs()[0]
        assert (run.suite, run.experiments) == ("ask", ("openai-plain", "openai-wise"))

    def test_the_cache_answers_the_second_time(self, cli: Cli, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with ModelServer("Paris") as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
            words = (*self.WORDS, "--model", "openai:plain", "--quiet")
            cli(*words, "--cache", "read-write")
            cli(*words, "--cache", "read-write")
            assert server.stats().requests == 2
            cli(*words)
            assert server.stats().requests == 4
        assert Path(".fairtrial/responses.db").exists()

    def test_columns_of_a_table_are_mapped(self, cli: Cli, prompts: Path) -> None:
        Path("ask.md").write_text("What is the capital of $country in $year?")
        Path("q.csv").write_text("country,capital,year\nFrance,Paris,1\nJapan,Tokyo,2\n")
        words = ("try", "ask.md", "--dataset", "q.csv", "--evaluator", "exact_match")
        model = ("--model", "prompts.py:parrot", "--quiet")
        mapped = ("--column", "input=country,year", "--column", "expected=capital")
        forgotten = cli(*words, *model).err
        assert "(found country, capital, year)" in forgotten
        assert "as in --column input=question --column expected=answer, or rename it" in forgotten
        assert "columns=" not in forgotten
        assert cli(*words, *model, "--column", "country").err.startswith("error: --column must be FIELD=COLUMN")
        done = cli(*words, *model, *mapped)
        assert (done.code, done.out) == (0, "ask@1:prompts.py-parrot  pass rate 50.0%, 2 scored, 0 errors\n")
        sample = Dataset.load("q.csv", columns={"input": ["country", "year"], "expected": "capital"})[0]
        again = cli("show", "ask", "--sample", sample.id).out
        assert "--column input=country,year --column expected=capital" in again

    def test_a_prompt_may_be_a_text_file_and_a_model_an_object(self, cli: Cli, prompts: Path) -> None:
        Path("ask.md").write_text("What is the capital of $country?")
        done = cli(
            *("try", "ask.md", "--dataset", "capitals.jsonl", "--evaluator", "exact_match"),
            *("--evaluator", "contains", "--model", "prompts.py:parrot", "--quiet"),
        )
        assert (done.code, done.out) == (0, "ask@1:prompts.py-parrot  pass rate 50.0%, 2 scored, 0 errors\n")
        shown = cli("show", "ask", "--sample", "j").out
        assert shown.splitlines()[-1] == (
            "again     fairtrial try ask.md --dataset capitals.jsonl --model prompts.py:parrot "
            "--evaluator exact_match --evaluator contains --sample j"
        )


MISSPELT = """
from fairtrial import Dataset, EvalConfig, EvalSuite, exact_match

def answer(number): return number.outputt

data = Dataset.of([(number, number) for number in range(9)])
suite = EvalSuite("misspelt", data, answer, exact_match, config=EvalConfig(max_concurrent=1))
"""


class TestTheSameErrorAgainAndAgain:
    @pytest.mark.parametrize("by", ["settings", "variable", "variable before settings"])
    def test_the_limit_is_a_setting(self, cli: Cli, place: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "evals.py").write_text(MISSPELT)
        if "variable" in by:
            monkeypatch.setenv("FAIRTRIAL_MAX_SAME_ERRORS", "3")
        if "settings" in by:
            number = 5 if "variable" in by else 3
            (place / "pyproject.toml").write_text(f"[tool.fairtrial]\nmax-same-errors = {number}\n")
        done = cli("run", "evals.py", "--json")
        assert done.code == 4
        (run,) = done.json["runs"]
        assert run["report"]["run"]["status"] == "incomplete"
        assert run["report"]["experiments"][0]["trials"]["task_error"] == 3
        stopped = run["report"]["run"]["notes"]["stopped"]
        assert "its first 3 trials all ended in the same error: AttributeError" in stopped

    def test_0_lets_the_run_end(self, cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "evals.py").write_text(MISSPELT)
        monkeypatch.setenv("FAIRTRIAL_MAX_SAME_ERRORS", "0")
        done = cli("run", "evals.py", "--json")
        (run,) = done.json["runs"]
        assert run["report"]["run"]["status"] == "finished"
        assert run["report"]["experiments"][0]["trials"]["task_error"] == 9


class TestProcesses:
    def test_options_that_change_the_suite_hold_in_all_processes_and_prints_do_not_mix_with_json(
        self, cli: Cli, evals: Path
    ) -> None:
        evals.write_text(evals.read_text().replace("    return number", '    print("called")\n    return number'))
        done = cli("run", "evals.py", "--processes", "2", "--set", "factor=3", "--filter", "rank=3", "--json")
        (run,) = done.json["runs"]
        assert done.code == 0
        assert run["name"] == "doubles+part@1"
        (result,) = EvalReport.load(open_store(), "doubles+part").results
        assert (result.output, result.passed) == (9, False)

    def test_processes_are_refused_with_a_fleet(self, cli: Cli, evals: Path) -> None:
        done = cli("run", "evals.py", "--processes", "2", "--mailbox", "redis://127.0.0.1:1")
        assert done.code == 2
        assert "--processes cannot be used with a fleet" in done.err
        assert "start one worker for each processor instead" in done.err

    def test_the_setting_holds_for_runs_of_this_machine(
        self, cli: Cli, evals: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAIRTRIAL_PROCESSES", "2")
        assert cli("run", "evals.py", "--quiet").code == 0
        (run,) = open_store().runs()
        assert run.config["processes"] == 2
