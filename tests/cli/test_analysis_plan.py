"""An analysis plan from its file to the comparison, as a user types it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fairtrial import AnalysisPlan, ConfigurationError, open_store
from tests.cli.conftest import EVALS, TWO, Cli

PLAN = """[plan]
primary = "passed"
secondary = ["value"]
margin = 0.1
slices = ["level"]
samples = 4
"""


@pytest.fixture
def planned(cli: Cli, two: Path, place: Path) -> Cli:
    (place / "plan.toml").write_text(PLAN)
    assert cli("run", "evals.py", "--quiet", "--plan", "plan.toml").code == 0
    return cli


def words(text: str) -> str:
    return " ".join(text.split())


class TestWriting:
    def test_a_plan_is_written_and_read_back(self, cli: Cli, two: Path, place: Path) -> None:
        cli("run", "evals.py", "--quiet")
        done = cli(
            "plan", "doubles", "--difference", "0.2", "--repeats", "1", "--margin", "0.1", "--by", "level",
            "--secondary", "value", "--secondary", 'odd "name"', "--cluster", "rank", "--power", "0.9",
            "--write", "plan.toml",
        )  # fmt: skip
        assert done.code == 0
        plan = AnalysisPlan.load("plan.toml")
        assert f"wrote plan.toml (plan {plan.digest[:8]}): fairtrial run --plan plan.toml" in done.out
        assert plan.suite == "doubles"
        assert plan.primary == "passed"
        assert plan.secondary == ("value", 'odd "name"')
        assert (plan.margin, plan.slices, plan.cluster, plan.power, plan.tests) == (0.1, ("level",), "rank", 0.9, 1)
        assert plan.smallest_difference_that_matters == 0.2
        assert plan.samples is not None
        assert f"About {plan.samples:,} samples" in words(done.out)
        again = cli("plan", "doubles", "--write", "plan.toml")
        assert again.code == 2
        assert "plan.toml exists" in again.err
        assert AnalysisPlan.load("plan.toml") == plan

    def test_the_smallest_difference_and_margin_of_another_metric_are_written_under_its_name(
        self, cli: Cli, two: Path
    ) -> None:
        cli("run", "evals.py", "--quiet")
        done = cli(
            "plan", "doubles", "--metric", "latency_ms", "--difference", "50", "--margin", "20", "--write", "p.toml"
        )
        assert done.code == 0, done.err
        plan = AnalysisPlan.load("p.toml")
        assert plan.smallest_difference_that_matters == {"latency_ms": 50}
        assert plan.margin is None
        assert plan.margins == {"latency_ms": 20}

    def test_what_is_wrong_in_a_file_is_named_before_anything_is_run(self, cli: Cli, two: Path, place: Path) -> None:
        for line, said in (
            ('primry = "passed"', "the plan has no 'primry'; did you mean primary?"),
            ("max_missing_shares = 0.1", "did you mean max_missing_share?"),
            ("samples = 0", "samples must be a whole number of at least 1 (got 0)"),
            ("repeats = true", "repeats must be a whole number of at least 1 (got True)"),
            ('secondary = ["passed"]', "passed is the primary metric and listed under secondary"),
            ("slices = 3", "slices must be a list of names (got 3)"),
            ('primary = "\\u001b[31m"', "primary must be a name in printable text"),
            ("margin = -1", "margin must be between 0 and 1"),
            ("alpha = 2", "alpha must be between 0 and 1"),
            ('power = "high"', "power must be between 0 and 1"),
        ):
            (place / "plan.toml").write_text(f"[plan]\n{line}\n")
            with pytest.raises(ConfigurationError) as refused:
                AnalysisPlan.load("plan.toml")
            assert str(refused.value).startswith("plan.toml: ")
            assert said in str(refused.value)
        done = cli("run", "evals.py", "--plan", "plan.toml")
        assert done.code == 2
        assert "plan.toml: power must be" in done.err
        assert not (place / ".fairtrial").exists()

    def test_the_plan_of_another_suite_is_refused(self, cli: Cli, two: Path, place: Path) -> None:
        (place / "plan.toml").write_text('[plan]\nsuite = "halves"\n')
        done = cli("run", "evals.py", "--plan", "plan.toml")
        assert done.code == 2
        assert "the plan in plan.toml is for suite 'halves' (got 'doubles')" in done.err


class TestComparing:
    def test_a_comparison_without_options_is_the_planned_one(self, planned: Cli) -> None:
        shown = words(planned("compare", "doubles").out)
        digest = AnalysisPlan.load("plan.toml").digest[:8]
        assert "As planned on 20" in shown
        assert f"before the first result (plan {digest})" in shown
        assert "Not as planned" not in shown
        assert "level = easy" in shown
        facts = planned("compare", "doubles", "--json").json
        assert facts["plan"]["deviations"] == []
        assert facts["plan"]["digest"].startswith(digest)
        assert [metric["metric"] for metric in facts["candidates"][0]["metrics"]] == ["passed", "value"]

    def test_every_change_by_an_option_is_listed(self, planned: Cli) -> None:
        smallest = "the smallest difference in passed that matters is 10.0 points, planned was 5.0 points"
        for options, said in (
            (["--alpha", "0.1"], ["alpha is 0.1, planned was 0.05"]),
            (["--metric", "value"], ["the primary metric passed is not compared"]),
            (
                ["--metric", "passed", "--metric", "latency_ms"],
                ["value was planned and is not compared", "latency_ms was not planned"],
            ),
            (
                ["--by", "rank"],
                ["slices by rank were not planned", "slices by level were planned and are left out"],
            ),
            (["--cluster", "level"], ["samples are clustered by level, which was not planned"]),
            (["--smallest-difference", "0.1"], [smallest]),
        ):
            done = planned("compare", "doubles", *options)
            assert done.code == 0, done.err
            for each in said:
                assert f"Not as planned: {each}." in words(done.out)
            assert "As planned" not in done.out

    def test_fewer_samples_and_sides_without_the_plan_are_listed(self, cli: Cli, two: Path, place: Path) -> None:
        (place / "plan.toml").write_text(PLAN.replace("samples = 4", "samples = 40"))
        cli("run", "evals.py", "--quiet")
        two.write_text(TWO.replace('"factor", 2', '"factor", 2.0'))
        cli("run", "evals.py", "--quiet", "--plan", "plan.toml")
        shown = words(cli("compare", "doubles@1:plain", "doubles@2:plain").out)
        assert "Not as planned: 4 samples are compared, planned were 40." in shown
        assert "Not as planned: doubles@1 was run without this plan." in shown
        assert "Not as planned: doubles@2 has 4 samples, planned were 40." in words(cli("show", "doubles@2").out)

    def test_candidates_with_different_plans_are_listed(self, planned: Cli, two: Path, place: Path) -> None:
        other = place / "other.toml"
        other.write_text(PLAN.replace("0.1", "0.2"))
        two.write_text(TWO.replace('"factor", 2', '"factor", 2.0'))
        planned("run", "evals.py", "--quiet", "--plan", "other.toml")
        shown = words(planned("compare", "doubles@1:plain", "doubles@2:plain").out)
        short = AnalysisPlan.load("plan.toml").digest[:8]
        assert f"Not as planned: doubles@1 has another plan ({short})." in shown

    def test_an_earlier_run_of_the_same_code_and_samples_is_listed(self, cli: Cli, two: Path, place: Path) -> None:
        cli("run", "evals.py", "--quiet")
        (place / "plan.toml").write_text(PLAN)
        cli("run", "evals.py", "--quiet", "--plan", "plan.toml")
        said = "Not as planned: doubles@1 ran the same code on the same samples before doubles@2 had a plan."
        assert said in words(cli("compare", "doubles@2").out)
        cli("store", "delete", "doubles@1", "--yes")
        assert said in words(cli("show", "doubles@2").out)


class TestGating:
    def test_a_gate_without_rules_applies_the_planned_ones(self, planned: Cli) -> None:
        done = planned("gate", "doubles:triple", "--baseline", "doubles:plain")
        assert "passed at most 10.0 points worse" in words(done.out)
        assert "As planned on 20" in words(done.out)

    def test_a_margin_that_was_changed_is_listed(self, planned: Cli) -> None:
        done = planned("gate", "doubles:triple", "--baseline", "doubles:plain", "--margin", "0.9")
        assert "Not as planned: the margin of passed is 90.0 points, planned was 10.0 points." in words(done.out)
        both = ("gate", "doubles:triple", "--baseline", "doubles:plain")
        facts = planned(*both, "--floor", "passed=0.1", "--json").json
        assert "a floor of passed was not planned" in facts["plan"]["deviations"]

    def test_rules_in_pyproject_that_differ_from_the_plan_are_listed(self, planned: Cli, place: Path) -> None:
        (place / "pyproject.toml").write_text("[tool.fairtrial.gate]\nmargin = 0.1\nmax_missing = 0.2\n")
        shown = words(planned("gate", "doubles:triple", "--baseline", "doubles:plain").out)
        rule = "up to 20.0% missing outcomes are left out, planned was: up to 5.0% are taken at their worst"
        assert f"Not as planned: {rule}." in shown

    def test_a_margin_changed_after_an_attempt_leaves_a_trace_without_a_plan(self, cli: Cli, two: Path) -> None:
        cli("run", "evals.py", "--quiet")
        first = cli("gate", "doubles:triple", "--baseline", "doubles:plain", "--margin", "0.02")
        assert "another margin" not in first.out
        assert (
            "another margin" not in cli("gate", "doubles:triple", "--baseline", "doubles:plain", "--margin", "0.02").out
        )
        second = words(cli("gate", "doubles:triple", "--baseline", "doubles:plain", "--margin", "0.9").out)
        assert "An earlier gate of this code had another margin: 2.0 points in passed; now 90.0 points." in second
        assert "attempt 2" not in second


class TestRuns:
    def test_the_plan_of_pyproject_is_that_of_its_suite(self, cli: Cli, two: Path, place: Path) -> None:
        table = PLAN.replace("[plan]", '[tool.fairtrial.plan]\nsuite = "doubles"')
        (place / "pyproject.toml").write_text(table)
        (place / "others.py").write_text(EVALS.replace('"doubles"', '"others"'))
        assert cli("run", "evals.py", "others.py", "--quiet").code == 0
        assert "As planned" in cli("show", "doubles").out
        assert "lan " not in cli("show", "others").out.replace("planned", "")
        (place / "pyproject.toml").write_text(table.replace("primary", "primry"))
        assert "did you mean primary?" in cli("run", "evals.py").err

    def test_a_resumed_run_keeps_its_plan_and_names_another_one(self, cli: Cli, two: Path, place: Path) -> None:
        (place / "plan.toml").write_text(PLAN)
        (place / "late.toml").write_text(PLAN.replace("margin = 0.1", "margin = 0.5"))
        cli("run", "evals.py", "--quiet", "--plan", "plan.toml")
        store = open_store(".fairtrial/runs.db")
        run = store.runs()[0]
        store.update_run(run.run_id, status="interrupted")
        done = cli("run", "evals.py", "--plan", "late.toml")
        first, late = (AnalysisPlan.load(name).digest for name in ("plan.toml", "late.toml"))
        assert f"run {run.run_id} keeps its plan {first[:8]}: plan {late[:8]} was given after 8 results" in words(
            done.err
        )
        notes = store.get_run(run.run_id).noted.plans
        assert [(note.digest, note.results) for note in notes] == [(first, 0), (late, 8)]
        shown = words(cli("show", "doubles").out)
        assert f"Not as planned: another plan ({late[:8]}) was given to doubles@1 on 20" in shown
        assert "after 8 results" in shown
        gated = words(cli("gate", "doubles:triple", "--baseline", "doubles:plain").out)
        assert "passed at most 10.0 points worse" in gated
        assert f"plan {first[:8]}" in gated
        store.update_run(run.run_id, status="interrupted")
        cli("run", "evals.py", "--quiet")
        assert store.get_run(run.run_id).noted.plans == notes

    def test_a_plan_for_a_run_with_results_is_called_late(self, cli: Cli, two: Path, place: Path) -> None:
        cli("run", "evals.py", "--quiet")
        store = open_store(".fairtrial/runs.db")
        run = store.runs()[0]
        store.update_run(run.run_id, status="interrupted")
        (place / "plan.toml").write_text(PLAN)
        cli("run", "evals.py", "--quiet", "--plan", "plan.toml")
        said = "Not as planned: the plan was given to doubles@1 after 8 results."
        assert said in words(cli("show", "doubles").out)
        assert said in words(cli("compare", "doubles").out)


class TestPapers:
    def test_a_table_and_a_methods_paragraph_are_printed(self, planned: Cli) -> None:
        table = planned("compare", "doubles", "--format", "latex").out
        assert table.startswith("\\begin{table}")
        assert "\\end{table}" in table
        text = words(planned("compare", "doubles", "--methods").out)
        assert "4 samples" in text
        assert "passed, was tested on its own at a level of 0.05" in text
        assert "planned on 20" in text
        assert "no deviation" in text
        assert planned("compare", "doubles", "--format", "latx").code == 2
        assert planned("compare", "doubles", "--methods", "--json").code == 2

    def test_the_file_of_a_plan_is_toml_whatever_its_names(self, place: Path) -> None:
        odd = 'a"b\\c # d'
        plan = AnalysisPlan(odd, secondary=("é",), floors={odd: 0.5}, slices=("x]",))
        (place / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
        assert tomllib.loads(plan.to_toml())["plan"]["primary"] == odd
        assert AnalysisPlan.load("plan.toml") == plan


class TestHistory:
    def test_earlier_runs_make_the_figures_of_a_part_more_precise(self, cli: Cli, place: Path) -> None:
        (place / "evals.py").write_text(MANY)
        (place / "plan.toml").write_text('[plan]\nhistory = ["guesses@1", "guesses@9"]\n')
        assert cli("run", "evals.py", "--quiet").code == 0
        done = cli("run", "evals.py", "--plan", "plan.toml", "--max-samples", "60")
        assert done.code == 0, done.err
        shown = words(cli("show", "guesses+part", "--full").out)
        assert "By the history of 300 samples in 1 run estimate interval as precise as" in shown
        assert "plain samples" in shown
        for text in (words(done.out), shown):
            assert "guesses@9 is not in this store: its history is not used." in text


MANY = """
import random

from fairtrial import Dataset, EvalSuite, exact_match

hard = [random.Random(place).random() < 0.4 for place in range(300)]
dataset = Dataset.of({place: not hard[place] for place in range(300)}, name="guesses")
suite = EvalSuite("guesses", dataset, lambda place: place % 9 != 0, exact_match)
"""
