"""Differences of quantiles and ratios of geometric means; differences of means with long tails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fairtrial import stats
from fairtrial.stats import (
    HistoryMean,
    Repeats,
    geometric_ratio,
    history_mean,
    mean_interval,
    paired_difference,
    quantile_difference,
    quantile_interval,
)
from fairtrial.stats._arrays import FloatArray
from fairtrial.stats.labelled import JudgedTrials, corrected_difference, corrected_mean

RNG = np.random.default_rng(11)


def lognormal(sigma: float, n: int) -> np.ndarray:
    return np.exp(sigma * RNG.normal(size=n) - sigma**2 / 2)


class TestQuantiles:
    def test_quantiles_of_both_sides_and_their_difference(self) -> None:
        a, b = np.arange(1.0, 101.0), np.arange(2.0, 202.0, 2.0)
        found = quantile_difference(a, b, 0.95)
        assert (found.mean_a, found.mean_b, found.difference) == (95.0, 190.0, -95.0)
        assert (found.wins, found.losses, found.ties, found.n) == (0, 100, 0, 100)

    def test_swapping_the_sides_negates_the_answer(self) -> None:
        a, b = lognormal(1, 60), lognormal(1.5, 60)
        one, two = quantile_difference(a, b, 0.5, seed=4), quantile_difference(b, a, 0.5, seed=4)
        assert one.interval is not None
        assert two.interval is not None
        assert (one.interval.low, one.interval.high) == (-two.interval.high, -two.interval.low)
        assert one.p_value == two.p_value

    @pytest.mark.parametrize("shift", [0.0, 0.3, 0.6, 1.0])
    def test_the_interval_leaves_out_0_if_and_only_if_p_says_so(self, shift: float) -> None:
        base = RNG.normal(10, 1, 80)
        for level in (0.8, 0.9, 0.95, 0.99):
            found = quantile_difference(base + shift * RNG.random(80), base, 0.5, level=level)
            assert found.interval is not None
            assert found.p_value is not None
            assert found.differs is (found.p_value <= 1 - level)

    def test_few_values_beyond_a_quantile_take_the_ends_of_both_sides(self) -> None:
        a, b = lognormal(1, 100), lognormal(1, 100)
        found = quantile_difference(a, b, 0.95)
        ends = [quantile_interval(side, 0.95, level=0.975) for side in (a, b)]
        assert found.interval is not None
        assert found.interval.low == pytest.approx((ends[0].low or 0) - (ends[1].high or 0))
        assert found.interval.high == pytest.approx((ends[0].high or 0) - (ends[1].low or 0))
        assert found.p_value is not None
        assert found.differs is (found.p_value <= 0.05)
        none = quantile_difference(a[:60], b[:60], 0.95)
        assert (none.interval, none.p_value) == (None, None)
        assert none.reason == "60 samples do not bound this quantile on both sides."

    def test_repeats_belong_to_their_sample_and_samples_to_their_cluster(self) -> None:
        base = RNG.normal(0, 3, 40)
        rows = [list(value + RNG.normal(0, 0.1, 5)) for value in base]
        other = [list(value + RNG.normal(0, 0.1, 5)) for value in RNG.permutation(base)]
        whole = quantile_difference(rows, other, 0.5).interval
        flat = quantile_difference(np.ravel(rows), np.ravel(other), 0.5).interval
        assert whole is not None
        assert flat is not None
        assert whole.high - whole.low > 1.5 * (flat.high - flat.low)
        clusters = np.repeat(np.arange(40), 5)
        grouped = quantile_difference(np.ravel(rows), np.ravel(other), 0.5, clusters=clusters)
        assert grouped.clusters == 40
        assert grouped.effective_clusters == pytest.approx(40.0)
        assert grouped.interval is not None
        assert (grouped.interval.low, grouped.interval.high) == (whole.low, whole.high)

    def test_a_sample_without_a_value_on_a_side_is_no_pair(self) -> None:
        rows = [[float(place)] for place in range(30)]
        found = quantile_difference([*rows, []], [*rows, [5.0]], 0.5)
        assert (found.n, found.unscored, found.difference) == (30, 1, 0.0)
        assert quantile_difference([[]], [[1.0]], 0.5).reason == "No sample has a score on both sides."
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            quantile_difference([1.0], [1.0], 1.0)

    @pytest.mark.parametrize(("sigmas", "share", "n"), [((2, 1), 0.5, 30), ((1, 1), 0.5, 20), ((1, 1), 0.95, 200)])
    def test_equal_quantiles_are_called_different_at_most_at_the_level(
        self, sigmas: tuple[float, float], share: float, n: int
    ) -> None:
        rng = np.random.default_rng(3)
        called = 0
        for run in range(200):
            a, b = (np.exp(sigma * rng.normal(size=n)) for sigma in sigmas)
            called += quantile_difference(a, b, share, draws=299, seed=run).differs or False
        assert called <= 200 * 0.05 + 2 * (200 * 0.05 * 0.95) ** 0.5


class TestRatio:
    def test_the_ratio_of_geometric_means(self) -> None:
        b = lognormal(2, 50)
        found = geometric_ratio(b * np.exp(0.01 * RNG.normal(size=50)) * 0.8, b)
        assert found.difference == pytest.approx(-0.2, abs=0.01)
        assert found.mean_b == pytest.approx(np.exp(np.log(b).mean()))
        assert found.interval is not None
        assert -0.21 < found.interval.low < found.interval.high < -0.19
        assert not found.heavy_tail

    def test_it_needs_values_above_0(self) -> None:
        found = geometric_ratio([1.0, 0.0, 2.0], [1.0, 1.0, 1.0])
        assert (found.difference, found.interval, found.p_value) == (None, None, None)
        assert found.reason == "A geometric mean needs values above 0 (1 is not)."


class TestLongTails:
    def test_a_side_of_which_a_few_values_are_most_of_the_sum_is_named(self) -> None:
        a = np.where(np.arange(100) < 3, 300.0, 1.0 + np.arange(100) / 100)
        found = paired_difference(a, np.ones(100), bounds=None)
        assert found.heavy_tail
        assert found.notes == (
            "The largest 5 of 100 values make up 86% of the sum: a difference of means is not reliable.",
        )
        assert not paired_difference(np.ones(100), 1 + np.arange(100) / 100, bounds=None).heavy_tail
        assert not paired_difference(a / 300, np.ones(100), bounds=(0.0, 1.0)).heavy_tail

    def test_one_difference_farther_out_belongs_to_the_interval(self) -> None:
        a, b = RNG.normal(10, 1, 40), RNG.normal(10, 1, 40)
        found = paired_difference(a, b, bounds=None)
        d = a - b
        residuals = d - d.mean()
        more = np.append(d, d.mean() + 2 * residuals[np.argmax(np.abs(residuals))])
        half = 2.0211 * more.std(ddof=1) / 41**0.5
        assert found.interval is not None
        assert found.interval.low <= more.mean() - half + 1e-3
        assert found.interval.high >= more.mean() + half - 1e-3
        assert "one difference farther out" in found.interval.method

    @pytest.mark.parametrize(("one", "two", "n"), [(2, 1, 30), (2, 1, 100), (1.5, 0.5, 50), (1, 0.3, 50)])
    def test_equal_means_of_unequal_tails_are_seldom_called_different(self, one: float, two: float, n: int) -> None:
        rng = np.random.default_rng(7)
        called = 0
        for run in range(150):
            a, b = (np.exp(sigma * rng.normal(size=n) - sigma**2 / 2) for sigma in (one, two))
            found = paired_difference(a, b, bounds=None, draws=299, seed=run)
            called += not found.heavy_tail and bool(found.differs)
        assert called <= 150 * 0.05 + 2 * (150 * 0.05 * 0.95) ** 0.5


# Means adjusted by earlier runs of their samples.


def drawn(seed: int, n: int = 100, pool: int = 1_000, correlation: float = 0.7) -> tuple[FloatArray, FloatArray]:
    """Earlier and present verdicts of a pool; those of the first n are the run's."""
    rng = np.random.default_rng(seed)
    before = (rng.random(pool) < 0.6).astype(float)
    now = np.where(rng.random(pool) < correlation, before, rng.random(pool) < 0.6).astype(float)
    return before, now[:n]


def adjusted(seed: int = 1, n: int = 100, pool: int = 1_000, correlation: float = 0.7) -> HistoryMean:
    before, now = drawn(seed, n, pool, correlation)
    return history_mean(now, before[:n], before[n:])


def width(found: HistoryMean) -> float:
    assert found.interval is not None
    return found.interval.width


class TestFormula:
    def test_mean_and_error_are_those_of_a_control_variate(self) -> None:
        before, now = drawn(3, 400, 2_000)
        found = history_mean(now, before[:400], before[400:])
        slope = float(np.cov(before[:400], now)[0, 1] / before[:400].var(ddof=1))
        by_hand = now.mean() - slope * (before[:400].mean() - before.mean())
        variance = (now - slope * before[:400]).var(ddof=1) / 400 + slope**2 * before.var(ddof=1) / 2_000
        assert found.reason is None
        assert found.slope == pytest.approx(slope, abs=0.01)
        assert found.mean == pytest.approx(by_hand, abs=0.001)
        assert found.se == pytest.approx(np.sqrt(variance), rel=0.01)
        assert (found.known, found.pool) == (400, 2_000)

    def test_the_estimate_is_unbiased_with_a_wrong_model_of_the_items(self) -> None:
        rng = np.random.default_rng(5)
        means = []
        for _ in range(150):
            difficulty = rng.standard_normal(500)
            now = (np.abs(difficulty) + rng.standard_normal(500) > 0.8).astype(float)
            means.append(history_mean(now[:60], np.exp(difficulty[:60]), np.exp(difficulty[60:])).mean or 0.0)
        truth = float(np.mean(np.abs(rng.standard_normal(10**6)) + rng.standard_normal(10**6) > 0.8))
        assert np.mean(means) == pytest.approx(truth, abs=3 * np.std(means) / np.sqrt(150))

    def test_the_effective_number_of_samples_has_an_interval_of_this_width(self) -> None:
        found = adjusted(4, 200, 5_000)
        assert 300 < found.plain_samples < 500
        rate, n = round((found.mean or 0) * found.plain_samples), round(found.plain_samples)
        plain = mean_interval(np.arange(n) < rate, binary=True).interval
        assert plain is not None
        assert width(found) == pytest.approx(plain.width, rel=0.03)

    def test_another_range_changes_the_unit_alone(self) -> None:
        before, now = drawn(6)
        graded = np.clip(0.2 + 0.6 * now + 0.1 * np.sin(np.arange(100)), 0, 1)
        one = history_mean(graded, before[:100], before[100:])
        five = history_mean(1 + 4 * graded, before[:100], before[100:], bounds=(1.0, 5.0))
        assert one.reason is None
        assert one.interval is not None and five.interval is not None  # noqa: PT018
        assert five.mean == pytest.approx(1 + 4 * (one.mean or 0))
        assert five.interval.low == pytest.approx(1 + 4 * one.interval.low)
        assert five.interval.high == pytest.approx(1 + 4 * one.interval.high)
        assert five.plain_samples == pytest.approx(one.plain_samples)

    def test_repeats_count_as_one_sample_and_samples_without_a_history_as_average_ones(self) -> None:
        before, now = drawn(7)
        single = history_mean(now, before[:100], before[100:])
        thrice = history_mean(Repeats(np.repeat(now, 3), np.full(100, 3)), before[:100], before[100:])
        assert thrice.mean == pytest.approx(single.mean)
        assert thrice.se == pytest.approx(single.se)
        unknown = np.where(np.arange(100) < 50, np.nan, before[:100])
        partly = history_mean(now, unknown, before[100:])
        assert (partly.known, partly.pool) == (50, 950)
        assert width(single) < width(partly) < width(single) * 1.4
        unscored = history_mean(Repeats(now[10:], np.where(np.arange(100) < 10, 0, 1)), before[:100], before[100:])
        assert unscored.known == 90

    def test_clusters_that_agree_are_worth_fewer_samples(self) -> None:
        before, now = drawn(8, 60, 400)
        labels = np.repeat(np.arange(400), 4)
        one = history_mean(now, before[:60], before[60:])
        copies = history_mean(np.repeat(now, 4), np.repeat(before[:60], 4), np.repeat(before[60:], 4), clusters=labels)
        independent = history_mean(np.repeat(now, 4), np.repeat(before[:60], 4), np.repeat(before[60:], 4))
        assert copies.se == pytest.approx(one.se, rel=0.1)
        assert width(copies) > 1.5 * width(independent)


class TestPlainFigures:
    """Where a history does not help, or cannot be trusted, the plain figure is kept."""

    def is_plain(self, found: HistoryMean, reason: str) -> None:
        assert found.reason is not None
        assert reason in found.reason
        assert (found.mean, found.interval) == (found.plain.mean, found.plain.interval)
        assert found.plain_samples == found.plain.n

    def test_few_samples_with_a_history(self) -> None:
        before, now = drawn(1)
        known = np.where(np.arange(100) < 19, before[:100], np.nan)
        self.is_plain(history_mean(now, known, before[100:]), "19 samples of the run have a history; it takes 20")

    def test_the_run_has_the_whole_pool(self) -> None:
        before, now = drawn(1)
        self.is_plain(history_mean(now, before[:100], []), "there is nothing to add")

    def test_few_imperfect_samples(self) -> None:
        before = np.random.default_rng(1).random(1_000)
        now = (np.arange(100) >= 9).astype(float)
        self.is_plain(history_mean(now, before[:100], before[100:]), "Too few samples differ")

    def test_unrelated_and_constant_histories(self) -> None:
        before, now = drawn(1)
        shuffled = np.random.default_rng(2).permutation(before)
        self.is_plain(history_mean(now, shuffled[:100], shuffled[100:]), "says too little")
        self.is_plain(history_mean(now, np.ones(100), np.ones(900)), "is the same")

    def test_a_run_of_selected_samples(self) -> None:
        before, now = drawn(1)
        hard = np.argsort(before, kind="stable")
        self.is_plain(history_mean(now, before[hard][:100], before[hard][100:]), "no random part")

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="history must have one number for each of the 3 samples"):
            history_mean([1, 0, 1], [1, 0], [1])


def test_what_the_history_foresaw_almost_always_is_not_certain() -> None:
    before, _ = drawn(9, 60, 2_000)
    now = before[:60].copy()
    now[0] = 1 - now[0]
    found = history_mean(now, before[:60], before[60:])
    assert found.reason is None
    assert width(found) > 4 * 2 / 60  # One surprise among 60 might have been four.


# Rates, means and differences of judged trials, corrected by labels of some of them.


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
