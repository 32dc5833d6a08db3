"""`fairtrial import traces.jsonl`: recorded traces as a run that can be rescored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, EvalSuite, ToolInvoked, open_store, tool_called
from fairtrial.data.session.events import TraceIncomplete
from fairtrial.errors import DataError
from fairtrial.integrations.tracing.importing import UNSCORED, OtlpTraces
from fairtrial.runs.imported import detect_format, load_importer, store_run, write_suite
from fairtrial.scoring import token_usage_under
from tests.integrations.tracing.test_receive import App, protobuf


def lines(count: int = 3, *, lose: int | None = None) -> list[str]:
    """Traces of an application that was called by another one, whose span is not in the file."""
    found = []
    for number in range(count):
        app = App("", f"00-{number + 1:032x}-{'ef' * 8}-01")
        spans = list(app.whole())
        spans[0]["attributes"] = [{"key": "input.value", "value": {"stringValue": f"question {number}"}},
                                  {"key": "output.value", "value": {"stringValue": f"answer {number}"}}]  # fmt: skip
        if number == lose:
            spans.append(app.span("orphan", parent="77" * 8))
        found.append(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))
    return found


def imported(path: Path) -> tuple[Any, Any, Any]:
    assert detect_format(path) == "otlp"
    suite = load_importer("otlp").read(path).suites[0]
    store = open_store("memory:")
    stored = store_run(store, suite, suite.runs[0], "otlp")
    return store, suite, stored.run


def test_every_trace_becomes_a_trial_with_its_output_and_session(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines()))
    store, suite, run = imported(path)
    assert (suite.name, run.planned) == ("traffic", 3)
    first = next(iter(EvalReport(store, run).results))
    assert (first.sample.input, first.output, first.error) == ("question 0", "answer 0", UNSCORED)
    assert first.usage.total_tokens == 35
    assert [call.name for call in first.session[ToolInvoked].all()] == ["weather"]


def test_an_imported_run_is_rescored_without_calling_the_application(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines()))
    store, imported_suite, run = imported(path)

    def refuse(question: str) -> str:
        raise AssertionError("the application was called")

    suite = EvalSuite("traffic", imported_suite.dataset, refuse, tool_called("weather"))
    assert suite.rescore_sync(run.run_id, store=store).pass_rate == 1.0
    assert suite.rescore_sync(run.run_id, token_usage_under(34), store=store).pass_rate == 0.0
    files = {file.name: file for file, _ in write_suite(imported_suite, tmp_path / "out")}
    assert sorted(files) == ["traffic.jsonl", "traffic.py"]
    compile(files["traffic.py"].read_text(), "traffic.py", "exec")


def test_a_trace_with_missing_spans_is_an_error_for_evaluators_of_the_session(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines(lose=1)))
    store, imported_suite, run = imported(path)
    results = list(EvalReport(store, run).results)
    assert [len(result.session[TraceIncomplete].all()) for result in results] == [0, 1, 0]
    suite = EvalSuite("traffic", imported_suite.dataset, len, tool_called("weather"))
    report = suite.rescore_sync(run.run_id, store=store)
    assert (report.successful, report.errors["scorer_error"]) == (2, 1)
    assert OtlpTraces().read(path).left_out == ("1 of 3 traces are incomplete: spans are missing",)


def test_protobuf_and_json_files_give_the_same_trials(tmp_path: Path) -> None:
    app = App("", f"00-{1:032x}-{'ef' * 8}-01")
    (tmp_path / "a.pb").write_bytes(protobuf(app).SerializeToString())
    again = App("", f"00-{1:032x}-{'ef' * 8}-01")
    (tmp_path / "a.json").write_text(
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(again.whole())}]}]}, indent=2)
    )
    found = []
    for name in ("a.pb", "a.json"):
        trial = next(OtlpTraces().read(tmp_path / name).suites[0].runs[0].trials())
        found.append((trial.outcome, trial.usage, [(event.kind, event.span_id) for event in trial.events]))  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert len(found[0][2]) == 3


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(lines(1)[0] + '\n{"resourceSpans": 7}\n')
    with pytest.raises(DataError, match=r"traffic\.jsonl:2: the body must be an OTLP request"):
        OtlpTraces().read(path)


def test_other_files_are_not_taken_for_traces(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "1", "input": "x"}\n')
    assert detect_format(path) is None
    path.write_text('{"resourceSpans": []}\n')
    with pytest.raises(DataError, match="must contain spans"):
        OtlpTraces().read(path)
