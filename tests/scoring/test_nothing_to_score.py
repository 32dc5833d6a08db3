"""What every built-in evaluator gives where there is nothing to score: as the table in the documentation says."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import fairtrial
import fairtrial.models.judges
import fairtrial.scoring
from fairtrial import Dataset, EvalSuite, Sample, Score, TrialContext, all_of, contains, evaluator, exact_match, gate
from fairtrial.data.session import PromptExecuted, Retrieved, Session, TokenUsage, ToolInvoked
from fairtrial.errors import NothingToScoreError
from fairtrial.integrations.sandbox import runs_tests
from fairtrial.models import ScriptedAdapter, tool_schema_accuracy
from fairtrial.rl import RewardFunction
from fairtrial.scoring import (
    ChoiceQuestion,
    adapt,
    json_diff,
    json_schema,
    json_subset,
    multiple_choice,
    one_of,
    resolve,
)
from fairtrial.scoring.evaluator import Case, Marks, Scorer, marks_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scorers.md"
CASES = (
    "no reference",
    "`expected=None`",
    "`expected=[]`",
    "output `None`",
    'output `""`',
    "output `[]`",
    "output `{}`",
    "nothing recorded",
)
NOT_GIVEN = object()
NOTHING: tuple[Any, ...] = (None, "", [], {})
CLAIMS = {"claims": [{"claim": "x", "reason": "r", "supported": "yes"}]}


ASKED: list[Any] = []


def _judge(reply: Any) -> ScriptedAdapter:
    def say(messages: Any) -> Any:
        ASKED.append(messages)
        return reply

    def embed(text: str) -> list[float]:
        ASKED.append(text)
        return [1.0, float(len(text))]

    return ScriptedAdapter(say, embedding=embed)


METRICS = {
    "answer_correctness": "correct",
    "hallucination": "grounded",
    "toxicity": "respectful",
    "bias": "fair",
    "summarization": "good",
    "task_completion": "completed",
    "goal_reached": "reached",
    "kept_role": "kept",
    "remembered": "remembered",
}


def _metric(name: str, label: str) -> Any:
    return getattr(fairtrial.models.judges, name)(_judge({"reason": "r", "label": label}))


# The evaluator, the right expected value and an output that passes.
MADE: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "exact_match": (lambda: exact_match, "yes", "yes"),
    "contains": (lambda: contains, "yes", "yes!"),
    "one_of": (lambda: one_of, ["yes"], "yes"),
    "matches": (lambda: fairtrial.matches(), "y.s", "yes"),
    "fuzzy_match": (lambda: fairtrial.scoring.fuzzy_match(), "yes", "yes"),
    "within_tolerance": (lambda: fairtrial.scoring.within_tolerance(1), 3, 3),
    "json_subset": (lambda: json_subset, {"a": 1}, {"a": 1}),
    "json_schema": (lambda: json_schema({"type": "object", "required": ["a"]}), "any", {"a": 1}),
    "json_diff": (lambda: json_diff(), {"a": 1}, {"a": 1}),
    "multiple_choice": (lambda: multiple_choice, "B", "ANSWER: B"),
    "squad": (lambda: fairtrial.scoring.squad(), "yes", "yes"),
    "math_equal": (lambda: fairtrial.scoring.math_equal(), "1/2", "0.5"),
    "rouge": (lambda: fairtrial.scoring.rouge(), "yes it is", "yes it is"),
    "bleu": (lambda: fairtrial.scoring.bleu(), "yes it is so", "yes it is so"),
    "chrf": (lambda: fairtrial.scoring.chrf(), "yes it is", "yes it is"),
    "tool_called": (lambda: fairtrial.tool_called("search"), "any", "yes"),
    "tool_not_called": (lambda: fairtrial.scoring.tool_not_called("delete"), "any", "yes"),
    "tool_call_count": (lambda: fairtrial.scoring.tool_call_count("search", min_count=1), "any", "yes"),
    "all_tools_succeeded": (lambda: fairtrial.scoring.all_tools_succeeded(), "any", "yes"),
    "token_usage_under": (lambda: fairtrial.scoring.token_usage_under(9), "any", "yes"),
    "slice_contains": (lambda: fairtrial.scoring.slice_contains(Retrieved, lambda event: True), "any", "yes"),
    "tool_calls_match": (lambda: fairtrial.scoring.tool_calls_match(), ["search"], "yes"),
    "tool_correctness": (lambda: fairtrial.scoring.tool_correctness(), ["search"], "yes"),
    "json_correctness": (
        lambda: fairtrial.scoring.json_correctness(),
        {"type": "object", "required": ["a"]},
        {"a": 1},
    ),
    "pii_leakage": (lambda: fairtrial.scoring.pii_leakage(), "any", "yes"),
    "tool_schema_accuracy": (lambda: tool_schema_accuracy([search]), "any", "yes"),
    "runs_tests": (lambda: runs_tests(), "assert x == 1", "x = 1"),
    "llm_judge": (lambda: fairtrial.llm_judge(_judge({"reason": "r", "rating": "good"}), "Good."), "yes", "yes"),
    "numeric_judge": (
        lambda: fairtrial.models.judges.numeric_judge(_judge({"reason": "r", "score": 0.7}), "Good."),
        "yes",
        "yes",
    ),
    "label_judge": (
        lambda: fairtrial.models.judges.label_judge(
            _judge({"reason": "r", "label": "a"}), "Good.", labels=["a", "b"], passing=["a"]
        ),
        "yes",
        "yes",
    ),
    "checklist": (
        lambda: fairtrial.models.judges.checklist(
            _judge({"answers": [{"question": 1, "reason": "r", "answer": "yes"}]}), ["Good?"]
        ),
        "yes",
        "yes",
    ),
    "rubric": (
        lambda: fairtrial.models.judges.rubric(_judge({"verdicts": [{"criterion": 1, "reason": "r", "met": "yes"}]})),
        {"Good.": 1},
        "yes",
    ),
    "short_answer_judge": (
        lambda: fairtrial.models.judges.short_answer_judge(_judge({"reason": "r", "label": "correct"})),
        "yes",
        "yes",
    ),
    "pairwise_judge": (
        lambda: fairtrial.models.judges.pairwise_judge(_judge({"reason": "r", "better": "equal"}), "Good."),
        "yes",
        "yes",
    ),
    "semantic_similarity": (lambda: fairtrial.models.judges.semantic_similarity(_judge(None)), "yes", "yes"),
    "faithfulness": (lambda: fairtrial.models.judges.faithfulness(_judge(CLAIMS)), "yes", "yes"),
    "answer_relevance": (
        lambda: fairtrial.models.judges.answer_relevance(_judge({"questions": ["q?"], "evasive": "no"}), _judge(None)),
        "yes",
        "yes",
    ),
    "context_precision": (
        lambda: fairtrial.models.judges.context_precision(
            _judge({"documents": [{"document": 1, "reason": "r", "useful": "yes"}]})
        ),
        "yes",
        "yes",
    ),
    "context_recall": (lambda: fairtrial.models.judges.context_recall(_judge(CLAIMS)), "yes", "yes"),
    **{name: (partial(_metric, name, label), "yes", "yes") for name, label in METRICS.items()},
}


@evaluator(form="plain", inline=True)
def _passes(output: Any, expected: Any) -> Score:
    return Score(1.0)


# They score what their members score: covered below, each with a member that has nothing to score.
COMBINATIONS: dict[str, Callable[[Any], Any]] = {
    "adapt": adapt,
    "all_of": all_of,
    "any_of": lambda member: fairtrial.any_of(member, _passes),
    "composite": fairtrial.scoring.composite,
    "negate": fairtrial.negate,
    "panel": lambda member: fairtrial.models.judges.panel(member, _passes),
    "threshold": lambda member: fairtrial.threshold(member, 0.5),
    "weighted": lambda member: fairtrial.weighted((member, 1.0), (_passes, 1.0)),
}


def search(query: str) -> str:
    """Search."""
    return query


def public_evaluators() -> Iterator[str]:
    """Yield the public names of functions that are evaluators, or that make one."""
    for module in (
        "fairtrial",
        "fairtrial.scoring",
        "fairtrial.models.judges",
        "fairtrial.models",
        "fairtrial.integrations.sandbox",
    ):
        found = importlib.import_module(module)
        for name in found.__all__:
            value = getattr(found, name)
            if not inspect.isfunction(value) or name in ("evaluator", "resolve", "eval_test"):
                continue
            said = str(value.__annotations__.get("return"))
            made = vars(importlib.import_module(value.__module__)).get(said)
            is_scorer = isinstance(made, type) and issubclass(made, Scorer | Score)
            if is_scorer or "Evaluator" in said or "Score]" in said or marks_of(value) != Marks() or name == "adapt":
                yield name


def recorded() -> Session:
    session = Session()
    session.record(Retrieved("q", ("a document",)))
    session.record(ToolInvoked("search", {"query": "x"}, "found"))
    session.record(PromptExecuted(usage=TokenUsage(1, 1)))
    return session


def score(name: str, expected: Any = (), output: Any = NOT_GIVEN, session: Session | None = None) -> str:
    """Return what an evaluator gives, as the documentation writes it.

    `expected` is empty for the right one, None for a sample without one, or a tuple with the value.
    """
    make, right, good = MADE[name]
    wanted = {} if expected is None else {"expected": expected[0] if expected else right}
    given = ChoiceQuestion("q", ("a", "b")) if name == "multiple_choice" else "q"
    sample: Sample[Any, Any] = Sample("s", given, **wanted)
    case = Case(sample, good if output is NOT_GIVEN else output, recorded() if session is None else session)
    ASKED.clear()
    try:
        found = anyio.run(resolve(make()).score, case)
    except (TypeError, ValueError, fairtrial.FairtrialError):
        return "error"
    return "judge" if ASKED else f"{found.value:.2g}"


def row(name: str) -> list[str]:
    """Return the row of the table for an evaluator."""
    return [
        score(name, expected=None),
        score(name, expected=(None,)),
        score(name, expected=([],)),
        *(score(name, output=output) for output in NOTHING),
        score(name, session=Session()),
    ]


def documented() -> dict[str, list[str]]:
    """Return the table of the documentation, by name."""
    text = PAGE.read_text(encoding="utf-8").partition("## Where there is nothing to score")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert tuple(rows[0][1:]) == CASES
    return {name.strip("`"): cells[1:] for cells in rows[2:] for name in cells[0].split(", ")}


NAMES = [pytest.param(name, marks=pytest.mark.bwrap) if name == "runs_tests" else name for name in MADE]


def test_every_built_in_evaluator_is_tried() -> None:
    assert set(public_evaluators()) == {*MADE, *COMBINATIONS, "user_check"}  # It checks the user, not the output.
    assert set(documented()) == set(MADE)


def test_evaluators_that_compute_little_are_called_on_the_event_loop_and_slow_ones_are_not() -> None:
    marks = {name: marks_of(make()) for name, (make, _, _) in MADE.items()}
    assert {name for name, mark in marks.items() if mark.inline} == {
        "exact_match", "contains", "one_of", "matches", "fuzzy_match", "within_tolerance", "json_subset", "json_schema",
        "json_diff", "multiple_choice", "squad", "tool_called", "tool_not_called", "tool_call_count",
        "all_tools_succeeded", "token_usage_under", "slice_contains", "tool_calls_match", "tool_schema_accuracy",
        "tool_correctness", "json_correctness", "pii_leakage",
    }  # fmt: skip
    assert {name for name, mark in marks.items() if mark.isolate} == {"math_equal"}


def test_evaluators_that_compare_with_the_expected_value_say_so() -> None:
    assert {name for name, (make, _, _) in MADE.items() if resolve(make()).needs_expected} == {
        "bleu", "chrf", "contains", "exact_match", "fuzzy_match", "json_diff", "json_subset", "matches", "math_equal",
        "multiple_choice", "one_of", "rouge", "squad", "tool_calls_match", "within_tolerance", "tool_correctness",
        "json_correctness",
    }  # fmt: skip
    assert not marks_of(fairtrial.matches("x")).needs_expected
    assert not resolve(fairtrial.scoring.tool_calls_match(["search"])).needs_expected


@pytest.mark.parametrize("name", NAMES)
def test_every_evaluator_gives_what_the_documentation_says(name: str) -> None:
    assert score(name) not in ("0", "error")  # What is varied below is what decides.
    assert row(name) == documented()[name]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_has_no_score_if_a_member_has_none(name: str) -> None:
    sample: Sample[Any, Any] = Sample("s", "q")
    with pytest.raises(NothingToScoreError, match="the sample has no expected value"):
        anyio.run(resolve(COMBINATIONS[name](exact_match)).score, Case(sample, "yes", Session()))
    anyio.run(resolve(COMBINATIONS[name](exact_match)).score, Case(Sample("s", "q", None), "yes", Session()))


NOTHING_RETRIEVED = Session()
NOTHING_RETRIEVED.record(Retrieved("q", ()))


def test_an_empty_retrieval_fails_and_a_missing_one_is_not_scored() -> None:
    for name, result in {"context_precision": "0", "context_recall": "0", "faithfulness": "judge"}.items():
        assert score(name, session=NOTHING_RETRIEVED) == result
        assert score(name, session=Session()) == "error"


@pytest.mark.parametrize("given", [None, "", "  "])
def test_relevance_to_no_input_is_not_scored(given: Any) -> None:
    judge = fairtrial.models.judges.answer_relevance(_judge({"questions": ["q?"], "evasive": "no"}), _judge(None))
    with pytest.raises(NothingToScoreError, match="the sample has no input"):
        anyio.run(judge.score, Case(Sample("s", given), "yes"))


def test_an_evaluator_of_your_own_gets_none_unless_it_asks_for_a_reference() -> None:
    @evaluator(needs_expected=True)
    def strict(output: str, expected: str | None) -> bool:
        return output == expected

    seen: list[Any] = []

    def lenient(output: str, expected: str | None) -> bool:
        seen.append(expected)
        return True

    data: Dataset[str, None] = Dataset([Sample("a", "x")], name="d")
    assert dict(EvalSuite("s", data, str, strict).run_sync(store="memory:").errors) == {"scorer_error": 1}
    assert EvalSuite("s", data, str, lenient).run_sync(store="memory:").pass_rate == 1.0
    assert seen == [None]


def claimless(messages: Any) -> Any:
    right = "1932" in messages[-1].text.partition("output_to_assess")[2]
    return CLAIMS if right else {"claims": []}


def answer(question: str, ctx: TrialContext) -> str:
    ctx.session.record(Retrieved(question, ("The bridge opened in 1932.",)))
    return "It opened in 1932." if int(question) % 4 else "Painted blue by Napoleon."


def test_answers_without_claims_are_counted_by_reason_and_missing_in_gates(tmp_path: Path) -> None:
    data = Dataset.of({str(n): "In 1932." for n in range(40)}, name="bridges")
    suite = EvalSuite("rag", data, answer, fairtrial.models.judges.faithfulness(ScriptedAdapter(claimless)))
    store = fairtrial.open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    report = suite.run_sync(store=store)
    assert dict(report.errors) == {"scorer_error": 10}
    assert (report.pass_rate, report.pass_rate_all) == (1.0, 0.75)
    assert "10 x scorer error: NothingToScoreError: judge 'faithfulness' found no statement" in str(report)
    document: Any = report.to_json()
    assert document["experiments"][0]["trials"]["scorer_error"] == 10
    assert not gate(report, {"min_pass_rate": 0.9}).passed
    missing = next(result for result in report.results if not result.success)
    assert missing.score is None
    assert "found no statement in the output, so there is no share" in str(missing.error)


def test_a_reward_of_an_answer_without_a_reference_is_none() -> None:
    suite = EvalSuite("s", Dataset([Sample("a", "x"), Sample("b", "x", "x")], name="d"), str, exact_match)
    suite_reward = RewardFunction(exact_match, suite.dataset, ("", None), "reward")
    scores = suite_reward.score_batch([Sample("a", "x"), Sample("b", "x", "x")], ["x", "x"], [None, None])
    assert [score if score is None else score.value for score in scores] == [None, 1.0]
