"""Floors and ceilings of quantiles, and of means that a few values make up; too few clusters for a verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fairtrial import ConfigurationError, GateRules, gate
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED, measured_metric, parse_quantile, quantile_name
from fairtrial.reports.figures.rules import SliceRule
from fairtrial.reports.gate.gate import GateResult, gate_columns
from tests.reports.made import Made, made_report

pytestmark = pytest.mark.proves("R103", "R150")
P95 = GateRules(ceilings={"p95:latency_ms": 2000})


def latencies(within: int, beyond: int, **changes: Any) -> Columns:
    """So many trials within 2,000 ms, and so many beyond."""
    return Columns.of({"latency_ms": np.repeat([1900.0, 2100.0], [within, beyond])}, **changes)


class TestCeilings:
    @pytest.mark.parametrize("n", [50, 72, 100, 250])
    def test_a_ceiling_is_decided_by_exact_binomial_tails(self, n: int) -> None:
        for within in range(n + 1):
            met = scipy_stats.binom.sf(within - 1, n, 0.95) <= 0.025
            missed = scipy_stats.binom.cdf(within, n, 0.95) <= 0.025
            expected = "pass" if met else "fail" if missed else "inconclusive"
            assert gate_columns(latencies(within, n - within), P95).status == expected

    def test_the_reason_has_the_quantile_its_interval_and_what_a_stated_share_would_take(self) -> None:
        result = gate_columns(latencies(97, 3), P95)
        assert result.reasons == (
            "p95 of latency_ms 1,900 (95% interval 1,900 to 2,100, 100 samples): the interval contains 2,000: "
            "inconclusive. If 97.5% of all trials are at or below 2,000, it takes about 520 samples to show it.",
        )
        check = result.checks[0]
        assert (check.metric, check.kind, check.value, check.low, check.high) == (
            "p95:latency_ms", "ceiling", 1900.0, 1900.0, 2100.0,
        )  # fmt: skip
        assert check.needed is not None
        enough = check.needed
        least = scipy_stats.binom.isf(0.025, enough, 0.95)
        assert scipy_stats.binom.sf(least, enough, 0.975) >= 0.8

    def test_too_few_values_leave_an_end_open(self) -> None:
        result = gate_columns(latencies(40, 0), P95)
        assert result.status == "inconclusive"
        assert result.checks[0].high is None
        assert "(95% interval at least 1,900, 40 samples): the interval contains 2,000" in result.reasons[0]

    @pytest.mark.parametrize(("hidden", "status"), [(0, "pass"), (1, "pass"), (3, "inconclusive")])
    def test_a_missing_number_may_have_been_beyond_every_other(self, hidden: int, status: str) -> None:
        """No range has to be declared: only the ranks of the others count."""
        values = np.repeat([1900.0, np.nan], [150, hidden])
        outcomes = np.repeat([SCORED, MISSING], [150, hidden])
        columns = Columns.of({"words": values}, outcomes=outcomes)
        result = gate_columns(columns, GateRules(ceilings={"p95:words": 2000}))
        assert result.status == status
        (check,) = result.checks
        assert (check.low, check.high) == (1900.0, None if hidden == 3 else 1900.0)
        if hidden == 3:
            assert "whatever the 3 missing would have been" in result.reasons[0]
            assert gate_columns(columns, GateRules(ceilings={"p95:words": 2000}, max_missing=0.05)).passed

    def test_a_task_error_without_a_number_counts_as_beyond_the_ceiling(self) -> None:
        values = np.repeat([1900.0, np.nan], [97, 3])
        columns = Columns.of({"words": values}, outcomes=np.repeat([SCORED, FAILED], [97, 3]))
        assert gate_columns(columns, GateRules(ceilings={"p95:words": 2000})).status == "inconclusive"

    @pytest.mark.parametrize("rules", [1, 10])
    def test_a_ceiling_that_is_exactly_met_is_seldom_missed_and_seldom_passed(self, rules: int) -> None:
        """Enumerated; the error of a miss is that of all rules together."""
        n = 200
        ceilings = {"p95:latency_ms": 2000.0} | {f"p95:other{place}": 1.0 for place in range(rules - 1)}
        statuses = []
        for within in range(n + 1):
            columns = latencies(within, n - within)
            statuses.append(gate_columns(columns, GateRules(ceilings=ceilings)).checks[0].status)
        chances = scipy_stats.binom.pmf(np.arange(n + 1), n, 0.95)
        assert chances[np.array(statuses) == "pass"].sum() <= 0.025
        missed = chances[np.array(statuses) == "fail"].sum()
        assert 1 - (1 - missed) ** rules <= 0.025 + 1e-9
        alone = [gate_columns(latencies(within, n - within), P95).status for within in range(n + 1)]
        assert (statuses == alone) == (rules == 1)

    def test_repeats_are_not_taken_for_more_samples(self) -> None:
        thrice = Columns.of({"latency_ms": np.repeat([[1900.0], [2100.0]], [49, 1], axis=0).repeat(3, axis=1)})
        assert gate_columns(thrice, P95).status == "inconclusive"
        assert gate_columns(latencies(150, 0), P95).passed

    def test_a_stored_run_is_gated_by_the_quantile_of_its_latency(self) -> None:
        report = made_report(lambda place, *_: Made(1.0, latency_ms=100 + place), samples=100)
        assert gate(report, GateRules(ceilings={"p95:latency_ms": 200})).passed
        failed = gate(report, GateRules(ceilings={"median:latency_ms": 120}))
        assert failed.status == "fail"
        assert "| median:latency\\_ms at most 120.0 | ❌ fail | 149.0 | 139.0 to 160.0 | 100 |" in failed.to_markdown()
        opened = gate(report, GateRules(ceilings={"p99:latency_ms": 150})).to_markdown()
        assert "| 198.0 | at least 196.0 | 100 |" in opened

    def test_slices_have_quantiles_of_their_own(self) -> None:
        columns = latencies(100, 100, groups={"kind": ["quick"] * 100 + ["slow"] * 100})
        rules = GateRules(slices=(SliceRule("kind", ceilings={"p95:latency_ms": 2000}),))
        assert [check.status for check in gate_columns(columns, rules).checks] == ["pass", "fail"]


class TestFloors:
    def test_a_median_can_have_a_floor(self) -> None:
        columns = Columns.of({"words": np.arange(100.0)})
        found = {
            least: gate_columns(columns, GateRules(floors={"median:words": least})).status for least in (30, 50, 70)
        }
        assert found == {30: "pass", 50: "inconclusive", 70: "fail"}


class TestNames:
    @pytest.mark.parametrize(
        ("name", "parsed"),
        [
            ("p95:latency_ms", ("latency_ms", 0.95)),
            ("p99.9:cost_usd", ("cost_usd", 0.999)),
            ("median:a:b", ("a:b", 0.5)),
            ("passed:polite", None),
            ("latency_ms", None),
        ],
    )
    def test_a_quantile_is_named_before_its_metric(self, name: str, parsed: tuple[str, float] | None) -> None:
        assert parse_quantile(name) == parsed
        assert measured_metric(name) == (name if parsed is None else parsed[0])
        if parsed is not None:
            assert quantile_name(*parsed) == name

    @pytest.mark.parametrize("name", ["p0:latency_ms", "p100:latency_ms", "p95:", "median:", "p9.5.1:words"])
    def test_a_quantile_that_does_not_exist_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=r"must be median or p0\.1 to p99\.9 of a metric"):
            GateRules(ceilings={name: 2000})

    def test_a_margin_may_be_about_a_quantile(self) -> None:
        assert GateRules(margins={"p95:latency_ms": 100}).metrics == ("latency_ms",)
        with pytest.raises(ConfigurationError, match="a quantile in margins must be median or"):
            GateRules(margins={"p100:latency_ms": 100})


class TestMeansThatAFewValuesMakeUp:
    VALUES = np.append(np.ones(98), [60.0, 50.0])

    def test_a_ceiling_is_not_passed(self) -> None:
        result = gate_columns(Columns.of({"latency_ms": self.VALUES}), GateRules(ceilings={"latency_ms": 1000}))
        assert result.status == "inconclusive"
        assert result.reasons[0].endswith(
            "cannot be decided: The largest 5 of 100 values make up 54% of the sum: the interval of the mean is not "
            "reliable; use the median or the 95th percentile. A gate takes ceilings for p95:latency_ms or "
            "median:latency_ms."
        )
        assert gate_columns(
            Columns.of({"latency_ms": self.VALUES}), GateRules(ceilings={"median:latency_ms": 1.5})
        ).passed

    def test_what_rests_on_the_low_end_is_decided(self) -> None:
        columns = Columns.of({"latency_ms": self.VALUES})
        assert gate_columns(columns, GateRules(ceilings={"latency_ms": 0.1})).status == "fail"
        assert gate_columns(columns, GateRules(floors={"latency_ms": 0.1})).status == "pass"
        assert gate_columns(columns, GateRules(floors={"latency_ms": 50})).status == "inconclusive"

    def test_a_ceiling_on_equal_values_is_passed(self) -> None:
        columns = Columns.of({"latency_ms": np.linspace(90, 110, 100)})
        assert gate_columns(columns, GateRules(ceilings={"latency_ms": 120})).passed


class TestFewClusters:
    @staticmethod
    def decided(sizes: list[int], repeats: int, rules: GateRules) -> GateResult:
        labels = np.repeat(np.arange(len(sizes)), sizes)
        rng = np.random.default_rng(1)
        shape = (labels.size, repeats)
        values = {"passed": np.ones(shape), "value": rng.uniform(0.8, 1, shape), "latency_ms": rng.uniform(1, 2, shape)}
        return gate_columns(Columns.of(values, clusters=labels), rules)

    @pytest.mark.parametrize("repeats", [1, 3])
    @pytest.mark.parametrize("sizes", [[50] * 3, [400, 5, 5, 5, 5]])
    @pytest.mark.parametrize(
        "rules",
        [
            GateRules(min_pass_rate=0.01),
            GateRules(floors={"value": 0.01}),
            GateRules(ceilings={"latency_ms": 1e6}),
            GateRules(ceilings={"median:latency_ms": 1e6}),
            GateRules(floors={"value": 0.9999}),
        ],
    )
    def test_fewer_than_about_four_clusters_have_no_verdict(
        self, sizes: list[int], repeats: int, rules: GateRules
    ) -> None:
        result = self.decided(sizes, repeats, rules)
        assert result.status == "inconclusive"
        assert f"cannot be decided: Only {len(sizes)} clusters" in result.reasons[0]
        assert result.reasons[0].endswith("about 4 are the least for a verdict.")

    @pytest.mark.parametrize("repeats", [1, 3])
    def test_enough_clusters_have_one(self, repeats: int) -> None:
        for rules in (
            GateRules(min_pass_rate=0.2),
            GateRules(floors={"value": 0.2}),
            GateRules(ceilings={"latency_ms": 9}),
        ):
            assert self.decided([10] * 20, repeats, rules).passed
