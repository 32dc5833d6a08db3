"""Executes and scores one trial, for the local scheduler and the fleet's workers.

It is independent of scheduling and storage. It always returns a result, whatever user code does; it raises only when it
is cancelled from outside, after closing all resources of the trial. On asyncio a trial runs in a separate task, which
is orphaned if user code ignores its cancellation.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Literal, cast

import anyio

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import canonical, dumps, from_json, to_json
from fairtrial.base.codec.escape import MARK
from fairtrial.base.isolation import Function, IsolatedError, IsolatedRunner, check_sendable
from fairtrial.base.isolation.runner import START_SECONDS
from fairtrial.base.offload import DaemonThreads, TimeLimit, supervise
from fairtrial.data.sample import Sample
from fairtrial.data.session.events import TokenUsage, TraceIncomplete
from fairtrial.data.session.session import NO_CALLS, ControlDispatcher, Session
from fairtrial.data.session.views import Envelope, RecordedView
from fairtrial.errors import BrokenUserError, CodecError, ConfigurationError, ModelRefusedError, is_programming_error
from fairtrial.scoring.evaluator import Case, NeedsIsolationError, OffloadedCall, Scorer
from fairtrial.scoring.score import Metric, Score
from fairtrial.trials.config import Experiment
from fairtrial.trials.context import TraceSource, TrialContext, TrialKey, _current, call_task_in_child, slot_released
from fairtrial.trials.failures import MAX_PAUSE, describe_error, raise_if_external, read_retry_after, retry_pause
from fairtrial.trials.result import EvalResult, Outcome, Stage, new_execution, unchecked_result
from fairtrial.trials.sample_types import (
    OUTPUT_TYPE,
    KnownTypes,
    TypeName,
    UnknownTypeError,
    restores,
    value_type_name,
)
from fairtrial.trials.task import ResolvedTask, without_recorded

_IMMUTABLE = (str, int, float, bool, bytes, type(None))
_NOT_FINITE = tuple(f'"{MARK}{name}"' for name in ("nan", "inf", "-inf"))
_MAX_FRAMES = 8
_MAX_TRACEBACK = 4_000
_MIN_GRACE = 1.0
_TRACE_GRACE = 10.0  # For a source of traces to end its wait by itself.


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt at the trial ended in an error and another one followed."""

    attempt: int
    outcome: str
    error: str


def last_attempt(recorded: RecordedView) -> RecordedView:
    """Return the events of the attempt that counts: the last one."""
    return recorded.view(attempt=len(recorded[AttemptFailed].all()) + 1)


@dataclass(frozen=True, slots=True)
class TrialRules:
    """The settings that all trials of a run share."""

    tasks: tuple[ResolvedTask, ...]  # One per experiment.
    experiments: tuple[Experiment, ...]
    scorer: Scorer
    threads: DaemonThreads = field(default_factory=DaemonThreads)
    isolated: IsolatedRunner = field(default_factory=IsolatedRunner)
    timeout_seconds: float = 300.0
    max_retries: int = 0
    close_seconds: float = 10.0
    max_output_bytes: int = 16 * 1024 * 1024
    refusals: Literal["error", "score"] = "error"
    seed: int = 0
    tags: tuple[tuple[str, str], ...] = ()
    adapter: Any = None
    shared: Any = None
    clock: Clock = SYSTEM_CLOCK
    dispatcher: ControlDispatcher | None = None  # Receives the events that trials record.
    traces: TraceSource | None = None  # Collects the spans of applications.

    def __post_init__(self) -> None:
        if self.scorer.needs_adapter and self.adapter is None:
            raise ConfigurationError(
                f"evaluator {self.scorer.name!r} has a judge without a model\n"
                "give the judge its own, llm_judge(adapter, criterion), or the suite one: EvalSuite(..., adapter=...)"
            )

    @property
    def grace_seconds(self) -> float:
        """How long user code may continue after its time limit, to clean up, before it is orphaned."""
        return max(self.close_seconds, _MIN_GRACE)

    @property
    def longest_seconds(self) -> float:
        """The longest duration of a trial: all attempts time out, the last one is scored and closed."""
        attempts = self.max_retries + 1
        executing = attempts * (self.timeout_seconds + self.close_seconds) + self.max_retries * MAX_PAUSE
        if self.traces is not None:
            executing += MAX_PAUSE
        return executing + self.timeout_seconds + self.grace_seconds

    def check_shared(self) -> None:
        """Raise if the resources of the lifespan cannot be sent to the child processes of isolated tasks."""
        if self.shared is not None and any(task.isolate and task.takes_context for task in self.tasks):
            check_sendable(self.shared, "what the lifespan gives an isolated task as ctx.shared")

    def close(self) -> None:
        """Let idle threads and child processes end."""
        self.threads.close()
        self.isolated.close()


@dataclass(slots=True)
class _Attempt:
    """The state of one attempt."""

    outcome: Outcome = "scored"
    stage: Stage | None = None
    error: BaseException | str | None = None
    output: Any = None
    output_json: str | None = None
    output_type: TypeName | None = None  # Where the output type of the task would not restore the output.
    score: Any = None
    latency: float = 0.0
    waited: float = 0.0
    retry_after: float | None = None
    close_error: str | None = None
    trace_incomplete: bool = False
    step: Stage | Literal["close"] = "setup"  # The current step, which decides the outcome of an orphaned trial.

    def fail(self, outcome: Outcome, stage: Stage, error: BaseException | str) -> None:
        self.outcome, self.stage, self.error = outcome, stage, error


@dataclass(slots=True)
class _Trial:
    """The state of a trial: everything needed for its result, also if its code does not end."""

    key: TrialKey
    ordinal: int
    started_at: float
    session: Session
    attempt: int
    state: _Attempt = field(default_factory=_Attempt)
    limit: TimeLimit = field(default_factory=TimeLimit)
    orphaned: bool = False
    earlier_attempts: int = 0

    async def finish(self, rules: TrialRules, work: Coroutine[Any, Any, None]) -> None:
        """Run the work to its end, or orphan it."""
        if not await supervise(self.limit, work, grace_seconds=rules.grace_seconds):
            self.orphaned = True
            self.state = _orphaned(self.state, rules.timeout_seconds)


def _orphaned(state: _Attempt, seconds: float) -> _Attempt:
    """Return a copy of the state of an orphaned attempt, whose code may still change the original."""
    state = replace(state)
    text = f"did not end within {seconds:g} s and ignored its cancellation"
    if state.step == "close":
        state.close_error = f"closing {text}"
    elif state.step == "score":
        state.fail("scorer_error", "score", f"scoring {text}")
    else:
        state.output = state.output_json = None
        state.latency = seconds
        state.fail("timeout", "task", f"the task {text}")
    return state


async def run_trial(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, *, attempt: int = 1
) -> EvalResult:
    """Execute and score one trial. `attempt` continues the count of an earlier execution."""
    tags = {"run_id": key.run_id, "sample_id": key.sample_id, "experiment": key.experiment}
    if rules.tags:
        tags.update(rules.tags)
    trial = _Trial(
        key, ordinal, rules.clock.time(), Session(tags=tags, clock=rules.clock, dispatcher=rules.dispatcher), attempt,
        earlier_attempts=attempt - 1,
    )  # fmt: skip
    await trial.finish(rules, _attempts(rules, trial, sample, experiment))
    return _result(trial)


async def _attempts(rules: TrialRules, trial: _Trial, sample: Sample[Any, Any], experiment: int) -> None:
    first = trial.attempt
    while True:
        state = trial.state
        context = TrialContext(
            trial.key,
            sample,
            rules.experiments[experiment],
            trial.session,
            run_seed=rules.seed,
            attempt=trial.attempt,
            shared=rules.shared,
            trace_endpoint="" if rules.traces is None else rules.traces.endpoint,
            limit=trial.limit,
        )
        await _attempt(rules, trial, context, rules.tasks[experiment])
        trial.limit.check()
        # A user that could not speak may in the next attempt; one that broke its rules is a result.
        again = state.outcome in ("task_error", "timeout") or (state.outcome == "user_error" and state.stage == "task")
        if not again or trial.attempt - first >= rules.max_retries:
            return
        failed = AttemptFailed(trial.attempt, state.outcome, describe_error(state.error))
        trial.session.record(failed, actor="framework")
        trial.session = trial.session.next_attempt()  # Before the pause: what the ended attempt records is late.
        pause = retry_pause(trial.attempt - first + 1, state.retry_after)
        with trial.limit.begin(pause + 1):
            await anyio.sleep(pause)
        trial.limit.check()
        trial.attempt += 1
        trial.state = _Attempt()


async def score_again(
    rules: TrialRules,
    key: TrialKey,
    ordinal: int,
    sample: Sample[Any, Any],
    stored: EvalResult,
    recorded: RecordedView | None,
    *,
    attempt: int = 1,
) -> EvalResult:
    """Score a stored output without calling the task; its cost and latency are kept."""
    if recorded is None:
        session = Session(clock=rules.clock)
    else:
        session = Session(session_id=recorded.session_id, tags=recorded.tags, clock=rules.clock)
        session.extend(recorded.everything().envelopes, keep_attempts=True)
    # In a separate run, scores only include the cost of their own judges; earlier ones belong to the other run.
    judges_since = len(session) if key.run_id != stored.key.run_id else 0
    state = _Attempt(output_json=dumps(stored.output), latency=stored.latency_ms / 1000)
    trial = _Trial(key, ordinal, stored.started_at, session, attempt, state, earlier_attempts=attempt - 1)
    place, experiment = next((at, one) for at, one in enumerate(rules.experiments) if one.name == key.experiment)
    try:
        state.output_type = cast("TypeName | None", stored.own_metadata.get(OUTPUT_TYPE))
        state.output = restore_output(rules, place, sample, stored)
    except UnknownTypeError as error:
        state.fail("scorer_error", "score", str(error))
    except CodecError as error:
        state.fail("scorer_error", "score", f"the stored output does not match the output type of the task: {error}")
    else:
        context = TrialContext(
            key,
            sample,
            experiment,
            session,
            run_seed=rules.seed,
            attempt=attempt,
            shared=rules.shared,
            limit=trial.limit,
        )
        await trial.finish(rules, _attempt(rules, trial, context, None))
    result = _result(trial, judges_since=judges_since)
    metadata = result.own_metadata if stored.known_latency_ms is not None else {**result.own_metadata, "untimed": True}
    return replace(result, usage=stored.usage, unpriced_calls=stored.unpriced_calls, metadata=metadata)


async def _attempt(rules: TrialRules, trial: _Trial, context: TrialContext, task: ResolvedTask | None) -> None:
    """Call the task, if there is one, score its output, and close its resources."""
    token = _current.set(context)
    try:
        if task is not None:
            if rules.traces is None:
                await _call_task(rules, trial, context, task)
            else:
                await _call_traced_task(rules, trial, context, task, rules.traces)
            trial.limit.check()
        if trial.state.error is None:
            await _score(rules, trial, context)
    finally:
        _current.reset(token)
        if context.has_resources:
            await _close(rules, trial, context)


async def _call_traced_task(
    rules: TrialRules, trial: _Trial, context: TrialContext, task: ResolvedTask, traces: TraceSource
) -> None:
    """Call the task, then wait for the spans of its application: outside of its latency and of its place in the run."""
    expected = traces.expect(context.key, context.attempt)
    try:
        await _call_task(rules, trial, context, task)
        trial.limit.check()
        collected = None
        if trial.state.error is None:
            async with slot_released():
                with trial.limit.begin(expected.wait_seconds + _TRACE_GRACE):
                    collected = await expected.wait()
            trial.limit.check()
        if collected is None:  # The task failed, and its events are for people to read; or the source took too long.
            collected = expected.collected()
        recorded = context.session.view(attempt=context.session.attempt)
        context.session.extend(without_recorded(recorded, collected.envelopes))
        if collected.problem is not None and trial.state.error is None:
            context.session.record(TraceIncomplete(collected.problem, collected.spans), actor="framework")
    finally:
        expected.close()


async def _call_task(rules: TrialRules, trial: _Trial, context: TrialContext, task: ResolvedTask) -> None:
    state = trial.state
    original = context.sample.input
    shared = type(original) in _IMMUTABLE
    try:
        # Each trial gets a copy, so that a task that modifies its input does not affect other trials of the sample.
        given = original if shared else copy.deepcopy(original)
    except BaseException as error:
        await raise_if_external(error)
        state.fail("task_error", "setup", f"the input cannot be copied for the task: {describe_error(error)}")
        return
    state.step = "task"
    started = rules.clock.monotonic()
    limit = trial.limit
    context.deadline = monotonic() + rules.timeout_seconds
    try:
        with limit.begin(rules.timeout_seconds):
            try:
                args = (given, context) if task.takes_context else (given,)
                if task.isolate:
                    state.output = await _invoke_isolated(rules, trial, context, task, given)
                elif task.is_async:
                    state.output = await task.fn(*args)
                else:
                    state.output = await _invoke(rules, task, args)
            finally:
                state.latency = max(0.0, rules.clock.monotonic() - started - state.waited - context.waited_seconds)
                context.end_task()
    except BaseException as error:
        await raise_if_external(error)
        refusal = error.refusal if isinstance(error, ModelRefusedError | IsolatedError) else None
        if refusal is None or rules.refusals == "error":
            state.retry_after = read_retry_after(error)
            state.fail("user_error" if _is_of_user(error) else "task_error", "task", error)
            return
        state.output = refusal
    # The second case: it blocked the event loop, so that it could not be cancelled, and returned late.
    if limit.expired or monotonic() > limit.deadline:
        state.output = None
        state.fail("timeout", "task", f"the task did not finish within {rules.timeout_seconds:g} s")
        return
    try:
        changed = not shared and _changed(given, original)
    except BaseException as error:
        await raise_if_external(error)
        changed = False
    if changed:
        state.fail("task_error", "task", "the task modified its input; modify a copy instead")
        return
    state.step = "output"
    await _check_output(rules, state, task)


def _is_of_user(error: BaseException) -> bool:
    """Return whether the user of a conversation was at fault, here or in a child process."""
    return isinstance(error, BrokenUserError) or (isinstance(error, IsolatedError) and error.broken_user)


async def _invoke(rules: TrialRules, task: ResolvedTask, args: tuple[Any, ...]) -> Any:
    """Call a task that is not async; in a thread, unless it is quick."""
    result = task.fn(*args) if task.inline else await rules.threads.run(partial(task.fn, *args))
    return await result if hasattr(result, "__await__") else result


async def _invoke_isolated(
    rules: TrialRules, trial: _Trial, context: TrialContext, task: ResolvedTask, given: Any
) -> Any:
    """Run the task in a child process, and copy its recorded events, however it ends."""
    function = rules.isolated.function(task.fn, f"task {task.name!r}", call_task_in_child)
    kind: Any = tuple[object, object, tuple[Envelope, ...]]
    async with _ready_child(rules, trial, function) as child:
        context.deadline = trial.limit.deadline
        args = (given, context.parts(shared=task.takes_context), task.takes_context)
        try:
            output, name, envelopes = await child.call(function, args, kind=kind)
        except IsolatedError as error:
            if error.details is not None:
                context.session.extend(from_json(tuple[Envelope, ...], error.details))
            raise
    context.session.extend(envelopes)
    return _read_output(rules, task, context.sample, output, name)


@contextlib.asynccontextmanager
async def _ready_child(rules: TrialRules, trial: _Trial, function: Function) -> AsyncIterator[Any]:
    """Start a child process that has loaded a function; its start does not count as time of the trial."""
    started = monotonic()
    trial.limit.extend(START_SECONDS)
    async with rules.isolated.child() as child:
        await child.load(function)
        trial.state.waited = monotonic() - started
        trial.limit.extend(trial.state.waited - START_SECONDS)
        yield child


async def _offload(rules: TrialRules, trial: _Trial, call: OffloadedCall) -> Any:
    """Run an evaluator's blocking function in a thread or, isolated, in a child process."""
    if call.wrapper is None:
        return await rules.threads.run(partial(call.fn, *call.args, **call.kwargs))
    function = rules.isolated.function(call.fn, f"evaluator {call.name!r}", call.wrapper)
    async with _ready_child(rules, trial, function) as child:
        return await child.call(function, (call.name, *call.args), call.kwargs, kind=call.kind)


def restore_output(rules: TrialRules, experiment: int, sample: Sample[Any, Any], result: EvalResult) -> Any:
    """Return the output of a result that came as JSON as the task returned it; raises `CodecError`."""
    name = cast("TypeName | None", result.own_metadata.get(OUTPUT_TYPE))
    return _read_output(rules, rules.tasks[experiment], sample, result.output, name)


def _read_output(
    rules: TrialRules, task: ResolvedTask, sample: Sample[Any, Any], output: Any, name: TypeName | None
) -> Any:
    """Return an output that was JSON, read under its name or, without one, as the output type of the task."""
    if name is None:
        return output if task.output_type is object else from_json(task.output_type, to_json(output))
    values = (sample.input, sample.expected)
    known = KnownTypes(task.fn, rules.scorer.function, output=task.output_type, values=values)
    return known.read(name, output, "output")


def _changed(given: Any, original: Any) -> bool:
    try:
        return bool(given != original) and canonical(given) != canonical(original)
    except Exception:
        return False


async def _check_output(rules: TrialRules, state: _Attempt, task: ResolvedTask) -> None:
    """Encode the output, so that an output that cannot be stored is an error of its trial."""
    output = state.output
    limit = rules.max_output_bytes
    try:
        size = len(output) if isinstance(output, str | bytes) else 0
        text = dumps(output) if size <= limit else ""
        name = value_type_name(output) if text and type(output) is not str else ""
        restored = restores(task.output_type, name, output)
    except BaseException as error:  # Encoding calls user code: properties, iterators, serializers.
        await raise_if_external(error)
        why = str(error) if isinstance(error, CodecError) else describe_error(error)
        state.fail("task_error", "output", f"the output cannot be stored: {why}")
    else:
        if max(size, len(text)) > limit:
            state.fail("task_error", "output", f"the output is larger than {limit:,} bytes; return a reference to it")
        elif MARK in text and any(name in text for name in _NOT_FINITE):
            state.fail("task_error", "output", "the output contains NaN or an infinity")
        else:
            state.output_json = text
            state.output_type = None if restored else name
    if state.error is not None:
        state.output = None


async def _score(rules: TrialRules, trial: _Trial, context: TrialContext) -> None:
    state, limit = trial.state, trial.limit
    state.step = "score"
    context.scoring = True
    scorer, key, sample, session = rules.scorer, context.key, context.sample, context.session
    try:
        if scorer.quick and not scorer.needs_session:
            # It does not await, so a timeout could not interrupt it.
            case = Case(sample, state.output, run_id=key.run_id, guarded=True, environment=context.environment)
            try:  # Not `contextlib.suppress`: this is done for every trial.
                state.score = scorer.score_now(case)
                return
            except NeedsIsolationError:
                pass
        # A view of the session at the end of the task: events of judges do not belong to the task.
        view = session.view(attempt=session.attempt)
        incomplete = view[TraceIncomplete].latest() if scorer.needs_session else None
        if incomplete is not None:
            state.trace_incomplete = True
            state.fail("scorer_error", "score", f"the application's trace is incomplete: {incomplete.reason}")
            return
        case = Case(
            sample,
            state.output,
            view,
            adapter=rules.adapter,
            run_id=key.run_id,
            offload=partial(_offload, rules, trial),
            recorder=session,
            guarded=True,
            environment=context.environment,
        )
        context.deadline = monotonic() + rules.timeout_seconds  # Judges have a separate time limit.
        with limit.begin(rules.timeout_seconds):
            state.score = await scorer.score(case)
    except BaseException as error:
        await raise_if_external(error)
        state.fail("user_error" if _is_of_user(error) else "scorer_error", "score", error)
        return
    if limit.expired:
        state.score = None
        state.fail("scorer_error", "score", f"scoring did not finish within {rules.timeout_seconds:g} s")


async def _close(rules: TrialRules, trial: _Trial, context: TrialContext) -> None:
    """Close the resources of a trial: shielded, with a time limit, and without affecting the result."""
    state = trial.state
    state.step = "close"
    try:
        with trial.limit.begin(rules.close_seconds, shield=True):
            await context.resources.aclose()
    except BaseException as error:
        await raise_if_external(error)
        state.close_error = describe_error(error)
    if trial.limit.expired:
        state.close_error = f"closing did not finish within {rules.close_seconds:g} s"


def _with_user(score: Score, usage: TokenUsage) -> Score:
    """Return a score with what the simulated user took, as metrics."""
    found = [Metric("user_tokens", float(usage.total_tokens), higher_is_better=False)]
    if usage.cost_usd is not None:
        found.append(Metric("user_cost_usd", usage.cost_usd, higher_is_better=False))
    names = {metric.name for metric in found}
    return replace(score, metrics=(*(metric for metric in score.metrics if metric.name not in names), *found))


def _result(trial: _Trial, *, judges_since: int = 0) -> EvalResult:
    session, state = trial.session, trial.state
    metadata: dict[str, Any] = {}
    if trial.attempt > 1:
        metadata["earlier_attempts"] = trial.earlier_attempts
    if session.late_events:
        metadata["late_events"] = session.late_events
    if trial.orphaned:
        metadata["orphaned"] = True
    if state.close_error is not None:
        metadata["close_error"] = state.close_error
    if state.trace_incomplete:
        metadata["trace_incomplete"] = True
    if state.output_type is not None and state.output_json is not None:
        metadata[OUTPUT_TYPE] = state.output_type
    calls, snapshot = NO_CALLS, None
    if len(session):
        try:
            calls = session.call_totals(judges_since=judges_since)
            if calls.user is not None:
                metadata["user"] = {"tokens": calls.user.total_tokens, "cost_usd": calls.user.cost_usd}
                if state.score is not None:
                    state.score = _with_user(state.score, calls.user)
            snapshot = session.snapshot()
        except Exception as error:  # Events hold what user code recorded, such as a cost that is no number.
            state.output = state.output_json = state.score = None
            state.fail("task_error", "output", f"the recorded events cannot be stored: {describe_error(error)}")
    if isinstance(state.error, BaseException) and state.error.__traceback__ is not None:
        frames, raised = "", state.error
        if isinstance(raised, BrokenUserError) and raised.__cause__ is not None:
            raised = raised.__cause__
        if isinstance(raised, IsolatedError):
            frames, mistake = raised.traceback, raised.mistake
        else:
            mistake = is_programming_error(raised)
        if not frames:
            frames = "".join(traceback.format_list(traceback.extract_tb(raised.__traceback__)[-_MAX_FRAMES:]))
        metadata["traceback"] = frames[-_MAX_TRACEBACK:]
        if mistake:
            metadata["programming_error"] = True
    message = describe_error(state.error) if state.error is not None else None
    return unchecked_result(
        trial.key, trial.ordinal, state.outcome, state.score, state.output, round(state.latency * 1000), calls.usage,
        message, state.stage, trial.attempt, new_execution(), trial.started_at, metadata, calls.judge_cost_usd,
        calls.cache_hits, calls.unpriced_calls, calls.unpriced_judge_calls, calls.cut_off_calls, calls.refused_calls,
        calls.unknown_endings, (), 0, state.output_json, snapshot, None,
    )  # fmt: skip
