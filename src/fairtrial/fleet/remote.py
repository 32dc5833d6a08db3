"""A MainLoop behind a mailbox, as a task.

One reply mailbox per worker, named in every request; answers come in any order and are told apart by their ids.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

from fairtrial.codec import from_json, to_json
from fairtrial.errors import BodyError, MailboxClosedError, MailboxError, SessionError
from fairtrial.fleet.sessions import SessionStore
from fairtrial.fleet.wire import MainLoopRequest, MainLoopResult
from fairtrial.fleet.worker import backoff
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.session.snapshot import restore_session
from fairtrial.trials.context import TrialContext
from fairtrial.trials.task import ResolvedTask, Task, resolve_task, task

_log = logging.getLogger("fairtrial.fleet")
_MAX_ANSWERS = 500
_LEASE_SECONDS = 60.0
_WAIT_SECONDS = 20.0

transport_problem: ContextVar[list[BaseException] | None] = ContextVar("fairtrial_transport", default=None)
"""Where a call leaves an error that is the way's and not the task's: the trial did not fail, it did not happen."""


class MainLoopError(Exception):
    """What the MainLoop said went wrong; recorded as the trial's error."""


class NoAnswerError(TimeoutError):
    """The MainLoop did not answer in time."""


class RemoteMainLoop:
    """Sends inputs to a MainLoop's mailbox and waits for what comes back.

    Args:
        requests: The MainLoop's mailbox.
        replies: The mailbox of this worker's own for answers.
        timeout_seconds: How long to wait for an answer.
        sessions: Where sessions lie that did not travel in the result.
        output_type: What outputs are read as.
    """

    def __init__(
        self,
        requests: Mailbox[MainLoopRequest],
        replies: Mailbox[MainLoopResult],
        *,
        timeout_seconds: float,
        sessions: SessionStore | None = None,
        output_type: Any = object,
        seed: int = 0,
    ) -> None:
        self._requests = requests
        self._replies = replies
        self._timeout = timeout_seconds
        self._sessions = sessions
        self._output_type = output_type
        self._seed = seed
        self._waiting: dict[str, asyncio.Future[MainLoopResult]] = {}
        self._settling: set[asyncio.Future[None]] = set()
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listening = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        if self._settling:
            await asyncio.wait(self._settling)

    def as_task(self) -> Task:
        """The MainLoop as a task."""

        async def remote_main_loop(input: Any, ctx: TrialContext) -> Any:
            return await self._call(input, ctx)

        remote_main_loop.__annotations__["return"] = self._output_type
        return task(name=f"mailbox {self._requests.name}")(remote_main_loop)

    async def _call(self, input: Any, ctx: TrialContext) -> Any:
        return _take_over(await self.ask(input, ctx), self._output_type, ctx)

    def answered(self, result: MainLoopResult) -> ResolvedTask:
        """A task that gives an answer which is already here; it can be sent to a child process."""
        return resolve_task(_Answered(result, self._output_type))

    async def ask(self, input: Any, ctx: TrialContext) -> MainLoopResult:
        """The MainLoop's answer, with its session on board."""
        request = MainLoopRequest(
            input,
            params=ctx.experiment.params,
            experiment=ctx.experiment.name,
            key=ctx.key,
            metadata=ctx.sample.metadata,
            seed=self._seed,
            attempt=ctx.attempt,
            timeout_seconds=self._timeout,
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
        except MailboxError as error:
            if isinstance(error, BodyError):
                raise  # This input cannot travel, now or later.
            raise _noted(error) from None
        finally:
            self._waiting.pop(request.request_id, None)
        if result.session_id is None:
            return result
        if self._sessions is None:
            raise SessionError("the session lies in a session store, and this worker was given none: sessions=...")
        try:
            snapshot = await self._sessions.load(result.session_id)
        except MailboxError as error:
            raise _noted(error) from None
        return replace(result, session=snapshot, session_id=None)

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                messages = await self._replies.receive(_MAX_ANSWERS, _LEASE_SECONDS, _WAIT_SECONDS)
                failures = 0
            except MailboxClosedError:
                return  # Calls that still wait time out.
            except Exception as error:
                failures += 1
                _log.warning("answers cannot be received from %s: %r", self._replies.name, error)
                await asyncio.sleep(backoff(failures))
                continue
            for message in messages:
                answer = self._waiting.pop(message.body.request_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(message.body)
            for message in messages:  # Not waited for: the next answers must not wait for these to be settled.
                settling = asyncio.ensure_future(self._settle(message))
                self._settling.add(settling)
                settling.add_done_callback(self._settling.discard)

    async def _settle(self, message: Message[MainLoopResult]) -> None:
        try:
            await message.acknowledge()
        except MailboxError as error:
            _log.warning("an answer comes twice: %s", error)  # Harmless: nobody waits for it any more.


@dataclass(frozen=True, slots=True)
class _Answered:
    result: MainLoopResult
    output_type: Any

    async def __call__(self, input: Any, ctx: TrialContext) -> Any:
        return _take_over(self.result, self.output_type, ctx)


def _take_over(result: MainLoopResult, output_type: Any, ctx: TrialContext) -> Any:
    """The output of an answer; what was recorded there is recorded here."""
    if result.session is not None:
        ctx.session.extend(restore_session(result.session).everything().envelopes)
    if result.error is not None:
        raise MainLoopError(result.error)
    if output_type is object:
        return result.output
    return from_json(output_type, to_json(result.output))


def _noted[E: BaseException](error: E) -> E:
    problems = transport_problem.get()
    if problems is not None:
        problems.append(error)
    return error
