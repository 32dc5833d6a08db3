"""Trials that may have ended or blocked the process: found, and run alone."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import anyio
from anyio import to_thread

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.codec import from_json
from fairtrial.base.isolation import ChildDiedError, NotSendableError
from fairtrial.base.isolation.runner import START_SECONDS
from fairtrial.base.offload import loop_caller
from fairtrial.data.sample import Sample
from fairtrial.runs.events import log
from fairtrial.runs.plan import PlannedTrial, RunRequest, missing_ordinals, missing_trials
from fairtrial.runs.run_lease import RunLease
from fairtrial.runs.scheduler import Execute
from fairtrial.store.notes import CrashNote, write_notes
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult, Outcome, failed_result
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import ResolvedTask


async def run_trial_in_child(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, *, attempt: int = 1
) -> EvalResult:
    """Execute and score one trial in a child process.

    Raises:
        ChildDiedError: the trial crashed its process.
        NotSendableError: the task, the evaluator or their dependencies cannot be sent to a child process.
        TimeoutError: the child did not answer within the time limit of all attempts together.
    """
    trial = (rules, key, ordinal, sample, experiment, attempt)
    with anyio.fail_after(START_SECONDS + rules.longest_seconds):
        reply: Any = await rules.isolated.run(_run, *trial, kind=object, what="a suspected trial")
    return EvalResult(**{name: from_json(kind, reply[name]) for name, kind in _result_types().items()})


def _run(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, attempt: int
) -> dict[str, Any]:
    """Run the trial in the child process, with its own threads and child processes."""
    try:
        result = asyncio.run(run_trial(rules, key, ordinal, sample, experiment, attempt=attempt))
    finally:
        rules.close()
    return {name: getattr(result, name) for name in _result_types()}


@functools.cache
def _result_types() -> dict[str, Any]:
    hints = get_type_hints(EvalResult) | {"output": Any}
    return {field.name: hints[field.name] for field in fields(EvalResult) if field.name != "source"}


_PAUSE_SECONDS = 0.1
_BLOCKED_SECONDS = 0.25  # An event loop that does not respond for this long is blocked.
_ENOUGH_SECONDS = 2.0  # Total blocked time for a warning, if it is at least half of the time.
_STALLS = 3  # One or two may be due to a cold start.
_OURS = (str(Path(__file__).parent.parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_LOOPS = (
    "_run_once",
    "unrolled_run",
)  # A turn of asyncio and of trio; below them is the program that started the loop.


@contextmanager
def watch_event_loop(tasks: Sequence[ResolvedTask]) -> Iterator[None]:
    """Warn once if async tasks block the event loop most of the time while the block runs."""
    names = dict.fromkeys(task.name for task in tasks if task.is_async)
    if not names:
        yield
        return
    over = threading.Event()
    call_soon, thread = loop_caller(), threading.get_ident()

    def watch() -> None:
        began, blocked, stalls = time.monotonic(), 0.0, 0
        while not over.wait(_PAUSE_SECONDS):
            answered, asked = threading.Event(), time.monotonic()
            try:
                call_soon(answered.set)
            except RuntimeError:  # The event loop has ended.
                return
            if answered.wait(_BLOCKED_SECONDS):
                continue
            location = _location_in(thread)
            while not answered.wait(_PAUSE_SECONDS) and not over.is_set():
                pass
            if location is None:
                continue
            now = time.monotonic()
            blocked += now - asked
            stalls += 1
            if stalls >= _STALLS and blocked >= _ENOUGH_SECONDS and blocked >= (now - began) / 2:
                log.warning(
                    "the event loop was blocked for %.1f of %.1f s (%s), so trials run one after another. Task %s is "
                    "async and calls code that blocks: use an async client and await it, or make the task a plain "
                    "`def`, which runs in a thread",
                    blocked,
                    now - began,
                    location,
                    ", ".join(names),
                )
                return

    threading.Thread(target=watch, name="fairtrial loop watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _location_in(thread: int) -> str | None:
    """Return the innermost location of a thread in user code; None during an import, or where there is none.

    Many concurrent trials keep the event loop busy with our own work, for which no task is to blame.
    """
    frame = sys._current_frames().get(thread)
    found: FrameType | None = None
    while frame is not None and frame.f_code.co_name not in _LOOPS:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return None  # Importing a library is slow, but happens once.
        if found is None and not file.startswith((*_OURS, "<")):
            found = frame
        frame = frame.f_back
    return (
        None if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"
    )


_CRASHES = 2
"""How often a run may crash before its trials are suspected."""
_ALONE_DEATHS = 3
"""How often a run must crash during one isolated trial to blame it: processes are also killed for other reasons."""


class SuspectedTrials:
    """The suspected trials of a run, and the note about those that start."""

    def __init__(self, request: RunRequest, run: RunRecord, lease: RunLease, rules: TrialRules) -> None:
        self._store = request.store
        self._dataset = request.dataset
        self._run = run
        self._lease = lease
        self._rules = rules
        self._step = request.config.max_concurrent
        self._note = CrashNote()
        self._noting = anyio.Lock()
        self._alone = anyio.Lock()
        self._alone_before = (-1, 0)  # The trial that was executed alone at the last crash, and its number of crashes.
        self.ordinals: tuple[int, ...] = ()
        self.workers = min(self._step, max(4, os.cpu_count() or 1))

    async def begin(self, done: bytearray) -> bool:
        """Read how the run ended last time; returns whether there are suspected trials."""
        before = (await to_thread.run_sync(lambda: self._store.get_run(self._run.run_id))).noted.crashes
        count = before.count + self._lease.replaced_owner
        missing = set(missing_ordinals(min(self._run.planned, before.started + 1), done))
        if before.alone in missing and self._lease.replaced_owner:
            self._alone_before = (before.alone, before.alone_deaths + 1)
        elif count < _CRASHES:
            missing = set()
        self.ordinals = tuple(sorted(missing))
        if count:
            await self._write(CrashNote(count, max(self.ordinals, default=-1), *self._alone_before))
        if self.ordinals:
            log.warning(
                "run %s has crashed %d times: the %d trials that were in flight are executed in child processes first",
                self._run.run_id,
                count,
                len(self.ordinals),
            )
        return bool(self.ordinals)

    def trials(self, done: bytearray) -> Iterator[PlannedTrial]:
        """Yield the suspected trials."""
        left = len(self.ordinals)
        wanted = frozenset(self.ordinals)
        for trial in missing_trials(self._run, self._dataset, done):
            if trial.ordinal in wanted:
                yield trial
                left -= 1
            if not left:
                return

    async def end(self, done: bytearray) -> None:
        """Mark the suspected trials as done, and reset the count of crashes."""
        for ordinal in self.ordinals:
            done[ordinal >> 3] |= 1 << (ordinal & 7)
        await self._write(CrashNote())

    def noting(self, execute: Execute) -> Execute:
        """Return a function that executes a trial, and first stores that it starts if the run has crashed before."""
        if not self._note.count:
            return execute

        async def noted(trial: PlannedTrial) -> EvalResult:
            if trial.stored is None and trial.ordinal > self._note.started:
                async with self._noting:
                    if trial.ordinal > self._note.started:
                        await self._write(CrashNote(self._note.count, trial.ordinal + self._step))
            return await execute(trial)

        return noted

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Execute a suspected trial in isolation."""
        rules = self._rules
        alone, deaths = self._alone_before
        if trial.ordinal == alone and deaths >= _ALONE_DEATHS:
            return _failed(trial, "task_error", "the trial crashed its process, in which nothing else was executed")
        arguments = (trial.key, trial.ordinal, trial.sample, trial.experiment)
        try:
            result = await run_trial_in_child(rules, *arguments, attempt=trial.attempt)
            if result.outcome not in ("task_error", "scorer_error"):
                return result
            # A child process lacks the resources of this process, so its error proves nothing about the trial.
            log.info("suspected trial %s failed in a child process and is executed alone: %s", trial.key, result.error)
        except ChildDiedError as error:
            log.error("trial %s crashes its process: %s", trial.key, error)
            return _failed(trial, "task_error", f"the trial crashes its process: {error}")
        except TimeoutError:
            return _failed(trial, "timeout", "the trial exceeded its time limit in a child process and was killed")
        except NotSendableError as error:
            log.warning("executing suspected trial %s alone in this process: %s", trial.key, error)
        async with self._alone:
            before = deaths if trial.ordinal == alone else 0
            await self._write(CrashNote(self._note.count, self._note.started, trial.ordinal, before))
            result = await run_trial(rules, *arguments, attempt=trial.attempt)
            await self._write(CrashNote(self._note.count, self._note.started))
        return result

    async def _write(self, note: CrashNote) -> None:
        epoch = self._lease.epoch
        await retry_while_unavailable(
            lambda: to_thread.run_sync(
                lambda: self._store.update_run(self._run.run_id, notes=write_notes(crashes=note), epoch=epoch)
            ),
            "storing which trials start",
            log,
        )
        self._note = note


def _failed(trial: PlannedTrial, outcome: Outcome, error: str) -> EvalResult:
    return failed_result(trial.key, trial.ordinal, trial.attempt, outcome, "task", error)
