"""The third specification, block by block: suites, contexts, criteria, in code of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ConfigurationError, EvalConfig, EvalReport, EvalResult, EvalSuite, Score, Session, evaluate_sync
from fairtrial.base.codec import canonical
from fairtrial.data import Dataset, Sample, load_jsonl
from fairtrial.integrations.model_server import ModelServer, Reply
from fairtrial.models import MarkdownSection, OpenAIAdapter, PromptTemplate, ScriptedAdapter, prompt_task
from fairtrial.models.judges import llm_judge, numeric_judge
from fairtrial.runs import EvalRunCompleted, EvalRunStarted, SampleEvaluated
from fairtrial.scoring import EvalContext, Evaluator, composite, contains, exact_match, resolve
from fairtrial.specifications import EvalSuite as SpecifiedSuite
from fairtrial.specifications import configure_wink
from fairtrial.store import redact
from tests.integrations.tracing.collector import Collector, attributes


@dataclass(slots=True, frozen=True)
class QAInput:
    question: str


@dataclass(slots=True, frozen=True)
class QAOutput:
    answer: str


QA_PROMPT = PromptTemplate[QAOutput](
    ns="tests",
    key="qa",
    name="qa_prompt",
    sections=[MarkdownSection(title="Question", template="Reply to this: $question", key="main")],
)
ROWS = [
    {"id": "a", "input": {"question": "Capital of Peru?"}, "expected": {"answer": "Lima"}},
    {"id": "b", "input": {"question": "3+4?"}, "expected": {"answer": "7"}, "metadata": {"kind": "sum"}},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "qa.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture
def model() -> Iterator[ModelServer]:
    def reply(request: Any) -> Reply:
        if "impartial judge" in request.system:
            good = "correct" in request.last_user
            return Reply(output={"reason": "seen", "rating": "excellent" if good else "fair"})
        return Reply(output={"answer": "Lima" if "Peru" in request.last_user else "8"})

    with ModelServer(reply) as server:
        yield server


def _context(adapter: Any = None) -> EvalContext:
    return EvalContext(adapter=adapter, session=Session(), run_id="test")


def test_block_49_a_sample_carries_metadata_that_starts_empty() -> None:
    assert Sample(id="1", input="x", expected="y").metadata == {}
    assert Sample(id="1", input="x", expected="y", metadata={"hard": True}).metadata["hard"] is True


def test_blocks_50_51_datasets_have_names_and_versions_and_come_from_files_or_code(path: Path) -> None:
    loaded = load_jsonl(str(path), QAInput, QAOutput)
    assert loaded[0] == Sample("a", QAInput("Capital of Peru?"), QAOutput("Lima"))
    made = Dataset(
        name="sums",
        samples=tuple(
            Sample(id=str(i), input=QAInput(q), expected=QAOutput(a)) for i, (q, a) in enumerate([("1", "1")])
        ),
    )
    assert (made.name, made.version, len(made), len(list(made))) == ("sums", "1.0", 1, 1)


def test_block_52_a_score_names_its_criterion_and_gives_a_rationale() -> None:
    score = Score(criterion="politeness", value=0.9, passed=True, rationale="it says please")
    assert (score.criterion, score.rationale) == ("politeness", "it says please")
    assert (score.name, score.reason) == ("politeness", "it says please")
    with pytest.raises(ValueError, match="rationale of reason"):
        Score(value=1.0, reason="a", rationale="b")


@pytest.mark.proves("R125", "R126")
def test_block_53_a_result_is_built_from_several_scores_and_keeps_every_verdict_and_reason() -> None:
    result = EvalResult[str](
        sample_id="1",
        output="hi",
        scores=(
            Score(criterion="tone", value=1.0, passed=True, rationale="kind"),
            Score(criterion="length", value=0.5, passed=False, rationale="too short"),
        ),
        latency_ms=7,
        tokens_used=42,
        success=True,
    )
    assert [(s.criterion, s.passed, s.rationale) for s in result.scores] == [
        ("tone", True, "kind"),
        ("length", False, "too short"),
    ]
    assert (result.aggregate_score, result.tokens_used, result.output, result.passed) == (0.75, 42, "hi", False)
    assert EvalResult(sample_id="2", error="boom").aggregate_score is None


@pytest.mark.proves("R124")
def test_blocks_54_55_an_evaluator_of_sample_output_and_context() -> None:
    class Brief:
        def __call__(self, sample: Sample[str, str], output: str, *, context: EvalContext) -> tuple[Score, ...]:
            return (Score(criterion="brief", value=1.0 if len(output) < 9 else 0.0),)

    brief: Evaluator[str, str, str] = Brief()
    assert brief(Sample("1", "x", "y"), "short", context=_context())[0].passed
    report = EvalSuite(dataset=Dataset([Sample("1", "x", "y")]), task=str.upper, evaluator=brief).run_sync(
        store="memory:"
    )
    assert report.scores_by_criterion == {"brief": 1.0}


@pytest.mark.parametrize("built_in", [exact_match, contains])
def test_blocks_56_57_67_built_in_evaluators_give_named_scores_in_the_context_form(built_in: Any) -> None:
    sample = Sample(id="1", input="x", expected="hello")
    scores = built_in(sample, "hello", context=_context())
    assert len(scores) == 1
    assert (scores[0].criterion, scores[0].value, scores[0].passed) == (built_in.__name__, 1.0, True)
    (score,) = built_in(sample, "world", context=_context())
    assert (score.value, score.passed, score.reason[:16]) == (0.0, False, "expected 'hello'")
    with pytest.raises(TypeError, match=r"with a context, the first argument must be a Sample \(got 'hello'\)"):
        built_in("hello", "hello", context=_context())
    assert resolve(built_in).needs_session is False  # In a run it is called with output and expected, as before.


@pytest.mark.proves("R127", "R128")
def test_block_58_a_judge_of_a_criterion_alone_asks_the_adapter_of_the_context() -> None:
    judge: Evaluator[Any, str, str | None] = llm_judge("The tone is friendly")
    sample: Sample[str, str] = Sample(id="1", input="x", expected=None)
    adapter = ScriptedAdapter([{"reason": "warm", "rating": "good"}])
    (score,) = judge(sample, "Hello!", context=_context(adapter))
    assert (score.criterion, score.value, score.passed, score.rationale) == ("The tone is friendly", 0.75, True, "warm")
    numbers = numeric_judge(ScriptedAdapter([{"reason": "so so", "score": 0.4}]), "The tone is friendly")
    assert numbers("Hello!").value == 0.4
    with pytest.raises(ConfigurationError, match="has no model"):
        judge("Hello!", None)


@pytest.mark.proves("R39", "R128")
def test_a_judges_own_model_is_asked_and_not_the_one_under_test() -> None:
    under_test = ScriptedAdapter([{"answer": "Lima"}], repeat=True)
    own = ScriptedAdapter([{"reason": "so", "rating": "good"}], repeat=True)
    judge = llm_judge(own, "Is it right")
    sample: Sample[QAInput, QAOutput] = Sample("1", QAInput("Capital of Peru?"), QAOutput("Lima"))
    (score,) = judge(sample, QAOutput("Lima"), context=_context(under_test))
    assert (score.value, len(own.calls), len(under_test.calls)) == (0.75, 1, 0)
    suite = EvalSuite(
        dataset=Dataset([sample]), task=prompt_task(QA_PROMPT, under_test), evaluator=judge, adapter=under_test
    )
    report = suite.run_sync(store="memory:")
    assert (report.scores_by_criterion, report.errors) == ({"Is it right": 0.75}, {})
    assert (len(own.calls), len(under_test.calls)) == (2, 1)


@pytest.mark.proves("R128")
def test_a_judge_takes_the_ratings_that_pass_without_a_scale_of_its_own() -> None:
    fair = ScriptedAdapter([{"reason": "so", "rating": "fair"}], repeat=True)
    assert not llm_judge(fair, "Is it right")("Lima", "Lima").passed
    assert llm_judge(fair, "Is it right", passing=["excellent", "good", "fair"])("Lima", "Lima").passed
    good = ScriptedAdapter([{"reason": "so", "rating": "good"}])
    assert not llm_judge(good, "Is it right", passing=["excellent"])("Lima", "Lima").passed


@pytest.mark.proves("R128")
def test_a_judge_without_a_model_is_refused_before_the_first_trial() -> None:
    with pytest.raises(ConfigurationError, match=r"judge without a model\ngive the judge its own"):
        EvalSuite(dataset=Dataset.of({"a": "b"}), task=str.upper, evaluator=composite(exact_match, llm_judge("Right")))


def test_block_59_a_composite_lists_the_scores_of_its_members() -> None:
    scores = composite(exact_match, contains)(Sample("1", "x", "b"), "abc", context=_context())
    assert [(score.name, score.passed) for score in scores] == [("exact_match", False), ("contains", True)]


@pytest.mark.proves("R152")
def test_block_60_a_config_takes_the_timeout_in_milliseconds_and_a_suite_needs_no_name() -> None:
    config = EvalConfig(max_concurrent=4, timeout_per_sample_ms=1500, max_retries=0, stop_on_error=False)
    assert config.timeout_seconds == 1.5
    with pytest.raises(ConfigurationError, match="are mutually exclusive"):
        EvalConfig(timeout_seconds=3, timeout_per_sample_ms=1500)
    with pytest.raises(ConfigurationError, match="must be a number"):
        EvalConfig(timeout_per_sample_ms="1500")  # type: ignore[arg-type]
    assert config.timeout_per_sample_ms == 1500
    assert EvalConfig(timeout_seconds=2).timeout_per_sample_ms == 2000
    for changed in (replace(config, timeout_per_sample_ms=800), replace(config, timeout_seconds=0.8)):
        assert (changed.timeout_seconds, changed.timeout_per_sample_ms) == (0.8, 800)
        assert replace(changed, repeats=2).timeout_seconds == 0.8
    assert EvalConfig(timeout_per_sample_ms=config.timeout_per_sample_ms) == EvalConfig(timeout_seconds=1.5)
    assert canonical(EvalConfig(timeout_per_sample_ms=1500)) == canonical(EvalConfig(timeout_seconds=1.5))
    suite = EvalSuite(dataset=Dataset.of({"a": "A"}, name="letters"), task=str.upper, evaluator=exact_match)
    assert suite.name == "letters"


@pytest.mark.proves("R125")
def test_block_61_a_report_is_built_from_results_and_has_every_figure() -> None:
    config = EvalConfig(max_concurrent=2)
    scores = (Score(criterion="tone", value=1.0, passed=True), Score(criterion="length", value=0.0, passed=False))
    results = (
        EvalResult(sample_id="1", output="x", scores=scores, latency_ms=10, tokens_used=3, success=True),
        EvalResult(sample_id="2", output=None, latency_ms=30, tokens_used=0, success=False, error="boom"),
    )
    report = EvalReport(run_id="r1", dataset_name="letters", results=results, config=config)
    assert (report.run_id, report.dataset_name, report.config) == ("r1", "letters", config)
    assert (report.total_samples, report.successful_samples, report.total_tokens) == (2, 1, 3)
    assert (report.pass_rate, report.mean_score) == (0.0, 0.5)
    assert report.scores_by_criterion == {"tone": 1.0, "length": 0.0}


def test_block_62_events_are_made_of_the_fields_that_observers_read() -> None:
    started = EvalRunStarted("r", "letters", 3)
    assert started == EvalRunStarted(run_id="r", dataset_name="letters", sample_count=3)
    completed = EvalRunCompleted("r", 0.5, 0.75, 12)
    assert completed == EvalRunCompleted(run_id="r", pass_rate=0.5, mean_score=0.75, total_tokens=12)
    assert (completed.total_tokens, completed.status) == (12, "finished")


@pytest.mark.proves("R90")
def test_block_63_every_run_of_a_process_is_traced_to_a_project_until_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    suite = EvalSuite(dataset=Dataset.of({"a": "A", "b": "x"}, name="letters"), task=str.upper, evaluator=exact_match)
    with Collector() as server:
        monkeypatch.setenv("LANGSMITH_ENDPOINT", server.url)
        monkeypatch.setenv("LANGSMITH_API_KEY", "lsv2_of_tests_0123456789")
        configure_wink(project="my evals", tracing_enabled=True)
        report = suite.run_sync(store="memory:")
        evaluate_sync([Sample("c", "c", "C")], str.upper, exact_match)
        configure_wink(project="my evals", tracing_enabled=False)
        sent = {attributes(span)["fairtrial.sample.id"]: attributes(span) for span in server.spans}
        suite.run_sync(store="memory:", resume="never")
        assert len(server.spans) == len(sent) == 3
        headers = server.requests[0].headers
    assert (server.requests[0].path, headers["langsmith-project"]) == ("/otel/v1/traces", "my evals")
    assert headers["x-api-key"] == "lsv2_of_tests_0123456789"
    for result in report.results:
        found = sent[result.sample_id]
        assert (found["langsmith.metadata.run_id"], found["fairtrial.dataset"]) == (report.run_id, "letters")
        assert (found["fairtrial.passed"], found["fairtrial.score"]) == (result.passed, float(result.passed))
    monkeypatch.delenv("LANGSMITH_API_KEY")
    with pytest.raises(ConfigurationError, match="LANGSMITH_API_KEY must be set to trace runs"):
        configure_wink(project="my evals")
    with pytest.raises(ConfigurationError, match="name of a LangSmith project"):
        configure_wink(project=" ")


@pytest.mark.proves("R88", "R127", "R128")
def test_blocks_62_65_a_suite_of_a_prompt_with_judges_that_use_its_adapter(path: Path, model: ModelServer) -> None:
    dataset: Dataset[QAInput, QAOutput] = load_jsonl(str(path), QAInput, QAOutput)
    adapter = OpenAIAdapter[QAOutput](model="gpt-4o", base_url=f"{model.base_url}/v1", api_key="test")
    heard: list[object] = []

    class Bus:
        def publish(self, event: object) -> None:
            heard.append(event)

    suite = SpecifiedSuite(
        prompt=QA_PROMPT,
        dataset=dataset,
        evaluator=composite(exact_match, llm_judge("Is it correct"), llm_judge("Is it concise")),
        adapter=adapter,
        config=EvalConfig(max_concurrent=4, timeout_per_sample_ms=30000),
    )
    report = suite.run(tags={"experiment_kind": "first"}, store="memory:", bus=Bus())
    assert report.results[0].output_json == '{"answer":"Lima"}'
    assert (report.pass_rate, report.total_samples) == (0.0, 2)
    assert report.scores_by_criterion == {"exact_match": 0.5, "Is it correct": 1.0, "Is it concise": 0.5}
    assert report.total_tokens > 0
    assert report.results[0].session.tags["experiment_kind"] == "first"
    kinds = [type(event) for event in heard]
    assert (kinds[0], kinds[-1], kinds.count(SampleEvaluated)) == (EvalRunStarted, EvalRunCompleted, 2)
