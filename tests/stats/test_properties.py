"""Properties that hold for any data: agreement with scipy and statsmodels, and invariants."""

import json
from collections.abc import Callable
from dataclasses import astuple
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats as oracle
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.inter_rater import cohens_kappa, fleiss_kappa
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import ttost_paired

from fairtrial import stats
from fairtrial.stats.intervals import totals_error, with_one_farther

modest = settings(deadline=None, max_examples=60, derandomize=True)
few = settings(modest, max_examples=40)

scores = st.floats(0, 1).map(lambda x: round(x, 3))
levels = st.sampled_from([0.8, 0.9, 0.95, 0.99])
bits = st.integers(0, 1)


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int]:
    n = draw(st.integers(1, 400))
    return draw(st.integers(0, n)), n


@st.composite
def clustered(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    n = draw(st.integers(3, 40))
    labels = draw(st.lists(st.integers(0, 7), min_size=n, max_size=n).filter(lambda got: len(set(got)) > 1))
    return draw(st.lists(scores, min_size=n, max_size=n)), labels


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[int] | None]:
    n = draw(st.integers(1, 25))
    one = draw(st.sampled_from([bits.map(float), scores, st.sampled_from([0.0, 0.5, 1.0])]))
    repeats = draw(st.integers(1, 3))
    side = st.lists(st.lists(one, min_size=1, max_size=repeats), min_size=n, max_size=n)
    labels = draw(st.none() | st.lists(st.integers(0, 9), min_size=n, max_size=n))
    return draw(side), draw(side), labels


def number(value: float | stats.Undefined) -> float:
    assert not isinstance(value, stats.Undefined)
    return value


def ends(interval: stats.Interval | stats.Undefined | None) -> tuple[float, float]:
    assert isinstance(interval, stats.Interval)
    return interval.low, interval.high


@modest
@given(counts(), levels)
def test_intervals_of_a_rate_agree_with_statsmodels_and_contain_the_rate(count: tuple[int, int], level: float) -> None:
    k, n = count
    for ours, theirs in ((stats.wilson, "wilson"), (stats.clopper_pearson, "beta")):
        found = ends(ours(k, n, level=level))
        assert found == pytest.approx(proportion_confint(k, n, alpha=1 - level, method=theirs), abs=1e-9)
        assert found[0] <= k / n <= found[1]
        assert found[0] < found[1]
    chosen = stats.clopper_pearson if min(k, n - k) <= 12 else stats.wilson
    assert ends(stats.mean_interval([1] * k + [0] * (n - k), level=level).interval) == pytest.approx(
        ends(chosen(k, n, level=level)), abs=1e-9
    )


@modest
@given(st.lists(scores, min_size=2, max_size=50), levels)
def test_the_t_interval_agrees_with_scipy(values: list[float], level: float) -> None:
    assume(np.ptp(values) > 0)
    expected = oracle.ttest_1samp(values, 0).confidence_interval(level)
    assert number(stats.sem(values)) == pytest.approx(float(oracle.sem(values)), rel=1e-12)
    assert ends(stats.t_interval(values, level=level)) == pytest.approx((expected.low, expected.high), abs=1e-9)
    unbounded = ends(stats.mean_interval(values, bounds=None, level=level).interval)
    assert unbounded[0] <= expected.low + 1e-9
    assert unbounded[1] >= expected.high - 1e-9


@modest
@given(clustered())
def test_the_clustered_error_agrees_with_statsmodels(data: tuple[list[float], list[int]]) -> None:
    values, labels = data
    fit = OLS(np.asarray(values), np.ones(len(values)))
    for correction in (True, False):
        robust = fit.fit(cov_type="cluster", cov_kwds={"groups": np.asarray(labels), "use_correction": correction})
        # statsmodels also scales by (n-1)/(n-k), which is 1 for a lone constant.
        assert number(stats.clustered_se(values, labels, correction=correction)) == pytest.approx(
            float(robust.bse[0]), abs=1e-9
        )


@modest
@given(clustered())
def test_the_error_of_unequal_clusters_agrees_with_its_matrices(data: tuple[list[float], list[int]]) -> None:
    """CR2 and its degrees of freedom as Bell and McCaffrey (2002) write them, by eigenvalues and whole matrices."""
    values, labels = np.asarray(data[0]), np.asarray(data[1])
    n = values.size
    rest = np.eye(n) - np.full((n, n), 1 / n)  # What is left of the samples once their mean is taken off.
    residuals = rest @ values
    columns, variance = [], 0.0
    for cluster in np.unique(labels):
        inside = np.flatnonzero(labels == cluster)
        share, axes = np.linalg.eigh(rest[np.ix_(inside, inside)])
        root = axes @ np.diag(share**-0.5) @ axes.T
        columns.append(rest[:, inside] @ root @ np.full(inside.size, 1 / n))
        variance += float(residuals[inside] @ root @ np.full(inside.size, 1 / n)) ** 2
    spread = np.asarray(columns) @ np.asarray(columns).T
    found = stats.clustered_error(values, labels)
    assert isinstance(found, stats.ClusteredError)
    assert found.se == pytest.approx(variance**0.5, abs=1e-9)
    assert found.df == pytest.approx(np.trace(spread) ** 2 / np.trace(spread @ spread), rel=1e-9)


@modest
@given(st.lists(scores, min_size=2, max_size=40), st.integers(1, 5))
def test_clusters_of_one_size_have_the_error_of_almost_one_size(totals: list[float], size: int) -> None:
    """Equal sizes have formulas of their own; those of other sizes must come to the same."""
    assume(max(totals) - min(totals) > 0.01)
    equal = np.full(len(totals), float(size))
    almost = equal * np.where(np.arange(len(totals)) == 0, 1 + 1e-9, 1)
    mean = sum(totals) / (size * len(totals))
    values = np.asarray(totals)
    exact, close = (totals_error(values, sizes) for sizes in (equal, almost))
    assert astuple(exact) == pytest.approx(astuple(close), rel=1e-6)
    centre, error, farthest = with_one_farther(values, equal, mean)
    more = np.append(values, mean * size + 2 * farthest)
    assert astuple(error) == pytest.approx(astuple(totals_error(more, np.append(equal, size))), rel=1e-9)
    assert centre == pytest.approx(more.sum() / (size * more.size), rel=1e-9)
    assert abs(farthest) == max(abs(one - mean * size) for one in totals)


@few
@given(pairs(), st.sampled_from([0.9, 0.95, 0.975, 0.99]))
def test_p_and_interval_agree_about_zero_at_every_level(
    data: tuple[list[list[float]], list[list[float]], list[int] | None], level: float
) -> None:
    a, b, labels = data
    found = stats.paired_difference(a, b, clusters=labels, draws=199, level=level)
    if found.interval is not None:
        assert found.p_value is not None
        assert found.differs == (found.p_value <= 1 - level)


@modest
@given(clustered())
def test_duplicating_every_sample_inside_its_cluster_leaves_the_clustered_error(
    data: tuple[list[float], list[int]],
) -> None:
    values, labels = data
    once = number(stats.clustered_se(values, labels))
    assert number(stats.clustered_se(values * 2, labels * 2)) == pytest.approx(once, abs=1e-12)
    assert number(stats.clustered_se(values * 3, labels * 3)) == pytest.approx(once, abs=1e-12)


@modest
@given(st.lists(scores, min_size=2, max_size=40))
def test_clusters_of_one_sample_have_the_plain_error(values: list[float]) -> None:
    plain = number(stats.sem(values))
    assert number(stats.clustered_se(values, list(range(len(values))))) == pytest.approx(plain, abs=1e-12)
    assert number(stats.clustered_se(values, [None] * len(values))) == pytest.approx(plain, abs=1e-12)
    zeros = [0.0] * len(values)
    paired = stats.paired_difference(values, zeros, clusters=list(range(len(values))), draws=99)
    assert paired.se == pytest.approx(plain, abs=1e-12)


@modest
@given(st.lists(st.lists(bits, min_size=1, max_size=5), min_size=1, max_size=40), st.none() | st.integers(2, 9))
def test_the_interval_of_a_mean_contains_it_and_never_collapses(samples: list[list[int]], groups: int | None) -> None:
    labels = None if groups is None else [i % groups for i in range(len(samples))]
    found = stats.mean_interval(samples, clusters=labels)
    if labels is not None and len(set(labels)) == 1:
        assert found.interval is None
        assert found.reason
        return
    low, high = ends(found.interval)
    assert found.mean is not None
    assert 0 <= low <= found.mean <= high <= 1
    assert high - low > 1e-3


@few
@given(pairs())
def test_swapping_the_two_systems_negates_everything(
    data: tuple[list[list[float]], list[list[float]], list[int] | None],
) -> None:
    a, b, labels = data
    there = stats.paired_difference(a, b, clusters=labels, draws=199)
    back = stats.paired_difference(b, a, clusters=labels, draws=199)
    assert there.difference is not None
    assert back.difference == pytest.approx(-there.difference, abs=1e-12)
    assert (there.wins, there.losses, there.ties) == (back.losses, back.wins, back.ties)
    assert there.p_value == back.p_value
    assert there.mde == pytest.approx(back.mde, abs=1e-9)
    assert there.se == pytest.approx(back.se, abs=1e-12)
    if there.interval is None:
        assert back.interval is None
        assert there.reason
    else:
        low, high = ends(back.interval)
        assert ends(there.interval) == pytest.approx((-high, -low), abs=1e-9)


@few
@given(pairs())
def test_the_order_of_the_samples_does_not_matter(
    data: tuple[list[list[float]], list[list[float]], list[int] | None],
) -> None:
    a, b, labels = data
    order = np.random.default_rng(len(a)).permutation(len(a)).tolist()
    there = stats.paired_difference(a, b, clusters=labels, draws=199)
    mixed = stats.paired_difference(
        [a[i] for i in order],
        [b[i] for i in order],
        clusters=None if labels is None else [labels[i] for i in order],
        draws=199,
    )
    assert mixed.p_value == there.p_value
    assert (mixed.interval is None) == (there.interval is None)
    if there.interval is not None:
        assert ends(mixed.interval) == pytest.approx(ends(there.interval), abs=1e-9)


@few
@given(pairs())
def test_the_interval_of_a_difference_never_collapses_and_p_is_a_probability(
    data: tuple[list[list[float]], list[list[float]], list[int] | None],
) -> None:
    a, b, labels = data
    found = stats.paired_difference(a, b, clusters=labels, draws=199)
    assert found.n == len(a) == found.wins + found.losses + found.ties
    if found.interval is not None:
        assert found.interval.width > 1e-3
        assert -1 <= found.interval.low <= found.interval.high <= 1
        assert found.p_value is not None
        assert 0 < found.p_value <= 1


@modest
@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_agrees_with_statsmodels(wins: int, losses: int) -> None:
    assume(wins + losses > 0)
    expected = mcnemar([[0, wins], [losses, 0]], exact=True).pvalue
    assert stats.mcnemar_exact(wins, losses) == pytest.approx(float(expected), rel=1e-9)
    assert 0 < stats.mcnemar_midp(wins, losses) <= stats.mcnemar_exact(wins, losses)


@modest
@given(st.lists(st.tuples(bits, bits), min_size=1, max_size=80))
def test_exact_mcnemar_equals_sign_flip_on_pass_fail_data(outcomes: list[tuple[int, int]]) -> None:
    differences = [float(a - b) for a, b in outcomes]
    found = stats.signflip(differences)
    assert isinstance(found, stats.SignFlip)
    assert found.exact
    expected = stats.mcnemar_exact(differences.count(1.0), differences.count(-1.0))
    assert found.p_value == pytest.approx(expected, rel=1e-9)


@few
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=9))
def test_the_enumerated_sign_flip_test_agrees_with_scipy(tenths: list[int]) -> None:
    differences = [value / 10 for value in tenths]
    expected = oracle.permutation_test(
        (np.asarray(differences),), np.mean, permutation_type="samples", n_resamples=10_000
    )
    found = stats.signflip(differences)
    assert isinstance(found, stats.SignFlip)
    assert found.p_value == pytest.approx(float(expected.pvalue), abs=1e-12)


@few
@given(st.lists(st.integers(-20, 20), min_size=6, max_size=9), st.none() | st.integers(6, 7))
def test_the_sign_flip_interval_holds_exactly_the_shifts_that_the_test_accepts(
    tenths: list[int], groups: int | None
) -> None:
    differences = np.asarray(tenths) / 10
    assume(np.ptp(differences) > 0)
    labels = None if groups is None else [i % groups for i in range(len(tenths))]
    found = stats.signflip_interval(differences, clusters=labels)
    if isinstance(found, stats.Undefined):
        assert groups == 5 or len(tenths) < 6
        return
    step = 1e-6
    for shift, accepted in (
        (found.low + step, True),
        (found.high - step, True),
        (found.low - step, False),
        (found.high + step, False),
    ):
        if found.width < 3 * step:
            continue
        p = stats.signflip(differences - shift, clusters=labels)
        assert isinstance(p, stats.SignFlip)
        assert (p.p_value > 0.05) == accepted


def test_adjusted_p_values_agree_with_statsmodels() -> None:
    # Two calls for all of them: statsmodels collects garbage in each, which takes longer than all else.
    p = np.concatenate([np.random.default_rng(1).beta(0.3, 3, 300), [0.0, 0.01, 0.01, 0.5, 0.5, 1.0, 1.0]])
    assert stats.holm(p) == pytest.approx(multipletests(p, method="holm")[1], abs=1e-12)
    assert stats.benjamini_hochberg(p) == pytest.approx(multipletests(p, method="fdr_bh")[1], abs=1e-12)


@modest
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_adjusted_p_values_agree_with_closed_tests_and_with_scipy(p: list[float]) -> None:
    adjusted = stats.holm(p)
    for place, one in enumerate(p):
        # Holm rejects what Bonferroni rejects in every set of the hypotheses that it belongs to.
        sets = [c for size in range(len(p)) for c in combinations([*p[:place], *p[place + 1 :]], size)]
        assert adjusted[place] == pytest.approx(min(1.0, max((len(c) + 1) * min(one, *c, 1.0) for c in sets)))
        assert adjusted[place] >= one - 1e-15
    assert stats.benjamini_hochberg(p) == pytest.approx(oracle.false_discovery_control(p), abs=1e-12)


@modest
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_average_over_all_choices_of_k_repeats(n: int, data: st.DataObject) -> None:
    passes, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(combinations([True] * passes + [False] * (n - passes), k))
    assert number(stats.pass_at_k(n, passes, k)) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert number(stats.pass_hat_k(n, passes, k)) == pytest.approx(sum(map(all, choices)) / len(choices))


@modest
@given(st.lists(st.lists(scores, min_size=4, max_size=4), min_size=2, max_size=20))
def test_the_variance_split_agrees_with_a_one_way_analysis_of_variance(rows: list[list[float]]) -> None:
    split = stats.variance_split(rows)
    array = np.asarray(rows)
    assert split.within == pytest.approx(float(array.var(axis=1, ddof=1).mean()), abs=1e-12)
    expected = float(array.mean(axis=1).var(ddof=1)) - float(array.var(axis=1, ddof=1).mean()) / 4
    assert split.between == pytest.approx(max(0.0, expected), abs=1e-12)


@modest
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=60))
def test_kappas_agree_with_statsmodels(rated: list[tuple[int, int]]) -> None:
    first, second = [a for a, _ in rated], [b for _, b in rated]
    assume(len({*first, *second}) > 1)
    table = stats.confusion_matrix(first, second)
    ours = stats.cohen_kappa(first, second)
    if not isinstance(ours, stats.Undefined):
        assert ours == pytest.approx(float(cohens_kappa(np.asarray(table.counts), return_results=False)), abs=1e-12)
    items = [[list(pair).count(label) for label in range(3)] for pair in rated]
    fleiss = number(stats.fleiss_kappa(items))
    assert fleiss == pytest.approx(float(fleiss_kappa(np.asarray(items))), abs=1e-12)
    # With two raters and no gaps, alpha is Fleiss' kappa (then Scott's pi) with a small-sample correction.
    n = 2 * len(rated)
    alpha = number(stats.krippendorff_alpha([first, second]))
    assert alpha == pytest.approx(1 - (1 - fleiss) * (n - 1) / n, abs=1e-12)


@modest
@given(st.lists(st.tuples(scores, scores), min_size=3, max_size=40), st.floats(0.01, 0.3))
def test_margin_tests_agree_with_scipy_and_statsmodels(values: list[tuple[float, float]], margin: float) -> None:
    a, b = np.asarray(values).T
    assume(np.std(a - b) > 1e-3)
    expected = oracle.ttest_1samp(a - b, -margin, alternative="greater").pvalue
    assert stats.noninferiority(a, b, margin=margin).p_value == pytest.approx(float(expected), abs=1e-9)
    two = ttost_paired(a, b, -margin, margin)[0]
    assert stats.equivalence(a, b, margin=margin).p_value == pytest.approx(float(two), abs=1e-9)


@modest
@given(st.floats(0.01, 0.5), st.floats(0.01, 0.25), st.floats(0, 0.25), st.integers(1, 10))
def test_sample_size_and_detectable_effect_undo_each_other(
    delta: float, omega2: float, sigma2: float, repeats: int
) -> None:
    n = number(stats.sample_size(delta, omega2=omega2, sigma_a2=sigma2, repeats_a=repeats))
    assert isinstance(n, int)
    assert number(stats.mde(n, omega2=omega2, sigma_a2=sigma2, repeats_a=repeats)) <= delta * (1 + 1e-9)
    if n > 1:
        assert number(stats.mde(n - 1, omega2=omega2, sigma_a2=sigma2, repeats_a=repeats)) > delta * (1 - 1e-9)


@modest
@given(st.lists(st.tuples(bits, bits), min_size=2, max_size=30), st.lists(bits, min_size=2, max_size=40))
def test_a_judge_of_no_weight_leaves_the_mean_of_the_labels(labelled: list[tuple[int, int]], rest: list[int]) -> None:
    labels, judged = [y for y, _ in labelled], [f for _, f in labelled]
    found = stats.prediction_powered_mean(labels, judged, rest, weight=0.0)
    assert found.estimate == pytest.approx(np.mean(labels))
    assert found.interval is not None
    assert found.interval.width > 0
    if 0 < sum(labels) < len(labels):
        assert found.se == pytest.approx(np.std(labels) / np.sqrt(len(labels)))


# Every routine against values obtained elsewhere; `reference.json` holds data, values, tolerances and origins.


CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("reference.json").read_text(encoding="utf-8"))


def both_ends(interval: stats.Interval | stats.Undefined | None) -> list[float]:
    assert isinstance(interval, stats.Interval)
    return [interval.low, interval.high]


def paired_figures(a: list[float], b: list[float]) -> dict[str, Any]:
    one, other = stats.sem(a), stats.sem(b)
    assert isinstance(one, float)
    assert isinstance(other, float)
    # An equivalence margin of nought turns one side of the paired t test into its one-sided p.
    one_sided = stats.noninferiority(a, b, margin=0.0).p_value
    assert one_sided is not None
    return {
        "diff": stats.paired_difference(a, b).difference,
        "se": stats.paired_se(a, b),
        "unpaired_se": float(np.hypot(one, other)),
        "t_p": 2 * one_sided,
    }


def repeats_figures(m: list[list[float]]) -> dict[str, Any]:
    split = stats.variance_split(m)
    flat = stats.sem([score for row in m for score in row])
    return {
        "mean": split.mean,
        "se": split.se,
        "within": split.within,
        "between": split.between,
        "wrong_flat_se": flat,
    }


def sample_size(delta: float, omega2: float, sa2: float, sb2: float, K: int = 1) -> int | stats.Undefined:
    return stats.sample_size(delta, omega2=omega2, sigma_a2=sa2, sigma_b2=sb2, repeats_a=K, repeats_b=K)


def mde(n: int, omega2: float, sa2: float, sb2: float, K: int) -> float | stats.Undefined:
    return stats.mde(n, omega2=omega2, sigma_a2=sa2, sigma_b2=sb2, repeats_a=K, repeats_b=K)


def prediction_powered(**given: Any) -> dict[str, Any]:
    found = stats.prediction_powered_mean(**given)
    return {"theta": found.estimate, "se": found.se, "ci": both_ends(found.interval)}


def rogan_gladen(**given: Any) -> dict[str, Any]:
    found = stats.rogan_gladen(**given)
    return {"theta": found.estimate, "se": found.se}


def sign_flip(d: list[float]) -> float:
    found = stats.signflip(d)
    assert isinstance(found, stats.SignFlip)
    assert found.exact
    return found.p_value


ROUTINES: dict[str, Callable[..., Any]] = {
    "wilson95": lambda k, n: both_ends(stats.wilson(k, n)),
    "beta_uniform95": lambda k, n: both_ends(stats.beta_uniform(k, n)),
    "clopper_pearson95": lambda k, n: both_ends(stats.clopper_pearson(k, n)),
    "sem": lambda x: stats.sem(x),
    "clustered_se": lambda y, cluster, correction: stats.clustered_se(y, cluster, correction=correction),
    "paired_se": paired_figures,
    "mcnemar_exact": lambda b, c: stats.mcnemar_exact(b, c),
    "mcnemar_midp": lambda b, c: stats.mcnemar_midp(b, c),
    "bonett_price95": lambda b, c, n: both_ends(stats.bonett_price(b, c, n)),
    "wilson_clustered95": lambda y, cluster: both_ends(stats.mean_interval(y, clusters=cluster).interval),
    "signflip_exact_p": sign_flip,
    "bootstrap_bca95": lambda x: both_ends(stats.bca_interval(x)),
    "pass_at_k": lambda n, c, k: stats.pass_at_k(n, c, k),
    "pass_hat_k": lambda n, c, k: stats.pass_hat_k(n, c, k),
    "holm": lambda p: stats.holm(p).tolist(),
    "bh": lambda p: stats.benjamini_hochberg(p).tolist(),
    "bh_count": lambda p, q: int(np.count_nonzero(stats.benjamini_hochberg(p) <= q)),
    "sample_size": sample_size,
    "mde": mde,
    "epochs": repeats_figures,
    "eprocess_pairs": lambda **n: stats.BettingMartingale([1] * n["w"] + [-1] * n["l"], bounds=(-1, 1)).capital(0.0),
    "betting_cs95": lambda k, n: both_ends(stats.BettingMartingale([1] * k + [0] * (n - k)).interval()),
    "cohen_kappa": lambda table: stats.cohen_kappa_table(table),
    "fleiss_kappa": lambda table: stats.fleiss_kappa(table),
    "krippendorff": lambda ratings: {
        measurement: stats.krippendorff_alpha(ratings, measurement=measurement)
        for measurement in ("nominal", "ordinal", "interval", "ratio")
    },
    "ppi_mean": prediction_powered,
    "rogan_gladen": rogan_gladen,
    "noninferiority_p": lambda a, b, margin: stats.noninferiority(a, b, margin=margin).p_value,
}


def agrees(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(agrees(found[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(agrees, found, expected, [tolerance] * len(expected)))
    return isinstance(found, int | float) and abs(found - expected) <= tolerance


@pytest.mark.parametrize("case", CASES, ids=[f"{i:02d}-{case['name']}" for i, case in enumerate(CASES)])
def test_every_reference_value_is_reached_at_its_tolerance(case: dict[str, Any]) -> None:
    found = ROUTINES[case["name"]](**case["input"])
    assert agrees(found, case["expected"], case["abs_tol"]), (found, case["expected"])


def test_no_reference_case_is_missing() -> None:
    assert len(CASES) == 49
    assert {case["name"] for case in CASES} == set(ROUTINES)
    assert all(case["source"] for case in CASES)
