"""The figures of a report: intervals that suit the data, in JSON and as properties."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Metric, Score, StopWhen, TokenUsage, TrialContext
from fairtrial.reports.render.files import as_text
from fairtrial.stats import (
    BettingMartingale,
    Interval,
    mean_interval,
    mean_pass_at_k,
    quantile_interval,
    rate_interval,
    stopped_by_width,
)
from tests.reports.made import FAIL, PASS, TASK_ERROR, Made, hostile_report, made_report


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
        "dead_letter": 0, "not_run": 0,
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
    assert rows["pass rate"][2:5] == ["-", "-", "0"]
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
    for text in (report.to_markdown(), str(report)):
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
    text = " ".join(str(report).split())
    assert "The run stopped by its own rule" in text
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
