"""A gate: pass, fail or inconclusive, from intervals, with reasons and the number of samples that would decide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairtrial import EvalReport, GateRules, gate, stats
from fairtrial.analysis.columns import Columns
from fairtrial.analysis.compare import compare_columns
from fairtrial.analysis.gate import gate_columns
from fairtrial.analysis.gate_rules import SliceRule
from fairtrial.errors import ConfigurationError
from tests.report.build import Trial, graded, stored

pytestmark = pytest.mark.proves("R103", "R114")


def share(passes: int, of: int) -> list[Trial]:
    return [1.0] * passes + [0.0] * (of - passes)


def changed(n: int, wins: int, losses: int) -> EvalReport:
    """Two experiments that differ on so many samples; on the others both pass."""
    rest = n - wins - losses
    return stored(
        {"plain": [0.0] * wins + [1.0] * losses + [1.0] * rest, "terse": [1.0] * wins + [0.0] * losses + [1.0] * rest}
    )


class TestFloors:
    @pytest.mark.parametrize(
        ("passes", "status", "code"), [(180, "pass", 0), (162, "inconclusive", 3), (140, "fail", 1)]
    )
    def test_a_floor_is_held_against_the_interval(self, passes: int, status: str, code: int) -> None:
        result = gate(stored(share(passes, 200)), GateRules(min_pass_rate=0.8))
        check = result.checks[0]
        expected = stats.wilson(passes, 200)
        assert isinstance(expected, stats.Interval)
        assert (result.status, result.exit_code, result.passed) == (status, code, status == "pass")
        assert (check.low, check.high, check.n, check.bound) == pytest.approx((expected.low, expected.high, 200, 0.8))
        assert (check.needed is not None) == (status == "inconclusive")

    def test_the_reason_has_the_numbers_and_what_would_decide(self) -> None:
        result = gate(stored(share(162, 200)), {"min_pass_rate": 0.8})
        assert result.reasons == (
            "pass rate 81.0% (95% interval 75.0% to 85.8%, 200 samples): the interval holds 80.0%, so it may be met or "
            "missed; about 13,000 samples would decide.",
        )
        assert result.needed == result.checks[0].needed

    @pytest.mark.parametrize("rate", [0.9, 0.7])
    def test_the_number_that_would_decide_does_decide(self, rate: float) -> None:
        result = gate(stored(share(round(rate * 20), 20)), GateRules(min_pass_rate=0.8))
        assert result.needed is not None
        more = gate(stored(share(round(rate * result.needed), result.needed)), GateRules(min_pass_rate=0.8))
        assert more.status == ("pass" if rate > 0.8 else "fail")

    def test_a_perfect_run_can_be_too_small(self) -> None:
        result = gate(stored([1.0] * 10), GateRules(min_pass_rate=0.8))
        assert result.status == "inconclusive"
        assert result.needed is not None
        assert gate(stored([1.0] * result.needed), GateRules(min_pass_rate=0.8)).status == "pass"

    def test_errors_of_the_system_count_as_failures(self) -> None:
        result = gate(stored([*[1.0] * 60, *["timeout"] * 40]), GateRules(min_pass_rate=0.8))
        assert (result.status, result.checks[0].value) == ("fail", 0.6)

    def test_floors_and_ceilings_of_other_metrics(self) -> None:
        rng = np.random.default_rng(1)
        trials = [graded(1, f1=float(rng.uniform(0.7, 0.9)), words=float(rng.normal(100, 5))) for _ in range(50)]
        good = gate(stored(trials), GateRules(floors={"f1": 0.7}, ceilings={"words": 110, "latency_ms": 1000}))
        assert [check.status for check in good.checks] == ["pass", "pass", "pass"]
        bad = gate(stored(trials), GateRules(floors={"f1": 0.9}, ceilings={"words": 90}))
        assert [check.status for check in bad.checks] == ["fail", "fail"]
        assert len(bad.reasons) == 2
        close = gate(stored(trials), GateRules(ceilings={"words": 100.5}))
        assert close.status == "inconclusive"
        assert close.needed is not None
        assert close.needed > 50

    def test_a_timeout_is_the_worst_a_ceiling_can_meet(self) -> None:
        trials: list[Trial] = [graded(1, toxic=0.1)] * 20
        assert gate(stored([*trials, *["timeout"] * 20]), GateRules(ceilings={"toxic": 0.3})).checks[0].value == 0.55

    def test_failures_that_a_metric_has_no_number_for_are_said_to_be_left_out(self) -> None:
        good = [graded(1, words=80.0 + place) for place in range(20)]
        report = stored({"plain": good[::-1], "terse": [*good[:15], *["timeout"] * 5]})
        floor = gate(report["terse"], GateRules(floors={"words": 50}))
        assert floor.reasons[0].endswith("at or above 50.0. 5 failed trials could not be counted in it.")
        margin = gate(report["terse"], GateRules(margins={"words": 50}), baseline=report["plain"])
        assert "5 failed trials could not be counted in it." in margin.checks[0].reason

    def test_scored_trials_without_the_metric_are_counted(self) -> None:
        good = [graded(1, f1=0.9 - place / 1000) for place in range(20)]
        report = stored({"plain": good[::-1], "terse": [*good[:15], *[1.0] * 5]})
        floor = gate(report["terse"], GateRules(floors={"f1": 0.5}))
        assert floor.reasons[0].endswith("at or above 0.500. 5 scored trials had no number for it.")
        margin = gate(report["terse"], GateRules(margins={"f1": 0.5}), baseline=report["plain"])
        assert margin.reasons[0].endswith("5 scored trials had no number for it.")

    @pytest.mark.parametrize("trials", [[], ["scorer_error"] * 3])
    def test_nothing_decides_nothing(self, trials: Sequence[Trial]) -> None:
        result = gate(stored(trials), GateRules(min_pass_rate=0.8))
        assert (result.status, result.needed) == ("inconclusive", None)
        assert any("no trial of baseline says anything about it" in reason for reason in result.reasons)

    def test_what_has_no_interval_is_open(self) -> None:
        one_cluster = stored([1.0] * 5, metadata=[{"cluster": 1}] * 5)
        result = gate(one_cluster, GateRules(min_pass_rate=0.5))
        assert (result.status, result.needed) == ("inconclusive", None)
        assert "All samples are in one cluster" in result.reasons[0]
        exactly = gate(stored(share(4, 5)), GateRules(min_pass_rate=0.8))
        assert "no number of samples can be named" in exactly.reasons[0]
        flat = gate(stored([graded(1, words=7.0)] * 3), GateRules(floors={"words": 5}))
        assert flat.status == "inconclusive"


class TestMargins:
    @pytest.mark.parametrize(
        ("wins", "losses", "status"), [(12, 10, "pass"), (2, 30, "fail"), (8, 14, "inconclusive"), (40, 2, "pass")]
    )
    def test_a_margin_is_held_against_the_interval_of_the_difference(self, wins: int, losses: int, status: str) -> None:
        report = changed(400, wins, losses)
        result = gate(report["terse"], GateRules(margin=0.03), baseline=report["plain"])
        check = result.checks[0]
        expected = stats.bonett_price(wins, losses, 400)
        assert isinstance(expected, stats.Interval)
        assert result.status == status
        assert (check.kind, check.low, check.high) == ("margin", expected.low, expected.high)
        assert check.p == stats.mcnemar_midp(wins, losses)
        assert (check.needed is not None) == (status == "inconclusive")
        assert (result.candidate, result.baseline) == ("terse", "plain")

    def test_a_loss_within_the_margin_passes_even_if_it_is_certain(self) -> None:
        report = changed(4000, 10, 40)
        result = gate(report["terse"], GateRules(margin=0.03), baseline=report["plain"])
        assert result.checks[0].high is not None
        assert result.checks[0].high < 0
        assert result.status == "pass"
        assert "worse, within the margin of 3.0 points" in result.reasons[0]

    def test_the_reasons_read_like_sentences(self) -> None:
        report = changed(400, 8, 14)
        result = gate(report["terse"], GateRules(margin=0.03), baseline=report["plain"])
        assert result.reasons == (
            "passed of terse against plain: -1.5 points (95% interval -3.9 to +0.9 points, 400 pairs): it may be worse "
            "by more than 3.0 points, and it may not be worse at all; about 2,000 samples would decide.",
        )
        assert "inconclusive: passed of terse against plain: -1.5 points" in str(result)

    def test_the_number_that_would_decide_does_decide(self) -> None:
        report = changed(200, 6, 6)
        result = gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"])
        assert result.status == "inconclusive"
        assert result.needed is not None
        each = round(result.needed * 6 / 200)
        more = changed(result.needed, each, each)
        assert gate(more["terse"], GateRules(margin=0.02), baseline=more["plain"]).status == "pass"

    def test_equal_runs_need_samples_too(self) -> None:
        report = changed(20, 0, 0)
        result = gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"])
        assert result.status == "inconclusive"
        assert result.needed is not None
        assert result.needed > 20

    def test_less_is_better_of_latency_and_of_what_is_said(self) -> None:
        rng = np.random.default_rng(2)
        base = rng.uniform(5, 6, 80)
        columns = [
            Columns.of({"passed": np.ones(80), "errors": values}, name=name)
            for name, values in (("plain", base), ("terse", base + rng.uniform(0.5, 1.0, 80)))
        ]
        rules = GateRules(margins={"errors": 0.1}, lower_is_better=("errors",))
        assert gate_columns(columns[1], rules, columns[0]).status == "fail"
        assert gate_columns(columns[0], rules, columns[1]).status == "pass"
        assert gate_columns(columns[1], replace(rules, lower_is_better=()), columns[0]).status == "pass"

    def test_nothing_in_common_decides_nothing(self) -> None:
        first = stored([1.0] * 3, ids=["a", "b", "c"], run_id="one")
        second = stored([1.0] * 3, ids=["d", "e", "f"], run_id="two", fingerprint="e" * 32)
        result = gate(second, GateRules(margin=0.02), baseline=first)
        assert (result.status, result.needed) == ("inconclusive", None)
        assert "No sample has a score on both sides." in result.reasons[0]

    def test_the_comparison_comes_along(self) -> None:
        report = changed(100, 1, 5)
        result = gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"])
        assert result.comparison is not None
        assert result.comparison["terse"].flips.lost_count == 5
        assert [flip.sample_id for flip in result.comparison.flipped("gained")] == ["s0"]


class TestHowManySamplesWouldDecide:
    """What is said to be enough must be enough, for the decision that is meant and the rules that there are."""

    def test_a_rule_that_is_nearly_missed_among_many_needs_more_than_one_that_is_alone(self) -> None:
        report = stored(share(148, 200))
        floors = {f"passed{place}": 0.0 for place in range(9)}
        alone = gate(report, GateRules(min_pass_rate=0.78))
        among = gate_columns(
            Columns.of({"passed": share(148, 200), **{name: share(200, 200) for name in floors}}),
            GateRules(min_pass_rate=0.78, floors=floors),
        )
        assert (alone.status, among.status) == ("inconclusive", "inconclusive")
        assert alone.needed is not None
        assert among.needed is not None
        assert among.needed > 1.4 * alone.needed  # (2.81 + .84)^2 / (1.96 + .84)^2 = 1.7, less what scatter adds.

    def test_a_margin_that_is_nearly_broken_among_many_needs_more_too(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [10, 20, 170])
        sides = [
            {"passed": np.maximum(sign * change, 0.0), **{f"m{place}": np.zeros(200) for place in range(9)}}
            for sign in (-1, 1)
        ]
        baseline, candidate = (Columns.of(values, name=name) for values, name in zip(sides, "ab", strict=True))
        alone = gate_columns(candidate, GateRules(margin=0.0), baseline)
        rules = GateRules(margin=0.0, ceilings={f"m{place}": 0.9 for place in range(9)})
        among = gate_columns(candidate, rules, baseline)
        assert (alone.status, among.status) == ("inconclusive", "inconclusive")
        assert alone.needed is not None
        assert among.needed is not None
        assert among.needed > 1.5 * alone.needed

    def test_a_margin_is_broken_only_allowing_for_the_floors_beside_it(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [10, 25, 165])  # p = .012.
        sides = [
            {"passed": np.maximum(sign * change, 0.0), **{f"m{place}": np.ones(200) for place in range(9)}}
            for sign in (-1, 1)
        ]
        baseline, candidate = (Columns.of(values, name=name) for values, name in zip(sides, "ab", strict=True))
        assert gate_columns(candidate, GateRules(margin=0.0), baseline).status == "fail"
        floors = {f"m{place}": 0.5 for place in range(9)}
        among = gate_columns(candidate, GateRules(margin=0.0, floors=floors), baseline)
        assert among.status == "inconclusive"
        assert "not clearly enough for one of 10 rules" in among.reasons[0]

    def test_a_run_that_has_ended_by_its_own_rule_is_promised_nothing(self) -> None:
        candidate = Columns.of({"passed": share(81, 100)}, name="b", adaptive=100)
        assert gate_columns(candidate, GateRules(min_pass_rate=0.8)).needed is None
        baseline = Columns.of({"passed": share(80, 100)[::-1]}, name="a")
        both = gate_columns(candidate, GateRules(margin=0.02), baseline)
        assert (both.status, both.needed) == ("inconclusive", None)

    def test_less_being_better_needs_as_many(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [8, 14, 178])
        up, down = (
            Columns.of({"passed": np.ones(200), "hit": np.maximum(sign * change, 0.0)}, name=name)
            for name, sign in (("b", 1), ("a", -1))
        )
        more = gate_columns(up, GateRules(margins={"hit": 0.03}), down)
        less = gate_columns(down, GateRules(margins={"hit": 0.03}, lower_is_better=("hit",)), up)
        assert more.needed is not None
        assert more.needed == less.needed

    def test_an_open_comparison_of_a_few_sure_wins_names_a_number(self) -> None:
        sides = [Columns.of({"passed": [value] * 3}, name=name) for name, value in (("a", 0.0), ("b", 1.0))]
        found = compare_columns(sides[0], sides[1:], metrics=["passed"])["b"]["passed"]
        assert found.verdict == "no detectable difference"
        assert found.needed is not None
        assert 3 < found.needed < 12


class TestSlicesAndSeveralRules:
    METADATA = [{"topic": "refunds" if place < 100 else "other"} for place in range(200)]

    def test_a_slice_has_its_own_rules(self) -> None:
        trials = {"plain": [1.0] * 200, "terse": [0.0] * 60 + [1.0] * 140}
        report = stored(trials, metadata=self.METADATA)
        rules = GateRules(
            min_pass_rate=0.5, slices=(SliceRule("topic", "refunds", min_pass_rate=0.8), SliceRule("topic", margin=0.1))
        )
        result = gate(report["terse"], rules, baseline=report["plain"])
        found = {(check.kind, check.slice): check.status for check in result.checks}
        assert found == {
            ("floor", None): "pass",
            ("floor", "topic = refunds"): "fail",
            ("margin", "topic = other"): "pass",
            ("margin", "topic = refunds"): "fail",
        }
        assert result.status == "fail"
        assert all(reason.startswith("[topic = refunds]") for reason in result.reasons)

    @pytest.mark.parametrize("rule", [SliceRule("topic", "travel", min_pass_rate=0.5), SliceRule("genre", margin=0.1)])
    def test_a_slice_that_nobody_is_in_is_open(self, rule: SliceRule) -> None:
        report = stored({"plain": [1.0] * 200, "terse": [1.0] * 200}, metadata=self.METADATA)
        rules = GateRules(margin=0.5, slices=(rule,))
        result = gate(report["terse"], rules, baseline=report["plain"])
        assert [check.status for check in result.checks] == ["pass", "inconclusive"]
        assert result.status == "inconclusive"

    def test_values_are_not_mistaken_for_each_other(self) -> None:
        report = stored([1.0] * 40 + [0.0] * 40, metadata=[{"hard": False}] * 40 + [{"hard": 0}] * 40)
        passes = gate(report, GateRules(slices=(SliceRule("hard", False, min_pass_rate=0.8),)))
        assert (passes.status, passes.checks[0].n) == ("pass", 40)

    def test_one_of_many_rules_must_be_missed_clearly(self) -> None:
        metadata = [{"topic": place // 50} for place in range(500)]
        # 34 of 50: the interval ends below .8 alone, not allowing for ten rules.
        trials: list[Trial] = [*share(33, 50), *[1.0] * 450]
        report = stored(trials, metadata=metadata)
        alone = gate(report, GateRules(slices=(SliceRule("topic", 0, min_pass_rate=0.8),)))
        among = gate(report, GateRules(slices=(SliceRule("topic", min_pass_rate=0.8),)))
        assert alone.status == "fail"
        assert among.status == "inconclusive"
        assert any("missed alone, but not clearly enough for one of 10 rules" in reason for reason in among.reasons)

    def test_one_of_many_margins_must_be_broken_clearly(self) -> None:
        metadata = [{"topic": place // 50} for place in range(500)]
        base: list[Trial] = [1.0] * 500
        report = stored({"plain": base, "terse": [*[0.0] * 6, *base[6:]]}, metadata=metadata)
        sides = {"candidate": report["terse"], "baseline": report["plain"]}
        alone = gate(rules=GateRules(slices=(SliceRule("topic", 0, margin=0.01),)), **sides)
        among = gate(rules=GateRules(slices=(SliceRule("topic", margin=0.01),)), **sides)
        assert alone.status == "fail"
        assert among.status == "inconclusive"
        assert any("worse alone, but not clearly enough for one of 10 rules" in text for text in among.reasons)

    def test_all_rules_must_be_met(self) -> None:
        report = changed(400, 12, 10)
        rules = GateRules(min_pass_rate=0.97, margin=0.03)
        result = gate(report["terse"], rules, baseline=report["plain"])
        assert [check.status for check in result.checks] == ["inconclusive", "pass"]
        assert (result.status, len(result.reasons)) == ("inconclusive", 1)


class TestMissing:
    @pytest.mark.parametrize("missing", ["scorer_error", "dead_letter", "not_run"])
    def test_too_much_missing_is_inconclusive_whatever_the_rest_says(self, missing: Trial) -> None:
        result = gate(stored([*[1.0] * 93, *[missing] * 7]), GateRules(min_pass_rate=0.5))
        assert result.status == "inconclusive"
        assert result.missing_share == pytest.approx(0.07)
        assert result.checks[0].status == "pass"
        assert result.reasons[0].startswith("7.0% of the trials are missing")

    def test_a_little_missing_is_let_through_and_the_limit_can_be_moved(self) -> None:
        report = stored([*[1.0] * 96, *["scorer_error"] * 4])
        assert gate(report, GateRules(min_pass_rate=0.5)).status == "pass"
        assert gate(report, GateRules(min_pass_rate=0.5, max_missing_share=0.01)).status == "inconclusive"

    def test_what_the_baseline_misses_counts_too(self) -> None:
        report = stored({"plain": [*[1.0] * 90, *["dead_letter"] * 10], "terse": [1.0] * 100})
        result = gate(report["terse"], GateRules(margin=0.5), baseline=report["plain"])
        assert result.status == "inconclusive"
        assert result.missing_share == pytest.approx(0.1)


class TestRules:
    def test_rules_come_from_a_toml_file(self, tmp_path: Path) -> None:
        path = tmp_path / "gates.toml"
        path.write_text("""
            [gate]
            min_pass_rate = 0.8
            margins = { passed = 0.02, value = 0.05 }
            ceilings.latency_ms = 2000
            lower_is_better = "toxic"
            cluster = "passage"

            [[gate.slices]]
            by = "topic"
            value = "refunds"
            min_pass_rate = 0.9
        """)
        rules = GateRules.load(path)
        assert rules == GateRules(
            min_pass_rate=0.8,
            margins={"passed": 0.02, "value": 0.05},
            ceilings={"latency_ms": 2000},
            lower_is_better=("toxic",),
            cluster="passage",
            slices=(SliceRule("topic", "refunds", min_pass_rate=0.9),),
        )
        assert rules.metrics == ("passed", "latency_ms", "value")
        with pytest.raises(ConfigurationError, match=r"has no table \[tool.fairtrial.gate\]"):
            GateRules.load(path, "tool.fairtrial.gate")
        path.write_text("[gate")
        with pytest.raises(ConfigurationError, match="is not a TOML file"):
            GateRules.load(path)
        with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
            GateRules.load(tmp_path / "none.toml")

    @pytest.mark.parametrize(
        ("table", "sentence"),
        [
            ({"min_passrate": 0.8}, "have no 'min_passrate'; did you mean min_pass_rate?"),
            ({"zzz": 1}, "have no 'zzz'; there are min_pass_rate"),
            ({"min_pass_rate": 80}, "min_pass_rate is a share from 0 to 1, such as 0.8, not 80"),
            ({"margin": True}, "margin is a share from 0 to 1, such as 0.8, not True"),
            ({"margins": {"value": -0.1}}, "margins.value is a number of at least 0, not -0.1"),
            ({"floors": {"value": "high"}}, "floors.value is a number, not 'high'"),
            ({"floors": 0.8}, "floors is a table of metric names and numbers, not 0.8"),
            ({"min_pass_rate": 0.8, "floors": {"passed": 0.9}}, "min_pass_rate and floors.passed say the same thing"),
            ({"max_missing_share": 5}, "max_missing_share is a share from 0 to 1, not 5"),
            ({"alpha": 0}, "alpha lies between 0 and 1, as in 0.05, not at 0"),
            ({"cluster": 3}, "cluster is the name of a metadata key, not 3"),
            ({"slices": {"by": "topic"}}, "slices are a list of tables"),
            ({"slices": ["topic"]}, "a slice rule is a table with by = a metadata key, not 'topic'"),
            ({"slices": [{"margin": 0.1}]}, "a slice rule needs `by`"),
            ({"slices": [{"by": "topic"}]}, "the slice rule for 'topic' asks for nothing"),
            ({"slices": [{"by": "topic", "margn": 0.1}]}, "a slice rule has no 'margn'; did you mean margin?"),
        ],
    )
    def test_a_mistake_in_the_rules_is_a_sentence(self, table: Mapping[str, Any], sentence: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            GateRules.from_mapping(table)
        assert sentence in str(caught.value)

    def test_slice_rules_may_be_records_already(self) -> None:
        rule = SliceRule("topic", margin=0.1)
        assert GateRules(lower_is_better="toxic").lower_is_better == ("toxic",)  # type: ignore[arg-type]  # as in TOML
        assert GateRules.from_mapping({"slices": [rule]}).slices == (rule,)
        with pytest.raises(ConfigurationError, match="slices are SliceRule records"):
            GateRules(slices=({"by": "topic"},))  # type: ignore[arg-type]  # that is the mistake

    def test_rules_and_baseline_must_fit(self) -> None:
        report = changed(10, 1, 1)
        with pytest.raises(ConfigurationError, match="the gate has no rules"):
            gate(report["terse"], GateRules())
        with pytest.raises(ConfigurationError, match="compares with a baseline; give one"):
            gate(report["terse"], GateRules(margin=0.02))
        with pytest.raises(ConfigurationError, match="no rule compares with it: set margin"):
            gate(report["terse"], GateRules(min_pass_rate=0.8), baseline=report["plain"])
        with pytest.raises(ConfigurationError, match=r'name one, as in gate\(report\["terse"\], rules\)'):
            gate(report, GateRules(min_pass_rate=0.8))


class TestRecords:
    def test_a_result_becomes_json(self) -> None:
        report = changed(100, 1, 5)
        result = gate(report["terse"], GateRules(margin=0.02, min_pass_rate=0.8), baseline=report["plain"])
        found = json.loads(json.dumps(result.to_json()))
        assert (found["status"], found["exit_code"], len(found["checks"])) == ("inconclusive", 3, 2)
        assert found["comparison"]["candidates"][0]["metrics"][0]["metric"] == "passed"

    def test_an_unfinished_run_is_mentioned(self) -> None:
        report = stored([1.0] * 100, status="interrupted")
        assert "Run r1 is not finished (interrupted)" in gate(report, {"min_pass_rate": 0.5}).warnings[0]
