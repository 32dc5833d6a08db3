"""Several systems on the same samples: the join, errors, directions, several datasets, words and every odd case."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fairtrial import ConfigurationError, EvalReport, StopWhen, compare, leaderboard, open_store, stats
from fairtrial.reports import Leaderboard
from fairtrial.reports.compare.pairing import ComparisonSettings
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.metrics import FAILED, SCORED
from fairtrial.reports.leaderboard.leaderboard import mean_over_suites, rank_columns
from fairtrial.reports.leaderboard.preferences import preferences
from fairtrial.store.notes import AdaptiveNote
from tests.reports.build import graded, stored

pytestmark = pytest.mark.proves("R148")


def passes(rate: float, n: int = 200, seed: int = 1) -> list[float]:
    rng = random.Random(f"{rate}{seed}")
    return [float(rng.random() < rate) for _ in range(n)]


FOUR = stored({"plain": passes(0.6), "good": passes(0.9), "better": passes(0.95), "bad": passes(0.3)})


class TestOrder:
    def test_systems_are_ordered_with_rank_intervals_and_a_sentence(self) -> None:
        found = leaderboard(FOUR)
        assert [one.name for one in found.systems] == ["better", "good", "plain", "bad"]
        assert [(one.rank, one.rank_low, one.rank_high) for one in found.systems] == [
            (1, 1, 2),
            (2, 1, 2),
            (3, 3, 3),
            (4, 4, 4),
        ]
        assert found.may_be_best == ("better", "good")
        assert found.sentence == "passed: 2 of 4 systems may be the best: better (97.0%), good (92.5%)."
        assert (found.n, found.baseline, found.lower_is_better, found.warnings) == (200, None, False, ())
        assert sum(one.best or 0 for one in found.systems) == pytest.approx(1)
        with pytest.raises(KeyError, match="no system 'worst' on this leaderboard"):
            found["worst"]

    def test_a_share_of_resamples_that_says_more_than_the_ranks_is_explained(self) -> None:
        sides = next(
            sides
            for seed in range(40)
            for sides in [{name: passes(rate, 60, seed) for name, rate in (("a", 0.8), ("b", 0.65), ("c", 0.6))}]
            if (leaderboard(stored(sides)).systems[0].best or 0) > 0.95
            and leaderboard(stored(sides)).systems[0].rank_high > 1
        )
        report = stored(sides)
        best = leaderboard(report).systems[0]
        said = " ".join(str(leaderboard(report)).split())
        assert f"P(best) of {best.name} is" in said
        assert f"although its rank may be 1 to {best.rank_high}: it is a share of resamples" in said
        assert "a share of resamples, not adjusted" not in str(leaderboard(stored({"a": [1.0] * 50, "b": [0.0] * 50})))

    def test_a_rank_lies_in_its_interval_where_large_means_differ_by_little(self) -> None:
        sides = {
            name: [graded(1.0, m=1e9 + add + 5e-5 * (place % step)) for place in range(25)]
            for name, add, step in (("old", 1e-4, 2), ("new", 3e-4, 3))
        }
        found = leaderboard(stored(sides), metric="m", higher_is_better=["m"])
        assert [(one.name, one.rank, one.rank_low, one.rank_high) for one in found.systems] == [
            ("new", 1, 1, 1),
            ("old", 2, 2, 2),
        ]

    def test_a_mean_has_the_interval_of_the_report(self) -> None:
        entry = leaderboard(FOUR)["good"]
        expected = stats.mean_interval(passes(0.9)).interval
        assert expected is not None
        assert (entry.low, entry.high, entry.mean) == pytest.approx((expected.low, expected.high, np.mean(passes(0.9))))

    def test_differences_from_a_baseline_are_wider_than_one_comparison_alone(self) -> None:
        found = leaderboard(FOUR, baseline="plain")
        assert found["plain"].against_baseline is None
        against = found["good"].against_baseline
        assert against is not None
        assert against.verdict == "better"
        alone = compare(FOUR["plain"], FOUR["good"], metrics="passed")["good"]["passed"]
        assert against.difference == pytest.approx(alone.difference)
        assert against.low is not None
        assert alone.low is not None
        assert 0 < against.low < alone.low
        lost = found["bad"].against_baseline
        assert lost is not None
        assert lost.verdict == "worse"

    def test_a_system_that_is_certainly_close_is_as_good_as_the_baseline(self) -> None:
        same = passes(0.9, 1_000)
        report = stored({"old": same, "new": same, "far": passes(0.5, 1_000)})
        against = leaderboard(report, baseline="old")["new"].against_baseline
        assert against is not None
        assert against.verdict == "as good as"
        other = leaderboard(report, baseline="old", smallest_difference_that_matters=0.0001)["new"].against_baseline
        assert other is not None
        assert other.verdict == "no detectable difference"

    def test_the_only_system_that_may_be_best_is_named_and_so_is_an_open_order(self) -> None:
        one = leaderboard(stored({"a": passes(0.95), "b": passes(0.5), "c": passes(0.4)}))
        assert one.sentence == "passed: a is the best of 3 systems with 97.0% (at 95%, no other may be)."
        none = leaderboard(stored({"a": [1.0, 0.0] * 5, "b": [0.0, 1.0] * 4 + [1.0, 1.0]}))
        assert none.sentence == "passed: any of 2 systems may be the best; b leads with 60.0%."
        assert none.warnings == ("Only 10 samples: only large differences can be detected.",)

    def test_less_is_better_of_costs_and_where_it_is_declared(self) -> None:
        rng = random.Random(2)
        slow = [graded(1, errors=rng.uniform(5, 9)) for _ in range(60)]
        quick = [graded(1, errors=rng.uniform(2, 6)) for _ in range(60)]
        report = stored({"slow": slow, "quick": quick})
        with pytest.raises(ConfigurationError, match="no system can be the best in 'errors'"):
            leaderboard(report, metric="errors")
        assert leaderboard(report, metric="errors", lower_is_better="errors").may_be_best == ("quick",)
        assert leaderboard(report, metric="errors", higher_is_better="errors").may_be_best == ("slow",)
        assert leaderboard(report, metric="latency_ms").lower_is_better

    def test_a_metric_that_evaluators_declare_needs_no_more(self) -> None:
        columns = [
            Columns.of({"toxicity": np.linspace(0, top, 80)}, name=name, directions={"toxicity": False})
            for name, top in (("mild", 0.2), ("rude", 0.9))
        ]
        assert rank_columns({"data": columns}, metric="toxicity").may_be_best == ("mild",)


class TestSamples:
    def test_only_samples_that_every_system_has_are_used_and_the_others_counted(self) -> None:
        store = open_store("memory:")
        ids = [f"s{place}" for place in range(100)]
        one = stored({"a": passes(0.9, 100)}, run_id="r1", store=store, ids=ids)
        two = stored({"b": passes(0.5, 90)}, run_id="r2", store=store, ids=[*ids[:80], *(f"t{i}" for i in range(10))])
        found = leaderboard(one, two)
        assert (found.n, found.suites[0].left_out) == (80, 30)
        assert "30 samples that not every system has are left out; 80 are used." in found.warnings
        assert found["a"].mean == pytest.approx(np.mean(passes(0.9, 100)[:80]))

    def test_errors_count_as_failures_and_what_was_not_scored_is_left_out(self) -> None:
        good = ["task_error", "timeout", *passes(0.9, 98)]
        other = [1.0, 1.0, "scorer_error", *passes(0.6, 97)]
        found = leaderboard(stored({"a": good, "b": other}))
        assert (found.n, found["a"].failures, found["b"].missing) == (99, 2, 1)
        kept = [0.0, 0.0, *passes(0.9, 98)]
        assert found["a"].mean == pytest.approx(np.mean([*kept[:2], *kept[3:]]))
        assert "1 sample without a score of every system is left out." in found.warnings

    def test_errors_that_make_the_order_are_named(self) -> None:
        rows = passes(0.9, 100)
        found = leaderboard(stored({"a": [*["task_error"] * 30, *rows[30:]], "b": passes(0.8, 100)}))
        assert found.systems[0].name == "b"
        assert (
            "Without task errors and timeouts, which count as failures here, a would lead with 92.9%." in found.warnings
        )

    def test_failures_without_a_worst_value_are_named(self) -> None:
        columns = [
            Columns.of(
                {"words": np.arange(50.0) * times}, name=name, outcomes=np.where(np.arange(50) < 3, FAILED, SCORED)
            )
            for name, times in (("a", 1), ("b", 2))
        ]
        settings = ComparisonSettings(higher_is_better=frozenset({"words"}))
        found = rank_columns({"data": columns}, metric="words", settings=settings)
        assert "words has no worst value: 6 failed trials could not be counted in it." in found.warnings

    def test_an_id_that_a_run_has_twice_names_no_sample(self) -> None:
        ids = [str(place) for place in range(40)]
        columns = [
            Columns.of({"passed": passes(0.8, 40)}, name="a", ids=ids),
            Columns.of({"passed": passes(0.7, 40)}, name="b", ids=[*ids[:39], "0"]),
        ]
        found = rank_columns({"data": columns})
        assert (found.n, found.suites[0].left_out) == (38, 1)
        assert any("1 sample id occurs more than once" in line for line in found.warnings)

    def test_repeats_are_averaged_and_clusters_kept_together(self) -> None:
        rng = np.random.default_rng(3)
        clusters = np.repeat(np.arange(20), 10)
        luck = rng.random((20, 2))[clusters]
        columns = [
            Columns.of({"passed": rng.random((200, 3)) < luck[:, [place]]}, name=name, clusters=clusters)
            for place, name in enumerate("ab")
        ]
        found = rank_columns({"data": columns})
        assert found.clusters == 20
        free = rank_columns({"data": [Columns.of(dict(one.values), name=one.name) for one in columns]})
        wide, narrow = (one.pairs[0].high - one.pairs[0].low for one in (found, free))  # type: ignore[operator]
        assert wide > 2 * narrow

    def test_few_clusters_leave_the_order_open(self) -> None:
        clusters = np.repeat(np.arange(3), 30)
        columns = [
            Columns.of({"passed": passes(rate, 90)}, name=name, clusters=clusters)
            for name, rate in (("a", 0.95), ("b", 0.2))
        ]
        found = rank_columns({"data": columns}, baseline="b")
        assert found.may_be_best == ("a", "b")
        assert found.sentence.startswith("passed: the order of 2 systems is open: Only 3 clusters")
        assert [one.best for one in found.systems] == [None, None]
        assert "Only 3 clusters" not in " ".join(found.warnings)
        against = found["a"].against_baseline
        assert against is not None
        assert against.verdict == "unknown"


class TestSeveralDatasets:
    def two(self, **changes: Any) -> tuple[EvalReport, EvalReport]:
        store = open_store("memory:")
        one = stored({"a": passes(0.9, 100), "b": passes(0.7, 100)}, run_id="r1", store=store)
        other = {"b": passes(0.6, 50, seed=2), "a": passes(0.8, 50, seed=2)}
        return one, _of_dataset(stored(other, run_id="r2", store=store, fingerprint="e" * 32, **changes), "other")

    def test_experiments_of_the_same_name_are_one_system_and_datasets_weigh_the_same(self) -> None:
        one, other = self.two()
        found = leaderboard(one, other)
        assert [(suite.name, suite.weight, suite.n) for suite in found.suites] == [
            ("data", 0.5, 100),
            ("other", 0.5, 50),
        ]
        means = (np.mean(passes(0.9, 100)), np.mean(passes(0.8, 50, seed=2)))
        assert found["a"].suite_means == pytest.approx(means)
        assert found["a"].mean == pytest.approx(np.mean(means))
        assert "Means are over 2 datasets, weighted: data 50.0%, other 50.0%." in str(found)

    def test_failures_and_missing_trials_are_those_of_all_datasets(self) -> None:
        store = open_store("memory:")
        rest: list[Any] = [1.0, 0.0] * 10
        first = {"a": ["task_error", *rest], "b": [1.0, *rest]}
        second = {"b": ["timeout", "scorer_error", *rest], "a": ["timeout", 1.0, *rest]}
        one = stored(first, run_id="r1", store=store)
        other = _of_dataset(stored(second, run_id="r2", store=store, fingerprint="e" * 32), "other")
        found = leaderboard(one, other)
        assert {name: (found[name].failures, found[name].missing) for name in "ab"} == {"a": (2, 0), "b": (1, 1)}

    def test_weights_are_taken_by_the_names_of_datasets(self) -> None:
        one, other = self.two()
        found = leaderboard(one, other, weights={"other": 3, "data": 1})
        assert [suite.weight for suite in found.suites] == [0.25, 0.75]
        assert found["b"].mean == pytest.approx(
            0.25 * np.mean(passes(0.7, 100)) + 0.75 * np.mean(passes(0.6, 50, seed=2))
        )
        for wrong in ({"data": 1.0}, {"data": 1.0, "others": 2.0}):
            with pytest.raises(ConfigurationError, match="weights must name every dataset once"):
                leaderboard(one, other, weights=wrong)
        with pytest.raises(ConfigurationError, match="at least 0"):
            leaderboard(one, other, weights={"data": 1, "other": -1})

    def test_a_system_that_a_dataset_lacks_is_refused(self) -> None:
        one, other = self.two()
        with pytest.raises(ConfigurationError, match="'other' has no experiment 'b'"):
            leaderboard(one, other["a"])
        with pytest.raises(ConfigurationError, match="'other' has more than one experiment 'a'"):
            leaderboard(one, other, other["a"])


def _of_dataset(report: EvalReport, name: str) -> EvalReport:
    return EvalReport(report.store, replace(report.run, dataset_name=name))


class TestMeanOverSuites:
    def two(self) -> tuple[EvalReport, EvalReport]:
        one = stored({"a": ["task_error", *passes(0.9, 99)]})
        return one, _of_dataset(stored({"a": passes(0.5, 50)}), "other")

    def test_suites_samples_or_weights_of_ones_own_weigh_the_same(self) -> None:
        found = mean_over_suites(*self.two(), weights={"data": 3, "other": 1})
        first, second = np.mean([0.0, *passes(0.9, 99)]), np.mean(passes(0.5, 50))
        assert [one.mean for one in found.suites.values()] == pytest.approx([first, second])
        assert found.macro.mean == pytest.approx((first + second) / 2)
        assert found.micro.mean == pytest.approx((2 * first + second) / 3)
        assert found.weighted is not None
        assert found.weighted.mean == pytest.approx((3 * first + second) / 4)
        errors = [one.se or 0.0 for one in found.suites.values()]
        assert found.macro.se == pytest.approx(float(np.sqrt(sum(error**2 for error in errors))) / 2)
        assert found.macro.interval is not None
        assert found.macro.interval.contains(0.7)

    def test_one_suite_has_the_interval_of_its_report(self) -> None:
        report = stored({"a": passes(0.9, 60)})
        found = mean_over_suites(report)
        assert found.weighted is None
        assert found.macro.interval == found.micro.interval == report["a"].pass_rate_interval

    def test_latency_needs_no_range(self) -> None:
        assert mean_over_suites(*self.two(), metric="latency_ms").macro.mean is not None

    def test_invalid_means_over_suites_are_refused(self) -> None:
        one, other = self.two()
        with pytest.raises(ConfigurationError, match="each dataset must be given once"):
            mean_over_suites(one, one)
        with pytest.raises(ConfigurationError, match="at least one report"):
            mean_over_suites()
        with pytest.raises(ConfigurationError, match="no trial of 'a' on 'data' has a value for 'wit'"):
            mean_over_suites(one, other, metric="wit")
        with pytest.raises(ConfigurationError, match="name one experiment of each"):
            mean_over_suites(FOUR, other)
        with pytest.raises(ConfigurationError, match="weights must name every dataset once"):
            mean_over_suites(one, other, weights={"data": 1})


class TestRefusals:
    def test_a_leaderboard_of_one_system_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"at least two systems \(got 1\)"):
            leaderboard(FOUR["plain"])
        with pytest.raises(ConfigurationError, match=r"at least two systems \(got 0\)"):
            leaderboard()

    def test_an_unknown_baseline_metric_or_alpha_is_refused_with_what_there_is(self) -> None:
        with pytest.raises(ConfigurationError, match="the systems are plain, good, better, bad"):
            leaderboard(FOUR, baseline="worst")
        with pytest.raises(ConfigurationError, match="no metric 'wit'"):
            leaderboard(FOUR, metric="wit")
        with pytest.raises(ConfigurationError, match="alpha must be between 0 and 1"):
            leaderboard(FOUR, alpha=2)

    def test_a_run_that_looked_at_its_own_results_is_refused(self) -> None:
        note = AdaptiveNote(
            stopped=False, reason=None, rule=StopWhen(0.2), samples=0, planned=0, beyond=0, experiments={}, pair=None
        )
        report = stored({"a": passes(0.9), "b": passes(0.8)}, notes={"adaptive": note.to_json()})
        with pytest.raises(ConfigurationError, match="a leaderboard needs runs of fixed length, but run r1"):
            leaderboard(report)
        with pytest.raises(ConfigurationError, match="a mean over suites needs runs of fixed length"):
            mean_over_suites(report["a"])

    def test_systems_without_a_common_sample_are_refused(self) -> None:
        store = open_store("memory:")
        one = stored({"a": [1.0, 0.0]}, run_id="r1", store=store, ids=["x", "y"])
        two = stored({"b": [1.0, 0.0]}, run_id="r2", store=store, ids=["p", "q"])
        with pytest.raises(ConfigurationError, match="at least two samples that all systems have"):
            leaderboard(one, two)


class TestShown:
    def test_every_format_has_the_sentence_and_the_ranks(self) -> None:
        found = leaderboard(FOUR, baseline="plain")
        assert isinstance(found, Leaderboard)
        assert "2 of 4 systems may be the best" in str(found)
        assert "| 1 | 1 to 2 | better |" in found.to_markdown()
        assert "may be the best" in found.to_html()
        facts = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert facts["format"] == "fairtrial.leaderboard/1"
        assert [one["name"] for one in facts["systems"]] == ["better", "good", "plain", "bad"]
        assert facts["may_be_best"] == ["better", "good"]
        assert len(facts["pairs"]) == 6

    def test_no_line_is_wider_than_80_columns(self) -> None:
        report = stored({"a-system-with-a-long-name": passes(0.6), "good": passes(0.9), "bad": passes(0.3)})
        for text in (str(leaderboard(report)), str(leaderboard(report, baseline="good"))):
            assert max(map(len, text.splitlines())) <= 80
            assert "1 to 1  good" in text


class TestPreferences:
    def judged(self, **experiments: list[Any]) -> EvalReport:
        """Trials of a pairwise judge: (ours first, ours second), or what became of the trial instead."""

        def trial(one: Any) -> Any:
            if isinstance(one, tuple):
                return graded(sum(one) / 2, ours_first=one[0], ours_second=one[1])
            return one

        return stored({name: [trial(one) for one in rows] for name, rows in experiments.items()})

    def test_both_orders_of_every_answer_are_comparisons_with_the_opponent(self) -> None:
        found = preferences(self.judged(a=[(1.0, 1.0), (0.0, 0.5)]), opponent="expected")
        assert found == [
            stats.Preference("a", "expected", "a", "s0"),
            stats.Preference("a", "expected", "expected", "s1"),
            stats.Preference("expected", "a", "a", "s0"),
            stats.Preference("expected", "a", None, "s1"),
        ]

    def test_empty_outputs_and_errors_of_the_system_lose_and_unscored_ones_are_left_out(self) -> None:
        report = self.judged(a=[(1.0, 1.0), graded(0.0), "task_error", "timeout", "scorer_error"])
        won = [one.winner for one in preferences(report["a"])]
        assert won == ["a", "expected", "expected", "expected"] * 2

    def test_systems_are_ranked_by_way_of_their_common_opponent(self) -> None:
        report = self.judged(a=[(1.0, 1.0), (1.0, 0.5), (0.0, 1.0)] * 20, b=[(0.0, 0.0), (0.0, 1.0), (0.5, 0.0)] * 20)
        found = stats.bradley_terry(preferences(report))
        assert isinstance(found, stats.BradleyTerry)
        assert [one.name for one in found.systems] == ["a", "expected", "b"]
        assert found.clusters == 60
        assert (found["a"].rank_low, found["a"].rank_high) == (1, 1)

    def test_samples_that_share_a_cluster_stay_together(self) -> None:
        rows = [graded(1.0, ours_first=1.0, ours_second=1.0)] * 4
        report = stored({"a": rows}, metadata=[{"cluster": "x"}, {"cluster": "x"}, {"cluster": 1}, {}])
        assert {one.cluster for one in preferences(report)} == {("cluster", "x"), ("cluster", 1), "s3"}

    def test_samples_with_the_same_input_stay_together_in_every_report(self) -> None:
        rows = [graded(1.0, ours_first=1.0, ours_second=0.0)] * 4
        inputs = ["same", "other", "same", "last"]
        first = stored({"a": rows}, inputs=inputs)
        alone = stored({"b": rows[:2]}, inputs=inputs[:2])
        made = preferences(first, alone)
        assert {one.cluster for one in made if "a" in (one.first, one.second)} == {"s0", "s1", "s3"}
        assert {one.cluster for one in made if "b" in (one.first, one.second)} == {"s0", "s1"}
        declared = stored({"a": rows}, inputs=inputs, metadata=[{"cluster": "x"}, {}, {}, {}])
        assert {one.cluster for one in preferences(declared)} == {("cluster", "x"), "s1", "s2", "s3"}

    def test_a_report_without_a_pairwise_judge_and_an_opponent_of_the_same_name_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="no result of 'plain' was scored by a pairwise judge"):
            preferences(FOUR)
        with pytest.raises(ConfigurationError, match="must not have the name of the experiment"):
            preferences(FOUR, opponent="plain")
