"""Sentences with figures in special cases: ties, one sample, few pairs, many slices."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fairtrial import calibrate
from fairtrial.base.formatting import rate
from fairtrial.reports import GateRules, SliceRule
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.estimates import estimates
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.reports.gate.document import MOST_REASONS, gate_document
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.reports.leaderboard.leaderboard import rank_columns
from fairtrial.reports.plan.plan import PlanRequest, plan_columns
from fairtrial.reports.plan.spread import HistorySide
from fairtrial.reports.render.document import Remarks
from fairtrial.stats import BradleyTerry, Preference, bradley_terry
from tests.reports import sentence_cases_watch  # noqa: F401 - registers its cases
from tests.reports.sentence_cases import CASES, columns, compared, draw, gated, history, long_tail, passes, shown
from tests.reports.sentence_cases_more import JUDGED, judged, people
from tests.reports.sentence_templates import pattern, templates


def passing(name: str, passed: int, n: int) -> Columns:
    return Columns.of({"passed": (np.arange(n) < passed).astype(float)}, name=name)


def side(name: str, passed: int, n: int) -> HistorySide:
    return HistorySide(passing(name, passed, n), name, name, name, (name, ""))


def test_a_share_is_rounded_the_same_however_it_was_added_up() -> None:
    assert rate(71 / 80) == rate(0.88749999999999996) == rate(sum([1 / 80] * 71)) == "88.8%"
    assert (rate(1 - 1e-9), rate(1e-9), rate(1.0)) == (">99.9%", "<0.1%", "100.0%")


class TestLeaderboards:
    def test_nobody_leads_in_a_tie(self) -> None:
        found = rank_columns({"d": [passing("old", 20, 20), passing("new", 20, 20)]})
        assert found.sentence == "passed: any of 2 systems may be the best; old and new lead with 100.0%."
        three = rank_columns({"d": [passing(name, 20, 20) for name in "abc"]})
        assert "a, b and c lead with 100.0%" in three.sentence

    def test_the_best_is_alone_at_its_level(self) -> None:
        found = rank_columns({"d": [passing("old", 10, 200), passing("new", 180, 200)]})
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
        found = compare_columns(passing("old", 1, n), [passing("new", n, n)])["new"]
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


# Every sentence that states a figure is printed by a case, and says only what its figures show.
#
# `sentences.toml` lists the templates of the source under the case that prints them. After a change of a sentence,
# `FAIRTRIAL_GOLDEN=write pytest tests/reports/test_sentences.py` writes the list anew; a sentence that no case prints
# needs a case first.


LIST = Path(__file__).with_name("sentences.toml")

OTHERS = {
    "\\multicolumn{{}}{l}{\\textit{{}}} \\\\": "a row of a LaTeX table",
    "The gate could not be recorded in run {}: {}": "a warning about the store",
    "{}:{} in {}": "the place of an error",
    "did you mean {}?": "part of an error",
    "there are {}": "part of an error",
    "the slice rule for {}": "part of an error",
    "; did you mean {}?": "part of an error",
    "{} not given": "the name of a slice",
    ", the first {} shown": "the heading of a list of trials",
    "{} by slice, {}{}": "the title of a drawing",
    "{} with {}{}\n{}": "one trial and its output",
    "Only the first {} of {} errors were grouped.": "needs thousands of errors",
    "mean of {}": "the name of a figure",
    "{}, started {}{}{}": "the heading of a run",
    "pass rate of {}": "the name of a figure",
    "{} plain samples": "a cell of the table of a history",
    "By the history of {}": "the heading of that table",
    "The history is not used{}. {}": "in tests/reports/test_figures.py",
    " p-values are adjusted for {} tests.": "in tests/reports/test_answer.py",
    "All failures differ from the expected value by type only, such as {} from {}: convert the output in the task, or "
    "the values of the dataset.": "in tests/first_hour/mistakes/datasets.py",
    "golden set  {}{}": "the heading of a golden set",
    "{} agrees with {} of {}{}.": "in tests/cli/test_decide.py",
}
"""Templates that are no sentences about figures, with the reason."""


@cache
def printed(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for text in CASES[name]() for line in str(text).split("\n")))


def prints(name: str, template: str) -> bool:
    return any(pattern(template).search(line) for line in printed(name))


def read_list() -> dict[str, str]:
    listed: Mapping[str, list[str]] = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return {text: name for name, texts in listed.items() for text in texts}


def write_list() -> None:
    """Write the list: each template under its present case if that still prints it, else under the first that does."""
    old = read_list() if LIST.exists() else {}
    lines = ["# The sentence templates of the source by the case that prints them, {} being a placeholder."]
    under: dict[str, list[str]] = {}
    for text in sorted(templates() - OTHERS.keys()):
        names = [old[text]] if text in old else []
        name = next((name for name in (*names, *CASES) if name in CASES and prints(name, text)), None)
        assert name is not None, f"no case prints {text!r}"
        under.setdefault(name, []).append(text)
    for name in filter(under.get, CASES):
        lines += ["", f"{name} = [", *(f"    {json.dumps(text, ensure_ascii=False)}," for text in under[name]), "]"]
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")


if os.environ.get("FAIRTRIAL_GOLDEN") == "write":
    write_list()


def test_every_sentence_with_a_figure_is_listed() -> None:
    listed = read_list()
    assert sorted(templates() - listed.keys() - OTHERS.keys()) == [], "sentences without a case"
    assert sorted((listed.keys() | OTHERS.keys()) - templates()) == [], "sentences that are no longer in the source"
    assert listed.keys().isdisjoint(OTHERS)
    assert set(listed.values()) == set(CASES), "cases that print no sentence of their own"


@pytest.mark.parametrize("name", CASES)
def test_a_case_prints_its_sentences(name: str) -> None:
    own = [text for text, case in read_list().items() if case == name]
    assert [text for text in own if not prints(name, text)] == []


def said(lines: Iterable[str]) -> str:
    return "\n".join(lines)


class TestIndefensibleSentences:
    """Eight situations in which an earlier version said what its figures did not show."""

    def test_as_good_as_is_not_said_while_missing_outcomes_could_undo_it(self) -> None:
        outcomes = np.where(np.arange(1000) < 45, MISSING, SCORED)
        sides = passes("old", 900, 1000), passes("new", 900, 1000, outcomes=outcomes)
        text = said(compared(*sides, smallest_difference_that_matters=0.02))
        assert "as good as" not in text
        assert "no detectable difference between new and old" in text
        assert "4.5% of the trials or pairs are missing" in text
        assert "Whatever they would have been, the interval of the difference is -" in text

    def test_means_of_long_tails_are_not_called_different(self) -> None:
        old, new = (columns(name, long_tail(sigma, 100), "latency_ms") for name, sigma in (("old", 2), ("new", 1)))
        text = said(compared(old, new, "latency_ms"))
        assert "than old" not in text
        assert "no verdict on new and old" in text
        assert "a difference of means is not reliable. Compare median:latency_ms" in text

    def test_crashes_are_no_dollars_and_are_said_to_be_left_out(self) -> None:
        """Numbers 20 and 21: a crash counted as 1 dollar, or silently not at all."""
        fees = np.random.default_rng(3).lognormal(-5, 0.5, 200)
        crashed = np.where(np.arange(200) % 20 == 0, FAILED, SCORED)
        sides = columns("old", fees, "fee_usd"), columns("new", fees / 2, "fee_usd", outcomes=crashed)
        text = said(compared(*sides, "fee_usd", lower_is_better=frozenset({"fee_usd"})))
        assert "new is better than old" in text
        assert "new is worse" not in text
        left_out = "fee_usd has no worst value: 10 failed trials could not be counted in it, which leaves 190 pairs."
        assert left_out in text
        assert "10 trials ended in a task error or timeout. fee_usd has no worst value" in text  # Nor do methods.

    def test_better_after_an_early_stop_has_an_interval_without_0(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [20, 5, 175])
        sides = [
            Columns.of({"passed": np.maximum(sign * change, 0.0)}, name=name, adaptive=200)
            for sign, name in ((-1, "old"), (1, "new"))
        ]
        text = said(compared(*sides))
        assert re.search(
            r"new is better than old: .* \(95% interval \+\S+ to \+\S+ points\), p = 0.0\d+\. The size", text
        )

    def test_runs_that_tell_nothing_are_not_called_no_run(self) -> None:
        text = said(history(("r2", "old", [1.0]), ("r1", "old", [1.0])))
        assert "No earlier run" not in text.replace("No earlier run has repeats", "")
        assert "The earlier runs have too few samples in common: worst case assumed." in text

    def test_nobody_leads_a_tie(self) -> None:
        text = said(shown(rank_columns({"d": [passes("old", 20, 20), passes("new", 20, 20)]})))
        assert "any of 2 systems may be the best; old and new lead with 100.0%." in text
        assert "P(best)" not in text  # It would look like a ranking of systems that nothing ranks.

    def test_labels_of_fails_alone_give_no_sensitivity(self) -> None:
        found = calibrate(judged(), people(np.flatnonzero(~JUDGED)[:40].tolist()))
        for figure in (found.sensitivity, found.specificity, found.agreement, found.kappa, found.corrected):
            assert (figure.value, figure.low, figure.high) == (None, None, None)
            assert "do not look like a random sample" in (figure.note or "")
        assert "These labels do not show what people would say; the judge says " in said(shown(found))


@pytest.mark.parametrize(("best", "shown_too"), [(100, False), (10, True)])
def test_p_best_is_shown_where_some_system_cannot_be_the_best(best: int, shown_too: bool) -> None:
    record = rank_columns({"d": [passes("a", 100, 120), passes("b", 98, 120), passes("c", best, 120)]})
    assert ("P(best)" in said(shown(record))) is shown_too
    assert all(entry.best is not None for entry in record.systems)


def test_those_who_would_lead_without_errors_do_not_include_who_leads() -> None:
    crashed = np.where(np.arange(100) < 30, FAILED, SCORED)
    sides = [passes("old", 100, 100, outcomes=crashed), passes("new", 100, 100)]
    assert "would lead" not in said(shown(rank_columns({"d": sides})))


def test_margins_of_ratios_are_shares_wherever_they_are_named() -> None:
    old, new = (
        columns(name, 100.0 + 90 * draw(seed, 0.5, 40), "latency_ms") for seed, name in ((1, "old"), (2, "new"))
    )
    text = said(gated(new, old, margins={"geomean:latency_ms": 0.1}))
    assert re.search(r"to show that within 10\.0%\.", text)


def test_no_plan_names_a_number_of_samples_at_which_the_search_ended() -> None:
    text = said(history(difference=1e-9))
    assert "No feasible number of samples is enough" in text
    assert "000,000,000" not in text
