"""Suites are checked from the dataset to the report: every documented form of task and evaluator is accepted.

mypy and pyright read this file (`scripts/types`); what they must refuse is in `refused_code.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, assert_type
from uuid import UUID

import pytest

from fairtrial import EvalReport, Evaluator, Score, all_of, any_of, contains, llm_judge, matches, negate, sync, weighted
from fairtrial.base.codec import decode, from_json
from fairtrial.data import Dataset, Sample, load_jsonl
from fairtrial.data.session import Session, SessionView, SliceView, ToolInvoked, Trajectory, restore_session
from fairtrial.fleet import EvalRequest, MainLoop
from fairtrial.mailbox import InMemoryMailbox, Mailbox
from fairtrial.models import MarkdownSection, OpenAIAdapter, PromptTemplate, ScriptedAdapter, agent_task, prompt_task
from fairtrial.scoring import (
    EvalContext,
    Metric,
    SessionEvaluator,
    composite,
    evaluator,
    exact_match,
    fuzzy_match,
    json_schema,
    json_subset,
    token_usage_under,
    tool_called,
    within_tolerance,
)
from fairtrial.suites import EvalSuite, evaluate, evaluate_sync
from fairtrial.trials import EvalResult, Experiment, TrialContext


@dataclass(frozen=True)
class Question:
    text: str


@dataclass(frozen=True)
class Answer:
    number: int


QUESTIONS = Dataset([Sample("a", Question("2+2?"), 4)])
MODEL = ScriptedAdapter([])


def answer(question: Question) -> Answer:
    return Answer(4)


def answer_in_context(question: Question, ctx: TrialContext) -> Answer:
    return Answer(4)


async def answer_later(question: Question) -> Answer:
    return Answer(4)


async def answer_later_in_context(question: Question, ctx: TrialContext) -> Answer:
    return Answer(4)


def is_right(output: Answer, expected: int) -> bool:
    return output.number == expected


def is_right_by_other_names(prediction: Answer, reference: int) -> float:
    return float(prediction.number == reference)


def is_right_by_position(one: Answer, other: int) -> Mapping[str, bool]:
    return {"right": one.number == other}


def is_right_in_other_order(expected: int, output: Answer) -> bool:
    return output.number == expected


async def is_right_of_all(input: Question, output: Answer, expected: int, minimum: float = 0.5) -> Score:
    return Score(1.0 if output.number == expected else 0.0)


def is_right_of_many(inputs: Question, outputs: Answer, reference_outputs: int) -> bool:
    return outputs.number == reference_outputs


def is_positive(output: Answer) -> bool:
    return output.number > 0


def with_session(output: Answer, expected: int, session: SessionView) -> Score:
    return Score(1.0)


def with_session_by_name(output: Answer, *, session: SessionView) -> Score:
    return Score(1.0)


def with_sample(sample: Sample[Question, int], output: Answer) -> bool:
    return output.number == sample.expected


def with_context(sample: Sample[Question, int], output: Answer, *, context: EvalContext) -> Sequence[Score]:
    return [Score(1.0, name="right")]


def of_trajectory(trajectory: Trajectory, sample: Sample[Question, int]) -> float:
    return 1.0


@evaluator(name="decorated", inline=True)
def decorated(output: Answer, expected: int) -> bool:
    return True


class Checker:
    def __call__(self, output: Answer, expected: int) -> bool:
        return True


def test_the_types_of_a_suite_come_from_its_dataset_and_its_task() -> None:
    assert_type(EvalSuite("s", QUESTIONS, answer, is_right), EvalSuite[Question, Answer, int])
    assert_type(EvalSuite("s", QUESTIONS, answer_in_context, is_right), EvalSuite[Question, Answer, int])
    assert_type(EvalSuite("s", QUESTIONS, answer_later, is_right), EvalSuite[Question, Answer, int])
    assert_type(EvalSuite("s", QUESTIONS, answer_later_in_context, is_right), EvalSuite[Question, Answer, int])
    assert_type(EvalSuite("s", Dataset.of({"a": 1}), len, exact_match), EvalSuite[str, int, int])
    assert_type(EvalSuite("s", Dataset.of({"a": 1}), lambda text: 2, exact_match), EvalSuite[str, int, int])
    named = EvalSuite(name="s", dataset=QUESTIONS, task=answer, evaluator=is_right, experiments=[Experiment("b")])
    assert_type(named, EvalSuite[Question, Answer, int])
    assert named.name == "s"


def test_a_report_knows_the_type_of_the_outputs() -> None:
    report = EvalSuite("s", QUESTIONS, answer_later, is_right).run_sync(store="memory:")
    assert_type(report, EvalReport[Answer])
    assert_type(report.results[0], EvalResult[Answer])
    assert_type(report.results[0].output, Answer)
    assert_type(evaluate_sync(QUESTIONS, answer, is_right), EvalReport[Answer])
    assert_type(evaluate_sync(list(QUESTIONS), answer_later, is_right), EvalReport[Answer])
    assert_type(sync.evaluate(QUESTIONS, answer_in_context, is_right), EvalReport[Answer])
    assert report.results[0].output == Answer(4)


async def test_evaluate_knows_the_type_of_the_outputs() -> None:
    report = await evaluate(QUESTIONS, answer_later, is_right)
    assert_type(report, EvalReport[Answer])
    assert report.pass_rate == 1.0


def test_every_form_of_evaluator_is_accepted() -> None:
    loose: Evaluator = is_right
    untyped: Any = is_right
    suites: list[EvalSuite[Question, Answer, int]] = [
        EvalSuite("s", QUESTIONS, answer, is_right),
        EvalSuite("s", QUESTIONS, answer_later, is_right_by_other_names),
        EvalSuite("s", QUESTIONS, answer, is_right_by_position),
        EvalSuite("s", QUESTIONS, answer, is_right_in_other_order),
        EvalSuite("s", QUESTIONS, answer_later, is_right_of_all),
        EvalSuite("s", QUESTIONS, answer, is_right_of_many),
        EvalSuite("s", QUESTIONS, answer, is_positive),
        EvalSuite("s", QUESTIONS, answer, with_session),
        EvalSuite("s", QUESTIONS, answer_later, with_session_by_name),
        EvalSuite("s", QUESTIONS, answer, with_sample),
        EvalSuite("s", QUESTIONS, answer, with_context),
        EvalSuite("s", QUESTIONS, answer, of_trajectory),
        EvalSuite("s", QUESTIONS, answer, decorated),
        EvalSuite("s", QUESTIONS, answer, Checker()),
        EvalSuite("s", QUESTIONS, answer, untyped),
        EvalSuite("s", QUESTIONS, answer, lambda output, expected: output.number == expected),
        EvalSuite("s", QUESTIONS, answer, partial(is_right_of_all, minimum=0.7)),
        EvalSuite("s", QUESTIONS, answer, loose),
    ]
    assert len(suites) == 18


def test_built_in_evaluators_judges_and_combinations_are_accepted() -> None:
    suites: list[EvalSuite[Question, Answer, int]] = [
        EvalSuite("s", QUESTIONS, answer_later, exact_match),
        EvalSuite("s", QUESTIONS, answer, contains),
        EvalSuite("s", QUESTIONS, answer, json_subset),
        EvalSuite("s", QUESTIONS, answer, json_schema({"type": "object"})),
        EvalSuite("s", QUESTIONS, answer_later, matches("4")),
        EvalSuite("s", QUESTIONS, answer, fuzzy_match(0.9)),
        EvalSuite("s", QUESTIONS, answer, within_tolerance(0.1)),
        EvalSuite("s", QUESTIONS, answer_later, tool_called("search")),
        EvalSuite("s", QUESTIONS, answer, token_usage_under(100)),
        EvalSuite("s", QUESTIONS, answer, llm_judge(MODEL, "It is right.")),
        EvalSuite("s", QUESTIONS, answer, all_of(is_right, any_of(exact_match, negate(tool_called("refund"))))),
        EvalSuite("s", QUESTIONS, answer_later, weighted((exact_match, 3), (is_right, 1))),
        EvalSuite("s", QUESTIONS, answer, composite(is_right, exact_match)),
    ]
    assert len(suites) == 13


def test_prompts_agents_and_main_loops_are_tasks() -> None:
    prompt = PromptTemplate[Answer](key="p", sections=[MarkdownSection("", "$text", "p")])
    as_task = EvalSuite("s", QUESTIONS, prompt_task(prompt, MODEL), is_right)
    assert_type(as_task, EvalSuite[Question, Answer, int])
    agent: EvalSuite[Question, Any, int] = EvalSuite("s", QUESTIONS, agent_task(MODEL), exact_match)
    loop: MainLoop[Question, Answer] = MainLoop(answer)
    assert_type(EvalSuite("s", QUESTIONS, loop, is_right), EvalSuite[Question, Answer, int])
    own_tasks = EvalSuite("s", QUESTIONS, evaluator=exact_match, experiments=[Experiment("one", task=answer)])
    assert [suite.name for suite in (as_task, agent, own_tasks)] == ["s"] * 3


def test_parameters_of_experiments_are_read_without_casts() -> None:
    experiment = Experiment("small", params={"known": {"France": "Paris"}})
    known: dict[str, str] = experiment.params["known"]
    assert known["France"] == "Paris"


# Static types of the public API. At run time these calls only have to work; mypy checks the types.


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
