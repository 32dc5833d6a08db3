"""The columns of runs: the only place where the viewer reads trials in bulk. numpy is imported here."""

from __future__ import annotations

from typing import Any

from fairtrial.base.codec import digest
from fairtrial.base.types import JSON
from fairtrial.reports.figures.trial_columns import Condition, TrialColumns
from fairtrial.reports.render.session_text import value_text
from fairtrial.store.numbers import NumberStore
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.viewer.question import Question

BUILT_HERE = 20_000
"""Columns of runs with at most so many trials are built by the server itself, those of others by a child."""


def open_columns_of(store: RunStore, run: RunRecord) -> TrialColumns:
    """Open the columns of a run in its present state; builds or updates their file if necessary.

    Opening a current file only maps it, so every request opens its own: columns belong to one thread.
    """
    return TrialColumns.open(store, run)


def needs_building(store: RunStore, run: RunRecord) -> bool:
    """Return whether opening the columns would take long."""
    return run.planned > BUILT_HERE and TrialColumns.open_existing(store, run) is None


def state_of(store: RunStore, run: RunRecord, *, samples: bool = True) -> tuple[Any, ...]:
    """Return what changes whenever the results of a run change, or what its pages say of it.

    The last part is how many samples are stored, which runs of the same dataset share; None without `samples`.
    """
    # Until its end, a run gets more results without a new revision.
    totals = () if run.finished_at is not None else store.totals(run.run_id)
    stored = tuple(tuple(sorted(part.outcomes.items())) for part in totals)
    known = tuple(store.sample_state(run.run_id)) if samples and isinstance(store, NumberStore) else None
    return run.run_id, run.revision, run.finished_at, run.status, digest(dict(run.notes)), stored, known


def accepted_values(columns: TrialColumns, key: str, texts: tuple[str, ...]) -> list[JSON]:
    """Return the values of a metadata key that are shown as one of these texts; None stands for samples without it."""
    found = [value for value in columns.metadata_values(key) if value_text(value) in texts]
    return [*found, None] if "" in texts else found


def conditions_of(columns: TrialColumns, question: Question) -> list[Condition] | None:
    """Return the conditions of a question that selects by no result; None if no trial can meet them."""
    made = []
    if question.experiments:
        known = tuple(name for name in question.experiments if name in columns.run.experiments)
        if not known:
            return None
        made.append(Condition("experiment", known))
    for key, texts in question.metadata:
        values = accepted_values(columns, key, texts) if key in columns.metadata else []
        if not values:
            return None
        made.append(Condition(f"meta:{key}", tuple(values)))
    if any(name not in columns.columns for name, _ in question.spans):
        return None
    made += [Condition(name, low=span.low, high=span.high) for name, span in question.spans]
    return made
