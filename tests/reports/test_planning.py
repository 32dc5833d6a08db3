"""Plans: how many samples to take, and runs held against a plan."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.coverage_designs import Design, Finding
from benchmarks.coverage_designs._run import measure_designs
from benchmarks.coverage_designs.power import designs
from fairtrial import ConfigurationError, Dataset, EvalSuite, compare, exact_match, gate, open_store, plan, stats
from fairtrial.base.formatting import round_samples
from fairtrial.reports import AnalysisPlan, EvalReport, GateRules
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.plan.plan import PlanRequest, SamplePlan, TrialCosts, plan_columns
from fairtrial.reports.plan.spread import HistorySide
from fairtrial.stats import holm
from fairtrial.store.notes import PlanNote, write_notes
from fairtrial.trials import EvalConfig, Experiment, StopWhen, TrialContext
from tests.reports.build import Trial, graded, stored
from tests.reports.sides import GRADED, one, planned

# Plans: how many samples and repeats, at what cost, from earlier runs.


def pairs(wins: int, losses: int, ties: int, **given: Any) -> EvalReport:
    first = [0.0] * wins + [1.0] * losses + [1.0] * ties
    second = [1.0] * wins + [0.0] * losses + [1.0] * ties
    return stored({"old": first, "new": second}, **given)


def sample_plan(
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
        found = sample_plan(*sides)
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
        found = sample_plan(*sides, repeats=(1, 3, 5, 1000))
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
        first = sample_plan(*sides, repeats=(repeats,)).options[0]
        assert first.detectable is not None
        again = sample_plan(*sides, repeats=(repeats,), difference=first.detectable).options[0]
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
        cheap, dear = (sample_plan(*sides, costs=costs, sample_cost_usd=usd) for usd in (0.0, 2.0))
        assert cheap.best_repeats is None
        assert cheap.repeats == 1
        assert dear.within is not None
        assert dear.best_repeats == pytest.approx(math.sqrt(dear.within * 2.0 / (dear.between * 0.02)))
        assert dear.repeats > 1
        assert f"{dear.best_repeats:.1f} repeats cost least" in " ".join(dear.assumptions)

    def test_repeats_are_chosen_where_they_make_the_present_samples_enough(self) -> None:
        sides = [("r", name, random_passes(1500, 5, seed)) for seed, name in enumerate(("old", "new"))]
        found = sample_plan(*sides, difference=0.04)
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
        found, alone = sample_plan(*sides, clusters=labels.tolist()), sample_plan(*sides)
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
        found = sample_plan(("r", "old", [0.0, 1.0] * 50), ("r", "new", [1.0, 1.0] * 10 + [0.0, 1.0] * 40), costs=costs)
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
        found = sample_plan(("r", "old", [0.0, 1.0] * 50), ("r", "new", [1.0, 1.0] * 50), costs=costs)
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


# Comparisons and gates against a plan: families of tests, and what the plan of a run is worth.


class TestFamilies:
    def test_the_primary_metric_is_tested_at_full_alpha_and_the_rest_by_holm(self) -> None:
        plan = AnalysisPlan("calm", secondary=("passed", "clear"))
        with_plan = one(planned(GRADED, plan))["terse"]
        without = one(planned(GRADED, None), metrics=plan.metrics)["terse"]
        primary, *rest = with_plan.metrics
        assert primary.metric == "calm"
        assert primary.adjusted_p == primary.p == without["calm"].p
        assert [metric.adjusted_p for metric in rest] == pytest.approx(
            holm([metric.p or 0.0 for metric in rest]).tolist()
        )
        assert "adjusted" not in primary.sentence
        assert "adjusted for 2 tests" in rest[0].sentence
        together = holm([metric.p or 0.0 for metric in without.metrics]).tolist()
        assert [metric.adjusted_p for metric in without.metrics] == pytest.approx(together)
        assert without["calm"].adjusted_p != primary.adjusted_p
        assert primary.mde is not None
        assert without["calm"].mde is not None
        assert primary.mde < without["calm"].mde

    def test_the_twin_of_the_primary_metric_is_in_its_family(self) -> None:
        plan = AnalysisPlan("value", secondary=("passed", "calm"))
        found = one(planned(GRADED, plan), metrics=["passed", "value", "calm"])["terse"]
        assert found["value"].same_as == "passed"
        assert found["passed"].adjusted_p == found["passed"].p
        assert found["calm"].adjusted_p == found["calm"].p

    def test_several_candidates_share_the_alpha_of_the_primary_metric(self) -> None:
        sides = {**GRADED, "other": GRADED["plain"][::-1]}
        report = planned(sides, AnalysisPlan(secondary=("calm",), tests=2))
        found = compare(report["plain"], report["terse"], report["other"])
        primary = [side["passed"] for side in found.candidates]
        assert [metric.adjusted_p for metric in primary] == pytest.approx(
            holm([metric.p or 0.0 for metric in primary]).tolist()
        )
        assert found.plan is not None
        assert found.plan.deviations == ()
        text = " ".join(str(found.in_detail()).split())
        assert "Adjusted p-values of the primary metric allow for 2 tests made together." in text
        assert "Adjusted p-values of the other metrics allow for 2 tests made together." in text
        assert "by Holm's method over 2 candidates" in found.methods()
        fewer = planned(sides, AnalysisPlan(secondary=("calm",)))
        check = compare(fewer["plain"], fewer["terse"], fewer["other"]).plan
        assert check is not None
        assert check.deviations == ("2 candidates are compared, planned was 1",)


class TestPlanInForce:
    def test_a_planned_metric_or_slice_that_no_trial_has_is_a_deviation_and_no_error(self) -> None:
        check = one(planned(GRADED, AnalysisPlan("passed", secondary=("clam",), slices=("topic",)))).plan
        assert check is not None
        assert check.deviations == (
            "clam was planned and is not compared",
            "slices by topic were planned and are left out",
        )

    def test_missing_outcomes_beyond_the_planned_share_are_listed(self) -> None:
        sides = {**GRADED, "terse": ["scorer_error"] * 6 + GRADED["terse"][6:]}
        check = one(planned(sides, AnalysisPlan())).plan
        assert check is not None
        assert check.deviations == ("10.0% of the trials or pairs are missing, allowed were 5.0%",)
        assert one(planned(sides, AnalysisPlan(max_missing_share=0.1))).plan.deviations == ()  # type: ignore[union-attr]

    def test_labels_and_repeats_that_were_not_planned_are_listed(self) -> None:
        report = planned({"plain": [[1.0, 0.0]] * 40, "terse": [[1.0, 1.0]] * 40}, AnalysisPlan())
        check = one(report).plan
        assert check is not None
        assert check.deviations == ("suite@1 has 2 repeats, planned was 1",)
        assert "Not as planned: suite@1 has 2 repeats, planned was 1." in " ".join(str(report).split())
        labels = {name: {f"s{place}": place % 2 == 0 for place in range(20)} for name in ("plain", "terse")}
        check = one(planned(GRADED, AnalysisPlan()), labels=labels).plan
        assert check is not None
        assert "labels correct passed, which was not planned" in check.deviations

    @pytest.mark.parametrize(
        ("planned_cluster", "deviation"),
        [
            (None, "clusters are not allowed for, which was not planned"),
            ("topic", "clusters are not allowed for, planned was topic"),
        ],
    )
    def test_another_way_to_cluster_is_listed(self, planned_cluster: str | None, deviation: str) -> None:
        check = one(planned(GRADED, AnalysisPlan(cluster=planned_cluster)), cluster="").plan
        assert check is not None
        assert deviation in check.deviations

    def test_a_run_that_ended_early_is_listed(self) -> None:
        for status in ("stopped", "interrupted", "incomplete"):
            report = planned({"plain": [1.0], "terse": [0.0]}, AnalysisPlan(samples=2), status=status)
            check = one(report).plan
            assert check is not None
            assert check.deviations == ("1 sample is compared, planned were 2", f"suite@1 ended early ({status})")
            assert "suite@1 has 1 sample, planned were 2" in " ".join(str(report).split())

    def test_choices_about_metrics_are_listed_unless_they_were_planned(self) -> None:
        chosen: dict[str, Any] = {"bounds": {"calm": (0.0, 1.0)}, "higher_is_better": ("calm",)}
        plan = AnalysisPlan(bounds=chosen["bounds"], higher_is_better=("calm",))
        assert one(planned(GRADED, plan), **chosen).plan.deviations == ()  # type: ignore[union-attr]
        check = one(planned(GRADED, AnalysisPlan()), **chosen, test="exact").plan
        assert check is not None
        assert check.deviations == (
            "higher_is_better is not that of the plan",
            "bounds is not that of the plan",
            "McNemar's exact test was asked for",
        )

    def test_a_plan_of_a_later_version_is_named_and_not_used(self) -> None:
        notes = write_notes(plans=[PlanNote("ab" * 32, {"primary": "calm", "later": 1}, 1e9)])
        found = one(stored(GRADED, notes=notes))
        assert found.plan is not None
        assert found.plan.deviations == ("this version cannot read the plan",)
        assert [metric.metric for metric in found["terse"].metrics] == ["passed", "value"]

    def test_a_gate_without_rules_takes_those_of_the_plan_or_is_refused(self) -> None:
        report = planned(GRADED, AnalysisPlan(min_pass_rate=0.5, slices=("topic",)))
        result = gate(report["terse"])
        assert result.status == "pass"
        assert result.plan is not None
        assert result.plan.deviations == ()
        with pytest.raises(ConfigurationError, match="the gate has no rules"):
            gate(planned(GRADED, None)["terse"])
        other = gate(report["terse"], GateRules(0.4, ceilings={"latency_ms": 10}, alpha=0.1)).plan
        assert other is not None
        assert other.deviations == (
            "the floor of passed is 40.0%, planned was 50.0%",
            "a ceiling of latency_ms was not planned",
            "alpha is 0.1, planned was 0.05",
        )


class TestRuns:
    def test_the_plan_is_in_the_store_before_the_first_trial_and_survives_rescoring(self, tmp_path: Any) -> None:
        store = open_store(str(tmp_path / "runs.db"))
        seen: list[int] = []

        def double(number: int, ctx: TrialContext) -> int:
            seen.append(len(store.get_run(ctx.key.run_id).noted.plans))
            return number * 2

        numbers = Dataset.of({number: number * 2 for number in range(8)}, name="numbers")
        suite = EvalSuite("doubles", numbers, double, exact_match, experiments=[Experiment("a"), Experiment("b")])
        plan = AnalysisPlan(samples=8, suite="doubles")
        report = suite.run_sync(store=store, plan=plan)
        assert set(seen) == {1}
        assert report.run.noted.plans[0].content == plan.content
        assert AnalysisPlan.from_mapping(report.run.noted.plans[0].content) == plan
        again = suite.rescore_sync(report.run_id, store=store)
        assert f"doubles@2 scores the outputs of run {report.run_id} again" in " ".join(str(again).split())
        with pytest.raises(ConfigurationError, match="the plan is for suite 'halves'"):
            suite.run_sync(store=store, plan=replace(plan, suite="halves"))

    def test_a_run_that_may_stop_by_itself_is_no_planned_one(self) -> None:
        numbers = Dataset.of({number: number * 2 for number in range(40)}, name="numbers")
        config = EvalConfig(stop_when=StopWhen(narrower_than=0.5))
        suite = EvalSuite("doubles", numbers, lambda number: number * 2, exact_match, config=config)
        report = suite.run_sync(store="memory:", plan=AnalysisPlan())
        assert "doubles@1 used its own results to decide when to stop" in " ".join(str(report).split())

    def test_equal_plans_have_one_hash_however_they_are_written(self) -> None:
        plan = AnalysisPlan("calm", margins={"calm": 1}, bounds={"calm": (0, 2)}, samples=40)
        assert (
            plan.digest == AnalysisPlan("calm", samples=40, bounds={"calm": (0.0, 2.0)}, margins={"calm": 1.0}).digest
        )
        assert plan.digest != replace(plan, margins={"calm": 2}).digest
        assert plan.digest != replace(plan, cluster="").digest


def test_a_plan_with_tables_is_written_as_toml() -> None:
    plan = AnalysisPlan(margins={"latency_ms": 20.0, "f1": 0.01}, bounds={"f1": (0.0, 1.0)}, lower_is_better=("x",))
    assert tomllib.loads(plan.to_toml())["plan"]["margins"] == {"latency_ms": 20.0, "f1": 0.01}


# Simulations of the stated power, and of the number of samples that is recommended.


DESIGNS = {(design.name, design.cell): design for design in designs()}
EFFECT, COMPARE, PLAN, GATE = (
    "difference of the minimum detectable effect",
    "number of samples named by compare",
    "number of samples named by plan",
    "number of samples named by a gate",
)


def measured(name: str, cell: str, runs: int) -> tuple[Design, Finding]:
    found = list(measure_designs(["power"], runs=runs, cell=f"{name}, {cell}"))
    assert len(found) == 1
    return DESIGNS[name, cell], found[0]


@pytest.mark.long
@pytest.mark.proves("R44", "R149")
@pytest.mark.parametrize(
    ("name", "cell", "runs"),
    [
        (EFFECT, "8 clusters, 1 test", 100),
        (EFFECT, "6 clusters, 2 tests", 50),
        (EFFECT, "30 samples x 5 repeats, 1 test", 50),
        (EFFECT, "40 pass/fail pairs, 1 test", 200),
        (EFFECT, "200 pass/fail pairs, 1 test", 200),
        (COMPARE, "pilot of 100 pass/fail pairs", 150),
        (PLAN, "pilot of 100 pass/fail pairs", 150),
        (PLAN, "pilot of 8 clusters of 10", 80),
        (PLAN, "pilot of 60 samples x 5 repeats", 60),
        (GATE, "margin 0.05, pilot of 100 pairs, truly equal", 100),
        (GATE, "floor 0.8, pilot of 100 samples, truth 0.85", 150),
    ],
)
def test_the_stated_difference_is_found_with_the_stated_power(name: str, cell: str, runs: int) -> None:
    _, found = measured(name, cell, runs)
    assert found.verdict == "holds", (found.figure, found.limit)


def test_every_kind_of_comparison_has_a_design() -> None:
    cells = {cell for name, cell in DESIGNS if name == EFFECT}
    assert {"8 clusters, 8 tests", "20 clusters, 8 tests", "30 samples x 5 repeats, 5 tests"} <= cells
    assert {name for name, _ in DESIGNS} == {EFFECT, COMPARE, PLAN, GATE}
