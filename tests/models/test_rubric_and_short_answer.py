"""Rubrics with signed points, and short answers with three labels."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Sample, ScriptedAdapter, all_of, exact_match
from fairtrial.errors import NothingToScoreError, OutputParseError
from fairtrial.models.judges import RubricItem, rubric, short_answer_judge, short_answer_summary
from fairtrial.models.judges.checks import judge_notes, rebuild_prompt
from fairtrial.models.judges.fence import read_fences
from fairtrial.models.judges.rubric import rubric_share
from fairtrial.models.judges.short_answer import LABELS
from fairtrial.scoring.evaluator import Case

ITEMS = {"Tells the reader to see a doctor.": 5.0, "Names the cause.": 3.0, "Gives a dose.": -8.0}


def verdicts(*met: str) -> dict[str, Any]:
    return {"verdicts": [{"criterion": n, "reason": f"why {n}", "met": each} for n, each in enumerate(met, 1)]}


@pytest.mark.proves("R157")
@pytest.mark.parametrize(
    ("met", "points"),
    [
        (("yes", "yes", "no"), 1.0),
        (("yes", "no", "no"), 0.625),
        (("no", "yes", "no"), 0.375),
        (("no", "no", "no"), 0.0),
        (("yes", "yes", "yes"), 0.0),
        (("yes", "no", "yes"), -0.375),
        (("no", "no", "yes"), -1.0),
    ],
)
async def test_points_of_met_criteria_are_a_share_of_the_positive_points(met: tuple[str, ...], points: float) -> None:
    score = await rubric(ScriptedAdapter([verdicts(*met)]), ITEMS).score(Case(Sample("s", "It hurts."), "See one."))
    assert score.value == max(points, 0.0)
    assert score.metric("points") == points
    assert score.passed == (points >= 0.5)
    fault = next(metric for metric in score.metrics if metric.name == "3: Gives a dose.")
    assert (fault.passed, fault.metadata["met"], fault.metadata["points"]) == (met[2] == "no", met[2] == "yes", -8.0)


@pytest.mark.parametrize("seed", range(30))
def test_the_share_agrees_with_sums_in_whole_numbers(seed: int) -> None:
    rng = random.Random(seed)
    points = [rng.choice([-10, -8, -3, 1, 2, 5, 7, 10]) for _ in range(rng.randint(1, 12))] + [4]
    met = [rng.random() < 0.5 for _ in points]
    earned = sum(each for each, is_met in zip(points, met, strict=True) if is_met)
    possible = sum(each for each in points if each > 0)
    share = rubric_share([RubricItem(f"c{n}", each) for n, each in enumerate(points)], met)
    assert math.isclose(share, earned / possible)


async def test_each_sample_may_have_its_own_rubric_which_the_judge_sees_as_criteria_only() -> None:
    model = ScriptedAdapter([verdicts("yes", "no")])
    own = [{"criterion": "Is polite.", "points": 2}, {"criterion": "Is rude.", "points": -1}]
    score = await rubric(model).score(Case(Sample("s", "Hello", own), "Good day"))
    assert score.value == 1.0
    question = model.calls[0].text
    assert [name for _, name, _ in read_fences(question)] == ["input", "output_to_assess"]
    assert "1. Is polite.\n2. Is rude." in question
    assert "points" not in question  # Points would tell the judge what is wanted.


async def test_a_prompt_can_be_rebuilt_and_an_empty_output_is_not_judged() -> None:
    model = ScriptedAdapter([verdicts("yes", "yes", "no")])
    judge = rubric(model, ITEMS)
    sample: Sample[str, None] = Sample("s", "It hurts.")
    score = await judge.score(Case(sample, "See one."))
    digest = str(score.metrics[0].metadata["prompt_sha256"])
    rebuilt = rebuild_prompt(judge_notes(judge), sample, "See one.", digest)
    assert rebuilt is not None
    assert tuple(rebuilt) == model.calls[0].messages
    assert (await judge.score(Case(sample, " "))).passed is False
    assert len(model.calls) == 1


async def test_verdicts_that_skip_a_criterion_are_no_verdict() -> None:
    with pytest.raises(OutputParseError, match=r"must answer criteria 1 to 3 \(got \[1, 2\]\)"):
        await rubric(ScriptedAdapter([verdicts("yes", "yes")]), ITEMS).score(Case(Sample("s", "?"), "x"))


@pytest.mark.parametrize(
    "items", [{}, {"Only a fault.": -1}, [("no points",)], [{"criterion": "x"}], {"zero": 0}, {" ": 1}, {"x": math.inf}]
)
def test_a_rubric_without_positive_points_or_with_broken_items_is_refused(items: Any) -> None:
    with pytest.raises(ConfigurationError, match="rubric"):
        rubric(ScriptedAdapter([]), items)


async def test_a_sample_without_a_rubric_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="must have at least one criterion"):
        await rubric(ScriptedAdapter([])).score(Case(Sample("s", "Hello", "an answer"), "Good day"))


QUESTION = Sample("q", "Who wrote Faust?", "Goethe")


@pytest.mark.proves("R157")
@pytest.mark.parametrize("label", LABELS)
async def test_labels_become_metrics_and_only_correct_passes(label: str) -> None:
    model = ScriptedAdapter([{"reason": "because", "label": label}])
    score = await short_answer_judge(model).score(Case(QUESTION, "It was Goethe."))
    assert {each: score.metric(each) for each in LABELS} == {each: float(each == label) for each in LABELS}
    assert score.passed == (label == "correct")
    assert [name for _, name, _ in read_fences(model.calls[0].text)] == [
        "input",
        "reference_answer",
        "output_to_assess",
    ]


async def test_an_empty_answer_is_not_attempted_without_a_call() -> None:
    score = await short_answer_judge(ScriptedAdapter([])).score(Case(QUESTION, ""))
    assert score.metric("not_attempted") == 1.0
    with pytest.raises(NothingToScoreError, match="the sample has none"):
        await short_answer_judge(ScriptedAdapter([])).score(Case(Sample("q", "Who?"), "x"))


def labelled_run(labels: list[str], evaluator: Any = None) -> Any:
    judge = short_answer_judge(
        ScriptedAdapter(lambda messages: {"reason": "r", "label": read_fences(messages[-1].text)[-1][2]})
    )
    samples = Dataset([Sample(f"q{n}", label, "x") for n, label in enumerate(labels)], name="facts")
    return EvalSuite("facts", samples, lambda text: text, evaluator(judge) if evaluator else judge).run_sync(
        store="memory:"
    )


COUNTS = [
    (correct, incorrect, skipped) for correct in (1, 7, 50, 386) for incorrect in (0, 3, 61) for skipped in (0, 12, 499)
]


@pytest.mark.parametrize(("correct", "incorrect", "not_attempted"), COUNTS)
def test_the_f_score_is_the_harmonic_mean(correct: int, incorrect: int, not_attempted: int) -> None:
    class Result:
        def __init__(self, number: int, label: str) -> None:
            self.sample_id = f"q{number}"
            self.score = self
            self.label = label

        def metric(self, name: str) -> float:
            return float(self.label == name)

    labels = ["correct"] * correct + ["incorrect"] * incorrect + ["not_attempted"] * not_attempted
    summary = short_answer_summary(Result(number, label) for number, label in enumerate(labels))
    # As the paper defines it: of the share that is correct overall, and of the share of attempted ones.
    overall, attempted = Fraction(correct, len(labels)), Fraction(correct, correct + incorrect)
    assert summary.f_score == pytest.approx(float(2 / (1 / overall + 1 / attempted)), abs=1e-12)
    assert summary.correct_given_attempted == pytest.approx(float(attempted), abs=1e-12)
    if len(labels) > 1 and summary.low is not None and summary.high is not None:
        assert summary.low <= summary.f_score <= summary.high


def test_the_f_score_of_counts_is_that_of_the_formula() -> None:
    # 3 correct, 1 wrong, 2 not attempted: 1/2 overall, 3/4 of those attempted; 2 * 3/8 / (5/4) = 0.6.
    labels = ["correct"] * 3 + ["incorrect"] + ["not_attempted"] * 2
    assert short_answer_summary(labelled_run(labels).results).f_score == pytest.approx(0.6, abs=1e-12)


def test_the_interval_of_the_f_score_covers_and_errors_count_as_not_attempted() -> None:
    rng = random.Random(4)
    truth = 2 * 0.5 / (1 + 0.8)

    class Result:
        def __init__(self, number: int) -> None:
            self.sample_id, self.score = f"q{number}", self
            draw = rng.random()
            self.label = "correct" if draw < 0.5 else "incorrect" if draw < 0.8 else "not_attempted"

        def metric(self, name: str) -> float:
            return float(self.label == name)

    covered = 0
    for _ in range(400):
        summary = short_answer_summary([Result(number) for number in range(60)])
        assert summary.low is not None
        assert summary.high is not None
        covered += summary.low <= truth <= summary.high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_run_is_summarised_also_inside_a_combination() -> None:
    labels = ["correct"] * 8 + ["incorrect"] * 3 + ["not_attempted"] * 4
    summary = short_answer_summary(labelled_run(labels).results)
    assert summary.samples == 15
    assert summary.correct == pytest.approx(8 / 15)
    assert str(summary).startswith("F-score 61.5% (95% interval ")
    combined = labelled_run(labels, lambda judge: all_of(judge, exact_match))
    assert short_answer_summary(combined.results, name="short answer").f_score == summary.f_score
    with pytest.raises(ConfigurationError, match="no metric correct"):
        short_answer_summary(combined.results)
    few = short_answer_summary(labelled_run(["correct", "incorrect"]).results)
    assert (few.f_score, few.low, few.high) == (0.5, None, None)
    with pytest.raises(ConfigurationError, match="at least one result"):
        short_answer_summary([])
