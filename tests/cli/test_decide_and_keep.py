"""`compare`, `leaderboard`, `gate`, `calibrate`, `rescore`, `export`, `delete`, `store` and `config`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pyarrow.parquet
import pytest

from fairtrial import ChatMessage, EvalReport, open_store
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.models.adapter import ModelReply
from fairtrial.models.cache import ResponseCache
from fairtrial.reports.figures.column_file import write_columns
from fairtrial.runs import run_lease
from fairtrial.store import RunStore
from fairtrial.store.schema import VERSION
from fairtrial.testing import FakeClock
from tests.cli.conftest import EVALS, Cli


@pytest.fixture
def ran(cli: Cli, two: Path) -> Cli:
    cli("run", "evals.py", "--quiet")
    return cli


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
        ran("delete", "doubles@1", "--yes")
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
        assert ran("gate", "doubles:plain", "--min-pass-rate", "0.15").code == 0
        assert ran("gate", "doubles:triple", "--min-pass-rate", "0.9").code == 1
        assert ran("gate", "doubles:plain", "--min-pass-rate", "0.7").code == 3
        done = ran("gate", "doubles:plain", "--baseline", "doubles:triple", "--margin", "0.1", "--json")
        assert done.code == done.json["exit_code"]
        assert done.json["format"] == "fairtrial.gate/1"

    def test_rules_come_from_files_and_options_come_on_top(self, ran: Cli, place: Path) -> None:
        (place / "rules.toml").write_text("[gate]\nmin_pass_rate = 0.9\n")
        assert ran("gate", "doubles:triple", "--rules", "rules.toml").code == 1
        (place / "pyproject.toml").write_text("[tool.fairtrial.gate]\nmin_pass_rate = 0.9\n")
        assert ran("gate", "doubles:triple").code == 1
        assert ran("gate", "doubles:plain", "--min-pass-rate", "0.1").code == 0
        assert ran("gate", "doubles:plain", "--min-pass-rate", "0.1", "--ceiling", "value=0.01").code == 1
        assert ran("gate", "doubles:plain", "--min-pass-rate", "0.1", "--floor", "value=0.0").code == 0

    def test_a_summary_is_added_where_ci_offers_a_page(
        self, ran: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (place / "summary.md").write_text("before\n")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place / "summary.md"))
        ran("gate", "doubles:plain", "--min-pass-rate", "0.2")
        text = (place / "summary.md").read_text()
        assert text.startswith("before\n")
        assert "pass rate" in text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["doubles:plain"], "error: the gate has no rules\n"),
            (["doubles", "--min-pass-rate", "0.1"], "error: doubles has 2 experiments\n"),
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
        assert "60 labels" not in ran("gate", "doubles:plain", "--min-pass-rate", "0.1", *words).out
        assert "3 labels" in ran("gate", "doubles:plain", "--min-pass-rate", "0.1", *words).out
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


class TestExport:
    def test_a_page_has_the_comparison_with_a_baseline(self, ran: Cli, place: Path) -> None:
        assert ran("export", "doubles", "-o", "page.html", "--against", "doubles:plain").code == 0
        page = (place / "page.html").read_text()
        assert "doubles@1: triple against plain" in page
        assert ran("export", "doubles", "-o", "page2.html", "--against", "plain").code == 0
        assert "doubles@1: triple against plain" in Path("page2.html").read_text()
        assert "there is no run 'plan'" in ran("export", "doubles", "-o", "page2.html", "--against", "plan").err
        assert "Wins and losses by slice, passed" in page
        assert "level = hard" in page
        ran("run", "evals.py", "--quiet", "--resume", "never")
        assert ran("export", "doubles@2", "-o", "page.html", "--against", "doubles@1").code == 0
        page = (place / "page.html").read_text()
        assert page.index("doubles@2:plain against doubles@1:plain") < page.index('<details class="trial"')
        assert "doubles@2:triple against doubles@1:triple" in page
        text = ran("export", "doubles@2", "-f", "markdown", "-o", "-", "--against", "doubles@1:plain").out
        assert "#### 2 candidates against doubles@\u200b1:plain" in text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["-f", "csv", "--against", "doubles"], "--against needs --format html or markdown"),
            (
                ["-f", "html", "--against", "doubles:plain"],
                "no experiment of doubles@2 can be compared with doubles:plain",
            ),
        ],
    )
    def test_a_comparison_that_cannot_be_exported_is_refused(self, ran: Cli, words: list[str], said: str) -> None:
        ran("run", "evals.py", "--quiet", "--experiment", "plain")
        done = ran("export", "doubles@2", *words)
        assert (done.code, done.out) == (2, "")
        assert said in done.err

    @pytest.mark.proves("R93")
    @pytest.mark.parametrize("format", ["csv", "jsonl", "parquet", "html", "junit", "markdown", "json", "run"])
    def test_every_format_is_written(self, ran: Cli, place: Path, format: str) -> None:
        done = ran("export", "doubles", "--format", format, "--json")
        assert done.code == 0
        file = place / done.json["file"]
        assert file.stat().st_size == done.json["bytes"] > 0
        assert file.name.startswith("doubles-1.")
        if format in ("csv", "jsonl"):
            rows = file.read_text().splitlines()[format == "csv" :]
            assert ["four" in row for row in rows] == [False] * 6 + [True] * 2
        elif format == "parquet":
            assert pyarrow.parquet.read_table(file).num_rows == 8

    def test_the_files_ending_says_the_format(self, ran: Cli, place: Path) -> None:
        done = ran("export", "doubles", "-o", "out.xml")
        assert done.err == f"wrote out.xml, {(place / 'out.xml').stat().st_size:,} bytes\n"
        assert (place / "out.xml").read_text().startswith("<?xml")
        ran("export", "doubles", "-o", "all.db")
        assert EvalReport.load("all.db").total == 8

    @pytest.mark.parametrize(
        ("format", "start"),
        [
            ("csv", "run,suite"),
            ("jsonl", '{"run":'),
            ("markdown", "#"),
            ("json", "{"),
            ("junit", "<?xml"),
            ("html", "<!"),
        ],
    )
    def test_text_can_be_printed(self, ran: Cli, format: str, start: str) -> None:
        assert ran("export", "doubles", "--format", format, "-o", "-").out.startswith(start)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "error: no export format is given\n"),
            (["--format", "cvs"], "error: unknown export format 'cvs'\n  did you mean csv?\n"),
            (
                ["--format", "run", "-o", "-"],
                "error: run is a binary format and cannot be printed\n  name a file with --output\n",
            ),
            (["-o", "no/where.csv"], "error: there is no folder no\n"),
        ],
    )
    def test_an_invalid_export_is_refused_with_the_reason(self, ran: Cli, words: list[str], said: str) -> None:
        assert ran("export", "doubles", *words).err.startswith(said)

    def test_runs_are_exported_whole(self, ran: Cli) -> None:
        assert ran("export", "doubles:plain", "--format", "csv").err == (
            "error: doubles:plain is one experiment, but only whole runs can be exported\n"
            "  as in: fairtrial export doubles@1\n"
        )


class TestDelete:
    def test_a_run_is_deleted_only_when_confirmed(self, ran: Cli) -> None:
        run_id = open_store().runs()[0].run_id
        done = ran("delete", "doubles@1")
        assert done.code == 2
        assert done.err == "nothing was deleted (use --yes in scripts)\n"
        assert ran("delete", "doubles@1", "--yes").err == f"deleted 1 run: doubles@1 ({run_id}, finished)\n"
        assert open_store().runs() == []

    def test_facts_and_mistakes(self, ran: Cli) -> None:
        assert "only whole runs can be deleted" in ran("delete", "doubles:plain", "--yes").err
        run_id = open_store().runs()[0].run_id
        facts = ran("delete", "doubles", "--yes", "--json").json
        assert facts == {"format": "fairtrial.deleted/1", "deleted": [run_id]}

    def test_a_run_that_a_process_executes_is_not_deleted(self, ran: Cli) -> None:
        store = open_store()
        run_id = store.runs()[0].run_id
        lease = anyio.run(run_lease.acquire, store, run_id)
        done = ran("delete", "doubles", "--yes")
        assert done.code == 2
        assert "is being executed by process" in done.err
        lease.release()
        assert ran("delete", "doubles", "--yes").code == 0
        store.close()


class TestStore:
    def test_store_stats_list_runs_and_results_of_each_suite(self, ran: Cli) -> None:
        lines = ran("store", "stats").out.splitlines()
        assert lines[0].startswith(".fairtrial/runs.db, ")
        assert lines[2].split()[:4] == ["doubles", "1", "0", "8"]
        facts = ran("store", "stats", "--json").json
        assert (facts["format"], facts["suites"][0]["results"]) == ("fairtrial.store/1", 8)

    def test_it_is_made_or_brought_up_to_date(self, cli: Cli) -> None:
        assert cli("store", "migrate", "--store", "new.db").err == f"new.db is up to date: schema {VERSION}\n"
        assert cli("store", "stats", "--store", "new.db").out.endswith("no runs yet\n")
        assert cli("store", "migrate", "--store", "new.db", "--json").json["version"] == VERSION


class TestPrune:
    """Runs of the suite `doubles`: 1 and 2 ended 100 and 50 days ago, 3 just now."""

    @pytest.fixture
    def aged(self, ran: Cli) -> Iterator[RunStore]:
        for _ in range(2):
            ran("run", "evals.py", "--resume", "never", "--quiet")
        store = open_store()
        for run, days in zip(store.runs(), (0, 50, 100), strict=True):
            store.update_run(run.run_id, finished_at=time.time() - days * 86_400)
        yield store
        store.close()

    def numbers(self, store: RunStore) -> list[int]:
        return sorted(run.number for run in store.runs())

    def test_runs_go_by_age_and_the_last_of_each_suite_can_be_kept(self, ran: Cli, aged: RunStore) -> None:
        assert ran("store", "prune", "--older-than", "90d", "--dry-run").err == (
            "would delete 1 run with 8 results: doubles@1\n"
        )
        assert ran("store", "prune", "--older-than", "1h", "--suite", "other", "--yes").err.startswith(
            "deleted 0 runs with 0 results\n"
        )
        assert ran("store", "prune", "--older-than", "1w", "--keep-last", "2", "--dry-run", "--json").json["runs"] == [
            run.run_id for run in aged.runs() if run.number == 1
        ]
        assert self.numbers(aged) == [1, 2, 3]
        done = ran("store", "prune", "--older-than", "90d")
        assert (done.code, done.err) == (2, "nothing was deleted (use --yes in scripts)\n")
        facts = ran("store", "prune", "--older-than", "7w", "--yes", "--json").json
        assert (facts["results"], facts["bytes_after"] <= facts["bytes_before"]) == (16, True)
        assert self.numbers(aged) == [3]

    def test_a_run_under_work_one_that_can_be_resumed_and_one_that_is_scored_again_are_kept(
        self, ran: Cli, aged: RunStore
    ) -> None:
        third, second, first = aged.runs()
        lease = anyio.run(run_lease.acquire, aged, first.run_id)
        aged.update_run(second.run_id, status="interrupted")
        aged.create_run(replace(third, run_id="child", number=0, status="running", parent_run=third.run_id))
        ran("store", "prune", "--older-than", "0h", "--yes")
        assert self.numbers(aged) == [1, 2, 3, 4]
        lease.release()
        ran("store", "prune", "--older-than", "0h", "--yes")
        assert self.numbers(aged) == [2, 3, 4]

    def test_old_responses_and_message_bodies_go_too(self, ran: Cli, aged: RunStore, place: Path) -> None:
        cache = ResponseCache(place / ".fairtrial" / "responses.db", clock=FakeClock(time.time() - 40 * 86_400))

        async def ask() -> ModelReply:
            return ModelReply(ChatMessage("assistant", "a"))

        anyio.run(cache.get, "old", ask, lambda _reply: True)
        cache.close()
        (place / "bodies").mkdir()
        sha256 = anyio.run(ClaimCheck(place / "bodies").keep, b"body")
        path = place / "bodies" / sha256[:2] / sha256
        os.utime(path, (1, 1))
        done = ran("store", "prune", "--older-than", "30d", "--claim-check", "bodies", "--yes")
        assert done.err.startswith(
            "deleted 2 runs with 16 results: doubles@1, doubles@2, 1 cached response, 1 message body\n"
        )
        assert not path.exists()

    @pytest.mark.parametrize("age", ["90", "d", "-1d", "90 days"])
    def test_an_age_without_a_unit_is_refused(self, ran: Cli, age: str) -> None:
        done = ran("store", "prune", f"--older-than={age}", "--yes")
        assert done.code == 2
        assert f"--older-than must be a number of hours, days or weeks (got '{age}')" in done.err

    def test_vacuum_prints_the_size_before_and_after(self, ran: Cli) -> None:
        ran("delete", "doubles", "--yes")
        facts = ran("store", "vacuum", "--json").json
        assert facts["format"] == "fairtrial.vacuumed/1"
        assert facts["bytes_after"] > 0
        assert ran("store", "vacuum").err.startswith("store size: ")

    def test_column_files_are_listed_cleared_and_deleted_with_their_run(self, ran: Cli) -> None:
        store = open_store(".fairtrial/runs.db")
        run = store.runs()[0]
        assert ran("store", "columns", "--json").json["files"] == []
        assert write_columns(store, run)
        facts = ran("store", "columns", "--json").json
        assert (facts["format"], [one["run_id"] for one in facts["files"]]) == ("fairtrial.columns/1", [run.run_id])
        assert facts["bytes"] == facts["files"][0]["bytes"] > 0
        shown = ran("store", "columns").out
        assert shown.startswith("1 column file, ")
        assert run.name in shown
        assert ran("store", "columns", "--clear").err.startswith("deleted 1 column file (")
        assert ran("store", "columns", "--json").json["files"] == []
        assert write_columns(store, run)
        assert ran("store", "columns", "--clear", "--all", "--json").json["cleared"] >= 1
        assert write_columns(store, run)
        ran("delete", run.name, "--yes")
        assert ran("store", "columns", "--json").json["files"] == []
        store.close()


class TestBackup:
    def test_a_copy_is_a_store_and_replaces_nothing(self, ran: Cli, place: Path) -> None:
        assert ran("store", "backup", "copy.db").err.startswith("copied .fairtrial/runs.db to copy.db (")
        assert ran("show", "doubles", "--store", "copy.db").code == 0
        done = ran("store", "backup", "copy.db")
        assert (done.code, "FILE must be a new file (got copy.db, which exists)" in done.err) == (2, True)
        assert ran("store", "backup", "other.db", "--json").json["format"] == "fairtrial.backup/1"


class TestConfig:
    def test_each_setting_has_its_origin(self, cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "pyproject.toml").write_text(
            '[tool.fairtrial]\nsuites = ["evals/a.py", "pkg.mod"]\nmax_error_share = 0.5\nstore = "here.db"\n'
            "[tool.fairtrial.prices]\ntiny = { input = 1, output = 2.5 }\n"
        )
        monkeypatch.setenv("FAIRTRIAL_MAILBOX", "redis://:a-long-password@queue:6379")
        monkeypatch.setenv("FAIRTRIAL_CONCURRENCY", "7")
        facts = cli("config", "--json").json
        assert facts["format"] == "fairtrial.config/1"
        found = {one["name"]: (one["value"], one["origin"]) for one in facts["settings"]}
        prices = facts["settings"][-1]["value"]["tiny"]
        assert (prices["input"], prices["output"]) == (1, 2.5)
        price = dict.fromkeys(prices) | {"input": 1, "output": 2.5, "tiers": {}}
        assert found == {
            "store": ("here.db", "pyproject.toml [tool.fairtrial]"),
            "suites": (["evals/a.py", "pkg.mod"], "pyproject.toml [tool.fairtrial]"),
            "mailbox": ("redis://:[redacted]@queue:6379", "$FAIRTRIAL_MAILBOX"),
            "concurrency": (7, "$FAIRTRIAL_CONCURRENCY"),
            "cache": ("off", "default"),
            "max-error-share": (0.5, "pyproject.toml [tool.fairtrial]"),
            "max-same-errors": (None, "default"),
            "log-format": ("text", "default"),
            "prices": ({"tiny": price}, "pyproject.toml [tool.fairtrial]"),
        }
        assert "tiny" in cli("config").out
        assert "[redacted]" in cli("config").out
        monkeypatch.setenv("COLUMNS", "140")
        assert "what it is" in cli("config").out

    def test_paths_in_the_file_start_where_it_is(self, cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "pyproject.toml").write_text('[tool.fairtrial]\nsuites = ["evals.py"]\nstore = "sqlite:///runs.db"\n')
        (place / "evals.py").write_text(EVALS)
        (place / "below").mkdir()
        monkeypatch.chdir(place / "below")
        assert cli("run", "--quiet").code == 0
        assert (place / "runs.db").exists()
        assert cli("runs").out.count("doubles@1") == 1

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("store = 3", "error: pyproject.toml [tool.fairtrial] store must be text (got 3)\n"),
            ("suites = 3", "error: pyproject.toml [tool.fairtrial] suites must be a list of text (got 3)\n"),
            (
                "concurrency = 0",
                "error: pyproject.toml [tool.fairtrial] concurrency must be a whole number of at least 1 (got 0)",
            ),
            (
                'concurrency = "x"',
                "error: pyproject.toml [tool.fairtrial] concurrency must be a whole number (got 'x')\n",
            ),
            ("max-error-share = 2", "error: pyproject.toml [tool.fairtrial] max-error-share must be a number from 0"),
            ('max-error-share = "x"', "error: pyproject.toml [tool.fairtrial] max-error-share must be a number from 0"),
            ("stor = 'x'", "error: pyproject.toml: [tool.fairtrial] has no setting 'stor'\n  did you mean store?\n"),
            ("zzz = 'x'", "error: pyproject.toml: [tool.fairtrial] has no setting 'zzz'\n  the settings are store,"),
            ("= 3", "error: pyproject.toml is not valid TOML: "),
            (
                "prices = 3",
                "error: pyproject.toml [tool.fairtrial] prices must be a table of US dollars per million tokens",
            ),
            (
                "prices = { m = { input = 1 } }",
                "error: pyproject.toml [tool.fairtrial] prices must be a table of US dollars",
            ),
            ('prices = "gone.toml"', "error: pyproject.toml [tool.fairtrial] prices must name a file that can be read"),
        ],
    )
    def test_wrong_settings_are_named(self, cli: Cli, place: Path, text: str, said: str) -> None:
        (place / "pyproject.toml").write_text(f"[tool.fairtrial]\n{text}\n")
        done = cli("config")
        assert done.code == 2
        assert done.err.startswith(said)
