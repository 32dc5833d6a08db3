"""The worker that executes inputs without scoring them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from fairtrial import errors
from fairtrial.base.isolation import ChildDiedError, IsolatedRunner
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import ControlDispatcher, Session
from fairtrial.fleet.messages import MainLoopRequest, MainLoopResult, new_id
from fairtrial.fleet.worker.config import LoopCounters, MainLoopConfig
from fairtrial.fleet.worker.execution import SuspectPool, emit_answers
from fairtrial.fleet.worker.jobs import DeliveryAttempts, Job
from fairtrial.fleet.worker.sessions import SessionStore, discard_session
from fairtrial.fleet.worker.worker import Worker, WorkerLoop
from fairtrial.mailbox.body import bind_body_type
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.models.adapter import ProviderAdapter
from fairtrial.models.main_loop import InputT, OutputT, TaskLoop
from fairtrial.runs.events import log_fields
from fairtrial.store.redact import current
from fairtrial.trials.config import EvalConfig, Experiment
from fairtrial.trials.context import TrialContext, TrialKey, _current
from fairtrial.trials.failures import describe_error
from fairtrial.trials.sample_types import KnownTypes, changes_parts, value_type_name
from fairtrial.trials.task import ResolvedTask, Task, resolve_task

_log = logging.getLogger("fairtrial.fleet")
_CLOSE_SECONDS = EvalConfig().close_seconds


class MainLoop(TaskLoop[InputT, OutputT], WorkerLoop):
    """Executes one input at a time: a subclass with `initialize`, or any task; directly or over a mailbox.

    For example::

        loop = Answer(adapter=OpenAIAdapter(model="gpt-4o-mini"), requests=mailbox)     # or MainLoop(my_function, ...)
        loop.run_sync()

    `execute` runs one input in this process. `run` serves `MainLoopRequest`s and replies with `MainLoopResult`s: the
    output or the error, and the session, as a snapshot in the result or, with a session store, by its id.

    Args:
        task: The task to execute, unless a subclass defines `initialize`.
        adapter: The model adapter for the prompts of `initialize`.
        requests: The mailbox of the inputs.
        config: Settings of `run`.
        sessions: The store for sessions that are too large to be sent with a result.
        input_type: The type of inputs; the type argument of the subclass by default.
        bus: Passed on to sessions by `initialize`, to observe what they record: `Session(dispatcher=self._bus)`.
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
        bus: ControlDispatcher | None = None,
    ) -> None:
        super().__init__(task, adapter=adapter, bus=bus)
        self.config: MainLoopConfig = config or MainLoopConfig()
        self.counters = LoopCounters()
        self._read_as = self.input_type if input_type is None else input_type
        self._resolved: ResolvedTask | None = None  # This loop as a task, from `run` on.
        self._sessions = sessions
        self._worker: Worker[MainLoopRequest] | None = None
        self._needed = self.config.timeout_seconds + _CLOSE_SECONDS
        self._isolated = IsolatedRunner()
        self._suspects = SuspectPool(partial(_answer_requests, self), self._isolated, self.config, self._needed)
        if requests is not None:
            bind_body_type(requests, MainLoopRequest)
            longest = self.config.hold_seconds(self._needed, "one input")
            self._worker = Worker(requests, self._handle, self.config, self.counters, hold_seconds=longest)

    @property
    def name(self) -> str:
        """The name of the loop in logs and metrics."""
        return type(self).__name__ if self._task is None else self._task.name

    async def _open_resources(self, stack: AsyncExitStack) -> None:
        self._resolved = resolve_task(self)
        stack.callback(self._isolated.close)
        stack.enter_context(log_fields(worker=self.name))

    async def _answer_request(self, request: MainLoopRequest) -> MainLoopResult:
        """Execute a request; always returns a result, unless it is cancelled from outside."""
        session = Session()
        started = time.monotonic()
        error: str | None = None
        output: Any = None
        try:
            output = await self._execute_request(request, session)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # Cancelled by the worker: the lease is lost, or the worker stops.
            error = "the task was cancelled by its own code"
        except errors.CodecError as problem:
            error = f"the input does not match the input type of this MainLoop: {problem}"
        except BaseException as problem:  # User code may raise anything, SystemExit too.
            error = describe_error(problem)
        latency = round((time.monotonic() - started) * 1000)
        if not len(session):
            return MainLoopResult(request.request_id, output, error, latency_ms=latency)
        return MainLoopResult(
            request.request_id, output, error, session.snapshot(), None, session.usage(), latency_ms=latency
        )

    async def _execute_request(self, request: MainLoopRequest, session: Session) -> Any:
        value = self._read_input(request)
        key = request.key or TrialKey("", request.experiment, request.request_id or "input")
        limit = min(self.config.timeout_seconds, request.timeout_seconds or self.config.timeout_seconds)
        context = TrialContext(
            key,
            Sample(key.sample_id, value, metadata=request.metadata),
            Experiment(request.experiment, request.params),
            session,
            run_seed=request.seed,
            attempt=request.attempt,
            deadline=time.monotonic() + limit,
        )
        assert self._resolved is not None  # noqa: S101 - `run` made it
        token = _current.set(context)
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await self._call(self._resolved, value, context)
        except TimeoutError:
            if not scope.expired():
                raise  # The task's own.
            raise TimeoutError(f"the task did not finish within {limit:g} s") from None
        finally:
            _current.reset(token)
            if context.has_resources:
                await _close(context)

    def _read_input(self, request: MainLoopRequest) -> Any:
        """Return the input, by the input type of the loop or, where that would change it, by the name of its type."""
        if request.type_name is None and value_type_name(request.input):
            return request.input  # Passed by reference, so it has its original type.
        value = request.typed(self._read_as)
        if not request.type_name or not changes_parts(request.type_name, value_type_name(value)):
            return value
        task = None if self._resolved is None else self._resolved.fn
        return KnownTypes(task, input=self._read_as).read(request.type_name, request.input, "input")

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
                result = MainLoopResult(message.body.request_id, error=f"the input crashes its process: {error}")
        else:
            result = await self._answer_request(message.body)
        if result.error is not None:  # Not the output and the session: evaluators score what the task really did.
            result = replace(result, error=current().text(result.error))
        result = await self._save_session(result)
        job.executed()
        sent = False
        try:
            sent = await self._reply(job, result)
        except errors.ReplyNotAvailableError as error:
            # The sender is gone, or will send the request again: executing it once more is useless.
            _log.warning("the answer to %s could not be delivered: %s", message.body.request_id, error)
        finally:
            if not sent:
                await discard_session(self._sessions, result.session_id)
        if crash is None:
            await message.acknowledge()
        else:
            await message.dead_letter(result.error or "", error=type(crash).__name__)
            self.counters.dead_lettered += 1
        self.counters.finished += 1
        self.counters.outcomes["scored" if result.error is None else "task_error"] += 1

    async def _answer_in_child(self, request: MainLoopRequest) -> MainLoopResult:
        """Execute a suspected poison message in a child process."""
        self.counters.suspects += 1
        try:
            return MainLoopResult.from_wire(await self._suspects.run(request.to_wire()))
        except TimeoutError:
            text = f"the task did not end within {self._needed:g} s in an isolated process and was killed"
            return MainLoopResult(request.request_id, error=text)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that a child process needs: no mailboxes, and nothing bound to this event loop."""
        return {**self.__dict__, "_worker": None, "_sessions": None, "_suspects": None}

    async def _save_session(self, result: MainLoopResult) -> MainLoopResult:
        if self._sessions is None or result.session_snapshot is None:
            return result
        session_id = new_id()
        await self._sessions.save(session_id, result.session_snapshot)
        return replace(result, session_snapshot=None, session_id=session_id)

    async def _reply(self, job: Job[MainLoopRequest], result: MainLoopResult) -> bool:
        """Reply, with retries while the mailbox is unavailable; False if the answer cannot be sent and an error was."""
        attempts = DeliveryAttempts(job, self.config, self.counters)
        whole = True
        while True:
            try:
                await job.message.reply(result)
                return whole
            except (errors.LeaseLostError, errors.ReplyNotAvailableError):
                raise
            except errors.BodyError as error:
                if result.output is None and result.session_snapshot is None:
                    raise
                whole = False
                result = MainLoopResult(result.request_id, error=f"the answer cannot be sent: {error}")
            except errors.FairtrialError as error:
                if not await attempts.pause(error, f"the answer to {result.request_id}"):
                    raise


def _answer_requests(loop: MainLoop[Any, Any], requests: Sequence[bytes]) -> None:
    """Execute requests in the child process."""

    async def answer(request: bytes) -> bytes:
        return (await loop._answer_request(MainLoopRequest.from_wire(request))).to_wire()

    asyncio.run(emit_answers(answer, requests))


async def _close(context: TrialContext) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await context.resources.aclose()
    except Exception as error:
        _log.warning("closing what trial %s opened failed: %r", context.key, error)
