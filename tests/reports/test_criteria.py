"""Criteria of experiments, reports of any data, and runs that are loaded."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairtrial import ConfigurationError, Dataset, FairtrialError, Metric, compare, gate, leaderboard, open_store, plan
from fairtrial.errors import StoreError, UnknownRunError
from fairtrial.reports import EvalReport, ExperimentReport, group_by, summarize
from fairtrial.reports.report import report as report_module
from fairtrial.reports.report.answer import failure_reason
from fairtrial.scoring import Score, all_of, contains, exact_match
from fairtrial.stats import mean_interval
from fairtrial.suites import EvalSuite, evaluate_sync
from fairtrial.trials import Experiment
from tests.reports.build import stored
from tests.reports.made import Made, made_report

# Criteria and rewards in reports: pass rates with intervals, one mean, reasons that name what failed.


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
        assert rows[rows.index("mean score") :][:7] == [
            "mean score", "**criteria**", "polite", "polite, mean", "right", "**metrics**", "turns",
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
        assert failure_reason(result) == "answer is not 4"
        (fair,) = stored([Score(0.5, False, metrics=[Metric("helpful", 0.5, passed=False)])]).failed_samples()
        assert failure_reason(fair) == "helpful: failed with 0.5"

    def test_several_failed_criteria_are_named_before_their_reasons(self) -> None:
        either = Score(0.5, False, "long text", [
            Metric("any_of", 0.5, passed=True), Metric("any_of.first", 0.0, passed=False, reason="not this one"),
            Metric("all_of", 0.0, passed=False), Metric("all_of.short", 0.0, passed=False, reason="12 words"),
            Metric("polite", 0.0, passed=False, reason="curt"),
        ])  # fmt: skip
        assert [metric.name for metric in either.failed_criteria] == ["all_of.short", "polite"]
        (result,) = stored([either]).failed_samples()
        assert failure_reason(result) == "all_of.short, polite: 12 words; curt"

    def test_a_failed_combination_names_the_criterion_that_failed(self) -> None:
        report = evaluate_sync(
            Dataset.of({"go": "Rome"}), lambda given: "Paris", all_of(contains, lambda output, expected: True)
        )
        (result,) = report.failed_samples()
        assert failure_reason(result) == "contains: expected 'Rome' in 'Paris'"


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


# Reports, comparisons, gates, leaderboards and plans of arbitrary runs: no warning, no "nan", no contradiction.
#
# Whatever was stored, each must print something readable, every estimate must lie in its interval, and no verdict may
# contradict the interval that is shown beside it.


ERRORS = ("task_error", "timeout", "scorer_error", "dead_letter", "not_run")
VALUES = {
    "shares": st.floats(0, 1),
    "passes": st.sampled_from([0.0, 1.0]),
    "one value": st.just(0.5),
    "large": st.floats(-1e30, 1e30),
    "tiny": st.floats(0, 1e-300),
    "similar": st.floats(1e9, 1e9 + 1e-3),
}
DECIDED = {"better": 1, "higher": 1, "worse": -1, "lower": -1}


@dataclass(frozen=True)
class Stored:
    report: EvalReport
    cluster: str | None


@st.composite
def runs(draw: st.DrawFn) -> Stored:
    n = draw(st.integers(1, 25))
    repeats = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(sorted(VALUES)))
    faulty = draw(st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    pool = draw(st.lists(VALUES[kind], min_size=1, max_size=6))

    def trial() -> Any:
        if rng.random() < faulty:
            return ERRORS[rng.integers(len(ERRORS))]
        metrics = [Metric("m", pool[rng.integers(len(pool))])] if rng.random() < 0.95 else []
        if rng.random() < 0.5:
            metrics.append(Metric("polite", rng.random(), passed=bool(rng.random() < 0.7)))
        return Score(float(rng.random() < 0.7) if rng.random() < 0.5 else rng.random(), metrics=metrics)

    names = [f"e{place}" for place in range(draw(st.integers(2, 4)))]
    groups = draw(st.sampled_from([1, 2, 5, 100]))
    metadata = [{"c": int(rng.integers(groups)), "kind": ["a", "b", None, 3][rng.integers(4)]} for _ in range(n)]
    inputs = [int(rng.integers(max(1, n // 2))) for _ in range(n)] if draw(st.booleans()) else None
    trials = {name: [[trial() for _ in range(repeats)] for _ in range(n)] for name in names}
    return Stored(stored(trials, metadata=metadata, inputs=inputs), draw(st.sampled_from([None, "c"])))


def shown(record: Any) -> str:
    text = str(record)
    assert not re.search(r"(?<![a-z])(nan|inf|None)(?![a-z])", text), text
    return text


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns; None if it refuses the data with an error of our own."""
    try:
        return call()
    except FairtrialError:
        return None


def check_comparison(found: Any) -> None:
    shown(found)
    shown(found.in_detail())
    for candidate in found.candidates:
        for metric in candidate.metrics:
            if metric.low is None or metric.difference is None:
                assert metric.verdict not in DECIDED
                continue
            slack = 1e-9 * max(1.0, abs(metric.difference))
            assert metric.low - slack <= metric.difference <= metric.high + slack
            if metric.verdict in DECIDED:
                assert metric.low > 0 or metric.high < 0, metric


@pytest.mark.long
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(run=runs())
def test_arbitrary_runs_are_reported_without_contradictions(run: Stored) -> None:
    report, cluster = run.report, run.cluster
    sides = report.parts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown(report)
        for part in sides:
            json.dumps(part.summary, allow_nan=False)
            for estimate in part.estimates:
                if estimate.low is not None and estimate.high is not None and estimate.value is not None:
                    slack = 1e-9 * max(1.0, abs(estimate.value))
                    assert estimate.low - slack <= estimate.value <= estimate.high + slack
        for given_ in ({}, {"metrics": None, "slice_by": "kind"}, {"metrics": ["m"], "higher_is_better": ["m"]}):
            found = attempt(lambda given_=given_: compare(*sides, cluster=cluster, **given_))  # type: ignore[misc]
            if found is not None:
                check_comparison(found)
        for metric in ("passed", "value", "m"):
            board = attempt(lambda metric=metric: leaderboard(report, metric=metric, higher_is_better=["m"]))  # type: ignore[misc]
            if board is not None:
                shown(board)
                assert all(one.rank_low <= one.rank <= one.rank_high for one in board.systems)
            planned = attempt(lambda metric=metric: plan(report, metric=metric, cluster=cluster))  # type: ignore[misc]
            if planned is not None:
                shown(planned)
        for rules, baseline in (
            ({"min_pass_rate": 0.5, "floors": {"value": 0.3}}, None),
            ({"ceilings": {"p95:m": 3.0, "p95:latency_ms": 30}, "max_missing_share": 0.5}, None),
            ({"margins": {"passed": 0.05, "m": 0.2}, "higher_is_better": ["m"]}, sides[0]),
        ):
            decided = attempt(lambda rules=rules, baseline=baseline: gate(sides[1], rules, baseline))  # type: ignore[misc]
            if decided is not None:
                shown(decided)
                assert decided.passed == (decided.status == "pass")


def test_the_check_notices_a_contradiction() -> None:
    with pytest.raises(AssertionError):
        shown("a mean of nan")


# Stored runs are opened by the names that the command line uses.


STUDY = EvalSuite("study", Dataset.of([(1, 1), (2, 2)]), lambda number: number, exact_match)
OTHER = EvalSuite(
    "other", Dataset.of([(1, 1)]), lambda number: number, exact_match, experiments=[Experiment("a"), Experiment("b")]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two runs of one suite and a run of another."""
    path = tmp_path / "runs.db"
    STUDY.run_sync(store=str(path))
    STUDY.run_sync(store=str(path), resume="never")
    OTHER.run_sync(store=str(path))
    return path


def test_load_finds_the_run_of_a_store_by_name(path: Path) -> None:
    assert EvalReport.load(path, "study@1").run.name == "study@1"
    assert EvalReport.load(str(path), "study").run.name == "study@2"
    assert EvalReport.load(f"sqlite:///{path}", "study@latest").total == 2
    store = open_store(path)
    run_id = store.runs(suite="other")[0].run_id
    assert EvalReport.load(store, run_id[:6]).run_id == run_id
    assert EvalReport.load(path, run_id).run.name == "other@1"
    store.close()


def test_load_of_several_runs_names_them_and_shows_the_call(path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        EvalReport.load(path)
    assert "it has other@1, study@2, study@1" in str(caught.value)
    assert str(caught.value).endswith(f"EvalReport.load({str(path)!r}, 'other@1')")
    store = open_store(path)
    with pytest.raises(StoreError, match=r"as in EvalReport\.load\(store, 'other@1'\)"):
        EvalReport.load(store)
    store.close()


def test_load_of_a_store_without_runs_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "empty.db").close()
    with pytest.raises(StoreError, match=r"empty\.db contains no runs"):
        EvalReport.load(tmp_path / "empty.db")


def test_load_of_an_unknown_name_suggests_similar_ones(path: Path) -> None:
    with pytest.raises(UnknownRunError, match="there is no run 'studdy'\ndid you mean study"):
        EvalReport.load(path, "studdy")
    with pytest.raises(UnknownRunError, match="suite 'study' has no run 7\nthere is study@1 to study@2"):
        EvalReport.load(path, "study@7")


def test_load_of_an_experiment_shows_how_to_take_it_from_its_run(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EvalReport\.load\(.*, 'other@1'\)\['b'\]"):
        EvalReport.load(path, "other:b")
    assert EvalReport.load(path, "other@1")["b"].pass_rate == 1.0


def test_load_of_a_file_that_does_not_exist_creates_none(tmp_path: Path) -> None:
    for name in (tmp_path / "nope.db", f"sqlite:///{tmp_path}/nope.db"):
        with pytest.raises(StoreError, match="there is no store at"):
            EvalReport.load(name, "study")
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_a_name_shows_how_to_load_it(path: Path) -> None:
    store = open_store(path)
    with pytest.raises(ConfigurationError, match=r"use EvalReport\.load\(store, '323fe'\)"):
        EvalReport(store, "323fe")  # type: ignore[call-overload]  # a user without a type checker
    with pytest.raises(ConfigurationError, match=r"use EvalReport\.load\('runs\.db', 'study@2'\)"):
        EvalReport("runs.db", store.runs(suite="study")[0])  # type: ignore[call-overload]  # as above
    store.close()
