"""Differences of quantiles and ratios of geometric means over pairs: what holds where tails are too long for means."""

from dataclasses import replace
from math import erfc, floor, sqrt

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats.intervals import few_clusters_note, quantile_interval
from fairtrial.stats.paired import PairedDifference, paired_difference
from fairtrial.stats.power import detectable_shift

BOOTSTRAP_BEYOND = 10
"""With at least this many values (or clusters) on each side of a quantile, its difference is bootstrapped."""

_DRAWS = 1999
_CELLS = 4_000_000  # Weights that are held at once.


def quantile_difference(
    a: arrays.Samples,
    b: arrays.Samples,
    share: float,
    *,
    clusters: arrays.Labels | None = None,
    level: float = 0.95,
    power: float = 0.8,
    draws: int | None = None,
    seed: int = 0,
) -> PairedDifference:
    """Compare a quantile of `a` with that of `b` on the same samples; `mean_a` and `mean_b` are the two quantiles.

    The interval is the percentile interval of 1,999 paired bootstrap draws of whole samples (or clusters), widened as t
    is against z for as many values as lie beyond the quantile, and p the largest 1 - level at which it holds 0. With
    fewer than 10 values (or clusters) beyond the quantile the bootstrap does not hold: then it is the difference of the
    ends of both sides' `quantile_interval`, each at half of 1 - level, which holds for all distributions and
    dependencies, and is wide. Wins and losses compare the means of samples.
    """
    arrays.check_level(level)
    if not 0 < share < 1:
        raise ConfigurationError(f"the share below a quantile must lie between 0 and 1 (got {share})")
    left, right, labels, unscored = _paired(a, b, clusters)
    counted = paired_difference(left, right, clusters=labels, bounds=None, level=level, power=power, draws=99)
    if not left.counts.size:
        return replace(counted, unscored=unscored)
    quantiles = [float(np.quantile(side.flat, share, method="inverted_cdf")) for side in (left, right)]
    difference = quantiles[0] - quantiles[1]
    units = np.arange(left.counts.size, dtype=np.intp) if labels is None else np.unique(labels, return_inverse=True)[1]
    number = int(units.max()) + 1
    sizes = np.bincount(units).astype(np.float64)
    worth = None if labels is None else float(sizes.sum() ** 2 / np.sum(sizes**2))
    note = None if worth is None else few_clusters_note(number, worth)
    interval, p, se, test, reason = None, None, None, None, None
    if min(share, 1 - share) * number >= BOOTSTRAP_BEYOND:
        drawn = np.sort(_bootstrap(left, right, share, units, draws or _DRAWS, seed))
        beyond = min(share, 1 - share) * number
        place = floor((drawn.size + 1) * _widened(1 - level, beyond) / 2)
        p = _p_value(drawn, beyond)
        se, test = float(drawn.std(ddof=1)), f"paired bootstrap of the quantile, {drawn.size} draws"
        if place >= 1:
            interval = arrays.Interval(float(drawn[place - 1]), float(drawn[-place]), level, "paired bootstrap")
    else:
        interval = _from_both_sides(left, right, share, labels, level)
        test = "order statistics of both sides"
        p = None if interval is None else _p_by_levels(left, right, share, labels)
    if interval is None:
        unit = "sample" if labels is None else "cluster"
        few = f"1 {unit} does" if number == 1 else f"{number:,} {unit}s do"
        reason = f"{few} not bound this quantile on both sides."
    mde = None if not se else se * detectable_shift(number - 1, units=number, level=level, power=power)
    return replace(
        counted,
        unscored=unscored,
        mean_a=quantiles[0],
        mean_b=quantiles[1],
        difference=difference,
        interval=interval,
        p_value=p,
        test=test,
        sd=None,
        se=se,
        mde=mde,
        notes=() if note is None else (note,),
        reason=reason,
        df=None,
        effective_clusters=worth,
        heavy_tail=False,
    )


def geometric_ratio(
    a: arrays.Samples,
    b: arrays.Samples,
    *,
    clusters: arrays.Labels | None = None,
    level: float = 0.95,
    power: float = 0.8,
    draws: int | None = None,
    seed: int = 0,
) -> PairedDifference:
    """Compare the geometric means of `a` and `b`: `difference` is mean(a)/mean(b) - 1, -.2 being a fifth less.

    It is `paired_difference` of the logarithms, so long tails do no harm; every value must be above 0.
    """
    left, right, labels, unscored = _paired(a, b, clusters)
    wrong = sum(int(np.count_nonzero(side.flat <= 0)) for side in (left, right))
    if wrong:
        counted = paired_difference(left, right, clusters=labels, bounds=None, level=level, power=power, draws=99)
        reason = f"A geometric mean needs values above 0 ({wrong:,} {'is' if wrong == 1 else 'are'} not)."
        return replace(
            counted,
            unscored=unscored,
            mean_a=None,
            mean_b=None,
            difference=None,
            interval=None,
            p_value=None,
            mde=None,
            notes=(),
            reason=reason,
            heavy_tail=False,
        )
    logs = [arrays.Repeats(np.log(side.flat), side.counts) for side in (left, right)]
    found = paired_difference(*logs, clusters=labels, bounds=None, level=level, power=power, draws=draws, seed=seed)
    if found.difference is None or found.mean_a is None or found.mean_b is None:
        return replace(found, unscored=unscored)
    ends = found.interval
    return replace(
        found,
        unscored=unscored,
        mean_a=float(np.exp(found.mean_a)),
        mean_b=float(np.exp(found.mean_b)),
        difference=_relative(found.difference),
        interval=None if ends is None else replace(ends, low=_relative(ends.low), high=_relative(ends.high)),
        mde=None if found.mde is None else _relative(found.mde),
        heavy_tail=False,
        notes=tuple(note for note in found.notes if "difference of means" not in note),
    )


def _relative(logarithm: float) -> float:
    """Return a difference of logarithms as a change relative to the second side."""
    return float(np.expm1(logarithm))


def _paired(
    a: arrays.Samples, b: arrays.Samples, clusters: arrays.Labels | None
) -> tuple[arrays.Repeats, arrays.Repeats, arrays.IntArray | None, int]:
    left, right = arrays.as_samples(a, "a"), arrays.as_samples(b, "b")
    if left.counts.size != right.counts.size:
        raise ConfigurationError(f"a has {left.counts.size} samples and b has {right.counts.size}: pair them first")
    labels = None if clusters is None else arrays.as_clusters(clusters, left.counts.size).codes
    scored = (left.counts > 0) & (right.counts > 0)
    kept = None if labels is None else labels[scored]
    return left.only(scored), right.only(scored), kept, int(np.count_nonzero(~scored))


def _bootstrap(
    left: arrays.Repeats, right: arrays.Repeats, share: float, units: arrays.IntArray, draws: int, seed: int
) -> arrays.FloatArray:
    """Return the differences of the quantiles of samples (or clusters) drawn with replacement, both sides together."""
    rng = np.random.default_rng(seed)
    number = int(units.max()) + 1
    sides = [_Ranked.of(side, units) for side in (left, right)]
    found = np.empty(draws)
    step = max(1, _CELLS // max(side.values.size for side in sides))
    for start in range(0, draws, step):
        count = min(step, draws - start)
        weights = rng.multinomial(number, np.full(number, 1 / number), size=count)
        quantiles = [side.quantiles(weights, share) for side in sides]
        found[start : start + count] = quantiles[0] - quantiles[1]
    return found


class _Ranked:
    """The values of one side in ascending order, and the unit of each."""

    def __init__(self, values: arrays.FloatArray, units: arrays.IntArray) -> None:
        self.values = values
        self.units = units

    @classmethod
    def of(cls, side: arrays.Repeats, units: arrays.IntArray) -> "_Ranked":
        order = np.argsort(side.flat, kind="stable")
        return cls(side.flat[order], np.repeat(units, side.counts)[order])

    def quantiles(self, weights: arrays.IntArray, share: float) -> arrays.FloatArray:
        """Return the quantile of the values with each of these weights of units."""
        below = np.cumsum(weights[:, self.units], axis=1)
        wanted = np.ceil(share * below[:, -1:] * (1 - 1e-12))
        places = np.argmax(below >= np.maximum(wanted, 1), axis=1)
        return self.values[places]


def _widened(alpha: float, beyond: float) -> float:
    """Return the 1 - level of percentiles that are as far out as t of `beyond` values instead of z."""
    stretched = arrays.t_quantile(arrays.two_sided(1 - alpha), beyond - 1) * sqrt(beyond / (beyond - 1))
    return erfc(stretched / sqrt(2))


def _p_value(drawn: arrays.FloatArray, beyond: float) -> float:
    tail = min(int(np.count_nonzero(drawn <= 0)), int(np.count_nonzero(drawn >= 0)))
    plain = min(1.0, 2 * (tail + 1) / (drawn.size + 1))
    # The inverse of `_widened`.
    return 2 * arrays.t_tail(arrays.normal_quantile(1 - plain / 2) / sqrt(beyond / (beyond - 1)), beyond - 1)


def _from_both_sides(
    left: arrays.Repeats, right: arrays.Repeats, share: float, labels: arrays.IntArray | None, level: float
) -> arrays.Interval | None:
    each = 1 - (1 - level) / 2
    one, two = (quantile_interval(side, share, clusters=labels, level=each) for side in (left, right))
    if one.low is None or one.high is None or two.low is None or two.high is None:
        return None
    return arrays.Interval(one.low - two.high, one.high - two.low, level, "order statistics of both sides")


def _p_by_levels(left: arrays.Repeats, right: arrays.Repeats, share: float, labels: arrays.IntArray | None) -> float:
    """Return the largest 1 - level at which the interval of both sides holds 0, to three digits."""
    low, high = 0.0, 1.0  # It holds 0 at the level 1 - low, and may not at 1 - high.
    for _ in range(12):
        middle = (low + high) / 2
        found = _from_both_sides(left, right, share, labels, 1 - middle)
        if found is None or found.contains(0.0):
            low = middle
        else:
            high = middle
    return high
