"""Suspected poison messages: what may have killed its worker is executed in a child process, to die there alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.isolation import IsolatedRunner

type SuspectRunner = Callable[[EvalRequest], Awaitable[EvalReply]]
"""Executes one request in isolation. Raises `ChildDiedError` if it ended its process."""


class IsolatedSuspects:
    """Executes suspected requests in child processes.

    Args:
        execute: Called in the child with the request as bytes; returns the reply as bytes.
        runner: The child processes.
    """

    def __init__(self, execute: Callable[[bytes], bytes], runner: IsolatedRunner) -> None:
        self._execute = execute
        self._runner = runner

    async def __call__(self, request: EvalRequest) -> EvalReply:
        """The reply. A cancelled wait kills the child, and what it started."""
        what = "what executes suspected trials"
        return EvalReply.from_wire(await self._runner.run(self._execute, request.to_wire(), kind=bytes, what=what))
