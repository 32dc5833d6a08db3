"""What the adapter of Inspect does without Inspect. `python scripts/peers files inspect` runs tasks with it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fairtrial import Score
from fairtrial.errors import MissingExtraError
from fairtrial.integrations.inspect import suite
from fairtrial.integrations.inspect.tasks import _evaluator


def scored(scores: dict[str, Any], wanted: str | None = None, error: str | None = None) -> Score:
    values = {name: {"value": value, "answer": None, "explanation": f"by {name}"} for name, value in scores.items()}
    return _evaluator(wanted)({"completion": "x", "scores": values, "scorer_error": error}, None)


def test_the_first_scorer_is_the_value_and_the_others_are_metrics() -> None:
    score = scored({"match": "C", "words": 34, "parts": {"named": 1, "short": "I"}})
    assert (score.value, score.passed, score.reason) == (1.0, True, "by match")
    assert {metric.name: (metric.value, metric.passed) for metric in score.metrics} == {
        "match": (1.0, True), "words": (34.0, None), "parts.named": (1.0, None), "parts.short": (0.0, False)
    }  # fmt: skip


def test_another_scorer_or_a_part_of_one_can_be_the_value() -> None:
    assert scored({"words": 34, "match": "I"}, "match").value == 0.0
    assert scored({"parts": {"a": 0.2, "b": 0.7}}, "parts.b").value == 0.7


@pytest.mark.parametrize(
    ("scores", "wanted", "said"),
    [
        ({"words": 34}, None, r"the score of words must be from 0 to 1 .*got 34"),
        ({"match": None, "other": 1}, "match", r"no score of match \(scores: other, match\)"),
        ({}, None, r"no score of any scorer"),
    ],
)
def test_a_trial_without_a_value_is_a_scorer_error(scores: dict[str, Any], wanted: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scored(scores, wanted)


def test_an_error_of_a_scorer_is_one_of_the_evaluator() -> None:
    with pytest.raises(ValueError, match="KeyError: 'x'"):
        scored({"match": "C"}, error="KeyError: 'x'")


def test_without_inspect_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.delitem(sys.modules, "fairtrial.integrations.inspect.tasks", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install \"fairtrial\[inspect\]\""):
        suite(object(), model="mockllm/model")
