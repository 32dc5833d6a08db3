"""Comparison of candidates with a baseline: joining samples, verdicts, slices, flipped samples and edge cases."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from fairtrial import ConfigurationError, GateRules, Score, compare, gate, stats
from fairtrial.base import formatting
from fairtrial.reports import by_metric
from fairtrial.reports.compare.compare import compare_columns
from fairtrial.reports.compare.comparison import SHOWN
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from tests.reports.build import Trial, graded, stored
from tests.reports.sides import one, two

pytestmark = pytest.mark.proves("R113")


BETTER = two([0.0] * 40 + [1.0] * 60, [1.0] * 30 + [0.0] * 12 + [1.0] * 58)


class TestVerdicts:
    def test_a_clear_gain_is_called_better_with_all_its_numbers(self) -> None:
        found = one(BETTER, metrics="passed")["terse"]["passed"]
        assert (found.wins, found.losses, found.ties, found.n) == (30, 2, 68, 100)
        expected = stats.bonett_price(30, 2, 100)
        assert isinstance(expected, stats.Interval)
        assert (found.low, found.high) == (expected.low, expected.high)
        assert found.p == max(stats.mcnemar_midp(30, 2), stats.bonett_price_p(30, 2, 100))
        assert (found.difference, found.baseline, found.candidate) == pytest.approx((0.28, 0.6, 0.88))
        assert found.verdict == "better"
        assert found.sentence == (
            "passed: terse is better than plain: 88.0% against 60.0%, +28.0 points "
            "(95% interval +17.6 to +37.3 points), p < 0.001."
        )

    def test_turned_round_it_is_worse(self) -> None:
        found = compare(BETTER["terse"], BETTER["plain"], metrics="passed")["plain"]["passed"]
        assert found.verdict == "worse"
        assert found.difference == pytest.approx(-0.28)

    def test_no_detectable_difference_says_what_could_have_shown_and_what_a_stated_one_takes(self) -> None:
        report = two([0.0] * 10 + [1.0] * 40, [1.0] * 6 + [0.0] * 8 + [1.0] * 36)
        found = one(report, metrics=["passed"])["terse"]["passed"]
        assert found.verdict == "no detectable difference"
        assert found.mde == stats.binary_mde(6, 4, 50)
        assert found.needed is not None
        assert found.needed > 50
        assert "differences below 26.2 points would probably not be detected" in found.sentence
        assert "Detecting a difference of 5.0 points four times in five takes about 790 samples." in found.sentence

    def test_less_is_better_where_it_is_said_or_known(self) -> None:
        rng = random.Random(1)
        slow = [graded(1, errors=rng.uniform(5, 9)) for _ in range(60)]
        quick = [graded(1, errors=rng.uniform(2, 6)) for _ in range(60)]
        report = two(slow, quick)
        assert one(report, metrics=["errors"])["terse"]["errors"].verdict == "lower"
        assert one(report, metrics=["errors"], higher_is_better="errors")["terse"]["errors"].verdict == "worse"
        found = one(report, metrics=["errors"], lower_is_better="errors")["terse"]["errors"]
        assert found.verdict == "better"
        assert found.wins > found.losses
        assert found.difference is not None
        assert found.difference < 0
        assert one(report, metrics=["latency_ms"])["terse"]["latency_ms"].lower_is_better

    def test_the_exact_test_can_be_asked_for(self) -> None:
        found = one(BETTER, metrics="passed", test="exact")["terse"]["passed"]
        expected = max(stats.mcnemar_exact(30, 2), stats.bonett_price_p(30, 2, 100))
        assert (found.p, found.test) == (expected, "exact McNemar test")

    def test_alpha_sets_the_level_of_the_interval(self) -> None:
        found = one(BETTER, metrics="passed", alpha=0.01)["terse"]["passed"]
        expected = stats.bonett_price(30, 2, 100, level=0.99)
        assert isinstance(expected, stats.Interval)
        assert (found.low, found.high) == (expected.low, expected.high)
        assert "99% interval" in found.sentence
        with pytest.raises(ConfigurationError, match="alpha must be between 0 and 1"):
            one(BETTER, alpha=5)


class TestSeveralAtOnce:
    def test_metrics_are_adjusted_by_holm(self) -> None:
        rng = random.Random(2)
        sides = [[graded(rng.random(), f1=rng.random(), words=rng.gauss(9, 1)) for _ in range(30)] for _ in "ab"]
        comparison = one(two(*sides), metrics=None)
        found = comparison["terse"].metrics
        assert [metric.metric for metric in found] == ["passed", "value", "f1", "words"]
        assert comparison.tests == 4
        expected = stats.holm([metric.p or 0.0 for metric in found])
        assert [metric.adjusted_p for metric in found] == pytest.approx(expected.tolist())
        assert "adjusted for 4 tests" in found[0].sentence

    def test_a_metric_with_the_same_numbers_is_not_a_second_test(self) -> None:
        comparison = one(BETTER)
        passed, value = comparison["terse"].metrics
        assert comparison.tests == 1
        assert (value.same_as, value.p, value.verdict) == ("passed", passed.p, passed.verdict)
        assert passed.adjusted_p == passed.p

    def test_several_candidates_are_adjusted_together(self) -> None:
        rng = random.Random(3)
        trials: dict[str, list[Trial]] = {name: [float(rng.random() < 0.7) for _ in range(40)] for name in "abcd"}
        report = stored(trials)
        comparison = compare(*(report[name] for name in "abcd"), metrics=["passed"])
        assert [one.name for one in comparison.candidates] == ["b", "c", "d"]
        raw = [one["passed"].p or 0.0 for one in comparison.candidates]
        assert [one["passed"].adjusted_p for one in comparison.candidates] == pytest.approx(stats.holm(raw).tolist())
        with pytest.raises(ValueError, match=r'3 candidates \(b, c, d\): ask for one, as in comparison\["d"\]'):
            comparison.verdict
        with pytest.raises(KeyError, match="no candidate 'x'"):
            comparison["x"]
        with pytest.raises(KeyError, match="metric 'f1' was not compared"):
            comparison["b"]["f1"]

    def test_what_shows_alone_may_not_show_among_many(self) -> None:
        rng = np.random.default_rng(1)
        values = {f"m{n}": rng.integers(0, 2, 50).astype(float) for n in range(9)}
        changed = dict(values)
        changed["m0"] = values["m0"].copy()
        changed["m0"][np.flatnonzero(values["m0"] == 0)[:7]] = 1.0
        for n in range(1, 9):  # Each a test of its own, and about nothing.
            changed[f"m{n}"] = rng.permutation(values[f"m{n}"])
        sides = Columns.of(values, name="a"), Columns.of(changed, name="b")
        alone = compare_columns(sides[0], [sides[1]], metrics=["m0"])["b"]["m0"]
        among = compare_columns(sides[0], [sides[1]], metrics=list(values))["b"]["m0"]
        assert alone.verdict == "higher"
        assert among.verdict == "no detectable difference"
        assert "On its own this would count as a difference" in among.sentence
        assert alone.mde is not None
        assert among.mde is not None
        assert among.mde > alone.mde


class TestJoin:
    def test_samples_are_matched_by_id_whatever_their_order(self) -> None:
        first = stored([1.0, 0.0, 1.0, 0.0], ids=["a", "b", "c", "d"], run_id="one")
        second = stored([1.0, 1.0, 0.0], ids=["x", "b", "a"], run_id="two", fingerprint="e" * 32)
        found = compare(first, second).candidates[0]
        assert (found.matched, found.only_baseline, found.only_candidate) == (2, 2, 1)
        assert (found["passed"].wins, found["passed"].losses) == (1, 1)
        assert any("2 samples only in" in warning and "2 are compared" in warning for warning in found.warnings)

    def test_runs_of_one_experiment_are_told_apart(self) -> None:
        first, second = stored([1.0], run_id="one"), stored([1.0], run_id="two")
        assert compare(first, second).baseline.name == "baseline of one"
        store = first.store
        third = stored([1.0], run_id="three", store=store)
        assert [compare(first, third).baseline.name, compare(first, third).candidates[0].name] == [
            "suite@1:baseline",
            "suite@2:baseline",
        ]
        assert compare(first, first).candidates[0].name == "baseline of one (2)"
        assert "An experiment is compared with itself." in compare(first, first).warnings

    def test_two_of_several_experiments_are_compared_without_adjustment_for_the_choice_and_it_is_said(self) -> None:
        report = stored({name: [1.0] * 40 for name in ("a", "b", "c", "d")})
        a, b, c, d = (report[name] for name in "abcd")
        (said,) = compare(a, b).warnings
        assert said == (
            "Run r1 has 4 experiments, and 2 are compared: no adjustment was made for choosing them. If their results "
            "were the reason, quote the leaderboard of all of them."
        )
        assert said in str(compare(a, b)).replace("\n  ", " ")
        assert [warning[:39] for warning in compare(a, b, c).warnings] == ["Run r1 has 4 experiments, and 3 are com"]
        assert compare(a, b, c, d).warnings == ()
        other = stored({name: [1.0] * 40 for name in ("a", "b", "c")}, run_id="r2", store=report.store)
        assert compare(a, other["a"]).warnings == ()  # One experiment of each run: nothing was chosen among them.

    def test_what_was_not_run_is_missing(self) -> None:
        first = stored([1.0] * 40, run_id="one")
        second = stored([1.0] * 20, run_id="two", planned=40, status="interrupted")
        comparison = compare(first, second)
        assert comparison.candidates[0].missing_share == 0.5
        assert comparison.candidates[0].candidate.missing == 20
        assert any("50.0% of the trials or pairs are missing" in text for text in comparison.candidates[0].warnings)
        assert "Run two is not finished (interrupted): these are not its final numbers." in comparison.warnings

    @pytest.mark.parametrize(("hidden", "warned"), [(2, False), (40, True)])
    def test_few_missing_outcomes_are_named_where_they_could_move_the_difference(
        self, hidden: int, warned: bool
    ) -> None:
        values = np.resize([1.0, 1.0, 1.0, 0.0], 2000)
        outcomes = np.where(np.arange(2000) < hidden, MISSING, SCORED)
        old = Columns.of({"passed": values}, name="old")
        new = Columns.of({"passed": values[::-1]}, name="new", outcomes=outcomes)
        found = compare_columns(old, [new], metrics=["passed"]).candidates[0]
        assert any("are missing (not run, or not scored" in text for text in found.warnings) is warned

    def test_different_evaluators_and_an_early_end_are_mentioned(self) -> None:
        first = stored([1.0] * 3, run_id="one")
        second = stored([1.0] * 3, run_id="two", evaluator="other", status="stopped")
        warnings = compare(first, second).warnings
        assert any("scored by different evaluators (grade, other)" in text for text in warnings)
        assert any("Run two was stopped early" in text for text in warnings)

    def test_different_datasets_are_mentioned(self) -> None:
        first = stored([1.0] * 3, run_id="one")
        second = stored([1.0] * 3, run_id="two", fingerprint="e" * 32, inputs=[None] * 3)
        said = compare(first, second).candidates[0].warnings
        assert any("an id must mean the same sample in all of them" in text for text in said)

    def test_clusters_can_be_named_or_left_out_of_it(self) -> None:
        shared = [{"cluster": place // 10, "passage": place // 5} for place in range(100)]
        report = two([1.0] * 100, [0.0] * 100, metadata=shared)
        counts = [one(report, cluster=key)["terse"]["passed"].clusters for key in (None, "passage", "")]
        assert counts == [10, 20, None]

    def test_a_report_of_several_experiments_alone_is_refused_with_the_way_out(self) -> None:
        with pytest.raises(ConfigurationError, match=r'covers 2 experiments .*compare\(report\["plain"\], report'):
            compare(BETTER)
        with pytest.raises(ConfigurationError, match="needs a baseline and at least one candidate"):
            compare(BETTER["plain"])

    def test_a_metric_that_no_trial_has_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="no metric 'f1': the metrics are passed, value"):
            one(BETTER, metrics=["f1"])
        with pytest.raises(ConfigurationError, match="at least one metric"):
            one(BETTER, metrics=[])


class TestErrors:
    def test_task_errors_and_timeouts_are_failures_and_scorer_errors_are_missing(self) -> None:
        report = two([1.0, 1.0, 1.0, 1.0], ["timeout", "task_error", "scorer_error", 1.0])
        found = one(report)["terse"]
        assert (found["passed"].n, found["passed"].losses, found["passed"].ties) == (3, 2, 1)
        assert (found.candidate.failures, found.candidate.missing, found.missing_share) == (2, 1, 0.25)
        scored = found["passed"].scored_only
        assert scored is not None
        assert (scored.n, scored.difference) == (1, 0.0)

    def test_a_verdict_that_hangs_on_errors_says_so(self) -> None:
        report = two([1.0] * 60, [1.0] * 45 + ["timeout"] * 15)
        found = one(report)["terse"]
        assert found["passed"].verdict == "worse"
        assert found["passed"].scored_only is not None
        assert found["passed"].scored_only.verdict == "no detectable difference"
        assert (
            "passed: worse with task errors and timeouts as failures, but no detectable difference on the 45 pairs "
            "scored on both sides: the errors make the difference."
        ) in found.warnings

    def test_a_failure_is_the_worst_value_of_a_metric_that_has_one(self) -> None:
        base = [graded(1, recall=0.9, toxic=0.1, words=80 + n) for n in range(12)]
        report = two(base, [*base[:8], *["timeout"] * 4])
        found = one(
            report,
            metrics=["recall", "toxic", "words"],
            lower_is_better=["toxic"],
            higher_is_better=["recall", "words"],
            bounds={"recall": (0, 1), "toxic": (0, 1)},
        )["terse"]
        assert found["recall"].candidate == pytest.approx(0.6)
        assert found["toxic"].candidate == pytest.approx(0.4)
        assert found["words"].n == 8
        assert found["words"].uncounted == 4
        assert any(told.startswith("words has no worst value: 4 failed trials") for told in found.warnings)

    def test_a_range_can_be_given(self) -> None:
        base = [graded(1, stars=4.0), graded(1, stars=5.0), graded(1, stars=3.0)]
        found = one(
            two(base, [base[0], base[1], "timeout"]),
            metrics=["stars"],
            bounds={"stars": (1.0, 5.0)},
            higher_is_better="stars",
        )
        assert found["terse"]["stars"].candidate == pytest.approx(10 / 3)
        free = one(two([0.5] * 9, [0.5] * 9), metrics=["value"], bounds={"value": None})["terse"]["value"]
        assert (free.verdict, free.low) == ("unknown", None)
        assert "Without bounds, equal differences (or a single one) give no interval." in free.sentence


class TestFlips:
    def test_flipped_samples_are_named_both_ways_and_their_results_are_at_hand(self) -> None:
        report = two([1.0, 0.0, 1.0, 1.0], [0.0, 1.0, "timeout", 1.0])
        comparison = one(report)
        flips = comparison["terse"].flips
        assert (flips.gained, flips.lost, flips.gained_count, flips.lost_count) == (("s1",), ("s0", "s2"), 1, 2)
        lost = comparison.flipped("lost")
        assert len(lost) == 2
        assert [flip.sample_id for flip in lost] == ["s0", "s2"]
        assert (lost[1].baseline[0].passed, lost[1].candidate[0].outcome) == (True, "timeout")
        assert lost[1].candidate[0].sample.input == "question 2"
        assert comparison.flipped("gained", "terse")[0].candidate[0].passed
        assert lost[:1].ids == ("s0",)
        assert repr(lost) == "<2 flipped samples>"

    def test_the_largest_changes_come_first(self) -> None:
        report = two([[1.0, 1.0, 1.0]] * 3, [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        assert one(report)["terse"].flips.lost == ("s1", "s2", "s0")

    def test_records_name_some_and_the_rest_is_there_on_demand(self) -> None:
        many = SHOWN + 70
        comparison = one(two([1.0] * many, [0.0] * many), metrics=["passed"])
        flips = comparison["terse"].flips
        assert (len(flips.lost), flips.lost_count) == (SHOWN, many)
        assert sum(not flip.candidate[0].passed for flip in comparison.flipped()) == many

    def test_numbers_alone_have_no_results_to_show(self) -> None:
        columns = Columns.of({"passed": [1.0, 0.0]})
        with pytest.raises(ValueError, match="made of numbers alone"):
            compare_columns(columns, [columns], metrics=["passed"]).flipped()

    def test_of_several_candidates_one_must_be_named(self) -> None:
        report = stored({"a": [1.0], "b": [0.0], "c": [1.0]})
        comparison = compare(report["a"], report["b"], report["c"])
        with pytest.raises(ValueError, match="say whose: b, c"):
            comparison.flipped()
        assert comparison.flipped(candidate="b").ids == ("s0",)


class TestEdges:
    """Each odd case ends in a sentence that a person can act on."""

    def test_no_samples(self) -> None:
        report = two([], [])
        found = one(report)["terse"]
        assert (found.matched, found.verdict) == (0, "unknown")
        assert found["passed"].sentence == (
            "passed: terse and plain cannot be compared: they have no sample in common."
        )
        assert "terse and plain have no sample in common: they were run on different data." in found.warnings

    def test_one_sample(self) -> None:
        found = one(two([0.0], [1.0]))["terse"]
        assert found["passed"].verdict == "no detectable difference"
        assert "With 1 sample, even the largest possible difference might be missed." in found["passed"].sentence
        assert not any("only large differences can be detected" in line for line in found.warnings)

    @pytest.mark.parametrize("value", [1.0, 0.0])
    def test_all_pass_or_all_fail(self, value: float) -> None:
        found = one(two([value] * 50, [value] * 50))["terse"]["passed"]
        assert (found.verdict, found.difference, found.p) == ("no detectable difference", 0.0, 1.0)
        assert found.low is not None
        assert found.low < 0
        assert "Every pair is equal." in found.sentence
        assert "would probably not be detected" in found.sentence

    def test_all_ties_of_graded_scores(self) -> None:
        values = [place / 50 for place in range(50)]
        found = one(two(values, values), metrics=["value"])["terse"]["value"]
        assert (found.ties, found.verdict, found.needed) == (50, "no detectable difference", None)
        assert found.low is not None
        assert found.high is not None
        assert found.low < 0 < found.high

    def test_all_task_errors_on_one_side_are_a_defeat(self) -> None:
        found = one(
            two([graded(1, f1=0.5)] * 40, ["task_error"] * 40),
            metrics=["passed", "f1"],
            higher_is_better="f1",
            bounds={"f1": (0, 1)},
        )["terse"]
        assert [metric.verdict for metric in found.metrics] == ["worse", "worse"]
        assert found["passed"].scored_only is not None
        assert found["passed"].scored_only.verdict == "unknown"

    def test_all_scorer_errors_on_one_side_say_nothing(self) -> None:
        found = one(two([1.0] * 40, ["scorer_error"] * 40))["terse"]
        assert (found.verdict, found.missing_share) == ("unknown", 1.0)
        assert found["passed"].sentence.endswith("no trial of terse has a value for passed.")

    def test_disjoint_samples(self) -> None:
        first = stored([1.0] * 3, ids=["a", "b", "c"], run_id="one")
        second = stored([1.0] * 3, ids=["d", "e", "f"], run_id="two", fingerprint="e" * 32)
        found = compare(first, second).candidates[0]
        assert (found.matched, found.only_baseline, found.only_candidate, found.verdict) == (0, 3, 3, "unknown")
        assert "baseline of two and baseline of one have no sample in common: they were run on different data." in (
            found.warnings
        )

    def test_one_cluster(self) -> None:
        report = two([1.0] * 20, [0.0] * 20, metadata=[{"cluster": "only"}] * 20)
        found = one(report)["terse"]["passed"]
        assert (found.verdict, found.clusters, found.low) == ("unknown", 1, None)
        assert "All samples are in one cluster, so the variance between clusters is not known." in found.sentence

    def test_three_clusters_have_an_interval_and_no_verdict(self) -> None:
        report = two([1.0] * 60, [0.0] * 60, metadata=[{"cluster": place % 3} for place in range(60)])
        note = "Only 3 clusters: about 4 are the least for a verdict."
        found = one(report)["terse"]
        assert note in found.warnings
        assert (found.verdict, found["passed"].low) == ("unknown", -1.0)
        assert found["passed"].sentence.startswith("passed: no verdict on terse and plain: 0.0% against 100.0%")
        assert found["passed"].sentence.endswith(note)
        five = two([1.0] * 60, [0.0] * 60, metadata=[{"cluster": place % 5} for place in range(60)])
        assert one(five).verdict == "worse"

    def test_one_large_cluster_among_five_leaves_no_verdict(self) -> None:
        clusters = [{"cluster": 0 if place < 150 else place % 4 + 1} for place in range(190)]
        found = one(two([1.0] * 150 + [0.0] * 40, [0.0] * 150 + [0.0] * 40, metadata=clusters))["terse"]
        assert found.verdict == "unknown"
        assert any(line.startswith("Only 5 clusters, worth 1.6 of equal size because some") for line in found.warnings)

    @pytest.mark.parametrize("clusters", [6, 7, 8])
    @pytest.mark.parametrize("tests", [2, 8])
    def test_several_metrics_of_few_clusters_can_show_a_total_failure(self, clusters: int, tests: int) -> None:
        labels = np.arange(10 * clusters) % clusters
        names = ["passed", *(f"m{place}" for place in range(1, tests))]
        rng = np.random.default_rng(1)
        sides = []
        for name, mean in (("old", 0.9), ("new", 0.3)):
            scores = np.clip(mean + rng.normal(0, 0.02, clusters)[labels] + rng.normal(0, 0.02, labels.size), 0, 1)
            other = {metric: rng.random(labels.size) for metric in names[1:]}
            sides.append(Columns.of({"passed": scores, **other}, name=name, clusters=labels))
        found = compare_columns(sides[0], [sides[1]], metrics=names)["new"]["passed"]
        assert (found.verdict, found.test) == ("worse", f"t test with {clusters - 1} df, clustered error")
        assert found.adjusted_p is not None
        assert found.adjusted_p <= 0.05

    def test_duplicate_ids(self) -> None:
        first = Columns.of({"passed": [1.0, 0.0, 1.0, 1.0]}, name="one", ids=["a", "a", "b", "c"])
        second = Columns.of({"passed": [1.0, 0.0, 1.0]}, name="two", ids=["a", "b", "d"])
        found = compare_columns(first, [second], metrics=["passed"])["two"]
        assert (found.matched, found.only_baseline, found.only_candidate) == (1, 1, 1)
        assert any("1 sample id occurs more than once on a side" in text for text in found.warnings)
        same = compare_columns(first, [first], metrics=["passed"]).candidates[0]
        assert (same.matched, same.only_baseline) == (2, 0)

    def test_a_metric_missing_in_one_run(self) -> None:
        found = one(two([graded(1, f1=0.5)] * 5, [1.0, 1.0, 1.0, 1.0, "timeout"]), metrics=["passed", "f1"])["terse"]
        assert found["f1"].verdict == "unknown"
        assert found["f1"].sentence == ("f1: terse and plain cannot be compared: no trial of terse has a value for f1.")
        assert found["passed"].verdict == "no detectable difference"


class TestWords:
    def test_what_is_just_short_of_a_round_number_does_not_read_as_it(self) -> None:
        assert [formatting.mean_text(value, percent=True) for value in (0.99996, 1.0, 0.0001, 0.0)] == [
            ">99.9%", "100.0%", "<0.1%", "0.0%",
        ]  # fmt: skip
        assert formatting.change_text(-0.0, percent=True) == "+0.0 points"
        for write in (formatting.change_text(0.0003, percent=True), formatting.signed(0.0003, percent=True)):
            assert write.startswith("+0.03")
        assert formatting.signed(-0.0003, percent=True) == "-0.03"
        assert formatting.signed(0.0, percent=True) == "0.0"

    def test_bounds_read_as_they_were_asked_for_and_ends_of_intervals_are_told_from_them(self) -> None:
        assert [formatting.bound_text(value, percent=True) for value in (0.8, 0.8125, 0.9995)] == [
            "80.0%",
            "81.25%",
            "99.95%",
        ]
        assert [formatting.bound_text(value, percent=False) for value in (0.8, 0.81254, 2000.5)] == [
            "0.800",
            "0.81254",
            "2,000.5",
        ]
        assert [formatting.margin_text(value, percent=True) for value in (0.02, 0.0025)] == [
            "2.0 points",
            "0.25 points",
        ]
        assert [formatting.margin_text(value, percent=False) for value in (0.02, 0.01234)] == ["0.020", "0.01234"]
        assert formatting.end_text(0.79999, 0.8, percent=True) == "79.999%"
        assert formatting.end_text(0.8, 0.8, percent=True) == "80.0%"
        assert formatting.end_text(0.80004, 0.8, percent=False) == "0.80004"
        assert formatting.end_text(0.8 + 1e-16, 0.8, percent=False) == "0.800"

    def test_a_level_is_not_rounded_to_certainty(self) -> None:
        sides = two([1.0, 0.0] * 10, [0.0, 1.0] * 10)
        assert "(99.9% interval" in one(sides, alpha=0.001)["terse"]["passed"].sentence
        levels = [0.995, 0.9999, 1 - 0.05 / 6, 0.05 / 6, 0.5]
        assert [*map(formatting.level, levels)] == ["99.5%", "99.99%", "99.167%", "0.833%", "50%"]

    def test_a_verdict_that_is_reached_needs_no_more_samples(self) -> None:
        found = one(two([0.0] * 9 + [1.0] * 91, [1.0] * 98 + [0.0] * 2), metrics=["passed"])
        better = found["terse"]["passed"]
        assert better.verdict == "better"
        assert better.needed is not None
        assert "takes about" not in better.sentence

    def test_one_of_two_tests_is_not_said_to_be_expected_to_err(self) -> None:
        change = np.repeat([1.0, -1.0, 0.0], [12, 3, 85])
        other = np.repeat([1.0, -1.0, 0.0], [10, 10, 80])
        baseline, candidate = (
            Columns.of({"passed": np.maximum(sign * change, 0), "other": np.maximum(sign * other, 0)}, name=name)
            for sign, name in ((-1, "a"), (1, "b"))
        )
        settings = ComparisonSettings(alpha=0.03)
        said = compare_columns(baseline, [candidate], metrics=["passed", "other"], settings=settings)["b"]["passed"]
        assert said.verdict == "no detectable difference"
        assert "On its own this would count as a difference; among 2 tests it may be chance." in said.sentence

    def test_the_adjustment_of_slices_is_explained(self) -> None:
        values = {"passed": [1.0, 0.0] * 30}
        groups = {"topic": ["x", "y", "z"] * 20}
        sides = [Columns.of(values, name=name, groups=groups) for name in ("a", "b")]
        record = compare_columns(sides[0], sides[1:], metrics=["passed"], slice_by="topic")
        shown = " ".join(str(record.in_detail()).split())
        assert (
            "Adjusted p-values of slices allow for 3 tests: of the slices that are called different, at most 5%"
            in shown
        )

    def test_numbers_are_written_as_they_are_read(self) -> None:
        assert [formatting.mean_text(0.8123, percent=percent) for percent in (True, False)] == ["81.2%", "0.812"]
        assert formatting.change_text(-0.00002, percent=True) == "-0.002 points"
        assert formatting.range_text(-0.01, 0.02, percent=True) == "-1.0 to +2.0 points"
        assert formatting.range_text(-1234.5, 20.04, percent=False) == "-1,234 to +20.0"
        assert formatting.change_text(0.00012, percent=False) == "+0.00012"
        assert [formatting.p_text(p) for p in (0.0001, 0.0123, 0.5, None)] == [
            "p < 0.001", "p = 0.012", "p = 0.50", "p undefined",
        ]  # fmt: skip
        assert [formatting.samples_text(count) for count in (99, 101, 12_345)] == ["99", "110", "13,000"]
        assert (
            formatting.mean_text(None, percent=False),
            formatting.change_text(None, percent=False),
            formatting.range_text(None, 1.0, percent=False),
        ) == (
            "-", "-", "-",
        )  # fmt: skip


class TestRecords:
    def test_a_comparison_becomes_json(self) -> None:
        report = two([1.0, 0.0, 0.5], [1.0, 1.0, "timeout"], metadata=[{"k": 1}, {"k": 2}, {}])
        found = json.loads(json.dumps(one(report, slice_by="k").to_json()))
        assert found["candidates"][0]["metrics"][0]["metric"] == "passed"
        assert found["candidates"][0]["flips"]["gained"] == ["s1"]
        assert "sources" not in found

    def test_printed_it_is_its_sentences(self) -> None:
        comparison = one(BETTER, slice_by=by_metric("value", at=0.5))
        assert comparison["terse"]["passed"].sentence in " ".join(str(comparison).split())
        assert comparison.verdict == "better"

    def test_the_same_data_always_give_the_same_answer(self) -> None:
        rng = np.random.default_rng(5)
        sides = [Columns.of({"value": rng.random(200)}, name=name) for name in "ab"]
        found = [compare_columns(sides[0], [sides[1]], metrics=["value"]) for _ in range(2)]
        assert found[0] == found[1]

    def test_outcomes_of_columns_count_like_those_of_runs(self) -> None:
        outcomes = np.array([1, 1, FAILED, 0])
        side = Columns.of({"passed": [1.0, 0.0, np.nan, np.nan]}, outcomes=outcomes, name="b")
        full = Columns.of({"passed": [1.0, 1.0, 1.0, 1.0]}, name="a")
        found = compare_columns(full, [side], metrics=["passed"])["b"]
        assert (found["passed"].n, found["passed"].losses, found.candidate.missing) == (3, 2, 1)


class TestFewScoredPairs:
    def test_a_verdict_without_pairs_scored_on_both_sides_is_said_to_rest_on_errors(self) -> None:
        half: list[Trial] = [0.0] * 10 + ["task_error"] * 10  # One side scored or the other, never both.
        for baseline, candidate, verdict in (
            (half, half[::-1], "no detectable difference"),
            (["task_error"] * 20, [1.0] * 20, "better"),
        ):
            found = one(two(baseline, candidate), metrics="passed")["terse"]
            assert found["passed"].verdict == verdict
            assert (
                f"passed: {verdict} with task errors and timeouts as failures; no pair is scored on both sides."
                in found.warnings
            )
            assert not any("make the difference" in line for line in found.warnings)

    def test_only_pairs_with_a_score_on_both_sides_are_counted_as_few(self) -> None:
        found = one(two([1.0] * 40, [1.0] * 10 + ["scorer_error"] * 30), metrics="passed")["terse"]
        assert "Only 10 pairs: only large differences can be detected." in found.warnings
        nothing = one(two([1.0] * 10, ["scorer_error"] * 10), metrics="passed")["terse"]
        assert not any(line.endswith("only large differences can be detected.") for line in nothing.warnings)

    def test_runs_on_different_samples_are_not_said_to_lack_values(self) -> None:
        old = stored({"old": [1.0, 0.0] * 10}, ids=[f"x{place}" for place in range(20)])
        new = stored({"new": [1.0, 0.0] * 10}, ids=[f"y{place}" for place in range(20)], run_id="r2")
        found = compare(old["old"], new["new"], metrics="passed")["new"]
        assert found["passed"].sentence == "passed: new and old cannot be compared: they have no sample in common."
        assert found.warnings == ("new and old have no sample in common: they were run on different data.",)
        (reason,) = gate(new["new"], GateRules(margin=0.05), baseline=old["old"]).reasons
        assert reason.endswith("cannot be decided: the two sides have no sample in common: run both on the same data.")


def test_samples_whose_score_alone_changed_are_counted_and_sorted_by_the_change() -> None:
    values = {"plain": [0.8, 0.8, 0.9, 0.2], "terse": [0.8, 0.7, 0.6, 0.9]}
    sides = {name: [Score(value, value >= 0.5) for value in scores] for name, scores in values.items()}
    (changes,) = compare(stored(sides)["plain"], stored(sides)["terse"]).changes
    assert [changes.count(kind) for kind in ("same", "changed", "lost", "gained")] == [1, 2, 0, 1]
    assert list(changes.ids_of("changed")) == ["s2", "s1"]
