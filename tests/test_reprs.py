"""The reprs of public objects: one short line, without secrets."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

import fairtrial
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


# A public record refuses fields in a wrong order: what is given by position must not mean something else.


PER_CALL = "the library makes it for every call, message or event, where a check would cost"
ANYTHING = "its first field may be anything"
STATISTIC = "the library makes it of arrays, thousands of times in a simulation"
EXEMPT = {
    **dict.fromkeys([
        "AgentEnded", "ChoicesShown", "Completion", "EnvironmentSaved", "EvalReply", "EvalRunCompleted",
        "EvalRunStarted", "ExecResult", "ExperimentFigures", "JudgeOutput", "MailboxDepth", "MainLoopResult",
        "ModelCall", "ModelCallFailed", "ModelReply", "OutputRepaired", "Rollout", "SampleEvaluated",
        "SpanClosed", "TokenRow", "Totals", "TrialStarted",
    ], PER_CALL),
    **dict.fromkeys(["EvalContext", "MainLoopRequest", "PromptResponse", "WrongShape"], ANYTHING),
    **dict.fromkeys([
        "BradleyTerry", "ClusteredError", "Confusion", "CorrectedMean", "Diagnosis", "Heterogeneity", "HistoryMean",
        "Interval", "JudgedTrials", "MarginTest", "MeanEstimate", "PairedDifference", "PairsDecision",
        "QuantileEstimate", "RankCorrelation", "Ranking", "RateDecision", "Repeats", "SignFlip",
        "SimultaneousDifferences", "Strength", "SystemScores", "Undefined", "VarianceSplit", "WeightedMean",
    ], STATISTIC),
}  # fmt: skip


class Wrong:
    """A value of no type that any field has."""


def public_records() -> dict[str, type]:
    """Every public dataclass that takes something by position, by name."""
    packages = [one.name for one in pkgutil.walk_packages(fairtrial.__path__, "fairtrial.") if one.ispkg]
    found = {}
    for package in ("fairtrial", *packages):
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            record = getattr(module, name)
            if isinstance(record, type) and is_dataclass(record) and first_of(record) is not None:
                found[name] = record
    return found


def first_of(record: type) -> str | None:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((one.name for one in inspect.signature(record).parameters.values() if one.kind in by_position), None)


def made_with(record: Any, value: object) -> object:
    """Make a record with this first field; the others that it needs are None."""
    _first, *others = inspect.signature(record).parameters.values()
    return record(
        value, **{one.name: None for one in others if one.default is one.empty and one.kind != one.VAR_KEYWORD}
    )


def refusal(record: type) -> str:
    try:
        made_with(record, Wrong())
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


RECORDS = public_records()


def test_every_public_record_refuses_a_first_field_of_another_type() -> None:
    first = {name: first_of(record) or "" for name, record in RECORDS.items()}
    accepting = [name for name in sorted(RECORDS.keys() - EXEMPT.keys()) if first[name] not in refusal(RECORDS[name])]
    assert len(RECORDS) > 100
    assert accepting == []


def test_only_records_that_need_it_are_exempt() -> None:
    assert sorted(EXEMPT.keys() - RECORDS.keys()) == []


@pytest.mark.parametrize(("name", "value"), [("Experiment", 5), ("Label", "r1"), ("RunRecord", None)])
def test_the_refusal_names_record_field_and_value(name: str, value: object) -> None:
    record = RECORDS[name]
    with pytest.raises(TypeError, match=rf"^{first_of(record)} of {name} must be \w+ \(got {value!r}\)$"):
        made_with(record, value)
