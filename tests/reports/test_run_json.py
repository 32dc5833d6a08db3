"""The two JSON forms of a run contain the same data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fairtrial import Metric
from fairtrial.reports.report.run_json import listed_run, report_run, totals_record
from tests.reports.made import TASK_ERROR, Made, made_report


def trial(place: int, *_: Any) -> Made | None:
    return None if place == 9 else TASK_ERROR if place == 8 else Made(place % 2, metrics=(Metric("m", 0.5),))


def test_both_shapes_of_a_run_agree_and_differ_only_in_the_form_of_times_and_dataset() -> None:
    report = made_report(trial, tags={"team": "a"}, notes={"stopped": "early"}, created_at=1000.25)
    listed, head = listed_run(report.run, report.store.totals(report.run_id)), report_run(report.run, 1)
    other_form = {"dataset", "created_at", "finished_at"}
    for name in (listed.keys() & head.keys()) - other_form:
        assert listed[name] == head[name], name
    assert listed["dataset"] == {
        "name": head["dataset"],
        "version": head["dataset_version"],
        "fingerprint": head["dataset_fingerprint"],
        "samples": head["samples"],
    }
    for name in ("created_at", "finished_at"):
        assert datetime.fromisoformat(listed[name]) == datetime.fromtimestamp(head[name], UTC)
    assert report_run(report.run, 1) == report.to_json()["run"]


def test_the_figures_of_a_listed_run_are_those_of_its_report() -> None:
    report = made_report(trial)
    part = report.parts[0]
    listed = totals_record(part.totals)
    for name in ("pass_rate", "pass_rate_all", "mean_score", "mean_reward", "mean_latency_ms", "errors", "cost_usd"):
        assert listed[name] == getattr(part, name), name
    record: Any = report.to_json()
    told = record["experiments"][0]
    assert (listed["trials"], listed["scored"], listed["tokens"]) == (
        told["trials"]["finished"],
        told["trials"]["scored"],
        told["tokens"],
    )
