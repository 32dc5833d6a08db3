"""Two systems on the same samples: the difference, its interval, its p-value, what could have been detected."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.stats._arrays import (
    FloatArray,
    Interval,
    Labels,
    Samples,
    Undefined,
    Values,
    as_clusters,
    as_samples,
    as_values,
    check_bounds,
    check_level,
    check_power,
    t_tail,
)
from fairtrial.stats.differences import Plan, binary_answer, resampled_answer
from fairtrial.stats.intervals import clustered_error, few_clusters_note, heavy_difference_note, sem


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """mean(a) - mean(b) over the pairs; `reason` explains a value of None.

    `n` counts the pairs with a score on both sides, `unscored` the others. `sd` is the standard deviation of the
    per-sample differences, `se` the (clustered) error of their mean and `df` its degrees of freedom. `p_value` is the
    largest 1 - level at which the interval still holds 0, so the two cannot disagree; `test` names the test behind it.
    `effective_clusters` is the number of clusters of equal size with the same information. `heavy_tail`: a few values
    make up so much of a side's sum that neither interval nor p is reliable.
    """

    n: int
    unscored: int
    clusters: int | None
    mean_a: float | None
    mean_b: float | None
    difference: float | None
    interval: Interval | None
    p_value: float | None
    test: str | None
    wins: int
    losses: int
    ties: int
    sd: float | None
    se: float | None
    mde: float | None
    power: float
    notes: tuple[str, ...]
    reason: str | None
    df: float | None = None
    effective_clusters: float | None = None
    heavy_tail: bool = False

    @property
    def differs(self) -> bool | None:
        """Whether the interval excludes 0, which is the verdict; None without an interval."""
        return None if self.interval is None else not self.interval.contains(0.0)


@dataclass(frozen=True, slots=True)
class MarginTest:
    """A one-sided (non-inferiority) or two one-sided (equivalence) t test against a margin."""

    n: int
    difference: float | None
    margin: float
    p_value: float | None
    method: str
    reason: str | None


def paired_se(a: Values, b: Values) -> float | Undefined:
    """Standard error of mean(a - b): sd(a_i - b_i)/sqrt(n). Student (1908).

    Smaller than the unpaired error whenever the two systems find the same samples hard.
    """
    return sem(_differences(as_values(a, "a"), as_values(b, "b")))


def paired_difference(
    a: Samples,
    b: Samples,
    *,
    clusters: Labels | None = None,
    binary: bool | None = None,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    level: float = 0.95,
    power: float = 0.8,
    test: Literal["midp", "exact"] = "midp",
    draws: int | None = None,
    seed: int = 0,
) -> PairedDifference:
    """Compare `a` with `b`, sample by sample; each may hold one score or a sequence of repeats per sample.

    - Pass/fail, one repeat, no clusters: `paired_rates_interval`, which is Bonett and Price's, stretched to 0 while
      mid-p McNemar (or the exact test) does not reject equality, and to exact binomial tails where no pair is won,
      none lost or none tied; in the last case the test is exact too. p is the larger of the test's and the interval's.
    - Otherwise repeats are averaged per sample and the differences d_i (or whole clusters of them) are resampled.
      The interval is the BCa bootstrap's, widened for small n, and stretched to take in every difference that the
      sign-flip test does not reject; p is the larger of the two. Each corrects the other: the bootstrap alone calls
      two identical systems different in up to 14% of runs when few samples differ, and the sign-flip interval alone
      ignores skew. Equal systems have symmetric differences, for which the sign-flip test is exact, so the rate of
      false alarms is at most 1 - level.
    - While fewer than 10 samples differ, and none has repeats, the interval also takes in Bonett and Price's: two
      pseudo-units with the largest possible difference, one each way, are added, t quantile. With or without repeats
      that is so where the differences are all equal, so equal data give no point.
    - Above 5,000 samples, or 1,000 clusters: t and the (clustered) error, for the interval and p.
    - Fewer units than the sign-flip test needs for the level (6 at 95%): of clusters, t with the error and degrees of
      freedom of `clustered_error`, never narrower than the same samples would be without clusters; of samples, the
      pseudo-units, or t without bounds. Where all units agree, so that p is the least that flipping signs can give, p
      is that of this interval if it is smaller still: several tests at once may need that.
    - Without bounds the interval also takes in that of t for the data and one more unit, twice as far from the mean as
      the farthest. Where a few values make up much of a side's sum, neither it nor p is reliable: `heavy_tail`.
    - Fewer than about 4 effective clusters are named in `notes`; one cluster has no interval and no p.

    The minimum detectable effect solves Miettinen's equation for pass/fail pairs and is (t_a/2 + t_b) SE elsewhere.
    Differences below a rounding error count as ties. `seed` makes the answer repeatable; swapping a and b negates it.
    """
    check_level(level)
    check_power(power)
    left, right = as_samples(a, "a"), as_samples(b, "b")
    if left.counts.size != right.counts.size:
        raise ConfigurationError(f"a has {left.counts.size} samples and b has {right.counts.size}: pair them first")
    check_bounds(left.flat, bounds, "a")
    check_bounds(right.flat, bounds, "b")
    labels = None if clusters is None else as_clusters(clusters, left.counts.size).codes
    scored = (left.counts > 0) & (right.counts > 0)
    unscored = int(np.count_nonzero(~scored))
    if unscored:
        left, right = left.only(scored), right.only(scored)
        labels = None if labels is None else labels[scored]
    count = None if labels is None else int(np.unique(labels).size)
    if left.counts.size == 0:
        reason = "No sample has a score on both sides."
        return PairedDifference(
            0, unscored, count, None, None, None, None, None, None, 0, 0, 0, None, None, None, power, (), reason
        )
    zero_one = left.binary and right.binary
    if binary and not zero_one:
        raise ConfigurationError("binary=True, but some scores are neither 0 nor 1: leave binary out for graded scores")
    differences = _differences(left.means, right.means)
    repeated = not (left.single and right.single)
    plan = Plan(level, power, None if bounds is None else bounds[1] - bounds[0], draws, seed, repeated)
    # A metric with another range is not pass/fail, even if all its values are 0 or 1.
    verdicts = zero_one and (bounds == (0.0, 1.0) if binary is None else binary)
    if verdicts and not repeated and labels is None:
        answer = binary_answer(differences, plan, exact=test == "exact")
    else:
        answer = resampled_answer(differences, labels, plan)
    worth = answer.effective_clusters
    few = None if count is None or worth is None else few_clusters_note(count, worth)
    heavy = None if bounds is not None else heavy_difference_note(left.means, right.means)
    n = differences.size
    return PairedDifference(
        n=n,
        unscored=unscored,
        clusters=count,
        mean_a=float(left.means.mean()),
        mean_b=float(right.means.mean()),
        difference=float(differences.mean()),
        interval=answer.interval,
        p_value=answer.p_value,
        test=answer.test,
        wins=int(np.count_nonzero(differences > 0)),
        losses=int(np.count_nonzero(differences < 0)),
        ties=int(np.count_nonzero(differences == 0)),
        sd=float(differences.std(ddof=1)) if n > 1 else None,
        se=answer.se,
        mde=answer.mde,
        power=power,
        notes=tuple(note for note in (few, heavy) if note is not None),
        reason=" ".join(answer.reasons) or None,
        df=answer.df,
        effective_clusters=worth,
        heavy_tail=heavy is not None,
    )


def noninferiority(a: Values, b: Values, *, margin: float, clusters: Labels | None = None) -> MarginTest:
    """One-sided t test that mean(a - b) lies above -margin. Schuirmann (1987).

    t = (mean(d) + margin)/SE with n-1 df, or SE and df of `clustered_error`. Undefined without spread.
    """
    return _margin_test(a, b, margin, clusters, sides=(1,), name="non-inferiority")


def equivalence(a: Values, b: Values, *, margin: float, clusters: Labels | None = None) -> MarginTest:
    """Two one-sided t tests that mean(a - b) lies between -margin and margin: the larger p. Schuirmann (1987)."""
    return _margin_test(a, b, margin, clusters, sides=(1, -1), name="equivalence")


def _margin_test(
    a: Values, b: Values, margin: float, clusters: Labels | None, *, sides: tuple[int, ...], name: str
) -> MarginTest:
    if not 0 <= margin < np.inf:
        raise ConfigurationError(f"margin must be a finite number of at least 0 (got {margin})")
    d = _differences(as_values(a, "a"), as_values(b, "b"))
    mean = float(d.mean()) if d.size else None
    if mean is None:
        return MarginTest(0, None, margin, None, f"{name} t test", "There are no pairs.")
    if d.size < 2:
        return MarginTest(d.size, mean, margin, None, f"{name} t test", "A standard error needs at least two samples.")
    error = clustered_error(d, np.arange(d.size) if clusters is None else clusters)
    if isinstance(error, Undefined):
        return MarginTest(d.size, mean, margin, None, f"{name} t test", error.reason)
    method = f"{name} t test with {error.df:.4g} df" + ("" if clusters is None else ", clustered error")
    if error.se <= 1e-12 * max(1.0, float(np.max(np.abs(d)))):
        return MarginTest(d.size, mean, margin, None, method, "The differences show no spread, so there is no t test.")
    p = max(t_tail((side * mean + margin) / error.se, error.df) for side in sides)
    return MarginTest(d.size, mean, margin, p, method, None)


def _differences(a: FloatArray, b: FloatArray) -> FloatArray:
    """a - b, with what is only rounding (means of the same repeats in another order) set to 0."""
    if a.size != b.size:
        raise ConfigurationError(f"a has {a.size} values and b has {b.size}: pair them first")
    d = a - b
    d[np.abs(d) <= 1e-12 * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))] = 0.0
    return d
