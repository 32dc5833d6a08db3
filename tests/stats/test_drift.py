"""Alarms on daily means: what bets may win without a change, the bound of a reference, and the day of a change."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from benchmarks.coverage_designs.alarm import compare_rules, false_alarms, traffic
from fairtrial.errors import ConfigurationError
from fairtrial.stats.drift import (
    REFERENCE_RISK,
    STAKES,
    DriftDetector,
    change_days,
    log_gains,
    reference_bound,
    shared,
)

PASSES = np.array([0.0, 1.0])


def day(passed: int, n: int, streams: int = 1) -> NDArray[np.float64]:
    return np.tile([float(n - passed), float(passed)], (streams, 1))


@pytest.mark.parametrize("chances", [(0.1, 0.9), (0.2, 0.3, 0.5), (0.0, 1.0, 0.0)])
def test_a_bet_against_the_true_mean_wins_nothing_on_average(chances: tuple[float, ...]) -> None:
    values = np.linspace(0.0, 1.0, len(chances))
    mean = float(values @ np.asarray(chances))
    gains = np.exp(log_gains(np.array(mean), values))
    assert np.asarray(chances) @ gains == pytest.approx(np.ones(STAKES.size))
    higher = np.exp(log_gains(np.array(mean * 0.9), values))
    assert np.all(np.asarray(chances) @ higher < 1)


def test_the_bet_on_passes_is_a_likelihood_ratio() -> None:
    gains = np.exp(log_gains(np.array(0.9), PASSES))
    assert gains[1] == pytest.approx(1 - STAKES)
    assert gains[0] == pytest.approx((1 - 0.9 * (1 - STAKES)) / 0.1)


def test_evidence_is_the_sum_over_all_days_on_which_a_change_may_have_begun() -> None:
    detector, passed = DriftDetector(np.array([0.9]), every=1_000), [9, 7, 10, 6]
    for number in passed:
        detector.add_day(PASSES, day(number, 10))
    daily = [np.exp(day(number, 10)[0] @ log_gains(np.array(0.9), PASSES)) for number in passed]
    total = sum(np.prod(daily[start:], axis=0).mean() for start in range(len(daily)))
    assert exp(detector.evidence[0]) == pytest.approx(total)
    assert detector.share == pytest.approx(total / (1_000 / 0.95))


def test_slices_share_the_evidence_and_half_is_that_of_all_scores() -> None:
    assert shared(1).tolist() == [1.0]
    assert shared(5).tolist() == [0.5] + [0.125] * 4
    quiet, alone = DriftDetector(np.full(3, 0.9), every=1_000), DriftDetector(np.array([0.9]), every=1_000)
    counts = np.stack([day(18, 20)[0], day(10, 10)[0], day(2, 10)[0]])
    quiet.add_day(PASSES, counts)
    alone.add_day(PASSES, counts[2:])
    assert int(np.argmax(quiet.evidence)) == 2
    assert quiet.evidence[2] == pytest.approx(alone.evidence[0] + log(0.25))


@pytest.mark.parametrize(("n", "rate"), [(200, 0.9), (200, 0.5), (500, 0.99)])
def test_the_bound_of_a_reference_is_above_the_rate_no_more_often_than_promised(n: int, rate: float) -> None:
    passes = np.arange(n + 1)
    above = [reference_bound(np.repeat(PASSES, [n - count, count])) > rate for count in passes]
    assert float(scipy_stats.binom.pmf(passes, n, rate)[above].sum()) <= REFERENCE_RISK


def test_the_bound_of_graded_scores_lies_below_their_mean_and_rises_with_their_number() -> None:
    grades = np.array([0.5, 0.75, 1.0, 1.0])
    bounds = [reference_bound(np.tile(grades, many)) for many in (10, 50, 500)]
    assert all(low < high for low, high in pairwise([*bounds, float(grades.mean())]))
    assert reference_bound(np.tile(grades, 50), risk=0.001) < bounds[1]
    assert reference_bound([]) == 0.0


def test_years_without_a_change_have_no_more_alarms_than_promised() -> None:
    made = traffic(0.9, 100, 1_000, slices=4)
    found = false_alarms(made, 60, np.random.default_rng(5))
    assert found.figure <= 0.365


def test_a_bound_above_the_true_rate_alarms_at_once() -> None:
    """The promise rests on the bound: with the reference's mean in its place it is broken at a large volume."""
    detector = DriftDetector(np.array([0.92]), every=1_000)
    days = 0
    while detector.share < 1:
        detector.add_day(PASSES, day(9_000, 10_000))
        days += 1
    assert days == 1


def test_a_threshold_that_nobody_can_know_alarms_in_most_years_and_the_detector_in_few() -> None:
    table = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in compare_rules(60).splitlines()[2:]}
    assert float(table["mean of 7 days below 88%"].rstrip("%")) > 80
    assert float(table["at most one false alarm in 1,000 days"].rstrip("%")) < 37


def test_the_day_of_a_change_is_named_with_a_range() -> None:
    sums, counts = np.array([90.0] * 20 + [75.0] * 6), np.full(26, 100.0)
    likely, low, high = change_days(sums, counts, (4_500.0, 5_000.0))
    assert likely == 20
    assert 17 <= low <= 20 <= high <= 22
    blurred = change_days(sums / 5, counts / 5, (900.0, 1_000.0))
    assert blurred[2] - blurred[1] > high - low


def test_a_larger_drop_is_found_sooner_and_none_below_the_bound() -> None:
    detector = DriftDetector(np.array([0.89]), every=1_000)
    days = [detector.days_to_find(drop, PASSES, day(90, 100)[0]) for drop in (0.02, 0.05, 0.1, 0.9)]
    assert all(long > short for long, short in pairwise(days))
    assert 4 < days[1] < 15
    assert detector.days_to_find(0.0, PASSES, day(90, 100)[0]) == np.inf


def test_a_promise_of_less_than_a_day_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 day"):
        DriftDetector(np.array([0.9]), every=0.5)
