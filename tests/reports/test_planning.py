"""Plans: how many samples and repeats, at what cost, from earlier runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, EvalReport, open_store, plan, stats
from fairtrial.base.formatting import round_samples
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.plan.plan import PlanRequest, SamplePlan, TrialCosts, plan_columns
from fairtrial.reports.plan.spread import HistorySide
from tests.reports.build import Trial, graded, stored


def pairs(wins: int, losses: int, ties: int, **given: Any) -> EvalReport:
    first = [0.0] * wins + [1.0] * losses + [1.0] * ties
    second = [1.0] * wins + [0.0] * losses + [1.0] * ties
    return stored({"old": first, "new": second}, **given)


def planned(
    *sides: tuple[str, str, Any], clusters: Sequence[int] | None = None, costs: TrialCosts | None = None,
    **given: Any,
) -> SamplePlan:  # fmt: skip
    """A plan from (run, experiment, passes) of earlier runs."""
    history = [
        HistorySide(Columns.of({"passed": passes}, clusters=clusters), f"{name} of {run}", run, name, (run, name))
        for run, name, passes in sides
    ]
    return plan_columns(history, PlanRequest(**({"difference": 0.05} | given)), costs=costs)


def random_passes(n: int, repeats: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.random((n, repeats)) < rng.beta(1.4, 0.6, n)[:, None]).astype(float)


class TestHistory:
    @pytest.mark.proves("R149")
    def test_two_experiments_on_the_same_samples_tell_how_often_they_disagree(self) -> None:
        found = plan(pairs(12, 8, 80))
        needed = stats.pairs_to_detect(0.2, 0.05)
        assert isinstance(needed, int)
        assert (found.samples, found.repeats) == (round_samples(needed), 1)
        assert found.unequal == pytest.approx(0.2)
        assert found.assumptions[0] == (
            "Earlier, new and old differed on 20 of 100 samples. A true difference of 5.0 points adds to that: 25.0% "
            "are assumed to differ."
        )
        assert "With 1 repeat, the 100 existing samples detect " in found.sentence

    def test_with_repeats_the_share_of_single_trials_that_differ_is_given(self) -> None:
        """More samples than single trials differ, because the means over repeats differ in smaller steps."""
        sides = [("r", name, random_passes(120, 3, seed)) for seed, name in enumerate(("old", "new"))]
        found = planned(*sides)
        assert found.unequal is not None
        assert f"Two single trials of a sample differ in {found.unequal:.1%} of cases. A true" in found.assumptions[0]
        assert f"adds to that: {found.unequal + 0.05:.1%} are assumed to differ" in found.assumptions[0]

    @pytest.mark.proves("R149")
    def test_the_difference_that_was_observed_plays_no_part(self) -> None:
        even, one_sided = plan(pairs(10, 10, 80)), plan(pairs(20, 0, 80))
        assert [option.samples for option in even.options] == [option.samples for option in one_sided.options]
        assert even.options[0].detectable == pytest.approx(one_sided.options[0].detectable)

    def test_experiments_of_two_runs_are_paired_by_sample(self) -> None:
        store = open_store("memory:")
        old = stored([0.0, 1.0] * 50, store=store, run_id="one", code_hash="a")
        new = stored([1.0, 1.0] * 15 + [0.0, 1.0] * 35, store=store, run_id="two", code_hash="b")
        found = plan(new, old)
        assert found.unequal == pytest.approx(0.15)
        assert "suite@2:baseline and suite@1:baseline" in found.assumptions[0]

    def test_runs_of_the_same_code_are_used_only_where_there_are_no_others(self) -> None:
        store = open_store("memory:")
        passes = [0.0, 1.0] * 50
        flipped = [1.0, 1.0] * 15 + [0.0, 1.0] * 35
        first = stored(passes, store=store, run_id="one", code_hash="a")
        again = stored(flipped, store=store, run_id="two", code_hash="a")
        alone = plan(again, first)
        assert "runs of the same code" in alone.assumptions[0]
        changed = stored([1.0] * 100, store=store, run_id="three", code_hash="b")
        both = plan(changed, again, first)
        assert "same code" not in both.assumptions[0]
        assert both.unequal == pytest.approx(0.35)

    def test_one_experiment_alone_is_doubled_and_that_is_said(self) -> None:
        found = plan(stored([1.0] * 80 + [0.0] * 20))
        assert found.unequal == pytest.approx(2 * 0.8 * 0.2)
        assert found.assumptions[0].startswith(
            "No two earlier runs have enough samples in common: the other side is assumed to be like baseline and to "
            "agree with it no more than chance."
        )

    def test_a_perfect_run_alone_is_not_taken_to_be_certain(self) -> None:
        found = plan(stored([1.0] * 40))
        assert found.unequal is not None
        assert 0.1 < found.unequal < 0.5

    def test_too_few_unequal_pairs_are_taken_at_the_upper_end(self) -> None:
        found = plan(pairs(2, 1, 97))
        high = stats.rate_interval(3, 100)
        assert isinstance(high, stats.Interval)
        assert found.unequal == pytest.approx(high.high, rel=0.02)
        assert "too few to tell how often" in found.assumptions[0]
        assert plan(pairs(0, 0, 100)).samples is not None

    @pytest.mark.proves("R149")
    def test_without_history_the_worst_case_is_assumed(self) -> None:
        found = plan()
        needed = stats.pairs_to_detect(0.5, 0.05)
        assert isinstance(needed, int)
        assert found.samples == round_samples(needed)
        assert found.present_samples is None
        assert "worst case" in found.assumptions[0]
        assert all(option.detectable is None and option.cost_usd is None for option in found.options)

    def test_the_worst_case_needs_at_least_what_any_history_does(self) -> None:
        assert (plan().samples or 0) >= (plan(pairs(24, 24, 52)).samples or math.inf)

    def test_a_metric_without_measurements_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="needs an earlier run that has it"):
            plan(metric="toxicity")
        with pytest.raises(ConfigurationError, match="must be one that an earlier run has"):
            plan(pairs(12, 8, 80), metric="toxicity")

    def test_a_metric_without_a_range_is_planned_from_its_spread(self) -> None:
        rng = np.random.default_rng(1)
        sides: dict[str, list[Trial]] = {
            name: [graded(1.0, words=float(value)) for value in rng.normal(100, 20, 60)] for name in ("old", "new")
        }
        found = plan(stored(sides), metric="words", difference=10.0)
        assert found.unequal is None
        assert found.options[0].se == pytest.approx(math.sqrt(2) * 20 / math.sqrt(60), rel=0.25)
        assert 40 < (found.samples or 0) < 120


class TestRepeats:
    def test_more_repeats_shrink_what_lies_within_samples_and_nothing_else(self) -> None:
        sides = [("r", name, random_passes(400, 5, seed)) for seed, name in enumerate(("old", "new"))]
        found = planned(*sides, repeats=(1, 3, 5, 1000))
        assert found.within is not None
        one, three, five, many = found.options
        assert one.samples is not None
        assert three.samples is not None
        assert five.samples is not None
        assert one.samples > three.samples > five.samples
        for option in (one, three, five):
            assert option.se == pytest.approx(math.sqrt((found.between + found.within / option.repeats) / 400))
        assert many.se == pytest.approx(math.sqrt(found.between / 400), rel=0.01)
        assert (one.trials or 0) < (three.trials or 0) < (five.trials or 0)

    @pytest.mark.parametrize("repeats", [1, 3, 5])
    def test_the_detectable_difference_and_the_needed_samples_agree(self, repeats: int) -> None:
        sides = [("r", name, random_passes(300, 5, seed)) for seed, name in enumerate(("old", "new"))]
        first = planned(*sides, repeats=(repeats,)).options[0]
        assert first.detectable is not None
        again = planned(*sides, repeats=(repeats,), difference=first.detectable).options[0]
        assert again.samples == pytest.approx(300, rel=0.05)

    def test_without_repeats_they_are_assumed_to_agree(self) -> None:
        found = plan(pairs(12, 8, 80))
        assert found.within is None
        assert len({option.samples for option in found.options}) == 1
        assert any(line.startswith("No earlier run has repeats") for line in found.assumptions)
        assert not any("repeats" in line for line in plan(pairs(12, 8, 80), repeats=1).assumptions)

    def test_samples_that_cost_more_than_trials_make_repeats_worth_while(self) -> None:
        sides = [("r", name, random_passes(400, 5, seed)) for seed, name in enumerate(("old", "new"))]
        costs = TrialCosts(100, 50.0, 0.01, 100.0, 10, complete=True)
        cheap, dear = (planned(*sides, costs=costs, sample_cost_usd=usd) for usd in (0.0, 2.0))
        assert cheap.best_repeats is None
        assert cheap.repeats == 1
        assert dear.within is not None
        assert dear.best_repeats == pytest.approx(math.sqrt(dear.within * 2.0 / (dear.between * 0.02)))
        assert dear.repeats > 1
        assert f"{dear.best_repeats:.1f} repeats cost least" in " ".join(dear.assumptions)

    def test_repeats_are_chosen_where_they_make_the_present_samples_enough(self) -> None:
        sides = [("r", name, random_passes(1500, 5, seed)) for seed, name in enumerate(("old", "new"))]
        found = planned(*sides, difference=0.04)
        one = found.options[0]
        assert one.samples is not None
        assert one.samples > 1500
        assert found.repeats == 3
        assert "The 1,500 existing samples are enough with 3 repeats." in found.sentence


class TestClusters:
    @pytest.mark.proves("R149")
    def test_the_answer_is_in_clusters_too(self) -> None:
        rng = np.random.default_rng(4)
        labels = np.repeat(np.arange(40), 5)
        chance = [rng.beta(2, 1, 40)[labels] for _ in "ab"]
        sides = [
            ("r", name, (rng.random(200) < p).astype(float)) for p, name in zip(chance, ("old", "new"), strict=True)
        ]
        found, alone = planned(*sides, clusters=labels.tolist()), planned(*sides)
        assert found.samples is not None
        assert alone.samples is not None
        assert found.clusters is not None
        assert found.clusters == math.ceil(found.samples / 5)
        assert found.samples > alone.samples
        assert f"{found.clusters:,} clusters like these" in found.sentence
        assert (
            found.assumptions[2]
            == "New samples come in new clusters like the 40 that were seen (5 samples on average)."
        )
        assert found.present_clusters == 40


class TestCosts:
    @pytest.mark.proves("R149")
    def test_costs_tokens_and_time_come_from_history_and_cover_both_sides(self) -> None:
        costs = TrialCosts(80, 1_200.0, 0.02, 1_500.0, 10, complete=False)
        found = planned(("r", "old", [0.0, 1.0] * 50), ("r", "new", [1.0, 1.0] * 10 + [0.0, 1.0] * 40), costs=costs)
        option = found.options[1]
        assert option.samples is not None
        assert option.trials == 2 * 3 * option.samples
        assert option.cost_usd == pytest.approx(option.trials * 0.02)
        assert option.tokens == 1_200 * option.trials
        assert option.duration_ms == pytest.approx(option.trials * 150.0)
        assert option.present_cost_usd == pytest.approx(2 * 3 * 100 * 0.02)
        assert f"for ${found.options[0].cost_usd:,.2f}." in found.sentence
        assert "a new run may cost more" in " ".join(found.assumptions)

    @pytest.mark.parametrize("priced", [True, False])
    def test_calls_without_any_known_price_are_named(self, priced: bool) -> None:
        costs = TrialCosts(80, 1_200.0, None, 1_500.0, 10, complete=True, priced=priced)
        found = planned(("r", "old", [0.0, 1.0] * 50), ("r", "new", [1.0, 1.0] * 50), costs=costs)
        assert ("The price of its calls is not known." in found.assumptions) is not priced

    def test_what_a_trial_takes_is_read_from_the_store(self) -> None:
        found = plan(pairs(12, 8, 80, config={"max_concurrent": 4}))
        assert found.costs is not None
        assert (found.costs.trials, found.costs.concurrency, found.costs.cost_usd) == (200, 4, None)
        assert found.costs.latency_ms == pytest.approx(10 + 199 / 2)
        assert "4 run at once" in " ".join(found.assumptions)


class TestRequests:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"difference": 0.0}, "the difference must be a number above 0"),
            ({"power": 1.0}, "power must be between 0 and 1"),
            ({"alpha": 0.0}, "alpha must be between 0 and 1"),
            ({"repeats": ()}, "repeats must be whole numbers of at least 1"),
            ({"repeats": 0}, "repeats must be whole numbers of at least 1"),
            ({"tests": 0}, "tests must be a whole number of at least 1"),
            ({"sample_cost_usd": -1.0}, "the cost of a sample must be at least 0"),
        ],
    )
    def test_invalid_plans_are_refused(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            plan(**given)

    def test_graded_values_make_two_tests_as_a_comparison_does(self) -> None:
        report = stored({"old": [0.4, 1.0] * 50, "new": [0.8, 1.0] * 20 + [0.4, 1.0] * 30})
        assert (plan(report).tests, plan(report, tests=1).tests, plan(pairs(12, 8, 80)).tests) == (2, 1, 1)
        assert (plan(report, metric="value").samples or 0) > (plan(report, metric="value", tests=1).samples or math.inf)

    def test_power_other_than_four_in_five_is_named(self) -> None:
        assert "in 90% of runs" in plan(power=0.9).sentence
        assert (plan(power=0.9).samples or 0) > (plan().samples or math.inf)


class TestShown:
    def test_it_says_the_answer_first_in_every_form(self) -> None:
        found = plan(pairs(12, 8, 80))
        assert isinstance(found, SamplePlan)
        assert repr(found) == f"<SamplePlan: {found.sentence}>"
        text = str(found)
        assert text.splitlines()[2].startswith("About 790 samples with 1 repeat: they detect a true difference of 5.0")
        assert "detectable with" in text
        assert "SE with" in text
        assert "About 790 samples with 1 repeat" in found.to_markdown()
        assert "<table" in found.to_html()
        record = found.to_json()
        assert record["format"] == "fairtrial.plan/1"
        assert record["samples"] == found.samples
        assert replace(found, suite="other").sentence == found.sentence

    def test_a_difference_that_the_present_samples_cannot_show_at_all_is_said(self) -> None:
        assert "even the largest difference might be missed" in plan(pairs(2, 1, 0), repeats=1).sentence


def test_a_difference_of_rates_in_points_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"must be below 1 \(got 5\): 0\.05 is five points"):
        PlanRequest(difference=5)
    with pytest.raises(ConfigurationError, match="must be below 1"):
        plan(difference=1, metric="passed:tone")
    assert PlanRequest(difference=5, metric="latency_ms").difference == 5
