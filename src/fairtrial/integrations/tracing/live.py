"""Live traces as trials of a run a day."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import batched
from typing import TYPE_CHECKING, Any

import anyio

from fairtrial.base.codec import digest
from fairtrial.errors import ConfigurationError
from fairtrial.integrations.tracing.importing import RecordedTrace, recorded_trial
from fairtrial.integrations.tracing.live_traces import (
    DAY_SECONDS,
    NEVER_ENDING,
    LiveCounts,
    LiveReceiver,
    LiveTrace,
    LiveTraces,
    Sampling,
    position,
    utc_day,
)
from fairtrial.runs.adaptive import check_prices
from fairtrial.runs.events import log
from fairtrial.runs.executor import Executor, execute_here
from fairtrial.runs.identity import ResumedRun, describe_run, identify
from fairtrial.runs.imported import imported_result
from fairtrial.runs.plan import PlannedTrial, RunRequest, TrialFeed
from fairtrial.runs.runner import Interrupt, OpenRun, execute_trials, run_to_end
from fairtrial.runs.scheduler import Execute
from fairtrial.runs.writer import ask_store
from fairtrial.store.notes import SAMPLING_STRATUM, SAMPLING_WEIGHT, SamplingNote, write_notes
from fairtrial.store.redact import current
from fairtrial.store.sql import SqlStore
from fairtrial.trials.context import TrialKey
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from fairtrial.store.protocol import RunRecord
    from fairtrial.suites.suite import EvalSuite

_POLL_SECONDS = 0.2
_ATTEMPTS = 3  # Of scoring.
_RETRY_SECONDS = 60.0
_FEW_TRIALS = 20  # Before that, their number says too little about the rest of the day.
_NEAR_DAYS = range(-9, 3)  # Whose runs may have a trace, whose spans are sent again.
_TOLERANCE = 0.95  # Rates are lowered when the budget allows less than this share of them.


def lowered(factor: float, budget: float, spent: float, per_second: float, seconds: float) -> float:
    """Return the factor of all shares with which the rest of a day costs what is left of its budget, at most `factor`.

    Args:
        factor: The present one.
        budget: For the day.
        spent: So far, with what is being scored.
        per_second: What scoring costs at present.
        seconds: The rest of the day.
    """
    left, needed = max(budget - spent, 0.0), per_second * seconds
    return factor * left / needed if left < _TOLERANCE * needed else factor if left else 0.0


class _DayTrials:
    """The trials of a day's run: each is planned when its trace is complete, until the day is over."""

    def __init__(self, service: LiveWatch, day: str, work: OpenRun, execute: Execute) -> None:
        self._service, self._day, self._work, self._execute = service, day, work, execute
        self._run = work.run
        self._queue: deque[PlannedTrial] = deque()
        self._lock = anyio.Lock()
        self._free: deque[int] = deque()  # Ordinals below the next that have no result.
        self._next = 0
        self._executed: dict[int, EvalResult] = {}  # Results that may not be committed yet.
        self._others: list[str] = []  # Other runs that may have a trace whose last spans are sent again.
        self._spent = self._load = 0.0
        self._scored = self._before = self._planned = 0
        self._first_at, self._last_at = math.inf, -math.inf

    async def begin(self, done: bytearray) -> tuple[TrialFeed, int]:
        """Return the feed of trials; their number is not known."""
        await ask_store(self._read, "reading the run")
        self._next = (len(done) << 3) if done else 0
        free = [place for place in range(self._next) if not done[place >> 3] >> (place & 7) & 1]
        while free and free[-1] == self._next - 1:
            self._next = free.pop()
        self._free.extend(free)
        return TrialFeed(self), self._work.request.config.max_concurrent

    def _read(self) -> None:
        store, run = self._service.store, self._run
        totals = store.totals(run.run_id)
        self._spent = sum(one.judge_cost_usd or 0.0 for one in totals)
        self._scored = self._before = sum(one.outcomes.get("scored", 0) for one in totals)
        day = date.fromisoformat(self._day)
        days = [(day + timedelta(days=more)).isoformat() for more in _NEAR_DAYS]
        others = [one for one in store.live_runs(run.suite, days) if one.run_id != run.run_id]
        self._others = [one.run_id for one in others]
        for one in others:
            if one.dataset_version == self._day:  # Of another evaluator: the budget is the day's.
                self._spent += sum(part.judge_cost_usd or 0.0 for part in store.totals(one.run_id))

    def missing(self, done: bytearray) -> TrialFeed:
        """Return no trials: what the store has lost is in the spool, and is read again by the next run."""
        return TrialFeed(iter(()))

    def replaced_costs(self) -> Mapping[int, float]:
        """Return nothing: the budget is the service's."""
        return {}

    async def execute(self, trial: PlannedTrial) -> EvalResult:
        """Score a trace; one whose application failed keeps its error."""
        stored = trial.stored
        result = stored if stored is not None and stored.stage == "task" else await self._execute(trial)
        if self._work.code:
            result = replace(result, code=self._work.code)
        self._executed[trial.ordinal] = result
        self._spent += result.judge_cost_usd or 0.0
        self._scored += 1
        return result

    def __aiter__(self) -> _DayTrials:
        return self

    async def __anext__(self) -> PlannedTrial:
        async with self._lock:
            while not self._queue:
                if self._work.stop.reason is not None or not await ask_store(self._collect, "reading the spool"):
                    raise StopAsyncIteration
                if not self._queue:
                    await anyio.sleep(_POLL_SECONDS)
            return self._queue.popleft()

    def _collect(self) -> bool:
        """Plan the traces that are complete; returns whether more may come."""
        service, traces = self._service, self._service.traces
        self.confirm()
        self._keep_to_budget()
        taken, free, next_ = traces.take_due(self._day), self._free.copy(), self._next
        try:
            due = [(one, found) for one in taken if (found := traces.read(one)) is not None]
            if due:
                self._plan(due)
        except BaseException:  # `ask_store` calls this again.
            if not self._queue:
                self._free, self._next = free, next_
            traces.release({one.trace for one in taken} - {trial.sample.id for trial in self._queue})
            raise
        over = utc_day(service.clock()) > self._day
        end = datetime.fromisoformat(self._day).replace(tzinfo=UTC).timestamp() + DAY_SECONDS
        late = service.clock() > end + 2 * NEVER_ENDING * traces.settle_seconds and not self._executed
        return bool(self._queue) or not over or (not late and any(day <= self._day for day in traces.days()))

    def _plan(self, due: Sequence[tuple[LiveTrace, RecordedTrace]]) -> None:
        store, traces, run = self._service.store, self._service.traces, self._run
        ids = [one.trace for one, _ in due]
        known = {found.sample_id: found for found in store.results(run.run_id, sample_ids=ids, outputs=False)}
        elsewhere = {
            found.sample_id for other in self._others for found in store.results(other, sample_ids=ids, outputs=False)
        }
        left_out, planned = [], []
        for one, found in due:
            stratum, share = traces.sampling.share_of(found)
            before = known.get(one.trace)
            factor = one.factor if before is not None else min(one.factor, traces.factor(self._service.clock()))
            chance = min(1.0, factor * share)
            again = before is not None and before.outcome == "scorer_error" and before.attempt < _ATTEMPTS
            if one.trace in elsewhere or (before is not None and not again) or position(one.trace) >= chance:
                left_out.append(one.trace)
                continue
            if before is not None:
                ordinal, attempt = before.ordinal, before.attempt + 1
            else:
                ordinal, attempt = self._free.popleft() if self._free else self._next, 1
                self._next = max(self._next, ordinal + 1)
            facts: dict[str, float | str] = {SAMPLING_WEIGHT: 1 / chance}
            if stratum:
                facts[SAMPLING_STRATUM] = stratum
            try:
                planned.append(self._trial(found, ordinal, attempt, facts))
                self._load += 1 / factor
                self._first_at = min(self._first_at, one.first_at)
                self._last_at = max(self._last_at, one.first_at)
            except Exception as error:  # Whatever a foreign program may have written.
                log.warning("trace %s cannot be read and is left out: %s: %s", one.trace, type(error).__name__, error)
                traces.counts.incomplete += 1
                left_out.append(one.trace)
                if before is None:  # Else the store has a result there.
                    self._free.appendleft(ordinal)
        if planned:
            store.extend_run(run.run_id, self._next, epoch=self._work.epoch)
        self._queue.extend(planned)
        self._planned += len(planned)
        traces.forget(left_out)

    def _trial(
        self, trace: RecordedTrace, ordinal: int, attempt: int, facts: Mapping[str, float | str]
    ) -> PlannedTrial:
        recorded = recorded_trial(trace, trace.events())
        sample = replace(recorded.sample, metadata={**recorded.sample.metadata, **facts})
        key = TrialKey(self._run.run_id, self._run.experiments[0], sample.id)
        stored = replace(imported_result(key, ordinal, recorded.imported(0)), attempt=attempt)
        return PlannedTrial(key, ordinal, ordinal, 0, sample, attempt, stored)

    def confirm(self) -> None:
        """Delete the traces from the spool whose results are in the store; scoring that failed is repeated later."""
        executed, traces, done, seen = dict(self._executed), self._service.traces, [], []
        refused = self._work.writer.refused_ordinals if self._work.writer is not None else set[int]()
        for ordinal in refused & executed.keys():  # Named in the log.
            traces.leave_out(executed.pop(ordinal).sample_id)
            del self._executed[ordinal]
        for some in batched(executed, 500):
            for found in self._service.store.results(self._run.run_id, ordinals=some, outputs=False):
                own = executed[found.ordinal]
                if found.attempt < own.attempt and found.outcome != "scored":
                    continue  # The stored result is of an earlier attempt.
                seen.append(found.ordinal)
                if found.outcome == "scorer_error" and found.attempt < _ATTEMPTS:
                    traces.put_back(found.sample_id, _RETRY_SECONDS * 2 ** (found.attempt - 1))
                else:
                    done.append(found.sample_id)
        if done:
            traces.forget(done)
        for ordinal in seen:
            del self._executed[ordinal]

    def _keep_to_budget(self) -> None:
        """Lower all shares if the day would cost more than its budget, and note it with the run."""
        traces, now = self._service.traces, self._service.clock()
        budget, day = traces.sampling.max_cost_usd, utc_day(now)
        if budget is None or day != self._day or not self._scored or not self._spent:
            return
        factor, mean = traces.factor(now), self._spent / self._scored
        waiting = max(0, self._planned - (self._scored - self._before))
        # As many as those so far would have been, had all been taken at the present rates.
        seconds = self._last_at - self._first_at
        per_second = mean * factor * self._load / seconds if self._planned >= _FEW_TRIALS and seconds > 0 else 0.0
        new = lowered(factor, budget, self._spent + mean * waiting, per_second, DAY_SECONDS - now % DAY_SECONDS)
        if new < factor:
            traces.set_factor(day, new)
            self.note((now, new))

    def note(self, *rates: tuple[float, float]) -> None:
        """Note with the run how it is sampled, and by which rates from now on."""
        store, counts, noted = self._service.store, replace(self._service.traces.counts), self._service.noted
        self._service.noted = counts
        before = store.get_run(self._run.run_id).noted.sampling or self._service.sampling_note(self._day)
        note = replace(
            before,
            rates=before.rates + rates,
            received=before.received + counts.received - noted.received,
            incomplete=before.incomplete + counts.incomplete - noted.incomplete,
            too_large=before.too_large + counts.too_large - noted.too_large,
            unstorable=before.unstorable + counts.unstorable - noted.unstorable,
        )
        store.update_run(self._run.run_id, notes=write_notes(sampling=note), epoch=self._work.epoch)


@dataclass(frozen=True, slots=True)
class _ScoringExecutor:
    """Executes the trials of an executor, without suspecting a trial with which the process ended."""

    inner: Executor
    rules: None = None

    def execute(self, trial: PlannedTrial) -> Any:
        return self.inner.execute(trial)


@asynccontextmanager
async def _open_executor(request: RunRequest) -> AsyncIterator[Executor]:
    async with execute_here(request.rules, request.lifespan) as inner:
        yield _ScoringExecutor(inner)


class LiveWatch:
    """Receives the traces of an application and scores a sample of them, in a run for each day (UTC).

    Args:
        suite: Its evaluator scores the traces, with its settings; its task and its samples are not used.
        store: In SQLite or PostgreSQL; has the runs and the spool.
        sampling: Which traces are scored.
        host: The interface that traces are received on.
        port: The port; 0 for any free one.
        settle_seconds: A trace is complete when nothing has arrived for this time.
        clock: The time, in seconds since the epoch.
        words: The command line after `fairtrial` that starts it again.
    """

    def __init__(
        self,
        suite: EvalSuite,
        store: object,
        sampling: Sampling,
        *,
        host: str = "127.0.0.1",
        port: int = 4318,
        settle_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
        words: Sequence[str] = (),
    ) -> None:
        if not isinstance(store, SqlStore):
            raise ConfigurationError("a watch needs a store in SQLite or PostgreSQL, which keeps what it acknowledged")
        if len(suite.experiments) > 1:
            raise ConfigurationError(
                f"suite {suite.name!r} has {len(suite.experiments)} experiments, and live traces are of one: "
                "give the watch a suite of its own"
            )
        if not 0 < settle_seconds < math.inf:
            raise ConfigurationError(f"settle_seconds must be above 0 (got {settle_seconds:g})")
        if suite.config.processes > 1:
            raise ConfigurationError(
                f"EvalConfig.processes of suite {suite.name!r} must be 1 (got {suite.config.processes}): "
                "live traces are scored in one process"
            )
        if suite.config.max_cost_usd is not None:
            raise ConfigurationError(
                f"EvalConfig.max_cost_usd of suite {suite.name!r} is the budget of a run, and live traces have "
                f"one of a day: leave it out and give --max-cost {suite.config.max_cost_usd:g}/day"
            )
        self.store = store
        self.clock = clock
        self.noted = LiveCounts()  # What runs say already.
        self._after = ""  # Days before it are over.
        self._sampling = sampling
        self._words = [current().text(word) for word in words]
        prepared = suite.prepared()
        check_prices(replace(prepared.config, max_cost_usd=sampling.max_cost_usd), replace(prepared.rules, tasks=()))
        endless: dict[str, Any] = {
            "max_cost_usd": None,
            "stop_when": None,
            "stop_on_error": False,
            "max_same_errors": 0,
        }
        config = replace(prepared.config, repeats=1, warmup=0, **endless)
        self._request = replace(prepared, store=store, config=config, rules=replace(prepared.rules, traces=None))
        self.traces = LiveTraces(store.spool, suite.name, sampling, settle_seconds=settle_seconds, clock=clock)
        self.receiver = LiveReceiver(self.traces, host=host, port=port)

    def sampling_note(self, day: str) -> SamplingNote:
        """Return how the traces of a day are sampled, before any rate was lowered."""
        sampling = self._sampling
        strata = tuple(f"{one.name}:{one.share:g}" for one in sampling.strata)
        return SamplingNote(day, sampling.sample, strata, sampling.max_cost_usd)

    async def run(self, interrupt: Interrupt) -> None:
        """Receive and score until the interrupt: trials in flight are finished, the rest stays in the spool."""
        await ask_store(self._restore_factor, "reading the runs")
        with self.receiver.running():
            while not interrupt.asked:
                days = self.traces.days()
                if days:
                    await self._run_day(max(days[0], self._after), interrupt)
                else:
                    await anyio.sleep(_POLL_SECONDS)

    def _restore_factor(self) -> None:
        today = utc_day(self.clock())
        for run in self.store.live_runs(self._request.suite, [today]):
            note = run.noted.sampling
            if note is not None and note.rates:
                self.traces.set_factor(today, note.rates[-1][1])
                return

    async def _run_day(self, day: str, interrupt: Interrupt) -> None:
        trials: list[_DayTrials] = []

        def make_source(work: OpenRun, execute: Execute) -> _DayTrials:
            trials.append(_DayTrials(self, day, work, execute))
            return trials[-1]

        run = await run_to_end(
            self._request,
            lambda work: execute_trials(work, make_source, _open_executor),
            opening=partial(self._open_run, day=day),
            interrupt=interrupt,
        )
        await ask_store(lambda: self._end_day(run, trials), "ending the run")

    def _end_day(self, run: RunRecord, trials: Sequence[_DayTrials]) -> None:
        for one in trials:
            one.confirm()
            one.note()
        self.traces.release()
        if run.status in ("finished", "unscored", "incomplete"):  # What is not complete belongs to the next day.
            self._after = utc_day(self.clock())
        if run.status in ("unscored", "incomplete"):
            # Its trials were scored several times, or their results cannot be stored: the day is over.
            notes = write_notes(stopped=None)
            ended_at = run.finished_at or self.clock()
            self.store.update_run(run.run_id, status="finished", finished_at=ended_at, notes=notes)

    def _open_run(self, request: RunRequest, day: str) -> ResumedRun:
        """Resume the run of a day, or create it; another evaluator has a run of its own."""
        identity = identify(request)
        for run in self.store.live_runs(request.suite, [day]):
            if run.status == "finished":
                continue
            if (run.evaluator, run.code_hash) == (identity.evaluator[0], identity.code[-1]):
                return ResumedRun(replace(run, dataset_size=0), resumed=True)
            self.store.update_run(run.run_id, status="finished", finished_at=self.clock())
        made = describe_run(identity, request.experiments, request.config, tags=request.tags)
        start = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        run = replace(
            made,
            dataset_version=day,
            dataset_fingerprint=digest(["live", made.run_id])[:32],
            dataset_size=0,
            created_at=min(max(self.clock(), start), start + DAY_SECONDS - 1),
            notes=write_notes(sampling=self.sampling_note(day))
            | (write_notes(resume_words=self._words) if self._words else {}),
        )
        return ResumedRun(self.store.create_run(run), resumed=False)
