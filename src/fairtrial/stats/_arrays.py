"""Arrays that statistics take, and what they return when there is nothing to say."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import inf
from sys import float_info
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtr, ndtri, stdtr, stdtrit

from fairtrial.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Interval:
    """A range for an unknown quantity, with its nominal level and the name of the method."""

    low: float
    high: float
    level: float
    method: str

    @property
    def width(self) -> float:
        """`high - low`."""
        return self.high - self.low

    def contains(self, value: float) -> bool:
        """Whether `value` lies in the interval; both ends belong to it."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Undefined:
    """The data do not determine the quantity that was asked for.

    It is returned instead of a number; arithmetic with it fails.
    """

    reason: str


type FloatArray = NDArray[np.float64]
type IntArray = NDArray[np.intp]
# `Any`, because numpy arrays of bools, integers and floats of every width are accepted.
type Values = Sequence[float] | NDArray[Any]
type Labels = Sequence[Hashable] | NDArray[Any]


def as_values(values: Values, name: str = "values") -> FloatArray:
    """Return a one-dimensional array of finite floats; raises if an entry is not finite."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} must be a flat sequence of numbers: {error}") from error
    if array.size == 0:
        return np.empty(0)
    if array.ndim != 1:
        raise ConfigurationError(f"{name} must be a flat sequence of numbers (got {array.ndim} dimensions)")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ConfigurationError(f"{name}[{bad[0]}] must be a finite number (got {array[bad[0]]})")
    return array


@dataclass(frozen=True, slots=True)
class Repeats:
    """The scored repeats of all samples in one array, with the number of repeats of each sample."""

    flat: FloatArray
    counts: IntArray

    @property
    def means(self) -> FloatArray:
        """The mean of each sample; every sample must have a repeat."""
        if self.single or not self.counts.size:
            return self.flat
        return np.asarray(np.add.reduceat(self.flat, self.starts) / self.counts, dtype=np.float64)

    @property
    def starts(self) -> IntArray:
        """Where each sample begins in `flat`."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]]).astype(np.intp)

    @property
    def single(self) -> bool:
        """Whether every sample has exactly one repeat."""
        return bool(self.flat.size == self.counts.size and np.all(self.counts == 1))

    @property
    def binary(self) -> bool:
        """Whether every single score is 0 or 1."""
        return bool(np.all((self.flat == 0) | (self.flat == 1)))

    def only(self, keep: NDArray[np.bool_]) -> Repeats:
        """The samples marked in `keep`."""
        return Repeats(self.flat[np.repeat(keep, self.counts)], self.counts[keep])


type Samples = Values | Sequence[Values] | Repeats


def as_samples(values: Samples, name: str = "values") -> Repeats:
    """Read one score per sample, or a sequence of repeats per sample; the number of repeats may vary."""
    if isinstance(values, Repeats):
        if int(values.counts.sum()) != values.flat.size:
            raise ConfigurationError(f"{name} counts {int(values.counts.sum())} repeats and holds {values.flat.size}")
        return Repeats(as_values(values.flat, name), values.counts)
    if isinstance(values, np.ndarray) and values.ndim == 2:
        rows, columns = values.shape
        return Repeats(as_values(values.reshape(-1), name), np.full(rows, columns, dtype=np.intp))
    nested = [isinstance(value, Sequence | np.ndarray) for value in values] if not _is_flat_array(values) else []
    if not any(nested):
        flat = as_values(cast(Values, values), name)
        return Repeats(flat, np.ones(flat.size, dtype=np.intp))
    if not all(nested):
        raise ConfigurationError(f"{name} must have a list of repeats for every sample, or for none (got both)")
    rows_of_scores = cast(Sequence[Sequence[float]], values)
    counts = np.fromiter((len(row) for row in rows_of_scores), dtype=np.intp, count=len(rows_of_scores))
    return Repeats(as_values(list(chain.from_iterable(rows_of_scores)), name), counts)


def _is_flat_array(values: Values | Sequence[Values]) -> bool:
    return isinstance(values, np.ndarray) and values.dtype != np.object_


@dataclass(frozen=True, slots=True)
class Clusters:
    """Which cluster each sample belongs to, numbered from 0, and how many there are."""

    codes: IntArray
    count: int

    def totals(self, values: FloatArray) -> FloatArray:
        """The sum of `values` within each cluster: to the last bit the same in any order, and with the other sign."""
        order = np.argsort(np.abs(values))
        codes, ordered = self.codes[order], values[order]
        gains = np.bincount(codes, weights=np.maximum(ordered, 0), minlength=self.count)
        losses = np.bincount(codes, weights=np.maximum(-ordered, 0), minlength=self.count)
        return (gains - losses).astype(np.float64)

    @property
    def sizes(self) -> FloatArray:
        """The number of samples in each cluster."""
        return np.bincount(self.codes, minlength=self.count).astype(np.float64)

    def only(self, keep: NDArray[np.bool_]) -> Clusters:
        """The same clustering of the samples marked in `keep`, renumbered."""
        return as_clusters(self.codes[keep], int(np.count_nonzero(keep)))


def as_clusters(labels: Labels, n: int) -> Clusters:
    """Number the labels; a sample labelled None is a cluster of its own."""
    if len(labels) != n:
        raise ConfigurationError(f"clusters must have one label for each of the {n} samples (got {len(labels)})")
    if isinstance(labels, np.ndarray) and np.issubdtype(labels.dtype, np.integer):
        names_found, found = np.unique(labels, return_inverse=True)
        return Clusters(found.astype(np.intp), int(names_found.size))
    seen: dict[Hashable, int] = {}
    names = cast(Iterable[Hashable], labels.tolist() if isinstance(labels, np.ndarray) else labels)
    codes = [
        seen.setdefault((position,) if label is None else (label, ""), len(seen))
        for position, label in enumerate(names)
    ]
    return Clusters(np.asarray(codes, dtype=np.intp), len(seen))


def check_level(level: float) -> None:
    """Refuse a confidence level outside (0, 1)."""
    if not 0 < level < 1:
        raise ConfigurationError(f"a confidence level must be above 0 and below 1, such as 0.95 (got {level})")


def check_power(power: float) -> None:
    """Refuse a power outside (0, 1)."""
    if not 0 < power < 1:
        raise ConfigurationError(f"power must be above 0 and below 1, such as 0.8 (got {power})")


def check_counts(successes: int, n: int) -> None:
    """Refuse counts that cannot be `successes` out of `n`."""
    if n < 0 or not 0 <= successes <= n:
        raise ConfigurationError(f"successes must be from 0 to n (got {successes} out of {n})")


def check_bounds(values: FloatArray, bounds: tuple[float, float] | None, name: str = "values") -> None:
    """Refuse values outside the declared range."""
    if bounds is None:
        return
    low, high = bounds
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ConfigurationError(f"bounds must be (lowest, highest), or None if there are none (got {bounds})")
    outside = values[(values < low) | (values > high)]
    if outside.size:
        raise ConfigurationError(
            f"{name} must be from {low:g} to {high:g} (got {outside[0]:g}): pass the bounds of the metric, "
            "or bounds=None if it has none"
        )


@lru_cache(maxsize=1024)
def normal_quantile(probability: float) -> float:
    """The standard normal quantile."""
    return float(ndtri(probability))


@lru_cache(maxsize=4096)
def t_quantile(probability: float, df: float) -> float:
    """Student's t quantile."""
    return float(stdtrit(df, probability))


# Functions of scipy.special, because a call of the distributions in scipy.stats takes 100 microseconds.
def normal_tail(value: float) -> float:
    """The chance that a standard normal variable exceeds `value`."""
    return float(ndtr(-value))


def t_tail(value: float, df: float) -> float:
    """The chance that Student's t exceeds `value`."""
    return float(stdtr(df, -value))


def two_sided(level: float) -> float:
    """The upper tail point of a two-sided interval: .975 for 95%."""
    return (1 + level) / 2


def binomial_tail(count: int, n: int, rate: float) -> float:
    """The chance of more than `count` successes in `n` trials."""
    return float(betainc(count + 1, n - count, rate)) if count < n else 0.0


def binomial_ranks(tail: float, n: int, rate: float) -> tuple[int, int]:
    """The least count k with P(X <= k) >= tail, and the least with P(X > k) <= tail, of a binomial X.

    As `ppf` and `isf` of `scipy.stats.binom`, which takes as long to load as everything else together.
    """
    low = bisect_left(range(n), True, key=lambda count: bool(betainc(n - count, count + 1, 1 - rate) >= tail))
    high = bisect_left(range(n), True, key=lambda count: binomial_tail(count, n, rate) <= tail)
    return low, high


def find_root(call: Callable[[float], float], low: float, high: float, *, xtol: float = 2e-12) -> float:
    """Find where a function of one number is 0 between two ends at which its signs differ, by Brent's method (1973).

    Step by step as `scipy.optimize.brentq`, whose package takes longer to load than a comparison takes.
    """
    before, now = low, high
    at_before, at_now = call(before), call(now)
    if at_before == 0 or at_now == 0:
        return before if at_before == 0 else now
    if (at_before > 0) == (at_now > 0):
        raise ValueError("the function must have different signs at both ends")
    other, at_other, last_step, step = before, at_before, now - before, now - before
    for _ in range(100):
        if at_before and at_now and (at_before > 0) != (at_now > 0):
            other, at_other = before, at_before
            last_step = step = now - before
        if abs(at_other) < abs(at_now):
            before, now, other = now, other, now
            at_before, at_now, at_other = at_now, at_other, at_now
        tolerance = (xtol + 4 * float_info.epsilon * abs(now)) / 2
        half = (other - now) / 2
        if at_now == 0 or abs(half) < tolerance:
            break
        if abs(last_step) > tolerance and abs(at_now) < abs(at_before):
            if before == other:
                try_step = -at_now * (now - before) / (at_now - at_before)
            else:
                slope, other_slope = (at_before - at_now) / (before - now), (at_other - at_now) / (other - now)
                divisor = other_slope * slope * (at_other - at_before)  # 0 where a function has steps: halve.
                try_step = -at_now * (at_other * other_slope - at_before * slope) / divisor if divisor else inf
            is_short = 2 * abs(try_step) < min(abs(last_step), 3 * abs(half) - tolerance)
            last_step, step = (step, try_step) if is_short else (half, half)
        else:
            last_step = step = half
        before, at_before = now, at_now
        now += step if abs(step) > tolerance else tolerance if half > 0 else -tolerance
        at_now = call(now)
    return float(now)
