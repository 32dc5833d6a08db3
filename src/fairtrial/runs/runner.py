"""Executes a run, new or resumed, to its end."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from fairtrial.base.garbage import fewer_collections
from fairtrial.base.metrics import RunProgress, track_run
from fairtrial.base.offload import in_thread, loop_caller, on_trio
from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, RunBusyError
from fairtrial.models.batches.batching import batches_allowed
from fairtrial.models.judges.checks import judge_notes
from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.runs import events, run_lease
from fairtrial.runs.adaptive import check_event_loop, check_rule, follow
from fairtrial.runs.baseline import Baseline, describe_code
from fairtrial.runs.executor import Executor, OpenExecutor, execute_here
from fairtrial.runs.identity import ResumedRun
from fairtrial.runs.opening import (
    Opening,
    expected_results,
    open_requested,
    rescoring_notes,
    run_completed,
    run_completion,
    wait_for_other,
    write_column_file,
)
from fairtrial.runs.plan import AUTO, Lifespan, PlannedTrial, Resume, RunRequest, TrialFeed, missing_trials, roots_of
from fairtrial.runs.retries import RetrySet
from fairtrial.runs.run_lease import RunLease
from fairtrial.runs.scheduler import Execute, Limits, RepeatedErrors, Stop, run_trials, unwrap_error_groups
from fairtrial.runs.suspects import SuspectedTrials
from fairtrial.runs.writer import Writer, ask_store, call_store
from fairtrial.scoring.evaluator import Evaluator, Scorer, resolve
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import NoteChanges, write_notes
from fairtrial.store.protocol import RESUMABLE, RunRecord, RunStatus, RunStore
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.context import TraceSource, TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import resolve_task

if TYPE_CHECKING:
    from fairtrial.models.batches.sender import RunBatches

_READING = "reading the run"  # What waits for a store that is unavailable.
_MAX_ROUNDS = 3  # How often trials are executed, including the first time, if the store loses their results.


@dataclass(slots=True)
class Interrupt:
    """Stops a run from any thread, so that it can be resumed."""

    _ask: Callable[[], None] | None = field(default=None)
    asked: bool = False

    def connect(self, stop: Stop) -> None:
        """Connect the interrupt; called by the run when it can be stopped."""
        call = loop_caller()

        def request() -> None:
            stop.request("interrupted", resumable=True)

        self._ask = lambda: call(request)
        if self.asked:
            request()

    def __call__(self) -> None:
        """Request the interrupt; may be called from any thread."""
        self.asked = True
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
    observers: Sequence[events.Observer] = (),
    adapter: Any = None,
    lifespan: Lifespan | None = None,
    version: str | None = None,
    resume: Resume = AUTO,
    allow_changed_code: bool = False,
    once: str | None = None,
    home: str = "",
    traces: TraceSource | None = None,
    baseline: Baseline | None = None,
) -> RunRequest:
    """Validate a run before its first call; `baseline` is what the suite executed when it was made."""
    if not name or any(mark in name for mark in ":@/\n"):
        raise ConfigurationError(f"invalid suite name {name!r}: it must be a line of text without ':', '@' or '/'")
    if once is not None and (not once or resume != AUTO):
        raise ConfigurationError("once must be a text that is not empty, without resume")
    if config.max_samples is not None:
        dataset = dataset.head(config.max_samples)
    if config.stop_when is not None and config.stop_when.shuffle:
        # A prefix must represent the whole dataset. The order is part of the run's identity, so a resumed run keeps it.
        dataset = dataset.shuffle(config.seed)
    given: Sequence[object] = experiments  # Checked at run time, for callers without a type checker.
    if wrong := next((one for one in given if not isinstance(one, Experiment)), None):
        raise ConfigurationError(
            f"experiments must be Experiment objects (got {wrong!r})\nwrite experiments=[Experiment({str(wrong)!r})]"
        )
    chosen = tuple(experiments) or (Experiment(config.experiment_name or "baseline"),)
    names = [experiment.name for experiment in chosen]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"experiment names must be unique (got {', '.join(names)})")
    if task is None and any(experiment.task is None for experiment in chosen):
        raise ConfigurationError(f"suite {name!r} has no task: pass one to the suite or to each experiment")
    check_rule(config, names)
    scorer = resolve(evaluator)
    heard_by = events.Observers(observers)
    rules = TrialRules(
        tasks=tuple(resolve_task(experiment.task or task) for experiment in chosen),
        experiments=chosen,
        scorer=scorer,
        timeout_seconds=config.timeout_seconds,
        max_retries=config.max_retries,
        close_seconds=config.close_seconds,
        max_output_bytes=config.max_output_bytes,
        refusals=config.refusals,
        seed=config.seed,
        tags=tuple(tags.items()),
        adapter=adapter,
        dispatcher=heard_by.dispatcher,
        traces=traces,
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
        observers=heard_by,
        lifespan=lifespan,
        version=version,
        resume=resume,
        allow_changed_code=allow_changed_code,
        once=once,
        evaluator=evaluator,
        adapter=adapter,
        code=describe_code(name, home, version, roots_of(rules, evaluator, adapter, lifespan), baseline),
        baseline=baseline,
        home=home,
    )


type OnResult = Callable[[EvalResult], Awaitable[None]]


@dataclass(slots=True)
class OpenRun:
    """A run in progress: the state that the local scheduler and the fleet's dispatcher share."""

    request: RunRequest
    run: RunRecord
    stop: Stop
    on_result: OnResult | None = None
    writer: Writer | None = None
    notice: str | None = None  # A message for the user about how the run was opened.
    code: int = 0  # The index of the code version that executes it.
    progress: RunProgress | None = None
    began: float = field(default_factory=time.monotonic)
    lease: RunLease | None = None  # None: this process executes nothing, or another client of a fleet owns the run.

    @property
    def epoch(self) -> int | None:
        """The fencing token of this process; None for fleet clients, several of which may share a run."""
        return None if self.lease is None or self.lease.client else self.lease.epoch

    async def done(self) -> bytearray:
        """Return the bitmap of stored trials, after publishing that the run starts."""
        done = await ask_store(lambda: self.request.store.done(self.run.run_id), _READING)
        run = self.run
        stored = sum(byte.bit_count() for byte in done)
        if self.progress is not None:
            self.progress.stored = stored
        retried = await ask_store(self._count_errors, _READING) if stored and self.request.resume.retry_errors else 0
        event = events.EvalRunStarted(
            run.run_id, run.dataset_name, run.dataset_size, run.planned, stored, run, self.notice, retried
        )
        if stored and not self.request.observers.announce_resume:
            # A warning, because Python shows nothing below that unless logging is configured.
            events.log.warning(event.resume_text(f"run {run.name}"))
        self.request.observers.publish(event)
        return done

    def _count_errors(self) -> int:
        totals = self.request.store.totals(self.run.run_id)
        return sum(part.outcomes.get(outcome, 0) for part in totals for outcome in ERRORS)

    def executed_seconds(self, ending: RunStatus) -> float | None:
        """Return the time of execution to note: of a run that was or can be resumed, over all its processes."""
        earlier = self.run.noted.executed_seconds or 0.0
        if not earlier and self.run.took_seconds is not None:
            earlier = self.run.took_seconds
        own = time.monotonic() - self.began
        return round(earlier + own, 3) if earlier or ending in RESUMABLE else None

    async def follow(self, redo: Set[int], *, window: int | None = None) -> None:
        """Apply `EvalConfig.stop_when`, if there is one; stored trials in `redo` count when they are repeated.

        `window` is how far trials may run ahead of the evaluated prefix; derived from the concurrency by default.
        After this call, `stop` receives every result through `Limits.check` and decides when there are enough. Await
        `stop.room_for(ordinal)` before starting a trial.
        """
        config, run, store = self.request.config, self.run, self.request.store
        if self.progress is not None:
            self.progress.stored -= len(redo)
        self.stop.follow(await ask_store(lambda: follow(config, run, store, redo, window), _READING))

    async def start(self, replaced: Mapping[int, float]) -> Limits:
        """Mark the run as running and compute the remaining budget.

        `replaced` are the costs of stored results whose trials are repeated, by ordinal.
        """
        store, config = self.request.store, self.request.config

        kept = not isinstance(store, MemoryStore)
        repeated = RepeatedErrors(self.run.experiments, config.max_same_errors, kept)

        def mark() -> float:
            store.update_run(self.run.run_id, status="running", epoch=self.epoch)
            totals = store.totals(self.run.run_id)
            repeated.pass_over(found.experiment for found in totals if found.outcomes.get("scored"))
            return sum((found.judge_cost_usd or 0.0) if only_judges else found.total_cost_usd for found in totals)

        only_judges = self.run.parent_run is not None
        spent = await ask_store(mark, "starting the run")
        if self.progress is not None:
            self.progress.cost_usd = spent - sum(replaced.values())  # New results include it.
        limits = Limits(config.stop_on_error, config.max_cost_usd, config.strict_cost, spent, replaced, only_judges)
        limits.repeated_errors = repeated
        limits.check_cost(self.stop)
        return limits


async def run_to_end(
    request: RunRequest,
    execute: Callable[[OpenRun], Awaitable[None]],
    *,
    opening: Opening | None = None,
    interrupt: Interrupt | None = None,
    on_result: OnResult | None = None,
) -> RunRecord:
    """Open a run, execute it, and return its record from the store, however it ended.

    `opening` creates or resumes the run; by default as the request describes.
    """
    check_event_loop(request.rules)
    while True:
        opened = await open_requested(request, opening)
        if opened.ended:
            return opened.run
        try:
            return await _execute_opened(request, opened, execute, interrupt, on_result)
        except RunBusyError as error:
            if request.once is None:
                raise
            await wait_for_other(request, opened.run, error, lambda: interrupt is not None and interrupt.asked)


async def _execute_opened(
    request: RunRequest,
    opened: ResumedRun,
    execute: Callable[[OpenRun], Awaitable[None]],
    interrupt: Interrupt | None,
    on_result: OnResult | None,
) -> RunRecord:
    """Execute an open run."""
    if opened.warning is not None:
        warnings.warn(opened.warning, events.ResumeWarning, stacklevel=2)
    work = OpenRun(request, opened.run, Stop(), on_result, notice=opened.warning, code=opened.code)
    if interrupt is not None:
        interrupt.connect(work.stop)
    run = opened.run
    with (
        observe_changes(request),
        events.log_fields(run=run.run_id),
        track_run(run.run_id, run.suite, run.planned) as work.progress,
    ):
        try:
            await execute(work)
        except RunBusyError as error:
            await _leave(work, error)
            raise  # Another process executes the run.
        except BaseException as error:
            await _break_off(work, error)
            raise
        if work.stop.reason is None:
            return await _end(work, "finished")
        if work.stop.incomplete:
            return await _end(work, "incomplete", work.stop.reason)
        return await _end(work, "interrupted" if work.stop.resumable else "stopped", work.stop.reason)


async def execute_run(
    request: RunRequest,
    *,
    open_executor: OpenExecutor | None = None,
    interrupt: Interrupt | None = None,
    on_result: OnResult | None = None,
) -> RunRecord:
    """Execute a run in this process, or by what `open_executor` opens."""
    return await run_to_end(
        request,
        lambda work: execute_trials(work, RunTrials, open_executor),
        interrupt=interrupt,
        on_result=on_result,
    )


class TrialSource(Protocol):
    """The source of a run's trials, and how each is executed."""

    def __init__(self, work: OpenRun, execute: Execute) -> None: ...

    async def begin(self, done: bytearray) -> tuple[TrialFeed, int]:
        """Return the trials to execute and their maximum number, given the bitmap of trials with a result."""
        ...

    def missing(self, done: bytearray) -> TrialFeed:
        """Return the trials without a result, after the store has lost committed results."""
        ...

    def replaced_costs(self) -> Mapping[int, float]:
        """What the stored results of trials that are done again cost, by ordinal."""
        ...

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Execute one trial, or score its stored output."""
        ...


class RunTrials:
    """The trials of a run: those to be repeated, and those without a result."""

    def __init__(self, work: OpenRun, execute: Execute) -> None:
        self._work = work
        self._execute = execute
        self._retries: RetrySet | None = None

    async def begin(self, done: bytearray) -> tuple[TrialFeed, int]:
        """Return the trials; those to be rescored or retried come first."""
        work, request, run = self._work, self._work.request, self._work.run
        self._retries = retries = await ask_store(
            lambda: RetrySet(
                request.store, request.dataset, run, request.rules, retry_errors=request.resume.retry_errors
            ),
            _READING,
        )
        await work.follow(retries.ordinals)
        remaining = run.planned - sum(byte.bit_count() for byte in done) + retries.count
        if remaining and request.config.warmup and work.stop.reason is None:
            await _warm_up(request, run, self._execute)
        return TrialFeed(retries.trials(), missing_trials(run, request.dataset, done)), remaining

    def missing(self, done: bytearray) -> TrialFeed:
        """Return the trials without a result."""
        return TrialFeed(missing_trials(self._work.run, self._work.request.dataset, done))

    def replaced_costs(self) -> Mapping[int, float]:
        """What the stored results of trials that are done again cost, by ordinal."""
        return {} if self._retries is None else self._retries.costs()

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Execute a trial; a trial with a stored output is only scored."""
        result = await self._execute(trial)
        if trial.stored is not None:
            return result
        if self._work.code:
            result = replace(result, code=self._work.code)
        return result if self._retries is None else self._retries.with_earlier_cost(result)


type MakeSource = Callable[[OpenRun, Execute], TrialSource]


async def execute_trials(work: OpenRun, make_source: MakeSource, open_executor: OpenExecutor | None = None) -> None:
    """Execute the trials of an open run, in this process by default."""
    request, run = work.request, work.run
    lease = work.lease = await run_lease.acquire(request.store, run.run_id)
    _warn_of_fleet(run)
    with unwrap_error_groups(), fewer_collections():
        async with anyio.create_task_group() as group:
            group.start_soon(lease.watch)
            here = execute_here(request.rules, request.lifespan)
            opened: AbstractAsyncContextManager[Executor] = here if open_executor is None else open_executor(request)
            async with opened as executor, _open_batches(work, lease) as batches:
                await _execute_trials(work, lease, make_source, executor, batches)
            group.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _open_batches(work: OpenRun, lease: RunLease) -> AsyncIterator[RunBatches | None]:
    """Let the trials of a run call models in batches, if an adapter of this process may do so."""
    request = work.request
    if not batches_allowed() or on_trio():
        yield None
        return
    from fairtrial.models.batches.sender import RunBatches  # It loads the database's library.

    def tell(line: str) -> None:
        request.observers.publish(events.BatchesProgressed(work.run.run_id, line))

    async with RunBatches(request.store, work.run.run_id, lease.epoch, tell).running() as batches:
        batches.stop = lambda reason: work.stop.request(reason, resumable=True)
        yield batches
        ended = work.stop.reason is None or not work.stop.resumable
        note = await batches.close() if ended else None
        if note is not None:
            changes = write_notes(batches=note)
            await ask_store(
                lambda: request.store.update_run(work.run.run_id, notes=changes, epoch=lease.epoch), "ending the run"
            )


async def _execute_trials(
    work: OpenRun,
    lease: RunLease,
    make_source: MakeSource,
    executor: Executor,
    batches: RunBatches | None,
) -> None:
    request, run = work.request, work.run
    source = make_source(work, executor.execute)
    done = await work.done()
    trials, remaining = await source.begin(done)
    expected = await ask_store(lambda: expected_results(request.store, run), _READING)
    limits = await work.start(source.replaced_costs())
    if batches is not None:
        batches.budget_left = limits.budget_left

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
            share_slots=request.rules.traces is not None or batches is not None,
            window=lambda: 0 if batches is None else batches.window,
        )
        return work.writer

    execute: Execute = source.execute
    # A run with batches goes on for days: it is no trial's fault that its process was ended meanwhile, and a child
    # process, in which a suspected trial is executed, could not wait for a batch.
    if run.parent_run is None and executor.rules is not None and batches is None:
        suspects = SuspectedTrials(request, run, lease, executor.rules)
        if await suspects.begin(done) and work.stop.reason is None:
            writer = await run_all(TrialFeed(suspects.trials(done)), suspects.execute, suspects.workers)
            await writer.close()
            if work.stop.reason is None:
                await suspects.end(done)  # `trials` is read lazily and skips trials that are done.
                remaining -= len(suspects.ordinals)
        execute = suspects.noting(execute)
    if batches is not None:
        execute = _noting_trials(batches, execute)
    for _round in range(_MAX_ROUNDS):
        writer = await run_all(trials, execute, min(request.config.max_concurrent, max(remaining, 1)))
        limits.end_stopped(work.stop)
        if work.stop.reason is not None:
            break
        # Only the store knows what is stored: after a failover or a restore, the database may have lost
        # commits.
        await writer.close()
        done = await ask_store(lambda: request.store.done(run.run_id), _READING)
        for ordinal in writer.refused_ordinals:
            # Executing it again would cost money and be refused again.
            done[ordinal >> 3] |= 1 << (ordinal & 7)
        remaining = expected - sum(byte.bit_count() for byte in done)
        if remaining <= 0:
            break
        events.log.warning(
            "%d committed results of run %s are missing from the store: executing these trials again",
            remaining,
            run.run_id,
        )
        trials = source.missing(done)


def _noting_trials(batches: RunBatches, execute: Execute) -> Execute:
    """Return a function that executes a trial, and tells the batches of the run that it is being executed."""

    async def noted(trial: PlannedTrial) -> EvalResult:
        batches.begin_trial(trial.key, trial.ordinal)
        try:
            return await execute(trial)
        finally:
            batches.end_trial(trial.key)

    return noted


def _warn_of_fleet(run: RunRecord) -> None:
    """Warn if requests of a fleet run may still be queued: workers would execute them in addition to this process."""
    note = run.noted.fleet
    if note is not None and note.cursor:
        events.log.warning(
            "run %s was executed by a fleet, and its requests may still be queued: workers that receive them "
            "execute those trials a second time. Resume it with --mailbox instead, or stop the workers first",
            run.run_id,
        )


async def _leave(work: OpenRun, error: RunBusyError) -> None:
    """Stop without modifying a run that another process executes now."""
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
    """Commit pending results, then store the status of the run; `patient` waits for an unavailable database."""
    request, run, adaptive = work.request, work.run, work.stop.adaptive
    store, observed = request.store, bool(request.observers)

    def record() -> tuple[RunRecord, events.EvalRunCompleted | None]:
        ending: RunStatus = status
        changes: NoteChanges = {"stopped": why, "cost_cap_usd": work.stop.cost_cap_usd}
        if ending in ("finished", "incomplete"):
            ending, missing = run_completion(store, run)
            changes["stopped"] = f"{missing}: {why}" if missing and why else missing
            changes |= rescoring_notes(store, run)
        if adaptive is not None or (run.parent_run is None and run.noted.is_adaptive):
            stored = sum(byte.bit_count() for byte in store.done(run.run_id))
            changes["adaptive"] = None if adaptive is None else adaptive.note(stored)
        changes["executed_seconds"] = work.executed_seconds(ending)
        if judges := judge_notes(request.scorer):
            changes["judges"] = judges
        finished_at = None if ending in ("interrupted", "incomplete") else time.time()
        notes = write_notes(**changes)
        store.update_run(run.run_id, status=ending, finished_at=finished_at, notes=notes, epoch=work.epoch)
        if work.lease is not None:
            work.lease.release()
        ended = store.get_run(run.run_id)
        return ended, run_completed(store, ended) if observed else None

    try:
        if work.writer is not None:
            await work.writer.close()
        ended, completed = await in_thread(lambda: call_store(record, "ending the run") if patient else record())
    finally:
        if work.lease is not None:
            work.lease.stop()
    if completed is not None:
        request.observers.publish(completed)
    await in_thread(lambda: write_column_file(store, ended))
    return ended


async def _break_off(work: OpenRun, error: BaseException) -> None:
    """End a run after a cancellation or an error: shielded, and the original error stays the one that is raised."""
    cancelled = isinstance(error, anyio.get_cancelled_exc_class())
    reason = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
    with anyio.CancelScope(shield=True):
        try:
            await _end(work, "interrupted", reason, patient=False)
        except Exception as further:
            error.add_note(f"and then: {type(further).__name__}: {further}")


def observe_changes(request: RunRequest) -> AbstractContextManager[None]:
    """Record which values of the suite change during the block, in which its trials are executed."""
    if request.baseline is None:
        return contextlib.nullcontext()
    return request.baseline.observe(request.suite, request.home, request.version, request.roots)


async def _warm_up(request: RunRequest, run: RunRecord, execute: Execute) -> None:
    """Execute some trials in every process and discard their results, so that cold starts are not measured."""
    async with anyio.create_task_group() as group:
        for sample in islice(request.dataset, request.config.warmup):
            key = TrialKey(run.run_id, run.experiments[0], sample.id)
            for _ in range(request.config.processes):
                group.start_soon(_discard_result, execute, PlannedTrial(key, 0, 0, 0, sample))


async def _discard_result(execute: Execute, trial: PlannedTrial) -> None:
    await execute(trial)
