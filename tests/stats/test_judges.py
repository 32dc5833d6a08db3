"""Intervals of kappa and of correlations, tests of groups, and bounds for missing outcomes."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from statsmodels.stats.inter_rater import cohens_kappa

from fairtrial import stats
from fairtrial.stats.agreement import Measurement, _kappa_and_error

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
