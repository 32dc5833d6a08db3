"""Sequential analysis: tests and intervals that stay valid at every look at the data.

The usual p-value, looked at every 10 samples up to 500, gives a false alarm in about one run of five. These methods do
not, if outcomes are used in the order of the plan: in order of completion, slow failures arrive late and the rate would
be too high. They are for single pass/fail outcomes of independent samples.
"""

from dataclasses import dataclass
from math import exp, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln

from fairtrial.stats._arrays import (
    FloatArray,
    Values,
    as_values,
    check_counts,
    check_level,
    find_root,
    normal_quantile,
    two_sided,
)
from fairtrial.stats.intervals import wilson_effective
from fairtrial.stats.results import Interval

_LARGEST_LOG = 700.0  # exp of more overflows; no decision needs the digits


@dataclass(frozen=True, slots=True)
class PairsDecision:
    """The decision after some pairs: `better`, `worse`, or None if more pairs are needed.

    `looked_at` counts the pairs up to the deciding look, or up to the last one. `p_value` is valid at any time.
    """

    verdict: Literal["better", "worse"] | None
    looked_at: int
    wins: int
    losses: int
    e_value: float
    p_value: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class RateDecision:
    """Whether a rate is known precisely enough, with its interval at the look that stopped or at the last one."""

    stopped: bool
    looked_at: int
    successes: int
    interval: Interval


def eprocess_pairs(wins: int, losses: int, *, missing: int = 0) -> float:
    """Evidence that wins and losses are not equally likely: 2^(w+l) B(1+w, 1+l). Ville (1939), Robbins (1970).

    The likelihood of the data under a uniform mixture of win rates, over that under 1/2. If both are equally likely,
    the chance that it ever reaches 1/alpha is at most alpha, however often one looks. `missing` pairs whose outcome is
    not known count against whichever side leads: the least evidence they could leave.
    """
    if min(wins, losses, missing) < 0:
        raise ValueError(f"wins, losses and missing must be at least 0 (got {wins}, {losses} and {missing}).")
    more, fewer = max(wins, losses), min(wins, losses)
    caught_up = min(more, fewer + missing)
    left = missing - (caught_up - fewer)  # Once level, one for each side in turn.
    return exp(min(_LARGEST_LOG, _log_evidence(more + left // 2, caught_up + (left + 1) // 2)))


def betabinom_sequence(successes: int, n: int, *, missing: int = 0, level: float = 0.95) -> Interval:
    """Interval for a rate that holds at every look at once. Robbins (1970); Waudby-Smith and Ramdas (2020).

    All p with B(1+k, 1+n-k) / (p^k (1-p)^(n-k)) < 1/(1-level): those the uniform mixture does not refute.
    With n = 0 it is 0 to 1. Of the `n` trials, `missing` have an unknown outcome: the low end takes them for failures
    and the high end for successes, so the interval holds whatever made them go missing.
    """
    for count in (successes, missing, successes + missing):
        check_counts(count, n)
    check_level(level)
    low, high = _unrefuted(successes, n, level)
    if missing:
        high = _unrefuted(successes + missing, n, level)[1]
    return Interval(low, high, level, "beta-binomial confidence sequence")


def _unrefuted(successes: int, n: int, level: float) -> tuple[float, float]:
    if n == 0:
        return 0.0, 1.0
    k, rest = successes, n - successes
    mixture = float(betaln(1 + k, 1 + rest)) + log(1 - level)

    def refuted_by(p: float) -> float:
        return mixture - (k * log(p) if k else 0.0) - (rest * np.log1p(-p) if rest else 0.0)

    # Below 1e-300 a root cannot be told from 0; at the rate itself the mixture never wins.
    rate = k / n
    low = find_root(refuted_by, 1e-300, rate, xtol=1e-14) if k else 0.0
    high = find_root(refuted_by, rate, 1 - 1e-16, xtol=1e-14) if rest else 1.0
    return low, high


def stopped_by_width(successes: int, n: int, *, missing: int = 0, level: float = 0.95) -> Interval:
    """Wilson's interval of a rate whose sampling ends once the interval is narrow enough. Chow and Robbins (1965).

    Such a rule looks at the width alone, so an ordinary interval keeps its coverage and needs a third of the samples
    that a confidence sequence of this width takes. `missing` outcomes are in neither: the interval holds whatever they
    would have been.
    """
    check_counts(successes + missing, n)
    check_level(level)
    name = "Wilson score at a stop by width"
    if not n:
        return Interval(0.0, 1.0, level, name)
    z = normal_quantile(two_sided(level))
    low, high = (
        wilson_effective(passed / n, n, quantile=z, level=level, method=name)
        for passed in (successes, successes + missing)
    )
    return Interval(low.low, high.high, level, name)


def pairs_sequence(wins: int, losses: int, n: int, *, missing: int = 0, level: float = 0.95) -> Interval:
    """Interval for the difference of two paired rates that holds at every look at once.

    Half of 1 - level goes to the share of wins among the unequal pairs, half to the rate of unequal pairs, both by
    `betabinom_sequence`; the difference is rate (2 share - 1). It is cautious: it may still touch 0 for a few looks
    after the e-process, which spends all of 1 - level on the direction, has decided. Of the `n` pairs, `missing` have
    an unknown outcome and may have been wins, losses or ties: whichever widens the interval.
    """
    for count in (wins, losses, missing, wins + losses + missing):
        check_counts(count, n)
    check_level(level)
    each = 1 - (1 - level) / 2
    share = betabinom_sequence(wins, wins + losses + missing, missing=missing, level=each)
    rate = betabinom_sequence(wins + losses, n, missing=missing, level=each)
    corners = [r * (2 * s - 1) for r in (rate.low, rate.high) for s in (share.low, share.high)]
    return Interval(min(corners), max(corners), level, "beta-binomial confidence sequences of unequal pairs")


def pairs_decision(differences: Values, *, level: float = 0.95, every: int = 1) -> PairsDecision:
    """Look at pairs in the order of the plan and stop at the first look at which the e-process reaches 1/(1-level).

    `differences` are 1 (only a passes), -1 (only b passes) or 0. The first look comes after `every` pairs; what
    follows the last full look is looked at once, at the end.
    """
    check_level(level)
    d = as_values(differences, "differences")
    if not np.all(np.isin(d, (-1.0, 0.0, 1.0))):
        raise ValueError("Early stopping is for pairs of pass/fail outcomes: differences must be -1, 0 or 1.")
    wins, losses = np.cumsum(d > 0, dtype=np.intp), np.cumsum(d < 0, dtype=np.intp)
    looks = _looks(d.size, every)
    evidence = _log_evidences(wins[looks - 1], losses[looks - 1])
    crossed = np.flatnonzero(evidence >= -log(1 - level) - 1e-12)
    at = int(crossed[0]) if crossed.size else looks.size - 1
    seen = int(looks[at]) if looks.size else 0
    w, lost = (int(wins[seen - 1]), int(losses[seen - 1])) if seen else (0, 0)
    strongest = float(np.max(evidence[: at + 1], initial=0.0))
    verdict: Literal["better", "worse"] | None = None
    if crossed.size:
        verdict = "better" if w > lost else "worse"
    interval = pairs_sequence(w, lost, seen, level=level)
    return PairsDecision(verdict, seen, w, lost, eprocess_pairs(w, lost), exp(-strongest), interval)


def rate_decision(outcomes: Values, *, width: float, level: float = 0.95, every: int = 1) -> RateDecision:
    """Look at outcomes in the order of the plan and stop once Wilson's interval is no wider than `width`."""
    check_level(level)
    if not 0 < width < 1:
        raise ValueError(f"The width to stop at must be above 0 and below 1 (got {width}).")
    values = as_values(outcomes, "outcomes")
    if not np.all(np.isin(values, (0.0, 1.0))):
        raise ValueError("Early stopping is for pass/fail outcomes: every outcome must be 0 or 1.")
    passed = np.cumsum(values)
    seen, successes = 0, 0
    interval = stopped_by_width(0, 0, level=level)
    for look in _looks(values.size, every).tolist():
        seen, successes = look, int(passed[look - 1])
        interval = stopped_by_width(successes, seen, level=level)
        if interval.width <= width:
            return RateDecision(True, seen, successes, interval)
    return RateDecision(False, seen, successes, interval)


def _looks(n: int, every: int) -> NDArray[np.intp]:
    if every < 1:
        raise ValueError(f"every must be at least 1 (got {every}).")
    looks = np.arange(every, n + 1, every, dtype=np.intp)
    return np.append(looks, np.intp(n)) if n % every else looks


def _log_evidence(wins: int, losses: int) -> float:
    return float(_log_evidences(np.asarray([wins], dtype=np.intp), np.asarray([losses], dtype=np.intp))[0])


def _log_evidences(wins: NDArray[np.intp], losses: NDArray[np.intp]) -> FloatArray:
    return np.asarray((wins + losses) * log(2) + betaln(1 + wins, 1 + losses), dtype=np.float64)
