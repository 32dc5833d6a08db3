"""Coverage, false alarms and power, by enumeration where possible and seeded simulation where not."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.coverage_designs._run import families, measure_designs
from fairtrial import stats

pytestmark = pytest.mark.long
RUNS = 2_000
type Array = NDArray[np.float64]
type Data = tuple[Array, Array, NDArray[np.intp] | None]


@pytest.mark.proves("R44", "R113", "R114", "R150")
@pytest.mark.parametrize("family", families())
def test_no_quick_design_of_the_coverage_benchmark_fails(family: str) -> None:
    found = list(measure_designs([family], quick=True))
    assert found
    assert [one for one in found if one.verdict == "FAILS"] == []


def beta(rng: np.random.Generator, rate: float, correlation: float, size: int) -> Array:
    total = (1 - correlation) / correlation
    return rng.beta(rate * total, (1 - rate) * total, size)


def compared(data: Data, run: int) -> stats.PairedDifference:
    a, b, labels = data
    return stats.paired_difference(a, b, clusters=labels, draws=999, seed=run)


def test_looking_every_ten_pairs_is_safe_with_bets_and_not_with_mcnemar() -> None:
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
            stats.BettingMartingale(np.repeat([1.0, 0.0], [k, n - k])).capital(0.8) >= 20
            for k, n in zip(passed, looks, strict=True)
        )
        differences = rng.choice([1, 0, -1], size=400, p=[0.2, 0.7, 0.1])
        missed_difference += any(
            stats.BettingMartingale(differences[:n], bounds=(-1, 1)).capital(0.1) >= 20 for n in range(40, 401, 40)
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


@pytest.mark.parametrize(("n", "disagreement"), [(50, 0.2), (300, 0.05), (1000, 0.4)])
def test_a_pass_fail_difference_at_the_reported_effect_is_found_four_times_in_five(n: int, disagreement: float) -> None:
    rng = np.random.default_rng([n, round(100 * disagreement)])
    draw = changing(n, disagreement)
    assert 0.75 <= detected(draw, reported_effect(draw, rng), rng, RUNS) <= 0.87


@pytest.mark.parametrize(
    ("n", "repeats", "count", "runs"),
    [(50, 3, None, 1_000), (200, 8, None, 500), (200, 1, 40, 500)],
)
def test_a_repeated_or_clustered_difference_at_the_reported_effect_is_found_four_times_in_five(
    n: int, repeats: int, count: int | None, runs: int
) -> None:
    rng = np.random.default_rng([n, repeats])
    draw = improving(n, 0.7, repeats, count)
    assert 0.75 <= detected(draw, reported_effect(draw, rng), rng, runs) <= 0.87


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_stopping_by_width_keeps_coverage_and_takes_a_third_of_a_confidence_sequence(rate: float) -> None:
    """Looked at after every outcome: 380 and 136 samples where the confidence sequence takes 1,262 and 453."""
    runs, longest = 2000, 700
    passed = np.cumsum(np.random.default_rng(3).random((runs, longest)) < rate, axis=1)
    n = np.arange(1, longest + 1)
    z2 = 1.959963984540054**2 / n
    centre = (passed / n + z2 / 2) / (1 + z2)
    half = np.sqrt(passed / n * (1 - passed / n) * z2 + z2 * z2 / 4) / (1 + z2)
    stop = np.argmax(2 * half <= 0.1, axis=1)
    rows = np.arange(runs)
    low, high = (centre - half)[rows, stop], (centre + half)[rows, stop]
    first = stats.stopped_by_width(int(passed[0, stop[0]]), int(n[stop[0]]))
    assert (first.low, first.high) == pytest.approx((low[0], high[0]))
    assert 0.935 <= np.mean((low <= rate) & (rate <= high)) <= 0.985
    assert np.mean(n[stop]) == pytest.approx(380 if rate == 0.5 else 136, rel=0.05)
