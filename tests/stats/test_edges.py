"""Edge cases: no data, one value, equal values, not a number. Each gives a reason, never 0 or NaN."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from math import floor, inf, isfinite, nan, sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm, t

import fairtrial.stats
from fairtrial import stats
from fairtrial.stats._arrays import binomial_ranks, binomial_tail, find_root


def numbers_in(value: object) -> list[float]:
    if isinstance(value, float):
        return [value]
    if is_dataclass(value):
        return [x for field in fields(value) for x in numbers_in(getattr(value, field.name))]
    return []


def interval_of(value: stats.Interval | stats.Undefined | None) -> stats.Interval:
    assert isinstance(value, stats.Interval)
    return value


UNDEFINED: dict[str, Callable[[], Any]] = {
    "wilson of nothing": lambda: stats.wilson(0, 0),
    "clopper-pearson of nothing": lambda: stats.clopper_pearson(0, 0),
    "error of one": lambda: stats.sem([1]),
    "error of one cluster": lambda: stats.clustered_se([0, 1], ["a", "a"]),
    "t of one": lambda: stats.t_interval([0.3]),
    "t of equals": lambda: stats.t_interval([0.3, 0.3, 0.3]),
    "pass@5 of three": lambda: stats.pass_at_k(3, 2, 5),
    "pass^5 of three": lambda: stats.pass_hat_k(3, 2, 5),
    "bonett-price of nothing": lambda: stats.bonett_price(0, 0, 0),
    "detectable effect of no pairs": lambda: stats.binary_mde(0, 0, 0),
    "detectable effect of one pair": lambda: stats.binary_mde(0, 0, 1),
    "sign-flip of nothing": lambda: stats.signflip([]),
    "sign-flip interval of nothing": lambda: stats.signflip_interval([]),
    "sign-flip interval of five": lambda: stats.signflip_interval([0.1, 0.2, 0.3, 0.4, 0.5]),
    "bootstrap of nothing": lambda: stats.bca_interval([]),
    "bootstrap of equals": lambda: stats.bca_interval([0.2, 0.2, 0.2]),
    "samples for no difference": lambda: stats.sample_size(0.0, omega2=0.1),
    "effect of no samples": lambda: stats.mde(0, omega2=0.1),
    "samples from no error": lambda: stats.samples_to_detect(10, 0.0, 0.1),
    "samples from an error beyond all numbers": lambda: stats.samples_to_detect(10, float("inf"), 0.1),
    "samples from no samples": lambda: stats.samples_to_detect(0, 0.1, 0.1),
    "samples for nought": lambda: stats.samples_to_detect(10, 0.1, 0.0),
    "kappa of nothing": lambda: stats.cohen_kappa([], []),
    "kappa of one label": lambda: stats.cohen_kappa(["y", "y"], ["y", "y"]),
    "fleiss of nothing": lambda: stats.fleiss_kappa([]),
    "fleiss of one rater": lambda: stats.fleiss_kappa([[1, 0], [0, 1]]),
    "fleiss of one label": lambda: stats.fleiss_kappa([[3, 0], [3, 0]]),
    "alpha of nothing": lambda: stats.krippendorff_alpha([]),
    "alpha of single ratings": lambda: stats.krippendorff_alpha([[1, None], [None, 2]]),
    "alpha of equals": lambda: stats.krippendorff_alpha([[1, 1], [1, 1]]),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_the_data_do_not_determine_is_undefined_with_a_sentence(name: str) -> None:
    found = UNDEFINED[name]()
    assert isinstance(found, stats.Undefined)
    assert found.reason.endswith(".")


RECORDS: dict[str, Callable[[], Any]] = {
    "mean of nothing": lambda: stats.mean_interval([]),
    "mean of one cluster": lambda: stats.mean_interval([0, 1, 1], clusters=["a", "a", "a"]),
    "mean of one": lambda: stats.mean_interval([1]),
    "unbounded mean of equals": lambda: stats.mean_interval([7, 7], bounds=None),
    "split of nothing": lambda: stats.variance_split([]),
    "split of one sample": lambda: stats.variance_split([[1, 0]]),
    "split of single repeats": lambda: stats.variance_split([1, 0, 1]),
    "split of one trial": lambda: stats.variance_split([[1]]),
    "split of equals": lambda: stats.variance_split([[1, 1], [1, 1]]),
    "pass@k without enough repeats": lambda: stats.mean_pass_at_k([[1, 0], [1, 1]], 3),
    "no pairs": lambda: stats.paired_difference([], []),
    "no scored pairs": lambda: stats.paired_difference([[], [1]], [[1], []]),
    "one pair": lambda: stats.paired_difference([1], [0]),
    "one graded pair": lambda: stats.paired_difference([0.7], [0.2]),
    "pairs in one cluster": lambda: stats.paired_difference([1, 0], [0, 0], clusters=["a", "a"]),
    "unbounded pairs that differ equally": lambda: stats.paired_difference([5, 7], [4, 6], bounds=None),
    "no pairs for a margin": lambda: stats.noninferiority([], [], margin=0.1),
    "one pair for a margin": lambda: stats.noninferiority([1], [1], margin=0.1),
    "equal pairs for a margin": lambda: stats.equivalence([1, 1, 0], [1, 1, 0], margin=0.1),
    "correction without labels": lambda: stats.prediction_powered_mean([], [], [1, 0]),
    "correction without judged cases": lambda: stats.prediction_powered_mean([1, 0], [1, 0], []),
    "correction without spread or bounds": lambda: stats.prediction_powered_mean([3, 3], [3, 3], [3], bounds=None),
    "correction without failed labels": lambda: stats.rogan_gladen(
        5, 9, true_passes=4, positives=5, true_fails=0, negatives=0
    ),
    "correction by a coin": lambda: stats.rogan_gladen(5, 9, true_passes=5, positives=10, true_fails=5, negatives=10),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_explain_what_they_leave_out(name: str) -> None:
    found = RECORDS[name]()
    assert found.reason
    assert found.reason.endswith(".")
    assert any(getattr(found, field.name) is None for field in fields(found) if field.name != "clusters")
    assert all(isfinite(number) for number in numbers_in(found))


REFUSED: dict[str, Callable[[], Any]] = {
    "nan": lambda: stats.mean_interval([0.5, nan]),
    "inf": lambda: stats.paired_difference([0.5, inf], [0.1, 0.2]),
    "nan in an array": lambda: stats.sem(np.array([1.0, nan])),
    "nan p": lambda: stats.holm([0.1, nan]),
    "p above one": lambda: stats.benjamini_hochberg([1.2]),
    "nan label": lambda: stats.krippendorff_alpha([[nan, 1.0], [1.0, 1.0]]),
    "nan rating": lambda: stats.krippendorff_alpha([[nan, 1.0], [1.0, 2.0]], measurement="interval"),
    "words where numbers belong": lambda: stats.krippendorff_alpha([["a", "b"], ["a", "a"]], measurement="ordinal"),
    "negative ratio": lambda: stats.krippendorff_alpha([[-1, 2], [1, 2]], measurement="ratio"),
    "no such measurement": lambda: stats.krippendorff_alpha([[1, 2], [1, 2]], measurement="cyclic"),  # type: ignore[arg-type] # the point of the case
    "uneven raters": lambda: stats.krippendorff_alpha([[1, 2], [1]]),
    "words": lambda: stats.sem(["a"]),  # type: ignore[list-item] # the point of the case
    "a cube": lambda: stats.mean_interval(np.zeros((2, 2, 2))),
    "a square for the error": lambda: stats.sem(np.zeros((2, 2))),
    "scores and repeats mixed": lambda: stats.mean_interval([[1, 0], 1]),  # type: ignore[arg-type] # the point of the case
    "out of range": lambda: stats.mean_interval([3.0, 0.5]),
    "no range": lambda: stats.mean_interval([0.5], bounds=(1.0, 0.0)),
    "level": lambda: stats.wilson(1, 2, level=95),
    "too many successes": lambda: stats.wilson(3, 2),
    "binary that is graded": lambda: stats.mean_interval([0.5], binary=True),
    "binary pairs that are graded": lambda: stats.paired_difference([0.5], [1], binary=True),
    "labels of another length": lambda: stats.mean_interval([1, 0], clusters=["a"]),
    "pairs of another length": lambda: stats.paired_difference([1, 0], [1]),
    "plain pairs of another length": lambda: stats.paired_se([1, 0], [1]),
    "no repeat": lambda: stats.sample_means([[1], []]),
    "k of nought": lambda: stats.pass_at_k(3, 1, 0),
    "more passes than repeats": lambda: stats.pass_hat_k(3, 4, 1),
    "graded passes": lambda: stats.mean_pass_at_k([[0.5]], 1),
    "negative wins": lambda: stats.mcnemar_exact(-1, 2),
    "capital against an end": lambda: stats.BettingMartingale([0.5]).capital(1.0),
    "bets beyond the range": lambda: stats.BettingMartingale([1.5]),
    "highest below lowest": lambda: stats.BettingMartingale([0.5], [0.4]),
    "highest of other samples": lambda: stats.BettingMartingale([0.5], [0.6, 0.7]),
    "more changes than pairs": lambda: stats.bonett_price(3, 3, 5),
    "negative margin": lambda: stats.noninferiority([1, 0], [0, 0], margin=-0.1),
    "no draws": lambda: stats.signflip(np.linspace(0.1, 1, 40), draws=0),
    "differences beyond the range": lambda: stats.pairs_decision([1.5]),
    "graded rate": lambda: stats.rate_decision([0.5], width=0.1),
    "no width": lambda: stats.rate_decision([1], width=0.0),
    "no step": lambda: stats.pairs_decision([1, 0], every=0),
    "power": lambda: stats.mde(10, omega2=0.1, power=1.0),
    "power of a comparison": lambda: stats.paired_difference([1], [0], power=1.5),
    "negative variance": lambda: stats.mde(10, omega2=-0.1),
    "no repeats": lambda: stats.mde(10, omega2=0.1, repeats_a=0),
    "infinite difference": lambda: stats.sample_size(inf, omega2=0.1),
    "uneven labels": lambda: stats.confusion_matrix(["a"], []),
    "a table that is not square": lambda: stats.cohen_kappa_table([[1, 2, 3], [1, 2, 3]]),
    "negative counts": lambda: stats.cohen_kappa_table([[1, -2], [1, 2]]),
    "uneven panels": lambda: stats.fleiss_kappa([[3, 0], [2, 0]]),
    "uneven judged": lambda: stats.prediction_powered_mean([1], [1, 0], [1]),
    "weight": lambda: stats.prediction_powered_mean([1], [1], [1], weight=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_input_without_meaning_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=r"^[^A-Z].*[^.]$|^(Cohen|Fleiss)"):
        REFUSED[name]()


@pytest.mark.parametrize(("score", "end"), [(1, "high"), (0, "low")])
def test_all_pass_and_all_fail_have_intervals_of_some_width(score: int, end: str) -> None:
    plain = interval_of(stats.mean_interval([score] * 10).interval)
    assert getattr(plain, end) == score
    assert plain.width == pytest.approx(1 - 0.025**0.1, abs=1e-9)
    repeated = interval_of(stats.mean_interval([[score] * 8] * 10).interval)
    assert repeated.width > plain.width  # eight equal repeats of ten samples are still ten samples
    grouped = interval_of(stats.mean_interval([score] * 40, clusters=[i % 4 for i in range(40)]).interval)
    assert grouped.width > plain.width  # forty equal samples of four clusters are worth four
    graded = interval_of(stats.mean_interval([score] * 10, binary=False).interval)
    assert graded.width == pytest.approx(plain.width, rel=0.15)


def test_one_sample_with_many_repeats_is_one_sample() -> None:
    found = stats.mean_interval([[1, 0, 1, 1]])
    assert found.trials == 4
    assert interval_of(found.interval).width > 0.7
    assert found.se is None


def test_graded_scores_use_their_own_range() -> None:
    found = interval_of(stats.mean_interval([4.0, 4.0, 4.0], bounds=(0.0, 5.0)).interval)
    wilson = interval_of(stats.mean_interval([0.8, 0.8, 0.8], binary=False).interval)
    assert (found.low, found.high) == pytest.approx((5 * wilson.low, 5 * wilson.high))
    wide = interval_of(stats.mean_interval([0.0, 50.0], bounds=None).interval)
    assert wide.low < -100
    assert interval_of(stats.t_interval([0.0, 1.0], bounds=(0.0, 1.0))).width == 1


def test_scores_a_hair_below_one_say_no_more_about_rare_zeros_than_perfect_ones() -> None:
    scores = np.linspace(0.95, 1, 50, endpoint=False)
    nearly, perfect = (
        interval_of(stats.mean_interval(scores).interval),
        interval_of(stats.mean_interval(np.ones(50), binary=False).interval),
    )
    # The mean of these samples and 3% of zeros, of which none is seen in 50 samples once in five times.
    assert nearly.low < 0.97 * scores.mean()
    assert nearly.low <= perfect.low + 1 / 50
    mirrored = interval_of(stats.mean_interval(1 - scores).interval)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - nearly.high, 1 - nearly.low))


def test_an_end_is_that_of_the_data_and_one_more_sample_at_the_end_of_the_range() -> None:
    scores = [0.95, 0.96, 0.97, 0.98, 0.99, 0.995]
    more = np.array([*scores, 0.0])
    half = float(t.ppf(0.975, 6)) * more.std(ddof=1) / np.sqrt(7)
    found = interval_of(stats.mean_interval(scores).interval)
    assert found.low == pytest.approx(max(0.0, more.mean() - half))
    # Each of three clusters counts as one.
    clustered = interval_of(stats.mean_interval(np.repeat(scores, 3), clusters=np.repeat(range(6), 3)).interval)
    assert clustered.low == pytest.approx(found.low)


def test_the_interval_of_scores_in_another_range_is_that_of_their_shares() -> None:
    scores = np.array([0.95, 0.96, 0.97, 0.98, 0.99, 0.995])
    one = interval_of(stats.mean_interval(scores).interval)
    other = interval_of(stats.mean_interval(1 + 4 * scores, bounds=(1, 5)).interval)
    assert (other.low, other.high) == pytest.approx((1 + 4 * one.low, 1 + 4 * one.high))


def test_graded_clusters_with_equal_means_do_not_collapse() -> None:
    found = stats.mean_interval([0.2, 0.6, 0.2, 0.6], clusters=["a", "a", "b", "b"])
    assert interval_of(found.interval).width > 0.5
    assert "Only 2 clusters" in found.notes[0]
    spread = stats.mean_interval([0.2, 0.3, 0.5, 0.6, 0.9, 0.7], clusters=[1, 1, 2, 2, 3, 3])
    assert interval_of(spread.interval).method == "Wilson score with effective n 9.8 from clusters, t with 2 df"


def test_a_few_failures_in_one_large_cluster_do_not_pass_for_certainty() -> None:
    values = [1] * 1000
    values[0] = 0
    found = stats.mean_interval(values, clusters=[i // 100 for i in range(1000)])
    assert interval_of(found.interval).low < 0.9
    assert found.effective_n is not None
    assert found.effective_n < 25


def test_clusters_with_repeats_count_neither_twice() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 2, size=(60, 4))
    found = stats.mean_interval(scores, clusters=[i % 20 for i in range(60)])
    assert found.effective_n is not None
    assert 60 < found.effective_n <= 240
    assert "clusters and repeats" in interval_of(found.interval).method


def test_samples_without_a_scored_repeat_are_left_out_and_counted() -> None:
    found = stats.mean_interval([[1, 1], [], [0]], clusters=["a", "b", "c"])
    assert (found.n, found.unscored, found.mean, found.clusters) == (2, 1, 0.5, 2)
    paired = stats.paired_difference([[1, 1], [], [0]], [[1], [1], [0, 1]], clusters=["a", "b", "c"])
    assert (paired.n, paired.unscored, paired.clusters) == (2, 1, 2)
    ragged = stats.variance_split([[1, 0], [], [1], [0, 0, 1]])
    assert (ragged.n, ragged.trials) == (3, 6)
    assert ragged.within == pytest.approx((0.5 + 2 / 3) / 3)


def test_repeats_are_averaged_per_sample_before_anything_else() -> None:
    assert stats.sample_means([[1, 0], [1], [0, 0, 1]]) == pytest.approx([0.5, 1, 1 / 3])
    assert stats.sample_means([1, 0]) == pytest.approx([1, 0])
    found = stats.mean_interval([[1], [0, 0, 0, 0]])
    assert found.mean == 0.5


def test_pass_at_k_over_samples_leaves_out_those_with_too_few_repeats() -> None:
    found = stats.mean_pass_at_k([[1, 0, 0], [0, 0, 0], [1]], 2)
    assert (found.n, found.unscored) == (2, 1)
    assert found.mean == pytest.approx((2 / 3) / 2)
    assert found.interval is not None
    strict = stats.mean_pass_hat_k([[1, 1], [1, 0], []], 2)
    assert (strict.mean, strict.unscored) == (0.5, 1)
    assert stats.mean_pass_at_k([], 1).n == 0


def test_all_ties_leave_room_for_a_difference() -> None:
    plain = stats.paired_difference([1, 0] * 25, [1, 0] * 25)
    assert (plain.ties, plain.p_value, plain.differs) == (50, 1.0, False)
    assert interval_of(plain.interval).width > 0.1
    assert plain.mde is not None
    assert plain.mde > 0.05
    repeated = stats.paired_difference([[1, 0]] * 50, [[0, 1]] * 50)
    assert (repeated.ties, repeated.p_value, repeated.differs) == (50, 1.0, False)
    assert interval_of(repeated.interval).width > 0.1
    assert repeated.mde is not None
    grouped = stats.paired_difference([1, 0] * 25, [1, 0] * 25, clusters=[i // 5 for i in range(50)])
    assert interval_of(grouped.interval).width > 2 * interval_of(plain.interval).width


def test_a_constant_graded_difference_is_not_certain() -> None:
    found = stats.paired_difference([0.75] * 40, [0.5] * 40)
    assert found.difference == 0.25
    assert interval_of(found.interval).low < 0.25 < interval_of(found.interval).high
    assert found.differs


def test_rounding_of_repeats_in_another_order_is_a_tie() -> None:
    found = stats.paired_difference([[0.1, 0.2, 0.3]] * 3, [[0.3, 0.2, 0.1]] * 3)
    assert found.ties == 3


def test_few_clusters_are_named_and_never_narrower_than_single_samples() -> None:
    a, b = [1, 1, 0, 1, 1, 0] * 4, [0, 1, 0, 1, 0, 0] * 4
    alone = interval_of(stats.paired_difference(a, b, binary=False, draws=999).interval)
    grouped = stats.paired_difference(a, b, clusters=[i % 3 for i in range(24)], draws=999)
    assert "Only 3 clusters" in grouped.notes[0]
    found = interval_of(grouped.interval)
    assert found.low <= alone.low
    assert found.high >= alone.high
    five = stats.paired_difference(a, b, clusters=[i % 5 for i in range(24)], draws=999)
    assert five.notes == ()


def test_one_large_cluster_leaves_few_effective_clusters_and_a_wide_interval() -> None:
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(8), [100, 5, 5, 5, 5, 5, 5, 5])
    scores = np.clip(0.5 + 0.15 * rng.normal(size=8)[labels] + 0.1 * rng.normal(size=labels.size), 0, 1)
    found = stats.mean_interval(scores, clusters=labels)
    assert found.effective_clusters == pytest.approx(135**2 / (100**2 + 7 * 25))
    assert "Only 8 clusters, worth 1.8 of equal size" in found.notes[0]
    assert interval_of(found.interval).width > 0.1
    equal = stats.mean_interval(scores[:132], clusters=np.arange(132) % 8)
    assert equal.effective_clusters == pytest.approx(8, abs=0.01)
    assert equal.notes == ()


def test_repeats_drop_the_pseudo_pairs_that_would_hide_a_difference() -> None:
    a, b = [[1.0] * 5] * 50, [[1.0] * 5] * 42 + [[1.0, 1.0, 1.0, 1.0, 0.0]] * 8
    found = stats.paired_difference(a, b, draws=999)
    assert "pseudo" not in interval_of(found.interval).method
    assert found.differs
    assert "pseudo" in interval_of(stats.paired_difference(a, a).interval).method


def test_clusters_of_unequal_size_are_resampled_whole() -> None:
    rng = np.random.default_rng(3)
    labels = np.sort(rng.integers(0, 12, 80))
    a, b = rng.random(80), rng.random(80)
    found = stats.paired_difference(a, b, clusters=labels, draws=999)
    assert "of whole clusters" in interval_of(found.interval).method
    assert found.test is not None
    assert "whole clusters" in found.test
    boot = interval_of(stats.bca_interval(a - b, clusters=labels, draws=999))
    assert boot.low < found.difference < boot.high  # type: ignore[operator] # there are pairs


def test_large_data_use_t_and_say_so() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.random(6_000), rng.random(6_000)
    found = stats.paired_difference(a, b)
    assert interval_of(found.interval).method == "t with 5999 df"
    assert found.test == "t test with 5999 df"
    grouped = stats.paired_difference(a, b, clusters=np.arange(6_000) // 4)
    assert interval_of(grouped.interval).method == "t with 1499 df"
    assert grouped.test == "t test with 1499 df, clustered error"
    rare = np.where(np.arange(6_000) < 20, a, b)  # only 20 differ: their signs can still be flipped
    assert "sign-flip" in (stats.paired_difference(rare, b, draws=999).test or "")


def test_unbounded_metrics_are_compared_without_pseudo_pairs() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.exponential(300, 40), rng.exponential(200, 40)
    found = stats.paired_difference(a, b, bounds=None, draws=999)
    assert interval_of(found.interval).high > 1
    few = stats.paired_difference(a[:4], b[:4], bounds=None)
    assert interval_of(few.interval).method == "t with 3 df and one difference farther out"


def test_the_exact_test_is_offered() -> None:
    a, b = [1] * 7 + [0] + [1] * 13, [0] * 7 + [1] + [1] * 13
    exact = stats.paired_difference(a, b, test="exact")
    assert exact.p_value == pytest.approx(0.0703125)
    assert not exact.differs
    found = stats.paired_difference(a, b)
    assert found.p_value == pytest.approx(max(0.0390625, stats.bonett_price_p(7, 1, 21)))
    assert (found.wins, found.losses, found.ties) == (7, 1, 13)


def test_no_pairs_have_no_verdict() -> None:
    assert stats.paired_difference([], []).differs is None


def test_counts_that_happen_to_be_0_or_1_are_no_rates() -> None:
    few = [0.0, 1.0] * 10
    assert "from scores" in interval_of(stats.mean_interval(few, bounds=(0.0, 10.0)).interval).method
    assert "t with 19 df" in interval_of(stats.mean_interval(few, bounds=None).interval).method
    assert interval_of(stats.mean_interval(few).interval).method == "Clopper-Pearson"
    paired = stats.paired_difference(few, few[::-1], bounds=(0.0, 10.0), draws=999)
    assert paired.test is not None
    assert "McNemar" not in paired.test
    assert "McNemar" in str(stats.paired_difference(few, few[::-1], binary=True, bounds=None).test)


def test_samples_to_detect_follows_the_error() -> None:
    assert stats.samples_to_detect(100, 0.05, 0.1) == 197
    assert stats.samples_to_detect(100, 0.05, -0.1) == 197


def test_early_stopping_stops_at_a_look_and_names_the_winner() -> None:
    found = stats.pairs_decision([1] * 30, every=10)
    assert (found.verdict, found.looked_at, found.wins) == ("better", 10, 10)
    assert found.p_value < 0.05
    assert found.interval.low > 0
    assert stats.pairs_decision([-1] * 30, every=10).verdict == "worse"
    open_ = stats.pairs_decision([1, -1, 0] * 5, every=10)
    assert (open_.verdict, open_.looked_at) == (None, 15)
    assert open_.interval.contains(0.0)
    nothing = stats.pairs_decision([])
    assert (nothing.verdict, nothing.p_value, nothing.looked_at) == (None, 1.0, 0)


def test_a_rate_stops_once_it_is_known_well_enough() -> None:
    outcomes = [1, 1, 1, 0] * 200
    found = stats.rate_decision(outcomes, width=0.2, every=10)
    assert found.stopped
    assert found.looked_at < 800
    assert found.interval.width <= 0.2
    assert not stats.rate_decision(outcomes[:25], width=0.2, every=10).stopped
    assert stats.rate_decision([], width=0.2).interval.width == 1


def test_overwhelming_evidence_stays_a_number() -> None:
    assert isfinite(stats.BettingMartingale([1.0] * 5_000, bounds=(-1, 1)).capital(0.0))


def test_kappa_can_be_negative_at_ninety_percent_agreement() -> None:
    first, second = ["y"] * 95 + ["n"] * 5, ["y"] * 90 + ["n"] * 5 + ["y"] * 5
    kappa = stats.cohen_kappa(first, second)
    assert isinstance(kappa, float)
    assert kappa == pytest.approx(-0.0526, abs=1e-4)


def test_labels_of_several_types_keep_their_order() -> None:
    assert stats.confusion_matrix(["b", 1], [1, "b"]).labels == ("b", 1)
    assert stats.confusion_matrix([True, False], [True, True]).counts == ((0, 1), (0, 1))


def test_ratio_alpha_accepts_zero() -> None:
    found = stats.krippendorff_alpha([[0, 2, 0, 4], [0, 2, 1, 4]], measurement="ratio")
    assert isinstance(found, float)
    assert 0 < found < 1


def test_a_judge_that_was_never_wrong_may_still_be_wrong() -> None:
    found = stats.prediction_powered_mean([1, 0] * 10, [1, 0] * 10, [1] * 50 + [0] * 50)
    assert interval_of(found.interval).width > 0.2
    assert "do not vary" in found.notes[0]
    perfect = stats.rogan_gladen(50, 100, true_passes=20, positives=20, true_fails=20, negatives=20)
    assert interval_of(perfect.interval).width > 0.2


def test_a_correction_beyond_the_range_is_cut_and_keeps_its_width() -> None:
    found = stats.rogan_gladen(100, 100, true_passes=80, positives=100, true_fails=90, negatives=100)
    assert found.estimate == 1
    assert 0 < interval_of(found.interval).width < 0.5
    assert "overshoots" in found.notes[0]
    powered = stats.prediction_powered_mean([1, 1, 1], [0, 0, 1], [1, 1, 1, 1])
    assert powered.estimate == 1
    assert interval_of(powered.interval).width > 0


def test_the_package_imports_nothing_else_of_ours_but_wilson_and_errors() -> None:
    for path in Path(fairtrial.stats.__file__).parent.glob("*.py*"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.split(".")[0] == "fairtrial"]
            allowed = ("fairtrial.stats", "fairtrial.base.rates", "fairtrial.base.lazy", "fairtrial.errors")
            assert all(name.startswith(allowed) for name in ours), path


def test_importing_the_top_package_brings_in_no_numpy() -> None:
    code = "import fairtrial, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'scipy', 'fairtrial.stats')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_is_slow_to_load_is_loaded_where_it_is_needed() -> None:
    slow = ("scipy.stats", "scipy.optimize", "scipy.sparse.csgraph")
    code = (
        f"from fairtrial.stats import *; import fairtrial.reports, sys; sys.exit(any(m in sys.modules for m in {slow}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@given(st.integers(1, 10**6), st.floats(0.001, 0.999), st.sampled_from([0.0005, 0.005, 0.025, 0.05]))
def test_ranks_of_a_binomial_are_those_of_scipy(n: int, rate: float, tail: float) -> None:
    low, high = binomial_ranks(tail, n, rate)
    assert (low, high) == (binom.ppf(tail, n, rate), binom.isf(tail, n, rate))
    assert binomial_tail(high, n, rate) == pytest.approx(binom.sf(high, n, rate), rel=1e-9, abs=1e-300)


@given(
    st.floats(-3, 3), st.floats(0.01, 9), st.floats(0.01, 9), st.floats(0, 0.3), st.sampled_from((2e-12, 1e-6, 1e-3))
)
def test_roots_are_those_of_scipys_brent_to_the_last_bit(
    root: float, below: float, above: float, wave: float, xtol: float
) -> None:
    def call(x: float) -> float:
        return (x - root) ** 3 + (x - root) * 0.1 + wave * (sin(5 * x) - sin(5 * root))

    def steps(x: float) -> float:
        return floor(8 * (x - root)) + 0.5

    low, high = root - below, root + above
    for each in (call, steps):
        if each(low) * each(high) < 0:
            assert find_root(each, low, high, xtol=xtol) == brentq(each, low, high, xtol=xtol)


def test_a_root_at_an_end_is_found_and_one_that_is_not_between_the_ends_is_refused() -> None:
    assert (find_root(lambda x: x, 0.0, 1.0), find_root(lambda x: x - 1, 0.0, 1.0)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="different signs at both ends"):
        find_root(lambda x: x + 1, 0.0, 1.0)


def test_the_public_names_are_all_there() -> None:
    assert len(stats.__all__) == len(set(stats.__all__))
    assert all(getattr(stats, name).__doc__ for name in stats.__all__)


def test_random_sign_patterns_agree_with_the_normal_approximation() -> None:
    rng = np.random.default_rng(8)
    differences = rng.normal(0.12, 1, 300)  # all distinct, so patterns are drawn bit by bit and in chunks
    found = stats.signflip(differences, draws=20_000)
    assert isinstance(found, stats.SignFlip)
    assert (found.exact, found.draws) == (False, 20_000)
    z = differences.sum() / np.sqrt(np.sum(differences**2))
    assert found.p_value == pytest.approx(2 * norm.sf(abs(z)), abs=0.01)
    interval = interval_of(stats.signflip_interval(differences, draws=20_000))
    t = interval_of(stats.t_interval(differences))
    assert (interval.low, interval.high) == pytest.approx((t.low, t.high), abs=0.01)


def test_no_p_values_need_no_adjustment() -> None:
    assert stats.holm([]).size == 0
    assert stats.benjamini_hochberg([]).size == 0


def test_a_level_beyond_the_number_of_draws_falls_back_on_t() -> None:
    rng = np.random.default_rng(9)
    found = stats.paired_difference(rng.random(40), rng.random(40), level=0.9999, draws=199)
    assert interval_of(found.interval).method == "t with 39 df"
