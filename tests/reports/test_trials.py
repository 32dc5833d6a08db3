"""Trials of a report, their tool calls, and small parts of reports."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from fairtrial import ChatMessage, ConfigurationError, Dataset, EvalReport, Metric, Sample, Score, ToolCall, ToolInvoked
from fairtrial.errors import MissingExtraError
from fairtrial.reports import TrialTable, group_by, summarize, tool_call_figures
from fairtrial.reports.figures.column_samples import StoredIds
from fairtrial.reports.figures.error_groups import (
    ErrorGroup,
    error_key,
    error_line,
    error_location,
    error_text,
    group_errors,
    traceback_of,
)
from fairtrial.reports.figures.labels import keyed_hash
from fairtrial.suites import EvalSuite, evaluate_sync
from fairtrial.trials import EvalConfig, EvalResult, Experiment, TrialContext, TrialKey
from tests.reports.build import stored

# The trials of a report as a table, for people, pandas and polars.


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


SCHEMAS = {"search": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}}


@pytest.fixture(scope="module")
def called() -> EvalReport:
    """Six trials: called, called twice with one invalid call, needless and unknown, missed, refrained, failed."""
    made: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "called": [("search", {"q": "a"})],
        "twice": [("search", {"q": "a"}), ("search", {"q": 7})],
        "needless": [("shell", {})],
        "missed": [],
        "refrained": [],
    }

    def task(given: str, ctx: TrialContext) -> str:
        if given == "called":
            ctx.session.record(ToolInvoked("search", {"q": "a"}))  # Without a transcript.
        else:
            calls = tuple(ToolCall(name, arguments) for name, arguments in made[given])
            ctx.session.record(ChatMessage("assistant", "", tool_calls=calls))
        return "done"

    expected = {"called": ["search"], "twice": ["search"], "missed": ["search"], "failed": ["search"], "refrained": []}
    samples: list[Sample[Any, Any]] = [Sample(name, name, expected.get(name)) for name in (*made, "failed")]
    return evaluate_sync(samples, task, lambda output, expected: Score(1.0))


@pytest.mark.proves("R138")
def test_decisions_and_valid_calls_are_counted_over_the_corpus(called: EvalReport) -> None:
    found = tool_call_figures(called.results, SCHEMAS)
    assert (found.called, found.needless, found.missed, found.refrained, found.unscored) == (2, 1, 1, 1, 1)
    assert (found.calls, found.valid) == (4, 2)
    assert found.problems == {"search: $.q: 7 is not of type 'string'": 1, "unknown tool 'shell'": 1}
    assert (found.precision, found.recall, found.f1) == (2 / 3, 2 / 3, 4 / 6)
    assert found.schema_accuracy == 0.5


@pytest.mark.proves("R138")
def test_the_decision_may_be_read_from_elsewhere_and_nothing_is_not_0(called: EvalReport) -> None:
    found = tool_call_figures(called.results, SCHEMAS, expects_call=lambda result: result.sample_id == "needless")
    assert (found.called, found.needless, found.missed) == (1, 2, 0)
    nothing = tool_call_figures([], SCHEMAS)
    assert (nothing.precision, nothing.recall, nothing.f1, nothing.schema_accuracy) == (None,) * 4


# Small parts of the analysis by themselves: summaries, groups of errors, stored ids and the draw of a review.


def result(sample: str, value: float | None, outcome: Any = "scored", *, repeat: int = 0, **given: Any) -> EvalResult:
    score = None if value is None else Score(value)
    key = TrialKey("r", "baseline", sample, repeat)
    return EvalResult(key=key, ordinal=0, outcome=outcome, score=score, **given)


class TestSummaries:
    def test_means_are_over_samples_and_spread_is_over_trials(self) -> None:
        results = [
            result("a", 1.0), result("a", 0.0, repeat=1), result("b", 1.0), result("c", None, "task_error"),
            result("d", None, "not_run"),
        ]  # fmt: skip
        found = summarize(results)
        assert found == {
            "n": 3, "mean": 0.75, "std": pytest.approx(math.sqrt(1 / 3)), "min": 0.0, "max": 1.0, "mean_score": 0.75,
            "pass_rate": 0.75, "pass_rate_all": pytest.approx(0.5), "errors": 1,
        }  # fmt: skip

    def test_one_result_has_no_spread_and_none_has_no_figures(self) -> None:
        one = summarize([result("a", 0.25)])
        assert (one["n"], one["mean"], one["std"], one["min"], one["max"]) == (1, 0.25, None, 0.25, 0.25)
        none = summarize([result("a", None, "not_run")])
        assert none == dict.fromkeys(none, None) | {"n": 0, "errors": 0}

    def test_the_same_figures_as_a_report(self) -> None:
        report = stored([1.0, 0.5, 0.25, "task_error", 0.0])
        assert summarize(report.results) == pytest.approx(report.summary)
        equal = stored([0.7] * 50)
        assert equal.summary["std"] == 0.0

    def test_groups_keep_their_order(self) -> None:
        results = [result("b", 1.0), result("a", 0.0), result("b", 0.5, repeat=1)]
        groups = group_by(results, lambda one: one.sample_id)
        assert {name: [one.repeat for one in group] for name, group in groups.items()} == {"b": [0, 1], "a": [0]}
        assert list(groups) == ["b", "a"]


def failed(
    error: str | None, sample: str = "a", outcome: Any = "task_error", traceback: str | None = None
) -> EvalResult:
    metadata = {} if traceback is None else {"traceback": traceback}
    return result(sample, None, outcome, error=error, metadata=metadata)


OURS = '  File "/lib/site-packages/fairtrial/trials/run_trial.py", line 3, in call\n    x\n'
OWN = '  File "/home/me/app/task.py", line 8, in answer\n    y\n'
LIBRARY = '  File "/lib/site-packages/json/decoder.py", line 9, in decode\n    z\n'


class TestErrors:
    def test_the_place_is_the_last_call_in_own_code(self) -> None:
        trial = failed("ValueError: 3", traceback=OURS + OWN + LIBRARY)
        assert error_location(trial) == "task.py:8 in answer"
        assert error_text(trial) == "ValueError: 3 (task.py:8 in answer)"
        shown = traceback_of(trial)
        assert shown.startswith('File "/home/me/app/task.py"')
        assert shown.endswith("z")

    def test_without_own_code_there_is_no_place(self) -> None:
        assert error_location(failed("x", traceback=OURS + LIBRARY)) == ""
        assert traceback_of(failed("x", traceback=OURS)).startswith('File "/lib')
        assert error_location(failed("x")) == traceback_of(failed("x")) == ""
        assert error_text(failed("fairtrial.errors.CodecError: x")) == "CodecError: x"
        assert group_errors([failed(None)])[0].error == "task error"
        assert error_location(failed("x", traceback=OWN.replace("/", "\\"))) == "task.py:8 in answer"

    def test_errors_are_grouped_by_location_or_by_their_text_without_numbers(self) -> None:
        assert error_key(failed("KeyError: 1", traceback=OWN)) == error_key(failed("KeyError: 'a'", traceback=OWN))
        assert error_key(failed("KeyError: 1", traceback=OWN)) != error_key(failed("ValueError: 1", traceback=OWN))
        assert error_key(failed("no 1 of 20")) == error_key(failed("no 7 of 30"))
        assert error_key(failed("no 1 of 20")) != error_key(failed("no 1 of twenty"))
        assert error_key(failed("x")) != error_key(failed("x", outcome="timeout"))

    def test_groups_come_with_the_most_frequent_first(self) -> None:
        found = group_errors(
            [failed("once", "s1"), failed("no 1", "s2"), failed("no 2", "s3"), failed("no 2", "s4"), result("s5", 1.0)]
        )
        assert found == [
            ErrorGroup(3, "task_error", "no 1", "", "s2", varied=True),
            ErrorGroup(1, "task_error", "once", "", "s1"),
        ]
        assert str(found[0]) == "3 x no 1 and similar"
        assert group_errors([failed("same"), failed("same")]) == [ErrorGroup(2, "task_error", "same", "", "a")]

    def test_a_line_is_short(self) -> None:
        assert error_line("a\n  b", "f.py:1 in g", varied=True) == "a b and similar (f.py:1 in g)"
        assert error_line("x" * 200) == "x" * 200
        assert error_line("x" * 201) == "x" * 199 + "…"


def ids(*names: str) -> StoredIds:
    parts = [name.encode("utf-8", "surrogatepass") for name in names]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    starts = ends - np.array([len(part) for part in parts], dtype=np.int64)
    return StoredIds(memoryview(b"".join(parts)), starts, ends)


class TestStoredIds:
    def test_they_are_a_sequence_of_texts(self) -> None:
        found = ids("a", "caf\u00e9", "\ud800", "d")
        assert len(found) == 4
        assert list(found) == ["a", "caf\u00e9", "\ud800", "d"]
        assert (found[1], found[-1]) == ("caf\u00e9", "d")
        assert list(found[1:3]) == ["caf\u00e9", "\ud800"]
        assert list(found.take(np.array([3, 0]))) == ["d", "a"]
        assert found == ["a", "caf\u00e9", "\ud800", "d"]
        assert found != ["a"]
        assert ids("a") != "a"

    def test_equal_ids_are_the_same_wherever_they_are_kept(self) -> None:
        whole = ids("a", "b", "c")
        assert whole.same_as(whole)
        assert whole.same_as(ids("a", "b", "c"))
        assert not whole.same_as(ids("a", "b"))
        assert not whole.same_as(ids("a", "b", "d"))
        assert not whole.same_as(ids("ab", "", "c"))  # The same text, cut elsewhere.
        part = ids("a", "b", "c", "d")[:3]
        assert part.same_as(whole)
        assert whole.same_as(part)
        assert not part.same_as(ids("b", "c", "d"))
        assert ids().same_as(ids())
        assert not ids("x", "b").take(np.array([1])).same_as(ids("x"))

    def test_an_id_that_occurs_twice_is_noticed(self) -> None:
        assert ids("a", "b").are_unique
        assert not ids("a", "b", "a").are_unique
        assert ids().are_unique


def test_hashes_of_a_review_are_spread_and_depend_on_the_seed() -> None:
    numbers = np.arange(10_000, dtype=np.int64)
    one, other = keyed_hash(1, numbers), keyed_hash(2, numbers)
    assert np.unique(one).size == np.unique(other).size == 10_000
    assert not np.any(one == other)
    for hashes in (one, other):
        shares = np.bincount((hashes >> np.uint64(60)).astype(int), minlength=16) / 10_000
        assert np.all(np.abs(shares - 1 / 16) < 0.012)
        assert abs(float(np.corrcoef(np.argsort(np.argsort(hashes)), numbers)[0, 1])) < 0.05
    # Reviews that were drawn once stay as they are.
    assert keyed_hash(7, np.array([0, 1, 2], dtype=np.int64)).tolist() == [
        648053925310402096,
        16501960747321146745,
        6627201918272125206,
    ]
