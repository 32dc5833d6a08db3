"""Rankings of several systems and means over suites, against independent code and by seeded simulation."""

from __future__ import annotations

import itertools
import time
from math import sqrt

import numpy as np
import pytest
import statsmodels.api
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, norm, studentized_range, t

from benchmarks.coverage_designs import monte_carlo_error
from benchmarks.coverage_designs.leaderboard import TIED, draw_systems, mean_covered, ranks_covered
from benchmarks.coverage_designs.preferences import STRENGTHS, draw_preferences, shares_covered
from fairtrial import stats
from fairtrial.stats import BradleyTerry, Preference, Ranking, SystemScores

pytestmark = pytest.mark.proves("R148")
type Array = NDArray[np.float64]


def ranked(*suites: Array | SystemScores, **given: object) -> Ranking:
    found = stats.rank_systems(*suites, **given)  # type: ignore[arg-type]
    assert isinstance(found, Ranking)
    return found


def outcomes(rates: list[float], n: int, seed: int = 1) -> Array:
    return draw_systems(np.random.default_rng(seed), rates, n)


class TestReference:
    def test_many_independent_systems_have_tukeys_critical_value(self) -> None:
        scores = np.random.default_rng(1).standard_normal((6_000, 5))
        found = ranked(SystemScores(scores, bounds=None), draws=60_000)
        assert found.method == "max-T of normal differences"
        assert found.pairs.critical == pytest.approx(studentized_range.ppf(0.95, 5, np.inf) / sqrt(2), rel=0.01)

    def test_differences_from_a_baseline_have_dunnetts_critical_value(self) -> None:
        scores = np.random.default_rng(2).standard_normal((6_000, 4))
        found = ranked(SystemScores(scores, bounds=None), baseline=2, draws=60_000)
        assert found.against is not None
        correlation = np.full((3, 3), 0.5) + 0.5 * np.eye(3)
        c = found.against.critical
        assert multivariate_normal(cov=correlation).cdf([c] * 3, lower_limit=[-c] * 3) == pytest.approx(0.95, abs=0.003)
        assert c < found.pairs.critical

    def test_resampled_critical_values_agree_with_plain_loops(self) -> None:
        rng = np.random.default_rng(3)
        scores = rng.beta(2, 1, (40, 1)) * 0.5 + rng.beta(1, 1, (40, 4)) * 0.5
        found = ranked(scores)
        pairs = list(itertools.combinations(range(4), 2))
        observed = [float(np.mean(scores[:, i] - scores[:, j])) for i, j in pairs]
        largest = []
        for _ in range(1_500):
            drawn = scores[rng.integers(0, 40, 40)]
            differences = [drawn[:, i] - drawn[:, j] for i, j in pairs]
            largest.append(
                max(
                    abs(float(d.mean()) - centre) / (float(d.std(ddof=1)) / sqrt(40))
                    for d, centre in zip(differences, observed, strict=True)
                )
            )
        assert found.pairs.critical == pytest.approx(np.quantile(largest, 0.95), rel=0.06)
        for place, (i, j) in enumerate(pairs):
            difference = scores[:, i] - scores[:, j]
            half = found.pairs.critical * float(difference.std(ddof=1)) / sqrt(40)
            assert (found.pairs.low[place], found.pairs.high[place]) == pytest.approx(
                (difference.mean() - half, difference.mean() + half)
            )

    def test_two_systems_of_pass_and_fail_have_the_centre_and_error_of_bonett_and_price(self) -> None:
        a, b = np.repeat([1.0, 0.0, 1.0], [30, 4, 66]), np.repeat([0.0, 1.0, 1.0], [30, 4, 66])
        found = ranked(np.column_stack([a, b])).pairs
        expected = stats.bonett_price(30, 4, 100)
        assert isinstance(expected, stats.Interval)
        centre = (found.low[0] + found.high[0]) / 2
        assert centre == pytest.approx((expected.low + expected.high) / 2)
        error = (found.high[0] - found.low[0]) / 2 / found.critical
        assert error == pytest.approx((expected.high - expected.low) / 2 / norm.ppf(0.975))
        assert 1.96 < found.critical < 2.1

    def test_the_chance_of_being_best_is_that_of_a_positive_difference(self) -> None:
        scores = outcomes([0.8, 0.77], 800)
        found = ranked(scores)
        difference = scores[:, 0] - scores[:, 1]
        z = float(difference.mean() / difference.std(ddof=1) * sqrt(800))
        assert found.best_chances[0] == pytest.approx(norm.cdf(z), abs=0.02)
        assert found.best_chances.sum() == pytest.approx(1)

    def test_clusters_have_the_error_of_the_paired_difference(self) -> None:
        labels = np.repeat(np.arange(12), [3, 4, 5, 8, 9, 10, 12, 13, 14, 15, 16, 20])
        rng = np.random.default_rng(4)
        scores = rng.random((labels.size, 3)) * 0.5 + rng.random((12, 3))[labels] * 0.5
        found = ranked(SystemScores(scores, labels)).pairs
        error = stats.clustered_error(scores[:, 0] - scores[:, 2], labels)
        assert isinstance(error, stats.ClusteredError)
        assert (found.high[1] - found.low[1]) / 2 / found.critical == pytest.approx(error.se)
        assert found.critical > t.ppf(0.975, error.df)


class TestRanks:
    def test_rank_intervals_count_the_systems_that_are_better_and_worse(self) -> None:
        found = ranked(outcomes([0.9, 0.88, 0.6, 0.58, 0.2], 400))
        assert found.ranks.tolist()[4] == 5
        assert list(zip(found.best_ranks.tolist(), found.worst_ranks.tolist(), strict=True)) == [
            (1, 2),
            (1, 2),
            (3, 4),
            (3, 4),
            (5, 5),
        ]
        for place in range(found.pairs.first.size):
            beyond = found.pairs.low[place] > 0 or found.pairs.high[place] < 0
            assert beyond == (found.pairs.p_values[place] <= 0.05)

    def test_less_is_better_turns_the_order_round(self) -> None:
        scores = outcomes([0.9, 0.5, 0.7], 300)
        more, less = ranked(scores), ranked(scores, higher_is_better=False)
        assert less.ranks.tolist() == (4 - more.ranks).tolist()
        assert less.best_ranks.tolist() == (4 - more.worst_ranks).tolist()
        assert (less.pairs.low == more.pairs.low).all()
        assert less.best_chances[1] > 0.99

    def test_systems_with_the_same_scores_share_rank_and_chance(self) -> None:
        one = outcomes([0.7], 100)
        found = ranked(np.hstack([one, one, one]))
        assert found.ranks.tolist() == [1, 1, 1]
        assert found.worst_ranks.tolist() == [3, 3, 3]
        assert found.best_chances == pytest.approx([1 / 3] * 3)
        assert (found.pairs.low < 0).all()
        assert (found.pairs.p_values == 1).all()

    def test_a_metric_without_a_range_whose_differences_are_equal_has_no_interval(self) -> None:
        base = np.random.default_rng(1).lognormal(0, 1, 50)
        found = ranked(SystemScores(np.column_stack([base, base + 1, base[::-1]]), bounds=None))
        assert (found.pairs.low[0], found.pairs.high[0], found.pairs.p_values[0]) == (-np.inf, np.inf, 1)
        assert np.isfinite(found.pairs.low[1])

    def test_one_lucky_sample_among_few_does_not_make_a_system_better(self) -> None:
        found = ranked(np.column_stack([np.ones(8), np.zeros(8), np.ones(8)]))
        assert found.best_ranks.tolist() == [1, 3, 1]
        few = ranked(np.column_stack([np.ones(3), np.zeros(3), np.ones(3)]))
        assert few.best_ranks.tolist() == [1, 1, 1]

    def test_too_few_clusters_leave_every_rank_open(self) -> None:
        labels = np.repeat(np.arange(3), 30)
        found = ranked(SystemScores(outcomes([0.99, 0.1], 90), labels))
        assert not found.decided
        assert found.worst_ranks.tolist() == [2, 2]
        assert found.notes == ("Only 3 clusters: about 4 are the least for a verdict.",)
        one = stats.rank_systems(SystemScores(outcomes([0.9, 0.1], 90), np.zeros(90, dtype=int)))
        assert isinstance(one, stats.Undefined)

    def test_the_same_seed_gives_the_same_answer(self) -> None:
        scores = outcomes([0.9, 0.8, 0.85], 60)
        assert ranked(scores, seed=3).pairs.critical == ranked(scores, seed=3).pairs.critical

    def test_two_suites_are_averaged_and_their_errors_added(self) -> None:
        rng = np.random.default_rng(5)
        large, small = rng.random((200, 3)), rng.random((50, 3))
        found = ranked(large, small, weights=[3, 1])
        assert found.means == pytest.approx(0.75 * large.mean(axis=0) + 0.25 * small.mean(axis=0))
        errors = [float((one[:, 0] - one[:, 1]).std(ddof=1)) / sqrt(len(one)) for one in (large, small)]
        expected = sqrt((0.75 * errors[0]) ** 2 + (0.25 * errors[1]) ** 2)
        assert (found.pairs.high[0] - found.pairs.low[0]) / 2 / found.pairs.critical == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"weights": [1.0, 2.0]}, "one weight for each of 1 suites"),
            ({"weights": [-1.0]}, "at least 0"),
            ({"baseline": 7}, "baseline must be the number of a system, 0 to 1"),
            ({"level": 1.5}, "confidence level"),
        ],
    )
    def test_what_cannot_be_ranked_is_refused(self, given: dict[str, object], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            stats.rank_systems(outcomes([0.5, 0.6], 20), **given)  # type: ignore[arg-type]

    def test_tables_of_other_shapes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least two systems"):
            stats.rank_systems(np.ones((5, 1)))
        with pytest.raises(ValueError, match="a column for each system"):
            stats.rank_systems(np.ones((5, 2)), np.ones((5, 3)))
        with pytest.raises(ValueError, match="must be from"):
            stats.rank_systems(np.full((5, 2), 3.0))
        assert isinstance(stats.rank_systems(np.ones((1, 2))), stats.Undefined)


class TestWeightedMean:
    def test_one_suite_keeps_its_own_interval(self) -> None:
        alone = stats.mean_interval(np.repeat([1.0, 0.0], [18, 2]))
        assert stats.weighted_mean([alone]).interval == alone.interval

    def test_errors_add_up_with_satterthwaites_degrees_of_freedom(self) -> None:
        rng = np.random.default_rng(6)
        parts = [rng.normal(50, 10, n) for n in (8, 20, 400)]
        weights = [1.0, 2.0, 1.0]
        found = stats.weighted_mean([stats.mean_interval(one, bounds=None) for one in parts], weights, bounds=None)
        shares = np.asarray(weights) / 4
        terms = [(w * float(one.std(ddof=1)) / sqrt(one.size)) ** 2 for w, one in zip(shares, parts, strict=True)]
        df = sum(terms) ** 2 / sum(v**2 / (one.size - 1) for v, one in zip(terms, parts, strict=True))
        assert (found.mean, found.se) == pytest.approx(
            (sum(w * one.mean() for w, one in zip(shares, parts, strict=True)), sqrt(sum(terms)))
        )
        assert found.df == pytest.approx(df)
        assert found.interval is not None
        assert found.mean is not None
        assert found.interval.low <= found.mean - t.ppf(0.975, df) * sqrt(sum(terms))

    def test_weights_by_samples_give_the_mean_of_all_samples(self) -> None:
        parts = [outcomes([rate], n, seed=n)[:, 0] for rate, n in ((0.9, 30), (0.5, 90))]
        estimates = [stats.mean_interval(one) for one in parts]
        micro = stats.weighted_mean(estimates, [one.n for one in estimates])
        assert micro.mean == pytest.approx(np.concatenate(parts).mean())
        macro = stats.weighted_mean(estimates)
        assert macro.mean == pytest.approx((parts[0].mean() + parts[1].mean()) / 2)

    def test_suites_that_passed_throughout_leave_no_point(self) -> None:
        found = stats.weighted_mean([stats.mean_interval(np.ones(10)), stats.mean_interval(np.ones(20))])
        assert found.interval is not None
        assert (found.se, found.interval.high) == (0.0, 1.0)
        assert 0.75 < found.interval.low < 0.9

    def test_what_is_undefined_says_why(self) -> None:
        empty, lone = stats.mean_interval([]), stats.mean_interval([0.5])
        known = stats.mean_interval([0.0, 1.0, 1.0])
        assert stats.weighted_mean([empty, known]).reason == "A suite has no scored sample."
        found = stats.weighted_mean([lone, known])
        assert found.interval is None
        assert found.reason == "One sample has no standard error."
        assert stats.weighted_mean([empty, known], [0, 1]).interval == known.interval
        with pytest.raises(ValueError, match=r"at level 0\.9 \(got 0\.95\)"):
            stats.weighted_mean([known, known], level=0.9)


@pytest.mark.long
class TestSimulations:
    def test_rank_intervals_cover_all_true_ranks_of_six_systems_on_500_samples(self) -> None:
        rng, runs = np.random.default_rng(8), 250
        share = sum(ranks_covered(TIED, 500, rng) for _ in range(runs)) / runs
        assert share >= 0.93 - 3 * monte_carlo_error(0.93, runs)

    def test_the_chance_of_being_best_is_calibrated(self) -> None:
        rng = np.random.default_rng(9)
        predicted, came_true = [], []
        for run in range(300):
            truth = rng.uniform(0.6, 0.9, 4)
            chances = ranked(outcomes(truth.tolist(), 200, seed=run), draws=300).best_chances
            predicted += chances.tolist()
            came_true += (truth == truth.max()).tolist()
        chance, hit = np.asarray(predicted), np.asarray(came_true)
        for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.01)):
            inside = (chance >= low) & (chance < high)
            share, runs = float(hit[inside].mean()), int(np.count_nonzero(inside))
            assert share == pytest.approx(float(chance[inside].mean()), abs=0.03 + 3 * monte_carlo_error(share, runs))

    def test_the_mean_over_forty_small_suites_near_the_end_of_the_range_is_covered(self) -> None:
        rng, runs = np.random.default_rng(10), 150
        share = sum(mean_covered(40, 10, 0.95, rng) for _ in range(runs)) / runs
        assert share >= 0.93 - 3 * monte_carlo_error(0.93, runs)


# Bradley and Terry's model with ties, against independent code and by seeded simulation.


def fitted(given: object, **rest: object) -> BradleyTerry:
    found = stats.bradley_terry(given, **rest)  # type: ignore[arg-type]
    assert isinstance(found, BradleyTerry)
    return found


def drawn(strengths: list[float], n: int, *, tie: float = 0.5, order: float = 0.0, seed: int = 1) -> list[Preference]:
    return draw_preferences(np.random.default_rng(seed), strengths, n, tie=tie, order=order)


class TestStrengths:
    def test_strengths_and_ties_maximize_a_likelihood_written_plainly(self) -> None:
        given = drawn([0.0, 0.5, 1.0], 80)

        def loss(values: Array) -> float:
            total = 0.0
            for one in given:
                a, b = values[int(one.first)], values[int(one.second)]
                terms = {one.first: np.exp(a), one.second: np.exp(b), None: np.exp(values[3] + (a + b) / 2)}
                total += float(np.log(terms[one.winner] / sum(terms.values())))
            return -total - 0.5 * float(np.sum(np.log(1 / (1 + np.exp(-values))) + np.log(1 / (1 + np.exp(values)))))

        best = minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8}).x
        found = fitted(given)
        strengths = best[:3] - best[:3].mean()
        assert [found[str(place)].strength for place in range(3)] == pytest.approx(strengths.tolist(), abs=1e-4)
        assert found.tie == pytest.approx(np.exp(best[3]), rel=1e-4)

    def test_without_ties_it_is_a_logistic_regression_with_clustered_errors(self) -> None:
        given = drawn([0.0, 0.4, 0.8, 1.2], 1_500, tie=0.0)
        design = np.zeros((len(given), 4))
        for row, one in enumerate(given):
            design[row, int(one.first)], design[row, int(one.second)] = 1, -1
        won = np.asarray([float(one.winner == one.first) for one in given])
        groups = np.asarray([one.cluster for one in given])
        model = statsmodels.api.Logit(won, design[:, 1:])  # The first system has strength 0.
        reference = model.fit(disp=0, cov_type="cluster", cov_kwds={"groups": groups})
        found = fitted(given)
        for place in range(found.pairs.first.size):
            a, b = (int(found.names[pair[place]]) for pair in (found.pairs.first, found.pairs.second))
            if 0 in (a, b):
                sign, system = (1, a) if b == 0 else (-1, b)
                assert sign * found.pairs.differences[place] == pytest.approx(reference.params[system - 1], abs=0.01)
                error = (found.pairs.high[place] - found.pairs.low[place]) / 2 / found.pairs.critical
                assert error == pytest.approx(reference.bse[system - 1], rel=0.02)

    def test_two_systems_have_the_logarithm_of_their_odds(self) -> None:
        found = fitted([("a", "b", "a")] * 600 + [("b", "a", "b")] * 200)
        assert found["a"].strength - found["b"].strength == pytest.approx(np.log(3), abs=0.01)
        assert (found.tie, found.order_effect) == (0.0, None)

    def test_a_tie_counts_for_both_systems(self) -> None:
        found = fitted(drawn([0.0, 1.0], 400, tie=1.0))
        assert found["1"].ties == found["0"].ties > 0


class TestComparisons:
    def test_answers_about_one_sample_count_once(self) -> None:
        singles = [
            Preference("a", "b", winner, cluster)
            for cluster, winner in enumerate(["a", "a", "b", None, "a", "b", "a", "a"] * 10)
        ]
        doubled = [one for one in singles for _ in range(2)]
        once, twice = fitted(singles), fitted(doubled)
        free = fitted([Preference(one.first, one.second, one.winner) for one in doubled])
        widths = [one.pairs.high[0] - one.pairs.low[0] for one in (once, twice, free)]
        assert widths[1] == pytest.approx(widths[0], rel=0.05)
        assert widths[2] < 0.8 * widths[1]
        assert (once.clusters, twice.clusters, free.clusters) == (80, 80, 160)

    def test_a_judge_that_prefers_the_first_place_makes_no_order_if_both_orders_are_asked(self) -> None:
        given = [
            Preference(*names, names[0], sample)
            for sample in range(50)
            for names in itertools.permutations(("a", "b", "c"), 2)
        ]
        found = fitted(given, order_effect=True)
        assert [one.strength for one in found.systems] == pytest.approx([0, 0, 0], abs=1e-9)
        assert found.order_effect is not None
        assert found.order_effect > 3
        assert [(one.rank_low, one.rank_high) for one in found.systems] == [(1, 3)] * 3

    def test_the_effect_of_the_order_is_found(self) -> None:
        found = fitted(drawn([0.0, 1.0], 1_500, order=0.5), order_effect=True)
        assert found.order_effect == pytest.approx(0.5, abs=0.15)

    def test_a_system_that_won_everything_has_a_finite_strength_and_no_upper_end(self) -> None:
        found = fitted([("a", "b", "a"), ("c", "a", "a"), ("b", "c", "b"), ("b", "c", "c")] * 6)
        best, others = found["a"], (found["b"], found["c"])
        assert (best.rank, best.high, best.wins, best.losses) == (1, None, 12, 0)
        assert best.low is not None
        assert 0 < best.low < best.strength < 6
        assert all(one.high is not None for one in others)
        assert found.notes == ("a won every comparison: its strength has no upper end.",)

    def test_groups_of_which_one_never_lost_to_the_other_are_named(self) -> None:
        within = [("a", "b", "a"), ("b", "a", "b"), ("c", "d", "c"), ("d", "c", "d")] * 5
        found = fitted([*within, *[("a", "c", "a"), ("d", "b", "b")] * 5])
        assert len(found.notes) == 1
        assert "Some systems never lost to others (" in found.notes[0]
        assert "a, b" in found.notes[0]

    def test_nothing_but_ties_leaves_the_order_open(self) -> None:
        found = fitted([("a", "b", None), ("b", "c", "tie"), ("c", "a", None)] * 10)
        assert [one.rank for one in found.systems] == [1, 1, 1]
        assert found.tie > 3
        assert [one.best for one in found.systems] == pytest.approx([1 / 3] * 3, abs=0.03)

    def test_systems_that_no_chain_of_comparisons_connects_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no comparison connects 'a' with 'c'.*\(a, b; c, d\)"):
            stats.bradley_terry([("a", "b", "a"), ("c", "d", None)])

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ([], "at least one comparison"),
            ([("a", "a", "a")], "must be of two systems"),
            ([("a", "b", "c")], "the winner must be 'a', 'b', or None for a tie"),
        ],
    )
    def test_what_is_no_comparison_is_refused(self, given: list[tuple[str, str, str]], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            stats.bradley_terry(given)

    def test_one_sample_is_no_ranking(self) -> None:
        found = stats.bradley_terry([Preference("a", "b", "a", "s1"), Preference("b", "a", "a", "s1")])
        assert isinstance(found, stats.Undefined)
        with pytest.raises(KeyError, match="there is no system 'z'"):
            fitted([("a", "b", "a"), ("b", "a", "a")])["z"]


@pytest.mark.long
class TestCoverageOfStrengths:
    def test_ranks_and_strengths_are_covered(self) -> None:
        runs = 150
        for share in shares_covered(STRENGTHS, 120, runs):
            assert share >= 0.93 - 3 * monte_carlo_error(0.93, runs)


@pytest.mark.measured
def test_a_hundred_thousand_comparisons_take_seconds() -> None:
    rng = np.random.default_rng(1)
    names = [str(one) for one in range(20)]
    first, second = rng.integers(0, 20, 100_000), rng.integers(1, 20, 100_000)
    given = [
        Preference(names[a], names[(a + b) % 20], [names[a], names[(a + b) % 20], None][c], sample % 20_000)
        for sample, (a, b, c) in enumerate(zip(first, second, rng.integers(0, 3, 100_000), strict=True))
    ]
    start = time.perf_counter()
    fitted(given)
    assert time.perf_counter() - start < 15
