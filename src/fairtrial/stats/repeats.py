"""Statistics of repeats: averages, variance between and within samples, pass@k and pass^k."""

from dataclasses import dataclass
from math import comb

import numpy as np

from fairtrial.errors import ConfigurationError
from fairtrial.stats._arrays import FloatArray, Labels, Samples, Undefined, as_samples
from fairtrial.stats.intervals import MeanEstimate, mean_interval, plain_se


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """How much of the variance lies between samples and how much between repeats of one sample.

    `reason` explains a value of None.
    """

    n: int
    trials: int
    mean: float | None
    se: float | None
    between: float | None
    within: float | None
    correlation: float | None
    reason: str | None


def sample_means(values: Samples) -> FloatArray:
    """The mean of each sample over its own repeats; every sample needs at least one."""
    samples = as_samples(values)
    empty = np.flatnonzero(samples.counts == 0)
    if empty.size:
        raise ConfigurationError(f"every sample must have a scored repeat (sample {empty[0]} has none): leave it out")
    return samples.means.copy()


def variance_split(values: Samples) -> VarianceSplit:
    """Split the variance of single trials into between-sample and within-sample parts. Miller (2024).

    within  = sum over samples and repeats of (x - sample mean)^2 / sum of (K_i - 1)
    between = var(sample means) - within * mean(1/K_i), and 0 where that is negative (Searle et al. 1992)
    correlation = between / (between + within), the intra-class correlation

    Samples without a scored repeat are ignored. `within` is undefined while no sample has two repeats, `between`
    below two samples.
    """
    samples = as_samples(values)
    samples = samples.only(samples.counts > 0)
    n, trials = samples.counts.size, samples.flat.size
    if n == 0:
        return VarianceSplit(0, 0, None, None, None, None, None, "There are no samples.")
    means = samples.means
    mean = float(means.mean())
    se = plain_se(means) if n > 1 else None
    reasons = [] if n > 1 else ["One sample shows no variance between samples."]
    if trials == n:
        reasons.append("No sample has two repeats, so the variance cannot be split.")
        return VarianceSplit(n, trials, mean, se, None, None, None, " ".join(reasons))
    residuals = samples.flat - np.repeat(means, samples.counts)
    within = float(np.sum(residuals * residuals)) / (trials - n)
    if n == 1:
        return VarianceSplit(n, trials, mean, se, None, within, None, " ".join(reasons))
    between = max(0.0, float(means.var(ddof=1)) - within * float(np.mean(1 / samples.counts)))
    if between + within <= 0:
        return VarianceSplit(n, trials, mean, se, between, within, None, "All scores are equal: no correlation.")
    return VarianceSplit(n, trials, mean, se, between, within, between / (between + within), None)


def pass_at_k(n: int, passes: int, k: int) -> float | Undefined:
    """Chance that at least one of k repeats passes: 1 - C(n-c, k)/C(n, k), unbiased. Chen et al. (2021)."""
    missing = _too_few(n, passes, k)
    return 1 - comb(n - passes, k) / comb(n, k) if missing is None else missing


def pass_hat_k(n: int, passes: int, k: int) -> float | Undefined:
    """Chance that all of k repeats pass (pass^k): C(c, k)/C(n, k), unbiased. Yao et al. (2024)."""
    missing = _too_few(n, passes, k)
    return comb(passes, k) / comb(n, k) if missing is None else missing


def mean_pass_at_k(values: Samples, k: int, *, clusters: Labels | None = None, level: float = 0.95) -> MeanEstimate:
    """pass@k averaged over samples, with its interval; samples with fewer than k repeats count as `unscored`."""
    return _mean_pass(values, k, clusters, level, all_of_them=False)


def mean_pass_hat_k(values: Samples, k: int, *, clusters: Labels | None = None, level: float = 0.95) -> MeanEstimate:
    """pass^k averaged over samples, with its interval; samples with fewer than k repeats count as `unscored`."""
    return _mean_pass(values, k, clusters, level, all_of_them=True)


def _mean_pass(values: Samples, k: int, clusters: Labels | None, level: float, *, all_of_them: bool) -> MeanEstimate:
    samples = as_samples(values)
    if not samples.binary:
        raise ConfigurationError("pass@k and pass^k count passes: every score must be 0 or 1")
    passes = np.add.reduceat(np.append(samples.flat, 0.0), samples.starts) if samples.counts.size else samples.flat
    passes = np.where(samples.counts > 0, passes, 0.0)
    formula = pass_hat_k if all_of_them else pass_at_k
    rows: list[list[float]] = []
    for count, passed in zip(samples.counts.tolist(), passes.tolist(), strict=True):
        value = formula(count, int(passed), k)
        rows.append([] if isinstance(value, Undefined) else [value])
    return mean_interval(rows, clusters=clusters, level=level)


def _too_few(n: int, passes: int, k: int) -> Undefined | None:
    if k < 1:
        raise ConfigurationError(f"k must be at least 1 (got {k})")
    if n < 0 or not 0 <= passes <= n:
        raise ConfigurationError(f"passes must be from 0 to the number of repeats (got {passes} of {n})")
    return Undefined(f"k = {k} needs at least {k} repeats (got {n}).") if n < k else None
