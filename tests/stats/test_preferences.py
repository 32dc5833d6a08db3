"""Bradley and Terry's model with ties, against independent code and by seeded simulation."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import statsmodels.api
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.coverage_designs import monte_carlo_error
from benchmarks.coverage_designs.preferences import STRENGTHS, draw_preferences, shares_covered
from fairtrial import stats
from fairtrial.stats import BradleyTerry, Preference

pytestmark = pytest.mark.proves("R148")
type Array = NDArray[np.float64]


def fitted(given: object, **rest: object) -> BradleyTerry:
    found = stats.bradley_terry(given, **rest)  # type: ignore[arg-type]
    assert isinstance(found, BradleyTerry)
    return found


def drawn(strengths: list[float], n: int, *, tie: float = 0.5, order: float = 0.0, seed: int = 1) -> list[Preference]:
    return draw_preferences(np.random.default_rng(seed), strengths, n, tie=tie, order=order)


class TestReference:
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
class TestSimulations:
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
