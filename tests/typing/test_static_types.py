"""Static types of the public API. At run time these calls only have to work; mypy checks the types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type
from uuid import UUID

import pytest

from fairtrial import EvalReport, EvalResult, EvalSuite, Experiment, Sample, Score, Session, ToolInvoked, contains, sync
from fairtrial.base.codec import decode, from_json
from fairtrial.data import Dataset, load_jsonl
from fairtrial.data.session import SessionView, SliceView, Trajectory, restore_session
from fairtrial.fleet import EvalRequest
from fairtrial.mailbox import InMemoryMailbox, Mailbox
from fairtrial.models import MarkdownSection, OpenAIAdapter, PromptTemplate, ScriptedAdapter, prompt_task
from fairtrial.scoring import EvalContext, Evaluator, Metric, SessionEvaluator, evaluator, exact_match, tool_called


@dataclass(frozen=True)
class Question:
    text: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"id": "a", "input": {"text": "2+2?"}, "expected": 4}\n')
    return file


@pytest.mark.proves("R5")
def test_a_loaded_dataset_has_the_types_it_was_asked_for(path: Path) -> None:
    assert_type(Dataset.load(path, Question, int), Dataset[Question, int])
    assert_type(Dataset.load(path, Question, int, lazy=True), Dataset[Question, int])
    assert_type(Dataset.load(path, Question), Dataset[Question, Any])
    assert_type(Dataset.load(path), Dataset[Any, Any])

    def row(fields: dict[str, Any]) -> Sample[str, int]:
        return Sample(fields["id"], fields["input"]["text"], fields["expected"])

    assert_type(Dataset.load(path, row=row), Dataset[str, int])
    assert len(Dataset.load(path, row=row, lazy=True)) == 1


@pytest.mark.proves("R5")
def test_load_jsonl_is_raw_or_typed(path: Path) -> None:
    assert_type(load_jsonl(path), Sequence[dict[str, Any]])
    assert_type(load_jsonl(path, Question), Dataset[Question, Any])
    assert_type(load_jsonl(path, Question, int), Dataset[Question, int])
    assert load_jsonl(path)[0]["expected"] == 4


@pytest.mark.proves("R1", "R2", "R3")
def test_samples_and_datasets_keep_their_types(path: Path) -> None:
    dataset = Dataset.load(path, Question, int)
    assert_type(dataset[0], Sample[Question, int])
    assert_type(dataset[:1], Dataset[Question, int])
    assert_type(dataset.filter(lambda sample: sample.expected == 4), Dataset[Question, int])
    assert_type(dataset.shuffle(1).head(1), Dataset[Question, int])
    assert_type(dataset[0].input, Question)
    assert_type(dataset[0].expected, int | None)
    assert_type(dataset[0].ground_truth, int | None)
    assert_type(Dataset.of({"France": "Paris"}), Dataset[str, str])
    pairs: list[tuple[int, float]] = [(1, 2.5)]
    assert_type(Dataset.of(pairs), Dataset[int, float])
    assert_type(Dataset([Sample("a", 1, "b")]), Dataset[int, str])
    assert [sample.input.text for sample in dataset] == ["2+2?"]


@pytest.mark.proves("R26", "R27")
def test_a_slice_has_the_type_of_its_events() -> None:
    session = Session()
    session.record(ToolInvoked("t"))
    view: SessionView = session.view()
    assert_type(session[ToolInvoked].all(), tuple[ToolInvoked, ...])
    assert_type(view[ToolInvoked], SliceView[ToolInvoked])
    assert_type(view[ToolInvoked].latest(), ToolInvoked | None)
    assert_type(view[ToolInvoked].where(lambda call: call.name == "t"), tuple[ToolInvoked, ...])
    assert_type(view.session_id, UUID)
    assert_type(restore_session(session.snapshot()).trajectory, Trajectory)
    assert len(view[ToolInvoked].all()) == 1


def test_evaluators_stay_what_they_are() -> None:
    @evaluator(name="strict", inline=True)
    def strict(output: str, expected: str) -> Score:
        return exact_match(output, expected)

    @evaluator
    def bare(output: str, expected: str) -> bool:
        return output == expected

    assert_type(strict("a", "a"), Score)
    assert_type(bare("a", "a"), bool)
    assert_type(Score(1.0).metric("x"), float | None)
    assert_type(Score(metrics=[Metric("m", 1.0, 1.0)]).reward, float)
    assert strict("a", "a").passed


def test_decoding_gives_the_type_asked_for() -> None:
    assert_type(decode(Question, '{"text": "x"}'), Question)
    assert_type(from_json(list[int], [1]), list[int])
    assert decode(Question, '{"text": "x"}').text == "x"


@pytest.mark.proves("R124")
def test_results_reports_and_suites_have_the_type_of_their_output() -> None:
    result = EvalResult[int](sample_id="a", score=Score(1.0), output=4)
    assert_type(result.output, int)
    assert_type(EvalResult(sample_id="a", score=Score(1.0), output="x"), EvalResult[str])
    report = EvalReport.of([result])
    assert_type(report, EvalReport[int])
    assert_type(report.results[0].output, int)
    plain: EvalResult = result
    assert_type(plain.output, Any)

    prompt = PromptTemplate[int](key="p", sections=[MarkdownSection("", "$input", "p")])
    suite: EvalSuite[Question, int, int] = EvalSuite(
        "typed",
        Dataset([Sample("a", Question("2+2?"), 4)]),
        prompt_task(prompt, ScriptedAdapter([])),
        exact_match,
    )
    assert (report.results[0].output, suite.name) == (4, "typed")


@pytest.mark.proves("R124")
def test_requests_mailboxes_evaluators_and_adapters_take_type_arguments() -> None:
    requests: Mailbox[EvalRequest[str, int]] = InMemoryMailbox(name="requests")
    aware: SessionEvaluator[str, int] = tool_called("search")
    of_three: Evaluator[Question, str, int] = exact_match
    adapter: OpenAIAdapter[Question] = OpenAIAdapter(model="m", api_key="test")
    assert_type(adapter, OpenAIAdapter[Question])

    def wrong(output: int, expected: str, session: SessionView) -> Score:
        return Score(1.0)

    refused: SessionEvaluator[str, str] = wrong  # type: ignore[assignment]  # what it takes is not what it says
    assert [requests.name, callable(aware), callable(of_three), callable(refused)] == ["requests", True, True, True]


def test_built_in_evaluators_give_one_score_or_with_a_context_a_tuple() -> None:
    context = EvalContext(None, Session().view(), "r")
    assert_type(exact_match("a", expected="a"), Score)
    assert_type(contains("ab", "a"), Score)
    assert_type(exact_match(Sample("s", "x", "a"), "a", context=context), tuple[Score, ...])
    assert_type(contains(Sample("s", "x", "a"), "ab", context=context), tuple[Score, ...])


def test_requests_and_blocking_functions_keep_their_types() -> None:
    request: EvalRequest[str, int] = EvalRequest(sample=Sample("s", "x", 1))
    assert_type(request.sample, Sample[str, int])
    requests: Mailbox[EvalRequest[str, int]] = InMemoryMailbox("requests")
    assert_type(sync.submit_dataset(Dataset([Sample("s", "x", 1)]), requests), str)
    others: Mailbox[EvalRequest[str, int]] = InMemoryMailbox("others")
    assert_type(sync.submit_dataset(Dataset([Sample("s", "x", 1)]), Experiment("a"), others, repeats=2), str)
    results: Mailbox[EvalResult] = InMemoryMailbox("results")
    sync.EvalLoop(requests=requests, loop=len, evaluator=exact_match, results=results).run(max_iterations=1)
    assert_type(sync.collect_results(results, 1, timeout_seconds=20), EvalReport[Any])
