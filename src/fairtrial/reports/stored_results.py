"""Store results as a run in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fairtrial.base.codec import dumps, to_json
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import CodecError, ConfigurationError
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult


def store_results(
    results: Iterable[EvalResult[Any]], *, run_id: str, dataset_name: str, config: EvalConfig | None
) -> tuple[RunStore, RunRecord]:
    """Store results as a new run in memory."""
    chosen = tuple(results)
    places: dict[str, int] = {}
    samples: list[Sample[Any, Any]] = []
    for result in chosen:
        if result.sample_id not in places:
            places[result.sample_id] = len(samples)
            samples.append(Sample(result.sample_id, None) if result.source is None else result.sample)
    experiments = tuple(dict.fromkeys(result.experiment for result in chosen)) or ("baseline",)
    repeats = max((result.repeat for result in chosen), default=0) + 1
    named = dataset_name or "results"
    dataset = Dataset(samples, name=named)
    store = MemoryStore()
    now = time.time()
    run = store.create_run(
        RunRecord(
            run_id or uuid4().hex[:12],
            named,
            named,
            dataset.version,
            dataset.fingerprint,
            len(samples),
            experiments,
            repeats,
            config=to_json(config or EvalConfig()),
            created_at=now,
            notes=write_notes(order=dataset.order),
        )
    )
    seen: set[int] = set()
    for result in chosen:
        position = places[result.sample_id]
        ordinal = run.ordinal(position, experiments.index(result.experiment), result.repeat)
        if ordinal in seen:
            raise ConfigurationError(
                f"two results are of sample {result.sample_id!r}, experiment {result.experiment!r}, "
                f"repeat {result.repeat}\ngive one of them another experiment or repeat: replace(result, key=...)"
            )
        seen.add(ordinal)
        committed = store.commit(run.run_id, [_moved(result, run.run_id, ordinal)], {position: samples[position]})
        for key, problem in (*committed.refused, *committed.unstorable):
            raise ConfigurationError(f"the result of trial {key} cannot be reported: {problem}")
    store.update_run(run.run_id, status="finished" if len(seen) == run.planned else "stopped", finished_at=now)
    return store, store.get_run(run.run_id)


def _moved(result: EvalResult[Any], run_id: str, ordinal: int) -> EvalResult[Any]:
    """Return the result as part of another run, with its output and session loaded."""
    try:
        output_json = result.output_json or dumps(result.output)
    except CodecError as error:
        raise ConfigurationError(f"the output of sample {result.sample_id!r} cannot be stored: {error}") from None
    snapshot = result.snapshot
    if snapshot is None and result.source is not None and isinstance(recorded := result.session, RecordedView):
        session = Session(session_id=recorded.session_id, tags=recorded.tags)
        session.extend(recorded.everything().envelopes, keep_attempts=True)
        snapshot = session.snapshot() if len(session) else None
    return replace(
        result,
        key=result.key._replace(run_id=run_id),
        ordinal=ordinal,
        metadata=result.own_metadata,
        output_json=output_json,
        snapshot=snapshot,
        source=None,
    )
