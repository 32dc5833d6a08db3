"""Tests and intervals of pairs of pass/fail outcomes, from the pairs in which exactly one side passes."""

from functools import lru_cache
from math import sqrt

import numpy as np
from scipy.special import bdtr, bdtrc, gammaln, ndtr, xlog1py, xlogy

from fairtrial.stats._arrays import (
    FloatArray,
    check_level,
    check_power,
    find_root,
    normal_quantile,
    normal_tail,
    two_sided,
)
from fairtrial.stats.results import Interval, Undefined

_ENUMERATED = 100
"""Up to this many pairs, power is computed by enumeration."""


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided exact test that wins and losses are equally likely: binomial with rate 1/2. McNemar (1947)."""
    _check(wins, losses)
    if wins + losses == 0:
        return 1.0
    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def mcnemar_midp(wins: int, losses: int) -> float:
    """The exact test with only half the probability of the observed split: less cautious. Fagerland et al. (2013).

    p = 2 P(X < k) + P(X = k) for k = min(wins, losses) and X binomial(wins + losses, 1/2).
    """
    _check(wins, losses)
    if wins == losses:
        return 1.0
    k, m = min(wins, losses), wins + losses
    return min(1.0, float(bdtr(k, m, 0.5) + (bdtr(k - 1, m, 0.5) if k else 0.0)))


def bonett_price(wins: int, losses: int, n: int, *, level: float = 0.95) -> Interval | Undefined:
    """Interval for the difference of two paired rates that cannot collapse. Bonett and Price (2012).

    One win and one loss are added: with b = (wins+1)/(n+2) and c = (losses+1)/(n+2) it is
    b - c -+ z sqrt((b + c - (b-c)^2)/(n+2)), cut to [-1, 1]. Undefined for n = 0.
    """
    _check(wins, losses)
    check_level(level)
    if n < wins + losses:
        raise ValueError(f"wins and losses must be at most the number of pairs (got {wins} and {losses} of {n}).")
    if n == 0:
        return Undefined("There are no pairs.")
    centre, error = _bonett_price(wins, losses, n)
    half = normal_quantile(two_sided(level)) * error
    return Interval(max(-1.0, centre - half), min(1.0, centre + half), level, "Bonett-Price")


def bonett_price_p(wins: int, losses: int, n: int) -> float:
    """The largest 1 - level at which the Bonett-Price interval of at least one pair still holds 0."""
    centre, error = _bonett_price(wins, losses, n)
    return 2 * normal_tail(abs(centre) / error)


def _bonett_price(wins: int, losses: int, n: int) -> tuple[float, float]:
    won, lost = (wins + 1) / (n + 2), (losses + 1) / (n + 2)
    return won - lost, sqrt((won + lost - (won - lost) ** 2) / (n + 2))


def binary_mde(wins: int, losses: int, n: int, *, level: float = 0.95, power: float = 0.8) -> float | Undefined:
    """The smallest true difference of paired rates that `n` pairs would show with the given power. Miettinen (1968).

    The Bonett-Price interval centres on d n/(n+2), so d solves

        d n/(n+2) = z_a/2 SE(d) + z_b SD(d),

    SE being the interval's own error and SD that of its centre, both at a rate of disagreement q + d. Here q is the
    disagreement that cancels out: the observed one, less the part of the observed difference e that is not noise,
    sqrt(max(0, e^2 - disagreement/n)). A true difference of d adds at least d to the disagreement, so the error of two
    near-identical systems would be too optimistic. For up to 100 pairs, where the normal approximation is too
    optimistic as well, the power is enumerated.
    """
    _check(wins, losses)
    check_level(level)
    check_power(power)
    if n < 1:
        return Undefined("There are no pairs.")
    disagreement = (wins + losses) / n
    cancelling = disagreement - sqrt(max(0.0, ((wins - losses) / n) ** 2 - disagreement / n))
    return pairs_mde(n, cancelling, level=level, power=power)


def pairs_mde(n: int, cancelling: float, *, level: float = 0.95, power: float = 0.8) -> float | Undefined:
    """`binary_mde` of `n` pairs of which the share `cancelling` disagrees beside what the difference itself brings."""
    check_level(level)
    check_power(power)
    z_interval, z_power = normal_quantile(two_sided(level)), normal_quantile(power)
    shrink = n / (n + 2)

    def shortfall(d: float) -> float:
        rate = min(1.0, cancelling + d)
        error = sqrt((rate * shrink + 2 / (n + 2) - (d * shrink) ** 2) / (n + 2))
        spread = sqrt(n * max(0.0, rate - d * d)) / (n + 2)
        return z_interval * error + z_power * spread - d * shrink

    def shortfall_of_power(d: float) -> float:
        return power - _pairs_power(n, min(1.0, cancelling + d), d, level)

    missing = shortfall if n > _ENUMERATED else shortfall_of_power
    if missing(1.0) > 0:
        return Undefined(f"With {n} pair{'s' if n > 1 else ''}, even the largest possible difference might be missed.")
    return find_root(missing, 0.0, 1.0, xtol=1e-6)


def _pairs_power(n: int, unequal: float, difference: float, level: float) -> float:
    """The chance that `n` pairs show a true difference: over all numbers of unequal pairs, and of wins among them."""
    counts = np.arange(n + 1)
    log_chance = gammaln(n + 1) - gammaln(counts + 1) - gammaln(n - counts + 1)
    log_chance = log_chance + xlogy(counts, unequal) + xlog1py(n - counts, -unequal)
    won = 0.5 + difference / (2 * unequal) if unequal > 0 else 0.5
    shown = bdtrc(_fewest_wins(n, level) - 1, counts, min(won, 1.0))
    return float(np.sum(np.exp(log_chance) * shown))


@lru_cache(maxsize=256)
def _fewest_wins(n: int, level: float) -> FloatArray:
    """For each number of unequal pairs, the fewest wins that show a difference; one more than all where none do."""
    unequal = np.arange(n + 1)[:, None]
    losses = np.arange(n + 1)[None, :]
    wins = unequal - losses
    ahead = wins > losses
    tail = bdtr(np.minimum(losses, unequal), unequal, 0.5)
    before = np.where(losses > 0, bdtr(np.clip(losses - 1, 0, unequal), unequal, 0.5), 0.0)
    p = tail + np.where(unequal == n, tail, before)  # Where all pairs differ, the test is the exact one.
    centre, spread = (wins - losses) / (n + 2), (unequal + 2) / (n + 2)
    statistic = centre / np.sqrt(np.maximum(spread - centre**2, 1e-300) / (n + 2))
    shown = ahead & (p <= 1 - level) & (2 * ndtr(-statistic) <= 1 - level)
    return np.asarray(np.arange(n + 1) + 1 - shown.sum(axis=1), dtype=np.float64)


def _check(wins: int, losses: int) -> None:
    if wins < 0 or losses < 0:
        raise ValueError(f"wins and losses must be at least 0 (got {wins} and {losses}).")
