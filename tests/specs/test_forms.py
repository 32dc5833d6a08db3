"""The records of `fairtrial.specifications`: made in the orders of the specifications, and those of `fairtrial`."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import import_module
from typing import Any
from uuid import UUID

import pytest

import fairtrial
from fairtrial import ChatMessage, ConfigurationError, EvalConfig, Metric, Sample, ScriptedAdapter, Trajectory, sync

spelled: Any = import_module("fairtrial.specifications")
SAMPLE: Sample[Any, Any] = Sample("1", {"p": 1}, "y", {"level": 3})
WORDS = Trajectory((ChatMessage("user", "?"),))
SCORE = fairtrial.Score(0.25, False, "terse")
RESULT: Any = fairtrial.EvalResult(sample_id="1", score=SCORE, latency_ms=12)


@pytest.mark.proves("R151")
def test_a_score_is_made_in_three_orders() -> None:
    tone = fairtrial.Score(0.25, False, "terse", name="tone")
    assert spelled.Score("tone", 0.25, False, "terse") == tone
    assert spelled.Score(criterion="tone", value=0.25, passed=False, rationale="terse") == tone
    assert spelled.Score(0.25, False, "terse") == SCORE
    metrics = (Metric("m", 0.5, weight=1.0),)
    assert spelled.Score(metrics) == spelled.Score(metrics=metrics) == fairtrial.Score(metrics=metrics)
    assert isinstance(SCORE, spelled.Score)
    assert type(spelled.Score(1.0)) is fairtrial.Score
    with pytest.raises(TypeError, match=r"Score takes at most criterion, value, passed, rationale by position \(got 5"):
        spelled.Score("tone", 0.25, False, "terse", ())


@pytest.mark.proves("R151", "R125")
def test_a_result_is_made_in_three_orders() -> None:
    plain = spelled.EvalResult("1", SCORE, 12, None)
    assert plain == spelled.EvalResult(sample_id="1", score=SCORE, latency_ms=12, error=None) == RESULT
    assert spelled.EvalResult("1", SCORE, 0, "boom").error == "boom"
    scores = (spelled.Score("tone", 0.25, False, "terse"), spelled.Score("length", 0.75, True))
    several = spelled.EvalResult("1", "hi", scores, 5, 7, True)
    assert several == spelled.EvalResult(
        sample_id="1", output="hi", scores=scores, latency_ms=5, tokens_used=7, success=True
    )
    assert (several.output, several.scores[0], several.latency_ms, several.tokens_used) == ("hi", scores[0], 5, 7)
    failed = spelled.EvalResult("1", None, (), 5, 0, False, "boom")
    assert (failed.success, failed.error, failed.score) == (False, "boom", None)
    rollout = spelled.EvalResult("1", SAMPLE, WORDS, SCORE, {"seconds": 2})
    assert (rollout.sample, rollout.trajectory, rollout.score) == (SAMPLE, WORDS, SCORE)
    assert rollout.metadata["seconds"] == 2


@pytest.mark.proves("R151", "R125")
def test_a_report_is_made_in_three_orders_and_its_summary_must_agree() -> None:
    assert spelled.EvalReport((RESULT,)).total == spelled.EvalReport(results=(RESULT,)).total == 1
    suite = spelled.EvalReport("r1", "letters", (RESULT,), EvalConfig(max_concurrent=3))
    assert (suite.run_id, suite.dataset_name, suite.total, suite.config.max_concurrent) == ("r1", "letters", 1, 3)
    rolled = spelled.EvalReport((RESULT,), {"mean": 0.25}, {"experiment_name": "first"})
    assert (rolled.summary["mean"], rolled.config["experiment_name"]) == (0.25, "first")
    with pytest.raises(
        ConfigurationError, match=r"summary\['mean'\] must be what the results come to, 0.25 \(got 1.0\)"
    ):
        spelled.EvalReport(results=(RESULT,), summary={"mean": 1.0}, config={})
    with pytest.raises(ConfigurationError, match=r"summary\['best'\] must be what the results come to, None"):
        spelled.EvalReport((RESULT,), {"best": 1.0})


@pytest.mark.proves("R151")
def test_requests_datasets_configs_suites_and_judges_answers_take_the_written_order() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    request = spelled.EvalRequest(SAMPLE, UUID(int=7), moment)
    assert (request.sample, request.request_id, request.created_at) == (SAMPLE, UUID(int=7).hex, moment.timestamp())
    dataset = spelled.Dataset("letters", (SAMPLE,), "2.0")
    assert (dataset.name, dataset.version, len(dataset), len(spelled.Dataset((SAMPLE,)))) == ("letters", "2.0", 1, 1)
    config = spelled.EvalConfig(3, 1500, 2, True)
    assert config == EvalConfig(max_concurrent=3, timeout_seconds=1.5, max_retries=2, stop_on_error=True)
    prompt = spelled.PromptTemplate(key="k", sections=[spelled.MarkdownSection("", "$p", "k")])
    suite = spelled.EvalSuite(prompt, dataset, spelled.exact_match, ScriptedAdapter(["y"]), config)
    assert isinstance(suite, sync.EvalSuite)
    assert suite.run(store="memory:").pass_rate == 1.0
    assert spelled.JudgeOutput("good", "kind") == spelled.JudgeOutput(rating="good", reason="kind")
    number = spelled.JudgeOutput(0.5, True, "kind")
    assert (number.score, number.passed, number.rationale) == (0.5, True, "kind")
    assert isinstance(number, spelled.JudgeOutput)


@pytest.mark.proves("R151")
def test_the_prompts_of_judges_are_bound_and_asked() -> None:
    params = spelled.JudgeParams(criterion="tone", output="hi", expected="hello")
    prompt = spelled.Prompt(spelled.JUDGE_TEMPLATE).bind(params)
    assert ["tone" in prompt.render(), prompt.output_type is fairtrial.models.judges.JudgeOutput] == [True, True]
    judge = spelled.llm_judge(
        ScriptedAdapter([{"reason": "so", "rating": "fair"}]), "tone", template=spelled.JUDGE_TEMPLATE
    )
    assert judge("hi", "hello").value == 0.5
    numbers = ScriptedAdapter([{"rationale": "so", "score": 0.4, "passed": False}])
    asked = spelled.JUDGE_PROMPT.bind(criterion="tone", output="hi", expected="Not provided")
    assert fairtrial.base.sync_bridge.call_sync(lambda: numbers.evaluate(asked)).output.score == 0.4


@pytest.mark.proves("R101")
def test_the_names_of_a_training_loop_compute_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert spelled.compute_grpo_advantages([1.0, 1.0]) == [0.0, 0.0]
    spelled.log_metric("score/correct", 0.5, step=3)
    assert capsys.readouterr().out == "step 3  score/correct 0.5\n"
