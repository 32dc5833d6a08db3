"""Runs, samples and results for tests of stores."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fairtrial import ChatMessage, EvalResult, Metric, Outcome, Sample, Score, Session, TokenUsage, TrialKey
from fairtrial.store import RunRecord, RunStore


def without_place(run: RunRecord) -> RunRecord:
    """Return a run without the note of where its transcripts are."""
    return replace(run, notes={name: note for name, note in run.notes.items() if name != "transcripts"})


def run_record(run_id: str = "r1", *, size: int = 10, **changes: Any) -> RunRecord:
    record = RunRecord(
        run_id=run_id,
        suite="support",
        dataset_name="tickets",
        dataset_version="1.0",
        dataset_fingerprint="f" * 32,
        dataset_size=size,
        experiments=("baseline", "terse"),
        repeats=2,
        created_at=1000.0,
    )
    return replace(record, **changes)


def sample(place: int, **metadata: Any) -> Sample[Any, Any]:
    return Sample(f"s{place}", {"question": f"q{place}"}, f"a{place}", metadata)


def samples(places: Iterable[int]) -> dict[int, Sample[Any, Any]]:
    return {place: sample(place, topic="even" if place % 2 == 0 else "odd") for place in places}


def result(run: RunRecord, ordinal: int, outcome: Outcome = "scored", **changes: Any) -> EvalResult:
    place, experiment, repeat = run.split(ordinal)
    made = EvalResult(
        key=TrialKey(run.run_id, run.experiments[experiment], f"s{place}", repeat),
        ordinal=ordinal,
        outcome=outcome,
        score=Score(0.75, reason="close") if outcome == "scored" else None,
        output={"answer": f"a{place}"} if outcome == "scored" else None,
        latency_ms=100 + ordinal,
        usage=TokenUsage(10, 5, 1, 0.25),
        error=None if outcome == "scored" else "ValueError: no",
        stage=None if outcome == "scored" else "task",
        execution=ordinal + 1,
        started_at=2000.0 + ordinal,
    )
    return replace(made, **changes)


def rich_result(run: RunRecord, ordinal: int) -> EvalResult:
    """A result that uses every field."""
    session = Session(tags={"run": run.run_id})
    session.record(TokenUsage(3, 2))
    score = Score(
        0.5,
        False,
        'half "right"\n\0',
        [
            Metric("accuracy", 0.5, 2.0, {"of": [1, 2]}),
            Metric("f1 \0", 0.25, passed=False, reason='too "low" \0'),
            Metric("polite", 1.0, 0.5, passed=True),
            Metric("speed", 12.0, 0.0, {"unit": "s"}),
        ],
        name="judge",
    )
    return result(
        run,
        ordinal,
        score=score,
        output={"text": "caf\u00e9 \ud800 \0", "nan": [1.5, None, True, 10**30]},
        metadata={"seed": 7, "nested": {"a": [1, "x\0"]}},
        attempt=3,
        execution=2**62 + ordinal,
        stage="score",
        error="late \0 \udfff warning",
        snapshot=session.snapshot(),
        judge_cost_usd=0.125,
        cache_hits=4,
        unpriced_calls=2,
        unpriced_judge_calls=1,
        cut_off_calls=3,
    )


def large_snapshot() -> bytes:
    """A transcript that is worth a part of a segment; each is different."""
    session = Session(tags={})
    session.record(ChatMessage("assistant", os.urandom(400).hex()))
    return session.snapshot()


def full_run(store: RunStore, *, size: int = 6) -> Any:
    run = store.create_run(run_record(size=size))
    store.commit(run.run_id, [result(run, ordinal) for ordinal in range(run.planned)], samples(range(size)))
    return run
