"""The first and the last step of a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import anyio

from fairtrial.base.codec import digest
from fairtrial.base.frozen import FrozenDict
from fairtrial.base.offload import in_thread
from fairtrial.errors import RunBusyError
from fairtrial.reports.figures.summaries import TotalsAnalysis
from fairtrial.runs import run_lease
from fairtrial.runs.adaptive import check_inputs, check_prices, refuse_clusters, scored_again
from fairtrial.runs.callables import describe
from fairtrial.runs.events import EvalRunCompleted, ExperimentFigures, log
from fairtrial.runs.identity import ResumedRun, describe_run, identify, open_run
from fairtrial.runs.plan import RunRequest
from fairtrial.runs.retries import altered_input
from fairtrial.runs.writer import ask_store
from fairtrial.store import column_cache
from fairtrial.store.export import export_beside_segments
from fairtrial.store.notes import NoteChanges, UserNote
from fairtrial.store.protocol import RunRecord, RunStatus, RunStore
from fairtrial.store.redact import current
from fairtrial.store.rows import refuse_secrets
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import USER_OF

_CHECKED_FIRST = 1000  # Samples searched for secrets before the run is opened; the others when they are read.
_POLL_SECONDS = 1.0

type Opening = Callable[[RunRequest], ResumedRun]


async def open_requested(request: RunRequest, opening: Opening | None = None) -> ResumedRun:
    """Create or resume a run: by `opening`, or else as the request describes."""
    if opening is not None:
        return await ask_store(lambda: opening(request), "opening the run")
    wanted = await in_thread(lambda: _describe(request))  # Once: a repeated attempt must not create a second run.
    return await ask_store(
        lambda: open_run(
            request.store,
            wanted,
            resume=request.resume,
            allow_changed_code=request.allow_changed_code,
            code=request.code,
        ),
        "opening the run",
    )


def _describe(request: RunRequest) -> RunRecord:
    check_prices(request.config, request.rules)
    check_inputs(request.rules, request.dataset)
    refuse_clusters(request.config, request.dataset)
    redactor = current()
    for ordinal, sample in enumerate(islice(request.dataset, _CHECKED_FIRST)):
        refuse_secrets(redactor, sample, ordinal)
    identity = identify(request)
    return describe_run(
        identity,
        request.experiments,
        request.config,
        tags=request.tags,
        once=request.once,
        plan=request.plan,
        split=request.dataset.split_origin,
        users=user_notes(request.rules, request.home),
    )


def user_notes(rules: TrialRules, home: str) -> list[UserNote]:
    """Return the users that the experiments talk to, each with a digest of its model, prompt and code."""
    digests: dict[int, str] = {}
    notes = []
    for task, experiment in zip(rules.tasks, rules.experiments, strict=True):
        user = getattr(task.fn, USER_OF, None)
        if user is None:
            continue
        if id(user) not in digests:
            digests[id(user)] = digest(describe({"user": user}, home).parts)[:16]
        notes.append(UserNote(experiment.name, user.model, digests[id(user)]))
    return notes


async def wait_for_other(
    request: RunRequest, run: RunRecord, error: RunBusyError, interrupted: Callable[[], bool]
) -> None:
    """Wait until no other process executes a run with the same key; raises `error` if that is interrupted."""
    log.warning("run %s has the same key and is being executed by another process: waiting for its end", run.run_id)
    while await ask_store(lambda: run_lease.active_owner(request.store, run.run_id), "reading the run") is not None:
        if interrupted():
            raise error
        await anyio.sleep(_POLL_SECONDS)


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
    """Write the column file of a large run that has ended, so that its first report is quick.

    If its transcripts are in a bucket or a folder, write its columns there, for the tools of others.
    """
    if run.finished_at is None:
        return
    if run.noted.transcripts is not None:
        export_beside_segments(store, run)
    if run.planned >= column_cache.WRITTEN_AT_THE_END:
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
