"""Long tails: no verdict on means that a few values decide, and medians, percentiles and ratios as the way on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, GateRules, compare
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.comparison import MetricComparison
from fairtrial.reports.compare.document import comparison_document
from fairtrial.reports.compare.pairing import ComparisonSettings, pair, scores_of
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import is_mean, measured_metric
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.reports.leaderboard.leaderboard import rank_columns
from fairtrial.reports.plan.plan import PlanRequest, plan_columns
from fairtrial.reports.plan.spread import HistorySide
from fairtrial.stats import quantile_difference
from tests.reports.build import graded, stored

RNG = np.random.default_rng(51)


def side(name: str, latency: Any, **changes: Any) -> Columns:
    return Columns.of({"passed": np.ones(len(latency)), "latency_ms": latency}, name=name, **changes)


def heavy(sigma: float, n: int) -> np.ndarray:
    return 1000 * np.exp(sigma * RNG.normal(size=n) - sigma**2 / 2)


OLD, NEW = heavy(2, 300), heavy(0.5, 300)


def compared(metric: str, old: Any = OLD, new: Any = NEW, **settings: Any) -> MetricComparison:
    found = compare_columns(
        side("old", old), [side("new", new)], metrics=[metric], settings=ComparisonSettings(**settings)
    )
    return found["new"][metric]


class TestCompare:
    def test_means_that_a_few_values_decide_have_no_verdict(self) -> None:
        found = compared("latency_ms")
        assert found.verdict == "unknown"
        assert found.needed is None
        assert found.sentence.startswith("latency_ms: no verdict on new and old: ")
        assert found.sentence.endswith(
            "of the sum: a difference of means is not reliable. Compare median:latency_ms, p95:latency_ms or "
            "geomean:latency_ms instead."
        )

    def test_medians_and_percentiles_are_compared(self) -> None:
        median, p95 = compared("median:latency_ms"), compared("p95:latency_ms")
        assert (median.verdict, p95.verdict) == ("worse", "better")
        assert median.baseline == np.quantile(OLD, 0.5, method="inverted_cdf")
        assert median.lower_is_better is True
        assert "p95:latency_ms: new is better than old: " in p95.sentence

    def test_ratios_of_geometric_means_are_shares(self) -> None:
        found = compared("geomean:latency_ms", OLD, 0.8 * OLD * np.exp(0.05 * RNG.normal(size=300)))
        assert found.verdict == "better"
        assert "geomean:latency_ms: new is better than old: " in found.sentence
        assert "-20." in found.sentence or "-19." in found.sentence
        assert "% (95% interval -2" in found.sentence

    def test_different_figures_of_one_metric_are_different_tests(self) -> None:
        names = ["latency_ms", "median:latency_ms", "p95:latency_ms", "geomean:latency_ms"]
        record = compare_columns(side("old", OLD), [side("new", NEW)], metrics=names)
        assert [metric.same_as for metric in record["new"].metrics] == [None] * 4
        assert record.tests == 4

    def test_they_are_named_as_metrics_are_and_mistakes_are_too(self) -> None:
        with pytest.raises(ConfigurationError, match="no metric 'median:speed'"):
            compared("median:speed")
        assert [measured_metric(name) for name in ("geomean:x", "p95:x", "geomean:", "x")] == [
            "x",
            "x",
            "geomean:",
            "x",
        ]
        assert [is_mean(name) for name in ("geomean:x", "median:x", "x")] == [False, False, True]

    def test_a_page_shows_ratios_in_percent(self) -> None:
        record = compare_columns(
            side("old", OLD), [side("new", 0.8 * OLD)], metrics=["geomean:latency_ms", "median:latency_ms"]
        )
        assert "-20.0%" in str(comparison_document(record, 0))

    def test_failures_count_in_quantiles_of_what_has_a_worst_value(self) -> None:
        report = stored({"old": [graded(1, f1=0.5)] * 40, "new": [*[graded(1, f1=0.5)] * 10, *["timeout"] * 30]})
        found = compare(
            report["old"], report["new"], metrics=["median:f1"], bounds={"f1": (0, 1)}, higher_is_better="f1"
        )
        assert found["new"]["median:f1"].candidate == 0.0

    def test_slices_have_no_test_of_quantiles_against_each_other(self) -> None:
        groups = {"topic": ["a", "b"] * 150}
        record = compare_columns(
            side("old", OLD, groups=groups), [side("new", NEW)], metrics=["median:latency_ms"], slice_by="topic"
        )
        assert record["new"].slice_tests == ()
        assert [part["median:latency_ms"].n for part in record["new"].slices] == [150, 150]


class TestGate:
    def test_a_margin_of_a_mean_with_a_long_tail_is_not_decided(self) -> None:
        found = gate_columns(side("new", OLD), GateRules(margins={"latency_ms": 1e6}), side("old", NEW))
        assert found.status == "inconclusive"
        assert "a difference of means is not reliable. Compare median:latency_ms" in found.reasons[0]

    @pytest.mark.parametrize(
        ("margins", "status", "reason"),
        [
            ({"median:latency_ms": 10_000.0}, "pass", "within the margin of 10,000"),
            ({"median:latency_ms": 1.0}, "fail", "more than the 1.000 allowed"),
            ({"geomean:latency_ms": 50.0}, "pass", "within the margin of 5000.0%"),
            ({"geomean:latency_ms": 0.05}, "fail", "% worse, more than the 5.0% allowed"),
        ],
    )
    def test_margins_of_medians_and_ratios(self, margins: dict[str, float], status: str, reason: str) -> None:
        found = gate_columns(side("new", NEW), GateRules(margins=margins), side("old", OLD))
        assert found.status == status
        assert reason in found.checks[0].reason

    def test_a_missing_value_leaves_it_open(self) -> None:
        latency = NEW.copy()
        latency[0] = np.nan
        rules = GateRules(margins={"median:latency_ms": 10_000.0})
        outcomes = np.full(300, 1)
        outcomes[0] = 0
        found = gate_columns(side("new", latency, outcomes=outcomes), rules, side("old", OLD))
        assert found.status == "inconclusive"
        assert "without declared bounds it could be anything" in found.reasons[0]

    def test_a_ratio_is_no_floor(self) -> None:
        with pytest.raises(
            ConfigurationError, match="which compares with a baseline\\); use margins, or median:latency_ms"
        ):
            GateRules(ceilings={"geomean:latency_ms": 2})


def test_leaderboards_are_about_means() -> None:
    with pytest.raises(ConfigurationError, match="a leaderboard ranks by means"):
        rank_columns({"d": [side("old", OLD), side("new", NEW)]}, metric="median:latency_ms")


class TestPlans:
    def sides(self, n: int = 300, **changes: Any) -> list[HistorySide]:
        rng = np.random.default_rng(7)
        return [
            HistorySide(side(name, 1000 * np.exp(2 * rng.normal(size=n)), **changes), name, name, "baseline")
            for name in ("old", "new")
        ]

    def test_a_ratio_is_planned_as_the_difference_of_logarithms(self) -> None:
        sides = self.sides()
        logs = [
            HistorySide(
                Columns.of({"passed": np.ones(300), "log": np.log(one.columns.values["latency_ms"])}, name=one.name),
                one.name,
                one.name,
                "baseline",
            )
            for one in sides
        ]
        found = plan_columns(sides, PlanRequest(0.2, "geomean:latency_ms"))
        same = plan_columns(logs, PlanRequest(np.log(1.2), "log"))
        assert found.samples == same.samples
        for one, other in zip(found.options, same.options, strict=True):
            assert other.detectable is not None
            assert one.detectable == pytest.approx(np.expm1(other.detectable))
        assert "a true difference of 20.0% in geomean:latency_ms" in found.sentence

    def test_a_quantile_is_planned_from_its_bootstrap(self) -> None:
        sides = self.sides()
        old, new = (one.columns.values["latency_ms"].ravel() for one in sides)
        error = quantile_difference(old, new, 0.5).se
        assert error is not None
        found = plan_columns(sides, PlanRequest(100, "median:latency_ms", repeats=(1,)))
        assert found.options[0].se == pytest.approx(error, rel=0.01)
        assert found.samples is not None
        wider = plan_columns(sides, PlanRequest(200, "median:latency_ms", repeats=(1,)))
        assert wider.samples is not None
        assert found.samples == pytest.approx(4 * wider.samples, rel=0.1)

    @pytest.mark.parametrize(("metric", "fewest"), [("median:latency_ms", 20), ("p95:latency_ms", 200)])
    def test_no_plan_names_fewer_samples_than_a_quantile_takes(self, metric: str, fewest: int) -> None:
        assert plan_columns(self.sides(), PlanRequest(1e9, metric, repeats=(1,))).samples == fewest
        groups = np.arange(400) // 2
        clustered = plan_columns(self.sides(400, clusters=groups), PlanRequest(1e9, metric, repeats=(1,)))
        assert (clustered.samples, clustered.clusters) == (2 * fewest, fewest)

    def test_repeats_help_only_as_far_as_they_differ(self) -> None:
        rng = np.random.default_rng(3)
        level = rng.normal(0, 1, (300, 1))
        sides = [
            HistorySide(
                side(name, np.exp(level + rng.normal(0, 0.7, (300, 1)) + rng.normal(0, 1, (300, 4)))),
                name,
                name,
                "baseline",
            )
            for name in ("old", "new")
        ]
        found = plan_columns(sides, PlanRequest(0.1, "median:latency_ms", repeats=(1, 4)))
        once, often = (one.samples for one in found.options)
        assert once is not None
        assert often is not None
        assert 1.5 < once / often < 4

    @pytest.mark.parametrize(
        ("metric", "values", "said"),
        [
            ("p95:latency_ms", heavy(1, 150), "needs two earlier experiments with at least 200 samples"),
            ("geomean:latency_ms", np.zeros(300), "needs values above 0"),
        ],
    )
    def test_what_earlier_runs_do_not_show_is_said(self, metric: str, values: Any, said: str) -> None:
        sides = [HistorySide(side(name, values), name, name, "baseline") for name in ("old", "new")]
        with pytest.raises(ConfigurationError, match=said):
            plan_columns(sides, PlanRequest(0.2, metric))
        with pytest.raises(ConfigurationError, match="needs an earlier run that has it"):
            plan_columns([], PlanRequest(0.2, metric))

    def test_a_plan_of_means_with_a_long_tail_warns(self) -> None:
        found = plan_columns(self.sides(), PlanRequest(100, "latency_ms"))
        assert any("their mean may have no verdict. Compare median:latency_ms" in line for line in found.assumptions)
        calm = [HistorySide(side(name, heavy(0.1, 300)), name, name, "baseline") for name in ("old", "new")]
        assert not any("long tail" in line for line in plan_columns(calm, PlanRequest(100, "latency_ms")).assumptions)


def test_a_leaderboard_of_means_with_a_long_tail_is_open() -> None:
    found = rank_columns({"d": [side("old", OLD), side("new", NEW)]}, metric="latency_ms")
    assert "the order of 2 systems is open: The largest 15 of 300 values" in found.sentence
    assert [entry.rank_low for entry in found.systems] == [1, 1]


def test_failures_are_left_out_only_where_a_metric_has_no_value_for_them() -> None:
    outcomes = np.repeat([2, 1], [5, 95])
    values = {"passed": np.where(outcomes == 2, np.nan, 1.0), "words": np.where(outcomes == 2, np.nan, 9.0)}
    latency = np.arange(100.0)
    sides = [
        Columns.of({**values, "latency_ms": latency + shift}, name=name, outcomes=outcomes, directions={"words": True})
        for name, shift in (("old", 0), ("new", 1))
    ]
    assert not any("could not be counted" in line for line in rank_columns({"d": sides}).warnings)
    timed = rank_columns({"d": sides}, metric="latency_ms")
    assert not any("could not be counted" in line for line in timed.warnings)
    words = rank_columns({"d": sides}, metric="words")
    assert "words has no worst value: 10 failed trials could not be counted in it." in words.warnings


@pytest.mark.parametrize("repeats", [1, 3])
def test_verdicts_know_how_often_samples_were_repeated(repeats: int) -> None:
    passed = np.tile([[1.0], [0.0]], (10, repeats))
    pairs = pair(*(Columns.of({"passed": passed}, name=name) for name in ("new", "old")))
    assert scores_of(pairs, "passed", "system", ComparisonSettings()).repeats == repeats
