"""Comparisons and gates against a plan: families of tests, and what the plan of a run is worth."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import AnalysisPlan, ConfigurationError, EvalSuite, GateRules, compare, exact_match, gate, open_store
from fairtrial.data import Dataset
from fairtrial.stats import holm
from fairtrial.store.notes import PlanNote, write_notes
from fairtrial.trials import EvalConfig, Experiment, StopWhen, TrialContext
from tests.reports.build import stored
from tests.reports.sides import GRADED, one, planned


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
