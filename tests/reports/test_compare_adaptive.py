"""Comparisons and gates of runs that stopped early by their own results."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fairtrial import Dataset, EvalReport, Experiment, GateRules, Sample, Score, compare, evaluate_sync, gate, stats
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.estimates import estimates
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.trials import EvalConfig, StopWhen, TrialContext

DATA = Dataset([Sample(f"s{n}", n, 1.0) for n in range(400)])


def luck(number: int, ctx: TrialContext) -> float:
    rates = {"plain": 0.5, "terse": 0.85}
    return float(random.Random(f"{number} {ctx.experiment.name}").random() < rates[ctx.experiment.name])


def as_told(output: float, expected: float) -> Score:
    return Score(output)


def stopped(rule: StopWhen, *experiments: str) -> EvalReport:
    config = EvalConfig(stop_when=rule, max_concurrent=1)
    return evaluate_sync(DATA, luck, as_told, config, experiments=[Experiment(name) for name in experiments])


def test_a_comparison_says_what_the_run_decided() -> None:
    report = stopped(StopWhen(decides=("plain", "terse")), "plain", "terse")
    assert report.adaptive is not None
    pair = report.adaptive["pair"]
    assert pair["verdict"] == "better"
    comparison = compare(report["plain"], report["terse"])
    found = comparison["terse"]["passed"]
    assert (found.verdict, found.n) == ("better", report.adaptive["samples"])
    assert (found.wins, found.losses, found.low, found.high) == (
        pair["wins"], pair["losses"], pair["low"], pair["high"],
    )  # fmt: skip
    assert found.p == pytest.approx(1 / pair["e_value"])
    assert found.p == pytest.approx(pair["p_value"])
    assert found.test == "betting martingale"
    assert pair["low"] > 0
    assert (found.mde, found.needed, comparison["terse"].missing_share) == (None, None, 0.0)
    assert any("used its own results to decide when to stop" in text for text in comparison.warnings)


def test_figures_without_a_range_or_with_clusters_are_shown_and_conclude_nothing() -> None:
    report = stopped(StopWhen(decides=("plain", "terse")), "plain", "terse")
    found = compare(report["plain"], report["terse"], metrics=["passed", "latency_ms"])["terse"]["latency_ms"]
    assert (found.verdict, found.low, found.p) == ("unknown", None, None)
    assert "only metrics with a declared range have an interval that allows for it. Declare bounds." in found.sentence
    bounded = compare(report["plain"], report["terse"], metrics=["latency_ms"], bounds={"latency_ms": (0.0, 60_000.0)})[
        "terse"
    ]["latency_ms"]
    assert (bounded.verdict, bounded.test) == ("no detectable difference", "betting martingale")
    clustered = Columns.of({"passed": [1.0, 0.0] * 5}, clusters=[0, 1] * 5, adaptive=10)
    refused = compare_columns(clustered, [clustered], metrics=["passed"])["columns"]["passed"]
    assert refused.verdict == "unknown"
    assert "saw clusters in part: only independent samples have an interval" in refused.sentence
    rates = {one.name: one for one in report["terse"].estimates}
    assert rates["pass_rate"].method == "betting confidence sequence"
    assert estimates(clustered)[0].low is None


def test_better_never_stands_beside_an_interval_that_contains_zero() -> None:
    """Twenty wins and five losses: the e-process decided while the interval of the two rates contained 0."""
    change = np.repeat([1.0, -1.0, 0.0], [20, 5, 175])
    sides = [
        Columns.of({"passed": np.maximum(sign * change, 0.0)}, name=name, adaptive=200)
        for sign, name in ((-1, "a"), (1, "b"))
    ]
    found = compare_columns(sides[0], sides[1:], metrics=["passed"])["b"]["passed"]
    assert found.p is not None
    assert found.low is not None
    assert (found.verdict, found.p < 0.05) == ("better", True)
    assert found.low > 0
    check = gate_columns(sides[1], GateRules(margin=0.0), sides[0]).checks[0]
    assert (check.status, check.low) == ("pass", found.low)
    assert "large loss" not in check.reason  # The interval allows for what was not seen.


def test_among_several_tests_the_adjusted_level_decides() -> None:
    change = np.repeat([1.0, -1.0, 0.0], [20, 5, 175])
    values = [
        {"passed": np.maximum(sign * change, 0.0), "value": np.roll(np.maximum(sign * change, 0.0), 7) * 0.5}
        for sign in (-1, 1)
    ]
    sides = [Columns.of(value, name=name, adaptive=200) for value, name in zip(values, "ab", strict=True)]
    found = compare_columns(sides[0], sides[1:], metrics=["passed", "value"])["b"]["passed"]
    assert found.p is not None
    assert found.adjusted_p == pytest.approx(2 * found.p)
    assert found.verdict == "no detectable difference"
    assert "among 2 tests it may be chance" in found.sentence


@pytest.mark.parametrize("metric", ["value", "f1"])
def test_graded_scores_and_metrics_with_bounds_are_compared(metric: str) -> None:
    rng = np.random.default_rng(2)
    low, high, scale = rng.uniform(0.2, 0.6, 120), rng.uniform(0.4, 0.9, 120), 1.0 if metric == "value" else 10.0
    sides = [
        Columns.of({"passed": np.ones(120), metric: scale * values}, name=name, adaptive=120)
        for values, name in ((low, "a"), (high, "b"))
    ]
    settings = ComparisonSettings(bounds={"f1": (0.0, 10.0)}, higher_is_better=frozenset({"f1"}))
    found = compare_columns(sides[0], sides[1:], metrics=[metric], settings=settings)["b"][metric]
    expected = stats.BettingMartingale(high - low, bounds=(-1, 1))
    interval = expected.interval()
    assert (found.low, found.high) == pytest.approx((scale * interval.low, scale * interval.high))
    assert found.p == pytest.approx(1 / expected.capital(0.0))
    assert found.verdict == "better"
    if metric == "value":
        floor = gate_columns(sides[1], GateRules(floors={"value": 0.5})).checks[0]
        alone = stats.BettingMartingale(high).interval()
        assert (floor.low, floor.high) == pytest.approx((alone.low, alone.high))
        assert floor.status == "pass"


def test_repeats_count_once_per_sample() -> None:
    rng = np.random.default_rng(3)
    outcomes = (rng.random((2, 60, 3)) < np.array([0.5, 0.8])[:, None, None]).astype(float)
    sides = [Columns.of({"passed": one}, name=name, adaptive=60) for one, name in zip(outcomes, "ab", strict=True)]
    found = compare_columns(sides[0], sides[1:], metrics=["passed"])["b"]["passed"]
    expected = stats.BettingMartingale(outcomes[1].mean(axis=1) - outcomes[0].mean(axis=1), bounds=(-1, 1)).interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    figures = {one.name: one for one in estimates(sides[1])}
    assert (figures["pass@2"].low, figures["pass^3"].low) == (None, None)
    assert "has no interval that allows for it" in str(figures["pass@2"].note)


def test_as_good_as_holds_with_what_is_missing_at_its_worst() -> None:
    def side(name: str, missing: int) -> Columns:
        outcomes = np.array([SCORED] * (2_000 - missing) + [MISSING] * missing)
        return Columns.of({"passed": [1.0] * 2_000}, outcomes=outcomes, name=name, adaptive=2_000)

    def verdict(missing: int) -> str:
        return str(compare_columns(side("a", 0), [side("b", missing)], metrics=["passed"])["b"]["passed"].verdict)

    assert [verdict(missing) for missing in (0, 20, 110)] == ["as good as", "as good as", "no detectable difference"]
    for missing, status in ((20, "pass"), (90, "inconclusive")):
        assert gate_columns(side("b", missing), GateRules(margin=0.04), side("a", 0)).status == status


def test_weak_evidence_is_no_difference_and_is_said_to_be_so() -> None:
    sides = [
        Columns.of({"passed": values}, name=name, adaptive=30)
        for name, values in (("a", [1.0] * 20 + [0.0] * 10), ("b", [1.0] * 25 + [0.0] * 5))
    ]
    found = compare_columns(sides[0], [sides[1]], metrics=["passed"])["b"]["passed"]
    assert found.verdict == "no detectable difference"
    assert found.sentence.endswith(
        "The run used its own results to decide when to stop, so only strong evidence counts."
    )
    nothing = [side.take(np.zeros(30, np.bool_)) for side in sides]
    assert compare_columns(nothing[0], [nothing[1]], metrics=["passed"])["b"]["passed"].verdict == "unknown"


def test_a_full_run_can_be_the_baseline_of_one_that_stopped() -> None:
    full = evaluate_sync(DATA, luck, as_told, EvalConfig(experiment_name="plain"))
    short = stopped(StopWhen(narrower_than=0.2), "terse")
    assert short.adaptive is not None
    found = compare(full, short)["terse"]
    assert found.matched == short.adaptive["samples"] < 400
    assert (found.verdict, found.missing_share) == ("better", 0.0)


def test_a_run_that_looked_at_widths_alone_has_ordinary_figures() -> None:
    report = stopped(StopWhen(narrower_than=0.2), "plain", "terse")
    assert report.adaptive is not None
    n = report.adaptive["samples"]
    comparison = compare(report["plain"], report["terse"], metrics=["passed"])
    found = comparison["terse"]["passed"]
    expected = stats.paired_rates_interval(found.wins, found.losses, n)
    assert (found.n, found.low, found.high) == (n, expected.low, expected.high)
    assert found.test == "mid-p McNemar test"
    assert found.mde is not None
    assert "own results" not in str(comparison)
    check = gate(report["terse"], GateRules(min_pass_rate=0.5)).checks[0]
    passed = round(report["terse"].adaptive["estimate"] * n)  # type: ignore[index]  # it stopped by its own rule
    exact = stats.exact_rate_interval(passed / n, n)
    assert (check.status, check.low, check.high) == ("pass", exact.low, exact.high)
    assert "stop_when" not in str(gate(report["terse"], GateRules(min_pass_rate=round(passed / n, 2))))


def test_a_gate_uses_the_interval_that_goes_with_the_run() -> None:
    report = stopped(StopWhen(decides=("plain", "terse")), "plain", "terse")
    figures = report["terse"].adaptive
    assert figures is not None
    result = gate(report["terse"], GateRules(min_pass_rate=0.5))
    assert (result.status, result.missing_share) == ("pass", 0.0)
    assert (result.checks[0].low, result.checks[0].high) == (figures["low"], figures["high"])
    closer = gate(report["terse"], GateRules(min_pass_rate=round(figures["estimate"], 2)))
    assert closer.status == "inconclusive"


def test_missing_scores_count_against_the_conclusion() -> None:
    outcomes = np.array([SCORED] * 40 + [MISSING] * 3 + [FAILED] * 17)
    side = Columns.of({"passed": [1.0] * 60}, outcomes=outcomes, name="b", adaptive=60)
    least, most = np.repeat([1.0, 0.0], [40, 20]), np.repeat([1.0, 0.0], [43, 17])
    worst = stats.BettingMartingale(least, most).interval()
    check = gate_columns(side, GateRules(min_pass_rate=0.5)).checks[0]
    assert (check.low, check.high) == (worst.low, worst.high)
    other = Columns.of({"passed": [0.0] * 60}, name="a", adaptive=60)
    found = compare_columns(other, [side], metrics=["passed"])["b"]["passed"]
    # The baseline failed all: a missing answer is a tie or a win.
    expected = stats.BettingMartingale(least, most, bounds=(-1, 1))
    assert (found.low, found.high) == (expected.interval().low, expected.interval().high)
    assert found.p == pytest.approx(1 / expected.capital(0.0))
    # On what was scored on both sides nothing is missing.
    assert found.scored_only is not None
    assert found.scored_only.low == pytest.approx(stats.BettingMartingale([1.0] * 40, bounds=(-1, 1)).interval().low)


def test_pairs_that_were_never_run_are_missing() -> None:
    """A full run was interrupted after 40 of the 60 samples that an adaptive run had seen."""
    early = Columns.of({"passed": [1.0] * 60}, name="b", adaptive=60)
    interrupted = Columns.of({"passed": [0.0] * 40}, name="a")
    made = [replace(side, fingerprint="f", planned=60) for side in (interrupted, early)]
    found = compare_columns(made[0], made[1:], metrics=["passed"])["b"]["passed"]
    expected = stats.BettingMartingale([1.0] * 40 + [-1.0] * 20, [1.0] * 60, bounds=(-1, 1)).interval()
    assert (found.n, found.low, found.high) == (40, expected.low, expected.high)
