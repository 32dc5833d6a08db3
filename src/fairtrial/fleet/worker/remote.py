"""Calls a remote MainLoop through its mailbox, as a task.

Each worker has one reply mailbox, named in every request; answers arrive in any order and are matched by their ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

from fairtrial import errors
from fairtrial.base.codec import from_json, to_json
from fairtrial.data.session.session import restore_session
from fairtrial.fleet.messages import MainLoopRequest, MainLoopResult
from fairtrial.fleet.worker.config import EvalLoopConfig
from fairtrial.fleet.worker.jobs import backoff
from fairtrial.fleet.worker.sessions import SessionStore, discard_session
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.trials.context import TrialContext
from fairtrial.trials.sample_types import KnownTypes, TypeName
from fairtrial.trials.task import ResolvedTask, Task, resolve_task, task

_log = logging.getLogger("fairtrial.fleet")
_MAX_ANSWERS = 500
_LEASE_SECONDS = 60.0
_WAIT_SECONDS = 20.0
_REPLY_TTL = 120.0

transport_problem: ContextVar[list[BaseException] | None] = ContextVar("fairtrial_transport", default=None)
"""Collects transport errors so that the request is retried instead of being recorded as a task error."""
input_type_name: ContextVar[TypeName | None] = ContextVar("fairtrial_input_type", default=None)
"""The name under which the input of this trial was sent, if this worker cannot read it."""


class MainLoopError(Exception):
    """An error that the MainLoop reported; recorded as the trial's error."""


class NoAnswerError(TimeoutError):
    """The MainLoop did not answer in time."""


class RemoteMainLoop:
    """Sends inputs to a MainLoop's mailbox and waits for the results.

    Args:
        requests: The MainLoop's mailbox.
        replies: This worker's mailbox for answers; created next to `requests` by default.
        config: Settings.
        worker: The name of this worker, which becomes part of the name of that mailbox.
        sessions: The store of sessions that are not sent with the result.
        output_type: The type of outputs.
    """

    def __init__(
        self,
        requests: Mailbox[MainLoopRequest],
        replies: Mailbox[MainLoopResult] | None,
        config: EvalLoopConfig,
        *,
        worker: str = "",
        sessions: SessionStore | None = None,
        output_type: Any = object,
        evaluator: Any = None,
    ) -> None:
        self._requests = requests
        self._own_replies = _reply_mailbox(requests, worker) if replies is None else None
        self._replies: Mailbox[MainLoopResult] = replies or self._own_replies  # type: ignore[assignment]  # never both
        self._timeout = config.mainloop_timeout
        self._sessions = sessions
        self._output_type = output_type
        self._known = KnownTypes(evaluator=evaluator, output=output_type)
        self._seed = config.seed
        self._waiting: dict[str, asyncio.Future[MainLoopResult]] = {}
        self._settling: set[asyncio.Future[None]] = set()
        self._loading: set[str] = set()  # Sessions of answers that a call waits for.
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._own_replies is not None:
            await self._own_replies.__aenter__()
        self._listening = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        if self._settling:
            await asyncio.wait(self._settling)
        if self._own_replies is not None:
            await self._own_replies.__aexit__(*error)

    def as_task(self) -> Task:
        """Return the MainLoop as a task."""

        async def remote_main_loop(input: Any, ctx: TrialContext) -> Any:
            return await self._call(input, ctx)

        remote_main_loop.__annotations__["return"] = self._output_type
        return task(name=f"mailbox {self._requests.name}")(remote_main_loop)

    async def _call(self, input: Any, ctx: TrialContext) -> Any:
        return _take_over(await self.ask(input, ctx), self._output_type, self._known, ctx)

    def answered(self, result: MainLoopResult) -> ResolvedTask:
        """Return a task with a fixed answer, which can be sent to a child process."""
        return resolve_task(_Answered(result, self._output_type, self._known))

    async def ask(self, input: Any, ctx: TrialContext) -> MainLoopResult:
        """Call the MainLoop and return its answer, including the session."""
        request = MainLoopRequest(
            input,
            params=ctx.experiment.params,
            experiment=ctx.experiment.name,
            key=ctx.key,
            metadata=ctx.sample.metadata,
            seed=self._seed,
            attempt=ctx.attempt,
            timeout_seconds=self._timeout,
            type_name=input_type_name.get(),
        )
        answer: asyncio.Future[MainLoopResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        try:
            async with asyncio.timeout(self._timeout):
                await self._requests.send(request, reply_to=self._replies)
                result = await answer
        except TimeoutError:
            problem = NoAnswerError(f"MainLoop {self._requests.name} did not answer within {self._timeout:g} s")
            raise _noted(problem) from None
        except errors.MailboxError as error:
            if isinstance(error, errors.BodyError):
                raise  # This input can never be sent.
            raise _noted(error) from None
        finally:
            self._waiting.pop(request.request_id, None)
        if result.session_id is None:
            return result
        if self._sessions is None:
            raise errors.SessionError("the session is in a session store, but this worker has none: pass sessions=...")
        try:
            snapshot = await self._sessions.load(result.session_id)
        except (errors.MailboxError, errors.StoreUnavailableError) as error:
            raise _noted(error) from None
        finally:
            # The session is loaded or the answer is given up, so the stored one is no longer needed. If this worker
            # dies before its result is delivered, another worker has the input executed again.
            self._in_background(self._discard_loaded(result.session_id))
        return replace(result, session_snapshot=snapshot, session_id=None)

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                messages = await self._replies.receive(_MAX_ANSWERS, _LEASE_SECONDS, _WAIT_SECONDS)
                failures = 0
            except errors.MailboxClosedError:
                return  # Waiting calls will time out.
            except Exception as error:
                failures += 1
                _log.warning("receiving answers from %s failed: %r", self._replies.name, error)
                await asyncio.sleep(backoff(failures))
                continue
            for message in messages:
                answer = self._waiting.pop(message.body.request_id, None)
                if answer is not None and not answer.done():
                    if message.body.session_id is not None and self._sessions is not None:
                        self._loading.add(message.body.session_id)
                    answer.set_result(message.body)
            for message in messages:
                self._in_background(self._settle(message))

    def _in_background(self, call: Coroutine[Any, Any, None]) -> None:
        """Run in the background: later answers must not wait until earlier ones are settled."""
        settling = asyncio.ensure_future(call)
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    async def _discard_loaded(self, session_id: str) -> None:
        await discard_session(self._sessions, session_id)
        self._loading.discard(session_id)

    async def _settle(self, message: Message[MainLoopResult]) -> None:
        if message.body.session_id not in self._loading:
            await discard_session(self._sessions, message.body.session_id)  # No call waits for this answer.
        try:
            await message.acknowledge()
        except errors.MailboxError as error:
            _log.warning("an answer will be redelivered: %s", error)  # Harmless: no call waits for it any more.


@dataclass(frozen=True, slots=True)
class _Answered:
    result: MainLoopResult
    output_type: Any
    known: KnownTypes

    async def __call__(self, input: Any, ctx: TrialContext) -> Any:
        return _take_over(self.result, self.output_type, self.known, ctx)


def _take_over(result: MainLoopResult, output_type: Any, known: KnownTypes, ctx: TrialContext) -> Any:
    """Return the output of an answer, after recording its session events here."""
    if result.session_snapshot is not None:
        ctx.session.extend(restore_session(result.session_snapshot).everything().envelopes)
    if result.error is not None:
        raise MainLoopError(result.error)
    if result.type_name:
        return known.read(result.type_name, result.output, "output")
    if output_type is object:
        return result.output
    return from_json(output_type, to_json(result.output))


def _noted[E: BaseException](error: E) -> E:
    problems = transport_problem.get()
    if problems is not None:
        problems.append(error)
    return error


def _reply_mailbox(requests: Mailbox[Any], worker: str) -> Mailbox[MainLoopResult]:
    """Create a mailbox for a worker's answers next to the mailbox of the MainLoops."""
    make = getattr(requests, "for_replies", None)
    if make is None:
        raise errors.ConfigurationError(
            f"{requests!r} cannot create a mailbox for answers: pass replies=... to EvalLoop"
        )
    made: Mailbox[MainLoopResult] = make(f"{requests.name[:120]}.replies.{worker[:70]}", MainLoopResult, _REPLY_TTL)
    return made
