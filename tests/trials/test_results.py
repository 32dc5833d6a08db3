"""Results as users create and read them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import EvalReport, EvalResult, Sample, Score, evaluate_sync, exact_match, group_by
from fairtrial.codec import to_json
from fairtrial.fleet.message_fields import MAX_INT
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import failed_result, new_execution
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
        assert (len(merged), set(merged), set(merged.keys())) == (len(expected), set(expected), set(expected))
        assert list(merged)[: len(own)] == list(own)
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
