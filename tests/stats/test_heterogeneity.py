"""The test of whether slices differ from each other."""

from __future__ import annotations

import tracemalloc
from importlib import import_module

import numpy as np
import pytest
from scipy import stats as oracle

from benchmarks.coverage_designs import ALARMS, monte_carlo_error
from benchmarks.coverage_designs.slices import HETEROGENEITY, heterogeneity_alarm
from fairtrial import stats
from fairtrial.stats import Heterogeneity, heterogeneity

pytestmark = pytest.mark.proves("R44")


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
