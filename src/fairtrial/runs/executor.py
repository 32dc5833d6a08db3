"""Executes the trials of a run in this process; the place of what executes them in others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

import anyio

from fairtrial.base.isolation import IsolatedRunner
from fairtrial.base.offload import DaemonThreads, in_thread
from fairtrial.runs.plan import Lifespan, PlannedTrial, RunRequest
from fairtrial.runs.retries import score_stored
from fairtrial.runs.suspects import watch_event_loop
from fairtrial.trials.context import TraceSource
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import TrialRules, run_trial


class Executor(Protocol):
    """Executes trials, or scores their stored outputs."""

    @property
    def rules(self) -> TrialRules | None:
        """The rules of trials in this process; None if all are executed in others, whose end this one survives."""
        ...

    def execute(self, trial: PlannedTrial) -> Awaitable[EvalResult]:
        """Execute one trial."""
        ...


type OpenExecutor = Callable[[RunRequest], AbstractAsyncContextManager[Executor]]
"""Opens what executes the trials of a run."""


def execute_trial(rules: TrialRules, trial: PlannedTrial) -> Awaitable[EvalResult]:
    """Execute one trial in this process, or score its stored output."""
    # Not `async`, as are others on this way: each step into a task that waits goes through every coroutine around it.
    if trial.stored is not None:
        return score_stored(rules, trial)
    return run_trial(rules, trial.key, trial.ordinal, trial.sample, trial.experiment, attempt=trial.attempt)


class OwnExecutor:
    """Executes trials in this process."""

    def __init__(self, rules: TrialRules) -> None:
        self.rules = rules

    def execute(self, trial: PlannedTrial) -> Awaitable[EvalResult]:
        """Execute one trial."""
        return execute_trial(self.rules, trial)


@contextlib.asynccontextmanager
async def execute_here(rules: TrialRules, lifespan: Lifespan | None) -> AsyncIterator[OwnExecutor]:
    """Open the resources of trials that are executed in this process."""
    threads, isolated = DaemonThreads(), IsolatedRunner()
    try:
        async with open_lifespan(lifespan) as shared, receive_traces(rules.traces):
            rules = replace(rules, shared=shared, threads=threads, isolated=isolated)
            rules.check_shared()
            with watch_event_loop(rules.tasks):
                yield OwnExecutor(rules)
    finally:
        threads.close()
        isolated.close()


@contextlib.asynccontextmanager
async def receive_traces(traces: TraceSource | None) -> AsyncIterator[None]:
    """Collect the spans of applications during the block, if there is a source of traces."""
    if traces is None:
        yield
        return
    source = traces.running()
    await in_thread(source.__enter__)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await in_thread(lambda: source.__exit__(None, None, None))


@contextlib.asynccontextmanager
async def open_lifespan(lifespan: Lifespan | None) -> AsyncIterator[Any]:
    """Open the resources that all trials of a run share."""
    if lifespan is None:
        yield None
        return
    opened = lifespan()
    if isinstance(opened, AbstractAsyncContextManager):
        async with opened as shared:
            yield shared
    else:
        with opened as shared:
            yield shared
