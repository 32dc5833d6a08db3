"""Executes suspected poison messages, which may have killed their worker, in child processes.

    suspected ──> a few at a time in one child ──> answered
                        │ the child died, or its interpreter stalled
                        └──> alone in a child ──> answered, or proven to crash its process

Most suspected messages lost their worker for another reason, so they are executed nearly as fast as others: the first
step shares the worker's concurrency among the child processes. Only messages of a child that died are isolated alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairtrial.base.codec import decode
from fairtrial.base.isolation import ChildDiedError, IsolatedError, IsolatedRunner
from fairtrial.base.isolation.child import emit

type ExecuteInChild = Callable[[Sequence[Any]], None]
"""Called in a child process with several requests; executes them and emits each answer (see `emit_answers`)."""

_HEARTBEAT_SECONDS = 0.5
_LEAST_SILENCE = 5.0
_PART: Any = tuple[int, bytes] | None  # The answer to the request at an index, or a heartbeat.


class _Suspect:
    __slots__ = ("alone", "answer", "request")

    def __init__(self, request: Any, answer: asyncio.Future[bytes]) -> None:
        self.request = request
        self.answer = answer
        self.alone = False  # Whether it was in a child process that died together with other messages.


class SuspectPool:
    """Executes suspected requests in child processes.

    Args:
        execute: Called in a child with several requests.
        runner: Runs the child processes.
        processes: Number of child processes at once.
        concurrency: Number of requests at once, in all child processes together.
        limit_seconds: Time limit for one request.
        buffer_seconds: Additional time for a child process, for its start and for delays.
        stall_seconds: A child with several requests is killed if its interpreter is stalled for this long.
    """

    def __init__(
        self,
        execute: ExecuteInChild,
        runner: IsolatedRunner,
        *,
        processes: int,
        concurrency: int,
        limit_seconds: float,
        buffer_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._execute = execute
        self._runner = runner
        self._processes = processes
        self._group_size = -(-concurrency // processes)
        self._limit = limit_seconds + buffer_seconds
        self._silence = max(stall_seconds, _LEAST_SILENCE)
        self._silence_alone = max(self._silence, limit_seconds)
        self._waiting: list[_Suspect] = []
        self._busy = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, request: Any) -> bytes:
        """Execute one request and return the answer. Cancelling kills the child if it has no other request.

        Raises:
            ChildDiedError: the request crashed a process in which nothing else was executed.
            TimeoutError: it exceeded its time limit in such a process and was killed.
        """
        suspect = _Suspect(request, asyncio.get_running_loop().create_future())
        self._add(suspect)
        return await suspect.answer

    def _add(self, suspect: _Suspect) -> None:
        self._waiting.append(suspect)
        if self._busy < self._processes:
            self._busy += 1
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        try:
            while group := self._next_group():
                await self._execute_group(group)
        finally:
            self._busy -= 1

    def _next_group(self) -> list[_Suspect]:
        waiting = [suspect for suspect in self._waiting if not suspect.answer.done()]
        if not waiting or waiting[0].alone:
            group = waiting[:1]
        else:
            group = [suspect for suspect in waiting if not suspect.alone][: self._group_size]
        self._waiting = [suspect for suspect in waiting if suspect not in group]
        return group

    async def _execute_group(self, group: list[_Suspect]) -> None:
        unanswered = dict(enumerate(group))

        def take(part: str) -> None:
            answered: tuple[int, bytes] | None = decode(_PART, part)
            if answered is not None and (suspect := unanswered.pop(answered[0], None)) is not None:
                _settle(suspect, answered[1])

        def look(_: object) -> None:
            if unanswered and all(suspect.answer.done() for suspect in unanswered.values()):
                call.cancel()  # All requests of the group were cancelled.

        call = asyncio.ensure_future(self._call(group, take))
        for suspect in group:
            suspect.answer.add_done_callback(look)
        error: Exception = IsolatedError("the child process did not answer every request")
        try:
            await call
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise  # This task itself was cancelled.
        except Exception as raised:
            error = raised
        for suspect in unanswered.values():
            if len(group) > 1 and isinstance(error, ChildDiedError | TimeoutError):
                suspect.alone = True
                self._add(suspect)
            elif not suspect.answer.done():
                suspect.answer.set_exception(error)

    async def _call(self, group: list[_Suspect], take: Callable[[str], None]) -> None:
        function = self._runner.function(self._execute, "what executes suspected requests")
        async with self._runner.child() as child:
            await child.load(function)
            async with asyncio.timeout(self._limit):
                await child.call(
                    function,
                    ([suspect.request for suspect in group],),
                    kind=object,
                    what="the arguments of a suspected trial",
                    on_part=take,
                    silence_seconds=self._silence if len(group) > 1 else self._silence_alone,
                )


def _settle(suspect: _Suspect, answer: bytes) -> None:
    if not suspect.answer.done():
        suspect.answer.set_result(answer)


async def emit_answers(
    execute: Callable[[Any], Awaitable[bytes]], requests: Sequence[Any], send: Callable[[Any], None] = emit
) -> None:
    """Execute requests concurrently in the child process, and send each answer as soon as it is available."""

    async def answer(index: int, request: Any) -> None:
        send((index, await execute(request)))

    async def beat() -> None:
        while True:
            send(None)
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    beating = asyncio.create_task(beat())
    try:
        await asyncio.gather(*(answer(index, request) for index, request in enumerate(requests)))
    finally:
        beating.cancel()
