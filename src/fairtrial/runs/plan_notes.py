"""Store the analysis plan of a run before its first trial; a plan that is given later is recorded as such."""

from __future__ import annotations

import time
from dataclasses import replace

from fairtrial.base.codec import to_json
from fairtrial.base.formatting import count
from fairtrial.reports.figures.analysis_plan import AnalysisPlan
from fairtrial.store.notes import PlanNote, write_notes
from fairtrial.store.protocol import RunRecord, RunStore

_RUNS_READ = 200  # Number of newest runs that are searched for earlier results of the same code.
_NAMED = 3


def plan_note(plan: AnalysisPlan) -> PlanNote:
    """Return the note of a plan that is given now, to a run without results."""
    return PlanNote(plan.digest, plan.content, time.time())


def name_earlier_runs(store: RunStore, wanted: RunRecord) -> RunRecord:
    """Return a run to be created, its plan with the runs that had executed the same code on the same samples."""
    if not wanted.noted.plans or not wanted.code_hash:
        return wanted
    earlier = [
        run.name
        for run in store.runs(suite=wanted.suite, limit=_RUNS_READ)
        if (run.code_hash, run.dataset_fingerprint) == (wanted.code_hash, wanted.dataset_fingerprint)
        and any(to_json(run.params.get(name)) == to_json(found) for name, found in wanted.params.items())
        and run.run_id != wanted.run_id
        and _stored(store, run)
    ]
    plans = [replace(note, earlier=tuple(earlier[:_NAMED])) for note in wanted.noted.plans]
    return replace(wanted, notes={**wanted.notes, **write_notes(plans=plans)})


def add_plan(store: RunStore, found: RunRecord, wanted: RunRecord) -> tuple[RunRecord, str | None]:
    """Record the plan that a resumed run is given, if it is another one; returns the run, and a line about it."""
    plans, given = found.noted.plans, wanted.noted.plans
    if not given or any(note.digest == given[-1].digest for note in plans):
        return found, None
    results = _stored(store, found)
    note = replace(given[-1], results=results)
    changes = write_notes(plans=[*plans, note])
    store.update_run(found.run_id, notes=changes)
    found = replace(found, notes={**found.notes, **changes})
    if not results:
        return found, None
    keeps = f"keeps its plan {plans[0].digest[:8]}" if plans else "had no plan"
    return found, (
        f"run {found.run_id} {keeps}: plan {note.digest[:8]} was given after {count(results, 'result')}, "
        "and its reports will say so"
    )


def _stored(store: RunStore, run: RunRecord) -> int:
    return sum(byte.bit_count() for byte in store.done(run.run_id))
