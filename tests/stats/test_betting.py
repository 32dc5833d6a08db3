"""Betting martingales: fair under the null, exact where a formula exists, and one answer for interval and verdict."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import product
from math import factorial, isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from fairtrial import stats
from fairtrial.stats import BettingMartingale
from fairtrial.stats.sequential import RunningCapital

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
