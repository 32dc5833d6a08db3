"""Detect a lasting drop of a mean over days, with at most one false alarm in a promised number of days.

An e-detector of Shin, Ramdas and Rinaldo (2024): the sum of Shiryaev (1963) and Roberts (1966) over all days on which
a change may have begun, of bets that the mean has been lower since. Works on arrays with leading axes, for simulations.
"""

from __future__ import annotations

from math import log

import numpy as np
from scipy.special import betaln

from fairtrial.errors import ConfigurationError
from fairtrial.stats import _arrays as arrays
from fairtrial.stats.intervals import exact_rate_interval
from fairtrial.stats.sequential import BettingMartingale
from fairtrial.stats.weighted import unequal_chances_mean

REFERENCE_RISK = 0.05
"""The chance that the lower bound of a reference lies above the true mean; the threshold allows for it."""

STAKES = 0.01 * 2.0 ** np.arange(7)
"""The bets: drops of 1% to 64% of the mean, whichever it turns out to be."""

FEWEST_REFERENCE = 200
"""Below this number of scores a reference says too little about a mean to watch it."""

_HIGHEST = 1 - 1e-9  # A bound of 1 would leave nothing to bet with.


def reference_bound(
    values: arrays.Values, *, risk: float = REFERENCE_RISK, weights: arrays.Values | None = None
) -> float:
    """Return a lower bound of the mean of scores from 0 to 1 that is above it with at most this chance.

    From the binomial tail for passes and failures, else the lower end of a betting interval; with weights, from those
    of `unequal_chances_mean`.
    """
    if weights is not None:
        interval = unequal_chances_mean(values, weights, level=1 - 2 * risk).interval
        return 0.0 if interval is None else interval.low
    scores = arrays.as_values(values)
    arrays.check_bounds(scores, (0.0, 1.0))
    if not scores.size:
        return 0.0
    if np.all((scores == 0) | (scores == 1)):
        return exact_rate_interval(float(scores.mean()), scores.size, level=1 - 2 * risk).low
    # The half of the capital on the other side is at most 1 there, so this level leaves `risk` on the lower side.
    return BettingMartingale(scores).interval(1 - 2 * risk / (1 + risk)).low


def shared(count: int) -> arrays.FloatArray:
    """Return the share of the false alarms of each stream: half is the first's, the others have equal parts."""
    return np.array([1.0]) if count == 1 else np.append(0.5, np.full(count - 1, 0.5 / (count - 1)))


class DriftDetector:
    """Evidence that the mean of any of several streams of scores from 0 to 1 has dropped for good.

    Before a change, the means of a stream's days are at least its bound. A score x multiplies a bet of stake a against
    a bound m by 1 + a(m - x)/(1 - m): of passes and failures, the likelihood ratio of the rate m(1 - a) to m. Each day
    every bet gets another 1 beside what it has, so that without a change the expected evidence after t days is at
    most t, and it takes `every` days or more on average until it reaches the limit. The evidence is the mean over
    stakes, weighted over streams by `shared`. The limit is every/(1 - risk): a fresh reference whose bounds all hold
    with a chance of 1 - risk then gives at least `every` days, on average over references.
    """

    def __init__(self, bounds: arrays.FloatArray, *, every: float, risk: float = REFERENCE_RISK) -> None:
        """Start from the lower bound of each stream, along the last axis."""
        if every < 1:
            raise ConfigurationError(f"every must be at least 1 day (got {every:g})")
        self.bounds = np.minimum(bounds, _HIGHEST)
        self.log_limit = log(every / (1 - risk))
        self._weights = np.log(shared(self.bounds.shape[-1]))[:, None] - log(STAKES.size)
        self.levels = np.full((*self.bounds.shape, STAKES.size), -np.inf)

    def add_day(
        self, values: arrays.FloatArray, counts: arrays.FloatArray, shares: arrays.FloatArray | float = 1.0
    ) -> None:
        """Add the scores of a day: distinct values, and how often each stream has them, along the last axis.

        `shares` are the weights of the values as shares of the day's largest: less is bet on scores that stand for
        fewer, so that a bet loses on average while the weighted mean has not dropped.
        """
        gains = log_gains(self.bounds[..., None], values, shares)
        self.levels = np.logaddexp(self.levels, 0.0) + np.einsum("...v,...vs->...s", counts, gains)

    @property
    def evidence(self) -> arrays.FloatArray:
        """The logarithm of each stream's evidence, weighted."""
        return np.asarray(np.logaddexp.reduce(self.levels + self._weights, axis=-1))

    @property
    def share(self) -> arrays.FloatArray:
        """The evidence as a share of the limit: an alarm from 1 on."""
        return np.asarray(np.exp(np.minimum(np.logaddexp.reduce(self.evidence, axis=-1) - self.log_limit, 700.0)))

    def days_to_find(
        self, drop: float, values: arrays.FloatArray, counts: arrays.FloatArray, shares: arrays.FloatArray | float = 1.0
    ) -> float:
        """Return after about how many days such as this one of the first stream a drop of its mean is found.

        A drop of d replaces a share of the scores by 0.
        """
        worth = counts * shares
        mean = float(values @ worth / worth.sum())
        share = min(drop / mean, 1.0) if mean > 0 else 1.0
        passing, failing = (log_gains(self.bounds[:1], each, shares) for each in (values, np.zeros_like(values)))
        daily = counts @ ((1 - share) * passing + share * failing)
        needed = self.log_limit - self._weights[0, 0]
        return float(needed / daily.max()) if daily.max() > 0 else np.inf


def log_gains(
    bounds: arrays.FloatArray, values: arrays.FloatArray, shares: arrays.FloatArray | float = 1.0
) -> arrays.FloatArray:
    """Return the logarithm of what each value makes of each stake, against a bound of each leading axis.

    Of each stake, these shares are bet on the values.
    """
    odds = (bounds - values) / (1 - bounds) * shares
    return np.asarray(np.log1p(odds[..., None] * STAKES), dtype=np.float64)


def change_days(
    sums: arrays.FloatArray, counts: arrays.FloatArray, reference: tuple[float, float], *, level: float = 0.95
) -> tuple[int, int, int]:
    """Return the likeliest first day of a change of the mean, and the range of days that holds it at this level.

    `sums` and `counts` are those of each day, `reference` those of the days before. Each day has as much weight as the
    likelihood of two rates, one before and one from that day on, each averaged over Jeffreys' prior. Graded scores
    count as parts of passes, which makes the range wider than needed.
    """
    after = np.cumsum(np.stack([sums, counts - sums])[:, ::-1], axis=1)[:, ::-1]
    whole = np.array([reference[0], reference[1] - reference[0]]) + after[:, 0]
    before = whole[:, None] - after
    logs = betaln(*(before + 0.5)) + betaln(*(after + 0.5))
    weights = np.exp(logs - logs.max())
    order = np.argsort(-weights, kind="stable")
    needed = int(np.searchsorted(np.cumsum(weights[order]), level * weights.sum())) + 1
    likely = order[:needed]
    return int(order[0]), int(likely.min()), int(likely.max())
