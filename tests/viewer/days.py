"""Daily runs with everything that a history shows: gaps, errors, unfinished runs, costs, and what changed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fairtrial import EvalResult, PromptExecuted, Sample, Score, Session, TokenUsage, TrialKey
from fairtrial.store import RunStore
from tests.viewer.conftest import record

FIRST = datetime(2026, 8, 20, 3, tzinfo=UTC).timestamp()
DAY = 86_400
IDENTITY = {"parts": {"app.py": "1a", "app.py:SYSTEM_PROMPT": "2b"}, "packages": {"python": "3.12"}}


def add_day(
    store: RunStore,
    number: int,
    *,
    rate: float = 0.9,
    suite: str = "daily",
    n: int = 60,
    model: str = "helper-1",
    hour: int = 0,
    errors: int = 0,
    stored: int | None = None,
    experiments: tuple[str, ...] = ("baseline", "careful"),
    **changes: Any,
) -> str:
    """Store a run of a day, the first being 0; `stored` samples only, if it is given: then it is not finished."""
    run_id = f"{suite}-{number}-{hour}-{changes.get('dataset_fingerprint', '')[:2]}"
    given: dict[str, Any] = {"created_at": FIRST + number * DAY + hour * 3600, "experiments": experiments,
                             "identity": IDENTITY, "code_hash": "c0de" * 8}  # fmt: skip
    run = store.create_run(record(run_id, suite, n, **given | changes))
    rng = random.Random(run_id)
    samples = {place: Sample(f"q{place:02}", f"Where is order {place}?", "Friday", {}) for place in range(n)}
    results = []
    for ordinal in range(run.planned):
        place, experiment, repeat = run.split(ordinal)
        if stored is not None and place >= stored:
            break
        key = TrialKey(run.run_id, run.experiments[experiment], f"q{place:02}", repeat)
        if place < errors:
            results.append(
                EvalResult(key=key, ordinal=ordinal, outcome="task_error", error="lost", stage="task", execution=1)
            )
            continue
        session = Session(tags={})
        session.record(PromptExecuted(model=model, usage=TokenUsage(10, 5)))
        score = Score(float(rng.random() < rate - 0.1 * experiment))
        usage = TokenUsage(100 + place, 20, cost_usd=round(0.001 + 0.0001 * rng.random(), 6))
        results.append(
            EvalResult(key=key, ordinal=ordinal, outcome="scored", score=score, output="on Friday", latency_ms=100,
                       usage=usage, execution=1, started_at=2000.0, snapshot=session.snapshot())
        )  # fmt: skip
    store.commit(run.run_id, results, samples)
    if stored is None:
        store.update_run(run.run_id, status="finished", finished_at=run.created_at + 60)
    else:
        store.update_run(run.run_id, status="interrupted", finished_at=run.created_at + 60)
    return run_id


def add_days(store: RunStore) -> None:
    """Store 60 days: a gap, a day with an unfinished run, one with errors, one with three runs, two changes, a drop."""
    changed: Mapping[int, Mapping[str, Any]] = {
        24: {"code_hash": "beef" * 8, "identity": IDENTITY | {"parts": {"app.py": "1c", "app.py:SYSTEM_PROMPT": "9d"}}},
        40: {"model": "helper-2", "rate": 0.72},
    }
    settings: dict[str, Any] = {}
    for number in range(60):
        settings |= changed.get(number, {})
        if number in (12, 13, 14, 33):
            continue
        if number == 20:
            add_day(store, number, stored=20, **settings)
            continue
        add_day(store, number, errors=4 if number in (8, 30) else 0, **settings)
        if number == 28:
            add_day(store, number, hour=4, **settings)
            add_day(store, number, hour=6, stored=10, **settings)
