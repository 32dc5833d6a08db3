"""The least coverage of intervals, by exact enumeration, and clusters too few for an interval or a verdict."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from benchmarks.coverage_designs import draw_outcomes, draw_rates
from benchmarks.coverage_designs.comparisons import worst_coverage
from fairtrial import GateRules, stats
from fairtrial.base.rates import FEW_OUTCOMES
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.compare.verdicts import AdjustedDifference, verdict_of
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.gate.gate import gate_columns

pytestmark = pytest.mark.proves("R44")


def least_coverage(n: int) -> float:
    """The coverage of the interval of a rate, at the rate where it is worst: right beside an end of some interval."""
    found = [stats.rate_interval(passes, n) for passes in range(n + 1)]
    low, high = (
        np.asarray([getattr(one, end) for one in found if isinstance(one, stats.Interval)]) for end in ("low", "high")
    )
    assert np.all(np.diff(low) > 0)
    assert np.all(np.diff(high) > 0)
    ends = np.concatenate([low, high])
    rates = np.concatenate([ends - 1e-9, ends + 1e-9])
    rates = rates[(rates > 0) & (rates < 1)]
    first, last = np.searchsorted(high, rates), np.searchsorted(low, rates, "right") - 1
    return float(np.min(scipy_stats.binom.cdf(last, n, rates) - scipy_stats.binom.cdf(first - 1, n, rates)))


@pytest.mark.parametrize("n", [1, 2, 5, 10, 22, 26, 30, 36, 50, 55, 89, 100, 149, 176, 300, 1000])
def test_the_interval_of_a_rate_covers_at_every_rate(n: int) -> None:
    assert least_coverage(n) >= 0.93


def test_the_limit_of_few_outcomes_is_the_smallest_that_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairtrial.stats.intervals.FEW_OUTCOMES", FEW_OUTCOMES - 2)
    assert least_coverage(89) < 0.93


@pytest.mark.parametrize("n", [10, 20, 30])
def test_the_interval_of_a_difference_of_paired_rates_covers_at_every_rate(n: int) -> None:
    """Bonett and Price's alone covers in 90% of runs of 10 pairs, 61% won and 39% lost, and in 92.8% of 20, 20% won."""
    assert worst_coverage(n) >= 0.94


@pytest.mark.parametrize(("wins", "losses"), [(5, 0), (6, 0), (0, 6), (0, 0), (15, 5), (20, 0), (14, 6)])
@pytest.mark.parametrize("exact", [False, True])
def test_exact_tails_of_paired_rates_agree_with_the_test(wins: int, losses: int, exact: bool) -> None:
    a, b = (np.repeat([*ends, 0.0], [wins, losses, 20 - wins - losses]) for ends in ((1.0, 0.0), (0.0, 1.0)))
    for level in (0.8, 0.9, 0.95, 0.99):
        found = stats.paired_difference(a, b, level=level, test="exact" if exact else "midp")
        assert found.p_value is not None
        assert found.differs == (found.p_value <= 1 - level)


CORRELATIONS = pytest.mark.parametrize("correlation", [0.1, 0.5, 0.9])


def clustered_outcomes(sizes: list[int], correlation: float, rate: float, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    return draw_outcomes(rng, np.repeat(draw_rates(rng, rate, correlation, len(sizes)), sizes))


@CORRELATIONS
def test_one_cluster_gives_no_interval_and_a_sentence(correlation: float) -> None:
    labels = np.zeros(40, dtype=np.intp)
    sides = [clustered_outcomes([40], correlation, 0.7, seed) for seed in (1, 2)]
    means = [stats.mean_interval(sides[0], clusters=labels), stats.mean_interval(0.5 + sides[0] / 4, clusters=labels)]
    difference = stats.paired_difference(*sides, clusters=labels)
    results: list[stats.MeanEstimate | stats.PairedDifference] = [*means, difference]
    for found in results:
        assert (found.interval, found.clusters) == (None, 1)
        assert found.reason == "All samples are in one cluster, so the variance between clusters is not known."
    assert verdict_of(AdjustedDifference(difference), ComparisonSettings(), lower=False) == "unknown"


@CORRELATIONS
@pytest.mark.parametrize("sizes", [[50] * 3, [100, 20, 10, 5], [150, 10, 10, 10, 10]])
def test_clusters_worth_fewer_than_about_4_have_an_interval_and_no_verdict(
    sizes: list[int], correlation: float
) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    old, new = (clustered_outcomes(sizes, correlation, rate, 3) for rate in (0.95, 0.05))  # Far apart.
    found = stats.paired_difference(new, old, clusters=labels, draws=199)
    assert found.interval is not None
    assert found.effective_clusters is not None
    assert found.effective_clusters < stats.FEW_CLUSTERS
    assert found.notes[0].endswith("about 4 are the least for a verdict.")
    assert verdict_of(AdjustedDifference(found), ComparisonSettings(), lower=False) == "unknown"
    sides = [Columns.of({"passed": side}, name=name, clusters=labels) for side, name in ((new, "new"), (old, "old"))]
    assert gate_columns(sides[0], GateRules(margin=0.02), sides[1]).status == "inconclusive"


def test_four_equal_clusters_have_a_verdict() -> None:
    labels = np.repeat(np.arange(4), 50)
    old, new = (clustered_outcomes([50] * 4, 0.1, rate, 3) for rate in (0.95, 0.05))
    found = stats.paired_difference(new, old, clusters=labels, draws=199)
    assert verdict_of(AdjustedDifference(found), ComparisonSettings(), lower=False) == "worse"


@pytest.mark.parametrize(
    ("sizes", "rate"), [([2, 3, 5, 8, 12, 20, 40, 60] * 2 + [4] * 4, 0.5), ([3] * 20 + [30] * 10, 0.8)]
)
def test_the_rate_of_unequal_clusters_of_similar_values_is_covered(sizes: list[int], rate: float) -> None:
    """At ICC .9, the model of independent samples covered in 92.5% of 20,000 and 90.6% of 8,000 runs."""
    labels, rng = np.repeat(np.arange(len(sizes)), sizes), np.random.default_rng(6)
    covered = 0
    for _ in range(500):
        found = stats.mean_interval(draw_outcomes(rng, draw_rates(rng, rate, 0.6, len(sizes))[labels]), clusters=labels)
        assert found.interval is not None
        covered += found.interval.contains(rate)
    assert covered / 500 >= 0.93


def test_degrees_of_freedom_of_equal_clusters_do_not_depend_on_the_working_model() -> None:
    rng = np.random.default_rng(2)
    for correlation in (0.1, 0.9):
        outcomes = clustered_outcomes([10] * 12, correlation, 0.6, 4)
        assert stats.mean_interval(outcomes, clusters=np.repeat(np.arange(12), 10)).df == pytest.approx(11)
    unequal = [40] * 3 + [5] * 9
    alike, apart = (
        stats.mean_interval(values, clusters=np.repeat(np.arange(12), unequal), bounds=None).df
        for values in (np.repeat(rng.normal(size=12), unequal), rng.normal(size=sum(unequal)))
    )
    assert alike is not None
    assert apart is not None
    assert alike + 0.5 < apart
