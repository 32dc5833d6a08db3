"""Figures of runs, their history and results read again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, Dataset, EvalSuite, Metric, Sample, Score, TokenUsage, compare, evaluate_sync
from fairtrial.reports import AnalysisPlan, EvalReport, Results
from fairtrial.reports.figures.estimates import HistoryEstimate
from fairtrial.reports.render.renderable import as_text
from fairtrial.scoring import contains, exact_match
from fairtrial.stats import (
    BettingMartingale,
    Interval,
    mean_interval,
    mean_pass_at_k,
    quantile_interval,
    rate_interval,
    stopped_by_width,
)
from fairtrial.store import RunStore, open_store
from fairtrial.trials import EvalConfig, EvalResult, Experiment, StopWhen, TrialContext
from tests.reports.build import Trial, stored
from tests.reports.made import FAIL, PASS, TASK_ERROR, Made, hostile_report, made_report
from tests.reports.sides import planned

# The figures of a report: intervals that suit the data, in JSON and as properties.


def errors_too(place: int, *_: Any) -> Made:
    return TASK_ERROR if place == 9 else FAIL if place < 3 else PASS


def ends(interval: object) -> tuple[float, float]:
    assert isinstance(interval, Interval)
    return interval.low, interval.high


@pytest.mark.proves("R44")
def test_both_pass_rates_have_their_interval() -> None:
    report = made_report(errors_too)
    assert report.pass_rate_interval == report["baseline"].pass_rate_interval
    assert ends(report.pass_rate_interval) == pytest.approx(ends(rate_interval(6, 9)))
    assert ends(report.pass_rate_all_interval) == pytest.approx(ends(rate_interval(6, 10)))
    assert report.mean_score_interval is not None
    assert report.mean_score_interval.contains(6 / 9)
    part = report["baseline"]
    assert part.mean_score_all_interval is not None
    assert [estimate.name for estimate in report.estimates] == [
        "pass_rate", "pass_rate_all", "mean_score", "mean_score_all",
    ]  # fmt: skip


def test_where_nothing_was_scored_the_interval_is_none() -> None:
    report = made_report(lambda *_: TASK_ERROR)
    assert (report.pass_rate_interval, report.mean_score_interval) == (None, None)
    assert ends(report.pass_rate_all_interval) == pytest.approx(ends(rate_interval(0, 10)))


def test_several_experiments_have_no_common_interval() -> None:
    report = made_report(errors_too, experiments=("a", "b"))
    for name in ("pass_rate_interval", "pass_rate_all_interval", "mean_score_interval", "estimates"):
        with pytest.raises(ValueError, match=rf'report\["b"\]\.{name}'):
            getattr(report, name)


def test_repeats_and_clusters_are_allowed_for_without_being_asked() -> None:
    def trial(place: int, experiment: str, repeat: int) -> Made:
        return PASS if (place * 7 + repeat) % 5 else FAIL

    rows = [[float(trial(place, "", repeat) is PASS) for repeat in range(3)] for place in range(40)]
    labels = [place // 4 for place in range(40)]
    repeated = made_report(trial, samples=40, repeats=3)
    assert repeated.pass_rate_interval == mean_interval(rows).interval
    at_3 = mean_pass_at_k(rows, 3)
    found = next(estimate for estimate in repeated.estimates if estimate.name == "pass@3")
    assert (found.value, found.n, found.trials) == (at_3.mean, 40, 120)
    clustered = made_report(trial, samples=40, repeats=3, metadata=lambda place: {"cluster": place // 4})
    assert clustered.pass_rate_interval == mean_interval(rows, clusters=labels).interval
    assert {estimate.clusters for estimate in clustered.estimates} == {10}


def test_the_distribution_counts_every_scored_trial_in_its_part() -> None:
    values = [0.0, 0.15, 0.3, 0.999, 1.0, 1.0]
    report = made_report(lambda place, *_: TASK_ERROR if place == 6 else Made(values[place]), samples=7)
    counts = report["baseline"].figures.distribution
    assert sum(counts) == 6
    assert {place: count for place, count in enumerate(counts) if count} == {0: 1, 3: 1, 6: 1, 19: 3}


@pytest.mark.proves("R46")
def test_json_has_every_figure_and_null_where_there_is_none() -> None:
    metrics = (Metric("brevity", 0.25),)
    report = made_report(lambda place, *_: TASK_ERROR if place == 1 else Made(1.0, metrics=metrics), repeats=2)
    found = json.loads(as_text(report.to_json()))
    assert found["format"] == "fairtrial.report/1"
    assert (found["run"]["suite"], found["run"]["repeats"]) == ("support", 2)
    (part,) = found["experiments"]
    assert part["trials"] == {
        "planned": 20, "finished": 20, "scored": 18, "passed": 18, "task_error": 2, "scorer_error": 0, "timeout": 0,
        "dead_letter": 0, "user_error": 0, "not_run": 0,
    }  # fmt: skip
    by_name = {estimate["name"]: estimate for estimate in part["estimates"]}
    assert list(by_name) == [
        "pass_rate", "pass_rate_all", "mean_score", "mean_score_all", "pass@2", "pass^2", "brevity",
    ]  # fmt: skip
    assert set(by_name["pass_rate"]) == {
        "name", "metric", "view", "value", "low", "high", "n", "trials", "clusters", "method", "note", "history",
    }  # fmt: skip
    assert by_name["pass_rate_all"]["value"] == 0.9
    assert part["variance"]["within"] == 0.0
    assert part["cost_usd"] is None
    assert sum(part["distribution"]["counts"]) == 18
    empty = json.loads(as_text(made_report(lambda *_: None)["baseline"].to_json()))["experiments"][0]
    assert (empty["estimates"][0]["value"], empty["estimates"][0]["low"]) == (None, None)
    assert empty["estimates"][0]["note"] == "No trial was scored."
    assert empty["latency_ms"] == {"mean": None, "max": None}


@pytest.mark.parametrize(("trials", "with_errors"), [(TASK_ERROR, "0.0%"), (None, None)])
def test_a_report_always_prints_and_its_pass_rate_is_none_if_nothing_was_scored(
    trials: Made | None, with_errors: str | None
) -> None:
    report = made_report(lambda *_: trials)
    assert report["baseline"].pass_rate is None
    rows = {line.partition("  ")[0]: line.split() for line in str(report["baseline"]).splitlines()}
    assert rows["baseline"][1:4] == ["-", "-", "0"]
    every = report["baseline"].pass_rate_all
    assert (None if every is None else f"{every:.1%}") == with_errors
    assert "No trial was scored." in str(report["baseline"])


@pytest.mark.proves("R44", "R46")
def test_a_report_has_the_median_and_the_95th_percentile_of_what_a_trial_takes() -> None:
    def trial(place: int, *_: Any) -> Made | None:
        usage = TokenUsage(place, 0, 0, 0.001 * place)
        metrics = (Metric("words", 10.0 * place), Metric("brevity", 0.5, bounds=(0, 1)))
        return Made(1.0, latency_ms=100 + place, usage=usage, metrics=metrics)

    report = made_report(trial, samples=100)
    (part,) = json.loads(as_text(report.to_json()))["experiments"]
    found = {one["name"]: one for one in part["per_trial"]}
    assert list(found) == [
        "latency_ms", "median:latency_ms", "p95:latency_ms", "tokens", "median:tokens", "p95:tokens",
        "cost_usd", "median:cost_usd", "p95:cost_usd", "median:words", "p95:words",
    ]  # fmt: skip
    assert set(found["p95:words"]) == set(part["estimates"][0])
    expected = quantile_interval([100.0 + place for place in range(100)], 0.95)
    p95 = found["p95:latency_ms"]
    assert (p95["value"], p95["low"], p95["high"]) == (expected.value, expected.low, expected.high)
    assert (p95["n"], p95["metric"], p95["method"], p95["note"]) == (100, "latency_ms", "order statistics", None)
    assert found["latency_ms"]["value"] == pytest.approx(part["latency_ms"]["mean"])
    assert found["latency_ms"]["low"] < 149.5 < found["latency_ms"]["high"]


def test_an_end_that_the_values_cannot_bound_is_open_and_the_report_says_at_least() -> None:
    report = made_report(lambda place, *_: Made(1.0, latency_ms=100 + place), samples=40)
    p95 = next(one for one in report["baseline"].figures.per_trial if one.name == "p95:latency_ms")
    assert (p95.value, p95.high) == (137.0, None)
    assert p95.note == "40 values do not bound this quantile on both sides."
    for text in (report.to_markdown(), str(report.in_detail())):
        assert f"at least {p95.low:g} ms" in text


def test_quantiles_of_repeats_and_of_clusters_are_those_of_the_statistics() -> None:
    def trial(place: int, experiment: str, repeat: int) -> Made:
        return Made(1.0, latency_ms=100 + 7 * place % 90 + repeat)

    rows = [[100.0 + 7 * place % 90 + repeat for repeat in range(3)] for place in range(90)]
    for metadata, labels in (
        (None, None),
        (lambda place: {"cluster": place // 2}, [place // 2 for place in range(90)]),
    ):
        options: dict[str, Any] = {} if metadata is None else {"metadata": metadata}
        report = made_report(trial, samples=90, repeats=3, **options)
        found = next(one for one in report["baseline"].figures.per_trial if one.name == "p95:latency_ms")
        expected = quantile_interval(rows, 0.95, clusters=labels)
        assert (found.value, found.low, found.high) == (expected.value, expected.low, expected.high)
        assert (found.n, found.trials, found.clusters) == (90, 270, None if labels is None else 45)


def test_json_of_hostile_text_can_be_read_by_anyone() -> None:
    text = as_text(hostile_report().to_json())
    assert text.isascii()
    found = json.loads(text)
    assert "<script>" in found["run"]["suite"]
    assert not any("\ud800" <= character <= "\udfff" for character in found["run"]["suite"])


def adaptive_report() -> Any:
    async def answer(given: int, ctx: TrialContext) -> int:
        return given if ctx.experiment.name == "good" or given % 3 == 0 else -1

    config = EvalConfig(stop_when=StopWhen(decides=("bad", "good"), every=10, shuffle=False), max_concurrent=1)

    def judge(output: int, expected: int) -> Score:
        return Score(float(output == expected), metrics=[Metric("words", 3 + expected % 7)])

    numbers = Dataset.of({number: number for number in range(500)}, name="numbers")
    experiments = [Experiment("bad"), Experiment("good")]
    return EvalSuite("adaptive", numbers, answer, judge, experiments=experiments, config=config).run_sync(
        store="memory:", resume="never"
    )


def test_a_run_that_stopped_by_itself_is_said_to_have_and_has_the_interval_that_allows_for_it() -> None:
    report = adaptive_report()
    looked = report.run.notes["adaptive"]["samples"]
    assert 10 <= looked < 100
    part = report["bad"]
    passed = -(-looked // 3)
    expected = BettingMartingale([1.0] * passed + [0.0] * (looked - passed)).interval()
    for interval in (part.pass_rate_interval, part.pass_rate_all_interval, part.mean_score_interval):
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
        assert "sequence" in interval.method
    found = {estimate.name: estimate for estimate in part.estimates}
    assert (found["pass_rate"].n, found["pass_rate"].value) == (looked, passed / looked)
    assert (found["words"].low, found["words"].n) == (None, looked)
    quantile = next(one for one in part.figures.per_trial if one.name == "median:latency_ms")
    assert (quantile.low, quantile.high, quantile.n) == (None, None, looked)
    assert quantile.note is not None
    assert quantile.note.startswith("The run used its own results")
    assert "The run stopped by its own rule" in " ".join(str(report).split())
    text = " ".join(str(report.in_detail()).split())
    assert re.search(r"good is better than bad: \+\d+\.\d points \([+-]\d+\.\d to \+\d+\.\d points\)", text)
    assert "have an interval that allows for it. Declare bounds. (words)" in text
    for rendered in (report.to_markdown(), report.to_html()):
        assert "The run stopped by its own rule" in rendered
    record = report.to_json()["experiments"][0]
    assert record["adaptive"] is True
    assert record["estimates"][-1]["low"] is None


def test_where_no_trial_of_such_a_run_was_scored_there_is_no_rate() -> None:
    side = {
        "n": 10,
        "passed": 0,
        "errors": 10,
        "missing": 0,
        "estimate": 0.0,
        "low": 0.0,
        "high": 0.3,
        "level": 0.9,
        "method": "s",
    }
    note = {
        "stopped": True, "reason": "enough", "rule": {"narrower_than": 0.5, "level": 0.9}, "samples": 10, "planned": 10,
        "beyond": 0, "experiments": {"baseline": side}, "pair": None,
    }  # fmt: skip
    report = made_report(lambda *_: TASK_ERROR, notes={"adaptive": note})
    assert report.pass_rate_interval is None
    assert report.pass_rate_all_interval is not None
    assert report.pass_rate_all_interval == stopped_by_width(0, 10, level=0.9)
    assert "90% interval" in str(report)


# Reports of runs that declare earlier runs of their samples.


CHANCES = np.random.default_rng(3).beta(0.4, 0.3, 600)


def passes(seed: int, n: int = 600) -> list[Trial]:
    found: list[Trial] = (np.random.default_rng(seed).random(n) < CHANCES[:n]).astype(float).tolist()
    return found


def earlier(store: RunStore, run_id: str, seed: int, ended: float, **changes: Any) -> EvalReport:
    return stored(passes(seed), run_id=run_id, store=store, created_at=ended - 1, finished_at=ended, **changes)


@pytest.fixture
def store() -> RunStore:
    found = open_store("memory:")
    earlier(found, "old1", 11, 2.0)
    earlier(found, "old2", 12, 4.0)
    return found


def now(store: RunStore, history: Any, **changes: Any) -> EvalReport:
    given = {"run_id": "now", "created_at": 10.0, "finished_at": 11.0} | changes
    return planned(passes(21, 120), AnalysisPlan(history=history), store=store, **given)


def history_of(report: EvalReport, name: str = "pass_rate") -> HistoryEstimate:
    found = report["baseline"].figures.get(name)
    assert found is not None
    assert found.history is not None
    return found.history


def words(report: object) -> str:
    return " ".join(str(report).split())


class TestDeclared:
    def test_nothing_is_adjusted_unless_it_is_declared(self, store: RunStore) -> None:
        report = stored(passes(21, 120), run_id="now", store=store, created_at=10.0)
        assert report["baseline"].estimates[0].history is None
        assert "history" not in words(report)

    @pytest.mark.parametrize("history", [["suite@1", "old2"], 2, ["suite@1:baseline", "suite@2"]])
    def test_runs_of_the_plan_make_the_figures_of_a_part_more_precise(self, store: RunStore, history: Any) -> None:
        report = now(store, history)
        plain, found = report["baseline"].estimates[0], history_of(report)
        assert found.note is None
        assert (found.known, found.samples, found.runs) == (120, 600, 2)
        assert plain.value is not None and plain.low is not None and plain.high is not None  # noqa: PT018
        assert found.low is not None and found.value is not None and found.high is not None  # noqa: PT018
        assert found.low < found.value < found.high
        assert found.high - found.low < 0.85 * (plain.high - plain.low)
        assert 160 < found.plain_samples < 300
        text = words(report.in_detail())
        assert "By the history of 600 samples in 2 runs" in text
        assert f"{found.plain_samples} plain samples" in text
        record: Any = report.to_json()["experiments"]
        record = record[0]["estimates"][0]
        assert record["value"] == plain.value
        assert record["history"]["value"] == found.value
        assert record["history"]["plain_samples"] == found.plain_samples

    def test_settings_of_the_suite_declare_it_too(self, store: RunStore) -> None:
        by_plan = history_of(now(store, 1))
        report = stored(passes(21, 120), run_id="set", store=store, created_at=10.0, config={"history": ["suite@2"]})
        assert history_of(report) == by_plan
        assert by_plan.runs == 1

    def test_whole_numbers_and_names_are_taken(self) -> None:
        assert EvalConfig(history=["a@1", "a@1"]).history == ("a@1",)  # type: ignore[arg-type]
        assert AnalysisPlan(history=3).content["history"] == 3
        assert "history" not in AnalysisPlan().content
        assert AnalysisPlan.from_mapping({"history": ["a@1"]}).history == ("a@1",)
        for wrong in (True, -1, 10**6, "a@1", [""], [1], 0.5, None):
            with pytest.raises(ConfigurationError, match="must be a number of earlier runs or a list of their names"):
                AnalysisPlan(history=wrong)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match=r"EvalConfig\.history must be"):
                EvalConfig(history=wrong)  # type: ignore[arg-type]


class TestEarlierRuns:
    def test_only_runs_that_ended_before_the_run_began_are_used(self, store: RunStore) -> None:
        earlier(store, "late", 13, 10.5)
        report = now(store, ["late", "suite@1", "suite@9", "now", "suite@2:other"])
        assert history_of(report).runs == 1
        text = words(report)
        assert "late had not ended when this run began: its history is not used." in text
        assert "now had not ended when this run began: its history is not used." in text
        assert "suite@9 is not in this store: its history is not used." in text
        assert "suite@2:other is not in this store: its history is not used." in text
        assert history_of(now(store, 5, run_id="more")).runs == 2

    def test_a_run_that_scores_outputs_again_has_no_history_from_them(self, store: RunStore) -> None:
        outputs = stored(passes(21, 120), run_id="outputs", store=store, created_at=5.0, finished_at=6.0)
        found = now(store, 5, parent_run=outputs.run_id)
        assert history_of(found).runs == 2
        orphan = now(store, 5, parent_run="gone", run_id="orphan")
        assert "No run of the suite ended before this one began: there is no history." in words(orphan)

    def test_another_dataset_is_no_history(self) -> None:
        found = open_store("memory:")

        def run(name: str, history: int | tuple[str, ...]) -> EvalReport:
            numbers = Dataset.of({number: number * 2 for number in range(4)}, name=name)
            config = EvalConfig(history=history)
            suite = EvalSuite("doubles", numbers, lambda number: number * 2, exact_match, config=config)
            return suite.run_sync(store=found, resume="never")

        run("first", 0)
        named = run("second", ("doubles@1",))
        assert "doubles@1 is of another dataset: its history is not used." in words(named)
        assert history_of(run("second", 5)).runs == 1

    def test_samples_with_another_content_have_none(self, store: RunStore) -> None:
        inputs = [f"question {place}" + (" changed" if place < 50 else "") for place in range(120)]
        found = history_of(now(store, 2, inputs=inputs))
        assert (found.known, found.samples) == (70, 600)
        all_new = history_of(now(store, 2, inputs=[f"new {place}" for place in range(120)], run_id="new"))
        assert all_new.note == "0 samples of the run have a history; it takes 20."

    def test_a_run_of_all_samples_keeps_its_plain_figures_and_says_why(self, store: RunStore) -> None:
        report = planned(passes(21), AnalysisPlan(history=2), store=store, run_id="all", created_at=10.0)
        plain, found = report["baseline"].estimates[0], history_of(report)
        assert (found.value, found.low, found.high, found.plain_samples) == (plain.value, plain.low, plain.high, 600)
        said = "The history is not used. The run has all samples with a history: there is nothing to add."
        assert said in words(report)
        assert "By the history" not in words(report)


class TestClusters:
    def test_clusters_of_the_pool_and_the_run_are_told_by_their_names(self) -> None:
        found = open_store("memory:")
        metadata = [{"cluster": place // 4} for place in range(600)]
        earlier(found, "old1", 11, 2.0, metadata=metadata)
        clustered = history_of(now(found, 1, metadata=metadata[:120]))
        assert clustered.note is None
        assert "t with 28 df" in str(clustered.method)

    def test_samples_with_equal_inputs_are_clusters_unless_all_are_equal(self) -> None:
        for inputs, df in (([f"q{place // 4}" for place in range(600)], 28), (["the same"] * 600, 118)):
            found = open_store("memory:")
            earlier(found, "old1", 11, 2.0, inputs=inputs)
            assert f"t with {df} df" in str(history_of(now(found, 1, inputs=inputs[:120])).method)


def test_the_same_outputs_under_two_evaluators_show_how_far_the_judge_moved() -> None:
    found = open_store("memory:")
    answers = Dataset.of({f"q{place}": "yes" if place % 4 else "yes, sir" for place in range(40)}, name="answers")
    strict = EvalSuite("judged", answers, lambda _: "yes", exact_match)
    lenient = EvalSuite("judged", answers, lambda _: "yes", contains)
    anchor = strict.run_sync(store=found)
    moved = lenient.rescore_sync(anchor.run_id, store=found)
    text = words(compare(anchor, moved).in_detail())
    said = "The sides score the same outputs: the difference is how far the evaluator moved, not the system."
    assert said in text
    assert "they may cause the difference" not in text
    fresh = lenient.run_sync(store=found, resume="never")
    assert said not in words(compare(anchor, fresh).in_detail())


# The results of a report as a sequence: their types, and what reading one of them costs.


@dataclass(frozen=True)
class Answer:
    number: int


def answer(text: str) -> Answer:
    return Answer(len(text))


def test_outputs_of_results_have_the_type_that_the_task_returns() -> None:
    suite = EvalSuite("typed", Dataset.of({"one": 3, "four": 4}), answer, exact_match)
    report = suite.run_sync(store="memory:")
    assert [result.output for result in report.results] == [Answer(3), Answer(4)]
    assert [result.output for result in report.failed_samples()] == [Answer(3), Answer(4)]
    assert report.refresh().results[1].output == Answer(4)


def test_an_output_that_does_not_fit_its_type_stays_as_it_is_stored() -> None:
    report = EvalSuite("typed", Dataset.of({"one": 3}), answer, exact_match).run_sync(store="memory:")
    (result,) = Results(report.store, report.run_id, 1, {"baseline": list[int]})
    assert result.output == {"number": 3}


class CountingStore:
    """A store that counts the results that are read from it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.read = 0

    def results(self, run_id: str, **filters: Any) -> Any:
        for result in self.store.results(run_id, **filters):
            self.read += 1
            yield result


def test_a_result_is_read_by_its_position_without_those_before_it() -> None:
    report = stored([1.0, 0.0] * 100, store=open_store("memory:"))
    counting: Any = CountingStore(report.store)
    results = Results(counting, report.run_id, 100, passed=False)
    everything: list[EvalResult] = list(results)
    counting.read = 0
    assert [results[place] for place in (0, 50, 99, -1)] == [everything[place] for place in (0, 50, 99, 99)]
    assert counting.read == 1 + 100 + 3  # The first one, then where all of them are, then one each.
    with pytest.raises(IndexError):
        results[100]


def test_figures_of_several_experiments_are_refused_with_one_error_type() -> None:
    suite = EvalSuite(
        "two", Dataset.of({"one": 3}), answer, exact_match, experiments=[Experiment("a"), Experiment("b")]
    )
    report = suite.run_sync(store="memory:")
    with pytest.raises(ConfigurationError, match=r'no common pass_rate; ask for one, as in report\["b"\]'):
        report.pass_rate
    with pytest.raises(ConfigurationError, match="this report covers 2 experiments"):
        report.only("name one")


def test_grouping_by_metadata_that_no_sample_has_is_refused_with_the_keys() -> None:
    dataset = Dataset([Sample("a", 1, 1, metadata={"topic": "sums"}), Sample("b", 2, 2)])
    report = evaluate_sync(dataset, lambda x: x, exact_match)
    assert set(report.group_by("topic")) == {"sums", None}
    with pytest.raises(ConfigurationError, match=r"no sample of run .* has metadata 'tpic'; it has topic"):
        report.group_by("tpic")
    bare = evaluate_sync(Dataset.of({"a": "a"}), lambda x: x, exact_match)
    with pytest.raises(ConfigurationError, match="its samples have no metadata"):
        bare.group_by("topic")


def test_a_comparison_of_anything_but_reports_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"must be a report or one of its experiments \(got 'a'\)"):
        compare("a", "b")  # type: ignore[arg-type]


def test_samples_that_are_a_function_are_refused_with_the_order() -> None:
    with pytest.raises(ConfigurationError, match="the samples come first, as in evaluate"):
        evaluate_sync(lambda x: x, Dataset.of({"a": "a"}), exact_match)  # type: ignore[call-overload]
