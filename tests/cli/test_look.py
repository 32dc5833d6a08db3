"""`runs`, `show`, `trials --failed`, and the names of runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fairtrial import open_store
from tests.cli.conftest import BROKEN, Cli

TALKATIVE = """
from fairtrial import ChatMessage, Dataset, EvalSuite, Sample, ToolCall, ToolInvoked, TrialContext, exact_match
from fairtrial import PromptExecuted, TokenUsage


async def answer(question: str, ctx: TrialContext) -> str:
    ctx.session.record(ChatMessage("user", question))
    ctx.session.record(ChatMessage("assistant", "", (ToolCall("look", {"up": 1}),)))
    ctx.session.record(ToolInvoked("look", {"up": 1}, result={"found": "nothing"}))
    ctx.session.record(ToolInvoked("jump", {}, success=False, error="too high"))
    ctx.session.record(PromptExecuted(model="some-model", usage=TokenUsage(10, 5, 0, 0.25)))
    return "line one\\nline \\x1b[31mtwo\\x1b[0m " + "word " * 30


suite = EvalSuite("talk", Dataset([Sample("s 1", "why?", {"because": [1, 2, 3]})]), answer, exact_match)
"""


class TestRuns:
    def test_runs_are_listed_newest_first(self, cli: Cli, two: Path) -> None:
        cli("run", "evals.py", "--quiet")
        cli("run", "evals.py", "--quiet", "--experiment", "plain", "--tag", "who=me")
        head, first, second = cli("runs").out.splitlines()
        assert head.split() == ["run", "id", "status", "when", "trials", "passed", "experiments"]
        assert first.startswith("doubles@2")
        assert first.endswith("4     75%  plain")
        assert second.endswith("8   0-75%  plain, triple")
        assert cli("runs", "--tag", "who=me").out.count("doubles@") == 1
        assert cli("runs", "--limit", "1").out.count("doubles@") == 1

    def test_runs_are_chosen_by_suite_and_status(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--quiet")
        assert cli("runs", "doubles", "--status", "finished").out.count("doubles@1") == 1
        done = cli("runs", "others")
        assert (done.code, done.out) == (0, "")
        assert done.err == "no runs of others here; start one with: fairtrial run SUITE\n"
        assert cli("runs", "--status", "finishd").err == "error: unknown status 'finishd'\n  did you mean finished?\n"

    def test_facts_for_programs(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--quiet")
        facts = cli("runs", "--json").json
        assert facts["format"] == "fairtrial.runs/1"
        (run,) = facts["runs"]
        assert set(run) == {
            *("run_id", "name", "suite", "number", "status", "created_at", "finished_at", "dataset", "evaluator"),
            *("repeats", "planned", "tags", "parent_run", "notes", "experiments"),
        }
        (part,) = run["experiments"]
        assert set(part) == {
            *("experiment", "params", "trials", "scored", "passed", "errors", "pass_rate", "pass_rate_all"),
            *("mean_score", "mean_reward", "mean_latency_ms", "tokens"),
            *("cost_usd", "judge_cost_usd", "cache_hits", "unpriced_calls", "cut_off_calls", "refused_calls"),
            "unknown_endings",
        }
        assert (run["name"], part["pass_rate"], part["cost_usd"]) == ("doubles@1", 0.75, None)


class TestShow:
    def test_a_report_and_one_experiment_of_it(self, cli: Cli, two: Path) -> None:
        cli("run", "evals.py", "--quiet")
        whole, part = cli("show", "doubles"), cli("show", "doubles:triple")
        assert "plain" in whole.out
        assert "  fairtrial compare doubles " in whole.out
        assert part.code == 0
        assert "75.0%" not in part.out
        assert cli("show", "doubles", "--json").json["format"] == "fairtrial.report/1"
        assert [one["name"] for one in cli("show", "doubles:triple", "--json").json["experiments"]] == ["triple"]

    def test_slices(self, cli: Cli, two: Path) -> None:
        cli("run", "evals.py", "--quiet")
        lines = cli("show", "doubles:plain", "--by", "level").out.splitlines()
        assert [line.split() for line in lines[:4]] == [
            ["errors"],
            ["level", "experiment", "samples", "pass", "rate", "95%", "interval", "(trials)", "mean", "score"],
            ["easy", "plain", "2", "100.0%", "15.8%", "to", "100.0%", "0", "1.000"],
            ["hard", "plain", "2", "50.0%", "1.3%", "to", "98.7%", "0", "0.500"],
        ]
        assert lines[4:] == ["", "plain: pass rates by level do not differ detectably (p = 1.00)."]
        assert len(cli("show", "doubles", "--by", "rank").out.splitlines()) == 10
        facts = cli("show", "doubles", "--by", "level", "--json").json
        assert (facts["format"], facts["by"], len(facts["slices"])) == ("fairtrial.slices/1", "level", 4)
        assert facts["differences"]["plain"] == {"p": 1.0, "adjusted_p": 1.0}
        first = facts["slices"][0]
        assert (first["n"], round(first["low"], 3), round(first["high"], 3)) == (2, 0.158, 1)
        done = cli("show", "doubles", "--by", "levl")
        assert done.err == "error: no sample of run doubles@1 has metadata 'levl'\n  it has level, rank\n"

    def test_one_trial_whole(self, cli: Cli, place: Path) -> None:
        (place / "talk.py").write_text(TALKATIVE)
        cli("run", "talk.py", "--quiet")
        lines = cli("show", "talk", "--sample", "s 1").out.splitlines()
        assert lines[0] == "s 1  talk@1:baseline  failed, score 0.000"
        assert lines[1:4] == ["input     why?", 'expected  {"because": [1, 2, 3]}', "output    line one"]
        assert lines[4].startswith("          line two word word")
        session = [line[11:] for line in lines[lines.index("session") + 1 : -2]]
        assert session == [
            "user  why?",
            "assistant  calls look(up=1)",
            'invoked  look(up=1) -> {"found": "nothing"}',
            "invoked  jump() -> failed: too high",
            "model  some-model: 10 + 5 tokens, $0.2500",
        ]
        assert lines[-2].startswith("timing    ")
        assert "10 + 5 tokens, task cost $0.2500, started 2" in lines[-2]
        assert lines[-1] == "again     fairtrial run talk.py --sample 's 1'"

    def test_the_command_it_ends_with_runs_just_that_trial(self, cli: Cli, two: Path) -> None:
        cli("run", "evals.py", "--quiet")
        again = cli("show", "doubles:triple", "--sample", "one").out.splitlines()[-1].split()
        assert again[1:3] == ["fairtrial", "run"]
        assert cli(*again[2:], "--json").json["runs"][0]["report"]["experiments"][0]["trials"]["planned"] == 1

    def test_facts_of_one_trial(self, cli: Cli, place: Path) -> None:
        (place / "talk.py").write_text(TALKATIVE)
        cli("run", "talk.py", "--quiet")
        facts = cli("show", "talk", "--sample", "s 1", "--json").json
        assert facts["format"] == "fairtrial.trials/1"
        (trial,) = facts["trials"]
        assert set(trial) == {
            *("run_id", "experiment", "sample_id", "repeat", "outcome", "passed", "value", "reason", "metrics"),
            *("reward", "criteria"),
            *("error", "stage", "output", "attempt", "started_at", "latency_ms", "tokens", "metadata"),
            *("cost_usd", "judge_cost_usd", "cache_hits", "unpriced_calls", "cut_off_calls", "refused_calls"),
            "unknown_endings",
            *("sample", "events", "redacted"),
        }
        assert trial["sample"]["expected"] == {"because": [1, 2, 3]}
        assert [event["kind"].rpartition(":")[2] for event in trial["events"]] == [
            *("ChatMessage", "ChatMessage", "ToolInvoked", "ToolInvoked", "PromptExecuted")
        ]

    def test_repeats_are_shown_together_or_one_by_one(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--repeats", "2", "--quiet")
        assert cli("show", "doubles", "--sample", "one").out.count("again ") == 2
        assert "repeat 1" in cli("show", "doubles", "--sample", "one", "--repeat", "1").out
        done = cli("show", "doubles", "--sample", "one", "--repeat", "5")
        assert done.err == "error: run doubles@1 has no result for sample 'one' in repeat 5\n"


class TestFailures:
    def test_errors_come_first_with_their_reason(self, cli: Cli, place: Path) -> None:
        (place / "evals.py").write_text(BROKEN)
        cli("run", "evals.py", "--quiet")
        lines = cli("trials", "doubles", "--failed").out.splitlines()
        assert lines[:4] == [
            "task error: evals.py:15: ValueError: that is too hard",
            "  three  3",
            "failed: expected 9, got 8",
            "  four  4 -> 8",
        ]
        assert lines[-1] == "  fairtrial show doubles@1:broken --sample three   one trial in full"
        assert "four" not in cli("trials", "doubles", "--failed", "--kind", "task-error").out
        assert "only the first 1" in cli("trials", "doubles", "--failed", "--limit", "1").out
        facts = cli("trials", "doubles", "--failed", "--json").json
        assert (facts["format"], facts["truncated"]) == ("fairtrial.failures/1", False)
        assert [trial["outcome"] for trial in facts["trials"]] == ["task_error", "scored"]

    def test_nothing_failed(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--filter", "level=easy", "--quiet")
        assert cli("trials", "doubles+part", "--failed").err == "every trial of doubles+part@1 passed\n"
        assert (
            cli("trials", "doubles+part", "--failed", "--kind", "timeout").err
            == "no trial of that kind in doubles+part@1\n"
        )
        assert "did you mean timeout?" in cli("trials", "doubles+part", "--failed", "--kind", "time-out").err


class TestNames:
    @pytest.mark.parametrize(
        "name", ["doubles@1", "doubles:triple@1", "doubles@1:triple", "doubles@latest", "doubles:triple", "doubles"]
    )
    def test_a_run_is_named_as_people_type_it(self, cli: Cli, two: Path, name: str) -> None:
        cli("run", "evals.py", "--quiet")
        assert cli("show", name, "--json").json["run"]["suite"] == "doubles"

    def test_the_latest_is_meant_unless_a_number_is_given(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--quiet")
        cli("run", "evals.py", "--quiet", "--repeats", "2")
        assert cli("show", "doubles", "--json").json["run"]["repeats"] == 2
        assert cli("show", "doubles@1", "--json").json["run"]["repeats"] == 1

    def test_the_start_of_an_id_is_enough(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--quiet")
        store = open_store()
        run = store.runs()[0]
        assert cli("show", run.run_id[:5], "--json").json["run"]["run_id"] == run.run_id
        store.create_run(replace(run, run_id=run.run_id[:8] + "zzzz"))
        assert f"error: '{run.run_id[:5]}' is the start of 2 ids" in cli("show", run.run_id[:5]).err

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("doubls", "error: there is no run 'doubls'\n  did you mean doubles? See: fairtrial runs\n"),
            ("zz", "error: there is no run 'zz'\n  the latest are doubles; see: fairtrial runs\n"),
            ("doubles@7", "error: suite 'doubles' has no run 7\n  there is doubles@1; see: fairtrial runs\n"),
            ("doubles:tripl", "error: run doubles@1 has no experiment 'tripl'\n  did you mean doubles@1:triple?\n"),
            ("doubles:x", "error: run doubles@1 has no experiment 'x'\n  it has plain, triple\n"),
            ("doubles@last", "error: '@' must be followed by a run number or 'latest' (got 'last')\n"),
            ("doubles@1@2", "error: invalid run name 'doubles@1@2'\n"),
            (":x", "error: invalid run name ':x'\n"),
        ],
    )
    def test_unknown_names_get_near_ones(self, cli: Cli, two: Path, name: str, said: str) -> None:
        cli("run", "evals.py", "--quiet")
        done = cli("show", name)
        assert done.code == 2
        assert done.err.startswith(said)


def test_failures_of_samples_without_ids_show_the_start_of_their_inputs(cli: Cli, place: Path) -> None:
    (place / "table.csv").write_text("input,expected\nWhat is the capital of France?,Paris\nAnd of Peru?,Lima\n")
    (place / "evals.py").write_text(
        "from fairtrial import Dataset, EvalSuite, exact_match\n"
        'suite = EvalSuite("table", Dataset.load("table.csv", str, str), lambda text: "Rome", exact_match)\n'
    )
    cli("run", "evals.py", "--quiet")
    lines = cli("trials", "table", "--failed").out.splitlines()
    assert lines[0] == "failed: expected 'Paris', got …"
    assert re.fullmatch(r"  [0-9a-f]{8}  What is the capital of France\? -> Rome", lines[1])
    assert any("What is the capital" in line for line in lines)
    assert any("And of Peru?" in line for line in lines)
    assert cli("export", "table", "--output", "page.md").code == 0
    page = (place / "page.md").read_text(encoding="utf-8")
    assert re.search(r"[0-9a-f]{16} +And of Peru\?", page)


class TestSamplesWithoutIds:
    @pytest.fixture
    def hashed(self, cli: Cli, place: Path) -> list[str]:
        """The ids of three samples of a stored run, which are hashes."""
        (place / "data.csv").write_text("question,answer\na,x\nb,x\nc,x\n")
        (place / "evals.py").write_text(
            "from fairtrial import Dataset, EvalSuite, exact_match\n"
            'data = Dataset.load("data.csv", columns={"input": "question", "expected": "answer"})\n'
            'suite = EvalSuite("letters", data, lambda letter: letter, exact_match)\n'
        )
        cli("run", "evals.py", "--quiet")
        return [trial["sample_id"] for trial in cli("trials", "letters", "--json").json["trials"]]

    def test_the_start_of_an_id_names_a_sample_if_it_is_unique(self, cli: Cli, hashed: list[str]) -> None:
        whole = cli("show", "letters", "--sample", hashed[1]).out
        for text in (hashed[1][:6], f"{hashed[1][:7]}…", f"{hashed[1][:4]}…{hashed[1][-4:]}"):
            done = cli("show", "letters", "--sample", text)
            assert (done.code, done.out) == (0, whole)
        done = cli("run", "evals.py", "--quiet", "--sample", hashed[1][:6])
        assert "letters+part@1" in done.out
        assert ", 1 scored" in done.out

    def test_a_start_of_several_ids_is_refused_with_the_ids(self, cli: Cli, evals: Path) -> None:
        cli("run", "evals.py", "--quiet")
        done = cli("show", "doubles", "--sample", "t…")
        assert (done.code, done.out) == (2, "")
        assert "'t…' matches 2 sample ids\n  give more characters: two, three" in done.err
        assert cli("show", "doubles", "--sample", "thr").code == 2
