"""Coverage, false alarms and power, by enumeration where possible and seeded simulation where not."""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from fairtrial import stats

pytestmark = pytest.mark.long
RUNS = 2_000
type Array = NDArray[np.float64]
type Data = tuple[Array, Array, NDArray[np.intp] | None]


def load_coverage() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


coverage = load_coverage()


@pytest.mark.parametrize("n", coverage.SIZES)
@pytest.mark.parametrize("rate", coverage.RATES)
def test_wilson_covers(rate: float, n: int) -> None:
    row = coverage.plain(rate, n)
    assert row.covered >= (0.90 if n == 10 else 0.92)


@pytest.mark.parametrize("n", coverage.SIZES)
@pytest.mark.parametrize("repeated", [3, 8])
def test_intervals_with_repeats_cover(repeated: int, n: int) -> None:
    for rate in coverage.RATES:
        row = coverage.repeats(rate, n, repeated, correlation=0.3, runs=3_000)
        assert row.covered >= 0.93, row


@pytest.mark.parametrize(("n", "count", "uneven"), coverage.CLUSTERS)
def test_intervals_with_clusters_cover_and_are_not_too_wide(n: int, count: int, uneven: bool) -> None:
    for rate in coverage.RATES:
        row = coverage.clusters(rate, n, count, uneven=uneven, runs=RUNS)
        assert 0.92 <= row.covered <= 0.995, row


def test_the_naive_interval_fails_where_ours_holds() -> None:
    assert coverage.plain(0.95, 10).naive < 0.45
    assert coverage.plain(0.99, 30).naive < 0.30
    assert coverage.repeats(0.8, 100, 8, correlation=0.3, runs=500).naive < 0.80
    assert coverage.repeats(0.99, 30, 3, correlation=0.3, runs=500).naive < 0.60
    assert coverage.clusters(0.8, 1000, 20, runs=500).naive < 0.50


# --- identical systems -----------------------------------------------------------------------------------------


def beta(rng: np.random.Generator, rate: float, correlation: float, size: int) -> Array:
    total = (1 - correlation) / correlation
    return rng.beta(rate * total, (1 - rate) * total, size)


def single(n: int, rate: float) -> Callable[[np.random.Generator], Data]:
    def draw(rng: np.random.Generator) -> Data:
        chance = beta(rng, rate, 0.5, n)
        return rng.binomial(1, chance).astype(float), rng.binomial(1, chance).astype(float), None

    return draw


def repeated(n: int, rate: float, repeats: int) -> Callable[[np.random.Generator], Data]:
    def draw(rng: np.random.Generator) -> Data:
        chance = beta(rng, rate, 0.3, n)[:, None]
        size = (n, repeats)
        return rng.binomial(1, chance, size).astype(float), rng.binomial(1, chance, size).astype(float), None

    return draw


def clustered(n: int, count: int, rate: float, own: float) -> Callable[[np.random.Generator], Data]:
    """Alike on average; in a share `own` of the clusters each system has its own chance of passing."""

    def draw(rng: np.random.Generator) -> Data:
        labels = np.arange(n) % count
        one, other = beta(rng, rate, 0.3, count), beta(rng, rate, 0.3, count)
        other = np.where(rng.random(count) < own, other, one)
        return rng.binomial(1, one[labels]).astype(float), rng.binomial(1, other[labels]).astype(float), labels

    return draw


def graded(n: int, moving: float) -> Callable[[np.random.Generator], Data]:
    """Scores in [0, 1] of which only a share `moving` differs at all."""

    def draw(rng: np.random.Generator) -> Data:
        base = rng.beta(4, 1, n)
        a = np.clip(base + rng.normal(0, 0.1, n), 0, 1)
        b = np.clip(base + rng.normal(0, 0.1, n), 0, 1)
        return a, np.where(rng.random(n) < moving, b, a), None

    return draw


def compared(data: Data, run: int) -> stats.PairedDifference:
    a, b, labels = data
    return stats.paired_difference(a, b, clusters=labels, draws=999, seed=run)


IDENTICAL = {
    "pass/fail, n=100": (single(100, 0.8), RUNS),
    "3 repeats, n=50": (repeated(50, 0.5, 3), RUNS),
    "8 repeats, n=50, nearly perfect": (repeated(50, 0.95, 8), RUNS // 2),
    "10 clusters of 10": (clustered(100, 10, 0.8, own=1.0), RUNS),
    "40 clusters of 5, some of their own": (clustered(200, 40, 0.8, own=0.3), RUNS),
    "4 clusters of 10": (clustered(40, 4, 0.8, own=1.0), RUNS // 2),
    "graded, few differ": (graded(50, 0.2), RUNS // 2),
}


@pytest.mark.parametrize("name", IDENTICAL)
def test_identical_systems_are_called_different_in_at_most_six_percent_of_runs(name: str) -> None:
    rng = np.random.default_rng(len(name))
    draw, runs = IDENTICAL[name]
    alarms = sum(bool(compared(draw(rng), run).differs) for run in range(runs))
    assert alarms / runs <= 0.06


def test_three_metrics_of_identical_systems_raise_one_alarm_in_at_most_six_percent_of_runs() -> None:
    rng = np.random.default_rng(33)
    draws = (single(40, 0.7), repeated(40, 0.7, 3), graded(40, 1.0))
    with_holm = without = 0
    for run in range(RUNS):
        found = [compared(draw(rng), run) for draw in draws]
        adjusted = stats.holm([one.p_value if one.p_value is not None else 1.0 for one in found])
        with_holm += any(one.differs and p <= 0.05 for one, p in zip(found, adjusted, strict=True))
        without += any(one.differs for one in found)
    assert with_holm / RUNS <= 0.06
    assert without / RUNS > 0.08  # what Holm is for


def test_looking_every_ten_pairs_is_safe_with_the_e_process_and_not_with_mcnemar() -> None:
    rng = np.random.default_rng(20)
    exact = cache(stats.mcnemar_exact)
    wolf = alarms = 0
    for _ in range(RUNS):
        differences = rng.choice([1, 0, -1], size=500, p=[0.15, 0.7, 0.15])
        alarms += stats.pairs_decision(differences, every=10).verdict is not None
        wins, losses = np.cumsum(differences > 0)[9::10], np.cumsum(differences < 0)[9::10]
        wolf += any(exact(int(w), int(lost)) <= 0.05 for w, lost in zip(wins, losses, strict=True))
    assert alarms / RUNS <= 0.05
    assert wolf / RUNS > 0.12


def test_confidence_sequences_hold_at_every_look_at_once() -> None:
    rng = np.random.default_rng(21)
    missed_rate = missed_difference = 0
    runs = 400
    for _ in range(runs):
        outcomes = rng.random(400) < 0.8
        passed = np.cumsum(outcomes)[9::10]
        looks = range(10, 401, 10)
        missed_rate += any(
            not stats.betabinom_sequence(int(k), n).contains(0.8) for k, n in zip(passed, looks, strict=True)
        )
        differences = rng.choice([1, 0, -1], size=400, p=[0.2, 0.7, 0.1])
        wins, losses = np.cumsum(differences > 0)[39::40], np.cumsum(differences < 0)[39::40]
        missed_difference += any(
            not stats.pairs_sequence(int(w), int(lost), n).contains(0.1)
            for w, lost, n in zip(wins, losses, range(40, 401, 40), strict=True)
        )
    assert missed_rate / runs <= 0.05
    assert missed_difference / runs <= 0.05


# --- a true difference at the reported minimum detectable effect ---------------------------------------------------


def reported_effect(draw: Callable[[np.random.Generator, float], Data], rng: np.random.Generator) -> float:
    """The difference that is reported as just detectable when it is the true one."""
    effect = 0.05
    for pilot in range(5):
        found = [compared(draw(rng, effect), 100 * pilot + run).mde for run in range(30)]
        effect = (effect + float(np.mean([one for one in found if one is not None]))) / 2
    return effect


def detected(
    draw: Callable[[np.random.Generator, float], Data], effect: float, rng: np.random.Generator, runs: int
) -> float:
    found = [compared(draw(rng, effect), run) for run in range(runs)]
    return sum(bool(one.differs) and (one.difference or 0) > 0 for one in found) / runs


def changing(n: int, disagreement: float) -> Callable[[np.random.Generator, float], Data]:
    """Pass/fail pairs of which a share disagrees evenly, and a share `effect` is won on top."""

    def draw(rng: np.random.Generator, effect: float) -> Data:
        d = rng.choice(
            [1.0, -1.0, 0.0], size=n, p=[disagreement / 2 + effect, disagreement / 2, 1 - disagreement - effect]
        )
        return np.maximum(d, 0.0), np.maximum(-d, 0.0), None

    return draw


def improving(
    n: int, rate: float, repeats: int, count: int | None = None
) -> Callable[[np.random.Generator, float], Data]:
    """One system fails a little less on every sample; samples share their difficulty within clusters, if any."""

    def draw(rng: np.random.Generator, effect: float) -> Data:
        labels = None if count is None else np.arange(n) % count
        chance = beta(rng, rate, 0.3, n if count is None else count)
        chance = chance if labels is None else chance[labels]
        better = np.clip(chance + effect / (1 - rate) * (1 - chance), 0, 1)
        size = (n, repeats)
        a, b = rng.binomial(1, better[:, None], size), rng.binomial(1, chance[:, None], size)
        return a.astype(float), b.astype(float), labels

    return draw


@pytest.mark.parametrize("n", [50, 100, 300, 1000])
@pytest.mark.parametrize("disagreement", [0.05, 0.2, 0.4])
def test_a_pass_fail_difference_at_the_reported_effect_is_found_four_times_in_five(n: int, disagreement: float) -> None:
    rng = np.random.default_rng([n, round(100 * disagreement)])
    draw = changing(n, disagreement)
    assert 0.75 <= detected(draw, reported_effect(draw, rng), rng, RUNS) <= 0.87


@pytest.mark.parametrize(
    ("n", "repeats", "count", "runs"),
    [(50, 3, None, 1_500), (200, 3, None, 600), (200, 8, None, 600), (1000, 3, None, 250), (200, 1, 40, 1_000)],
)
def test_a_repeated_or_clustered_difference_at_the_reported_effect_is_found_four_times_in_five(
    n: int, repeats: int, count: int | None, runs: int
) -> None:
    rng = np.random.default_rng([n, repeats])
    draw = improving(n, 0.7, repeats, count)
    assert 0.75 <= detected(draw, reported_effect(draw, rng), rng, runs) <= 0.87
