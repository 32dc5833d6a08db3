"""A judge's rate, corrected by a random sample of human labels.

The labels must be a random sample of the same cases: no formula corrects for selected labels.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from fairtrial.stats._arrays import (
    Labels,
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
from fairtrial.stats.results import Interval


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
        raise ValueError(
            f"There must be one judged score for each label (got {y.size} labels and {f.size} scores): pair them first."
        )
    if not 0 <= weight <= 1:
        raise ValueError(f"The judge's weight must be from 0 to 1 (got {weight}).")
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
