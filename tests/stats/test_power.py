"""The recommended number of samples leads to a decision in about 80% of runs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fairtrial import stats
from fairtrial.stats.power import detectable_shift, excess_width

pytestmark = pytest.mark.proves("R44")


def interval_of(found: object) -> stats.Interval:
    assert isinstance(found, stats.Interval)
    return found


def chance_to_clear(rate: float, bound: float, n: int, level: float) -> float:
    """By enumeration: how often Wilson's interval lies on the true rate's side of the bound."""
    chance = 0.0
    for passes in range(n + 1):
        found = interval_of(stats.wilson(passes, n, level=level))
        clear = found.low >= bound if rate > bound else found.high < bound
        chance += float(scipy_stats.binom.pmf(passes, n, rate)) if clear else 0.0
    return chance


@pytest.mark.parametrize(
    ("rate", "bound", "level"),
    [
        (0.95, 0.9, 0.95),
        (0.8, 0.95, 0.95),
        (0.5, 0.6, 0.95),
        (0.7, 0.9, 0.95),
        (0.99, 0.95, 0.95),
        (0.7, 0.85, 0.995),
        (0.95, 0.8, 0.995),
    ],
)
def test_a_rate_clears_its_bound_four_times_in_five_at_the_number_that_is_named(
    rate: float, bound: float, level: float
) -> None:
    n = stats.samples_to_clear(200, 200.0, rate, bound, level=level)
    assert isinstance(n, int)
    assert 0.74 <= chance_to_clear(rate, bound, n, level) <= 0.86


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
    """Power of a t test at the number named, by the noncentral t, over the errors that so many units may show."""
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


def test_a_perfect_rate_is_not_taken_to_be_certain() -> None:
    ten, many = (stats.samples_to_clear(n, float(n), 1.0, 0.8) for n in (10, 10_000))
    assert isinstance(ten, int)
    assert isinstance(many, int)
    assert ten > many >= 16


@pytest.mark.parametrize(
    "found",
    [
        stats.samples_to_clear(0, 0.0, 0.5, 0.8),
        stats.samples_to_clear(10, 10.0, 0.8, 0.8),
        stats.pairs_to_clear(0, 0, 0),
        stats.pairs_to_clear(3, 3, 10),
    ],
)
def test_where_no_number_is_enough_the_reason_is_given(found: object) -> None:
    assert isinstance(found, stats.Undefined)
    assert found.reason.endswith(".")


def test_a_bound_that_no_rate_can_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="its bound above 0 and below 1"):
        stats.samples_to_clear(10, 10.0, 0.5, 1.0)


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
