"""`fairtrial import`: what it prints, and what it says when it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairtrial.integrations.model_server import HostedEvals
from tests.cli.conftest import Cli
from tests.integrations.importers.project import (
    CRITERIA,
    answers,
    eval_of,
    item_of,
    run_of,
    small_project,
    write_archive,
)

GOLDEN = Path(__file__).with_name("golden")


def project() -> HostedEvals:
    """Two evals: one with two runs, one with an errored item, an unknown grader and a run without items."""
    made = small_project()
    odd = answers("evalrun_c", {0: "no"}, count=3)
    odd[1] |= {"status": "error", "results": [], "sample": None}
    criteria = [*CRITERIA[:1], {"type": "python", "name": "length", "source": "def grade(sample, item): ..."}]
    made.evals.append(eval_of("eval_two", "An eval with a name that is too long for any column", criteria))
    made.runs.append(run_of("evalrun_c", odd, eval_id="eval_two", name="Nightly", status="canceled"))
    made.runs.append(run_of("evalrun_d", [], eval_id="eval_two", status="failed"))
    made.items["evalrun_c"] = odd
    return made


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FAIRTRIAL_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "set FAIRTRIAL_GOLDEN=write and read what changed"


def test_the_screens_of_an_import_and_of_a_second_one(cli: Cli, place: Path) -> None:
    write_archive(project(), place / "openai-evals")
    first = cli("import", "openai-evals", "--format", "openai-evals")
    assert (first.code, first.err) == (0, "")
    assert_golden("import", first.out)
    tables = first.out.partition("files")[0]
    assert max(map(len, tables.splitlines())) <= 80
    (place / "imported" / "capitals_short_answers.py").write_text("# mine\n")
    made = project()
    made.items["evalrun_c"][0]["status"] = "pass"
    write_archive(made, place / "openai-evals")
    again = cli("import", "openai-evals")
    assert_golden("import-again", again.out)
    assert len(cli("runs", "--tag", "origin=openai-evals", "--json").json["runs"]) == 3


def test_an_import_as_json(cli: Cli, place: Path) -> None:
    write_archive(project(), place / "openai-evals")
    facts = cli("import", "openai-evals", "--json", "--output", "there").json
    assert (facts["format"], facts["from"]) == ("fairtrial.import/1", "openai-evals")
    first, second = facts["suites"]
    assert [run["state"] for run in first["runs"]] == ["imported", "imported"]
    assert first["runs"][0]["experiments"][0]["pass_rate"] == 0.5
    assert second["graders"][1] == {
        "name": "length", "type": "python", "evaluator": None,
        "remark": "write it as a function of (output, expected); its source is in evals.jsonl",
    }  # fmt: skip
    assert second["files"][0] == {"file": f"there/{second['suite']}.jsonl", "state": "written"}
    assert facts["left_out"] == [f"run evalrun_d of {second['suite']}: it has no output items (failed)"]


def test_every_command_that_reads_a_run_reads_an_imported_one(cli: Cli, place: Path) -> None:
    write_archive(project(), place / "openai-evals")
    cli("import", "openai-evals")
    shown = cli("show", "capitals-short-answers@1", "--sample", "2")
    assert (shown.code, "latency not known" in shown.out, "again" in shown.out) == (0, True, False)
    failed = cli("trials", "evalrun", "--failed", "--json")
    assert failed.code == 2
    for words in (
        ["show", "capitals-short-answers"],
        ["trials", "capitals-short-answers@1", "--failed"],
        ["compare", "capitals-short-answers@1", "capitals-short-answers@2"],
        ["gate", "capitals-short-answers", "--floor", "passed=0.1"],
        ["export", "capitals-short-answers", "--format", "csv"],
        ["export", "capitals-short-answers", "--format", "html"],
        ["rescore", "capitals-short-answers@1", "imported/capitals_short_answers.py"],
    ):
        done = cli(*words)
        assert done.code == 0, (words, done.err)
    rows = cli("export", "capitals-short-answers@1", "--format", "jsonl", "-o", "-").out
    assert '"latency_ms":null' in rows.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "error: nowhere must be a folder or file that another tool saved"),
        (["."], "error: the format of . is not recognized"),
        (
            [".", "--format", "openai-evals"],
            "error: . must be a folder saved from OpenAI Evals (it has no evals.jsonl)",
        ),
        ([".", "--format", "openai-eval"], "did you mean openai-evals?"),
    ],
)
def test_an_invalid_source_of_an_import_is_refused_with_the_remedy(cli: Cli, words: list[str], said: str) -> None:
    done = cli("import", *words)
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert not Path(".fairtrial").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("cut.json", '{"results": {', "error: cut.json is not JSON: "), ("none.eval", "", "error: none.eval is empty")],
)
def test_a_file_that_is_damaged_is_not_called_unknown(
    cli: Cli, place: Path, name: str, content: str, said: str
) -> None:
    (place / name).write_text(content)
    done = cli("import", name)
    assert done.code == 2
    assert done.err.startswith(said)
    assert "was it copied completely?" in done.err


def test_a_line_that_was_cut_off_is_named(cli: Cli, place: Path) -> None:
    write_archive(small_project(), place / "saved")
    path = place / "saved" / "items" / "evalrun_b.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    done = cli("import", "saved")
    assert done.code == 2
    assert "saved/items/evalrun_b.jsonl:10: " in done.err
    assert "run the save script again" in " ".join(done.err.split())


def test_a_sample_of_an_imported_run_with_repeats_is_shown(cli: Cli, place: Path) -> None:
    made = small_project()
    made.items["evalrun_a"].append(item_of("evalrun_a", 0, "Lyon", part=1))
    write_archive(made, place / "saved")
    cli("import", "saved")
    assert "repeat 1" in cli("show", "capitals-short-answers@1", "--sample", "0", "--repeat", "1").out


def test_several_files_of_other_tools_are_imported_by_one_command(cli: Cli, place: Path) -> None:
    files = Path(__file__).parents[1] / "integrations" / "importers" / "files"
    first = cli("import", str(files / "inspect" / "forecast.eval"), str(files / "inspect" / "short.json"), "--json")
    assert first.json["from"] == "inspect"
    assert [suite["suite"] for suite in first.json["suites"]] == ["forecast", "short"]
    shown = cli("import", str(files / "promptfoo" / "results.json"), "--format", "auto")
    assert "imported 1 run of 1 eval" in shown.out
    assert "4 tests ended with an error" in shown.out
    assert [run["suite"] for run in cli("runs", "--tag", "origin=inspect", "--json").json["runs"]] == [
        "short",
        "forecast",
    ]


def test_files_of_several_formats_in_one_command_are_refused(cli: Cli) -> None:
    files = Path(__file__).parents[1] / "integrations" / "importers" / "files"
    done = cli("import", str(files / "inspect" / "short.json"), str(files / "promptfoo" / "results.json"))
    assert done.code != 0
    assert "several formats: inspect, promptfoo" in done.err
