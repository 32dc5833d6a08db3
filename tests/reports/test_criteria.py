"""Criteria and rewards in reports: pass rates with intervals, one mean, reasons that name what failed."""

from __future__ import annotations

import ast
import inspect
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial import Dataset, EvalReport, Metric, Score, all_of, compare, contains, evaluate_sync, exact_match
from fairtrial.cli.command_failures import why
from fairtrial.reports import ExperimentReport, group_by, summarize
from fairtrial.reports import report as report_module
from fairtrial.stats import mean_interval
from tests.reports.build import stored
from tests.reports.made import Made, made_report

NAMES = ("n", "mean", "std", "min", "max", "mean_score", "pass_rate", "pass_rate_all", "errors")


def judged(polite: float, *, right: bool, turns: int = 3) -> Score:
    metrics = [
        Metric("polite", polite, passed=polite >= 0.75, reason="" if polite >= 0.75 else "curt"),
        Metric("right", float(right), passed=right, higher_is_better=True, bounds=(0, 1)),
        Metric("turns", turns),
    ]
    passed = right and polite >= 0.75
    return Score((polite + right) / 2, passed, "" if passed else "polite: curt", metrics)


def rewarded(value: float, reward: float) -> Score:
    return Score(value, metrics=[Metric("gain", reward, weight=2.0)])


SCORES = [judged(1.0, right=True), judged(0.5, right=True), judged(0.75, right=False), judged(0.5, right=False)]


class TestCriteria:
    @pytest.mark.proves("R126")
    def test_every_criterion_has_its_pass_rate_with_an_interval_and_tracked_metrics_have_none(self) -> None:
        report = stored([*SCORES, "timeout"])
        assert list(report.criteria) == ["polite", "right"]
        polite = report.criteria["polite"]
        assert (polite.value, polite.n, polite.metric, polite.view) == (0.5, 4, "passed:polite", "scored")
        expected = mean_interval([1.0, 0.0, 1.0, 0.0], bounds=(0.0, 1.0)).interval
        assert expected is not None
        assert (polite.low, polite.high) == (expected.low, expected.high)
        names = [estimate.name for estimate in report.estimates]
        assert names[4:] == ["pass_rate:polite", "polite", "pass_rate:right", "right", "turns"]

    def test_a_score_without_criteria_is_one_under_the_evaluators_name(self) -> None:
        report = evaluate_sync(Dataset.of({1: 1, 2: 3}), lambda given: given, exact_match)
        assert report.scores_by_criterion == {"exact_match": 0.5}
        assert {name: estimate.value for name, estimate in report.criteria.items()} == {"exact_match": 0.5}
        tracked = stored([Score(0.5, metrics=[Metric("turns", 4)])])
        assert (list(tracked.criteria), tracked.scores_by_criterion) == (["grade"], {"turns": 4.0})
        assert stored([*SCORES]).scores_by_criterion == {"polite": 0.6875, "right": 0.5, "turns": 3.0}
        assert stored(["timeout"]).scores_by_criterion == {}

    def test_a_comparison_can_be_of_the_verdicts_on_a_criterion(self) -> None:
        report = stored({"a": SCORES * 3, "b": [judged(1.0, right=True)] * 12})
        found = compare(report["a"], report["b"], metrics="passed:polite")["b"]["passed:polite"]
        assert (found.baseline, found.candidate, found.wins) == (0.5, 1.0, 6)
        assert "+50.0 points" in found.sentence
        everything = compare(report["a"], report["b"], metrics=None)
        assert everything["b"]["passed:right"].same_as == "right"
        text = everything.to_markdown()
        assert "| passed:polite | 50.0% | 100.0% |" in text
        assert "passed:right" not in text

    def test_a_report_shows_criteria_apart_from_metrics_and_nothing_twice(self) -> None:
        text = stored([*SCORES]).to_markdown()
        rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
        assert rows[2:10] == [
            "pass rate", "mean score", "**criteria**", "polite", "polite, mean", "right", "**metrics**", "turns",
        ]  # fmt: skip
        alone = stored([Score(0.5, metrics=[Metric("polite", 0.5, passed=True)]), Score(1.0), Score(0.25)])
        assert "| polite" in alone.to_markdown()
        whole = [Score(v, metrics=[Metric("polite", v, passed=v >= 0.5, bounds=(0, 1))]) for v in (0.5, 1.0, 0.25)]
        assert "| polite" not in stored(whole).to_markdown()

    @pytest.mark.proves("R126")
    def test_the_json_of_a_report_has_the_pass_rate_of_each_criterion(self) -> None:
        (part,) = json.loads(json.dumps(stored([*SCORES]).to_json()))["experiments"]
        found = {estimate["name"]: estimate for estimate in part["estimates"]}
        assert (found["pass_rate:right"]["value"], found["pass_rate:right"]["metric"]) == (0.5, "passed:right")

    def test_a_page_names_each_criterion_with_its_verdict_and_reason(self) -> None:
        page = stored([*SCORES]).to_html()
        assert "failed with 0.5  polite: curt\npassed  right" in page
        assert "turns 3.000" in page

    def test_a_failure_is_explained_by_its_reason_and_never_by_tracked_metrics(self) -> None:
        tracked = [Metric("correct", 0.0, weight=1.0), Metric("tool_errors", 0), Metric("cost", 0.01)]
        (result,) = stored([Score(reason="answer is not 4", metrics=tracked)]).failed_samples()
        assert why(result) == "answer is not 4"
        (fair,) = stored([Score(0.5, False, metrics=[Metric("helpful", 0.5, passed=False)])]).failed_samples()
        assert why(fair) == "helpful: got an answer"

    def test_several_failed_criteria_are_named_before_their_reasons(self) -> None:
        either = Score(0.5, False, "long text", [
            Metric("any_of", 0.5, passed=True), Metric("any_of.first", 0.0, passed=False, reason="not this one"),
            Metric("all_of", 0.0, passed=False), Metric("all_of.short", 0.0, passed=False, reason="12 words"),
            Metric("polite", 0.0, passed=False, reason="curt"),
        ])  # fmt: skip
        assert [metric.name for metric in either.failed_criteria] == ["all_of.short", "polite"]
        (result,) = stored([either]).failed_samples()
        assert why(result) == "all_of.short, polite: 12 words; curt"

    def test_a_failed_combination_names_the_criterion_that_failed(self) -> None:
        report = evaluate_sync(
            Dataset.of({"go": "Rome"}), lambda given: "Paris", all_of(contains, lambda output, expected: True)
        )
        (result,) = report.failed_samples()
        assert why(result) == "contains: expected 'Rome' in 'Paris'"


class TestRewards:
    @pytest.mark.proves("R134")
    def test_rewards_have_a_row_where_they_differ_from_scores_and_none_elsewhere(self) -> None:
        rewards = [rewarded(0.0, -5.0), rewarded(0.0, -3.0), rewarded(0.0, 0.0), rewarded(1.0, 4.0)]
        report = stored(rewards)
        assert (report.mean_score, report.mean_reward) == (0.25, -1.0)
        found = {estimate.name: estimate for estimate in report.estimates}
        assert found["mean_reward"].value == -1.0
        assert found["mean_reward"].low is not None
        assert "| mean reward | -1.000 |" in report.to_markdown()
        plain = stored([0.5, 1.0])
        assert "mean_reward" not in {estimate.name for estimate in plain.estimates}
        assert plain.mean_reward == 0.75

    @pytest.mark.proves("R134")
    def test_a_comparison_includes_rewards_if_one_side_has_rewards_of_its_own(self) -> None:
        report = stored({"a": [rewarded(0.5, 2.0)] * 8, "b": [0.5] * 8, "c": [0.25] * 8})
        found = compare(report["a"], report["b"])
        assert [metric.metric for metric in found["b"].metrics] == ["passed", "value", "reward"]
        assert (found["b"]["reward"].baseline, found["b"]["reward"].candidate) == (2.0, 0.5)
        for metrics in ({}, {"metrics": None}):
            names = [metric.metric for metric in compare(report["b"], report["c"], **metrics)["c"].metrics]  # type: ignore[arg-type]
            assert names == ["passed", "value"]
        asked = compare(report["b"], report["c"], metrics=["reward"])
        assert asked["c"]["reward"].baseline == 0.5

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.sampled_from(["timeout", "task_error", "not_run"]),
                st.builds(rewarded, st.floats(0, 1), st.floats(-50, 50)),
                st.floats(0, 1).map(Score),
            ),
            min_size=1,
            max_size=12,
        )
    )
    def test_all_four_summaries_agree(self, trials: list[Any]) -> None:
        report = stored(trials, metadata=[{"kind": "all"}] * len(trials))
        results = [*report.results]
        by_key, by_function = report.group_by("kind"), report.group_by(lambda result: "all")
        summaries = [report.summary, summarize(results)]
        if results:
            summaries += [by_key["all"], by_function["all"], report["baseline"].group_by("kind")["all"]]
        for summary in summaries:
            assert tuple(summary) == NAMES
            for name in NAMES:
                assert summary[name] == pytest.approx(summaries[0][name], abs=2e-6), name
        rewards = [result.score.reward for result in results if result.score is not None]
        if rewards:
            assert summaries[0]["mean"] == pytest.approx(math.fsum(rewards) / len(rewards))
            assert (summaries[0]["min"], summaries[0]["max"]) == (min(rewards), max(rewards))
            assert report.mean_reward == pytest.approx(summaries[0]["mean"])
            assert report.mean_score == pytest.approx(summaries[0]["mean_score"])

    def test_a_trial_that_was_not_run_is_not_an_error(self) -> None:
        from fairtrial import EvalResult
        from fairtrial.trials.context import TrialKey

        missing = EvalResult(key=TrialKey("r", "e", "s", 0), ordinal=0, outcome="not_run")
        assert summarize([missing])["errors"] == 0


class TestRemedies:
    def test_one_experiment_of_several_can_be_grouped_as_the_error_says(self) -> None:
        report = stored(
            {"one": [1.0, 0.0], "two": [rewarded(0.5, 7.0), "timeout"]}, metadata=[{"k": "x"}, {"k": ["y", 1]}]
        )
        with pytest.raises(ValueError, match=r'report\["two"\]\.group_by'):
            report.group_by("k")
        found = report["two"].group_by("k")
        assert (found["x"]["mean"], found["x"]["mean_score"], found["y", 1]["errors"]) == (7.0, 0.5, 1)
        assert report["one"].group_by("k")["x"]["mean"] == 1.0
        assert report["two"].group_by(lambda result: result.success)[True] == found["x"]
        assert group_by(report["one"].results, lambda result: result.passed).keys() == {True, False}

    def test_every_figure_that_several_experiments_lack_exists_for_each_of_them(self) -> None:
        tree = ast.parse(inspect.getsource(report_module))
        named = [
            call.args[0].value
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "_only"
            and isinstance(call.args[0], ast.Constant)
        ]
        assert {"group_by", "pass_rate", "criteria"} <= set(named)
        for name in named:
            assert isinstance(name, str)
            assert hasattr(ExperimentReport, name), name
            assert hasattr(EvalReport, name), name


def test_markdown_shows_both_sides_of_a_flipped_sample_with_repeats() -> None:
    def trial(place: int, experiment: str, repeat: int) -> Made:
        return Made(float(experiment == "a"), output=f"answer of {experiment} {repeat}")

    report = made_report(trial, samples=12, repeats=5, experiments=("a", "b"))
    text = compare(report["a"], report["b"]).to_markdown()
    for repeat in range(3):
        assert text.count(f"  - baseline, repeat {repeat}: ") == 10
        assert text.count(f"  - candidate, repeat {repeat}: ") == 10
    assert "answer of b 2" in text
