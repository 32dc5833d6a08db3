"""The trials of a report as a table, for people, pandas and polars."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalConfig, EvalReport, EvalSuite, Experiment, Metric, Sample, Score
from fairtrial.errors import MissingExtraError
from fairtrial.reports import TrialTable


def answer(question: dict[str, Any], ctx: Any) -> Any:
    if question["n"] == 3:
        raise ValueError("three is out of order")
    return {"text": f"<b>{question['n']}</b>\n{ctx.experiment.params.get('style', 'plain')}"}


def judge(output: Any, expected: str) -> Score:
    return Score(1.0 if expected in output["text"] else 0.25, name="right", metrics=[Metric("words", 2.0)])


@pytest.fixture(scope="module")
def report() -> EvalReport[Any]:
    samples = [
        Sample(f"s{n}", {"n": n}, str(n if n % 2 else n + 1), {"parity": "odd" if n % 2 else "even", "level": n})
        for n in range(6)
    ]
    suite = EvalSuite(
        "numbers",
        Dataset(samples),
        task=answer,
        evaluator=judge,
        experiments=[Experiment("terse"), Experiment("long", params={"style": "long"})],
        config=EvalConfig(repeats=2, max_retries=0),
    )
    return suite.run_sync(store="memory:")


def test_every_trial_is_a_row_with_the_columns_of_an_export(report: EvalReport[Any]) -> None:
    table = report.trials()
    assert len(table) == len(list(table)) == 24
    row = table[0]
    assert tuple(row) == table.columns
    assert (row["sample_id"], row["repeat"], row["input"], row["expected"]) == ("s0", 0, {"n": 0}, "1")
    assert (row["metadata.parity"], row["metrics.words"], row["passed"], row["value"]) == ("even", 2.0, False, 0.25)
    assert table[-1]["sample_id"] == "s5"
    with pytest.raises(IndexError):
        table[24]
    assert {each["experiment"] for each in report["long"].trials()} == {"long"}


def test_tables_are_filtered_by_columns_metadata_metrics_and_functions(report: EvalReport[Any]) -> None:
    table = report.trials()
    assert {row["sample_id"] for row in table.failed()} == {"s0", "s2", "s4"}
    assert {row["sample_id"] for row in table.errors()} == {"s3"}
    odd = table.where(parity="odd", experiment="terse")
    assert [row["sample_id"] for row in odd] == ["s1", "s1", "s3", "s3", "s5", "s5"]
    assert {row["sample_id"] for row in odd.where(value=lambda value: value > 0.5)} == {"s1", "s5"}
    assert len(odd) == 6  # The table that was filtered stays as it was.
    assert len(table.where({"metrics.words": 2.0}, repeat=1)) == 10
    assert len(table.where(lambda row: row["input"]["n"] < 2)) == 8
    assert len(table.where(words=2.0)) == 20
    chosen = table.failed().select("sample_id", "parity", "output")
    assert chosen.columns == ("sample_id", "metadata.parity", "output")
    assert chosen[0] == {"sample_id": "s0", "metadata.parity": "even", "output": {"text": "<b>0</b>\nplain"}}


def test_a_column_that_does_not_exist_is_refused_with_the_nearest(report: EvalReport[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"no column 'parety' .*\ndid you mean 'parity'\?"):
        report.trials().where(parety="odd")
    with pytest.raises(ConfigurationError, match=r"(?s)no column 'xyz'.*it has run, suite, experiment"):
        report.trials().select("xyz")


def test_pandas_gets_nullable_types_and_values_as_they_are(report: EvalReport[Any]) -> None:
    frame = report.to_pandas()
    assert frame.shape == (24, len(report.trials().columns))
    assert (str(frame["passed"].dtype), str(frame["value"].dtype), str(frame["latency_ms"].dtype)) == (
        *("boolean", "float64", "Int64"),
    )
    assert frame["passed"].isna().sum() == 4  # Errors have no verdict, not a false one.
    assert frame.groupby("metadata.parity")["passed"].mean().to_dict() == {"even": 0.0, "odd": 1.0}
    assert frame["input"][0] == {"n": 0}
    assert report["long"].to_pandas()["experiment"].unique().tolist() == ["long"]


def test_polars_gets_the_same_figures_and_json_for_what_is_not_text(report: EvalReport[Any]) -> None:
    frame = report.to_polars()
    assert frame.shape == report.to_pandas().shape
    assert frame["passed"].null_count() == 4
    assert frame["value"].sum() == report.to_pandas()["value"].sum()
    assert frame["input"][0] == '{"n":0}'
    assert report["long"].to_polars()["experiment"].unique().to_list() == ["long"]
    assert report.trials().where(parity="nowhere").to_polars().shape[0] == 0
    assert report.trials().where(parity="nowhere").to_pandas().shape[0] == 0


def test_a_table_is_shown_with_input_and_output_side_by_side(report: EvalReport[Any]) -> None:
    table = report.trials()
    shown = str(table.failed())
    first = shown.splitlines()[3]
    assert shown.startswith("Trials of numbers@1")
    assert first.split()[:4] == ["s0", "terse", "0", "failed"]
    assert '{"n":0}' in first
    assert "<b>0</b>\\nplain" in first
    assert max(map(len, shown.splitlines())) <= 80
    assert str(table).endswith("Only the first 20 are shown.")
    assert "no trial matches" in str(table.where(parity="nowhere"))
    assert "&lt;b&gt;0&lt;/b&gt;" in table._repr_html_()
    assert repr(table) == f"<TrialTable of {report.run_id}: {len(table.columns)} columns>"


def test_a_table_follows_a_run_that_goes_on(report: EvalReport[Any]) -> None:
    table: TrialTable = EvalReport.of(list(report.results)[:3]).trials()
    assert [row["sample_id"] for row in table] == [row["sample_id"] for row in table]
    assert len(table) == 3


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_without_the_library_the_extra_is_named(
    report: EvalReport[Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=r"fairtrial\[data\]"):
        getattr(report, f"to_{library}")()
