"""Samples are pairs if their id means the same on both sides: the same input and the same expected value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy

from fairtrial import EvalReport, EvalResult, Sample, Score, TrialKey, compare, gate, leaderboard, open_store, plan
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.reports.compare.pairing import pair
from fairtrial.reports.figures.columns import Columns, SampleContents, compare_contents
from fairtrial.store.schema import samples as samples_table


def report(
    passed: Sequence[bool],
    *,
    inputs: Mapping[int, Any] | None = None,
    expected: Mapping[int, Any] | None = None,
    topics: int = 1,
    known: bool = True,
    experiment: str = "baseline",
) -> EvalReport:
    results = []
    for place, value in enumerate(passed):
        asked = {"question": place, "of": "a form"} | (inputs or {}).get(place, {})
        sample = Sample(f"q{place}", asked, (expected or {}).get(place, "yes"), {"topic": place % topics})
        key = TrialKey("r", experiment, sample.id)
        given: dict[str, Any] = {"sample": sample} if known else {"sample_id": sample.id}
        results.append(EvalResult(key=key, ordinal=0, outcome="scored", score=Score(float(value)), **given))
    return EvalReport(results=results, dataset_name="data")


SAME = [True] * 180 + [False] * 20


def test_ids_that_mean_other_questions_are_no_pairs_and_a_gate_cannot_pass_on_them() -> None:
    old = report(SAME)
    new = report([True] * 200, inputs={place: {"question": -1 - place} for place in range(200)})
    found = gate(new, {"margin": 0.02}, baseline=old)
    assert (found.status, found.exit_code) == ("inconclusive", 3)
    assert "no sample in common" in found.reasons[0]
    compared = compare(old, new).candidates[0]
    assert (compared.matched, compared["passed"].n, compared.verdict) == (0, 0, "unknown")
    assert "they have no sample in common" in compared["passed"].sentence
    said = "Changed between the sides: the input of 200 samples (q0, q1, q2 and 197 more)."
    assert any(said in line for line in compared.warnings)


def test_changed_samples_are_named_by_what_changed_and_left_out_of_every_figure() -> None:
    old = report(SAME)
    new = report(SAME, inputs={7: {"of": "a letter"}, 9: {"of": "a letter"}}, expected={9: "no", 4: "no"})
    found = compare(old, new)
    one = found.candidates[0]
    assert (one.matched, one["passed"].n, one["passed"].missing) == (197, 197, 3)
    assert one.changed is not None
    assert (one.changed.inputs, one.changed.expected) == (2, 1)
    assert (one.changed.input_ids, one.changed.expected_ids) == (("q7", "q9"), ("q4",))
    text = " ".join(str(found).split())
    assert "197 samples on both sides; none is on one side only; 3 changed between the sides" in text
    assert "the input of 2 samples (q7, q9) and the expected value of 1 sample (q4). Changed samples are not" in text
    assert found.to_json()["candidates"][0]["changed"] == {  # type: ignore[index, call-overload]
        "inputs": 2, "expected": 1, "input_ids": ["q7", "q9"], "expected_ids": ["q4"],
    }  # fmt: skip


def test_changed_samples_are_taken_at_their_worst_by_as_good_as_and_by_gates() -> None:
    old = report([True] * 400)
    few, many = (dict.fromkeys(range(size), "no") for size in (2, 18))
    for changed, verdict, status in ((few, "as good as", "pass"), (many, "no detectable difference", "inconclusive")):
        new = report([True] * 400, expected=changed)
        found = compare(old, new).candidates[0]["passed"]
        assert (found.verdict, found.missing) == (verdict, len(changed))
        gated = gate(new, {"margin": 0.05}, baseline=old)
        assert (gated.status, gated.checks[0].missing) == (status, len(changed))
        assert f"whatever the {len(changed)} missing would have been" in gated.checks[0].reason


def test_a_gate_says_how_many_changed_samples_are_too_many() -> None:
    new = report([True] * 200, expected=dict.fromkeys(range(30), "no"))
    reason = gate(new, {"margin": 0.02}, baseline=report([True] * 200)).reasons[0]
    assert "30 changed samples are among them. Run both sides on the same data." in reason


def test_a_slice_counts_the_changed_samples_that_belong_to_it() -> None:
    old, new = report(SAME, topics=4), report(SAME, topics=4, expected={1: "no", 5: "no"})
    found = compare(old, new, slice_by="topic").candidates[0]
    assert [part["passed"].n for part in found.slices] == [50, 48, 50, 50]
    assert [part["passed"].missing for part in found.slices] == [0, 2, 0, 0]


def test_other_metadata_other_samples_and_another_order_of_keys_change_nothing() -> None:
    old = report(SAME)
    new = report([*SAME, True], topics=3, inputs={3: {"of": "a form", "question": 3}})
    found = compare(old, new).candidates[0]
    assert (found.matched, found.changed, found.only_candidate) == (200, None, 1)
    assert not any("must mean the same" in line for line in found.warnings)
    first = report([True], expected={0: {"a": 1, "b": [2]}})
    assert compare(first, report([True, False], expected={0: {"b": [2], "a": 1}})).candidates[0].matched == 1


def test_samples_whose_inputs_are_not_known_are_paired_by_id_and_that_is_said() -> None:
    found = compare(report(SAME), report(SAME, known=False)).candidates[0]
    assert (found.matched, found.changed) == (200, None)
    assert any("the inputs of 200 samples are not stored: an id must mean the same" in line for line in found.warnings)


def test_a_leaderboard_leaves_changed_samples_out_and_allows_for_them() -> None:
    old = report([True] * 400, experiment="old")
    for changed, verdict in ((4, "as good as"), (30, "no detectable difference")):
        new = report([True] * 400, expected=dict.fromkeys(range(changed), "no"), experiment="new")
        found = leaderboard(old, new, baseline="old")
        suite = found.suites[0]
        assert (found.n, suite.missing, suite.changed and suite.changed.expected) == (400 - changed, changed, changed)
        assert any(f"the expected value of {changed} samples (q0, q1, q2 and " in line for line in found.warnings)
        against = found["new"].against_baseline
        assert against is not None
        assert against.verdict == verdict


def test_a_plan_does_not_learn_from_changed_samples() -> None:
    old, unequal = report(SAME), (*range(20), *range(180, 200))
    unchanged, changed = (
        report(SAME[::-1], inputs={place: {"of": form} for place in unequal}) for form in ("a form", "a letter")
    )
    few, many = plan(old, changed).samples, plan(old, unchanged).samples
    assert few is not None
    assert many is not None
    assert 2 * few < many


@pytest.mark.parametrize("address", ["memory:", "file"])
def test_runs_of_stores_are_compared_by_content_even_from_before_inputs_were_hashed(
    address: str, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "runs.db") if address == "file" else address)
    saved = []
    for made in (report(SAME), report(SAME, inputs={8: {"of": "a letter"}}, expected={2: {"a": 1}})):
        run = store.create_run(made.run)
        results = list(made.store.results(run.run_id))
        store.commit(run.run_id, results, dict(made.store.samples(run.run_id)))
        saved.append(EvalReport(store, store.get_run(run.run_id)))
    assert pairs_of(*saved) == (198, ("q8",), ("q2",))
    if address == "file":
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'runs.db'}")
        with engine.begin() as connection:
            first = sqlalchemy.select(sqlalchemy.func.min(samples_table.c.dataset)).scalar_subquery()
            connection.execute(samples_table.update().where(samples_table.c.dataset == first).values(input_hash=None))
        assert pairs_of(*saved) == (198, ("q8",), ("q2",))
    store.close()


def pairs_of(old: EvalReport, new: EvalReport) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    found = compare(old, new).candidates[0]
    assert found.changed is not None
    return found.matched, found.changed.input_ids, found.changed.expected_ids


def test_what_is_unknown_differs_from_nothing() -> None:
    sides = [[1, UNKNOWN, 3, UNKNOWN], [1, 2, UNKNOWN, UNKNOWN], [1, 5, 3, UNKNOWN]]
    contents = [SampleContents(lambda row=row: (np.array(row), np.full(4, 0))) for row in sides]  # type: ignore[misc]
    found = compare_contents(contents)
    assert found.inputs.tolist() == [False, True, False, False]
    assert found.unknown == 2


def test_contents_are_not_read_for_runs_of_one_dataset() -> None:
    def never() -> Any:
        raise AssertionError("read")

    sides = [
        Columns("a", ["x"], 1, np.ones((1, 1), dtype=np.int8), {}, fingerprint="f", contents=SampleContents(never))
        for _ in range(2)
    ]
    assert pair(*sides).matched == 1
