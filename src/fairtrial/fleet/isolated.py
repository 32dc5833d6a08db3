"""Suspected poison messages: what may have killed its worker is executed in child processes.

    suspected ──> a few at a time in one child ──> answered
                        │ the child died, or its interpreter stalled
                        └──> alone in a child ──> answered, or proven to end its process

Most suspected messages only lost their worker, so they are executed nearly as fast as others: the first step shares the
worker's concurrency among its child processes. Only what was in a child that died is isolated alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from fairtrial.codec import decode
from fairtrial.isolation import ChildDiedError, IsolatedError, IsolatedRunner
from fairtrial.isolation.child import emit

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
        self.alone = False  # Whether it was in a child process that died, and others were too.


class SuspectPool:
    """Executes suspected requests in child processes.

    Args:
        execute: Called in a child with several requests.
        runner: The child processes.
        processes: How many of them run at once.
        concurrency: How many requests are executed at once, in all of them together.
        limit_seconds: How long one request may take.
        buffer_seconds: How much longer a child process is given, since it may be late and has to start.
        stall_seconds: A child with several requests whose interpreter is stalled for so long is killed.
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
        """The answer to one request. A cancelled wait kills the child if nobody else waits for it.

        Raises:
            ChildDiedError: the request ended a process in which nothing else was executed.
            TimeoutError: it did not end in time in such a process, and was killed.
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
        scope = anyio.CancelScope()

        def take(part: str) -> None:
            answered: tuple[int, bytes] | None = decode(_PART, part)
            if answered is not None and (suspect := unanswered.pop(answered[0], None)) is not None:
                _settle(suspect, answered[1])

        def look(_: object) -> None:
            if unanswered and all(suspect.answer.done() for suspect in unanswered.values()):
                scope.cancel()  # All of them were cancelled.

        for suspect in group:
            suspect.answer.add_done_callback(look)
        error: Exception = IsolatedError("the child process did not answer every request")
        try:
            with scope:
                await self._call(group, take)
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
            with anyio.fail_after(self._limit):
                await child.call(
                    function,
                    ([suspect.request for suspect in group],),
                    kind=object,
                    what="what a suspected trial is called with",
                    on_part=take,
                    silence_seconds=self._silence if len(group) > 1 else self._silence_alone,
                )


def _settle(suspect: _Suspect, answer: bytes) -> None:
    if not suspect.answer.done():
        suspect.answer.set_result(answer)


async def emit_answers(
    execute: Callable[[Any], Awaitable[bytes]], requests: Sequence[Any], send: Callable[[Any], None] = emit
) -> None:
    """Execute requests at once, in the child process, and send each answer as soon as it is there."""

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
