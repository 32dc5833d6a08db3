"""Comparisons and gates of runs that stopped early by their own results."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fairtrial import (
    Dataset,
    EvalConfig,
    EvalReport,
    Experiment,
    GateRules,
    Sample,
    Score,
    StopWhen,
    TrialContext,
    compare,
    evaluate_sync,
    gate,
    stats,
)
from fairtrial.analysis.columns import Columns
from fairtrial.analysis.compare import compare_columns
from fairtrial.analysis.estimates import estimates
from fairtrial.analysis.gate import gate_columns
from fairtrial.analysis.metrics import FAILED, MISSING, SCORED

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
    assert (found.p, found.test) == (1 / pair["e_value"], "e-process of unequal pairs")
    assert (found.mde, found.needed, comparison["terse"].missing_share) == (None, None, 0.0)
    assert any("used its own results to decide when to stop" in text for text in comparison.warnings)


def test_only_pass_and_fail_have_an_interval() -> None:
    report = stopped(StopWhen(decides=("plain", "terse")), "plain", "terse")
    found = compare(report["plain"], report["terse"], metrics=["passed", "latency_ms"])["terse"]["latency_ms"]
    assert (found.verdict, found.low, found.p) == ("unknown", None, None)
    assert "only pass/fail outcomes, one per sample, have an interval that allows for it" in found.sentence
    clustered = Columns.of({"passed": [1.0, 0.0] * 5}, clusters=[0, 1] * 5, adaptive=10)
    assert compare_columns(clustered, [clustered], metrics=["passed"]).verdict == "unknown"
    rates = {one.name: one for one in report["terse"].estimates}
    assert rates["pass_rate"].method == "beta-binomial confidence sequence"
    assert estimates(clustered)[0].low is None


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


def test_a_gate_uses_the_interval_that_goes_with_the_run() -> None:
    report = stopped(StopWhen(narrower_than=0.2), "terse")
    figures = report["terse"].adaptive
    assert figures is not None
    result = gate(report, GateRules(min_pass_rate=0.5))
    assert (result.status, result.missing_share) == ("pass", 0.0)
    assert (result.checks[0].low, result.checks[0].high) == (figures["low"], figures["high"])
    closer = gate(report, GateRules(min_pass_rate=round(figures["estimate"], 2)))
    assert closer.status == "inconclusive"


def test_missing_scores_count_against_the_conclusion() -> None:
    outcomes = np.array([SCORED] * 40 + [MISSING] * 10 + [FAILED] * 10)
    side = Columns.of({"passed": [1.0] * 60}, outcomes=outcomes, name="b", adaptive=60)
    worst = stats.betabinom_sequence(40, 60, missing=10)
    check = gate_columns(side, GateRules(min_pass_rate=0.5)).checks[0]
    assert (check.low, check.high) == (worst.low, worst.high)
    other = Columns.of({"passed": [0.0] * 60}, name="a", adaptive=60)
    found = compare_columns(other, [side], metrics=["passed"])["b"]["passed"]
    expected = stats.pairs_sequence(40, 0, 60, missing=10)
    assert (found.low, found.high) == (expected.low, expected.high)
    assert found.p == pytest.approx(1 / stats.eprocess_pairs(40, 0, missing=10))
