"""The fourth specification, block by block; it lists in short what the first one spells out."""

from __future__ import annotations

import pytest

from fairtrial import Dataset, EvalReport, EvalResult, Evaluator, Sample, Score, ScriptedAdapter, llm_judge, tool_called
from fairtrial.scoring import SessionEvaluator, exact_match


def test_block_69_samples_and_datasets_take_type_arguments() -> None:
    sample = Sample[str, int](id="a", input="four", expected=4)
    dataset = Dataset[str, int](samples=(sample,))
    assert dataset[0].expected == 4


def test_block_70_scores_by_position_and_by_name() -> None:
    assert Score(0.5, False, "half") == Score(value=0.5, passed=False, reason="half")


@pytest.mark.proves("R124")
def test_block_71_evaluator_types() -> None:
    plain: Evaluator[str, str] = exact_match
    aware: SessionEvaluator[str, str] = tool_called("search")
    assert plain("a", "a").passed
    assert callable(aware)


def test_block_72_a_judge_is_an_evaluator_of_text() -> None:
    adapter = ScriptedAdapter([{"reason": "right", "rating": "excellent"}])
    judge: Evaluator[str, str] = llm_judge(adapter, "The answer is right")
    assert judge("7", "7").value == 1.0


@pytest.mark.proves("R125")
def test_block_73_results_and_reports_are_built_directly() -> None:
    passed = EvalResult(sample_id="1", score=Score(1.0, True), latency_ms=5, error=None)
    failed = EvalResult(sample_id="2", score=Score(0.0, False), latency_ms=15, error=None)
    report = EvalReport.of([passed, failed])
    assert (report.pass_rate, report.mean_score, report.mean_latency_ms) == (0.5, 0.5, 10)
    assert [result.sample_id for result in report.failed_samples()] == ["2"]
