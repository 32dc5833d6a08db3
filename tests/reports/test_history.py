"""Reports of runs that declare earlier runs of their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fairtrial import AnalysisPlan, ConfigurationError, Dataset, EvalConfig, EvalSuite, compare, contains, exact_match
from fairtrial.reports import EvalReport
from fairtrial.reports.figures.estimates import HistoryEstimate
from fairtrial.store import RunStore, open_store
from tests.reports.build import Trial, stored
from tests.reports.sides import planned

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
        text = words(report)
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
