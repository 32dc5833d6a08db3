"""Comparisons and gates of judged runs, corrected by people's labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, Dataset, EvalReport, EvalSuite, GateRules, Sample, compare, gate, open_store
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.columns import Columns, LabelColumn
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.store.protocol import Label
from fairtrial.trials import EvalConfig, Experiment, StopWhen, TrialContext, TrialKey

pytestmark = pytest.mark.proves("R113", "R115")

N = 200
LABELLED = 60


def truly_good(name: str, number: int) -> bool:
    """Both systems are right four times in five."""
    return (number * 7 + (0 if name == "plain" else 3)) % 5 != 0


def judged_good(name: str, number: int) -> bool:
    """The judge believes most of what `wordy` says, and nothing wrong that `plain` says."""
    return truly_good(name, number) or (name == "wordy" and number % 4 != 0)


def suite(**settings: Any) -> EvalSuite[Any, Any, Any]:
    def task(number: int, ctx: TrialContext) -> bool:
        if number == 190 and ctx.experiment.name == "wordy":
            raise RuntimeError("no answer")
        return judged_good(ctx.experiment.name, number)

    def judge(output: bool, expected: object) -> bool:
        return output

    data: Dataset[Any, Any] = Dataset([Sample(f"q{i}", i) for i in range(N)], name="letters")
    experiments = [Experiment("plain"), Experiment("wordy")]
    return EvalSuite("letters", data, task, judge, experiments=experiments, config=EvalConfig(**settings))


def people(name: str, numbers: range = range(LABELLED)) -> dict[str, bool]:
    return {f"q{i}": truly_good(name, i) for i in numbers}


@pytest.fixture(scope="module")
def report() -> EvalReport:
    return suite().run_sync(store=open_store("memory:"))


def test_a_judge_that_favours_one_side_makes_no_winner_once_labels_correct_it(report: EvalReport) -> None:
    raw = compare(report["plain"], report["wordy"], metrics=["passed"])["wordy"]["passed"]
    assert raw.verdict == "better"
    comparison = compare(report["plain"], report["wordy"], labels={"plain": people("plain"), "wordy": people("wordy")})
    corrected = comparison["wordy"]["passed"]
    assert [metric.metric for metric in comparison["wordy"].metrics] == ["passed"]
    assert (corrected.verdict, corrected.labels) == ("no detectable difference", (LABELLED, LABELLED))
    assert corrected.candidate == pytest.approx(0.8, abs=0.01)
    assert corrected.baseline == pytest.approx(0.8, abs=0.01)
    assert "by 60 labels of wordy and 60 of plain" in corrected.sentence
    assert corrected.needed is None
    assert (corrected.wins, corrected.losses) == (raw.wins, raw.losses)
    text = str(comparison)
    assert "If the labels were drawn at random, rates are what people would say; won, lost" in " ".join(text.split())
    assert "by 60 labels of wordy and 60 of plain, if these were drawn at random" in " ".join(text.split())
    labels = {"plain": people("plain"), "wordy": people("wordy")}
    drawn = compare(report["plain"], report["wordy"], labels=labels, labels_drawn=True)
    assert (corrected.drawn, drawn["wordy"]["passed"].drawn) == (False, True)
    assert "Rates are what people would say; won, lost and tied count the judge's" in str(drawn)
    assert "drawn at random" not in str(drawn)


def test_labels_of_the_store_and_by_key_say_the_same(report: EvalReport) -> None:
    store = open_store("memory:")
    stored = suite().run_sync(store=store)
    for name in ("plain", "wordy"):
        for sample, value in people(name).items():
            store.label(Label(TrialKey(stored.run_id, name, sample), "ok", value))
    by_key = {
        TrialKey(report.run_id, name, sample): value
        for name in ("plain", "wordy")
        for sample, value in people(name).items()
    }
    records = [Label(key, "", value) for key, value in by_key.items()]
    found = [
        compare(stored["plain"], stored["wordy"], labels=True),
        compare(report["plain"], report["wordy"], labels=by_key),
        compare(report["plain"], report["wordy"], labels=iter(records)),
    ]
    assert len({(one["wordy"]["passed"].low, one["wordy"]["passed"].high) for one in found}) == 1
    assert compare(stored["plain"], stored["wordy"], labels=True, label_name="ok")["wordy"]["passed"].labels == (60, 60)


def test_labels_of_one_side_are_refused_with_the_remedy(report: EvalReport) -> None:
    with pytest.raises(ConfigurationError, match=r"labels must be of both sides \(got 60 of plain and 0 of wordy\)"):
        compare(report["plain"], report["wordy"], labels={"plain": people("plain")})
    with pytest.raises(ConfigurationError, match="Label a random sample of the trials of plain too"):
        gate(report["wordy"], {"margin": 0.05}, report["plain"], labels={"wordy": people("wordy")})
    with pytest.raises(ConfigurationError, match="do not say whose output"):
        compare(report["plain"], report["wordy"], labels=people("plain"))
    with pytest.raises(ConfigurationError, match=r"must be of a judged trial \(got 0 of wordy\)"):
        gate(report["wordy"], {"min_pass_rate": 0.5}, labels=True)


def test_labels_of_a_run_that_ended_by_its_own_rule_are_refused() -> None:
    report = suite(stop_when=StopWhen(narrower_than=0.2)).run_sync(store="memory:")
    with pytest.raises(ConfigurationError, match="stopped by its own rule"):
        compare(report["plain"], report["wordy"], labels=True)


def test_picked_labels_leave_the_comparison_undecided_unless_drawn_by_verdict(report: EvalReport) -> None:
    bad = [i for i in range(N) if not judged_good("wordy", i)]
    wordy = {f"q{i}": truly_good("wordy", i) for i in [*bad, *range(20)] if i != 190}
    labels = {"plain": people("plain"), "wordy": wordy}
    # Twice as many of its fails would not show in so few: this is every one of them.
    refused = compare(report["plain"], report["wordy"], labels=labels)["wordy"]["passed"]
    assert (refused.verdict, refused.difference) == ("unknown", None)
    assert "wordy: The labelled trials do not look like a random sample" in refused.sentence
    drawn = compare(report["plain"], report["wordy"], labels=labels, labels_by_verdict=True)["wordy"]["passed"]
    assert drawn.verdict == "no detectable difference"


def test_a_metric_that_labels_are_not_about_is_named(report: EvalReport) -> None:
    labels = {"plain": people("plain"), "wordy": people("wordy")}
    found = compare(report["plain"], report["wordy"], metrics=["passed", "value"], labels=labels)["wordy"]
    assert found["value"].labels is None
    assert found["value"].same_as is None
    assert "The labels are about passed: value is not corrected." in found.warnings


def test_a_floor_is_about_what_people_would_say(report: EvalReport) -> None:
    rules = GateRules(min_pass_rate=0.88)
    assert gate(report["wordy"], rules).status == "pass"
    everything = {"wordy": people("wordy", range(N - 20))}
    decided = gate(report["wordy"], rules, labels=everything, labels_drawn=True)
    assert decided.status == "fail"
    assert decided.checks[0].labels == (N - 20,)
    assert decided.checks[0].value == pytest.approx(0.8, abs=0.01)
    assert "200 samples, 180 labels" in decided.reasons[0]
    few = gate(report["wordy"], rules, labels={"wordy": people("wordy", range(10))}, labels_drawn=True)
    assert (few.status, few.checks[0].needed) == ("inconclusive", None)
    margin = gate(
        report["wordy"],
        GateRules(margin=0.15),
        report["plain"],
        labels={name: people(name, range(N - 20)) for name in ("plain", "wordy")},
        labels_drawn=True,
    )
    assert margin.status == "pass"
    assert margin.checks[0].labels == (N - 20, N - 20)
    assert "200 pairs, 180 and 180 labels" in margin.reasons[0]


def labelled(values: Any, truth: Any, mask: Any, *, name: str, outcomes: Any = None) -> Columns:
    columns = Columns.of({"passed": np.asarray(values, dtype=float)}, name=name, outcomes=outcomes)
    labels = np.where(mask, np.asarray(truth, dtype=float), np.nan)[:, None]
    object.__setattr__(columns, "labels", LabelColumn("passed", labels))
    return columns


def test_a_missing_verdict_is_taken_at_its_worst_beside_labels() -> None:
    truth = np.arange(100) % 10 != 0
    outcomes = np.where(np.arange(100) < 4, 3, 1)[:, None]
    values = np.where(np.arange(100) < 4, np.nan, truth.astype(float))
    mask = np.arange(100) >= 50
    some = gate_columns(labelled(values, truth, mask, name="a", outcomes=outcomes), GateRules(min_pass_rate=0.5))
    whole = gate_columns(labelled(truth, truth, mask, name="a"), GateRules(min_pass_rate=0.5))
    assert "whatever the 4 missing would have been" in some.reasons[0]
    assert some.checks[0].low is not None
    assert whole.checks[0].low is not None
    assert some.checks[0].low < whole.checks[0].low - 0.02


def test_a_verdict_without_labels_is_named() -> None:
    mask = np.arange(100) < 30
    a = labelled(np.arange(100) < 60, np.arange(100) < 60, mask, name="a")
    b = labelled(np.arange(100) >= 0, np.arange(100) < 60, mask, name="b")
    found = compare_columns(a, [b], metrics=["passed"])["b"]
    assert any(line.startswith("No trial that the judge failed is labelled") for line in found.warnings)


def test_slices_use_their_own_labels(report: EvalReport) -> None:
    labels = {name: people(name) for name in ("plain", "wordy")}

    def half(number: int) -> str:
        return "labelled" if number < 100 else "unlabelled"

    parts = compare(report["plain"], report["wordy"], labels=labels, slice_by=half)["wordy"].slices
    found = {part.name.split()[-1]: part["passed"] for part in parts}
    assert found["labelled"].labels == (60, 60)
    assert found["unlabelled"].verdict == "unknown"
    assert "No judged trial is labelled." in found["unlabelled"].notes
