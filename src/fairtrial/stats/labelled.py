"""Estimate people's labels of all judged trials from labels of some: rates, means, and differences of two systems.

Pass/fail verdicts are post-stratified by the judge's verdict (Tenenbein 1970): the judge says how many trials are of
each kind, and people say how many of each kind pass. Errors of the judge reduce the precision but cause no bias, and
people may label more of its fails than of its passes. Graded scores are corrected by regression on the judge's scores
(prediction-powered inference with a tuned weight; Angelopoulos, Duchi and Zrnic 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri, stdtrit

from fairtrial.base.rates import wilson_bounds
from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats.agreement import CorrectedMean
from fairtrial.stats.intervals import FEW_IMPERFECT, few_clusters_note
from fairtrial.stats.paired import PairedDifference

LABELS_TEST = "interval of corrected rates"
"""The name of the test where a difference rests on labels."""

_SHIFT = 0.25  # Of the beta limits in a stratum: 0 is Clopper and Pearson's, .5 Jeffreys'.

type Arms = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class JudgedTrials:
    """The judge's scores of one system's trials, and people's labels of some of them (NaN elsewhere).

    Attributes:
        scores: What the judge said of each trial.
        labels: What people said.
        weights: How many trials each label stands for, up to a common factor: 1/(chance of being picked). None: all
            trials had the same chance.
        certain: Trials whose label is known without asking anybody, such as a crash. They have no sampling error.
        samples: The number of the sample of each trial, from 0; None if every trial is a sample. A sample weighs the
            same however many trials it has.
    """

    scores: arrays.FloatArray
    labels: arrays.FloatArray
    weights: arrays.FloatArray | None = None
    certain: NDArray[np.bool_] | None = None
    samples: arrays.IntArray | None = None

    def __post_init__(self) -> None:
        n = self.scores.size
        for name in ("labels", "weights", "certain", "samples"):
            array = getattr(self, name)
            if array is not None and array.size != n:
                raise ConfigurationError(f"{name} must have one entry for each of the {n} scores (got {array.size})")
        picked = self.labelled
        if self.weights is not None and not np.all(self.weights[picked] > 0):
            raise ConfigurationError("the weight of a label must be above 0")

    @property
    def known(self) -> NDArray[np.bool_]:
        """The trials whose label is certain."""
        return np.zeros(self.scores.size, dtype=np.bool_) if self.certain is None else self.certain

    @property
    def labelled(self) -> NDArray[np.bool_]:
        """The judged trials that people labelled."""
        return np.asarray(np.isfinite(self.labels) & ~self.known)

    @property
    def places(self) -> arrays.IntArray:
        """The number of the sample of each trial."""
        return np.arange(self.scores.size, dtype=np.intp) if self.samples is None else self.samples

    @property
    def binary(self) -> bool:
        """Whether judge and people only say pass or fail."""
        judged = self.scores[~self.known]
        people = self.labels[np.isfinite(self.labels)]
        return bool(np.all((judged == 0) | (judged == 1)) and np.all((people == 0) | (people == 1)))


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """An estimate, the pull of each sample on it, and how far its interval reaches down and up at a level."""

    estimate: float
    pulls: arrays.FloatArray
    arms: Callable[[float], Arms]
    method: str
    labels: float  # The effective number of labels.
    notes: tuple[str, ...]


def corrected_mean(
    trials: JudgedTrials,
    *,
    clusters: arrays.Labels | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
    exact: bool = False,
) -> CorrectedMean:
    """Estimate the mean of people's labels over all trials. Labels may be selected by the judge's score only.

    - Pass/fail: theta = sum over the judge's verdicts h of W_h p_h, W_h being the share of trials with that verdict and
      p_h the (weighted) share of its labels that pass. The interval adds up the squares of the distances between p_h
      and its limits, and of z times the error of the shares W_h (MOVER; Zou and Donner 2008), so that verdicts with few
      labels, or labels that all agree, do not shrink it. The limits of p_h are halfway between those of Jeffreys and of
      Clopper and Pearson, or with `exact` the latter. A verdict without labels may hide any rate.
    - Graded: theta = mean of w f over all trials + mean of (y - w f) over labels, with the weight w from 0 to 1 of the
      least error; the interval is Wilson's with the effective n of that error and t(n-2).
    - Repeats of a sample, and samples of one cluster, are not independent: the distances grow by the ratio of errors
      with and without clusters, and t(C-1) takes the place of z, C being the clusters with labels. `clusters` names the
      cluster of each sample.

    In the answer, `judged` counts all trials but those that are certain, and `labelled` those that people labelled.
    """
    arrays.check_level(level)
    side = _side(trials, clusters, bounds, exact=exact)
    judged, labelled = int(np.count_nonzero(~trials.known)), int(np.count_nonzero(trials.labelled))
    if isinstance(side, str):
        return CorrectedMean(None, None, None, judged, labelled, (), side)
    low, high = (-inf, inf) if bounds is None else bounds
    down, up = side.arms(level)
    interval = arrays.Interval(max(low, side.estimate - down), min(high, side.estimate + up), level, side.method)
    se = sqrt(_variance(side.pulls, clusters))
    return CorrectedMean(side.estimate, se, interval, judged, labelled, side.notes, None)


def corrected_difference(
    a: JudgedTrials,
    b: JudgedTrials,
    *,
    clusters: arrays.Labels | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
    power: float = 0.8,
) -> PairedDifference:
    """corrected_mean(a) - corrected_mean(b) over the same samples, each side corrected by its own labels.

    With l and u the distances from each mean to the ends of its interval, the interval is
    d - sqrt(l_a^2 + u_b^2 - 2 r l_a u_b) to d + sqrt(u_a^2 + l_b^2 - 2 r u_a l_b) (Newcombe 1998; Zou and Donner 2008);
    r is the correlation of the two estimates, from what each sample (or cluster) adds to either. Wins, losses and ties
    are those of the judge's scores. The p-value is the largest 1 - level at which the interval still holds 0.
    """
    arrays.check_level(level)
    arrays.check_power(power)
    sides = [_side(trials, clusters, bounds, exact=False) for trials in (a, b)]
    wins, losses, n = _wins(a, b)
    count = effective = None
    if clusters is not None:
        groups = arrays.as_clusters(clusters, n)
        count, effective = groups.count, n**2 / float(groups.sizes @ groups.sizes)
    for side in sides:
        if isinstance(side, str):
            return PairedDifference(
                n, 0, count, None, None, None, None, None, None, wins, losses, n - wins - losses,
                None, None, None, power, (), side,
            )  # fmt: skip
    first, second = (side for side in sides if isinstance(side, _Side))
    if first.pulls.size != second.pulls.size:
        raise ConfigurationError("both sides must have the same samples: pair them first")
    difference = first.estimate - second.estimate
    correlation = _correlation(first, second, clusters)

    def ends(at: float) -> Arms:
        (down_a, up_a), (down_b, up_b) = first.arms(at), second.arms(at)
        down = sqrt(max(down_a**2 + up_b**2 - 2 * correlation * down_a * up_b, 0.0))
        up = sqrt(max(up_a**2 + down_b**2 - 2 * correlation * up_a * down_b, 0.0))
        return difference - down, difference + up

    low, high = ends(level)
    se = sqrt(_variance(first.pulls - second.pulls, clusters))
    reach = (high - low) / 2 + arrays.normal_quantile(power) * se
    largest = inf if bounds is None else bounds[1] - bounds[0]
    few = None if count is None or effective is None else few_clusters_note(count, effective)
    notes = dict.fromkeys((*first.notes, *second.notes, *(() if few is None else (few,))))
    return PairedDifference(
        n=n,
        unscored=0,
        clusters=count,
        mean_a=first.estimate,
        mean_b=second.estimate,
        difference=difference,
        interval=arrays.Interval(max(-largest, low), min(largest, high), level, f"{first.method}, both sides"),
        p_value=_p_value(ends),
        test=LABELS_TEST,
        wins=wins,
        losses=losses,
        ties=n - wins - losses,
        sd=None,
        se=se,
        mde=reach if reach <= largest else None,
        power=power,
        notes=tuple(notes),
        reason=None,
        effective_clusters=effective,
    )


def weighted_groups_differ(trials: JudgedTrials) -> float | None:
    """The p-value that weighted labels are of trials like all of them, by the judge's mean; None without spread.

    The weighted mean of the judge's scores over labelled trials is compared with its mean over all trials.
    """
    picked, judged = trials.labelled, ~trials.known
    if not picked.any() or trials.weights is None:
        return None
    f, w = trials.scores[picked], trials.weights[picked]
    mean = float(np.average(f, weights=w))
    every = trials.scores[judged]
    pull = w * (f - mean) / w.sum()
    variance = max(float(pull @ pull), float(every.var()) * float(w @ w) / float(w.sum()) ** 2)
    if variance <= 0:
        return None
    return float(2 * ndtr(-abs(mean - float(every.mean())) / sqrt(variance)))


def labels_to_detect(
    labels: int, se: float | None, judged_se: float | None, delta: float, *, level: float = 0.95, power: float = 0.8
) -> int | arrays.Undefined:
    """Labels at which a true difference `delta` would show, given that `labels` left the standard error `se`.

    More labels shrink what they add to the squared error, (se^2 - judged_se^2) labels/L, and leave the error of the
    judge's own figure, `judged_se`, about which would remain if every trial were labelled: se is to be at most
    delta/(z_a/2 + z_b).
    """
    if se is None or judged_se is None:
        return arrays.Undefined("Without a standard error the number of labels is not known.")
    room = (
        delta / (arrays.normal_quantile(arrays.two_sided(level)) + arrays.normal_quantile(power))
    ) ** 2 - judged_se**2
    if room <= 0:
        return arrays.Undefined("Even if every trial were labelled, the difference would not show.")
    return max(1, ceil(labels * max(0.0, se**2 - judged_se**2) / room))


def _side(
    trials: JudgedTrials, clusters: arrays.Labels | None, bounds: tuple[float, float] | None, *, exact: bool
) -> _Side | str:
    """The estimate of one system, or why there is none."""
    if not trials.labelled.any():
        return "No judged trial is labelled."
    if not np.all(np.isfinite(trials.scores[~trials.known])) or not np.all(np.isfinite(trials.labels[trials.known])):
        raise ConfigurationError("every trial must have a score of the judge, or a label that is certain")
    arrays.check_bounds(trials.labels[np.isfinite(trials.labels)], bounds, "labels")
    arrays.check_bounds(trials.scores[~trials.known], bounds, "scores")
    grouped = _Grouping(trials, clusters)
    if grouped.count < 2:
        return "All samples are in one cluster, so the variance between clusters is not known."
    if bounds == (0.0, 1.0) and trials.binary:
        return _post_stratified(trials, grouped, exact=exact)
    return _regression(trials, grouped, bounds)


class _Grouping:
    """How much each trial weighs, and which trials are not independent."""

    def __init__(self, trials: JudgedTrials, clusters: arrays.Labels | None) -> None:
        places = trials.places
        repeats = np.bincount(places)
        self.samples = int(repeats.size)
        if not repeats.all():
            raise ConfigurationError(f"every sample must have a trial (sample {int(np.argmin(repeats))} has none)")
        self.shares = 1 / (repeats.size * repeats[places])
        self.places = places
        self.single = clusters is None and bool(np.all(repeats <= 1))
        codes = None if clusters is None else arrays.as_clusters(clusters, self.samples).codes
        self.units = places if codes is None else codes[places]
        self.count = int(np.unique(self.units).size)
        self.labelled_units = int(np.unique(self.units[trials.labelled]).size)

    def stretch(self, pulls: arrays.FloatArray) -> float:
        """How much larger the error is than that of independent trials: at least 1."""
        if self.single:
            return 1.0
        plain = float(pulls @ pulls)
        sums = np.bincount(self.units, weights=pulls)
        together = float(sums @ sums) * self.count / (self.count - 1)
        return sqrt(max(1.0, together / plain)) if plain > 0 else 1.0

    def quantile(self, level: float) -> float:
        """z, or t where trials are not independent."""
        return _quantile(level, None if self.single else max(1, self.labelled_units - 1))

    def by_sample(self, pulls: arrays.FloatArray) -> arrays.FloatArray:
        """The pull of each sample."""
        return np.bincount(self.places, weights=pulls, minlength=self.samples).astype(np.float64)


def _label_weights(trials: JudgedTrials, grouped: _Grouping) -> arrays.FloatArray:
    return grouped.shares if trials.weights is None else grouped.shares * trials.weights


def _post_stratified(trials: JudgedTrials, grouped: _Grouping, *, exact: bool) -> _Side:
    picked, weights = trials.labelled, _label_weights(trials, grouped)
    pooled = float(np.average(trials.labels[picked], weights=weights[picked]))
    means = np.where(trials.known, trials.labels, 0.0)
    pulls = np.zeros(means.size)
    strata: list[tuple[float, float, float]] = []  # Share of trials, rate, and the number of labels it rests on.
    notes = []
    for verdict, word in ((0.0, "failed"), (1.0, "passed")):
        here = ~trials.known & (trials.scores == verdict)
        if not here.any():
            continue
        share, some = float(grouped.shares[here].sum()), here & picked
        if not some.any():
            notes.append(
                f"No trial that the judge {word} is labelled: what people say of those is anything from 0 to 1."
            )
            strata.append((share, pooled, 0.0))
            means[here] = pooled
            continue
        w = weights[some] / weights[some].sum()
        rate, size = float(w @ trials.labels[some]), 1 / float(w @ w)
        if not grouped.single and rate in (0.0, 1.0):
            size = min(size, float(np.unique(grouped.units[some]).size))
        strata.append((share, rate, size))
        means[here] = rate
        pulls[some] = share * w * (trials.labels[some] - rate)
    # Shares add up to 1 only nearly: equal rates must not become 99.9999%.
    estimate = min(max(float(grouped.shares @ means), float(means.min())), float(means.max()))
    between = grouped.shares * (means - estimate)
    pulls += between
    stretch, spread, shift = grouped.stretch(pulls), float(between @ between), 0.0 if exact else _SHIFT

    def arms(level: float) -> Arms:
        z = _quantile(level)
        down = up = z * z * spread
        for share, rate, size in strata:
            low, high = _rate_limits(rate, size, level, shift)
            down += (share * (rate - low)) ** 2
            up += (share * (high - rate)) ** 2
        factor = stretch * grouped.quantile(level) / z
        return factor * sqrt(down), factor * sqrt(up)

    method = "post-stratified by verdict" + ("" if grouped.single else ", clustered")
    labels = float(sum(size for _, _, size in strata))
    return _Side(estimate, grouped.by_sample(pulls), arms, method, labels, tuple(notes))


def _quantile(level: float, df: float | None = None) -> float:
    """Of the normal or the t distribution, two-sided; uncached, because a p-value takes many levels."""
    return float(ndtri(arrays.two_sided(level)) if df is None else stdtrit(df, arrays.two_sided(level)))


def _rate_limits(rate: float, size: float, level: float, shift: float) -> tuple[float, float]:
    """The limits of a rate of `size` labels by quantiles of beta distributions; 0 to 1 without labels."""
    if size <= 0:
        return 0.0, 1.0
    tail, passes = (1 - level) / 2, rate * size
    low = float(betaincinv(passes + shift, size - passes + 1 - shift, tail)) if rate > 0 else 0.0
    high = float(betaincinv(passes + 1 - shift, size - passes + shift, 1 - tail)) if rate < 1 else 1.0
    return min(low, rate), max(high, rate)


def _regression(trials: JudgedTrials, grouped: _Grouping, bounds: tuple[float, float] | None) -> _Side | str:
    picked, judged = trials.labelled, ~trials.known
    weights = _label_weights(trials, grouped)[picked]
    w = weights / weights.sum()
    size = 1 / float(w @ w)
    if size < 3:
        return "Graded figures need at least three labels."
    y, f = trials.labels[picked], trials.scores[picked]
    centred = f - float(w @ f)
    spread = float(w @ centred**2)
    slope = float(w @ (centred * y)) / spread if spread > 1e-12 else 0.0
    slope = min(1.0, max(0.0, slope))
    errors = y - slope * f
    error = float(w @ errors)
    share = float(grouped.shares[judged].sum())
    means = np.where(trials.known, trials.labels, slope * np.nan_to_num(trials.scores) + error)
    estimate = float(grouped.shares @ means)
    pulls = grouped.shares * (means - estimate)
    # Two parameters were fitted to the labels.
    pulls[picked] += share * w * (errors - error) * sqrt(size / (size - 2))
    se = sqrt(float(pulls @ pulls)) * grouped.stretch(pulls)
    df = max(1.0, size - 2 if grouped.single else min(size - 2, grouped.labelled_units - 1))
    low, high = (estimate, estimate) if bounds is None else bounds
    inside = min(high, max(low, estimate)) if bounds is not None else estimate
    imperfect = low < high and min(np.count_nonzero(y > low), np.count_nonzero(y < high)) < FEW_IMPERFECT

    def arms(level: float) -> Arms:
        t = _quantile(level, df)
        if bounds is None:
            return t * se, t * se
        rate, error = (inside - low) / (high - low), se / (high - low)
        # Uses the mean of the labels, because the corrected one may lie outside the range. Equal labels do not vary.
        mean = (float(w @ y) - low) / (high - low)
        effective = mean * (1 - mean) / error**2 if error > 1e-12 and 0 < mean < 1 else size
        effective = min(effective, size) if imperfect else effective
        ends = wilson_bounds(rate, effective, t)
        return (rate - ends[0]) * (high - low), (ends[1] - rate) * (high - low)

    if bounds is None and se <= 1e-12 * max(1.0, abs(estimate)):
        return "The judge's errors do not vary, so without bounds there is no interval."
    method = f"regression on the judge's scores, weight {slope:.2f}" + ("" if grouped.single else ", clustered")
    return _Side(inside, grouped.by_sample(pulls), arms, method, size, ())


def _variance(pulls: arrays.FloatArray, clusters: arrays.Labels | None) -> float:
    """Of a sum of pulls of samples, or of whole clusters."""
    if clusters is None:
        return float(pulls @ pulls)
    groups = arrays.as_clusters(clusters, pulls.size)
    sums = groups.totals(pulls)
    return float(sums @ sums) * groups.count / max(1, groups.count - 1)


def _correlation(first: _Side, second: _Side, clusters: arrays.Labels | None) -> float:
    """Return the correlation of two estimates, slightly reduced, because equal data do not prove equal systems."""
    a, b = first.pulls, second.pulls
    if clusters is not None:
        groups = arrays.as_clusters(clusters, a.size)
        a, b = groups.totals(a), groups.totals(b)
    size = sqrt(float(a @ a) * float(b @ b))
    labels = min(first.labels, second.labels)
    return float(a @ b) / size * labels / (labels + 1) if size > 0 else 0.0


def _p_value(ends: Callable[[float], Arms]) -> float:
    """The largest 1 - level at which the interval holds 0, by bisection."""

    def holds(p: float) -> bool:
        low, high = ends(1 - p)
        return low <= 0 <= high

    least, most = 1e-12, 1 - 1e-9
    if not holds(least):
        return least
    if holds(most):
        return 1.0
    for _ in range(40):
        middle = sqrt(least * most) if least < 1e-3 else (least + most) / 2
        least, most = (middle, most) if holds(middle) else (least, middle)
    return least


def _wins(a: JudgedTrials, b: JudgedTrials) -> tuple[int, int, int]:
    """On how many samples the judge (or what is certain) puts a above b, below it, and how many there are."""
    means = []
    for side in (a, b):
        values = np.where(side.known, side.labels, side.scores)
        means.append(np.bincount(side.places, weights=values) / np.bincount(side.places))
    if means[0].size != means[1].size:
        raise ConfigurationError("both sides must have the same samples: pair them first")
    change = means[0] - means[1]
    change[np.abs(change) < 1e-12] = 0.0
    return int(np.count_nonzero(change > 0)), int(np.count_nonzero(change < 0)), int(change.size)
