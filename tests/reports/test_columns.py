"""The numbers of an experiment as columns, and its rates and means with intervals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairtrial import Dataset, EvalConfig, Metric, Sample, Score, evaluate_sync, exact_match, open_store, stats
from fairtrial.errors import ConfigurationError
from fairtrial.reports import EvalReport, by_metric
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.estimates import Estimate, estimates, quantile_of
from fairtrial.reports.figures.metrics import SCORED, ExperimentSource, View
from fairtrial.reports.report import source_of
from fairtrial.reports.tool_calls import slice_estimates
from tests.records import changeable
from tests.reports.build import graded, stored


def source(report: EvalReport) -> ExperimentSource:
    return source_of(report, "name one")


def named(found: tuple[Estimate, ...]) -> dict[str, Estimate]:
    return {one.name: one for one in found}


class TestColumns:
    def test_a_row_is_a_sample_and_a_cell_is_a_repeat(self) -> None:
        report = stored([[1.0, 0.4], [0.75, "timeout"], ["scorer_error", "not_run"]])
        columns = read_columns(source(report))
        assert columns.ids == ["s0", "s1", "s2"]
        np.testing.assert_array_equal(columns.values["passed"], [[1, 0], [1, np.nan], [np.nan, np.nan]])
        np.testing.assert_array_equal(columns.values["value"], [[1, 0.4], [0.75, np.nan], [np.nan, np.nan]])
        assert (columns.planned, columns.repeats, columns.trials, columns.missing) == (3, 2, 6, 2)

    def test_which_trials_count_depends_on_the_view(self) -> None:
        columns = read_columns(
            source(stored([1.0, 0.6, "task_error", "timeout", "scorer_error", "dead_letter", "not_run"]))
        )
        views: tuple[View, ...] = ("scored", "system", "all")
        counts = {view: columns.scores("passed", view).counts.tolist() for view in views}
        assert counts == {
            "scored": [1, 1, 0, 0, 0, 0, 0],
            "system": [1, 1, 1, 1, 0, 0, 0],
            "all": [1, 1, 1, 1, 1, 1, 0],
        }
        assert columns.scores("value", "system").flat.tolist() == [1.0, 0.6, 0.0, 0.0]
        assert columns.scores("value", "system", worst=None).flat.tolist() == [1.0, 0.6]

    def test_metrics_that_some_trials_lack_are_missing_there(self) -> None:
        first = Score(1, metrics=[Metric("f1", 0.5, bounds=(0, 1))])
        columns = read_columns(source(stored([first, graded(0, f1=0.25, words=90), 1.0])))
        assert columns.scores("f1", "scored").counts.tolist() == [1, 1, 0]
        assert columns.scores("words", "system").flat.tolist() == [90.0]
        assert columns.bounds("f1") == (0.0, 1.0)
        assert columns.bounds("words") is None
        assert columns.scores("no such", "system").counts.tolist() == [0, 0, 0]

    def test_the_range_of_a_metric_is_that_of_all_samples_also_in_a_slice(self) -> None:
        trials = [graded(1, words=float(place % 2)) for place in range(20)] + [
            graded(1, words=90.0 + i) for i in range(9)
        ]
        report = stored([*trials, "timeout"], metadata=[{"short": place < 20 or place == 29} for place in range(30)])
        columns = read_columns(source(report), keys=["short"])
        few = columns.take(np.asarray(columns.groups["short"], dtype=np.bool_))
        assert columns.bounds("words") is few.bounds("words") is None
        assert few.take(np.arange(5)).bounds("words") is None
        found = {part.name: part for part in slice_estimates(report, "short")}["short = True"]["words"]
        assert str(found.method).startswith("t with 19 df")  # Wilson's interval is for shares.
        sides = [columns, replace(columns, name="other")]
        part = compare_columns(sides[0], sides[1:], metrics=["words"], slice_by="short")["other"].slices[-1]["words"]
        assert (part.n, part.method) == (20, None)  # The timeout has no number of words; 0 would be made up.

    def test_only_what_is_asked_for_is_read(self) -> None:
        report = stored([graded(1, f1=0.5, words=90)])
        assert set(read_columns(source(report), metrics=["f1"]).values) == {"f1"}
        assert set(read_columns(source(report)).values) == {"passed", "value", "f1", "words"}
        costs = read_columns(source(report), metrics=["latency_ms", "tokens", "cost_usd"])
        assert costs.values["latency_ms"].tolist() == [[10.0]]
        assert costs.values["tokens"].tolist() == [[0.0]]
        assert "cost_usd" not in costs.values  # No price is known.

    def test_failed_trials_have_a_latency_too(self) -> None:
        columns = read_columns(source(stored([1.0, "timeout"])), metrics=["latency_ms"])
        assert columns.scores("latency_ms", "scored").flat.tolist() == [10.0, 50.0]

    def test_the_reward_is_the_weighted_mean_of_the_metrics(self) -> None:
        weighted = Score(0.9, metrics=[Metric("a", 1.0, 3.0), Metric("b", -1.0, 1.0), Metric("c", 7.0)])
        columns = read_columns(source(stored([weighted, Score(0.25), "timeout"])), metrics=["reward"])
        np.testing.assert_array_equal(columns.values["reward"], [[0.5], [0.25], [np.nan]])

    def test_one_experiment_of_several_is_read(self) -> None:
        report = stored({"a": [1.0, 0.0], "b": [0.0, 0.0]})
        assert read_columns(report["a"].source).values["value"].tolist() == [[1.0], [0.0]]
        assert read_columns(report["b"].source).values["value"].tolist() == [[0.0], [0.0]]
        with pytest.raises(ConfigurationError, match=r"covers 2 experiments \(a, b\): name one"):
            read_columns(source(report))

    def test_a_database_gives_the_same_columns(self, tmp_path: Path) -> None:
        trials = [[graded(1, f1=0.5), "timeout"], [0.2, graded(0.4, f1=0.1)]]
        store = open_store(str(tmp_path / "runs.db"))
        metadata = [{"cluster": "a", "topic": ["x"]}, {"cluster": "a"}]
        one, other = (
            read_columns(source(report), keys=["topic"], inputs={"length": len})
            for report in (stored(trials, store=store, metadata=metadata), stored(trials, metadata=metadata))
        )
        assert one.ids == other.ids
        assert one.groups == other.groups == {"topic": ['["x"]', None], "length": [10, 10]}
        for name in ("passed", "value", "f1"):
            np.testing.assert_array_equal(one.values[name], other.values[name])
        assert one.clusters is not None
        assert one.clusters.tolist() == [0, 0]
        store.close()


class TestClusters:
    def test_samples_are_independent_unless_metadata_names_a_cluster(self) -> None:
        assert read_columns(source(stored([1.0, 0.0]))).clusters is None
        shared = [{"cluster": 1}, {"cluster": 1}, {"cluster": True}, {}]
        clusters = read_columns(source(stored([1.0, 0.0, 1.0, 1.0], metadata=shared))).clusters
        assert clusters is not None
        assert clusters.tolist() == [0, 0, 1, 2]

    def test_a_cluster_for_every_sample_is_no_cluster(self) -> None:
        assert read_columns(source(stored([1.0, 0.0], metadata=[{"cluster": 1}, {"cluster": 2}]))).clusters is None

    def test_the_run_or_the_caller_names_the_key(self) -> None:
        passages = [{"passage": "p", "cluster": place} for place in range(3)]
        report = stored([1.0, 0.0, 1.0], metadata=passages, config={"cluster": "passage"})
        assert read_columns(source(report)).clusters is not None
        assert read_columns(source(report), cluster="").clusters is None
        assert read_columns(source(report), cluster="cluster").clusters is None
        assert read_columns(source(stored([1.0, 0.0], metadata=passages[:2])), cluster="passage").clusters is not None
        with pytest.raises(ConfigurationError, match="no sample of run r1 has 'author' in its metadata"):
            read_columns(source(report), cluster="author")
        with pytest.raises(ConfigurationError, match="name of a metadata key"):
            EvalConfig(cluster=7)  # type: ignore[arg-type]  # what a file may say

    def test_a_suite_names_its_key_in_its_settings(self) -> None:
        data = Dataset([Sample(f"s{n}", "x", "x", {"passage": n // 5}) for n in range(20)])
        report = evaluate_sync(data, lambda text: text, exact_match, EvalConfig(cluster="passage"))
        assert named(report.estimates)["pass_rate"].clusters == 4


class TestEstimates:
    @pytest.mark.proves("R44")
    def test_every_rate_and_mean_has_an_interval_over_scored_trials_and_with_errors_as_failures(self) -> None:
        report = stored([*[1.0] * 30, *[0.2] * 10, *["timeout"] * 6, *["scorer_error"] * 4])
        found = named(report.estimates)
        scored, every = found["pass_rate"], found["pass_rate_all"]
        expected = stats.rate_interval(30, 40)
        assert isinstance(expected, stats.Interval)
        assert (scored.value, scored.low, scored.high, scored.n) == pytest.approx(
            (report.pass_rate, expected.low, expected.high, 40)
        )
        assert (every.value, every.n) == (report.pass_rate_all, 50)
        assert found["mean_score"].value == pytest.approx(report.mean_score)
        assert found["mean_score_all"].value == pytest.approx(report["baseline"].mean_score_all)
        assert scored.method == "Clopper-Pearson"

    def test_repeats_are_averaged_and_give_pass_at_k(self) -> None:
        found = named(stored([[1.0, 0.0], [1.0, 1.0], [0.0, "timeout"]]).estimates)
        assert found["pass_rate"].value == 0.5
        assert (found["pass_rate"].n, found["pass_rate"].trials) == (3, 5)
        assert (found["pass@2"].value, found["pass^2"].value) == pytest.approx((2 / 3, 1 / 3))

    def test_metrics_have_intervals_in_their_own_range(self) -> None:
        trials = [
            Score(1, metrics=[Metric("f1", f1, bounds=(0, 1)), Metric("words", words)])
            for f1, words in ((0.9, 80), (0.7, 120))
        ]
        found = named(stored(trials).estimates)
        assert found["f1"].low is not None
        assert 0 <= found["f1"].low < 0.8 < (found["f1"].high or 0) <= 1
        assert found["words"].value == 100.0
        assert found["words"].low is not None
        assert found["words"].low < 0

    def test_an_interval_never_collapses_and_nothing_is_nothing(self) -> None:
        ten = named(stored([1.0] * 10).estimates)["pass_rate"]
        assert (round(ten.low or 0, 2), ten.high) == (0.69, 1.0)
        none = named(stored(["scorer_error"] * 3).estimates)["pass_rate"]
        assert (none.value, none.low, none.n, none.note) == (None, None, 0, "No trial was scored.")

    def test_every_k_up_to_the_repeats_has_its_pass_rates(self) -> None:
        passed = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, np.nan, 1.0]]
        outcomes = np.where(np.isnan(passed), 3, SCORED)
        found = named(estimates(Columns.of({"passed": passed}, outcomes=outcomes)))
        assert [name for name in found if name.startswith("pass@")] == ["pass@2", "pass@3"]
        assert [name for name in found if name.startswith("pass^")] == ["pass^2", "pass^3"]
        assert found["pass@2"].value == pytest.approx((1 + 2 / 3 + 1) / 3)  # The last sample lacks a repeat.
        assert found["pass^2"].value == pytest.approx((1 / 3 + 0 + 1) / 3)
        assert (found["pass^3"].n, found["pass^3"].trials) == (3, 9)

    def test_quantiles_take_repeats_of_a_sample_for_one_cluster(self) -> None:
        times = np.exp(np.random.default_rng(1).normal(0, 1, 200))
        single = Columns.of({"latency_ms": times})
        thrice = Columns.of({"latency_ms": np.repeat(times[:, None], 3, axis=1)})
        alone, repeated = (quantile_of(one, "latency_ms", 0.95) for one in (single, thrice))
        assert (alone.value, alone.trials, repeated.n, repeated.trials) == (repeated.value, 200, 200, 600)
        assert alone.low is not None
        assert alone.high is not None
        assert repeated.low is not None
        assert repeated.low <= 1.05 * alone.low
        assert (repeated.high or np.inf) >= 0.9 * alone.high

    def test_few_clusters_are_named(self) -> None:
        found = estimates(Columns.of({"passed": [1.0, 0.0, 1.0, 1.0]}, clusters=["a", "a", "b", "b"]))
        assert found[0].clusters == 2
        assert found[0].note == "Only 2 clusters: about 4 are the least for a verdict."

    @pytest.mark.proves("R47")
    def test_every_slice_has_its_own_estimates(self) -> None:
        topics = [{"topic": "law"}] * 4 + [{"topic": "art"}] * 2
        report = stored([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], metadata=topics)
        art, law = slice_estimates(report, "topic")
        assert (art.name, art.n, art["pass_rate"].value) == ("topic = art", 2, 0.0)
        assert (law.name, law.n, law["pass_rate"].value) == ("topic = law", 4, 0.75)
        assert [part.n for part in slice_estimates(report, by_metric("value", at=0.5))] == [3, 3]
        with pytest.raises(KeyError, match="no estimate 'f1'; there are pass_rate, pass_rate_all"):
            law["f1"]


def test_only_these_records_can_be_changed() -> None:
    assert changeable("reports") == {"AdjustedDifference", "CollectedLabels", "SampleArrays", "_Key", "_Metric"}
