"""Differences of quantiles and ratios of geometric means; differences of means with long tails."""

from __future__ import annotations

import numpy as np
import pytest

from fairtrial.stats import geometric_ratio, paired_difference, quantile_difference, quantile_interval

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
