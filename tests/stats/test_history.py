"""Means adjusted by earlier runs of their samples."""

from __future__ import annotations

import numpy as np
import pytest

from fairtrial.stats import HistoryMean, Repeats, history_mean, mean_interval
from fairtrial.stats._arrays import FloatArray


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
