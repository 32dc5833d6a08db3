"""Live traces that were sampled at several rates: each figure over trials allows for their weights or is refused."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairtrial import EvalReport, GateRules, Score, calibrate, compare, gate, plan
from fairtrial.errors import ConfigurationError
from fairtrial.integrations.inspect import write_log
from fairtrial.integrations.tracing.langsmith import upload_requests
from fairtrial.reports import summarize, tool_call_figures
from fairtrial.reports.figures.metrics import run_totals
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.reports.leaderboard.leaderboard import mean_over_suites
from fairtrial.reports.tool_calls import slice_rate_test
from fairtrial.store import RunStore, open_store
from fairtrial.store.notes import SAMPLING_WEIGHT, SamplingNote, write_notes
from tests.reports.build import graded, stored

SIZE = 60
VALUES = [float(place % 5 > 0) for place in range(SIZE // 2)] + [0.0, 0.25, 0.75] * (SIZE // 6)
WEIGHTS = [100.0] * (SIZE // 2) + [1.0] * (SIZE // 2)
LATENCY = [10.0 + place for place in range(SIZE)]
MEAN = float(np.average(VALUES, weights=WEIGHTS))
PASSED = float(np.average(np.array(VALUES) >= 0.5, weights=WEIGHTS))
METADATA = [{SAMPLING_WEIGHT: weight, "half": place % 2} for place, weight in enumerate(WEIGHTS)]


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunStore]:
    url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path / 'runs.db'}"}.get(request.param)
    opened = open_store(url or str(request.getfixturevalue("pg_url")))
    yield opened
    opened.close()


def live(store: RunStore | None = None, metadata: Any = METADATA, **changes: Any) -> EvalReport[Any]:
    trials = [graded(value, kind=1 - value) for value in VALUES]
    facts: dict[str, Any] = {"notes": write_notes(sampling=SamplingNote("2026-10-01", 0.01)), "finished_at": 3000.0}
    return stored(trials, store=store, metadata=metadata, **facts | changes)


def test_summaries_and_latency_allow_for_weights(store: RunStore) -> None:
    report = live(store)
    centred = np.array(VALUES) - MEAN
    std = (np.average(centred**2, weights=WEIGHTS) * SIZE / (SIZE - 1)) ** 0.5
    for found in (report.summary, summarize(report.results), summarize(list(report.results))):
        assert (found["n"], found["min"], found["max"], found["errors"]) == (SIZE, 0.0, 1.0, 0)
        assert [found[name] for name in ("mean", "mean_score")] == pytest.approx([MEAN, MEAN])
        assert [found[name] for name in ("pass_rate", "pass_rate_all")] == pytest.approx([PASSED, PASSED])
        assert found["std"] == pytest.approx(std)
    assert report.mean_latency_ms == pytest.approx(np.average(LATENCY, weights=WEIGHTS))
    half = [place for place in range(SIZE) if place % 2]
    expected = np.average([VALUES[place] for place in half], weights=[WEIGHTS[place] for place in half])
    by_key = report.group_by("half")
    by_function = report.group_by(lambda result: result.sample.metadata["half"])
    for groups in (by_key, by_function):
        assert groups[1]["mean"] == pytest.approx(expected)
    assert by_key[1]["std"] == pytest.approx(by_function[1]["std"])
    if hasattr(store, "identity"):
        TrialColumns.open(store, report.run)  # Writes the file that has the sums.
        assert run_totals(store, report.run) == store.totals(report.run_id)


def test_equal_weights_change_no_figure() -> None:
    plain, weighted = live(notes={}), live(metadata=[{**one, SAMPLING_WEIGHT: 5.0} for one in METADATA])
    assert weighted.summary == pytest.approx(plain.summary)
    assert weighted.mean_latency_ms == pytest.approx(plain.mean_latency_ms)
    assert summarize(weighted.results) == pytest.approx(summarize(plain.results))


def test_the_weight_of_a_sample_counts_in_live_runs_alone() -> None:
    # Curated failures keep the metadata of their traces.
    report = live(notes={})
    assert summarize(report.results)["mean"] == report.summary["mean"] == pytest.approx(np.mean(VALUES))


@pytest.mark.parametrize("content", [True, False])
def test_the_pass_rate_that_is_sent_to_langsmith_is_weighted(content: bool) -> None:
    report = live()
    (request,) = upload_requests(report.store, report.run, content=content)
    (found,) = json.loads(request.body)["summary_experiment_scores"]
    assert found["score"] == pytest.approx(PASSED)
    passed = sum(value >= 0.5 for value in VALUES)
    assert found["comment"] == f"{passed} of 60 scored trials passed, 0 without a score; the rate is weighted"


def test_the_figures_in_an_inspect_log_are_weighted(tmp_path: Path) -> None:
    report = live()
    (path,) = write_log(report.store, report.run, tmp_path / "live.eval")
    with zipfile.ZipFile(path) as log:
        scores = json.loads(log.read("header.json"))["results"]["scores"]
    found = {one["name"]: {name: metric["value"] for name, metric in one["metrics"].items()} for one in scores}
    assert found == {
        "score": {"mean": pytest.approx(MEAN), "pass_rate": pytest.approx(PASSED)},
        "kind": {"mean": pytest.approx(1 - MEAN)},
    }


REFUSED: dict[str, Callable[[EvalReport[Any], EvalReport[Any]], Any]] = {
    "a comparison": compare,
    "a gate": lambda one, _: gate(one, GateRules(floors={"passed": 0.5})),
    "a plan": lambda one, _: plan(one),
    "a mean over suites": lambda one, _: mean_over_suites(one),
    "a calibration": lambda one, _: calibrate(one, {"s1": True, "s2": False}),
    "the share of tool calls": lambda one, _: tool_call_figures(one.results, {}),
    "a report of selected results": lambda one, _: EvalReport.of(list(one.results)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_figures_without_weights_are_refused(what: str) -> None:
    one = live()
    two = live(one.store, run_id="r2")
    with pytest.raises(ConfigurationError, match=f"sampled at several rates, for which {what} has no weights"):
        REFUSED[what](one, two)


def test_a_test_between_slices_says_that_it_has_no_weights() -> None:
    found = slice_rate_test(live(), "half")
    assert "sampled at several rates" in str(found)


def test_a_declared_history_is_not_used_for_live_traces() -> None:
    store = open_store("memory:")
    stored([Score(1.0)] * SIZE, store=store, run_id="earlier", finished_at=1.0)
    report = live(store, config={"history": 1}, created_at=10.0)
    assert all(one.history is None for one in report.estimates)
    assert report.pass_rate == pytest.approx(PASSED)
    plain = stored([Score(1.0)] * SIZE, store=store, run_id="later", created_at=4000.0, config={"history": ["suite@2"]})
    assert "has live traces" in " ".join(plain["baseline"].figures.history_notes)
