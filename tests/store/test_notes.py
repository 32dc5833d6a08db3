"""The notes of a run: typed records with a stable stored form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fairtrial.base.codec import dumps
from fairtrial.data.splits import SplitOrigin
from fairtrial.errors import StoreError
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import (
    AdaptiveNote,
    AdaptivePair,
    AdaptiveRate,
    BatchesNote,
    CrashNote,
    FleetNote,
    GateNote,
    ImportNote,
    JudgeNote,
    MissingNote,
    NoteChanges,
    PlanNote,
    ReviewNote,
    RunNotes,
    SamplingNote,
    SearchNote,
    UserNote,
    write_notes,
)
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.config import StopWhen

RATE = AdaptiveRate(40, 20, 1, 2, 0.5, 0.25, 0.75, 0.95, "sequence")
PAIR = AdaptivePair("a", "b", 17, 3, 20, 0, 0.35, 0.1, 0.7, 0.95, "pairs", 43.5, 0.02, "better")
ADAPTIVE = AdaptiveNote(True, "enough", StopWhen(decides=("a", "b")), 40, 300, 10, {"a": RATE, "b": RATE}, PAIR)
REVIEW = ReviewNote(
    "helpful", "Is it?", "**Be** strict.", ("a", "b"), "ratings", "00ff", 50, 2, ("expected", "m.kind"), 7.5, "ann"
)
PLAN = PlanNote("ab", {"primary": "passed"}, 7.5, 3, ("s@1",))
STORED_RATE = {
    "n": 40, "passed": 20, "errors": 1, "missing": 2, "estimate": 0.5,
    "low": 0.25, "high": 0.75, "level": 0.95, "method": "sequence",
}  # fmt: skip
STORED: dict[str, Any] = {
    "order": "0f",
    "once": "1e",
    "stopped": None,
    "cost_cap_usd": 2.5,
    "executed_seconds": 12.5,
    "redacted": 2,
    "code_changed": True,
    "collected": True,
    "kept": True,
    "command_line": ["evals.py", "--seed", "1"],
    "resume_words": ["run", "evals.py", "--seed", "1"],
    "sample_types": ["Problem", ""],
    "gates": [{"baseline": "a", "run": "r2", "experiment": "b", "code": "c", "data": "d", "trials": 9,
               "margins": {"passed": 0.02}}],
    "plans": [{"digest": "ab", "content": {"primary": "passed"}, "given_at": 7.5, "results": 3, "earlier": ["s@1"]}],
    "reviews": [{
        "name": "helpful", "question": "Is it?", "guidelines": "**Be** strict.", "experiments": ["a", "b"],
        "scale": "ratings", "seed": "00ff", "size": 50, "votes": 2, "shows": ["expected", "m.kind"],
        "created_at": 7.5, "created_by": "ann", "outcome": "scored",
    }],
    "judges": [{"name": "polite", "question": "Is it?", "include_input": False, "pairs": True}],
    "transcripts": "s3://bucket/evals",
    "transcripts_shared": True,
    "transcripts_returning": True,
    "split": {"name": "train", "fingerprint": "f0", "size": 30, "test": "f1", "test_size": 20},
    "search": {"best": "0a1b2c3d", "ended": "the budget is used up"},
    "users": [{"experiment": "a", "model": "m", "digest": "0d"}],
    "sampling": {
        "day": "2026-11-13", "sample": 0.01, "strata": ["error=true:0.5"], "max_cost_usd": 5.0, "rates": [[7.5, 0.5]],
        "received": 900, "incomplete": 2, "too_large": 1, "unstorable": 3,
    },
    "fleet": {"cursor": 20, "fingerprint": "f1"},
    "batches": {
        "requests": 9, "replies": 8, "cost_usd": 0.5, "unused": 1, "unused_cost_usd": 0.125, "open_batches": 2,
    },
    "missing": {"count": 2, "first": ["a/s#0", "a/t#0"]},
    "crashes": [2, 7, 3, 1],
    "imported": {"model": "m", "format": "f", "source": "s", "content": "c", "imported_at": 1.5, "remarks": ["r"]},
    "adaptive": {
        "stopped": True, "reason": "enough",
        "rule": {
            "narrower_than": None, "decides": ["a", "b"], "level": 0.95, "every": 10,
            "verdicts": False, "shuffle": True,
        },
        "samples": 40, "planned": 300, "beyond": 10, "experiments": {"a": STORED_RATE, "b": STORED_RATE},
        "pair": {
            "baseline": "a", "candidate": "b", "wins": 17, "losses": 3, "ties": 20, "missing": 0, "estimate": 0.35,
            "low": 0.1, "high": 0.7, "level": 0.95, "method": "pairs", "e_value": 43.5, "p_value": 0.02,
            "verdict": "better", "graded": False,
        },
    },
}  # fmt: skip
"""Every note as runs of all versions have it."""
SAMPLING = SamplingNote("2026-11-13", 0.01, ("error=true:0.5",), 5.0, ((7.5, 0.5),), 900, 2, 1, 3)


def test_every_fact_is_stored_byte_for_byte_as_it_always_was() -> None:
    written = write_notes(
        order="0f",
        once="1e",
        stopped=None,
        cost_cap_usd=2.5,
        executed_seconds=12.5,
        redacted=2,
        code_changed=True,
        collected=True,
        kept=True,
        command_line=("evals.py", "--seed", "1"),
        resume_words=("run", "evals.py", "--seed", "1"),
        sample_types=("Problem", ""),
        gates=(GateNote("a", "r2", "b", "c", "d", 9, {"passed": 0.02}),),
        plans=(PLAN,),
        reviews=(REVIEW,),
        judges=(JudgeNote("polite", "Is it?", False, True),),
        transcripts="s3://bucket/evals",
        transcripts_shared=True,
        transcripts_returning=True,
        split=SplitOrigin("train", "f0", 30, "f1", 20),
        search=SearchNote("0a1b2c3d", "the budget is used up"),
        users=(UserNote("a", "m", "0d"),),
        sampling=SAMPLING,
        fleet=FleetNote(20, "f1"),
        batches=BatchesNote(9, 8, 0.5, 1, 0.125, 2),
        missing=MissingNote(2, ("a/s#0", "a/t#0")),
        crashes=CrashNote(2, 7, 3, 1),
        imported=ImportNote("f", "s", "c", 1.5, ("r",), {"model": "m"}),
        adaptive=ADAPTIVE,
    )
    assert dumps(written) == dumps(STORED)
    assert STORED.keys() == NoteChanges.__annotations__.keys()


def test_every_stored_fact_is_read_as_its_record() -> None:
    notes = RunNotes(STORED)
    assert (notes.order, notes.stopped, notes.cost_cap_usd, notes.redacted) == ("0f", None, 2.5, 2)
    assert notes.transcripts == "s3://bucket/evals"
    assert notes.transcripts_returning
    assert not RunNotes({}).transcripts_returning
    assert notes.search == SearchNote("0a1b2c3d", "the budget is used up")
    assert notes.batches == BatchesNote(9, 8, 0.5, 1, 0.125, 2)
    assert (notes.code_changed, notes.collected, notes.kept, notes.had_owner) == (True, True, True, False)
    assert notes.command_line == ("evals.py", "--seed", "1")
    assert notes.sample_types == ("Problem", "")
    assert notes.split == SplitOrigin("train", "f0", 30, "f1", 20)
    assert notes.users == {"a": UserNote("a", "m", "0d")}
    assert notes.sampling == SAMPLING
    earlier = {name: value for name, value in STORED["sampling"].items() if name != "unstorable"}
    assert RunNotes({"sampling": earlier}).sampling == replace(SAMPLING, unstorable=0)
    assert RunNotes({"users": [{"experiment": "a"}, 7]}).users == {}
    assert notes.gates == (GateNote("a", "r2", "b", "c", "d", 9, {"passed": 0.02}),)
    earlier = {name: value for name, value in STORED["gates"][0].items() if name != "margins"}
    assert RunNotes({"gates": [earlier]}).gates == (GateNote("a", "r2", "b", "c", "d", 9),)
    assert notes.plans == (PLAN,)
    for part in ("content", "results", "given_at"):
        assert RunNotes({"plans": [STORED["plans"][0] | {part: "x"}, 3]}).plans == ()
    assert RunNotes({"gates": [{"baseline": "a"}, 3]}).gates == ()
    assert notes.judges == (JudgeNote("polite", "Is it?", False, True),)
    assert RunNotes({"judges": [{"name": "x"}, 7]}).judges == ()
    assert notes.reviews == (REVIEW,)
    stored = STORED["reviews"][0]
    for damaged in ({"name": "helpful"}, stored | {"seed": "xyz"}, stored | {"scale": "stars"}, 3):
        assert RunNotes({"reviews": [damaged, stored]}).reviews == (REVIEW,)
    assert (notes.fleet, notes.missing) == (FleetNote(20, "f1"), MissingNote(2, ("a/s#0", "a/t#0")))
    assert notes.crashes == CrashNote(2, 7, 3, 1)
    assert notes.imported == ImportNote("f", "s", "c", 1.5, ("r",), {"model": "m"})
    assert notes.is_imported
    assert notes.adaptive == ADAPTIVE
    assert notes.is_adaptive


def test_a_review_asks_one_reviewer_for_each_trial_unless_told_otherwise() -> None:
    stored = {name: value for name, value in STORED["reviews"][0].items() if name != "votes"}
    (read,) = RunNotes({"reviews": [stored]}).reviews
    assert read.votes == ReviewNote("helpful", "?", "", ("a",), "ratings", "00ff", 50).votes == 1


def test_a_run_without_notes_has_no_facts() -> None:
    notes = RunNotes({})
    assert (notes.order, notes.stopped, notes.cost_cap_usd, notes.redacted, notes.command_line) == (None,) * 3 + (
        0,
        None,
    )
    assert (notes.adaptive, notes.fleet, notes.missing, notes.imported) == (None,) * 4
    flags = (notes.code_changed, notes.collected, notes.kept, notes.had_owner, notes.is_imported, notes.is_adaptive)
    assert flags == (False,) * 6


@pytest.mark.parametrize("stored", [None, "x", [1, "a", 2, 0], [1, 2, 3], [True, 1, 2, 0]])
def test_a_note_of_crashes_that_is_none_is_read_as_no_crashes(stored: Any) -> None:
    assert RunNotes({"crashes": stored}).crashes == CrashNote()
    assert write_notes(crashes=CrashNote()) == {"crashes": None}


def test_requests_without_a_readable_fingerprint_are_for_no_known_code() -> None:
    assert RunNotes({"fleet": {"cursor": 7}}).fleet == FleetNote(7, "")
    assert RunNotes({"fleet": {"fingerprint": "f"}}).fleet == FleetNote(0, "")
    assert RunNotes({"fleet": {}}).fleet is None


def test_what_a_newer_version_added_to_a_note_is_left_out_and_stays_stored() -> None:
    stored: Any = json.loads(dumps(STORED["adaptive"]))
    stored["seen"] = stored["experiments"]["a"]["seen"] = stored["rule"]["seen"] = stored["pair"]["seen"] = 1
    store = MemoryStore()
    run = store.create_run(RunRecord("r", "s", "d", "1", "f", 1, ("a",), 1, notes={"adaptive": stored, "newer": [1]}))
    assert run.noted.adaptive == ADAPTIVE
    store.update_run("r", notes=write_notes(stopped="\0 \ufdd0"))
    found = store.get_run("r")
    assert found.noted.stopped == "\0 \ufdd0"
    assert (found.notes["newer"], found.notes["adaptive"]) == ([1], stored)


def test_a_damaged_note_of_adaptive_stopping_is_refused_and_not_read_as_none() -> None:
    damaged = RunNotes({"adaptive": {"samples": 3}, "order": "0f"})
    with pytest.raises(StoreError, match="damaged or was stored by another version"):
        _ = damaged.adaptive
    assert (damaged.order, damaged.is_adaptive) == ("0f", True)
