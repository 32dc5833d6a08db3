"""Pairs of pass/fail outcomes: what counts are the pairs in which exactly one side passes."""

from math import sqrt

from scipy import stats
from scipy.optimize import brentq

from fairtrial.stats._arrays import check_level, check_power, normal_quantile, two_sided
from fairtrial.stats.results import Interval, Undefined


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided exact test that wins and losses are equally likely: binomial with rate 1/2. McNemar (1947)."""
    _check(wins, losses)
    if wins + losses == 0:
        return 1.0
    return min(1.0, float(stats.binomtest(wins, wins + losses).pvalue))


def mcnemar_midp(wins: int, losses: int) -> float:
    """The exact test with only half the probability of the observed split: less cautious. Fagerland et al. (2013).

    p = 2 P(X < k) + P(X = k) for k = min(wins, losses) and X binomial(wins + losses, 1/2).
    """
    _check(wins, losses)
    if wins == losses:
        return 1.0
    k, m = min(wins, losses), wins + losses
    return min(1.0, float(2 * stats.binom.cdf(k, m, 0.5) - stats.binom.pmf(k, m, 0.5)))


def bonett_price(wins: int, losses: int, n: int, *, level: float = 0.95) -> Interval | Undefined:
    """Interval for the difference of two paired rates that cannot collapse. Bonett and Price (2012).

    One win and one loss are added: with b = (wins+1)/(n+2) and c = (losses+1)/(n+2) it is
    b - c -+ z sqrt((b + c - (b-c)^2)/(n+2)), cut to [-1, 1]. Undefined for n = 0.
    """
    _check(wins, losses)
    check_level(level)
    if n < wins + losses:
        raise ValueError(f"{wins} wins and {losses} losses do not fit into {n} pairs.")
    if n == 0:
        return Undefined("There are no pairs.")
    won, lost = (wins + 1) / (n + 2), (losses + 1) / (n + 2)
    half = normal_quantile(two_sided(level)) * sqrt((won + lost - (won - lost) ** 2) / (n + 2))
    centre = won - lost
    return Interval(max(-1.0, centre - half), min(1.0, centre + half), level, "Bonett-Price")


def binary_mde(wins: int, losses: int, n: int, *, level: float = 0.95, power: float = 0.8) -> float | Undefined:
    """The smallest true difference of paired rates that `n` pairs would show with the given power. Miettinen (1968).

    The Bonett-Price interval centres on d n/(n+2), so d solves
        d n/(n+2) = z_a/2 SE(d) + z_b SD(d),
    SE being the interval's own error and SD that of its centre, both at a rate of disagreement q + d. Here q is the
    disagreement that cancels out: the observed one, less the part of the observed difference e that is not noise,
    sqrt(max(0, e^2 - disagreement/n)). A true difference of d brings at least d more disagreement, so the error seen
    on two near-identical systems would promise too much.
    """
    _check(wins, losses)
    check_level(level)
    check_power(power)
    if n < 1:
        return Undefined("There are no pairs.")
    disagreement = (wins + losses) / n
    cancelling = disagreement - sqrt(max(0.0, ((wins - losses) / n) ** 2 - disagreement / n))
    z_interval, z_power = normal_quantile(two_sided(level)), normal_quantile(power)
    shrink = n / (n + 2)

    def shortfall(d: float) -> float:
        rate = min(1.0, cancelling + d)
        error = sqrt((rate * shrink + 2 / (n + 2) - (d * shrink) ** 2) / (n + 2))
        spread = sqrt(n * max(0.0, rate - d * d)) / (n + 2)
        return z_interval * error + z_power * spread - d * shrink

    if shortfall(1.0) > 0:
        return Undefined(f"With {n} pairs even the largest possible difference might be missed.")
    return float(brentq(shortfall, 0.0, 1.0))


def _check(wins: int, losses: int) -> None:
    if wins < 0 or losses < 0:
        raise ValueError(f"Wins and losses are counts; got {wins} and {losses}.")
