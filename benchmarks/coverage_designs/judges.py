"""Judges: rates corrected by people's labels, and comparisons of systems that a judge treats differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fairtrial.analysis.review_sample import keyed_hash
from fairtrial.stats import Interval, JudgedTrials, corrected_difference, corrected_mean

from . import ALARMS, COVERAGE, Array, Design, Rng, contains, share

JUDGES = ((0.7, 0.6), (0.9, 0.8), (0.95, 0.7))
"""Sensitivity and specificity."""


def verdicts(rng: Rng, truth: Array, sensitivity: float, specificity: float) -> Array:
    """What a judge says of each trial."""
    chance = np.where(truth == 1, sensitivity, 1 - specificity)
    return (rng.random(truth.size) < chance).astype(np.float64)


def label(rng: Rng, truth: Array, judged: Array, labels: int, *, half: bool) -> JudgedTrials:
    """Trials of which some are labelled: at random, or half of them among those that the judge failed."""
    people = np.full(truth.size, np.nan)
    for group, size in (
        [(np.flatnonzero(judged == verdict), labels // 2) for verdict in (0, 1)]
        if half
        else [(np.arange(truth.size), labels)]
    ):
        some = rng.permutation(group)[:size]
        people[some] = truth[some]
    return JudgedTrials(judged, people)


def corrected_rate(
    rate: float, judge: tuple[float, float], labels: int, *, half: bool, n: int = 1_000
) -> Callable[[Rng], bool]:
    """One run: whether the interval of the corrected rate holds the rate that people would give."""

    def once(rng: Rng) -> bool:
        truth = (rng.random(n) < rate).astype(np.float64)
        trials = label(rng, truth, verdicts(rng, truth, *judge), labels, half=half)
        return contains(corrected_mean(trials).interval, rate)

    return once


def reviewed_rate(rate: float, judge: tuple[float, float], size: int, *, n: int = 3_000) -> Callable[[Rng], bool]:
    """One run: whether the corrected rate holds the truth if people label the trials that a review draws.

    A tenth of the trials has no score. One in 25 of the drawn ones is skipped, whatever the answer is.
    """

    def once(rng: Rng) -> bool:
        truth = (rng.random(n) < rate).astype(np.float64)
        judged = verdicts(rng, truth, *judge)
        scored = np.flatnonzero(rng.random(n) >= 0.1)
        hashes = keyed_hash(int(rng.integers(1 << 63)), scored)
        drawn = np.argsort(hashes)[:size]
        people = np.full(scored.size, np.nan)
        answered = drawn[rng.random(size) >= 0.04]
        people[answered] = truth[scored[answered]]
        return contains(corrected_mean(JudgedTrials(judged[scored], people)).interval, rate)

    return once


def graded_mean(labels: int, *, biased: bool, n: int = 500) -> Callable[[Rng], bool]:
    """One run: whether the corrected mean of ratings from 0 to 1 in five steps holds the mean of people's."""
    shares = np.array([0.05, 0.1, 0.2, 0.35, 0.3] if biased else [0.02, 0.03, 0.05, 0.2, 0.7])

    def once(rng: Rng) -> bool:
        truth = rng.choice(5, n, p=shares)
        judged = (
            np.clip(truth + rng.choice([-1, 0, 1, 1], n), 0, 4) if biased else np.where(rng.random(n) < 0.05, 4, truth)
        )
        people = np.full(n, np.nan)
        people[:labels] = truth[:labels] / 4
        return contains(corrected_mean(JudgedTrials(judged / 4, people)).interval, float(shares @ np.arange(5)) / 4)

    return once


def favoured(labels: int, *, half: bool = False, shared: float = 0.0, n: int = 500) -> Callable[[Rng], bool]:
    """One run: whether equal systems are called different, of which the judge forgives one more than the other.

    Both are right on 80% of samples; the judge passes 10% of the wrong answers of one and 35% of the other's. `shared`
    is the share of samples that are as hard for one as for the other.
    """

    def once(rng: Rng) -> bool:
        common, sides = rng.random(n), []
        for forgiven in (0.10, 0.35):
            own = np.where(rng.random(n) < shared, common, rng.random(n))
            truth = (own < 0.8).astype(np.float64)
            sides.append(label(rng, truth, verdicts(rng, truth, 0.95, 1 - forgiven), labels, half=half))
        interval = corrected_difference(*sides).interval
        return isinstance(interval, Interval) and not interval.contains(0.0)

    return once


def designs() -> Iterator[Design]:
    """Every design of this family."""
    for rate in (0.8, 0.95):
        for judge in JUDGES:
            for labels in (20, 50, 100, 200):
                for half in (False, True):
                    drawn = "half on fails" if half else "random"
                    yield Design(
                        "rate corrected by labels, 1,000 trials",
                        "coverage",
                        COVERAGE,
                        share(corrected_rate(rate, judge, labels, half=half)),
                        cell=f"rate {rate}, judge {judge[0]}/{judge[1]}, {labels} labels, {drawn}",
                        quick=200 if labels in (20, 100) and judge == (0.7, 0.6) else 0,
                    )
    for size in (50, 150):
        yield Design(
            "rate corrected by a review, 3,000 trials",
            "coverage",
            COVERAGE,
            share(reviewed_rate(0.8, (0.95, 0.7), size)),
            cell=f"rate 0.8, judge 0.95/0.7, {size} drawn, 4% skipped",
            quick=200 if size == 50 else 0,
        )
    for labels in (20, 50, 100):
        for biased in (False, True):
            yield Design(
                "mean of ratings corrected by labels",
                "coverage",
                COVERAGE,
                share(graded_mean(labels, biased=biased)),
                cell=f"{'judge too kind' if biased else 'judge right in 95%'}, {labels} labels",
                quick=200 if labels == 20 else 0,
            )
    for labels in (20, 50, 100, 200):
        for half, shared in ((False, 0.0), (True, 0.0), (False, 0.8)):
            yield Design(
                "equal systems, judge kinder to one, labels of both",
                "called different",
                ALARMS,
                share(favoured(labels, half=half, shared=shared)),
                cell=f"{labels} labels, {'half on fails' if half else 'random'}, {shared:.0%} equally hard",
                quick=200 if labels == 100 else 0,
            )
