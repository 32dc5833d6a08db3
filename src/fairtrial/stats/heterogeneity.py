"""Test whether a mean, or a mean difference, is the same in several groups of samples."""

from dataclasses import dataclass

import numpy as np
from scipy.special import fdtrc

from fairtrial.stats._arrays import FloatArray, IntArray, Labels, Values, as_clusters, as_values
from fairtrial.stats.results import Undefined

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
