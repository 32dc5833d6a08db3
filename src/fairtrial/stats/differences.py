"""Differences of two systems, and whether they differ between slices."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import cast

import numpy as np
from scipy.special import fdtrc

from fairtrial.errors import ConfigurationError
from fairtrial.stats import resampling
from fairtrial.stats._arrays import (
    FloatArray,
    IntArray,
    Interval,
    Labels,
    Undefined,
    Values,
    as_clusters,
    as_values,
    t_quantile,
    t_tail,
    two_sided,
)
from fairtrial.stats.intervals import (
    FEW_IMPERFECT,
    ClusteredError,
    exact_rate_interval,
    sem,
    totals_error,
    with_one_farther,
)
from fairtrial.stats.power import detectable_shift

FEW_GROUP_CLUSTERS = 5
"""A group with fewer clusters takes no part in the test."""

_DRAWS, _CELLS = 1_999, 2_000_000
_PERMUTE_UP_TO = 2_000  # Above this many samples the F distribution is as good; clusters are merged to this many.
_PRIOR = 2  # A group's variance is at least what this many degrees of freedom of all groups make of none of its own.


@dataclass(frozen=True, slots=True)
class Heterogeneity:
    """The p-value of the test that all groups have the same mean, over `n` samples in `groups` groups."""

    p_value: float
    groups: int
    n: int
    test: str


def heterogeneity(
    values: Values, groups: Labels, *, clusters: Labels | None = None, draws: int = _DRAWS, seed: int = 0
) -> Heterogeneity | Undefined:
    """Test whether all groups of samples have the same mean; `values` may be paired differences.

    The statistic is the sum of squared deviations of the groups' means from their common mean, each divided by its own
    variance (Welch 1951), which is never 0. Samples are permuted between the groups (Janssen 1997); above 2,000 samples
    p is that of Welch's F. With clusters, the residuals of whole clusters change their signs (the wild cluster
    bootstrap; Cameron, Gelbach and Miller 2008), whether a cluster lies in one group or in several; of more than 2,000
    clusters, random sets change theirs together. Groups of one sample, or of fewer than 5 clusters, take no part;
    undefined if fewer than two remain.
    """
    array = as_values(values)
    codes = as_clusters(groups, array.size).codes
    units = None if clusters is None else as_clusters(clusters, array.size).codes
    if units is None:
        enough = np.bincount(codes) > 1
    else:
        met = np.unique(np.stack([codes, units]), axis=1)
        enough = np.bincount(met[0]) >= FEW_GROUP_CLUSTERS
    keep = enough[codes] if codes.size else np.zeros(0, dtype=np.bool_)
    array, codes = array[keep], np.unique(codes[keep], return_inverse=True)[1].astype(np.intp)
    count = int(codes.max(initial=-1)) + 1
    if count < 2:
        least = "two samples" if units is None else f"{FEW_GROUP_CLUSTERS} clusters"
        return Undefined(f"Fewer than two slices have at least {least}.")
    if np.ptp(array) <= 1e-12 * max(1.0, float(np.max(np.abs(array)))):
        return Heterogeneity(1.0, count, array.size, "all values are equal")
    if units is not None:
        p, test = _flipped(array, codes, units[keep], draws, seed), "wild cluster bootstrap of Welch's statistic"
    elif array.size <= _PERMUTE_UP_TO:
        p, test = _permuted(array, codes, draws, seed), "permutation of Welch's statistic"
    else:
        p, test = _welch(array, codes), "Welch's F test"
    return Heterogeneity(p, count, array.size, test)


def _permuted(array: FloatArray, codes: IntArray, draws: int, seed: int) -> float:
    order = np.argsort(codes, kind="stable")
    # Samples are sorted, so that the result does not depend on the order of the data.
    array = np.concatenate([np.sort(part) for part in np.split(array[order], _starts(codes)[1:])])
    sizes, starts = np.bincount(codes).astype(np.float64), _starts(codes)

    def statistic(rows: FloatArray) -> FloatArray:
        sums = np.add.reduceat(rows, starts, axis=1)
        inside = np.add.reduceat(rows * rows, starts, axis=1) - sums**2 / sizes
        pooled = inside.sum(axis=1, keepdims=True) / max(1.0, array.size - sizes.size)
        variances = np.maximum(inside / (sizes - 1), _PRIOR * pooled / (sizes - 1 + _PRIOR))
        return _spread(sums / sizes, variances / sizes)

    rng = np.random.default_rng(seed)
    observed = float(statistic(array[None, :])[0])
    hits = 0
    step = max(1, _CELLS // array.size)
    for start in range(0, draws, step):
        rows = np.tile(array, (min(step, draws - start), 1))
        hits += int(np.count_nonzero(statistic(rng.permuted(rows, axis=1, out=rows)) >= observed * (1 - 1e-9)))
    return (1 + hits) / (1 + draws)


def _flipped(array: FloatArray, codes: IntArray, units: IntArray, draws: int, seed: int) -> float:
    units = np.unique(units, return_inverse=True)[1]
    shape = (int(units.max()) + 1, int(codes.max()) + 1)
    residuals, sizes = np.zeros(shape), np.zeros(shape)
    np.add.at(residuals, (units, codes), array - array.mean())
    np.add.at(sizes, (units, codes), 1.0)
    rng = np.random.default_rng(seed)
    order = np.lexsort((*residuals.T, *sizes.T))
    if order.size > _PERMUTE_UP_TO:
        order = rng.permutation(order)
        starts = np.linspace(0, order.size, _PERMUTE_UP_TO, endpoint=False).astype(np.intp)
        residuals, sizes = (np.add.reduceat(each[order], starts, axis=0) for each in (residuals, sizes))
    else:
        residuals, sizes = residuals[order], sizes[order]
    n, clusters = sizes.sum(axis=0), np.count_nonzero(sizes, axis=0)
    typical = float(np.sum(residuals**2) / np.sum(sizes**2)) * np.sum(sizes**2, axis=0) / n**2

    def statistic(signs: FloatArray) -> FloatArray:
        means = signs @ residuals / n
        squares = np.sum(residuals**2, axis=0) - 2 * means * (signs @ (residuals * sizes))
        squares = (squares + means**2 * np.sum(sizes**2, axis=0)) / n**2 * clusters / (clusters - 1)
        return _spread(means, np.maximum(squares, _PRIOR * typical / (clusters - 1 + _PRIOR)))

    observed = float(statistic(np.ones((1, len(sizes)), dtype=np.float64))[0])
    signs = np.where(rng.random((draws, len(sizes))) < 0.5, -1.0, 1.0)
    found = statistic(signs)
    return (1 + int(np.count_nonzero(found >= observed * (1 - 1e-9)))) / (1 + draws)


def _welch(array: FloatArray, codes: IntArray) -> float:
    sizes = np.bincount(codes).astype(np.float64)
    means = np.bincount(codes, array) / sizes
    inside = np.bincount(codes, (array - means[codes]) ** 2)
    pooled = float(inside.sum()) / (array.size - sizes.size)
    variances = np.maximum(inside / (sizes - 1), _PRIOR * pooled / (sizes - 1 + _PRIOR)) / sizes
    weights = 1 / variances / np.sum(1 / variances)
    count = sizes.size
    unsure = float(np.sum((1 - weights) ** 2 / (sizes - 1)))
    ratio = float(_spread(means[None, :], variances[None, :])[0]) / (count - 1)
    ratio /= 1 + 2 * (count - 2) / (count**2 - 1) * unsure
    return float(fdtrc(count - 1, (count**2 - 1) / (3 * unsure), ratio))


def _spread(means: FloatArray, variances: FloatArray) -> FloatArray:
    """The weighted squares of the means around their weighted mean, of each row."""
    weights = 1 / np.maximum(variances, 1e-300)
    centre = np.sum(weights * means, axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True)
    return np.asarray(np.sum(weights * (means - centre) ** 2, axis=1), dtype=np.float64)


def _starts(codes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.bincount(codes))[:-1]]).astype(np.intp)


FARTHER_OUT = "one difference farther out"
"""Names intervals that allow for a difference beyond those that were seen."""
_USUAL = 0.05  # Units that allow the sign-flip test at the usual level always have to pass it.


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings: level, power, the largest possible difference (None: no limit), draws and seed.

    `repeated` says that samples have repeats, so that few of them differ by as much as the largest difference.
    """

    level: float
    power: float
    largest: float | None
    draws: int | None
    seed: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class DifferenceInference:
    """The inference about one set of differences; `reasons` explain every None.

    `p_value` is the largest 1 - level at which the interval still holds 0: the two cannot disagree. `df` are the
    degrees of freedom of `se`.
    """

    interval: Interval | None
    p_value: float | None
    test: str | None
    se: float | None
    mde: float | None
    reasons: tuple[str, ...]
    df: float | None = None
    effective_clusters: float | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """One of the intervals whose hull is reported, and the largest 1 - level at which it still holds 0."""

    low: float
    high: float
    name: str
    p_value: float


def binary_answer(differences: FloatArray, plan: Plan, *, exact: bool) -> DifferenceInference:
    """McNemar's test and `paired_rates_interval` for pairs of single pass/fail outcomes."""
    wins, losses = int(np.count_nonzero(differences > 0)), int(np.count_nonzero(differences < 0))
    n = differences.size
    reasons: list[str] = []
    se = _defined(sem(differences), reasons)
    mde = _defined(resampling.binary_mde(wins, losses, n, level=plan.level, power=plan.power), reasons)
    interval = paired_rates_interval(wins, losses, n, level=plan.level, exact=exact)
    p = max(_mcnemar(wins, losses, n, exact=exact), resampling.bonett_price_p(wins, losses, n))
    test = "exact McNemar test" if exact or wins + losses == n else "mid-p McNemar test"
    return DifferenceInference(interval, p, test, se, mde, tuple(reasons))


def paired_rates_interval(wins: int, losses: int, n: int, *, level: float = 0.95, exact: bool = False) -> Interval:
    """Interval for the difference of two paired rates over at least one pair.

    Bonett and Price's, stretched to 0 while mid-p McNemar (or the exact test) does not reject equality. If no pair is
    won, none lost or none tied, the difference is that of one rate, and the interval is stretched to Clopper and
    Pearson's: without it 20 pairs are covered in 92.8% of runs with 20% wins, in 90% of 10 pairs that all differ.
    """
    if n < 1:
        raise ConfigurationError(f"there must be at least one pair (got {n})")
    interval = cast(Interval, resampling.bonett_price(wins, losses, n, level=level))
    ends, method = [interval.low, interval.high], interval.method
    if _mcnemar(wins, losses, n, exact=exact) > 1 - level:
        ends.append(0.0)
    # Of three kinds of pairs one is absent: the difference is a rate, its negative, or twice a rate less 1.
    for absent, rate, scale, shift in ((losses, wins, 1, 0), (wins, losses, -1, 0), (n - wins - losses, wins, 2, -1)):
        if not absent:
            tails = exact_rate_interval(rate / n, n, level=level)
            ends += [scale * tails.low + shift, scale * tails.high + shift]
            method = "Bonett-Price and exact binomial tails"
    return Interval(min(ends), max(ends), level, method)


def _mcnemar(wins: int, losses: int, n: int, *, exact: bool) -> float:
    """The test's p-value; where all pairs differ it is the exact test's, as is the interval."""
    return (
        resampling.mcnemar_exact(wins, losses) if exact or wins + losses == n else resampling.mcnemar_midp(wins, losses)
    )


def resampled_answer(differences: FloatArray, labels: IntArray | None, plan: Plan) -> DifferenceInference:
    """Sign-flip test, and the hull of the bootstrap and sign-flip intervals, for samples or whole clusters."""
    units = resampling.units_of(differences, labels)
    if labels is not None and units.count < 2:
        reason = "All samples are in one cluster, so the variance between clusters is not known."
        return DifferenceInference(None, None, None, None, None, (reason,))
    reasons: list[str] = []
    error = None
    if units.count < 2:
        reasons.append("A standard error needs at least two samples.")
    else:
        error = totals_error(units.totals, units.sizes)
    facing = _orientation(units)
    turned = resampling.Units(facing * units.totals, units.sizes) if facing else units
    compared = _UnitInference(differences * (facing or 1), _sorted(turned), labels, error, plan)
    spans, p, test = compared.answer()
    se, df = (None, None) if error is None else (error.se, error.df)
    effective = None if error is None or labels is None else error.effective
    if not spans:
        reasons.append("Without bounds, equal differences (or a single one) give no interval.")
        return DifferenceInference(None, None, None, se, None, tuple(reasons), df, effective)
    low, high = min(span.low for span in spans), max(span.high for span in spans)
    low, high, p = _agreeing(low, high, p, 1 - plan.level)
    if not facing:
        # The data are symmetric about 0, so the interval must be too, whatever the random draws.
        low, high = -max(-low, high), max(-low, high)
    elif facing < 0:
        low, high = -high, -low
    scatter = (se or compared.pseudo_error or 0.0, df or 1.0)
    mde = _defined(_mde((high - low) / 2, scatter, units.count, plan), reasons)
    if plan.largest is not None:
        low, high = max(-plan.largest, low), min(plan.largest, high)
    method = " and ".join(span.name for span in spans)
    return DifferenceInference(Interval(low, high, plan.level, method), p, test, se, mde, tuple(reasons), df, effective)


def _agreeing(low: float, high: float, p: float, alpha: float) -> tuple[float, float, float]:
    """Make interval and p-value agree about 0 if they differ by rounding, ties or the number of draws."""
    if p > alpha:
        return min(low, 0.0), max(high, 0.0), p
    if low == 0:  # The test rejects 0, and accepts whatever is larger.
        return float(np.nextafter(0.0, 1.0)), high, p
    if high == 0:
        return low, float(np.nextafter(0.0, -1.0)), p
    return low, high, float(np.nextafter(alpha, 1.0)) if low < 0 < high else p


class _UnitInference:
    """The intervals and the test of one set of differences, turned so that more of them is above 0 than below."""

    def __init__(
        self,
        differences: FloatArray,
        units: resampling.Units,
        labels: IntArray | None,
        error: ClusteredError | None,
        plan: Plan,
    ) -> None:
        self.differences = differences
        self.units = units
        self.labels = labels
        self.plan = plan
        self.error = error if error is not None and error.se > 0 and units.spread else None
        self.whole = "" if labels is None else " of whole clusters"
        self.pseudo_error: float | None = None
        # The least p-value that flipping signs can give; below it only t can tell.
        self.least = 2.0 ** (1 - units.count)

    def answer(self) -> tuple[list[_Span], float, str]:
        """The intervals, the p-value at which their hull leaves out 0, and the name of the test."""
        alpha = 1 - self.plan.level
        limit = resampling.RESAMPLE_UP_TO if self.labels is None else resampling.RESAMPLE_CLUSTERS_UP_TO
        if self.error is not None and self.units.count > limit:
            return self._by_t(self.error, limit)
        flips = resampling.signflip_units(self.units, draws=self.plan.draws, seed=self.plan.seed)
        agree = flips.p_value <= self.least * (1 + 1e-9)
        if self.least > alpha or self.error is None:
            spans = self._coarse()
            p = max((span.p_value for span in spans), default=1.0)
            # Otherwise a higher level could exclude what a lower one, at which signs can be flipped, does not.
            return spans, p if agree or self.least > _USUAL else max(p, flips.p_value), self._t_test()
        how = "exact" if flips.exact else f"{flips.draws} draws"
        test = f"sign-flip test{self.whole}, {how}"
        spans = [*self._fine(self.error, flips.p_value), *self._pseudo()]
        p = max(span.p_value for span in spans)
        if agree:
            # Among several tests a smaller p-value may be needed than any pattern of signs has.
            coarse = max((span.p_value for span in self._coarse()), default=1.0)
            if coarse < self.least:
                p, test = coarse, self._t_test()
        return spans, p, test

    def _by_t(self, error: ClusteredError, limit: int) -> tuple[list[_Span], float, str]:
        spans = [self._t(error), *self._pseudo()]
        p = max(span.p_value for span in spans)
        moving = self.units.totals[self.units.totals != 0]
        if moving.size > limit and np.ptp(np.abs(moving)) > 0:
            return spans, p, self._t_test()
        flips = resampling.signflip_units(self.units, draws=self.plan.draws, seed=self.plan.seed)
        how = "exact" if flips.exact else f"{flips.draws} draws"
        return spans, max(p, flips.p_value), f"sign-flip test{self.whole}, {how}"

    def _fine(self, error: ClusteredError, flips: float) -> list[_Span]:
        plan, units = self.plan, self.units
        flip = resampling.signflip_interval_units(units, level=plan.level, draws=plan.draws, seed=plan.seed)
        if isinstance(flip, Undefined):  # The draws are too few for so high a level.
            return [self._t(error)]
        spans = []
        boot = resampling.Bootstrap.of(units, draws=plan.draws, seed=plan.seed)
        ends = boot if isinstance(boot, Undefined) else boot.interval(plan.level, widened=True)
        if isinstance(boot, resampling.Bootstrap) and isinstance(ends, Interval):
            spans.append(_Span(ends.low, ends.high, ends.method + self.whole, boot.p_value()))
        spans.append(_Span(flip.low, flip.high, flip.method + self.whole, flips))
        return spans

    def _coarse(self) -> list[_Span]:
        """Return intervals for units that are too few to flip: t, at least as wide as for independent samples."""
        spans = []
        if self.error is not None and (self.labels is not None or self.plan.largest is None):
            spans.append(self._t(self.error))
        if self.labels is not None:
            # Two or three clusters may agree by chance, so the interval is at least as wide as that of the samples.
            alone = resampled_answer(self.differences, None, self.plan)
            if alone.interval is not None and alone.p_value is not None:
                name = f"{alone.interval.method} of single samples"
                spans.append(_Span(alone.interval.low, alone.interval.high, name, alone.p_value))
        return [*spans, *self._pseudo()]

    def _t(self, error: ClusteredError) -> _Span:
        centre, se, df = self.units.difference, error.se, error.df
        half = t_quantile(two_sided(self.plan.level), df) * se
        return _Span(centre - half, centre + half, self._df("t"), 2 * t_tail(abs(centre) / se, df))

    def _t_test(self) -> str:
        if self.error is None:
            return "t test with pseudo-pairs"
        return self._df("t test") + ("" if self.labels is None else ", clustered error")

    def _df(self, name: str) -> str:
        return f"{name} with {self.error.df:.4g} df" if self.error is not None else name

    def _pseudo(self) -> list[_Span]:
        """Bonett and Price's idea for units of any kind: add one with the largest difference each way.

        Without bounds, one that is farther out than all, as for means.
        """
        units, largest = self.units, self.plan.largest
        if largest is None:
            return [] if self.error is None else [self._farther()]
        too_few = self.labels is None and self.least > 1 - self.plan.level
        few = not self.plan.repeated and np.count_nonzero(self.differences) < FEW_IMPERFECT
        if not (few or too_few or self.error is None):
            return []
        size = float(units.sizes.mean())
        total = float(units.sizes.sum()) + 2 * size
        centre = float(units.totals.sum()) / total
        residuals = units.totals - centre * units.sizes
        extra = (size * (largest - centre)) ** 2 + (size * (largest + centre)) ** 2
        se = sqrt(float(np.sum(residuals * residuals)) + extra) / total
        self.pseudo_error = se
        half = t_quantile(two_sided(self.plan.level), units.count + 1) * se
        p = 2 * t_tail(abs(centre) / se, units.count + 1)
        return [_Span(centre - half, centre + half, "Bonett-Price pseudo-pairs", p)]

    def _farther(self) -> _Span:
        centre, error, _ = with_one_farther(self.units.totals, self.units.sizes, self.units.difference)
        half = t_quantile(two_sided(self.plan.level), error.df) * error.se
        p = 2 * t_tail(abs(centre) / error.se, error.df)
        return _Span(centre - half, centre + half, FARTHER_OUT, p)


def _mde(half: float, scatter: tuple[float, float], units: int, plan: Plan) -> float | Undefined:
    """Return the true difference at which an interval of this half-width excludes 0 with the given power."""
    error, df = scatter
    if error <= 1e-12 * max(1.0, half):
        return half
    found = error * detectable_shift(df, units=units, reach=half / error, level=plan.level, power=plan.power)
    if plan.largest is not None and found > plan.largest:
        return Undefined("Even the largest possible difference might be missed.")
    return found


def _orientation(units: resampling.Units) -> int:
    """1 or -1 such that data and their negative are turned to the same side; 0 if they are the same data."""
    there, back = _sorted(units), _sorted(resampling.Units(-units.totals, units.sizes))
    apart = np.flatnonzero(there.totals != back.totals)
    if not apart.size:
        return 0
    return 1 if there.totals[apart[0]] > back.totals[apart[0]] else -1


def _sorted(units: resampling.Units) -> resampling.Units:
    order = np.lexsort((units.totals, units.sizes))
    return resampling.Units(units.totals[order], units.sizes[order])


def _defined(value: float | Undefined, reasons: list[str]) -> float | None:
    if isinstance(value, Undefined):
        reasons.append(value.reason)
        return None
    return value
