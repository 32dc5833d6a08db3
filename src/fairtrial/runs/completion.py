"""Whether a run is complete, as the store tells, and its figures at the end."""

from __future__ import annotations

from typing import Any

from fairtrial.frozen import FrozenDict
from fairtrial.runs.adaptive import scored_again
from fairtrial.runs.events import EvalRunCompleted, ExperimentFigures
from fairtrial.runs.retries import altered_input
from fairtrial.store.protocol import RunRecord, RunStatus, RunStore


def run_completion(store: RunStore, run: RunRecord) -> tuple[RunStatus, str | None]:
    """The status of a run whose trials were all executed, and why if it is not finished: what the store says."""
    stored, expected = sum(byte.bit_count() for byte in store.done(run.run_id)), expected_results(store, run)
    if stored < expected:
        return "incomplete", f"{expected - stored:,} of {expected:,} trials have no stored result"
    failed = store.results(run.run_id, outcomes=("scorer_error",), outputs=False)
    if any(altered_input(result) is None for result in failed):
        return "unscored", None  # The answers are paid for: the same command again only scores them.
    return "finished", None


def expected_results(store: RunStore, run: RunRecord) -> int:
    """How many results a run has when it is complete: one per trial, or per result of the run it scores again."""
    if run.parent_run is None:
        return run.planned
    return sum(byte.bit_count() for byte in store.done(run.parent_run))


def rescoring_notes(store: RunStore, run: RunRecord) -> dict[str, Any]:
    """What a reader must know of a run that scored the outputs of another: its stopping rule, what was not scored."""
    if run.parent_run is None:
        return {}
    failed = store.results(run.run_id, outcomes=("scorer_error",), outputs=False)
    redacted = sum(altered_input(result) is not None for result in failed)
    adaptive = scored_again(store.get_run(run.parent_run), run, store)
    return {"redacted": redacted or None} | ({} if adaptive is None else {"adaptive": adaptive})


def run_completed(store: RunStore, run: RunRecord) -> EvalRunCompleted:
    """The event that says how a run ended, with the figures of its experiments."""
    figures: dict[str, ExperimentFigures] = {}
    for totals in store.totals(run.run_id):
        scored = totals.outcomes.get("scored", 0)
        figures[totals.experiment] = ExperimentFigures(
            totals.passed / scored if scored else None,
            totals.value_sum / scored if scored else None,
            totals.input_tokens + totals.output_tokens,
        )
    only = next(iter(figures.values())) if len(figures) == 1 else None
    return EvalRunCompleted(
        run.run_id,
        run.status,
        None if only is None else only.pass_rate,
        None if only is None else only.mean_score,
        sum(one.total_tokens for one in figures.values()),
        FrozenDict(figures),
    )
