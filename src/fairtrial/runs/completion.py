"""Determines from the store whether a run is complete, and its final figures."""

from __future__ import annotations

from fairtrial.base.frozen import FrozenDict
from fairtrial.reports.figures.experiment import TotalsAnalysis
from fairtrial.runs.adaptive import scored_again
from fairtrial.runs.events import EvalRunCompleted, ExperimentFigures
from fairtrial.runs.retries import altered_input
from fairtrial.store import column_cache
from fairtrial.store.notes import NoteChanges
from fairtrial.store.protocol import RunRecord, RunStatus, RunStore


def run_completion(store: RunStore, run: RunRecord) -> tuple[RunStatus, str | None]:
    """Return the status of a run after its last trial, and the reason if it is not finished."""
    stored, expected = sum(byte.bit_count() for byte in store.done(run.run_id)), expected_results(store, run)
    if stored < expected:
        return "incomplete", f"{expected - stored:,} of {expected:,} trials have no stored result"
    failed = store.results(run.run_id, outcomes=("scorer_error",), outputs=False)
    if any(altered_input(result) is None for result in failed):
        return "unscored", None  # Outputs are stored: repeating the command only scores them.
    return "finished", None


def expected_results(store: RunStore, run: RunRecord) -> int:
    """Return the number of results of a complete run: one per trial, or per result of the parent run."""
    if run.parent_run is None:
        return run.planned
    return sum(byte.bit_count() for byte in store.done(run.parent_run))


def rescoring_notes(store: RunStore, run: RunRecord) -> NoteChanges:
    """Return the notes of a rescored run: the stopping rule of its parent, and what was not scored."""
    if run.parent_run is None:
        return {}
    failed = store.results(run.run_id, outcomes=("scorer_error",), outputs=False)
    redacted = sum(altered_input(result) is not None for result in failed)
    adaptive = scored_again(store.get_run(run.parent_run), run, store)
    changes: NoteChanges = {"redacted": redacted or None}
    if adaptive is not None:
        changes["adaptive"] = adaptive
    return changes


def write_column_file(store: RunStore, run: RunRecord) -> None:
    """Write the column file of a large run that has ended, so that its first report is quick."""
    if run.finished_at is not None and run.planned >= column_cache.WRITTEN_AT_THE_END:
        # numpy takes longer to load than a small run takes.
        from fairtrial.reports.figures.column_file import write_columns

        write_columns(store, run)


def run_completed(store: RunStore, run: RunRecord) -> EvalRunCompleted:
    """Build the event with the status and figures of a run that has ended."""
    figures: dict[str, ExperimentFigures] = {}
    for totals in store.totals(run.run_id):
        found = TotalsAnalysis(totals)
        figures[totals.experiment] = ExperimentFigures(found.pass_rate, found.mean_score, found.total_tokens)
    only = next(iter(figures.values())) if len(figures) == 1 else None
    return EvalRunCompleted(
        run.run_id,
        None if only is None else only.pass_rate,
        None if only is None else only.mean_score,
        sum(one.total_tokens for one in figures.values()),
        run.status,
        FrozenDict(figures),
    )
