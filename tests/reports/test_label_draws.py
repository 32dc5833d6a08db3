"""Labels of drawn trials, and reviews of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairtrial import EvalReport, EvalResult, GateRules, Label, Sample, Score, TrialKey, calibrate, compare, gate, stats
from fairtrial.cli.label_file import read_labels
from fairtrial.reports.calibrate.document import judge_sentence
from fairtrial.reports.figures.labels import draw_trials, smallest
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.store import RunRecord, RunStore, open_store
from fairtrial.store.notes import SKIP, ReviewNote, write_notes

# What people would say is only known of trials that were drawn at random; of others every sentence has an if.


N, DRAWN = 300, 60
TRUTH = np.arange(N) % 5 != 0
JUDGED = TRUTH | (np.arange(N) % 15 == 0)
IF = "If the labels were drawn at random, people would pass"


def judged_report(judged: Sequence[bool] = JUDGED.tolist(), experiment: str = "baseline") -> EvalReport:
    results = [
        EvalResult(
            key=TrialKey("r", experiment, f"q{at}"),
            ordinal=0,
            outcome="scored",
            score=Score(float(passed)),
            sample=Sample(f"q{at}", at),
        )
        for at, passed in enumerate(judged)
    ]
    return EvalReport(results=results)


@pytest.fixture
def reviewed() -> tuple[EvalReport, ReviewNote, list[int]]:
    """A run with a review, and the trials that it draws."""
    report = judged_report()
    review = ReviewNote("helpful", "Is it?", "", ("baseline",), "pass_fail", "00000000000000ab", DRAWN)
    report.store.update_run(report.run_id, notes=write_notes(reviews=(review,)))
    drawn = sorted(smallest(np.arange(N, dtype=np.int64), review).tolist())
    return EvalReport(report.store, report.store.get_run(report.run_id)), review, drawn


def answer(report: EvalReport, places: Sequence[int], name: str = "helpful", value: Any = None) -> None:
    for at in places:
        key = TrialKey(report.run_id, "baseline", f"q{at}")
        report.store.label(Label(key, name, bool(TRUTH[at]) if value is None else value, "ann"))


def people(places: Sequence[int]) -> dict[str, bool]:
    return {f"q{at}": bool(TRUTH[at]) for at in places}


def test_labels_of_a_review_say_what_people_would_say(reviewed: tuple[EvalReport, ReviewNote, list[int]]) -> None:
    report, _, drawn = reviewed
    answer(report, drawn)
    found = calibrate(report)
    assert found.drawn is True
    assert "\nPeople would pass " in str(found)
    assert judge_sentence(found).startswith("People would pass ")
    assert found.notes == ("The review 'helpful' drew the trials with labels at random.",)
    assert found.to_json()["drawn"] is True
    assert gate(report, {"min_pass_rate": 0.6}, labels=True).status == "pass"


def test_other_labels_have_an_if_in_every_sentence_and_decide_no_gate() -> None:
    report, labels = judged_report(), people(range(DRAWN))
    found = calibrate(report, labels)
    assert found.drawn is False
    assert IF in " ".join(str(found).split())
    assert judge_sentence(found).startswith(IF)
    assert any("How the trials with labels were chosen is not known." in line for line in found.warnings)
    for rules in ({"min_pass_rate": 0.6}, {"min_pass_rate": 0.99}):
        undecided = gate(report, rules, labels=labels)
        assert (undecided.status, undecided.checks[0].drawn) == ("inconclusive", False)
        assert "cannot be decided: how the trials with labels were chosen is not known" in undecided.reasons[0]
        assert "--labels-drawn" in undecided.reasons[0]
    declared = gate(report, {"min_pass_rate": 0.6}, labels=labels, labels_drawn=True)
    assert (declared.status, declared.checks[0].drawn) == ("pass", True)
    assert gate(report, {"min_pass_rate": 0.6}).checks[0].drawn is None


def test_a_margin_by_labels_that_nobody_drew_is_undecided() -> None:
    old, new = judged_report(experiment="old"), judged_report(experiment="new")
    labels = {name: people(range(200)) for name in ("old", "new")}
    found = gate(new, {"margin": 0.2}, old, labels=labels)
    assert (found.status, found.checks[0].drawn) == ("inconclusive", False)
    assert "how the trials with labels were chosen is not known" in found.reasons[0]
    assert gate(new, {"margin": 0.2}, old, labels=labels, labels_drawn=True).status == "pass"
    warnings = compare(old, new, labels=labels).candidates[0].warnings
    assert sum("How the trials with labels were chosen" in line for line in warnings) == 1


def test_weights_a_draw_by_verdict_and_labels_of_all_trials_need_no_declaration() -> None:
    report = judged_report()
    keys = [TrialKey(report.run_id, "baseline", f"q{at}") for at in range(100)]
    weighted = [Label(key, "", bool(TRUTH[at]), weight=1 + at % 2) for at, key in enumerate(keys)]
    assert calibrate(report, weighted).drawn
    assert calibrate(report, people(range(DRAWN)), by_verdict=True).drawn
    everything = calibrate(report, people(range(N)))
    assert everything.drawn
    assert "People would pass 80.0%" in str(everything)


def test_labels_beside_the_draw_of_a_review_are_no_random_sample(
    reviewed: tuple[EvalReport, ReviewNote, list[int]],
) -> None:
    report, _, drawn = reviewed
    answer(report, [*drawn, next(at for at in range(N) if at not in drawn)])
    found = calibrate(report)
    assert not found.drawn
    assert "Some of the labels are of trials that the review 'helpful' has not drawn." in found.warnings


@pytest.mark.parametrize(("skips", "enough"), [(3, True), (4, False)])
def test_a_review_of_which_many_trials_were_skipped_is_no_random_sample(
    reviewed: tuple[EvalReport, ReviewNote, list[int]], skips: int, enough: bool
) -> None:
    report, _, drawn = reviewed
    answer(report, drawn[skips:])
    answer(report, drawn[: skips + 1], SKIP + "helpful", "cannot tell")  # The last of them was answered after all.
    found = calibrate(report)
    assert found.drawn is enough
    assert enough or "4 of the 60 trials that the review 'helpful' drew were skipped" in found.warnings[0]


def test_labels_of_a_review_that_come_by_file_must_be_nearly_all_of_them(
    reviewed: tuple[EvalReport, ReviewNote, list[int]], tmp_path: Any
) -> None:
    report, _, drawn = reviewed
    for some, enough in ((drawn, True), (drawn[: DRAWN // 2], False)):
        rows = "\n".join(f"q{at},{'pass' if TRUTH[at] else 'fail'},helpful" for at in some)
        (tmp_path / "labels.csv").write_text(f"id,label,review\n{rows}\n")
        labels = read_labels(tmp_path / "labels.csv", [report["baseline"]])
        assert calibrate(report, labels).drawn is enough


def test_a_rescored_run_has_the_draw_of_its_original(reviewed: tuple[EvalReport, ReviewNote, list[int]]) -> None:
    report, _, drawn = reviewed
    answer(report, drawn)
    store = report.store
    again = store.create_run(replace(report.run, run_id="again", parent_run=report.run_id, notes={}))
    results = [replace(one, key=one.key._replace(run_id="again")) for one in store.results(report.run_id)]
    store.commit("again", results, dict(store.samples(report.run_id)))
    assert calibrate(EvalReport(store, again)).drawn


def test_labels_by_id_are_taken_wherever_one_experiment_can_be_meant() -> None:
    report, labels = judged_report(), people(range(DRAWN))
    rules = GateRules(min_pass_rate=0.6)
    plain, nested = (gate(report, rules, labels=one, labels_drawn=True) for one in (labels, {"baseline": labels}))
    assert plain.checks == nested.checks
    assert calibrate(report, labels).corrected == calibrate(report, {"baseline": labels}).corrected


def test_labels_that_all_pass_are_a_rate_of_exactly_one() -> None:
    judged = np.arange(137) % 3 > 0
    found = calibrate(judged_report(judged.tolist()), {f"q{at}": True for at in range(50)}, drawn=True)
    assert found.corrected.value == 1.0
    assert "People would pass 100.0%" in str(found)


def test_an_open_gate_names_the_labels_that_it_takes() -> None:
    report = judged_report((np.arange(2000) % 10 > 0).tolist())
    labels = {f"q{at}": at % 10 > 0 if at % 7 else at % 3 > 0 for at in range(40)}
    found = gate(report, {"min_pass_rate": 0.8}, labels=labels, labels_drawn=True).checks[0]
    assert found.status == "inconclusive"
    assert found.needed_labels is not None
    assert 40 < found.needed_labels < 1000
    assert "If the true pass rate is 85.0%, it takes about " in found.reason
    assert " labels to show at least 80.0%." in found.reason
    both = dict.fromkeys(("old", "new"), labels)
    old, new = (judged_report((np.arange(2000) % 10 > 0).tolist(), experiment=name) for name in both)
    margin = gate(new, {"margin": 0.02}, old, labels=both, labels_drawn=True).checks[0]
    assert "If the two are truly equal, it takes about " in margin.reason
    assert " labels of each side to show that within 2.0 points." in margin.reason
    small = gate(judged_report(), {"min_pass_rate": 0.78}, labels=people(range(DRAWN)), labels_drawn=True).checks[0]
    assert small.needed_labels is None
    assert "even with every trial labelled, it takes more samples" in small.reason


def test_the_labels_that_are_named_are_enough_in_most_runs() -> None:
    rng = np.random.default_rng(5)
    rate, n, labels = 0.85, 2000, 60
    passed = runs = 0
    for _ in range(60):
        truth = rng.random(n) < rate
        judged = np.where(truth, rng.random(n) < 0.9, rng.random(n) < 0.3).astype(float)

        def estimate(size: int, truth: Any = truth, judged: Any = judged) -> stats.CorrectedMean:
            some = np.where(np.arange(n) < size, truth, np.nan).astype(float)
            return stats.corrected_mean(stats.JudgedTrials(judged, some), exact=True)

        pilot = estimate(labels)
        judge = stats.mean_interval(judged).se
        needed = stats.labels_to_detect(labels, pilot.se, judge, 0.05)
        assert isinstance(needed, int)
        interval = estimate(min(needed, n)).interval
        runs += 1
        passed += interval is not None and interval.low >= 0.8
    assert passed / runs >= 0.7


# Labels of drawn trials correct a judge; labels of trials that somebody picked are never used.


TRIALS, REVIEWED, REVIEWS = 1_500, 60, 40


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    made = open_store(tmp_path / "runs.db")
    yield made
    made.close()


def judged_run(store: RunStore, truth: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> RunRecord:
    """A run whose judge passes what is right, and a third of what is wrong."""
    rng = np.random.default_rng(3)
    plan = RunRecord(
        run_id="judged", suite="s", dataset_name="d", dataset_version="1", dataset_fingerprint="f" * 32,
        dataset_size=TRIALS, experiments=("only",), repeats=1, evaluator="judge", created_at=1.0, status="running",
    )  # fmt: skip
    run = store.create_run(plan)
    results = [
        EvalResult(
            key=TrialKey("judged", "only", f"s{at:04}"),
            ordinal=at,
            outcome="scored",
            score=Score(float(right or rng.random() < 0.33)),
            output="x",
            execution=at + 1,
        )
        for at, right in enumerate(truth)
    ]
    store.commit("judged", results, {at: Sample(f"s{at:04}", at) for at in range(TRIALS)})
    store.update_run("judged", status="finished", finished_at=2.0)
    return store.get_run(run.run_id)


@pytest.mark.long
@pytest.mark.proves("R115")
def test_the_rate_corrected_by_a_review_holds_the_truth_and_picked_labels_change_nothing(store: RunStore) -> None:
    truth = np.random.default_rng(4).random(TRIALS) < 0.7
    run = judged_run(store, truth)
    columns = TrialColumns.open(store, run)
    report: EvalReport = EvalReport(store, run)
    held = 0
    for number in range(REVIEWS):
        name = f"review {number}"
        review = ReviewNote(name, "?", "", ("only",), "pass_fail", f"{number * 7919 + 1:016x}", REVIEWED)
        for at in draw_trials(columns, review).ordinals:
            store.label(Label(TrialKey("judged", "only", f"s{at:04}"), name, bool(truth[at]), "ann"))
        before = calibrate(report["only"], name=name)
        if number == 0:
            for at in np.flatnonzero(~truth)[:200].tolist():
                store.label(Label(TrialKey("judged", "only", f"s{at:04}"), f"~picked:{name}", False, "ann"))
            assert calibrate(report["only"], name=name).to_json() == before.to_json()
        assert before.labelled == REVIEWED
        assert before.corrected.low is not None
        assert before.corrected.high is not None
        held += bool(before.corrected.low <= truth.mean() <= before.corrected.high)
        assert before.judge_rate.value is not None
        assert before.judge_rate.value - truth.mean() > 0.07
    # 93% of 40 less three standard errors.
    assert held / REVIEWS >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / REVIEWS)
