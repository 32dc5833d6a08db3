"""Judges: rates corrected by people's labels, and comparisons of systems that a judge treats differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from fairtrial import EvalReport, EvalResult, Sample, Score, TrialKey, calibrate
from fairtrial.reports.calibrate.document import judge_sentence
from fairtrial.reports.figures.columns import Columns, LabelColumn
from fairtrial.reports.figures.labels import UNKNOWN_DRAW, keyed_hash
from fairtrial.reports.figures.rules import GateRules
from fairtrial.reports.gate.gate import gate_columns
from fairtrial.stats import Interval, JudgedTrials, corrected_difference, corrected_mean

from . import ALARMS, COVERAGE, GATE_ERRORS, Array, Design, Rng, contains, share, share_or_warned

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


def complaints(labels: int, *, n: int = 400) -> Callable[[Rng], tuple[bool, bool]]:
    """One run: whether the corrected rate holds the truth, and whether its sentence has the condition, or is refused.

    Wrong answers have three times the chance of a label, as where complaints are labelled.
    """

    def once(rng: Rng) -> tuple[bool, bool]:
        truth = (rng.random(n) < 0.8).astype(np.float64)
        judged = verdicts(rng, truth, 0.9, 0.6)
        chance = np.where(truth == 1, 1.0, 3.0)
        picked = rng.choice(n, labels, replace=False, p=chance / chance.sum())
        found = calibrate(judged_report(judged), {f"s{at}": bool(truth[at]) for at in picked})
        low, high = found.corrected.low, found.corrected.high
        held = low is not None and high is not None and low <= 0.8 <= high
        sentence = judge_sentence(found)
        return held, not sentence.startswith("People would")

    return once


def judged_report(judged: Array) -> EvalReport:
    """A run with these verdicts of a judge."""
    results = [
        EvalResult(
            key=TrialKey("r", "x", f"s{at}"),
            ordinal=0,
            outcome="scored",
            score=Score(float(value)),
            sample=Sample(f"s{at}", at),
        )
        for at, value in enumerate(judged)
    ]
    return EvalReport(results=results)


def gated_complaints(labels: int, *, n: int = 1_000) -> Callable[[Rng], bool]:
    """One run: whether a floor passes that is missed by 5 points, by labels of praise that nobody drew.

    Right answers have three times the chance of a label.
    """

    def once(rng: Rng) -> bool:
        truth = (rng.random(n) < 0.8).astype(np.float64)
        judged = verdicts(rng, truth, 0.9, 0.6)
        chance = np.where(truth == 1, 3.0, 1.0)
        people = np.full((n, 1), np.nan)
        picked = rng.choice(n, labels, replace=False, p=chance / chance.sum())
        people[picked, 0] = truth[picked]
        column = LabelColumn("passed", people, undrawn=UNKNOWN_DRAW)
        return gate_columns(
            replace(Columns.of({"passed": judged}), labels=column), GateRules(min_pass_rate=0.85)
        ).passed

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
    for labels in (30, 100):
        yield Design(
            "rate corrected by labels of complaints",
            "coverage",
            COVERAGE,
            share_or_warned(complaints(labels)),
            cell=f"{labels} labels of 400 trials, wrong answers three times as likely",
            quick=6 if labels == 30 else 0,
        )
        yield Design(
            "floor missed by 5 points, labels of praise",
            "PASS",
            GATE_ERRORS,
            share(gated_complaints(labels)),
            cell=f"{labels} labels of 1,000 trials, right answers three times as likely",
            quick=100 if labels == 100 else 0,
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
