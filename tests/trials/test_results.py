"""Results as users create and read them."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from fairtrial import EvalResult, FairtrialError, Metric, Sample, Score, TrialKey, evaluate_sync, exact_match
from fairtrial.base.codec import to_json
from fairtrial.data.session import ChatMessage, TokenUsage, Trajectory
from fairtrial.fleet.message_fields import MAX_INT
from fairtrial.reports import EvalReport, group_by
from fairtrial.trials.result import failed_result, new_execution, unchecked_result
from tests.records import changeable


@pytest.mark.proves("R153")
def test_the_metadata_of_a_result_and_its_sample_are_one_mapping() -> None:
    samples = [Sample(str(at), at, at, {"level": at % 2, "topic": "sums"}) for at in range(4)]
    report = evaluate_sync(samples, lambda given: given, exact_match)
    for result in (
        report.results[1],
        replace(report.results[1], metadata={"topic": "own"}, source=report.results[1].source),
    ):
        merged: Any = result.metadata
        own: dict[str, Any] = dict(result.own_metadata)
        expected = {**samples[1].metadata, **own}
        assert merged["level"] == merged.get("level") == 1
        assert merged.get("absent") is None
        assert "level" in merged
        assert "absent" not in merged
        assert dict(merged) == {**merged} == merged.copy() == merged == expected
        assert (merged != expected, merged != {}, merged == own) == (False, True, False)
        assert (len(merged), set(merged), set(merged.keys())) == (len(expected), set(expected), set(expected))
        assert list(merged)[: len(own)] == list(own)
        assert list(reversed(merged)) == list(merged)[::-1]
        assert (sorted(map(str, merged.values())), dict(merged.items())) == (
            sorted(map(str, expected.values())),
            expected,
        )
        assert (merged | {}, {} | merged) == (expected, expected)
        assert json.loads(json.dumps(merged)) == to_json(merged) == expected
        assert pickle.loads(pickle.dumps(merged)) == expected
        assert repr(merged) == repr(dict(merged))
        with pytest.raises(KeyError):
            merged["absent"]
        with pytest.raises(TypeError, match="frozen"):
            merged["level"] = 2
    groups: Any = group_by(report.results, key=lambda result: result.metadata.get("level"))
    assert sorted(groups) == [0, 1]


def test_the_framework_reads_only_what_belongs_to_the_trial() -> None:
    """A sample may have any keys, those of the framework too."""
    sample = Sample("s", 1, 1, {"untimed": True, "orphaned": True, "traceback": "none", "output_type": "x"})
    (result,) = evaluate_sync([sample], lambda given: given, exact_match).results
    assert result.known_latency_ms == result.latency_ms
    assert dict(result.own_metadata) == {}
    (again,) = EvalReport.of([result]).results
    assert (dict(again.own_metadata), again.metadata["traceback"]) == ({}, "none")


@pytest.mark.proves("R153")
def test_a_result_by_position_has_a_sample_a_score_a_latency_and_an_error() -> None:
    result = EvalResult("1", Score(1.0, True), 12)
    assert (result.sample_id, result.score, result.latency_ms, result.outcome) == ("1", Score(1.0, True), 12, "scored")
    assert EvalReport.of([result]).pass_rate == 1.0
    failed = EvalResult("1", None, 3, "it broke")
    assert (failed.outcome, failed.error, failed.score) == ("task_error", "it broke", None)


@pytest.mark.parametrize(
    ("arguments", "named", "problem"),
    [
        ((TrialKey("r", "e", "s"),), {"score": Score(1.0)}, "sample_id of a result must be text"),
        (("1", 0.5), {}, "score of a result must be a Score"),
        (("1", Score(1.0), "12"), {}, "latency_ms of a result must be an int"),
        (("1", None, 1, ValueError("x")), {}, "error of a result must be text"),
        ((), {"key": "1", "score": Score(1.0)}, "key of a result must be a TrialKey"),
    ],
)
def test_what_a_result_cannot_be_made_of_is_refused(
    arguments: tuple[Any, ...], named: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TypeError, match=problem) as refused:
        EvalResult(*arguments, **named)
    assert "the id of the sample, the score, the latency and the error" in str(refused.value)


def test_an_outcome_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="outcome must be one of dead_letter, "):
        EvalResult("1", Score(1.0), outcome=12)  # type: ignore[arg-type]


def test_parts_of_a_result_that_contradict_each_other_are_refused() -> None:
    sample = Sample("1", "q", "a")
    refused: dict[str, dict[str, Any]] = {
        "score and scores are mutually exclusive": {"score": Score(1.0), "scores": [Score(1.0)]},
        "a result must have a score or an error": {},
        "success must be True": {"score": Score(0.0), "success": False},
        "success must be False": {"error": "it broke", "success": True},
        "sample_id must be that of the sample, '1'": {"sample_id": "2", "sample": sample, "score": Score(1.0)},
        "sample_id must be that of the key, '3'": {"key": TrialKey("r", "e", "3"), "score": Score(1.0)},
        "a result must have a key, a sample_id or a sample": {"sample_id": None, "score": Score(1.0)},
    }
    for problem, arguments in refused.items():
        with pytest.raises(ValueError, match=problem):
            EvalResult(**{"sample_id": "1", **arguments})
    assert EvalResult("1", Score(0.0), success=True).success
    assert not EvalResult("1", None, 0, "it broke", success=False).success
    assert EvalResult(sample=sample, score=Score(1.0)).sample_id == "1"
    assert EvalResult("3", Score(1.0), key=TrialKey("r", "e", "3")).experiment == "e"


def test_the_criteria_of_a_result_are_one_score_with_their_mean() -> None:
    result = EvalResult("1", scores=[Score(1.0, True, name="short"), Score(0.5, False, "rude")])
    assert result.score is not None
    assert (result.score.value, result.passed) == (0.75, False)
    assert [(part.name, part.value, part.passed) for part in result.scores] == [
        ("short", 1.0, True),
        ("criterion 2", 0.5, False),
    ]
    assert result.aggregate_score == 0.75
    assert EvalResult("1", scores=[Score(1.0, True), Score(1.0, True)]).passed
    assert EvalResult("1", Score(0.25)).scores == (Score(0.25),)
    failed = EvalResult("1", None, 0, "it broke")
    assert (failed.scores, failed.aggregate_score, failed.passed) == ((), None, False)


def test_nested_criteria_are_part_of_their_outer_one_and_values_stay_between_0_and_1() -> None:
    metrics = [
        Metric("style", 0.5, passed=False, reason="curt"),
        Metric("style.tone", 0.2, passed=False),
        Metric("speed", 7.0, passed=True),
        Metric("debt", -2.0, passed=False),
        Metric("words", 12.0),
    ]
    result = EvalResult("1", Score(0.5, False, metrics=metrics))
    assert [(part.name, part.value, part.passed, part.reason) for part in result.scores] == [
        ("style", 0.5, False, "curt"),
        ("speed", 1.0, True, ""),
        ("debt", 0.0, False, ""),
    ]


def test_a_result_created_directly_has_what_it_was_given() -> None:
    sample = Sample("1", "q", "a", {"level": 3})
    trajectory = Trajectory((ChatMessage("user", "q"), ChatMessage("assistant", "a")))
    result = EvalResult(sample=sample, score=Score(1.0), trajectory=trajectory, tokens_used=12)
    assert (result.sample, result.trajectory.messages) == (sample, trajectory.messages)
    assert (result.tokens_used, result.metadata["level"]) == (12, 3)
    assert result.session.trajectory == result.trajectory
    no_messages = EvalResult(sample=sample, score=Score(1.0))
    assert no_messages.trajectory.messages == ()
    no_sample = EvalResult("1", Score(1.0), trajectory=trajectory)
    assert (no_sample.sample, no_sample.trajectory.messages) == (Sample("1", None), trajectory.messages)
    with pytest.raises(FairtrialError, match="has no store from which its sample and session can be loaded"):
        _ = EvalResult("1", Score(1.0)).sample


def test_results_are_equal_if_their_trials_gave_the_same() -> None:
    key = TrialKey("r", "e", "1")
    result = EvalResult(key=key, score=Score(1.0), output=["a"], metadata={"late_events": 1})
    stored = replace(result, source=EvalResult(sample=Sample("1", "q", "a", {"x": 1}), score=Score(1.0)).source)
    assert stored.metadata["x"] == 1
    assert result == stored
    assert len({result, stored, replace(result, execution=7)}) == 2
    others = [
        replace(result, metadata={}),
        replace(result, score=Score(0.5)),
        replace(result, latency_ms=1),
        replace(result, key=TrialKey("r", "e", "2")),
    ]
    assert result not in others
    assert result != "a result"


def test_a_result_is_shown_in_one_line() -> None:
    key = TrialKey("r", "terse", "s1", 2)
    assert repr(EvalResult("s1", Score(0.5, True))) == "<EvalResult 's1' of baseline: passed with 0.5>"
    assert repr(EvalResult(key=key, score=Score(0.0))) == "<EvalResult 's1' of terse, repeat 2: failed with 0>"
    assert (
        repr(EvalResult("s1", None, 0, "x" * 90 + "\nmore")) == f"<EvalResult 's1' of baseline: task_error: {'x' * 80}>"
    )
    assert repr(EvalResult("s1", outcome="timeout")) == "<EvalResult 's1' of baseline: timeout>"


def test_the_cost_of_a_result_includes_its_judges() -> None:
    for task_cost, judge_cost, total in ((1.5, 0.25, 1.75), (None, 0.25, 0.25), (1.5, None, 1.5), (None, None, 0.0)):
        usage = TokenUsage(1, 1, cost_usd=task_cost)
        assert EvalResult("1", Score(1.0), usage=usage, judge_cost_usd=judge_cost).total_cost_usd == total


def test_only_these_records_can_be_changed() -> None:
    assert changeable("trials") == {"_Attempt", "_Trial"}


def test_ids_of_executions_use_all_bits_that_messages_carry() -> None:
    drawn = [new_execution() for _ in range(200)]
    assert len(set(drawn)) == 200
    assert min(drawn) >= 0
    assert MAX_INT // 2 < max(drawn) <= MAX_INT


def test_the_error_of_a_trial_that_could_not_be_executed_is_limited() -> None:
    result = failed_result(TrialKey("r", "e", "s", 2), 7, 3, "dead_letter", "delivery", "x" * 20_000)
    assert (result.key.repeat, result.ordinal, result.attempt) == (2, 7, 3)
    assert (result.outcome, result.stage, result.error) == ("dead_letter", "delivery", "x" * 10_000)
    assert result.started_at > 0


def test_a_subclass_of_results_has_the_fields_of_one() -> None:
    class Marked(EvalResult[str]):
        pass

    found, plain = Marked("7", Score(1.0), 12), EvalResult[str]("7", Score(1.0), 12)
    assert type(found) is Marked
    assert type(plain) is EvalResult
    assert {name: getattr(found, name) for name in EvalResult.__slots__} == {
        name: getattr(plain, name) for name in EvalResult.__slots__
    }


def test_a_result_of_values_in_their_order_is_that_of_values_by_name() -> None:
    named = {
        "key": TrialKey("r", "e", "s", 2), "ordinal": 3, "outcome": "scored", "score": Score(0.5), "output": "o",
        "latency_ms": 4, "usage": TokenUsage(5, 6), "error": "e", "stage": "task", "attempt": 7, "execution": 8,
        "started_at": 9.5, "metadata": {"a": 1}, "judge_cost_usd": 10.5, "cache_hits": 11, "unpriced_calls": 12,
        "unpriced_judge_calls": 13, "cut_off_calls": 14, "refused_calls": 15, "unknown_endings": {"x": 16},
        "redacted_parts": ("output",), "code": 17, "output_json": '"o"', "snapshot": b"s", "source": None,
    }  # fmt: skip
    made = unchecked_result(*named.values())
    by_name: Any = EvalResult(**named)  # type: ignore[arg-type]
    assert type(made) is type(by_name) is EvalResult
    assert list(named) == [field.name for field in fields(EvalResult)]
    assert {name: getattr(made, name) for name in named} == {name: getattr(by_name, name) for name in named} == named
