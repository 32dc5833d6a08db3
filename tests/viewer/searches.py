"""Stored searches for better prompts, with any number of candidates and any text."""

from __future__ import annotations

from collections.abc import Sequence

from fairtrial import EvalResult, Sample, Score, TrialKey
from fairtrial.data.splits import SplitOrigin
from fairtrial.reports.search.search import (
    BASELINE,
    CANDIDATE,
    OPTIMIZER,
    PARAMETER,
    PARENTS,
    SEARCH,
    SEARCHING,
)
from fairtrial.store import RunStore
from fairtrial.store.notes import SearchNote, write_notes
from tests.viewer.conftest import record


def add_search(
    store: RunStore,
    name: str,
    texts: Sequence[str],
    parents: Sequence[int],
    *,
    suite: str = "many",
    parameter: str = "prompt",
    error: str = "",
) -> None:
    """Store a search that found nothing better: a run of two samples for each text, made from that at its parent."""
    origin = SplitOrigin("validation", "ab" * 16, 2, "cd" * 16, 9)
    for place, text in enumerate(texts):
        id = f"{place:08x}"
        tags = {SEARCH: name, PARAMETER: parameter, OPTIMIZER: name, CANDIDATE: id}
        tags[PARENTS] = f"{parents[place]:08x}" if place else ""
        experiment = id if place else BASELINE
        run = store.create_run(
            record(
                f"{suite}-{place}", suite + SEARCHING, 2, experiments=(experiment,), tags=tags, evaluator="right",
                params={experiment: {parameter: text}}, created_at=50.0 + place,
            )
        )  # fmt: skip
        samples = {at: Sample(f"{error}{at}", at, at) for at in range(2)}
        keys = [TrialKey(run.run_id, experiment, samples[at].id, 0) for at in range(2)]
        failed = EvalResult(key=keys[1], ordinal=1, outcome="task_error", error=error, stage="task", execution=2)
        passed = EvalResult(key=keys[0], ordinal=0, outcome="scored", score=Score(1.0), output=text, execution=1)
        store.commit(run.run_id, [passed, failed], samples)
        ended = {"search": SearchNote(f"{0:08x}", error)} if not place else {}
        notes = write_notes(split=origin, **ended)  # type: ignore[arg-type]
        store.update_run(run.run_id, status="finished", finished_at=60.0 + place, notes=notes)
