"""Comparisons and gates against a plan: families of tests, and what the plan of a run is worth."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import (
    AnalysisPlan,
    Comparison,
    ConfigurationError,
    Dataset,
    EvalReport,
    EvalSuite,
    Experiment,
    GateRules,
    Metric,
    Score,
    StopWhen,
    TrialContext,
    compare,
    exact_match,
    gate,
    open_store,
)
from fairtrial.stats import holm
from fairtrial.store.notes import PlanNote, write_notes
from tests.report.build import stored
from tests.report.made import HOSTILE, hostile_report


def planned(trials: Any, plan: AnalysisPlan | None, **changes: Any) -> EvalReport:
    """A run of these trials, with a plan that it had before its first result."""
    notes = {} if plan is None else write_notes(plans=[PlanNote(plan.digest, plan.content, 1e9)])
    return stored(trials, notes=notes, **changes)


def graded(place: int, shift: int) -> Score:
    """A score with two metrics, of which one side has more."""
    more = shift and place % 5 == 0
    metrics = [
        Metric("calm", 0.2 + 0.01 * (place % 7) + (0.1 if more else 0.0), higher_is_better=True),
        Metric("clear", 0.5 + 0.01 * (place % 3) * shift, higher_is_better=True),
    ]
    return Score(1.0 if place % 4 or (shift and place % 8) else 0.0, metrics=metrics)


SIDES = {name: [graded(place, shift) for place in range(60)] for shift, name in enumerate(("plain", "terse"))}


def verdicts(report: EvalReport, **given: Any) -> Comparison:
    return compare(report["plain"], report["terse"], **given)


class TestFamilies:
    def test_the_primary_metric_is_tested_at_full_alpha_and_the_rest_by_holm(self) -> None:
        plan = AnalysisPlan("calm", secondary=("passed", "clear"))
        with_plan = verdicts(planned(SIDES, plan))["terse"]
        without = verdicts(planned(SIDES, None), metrics=plan.metrics)["terse"]
        primary, *rest = with_plan.metrics
        assert primary.metric == "calm"
        assert primary.adjusted_p == primary.p == without["calm"].p
        assert [one.adjusted_p for one in rest] == pytest.approx(holm([one.p or 0.0 for one in rest]).tolist())
        assert "adjusted" not in primary.sentence
        assert "adjusted for 2 tests" in rest[0].sentence
        together = holm([one.p or 0.0 for one in without.metrics]).tolist()
        assert [one.adjusted_p for one in without.metrics] == pytest.approx(together)
        assert without["calm"].adjusted_p > primary.adjusted_p
        assert primary.mde is not None
        assert without["calm"].mde is not None
        assert primary.mde < without["calm"].mde

    def test_a_metric_with_the_numbers_of_the_primary_one_is_the_same_test(self) -> None:
        sides = {"plain": [0.0, 1.0] * 20, "terse": [1.0, 1.0] * 20}
        plan = AnalysisPlan("value", secondary=("passed", "latency_ms"))
        found = verdicts(planned(sides, plan), metrics=["passed", "value"])
        assert found["terse"]["value"].same_as == "passed"
        assert found["terse"]["passed"].adjusted_p == found["terse"]["passed"].p
        assert found.tests == 1

    def test_several_candidates_share_the_alpha_of_the_primary_metric(self) -> None:
        sides = {**SIDES, "other": SIDES["plain"][::-1]}
        report = planned(sides, AnalysisPlan(secondary=("calm",), tests=2))
        found = compare(report["plain"], report["terse"], report["other"])
        primary = [one["passed"] for one in found.candidates]
        assert [one.adjusted_p for one in primary] == pytest.approx(holm([one.p or 0.0 for one in primary]).tolist())
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
        check = verdicts(planned(SIDES, AnalysisPlan("passed", secondary=("clam",), slices=("topic",)))).plan
        assert check is not None
        assert check.deviations == (
            "clam was planned and is not compared",
            "slices by topic were planned and are left out",
        )

    def test_missing_outcomes_beyond_the_planned_share_are_listed(self) -> None:
        sides = {**SIDES, "terse": ["scorer_error"] * 6 + SIDES["terse"][6:]}
        check = verdicts(planned(sides, AnalysisPlan())).plan
        assert check is not None
        assert check.deviations == ("10.0% of the trials or pairs are missing, allowed were 5.0%",)
        assert verdicts(planned(sides, AnalysisPlan(max_missing_share=0.1))).plan.deviations == ()  # type: ignore[union-attr]

    def test_labels_and_repeats_that_were_not_planned_are_listed(self) -> None:
        report = planned({"plain": [[1.0, 0.0]] * 40, "terse": [[1.0, 1.0]] * 40}, AnalysisPlan())
        check = verdicts(report).plan
        assert check is not None
        assert check.deviations == ("suite@1 has 2 repeats, planned was 1",)
        assert "Not as planned: suite@1 has 2 repeats, planned was 1." in " ".join(str(report).split())
        labels = {name: {f"s{place}": place % 2 == 0 for place in range(20)} for name in ("plain", "terse")}
        check = verdicts(planned(SIDES, AnalysisPlan()), labels=labels).plan
        assert check is not None
        assert "labels correct passed, which was not planned" in check.deviations

    def test_choices_about_metrics_are_listed_unless_they_were_planned(self) -> None:
        chosen: dict[str, Any] = {"bounds": {"calm": (0.0, 1.0)}, "higher_is_better": ("calm",)}
        plan = AnalysisPlan(bounds=chosen["bounds"], higher_is_better=("calm",))
        assert verdicts(planned(SIDES, plan), **chosen).plan.deviations == ()  # type: ignore[union-attr]
        check = verdicts(planned(SIDES, AnalysisPlan()), **chosen, test="exact").plan
        assert check is not None
        assert check.deviations == (
            "higher_is_better is not that of the plan",
            "bounds is not that of the plan",
            "McNemar's exact test was asked for",
        )

    def test_a_plan_of_a_later_version_is_named_and_not_used(self) -> None:
        notes = write_notes(plans=[PlanNote("ab" * 32, {"primary": "calm", "later": 1}, 1e9)])
        found = verdicts(stored(SIDES, notes=notes))
        assert found.plan is not None
        assert found.plan.deviations == ("this version cannot read the plan",)
        assert [one.metric for one in found["terse"].metrics] == ["passed", "value"]

    def test_a_gate_without_rules_takes_those_of_the_plan_or_is_refused(self) -> None:
        report = planned(SIDES, AnalysisPlan(min_pass_rate=0.5, slices=("topic",)))
        result = gate(report["terse"])
        assert result.status == "pass"
        assert result.plan is not None
        assert result.plan.deviations == ()
        with pytest.raises(ConfigurationError, match="the gate has no rules"):
            gate(planned(SIDES, None)["terse"])
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
        from fairtrial import EvalConfig

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


class TestPapers:
    def test_foreign_text_is_no_latex(self) -> None:
        report = hostile_report()
        names = report.experiments
        found = compare(report[names[0]], report[names[-1]], metrics=None)
        evil = '\\input{/etc/passwd} $x^2$ ^^5cinput %& #1 ~_|<>`"a[2pt]*--' + HOSTILE
        found = replace(found, baseline=replace(found.baseline, name=evil))
        named = tuple(
            replace(metric, metric=f"{evil} {place}") for place, metric in enumerate(found.candidates[0].metrics)
        )
        found = replace(found, candidates=(replace(found.candidates[0], metrics=named),))
        for text in (found.to_latex(), _latex(found.methods())):
            assert "input" in text
            _check_latex(text)

    def test_a_row_that_begins_with_a_bracket_or_star_is_no_argument(self) -> None:
        sides = {
            name: [
                Score(1.0, metrics=[Metric("[2pt]", float(place % 2 + shift)), Metric("*", 1.0 * place)])
                for place in range(12)
            ]
            for shift, name in enumerate(("plain", "terse"))
        }
        table = verdicts(stored(sides), metrics=None).to_latex()
        assert "{[}2pt{]} & " in table
        assert "{*} & " in table

    def test_the_methods_follow_what_was_done(self) -> None:
        sides = {**SIDES, "terse": ["task_error", "scorer_error", *SIDES["terse"][2:]]}
        metadata = [{"cluster": place // 3, "topic": "odd" if place % 2 else "even"} for place in range(60)]
        said = verdicts(stored(sides, metadata=metadata), metrics=["passed", "calm"], slice_by="topic").methods()
        for part in (
            "terse was compared with plain on 60 samples that both have, with 1 trial of each sample and side.",
            "tests and intervals are based on 20 clusters",
            "The p-values of 2 tests were adjusted by Holm's method, for 0.05 over all of them.",
            "repeated on 2 slices by topic; their 4 p-values were adjusted by Benjamini and Hochberg's method",
            "1 trial that ended in a task error or timeout counted as a failure.",
            "1 trial was not run or not scored, and left out of means and intervals.",
            "Sides whose interval in passed lies within 5.0 points of 0 are called equally good.",
            "No analysis plan was stored with the runs.",
        ):
            assert part in said
        plain = verdicts(stored({"plain": [0.0, 1.0] * 20, "terse": [1.0] * 40})).methods()
        assert "Differences in passed were assessed by the mid-p McNemar test (95% interval: " in plain
        assert "The level of the test is 0.05." in plain
        assert "No trial ended in a task error or timeout. No trial is missing." in plain
        assert "Holm" not in plain
        assert "cluster" not in plain
        plan = AnalysisPlan(samples=50)
        late = verdicts(planned({"plain": [0.0, 1.0] * 20, "terse": [1.0] * 40}, plan)).methods()
        assert "50 samples had been planned, for a power of 0.8." in late
        assert "with these deviations: 40 samples are compared, planned were 50." in late


def _latex(text: str) -> str:
    from fairtrial.render.latex import latex_text

    return latex_text(text)


OURS = re.compile(
    r"\\begin\{tabular\}\{[lr]+\}|\\(begin|end)\{(table|tabular)\}|\\caption\{|\\centering\b|\\hline\b| \\\\$"
    r"|\\textit\{"
    r"|\\multicolumn\{\d\}\{l\}\{|\\text(backslash|asciicircum|asciitilde|less|greater|bar|asciigrave)\{\}"
    r"|\{\\char34\}|\\[{}$&#%_]|\{[\[\]*]\}|\$-\$| & |[-'!?,]\{\}",
    re.MULTILINE,
)


def _check_latex(text: str) -> None:
    """What is left without our own commands and the escapes has no character that TeX treats specially."""
    left = OURS.sub("", text)
    assert not set(left.replace("}", "")) & set('\\{$&#%_^~<>|`"[]*'), left
