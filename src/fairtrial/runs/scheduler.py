"""The local scheduler: a fixed number of workers that pull trials from a lazy plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import anyio

from fairtrial.base.formatting import money
from fairtrial.base.metrics import TRIAL_SECONDS, RunProgress
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.error_groups import error_key, error_line, error_location, plain_error
from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.runs.adaptive import GIVE_PRICES, Adaptive
from fairtrial.runs.events import Observers, SampleEvaluated, TrialStarted, log, trial_fields
from fairtrial.runs.plan import PlannedTrial, StoredTrials, TrialFeed
from fairtrial.runs.run_lease import RunLease
from fairtrial.runs.writer import Writer
from fairtrial.trials.context import current_slot
from fairtrial.trials.result import EvalResult

SAME_ERRORS = 20
"""The number of trials with the same error, and none without, after which a run warns."""

_LEAST_WAITING = 1_000  # Trials that may wait for spans at once, beside those that run.
_WAITING_PER_SLOT = 20

type Execute = Callable[[PlannedTrial], Awaitable[EvalResult]]


@dataclass(slots=True)
class Stop:
    """The request to end a run before the end of its plan. `reason` is None while it continues."""

    reason: str | None = None
    resumable: bool = True
    incomplete: bool = False  # Trials could not be executed: the run becomes `incomplete`, not `interrupted`.
    cost_cap_usd: float | None = None  # The cost cap that ended it.
    requested: anyio.Event = field(default_factory=anyio.Event)
    adaptive: Adaptive | None = None
    _moved: anyio.Event = field(default_factory=anyio.Event)

    def follow(self, adaptive: Adaptive | None) -> None:
        """Apply adaptive stopping; stop at once if the stored results suffice."""
        self.adaptive = adaptive
        self._obey()

    def see(self, result: EvalResult) -> None:
        """Record one result for adaptive stopping, if enabled."""
        if self.adaptive is not None:
            try:
                self.adaptive.see(result)
            except ConfigurationError:
                self.adaptive = None  # Its counts are invalid.
                raise
            self._obey()
            self._moved.set()
            self._moved = anyio.Event()

    def _obey(self) -> None:
        if self.adaptive is not None and self.adaptive.reason is not None and not self.adaptive.complete:
            self.request(self.adaptive.reason, resumable=False)

    async def room_for(self, ordinal: int) -> None:
        """Wait while a trial is too far ahead of the evaluated prefix."""
        while self.reason is None and self.adaptive is not None and ordinal >= self.adaptive.horizon:
            await _either(self._moved, self.requested)

    def request(self, reason: str, *, resumable: bool, incomplete: bool = False) -> None:
        """Start no further trial. The first reason is kept."""
        if self.reason is None:
            self.reason, self.resumable, self.incomplete = reason, resumable, incomplete
            self.requested.set()


@dataclass(slots=True)
class RepeatedErrors:
    """Watches whether the first trials of an experiment to finish all end in the same error, as all others may.

    If it is a programming error at one line of the user's code, the experiment is stopped; else a warning is logged.

    Attributes:
        limit: The number of trials after which an experiment is stopped; 0 never stops it.
        kept: Whether the outputs outlast the process.
        stopped: Why an experiment was stopped, by its name.
    """

    experiments: Collection[str] = ()
    limit: int = 0
    kept: bool = True
    stopped: dict[str, str] = field(default_factory=dict)
    _first: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    _decided: set[str] = field(default_factory=set)
    _warned: bool = False

    def pass_over(self, experiments: Iterable[str]) -> None:
        """Leave out experiments of which trials were scored before."""
        self._decided.update(experiments)

    @property
    def matter(self) -> bool:
        """Whether an experiment may still be stopped."""
        return self.limit > 0 and not self._decided.issuperset(self.experiments)

    def see(self, result: EvalResult) -> None:
        """Count one result, until one differs or enough are the same."""
        name = result.key.experiment
        if name in self._decided:
            return
        key = () if result.outcome not in ERRORS else error_key(result)
        first, count = self._first.get(name, (key, 0))
        if not key or key != first:
            self._decided.add(name)
            return
        count += 1
        self._first[name] = key, count
        if count < (self.limit or SAME_ERRORS):
            return
        self._decided.add(name)
        error = error_line(plain_error(result), error_location(result))
        is_mistake = result.own_metadata.get("programming_error") is True and bool(error_location(result))
        if self.limit and is_mistake:
            self._stop(result, error, count)
        elif not self._warned:
            self._warned = True
            self._warn(result, error, count)

    def _stop(self, result: EvalResult, error: str, count: int) -> None:
        name = result.key.experiment
        which = f"experiment {name}" if len(self.experiments) > 1 else "the run"
        reason = f"{which} was stopped because its first {count:,} trials all ended in the same error: {error}"
        self.stopped[name] = reason
        log.error(
            "%s. Fix it, then run it again with --resume errors (resume='errors'); max_same_errors=0 "
            "(max-same-errors = 0 in [tool.fairtrial]) turns this off",
            reason,
            extra=trial_fields(result.key, result.attempt),
        )

    def _warn(self, result: EvalResult, error: str, count: int) -> None:
        remedy = "interrupt it, fix the error, and run it again with --resume errors (resume='errors')"
        if result.outcome == "scorer_error":
            remedy = "interrupt it, fix the evaluator, and run it again"
            if self.kept:
                remedy = "the outputs are stored: fix the evaluator, then use `fairtrial rescore` (suite.rescore)"
        log.warning(
            "the first %d trials that finished all ended in the same error: %s. The run continues; if that was not "
            "expected, %s",
            count,
            error,
            remedy,
            extra=trial_fields(result.key, result.attempt),
        )


@dataclass(slots=True)
class Limits:
    """The limits that end a run early."""

    stop_on_error: bool = False
    max_cost_usd: float | None = None
    strict_cost: bool = False
    spent_usd: float = 0.0
    # Costs of stored results whose trials are repeated, by ordinal; included in `spent_usd`.
    replaced: Mapping[int, float] = field(default_factory=dict)
    only_judges: bool = False  # The calls of the task were paid for in another run.
    _warned: bool = False
    repeated_errors: RepeatedErrors = field(default_factory=RepeatedErrors)

    @property
    def matter(self) -> bool:
        """Whether there is any limit."""
        limited = self.stop_on_error or self.max_cost_usd is not None or self.strict_cost
        return limited or self.repeated_errors.matter

    def is_stopped(self, experiment: str) -> bool:
        """Whether an experiment was stopped, so that no further trial of it is started."""
        return experiment in self.repeated_errors.stopped

    def end_stopped(self, stop: Stop) -> None:
        """End the run as incomplete if experiments were stopped, after the trials of the others."""
        if self.repeated_errors.stopped:
            stop.request("; ".join(self.repeated_errors.stopped.values()), resumable=True, incomplete=True)

    def check(self, result: EvalResult, stop: Stop) -> None:
        """Check one result and stop the run if it exceeds a limit."""
        self.repeated_errors.see(result)
        stopped = self.repeated_errors.stopped
        if stopped and stopped.keys() >= set(self.repeated_errors.experiments):
            self.end_stopped(stop)
        failed = result.outcome == "scorer_error" if self.only_judges else not result.success
        if self.stop_on_error and failed:
            stop.request(f"stop_on_error: trial {result.key} ended as {result.outcome}", resumable=True)
        if self.max_cost_usd is not None or self.strict_cost:
            cost = (result.judge_cost_usd or 0.0) if self.only_judges else result.total_cost_usd
            self.spent_usd += cost - self.replaced.get(result.ordinal, 0.0)
            if result.unpriced_judge_calls or (result.unpriced_calls and not self.only_judges):
                self._meet_unpriced(result, stop)
            self.check_cost(stop)
        stop.see(result)

    def _meet_unpriced(self, result: EvalResult, stop: Stop) -> None:
        if self.strict_cost:
            reason = f"strict_cost: a model call of trial {result.key} has no known price. {GIVE_PRICES}"
            stop.request(reason, resumable=True)
        elif not self._warned:
            self._warned = True
            log.warning(
                "a model call of trial %s has no known price and does not count against max_cost_usd. %s",
                result.key,
                GIVE_PRICES,
                extra=trial_fields(result.key, result.attempt),
            )

    def budget_left(self) -> float | None:
        """Return what is left of the cost cap in US dollars; None without one."""
        return None if self.max_cost_usd is None else self.max_cost_usd - self.spent_usd

    def check_cost(self, stop: Stop) -> None:
        """Stop the run if it has reached its cost cap; costs before it was resumed count."""
        if self.max_cost_usd is not None and self.spent_usd >= self.max_cost_usd:
            stop.cost_cap_usd = self.max_cost_usd
            spent, cap = money(self.spent_usd), money(self.max_cost_usd)
            stop.request(
                f"the cost reached {spent} of {cap}. Raise max_cost_usd (--max-cost) to resume", resumable=True
            )


async def run_trials(
    trials: Iterator[PlannedTrial] | StoredTrials | TrialFeed,
    execute: Execute,
    writer: Writer,
    *,
    workers: int,
    stop: Stop,
    limits: Limits,
    observers: Observers,
    grace_seconds: float,
    on_result: Callable[[EvalResult], Awaitable[None]] | None = None,
    lease: RunLease | None = None,
    progress: RunProgress | None = None,
    share_slots: bool = False,
    window: Callable[[], int] = int,
) -> None:
    """Execute trials until the plan is empty, `stop` is requested or the `lease` of the run is lost.

    With `share_slots`, a trial that only waits for the spans of its application lets another one run, and so does one
    that waits for a batch of its model's provider, until as many wait as `window` returns.

    After a stop, trials in flight may finish within the grace time and are then cancelled; cancelled trials leave no
    result, so a resumed run executes them again.
    """
    watched, hears_starts = bool(observers), observers.hears_starts
    feed = trials if isinstance(trials, TrialFeed) else TrialFeed(trials)
    slots: SharedSlots | None = None

    async def slots_work() -> None:
        if slots is not None:
            async with slots:
                await work()

    async def work() -> None:
        async for trial in feed:
            if stop.adaptive is not None and trial.attempt == 1:
                await stop.room_for(trial.ordinal)
            if lease is not None and not lease.is_current:
                await lease.confirm()
            if stop.reason is not None:
                return
            if limits.is_stopped(trial.key.experiment):
                continue
            if hears_starts:
                observers.publish(TrialStarted(trial.key.run_id, trial.key))
            if progress is not None:
                progress.outstanding += 1
            began = time.monotonic()
            result = await execute(trial)
            TRIAL_SECONDS.observe(time.monotonic() - began, result.outcome)
            if watched:
                observers.publish(SampleEvaluated(trial.key.run_id, result, trial.sample))
            await writer.put(result, trial.sample_ordinal, trial.sample)
            if progress is not None:
                progress.outstanding -= 1
            limits.check(result, stop)
            if on_result is not None:
                await on_result(result)
            if slots is not None and await slots.is_surplus():
                return

    with unwrap_error_groups():
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as crew:
                group.start_soon(_cancel_after_grace, stop, grace_seconds, crew.cancel_scope)
                if share_slots:
                    slots = SharedSlots(workers, lambda: crew.start_soon(slots_work), window=window)
                for _ in range(workers):
                    crew.start_soon(work if slots is None else slots_work)
            group.cancel_scope.cancel()


class SharedSlots:
    """The slots of running trials: a trial that waits gives up its slot, and a further worker takes it.

    When it goes on, it queues for a slot with the workers, which queue again after every trial; first come, first
    served. A worker that has become surplus by this ends after its trial.
    """

    def __init__(self, count: int, start_worker: Callable[[], object], *, window: Callable[[], int] = int) -> None:
        self._slots = anyio.Semaphore(count)
        self._start_worker = start_worker
        self._surplus = 0
        self._most = max(_LEAST_WAITING, count * _WAITING_PER_SLOT)
        self._window = window

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        current_slot.set(self)

    async def __aexit__(self, *_: object) -> None:
        self._slots.release()

    def release(self) -> bool:
        """Give up a slot; False if too many trials wait already."""
        window = self._window()
        if self._surplus >= (window or self._most):
            if window:  # Nobody holds a slot for hours: others, whose replies have come, need it.
                self._slots.release()
            return window > 0
        self._surplus += 1
        self._slots.release()
        self._start_worker()
        return True

    async def acquire(self) -> None:
        """Take a slot again."""
        with anyio.CancelScope(shield=True):  # A cancelled caller releases its slot too.
            await self._slots.acquire()

    async def is_surplus(self) -> bool:
        """Let trials that queue go first; then return whether the worker that asks is to end."""
        if self._surplus:
            self._surplus -= 1
            return True
        self._slots.release()
        await self.acquire()
        return False


async def _either(one: anyio.Event, other: anyio.Event) -> None:
    async with anyio.create_task_group() as group:

        async def wait_for(event: anyio.Event) -> None:
            await event.wait()
            group.cancel_scope.cancel()

        group.start_soon(wait_for, one)
        group.start_soon(wait_for, other)


async def _cancel_after_grace(stop: Stop, grace_seconds: float, scope: anyio.CancelScope) -> None:
    await stop.requested.wait()
    await anyio.sleep(grace_seconds)
    scope.cancel()


@contextlib.contextmanager
def unwrap_error_groups() -> Iterator[None]:
    """Unwrap the exception group of a task group, so that the caller gets the error itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
