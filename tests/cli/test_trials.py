"""`fairtrial trials`: samples in the terminal, with input and output side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import TWO, Cli


@pytest.fixture
def ran(cli: Cli, place: Path) -> Cli:
    (place / "evals.py").write_text(TWO)
    assert cli("run", "evals.py", "--quiet").code in (0, 1)
    return cli


@pytest.mark.proves("R92")
def test_trials_are_listed_with_input_and_output_side_by_side(ran: Cli) -> None:
    done = ran("trials", "doubles")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "Trials of doubles@1"
    assert lines[2].split() == ["sample", "experiment", "result", "input", "expected", "output"]
    assert max(map(len, lines)) <= 80
    assert len(lines) > 5


LONG = TWO.replace('Sample("one", 1, 2', 'Sample("one", "a question of many words " * 20, 2').replace(
    "return number *", "return (2 if isinstance(number, str) else number) *"
)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_long_text_takes_up_to_four_lines_beside_the_others(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    (place / "evals.py").write_text(LONG)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli("run", "evals.py", "--quiet").code in (0, 1)
    lines = cli("trials", "doubles:plain").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == 3 + 4 + 3  # A title and a heading; four lines of the first trial; one each of the others.
    first = lines[3:7]
    assert first[0].startswith("one")
    assert all("question" in line for line in first[:3])
    assert "…" in first[3]
    assert lines[7].startswith("two")


def test_filters_and_columns_are_chosen_by_name(ran: Cli) -> None:
    whole = ran("trials", "doubles", "--json").json
    assert whole["format"] == "fairtrial.trial_table/1"
    failed = ran("trials", "doubles", "--failed", "--json").json["trials"]
    assert failed
    assert {row["passed"] for row in failed} == {False}
    assert [row["sample_id"] for row in failed if row["experiment"] == "plain"] == ["four"]
    hard = ran("trials", "doubles", "--failed", "--where", "level=easy", "--json").json["trials"]
    assert {(row["sample_id"], row["experiment"]) for row in hard} == {("one", "triple"), ("two", "triple")}
    assert len(ran("trials", "doubles", "--where", "rank=3", "--json").json["trials"]) == 2
    first = whole["trials"][0]
    found = ran("trials", "doubles:plain", "--where", f"input={first['input']}", "--json").json["trials"]
    assert [row["sample_id"] for row in found] == [first["sample_id"]]
    chosen = ran("trials", "doubles", "--columns", "sample_id,value", "--limit", "1", "--json").json
    assert (chosen["columns"], len(chosen["trials"]), chosen["truncated"]) == (["sample_id", "value"], 1, True)
    assert "no trial matches" in ran("trials", "doubles", "--errors").out


def test_a_value_is_found_as_text_as_a_number_and_as_a_truth(cli: Cli, place: Path) -> None:
    suite = (
        TWO.replace('"rank": 1', '"rank": "true"')
        .replace('"rank": 2', '"rank": True')
        .replace('"rank": 3', '"rank": 1')
    )
    (place / "evals.py").write_text(suite)
    cli("run", "evals.py", "--quiet")

    def found(value: str) -> set[str]:
        rows = cli("trials", "doubles", "--where", f"rank={value}", "--json").json["trials"]
        return {row["sample_id"] for row in rows}

    assert (found("true"), found("1"), found("4")) == ({"one", "two"}, {"three"}, {"four"})
    assert len(cli("trials", "doubles", "--where", "error=null", "--json").json["trials"]) == 8


def test_an_unknown_column_is_refused_with_the_nearest(ran: Cli) -> None:
    for words in (("--columns", "sampel_id"), ("--where", "sampel_id=1")):
        done = ran("trials", "doubles", *words)
        assert (done.code, done.out) == (2, "")
        assert "no column 'sampel_id'" in done.err
        assert "did you mean 'sample_id'?" in done.err
