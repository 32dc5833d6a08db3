"""The reprs of public objects: one short line, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from fairtrial import Dataset, EvalResult, EvalSuite, Score, compare, exact_match, gate, leaderboard, llm_judge
from fairtrial.fleet import MemoryBroker
from fairtrial.mailbox import InMemoryMailbox
from fairtrial.models import AnthropicAdapter, OpenAIAdapter, ScriptedAdapter
from fairtrial.reports import EvalReport, GateRules
from fairtrial.trials import Experiment

LETTERS = Dataset.of({"a": "A", "b": "x"}, name="letters")
SUITE = EvalSuite("upper", LETTERS, str.upper, exact_match, experiments=[Experiment("one"), Experiment("two")])


@pytest.fixture(scope="module")
def report() -> EvalReport[str]:
    return SUITE.run_sync(store="memory:")


def test_a_suite_names_its_dataset_and_counts_its_experiments() -> None:
    assert repr(SUITE) == "<EvalSuite 'upper': 2 samples of 'letters', 2 experiments>"
    assert repr(EvalSuite("s", LETTERS, str.upper, exact_match)) == "<EvalSuite 's': 2 samples of 'letters'>"
    assert repr(SUITE.stream(store="memory:")) == "<ResultStream: not started>"


def test_the_repr_of_a_result_shows_its_outcome() -> None:
    assert repr(EvalResult(sample_id="q1", score=Score(0.25))) == "<EvalResult 'q1' of baseline: failed with 0.25>"
    broken = EvalResult(sample_id="q1", error="ValueError: no\nand more")
    assert repr(broken) == "<EvalResult 'q1' of baseline: task_error: ValueError: no>"


def test_reports_and_what_is_made_of_them_take_one_line(report: EvalReport[str]) -> None:
    shown = [
        report,
        report["one"],
        report.results,
        report.results[3],
        report.store,
        compare(report["one"], report["two"]),
        gate(report["one"], GateRules(0.5)),
        leaderboard(report["one"], report["two"]),
        compare(report["one"], report["two"])["two"],
        report.run,
    ]
    assert [text for each in shown if "\n" in (text := repr(each)) or len(text) > 120 or " at 0x" in text] == []
    assert repr(shown[5]) == "<Comparison of two with one>"
    assert (
        repr(shown[8]) == "<CandidateComparison two: passed no detectable difference, value no detectable difference>"
    )
    assert repr(report.run) == f"<RunRecord upper@1 {report.run_id}: finished, 4 trials planned>"
    assert repr(shown[6]) == "<GateResult: inconclusive, 1 check>"


def test_a_table_of_trials_is_described_without_reading_its_rows(
    report: EvalReport[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = report.trials()

    def refuse(*args: Any, **filters: Any) -> Any:
        raise AssertionError("the rows must not be read")

    monkeypatch.setattr(type(report.store), "results", refuse)
    assert repr(table) == f"<TrialTable of {report.run_id}: {len(table.columns)} columns>"
    assert repr(table.failed()) == f"<TrialTable of {report.run_id}: {len(table.columns)} columns, filtered>"


def test_adapters_judges_and_mailboxes_show_no_secrets() -> None:
    for adapter in (OpenAIAdapter(model="m", api_key="sk-123"), AnthropicAdapter(model="m", api_key="sk-123")):
        assert "sk-123" not in repr(adapter)
        assert "'m'" in repr(adapter)
    assert repr(llm_judge(ScriptedAdapter([]), "It is right.")).startswith("<LLMJudge")
    assert repr(InMemoryMailbox("requests")) == "InMemoryMailbox('requests')"
    assert repr(MemoryBroker()) == "<MemoryBroker: 0 mailboxes>"
