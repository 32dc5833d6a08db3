"""`export`, `store` and `doctor --settings`."""

from __future__ import annotations

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
from fairtrial.models import ModelReply, ResponseCache
from fairtrial.reports.figures.column_file import write_columns
from fairtrial.runs import run_lease
from fairtrial.store import RunStore
from fairtrial.store.schema import VERSION
from fairtrial.testing import FakeClock
from tests.cli.conftest import EVALS, Cli


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
        done = ran("store", "delete", "doubles@1")
        assert done.code == 2
        assert done.err == "nothing was deleted (use --yes in scripts)\n"
        assert ran("store", "delete", "doubles@1", "--yes").err == f"deleted 1 run: doubles@1 ({run_id}, finished)\n"
        assert open_store().runs() == []

    def test_facts_and_mistakes(self, ran: Cli) -> None:
        assert "only whole runs can be deleted" in ran("store", "delete", "doubles:plain", "--yes").err
        run_id = open_store().runs()[0].run_id
        facts = ran("store", "delete", "doubles", "--yes", "--json").json
        assert facts == {"format": "fairtrial.deleted/1", "deleted": [run_id]}

    def test_a_run_that_a_process_executes_is_not_deleted(self, ran: Cli) -> None:
        store = open_store()
        run_id = store.runs()[0].run_id
        lease = anyio.run(run_lease.acquire, store, run_id)
        done = ran("store", "delete", "doubles", "--yes")
        assert done.code == 2
        assert "is being executed by process" in done.err
        lease.release()
        assert ran("store", "delete", "doubles", "--yes").code == 0
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

    def test_a_stopped_run_takes_no_place_of_a_finished_one(self, ran: Cli, aged: RunStore) -> None:
        third, _, _ = aged.runs()
        aged.update_run(third.run_id, status="stopped", finished_at=1.0)
        ran("store", "prune", "--older-than", "1d", "--keep-last", "1", "--yes")
        assert self.numbers(aged) == [2, 3]
        ran("store", "prune", "--older-than", "1d", "--keep-last", "0", "--yes")
        assert self.numbers(aged) == []

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
        ran("store", "delete", "doubles", "--yes")
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
        ran("store", "delete", run.name, "--yes")
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
            "[tool.fairtrial.prices]\ntiny = { input = 1, output = 2.5 }\n[tool.fairtrial.tracing]\nsample = 0.5\n"
        )
        monkeypatch.setenv("FAIRTRIAL_TRACING_CONTENT", "true")
        monkeypatch.setenv("FAIRTRIAL_MAILBOX", "redis://:a-long-password@queue:6379")
        monkeypatch.setenv("FAIRTRIAL_CONCURRENCY", "7")
        facts = cli("doctor", "--settings", "--json").json
        assert facts["format"] == "fairtrial.config/1"
        found = {one["name"]: (one["value"], one["origin"]) for one in facts["settings"]}
        prices = facts["settings"][-1]["value"]["tiny"]
        assert (prices["input"], prices["output"]) == (1, 2.5)
        price = dict.fromkeys(prices) | {"input": 1, "output": 2.5, "tiers": {}}
        assert found == {
            "store": ("here.db", "pyproject.toml [tool.fairtrial]"),
            "transcripts": (None, "default"),
            "suites": (["evals/a.py", "pkg.mod"], "pyproject.toml [tool.fairtrial]"),
            "mailbox": ("redis://:[redacted]@queue:6379", "$FAIRTRIAL_MAILBOX"),
            "concurrency": (7, "$FAIRTRIAL_CONCURRENCY"),
            "cache": ("off", "default"),
            "max-error-share": (0.5, "pyproject.toml [tool.fairtrial]"),
            "max-same-errors": (None, "default"),
            "strict-cost": (False, "default"),
            "log-format": ("text", "default"),
            "health-host": ("127.0.0.1", "default"),
            "processes": (None, "default"),
            "tracing.sample": (0.5, "pyproject.toml [tool.fairtrial.tracing]"),
            "tracing.content": (True, "$FAIRTRIAL_TRACING_CONTENT"),
            "tracing.profile": (None, "default"),
            "tracing.receive": (None, "default"),
            "tracing.wait": (6.0, "default"),
            "prices": ({"tiny": price}, "pyproject.toml [tool.fairtrial]"),
        }
        assert "tiny" in cli("doctor", "--settings").out
        assert "[redacted]" in cli("doctor", "--settings").out
        monkeypatch.setenv("COLUMNS", "140")
        assert "what it is" in cli("doctor", "--settings").out

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
        done = cli("doctor", "--settings")
        assert done.code == 2
        assert done.err.startswith(said)
