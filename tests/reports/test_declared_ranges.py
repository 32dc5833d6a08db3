"""A range is declared or it is none: no figure depends on the unit of a metric, or on where values happen to lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairtrial import EvalReport, EvalResult, GateRules, Metric, Score, compare, gate, open_store
from fairtrial.fleet.messages import EvalReply
from fairtrial.reports.figures import column_reader
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.report import source_of
from tests.reports.build import Trial, graded, stored

RNG = np.random.default_rng(3)
FEES = RNG.lognormal(-5, 0.5, 200)  # Dollars for each call: all far below 1.
CRASHED = [place % 20 == 0 for place in range(200)]


def costs(unit: float) -> EvalReport:
    new: list[Trial] = [
        "task_error" if crashed else graded(1, fee=unit * fee / 2) for fee, crashed in zip(FEES, CRASHED, strict=True)
    ]
    return stored({"old": [graded(1, fee=unit * fee) for fee in FEES], "new": new})


@pytest.mark.parametrize("unit", [1.0, 100.0, 1e6])
def test_the_unit_of_a_metric_changes_no_verdict(unit: float) -> None:
    report = costs(unit)
    found = compare(report["old"], report["new"], metrics=["fee"], lower_is_better="fee")["new"]["fee"]
    assert (found.verdict, found.n) == ("better", 190)
    assert found.candidate == pytest.approx(
        unit * np.mean([f for f, out in zip(FEES, CRASHED, strict=True) if not out]) / 2
    )
    rules = GateRules(margins={"fee": unit * 0.001}, lower_is_better=("fee",), max_missing=0.1)
    assert gate(report["new"], rules, baseline=report["old"]).status == "pass"
    strict = replace(rules, max_missing=None)
    assert gate(report["new"], strict, baseline=report["old"]).status == "inconclusive"


def test_a_declared_range_gives_failures_their_worst_value() -> None:
    report = costs(1.0)
    declared = compare(report["old"], report["new"], metrics=["fee"], lower_is_better="fee", bounds={"fee": (0, 1)})[
        "new"
    ]["fee"]
    assert (declared.verdict, declared.n) == ("worse", 200)


@pytest.mark.parametrize("values", [[0.0] * 60, [0.0] * 59 + [1.0], [7.0] * 60])
def test_a_count_is_treated_the_same_whatever_its_values(values: list[float]) -> None:
    found = next(one for one in stored([graded(1, turns=value) for value in values]).estimates if one.name == "turns")
    if len(set(values)) == 1:
        assert (found.low, found.note) == (None, "Without bounds, equal values (or a single one) give no interval.")
    else:
        assert found.low is not None
        assert found.low < 0  # Not the interval of a share.


def test_what_was_left_out_is_always_said() -> None:
    report = costs(1.0)
    text = str(compare(report["old"], report["new"], metrics=["fee"], lower_is_better="fee"))
    assert (
        "fee has no worst value: 10 failed trials could not be counted in it, which leaves 190 pairs. Declare its "
        "bounds to count them."
    ) in " ".join(text.split())


class TestMetric:
    def test_bounds_are_checked(self) -> None:
        assert Metric("f1", 1, bounds=(0, 1)).bounds == (0.0, 1.0)
        assert Metric("stars", 3, bounds=[1, 5]).bounds == (1.0, 5.0)  # type: ignore[arg-type]  # as JSON has it
        with pytest.raises(ValueError, match=r"metric 'f1' is 1\.5, outside of its bounds 0 to 1"):
            Metric("f1", 1.5, bounds=(0, 1))
        with pytest.raises(ValueError, match="bounds of metric 'f1' must ascend"):
            Metric("f1", 0.5, bounds=(1, 0))
        with pytest.raises(TypeError, match="bounds of metric 'f1' must be a range such as"):
            Metric("f1", 0.5, bounds=1)  # type: ignore[arg-type]  # that is the mistake
        with pytest.raises(ValueError, match="an end of the bounds of metric 'f1' must be a finite number"):
            Metric("f1", 0.5, bounds=(0, float("inf")))

    def test_the_reward_has_the_range_of_its_metrics(self) -> None:
        f1, stars = Metric("f1", 0.5, 1.0, bounds=(0, 1)), Metric("stars", 4, 3.0, bounds=(1, 5))
        assert Score(0.5).reward_bounds == (0.0, 1.0)
        assert Score(0.5, metrics=[Metric("words", 90)]).reward_bounds == (0.0, 1.0)
        assert Score(metrics=[f1, stars, Metric("words", 90)]).reward_bounds == (0.75, 4.0)
        assert Score(metrics=[f1, Metric("words", 90, 1.0)]).reward_bounds is None


SCORES: dict[str, Score] = {
    "share": Score(0.5, metrics=[Metric("f1", 0.5, passed=True, higher_is_better=True, bounds=(0, 1))]),
    "stars": Score(0.5, metrics=[Metric("words", 90), Metric("stars", 4, bounds=(1, 5))]),
    "weighted": Score(metrics=[Metric("stars", 4, 1.0, bounds=(1, 5)), Metric("f1", 0.25, 1.0, bounds=(0, 1))]),
    "unbounded reward": Score(metrics=[Metric("stars", 4, 1.0, bounds=(1, 5)), Metric("words", 90.0, 1.0)]),
    "tiny": Score(0.5, metrics=[Metric("p", 1e-300, bounds=(-1e-300, 2e-300))]),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=list(SCORES))
def test_ranges_are_stored_and_sent(score: Score, tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'runs.db'}"
    store = open_store(where)
    (kept,) = stored([score], store=store).results
    store.close()
    assert kept.score == score
    reply = EvalReply(result=kept)
    assert EvalReply.from_wire(reply.to_wire()).result.score == score
    assert EvalReport.of([EvalResult(sample_id="a", score=score)]).results[0].score == score


@pytest.mark.parametrize("through", ["rows", "file"])
def test_columns_have_the_declared_ranges(through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_reader, "SMALLEST_FILE", 1 if through == "file" else 10**9)
    trials: list[Any] = [
        Score(0.5, metrics=[Metric("stars", 4, bounds=(1, 5)), Metric("f1", 0.5, bounds=(0, 1)), Metric("words", 9)]),
        Score(0.5, metrics=[Metric("stars", 7, bounds=(0, 10)), Metric("f1", 0.5)]),
        Score(metrics=[Metric("stars", 4, 1.0, bounds=(1, 5))]),
    ]
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    report = stored(trials, store=store)
    columns = read_columns(source_of(report["baseline"], ""))
    assert dict(columns.ranges) == {"stars": (0.0, 10.0), "f1": (0.0, 1.0), "reward": (1.0, 5.0)}
    trials.append(Score(metrics=[Metric("words", 3, 1.0)]))
    columns = read_columns(source_of(stored(trials, store=store, run_id="second")["baseline"], ""))
    assert dict(columns.ranges) == {"stars": (0.0, 10.0), "f1": (0.0, 1.0)}
    store.close()


def test_a_range_that_the_other_side_has_left_does_not_hold() -> None:
    inside = [Score(1, metrics=[Metric("f1", value, higher_is_better=True, bounds=(0, 1))]) for value in (0.4, 0.5)]
    report = stored({"old": inside * 10, "new": [graded(1, f1=value) for value in (0.6, 1.5)] * 10})
    assert compare(report["old"], report["new"], metrics="f1")["new"]["f1"].smallest_difference is None
    report = stored({"old": inside * 10, "new": [graded(1, f1=value) for value in (0.6, 0.5)] * 10})
    assert compare(report["old"], report["new"], metrics="f1")["new"]["f1"].smallest_difference == 0.05
