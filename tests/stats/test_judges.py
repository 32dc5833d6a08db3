"""Intervals of kappa and of correlations, tests of groups, and bounds for missing outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from math import factorial, isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import spearmanr
from statsmodels.stats.inter_rater import cohens_kappa

from fairtrial import stats
from fairtrial.stats import BettingMartingale
from fairtrial.stats.agreement import Measurement, _kappa_and_error
from fairtrial.stats.sequential import RunningCapital

TRUTHS = [(0.5, 0.9, 0.9), (0.8, 0.9, 0.7), (0.9, 0.95, 0.6), (0.7, 0.99, 0.97), (0.8, 0.6, 0.6)]


@pytest.mark.parametrize("labels", [2, 3, 5])
def test_the_error_of_kappa_is_statsmodels(labels: int) -> None:
    table = np.random.default_rng(labels).integers(1, 30, (labels, labels))
    kappa, error = _kappa_and_error(table.astype(float))
    oracle = cohens_kappa(table)
    assert kappa == pytest.approx(oracle.kappa)
    assert error == pytest.approx(oracle.std_kappa)


@pytest.mark.parametrize(("passing", "sensitivity", "specificity"), TRUTHS)
def test_the_interval_of_kappa_covers(passing: float, sensitivity: float, specificity: float) -> None:
    shares = np.array(
        [
            [(1 - passing) * specificity, passing * (1 - sensitivity)],
            [(1 - passing) * (1 - specificity), passing * sensitivity],
        ]
    )
    truth = stats.cohen_kappa_table((shares * 1e9).astype(int).tolist())
    assert isinstance(truth, float)
    rng = np.random.default_rng(1)
    for n in (20, 60, 300):
        found = [stats.kappa_interval(t.reshape(2, 2).tolist()) for t in rng.multinomial(n, shares.ravel(), 800)]
        known = [one for one in found if isinstance(one, stats.Interval)]
        assert np.mean([one.contains(truth) for one in known]) >= 0.92


def test_raters_who_always_agree_have_an_interval_that_is_no_point() -> None:
    interval = stats.kappa_interval([[10, 0], [0, 10]])
    assert isinstance(interval, stats.Interval)
    assert interval.high == 1.0
    assert 0.4 < interval.low < 0.9
    assert isinstance(stats.kappa_interval([[10, 0], [0, 0]]), stats.Undefined)


PANELS: dict[str, Callable[[int], stats.Interval | stats.Undefined]] = {
    "alpha of labels": lambda n: stats.krippendorff_alpha_interval([[0, 1] * n, [0, 1] * n]),
    "alpha of numbers": lambda n: stats.krippendorff_alpha_interval([[0, 1, 4] * n] * 2, measurement="interval"),
    "Fleiss' kappa": lambda n: stats.fleiss_kappa_interval([[3, 0], [0, 3]] * n),
}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_that_always_agrees_has_an_interval_that_more_items_narrow(name: str) -> None:
    few, many = PANELS[name](5), PANELS[name](100)
    assert isinstance(few, stats.Interval)
    assert isinstance(many, stats.Interval)
    assert few.high == many.high == 1.0
    assert few.low + 0.2 < many.low < 1


def test_the_interval_of_alpha_is_that_of_the_jackknife_where_many_items_disagree() -> None:
    rng = np.random.default_rng(8)
    true = rng.integers(0, 3, (1, 800))
    ratings = np.where(rng.random((3, 800)) < 0.7, true, rng.integers(0, 3, (3, 800)))
    interval = stats.krippendorff_alpha_interval(ratings.tolist())
    assert isinstance(interval, stats.Interval)
    alphas = [stats.krippendorff_alpha(np.delete(ratings, item, axis=1).tolist()) for item in range(0, 800, 4)]
    error = np.sqrt(799**2 / 800 * np.var([one for one in alphas if isinstance(one, float)]))
    assert (interval.high - interval.low) / 2 == pytest.approx(1.963 * error, rel=0.12)


def test_one_item_and_equal_ratings_have_no_interval_of_agreement() -> None:
    assert stats.krippendorff_alpha_interval([[0], [1]]) == stats.Undefined("One item has no interval.")
    assert isinstance(stats.krippendorff_alpha_interval([[1, 1], [1, 1]]), stats.Undefined)
    assert isinstance(stats.krippendorff_alpha_interval([]), stats.Undefined)
    assert isinstance(stats.fleiss_kappa_interval([[2, 0], [2, 0]]), stats.Undefined)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=3, max_size=3), min_size=2, max_size=12))
def test_an_interval_of_alpha_contains_alpha_whatever_the_measurement(items: list[list[int | None]]) -> None:
    ratings = [list(row) for row in zip(*items, strict=True)]
    measurements: tuple[Measurement, ...] = ("nominal", "ordinal", "interval", "ratio")
    for measurement in measurements:
        alpha = stats.krippendorff_alpha(ratings, measurement=measurement)
        interval = stats.krippendorff_alpha_interval(ratings, measurement=measurement)
        if isinstance(interval, stats.Interval):
            assert isinstance(alpha, float)
            assert -1 <= interval.low <= alpha <= interval.high <= 1
            assert interval.low < interval.high


def test_rank_correlation_is_scipys() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 8, 60).astype(float)
    y = x + rng.normal(0, 3, 60)
    found = stats.rank_correlation(x, y)
    assert found.value == pytest.approx(spearmanr(x, y).statistic)
    assert found.value is not None
    assert found.interval is not None
    assert found.interval.contains(found.value)


def test_a_correlation_that_is_not_there_says_why() -> None:
    assert stats.rank_correlation([1, 1, 1], [1, 2, 3]).value is None
    assert stats.rank_correlation([], []).reason is not None
    few = stats.rank_correlation([1, 2, 3], [1, 3, 2])
    assert few.value == pytest.approx(0.5)
    assert few.interval is None
    assert stats.rank_correlation(range(10), range(10)).interval is None
    with pytest.raises(ValueError, match="pair them first"):
        stats.rank_correlation([1.0], [1.0, 2.0])


def test_the_interval_of_a_correlation_covers() -> None:
    rng = np.random.default_rng(4)
    truth = 6 / np.pi * np.arcsin(0.5 / 2)
    held = 0
    for _ in range(600):
        x = rng.normal(size=60)
        y = 0.5 * x + np.sqrt(0.75) * rng.normal(size=60)
        interval = stats.rank_correlation(x, y).interval
        assert interval is not None
        held += interval.contains(truth)
    assert held / 600 >= 0.93


def test_groups_that_differ_have_a_small_p_value() -> None:
    assert stats.groups_differ([1.0] * 20, [0.0] * 20) < 1e-6  # type: ignore[operator]  # a number, as both have members
    assert stats.groups_differ([0.2, 0.4, 0.6], [0.3, 0.5, 0.7]) > 0.5  # type: ignore[operator]  # the same
    assert isinstance(stats.groups_differ([], [1.0]), stats.Undefined)


def test_one_cluster_says_nothing_about_the_error_of_a_correction() -> None:
    found = stats.prediction_powered_mean([1.0, 0.0], [1.0, 1.0], [1.0, 0.0], clusters=["a"] * 4)
    assert (found.estimate, found.interval) == (0.0, None)
    assert found.reason is not None
    assert "one cluster" in found.reason


# Betting martingales: fair under the null, exact where a formula exists, and one answer for interval and verdict.


modest = settings(max_examples=60, deadline=None)
scores = st.lists(st.floats(0, 1), min_size=1, max_size=25)
UNIT, DIFFERENCE = (0.0, 1.0), (-1.0, 1.0)


def pairs(wins: int, losses: int, ties: int = 0) -> list[float]:
    return [1.0] * wins + [-1.0] * losses + [0.0] * ties


def integrated(values: list[float], mean: float, bounds: tuple[float, float]) -> float:
    """The capital by numerical integration over stakes, from the definition."""
    least, most = bounds

    def product_of(stake: float, odds: float) -> float:
        return float(np.prod([1 + stake * (value - mean) * odds for value in values]))

    sides = [quad(product_of, 0, 1, args=(odds,))[0] for odds in (1 / (mean - least), -1 / (most - mean))]
    return sum(sides) / 2


def test_the_capital_of_one_and_two_samples_is_that_of_the_formula() -> None:
    # A bet on more: the integral of 1 + 3a is 2.5; a bet on less: that of 1 - a is .5.
    assert BettingMartingale([1.0]).capital(0.25) == pytest.approx((2.5 + 0.5) / 2)
    # The integral of (1 + a)(1 - a/2) is 1 + 1/4 - 1/6 on one side, that of (1 - a)(1 + a/2) 1 - 1/4 - 1/6.
    assert BettingMartingale([1.0, -0.5], bounds=DIFFERENCE).capital(0.0) == pytest.approx(1 - 1 / 6)
    assert BettingMartingale([]).capital(0.3) == 1


def test_the_interval_of_one_sample_is_that_of_the_formula() -> None:
    # 1/2 (1 + r/2) + 1/4 = 20 for r = (1 - m)/(1 + m) = 77, so m = -76/78.
    found = BettingMartingale([1.0], bounds=DIFFERENCE).interval()
    assert (found.low, found.high) == pytest.approx((-76 / 78, 1.0))
    nothing = BettingMartingale([], bounds=DIFFERENCE).interval()
    assert (nothing.low, nothing.high) == DIFFERENCE


@pytest.mark.parametrize("ties", [0, 40])
def test_pairs_of_pass_and_fail_have_the_capital_of_the_formula(ties: int) -> None:
    for wins, losses in product((0, 1, 4, 9, 30), repeat=2):
        exact = Fraction(2 ** (wins + losses) * factorial(wins) * factorial(losses), factorial(wins + losses + 1))
        assert BettingMartingale(pairs(wins, losses, ties), bounds=DIFFERENCE).capital(0.0) == pytest.approx(
            float(exact), rel=1e-7
        )


def test_equal_systems_are_told_apart_in_at_most_one_run_of_twenty_however_long_one_looks() -> None:
    """All paths of 300 unequal pairs, by the number of wins: the chance that the capital ever reaches 20."""
    chance, alarm = np.array([1.0]), 0.0
    for n in range(1, 301):
        chance = np.append(chance, 0.0) / 2 + np.append(0.0, chance) / 2
        for wins in range(n + 1):
            capital = Fraction(2**n * factorial(wins) * factorial(n - wins), factorial(n + 1))
            if capital >= 20:
                alarm += chance[wins]
                chance[wins] = 0.0
    assert 0.02 < alarm <= 0.05
    first = next(n for n in range(1, 20) if stats.pairs_decision([1.0] * n).verdict == "better")
    assert first == next(n for n in range(1, 20) if 2**n / (n + 1) >= 20)


@modest
@given(scores, st.floats(0.05, 0.95), st.floats(0, 1), st.floats(0, 1))
def test_no_bet_against_the_true_mean_is_expected_to_win(
    seen: list[float], mean: float, below: float, above: float
) -> None:
    """Two points with this mean: the capital after one more sample is, on average, the capital before."""
    low, high = mean * below, mean + (1 - mean) * above
    rise = 0.5 if high == low else (mean - low) / (high - low)
    after = [BettingMartingale([*seen, value]).capital(mean) for value in (low, high)]
    before = BettingMartingale(seen).capital(mean)
    assert isclose((1 - rise) * after[0] + rise * after[1], before, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("values", [[0.2, 0.9, 0.9, 1.0, 0.7], [0.0, 0.5, 1.0] * 8, [0.95] * 30, [0.0] * 12])
def test_the_interval_is_the_set_of_means_that_integration_does_not_refute(values: list[float]) -> None:
    interval = BettingMartingale(values).interval(0.9)
    for mean in np.linspace(0.003, 0.997, 60).tolist():
        capital = integrated(values, mean, UNIT)
        assert BettingMartingale(values).capital(mean) == pytest.approx(capital, rel=1e-6)
        assert interval.contains(mean) == (capital < 10)


@modest
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_verdict_interval_and_p_value_always_agree(differences: list[float], level: float) -> None:
    found = stats.pairs_decision(differences, level=level, every=7)
    assert (found.verdict is None) == found.interval.contains(0.0) == (found.p_value > 1 - level)
    seen = differences[: found.looked_at]
    if found.verdict is not None:
        assert (found.verdict == "better") == (np.mean(seen) > 0)
    assert found.interval.low <= np.mean(seen) + 1e-12
    assert np.mean(seen) - 1e-12 <= found.interval.high


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_equal_scores_have_an_interval_inside_the_range_that_shrinks(value: float) -> None:
    widths = []
    for n in (1, 10, 100, 1_000):
        interval = BettingMartingale([value] * n).interval()
        assert 0 <= interval.low <= value <= interval.high <= 1
        widths.append(interval.width)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.02


def test_the_unit_of_the_numbers_does_not_matter() -> None:
    values = [0.1, 0.7, 0.7, 0.2, 0.9, 1.0]
    plain = BettingMartingale(values).interval()
    scaled = BettingMartingale([3 + 50 * value for value in values], bounds=(3.0, 53.0)).interval()
    assert (scaled.low, scaled.high) == pytest.approx((3 + 50 * plain.low, 3 + 50 * plain.high))


@pytest.mark.parametrize("known", [pairs(9, 1, 5), pairs(1, 8, 3), [0.25, -0.5, 0.125], []])
def test_numbers_that_are_missing_are_taken_at_their_worst_for_every_conclusion(known: list[float]) -> None:
    gaps = [(-1.0, 1.0), (-1.0, 0.0), (0.25, 1.0)]
    worst = BettingMartingale(
        [*known, *(low for low, _ in gaps)], [*known, *(high for _, high in gaps)], bounds=DIFFERENCE
    )
    for filled in product(*((low, (low + high) / 2, high) for low, high in gaps)):
        completed = BettingMartingale([*known, *filled], bounds=DIFFERENCE)
        for mean in (-0.6, 0.0, 0.3):
            assert worst.capital(mean) <= completed.capital(mean) * (1 + 1e-9)
        assert worst.interval().low <= completed.interval().low + 1e-9
        assert completed.interval().high <= worst.interval().high + 1e-9


def test_numbers_that_come_one_by_one_have_the_capital_of_all_of_them() -> None:
    rng = np.random.default_rng(4)
    least = rng.uniform(-1, 0.6, 50)
    most = np.minimum(1.0, least + rng.choice([0.0, 0.3], 50))
    running = RunningCapital()
    for low, high in zip(least.tolist(), most.tolist(), strict=True):
        running.add(low, high)
    assert running.e_value == pytest.approx(BettingMartingale(least, most, bounds=DIFFERENCE).capital(0.0))
    exact = stats.pairs_decision(least, level=0.9999999)
    assert exact.e_value == pytest.approx(BettingMartingale(least, bounds=DIFFERENCE).capital(0.0))


def test_very_many_different_numbers_have_an_interval_a_hair_wider_at_once() -> None:
    rng = np.random.default_rng(5)
    values = np.clip(rng.normal(0.1, 0.2, 3_000), -1, 1)
    interval = BettingMartingale(values, bounds=DIFFERENCE).interval()
    for end, outside in ((interval.low, -1e-5), (interval.high, 1e-5)):
        capital = BettingMartingale(values, bounds=DIFFERENCE).capital(end)
        assert capital * (1 + 1e-9) >= 20
        assert capital < BettingMartingale(values, bounds=DIFFERENCE).capital(end + outside) < 21
    begin = time.process_time()
    BettingMartingale(rng.uniform(-1, 1, 100_000), bounds=DIFFERENCE).interval()
    assert time.process_time() - begin < 5
