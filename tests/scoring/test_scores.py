"""R8 to R11: scores and metrics."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import Metric, Score
from tests.records import changeable

unchecked: Any = Score  # For what a type checker would not let pass.
finite = st.floats(allow_nan=False, allow_infinity=False)
weighted = st.builds(Metric, st.text(min_size=1), finite, st.floats(0, allow_infinity=False, exclude_min=True))
weighted_lists = st.lists(weighted, min_size=1, max_size=6, unique_by=lambda metric: metric.name)


@pytest.mark.proves("R8")
def test_a_score_has_a_value_a_verdict_and_a_reason() -> None:
    score = Score(0.75, True, "close")
    assert (score.value, score.passed, score.reason, score.metrics, score.name) == (0.75, True, "close", (), "")
    assert score == Score(0.75, True, "close")
    assert hash(score) == hash(Score(0.75, True, "close"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        score.value = 1.0  # type: ignore[misc]


@pytest.mark.proves("R8")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.001, 1.001, 10**400])
def test_a_value_is_finite_and_from_0_to_1(value: float) -> None:
    with pytest.raises(ValueError, match="the value of a score must"):
        Score(value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: unchecked("0.5"), "must be a number"),
        (lambda: unchecked([1]), "must be a number"),
        (lambda: unchecked(object()), "must be a number"),
        (lambda: unchecked(1.0, 1), "True or False"),
        (lambda: unchecked(1.0, True, None), "reason of a score must be text"),
        (lambda: unchecked(1.0, True, "", name=3), "name of a score must be text"),
        (lambda: unchecked(1.0, metrics=["a"]), "must be Metric objects"),
    ],
)
def test_what_is_no_score_is_refused(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.proves("R8")
def test_without_a_verdict_half_is_a_pass() -> None:
    assert Score(0.5).passed
    assert not Score(0.4999).passed
    assert Score(0.1, True).passed
    assert repr(Score(True).value) == repr(unchecked(np.float32(1)).value) == repr(Score(1).value) == "1.0"


@pytest.mark.proves("R10")
def test_the_reward_is_the_weighted_mean_of_the_metrics_that_have_a_weight() -> None:
    metrics = (Metric("right", 1.0, 3.0), Metric("polite", 0.0, 1.0), Metric("turns", 12.0))
    score = Score(metrics=metrics)
    assert score.reward == score.value == 0.75
    assert score.passed
    assert (score.metric("turns"), score.metric("none")) == (12.0, None)
    assert Score(0.2, metrics=metrics).reward == 0.75
    assert Score(0.2, metrics=[Metric("turns", 3)]).reward == 0.2
    assert dataclasses.asdict(metrics[2]) == {
        "name": "turns",
        "value": 12.0,
        "weight": 0.0,
        "metadata": {},
        "passed": None,
        "reason": "",
        "higher_is_better": None,
        "bounds": None,
    }


@pytest.mark.proves("R10", "R11")
def test_a_reward_may_leave_the_range_and_the_value_is_clipped() -> None:
    for value, clipped in ((-3.0, 0.0), (7.5, 1.0)):
        score = Score(metrics=[Metric("penalty", value, 1.0)])
        assert (score.reward, score.value) == (value, clipped)


@pytest.mark.proves("R10")
def test_a_score_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a value, or metrics to compute one from"):
        Score()


@pytest.mark.proves("R10")
def test_a_score_of_tracked_metrics_alone_rewards_nothing_and_keeps_them() -> None:
    score = Score(metrics=(Metric("turns", 12), Metric("cost", 0.5)))
    assert (score.reward, score.value, score.passed) == (0.0, 0.0, False)
    assert score.metric("turns") == 12
    assert Score(metrics=(Metric("turns", 12),), passed=True).passed


@pytest.mark.proves("R11")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Metric("m", math.nan),
        lambda: Metric("m", math.inf),
        lambda: Metric("m", 1.0, math.nan),
        lambda: Metric("m", 1.0, math.inf),
        lambda: Metric("m", 1.0, -1.0),
        lambda: Metric("", 1.0),
        lambda: Metric(3, 1.0),  # type: ignore[arg-type]
        lambda: Score(1.0, metrics=[Metric("m", 1.0), Metric("m", 2.0)]),
    ],
)
def test_metrics_that_mean_nothing_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"metric"):
        make()


@pytest.mark.proves("R11")
@given(finite)
def test_a_metric_may_be_any_finite_number(value: float) -> None:
    assert Metric("m", value).value == value
    assert Score(0.5, metrics=[Metric("m", value)]).value == 0.5


@pytest.mark.proves("R10")
@given(weighted_lists)
def test_the_reward_is_a_true_mean_for_any_weights(metrics: list[Metric]) -> None:
    reward = Score(metrics=metrics).reward
    values = [Fraction(metric.value) for metric in metrics]
    weights = [Fraction(metric.weight) for metric in metrics]
    exact: Any = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    assert math.isfinite(reward)
    scale = max(abs(value) for value in values)
    assert abs(Fraction(reward) - exact) <= scale * Fraction(1, 10**12) + Fraction(1, 10**300)
    assert Score(metrics=metrics[::-1]).reward == pytest.approx(reward, rel=1e-12, abs=1e-300)


@pytest.mark.proves("R10")
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_the_mean_of_equal_values_is_that_value(weights: list[float]) -> None:
    for value in (0.0, 1.0, 0.5):
        assert Score(metrics=[Metric(f"m{n}", value, weight) for n, weight in enumerate(weights)]).reward == value


def test_the_metadata_of_a_metric_cannot_be_changed() -> None:
    metric = Metric("m", 1.0, metadata={"a": [1]})
    with pytest.raises(TypeError):
        metric.metadata["a"].append(2)  # type: ignore[union-attr]


def test_a_metric_with_a_verdict_is_a_criterion_and_one_without_is_not() -> None:
    met, tracked = Metric("polite", 0.25, passed=True, reason="kind"), Metric("turns", 12)
    assert Score(0.25, False, metrics=[tracked, met]).criteria == (met,)
    assert Score(1.0).criteria == ()
    with pytest.raises(TypeError, match=r"passed of metric 'polite' must be True, False or None \(got 1\)"):
        Metric("polite", 1.0, passed=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reason of metric 'polite' must be text"):
        Metric("polite", 1.0, passed=True, reason=None)  # type: ignore[arg-type]


def test_criterion_and_rationale_are_other_names_of_name_and_reason() -> None:
    score = Score(1.0, criterion="polite", rationale="kind")
    assert score == Score(1.0, reason="kind", name="polite")
    assert (score.criterion, score.rationale) == ("polite", "kind")
    assert Score(1.0, criterion="polite", reason="kind") == Score(1.0, name="polite", rationale="kind") == score
    both: list[dict[str, Any]] = [{"criterion": "a", "name": "a"}, {"rationale": "b", "reason": "b"}]
    for pair in both:
        with pytest.raises(ValueError, match="pass one of each pair"):
            Score(1.0, **pair)


def test_the_innermost_criteria_that_failed_explain_a_score_without_a_reason() -> None:
    metrics = [
        Metric("style", 0.0, passed=False, reason="curt"),
        Metric("style.tone", 0.25, passed=False),
        Metric("style.tone.greeting", 0.0, passed=False, reason="no greeting"),
        Metric("style.length", 1.0, passed=True),
        Metric("facts", 1.0, passed=True),
        Metric("facts.first", 0.0, passed=False, reason="one of any was enough"),
        Metric("sources", 0.125, passed=False),
        Metric("turns", 12),
    ]
    score = Score(0.0, metrics=metrics)
    assert [metric.name for metric in score.failed_criteria] == ["style.tone.greeting", "sources"]
    assert score.explain() == "style.tone.greeting: no greeting; sources: failed with 0.125"
    assert Score(0.0, False, "rude", metrics).explain() == "rude"
    assert Score(1.0, True, "", metrics).explain() == ""


def test_records_cannot_be_changed() -> None:
    assert changeable("scoring") == set()
