"""Wrong decisions of gates, counted over all of their rules.

A rule that is exactly met must neither be failed nor passed often: what lies just beside it would be. FAIL is counted
over independent rules of which every one is exactly met, PASS with one exactly met and all others met by far, which is
the worst case of each. Pass/fail decisions are enumerated: they change once along the number of passes, or of wins, and
`evaluate_checks` is asked on both sides of that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from fairtrial import GateRules
from fairtrial.reports.compare.looks import spent_alpha
from fairtrial.reports.compare.pairing import ComparisonSettings, pair
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.gate.checks import Check, Floor, Margin, evaluate_checks
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.stats import exact_rate_interval, paired_rates_interval

from . import GATE_ERRORS, Array, Design, Measured, Rng, draw_outcomes, draw_rates, share, share_or_warned

FLOORS = (0.8, 0.9, 0.95, 0.98, 0.99)
LOW_FLOORS = (0.02, 0.05, 0.2)
RULES = (1, 5, 10, 20)
ALL_N, SOME_N = range(20, 1001), (20, 34, 55, 100, 300)
MARGINS = (0.02, 0.05, 0.1)
MANY_PAIRS, SOME_PAIRS = (*range(20, 201), *range(210, 1001, 10)), (30, 50, 100, 140, 183, 400)
ASKED = 50  # One in 50 numbers of samples is asked of the gate itself.
MOST_LOST = 0.3  # Beyond this share of lost pairs (and some more, if they are few) no design has a chance worth adding.


def designs() -> Iterator[Design]:
    """Return the designs."""
    yield from floor_designs()
    yield from margin_designs()
    yield from repeated_designs()
    yield from graded_designs()


def floor_designs() -> Iterator[Design]:
    """Floors of pass rates that are exactly met."""
    for numbers, cell, quick in ((ALL_N, "n 20 to 1,000", 0), (SOME_N, "5 n from 20 to 300", 1)):
        for floor in FLOORS + LOW_FLOORS:
            few = int(bool(quick) and floor in (0.02, 0.95, 0.99))
            if quick and not few:
                continue
            for rules in RULES:
                yield _exact(
                    "floor exactly met",
                    "FAIL of any rule, worst n",
                    partial(floor_error, floor, numbers, rules, "fail"),
                    f"floor {floor}, {rules} rule{'s'[: rules > 1]}, {cell}",
                    few,
                )
            figure = partial(floor_error, floor, numbers, 1, "pass")
            yield _exact("floor exactly met", "PASS, worst n", figure, f"floor {floor}, {cell}", few)


def margin_designs() -> Iterator[Design]:
    """Margins of pass/fail pairs: exactly met, not needed, and losses inside of them."""
    for numbers, counts, quick in ((MANY_PAIRS, "261 n to 1,000", 0), (SOME_PAIRS, "6 n to 400", 1)):
        for margin in (0.02, 0.1) if quick else MARGINS:
            for wins in (0.0, 0.05) if quick else (0.0, 0.01, 0.05, 0.15):
                cell = f"margin {margin}, {wins:.0%} won, {wins + margin:.0%} lost, {counts}"
                figure = partial(worst_margin_error, wins, wins + margin, margin, numbers, 1, "pass")
                yield _exact("loss exactly at the margin", "PASS, worst n", figure, cell, quick)
                for rules in (10,) if quick else RULES:
                    figure = partial(worst_margin_error, wins, wins + margin, margin, numbers, rules, "fail")
                    many = f"{cell}, {rules} rule{'s'[: rules > 1]}"
                    yield _exact("loss exactly at the margin", "FAIL of any rule, worst n", figure, many, quick)
        for unequal in (0.02, 0.1, 0.3):
            for rules in (10,) if quick else RULES:
                figure = partial(worst_margin_error, unequal / 2, unequal / 2, 0.0, numbers, rules, "fail")
                cell = f"margin 0, {unequal:.0%} unequal, {rules} rule{'s'[: rules > 1]}, {counts}"
                yield _exact("equal systems", "FAIL of any rule, worst n", figure, cell, quick)
    for loss in (0.01, 0.02, 0.03, 0.04):
        numbers = (200, 500, 1000, 2000, 5000)
        figure = partial(worst_margin_error, 0.05 - loss / 2, 0.05 + loss / 2, 0.05, numbers, 1, "fail")
        cell = f"margin 0.05, true loss {loss}, n 200 to 5,000"
        yield _exact("loss inside the margin", "FAIL, worst n", figure, cell, int(loss == 0.04))


def repeated_designs() -> Iterator[Design]:
    """Gates that are tried again, with `spend_alpha`."""
    for margin in (0.05, 0.1):
        for n in (200, 1000):
            wins, losses = 0.1 - margin / 2, 0.1 + margin / 2
            yield _exact(
                "up to 10 tries with spend_alpha, loss exactly at the margin",
                "PASS of any try",
                partial(retried, wins, losses, margin, n),
                f"margin {margin}, fresh runs of n {n}",
                1,
            )
        yield Design(
            "gated again with more samples and spend_alpha, loss exactly at the margin",
            "PASS of any look",
            GATE_ERRORS,
            partial(enlarged, 0.1 - margin / 2, 0.1 + margin / 2, margin, "pass"),
            f"margin {margin}, n 40 doubled up to 5 times",
            quick=400,
        )
    yield Design(
        "gated again with more samples and spend_alpha, equal systems",
        "FAIL of any look",
        GATE_ERRORS,
        partial(enlarged, 0.1, 0.1, 0.0, "fail"),
        "margin 0, n 40 doubled up to 5 times",
        quick=400,
    )


def graded_designs() -> Iterator[Design]:
    """Decisions on graded scores, repeats and clusters, simulated."""
    for shape, sizes in CLUSTERS.items():
        for status in ("pass", "fail"):
            yield Design(
                "floor of a graded score exactly met, in clusters",
                status.upper(),
                GATE_ERRORS,
                share(partial(floor_in_clusters, sizes, status)),
                f"clusters: {shape}, ICC 0.5",
                quick=200 if shape.startswith("one of 150") else 0,
            )
    for kind, (draw, margin) in LOSSES.items():
        for n in (50, 100, 300):
            yield Design(
                "loss exactly at the margin, graded or repeated",
                "PASS",
                GATE_ERRORS,
                share_or_warned(partial(rare_loss_passed, draw, margin, n), good=False),
                f"{kind}, n {n}",
                quick=100 if n == 100 else 0,
            )
    for status in ("pass", "fail"):
        yield Design(
            "margin exactly met, in clusters",
            status.upper(),
            GATE_ERRORS,
            share(partial(margin_in_clusters, status)),
            "10 clusters of 20, own effects of each system, ICC 0.3, margin 0.1",
            quick=100,
        )


def _exact(name: str, what: str, figure: Callable[[], float], cell: str, quick: int) -> Design:
    return Design(name, what, GATE_ERRORS, lambda _runs, _rng: Measured(figure()), cell, exact=True, quick=quick)


# --- floors ----------------------------------------------------------------------------------------------------


@cache
def exact_ends(n: int, rules: int) -> tuple[Array, Array]:
    """Return the ends of the intervals that decide about a floor, of 0 to n passes, at the level of `rules` rules."""
    found = [exact_rate_interval(passes / n, n, level=1 - 0.05 / rules) for passes in range(n + 1)]
    return np.asarray([one.low for one in found]), np.asarray([one.high for one in found])


def floor_error(floor: float, numbers: Sequence[int], rules: int, status: str) -> float:
    """Return the largest chance, over numbers of samples, that a rate equal to the floor passes, or any rule fails."""
    worst = 0.0
    for n in numbers:
        low, high = exact_ends(n, rules)
        if status == "pass":
            edge = int(np.searchsorted(low, floor))  # The least number of passes with which all of it is above.
            chance = float(binom.sf(edge - 1, n, floor))
            asked = {edge - 1: "inconclusive", edge: "pass"}
        else:
            edge = int(np.searchsorted(high, floor))  # The least with which not all of it is below.
            chance = 1 - (1 - float(binom.cdf(edge - 1, n, floor))) ** rules
            asked = {edge - 1: "fail", edge: "inconclusive"}
        worst = max(worst, chance)
        if n % ASKED == 0 or len(numbers) <= len(SOME_N):
            for passes, expected in asked.items():
                if 0 <= passes <= n and floor_status(passes, n, floor, rules) != expected:
                    raise AssertionError(f"{passes} of {n} passes against {floor}: the gate does not say {expected}")
    return worst


def floor_status(passes: int, n: int, floor: float, rules: int) -> str:
    """Return what a gate says to one of `rules` floors."""
    columns = Columns.of({"passed": np.repeat([1.0, 0.0], [passes, n - passes])})
    rule: Check = Floor("passed", None, floor, columns, ceiling=False)
    return evaluate_checks([rule] * rules, ComparisonSettings())[0].status


# --- margins of pass/fail pairs ----------------------------------------------------------------------------------


@cache
def wins_needed(n: int, margin: float, alpha: float, status: str) -> NDArray[np.intp]:
    """Return, for each number of losses, the least number of wins that passes, or that no longer fails."""

    def decided(wins: int, losses: int) -> bool:
        interval = paired_rates_interval(wins, losses, n, level=1 - alpha)
        return interval.low > -margin if status == "pass" else interval.high >= -margin

    found = []
    least = 0
    for losses in range(min(n, round(MOST_LOST * n) + 40) + 1):
        least = max(0, least - 1)
        while least <= n - losses and not decided(least, losses):  # More losses never need fewer wins.
            least += 1
        found.append(least)
    return np.asarray(found, dtype=np.intp)


def margin_error(wins: float, losses: float, margin: float, n: int, alpha: float, status: str) -> float:
    """Return the chance of a decision about pairs that are won and lost at these rates."""
    needed = wins_needed(n, margin, alpha, status)
    lost = np.arange(needed.size)
    passing = binom.sf(needed - 1, n - lost, wins / (1 - losses))
    return float(np.sum(binom.pmf(lost, n, losses) * (passing if status == "pass" else 1 - passing)))


def worst_margin_error(
    wins: float, losses: float, margin: float, numbers: Sequence[int], rules: int, status: str
) -> float:
    """Return the largest chance of a decision, over numbers of pairs and independent rules."""
    alpha = 0.05 / rules if status == "fail" else 0.05
    worst = 0.0
    for n in numbers:
        worst = max(worst, 1 - (1 - margin_error(wins, losses, margin, n, alpha, status)) ** rules)
        needed = wins_needed(n, margin, alpha, status)
        likely = round(n * losses)
        for won in (int(needed[likely]) - 1, int(needed[likely])):
            if 0 <= won <= n - likely and (n % ASKED == 0 or len(numbers) <= len(SOME_PAIRS)) and n <= 1000:
                said = pairs_status(won, likely, n, margin, rules)
                if (said == status) != ((won >= needed[likely]) == (status == "pass")):
                    raise AssertionError(
                        f"{won} wins and {likely} losses of {n}, margin {margin}: the gate says {said}"
                    )
    return worst


def pairs_status(wins: int, losses: int, n: int, margin: float, rules: int) -> str:
    """Return what a gate says to one of `rules` margins."""
    change = np.repeat([1.0, -1.0, 0.0], [wins, losses, n - wins - losses])
    sides = [Columns.of({"passed": np.maximum(sign * change, 0.0)}, name=name) for sign, name in ((1, "b"), (-1, "a"))]
    rule: Check = Margin("passed", None, margin, pair(*sides))
    return evaluate_checks([rule] * rules, ComparisonSettings())[0].status


def retried(wins: float, losses: float, margin: float, n: int) -> float:
    """Return the chance that one of ten fresh runs passes, each at the alpha that is left for it."""
    passing = [margin_error(wins, losses, margin, n, spent_alpha(0.05, attempt), "pass") for attempt in range(1, 11)]
    return 1 - float(np.prod([1 - chance for chance in passing]))


def enlarged(wins: float, losses: float, margin: float, status: str, runs: int, rng: Rng) -> float:
    """Return how often one of six looks at growing data decides wrongly."""
    wrong = np.zeros(runs, dtype=np.bool_)
    won, lost = np.zeros(runs, dtype=np.intp), np.zeros(runs, dtype=np.intp)
    n = 0
    for attempt in range(1, 7):
        more = n or 40
        drawn = rng.multinomial(more, [wins, losses, 1 - wins - losses], size=runs)
        won, lost, n = won + drawn[:, 0], lost + drawn[:, 1], n + more
        enough = won >= wins_needed(n, margin, spent_alpha(0.05, attempt), status)[lost]
        wrong |= enough if status == "pass" else ~enough
    return float(wrong.mean())


# --- graded scores, repeats and clusters --------------------------------------------------------------------------

CLUSTERS = {
    "8 of 20": [20] * 8,
    "8 of 2 to 60": [2, 3, 5, 8, 12, 20, 40, 60],
    "one of 100, seven of 5": [100, *[5] * 7],
    "one of 150, four of 10": [150, *[10] * 4],
}


def floor_in_clusters(sizes: Sequence[int], status: str, rng: Rng) -> bool:
    """Whether a gate says `status` to a graded score whose floor is exactly met."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    noise = rng.normal(0, 0.5**0.5, len(sizes))[labels] + rng.normal(0, 0.5**0.5, labels.size)
    values = {"passed": np.ones(labels.size), "value": np.clip(0.5 + 0.15 * noise, 0, 1)}
    return gate_columns(Columns.of(values, clusters=labels), GateRules(floors={"value": 0.5})).status == status


def rare_losses(rng: Rng, n: int) -> tuple[Array, Array]:
    """Draw scores of which 4% lose 0.7, or what there is to lose."""
    old = rng.beta(8, 2, n)
    new = np.clip(old + rng.normal(0, 0.02, n), 0, 1)
    return np.where(rng.random(n) < 0.04, np.maximum(old - 0.7, 0.0), new), old


def broken_samples(rng: Rng, n: int) -> tuple[Array, Array]:
    """Draw three repeats, of which 5% of the samples fail entirely with the new system."""
    broken = (rng.random(n) < 0.05)[:, None]
    chances = np.full((n, 3), 0.95)
    return np.where(broken, 0.0, draw_outcomes(rng, chances)), draw_outcomes(rng, chances)


def small_losses(rng: Rng, n: int) -> tuple[Array, Array]:
    """Draw scores that lose 0.02 on average."""
    old = rng.beta(8, 4, n)
    return np.clip(old - 0.02 + rng.uniform(-0.02, 0.02, n), 0, 1), old


@cache
def true_loss(draw: Callable[[Rng, int], tuple[Array, Array]]) -> float:
    """Return the true loss of a design, from a million samples."""
    new, old = draw(np.random.default_rng(1), 1_000_000)
    return float(old.mean() - new.mean())


LOSSES: dict[str, tuple[Callable[[Rng, int], tuple[Array, Array]], float | None]] = {
    "4% of the scores lose 0.7": (rare_losses, None),
    "5% of the samples break, 3 repeats": (broken_samples, 0.0475),
    "all scores lose about 0.02": (small_losses, None),
}


def rare_loss_passed(
    draw: Callable[[Rng, int], tuple[Array, Array]], margin: float | None, n: int, rng: Rng
) -> tuple[bool, bool]:
    """Whether a gate passes a loss that equals the margin, and whether it says that a rare loss may be unseen."""
    new, old = draw(rng, n)
    sides = [Columns.of({"value": side}, name=name) for side, name in ((new, "new"), (old, "old"))]
    rule = Margin("value", None, true_loss(draw) if margin is None else margin, pair(*sides))
    check = evaluate_checks([rule], ComparisonSettings(draws=499))[0]
    return check.status == "pass", "may not be among these" in check.reason


def margin_in_clusters(status: str, rng: Rng) -> bool:
    """Whether a gate says `status` where a loss in clusters equals the margin."""
    labels = np.repeat(np.arange(10), 20)
    new, old = (
        Columns.of({"passed": draw_outcomes(rng, draw_rates(rng, rate, 0.3, 10)[labels])}, name=name, clusters=labels)
        for rate, name in ((0.7, "new"), (0.8, "old"))
    )
    rule = Margin("passed", None, 0.1, pair(new, old))
    return evaluate_checks([rule], ComparisonSettings(draws=499))[0].status == status
