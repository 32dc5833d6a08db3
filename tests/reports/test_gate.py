"""A gate: pass, fail or inconclusive, from intervals, with reasons and what it would take to decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fairtrial import EvalReport, GateRules, gate, stats
from fairtrial.base import formatting
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.rules import SliceRule
from fairtrial.reports.gate.gate import gate_columns
from tests.reports.build import Trial, graded, stored

pytestmark = pytest.mark.proves("R103", "R114")


def share(passes: int, of: int) -> list[Trial]:
    return [1.0] * passes + [0.0] * (of - passes)


def changed(n: int, wins: int, losses: int) -> EvalReport:
    """Two experiments that differ on some samples; on the others both pass."""
    rest = n - wins - losses
    return stored(
        {"plain": [0.0] * wins + [1.0] * losses + [1.0] * rest, "terse": [1.0] * wins + [0.0] * losses + [1.0] * rest}
    )


class TestFloors:
    @pytest.mark.parametrize(
        ("passes", "status", "code"), [(180, "pass", 0), (162, "inconclusive", 3), (140, "fail", 1)]
    )
    def test_a_floor_is_compared_with_the_interval(self, passes: int, status: str, code: int) -> None:
        result = gate(stored(share(passes, 200)), GateRules(min_pass_rate=0.8))
        check = result.checks[0]
        expected = stats.clopper_pearson(passes, 200)
        assert isinstance(expected, stats.Interval)
        assert (result.status, result.exit_code, result.passed) == (status, code, status == "pass")
        assert (check.low, check.high, check.n, check.bound) == pytest.approx((expected.low, expected.high, 200, 0.8))
        assert (check.needed is not None) == (status == "inconclusive")

    def test_the_reason_has_the_numbers_and_what_a_stated_rate_would_take(self) -> None:
        result = gate(stored(share(162, 200)), {"min_pass_rate": 0.8})
        assert result.reasons == (
            "pass rate 81.0% (exact 95% interval 74.9% to 86.2%, 200 samples): the interval contains 80.0%: "
            "inconclusive. If the true pass rate is 85.0%, it takes about 490 samples to show at least 80.0%.",
        )
        assert result.needed == result.checks[0].needed
        assert result.checks[0].needed_if == "the true pass rate is 85.0%"

    def test_an_interval_that_differs_from_the_reports_is_called_exact(self) -> None:
        for passes, word in ((23, "(exact 95% interval 42.1% to 74.4%,"), (35, "(95% interval 75.8% to 97.1%,")):
            report = stored({"only": [1.0] * passes + [0.0] * (39 - passes)})
            (reason,) = gate(report, {"min_pass_rate": 0.5}).reasons
            assert word in reason

    def test_the_number_of_samples_does_not_depend_on_the_rate_that_was_seen(self) -> None:
        rules = GateRules(min_pass_rate=0.8, smallest_difference_that_matters=0.1)
        assert len({gate(stored(share(passes, 40)), rules).needed for passes in (30, 32, 35)}) == 1

    @pytest.mark.parametrize("floor", [0.5, 0.8, 0.95])
    def test_the_named_number_of_samples_passes_four_times_in_five(self, floor: float) -> None:
        needed = stats.samples_to_reach(floor + 0.04, floor)
        assert isinstance(needed, int)
        passed = [stats.exact_rate_interval(passes / needed, needed).low >= floor for passes in range(needed + 1)]
        chances = scipy_stats.binom.pmf(np.arange(needed + 1), needed, floor + 0.04)
        assert 0.78 <= float(chances[np.array(passed)].sum()) <= 0.91  # Few samples come in steps.

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
        assert (close.status, close.needed) == ("inconclusive", None)  # Nobody said what difference in words matters.
        matters = {"words": 0.5}
        close = gate(stored(trials), GateRules(ceilings={"words": 100.5}, smallest_difference_that_matters=matters))
        assert close.needed is not None
        assert close.needed > 50
        assert "If the true words is 100.0, it takes about" in close.reasons[0]

    def test_a_timeout_is_the_worst_a_ceiling_can_meet(self) -> None:
        trials: list[Trial] = [graded(1, toxic=0.1)] * 20
        rules = GateRules(ceilings={"toxic": 0.3}, bounds={"toxic": (0, 1)})
        assert gate(stored([*trials, *["timeout"] * 20]), rules).checks[0].value == 0.55

    @pytest.mark.parametrize("trials", [[], ["scorer_error"] * 3])
    def test_nothing_decides_nothing(self, trials: Sequence[Trial]) -> None:
        result = gate(stored(trials), GateRules(min_pass_rate=0.8))
        assert (result.status, result.needed) == ("inconclusive", None)
        told = "3 of 3 trials (100.0%) have no number for it" if trials else "no trial of baseline has a value for it"
        assert told in result.reasons[0]

    @pytest.mark.parametrize(
        "rules",
        [
            {"floors": {"helpfulness": 0.5}},
            {"ceilings": {"p95:helpfulness": 2}},
            {"slices": [{"by": "kind", "floors": {"helpfulness": 0.5}}]},
        ],
    )
    def test_a_metric_that_no_trial_has_is_refused_with_the_names_of_the_metrics(
        self, rules: Mapping[str, Any]
    ) -> None:
        report = stored([graded(1, helpful=0.7)] * 4, metadata=[{"kind": "a"}] * 4)
        told = "no metric 'helpfulness': the metrics are helpful, passed, value; did you mean 'helpful'\\?"
        with pytest.raises(ConfigurationError, match=told):
            gate(report, rules)

    def test_a_metric_that_some_trials_lack_is_inconclusive_and_not_refused(self) -> None:
        some = stored([graded(1, helpful=0.7), *share(3, 3)])
        assert gate(some, GateRules(floors={"helpful": 0.5})).status == "inconclusive"
        none_scored = stored(["scorer_error"] * 3)
        assert gate(none_scored, GateRules(floors={"helpful": 0.5})).status == "inconclusive"

    def test_a_rule_without_an_interval_is_inconclusive(self) -> None:
        one_cluster = stored([1.0] * 5, metadata=[{"cluster": 1}] * 5)
        result = gate(one_cluster, GateRules(min_pass_rate=0.5))
        assert (result.status, result.needed) == ("inconclusive", None)
        assert "All samples are in one cluster" in result.reasons[0]
        flat = gate(stored([graded(1, words=7.0)] * 3), GateRules(floors={"words": 5}))
        assert flat.status == "inconclusive"


class TestMargins:
    @pytest.mark.parametrize(
        ("wins", "losses", "status"), [(12, 10, "pass"), (2, 30, "fail"), (8, 14, "inconclusive"), (40, 2, "pass")]
    )
    def test_a_margin_is_compared_with_the_interval_of_the_difference(
        self, wins: int, losses: int, status: str
    ) -> None:
        report = changed(400, wins, losses)
        result = gate(report["terse"], GateRules(margin=0.03), baseline=report["plain"])
        check = result.checks[0]
        expected = stats.bonett_price(wins, losses, 400)
        assert isinstance(expected, stats.Interval)
        assert result.status == status
        assert (check.kind, check.low, check.high) == ("margin", expected.low, expected.high)
        assert check.p == max(stats.mcnemar_midp(wins, losses), stats.bonett_price_p(wins, losses, 400))
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
            "passed of terse against plain: -1.5 points (95% interval -3.9 to +0.9 points, 400 pairs): it may or "
            "may not be worse by more than 3.0 points. If the two are truly equal, it takes about 500 samples to show "
            "that within 3.0 points.",
        )
        assert "inconclusive: passed of terse against plain: -1.5 points" in str(result)

    @pytest.mark.parametrize(("wins", "losses"), [(6, 6), (7, 5), (4, 8)])
    def test_the_named_number_of_pairs_passes_if_the_two_are_equal(self, wins: int, losses: int) -> None:
        report = changed(200, wins, losses)
        result = gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"])
        assert result.status == "inconclusive"
        assert (
            result.needed
            == gate(changed(200, 6, 6)["terse"], GateRules(margin=0.02), baseline=changed(200, 6, 6)["plain"]).needed
        )
        assert result.needed is not None
        rng = np.random.default_rng(1)
        found = rng.multinomial(result.needed, [0.03, 0.03, 0.94], size=2000)
        lows = [stats.bonett_price(won, lost, result.needed).low for won, lost, _ in found.tolist()]  # type: ignore[union-attr]
        assert 0.77 <= np.mean(np.array(lows) > -0.02) <= 0.86

    def test_few_unequal_pairs_name_no_number(self) -> None:
        for wins, losses in ((0, 0), (1, 0), (5, 4)):
            report = changed(40, wins, losses)
            result = gate(report["terse"], GateRules(margin=0.02), baseline=report["plain"])
            assert (result.status, result.needed) == ("inconclusive", None)
            assert "it takes" not in result.reasons[0]

    @pytest.mark.proves("R150")
    def test_a_loss_that_may_be_within_the_margin_does_not_fail(self) -> None:
        report = changed(1000, 30, 70)
        result = gate(report["terse"], GateRules(margin=0.05), baseline=report["plain"])
        check = result.checks[0]
        assert check.high is not None
        assert check.low is not None
        assert check.low < -0.05 < check.high < 0
        assert result.status == "inconclusive"
        assert "it is worse, but whether by more than 5.0 points is inconclusive." in result.reasons[0]

    def test_a_failed_margin_says_by_how_much_at_least(self) -> None:
        report = changed(400, 2, 60)
        result = gate(report["terse"], GateRules(margin=0.05), baseline=report["plain"])
        assert result.status == "fail"
        assert result.reasons[0].endswith(": at least 10.8 points worse, more than the 5.0 points allowed.")

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
        higher = replace(rules, lower_is_better=(), higher_is_better=("errors",))
        assert gate_columns(columns[1], higher, columns[0]).status == "pass"

    def test_too_few_clusters_decide_no_margin(self) -> None:
        labels = np.repeat(np.arange(5), [150, 10, 10, 10, 10])
        rng = np.random.default_rng(6)
        old, new = (
            Columns.of({"passed": (rng.random(190) < rate).astype(float)}, name=name, clusters=labels)
            for name, rate in (("old", 0.9), ("new", 0.88))
        )
        result = gate_columns(new, GateRules(margin=0.5), old)
        assert result.status == "inconclusive"
        assert "cannot be decided: " in result.reasons[0]

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
    """A number of samples is named for a stated truth, in the unit of its rule."""

    def test_a_slice_needs_samples_of_its_own(self) -> None:
        topics = ["rare"] * 40 + ["common"] * 960
        passes = np.array(share(33, 40) + share(790, 960))
        candidate = Columns.of({"passed": passes}, groups={"topic": topics})
        found = gate_columns(
            candidate, GateRules(min_pass_rate=0.8, slices=(SliceRule("topic", "rare", min_pass_rate=0.8),))
        )
        whole, rare = found.checks
        assert (whole.needed, found.needed) == (None, None)  # There are more samples than five points more would take.
        assert rare.needed == 483
        assert "it takes about 490 samples of this slice to show" in rare.reason

    def test_clusters_are_counted_in_clusters(self) -> None:
        rng = np.random.default_rng(3)
        passes = (rng.random(400) < np.repeat(rng.beta(6, 2, 20), 20)).astype(float)
        candidate = Columns.of({"passed": passes}, clusters=np.repeat(np.arange(20), 20))
        check = gate_columns(candidate, GateRules(min_pass_rate=round(float(passes.mean()), 2))).checks[0]
        assert check.needed is not None
        assert check.needed_clusters == -(-check.needed * 20 // 400)
        assert f"it takes about {formatting.samples_text(check.needed_clusters)} clusters like these (" in check.reason

    def test_a_margin_is_broken_only_allowing_for_the_floors_beside_it(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [10, 25, 165])  # p = .012.
        sides = [
            {"passed": np.maximum(sign * change, 0.0), **{f"m{place}": np.ones(200) for place in range(9)}}
            for sign in (-1, 1)
        ]
        shares = {f"m{place}": (0.0, 1.0) for place in range(9)}
        baseline, candidate = (
            Columns.of(values, name=name, ranges=shares) for values, name in zip(sides, "ab", strict=True)
        )
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
        assert both.reasons[0].endswith(
            "This run stopped by its own rule: to decide this, run a planned number of samples without stop_when."
        )

    def test_less_being_better_needs_as_many(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [8, 14, 178])
        up, down = (
            Columns.of(
                {"passed": np.ones(200), "hit": np.maximum(sign * change, 0.0)}, name=name, ranges={"hit": (0.0, 1.0)}
            )
            for name, sign in (("b", 1), ("a", -1))
        )
        more = gate_columns(up, GateRules(margins={"hit": 0.03}, higher_is_better=("hit",)), down)
        less = gate_columns(down, GateRules(margins={"hit": 0.03}, lower_is_better=("hit",)), up)
        assert more.needed is not None
        assert more.needed == less.needed


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
    def test_a_slice_without_samples_is_inconclusive(self, rule: SliceRule) -> None:
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
        assert any(
            "missed on its own, but not clearly enough for one of 10 rules" in reason for reason in among.reasons
        )

    def test_one_of_many_margins_must_be_broken_clearly(self) -> None:
        metadata = [{"topic": place // 50} for place in range(500)]
        base: list[Trial] = [1.0] * 500
        report = stored({"plain": base, "terse": [*[0.0] * 6, *base[6:]]}, metadata=metadata)
        one, every = SliceRule("topic", 0, margin=0.01), SliceRule("topic", margin=0.01)
        alone, among = (gate(report["terse"], GateRules(slices=(rule,)), report["plain"]) for rule in (one, every))
        assert alone.status == "fail"
        assert among.status == "inconclusive"
        assert any("on its own, but not clearly enough for one of 10 rules" in text for text in among.reasons)

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
        assert result.reasons[0].endswith(
            "cannot be decided: 7 of 100 trials (7.0%) have no number for it, more than the 5.0% that is allowed: "
            "finish the run, or repair its scoring."
        )
        assert str(result).count("7.0%") == 1

    def test_the_limit_can_be_moved(self) -> None:
        report = stored([*[1.0] * 96, *["scorer_error"] * 4])
        assert gate(report, GateRules(min_pass_rate=0.5)).status == "pass"
        assert gate(report, GateRules(min_pass_rate=0.5, max_missing_share=0.01)).status == "inconclusive"

    @pytest.mark.proves("R150")
    def test_a_pass_must_hold_with_what_is_missing_at_its_worst(self) -> None:
        report = stored([*[1.0] * 96, *["scorer_error"] * 4])
        result = gate(report, GateRules(min_pass_rate=0.93))
        worst, best = stats.clopper_pearson(96, 100), stats.clopper_pearson(100, 100)
        assert isinstance(worst, stats.Interval)
        assert isinstance(best, stats.Interval)
        assert (result.checks[0].low, result.checks[0].high) == pytest.approx((worst.low, best.high))
        assert result.status == "inconclusive"
        assert "96 samples, whatever the 4 missing would have been)" in result.reasons[0]
        at_random = gate(report, GateRules(min_pass_rate=0.93, max_missing=0.05))
        assert at_random.status == "pass"
        assert at_random.checks[0].missing_at_random
        assert at_random.reasons[0].endswith("This assumes that the 4 missing are like the others.")

    def test_one_missing_pair_is_an_assumption_too(self) -> None:
        old, new = stored([1.0] * 100), stored([*[1.0] * 99, "scorer_error"])
        (check,) = gate(new, GateRules(margin=0.1, max_missing=0.05), baseline=old).checks
        assert (check.missing, check.missing_at_random) == (1, True)
        (check,) = gate(old, GateRules(margin=0.1, max_missing=0.05), baseline=old).checks
        assert (check.missing, check.missing_at_random) == (0, False)

    def test_a_failure_must_hold_with_what_is_missing_at_its_best(self) -> None:
        report = stored([*share(69, 96), *["scorer_error"] * 4])
        assert gate(report, GateRules(min_pass_rate=0.81)).status == "inconclusive"
        assert gate(report, GateRules(min_pass_rate=0.81, max_missing=0.05)).status == "fail"

    @pytest.mark.proves("R150")
    def test_a_margin_must_hold_with_what_is_missing_at_its_worst(self) -> None:
        base: list[Trial] = [1.0] * 400
        report = stored({"plain": base, "terse": [*base[:390], *["scorer_error"] * 10]})
        result = gate(report["terse"], GateRules(margin=0.03), baseline=report["plain"])
        worst = stats.paired_rates_interval(0, 10, 400)
        assert result.checks[0].low == pytest.approx(worst.low)
        assert result.status == "inconclusive"
        rules = GateRules(margin=0.03, max_missing=0.05)
        assert gate(report["terse"], rules, baseline=report["plain"]).status == "pass"

    def test_what_the_baseline_misses_counts_too(self) -> None:
        report = stored({"plain": [*[1.0] * 90, *["dead_letter"] * 10], "terse": [1.0] * 100})
        result = gate(report["terse"], GateRules(margin=0.5), baseline=report["plain"])
        assert result.status == "inconclusive"
        assert result.missing_share == pytest.approx(0.1)

    def test_a_slice_half_of_which_is_missing_is_not_decided(self) -> None:
        trials: list[Trial] = [*["scorer_error"] * 20, *[1.0] * 980]
        report = stored(trials, metadata=[{"topic": "rare" if place < 40 else "common"} for place in range(1000)])
        result = gate(report, GateRules(slices=(SliceRule("topic", "rare", min_pass_rate=0.3),)))
        assert result.status == "inconclusive"
        assert result.missing_share == 0.5
        own = GateRules(slices=(SliceRule("topic", "rare", min_pass_rate=0.3, max_missing=0.6),))
        assert gate(report, own).status == "pass"

    def test_samples_that_were_never_run_may_belong_to_any_slice(self) -> None:
        report = stored([1.0] * 50, metadata=[{"topic": "rare"}] * 50, planned=60)
        result = gate(report, GateRules(slices=(SliceRule("topic", "rare", min_pass_rate=0.5),)))
        assert (result.status, result.checks[0].missing) == ("inconclusive", 10)

    def test_a_metric_that_few_trials_have_is_not_decided(self) -> None:
        values = np.where(np.arange(1000) < 100, 0.9 + np.arange(1000) % 10 / 100, np.nan)
        sides = [Columns.of({"passed": np.ones(1000), "faithful": values}, name=name) for name in ("a", "b")]
        assert gate_columns(sides[0], GateRules(floors={"faithful": 0.8})).missing_share == 0.9
        rules = GateRules(margins={"faithful": 0.1}, higher_is_better="faithful")  # type: ignore[arg-type]  # as in TOML
        result = gate_columns(sides[0], rules, sides[1])
        assert (result.status, result.missing_share) == ("inconclusive", 0.9)

    def test_without_declared_bounds_one_missing_number_is_enough(self) -> None:
        good = [graded(1, words=80.0 + place) for place in range(40)]
        report = stored([*good[:39], "timeout"])
        result = gate(report, GateRules(floors={"words": 50}))
        assert result.status == "inconclusive"
        assert (
            "1 of 40 trials has no number for it, and without declared bounds it could be anything"
            in (result.reasons[0])
        )
        assert gate(report, GateRules(floors={"words": 50}, bounds={"words": (0, 200)})).status == "pass"
        assert gate(report, GateRules(floors={"words": 50}, max_missing=0.05)).status == "pass"
        with pytest.raises(ConfigurationError, match=r"bounds.words must contain every number .* \(got 101, outside"):
            gate(report, GateRules(floors={"words": 50}, bounds={"words": (0, 100)}))

    def test_warm_up_trials_are_no_missing_latencies(self) -> None:
        latency = np.array([np.nan, np.nan, *(100.0 + place for place in range(48))])
        found = gate_columns(
            Columns.of({"passed": np.ones(50), "latency_ms": latency}), GateRules(ceilings={"latency_ms": 200})
        )
        assert (found.status, found.checks[0].missing) == ("pass", 0)
