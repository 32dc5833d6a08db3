"""One trial from its input to its result: the function the local scheduler and the fleet's workers share.

It knows nothing of scheduling and storage. Whatever user code does, it returns a result; it raises only when it is
cancelled from outside, and then everything the trial opened has been closed.
"""

from __future__ import annotations

import copy
import random
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio

from fairtrial.clock import SYSTEM_CLOCK, Clock
from fairtrial.codec import canonical, dumps, from_json, to_json
from fairtrial.codec.escape import MARK
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError
from fairtrial.offload import DaemonThreads, on_trio, run_isolated
from fairtrial.scoring.evaluator import Case, Scorer
from fairtrial.session.session import NO_CALLS, Session
from fairtrial.session.views import Envelope, RecordedView
from fairtrial.trials.context import TrialContext, _current
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult, Outcome, Stage
from fairtrial.trials.task import ResolvedTask

_IMMUTABLE = (str, int, float, bool, bytes, type(None))
_NOT_FINITE = tuple(f'"{MARK}{name}"' for name in ("nan", "inf", "-inf"))
_MAX_ERROR = 10_000


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt at the trial ended in an error and another one followed."""

    attempt: int
    outcome: str
    error: str


@dataclass(frozen=True, slots=True)
class TrialRules:
    """What is the same for every trial of a run."""

    tasks: tuple[ResolvedTask, ...]  # One per experiment.
    experiments: tuple[Experiment, ...]
    scorer: Scorer
    threads: DaemonThreads = field(default_factory=DaemonThreads)
    timeout_seconds: float = 300.0
    max_retries: int = 0
    close_seconds: float = 10.0
    max_output_bytes: int = 16 * 1024 * 1024
    seed: int = 0
    tags: tuple[tuple[str, str], ...] = ()
    adapter: Any = None
    shared: Any = None
    clock: Clock = SYSTEM_CLOCK

    async def offload(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, isolate: bool, kind: Any
    ) -> Any:
        """Run a user's blocking function in a thread or, isolated, in a child process."""
        call = partial(fn, *args, **kwargs)
        return await run_isolated(call, kind=kind) if isolate else await self.threads.run(call)


@dataclass(slots=True)
class _Attempt:
    """How one attempt went so far."""

    outcome: Outcome = "scored"
    stage: Stage | None = None
    error: BaseException | str | None = None
    output: Any = None
    output_json: str | None = None
    score: Any = None
    latency: float = 0.0
    retry_after: float | None = None
    close_error: str | None = None

    def fail(self, outcome: Outcome, stage: Stage, error: BaseException | str) -> None:
        self.outcome, self.stage, self.error = outcome, stage, error


async def run_trial(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, *, attempt: int = 1
) -> EvalResult:
    """Execute and score one trial. `attempt` continues the count of an earlier execution."""
    tags = {"run_id": key.run_id, "sample_id": key.sample_id, "experiment": key.experiment}
    if rules.tags:
        tags.update(rules.tags)
    session = Session(tags=tags, clock=rules.clock)
    started_at = rules.clock.time()
    first = attempt
    while True:
        context = TrialContext(
            key,
            sample,
            rules.experiments[experiment],
            session,
            run_seed=rules.seed,
            attempt=attempt,
            shared=rules.shared,
        )
        state = await _attempt(rules, context, rules.tasks[experiment])
        if state.outcome not in ("task_error", "timeout") or attempt - first >= rules.max_retries:
            break
        session.record(AttemptFailed(attempt, state.outcome, _describe(state.error)), actor="framework")
        session = session.next_attempt()  # Before the pause: what the ended attempt records meanwhile is late.
        await anyio.sleep(_backoff(attempt - first, state.retry_after))
        attempt += 1
    return _result(key, ordinal, attempt, started_at, session, state)


async def score_again(
    rules: TrialRules,
    key: TrialKey,
    ordinal: int,
    sample: Sample[Any, Any],
    stored: EvalResult,
    recorded: RecordedView | None,
    *,
    output_type: Any = object,
    attempt: int = 1,
) -> EvalResult:
    """Score a stored output: the task is not called, and what it cost and how long it took stay as they were."""
    if recorded is None:
        session = Session(clock=rules.clock)
    else:
        session = Session(session_id=recorded.session_id, tags=recorded.tags, clock=rules.clock)
        session.extend(recorded.everything().envelopes, keep_attempts=True)
    # In a run of their own, scores are charged with their own judges; the earlier ones were paid for in the other run.
    judges_since = len(session) if key.run_id != stored.key.run_id else 0
    state = _Attempt(output_json=dumps(stored.output), latency=stored.latency_ms / 1000)
    try:
        state.output = stored.output if output_type is object else from_json(output_type, to_json(stored.output))
    except CodecError as error:
        state.fail("scorer_error", "score", f"the stored output is no longer what the task returns: {error}")
    else:
        experiment = next(found for found in rules.experiments if found.name == key.experiment)
        context = TrialContext(key, sample, experiment, session, run_seed=rules.seed, attempt=attempt)
        token = _current.set(context)
        try:
            await _score(rules, context, state)
        finally:
            _current.reset(token)
    result = _result(key, ordinal, attempt, stored.started_at, session, state, judges_since=judges_since)
    return replace(result, usage=stored.usage, unpriced_calls=stored.unpriced_calls)


async def _attempt(rules: TrialRules, context: TrialContext, task: ResolvedTask) -> _Attempt:
    state = _Attempt()
    token = _current.set(context)
    try:
        await _call_task(rules, context, task, state)
        if state.error is None:
            await _score(rules, context, state)
    finally:
        _current.reset(token)
        if context.has_resources:
            await _close(rules, context, state)
    return state


async def _call_task(rules: TrialRules, context: TrialContext, task: ResolvedTask, state: _Attempt) -> None:
    original = context.sample.input
    shared = type(original) in _IMMUTABLE
    # A trial gets its own copy: what one task does to its input must not reach another trial of the same sample.
    given = original if shared else copy.deepcopy(original)
    context.deadline = time.monotonic() + rules.timeout_seconds
    started = rules.clock.monotonic()
    scope = anyio.CancelScope(deadline=anyio.current_time() + rules.timeout_seconds)
    try:
        with scope:
            try:
                state.output = await _invoke(rules, task, (given, context) if task.takes_context else (given,))
            finally:
                state.latency = rules.clock.monotonic() - started
    except BaseException as error:
        await _raise_if_cancelled(error)
        state.retry_after = _retry_after(error)
        state.fail("task_error", "task", error)
        return
    if scope.cancelled_caught:
        state.fail("timeout", "task", f"the task did not finish within {rules.timeout_seconds:g} s")
        return
    if not shared and _changed(given, original):
        state.fail("task_error", "task", "the task changed its input; change a copy of it instead")
        return
    _check_output(rules, state)


async def _invoke(rules: TrialRules, task: ResolvedTask, args: tuple[Any, ...]) -> Any:
    if task.is_async:
        return await task.fn(*args)
    if task.isolate:
        return await _isolated_task(task, args)
    result = task.fn(*args) if task.inline else await rules.threads.run(partial(task.fn, *args))
    return await result if hasattr(result, "__await__") else result


async def _isolated_task(task: ResolvedTask, args: tuple[Any, ...]) -> Any:
    """Run the task in a child process, and bring home what it recorded there."""
    context = args[1] if len(args) == 2 else None
    known = len(context.session) if context is not None else 0

    def call() -> tuple[Any, tuple[Envelope, ...]]:
        output = task.fn(*args)
        return output, context.session.everything().envelopes[known:] if context is not None else ()

    kind: Any = types.GenericAlias(tuple, (task.output_type, tuple[Envelope, ...]))
    output, envelopes = await run_isolated(call, kind=kind)
    if context is not None:
        context.session.extend(envelopes)
    return output


def _changed(given: Any, original: Any) -> bool:
    try:
        return bool(given != original) and canonical(given) != canonical(original)
    except Exception:
        return False


def _check_output(rules: TrialRules, state: _Attempt) -> None:
    """Encode the output now: what cannot be stored is this trial's error, not the store's."""
    output = state.output
    limit = rules.max_output_bytes
    size = len(output) if isinstance(output, str | bytes) else 0
    try:
        text = dumps(output) if size <= limit else ""
    except CodecError as error:
        state.fail("task_error", "output", f"the output cannot be stored: {error}")
    else:
        if max(size, len(text)) > limit:
            state.fail("task_error", "output", f"the output is larger than {limit:,} bytes; return a reference to it")
        elif MARK in text and any(name in text for name in _NOT_FINITE):
            state.fail("task_error", "output", "the output holds NaN or an infinity")
        else:
            state.output_json = text
    if state.error is not None:
        state.output = None


async def _score(rules: TrialRules, context: TrialContext, state: _Attempt) -> None:
    scorer, key, sample, session = rules.scorer, context.key, context.sample, context.session
    try:
        if scorer.quick and not scorer.needs_session:
            # Nothing in it waits, so there is nothing a timeout could cut short.
            state.score = scorer.score_now(Case(sample, state.output, run_id=key.run_id))
            return
        # The session as it stood when the task ended: what judges record from here on is not the task's.
        view = session.view(attempt=session.attempt)
        case = Case(
            sample,
            state.output,
            view,
            adapter=rules.adapter,
            run_id=key.run_id,
            offload=rules.offload,
            recorder=session,
        )
        context.deadline = time.monotonic() + rules.timeout_seconds  # Judges have a time of their own.
        with anyio.CancelScope(deadline=anyio.current_time() + rules.timeout_seconds) as scope:
            state.score = await scorer.score(case)
    except BaseException as error:
        await _raise_if_cancelled(error)
        state.fail("scorer_error", "score", error)
        return
    if scope.cancelled_caught:
        state.fail("scorer_error", "score", f"scoring did not finish within {rules.timeout_seconds:g} s")


async def _close(rules: TrialRules, context: TrialContext, state: _Attempt) -> None:
    """Close what the trial opened: shielded, bounded, and never at the cost of the result."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + rules.close_seconds) as scope:
        try:
            await context.resources.aclose()
        except BaseException as error:
            if isinstance(error, anyio.get_cancelled_exc_class()):
                raise
            state.close_error = _describe(error)
    if scope.cancelled_caught:
        state.close_error = f"closing did not finish within {rules.close_seconds:g} s"


async def _raise_if_cancelled(error: BaseException) -> None:
    """Let through what came from outside: a cancellation, Ctrl-C. The rest is user code's own."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    if isinstance(error, anyio.get_cancelled_exc_class()):
        if not on_trio():
            import asyncio

            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise error
        await anyio.lowlevel.checkpoint_if_cancelled()


def _retry_after(error: BaseException) -> float | None:
    wanted = getattr(error, "retry_after", None)
    return float(wanted) if isinstance(wanted, int | float) and wanted >= 0 else None


def _backoff(failures: int, retry_after: float | None) -> float:
    # Full jitter: trials that failed together must not come back together.
    if retry_after is not None:
        return min(retry_after, 60.0)
    return random.uniform(0.0, min(30.0, 0.5 * 2**failures))  # noqa: S311 - a delay, not a secret


def _describe(error: BaseException | str | None) -> str:
    if isinstance(error, str) or error is None:
        return error or ""
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        text = type(error).__name__
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " ..."


def _result(
    key: TrialKey,
    ordinal: int,
    attempt: int,
    started_at: float,
    session: Session,
    state: _Attempt,
    *,
    judges_since: int = 0,
) -> EvalResult:
    calls = session.call_totals(judges_since=judges_since) if len(session) else NO_CALLS
    metadata: dict[str, Any] = {}
    if session.late_events:
        metadata["late_events"] = session.late_events
    if state.close_error is not None:
        metadata["close_error"] = state.close_error
    if isinstance(state.error, BaseException) and state.error.__traceback__ is not None:
        frames = traceback.format_list(traceback.extract_tb(state.error.__traceback__)[-8:])
        metadata["traceback"] = "".join(frames)[-4000:]
    return EvalResult(
        key=key,
        ordinal=ordinal,
        outcome=state.outcome,
        score=state.score,
        output=state.output,
        latency_ms=round(state.latency * 1000),
        usage=calls.usage,
        error=_describe(state.error) if state.error is not None else None,
        stage=state.stage,
        attempt=attempt,
        execution=random.getrandbits(62),
        started_at=started_at,
        metadata=metadata,
        judge_cost_usd=calls.judge_cost_usd,
        cache_hits=calls.cache_hits,
        unpriced_calls=calls.unpriced_calls,
        unpriced_judge_calls=calls.unpriced_judge_calls,
        output_json=state.output_json,
        snapshot=session.snapshot() if len(session) else None,
    )
