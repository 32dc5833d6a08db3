"""Finds trials that may have crashed the process of a local run, at no cost for runs that never crash.

A crashed process leaves no message. What is known afterwards: its lease was not released, and trials start in plan
order. Nothing is written until a run has crashed once. From then on the run stores, once per batch of concurrent
trials, how far in the plan trials may have started. If it crashes again, the trials without a result up to there were
in flight, or finished and not yet stored. They are executed first, each in a child process; a trial that crashes its
child is stored as an error. A trial that cannot be sent to a child, or fails there, is executed alone in this process,
after its ordinal has been stored: if the process crashes once more, this trial is the cause.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import anyio
from anyio import to_thread

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.isolation import ChildDiedError, NotSendableError
from fairtrial.runs.events import log
from fairtrial.runs.plan import PlannedTrial, missing_ordinals, missing_trials
from fairtrial.runs.request import RunRequest
from fairtrial.runs.run_lease import RunLease
from fairtrial.runs.scheduler import Execute
from fairtrial.store.notes import CrashNote, write_notes
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.isolated_trial import run_trial_in_child
from fairtrial.trials.result import EvalResult, Outcome, failed_result
from fairtrial.trials.run_trial import TrialRules, run_trial

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
        place = (trial.key, trial.ordinal, trial.sample, trial.experiment)
        try:
            result = await run_trial_in_child(rules, *place, attempt=trial.attempt)
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
            result = await run_trial(rules, *place, attempt=trial.attempt)
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
