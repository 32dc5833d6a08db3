"""Means of samples that were drawn with different chances, and the intervals of such means."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats.intervals import (
    FEW_IMPERFECT,
    ClusteredError,
    MeanEstimate,
    exact_rate_interval,
    few_clusters_note,
    heavy_tail_note,
    satterthwaite,
    totals_error,
    with_one_farther,
    with_one_more,
)


def unequal_chances_mean(
    values: arrays.Values,
    weights: arrays.Values,
    *,
    clusters: arrays.Labels | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
) -> MeanEstimate:
    """Mean of a population of which each sample was drawn with its own chance, with weights 1/chance. Hajek (1971).

    The mean is sum(w x)/sum(w), a ratio of two estimates of Horvitz and Thompson (1952): nearly unbiased whatever the
    chances, also if they depend on what was drawn before. It is the mean over clusters of w samples with equal values,
    and so is its error: `clustered_error`, of declared clusters with the sums of their weights. With bounds, binomial
    tails for m(1-m)/SE^2 trials with Satterthwaite's degrees of freedom (Korn and Graubard 1998), and each end at least
    as far out as that of t with one more sample of the largest weight at this end of the range: of the samples that
    stand for many, those that fail are seldom seen. While the imperfect ones (or those above zero) stand for fewer than
    10 of the largest weight, the number is at most Kish's effective one, sum(w)^2/sum(w^2). Without bounds, t, and one
    more sample twice as far from the mean as the farthest.
    """
    arrays.check_level(level)
    x, w = arrays.as_values(values), arrays.as_values(weights)
    arrays.check_bounds(x, bounds)
    if x.size != w.size or (w.size and float(w.min()) <= 0):
        raise ConfigurationError("weights must be numbers above 0, one for each value")
    groups = None if clusters is None else arrays.as_clusters(clusters, x.size)
    count = None if groups is None else groups.count
    if not x.size:
        return MeanEstimate(0, 0, 0, count, None, None, None, None, None, (), "There are no samples.")
    mean = float(np.sum(w * x) / w.sum())
    sizes, totals = (w, w * x) if groups is None else (groups.totals(w), groups.totals(w * x))
    found = MeanEstimate(x.size, x.size, 0, count, mean, None, None, None, None, (), None)
    if sizes.size < 2:
        return replace(found, reason="One sample or cluster has no standard error.")
    error = _error(totals, sizes)
    few = None if count is None else few_clusters_note(count, error.effective)
    heavy = None if bounds is not None else heavy_tail_note(x)
    found = replace(
        found,
        sd=sqrt(float(np.sum(w * (x - mean) ** 2) / w.sum())),
        se=error.se,
        df=error.df,
        effective_clusters=None if count is None else error.effective,
        notes=tuple(note for note in (few, heavy) if note is not None),
        heavy_tail=heavy is not None,
    )
    if bounds is not None:
        interval, effective = _bounded(totals, sizes, error, bounds, level)
        return replace(found, interval=interval, effective_n=effective)
    if error.se <= 1e-12 * float(np.max(np.abs(x))):
        return replace(found, reason="Without bounds, equal values give no interval.")
    half = arrays.t_quantile(arrays.two_sided(level), error.df) * error.se
    centre, wider, farthest = with_one_farther(totals, sizes, mean)
    other = arrays.t_quantile(arrays.two_sided(level), wider.df) * wider.se
    ends = (
        (mean - half, max(mean + half, centre + other))
        if farthest > 0
        else (min(mean - half, centre - other), mean + half)
    )
    return replace(found, interval=arrays.Interval(*ends, level, f"t with {error.df:.4g} df, weighted"))


def _error(totals: arrays.FloatArray, sizes: arrays.FloatArray) -> ClusteredError:
    """`totals_error` with degrees of freedom for sums whose standard deviation grows with their size."""
    error = totals_error(totals, sizes)
    return replace(error, df=max(1.0, satterthwaite(sizes / sizes.sum(), sizes * sizes)))


def _bounded(
    totals: arrays.FloatArray,
    sizes: arrays.FloatArray,
    error: ClusteredError,
    bounds: tuple[float, float],
    level: float,
) -> tuple[arrays.Interval, float]:
    """Return the interval of a mean with bounds, and the number of independent trials that it assumes."""
    low, high = bounds
    shares = (totals - low * sizes) / (high - low)
    mean, se = min(1.0, max(0.0, float(shares.sum() / sizes.sum()))), error.se / (high - low)
    effective = mean * (1 - mean) / (se * se) if se > 1e-12 else np.inf
    largest = float(sizes.max())
    few = min(float(sizes[shares < sizes].sum()), float(sizes[shares > 0].sum())) < FEW_IMPERFECT * largest
    if few or not np.isfinite(effective):
        effective = min(effective, error.effective)
    method = f"exact tails with effective n {effective:.1f}, weighted, t with {error.df:.4g} df"
    t = arrays.t_quantile(arrays.two_sided(level), error.df)
    worth = effective * (arrays.normal_quantile(arrays.two_sided(level)) / t) ** 2
    found = exact_rate_interval(mean, worth, level=level)
    more = [with_one_more(shares, sizes, end, level, size=largest) for end in (0, 1)]
    ends = min(found.low, more[0].low), max(found.high, more[1].high)
    interval = arrays.Interval(low + ends[0] * (high - low), low + ends[1] * (high - low), level, method)
    return interval, float(effective)
