"""Cases that print the sentences of leaderboards, calibrations, reports and preferences, and of gates by labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fairtrial import AnalysisPlan, Label, Metric, Sample, Score, TrialKey, calibrate, compare, gate, open_store, stats
from fairtrial.data.splits import SplitOrigin
from fairtrial.reports import EvalReport
from fairtrial.reports.calibrate.document import judge_sentence
from fairtrial.reports.compare.looks import TestLooks
from fairtrial.reports.figures.labels import smallest
from fairtrial.reports.figures.metrics import FAILED, MISSING, SCORED
from fairtrial.reports.leaderboard.leaderboard import rank_columns
from fairtrial.reports.plan.plan import PlanRequest, TrialCosts, plan_columns
from fairtrial.reports.plan.test_split import TestSplit
from fairtrial.stats import Preference, bradley_terry, heterogeneity, signflip_interval
from fairtrial.store.notes import SKIP, BatchesNote, ReviewNote, UserNote, write_notes
from fairtrial.trials import EvalResult, StopWhen
from tests.reports.build import stored
from tests.reports.sentence_cases import case, columns, draw, passes, shown, stopped
from tests.reports.sides import planned


def board(*sides: Any, **given: Any) -> Iterator[str]:
    yield from shown(rank_columns({"d": list(sides)}, **given))


@case
def leaderboards() -> Iterator[str]:
    yield from board(passes("old", 20, 20), passes("new", 20, 20))
    yield from board(*(passes(f"s{place}", 20, 20) for place in range(8)))
    yield from board(passes("old", 10, 200), passes("new", 180, 200), baseline="old")
    groups = [columns(f"a{place}", draw(place, 0.8, 200), "passed") for place in range(6)]
    yield from board(*groups, passes("low", 10, 200))
    sides = (("a", 0.8), ("b", 0.65), ("c", 0.6))
    for seed in range(12):
        yield from board(
            *(columns(name, draw(seed + 50 * at, rate, 60), "passed") for at, (name, rate) in enumerate(sides))
        )
    yield from board(passes("old", 3, 4), passes("new", 2, 4))
    yield from board(passes("old", 3, 9, clusters=[0, 1, 2] * 3), passes("new", 2, 9))


@case
def leaderboards_that_leave_samples_out() -> Iterator[str]:
    names = [f"s{place}" for place in range(101)]
    outcomes = np.where(np.arange(100) < 10, MISSING, SCORED)
    yield from board(passes("old", 50, 100, ids=names[1:]), passes("new", 70, 100, ids=names[:100], outcomes=outcomes))
    twice = ["s0", "s0", "s1", "s1", *names[2:98]]
    yield from board(passes("old", 50, 100, ids=twice), passes("new", 70, 100, ids=names[:100]))
    crashed = np.where(np.arange(100) < 30, FAILED, SCORED)
    yield from board(passes("old", 100, 100, outcomes=crashed), passes("new", 80, 100))
    fees = [
        columns(name, draw(at, 0.5, 100) + 1, "fee", outcomes=crashed, directions={"fee": False})
        for at, name in ((1, "old"), (2, "new"))
    ]
    yield from board(*fees, metric="fee")
    yield from shown(rank_columns({one: [passes("old", 50, 100), passes("new", 90, 100)] for one in ("d", "e")}))


# Judges and labels.

TRUTH = np.arange(300) % 5 != 0
JUDGED = TRUTH | (np.arange(300) % 15 == 0)


def judged(verdicts: Sequence[Any] = JUDGED.tolist(), experiment: str = "new", **metadata: str) -> EvalReport:
    results = [
        EvalResult(
            key=TrialKey("r", experiment, f"q{at}"),
            ordinal=0,
            outcome="scored" if verdict is not None else "scorer_error",
            score=None
            if verdict is None
            else Score(float(verdict), metrics=[Metric("rating", float(verdict), metadata=metadata)]),
            error=None if verdict is not None else "the judge broke",
            sample=Sample(f"q{at}", at),
        )
        for at, verdict in enumerate(verdicts)
    ]
    return EvalReport(results=results)


def people(places: Sequence[int]) -> dict[str, bool]:
    return {f"q{at}": bool(TRUTH[at]) for at in places}


def calibrated(report: EvalReport, *given: Any, **how: Any) -> Iterator[str]:
    found = calibrate(report, *given, **how)
    yield from shown(found)
    yield judge_sentence(found)


@case
def judges_against_labels() -> Iterator[str]:
    yield from calibrated(judged(), people(range(60)), drawn=True)
    yield from calibrated(judged(judge_model="m", same_family="n"), people(range(60)))
    generous = (np.arange(300) % 50 > 0).tolist()
    yield from calibrated(judged(generous), {f"q{at}": at % 2 == 0 for at in range(100)}, drawn=True)
    fails = np.flatnonzero(~JUDGED)[:40].tolist()
    yield from calibrated(judged(), people(fails))
    halves = {f"q{at}": 0.4 + 0.2 * (at % 2) for at in range(40)}
    yield from calibrated(judged(), halves)
    graded = [0.2 + 0.6 * (at % 7) / 7 for at in range(100)]
    yield from calibrated(judged(graded), {f"q{at}": 0.5 for at in range(40)}, metric="value", drawn=True)
    yield from calibrated(judged([1.0] * 100), people(range(9)), drawn=True)
    yield from calibrated(judged(), people(np.flatnonzero(JUDGED)[:40].tolist()), by_verdict=True)


@case
def labels_of_several_people() -> Iterator[str]:
    report = judged([1, 1, 0, 0, 1, 1, None])
    votes = [("q0", 1, "ann"), ("q0", 1, "bob"), ("q1", 1, "ann"), ("q1", 0, "bob"), ("q6", 1, ""), ("q99", 1, "")]
    for sample, value, who in votes:
        report.store.label(Label(TrialKey(report.run_id, "new", sample), "ok", value, who))
    yield from calibrated(report)


@case
def reviews() -> Iterator[str]:
    review = ReviewNote("helpful", "Is it?", "", ("new",), "pass_fail", "00000000000000ab", 60)
    drawn = sorted(smallest(np.arange(300, dtype=np.int64), review).tolist())
    other = next(at for at in range(300) if at not in drawn)
    for answered, skipped in ((drawn, []), ([*drawn, other], []), (drawn[9:], drawn[:9])):
        report = judged()
        report.store.update_run(report.run_id, notes=write_notes(reviews=(review,)))
        report = EvalReport(report.store, report.store.get_run(report.run_id))
        for at, name in (*((at, "helpful") for at in answered), *((at, SKIP + "helpful") for at in skipped)):
            value: Any = bool(TRUTH[at]) if name == "helpful" else "cannot tell"
            report.store.label(Label(TrialKey(report.run_id, "new", f"q{at}"), name, value, "ann"))
        yield from calibrated(report)
        if skipped:
            key = partial(TrialKey, report.run_id, "new")
            some = [Label(key(f"q{at}"), "helpful", bool(TRUTH[at]), "ann") for at in drawn[:30]]
            yield from calibrated(report, some)


@case
def comparisons_and_gates_by_labels() -> Iterator[str]:
    old, new = judged(experiment="old"), judged(experiment="new")
    labels = {name: people(range(60)) for name in ("old", "new")}
    for drawn in (True, False):
        yield from shown(compare(old, new, labels=labels, labels_drawn=drawn, metrics=["passed", "value"]))
        yield from shown(gate(new, {"margin": 0.2, "min_pass_rate": 0.78}, old, labels=labels, labels_drawn=drawn))
    large = {name: judged((np.arange(900) % 10 > 0).tolist(), experiment=name) for name in labels}
    wrong = {f"q{at}": at % 10 > 0 if at % 7 else at % 3 > 0 for at in range(40)}
    both = dict.fromkeys(labels, wrong)
    yield from shown(
        gate(large["new"], {"margin": 0.02, "min_pass_rate": 0.8}, large["old"], labels=both, labels_drawn=True)
    )
    passed = people(np.flatnonzero(JUDGED)[:6].tolist())
    yield from shown(compare(old, new, labels=dict.fromkeys(labels, passed), labels_drawn=True))


# Reports.


@case
def reports() -> Iterator[str]:
    rates = np.random.default_rng(4).random((40, 3)) < np.repeat([0.95, 0.4], 20)[:, None]
    yield from shown(stored({"new": rates.astype(float).tolist()}))
    yield from shown(
        stored({"new": [1.0] * 20, "old": [0.0] * 20}, metadata=[{"cluster": at // 2} for at in range(20)])
    )
    yield from shown(stored({"new": [1.0, *["task_error"] * 3, "timeout"]}, status="finished"))
    yield from shown(stored({"new": [1.0, 0.0, "scorer_error"]}, status="unscored"))
    yield from shown(stored({"new": [1.0, 0.0]}, notes={"code_changed": True}))
    yield from shown(_with_endings())
    parts = [[Metric("polite", 1.0, passed=at > 2), Metric("turns", 7.0)] for at in range(48)]
    ended = [{"cluster": at % 12} for at in range(48)]
    yield from shown(stored([Score(1.0, metrics=part) for part in parts], metadata=ended))
    grouped = [{"cluster": at // 5} for at in range(50)]
    yield from shown(stored({"new": (np.arange(50) % 7 > 0).astype(float).tolist()}, metadata=grouped))


def _with_endings() -> EvalReport:
    report = stored({"new": [1.0] * 4})
    store, run = report.store, replace(report.run, run_id="endings")
    store.create_run(run)
    ended: dict[str, Any] = {"cut_off_calls": 1, "refused_calls": 1, "unknown_endings": {"weird": 2}}
    results = [replace(one, key=one.key._replace(run_id=run.run_id), **ended) for one in store.results(report.run_id)]
    store.commit(run.run_id, results, dict(store.samples(report.run_id)))
    return EvalReport(store, store.get_run(run.run_id))


@case
def runs_of_two_code_versions() -> Iterator[str]:
    report = stored({"old": [1.0] * 30, "new": [0.0] * 30}, notes={"code_changed": True})
    yield from shown(compare(report["old"], report["new"]))


@case
def early_stops_with_missing_outcomes() -> Iterator[str]:
    yield from shown(stopped(StopWhen(decides=("old", "new")), 0.5, 0.6, n=20, unscored=True))


@case
def reports_with_earlier_runs() -> Iterator[str]:
    chances = np.random.default_rng(3).beta(0.4, 0.3, 400)
    store = open_store("memory:")

    def ran(run_id: str, at: float, n: int, plan: AnalysisPlan | None) -> EvalReport:
        verdicts = (np.random.default_rng(int(at)).random(n) < chances[:n]).astype(float).tolist()
        made: dict[str, Any] = {"run_id": run_id, "store": store, "created_at": at, "finished_at": at + 1}
        return stored(verdicts, **made) if plan is None else planned(verdicts, plan, **made)

    ran("old", 1.0, 400, None)
    part = ran("r2", 10.0, 120, AnalysisPlan(history=1))
    yield from shown(part)
    yield from (one.history.method or "" for one in part["baseline"].estimates if one.history is not None)
    yield from shown(ran("r3", 20.0, 10, AnalysisPlan(history=("old",))))
    yield from shown(ran("r4", 0.0, 120, AnalysisPlan(history=("old", "nowhere"))))
    yield from shown(ran("r5", 0.0, 120, AnalysisPlan(history=3)))


# Preferences, and functions of `stats` that are called directly.


@case
def preferences() -> Iterator[str]:
    for given in (
        [Preference("a", "b", "a", place) for place in range(40)],
        [("a", "b", "a"), ("b", "c", "b"), ("b", "a", "a"), ("c", "b", "b"), ("a", "c", "a")],
        [
            *[
                ("a", "b", "a"),
                ("b", "a", "b"),
                ("c", "d", "c"),
                ("d", "c", "d"),
                ("a", "c", "a"),
                ("b", "d", "b"),
                ("c", "a", "a"),
            ]
            * 3
        ],
    ):
        found = bradley_terry(given)
        assert isinstance(found, stats.BradleyTerry)
        yield from found.notes


@case
def functions_of_stats() -> Iterator[str]:
    for n, k in ((1, 2), (3, 4)):
        undefined = stats.pass_at_k(n, 1, k)
        assert isinstance(undefined, stats.Undefined)
        yield undefined.reason
    yield stats.prediction_powered_mean([1.0], [1.0], []).reason or ""
    yield from stats.prediction_powered_mean([1.0] * 5, [1.0] * 5, [1.0] * 9).notes
    overshot = {"true_passes": 2, "positives": 9, "true_fails": 9, "negatives": 9}
    yield from stats.rogan_gladen(90, 100, **overshot).notes
    yield from (
        stats.noninferiority(values, [0.5, 0.4, 0.6][: len(values)], margin=0.1).method
        for values in ([0.5], [0.4, 0.6, 0.6])
    )
    grouped = (np.arange(60) % 7 > 0).astype(float)
    equal = heterogeneity(grouped, np.arange(60) % 2, clusters=np.arange(60) % 3)
    few = signflip_interval([0.1])
    assert isinstance(equal, stats.Undefined)
    assert isinstance(few, stats.Undefined)
    yield from (equal.reason, few.reason)
    several = signflip_interval([0.1, 0.2, 0.3])
    assert isinstance(several, stats.Undefined)
    yield several.reason
    rows = np.where(np.arange(50) < 3, 0.0, 1.0)
    yield from stats.mean_interval(rows, clusters=np.arange(50) % 12, bounds=(0.0, 1.0)).notes
    means = [stats.mean_interval(np.arange(size), bounds=None) for size in (9.0, 7.0)]
    yield str(stats.weighted_mean(means, [1.0, 1.0]).interval)


@case
def looks_at_a_test_split() -> Iterator[str]:
    for numbers, spends, fresh, error in (
        ((1,), False, None, ""), ((3,), True, None, ""), ((2, 3), False, None, "it is read-only"),
        ((10,), False, None, ""), ((12,), True, 400, ""),
    ):  # fmt: skip
        yield from TestLooks("f" * 32, 80, numbers, 0.05, spends, fresh, error).sentences


@case
def what_a_test_split_can_show() -> Iterator[str]:
    for spends, detectable in ((True, 0.3), (False, None)):
        yield TestSplit(41, 2, spends).gain("passed", 0.05, 0.8, 2, detectable).sentence


@case
def runs_on_a_split_and_in_batches() -> Iterator[str]:
    origin = SplitOrigin("test", "f" * 32, 41, "f" * 32, 41)
    for number in (1, 8):
        notes = write_notes(split=origin, batches=BatchesNote(9, number, 0.5, number, 0.125))
        yield from shown(stored([1.0, 0.0], notes=notes))
    for turns, batched in ((1, False), (3, False), (3, True)):
        costs = TrialCosts(20, 100.0, 0.01, 900.0, 10, True, turns=turns, batched=batched)
        yield from shown(plan_columns([], PlanRequest(difference=0.05), costs=costs))


@case
def broken_users() -> Iterator[str]:
    # More on one side; many on both sides; few.
    for numbers in ((0, 20), (20, 22), (2, 2)):
        reports = []
        for place, broken in enumerate(numbers):
            trials = [["user_error" if n < broken else float(n % 2)] for n in range(60)]
            notes = write_notes(users=[UserNote("baseline", "m", f"0d{place}")])
            reports.append(stored(trials, run_id=f"r{place}", notes=notes))
            yield from shown(reports[-1])
        yield from shown(compare(*reports, other_users=True))
