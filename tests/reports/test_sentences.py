"""Sentences with figures in special cases: ties, one sample, few pairs, many slices."""

from __future__ import annotations

import numpy as np
import pytest

from fairtrial.base.formatting import rate
from fairtrial.reports import GateRules, SliceRule
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.estimates import estimates
from fairtrial.reports.gate.document import MOST_REASONS, gate_document
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.reports.leaderboard.leaderboard import rank_columns
from fairtrial.reports.plan.plan import PlanRequest, plan_columns
from fairtrial.reports.plan.spread import HistorySide
from fairtrial.reports.render.document import Remarks
from fairtrial.stats import BradleyTerry, Preference, bradley_terry


def passes(name: str, passed: int, n: int) -> Columns:
    return Columns.of({"passed": (np.arange(n) < passed).astype(float)}, name=name)


def side(name: str, passed: int, n: int) -> HistorySide:
    return HistorySide(passes(name, passed, n), name, name, name, (name, ""))


def test_a_share_is_rounded_the_same_however_it_was_added_up() -> None:
    assert rate(71 / 80) == rate(0.88749999999999996) == rate(sum([1 / 80] * 71)) == "88.8%"
    assert (rate(1 - 1e-9), rate(1e-9), rate(1.0)) == (">99.9%", "<0.1%", "100.0%")


class TestLeaderboards:
    def test_nobody_leads_in_a_tie(self) -> None:
        found = rank_columns({"d": [passes("old", 20, 20), passes("new", 20, 20)]})
        assert found.sentence == "passed: any of 2 systems may be the best; old and new lead with 100.0%."
        three = rank_columns({"d": [passes(name, 20, 20) for name in "abc"]})
        assert "a, b and c lead with 100.0%" in three.sentence

    def test_the_best_is_alone_at_its_level(self) -> None:
        found = rank_columns({"d": [passes("old", 10, 200), passes("new", 180, 200)]})
        assert found.sentence == "passed: new is the best of 2 systems with 90.0% (at 95%, no other may be)."


class TestPlans:
    def test_runs_that_say_nothing_are_not_called_none(self) -> None:
        assumed = plan_columns([side("old", 1, 1), side("new", 1, 1)], PlanRequest(difference=0.05)).assumptions
        assert any(line.startswith("The earlier runs have too few samples in common: worst case") for line in assumed)
        none = plan_columns([], PlanRequest(difference=0.05)).assumptions
        assert any(line.startswith("No earlier run: worst case assumed.") for line in none)

    @pytest.mark.parametrize(("n", "said"), [(1, "the 1 existing sample,"), (40, "the 40 existing samples detect ")])
    def test_existing_samples_are_counted_in_words_that_fit(self, n: int, said: str) -> None:
        text = plan_columns([side("old", n // 2, n), side("new", n // 2, n)], PlanRequest(difference=0.05)).sentence
        assert said in text
        if n > 1:
            assert text.endswith("or more. That is an upper bound: what flips few samples shows sooner.")


class TestComparisons:
    @pytest.mark.parametrize(("n", "said"), [(5, False), (6, True), (19, True)])
    def test_so_few_pairs_that_nothing_shows_are_not_said_to_show_large_differences(self, n: int, said: bool) -> None:
        found = compare_columns(passes("old", 1, n), [passes("new", n, n)])["new"]
        assert any("only large differences can be detected" in line for line in found.warnings) is said

    def test_several_equivalences_hold_each_on_its_own(self) -> None:
        base, shift = np.repeat([1.0, 0.0], [1600, 400]), np.tile([0.01, -0.01], 1000)
        sides = [
            Columns.of({"passed": base, "value": np.where(base, 0.8, 0.1) + sign * shift}, name=name)
            for name, sign in (("old", 0), ("new", 1))
        ]
        found = compare_columns(sides[0], [sides[1]])["new"]
        assert [metric.verdict for metric in found.metrics] == ["as good as", "as good as"]
        told = (
            "Whether a metric is as good is decided for each of 2 on its own: a wrong answer about one of several is "
            "more likely than about one alone."
        )
        assert told in found.warnings
        alone = compare_columns(sides[0], [sides[1]], metrics=["passed"])["new"]
        assert told not in alone.warnings

    def test_no_p_value_stands_beside_no_verdict(self) -> None:
        clusters = np.repeat(np.arange(5), [150, 10, 10, 10, 10])
        sides = [
            Columns.of({"passed": np.full(190, value)}, name=name, clusters=clusters)
            for name, value in (("old", 1.0), ("new", 0.0))
        ]
        found = compare_columns(sides[0], [sides[1]])["new"]["passed"]
        assert found.verdict == "unknown"
        assert "p " not in found.sentence
        assert found.p is not None

    def test_slices_whose_interval_and_verdict_seem_to_differ_are_explained(self) -> None:
        rng = np.random.default_rng(2)
        topics = [f"t{place % 40}" for place in range(1600)]
        old = (rng.random(1600) < 0.5).astype(float)
        new = old.copy()
        chosen = [place for place, topic in enumerate(topics) if topic == "t3"]
        new[chosen] = 0.0
        old[chosen] = [float(place % 5 == 0) for place in range(len(chosen))]
        sides = [
            Columns.of({"passed": values}, name=name, groups={"topic": topics})
            for name, values in (("old", old), ("new", new))
        ]
        found = compare_columns(sides[0], [sides[1]], metrics=["passed"], slice_by="topic")["new"]
        apart = [part for part in found.slices if part["passed"].high is not None and part["passed"].high < 0]
        assert len(apart) == 1
        assert apart[0]["passed"].verdict == "no detectable difference"
        assert (
            "1 slice has an interval without 0 and no verdict of a difference: among 40 slices that may be chance."
            in found.warnings
        )


def test_the_ends_of_pass_at_k_do_not_turn_back() -> None:
    rng = np.random.default_rng(4)
    for _ in range(30):
        passed = (rng.random((12, 6)) < rng.beta(4, 1, 12)[:, None]).astype(float)
        found = {one.name: one for one in estimates(Columns.of({"passed": passed}))}
        lows = [found[f"pass@{k}"].low or 0.0 for k in range(2, 7)]
        highs = [found[f"pass^{k}"].high or 1.0 for k in range(2, 7)]
        assert lows == sorted(lows)
        assert highs == sorted(highs, reverse=True)


class TestOneOrder:
    def test_a_system_that_is_always_shown_first_is_not_called_the_best(self) -> None:
        found = bradley_terry([Preference("a", "b", "a", place) for place in range(40)])
        assert isinstance(found, BradleyTerry)
        assert [one.rank_low for one in found.systems] == [1, 1]
        assert found.notes[0] == (
            "a was always shown first, and judges prefer places: ask in both orders, or set order_effect."
        )

    def test_both_orders_decide(self) -> None:
        both = [Preference(*order, "a", place) for place in range(40) for order in (("a", "b"), ("b", "a"))]
        found = bradley_terry(both)
        assert isinstance(found, BradleyTerry)
        assert (found.systems[0].name, found.systems[0].rank_high) == ("a", 1)
        assert not any("always shown" in note for note in found.notes)


@pytest.mark.parametrize(
    ("slices", "said"), [(7, None), (50, "Of all 50 rules, the decision is: 50 inconclusive; the table lists each.")]
)
def test_a_gate_of_many_slices_sums_up_its_reasons(slices: int, said: str | None) -> None:
    n = 10 * slices
    topics = [f"t{place % slices}" for place in range(n)]
    columns = Columns.of({"passed": (np.arange(n) // slices % 2).astype(float)}, groups={"topic": topics})
    result = gate_columns(columns, GateRules(slices=(SliceRule("topic", min_pass_rate=0.5),)))
    assert len(result.reasons) == slices
    reasons = [line for block in gate_document(result, 0).blocks if isinstance(block, Remarks) for line in block.lines]
    shown = [line for line in reasons if "[topic = " in line]
    assert len(shown) == (6 if said is None else MOST_REASONS - 1)
    assert (said in reasons) is (said is not None)
