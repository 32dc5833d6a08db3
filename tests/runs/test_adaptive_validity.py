"""Simulations of adaptive stopping: the rate of false alarms and the coverage of intervals."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fairtrial import StopWhen, stats
from fairtrial.runs.adaptive import FAILED, MISSING, PASSED, Adaptive
from fairtrial.store.protocol import RunRecord

pytestmark = pytest.mark.long

RUNS = 2_000


def plan(size: int, *experiments: str) -> RunRecord:
    return RunRecord("r", "s", "d", "1", "f", size, experiments, 1)


def followed(rule: StopWhen, codes: NDArray[np.intp], names: tuple[str, ...]) -> Adaptive:
    """One row of codes per sample, one column per experiment."""
    adaptive = Adaptive(rule, plan(len(codes), *names))
    for ordinal, code in enumerate(codes.ravel().tolist()):
        adaptive.take(ordinal, code)
        if adaptive.reason is not None:
            break
    return adaptive


def pairs(rng: np.random.Generator, n: int, rate: float) -> NDArray[np.intp]:
    """Two systems that pass each sample with the same chance, easy samples and hard ones mixed."""
    chance = rng.beta(rate, 1 - rate, n)[:, None]
    return np.where(rng.random((n, 2)) < chance, PASSED, FAILED)


@pytest.mark.proves("R113")
@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_identical_systems_are_called_different_in_few_runs_looked_at_every_ten_samples(rate: float) -> None:
    rng = np.random.default_rng(7)
    rule = StopWhen(decides=("a", "b"), every=10)
    alarms = sum(followed(rule, pairs(rng, 500, rate), ("a", "b")).reason is not None for _ in range(RUNS // 2))
    assert alarms / (RUNS // 2) <= 0.06


def test_the_usual_test_gives_false_alarms_when_looked_at_as_often() -> None:
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(100):
        codes = pairs(rng, 500, 0.5)
        wins = np.cumsum((codes[:, 1] == PASSED) & (codes[:, 0] == FAILED))[9::10]
        losses = np.cumsum((codes[:, 0] == PASSED) & (codes[:, 1] == FAILED))[9::10]
        alarms += any(stats.mcnemar_exact(int(won), int(lost)) < 0.05 for won, lost in zip(wins, losses, strict=True))
    assert alarms / 100 > 0.12


def test_scores_that_go_missing_on_one_side_raise_no_false_alarms() -> None:
    """The scorer of one system breaks on most of its failures: dropping those pairs would make it look better."""
    rng = np.random.default_rng(8)
    alarms = naive = 0
    for _ in range(500):
        codes = pairs(rng, 300, 0.7)
        codes[:, 1] = np.where((codes[:, 1] == FAILED) & (rng.random(300) < 0.6), MISSING, codes[:, 1])
        alarms += followed(StopWhen(decides=("a", "b")), codes, ("a", "b")).reason is not None
        kept = codes[codes[:, 1] != MISSING]
        naive += stats.pairs_decision((kept[:, 0] - kept[:, 1]).astype(float), every=10).verdict is not None
    assert alarms / 500 <= 0.06
    assert naive / 500 > 0.5


@pytest.mark.parametrize(("rate", "width"), [(0.5, 0.25), (0.8, 0.2), (0.95, 0.12), (0.99, 0.1)])
def test_the_interval_holds_the_truth_where_the_run_stopped(rate: float, width: float) -> None:
    rng = np.random.default_rng([3, round(100 * rate)])
    rule = StopWhen(narrower_than=width, every=10)
    held = 0
    for _ in range(RUNS // 2):
        adaptive = followed(rule, np.where(rng.random((600, 1)) < rate, PASSED, FAILED), ("a",))
        assert adaptive.reason is not None
        figures = adaptive.note(600).to_json()["experiments"]["a"]
        held += figures["low"] <= rate <= figures["high"]
    assert held / (RUNS // 2) >= 0.95


def test_the_interval_holds_even_if_failures_are_the_ones_that_cannot_be_scored() -> None:
    rng = np.random.default_rng(5)
    held = naive = 0
    for _ in range(200):
        codes = np.where(rng.random((600, 1)) < 0.8, PASSED, FAILED)
        codes = np.where((codes == FAILED) & (rng.random((600, 1)) < 0.5), MISSING, codes)
        figures = followed(StopWhen(narrower_than=0.2), codes, ("a",)).note(600).to_json()["experiments"]["a"]
        held += figures["low"] <= 0.8 <= figures["high"]
        naive += stats.stopped_by_width(figures["passed"], figures["n"] - figures["missing"]).contains(0.8)
    assert held / 200 >= 0.95
    assert naive / 200 < 0.5


def test_a_real_difference_is_found_and_the_interval_that_goes_with_it_holds() -> None:
    rng = np.random.default_rng(6)
    found = held = 0
    for _ in range(400):
        codes = np.where(rng.random((500, 2)) < (0.6, 0.75), PASSED, FAILED)
        note = followed(StopWhen(decides=("a", "b")), codes, ("a", "b")).note(1000).to_json()["pair"]
        found += note["verdict"] == "better"
        held += note["low"] <= 0.15 <= note["high"]
    assert found / 400 > 0.9
    assert held / 400 >= 0.95
