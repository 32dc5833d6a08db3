"""The worker that executes inputs and leaves scoring to others."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fairtrial.backoff import UNAVAILABLE
from fairtrial.data.sample import Sample
from fairtrial.errors import (
    BodyError,
    CodecError,
    ConfigurationError,
    FairtrialError,
    LeaseLostError,
    ReplyNotAvailableError,
)
from fairtrial.fleet.config import MainLoopConfig
from fairtrial.fleet.counters import LoopCounters
from fairtrial.fleet.isolated import SuspectPool, emit_answers
from fairtrial.fleet.sessions import SessionStore
from fairtrial.fleet.wire import MainLoopRequest, MainLoopResult, new_id
from fairtrial.fleet.worker import Job, Worker, backoff, run_interruptibly
from fairtrial.isolation import ChildDiedError, IsolatedRunner
from fairtrial.logs import log_fields
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.main_loop import InputT, OutputT, TaskLoop
from fairtrial.session.session import Session
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.context import TrialContext, _current
from fairtrial.trials.experiment import Experiment
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.task import ResolvedTask, Task, resolve_task

_log = logging.getLogger("fairtrial.fleet")
_MAX_ERROR = 10_000
_CLOSE_SECONDS = EvalConfig().close_seconds


class MainLoop(TaskLoop[InputT, OutputT]):
    """What turns one input into one output: a subclass with `initialize`, or any task; here or over a mailbox.

        loop = Answer(adapter=OpenAIAdapter(model="gpt-4o-mini"), requests=mailbox)     # or MainLoop(my_function, ...)
        loop.run_sync()

    `execute` runs one input here. `run` serves `MainLoopRequest`s and replies with `MainLoopResult`s: the output or
    the error, and the session, as a snapshot in the result or, with a session store, by its id.

    Args:
        task: What to execute, where there is no `initialize` of one's own.
        adapter: The model that `initialize`'s prompts go to.
        requests: Where inputs come from.
        config: Settings of `run`.
        sessions: Where to save sessions that are too big to travel in a result.
        input_type: What inputs are read as; what the subclass says it takes, unless given.
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        adapter: ProviderAdapter | None = None,
        requests: Mailbox[MainLoopRequest] | None = None,
        config: MainLoopConfig | None = None,
        sessions: SessionStore | None = None,
        input_type: Any = None,
    ) -> None:
        super().__init__(task, adapter=adapter)
        self.config = config or MainLoopConfig()
        self.counters = LoopCounters()
        self._input_type = self._type_argument(0) if input_type is None else input_type
        self._sessions = sessions
        self._resolved: ResolvedTask | None = None
        self._worker: Worker[MainLoopRequest] | None = None
        self._needed = self.config.timeout_seconds + _CLOSE_SECONDS
        self._isolated = IsolatedRunner()
        self._suspects = SuspectPool(
            partial(_answer_requests, self),
            self._isolated,
            processes=self.config.isolated_processes,
            concurrency=self.config.concurrency,
            limit_seconds=self._needed,
            buffer_seconds=self.config.buffer_seconds,
            stall_seconds=self.config.lease_seconds,
        )
        if requests is not None:
            settings = self.config
            self._worker = Worker(
                requests,
                self._handle,
                concurrency=settings.concurrency,
                lease_seconds=settings.lease_seconds,
                hold_seconds=settings.hold_seconds(self._needed, "one input"),
                wait_seconds=settings.wait_seconds,
                drain_seconds=settings.drain_seconds,
                stall_seconds=settings.stall_seconds,
                policy=settings.dlq,
                counters=self.counters,
            )

    @property
    def name(self) -> str:
        """What the loop is called in logs and metrics."""
        return type(self).__name__ if self._task is None else self._task.name

    @property
    def beat(self) -> float:
        """When `run` last turned, on the clock `time.monotonic()`: about once a second while it lives."""
        return 0.0 if self._worker is None else self._worker.beat

    @property
    def running(self) -> bool:
        """Whether `run` is under way."""
        return self._worker is not None and self._worker.running

    @property
    def ready(self) -> bool:
        """Whether `run` is under way and has reached its mailbox."""
        return self._worker is not None and self._worker.running and self._worker.reached

    def stop(self) -> None:
        """Receive no more and end; see `EvalLoop.stop`."""
        if self._worker is not None:
            self._worker.stop()

    async def run(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """Serve requests until stopped; see `EvalLoop.run`."""
        if self._worker is None:
            raise ConfigurationError(f"{type(self).__name__} has no mailbox to serve: give it requests=...")
        self._resolved = resolve_task(self)
        try:
            with log_fields(worker=self.name):
                await self._worker.run(max_iterations=max_iterations, until_empty=until_empty)
        finally:
            self._isolated.close()

    def run_sync(self, *, max_iterations: int | None = None, until_empty: bool = False) -> None:
        """`run`, from ordinary code."""
        call = partial(self.run, max_iterations=max_iterations, until_empty=until_empty)
        run_interruptibly(call, self.stop, self.config.drain_seconds)

    async def _handle(self, job: Job[MainLoopRequest]) -> None:
        message = job.message
        crash: ChildDiedError | None = None
        if message.expiries and self.config.dlq.treatment(message.expiries) == "run_isolated":
            job.keep_until(
                time.monotonic() + (1 + self.config.concurrency) * (self._needed + self.config.buffer_seconds)
            )
            try:
                result = await self._answer_in_child(message.body)
            except ChildDiedError as error:
                crash = error
                self.counters.crashes += 1
                result = MainLoopResult(message.body.request_id, error=f"the input ends its process: {error}")
        else:
            result = await self._answer(message.body)
        result = await self._save_session(result)
        job.executed()
        try:
            await self._reply(job, result)
        except ReplyNotAvailableError as error:
            # Whoever asked is gone, or will ask again: executing it once more would help nobody.
            _log.warning("the answer to %s is of no use: %s", message.body.request_id, error)
        if crash is None:
            await message.acknowledge()
        else:
            await message.dead_letter(f"the input ends its process: {crash}", error=type(crash).__name__)
            self.counters.dead_lettered += 1
        self.counters.finished += 1
        self.counters.outcomes["scored" if result.error is None else "task_error"] += 1

    async def _answer_in_child(self, request: MainLoopRequest) -> MainLoopResult:
        """Execute a suspected poison message in a child process, where a crash hurts nobody."""
        self.counters.suspects += 1
        try:
            return MainLoopResult.from_wire(await self._suspects.run(request.to_wire()))
        except TimeoutError:
            text = f"the task did not end within {self._needed:g} s in a process of its own, and was killed"
            return MainLoopResult(request.request_id, error=text)

    def __getstate__(self) -> dict[str, Any]:
        """What a child process needs: neither mailboxes nor what belongs to this event loop."""
        return {**self.__dict__, "_worker": None, "_sessions": None, "_suspects": None}

    async def _answer(self, request: MainLoopRequest) -> MainLoopResult:
        session = Session()
        started = time.monotonic()
        error: str | None = None
        output: Any = None
        try:
            output = await self._execute(request, session)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # Ours: the lease is lost, or the worker stops.
            error = "the task was cancelled by its own code"
        except BaseException as problem:  # User code may raise anything, SystemExit too.
            error = _describe(problem)
        latency = round((time.monotonic() - started) * 1000)
        if not len(session):
            return MainLoopResult(request.request_id, output, error, latency_ms=latency)
        return MainLoopResult(
            request.request_id, output, error, session.snapshot(), None, session.usage(), latency_ms=latency
        )

    async def _save_session(self, result: MainLoopResult) -> MainLoopResult:
        if self._sessions is None or result.session is None:
            return result
        session_id = new_id()
        await self._sessions.save(session_id, result.session)
        return replace(result, session=None, session_id=session_id)

    async def _execute(self, request: MainLoopRequest, session: Session) -> Any:
        given = request.typed(self._input_type)
        key = request.key or TrialKey("", request.experiment, request.request_id or "input")
        limit = min(self.config.timeout_seconds, request.timeout_seconds or self.config.timeout_seconds)
        context = TrialContext(
            key,
            Sample(key.sample_id, given, None, request.metadata),
            Experiment(request.experiment, request.params),
            session,
            run_seed=request.seed,
            attempt=request.attempt,
            deadline=time.monotonic() + limit,
        )
        assert self._resolved is not None  # noqa: S101 - `run` resolved it
        token = _current.set(context)
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await self._call(self._resolved, given, context)
        except TimeoutError:
            if not scope.expired():
                raise  # The task's own.
            raise TimeoutError(f"the task did not finish within {limit:g} s") from None
        finally:
            _current.reset(token)
            if context.has_resources:
                await _close(context)

    async def _reply(self, job: Job[MainLoopRequest], result: MainLoopResult) -> None:
        """Reply, and again while the way there is blocked; what cannot travel is an error to reply with."""
        end = time.monotonic() + self.config.delivery_seconds
        failures = 0
        while True:
            try:
                await job.message.reply(result)
                return
            except (LeaseLostError, ReplyNotAvailableError):
                raise
            except BodyError as error:
                if result.output is None and result.session is None:
                    raise
                result = MainLoopResult(result.request_id, error=f"the answer cannot travel: {error}")
            except FairtrialError as error:
                failures += 1
                if time.monotonic() >= end and not isinstance(error, UNAVAILABLE):
                    raise
                self.counters.delivery_retries += 1
                delay = backoff(failures)
                job.keep_until(max(end, time.monotonic() + delay) + self.config.buffer_seconds)
                _log.warning("the answer to %s is sent again: %s", result.request_id, error)
                await asyncio.sleep(delay)


def _answer_requests(loop: MainLoop[Any, Any], requests: Sequence[bytes]) -> None:
    """What runs in the child process."""

    async def answer(request: bytes) -> bytes:
        return (await loop._answer(MainLoopRequest.from_wire(request))).to_wire()

    asyncio.run(emit_answers(answer, requests))


async def _close(context: TrialContext) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await context.resources.aclose()
    except Exception as error:
        _log.warning("closing what trial %s opened failed: %r", context.key, error)


def _describe(error: BaseException) -> str:
    if isinstance(error, CodecError):
        return f"the input is not what this MainLoop takes: {error}"
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        text = type(error).__name__
    return text[:_MAX_ERROR]
