"""Several tests, and tests that may stop at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats.intervals import wilson_effective


def holm(p_values: arrays.Values) -> arrays.FloatArray:
    """Adjusted p-values that bound the chance of even one false alarm, whatever the dependence. Holm (1979).

    Sorted upwards, the i-th of m is max over j <= i of min(1, (m - j + 1) p_j). For several metrics or candidates,
    where one false alarm blocks a release.
    """
    p = _checked(p_values)
    order = np.argsort(p, kind="stable")
    steps = np.minimum(1.0, p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted


def benjamini_hochberg(p_values: arrays.Values) -> arrays.FloatArray:
    """Adjusted p-values that bound the share of false alarms among all alarms. Benjamini and Hochberg (1995).

    Sorted upwards, the i-th of m is min over j >= i of min(1, m p_j / j). For many slices, where a list is read
    through anyway. Valid for independent or positively dependent p-values.
    """
    p = _checked(p_values)
    order = np.argsort(p, kind="stable")[::-1]
    steps = np.minimum(1.0, p[order] * p.size / np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum.accumulate(steps)
    return adjusted


def _checked(p_values: arrays.Values) -> arrays.FloatArray:
    p = arrays.as_values(p_values, "p_values")
    outside = p[(p < 0) | (p > 1)]
    if outside.size:
        raise ConfigurationError(f"a p-value must be from 0 to 1 (got {outside[0]:g})")
    return p


BETTING_TEST = "betting martingale"
"""The name of the test that goes with `BettingMartingale.interval`."""

type _Counted = tuple[arrays.FloatArray, arrays.FloatArray]

_LARGEST_LOG = 700.0  # exp of more overflows; no decision needs the digits
_PANELS, _POINTS = 12, 10  # Bets: Gauss-Legendre points between halvings of 1. 50,000 wins to 49,000 losses: 6 digits.
_LATTICE = 1_024  # Steps: ends of the interval of differences of scores move by less than 1e-6.
_CHUNK = 512  # What fits into a cache.
_NEAR = 1e-12  # A share of the range that cannot be told from its end.
_BLOCK = 512  # Looks whose capital is computed at once.


@dataclass(frozen=True, slots=True)
class PairsDecision:
    """The decision after some pairs: `better`, `worse`, or None if more pairs are needed.

    `looked_at` counts the pairs up to the deciding look, or up to the last one. `e_value` is the capital there,
    `p_value` 1/e_value. Both stay valid at any time, and the interval leaves out 0 if and only if there is a verdict.
    """

    verdict: Literal["better", "worse"] | None
    looked_at: int
    wins: int
    losses: int
    e_value: float
    p_value: float
    interval: arrays.Interval


@dataclass(frozen=True, slots=True)
class RateDecision:
    """Whether a rate is known precisely enough, with its interval at the look that stopped or at the last one."""

    stopped: bool
    looked_at: int
    successes: int
    interval: arrays.Interval


class BettingMartingale:
    """Evidence against each mean of numbers in a known range: the capital of a gambler who bets against that mean.

    Against a mean m of numbers from l to u, each number x multiplies the capital by 1 + a(x - m)/(m - l) in a bet that
    the mean is higher, and by 1 + a(m - x)/(u - m) in a bet that it is lower. Half of the capital is on each side,
    spread evenly over all stakes a from 0 to 1. If m is the mean, no bet is expected to win: the chance that the
    capital ever reaches 1/alpha is at most alpha, however often one looks (Ville 1939). Waudby-Smith and Ramdas (2024);
    the even spread over constant stakes is Cover's (1991) universal portfolio.

    The order of the numbers does not matter. Of pairs of pass/fail outcomes with w wins and l losses the capital
    against 0 is 2^(w+l) B(1+w, 1+l), the e-process of Robbins (1970).
    """

    def __init__(
        self, values: arrays.Values, highest: arrays.Values | None = None, *, bounds: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        """Start from one number for each sample.

        Args:
            values: The numbers. Where one is not known exactly: the least that it may be.
            highest: The most that each may be; by default `values`. Bets on a higher mean use the former and bets on a
                lower mean the latter, so the capital is at most what any numbers in between would have made.
            bounds: The range of the numbers.
        """
        low = arrays.as_values(values)
        high = low if highest is None else arrays.as_values(highest, "highest")
        for ends in (low, high):
            arrays.check_bounds(ends, bounds)
        if low.size != high.size or np.any(low > high):
            raise ConfigurationError("highest must have a number for each of values, at least as large")
        self.n = int(low.size)
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self._numbers = (_counted(low), _counted(high))

    def capital(self, mean: float) -> float:
        """Return the capital against this mean, an e-value: 1 at the start."""
        least, most = self.bounds
        if not least < mean < most:
            raise ConfigurationError(f"mean must be between {least:g} and {most:g} (got {mean:g})")
        return exp(min(_LARGEST_LOG, self._log_capital(mean, self._numbers)))

    def interval(self, level: float = 0.95) -> arrays.Interval:
        """Return the means against which the capital is below 1/(1 - level): an interval, as the capital is convex.

        It holds at every look at once, and contains the mean of the numbers.
        """
        arrays.check_level(level)
        low, high = (_on_lattice(one, self.bounds) for one in self._numbers)
        ends = [self._end(side, level, (low, high)) for side in (0, 1)]
        if self.bounds[0] < 0.0 < self.bounds[1]:
            # 0 is inside or outside by its own capital, not by the rounding of an end.
            rejected = refutes(self.capital(0.0), level)
            ends = _beside_zero(ends, self._centre) if rejected else [min(ends[0], 0.0), max(ends[1], 0.0)]
        return arrays.Interval(ends[0], ends[1], level, "betting confidence sequence")

    @property
    def _centre(self) -> float:
        """A mean against which nothing is won: between those of the lowest and of the highest numbers."""
        if not self.n:
            return sum(self.bounds) / 2
        return sum(float(values @ counts) for values, counts in self._numbers) / (2 * self.n)

    def _end(self, side: int, level: float, numbers: tuple[_Counted, _Counted]) -> float:
        least, most = self.bounds
        width = most - least
        limit = (least + _NEAR * width, most - _NEAR * width)
        inner = min(max(self._centre, limit[0]), limit[1])
        step = width / sqrt(self.n + 1)

        def excess(mean: float) -> float:
            return self._log_capital(mean, numbers) + log(1 - level)

        while inner != limit[side]:
            outer = min(max(inner + (step if side else -step), limit[0]), limit[1])
            if excess(outer) >= 0:
                return arrays.find_root(excess, inner, outer, xtol=1e-13 * width)
            inner, step = outer, 2 * step
        return self.bounds[side]

    def _log_capital(self, mean: float, numbers: tuple[_Counted, _Counted]) -> float:
        least, most = self.bounds
        odds = (1 / (mean - least), -1 / (most - mean))
        return float(
            _totals(np.stack([_log_product((x - mean) * by, n) for (x, n), by in zip(numbers, odds, strict=True)]))
        )


class RunningCapital:
    """The capital against a mean of 0 of numbers from -1 to 1 that come one by one (see `BettingMartingale`)."""

    def __init__(self) -> None:
        self._logs = np.zeros((2, _stakes()[0].size))

    def add(self, least: float, most: float) -> None:
        """Count a number that lies between these two."""
        self._logs += _log_factor(least, most)

    @property
    def e_value(self) -> float:
        """The capital."""
        return exp(min(_LARGEST_LOG, float(_totals(self._logs))))


def refutes(capital: float, level: float) -> bool:
    """Whether a capital against a mean refutes it at this level."""
    return capital >= (1 - 1e-9) / (1 - level)  # Below, because of rounding: 1/(1 - .95) is not exactly 20.


def stopped_by_width(successes: int, n: int, *, missing: int = 0, level: float = 0.95) -> arrays.Interval:
    """Wilson's interval of a rate whose sampling ends once the interval is narrow enough. Chow and Robbins (1965).

    Such a rule looks at the width alone, so an ordinary interval keeps its coverage and needs a third of the samples
    that a confidence sequence of this width takes. `missing` outcomes are in neither: the interval holds whatever they
    would have been.
    """
    arrays.check_counts(successes + missing, n)
    arrays.check_level(level)
    name = "Wilson score at a stop by width"
    if not n:
        return arrays.Interval(0.0, 1.0, level, name)
    z = arrays.normal_quantile(arrays.two_sided(level))
    low, high = (
        wilson_effective(passed / n, n, quantile=z, level=level, method=name)
        for passed in (successes, successes + missing)
    )
    return arrays.Interval(low.low, high.high, level, name)


def pairs_decision(differences: arrays.Values, *, level: float = 0.95, every: int = 1) -> PairsDecision:
    """Look at pairs in the order of the plan and stop at the first look at which the capital reaches 1/(1-level).

    `differences` are a - b, from -1 to 1: scores lie between 0 and 1. The first look comes after `every` pairs; what
    follows the last full look is looked at once, at the end.
    """
    arrays.check_level(level)
    d = arrays.as_values(differences, "differences")
    arrays.check_bounds(d, (-1.0, 1.0), "differences")
    looks = _looks(d.size, every)
    seen, e_value = 0, 1.0
    for look, capital in _capitals(d, looks):
        seen, e_value = look, capital
        if refutes(capital, level):
            break
    wins, losses = int(np.count_nonzero(d[:seen] > 0)), int(np.count_nonzero(d[:seen] < 0))
    interval = BettingMartingale(d[:seen], bounds=(-1.0, 1.0)).interval(level)
    verdict: Literal["better", "worse"] | None = None
    if not interval.contains(0.0):
        verdict = "better" if interval.low > 0 else "worse"
    return PairsDecision(verdict, seen, wins, losses, e_value, min(1.0, 1 / e_value), interval)


def rate_decision(outcomes: arrays.Values, *, width: float, level: float = 0.95, every: int = 1) -> RateDecision:
    """Look at outcomes in the order of the plan and stop once Wilson's interval is no wider than `width`."""
    arrays.check_level(level)
    if not 0 < width < 1:
        raise ConfigurationError(f"the width to stop at must be above 0 and below 1 (got {width})")
    values = arrays.as_values(outcomes, "outcomes")
    if not np.all(np.isin(values, (0.0, 1.0))):
        raise ConfigurationError("early stopping is for pass/fail outcomes: every outcome must be 0 or 1")
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
        raise ConfigurationError(f"every must be at least 1 (got {every})")
    looks = np.arange(every, n + 1, every, dtype=np.intp)
    return np.append(looks, np.intp(n)) if n % every else looks


def _capitals(differences: arrays.FloatArray, looks: NDArray[np.intp]) -> Iterator[tuple[int, float]]:
    """Yield the number of pairs and the capital against 0 at each look."""
    begin, carried = 0, np.zeros((2, _stakes()[0].size))
    for block in np.array_split(looks, range(_BLOCK, looks.size, _BLOCK)) if looks.size else ():
        distinct, places = np.unique(differences[begin : block[-1]], return_inverse=True)
        factors = _log_factors(distinct, distinct)[places]
        logs = carried + np.cumsum(np.add.reduceat(factors, np.append(begin, block[:-1]) - begin), axis=0)
        yield from zip(block.tolist(), np.exp(np.minimum(_LARGEST_LOG, _totals(logs))).tolist(), strict=True)
        begin, carried = int(block[-1]), logs[-1]


def _log_factors(least: arrays.FloatArray, most: arrays.FloatArray) -> arrays.FloatArray:
    """Return what each number from -1 to 1 makes of the capital against 0, on both sides and at all stakes."""
    stakes = _stakes()[0]
    return np.stack([np.log1p(np.outer(least, stakes)), np.log1p(-np.outer(most, stakes))], axis=1)


@lru_cache(maxsize=256)  # Pass/fail outcomes have three differences.
def _log_factor(least: float, most: float) -> arrays.FloatArray:
    factors: arrays.FloatArray = _log_factors(np.asarray([least]), np.asarray([most]))[0]
    return factors


def _beside_zero(ends: list[float], centre: float) -> list[float]:
    """Return the ends of an interval that leaves out 0, on the side of its centre."""
    least = float(np.nextafter(0.0, 1.0))
    return [max(ends[0], least), ends[1]] if centre > 0 else [ends[0], min(ends[1], -least)]


@lru_cache(maxsize=1)
def _stakes() -> tuple[arrays.FloatArray, arrays.FloatArray]:
    """Return stakes from 0 to 1 and their weights, for an even spread; closer to each other towards 0."""
    points, weights = np.polynomial.legendre.leggauss(_POINTS)
    ends = np.append(0.0, 0.5 ** np.arange(_PANELS - 1, -1, -1))
    halves = np.diff(ends)[:, None] / 2
    return (ends[:-1, None] + halves * (1 + points)).ravel(), (halves * weights).ravel()


def _totals(logs: arrays.FloatArray) -> arrays.FloatArray:
    """Return the logarithm of the capital over both sides and all stakes."""
    peak = logs.max(axis=(-2, -1), keepdims=True)
    shares = np.exp(logs - peak).sum(axis=-2) @ _stakes()[1]
    return np.asarray(peak[..., 0, 0] + np.log(shares / 2), dtype=np.float64)


def _log_product(gains: arrays.FloatArray, counts: arrays.FloatArray) -> arrays.FloatArray:
    """Return the logarithm of the capital at each stake, given the gain of each number at a stake of 1."""
    logs = np.zeros(_stakes()[0].size)
    for first in range(0, gains.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        logs += np.log(1 + np.outer(_stakes()[0], gains[part])) @ counts[part]  # log1p takes three times as long.
    return logs


def _counted(values: arrays.FloatArray) -> _Counted:
    """Return the distinct numbers and how often each occurs."""
    distinct, counts = np.unique(values, return_counts=True)
    return distinct, counts.astype(np.float64)


def _on_lattice(numbers: _Counted, bounds: tuple[float, float]) -> _Counted:
    """Return very many numbers with each split between its two neighbours on a lattice, so that its mean stays.

    The capital against any mean gets smaller by that, never larger, as the logarithm is concave.
    """
    distinct, counts = numbers
    if distinct.size <= _LATTICE:
        return numbers
    least, most = bounds
    places = (distinct - least) / (most - least) * _LATTICE
    below = np.minimum(np.floor(places), _LATTICE - 1).astype(np.intp)
    share = (places - below) * counts
    weights = np.bincount(below, counts - share, _LATTICE + 1) + np.bincount(below + 1, share, _LATTICE + 1)
    return least + (most - least) * np.arange(_LATTICE + 1) / _LATTICE, weights
