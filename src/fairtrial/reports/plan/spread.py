"""How much the difference between two systems varies over samples and repeats, from earlier runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairtrial.base.formatting import count, number_word, rate
from fairtrial.errors import ConfigurationError
from fairtrial.reports.compare.pairing import ComparisonSettings, Pairs, pair, scores_of, way_on
from fairtrial.reports.compare.verdicts import FEW_UNEQUAL, excess_of
from fairtrial.reports.figures import metrics
from fairtrial.reports.figures.columns import Columns, IntArray
from fairtrial.stats import (
    Interval,
    Repeats,
    Undefined,
    clustered_error,
    paired_difference,
    quantile_difference,
    rate_interval,
    sem,
    variance_split,
)
from fairtrial.stats.quantile_differences import BOOTSTRAP_BEYOND

_WORST_UNEQUAL = 0.5  # Two systems with a pass rate of one half that agree only by chance.


@dataclass(frozen=True, slots=True)
class HistorySide:
    """One experiment of an earlier run: its numbers, its name, and its code."""

    columns: Columns
    name: str
    run_id: str = ""
    experiment: str = ""
    version: tuple[str, str] = ("", "")  # Code and parameters: two sides that share both are one system run twice.


@dataclass(frozen=True, slots=True)
class Spread:
    """The variance of the difference between two systems over samples, and its source.

    `between` includes what clusters add. `within` is None where no sample was repeated.
    """

    between: float
    within: float | None
    mean: float
    n: int
    clusters: int | None
    worth: float  # Number of samples, or clusters of equal size, behind the figures.
    unequal: int
    binary: bool
    bounded: bool
    same_system: bool
    names: tuple[str, str]
    heavy: bool = False  # Whether differences have so long a tail that comparisons of means have no verdict.
    excess: float = 0.0  # How much wider than t intervals are; see `excess_width`.
    df: float = math.inf  # Degrees of freedom of the error.

    @property
    def share(self) -> float:
        """The share of samples on which single pass/fail trials of two sides disagree."""
        variance = self.variance(1)
        if self.within is None and self.n:
            variance *= (self.n - 1) / self.n  # Without the correction for the number of samples.
        return min(1.0, variance + self.mean**2)

    def variance(self, repeats: int) -> float:
        """The variance of the difference on one sample with this many repeats."""
        return self.between + (self.within or 0.0) / repeats


def spread_of(sides: Sequence[HistorySide], metric: str) -> tuple[Spread, list[str]]:
    """Return the spread of differences, from pairs if there are any, and a line about its source."""
    percent = metrics.is_verdict(metric)
    found = [spread for one, two in _pairs(sides) if (spread := _of_pair(one, two, metric)) is not None]
    different = [spread for spread in found if not spread.same_system] or found
    if different:
        pooled, lines = _pooled(different)
        return pooled, [*lines, *_about_tail(pooled, metric)]
    single = next((spread for side in sides if (spread := _of_side(side, metric)) is not None), None)
    if single is not None:
        line = (
            "No two earlier runs have enough samples in common: the other side is assumed to be like "
            f"{single.names[0]} and to agree with it no more than chance."
        )
        return single, [line, *_about_tail(single, metric)]
    if sides and not metrics.is_mean(metric):
        raise _too_few(metric)
    if not percent and metric != metrics.VALUE:
        raise ConfigurationError(
            f"a plan for the metric {metric!r} needs an earlier run that has it: nothing else tells how much it varies"
        )
    known = "The earlier runs have too few samples in common" if sides else "No earlier run"
    line = f"{known}: worst case assumed. Both sides pass half of the samples and agree no more than chance."
    return Spread(_WORST_UNEQUAL, None, 0.0, 0, None, 0.0, 0, percent, True, False, ("", "")), [line]


def _about_tail(spread: Spread, metric: str) -> list[str]:
    if not spread.heavy:
        return []
    return [f"Differences of {metric} have a long tail: their mean may have no verdict. {way_on(metric)}"]


def fewest_units(metric: str) -> int:
    """Return from how many samples or clusters on a quantile's difference is bootstrapped; 1 for other figures."""
    quantile = metrics.parse_quantile(metric)
    return 1 if quantile is None else math.ceil(BOOTSTRAP_BEYOND / min(quantile[1], 1 - quantile[1]) - 1e-9)


def _too_few(metric: str) -> ConfigurationError:
    if metrics.is_ratio(metric):
        return ConfigurationError(f"a plan for {metric!r} needs values above 0 (got others)")
    return ConfigurationError(
        f"a plan for {metric!r} needs two earlier experiments with at least {fewest_units(metric):,} samples (or "
        "clusters) in common"
    )


def _pairs(sides: Sequence[HistorySide]) -> Iterator[tuple[HistorySide, HistorySide]]:
    """Yield sides to compare: a run's first experiment and its others; each experiment and its previous run."""
    for place, one in enumerate(sides):
        first = next(side for side in sides if side.run_id == one.run_id)
        if first is not one:
            yield one, first
        earlier = next((side for side in sides[place + 1 :] if side.experiment == one.experiment), None)
        if earlier is not None and earlier.run_id != one.run_id:
            yield one, earlier


def _of_pair(one: HistorySide, two: HistorySide, metric: str) -> Spread | None:
    pairs: Pairs = pair(one.columns, two.columns)
    settings = ComparisonSettings().declared_by(one.columns, two.columns)
    scores = scores_of(pairs, metric, "system", settings)
    both = (scores.candidate.counts > 0) & (scores.baseline.counts > 0)
    if np.count_nonzero(both) < 2:
        return None
    left, right = scores.candidate.only(both), scores.baseline.only(both)
    clusters = None if pairs.clusters is None else pairs.clusters[both]
    unequal = int(np.count_nonzero(np.abs(left.means - right.means) >= 1e-12))
    heavy, excess, df = False, 0.0, None
    if not metrics.is_mean(metric):
        linear = _linear(left, right, metric, clusters)
        if linear is None:
            return None
        left, right = linear
    if (quantile := metrics.parse_quantile(metric)) is not None:
        units = left.counts.size if clusters is None else np.unique(clusters).size
        df = min(quantile[1], 1 - quantile[1]) * units - 1
    elif scores.bounds is None:
        found = paired_difference(left, right, clusters=clusters, bounds=None)
        heavy, excess = metrics.is_mean(metric) and found.heavy_tail, excess_of(found, ratio=False)
    differences = left.means - right.means
    differences[np.abs(differences) < 1e-12] = 0.0
    within = _within(left, right)
    noise = 0.0 if within is None else sum(_noise(side) for side in (left, right))
    return _made(
        differences, clusters, within, noise, unequal,
        binary=left.binary and right.binary and scores.bounds == metrics.UNIT, bounded=scores.bounds == metrics.UNIT,
        same_system=one.version == two.version and one.experiment == two.experiment,
        names=(one.name, two.name), heavy=heavy, excess=excess, df=df,
    )  # fmt: skip


def _linear(left: Repeats, right: Repeats, metric: str, clusters: IntArray | None) -> tuple[Repeats, Repeats] | None:
    """Return numbers whose means differ with the error of a quantile's difference, or of a ratio; None if unknown.

    A quantile moves as the share of values above it does (Bahadur 1966); how far is taken from its bootstrap.
    """
    quantile, sides = metrics.parse_quantile(metric), (left, right)
    if quantile is None:
        if any(np.any(side.flat <= 0) for side in sides):
            return None
        return Repeats(np.log(left.flat), left.counts), Repeats(np.log(right.flat), right.counts)
    share = quantile[1]
    ends = [np.quantile(side.flat, share, method="inverted_cdf") for side in sides]
    above = [Repeats((side.flat > end).astype(np.float64), side.counts) for side, end in zip(sides, ends, strict=True)]
    error = quantile_difference(left, right, share, clusters=clusters).se
    plain = paired_difference(*above, clusters=clusters, bounds=None, draws=99).se
    if not error:
        return None
    if not plain:  # The same samples are above it on both sides: the spread of differences stands for that of shares.
        differences, ones = left.means - right.means, np.ones(left.counts.size, dtype=left.counts.dtype)
        spread = float(differences.std(ddof=1))
        scaled = differences * error * math.sqrt(differences.size) / spread if spread else differences
        return Repeats(scaled, ones), Repeats(np.zeros(differences.size), ones)
    return Repeats(above[0].flat * error / plain, left.counts), Repeats(above[1].flat * error / plain, right.counts)


def _of_side(side: HistorySide, metric: str) -> Spread | None:
    """Return the spread of one side alone, assuming an independent second side: twice its variance."""
    columns = side.columns
    settings = ComparisonSettings().declared_by(columns)
    bounds = settings.range_of(metric)
    scores = columns.scores(metrics.measured_metric(metric), "system", worst=settings.worst_of(metric))
    known = scores.counts > 0
    if np.count_nonzero(known) < 2 or metrics.parse_quantile(metric) is not None:
        return None
    some = scores.only(known)
    if metrics.is_ratio(metric):
        if np.any(some.flat <= 0):
            return None
        some = Repeats(np.log(some.flat), some.counts)
    clusters = None if columns.clusters is None else columns.clusters[known]
    within = _within(some, some)
    noise = 0.0 if within is None else 2 * _noise(some)
    deviations = math.sqrt(2) * (some.means - float(some.means.mean()))
    heavy, excess = False, 0.0
    if bounds is None:
        found = paired_difference(deviations, np.zeros(deviations.size), clusters=clusters, bounds=None)
        heavy, excess = metrics.is_mean(metric) and found.heavy_tail, excess_of(found, ratio=False)
    made = _made(
        deviations, clusters, within, noise, None,
        binary=some.binary and bounds == metrics.UNIT, bounded=bounds == metrics.UNIT,
        same_system=False, names=(side.name, ""), heavy=heavy, excess=excess,
    )  # fmt: skip
    if made is None or bounds != metrics.UNIT:
        return made
    # Where few samples fail, or few pass, their share may well be larger; half is the worst it can be.
    few = int(min(np.count_nonzero(some.means > 0), np.count_nonzero(some.means < 1)))
    ends = rate_interval(few, some.means.size)
    if few < FEW_UNEQUAL and isinstance(ends, Interval):
        high = min(0.5, ends.high)
        made = replace(made, between=max(made.between, 2 * high * (1 - high)))
    return made


def _made(
    differences: np.ndarray[tuple[int], np.dtype[np.float64]],
    clusters: np.ndarray[tuple[int], np.dtype[np.intp]] | None,
    within: float | None,
    noise: float,
    unequal: int | None,
    *,
    binary: bool,
    bounded: bool,
    same_system: bool,
    names: tuple[str, str],
    heavy: bool = False,
    excess: float = 0.0,
    df: float | None = None,
) -> Spread | None:
    n = differences.size
    if clusters is None:
        error = sem(differences)
        se, worth, groups = (None if isinstance(error, Undefined) else error), float(n), None
    else:
        clustered = clustered_error(differences, clusters)
        if isinstance(clustered, Undefined):
            return None
        se, worth, groups = clustered.se, clustered.effective, int(np.unique(clusters).size)
    if se is None:
        return None
    unequal = int(np.count_nonzero(differences)) if unequal is None else unequal
    between = max(0.0, n * se * se - noise)
    mean = float(differences.mean()) if names[1] else 0.0
    return Spread(
        between, within, mean, n, groups, worth, unequal, binary, bounded, same_system, names, heavy, excess,
        worth - 1 if df is None else df,
    )  # fmt: skip


def _within(left: Repeats, right: Repeats) -> float | None:
    """Return the within-sample variance of differences of single repeats; None without repeats."""
    found = [variance_split(side).within for side in (left, right)]
    return None if found[0] is None or found[1] is None else found[0] + found[1]


def _noise(side: Repeats) -> float:
    """Return the variance that repeats add to the mean of a sample."""
    return (variance_split(side).within or 0.0) * float(np.mean(1 / side.counts))


def _pooled(found: Sequence[Spread]) -> tuple[Spread, list[str]]:
    """Pool the spreads over samples; if few samples differ, use the upper end of the interval."""
    weights = np.asarray([spread.n for spread in found], dtype=np.float64)
    n, unequal = int(weights.sum()), sum(spread.unequal for spread in found)
    split = [spread for spread in found if spread.within is not None]
    between = float(np.average([spread.between for spread in found], weights=weights))
    within = None
    if split:
        within = float(np.average([spread.within or 0.0 for spread in split], weights=[one.n for one in split]))
    sides = (
        f"Earlier, {found[0].names[0]} and {found[0].names[1]}"
        if len(found) == 1
        else f"In {number_word(len(found))} earlier comparisons, the two sides"
    )
    line = f"{sides} differed on {unequal:,} of {count(n, 'sample' if len(found) == 1 else 'pair')}."
    if found[0].same_system:
        line = f"{line} Those were runs of the same code: a change of the system may differ on more."
    if unequal < FEW_UNEQUAL:
        ends = rate_interval(unequal, n)
        high = ends.high if isinstance(ends, Interval) else 1.0
        seen = unequal / n
        between, within = (high, within) if not seen else (between * high / seen, within and within * high / seen)
        line = f"{line} That is too few to tell how often, so {rate(high)} is assumed."
    whole = found[0]
    pooled = Spread(
        between=between,
        within=within,
        mean=float(np.average([spread.mean for spread in found], weights=weights)),
        n=whole.n,
        clusters=whole.clusters,
        worth=whole.worth,
        unequal=unequal,
        binary=all(spread.binary for spread in found),
        bounded=all(spread.bounded for spread in found),
        same_system=whole.same_system,
        names=whole.names,
        heavy=any(spread.heavy for spread in found),
        excess=max(spread.excess for spread in found),
        df=whole.df,
    )
    return pooled, [line]
