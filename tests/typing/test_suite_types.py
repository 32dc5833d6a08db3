"""Suites are checked from the dataset to the report: every documented form of task and evaluator is accepted.

mypy and pyright read this file (`scripts/types`); what they must refuse is in `refused_code.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_type

from fairtrial import EvalReport, Evaluator, Score, all_of, any_of, contains, llm_judge, matches, negate, sync, weighted
from fairtrial.data import Dataset, Sample
from fairtrial.data.session import SessionView, Trajectory
from fairtrial.fleet import MainLoop
from fairtrial.models import MarkdownSection, PromptTemplate, ScriptedAdapter, agent_task, prompt_task
from fairtrial.scoring import (
    EvalContext,
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
