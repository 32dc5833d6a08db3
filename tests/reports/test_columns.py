"""The numbers of an experiment as columns, and its rates and means with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fairtrial import Dataset, EvalConfig, Metric, Sample, Score, evaluate_sync, exact_match, gate, open_store, stats
from fairtrial.base.frozen import FrozenList
from fairtrial.errors import ConfigurationError, StoreError
from fairtrial.reports import EvalReport, ExperimentReport, GateRules, by_metric
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.pairing import pair
from fairtrial.reports.figures import column_file
from fairtrial.reports.figures.column_file import forget, open_columns, write_columns
from fairtrial.reports.figures.column_reader import read_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.estimates import Estimate, estimates, per_trial, quantile_of, slice_rate_test
from fairtrial.reports.figures.labels import CollectedLabels, draw_trials, keyed_hash
from fairtrial.reports.figures.metrics import MISSING, SCORED, ExperimentSource, View
from fairtrial.reports.figures.trial_columns import Condition, TrialColumns
from fairtrial.reports.report import source_of
from fairtrial.reports.tool_calls import slice_estimates
from fairtrial.store import RunStore
from fairtrial.store.notes import ReviewNote
from tests.records import changeable
from tests.reports.build import graded, stored
from tests.reports.sides import one, two
from tests.reports.test_column_files import BLOCK, Trial, assert_equal, both, sample_run, store_run


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
    assert changeable("reports") == {
        "AdjustedDifference",
        "CollectedLabels",
        "SampleArrays",
        "_Group",
        "_Key",
        "_Metric",
    }


# Details of columns and of what is computed from them, each by itself.


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    found = open_store(f"sqlite:///{tmp_path / 'runs.db'}")
    yield found
    found.close()


def test_trials_that_were_not_run_have_no_verdict_of_a_metric(store: RunStore) -> None:
    samples, repeats, cells = sample_run()
    cells[40:] = [[(None, 0, 0, None, {})] * repeats for _ in cells[40:]]
    read, direct = both(store, store_run(store, samples, repeats, cells), costs=True)
    assert_equal(read, direct)
    assert set(np.unique(read.values["passed:a"][np.isfinite(read.values["passed:a"])])) == {0.0}


def test_a_key_with_too_many_values_is_read_from_the_store_alone(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairtrial.reports.figures.column_samples.MOST_VALUES", 2)
    read, direct = both(store, store_run(store, *sample_run()), keys=["topic"], cluster="")
    assert_equal(read, direct)
    assert set(read.groups["topic"]) == {None, "t0", "t1", "t2"}


def test_inputs_that_repeat_are_found_without_metadata(store: RunStore) -> None:
    samples, repeats, cells = sample_run()
    read, direct = both(store, store_run(store, [replace(each, metadata={}) for each in samples], repeats, cells))
    assert_equal(read, direct)
    assert read.repeated_inputs is not None


def test_what_is_missing_of_a_plan_is_filled_in() -> None:
    columns = Columns.of({"passed": [1.0, 0.0, 1.0]}, clusters=["a", "a", "b"])
    columns = replace(columns, planned=5)
    assert columns.missing_values("passed") == 2
    filled = columns.completed("passed", 0.0)
    assert (filled.planned, len(filled.ids), filled.missing_values("passed")) == (5, 5, 0)
    assert filled.values["passed"].ravel().tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert filled.clusters is not None
    assert filled.clusters.tolist() == [0, 0, 1, 2, 3]  # Each of the missing is a cluster of its own.


def test_quantiles_are_of_costs_and_of_metrics_without_a_range() -> None:
    numbers = {"latency_ms": [10.0, 20.0, 40.0], "reward": [5.0, 7.0, 9.0], "turns": [1.0, 7.0, 3.0]}
    found = per_trial(Columns.of({"passed": [1.0, 0.0, 1.0], "value": [0.5, 0.0, 1.0], **numbers}))
    names = [each.name for each in found]
    assert names == ["latency_ms", "median:latency_ms", "p95:latency_ms", "median:turns", "p95:turns"]


def test_the_share_of_missing_pairs_is_of_the_plan() -> None:
    plain, terse = (Columns.of({"passed": values}) for values in ([1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]))
    terse = replace(terse, outcomes=np.array([[SCORED], [MISSING], [SCORED], [SCORED]], dtype=np.int8))
    assert pair(terse, plain).missing_share == 0.25
    assert replace(pair(terse, plain), planned=8).missing_share == 1 - 3 / 8


def test_pairs_without_errors_are_adjusted_for_the_number_of_tests_too() -> None:
    def sides(*, more: bool) -> tuple[list[Score | str], list[Score | str]]:
        def score(value: float, place: int) -> Score:
            return Score(value, metrics=[Metric("odd", place % 2, bounds=(0, 1))] if more else [])

        plain = [score(float(place >= 5), place) for place in range(45)]
        return [*plain, *["task_error"] * 3], [score(1.0, place) for place in range(48)]

    for more, verdict in ((False, "better"), (True, "no detectable difference")):
        (found, *_) = one(two(*sides(more=more)), metrics=["passed", *(["odd"] if more else [])]).candidates[0].metrics
        assert found.scored_only is not None
        assert (found.scored_only.n, found.scored_only.verdict) == (45, verdict)


def test_the_missing_are_counted_in_words() -> None:
    old = stored([1.0] * 100)
    for count, words in ((1, "the missing is"), (2, "the 2 missing are")):
        new = stored([*[1.0] * (100 - count), *["scorer_error"] * count])
        (reason,) = gate(new, GateRules(margin=0.1, max_missing=0.05), baseline=old).reasons
        assert reason.endswith(f"This assumes that {words} like the others.")


@pytest.mark.parametrize(
    ("scores", "votes", "graded"), [((0, 1), (0, 1), False), ((0, 1), (0.5, 1), True), ((0.5, 1), (0, 1), True)]
)
def test_labels_are_graded_unless_scores_and_labels_are_verdicts(
    scores: tuple[float, float], votes: tuple[float, float], graded: bool
) -> None:
    columns = Columns.of({"helpful": [*scores]})
    by_trial = {(place, 0): {"ann": float(vote)} for place, vote in enumerate(votes)}
    labels = CollectedLabels(by_trial=by_trial, weights=dict.fromkeys(by_trial, 1.0))
    column, found = labels.column(columns, "helpful", by_verdict=False)
    assert found is graded
    assert column.values.ravel().tolist() == [float(vote) for vote in votes]


REVIEW = ReviewNote("helpful", "Is it?", "", ("terse", "plain"), "pass_fail", "00ff", 5)


def test_a_larger_review_contains_a_smaller_one(store: RunStore) -> None:
    columns = TrialColumns.open(store, store_run(store, *sample_run()))
    scored = {each.ordinal: each.experiment for each in store.results("r1", outcomes=["scored"])}
    few, more, all_of_them = (draw_trials(columns, replace(REVIEW, size=size)) for size in (5, 8, 10_000))
    assert few.judged == more.judged == all_of_them.judged == len(scored)
    assert [scored[place] for place in few.ordinals] == ["terse"] * 5 + ["plain"] * 5
    assert few.ordinals == more.ordinals[:5] + more.ordinals[8:13]
    assert sorted(all_of_them.ordinals) == sorted(scored)
    assert draw_trials(columns, replace(REVIEW, seed="0100")).ordinals != few.ordinals
    by_hash = sorted((name for name in scored if scored[name] == "terse"), key=lambda name: hash_of(255, name))
    assert list(few.ordinals[:5]) == by_hash[:5]


def hash_of(seed: int, ordinal: int) -> int:
    return int(keyed_hash(seed, np.array([ordinal], dtype=np.int64))[0])


def test_facts_of_samples_are_found_though_others_are_unknown(store: RunStore) -> None:
    run = store_run(store, *sample_run(), order=[3, 5, 29])
    columns = TrialColumns.open(store, run)
    expected = {each.ordinal: each.sample.metadata.get("topic") for each in store.results("r1")}
    everything = np.arange(columns.extent)
    topics = [None, *columns._file.metadata_values("topic")]
    found = {
        int(place): topics[code] for place, code in enumerate(columns.at("meta:topic", everything).tolist()) if code
    }
    assert {place: found[place] for place in expected} == expected
    assert {place // 4 for place in found} == {3, 5, 29}
    assert columns.stored_part("outcome", 0, 4).tolist() == [0, 0, 0, 0]
    with pytest.raises(ConfigurationError, match="the column must be one of"):
        columns.stored_part("no such", 0, 4)


def test_a_condition_may_have_one_bound(store: RunStore) -> None:
    columns = TrialColumns.open(store, store_run(store, *sample_run()))
    latencies = [each.latency_ms for each in store.results("r1")]
    several: list[dict[str, Any]] = [{"high": 5}, {"low": 5}, {"low": 5, "high": 5}]
    for bounds in several:
        found = columns.select(Condition("latency_ms", **bounds)).total
        assert found == sum(bounds.get("low", 0) <= one <= bounds.get("high", 99) for one in latencies)


def test_a_key_that_no_sample_has_is_nothing_everywhere(store: RunStore) -> None:
    read, _ = both(store, store_run(store, *sample_run()), keys=["none"])
    nothing = read.groups["none"]
    assert (len(nothing), list(nothing[2:5]), len(nothing[-2:]), nothing[-1]) == (30, [None] * 3, 2, None)
    with pytest.raises(IndexError):
        nothing[30]


def test_a_file_is_not_built_for_who_only_looks(store: RunStore) -> None:
    run = store_run(store, *sample_run(missing=False))
    assert open_columns(store, run, build=False) is None
    built = open_columns(store, run)
    assert built is not None
    assert open_columns(store, run, build=False) is built
    forget()
    again = open_columns(store, run, build=False)
    assert again is not None
    assert again is not built


def test_the_file_of_an_incomplete_run_is_used_as_long_as_nothing_is_added(store: RunStore) -> None:
    samples, repeats, cells = sample_run(missing=False)
    never: list[list[Trial]] = [[(None, 0, 0, None, {})] * repeats for _ in cells]
    for last in range(48, 56):  # Blocks are full, or nearly so, or have just begun.
        given = [*cells[:last], *never[last:]]
        run = store_run(store, samples, repeats, given, run_id=f"r{last}")
        with mock.patch.object(column_file, "BLOCK", BLOCK):
            built = open_columns(store, run)
            assert built is not None
            assert open_columns(store, run) is built


def test_values_of_metadata_cannot_be_changed(store: RunStore) -> None:
    samples, repeats, cells = sample_run()
    of_lists = [replace(each, metadata={"topic": ["t", place % 2]}) for place, each in enumerate(samples)]
    found = open_columns(store, store_run(store, of_lists, repeats, cells))
    assert found is not None
    values: list[Any] = list(found.metadata_values("topic"))
    assert [type(value) for value in values] == [FrozenList] * 2
    assert [list(value) for value in values] == [["t", 0], ["t", 1]]


def test_a_file_that_cannot_be_made_stops_nothing(store: RunStore) -> None:
    run = store_run(store, *sample_run())
    with mock.patch.object(type(store), "result_numbers", side_effect=StoreError("gone")):
        assert not write_columns(store, run)
    assert write_columns(store, run)


STOPPED = {
    "stopped": True, "reason": "enough", "rule": {"decides": ["a", "b"]}, "samples": 40, "planned": 40, "beyond": 0,
    "experiments": {}, "pair": None,
}  # fmt: skip


def test_slices_that_differ_in_their_pass_rates_are_noticed() -> None:
    def tested(values: list[Any], *, clusters: bool = False, **given: Any) -> Any:
        topics = [{"topic": "law" if place < 20 else "art"} for place in range(40)]
        teams = [{"cluster": place // 4} if clusters else {} for place in range(40)]
        metadata = [topic | team for topic, team in zip(topics, teams, strict=True)]
        return slice_rate_test(source_of(stored(values, metadata=metadata, **given), ""), "topic")

    different = tested([1.0] * 20 + [0.0] * 18 + [1.0, "task_error"])
    assert different.p_value < 0.001
    assert (different.n, different.groups, different.test) == (39, 2, "permutation of Welch's statistic")
    assert tested([1.0, 0.0] * 20).p_value == 1.0
    clustered = tested([*[1.0] * 24, *[0.0] * 16], clusters=True)
    assert (clustered.n, clustered.test) == (40, "wild cluster bootstrap of Welch's statistic")
    stopped = tested([1.0] * 20 + [0.0] * 20, notes={"adaptive": STOPPED})
    assert isinstance(stopped, stats.Undefined)


def test_scores_by_criterion_are_means_over_samples() -> None:
    def analysis(trials: list[Any], **given: Any) -> ExperimentReport:
        return ExperimentReport.read(source_of(stored({"other": trials[::-1], "own": trials}, **given)["own"], ""))

    def score(value: float, *metrics: Metric) -> Score:
        return Score(value, metrics=metrics)

    bare = analysis([1.0, 0.5, 0.0])
    assert bare.name == "own"
    assert (bare.scores_by_criterion, list(bare.criteria)) == ({"grade": 0.5}, ["grade"])
    assert bare.criteria["grade"].value == pytest.approx(2 / 3)
    none = analysis(["task_error", "timeout"])
    assert none.scores_by_criterion == {}
    judged = [score(1.0, Metric("a", 1.0, passed=True)), score(0.0, Metric("a", 0.25, passed=False), Metric("b", 7.0))]
    once = analysis(judged)
    assert once.scores_by_criterion == {"a": 0.625, "b": 7.0}
    assert {name: found.value for name, found in once.criteria.items()} == {"a": 0.5}
    twice = analysis([[judged[0], judged[0]], [judged[1], "task_error"], [judged[0], judged[1]]])
    assert twice.scores_by_criterion["a"] == pytest.approx((1.0 + 0.25 + 0.625) / 3)


def test_a_comparison_shows_its_first_verdicts() -> None:
    scores = [Score(1.0, metrics=[Metric(name, place) for name in "abc"]) for place in range(4)]
    found = one(two(scores, scores), metrics=["passed", "a", "b", "c"]).candidates[0]
    assert (
        repr(found)
        == "<CandidateComparison terse: "
        + ", ".join(f"{name} {found[name].verdict}" for name in ("passed", "a", "b"))
        + ">"
    )


def test_a_gate_against_another_baseline_is_no_second_attempt() -> None:
    store = open_store("memory:")
    values: list[Any] = [1.0] * 30
    old = stored({"plain": values, "other": values}, run_id="old", store=store)
    for run_id, baseline, attempt in (("a", "plain", 1), ("b", "other", 1), ("c", "plain", 2), ("d", "other", 2)):
        new = stored({"terse": values}, run_id=run_id, store=store, code_hash="c")
        assert gate(new, GateRules(margin=0.2), baseline=old[baseline]).attempt == attempt
