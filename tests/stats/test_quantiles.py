"""Quantiles with intervals between order statistics, and means of long tails."""

from __future__ import annotations

import tracemalloc
from importlib import import_module

import numpy as np
import pytest
from scipy import stats as oracle
from scipy import stats as scipy_stats

from benchmarks.coverage_designs import ALARMS, monte_carlo_error
from benchmarks.coverage_designs.slices import HETEROGENEITY, heterogeneity_alarm
from fairtrial import stats
from fairtrial.stats import Heterogeneity, heterogeneity
from fairtrial.stats.power import detectable_shift, excess_width

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


# The test of whether slices differ from each other.


def outcome_of(*given: object, **rest: object) -> Heterogeneity:
    found = heterogeneity(*given, **rest)  # type: ignore[arg-type]
    assert isinstance(found, Heterogeneity)
    return found


@pytest.mark.parametrize("cell", ["pass rate 0.9, slices of 5, 25 and 120", "4 slices crossed with 12 clusters of 20"])
def test_equal_slices_are_seldom_called_different(cell: str) -> None:
    rng, runs = np.random.default_rng(3), 300
    share = sum(heterogeneity_alarm(HETEROGENEITY[cell], rng) for _ in range(runs)) / runs
    assert share <= ALARMS[1] + 3 * monte_carlo_error(ALARMS[1], runs)


def test_slices_that_differ_are_found_in_whatever_order_they_come() -> None:
    values = np.repeat([0.0, 1.0, 0.0, 1.0, 0.0], [20, 4, 2, 20, 20])
    slices = np.repeat(["a", "b", "c"], [24, 22, 20])
    found = outcome_of(values, slices)
    assert found.p_value < 0.01
    assert (found.groups, found.n, found.test) == (3, 66, "permutation of Welch's statistic")
    order = np.random.default_rng(1).permutation(66)
    assert outcome_of(values[order], slices[order]).p_value == pytest.approx(found.p_value, abs=0.005)


def test_many_samples_are_tested_by_welchs_f() -> None:
    rng = np.random.default_rng(2)
    slices = rng.integers(0, 3, 3_000)
    values = rng.normal(0.05 * slices, 1 + slices)
    found = outcome_of(values, slices)
    expected = oracle.alexandergovern(*(values[slices == one] for one in range(3)))  # Another test of the same.
    assert found.test == "Welch's F test"
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)
    two = oracle.ttest_ind(values[slices == 0], values[slices == 1], equal_var=False)
    some = slices < 2
    assert outcome_of(values[some], slices[some], draws=9_999).p_value == pytest.approx(two.pvalue, abs=0.02)


def test_samples_of_one_cluster_are_no_evidence_of_their_own() -> None:
    clusters = np.repeat(np.arange(20), 20)
    effects = np.random.default_rng(5).normal(0, 1, 20)
    values = effects[clusters] + 0.01 * np.random.default_rng(6).normal(size=400)
    slices = clusters % 2
    assert outcome_of(values, slices).p_value < 0.05
    assert outcome_of(values, slices, clusters=clusters).p_value > 0.05


def test_many_clusters_are_merged_to_save_memory_and_give_nearly_the_same_p(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    clusters = np.repeat(np.arange(3_000), 2)
    slices = rng.integers(0, 3, clusters.size)
    for effect, low, high in ((0.0, 0.05, 1.0), (0.08, 0.0, 0.2)):
        values = rng.normal(effect * slices + rng.normal(size=3_000)[clusters], 1)
        merged = outcome_of(values, slices, clusters=clusters).p_value
        with monkeypatch.context() as patch:
            patch.setattr(import_module("fairtrial.stats.differences"), "_PERMUTE_UP_TO", 10_000)
            assert merged == pytest.approx(outcome_of(values, slices, clusters=clusters).p_value, abs=0.05)
        assert low < merged < high

    tracemalloc.start()
    outcome_of(rng.normal(size=40_000), rng.integers(0, 3, 40_000), clusters=np.arange(40_000) // 2, draws=999)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80e6


def test_a_slice_with_too_few_samples_or_clusters_takes_no_part() -> None:
    values = np.r_[np.zeros(10), np.ones(10), 5.0]
    assert outcome_of(values, np.repeat([0, 1, 2], [10, 10, 1])).groups == 2
    alone = heterogeneity([0.0, 1.0], ["a", "b"])
    assert alone == stats.Undefined("Fewer than two slices have at least two samples.")
    few = heterogeneity(values[:20], np.repeat([0, 1], 10), clusters=np.arange(20) // 5)
    assert few == stats.Undefined("Fewer than two slices have at least 5 clusters.")
    assert outcome_of(np.ones(10), np.arange(10) % 2).p_value == 1.0


# The recommended number of samples leads to a decision in about 80% of runs.


def interval_of(found: object) -> stats.Interval:
    assert isinstance(found, stats.Interval)
    return found


@pytest.mark.parametrize(("won", "lost"), [(0.05, 0.01), (0.25, 0.05), (0.3, 0.1), (0.5, 0.05), (0.35, 0.25)])
@pytest.mark.parametrize("bound", [0.0, -0.05])
def test_pairs_clear_their_bound_four_times_in_five_at_the_number_that_is_named(
    won: float, lost: float, bound: float
) -> None:
    n = stats.pairs_to_clear(round(1000 * won), round(1000 * lost), 1000, bound=bound)
    assert isinstance(n, int)
    draws = np.random.default_rng(3).multinomial(n, [won, lost, 1 - won - lost], size=4_000)
    pairs, counts = np.unique(draws[:, :2], axis=0, return_counts=True)
    clear = [
        count
        for (wins, losses), count in zip(pairs.tolist(), counts.tolist(), strict=True)
        if interval_of(stats.bonett_price(wins, losses, n)).low > bound
    ]
    assert 0.74 <= sum(clear) / 4_000 <= 0.86


def test_both_directions_need_as_many_pairs() -> None:
    assert stats.pairs_to_clear(30, 10, 100) == stats.pairs_to_clear(10, 30, 100)
    assert stats.pairs_to_clear(30, 10, 100, bound=-0.1) == stats.pairs_to_clear(10, 30, 100, bound=0.1)


@pytest.mark.parametrize("units", [6, 10, 40])
def test_of_few_units_more_are_needed_than_the_normal_formula_says(units: int) -> None:
    """Power of a t test at the number named, by the noncentral t, over the errors that this many units may show."""
    n, se, powers = 10 * units, 0.05, []
    delta = 2.8016 * se
    for share in (np.arange(21) + 0.5) / 21:
        seen = se * float(np.sqrt(scipy_stats.chi2.ppf(share, units - 1) / (units - 1)))
        needed = stats.samples_to_detect(n, seen, delta, units=units)
        assert isinstance(needed, int)
        assert needed % 10 == 0  # Whole clusters of ten.
        count = needed // 10
        shift = delta / (se * np.sqrt(units / count))
        powers.append(float(scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, count - 1), count - 1, shift)))
    power = float(np.mean(powers))
    assert 0.78 <= power <= 0.84
    short = float(scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, units - 1), units - 1, 2.8016))
    assert short < power


def test_many_units_need_what_the_normal_formula_says() -> None:
    plain = stats.samples_to_detect(10_000, 0.05, 0.05)
    by_t = stats.samples_to_detect(10_000, 0.05, 0.05, units=10_000)
    assert isinstance(plain, int)
    assert isinstance(by_t, int)
    assert 0 <= by_t - plain <= 3


@pytest.mark.parametrize(
    "found",
    [
        stats.samples_to_reach(0.8, 0.8),
        stats.pairs_to_clear(0, 0, 0),
        stats.pairs_to_clear(3, 3, 10),
    ],
)
def test_where_no_number_is_enough_the_reason_is_given(found: object) -> None:
    assert isinstance(found, stats.Undefined)
    assert found.reason.endswith(".")


def test_a_bound_that_no_rate_can_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="its bound above 0 and below 1"):
        stats.samples_to_reach(0.5, 1.0)


@pytest.mark.parametrize("df", [1, 2, 30])
def test_intervals_of_millions_of_standard_errors_have_a_detectable_shift(df: int) -> None:
    near, far = (detectable_shift(df, reach=reach) / reach for reach in (2_900.0, 2_250_330.7))
    assert far == pytest.approx(near, rel=1e-5)


def test_a_wider_interval_needs_more_samples() -> None:
    plain = stats.samples_to_detect(200, 0.05, 0.14, units=200)
    wider = stats.samples_to_detect(200, 0.05, 0.14, units=200, excess=excess_width(0.12, 0.05, 199, 200))
    assert isinstance(plain, int)
    assert isinstance(wider, int)
    t = 0.12 / 0.05  # The half-width in standard errors, at the 200 units that were seen.
    again = wider * (0.14 / 0.05) ** 2 / 200
    assert (t + 0.8416) ** 2 > again > (1.96 + 0.8416) ** 2  # It lies between those of 200 units and of very many.
    assert wider > plain
    assert excess_width(0.05, 0.05, 199, 200) == 0.0  # Narrower than t: nothing to allow for.
    detectable = stats.smallest_detectable(0.05, 199, excess=excess_width(0.12, 0.05, 199, 200))
    assert detectable == pytest.approx(0.05 * detectable_shift(199, reach=0.12 / 0.05))
