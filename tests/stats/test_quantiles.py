"""Quantiles with intervals between order statistics, and means of long tails."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fairtrial import stats

pytestmark = pytest.mark.proves("R44")


@pytest.mark.parametrize("share", [0.5, 0.95])
@pytest.mark.parametrize("n", [5, 20, 80, 300])
def test_the_interval_of_a_quantile_has_at_most_half_of_alpha_in_each_tail(n: int, share: float) -> None:
    found = stats.quantile_interval(np.arange(1, n + 1), share)  # The values are their own ranks.
    if found.low is not None:
        assert scipy_stats.binom.cdf(found.low - 1, n, share) <= 0.025  # Fewer than `low` values lie below.
        assert scipy_stats.binom.cdf(found.low, n, share) > 0.025
    if found.high is not None:
        assert scipy_stats.binom.sf(found.high - 1, n, share) <= 0.025
        assert scipy_stats.binom.sf(found.high - 2, n, share) > 0.025
    assert (found.reason is None) == (found.low is not None and found.high is not None)


def test_the_95th_percentile_has_no_upper_end_below_72_values() -> None:
    assert stats.quantile_interval(np.arange(71), 0.95).high is None
    found = stats.quantile_interval(np.arange(72), 0.95)
    assert found.high == 71
    assert found.low is not None
    assert found.value == 68


def test_values_of_few_clusters_bound_a_quantile_less_well() -> None:
    rng = np.random.default_rng(1)
    labels = np.arange(200) % 10
    values = np.exp(rng.normal(0, 1, 10)[labels] + rng.normal(0, 0.2, 200))
    alone = stats.quantile_interval(values, 0.5)
    grouped = stats.quantile_interval(values, 0.5, clusters=labels)
    assert grouped.value == alone.value
    assert (grouped.low or 0) < (alone.low or 0)
    assert (grouped.high or np.inf) > (alone.high or np.inf)
    assert stats.quantile_interval([1, 2], 0.5, clusters=["a", "a"]).reason
    assert stats.quantile_interval([], 0.5).value is None


def test_clusters_of_similar_values_are_worth_few_values_in_the_tail_too() -> None:
    """40 clusters of 5 are worth about 52 values, which do not bound the 95th percentile from above.

    The few values beyond it show that in no run reliably; all the others do.
    """
    labels = np.repeat(np.arange(40), 5)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = np.exp(np.sqrt(0.9) * rng.normal(size=40)[labels] + np.sqrt(0.1) * rng.normal(size=200))
        assert stats.quantile_interval(values, 0.95, clusters=labels).high is None
        assert stats.quantile_interval(values.reshape(40, 5), 0.95).high is None
        assert stats.quantile_interval(values, 0.95).high is not None


def test_a_share_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        stats.quantile_interval([1, 2], 1.0)


def test_the_mean_of_a_long_tail_reaches_further_up_than_down_and_says_that_it_is_unreliable() -> None:
    values = np.append(np.ones(98), [60.0, 50.0])
    found = stats.mean_interval(values, bounds=None)
    assert found.interval is not None
    assert found.mean is not None
    assert found.interval.high - found.mean > 1.5 * (found.mean - found.interval.low)
    assert found.heavy_tail
    assert found.notes == (
        "The largest 5 of 100 values make up 54% of the sum: the interval of the mean is not reliable; use the median "
        "or the 95th percentile.",
    )
    calm = stats.mean_interval(np.linspace(1, 2, 100), bounds=None)
    assert (calm.notes, calm.heavy_tail) == ((), False)


@pytest.mark.parametrize(("n", "heavy"), [(6, False), (20, True), (99, True), (100, False), (1000, False)])
def test_the_more_values_there_are_the_more_the_largest_may_make_up(n: int, heavy: bool) -> None:
    """The largest 5% make up 39% of the sum in each of them."""
    count = max(2, -(-n // 20))
    values = np.append(np.ones(n - count), np.full(count, 0.39 / 0.61 * (n - count) / count))
    assert stats.mean_interval(values, bounds=None).heavy_tail is heavy


def test_the_mean_of_an_unbounded_metric_is_the_mirror_image_of_its_negative() -> None:
    values = np.random.default_rng(3).lognormal(0, 1, 40)
    up, down = (stats.mean_interval(sign * values, bounds=None).interval for sign in (1, -1))
    assert up is not None
    assert down is not None
    assert (up.low, up.high) == pytest.approx((-down.high, -down.low))


def test_samples_that_are_clusters_of_their_own_have_the_same_interval_as_without_clusters() -> None:
    values = np.random.default_rng(4).lognormal(0, 1, 40)
    alone = stats.mean_interval(values, bounds=None).interval
    grouped = stats.mean_interval(values, clusters=range(40), bounds=None).interval
    assert alone is not None
    assert grouped is not None
    assert (alone.low, alone.high) == pytest.approx((grouped.low, grouped.high))
