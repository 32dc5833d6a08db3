"""Rates, means and differences of judged trials, corrected by labels of some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fairtrial import stats
from fairtrial.stats.labelled import JudgedTrials, corrected_difference, corrected_mean


def judged(scores: Sequence[float], labels: Sequence[float | None], **more: object) -> JudgedTrials:
    arrays = {name: np.asarray(value) for name, value in more.items()}
    people = np.array([np.nan if label is None else label for label in labels])
    return JudgedTrials(np.array(scores, dtype=float), people, **arrays)


def test_the_post_stratified_rate_is_that_of_the_formula() -> None:
    found = corrected_mean(judged([1] * 60 + [0] * 40, [1, 1, 1, 0] + [None] * 56 + [0, 1] + [None] * 38))
    assert found.estimate == pytest.approx(0.6 * 0.75 + 0.4 * 0.5)
    assert (found.judged, found.labelled) == (100, 6)
    assert found.se == pytest.approx(
        np.sqrt(0.36 * 0.75 * 0.25 / 4 + 0.16 * 0.25 / 2 + 0.6 * 0.4 * 0.25**2 / 100), rel=1e-9
    )


def test_a_verdict_without_labels_may_hide_any_rate() -> None:
    found = corrected_mean(judged([1] * 50 + [0] * 50, [1] * 40 + [None] * 60))
    assert found.interval is not None
    assert found.interval.low < 0.51
    assert found.notes == (
        "No trial that the judge failed is labelled: what people say of those is anything from 0 to 1.",
    )


def test_what_is_certain_has_no_error_and_is_not_judged() -> None:
    labels = [1.0, 0.0] * 10 + [None] * 30
    some = corrected_mean(judged([1.0] * 50, labels))
    failed = corrected_mean(
        judged([1.0] * 50 + [np.nan] * 50, [*labels, *([0.0] * 50)], certain=[False] * 50 + [True] * 50)
    )
    assert (failed.judged, failed.labelled) == (50, 20)
    assert some.estimate == pytest.approx(0.5)
    assert failed.estimate == pytest.approx(0.25)
    assert failed.interval is not None
    assert some.interval is not None
    assert failed.interval.width < some.interval.width


def test_exact_limits_are_wider() -> None:
    trials = judged([1] * 60 + [0] * 40, [1] * 10 + [None] * 50 + [0, 1] * 5 + [None] * 30)
    plain, exact = corrected_mean(trials).interval, corrected_mean(trials, exact=True).interval
    assert plain is not None
    assert exact is not None
    assert exact.low < plain.low
    assert exact.high > plain.high


def test_equal_sides_do_not_shrink_to_a_point() -> None:
    trials = judged([1, 0] * 50, [1, 0] * 20 + [None] * 60)
    found = corrected_difference(trials, trials)
    assert found.difference == 0
    assert found.interval is not None
    assert found.interval.width > 0.01
    assert (found.p_value, found.ties, found.test) == (1.0, 100, stats.LABELS_TEST)


def test_the_p_value_is_where_the_interval_begins_to_hold_nothing() -> None:
    rng = np.random.default_rng(4)
    y = [(rng.random(300) < rate).astype(float) for rate in (0.85, 0.7)]
    sides = [JudgedTrials(one, np.where(np.arange(300) < 150, one, np.nan)) for one in y]
    found = corrected_difference(*sides)
    assert found.p_value is not None
    assert found.p_value < 0.05
    for factor, holds in ((0.98, True), (1.02, False)):
        at = corrected_difference(*sides, level=1 - factor * found.p_value).interval
        assert at is not None
        assert at.contains(0.0) is holds
    assert found.mean_a == pytest.approx((found.mean_b or 0) + (found.difference or 0))


def test_clusters_and_repeats_widen_the_interval() -> None:
    rng = np.random.default_rng(1)
    y = np.repeat(rng.random(50) < 0.7, 4).astype(float)
    labels = np.where(np.tile([True, True, False, False], 50), y, np.nan)
    alone = corrected_mean(JudgedTrials(y, labels)).interval
    repeats = corrected_mean(JudgedTrials(y, labels, samples=np.repeat(np.arange(50), 4))).interval
    clusters = corrected_mean(JudgedTrials(y, labels), clusters=np.repeat(np.arange(50), 4)).interval
    assert alone is not None
    assert repeats is not None
    assert clusters is not None
    assert repeats.width == pytest.approx(clusters.width)
    assert repeats.width > 1.5 * alone.width
    one = corrected_mean(JudgedTrials(y, labels), clusters=np.zeros(200, dtype=np.intp))
    assert (one.interval, one.estimate) == (None, None)
    assert "one cluster" in (one.reason or "")


def test_a_judge_of_graded_scores_weighs_as_much_as_it_knows() -> None:
    rng = np.random.default_rng(2)
    y = rng.choice(np.array([0.25, 0.5, 0.75]), 400)
    labels = np.where(np.arange(400) < 80, y, np.nan)
    useless, good = rng.random(400), np.clip(y + 0.1, 0, 1)
    alone = stats.mean_interval(y[:80]).interval
    found = [corrected_mean(JudgedTrials(f, labels)).interval for f in (useless, good)]
    assert alone is not None
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].width < 1.1 * alone.width
    assert found[1].width < 0.7 * alone.width
    assert found[1].contains(y.mean())
    assert (
        corrected_mean(judged([0.3, 0.4, 0.5], [0.2, None, 0.7])).reason == "Graded figures need at least three labels."
    )


def test_invalid_labels_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry for each of the 2 scores"):
        judged([1, 0], [1])
    with pytest.raises(ValueError, match="weight of a label must be above 0"):
        judged([1, 0], [1, None], weights=[0.0, 1.0])
    with pytest.raises(ValueError, match="must have a score"):
        corrected_mean(judged([1, np.nan], [1, None]))
    with pytest.raises(ValueError, match="every sample must have a trial"):
        corrected_mean(judged([1, 0], [1, None], samples=[0, 2]))
    with pytest.raises(ValueError, match="the same samples"):
        corrected_difference(judged([1, 0], [1, None]), judged([1, 0, 1], [1, None, 1]))
    assert corrected_mean(judged([1, 0], [None, None])).reason == "No judged trial is labelled."
    assert corrected_difference(judged([1, 0], [None, None]), judged([1, 0], [1, 0])).interval is None


@pytest.mark.long
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("rate", "sensitivity", "specificity"), [(0.8, 0.7, 0.6), (0.8, 0.9, 0.8), (0.95, 0.95, 0.7)])
def test_the_corrected_rate_covers_however_few_and_wherever_the_labels(
    rate: float, sensitivity: float, specificity: float, half: bool
) -> None:
    rng, runs, n = np.random.default_rng(21), 250, 1_000
    for labels in (20, 100):
        held, widths, alone = 0, 0.0, 0.0
        for _ in range(runs):
            truth = rng.random(n) < rate
            judge = np.where(truth, rng.random(n) < sensitivity, rng.random(n) >= specificity)
            groups = [np.flatnonzero(judge == verdict) for verdict in (0, 1)] if half else [np.arange(n)]
            some = np.concatenate([rng.permutation(group)[: labels // len(groups)] for group in groups])
            people = np.full(n, np.nan)
            people[some] = truth[some]
            interval = corrected_mean(JudgedTrials(judge.astype(float), people)).interval
            own = stats.mean_interval(truth[some].astype(float)).interval
            assert interval is not None
            assert own is not None
            held += interval.contains(rate)
            widths, alone = widths + interval.width, alone + own.width
        assert held / runs >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / runs)
        if not half:
            assert widths <= 1.03 * alone  # A judge is never worse than none.


@pytest.mark.long
@pytest.mark.parametrize("half", [False, True])
def test_a_judge_that_is_kinder_to_one_of_two_equal_systems_makes_no_winner(half: bool) -> None:
    """It passes 10% of the wrong answers of one and 35% of the other's; without labels one wins half of the time."""
    rng, runs, n, labels = np.random.default_rng(22), 300, 500, 100
    corrected = raw = 0
    for _ in range(runs):
        sides, verdicts = [], []
        for forgiven in (0.10, 0.35):
            truth = rng.random(n) < 0.8
            judge = np.where(truth, rng.random(n) < 0.95, rng.random(n) < forgiven)
            groups = [np.flatnonzero(judge == verdict) for verdict in (0, 1)] if half else [np.arange(n)]
            some = np.concatenate([rng.permutation(group)[: labels // len(groups)] for group in groups])
            people = np.full(n, np.nan)
            people[some] = truth[some]
            sides.append(JudgedTrials(judge.astype(float), people))
            verdicts.append(judge.astype(float))
        corrected += bool(corrected_difference(*sides).differs)
        raw += bool(stats.paired_difference(*verdicts).differs)
    assert raw / runs > 0.3
    assert corrected / runs <= 0.06 + 3 * np.sqrt(0.06 * 0.94 / runs)
