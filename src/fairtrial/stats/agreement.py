"""Agreement and association of two sets of values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import atanh, sqrt, tanh
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import ConfigurationError
from fairtrial.stats._arrays import (
    FloatArray,
    Interval,
    Labels,
    Undefined,
    Values,
    as_clusters,
    as_values,
    check_bounds,
    check_counts,
    check_level,
    normal_quantile,
    t_quantile,
    two_sided,
)


@dataclass(frozen=True, slots=True)
class CorrectedMean:
    """An estimate of the true mean; `reason` explains a value of None."""

    estimate: float | None
    se: float | None
    interval: Interval | None
    judged: int
    labelled: int
    notes: tuple[str, ...]
    reason: str | None


def prediction_powered_mean(
    labels: Values,
    judged_labelled: Values,
    judged_unlabelled: Values,
    *,
    weight: float = 1.0,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    clusters: Labels | None = None,
    level: float = 0.95,
) -> CorrectedMean:
    """Mean of the judge's scores less its mean error on labelled cases. Angelopoulos et al. (2023).

    theta = w mean(f_N) - mean(w f - y)_n, SE^2 = w^2 var(f_N)/N + var(w f - y)/n, variances with 1/n; the normal
    interval is cut to `bounds`. f_N are judged cases without labels, f and y the judge's scores and labels of the
    others; w = 1 gives the judge its full weight, w = 0 uses only the labels.

    Where a sample shows no variance at all (say, the judge was never wrong), one pseudo-case at each end of the range
    is added for its error, as Bonett and Price do: a judge that was right 20 times may still be wrong later.

    `clusters` says which cases belong together, the labelled ones first: the error is then that of cluster sums (as in
    `clustered_se`), with t(C-1), and never below the plain one.
    """
    check_level(level)
    y, f, rest = as_values(labels, "labels"), as_values(judged_labelled), as_values(judged_unlabelled)
    for name, array in (("labels", y), ("judged_labelled", f), ("judged_unlabelled", rest)):
        check_bounds(array, bounds, name)
    if y.size != f.size:
        raise ConfigurationError(
            f"there must be one judged score for each label (got {y.size} labels and {f.size} scores): pair them first"
        )
    if not 0 <= weight <= 1:
        raise ConfigurationError(f"the judge's weight must be from 0 to 1 (got {weight})")
    if y.size == 0 or rest.size == 0:
        missing = "labelled" if y.size == 0 else "judged, unlabelled"
        return CorrectedMean(None, None, None, rest.size, y.size, (), f"There are no {missing} cases.")
    errors = weight * f - y
    estimate = weight * float(rest.mean()) - float(errors.mean())
    notes: list[str] = []
    low, high = (0.0, 0.0) if bounds is None else bounds
    variance = 0.0
    for what, array, ends in (
        ("The judge's scores", weight * rest, (weight * low, weight * high)),
        ("The judge's errors", errors, (weight * low - high, weight * high - low)),
    ):
        size, own = array.size, float(array.var())
        if own <= 1e-24 and ends[0] < ends[1]:
            notes.append(f"{what} do not vary; two pseudo-cases were added to estimate their error.")
            size, own = size + 2, float(np.append(array, ends).var())
        variance += own / size
    quantile, method = normal_quantile(two_sided(level)), "prediction-powered, normal"
    if clusters is not None:
        groups = as_clusters(clusters, y.size + rest.size)
        if groups.count < 2:
            reason = "All cases are in one cluster, so their error cannot be estimated."
            return CorrectedMean(estimate, None, None, rest.size, y.size, tuple(notes), reason)
        pull = np.concatenate([-(errors - errors.mean()) / y.size, weight * (rest - rest.mean()) / rest.size])
        sums = np.bincount(groups.codes, weights=pull)
        variance = max(variance, float(sums @ sums) * groups.count / (groups.count - 1))
        quantile, method = t_quantile(two_sided(level), groups.count - 1), "prediction-powered, clustered, t"
    return _answer(estimate, sqrt(variance), bounds, rest.size, y.size, level, notes, method, quantile)


def rogan_gladen(
    passed: int,
    judged: int,
    *,
    true_passes: int,
    positives: int,
    true_fails: int,
    negatives: int,
    level: float = 0.95,
) -> CorrectedMean:
    """True pass rate behind a judge of known sensitivity and specificity. Rogan and Gladen (1978).

    theta = (p + spec - 1)/(sens + spec - 1), by the delta method
    SE^2 = (p(1-p)/n + theta^2 sens(1-sens)/m1 + (1-theta)^2 spec(1-spec)/m0)/(sens + spec - 1)^2,
    where the judge passed `passed` of `judged` cases, `true_passes` of the `positives` that humans passed (m1) and
    failed `true_fails` of the `negatives` that humans failed (m0). A share of exactly 0 or 1 enters the error as
    (k+1)/(m+2), in the manner of Lang and Reiczigel (2014), so that the interval cannot collapse. Theta and interval
    are cut to [0, 1]. Undefined if the judge is no better than chance.
    """
    check_level(level)
    for count, total in ((passed, judged), (true_passes, positives), (true_fails, negatives)):
        check_counts(count, total)
    labelled = positives + negatives
    if min(judged, positives, negatives) == 0:
        reason = "The correction needs judged cases, and labelled cases that humans passed and that humans failed."
        return CorrectedMean(None, None, None, judged, labelled, (), reason)
    p, sensitivity, specificity = passed / judged, true_passes / positives, true_fails / negatives
    skill = sensitivity + specificity - 1
    if skill <= 0:
        reason = "The judge agrees with the labels no better than chance, so its rate says nothing about the true one."
        return CorrectedMean(None, None, None, judged, labelled, (), reason)
    theta = (p + specificity - 1) / skill
    inside = min(1.0, max(0.0, theta))
    variance = (
        _share_variance(passed, judged)
        + inside**2 * _share_variance(true_passes, positives)
        + (1 - inside) ** 2 * _share_variance(true_fails, negatives)
    ) / skill**2
    quantile = normal_quantile(two_sided(level))
    return _answer(
        theta, sqrt(variance), (0.0, 1.0), judged, labelled, level, [], "Rogan-Gladen, delta method", quantile
    )


def _share_variance(successes: int, n: int) -> float:
    share = successes / n
    if share in (0.0, 1.0):
        share = (successes + 1) / (n + 2)
    return share * (1 - share) / n


def _answer(
    estimate: float,
    se: float,
    bounds: tuple[float, float] | None,
    judged: int,
    labelled: int,
    level: float,
    notes: list[str],
    method: str,
    quantile: float,
) -> CorrectedMean:
    low, high = (-np.inf, np.inf) if bounds is None else bounds
    # The estimate is cut to the range first: otherwise one beyond the range would have an interval of one point.
    inside = float(min(high, max(low, estimate)))
    if inside != estimate:
        notes.append(f"The correction overshoots to {estimate:.3f}; it is cut to the range.")
    half = quantile * se
    interval = Interval(float(max(low, inside - half)), float(min(high, inside + half)), level, method)
    if interval.width == 0:
        return CorrectedMean(
            inside, se, None, judged, labelled, tuple(notes), "The values do not vary, so there is no interval."
        )
    return CorrectedMean(inside, se, interval, judged, labelled, tuple(notes), None)


type Measurement = Literal["nominal", "ordinal", "interval", "ratio"]


@dataclass(frozen=True, slots=True)
class Confusion:
    """Counts of pairs of labels: the first rater's in rows, the second's in columns."""

    labels: tuple[Hashable, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def n(self) -> int:
        """How many items both rated."""
        return sum(map(sum, self.counts))


def confusion_matrix(first: Sequence[Hashable], second: Sequence[Hashable]) -> Confusion:
    """Count the pairs of labels; labels are sorted where they can be, else in order of appearance."""
    if len(first) != len(second):
        raise ConfigurationError(
            f"both raters must have the same number of labels (got {len(first)} and {len(second)}): pair them first"
        )
    seen: list[Any] = list(dict.fromkeys([*first, *second]))
    try:
        seen = sorted(seen)
    except TypeError:  # labels of several types have no common order
        pass
    place = {label: index for index, label in enumerate(seen)}
    counts = np.zeros((len(seen), len(seen)), dtype=np.int64)
    for one, other in zip(first, second, strict=True):
        counts[place[one], place[other]] += 1
    return Confusion(tuple(seen), tuple(tuple(row) for row in counts.tolist()))


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | Undefined:
    """Agreement of two raters beyond chance, (p_o - p_e)/(1 - p_e). Cohen (1960).

    p_e is the agreement of independent raters with the same label frequencies. Undefined if p_e = 1.
    """
    return cohen_kappa_table(confusion_matrix(first, second).counts)


def cohen_kappa_table(table: Sequence[Sequence[float]]) -> float | Undefined:
    """`cohen_kappa` from a square table of counts."""
    counts = _counts(table)
    if counts.size and counts.shape[0] != counts.shape[1]:
        raise ConfigurationError("Cohen's kappa needs a square table: both raters use the same labels")
    n = counts.sum()
    if n == 0:
        return Undefined("There are no items that both rated.")
    observed = float(np.trace(counts)) / n
    expected = float(counts.sum(axis=0) @ counts.sum(axis=1)) / n**2
    if expected >= 1:
        return Undefined("Both raters gave the same label to every item, so agreement beyond chance is not defined.")
    return float((observed - expected) / (1 - expected))


def kappa_interval(table: Sequence[Sequence[int]], *, level: float = 0.95) -> Interval | Undefined:
    """Interval of Cohen's kappa, with the large-sample error of Fleiss, Cohen and Everitt (1969), cut to [-1, 1].

    It is computed from the table with one case added to every cell, as by Agresti and Coull (1998), and extended to
    contain kappa itself, so that raters who never disagreed do not get an interval of one point. For 15 cases and more
    it covered the true value in at least 93% of simulated tables; without the added cases, coverage drops to 83%.
    Items must be independent.
    """
    check_level(level)
    kappa = cohen_kappa_table(table)
    if isinstance(kappa, Undefined):
        return kappa
    centre, error = _kappa_and_error(_counts(table) + 1)
    half = normal_quantile(two_sided(level)) * error
    low, high = max(-1.0, min(kappa, centre - half)), min(1.0, max(kappa, centre + half))
    return Interval(low, high, level, "Fleiss-Cohen-Everitt, one case added to every cell")


def _kappa_and_error(counts: FloatArray) -> tuple[float, float]:
    n = float(counts.sum())
    shares = counts / n
    rows, columns = shares.sum(axis=1), shares.sum(axis=0)
    expected = float(rows @ columns)
    kappa = (float(np.trace(shares)) - expected) / (1 - expected)
    # Cell (i, j) influences kappa through the agreement that it belongs to, and through row i and column j.
    pull = np.eye(len(shares)) - (1 - kappa) * np.add.outer(columns, rows)
    variance = float(np.sum(shares * pull**2)) - (kappa - expected * (1 - kappa)) ** 2
    return kappa, sqrt(max(variance, 0.0) / n) / (1 - expected)


def fleiss_kappa(table: Sequence[Sequence[int]]) -> float | Undefined:
    """Agreement beyond chance of a fixed number of raters per item; rows are items, columns labels. Fleiss (1971).

    (P - P_e)/(1 - P_e), with P the mean share of agreeing pairs of raters and P_e the sum of squared label shares.
    """
    return _fleiss_kappa(_counts(table))


def fleiss_kappa_interval(table: Sequence[Sequence[int]], *, level: float = 0.95) -> Interval | Undefined:
    """Interval of Fleiss' kappa, by the method of `krippendorff_alpha_interval`."""
    check_level(level)
    counts = _counts(table)
    kappa = _fleiss_kappa(counts)
    if isinstance(kappa, Undefined):
        return kappa
    used = counts[:, counts.sum(axis=0) > 0]
    return _agreement_interval(used, 1 - np.eye(used.shape[1]), kappa, level)


def _fleiss_kappa(counts: FloatArray) -> float | Undefined:
    if counts.size == 0:
        return Undefined("There are no rated items.")
    raters = counts.sum(axis=1)
    if np.ptp(raters) != 0:
        raise ConfigurationError(
            "Fleiss' kappa needs the same number of ratings for every item; use Krippendorff's alpha"
        )
    m = float(raters[0])
    if m < 2:
        return Undefined("Agreement needs at least two raters.")
    observed = float(np.mean((np.sum(counts * counts, axis=1) - m) / (m * (m - 1))))
    shares = counts.sum(axis=0) / counts.sum()
    expected = float(shares @ shares)
    if expected >= 1:
        return Undefined("All raters gave the same label to every item, so agreement beyond chance is not defined.")
    return (observed - expected) / (1 - expected)


def krippendorff_alpha(
    ratings: Sequence[Sequence[Hashable | None]], *, measurement: Measurement = "nominal"
) -> float | Undefined:
    """Agreement of any number of raters with ratings missing: 1 - observed/expected disagreement. Krippendorff (2011).

    One row per rater, one column per item, None where a rating is missing; items with a single rating are left out.
    Disagreement of two values is 0 or 1 (nominal), the squared number of ratings between their ranks (ordinal), their
    squared distance (interval), or that over their squared sum (ratio). All but nominal need numbers.
    """
    return _alpha(*_count_ratings(ratings, measurement))


def krippendorff_alpha_interval(
    ratings: Sequence[Sequence[Hashable | None]], *, measurement: Measurement = "nominal", level: float = 0.95
) -> Interval | Undefined:
    """Interval of Krippendorff's alpha, cut to [-1, 1]. Items must be independent.

    Observed over expected disagreement is a ratio, and its error over items that of Taylor's linearization (Gwet 2021)
    with t(items - 1). Both are those of the data with two items added on which all raters agree and two on which they
    disagree, spread evenly over the labels, in the manner of Agresti and Coull (1998); of three and more numbers half
    an item each, of the smallest and the largest. The interval is stretched to alpha itself. So it is no point where
    raters never disagreed, and holds in simulation where one label is rare (`benchmarks/coverage.py`).
    """
    check_level(level)
    counts, distance = _count_ratings(ratings, measurement)
    alpha = _alpha(counts, distance)
    return alpha if isinstance(alpha, Undefined) else _agreement_interval(counts, distance, alpha, level)


def _count_ratings(
    ratings: Sequence[Sequence[Hashable | None]], measurement: Measurement
) -> tuple[FloatArray, FloatArray]:
    """Return how often each label (column) was given to each item that has two ratings, and how far labels differ."""
    if len({len(row) for row in ratings}) > 1:
        raise ConfigurationError("every rater needs one entry per item: put None where a rating is missing")
    units = [[value for value in column if value is not None] for column in zip(*ratings, strict=True)]
    units = [unit for unit in units if len(unit) > 1]
    seen = list(dict.fromkeys(value for unit in units for value in unit))
    numbers = _numbers(seen, measurement)
    if measurement != "nominal":
        order = np.argsort(numbers)
        seen, numbers = [seen[index] for index in order], numbers[order]
    place = {value: index for index, value in enumerate(seen)}
    counts = np.zeros((len(units), len(seen)))
    for row, unit in enumerate(units):
        for value in unit:
            counts[row, place[value]] += 1
    return counts, _DISTANCES[measurement](numbers, counts.sum(axis=0))


def _alpha(counts: FloatArray, distance: FloatArray) -> float | Undefined:
    if not counts.size:
        return Undefined("No item has two ratings.")
    frequency = counts.sum(axis=0)
    expected = float(frequency @ distance @ frequency) / (float(frequency.sum()) - 1)
    if expected == 0:
        return Undefined("All ratings are equal, so the expected disagreement is 0.")
    return 1 - float(np.sum(_disagreements(counts, distance))) / expected


def _disagreements(counts: FloatArray, distance: FloatArray) -> FloatArray:
    """Return the distances between all pairs of ratings of each item, over its number of ratings less one."""
    return np.asarray(np.sum((counts @ distance) * counts, axis=1) / (counts.sum(axis=1) - 1))


def _agreement_interval(counts: FloatArray, distance: FloatArray, value: float, level: float) -> Interval | Undefined:
    n, labels = counts.shape
    if n < 2:
        return Undefined("One item has no interval.")
    size = float(counts.sum()) / n
    names = labels < 3 or bool(np.all(distance + np.eye(labels) == 1))
    ends, more = (np.arange(labels), 2.0) if names else (np.array([0, labels - 1]), 0.5)
    pairs = np.array([(one, other) for one in ends for other in ends])
    same = pairs[:, 0] == pairs[:, 1]
    weights = np.where(same, more / ends.size, more / (ends.size * (ends.size - 1)))
    added = np.zeros((len(pairs), labels))
    for column in (0, 1):
        added[np.arange(len(pairs)), pairs[:, column]] += size / 2
    rows, weights = np.vstack([counts, added]), np.concatenate([np.ones(n), weights])
    apart = np.concatenate([_disagreements(counts, distance), size * distance[pairs[:, 0], pairs[:, 1]]])
    sizes, frequency = rows.sum(axis=1), weights @ rows
    total, observed = float(weights @ sizes), float(weights @ apart)
    chance = distance @ frequency
    expected = float(frequency @ chance)
    ratio = observed * total / expected
    # What one more item like this one would do to the ratio, relative to it.
    pulls = apart / observed - 2 * (rows @ chance) / expected + sizes / total
    units = float(weights.sum())
    half = t_quantile(two_sided(level), n - 1) * ratio * sqrt(float(weights @ pulls**2) * units / (units - 1))
    low, high = max(-1.0, min(value, 1 - ratio - half)), min(1.0, max(value, 1 - ratio + half))
    return Interval(low, high, level, f"linearization with t({n - 1}), {2 * more:g} items added")


def _nominal(numbers: FloatArray, _frequency: FloatArray) -> FloatArray:
    return np.asarray(1 - np.eye(numbers.size))


def _ordinal(_numbers: FloatArray, frequency: FloatArray) -> FloatArray:
    middle = np.cumsum(frequency) - frequency / 2
    return np.asarray(np.subtract.outer(middle, middle) ** 2)


def _interval(numbers: FloatArray, _frequency: FloatArray) -> FloatArray:
    return np.asarray(np.subtract.outer(numbers, numbers) ** 2)


def _ratio(numbers: FloatArray, _frequency: FloatArray) -> FloatArray:
    total = np.add.outer(numbers, numbers)
    return np.asarray((np.subtract.outer(numbers, numbers) / np.where(total == 0, 1.0, total)) ** 2)


_DISTANCES: dict[Measurement, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "nominal": _nominal,
    "ordinal": _ordinal,
    "interval": _interval,
    "ratio": _ratio,
}


def _numbers(seen: Sequence[Hashable], measurement: Measurement) -> FloatArray:
    if measurement not in _DISTANCES:
        raise ConfigurationError(f"measurement must be one of {', '.join(_DISTANCES)} (got {measurement!r})")
    if measurement == "nominal":
        if any(value != value for value in seen):
            raise ConfigurationError("a rating is NaN: put None where a rating is missing")
        return np.arange(len(seen), dtype=np.float64)
    if not all(isinstance(value, int | float | np.number) for value in seen):
        raise ConfigurationError(f"{measurement} ratings must be numbers")
    numbers = np.asarray(seen, dtype=np.float64)
    if not np.all(np.isfinite(numbers)):
        raise ConfigurationError("a rating is not a finite number: put None where a rating is missing")
    if measurement == "ratio" and np.any(numbers < 0):
        raise ConfigurationError("ratio ratings must be at least 0")
    return numbers


def _counts(table: Sequence[Sequence[float]]) -> FloatArray:
    counts: NDArray[Any] = np.asarray(table, dtype=np.float64)
    if counts.size and (counts.ndim != 2 or not np.all(np.isfinite(counts)) or np.any(counts < 0)):
        raise ConfigurationError("the table must hold counts, in rows of equal length")
    return np.asarray(counts, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class RankCorrelation:
    """The rank correlation of two quantities, from -1 to 1; `reason` explains a value of None."""

    n: int
    value: float | None
    interval: Interval | None
    reason: str | None


def rank_correlation(first: Values, second: Values, *, level: float = 0.95) -> RankCorrelation:
    """Spearman's correlation of ranks (1904), with the interval of Bonett and Wright (2000).

    tanh(atanh(r) +- z sqrt((1 + r^2/2)/(n - 3))). Undefined if one of the two never varies; no interval below 5
    pairs, or if the ranks agree throughout.
    """
    check_level(level)
    x, y = as_values(first, "first"), as_values(second, "second")
    if x.size != y.size:
        raise ConfigurationError(
            f"both must have the same number of values (got {x.size} and {y.size}): pair them first"
        )
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return RankCorrelation(x.size, None, None, "One of the two does not vary, so there is no correlation.")
    from scipy.stats import rankdata  # Imported late: it takes as long to load as everything else together.

    r = float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])
    if x.size < 5 or abs(r) > 1 - 1e-12:
        return RankCorrelation(
            x.size, r, None, "There are too few pairs for an interval, or their ranks agree completely."
        )
    half = normal_quantile(two_sided(level)) * sqrt((1 + r * r / 2) / (x.size - 3))
    interval = Interval(tanh(atanh(r) - half), tanh(atanh(r) + half), level, "Bonett-Wright")
    return RankCorrelation(x.size, r, interval, None)


def groups_differ(first: Values, second: Values) -> float | Undefined:
    """Return the p-value of a test whether two groups differ: Fisher's exact test for 0/1, else Mann and Whitney's."""
    x, y = as_values(first, "first"), as_values(second, "second")
    if x.size == 0 or y.size == 0:
        return Undefined("One of the two groups is empty.")
    from scipy.stats import fisher_exact, mannwhitneyu

    if np.all(np.isin(x, (0, 1))) and np.all(np.isin(y, (0, 1))):
        table = [[int(x.sum()), int(x.size - x.sum())], [int(y.sum()), int(y.size - y.sum())]]
        return float(fisher_exact(table).pvalue)
    return float(mannwhitneyu(x, y).pvalue)
