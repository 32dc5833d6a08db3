"""A run from its beginning, or from where it stopped, to its end."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import anyio

from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, RunBusyError
from fairtrial.isolation import IsolatedRunner
from fairtrial.logs import log_fields
from fairtrial.metrics import RunProgress, track_run
from fairtrial.offload import DaemonThreads, loop_caller
from fairtrial.runs import run_lease
from fairtrial.runs.adaptive import check_rule, follow, refuse_clusters
from fairtrial.runs.completion import expected_results, rescoring_notes, run_completed, run_completion
from fairtrial.runs.costs import check_prices
from fairtrial.runs.events import (
    EvalRunCompleted,
    EvalRunStarted,
    Observer,
    Observers,
    ResumeWarning,
    log,
)
from fairtrial.runs.identity import ResumedRun, describe_run, evaluator_digest, identify, open_run
from fairtrial.runs.loop_watch import watch_event_loop
from fairtrial.runs.plan import PlannedTrial, TrialFeed, missing_trials
from fairtrial.runs.retries import RetrySet, score_stored
from fairtrial.runs.run_lease import RunLease
from fairtrial.runs.scheduler import Execute, Limits, Stop, run_trials, unwrapped
from fairtrial.runs.suspects import SuspectedTrials
from fairtrial.runs.writer import Writer, call_store
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.store.protocol import RunRecord, RunStatus, RunStore
from fairtrial.store.redact import current
from fairtrial.store.rows import refuse_secrets
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import TrialRules, run_trial
from fairtrial.trials.task import resolve_task

type Lifespan = Callable[[], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]]

_CHECKED_FIRST = 1000  # Samples searched for secrets before the run is opened; the others as they are read.
_MAX_ROUNDS = 3  # How often trials are executed whose stored results vanished, the first time included.


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Everything a run needs, checked before anything is called."""

    suite: str
    dataset: Dataset[Any, Any]
    experiments: tuple[Experiment, ...]
    scorer: Scorer
    rules: TrialRules
    config: EvalConfig
    store: RunStore
    tags: Mapping[str, str]
    observers: Observers
    lifespan: Lifespan | None = None
    version: str | None = None
    fresh: bool = False
    retry_errors: bool = False
    run_id: str | None = None  # The run to resume.
    force: bool = False  # Resume although the code differs.
    evaluator: Any = None  # As it was given.
    evaluator_digest: str = ""
    adapter: Any = None
    home: str = ""  # The file the suite was made in.


@dataclass(slots=True)
class Interrupt:
    """A switch that asks a run, from any thread, to stop and leave itself resumable."""

    _ask: Callable[[], None] | None = field(default=None)
    _asked: bool = False

    def connect(self, stop: Stop) -> None:
        """Called by the run when it can be stopped."""
        call = loop_caller()

        def request() -> None:
            stop.request("interrupted", resumable=True)

        self._ask = lambda: call(request)
        if self._asked:
            request()

    def __call__(self) -> None:
        """Ask."""
        self._asked = True
        if self._ask is not None:
            self._ask()


def prepare(
    name: str,
    dataset: Dataset[Any, Any],
    task: Any,
    evaluator: Evaluator | Scorer,
    experiments: Sequence[Experiment],
    config: EvalConfig,
    *,
    store: RunStore,
    tags: Mapping[str, str],
    observers: Sequence[Observer] = (),
    adapter: Any = None,
    lifespan: Lifespan | None = None,
    version: str | None = None,
    fresh: bool = False,
    retry_errors: bool = False,
    run_id: str | None = None,
    force: bool = False,
    home: str = "",
) -> RunRequest:
    """Check everything that can be wrong with a run before its first call."""
    if not name or any(mark in name for mark in ":@/\n"):
        raise ConfigurationError(f"a suite's name is text without ':', '@' or '/', not {name!r}")
    if config.max_samples is not None:
        dataset = dataset.head(config.max_samples)
    given: Sequence[object] = experiments  # As people write them, whatever the types say.
    if wrong := next((one for one in given if not isinstance(one, Experiment)), None):
        raise ConfigurationError(
            f"experiments must be Experiment objects (got {wrong!r})\nwrite experiments=[Experiment({str(wrong)!r})]"
        )
    chosen = tuple(experiments) or (Experiment(config.experiment_name or "baseline"),)
    names = [experiment.name for experiment in chosen]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"two experiments share a name: {', '.join(names)}")
    if task is None and any(experiment.task is None for experiment in chosen):
        raise ConfigurationError(f"suite {name!r} has no task: give it one, or one to each experiment")
    check_rule(config, names)
    scorer = resolve(evaluator)
    rules = TrialRules(
        tasks=tuple(resolve_task(experiment.task or task) for experiment in chosen),
        experiments=chosen,
        scorer=scorer,
        timeout_seconds=config.timeout_seconds,
        max_retries=config.max_retries,
        close_seconds=config.close_seconds,
        max_output_bytes=config.max_output_bytes,
        seed=config.seed,
        tags=tuple(tags.items()),
        adapter=adapter,
    )
    return RunRequest(
        suite=name,
        dataset=dataset,
        experiments=chosen,
        scorer=scorer,
        rules=rules,
        config=config,
        store=store,
        tags=tags,
        observers=Observers(observers),
        lifespan=lifespan,
        version=version,
        fresh=fresh,
        retry_errors=retry_errors,
        run_id=run_id,
        force=force,
        evaluator=evaluator,
        evaluator_digest=evaluator_digest(evaluator),
        adapter=adapter,
        home=home,
    )


type OnResult = Callable[[EvalResult], Awaitable[None]]


@dataclass(slots=True)
class OpenRun:
    """A run that is being carried out: what the local scheduler and the fleet's dispatcher have in common."""

    request: RunRequest
    run: RunRecord
    stop: Stop
    on_result: OnResult | None = None
    writer: Writer | None = None
    notice: str | None = None  # What the user must know about how the run was opened.
    code: int = 0  # Which of the run's code versions executes it.
    progress: RunProgress | None = None
    lease: RunLease | None = None  # None: this process executes nothing, or another client of a fleet owns the run.

    @property
    def epoch(self) -> int | None:
        """The fencing token of this process; None for clients of a fleet, of which several may work on a run."""
        return None if self.lease is None or self.lease.client else self.lease.epoch

    async def done(self) -> bytearray:
        """Which trials are stored; tells the observers that the run begins or goes on."""
        done = await blocking(lambda: self.request.store.done(self.run.run_id))
        run = self.run
        stored = sum(byte.bit_count() for byte in done)
        if self.progress is not None:
            self.progress.stored = stored
        self.request.observers.publish(
            EvalRunStarted(run.run_id, run.dataset_name, run.dataset_size, run.planned, stored, run, self.notice)
        )
        return done

    async def follow(self, redo: Set[int], *, window: int | None = None) -> None:
        """Go by `EvalConfig.stop_when`, if there is one; stored trials in `redo` count when they are done again.

        `window` is how far trials may run ahead of those that are looked at; by the run's concurrency unless given.

        From here on `stop` takes every result through `Limits.check` and says when there are enough;
        `stop.room_for(ordinal)` is to be awaited before a trial is started.
        """
        config, run, store = self.request.config, self.run, self.request.store
        if self.progress is not None:
            self.progress.stored -= len(redo)
        self.stop.follow(await blocking(lambda: follow(config, run, store, redo, window)))

    async def start(self, replaced: Mapping[int, float]) -> Limits:
        """Mark the run as running and work out what may still be spent.

        `replaced` is what the stored results of trials that are done again cost, by ordinal.
        """
        store, config = self.request.store, self.request.config

        def mark() -> float:
            store.update_run(self.run.run_id, status="running", epoch=self.epoch)
            totals = store.totals(self.run.run_id)
            return sum((found.judge_cost_usd or 0.0) if only_judges else found.total_cost_usd for found in totals)

        only_judges = self.run.parent_run is not None
        spent = await blocking(mark)
        if self.progress is not None:
            self.progress.cost_usd = spent - sum(replaced.values())  # New results have it in theirs.
        limits = Limits(config.stop_on_error, config.max_cost_usd, config.strict_cost, spent, replaced, only_judges)
        limits.check_cost(self.stop)
        return limits


async def carry_out(
    request: RunRequest,
    carry: Callable[[OpenRun], Awaitable[None]],
    *,
    opening: Callable[[RunRequest], ResumedRun] | None = None,
    interrupt: Interrupt | None = None,
    on_result: OnResult | None = None,
) -> RunRecord:
    """Open a run, have it carried out, and return it as it then stands in the store, however it ended.

    `opening` creates the run or finds the one to resume; by what the request describes unless given.
    """
    opened = await blocking(lambda: (opening or _open)(request))
    if opened.warning is not None:
        warnings.warn(opened.warning, ResumeWarning, stacklevel=2)
    work = OpenRun(request, opened.run, Stop(), on_result, notice=opened.warning, code=opened.code)
    if interrupt is not None:
        interrupt.connect(work.stop)
    run = opened.run
    with log_fields(run=run.run_id), track_run(run.run_id, run.suite, run.planned) as work.progress:
        try:
            await carry(work)
        except RunBusyError as error:
            await _leave(work, error)
            raise  # It is someone else's, and goes on.
        except BaseException as error:
            await _break_off(work, error)
            raise
        if work.stop.reason is None:
            return await _end(work, "finished")
        if work.stop.incomplete:
            return await _end(work, "incomplete", work.stop.reason)
        return await _end(work, "interrupted" if work.stop.resumable else "stopped", work.stop.reason)


async def execute_run(
    request: RunRequest, *, interrupt: Interrupt | None = None, on_result: OnResult | None = None
) -> RunRecord:
    """Carry out a run in this process."""
    return await carry_out(
        request, lambda work: execute_trials(work, RunTrials), interrupt=interrupt, on_result=on_result
    )


class TrialSource(Protocol):
    """Where the trials of a run come from and what is done to each."""

    def __init__(self, work: OpenRun, rules: TrialRules) -> None: ...

    async def begin(self, done: bytearray) -> tuple[TrialFeed, int]:
        """The trials to execute, and how many there are at most, given the bitmap of those with a result."""
        ...

    def missing(self, done: bytearray) -> TrialFeed:
        """The trials without a result, after results that were committed are not in the store."""
        ...

    def replaced_costs(self) -> Mapping[int, float]:
        """What the stored results of trials that are done again cost, by ordinal."""
        ...

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Execute one trial, or score its stored output."""
        ...


class RunTrials:
    """The trials of a run: those that are to be done again, and those without a result."""

    def __init__(self, work: OpenRun, rules: TrialRules) -> None:
        self._work = work
        self._rules = rules
        self._retries: RetrySet | None = None

    async def begin(self, done: bytearray) -> tuple[TrialFeed, int]:
        """What is to be scored again or retried comes first."""
        work, request, run = self._work, self._work.request, self._work.run
        self._retries = retries = await blocking(
            lambda: RetrySet(request.store, request.dataset, run, self._rules, retry_errors=request.retry_errors)
        )
        await work.follow(retries.ordinals)
        remaining = run.planned - sum(byte.bit_count() for byte in done) + retries.count
        if remaining and request.config.warmup and work.stop.reason is None:
            await _warm_up(request, run, self._rules)
        return TrialFeed(retries.trials(), missing_trials(run, request.dataset, done)), remaining

    def missing(self, done: bytearray) -> TrialFeed:
        """The trials without a result."""
        return TrialFeed(missing_trials(self._work.run, self._work.request.dataset, done))

    def replaced_costs(self) -> Mapping[int, float]:
        """What the stored results of trials that are done again cost, by ordinal."""
        return {} if self._retries is None else self._retries.costs()

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Execute a trial; one that has an output is only scored."""
        rules = self._rules
        if trial.stored is not None:
            return await score_stored(rules, trial, rules.tasks[trial.experiment].output_type)
        result = await run_trial(rules, trial.key, trial.ordinal, trial.sample, trial.experiment, attempt=trial.attempt)
        if self._work.code:
            result = replace(result, code=self._work.code)
        return result if self._retries is None else self._retries.with_earlier_cost(result)


async def execute_trials(work: OpenRun, make_source: type[TrialSource]) -> None:
    """Execute the trials of an open run in this process."""
    request, run = work.request, work.run
    lease = work.lease = await run_lease.acquire(request.store, run.run_id)
    _warn_of_fleet(run)
    with unwrapped(), watch_event_loop(request.rules.tasks):
        async with anyio.create_task_group() as group:
            group.start_soon(lease.watch)
            await _execute_trials(work, lease, make_source)
            group.cancel_scope.cancel()


async def _execute_trials(work: OpenRun, lease: RunLease, make_source: type[TrialSource]) -> None:
    request, run = work.request, work.run
    threads, isolated = DaemonThreads(), IsolatedRunner()
    try:
        async with open_lifespan(request.lifespan) as shared:
            rules = replace(request.rules, shared=shared, threads=threads, isolated=isolated)
            rules.check_shared()
            source = make_source(work, rules)
            done = await work.done()
            trials, remaining = await source.begin(done)
            expected = await blocking(lambda: expected_results(request.store, run))
            limits = await work.start(source.replaced_costs())

            async def run_all(trials: TrialFeed, execute: Execute, workers: int) -> Writer:
                work.writer = Writer(request.store, run.run_id, epoch=lease.epoch)
                await run_trials(
                    trials,
                    execute,
                    work.writer,
                    workers=workers,
                    stop=work.stop,
                    limits=limits,
                    observers=request.observers,
                    grace_seconds=request.config.grace_seconds,
                    on_result=work.on_result,
                    lease=lease,
                    progress=work.progress,
                )
                return work.writer

            execute: Execute = source.execute
            if run.parent_run is None:
                suspects = SuspectedTrials(request, run, lease, rules)
                if await suspects.begin(done) and work.stop.reason is None:
                    writer = await run_all(TrialFeed(suspects.trials(done)), suspects.execute, suspects.workers)
                    await writer.close()
                    if work.stop.reason is None:
                        await suspects.end(done)  # `trials` is read as it is needed, and skips what is done.
                        remaining -= len(suspects.ordinals)
                execute = suspects.noting(execute)
            for _round in range(_MAX_ROUNDS):
                writer = await run_all(trials, execute, min(request.config.max_concurrent, max(remaining, 1)))
                if work.stop.reason is not None:
                    break
                # Only the store knows what is stored: a database that failed over, or was restored, loses commits.
                await writer.close()
                done = await blocking(lambda: request.store.done(run.run_id))
                for ordinal in writer.refused_ordinals:
                    done[ordinal >> 3] |= 1 << (ordinal & 7)  # Executing it again would be paid for and refused again.
                remaining = expected - sum(byte.bit_count() for byte in done)
                if remaining <= 0:
                    break
                log.warning(
                    "%d results of run %s were committed and are not in the store: executing these trials again",
                    remaining,
                    run.run_id,
                )
                trials = source.missing(done)
    finally:
        threads.close()
        isolated.close()


def _warn_of_fleet(run: RunRecord) -> None:
    """Say so when a run's requests may still be in a queue: workers would execute them beside this process."""
    note = run.notes.get("fleet")
    if isinstance(note, Mapping) and note.get("cursor"):
        log.warning(
            "run %s was being carried out by a fleet, and requests of it may still be queued: workers that take them "
            "execute those trials a second time. Go on with --mailbox instead, or stop the workers first",
            run.run_id,
        )


def _open(request: RunRequest) -> ResumedRun:
    check_prices(request.config, request.rules)
    refuse_clusters(request.config, request.dataset)
    redactor = current()
    for ordinal, sample in enumerate(islice(request.dataset, _CHECKED_FIRST)):
        refuse_secrets(redactor, sample, ordinal)
    wanted = describe_run(identify(request), request.experiments, request.config, tags=request.tags)
    return open_run(
        request.store,
        wanted,
        fresh=request.fresh,
        retry_errors=request.retry_errors,
        run_id=request.run_id,
        force=request.force,
        version=request.version,
    )


async def _leave(work: OpenRun, error: RunBusyError) -> None:
    """Stop without touching a run that another process executes now."""
    if work.lease is not None:
        work.lease.stop()
    if work.writer is not None:
        try:
            await work.writer.close()
        except RunBusyError:
            pass
        except Exception as further:
            error.add_note(f"and then: {type(further).__name__}: {further}")


async def _end(work: OpenRun, status: RunStatus, why: str | None = None, *, patient: bool = True) -> RunRecord:
    """Commit what is on its way, then say how the run ended; `patient` waits for a database that is away."""
    request, run, adaptive = work.request, work.run, work.stop.adaptive
    store, observed = request.store, bool(request.observers)

    def record() -> tuple[RunRecord, EvalRunCompleted | None]:
        ending: RunStatus = status
        notes: dict[str, Any] = {"stopped": why, "cost_cap_usd": None, **work.stop.notes}
        if ending in ("finished", "incomplete"):
            ending, missing = run_completion(store, run)
            notes["stopped"] = f"{missing}: {why}" if missing and why else missing
            notes |= rescoring_notes(store, run)
        if adaptive is not None or (run.notes.get("adaptive") and run.parent_run is None):
            stored = sum(byte.bit_count() for byte in store.done(run.run_id))
            notes["adaptive"] = None if adaptive is None else adaptive.note(stored)
        finished_at = None if ending in ("interrupted", "incomplete") else time.time()
        store.update_run(run.run_id, status=ending, finished_at=finished_at, notes=notes, epoch=work.epoch)
        if work.lease is not None:
            work.lease.release()
        ended = store.get_run(run.run_id)
        return ended, run_completed(store, ended) if observed else None

    try:
        if work.writer is not None:
            await work.writer.close()
        ended, completed = await blocking(lambda: call_store(record, "ending the run") if patient else record())
    finally:
        if work.lease is not None:
            work.lease.stop()
    if completed is not None:
        request.observers.publish(completed)
    return ended


async def _break_off(work: OpenRun, error: BaseException) -> None:
    """The same after a cancellation or an error: shielded, and the error that ended the run is the one to hear of."""
    cancelled = isinstance(error, anyio.get_cancelled_exc_class())
    reason = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
    with anyio.CancelScope(shield=True):
        try:
            await _end(work, "interrupted", reason, patient=False)
        except Exception as further:
            error.add_note(f"and then: {type(further).__name__}: {further}")


async def blocking[T](call: Callable[[], T]) -> T:
    """The result of a call that waits, such as one to a store."""
    return await anyio.to_thread.run_sync(call)


@contextlib.asynccontextmanager
async def open_lifespan(lifespan: Lifespan | None) -> AsyncIterator[Any]:
    """What all trials of a run share, open in here."""
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


async def _warm_up(request: RunRequest, run: RunRecord, rules: TrialRules) -> None:
    """Execute some trials and throw them away, so that cold starts are not measured."""
    async with anyio.create_task_group() as group:
        for sample in islice(request.dataset, request.config.warmup):
            key = TrialKey(run.run_id, run.experiments[0], sample.id)
            group.start_soon(run_trial, rules, key, 0, sample, 0)
