from __future__ import annotations

from typing import Any

import pytest

from fairtrial import ChatMessage, EvalReport, Sample, Score, ToolCall, ToolInvoked, TrialContext, evaluate_sync
from fairtrial.reports import tool_call_figures

SCHEMAS = {"search": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}}


@pytest.fixture(scope="module")
def report() -> EvalReport:
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
def test_decisions_and_valid_calls_are_counted_over_the_corpus(report: EvalReport) -> None:
    found = tool_call_figures(report.results, SCHEMAS)
    assert (found.called, found.needless, found.missed, found.refrained, found.unscored) == (2, 1, 1, 1, 1)
    assert (found.calls, found.valid) == (4, 2)
    assert found.problems == {"search: $.q: 7 is not of type 'string'": 1, "unknown tool 'shell'": 1}
    assert (found.precision, found.recall, found.f1) == (2 / 3, 2 / 3, 4 / 6)
    assert found.schema_accuracy == 0.5


@pytest.mark.proves("R138")
def test_the_decision_may_be_read_from_elsewhere_and_nothing_is_not_0(report: EvalReport) -> None:
    found = tool_call_figures(report.results, SCHEMAS, expects_call=lambda result: result.sample_id == "needless")
    assert (found.called, found.needless, found.missed) == (1, 2, 0)
    nothing = tool_call_figures([], SCHEMAS)
    assert (nothing.precision, nothing.recall, nothing.f1, nothing.schema_accuracy) == (None,) * 4
