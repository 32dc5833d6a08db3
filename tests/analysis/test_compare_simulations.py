"""False alarms and power of whole comparisons, by seeded simulation on columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fairtrial import stats
from fairtrial.analysis.columns import Columns
from fairtrial.analysis.compare import compare_columns
from fairtrial.analysis.comparison import ComparisonRecord, MetricComparison
from fairtrial.analysis.gate import gate_columns
from fairtrial.analysis.gate_rules import GateRules
from fairtrial.analysis.metrics import FAILED, SCORED
from fairtrial.analysis.pairing import ComparisonSettings
from fairtrial.report import by_metric

pytestmark = [pytest.mark.long, pytest.mark.proves("R113")]

RUNS = 2_000
type Array = NDArray[np.float64]
type Rng = np.random.Generator


def beta(rng: Rng, rate: float, correlation: float, size: int) -> Array:
    total = (1 - correlation) / correlation
    return rng.beta(rate * total, (1 - rate) * total, size)


def coins(rng: Rng, chance: Array) -> Array:
    return rng.binomial(1, chance).astype(float)


def alarmed(comparison: ComparisonRecord) -> bool:
    return any(
        metric.verdict in ("better", "worse") for candidate in comparison.candidates for metric in candidate.metrics
    )


def versus(sides: Sequence[Columns], run: int, metrics: Sequence[str], **given: Any) -> ComparisonRecord:
    settings = ComparisonSettings(draws=499, seed=run)
    return compare_columns(sides[0], sides[1:], metrics=metrics, settings=settings, **given)


# --- identical systems -----------------------------------------------------------------------------------------


def single(rng: Rng) -> list[Columns]:
    chance = beta(rng, 0.8, 0.5, 100)
    return [Columns.of({"passed": coins(rng, chance)}, name=name) for name in "ab"]


def with_errors(rng: Rng) -> list[Columns]:
    """A tenth of the trials times out, a few cannot be scored; on either side alike."""
    chance = beta(rng, 0.8, 0.5, 100)
    sides = []
    for name in "ab":
        outcomes = rng.choice([SCORED, FAILED, 3], size=100, p=[0.87, 0.1, 0.03])
        sides.append(Columns.of({"passed": coins(rng, chance)}, name=name, outcomes=outcomes))
    return sides


def four_systems(rng: Rng) -> list[Columns]:
    chance = beta(rng, 0.7, 0.5, 80)
    return [Columns.of({"passed": coins(rng, chance)}, name=name) for name in "abcd"]


IDENTICAL: dict[str, tuple[Callable[[Rng], list[Columns]], int]] = {
    "pass/fail": (single, RUNS),
    "with timeouts and scorer errors": (with_errors, RUNS // 2),
    "three candidates": (four_systems, RUNS // 2),
}


@pytest.mark.parametrize("name", IDENTICAL)
def test_identical_systems_are_called_different_in_at_most_six_percent_of_comparisons(name: str) -> None:
    rng = np.random.default_rng(len(name))
    draw, runs = IDENTICAL[name]
    alarms = sum(alarmed(versus(draw(rng), run, ["passed"])) for run in range(runs))
    assert alarms / runs <= 0.06


def test_clusters_repeats_and_three_metrics_together_keep_false_alarms_below_six_percent() -> None:
    rng = np.random.default_rng(7)
    labels = np.arange(60) % 10
    alarms = single_metric = 0
    for run in range(RUNS):
        shared = beta(rng, 0.7, 0.3, 10)
        sides = []
        for name in "ab":
            # In a third of the clusters each system has its own luck: clusters matter for the difference, too.
            own = np.where(rng.random(10) < 0.3, beta(rng, 0.7, 0.3, 10), shared)[labels][:, None]
            passed = coins(rng, np.broadcast_to(own, (60, 2)))
            value = np.clip(0.5 * passed + 0.5 * rng.random((60, 2)), 0, 1)
            words = 100 * own + rng.normal(0, 20, (60, 2))
            sides.append(Columns.of({"passed": passed, "value": value, "words": words}, name=name, clusters=labels))
        found = versus(sides, run, ["passed", "value", "words"])
        alarms += alarmed(found)
        single_metric += any(metric.low is not None and not _holds(metric) for metric in found["b"].metrics)
    assert alarms / RUNS <= 0.06
    assert single_metric > alarms  # What allowing for three tests is for.


def test_runs_that_stop_when_they_can_tell_two_systems_apart_keep_false_alarms_below_six_percent() -> None:
    rng = np.random.default_rng(11)
    alarms = blind = 0
    for run in range(RUNS):
        chance = beta(rng, 0.7, 0.5, 300)
        passed = [coins(rng, chance) for _ in "ab"]
        # A look every ten samples, and an end at the first one at which the evidence is strong.
        seen = stats.pairs_decision(passed[1] - passed[0], every=10).looked_at
        sides = [
            Columns.of({"passed": side[:seen]}, name=name, adaptive=seen)
            for name, side in zip("ab", passed, strict=True)
        ]
        alarms += alarmed(versus(sides, run, ["passed"]))
        # And one at the first look at which the ordinary test would see a difference.
        wins, losses = np.cumsum(passed[1] > passed[0])[9::10], np.cumsum(passed[1] < passed[0])[9::10]
        blind += any(_midp(int(won), int(lost)) <= 0.05 for won, lost in zip(wins, losses, strict=True))
    assert alarms / RUNS <= 0.06
    assert blind / RUNS > 0.15


_midp = cache(stats.mcnemar_midp)


def _holds(metric: MetricComparison) -> bool:
    return metric.low is not None and metric.high is not None and metric.low <= 0 <= metric.high


def test_slices_by_a_metric_do_not_make_a_difference_out_of_luck() -> None:
    rng = np.random.default_rng(8)
    ours = by_one_side = 0
    runs = 300
    for run in range(runs):
        chance = rng.uniform(0.2, 0.8, 80)[:, None]
        sides = [Columns.of({"passed": coins(rng, np.broadcast_to(chance, (80, 2)))}, name=name) for name in ("a", "b")]
        low = sides[0].values["passed"].mean(axis=1) < 0.75
        naive = [side.take(low) for side in sides]
        by_one_side += alarmed(versus(naive, run, ["passed"]))
        parts = versus(sides, run, ["passed"], slice_by=by_metric("passed", at=0.75))["b"].slices
        ours += any(part["passed"].verdict in ("better", "worse") for part in parts)
    assert ours / runs <= 0.06
    assert by_one_side / runs > 0.5


@pytest.mark.proves("R114")
def test_a_gate_stops_an_equal_run_in_at_most_three_percent_of_cases() -> None:
    # The upper bound alone decides, which is half of a two-sided test.
    rng = np.random.default_rng(9)
    rules = GateRules(margin=0.02)
    stopped = 0
    for run in range(RUNS // 2):
        baseline, candidate = single(rng)
        stopped += gate_columns(candidate, rules, baseline, settings=ComparisonSettings(seed=run)).status == "fail"
    assert stopped / (RUNS // 2) <= 0.035


@pytest.mark.proves("R114")
def test_a_gate_lets_a_run_that_is_worse_by_the_margin_through_in_at_most_four_percent_of_cases() -> None:
    rng = np.random.default_rng(10)
    rules = GateRules(margin=0.1)
    through = 0
    for run in range(RUNS // 2):
        change = rng.choice([1.0, -1.0, 0.0], size=200, p=[0.05, 0.15, 0.8])
        baseline = Columns.of({"passed": np.maximum(-change, 0.0)}, name="a")
        candidate = Columns.of({"passed": np.maximum(change, 0.0)}, name="b")
        through += gate_columns(candidate, rules, baseline, settings=ComparisonSettings(seed=run)).status == "pass"
    assert through / (RUNS // 2) <= 0.04


# --- a true difference at the reported minimum detectable effect ---------------------------------------------------

type Draw = Callable[[Rng, float], list[Columns]]


def detected(draw: Draw, rng: Rng, metric: str, metrics: Sequence[str], runs: int) -> float:
    """How often the difference that is reported as just detectable, when it is the true one, is found."""
    effect = 0.1
    for pilot in range(5):
        found = [versus(draw(rng, effect), 40 * pilot + run, metrics)["b"][metric].mde for run in range(30)]
        effect = (effect + float(np.mean([one for one in found if one is not None]))) / 2
    return sum(versus(draw(rng, effect), run, metrics)["b"][metric].verdict == "better" for run in range(runs)) / runs


def pass_fail(n: int, disagreement: float) -> Draw:
    def draw(rng: Rng, effect: float) -> list[Columns]:
        shares = [disagreement / 2 + effect, disagreement / 2, 1 - disagreement - effect]
        change = rng.choice([1.0, -1.0, 0.0], size=n, p=shares)
        noise = rng.choice([1.0, -1.0, 0.0], size=n, p=[0.1, 0.1, 0.8])
        return [
            Columns.of({"passed": np.maximum(sign * change, 0.0), "other": np.maximum(sign * noise, 0.0)}, name=name)
            for name, sign in (("a", -1), ("b", 1))
        ]

    return draw


def graded(n: int) -> Draw:
    def draw(rng: Rng, effect: float) -> list[Columns]:
        base = rng.uniform(0.2, 0.6, n)
        a, b = base + rng.normal(0, 0.1, n), base + effect + rng.normal(0, 0.1, n)
        return [Columns.of({"value": np.clip(side, 0, 1)}, name=name) for name, side in (("a", a), ("b", b))]

    return draw


@pytest.mark.parametrize(
    ("n", "metrics"),
    [
        *((n, ["passed"]) for n in (50, 100, 300, 1000)),
        *((n, ["passed", "other"]) for n in (50, 300)),
    ],
    ids=lambda given: str(given),
)
def test_a_pass_fail_difference_at_the_reported_effect_is_found_four_times_in_five(
    n: int, metrics: Sequence[str]
) -> None:
    rng = np.random.default_rng([n, len(metrics)])
    assert 0.75 <= detected(pass_fail(n, 0.2), rng, "passed", metrics, RUNS // 2) <= 0.87


@pytest.mark.parametrize(("n", "runs"), [(50, 500), (200, 300)])
def test_a_graded_difference_at_the_reported_effect_is_found_four_times_in_five(n: int, runs: int) -> None:
    rng = np.random.default_rng([n, 3])
    assert 0.75 <= detected(graded(n), rng, "value", ["value"], runs) <= 0.87
