"""`compare`, `plan`, `leaderboard`, `gate`, `calibrate` and `rescore`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairtrial import open_store
from fairtrial.integrations.model_server import ModelServer
from tests.cli.conftest import Cli


class TestCompare:
    @pytest.mark.proves("R92")
    def test_experiments_and_runs_are_compared(self, ran: Cli) -> None:
        ran("run", "evals.py", "--quiet", "--experiment", "plain")
        done = ran("compare", "doubles@1:plain", "doubles@1:triple")
        assert done.code == 0
        assert "triple against plain" in done.out
        assert ran("compare", "doubles@1").out == done.out
        assert ran("compare", "doubles@1:plain", "doubles@2").code == 0
        facts = ran("compare", "doubles@1", "--all-metrics", "--by", "level", "--json").json
        assert facts["format"] == "fairtrial.comparison/1"
        assert ran("compare", "doubles@1", "--metric", "value", "--json").json["candidates"][0]["metrics"][0][
            "metric"
        ] == ("value")

    def test_a_comparison_of_one_or_of_ambiguous_experiments_is_refused(self, ran: Cli) -> None:
        assert ran("compare", "doubles:plain").err == (
            "error: a comparison needs two experiments (got doubles:plain)\n"
            "  as in: fairtrial compare doubles@1:plain doubles@1:triple\n"
        )
        assert ran("compare", "doubles", "doubles").err == (
            "error: doubles has 2 experiments\n  choose one: doubles@1:plain or doubles@1:triple\n"
        )

    def test_hints_name_runs_that_exist(self, ran: Cli) -> None:
        ran("run", "evals.py", "--quiet", "--experiment", "plain")
        assert "  as in: fairtrial compare doubles@1:plain doubles@2\n" in ran("compare", "doubles").err
        assert ran("compare", "doubles@1:plain", "doubles@2").code == 0
        assert "  name one: --baseline doubles@1:plain\n" in ran("gate", "doubles", "--margin", "0.1").err
        assert ran("gate", "doubles", "--margin", "0.1", "--baseline", "doubles@1:plain").code in (0, 1, 3)
        ran("store", "delete", "doubles@1", "--yes")
        assert "there is no other run of suite 'doubles' yet: run it again" in ran("compare", "doubles").err
        assert "there is no other run of this suite yet: run it again" in ran("gate", "doubles", "--margin", "0.1").err


class TestBounds:
    SUITE = """
from fairtrial import Dataset, EvalSuite, Experiment, Metric, Score

def fee(output, expected):
    return Score(1.0, metrics=[Metric("fee", output, higher_is_better=False)])

def charge(number, ctx):
    price = ctx.experiment.params["price"]
    if price == "cheap" and number % 20 == 0:
        raise OSError("no answer")
    return (0.004 if price == "cheap" else 0.1) + number % 7 / 1000

prices = [Experiment(price, params={"price": price}) for price in ("dear", "cheap")]
suite = EvalSuite("fees", Dataset.of({number: None for number in range(100)}), charge, fee, experiments=prices)
"""

    def test_a_range_that_is_declared_gives_failures_their_worst_value(self, cli: Cli, place: Path) -> None:
        (place / "fees.py").write_text(self.SUITE)
        cli("run", "fees.py", "--quiet")
        compared = ("compare", "fees@1", "--metric", "fee")
        assert "fee has no worst value: 5 failed trials could not be counted" in " ".join(cli(*compared).out.split())
        with_range = cli(*compared, "--bounds", "fee=0:1", "--json").json["candidates"][0]["metrics"][0]
        assert (with_range["n"], with_range["uncounted"]) == (100, 0)
        ranked = ("leaderboard", "fees", "--metric", "fee")
        assert "95 samples that every system has" in cli(*ranked).out
        assert "100 samples that every system has" in cli(*ranked, "--bounds", "fee=0:1").out
        gate = ("gate", "fees:cheap", "--ceiling", "fee=0.5")
        assert (cli(*gate).code, cli(*gate, "--bounds", "fee=0:1").code) == (3, 0)

    @pytest.mark.parametrize("text", ["fee", "fee=1", "fee=1:0", "fee=0:inf", "fee=a:b", "fee=0:1:2"])
    def test_what_is_no_range_is_refused(self, ran: Cli, text: str) -> None:
        for command in (("compare", "doubles"), ("leaderboard", "doubles"), ("gate", "doubles:plain")):
            done = ran(*command, "--bounds", text)
            assert done.code == 2
            assert "as in: --bounds f1=0:1" in done.err


class TestPlan:
    @pytest.mark.proves("R149")
    def test_a_plan_is_made_from_all_runs_of_a_suite_or_from_one(self, ran: Cli) -> None:
        ran("run", "evals.py", "--quiet")
        done = ran("plan", "doubles", "--difference", "0.1")
        assert done.code == 0
        assert done.out.splitlines()[2].startswith("About ")
        assert "earlier comparisons" in done.out
        facts = ran("plan", "doubles@1", "--repeats", "2", "--repeats", "4", "--tests", "3", "--json").json
        assert facts["format"] == "fairtrial.plan/1"
        assert [option["repeats"] for option in facts["options"]] == [2, 4]
        assert (facts["suite"], facts["tests"], facts["present_samples"]) == ("doubles", 3, 4)
        assert "triple and plain" in facts["assumptions"][0]
        assert "to be like plain" in ran("plan", "doubles@1:plain", "--json").json["assumptions"][0]

    def test_without_a_name_the_worst_case_is_assumed_and_no_store_is_needed(self, cli: Cli) -> None:
        done = cli("plan", "--difference", "0.05", "--power", "0.9")
        assert (done.code, done.err) == (0, "")
        assert "worst case" in done.out

    def test_a_name_that_does_not_exist_is_an_error_that_says_what_to_do(self, ran: Cli) -> None:
        done = ran("plan", "doublez")
        assert done.code == 2
        assert "did you mean doubles" in done.err
        assert "without a name, the worst case is assumed" in done.err

    def test_the_default_difference_is_that_of_the_gate_rules(self, ran: Cli, place: Path) -> None:
        assert ran("plan", "--json").json["difference"] == 0.05
        file = place / "pyproject.toml"
        file.write_text("[tool.fairtrial.gate]\nsmallest_difference_that_matters = 0.02\n")
        assert ran("plan", "--json").json["difference"] == 0.02
        file.write_text("[tool.fairtrial.gate]\nsmallest_difference_that_matters = { latency_ms = 50 }\n")
        assert ran("plan", "--json").json["difference"] == 0.05
        assert ran("plan", "doubles", "--metric", "latency_ms", "--json").json["difference"] == 50
        done = ran("plan", "doubles", "--metric", "tokens")
        assert (done.code, done.err) == (
            2,
            "error: the difference in tokens that matters must be given\n  as in: --difference 100\n",
        )


class TestLeaderboard:
    @pytest.mark.proves("R148")
    def test_all_experiments_of_all_runs_are_ranked(self, ran: Cli) -> None:
        done = ran("leaderboard", "doubles")
        assert done.code == 0
        assert "any of 2 systems may be the best; plain leads with 75.0%" in done.out
        ran("run", "evals.py", "--quiet", "--experiment", "plain")
        facts = ran("leaderboard", "doubles@1", "doubles@2", "--baseline", "doubles@1:plain", "--json").json
        assert facts["format"] == "fairtrial.leaderboard/1"
        assert {one["name"] for one in facts["systems"]} == {"doubles@1:plain", "doubles@1:triple", "doubles@2:plain"}
        assert facts["baseline"] == "doubles@1:plain"
        assert ran("leaderboard", "doubles@1", "--weight", "numbers=2").code == 0

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["doubles:plain"], "a leaderboard needs at least two systems (got 1)"),
            (["doubles", "--baseline", "best"], "the systems are plain, triple"),
            (["doubles", "--metric", "wit"], "no metric 'wit': the metrics are"),
            (["doubles", "--weight", "numbers"], "--weight must be KEY=VALUE"),
            (["doubles", "--weight", "numbers=much"], "a weight must be a number (got 'much')"),
            (["doubles", "--lower-is-better", "--higher-is-better"], "cannot both be given"),
        ],
    )
    def test_an_invalid_leaderboard_is_refused_with_the_reason(self, ran: Cli, words: list[str], said: str) -> None:
        done = ran("leaderboard", *words)
        assert done.code == 2
        assert said in " ".join(done.err.split())


class TestGate:
    @pytest.mark.proves("R103")
    def test_a_gate_passes_fails_or_is_inconclusive(self, ran: Cli) -> None:
        assert ran("gate", "doubles:plain", "--floor", "passed=0.15").code == 0
        assert ran("gate", "doubles:triple", "--floor", "passed=0.9").code == 1
        assert ran("gate", "doubles:plain", "--floor", "passed=0.7").code == 3
        done = ran("gate", "doubles:plain", "--baseline", "doubles:triple", "--margin", "0.1", "--json")
        assert done.code == done.json["exit_code"]
        assert done.json["format"] == "fairtrial.gate/1"

    def test_rules_come_from_files_and_options_come_on_top(self, ran: Cli, place: Path) -> None:
        (place / "rules.toml").write_text("[gate]\nmin_pass_rate = 0.9\n")
        assert ran("gate", "doubles:triple", "--rules", "rules.toml").code == 1
        (place / "pyproject.toml").write_text("[tool.fairtrial.gate]\nmin_pass_rate = 0.9\n")
        assert ran("gate", "doubles:triple").code == 1
        assert ran("gate", "doubles:plain", "--floor", "passed=0.1").code == 0
        assert ran("gate", "doubles:plain", "--floor", "passed=0.1", "--ceiling", "value=0.01").code == 1
        assert ran("gate", "doubles:plain", "--floor", "passed=0.1", "--floor", "value=0.0").code == 0

    def test_a_summary_is_added_where_ci_offers_a_page(
        self, ran: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (place / "summary.md").write_text("before\n")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place / "summary.md"))
        ran("gate", "doubles:plain", "--floor", "passed=0.2")
        text = (place / "summary.md").read_text()
        assert text.startswith("before\n")
        assert "pass rate" in text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["doubles:plain"], "error: the gate has no rules\n"),
            (["doubles", "--floor", "passed=0.1"], "error: doubles has 2 experiments\n"),
            (["doubles:plain", "--margin", "0.1"], "error: a margin needs a baseline\n"),
            (["doubles:plain", "--floor", "pased=0.5"], "error: no metric 'pased': the metrics are passed, value"),
            (["doubles:plain", "--floor", "value=high"], "error: --floor must be METRIC=NUMBER (got value=high)\n"),
            (["doubles:plain", "--floor", "value"], "error: --floor must be KEY=VALUE (got 'value')\n"),
        ],
    )
    def test_an_invalid_gate_is_refused_with_the_reason(self, ran: Cli, words: list[str], said: str) -> None:
        done = ran("gate", *words)
        assert done.code == 2
        assert done.err.startswith(said)


class TestCalibrate:
    def test_a_judge_is_compared_with_labels(self, ran: Cli, place: Path) -> None:
        (place / "labels.csv").write_text("id,label\none,pass\ntwo,pass\nthree,fail\nfour,fail\n")
        rows = [{"id": "one", "label": True}, {"id": "two", "label": 1}, {"id": "four", "label": False}]
        (place / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
        done = ran("calibrate", "doubles:plain", "--labels", "labels.csv")
        assert done.code == 0
        assert "agree" in done.out
        facts = ran("calibrate", "doubles:plain", "--labels", "labels.jsonl", "--json").json
        assert (facts["format"], facts["experiment"]) == ("fairtrial.calibration/1", "plain")

    @pytest.mark.parametrize(
        ("file", "text", "said"),
        [
            (
                "l.csv",
                "id,verdict\none,1\n",
                "error: l.csv:2: a label needs id and label\n  this row has id, verdict\n",
            ),
            ("l.jsonl", "[]\n", "error: l.jsonl:1: a label needs id and label\n  this row has neither\n"),
            ("l.jsonl", "{\n", "error: l.jsonl:1: not JSON: "),
            (
                "l.csv",
                'id,note,label\none,"two\nlines\u2028",pass\ntwo,,\n,,pass\n',
                "error: l.csv:5: a label needs id and label\n  this row has id, note, label\n",
            ),
            ("l.jsonl", '{"id": "one", "note": "a\u2028b", "label": 1}\n{\n', "error: l.jsonl:2: not JSON: "),
            ("l.txt", "", "error: labels must be in a .csv or .jsonl file (got l.txt)\n"),
        ],
    )
    def test_bad_labels_name_their_place(self, ran: Cli, place: Path, file: str, text: str, said: str) -> None:
        (place / file).write_text(text)
        assert ran("calibrate", "doubles:plain", "--labels", file).err.startswith(said)

    def test_labels_correct_comparisons_and_gates(self, ran: Cli, place: Path) -> None:
        rows = [f"{sample},{name},pass,2" for sample in ("one", "two", "three") for name in ("plain", "triple")]
        (place / "labels.csv").write_text("id,experiment,label,weight\n" + "\n".join(rows))
        words = ("--labels", "labels.csv", "--labels-by-verdict")
        done = ran("compare", "doubles", *words)
        assert done.code == 0
        assert "by 3 labels of triple and 3 of plain" in " ".join(done.out.split())
        facts = ran("gate", "doubles:triple", "--baseline", "doubles:plain", "--margin", "0.9", *words, "--json")
        assert facts.code in (0, 3)
        assert facts.json["checks"][0]["labels"] == [3, 3]
        assert "60 labels" not in ran("gate", "doubles:plain", "--floor", "passed=0.1", *words).out
        assert "3 labels" in ran("gate", "doubles:plain", "--floor", "passed=0.1", *words).out
        none = ran("compare", "doubles", "--labels", "store")
        assert none.code == 2
        assert "labels must be of both sides (got 0 of plain and 0 of triple)" in none.err

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("id,label\none,pass\n", "error: l.csv:2: the row does not tell which experiment the label belongs to\n"),
            ("id,experiment,label,weight\none,plain,pass,0\n", "error: l.csv:2: repeat must be a whole number and"),
            ("id,run,label,repeat\none,doubles@1,pass,x\n", "error: l.csv:2: the row does not tell which experiment"),
            ("id,run,experiment,label,repeat\none,doubles@1,plain,pass,x\n", "error: l.csv:2: repeat must be"),
        ],
    )
    def test_labels_of_a_comparison_say_whose_they_are(self, ran: Cli, place: Path, text: str, said: str) -> None:
        (place / "l.csv").write_text(text)
        done = ran("compare", "doubles", "--labels", "l.csv")
        assert (done.code, done.err.startswith(said)) == (2, True)

    def test_labels_of_repeats_name_the_repeat(self, ran: Cli, place: Path) -> None:
        ran("run", "evals.py", "--quiet", "--experiment", "plain", "--repeats", "2")
        (place / "l.csv").write_text("id,label\none,pass\n")
        assert (
            "has 2 repeats of each sample\n  add a column `repeat`"
            in ran("calibrate", "doubles", "--labels", "l.csv").err
        )
        (place / "l.csv").write_text("id,label,repeat\none,pass,1\n")
        assert ran("calibrate", "doubles", "--labels", "l.csv").code == 0

    def test_which_labels_and_which_experiment(self, ran: Cli) -> None:
        assert "No such file" in ran("calibrate", "doubles:plain", "--labels", "none.csv").err
        assert "error: doubles has 2 experiments" in ran("calibrate", "doubles").err


class TestGolden:
    def test_a_rule_is_measured_at_once(self, cli: Cli) -> None:
        done = cli("calibrate", "--golden", "pii_leakage")
        assert done.code == 0
        assert done.out.splitlines()[1].startswith("pii_leakage agrees with 35 of 44 labels: 79.5% (")
        assert "name-and-address" in done.out
        assert "limit: names, postal addresses" in done.out
        facts = cli("calibrate", "--golden", "pii_leakage", "--json", "--level", "0.9").json
        assert (facts["format"], facts["level"], len(facts["disagreements"])) == ("fairtrial.golden/1", 0.9, 9)
        assert not Path(".fairtrial").exists()  # Nothing is stored.

    def test_a_judge_is_measured_with_the_model_that_is_named(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        with ModelServer('{"reason": "fine", "label": "fair"}') as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
            done = cli("calibrate", "--golden", "bias", "--model", "openai:judge")
            assert server.stats().requests == 46
        assert done.code == 0
        assert "bias agrees with 24 of 46 labels" in done.out
        assert "judged by judge" in done.out
        assert "who have measured no model with them" in " ".join(done.out.split())

    def test_a_judge_without_verdicts_fails(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        with ModelServer("I cannot say.") as server:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
            done = cli("calibrate", "--golden", "toxicity", "--model", "openai:judge")
        assert done.code == 4
        assert "without a score" in done.out

    @pytest.mark.parametrize(("what", "kind"), [("5", "int"), ("fairtrial.ScriptedAdapter", "a class")])
    def test_a_judge_that_is_no_adapter_is_refused_before_the_first_case(
        self, cli: Cli, place: Path, what: str, kind: str
    ) -> None:
        (place / "odd.py").write_text(f"import fairtrial\nadapter = {what}\n")
        done = cli("calibrate", "--golden", "toxicity", "--model", "odd.py:adapter")
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            f"error: odd.py:adapter must be an adapter (got {kind})\n"
            '  as in: adapter = fairtrial.OpenAIAdapter("gpt-6.1-sol")\n'
        )

    def test_the_sets_are_listed(self, cli: Cli) -> None:
        done = cli("calibrate", "--golden", "list")
        assert [line.split()[:2] for line in done.out.splitlines() if line[:1].strip()][1:3] == [
            ["json_correctness", "rule"],
            ["pii_leakage", "rule"],
        ]
        facts = cli("calibrate", "--golden", "list", "--json").json
        assert [row["kind"] for row in facts["golden_sets"]] == ["rule"] * 3 + ["judge"] * 9

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--golden", "toxcity"], "error: there is no golden set 'toxcity'\n  did you mean toxicity?\n"),
            (["--golden", "x"], "error: there is no golden set 'x'\n  fairtrial calibrate --golden list shows them\n"),
            (
                ["--golden", "bias"],
                "error: bias is a judge, which needs a model\n  as in: fairtrial calibrate --golden",
            ),
            (["--golden", "pii_leakage", "--model", "openai:m"], "error: pii_leakage is a rule, which asks no model\n"),
            (["doubles", "--golden", "bias"], "error: --golden takes neither a run nor labels\n"),
            (["--golden", "bias", "--model", "opnai:m"], "error: there is no provider 'opnai'\n"),
            (["--model", "openai:m"], "error: --model is the judge of a golden set\n"),
            ([], "error: name a run, or a golden set\n"),
        ],
    )
    def test_mistakes_are_explained(self, cli: Cli, words: list[str], said: str) -> None:
        done = cli("calibrate", *words)
        assert (done.code, done.err.startswith(said)) == (2, True), done.err


def test_stored_outputs_are_scored_again_without_the_task(ran: Cli, two: Path) -> None:
    two.write_text(two.read_text().replace("double, exact_match,", "double, lambda output, expected: True,"))
    done = ran("rescore", "doubles", "evals.py")
    assert done.code == 0
    assert done.err == "rescored doubles@1 as doubles@2; no task was called\n"
    assert "100.0%" in done.out
    assert open_store().runs()[0].parent_run == open_store().runs()[1].run_id
    assert ran("rescore", "doubles@1", "evals.py", "--json").json["format"] == "fairtrial.report/1"


class TestRescore:
    def test_another_suite_is_refused_with_the_difference(self, ran: Cli, two: Path) -> None:
        two.write_text(two.read_text().replace('Experiment("plain"', 'Experiment("other"'))
        done = ran("rescore", "doubles", "evals.py")
        assert done.code == 2
        assert "it has experiment 'plain', but the suite has" in done.err
        assert "use the suite that executed the run" in done.err
        assert len(open_store().runs()) == 1

    def test_scoring_that_failed_is_repeated_by_the_same_command(self, ran: Cli, two: Path) -> None:
        judge = "lambda output, expected: 1 / 0 if __import__('os').path.exists('broken') else True"
        two.write_text(two.read_text().replace("double, exact_match,", f"double, {judge},"))
        Path("broken").touch()
        done = ran("rescore", "doubles", "evals.py")
        assert done.code == 4
        assert "the same command scores them again" in done.err
        Path("broken").unlink()
        assert ran("rescore", "doubles@1", "evals.py").code == 0
        assert [run.status for run in open_store().runs()] == ["finished", "finished"]
