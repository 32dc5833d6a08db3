"""Stored runs for tests of reports, described by the outcome of each trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial import EvalReport, EvalResult, Metric, Outcome, Sample, Score, TrialKey, open_store
from fairtrial.store import RunRecord, RunStore

type Trial = Any
"""A value that is scored, the name of an error, or a whole score."""


def stored(
    trials: Sequence[Trial] | Mapping[str, Sequence[Trial]],
    *,
    run_id: str = "r1",
    store: RunStore | None = None,
    ids: Sequence[str] | None = None,
    metadata: Sequence[Any] | None = None,
    inputs: Sequence[Any] | None = None,
    planned: int | None = None,
    fingerprint: str = "f" * 32,
    **changes: Any,
) -> EvalReport:
    """The report of a run with these trials, per sample, or per experiment and sample; "not_run" is left out."""
    by_experiment = trials if isinstance(trials, Mapping) else {"baseline": trials}
    rows = {
        name: [[one] if isinstance(one, float | int | str | Score) else list(one) for one in given]
        for name, given in by_experiment.items()
    }
    first = next(iter(rows.values()))
    size, repeats = len(first), max((len(row) for row in first), default=1)
    names = [f"s{place}" for place in range(size)] if ids is None else list(ids)
    where = open_store("memory:") if store is None else store
    fields: dict[str, Any] = {"status": "finished", "evaluator": "grade"} | changes
    suite = fields.pop("suite", "suite")
    run = where.create_run(
        RunRecord(
            run_id,
            suite,
            "data",
            "1",
            fingerprint,
            size if planned is None else planned,
            tuple(rows),
            repeats,
            **fields,
        )
    )
    results = []
    for experiment, name in enumerate(rows):
        for place, row in enumerate(rows[name]):
            for repeat, trial in enumerate(row):
                if trial != "not_run":
                    key = TrialKey(run_id, name, names[place], repeat)
                    results.append(result(key, run.ordinal(place, experiment, repeat), trial))
    samples: dict[int, Sample[Any, Any]] = {
        place: Sample(
            names[place],
            inputs[place] if inputs is not None else f"question {place if ids is None else names[place]}",
            None,
            {} if metadata is None else metadata[place],
        )
        for place in range(size)
    }
    committed = where.commit(run_id, results, samples)
    assert not committed.refused
    return EvalReport(where, where.get_run(run_id))


def result(key: TrialKey, ordinal: int, trial: Trial) -> EvalResult:
    if isinstance(trial, str):
        outcome: Outcome = trial  # type: ignore[assignment]  # the store refuses what is none
        return EvalResult(
            key=key,
            ordinal=ordinal,
            outcome=outcome,
            error="it broke",
            stage="task",
            execution=ordinal + 1,
            latency_ms=50,
        )
    score = trial if isinstance(trial, Score) else Score(float(trial))
    return EvalResult(
        key=key,
        ordinal=ordinal,
        outcome="scored",
        score=score,
        output="an answer",
        latency_ms=10 + ordinal,
        execution=ordinal + 1,
    )


def graded(value: float, **metrics: float) -> Score:
    return Score(value, metrics=[Metric(name, number) for name, number in metrics.items()])
