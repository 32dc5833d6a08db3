"""Labels of drawn trials correct a judge; labels of trials that somebody picked are never used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fairtrial import EvalReport, EvalResult, Label, Sample, Score, TrialKey, calibrate, open_store
from fairtrial.reports.figures.labels import draw_trials
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.store import RunRecord, RunStore
from fairtrial.store.notes import ReviewNote

TRIALS, DRAWN, REVIEWS = 1_500, 60, 40


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
        review = ReviewNote(name, "?", "", ("only",), "pass_fail", f"{number * 7919 + 1:016x}", DRAWN)
        for at in draw_trials(columns, review).ordinals:
            store.label(Label(TrialKey("judged", "only", f"s{at:04}"), name, bool(truth[at]), "ann"))
        before = calibrate(report["only"], name=name)
        if number == 0:
            for at in np.flatnonzero(~truth)[:200].tolist():
                store.label(Label(TrialKey("judged", "only", f"s{at:04}"), f"~picked:{name}", False, "ann"))
            assert calibrate(report["only"], name=name).to_json() == before.to_json()
        assert before.labelled == DRAWN
        assert before.corrected.low is not None
        assert before.corrected.high is not None
        held += bool(before.corrected.low <= truth.mean() <= before.corrected.high)
        assert before.judge_rate.value is not None
        assert before.judge_rate.value - truth.mean() > 0.07
    # 93% of 40 less three standard errors.
    assert held / REVIEWS >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / REVIEWS)
