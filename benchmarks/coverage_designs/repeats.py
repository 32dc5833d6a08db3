"""Repeats of each sample: samples pass with chances of their own, drawn with the stated mean and correlation (ICC)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fairtrial.stats import mean_interval, mean_pass_at_k, mean_pass_hat_k, paired_difference

from . import ALARMS, COVERAGE, Design, Rng, contains, draw_outcomes, draw_rates, share

RATES = (0.5, 0.8, 0.95, 0.99)
CORRELATIONS = (0.3, 0.8, 0.95)
COMPARED = ((50, 0.8, 0.8), (50, 0.8, 0.95), (100, 0.9, 0.9), (50, 0.8, 0.3), (30, 0.95, 0.8))


def designs() -> Iterator[Design]:
    """Return the designs."""
    for correlation in CORRELATIONS:
        for rate in RATES:
            cell = f"30 samples x 5, rate {rate}, ICC {correlation}"
            quick = 400 if correlation == 0.8 else 0
            yield Design(
                "pass rate over repeats",
                "coverage",
                COVERAGE,
                share(repeated(30, rate, correlation)),
                cell,
                quick=quick,
            )
    for rate, correlation in ((0.8, 0.8), (0.95, 0.8), (0.8, 0.3)):
        for k in (2, 3, 5):
            for symbol in "@^":
                yield Design(
                    f"pass{symbol}k",
                    "coverage",
                    COVERAGE,
                    share(pass_k(symbol, k, rate, correlation)),
                    f"k {k} of 5 repeats, 30 samples, rate {rate}, ICC {correlation}",
                    quick=200 if (k, correlation) == (3, 0.3) else 0,
                )
    for n, repeats in ((60, 10), (100, 10), (60, 20)):
        for k in (3, 4, 5):
            once = pass_k("@", k, 0.8, 0.2, n, repeats)
            cell = f"k {k} of {repeats} repeats, {n} samples, rate 0.8, ICC 0.2"
            yield Design("pass@k", "coverage", COVERAGE, share(once), cell, quick=200 if n == 100 and k == 4 else 0)
    for n in (30, 50, 200):
        for repeats in (10, 20):
            cell = f"{n} samples x {repeats}, 2% of the samples never pass, the others with chance 0.975"
            yield Design("pass rate over repeats", "coverage", COVERAGE, share(rarely_hard(n, repeats)), cell)
    for n, rate, correlation in COMPARED:
        cell = f"{n} samples x 5, rate {rate}, ICC {correlation}"
        once = alarm_in_repeats(n, rate, correlation)
        quick = 150 if n == 50 and correlation == 0.8 else 0
        yield Design("identical systems on repeats", "false alarms", ALARMS, share(once), cell, quick=quick)
    for rate, correlation in ((0.8, 0.3), (0.8, 0.8)):
        cell = f"30 samples x 5, a tenth of the samples gains 80 points, rate {rate}, ICC {correlation}"
        yield Design("skewed difference over repeats", "coverage", COVERAGE, share(skewed(rate, correlation)), cell)


def repeated(n: int, rate: float, correlation: float, repeats: int = 5) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of a pass rate over repeats contains it."""

    def once(rng: Rng) -> bool:
        chances = np.broadcast_to(draw_rates(rng, rate, correlation, n)[:, None], (n, repeats))
        return contains(mean_interval(draw_outcomes(rng, chances)).interval, rate)

    return once


def rarely_hard(n: int, repeats: int) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of a pass rate to which rare impossible samples belong contains it."""

    def once(rng: Rng) -> bool:
        chances = np.where(rng.random(n) < 0.02, 0.0, 0.975)
        outcomes = draw_outcomes(rng, np.broadcast_to(chances[:, None], (n, repeats)))
        return contains(mean_interval(outcomes).interval, 0.98 * 0.975)

    return once


def pass_k(
    symbol: str, k: int, rate: float, correlation: float, n: int = 30, repeats: int = 5
) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of pass@k or pass^k contains the truth."""
    total = (1 - correlation) / correlation
    chance = (1 - rate) if symbol == "@" else rate
    # The k-th moment of a beta distribution.
    moment = float(np.prod([(chance * total + i) / (total + i) for i in range(k)]))
    truth, estimate = (1 - moment, mean_pass_at_k) if symbol == "@" else (moment, mean_pass_hat_k)

    def once(rng: Rng) -> bool:
        chances = np.broadcast_to(draw_rates(rng, rate, correlation, n)[:, None], (n, repeats))
        return contains(estimate(draw_outcomes(rng, chances), k).interval, truth)

    return once


def alarm_in_repeats(n: int, rate: float, correlation: float, repeats: int = 5) -> Callable[[Rng], bool]:
    """Return one run: whether two identical systems on repeats are called different."""

    def once(rng: Rng) -> bool:
        chances = np.broadcast_to(draw_rates(rng, rate, correlation, n)[:, None], (n, repeats))
        return bool(paired_difference(draw_outcomes(rng, chances), draw_outcomes(rng, chances), draws=499).differs)

    return once


def skewed(rate: float, correlation: float) -> Callable[[Rng], bool]:
    """Return one run: whether the interval of a difference that a few samples make contains it."""

    def once(rng: Rng) -> bool:
        base = np.broadcast_to(0.2 * draw_rates(rng, rate, correlation, 30)[:, None], (30, 5))
        gain = np.where(rng.random(30) < 0.1, 0.8, 0.0)[:, None]
        found = paired_difference(draw_outcomes(rng, base + gain), draw_outcomes(rng, base), draws=499)
        return contains(found.interval, 0.08)

    return once
