"""Suspected poison messages: what may have killed its worker is executed in a child process, to die there alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fairtrial.data.sample import Sample
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.isolation import IsolatedRunner
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.run_trial import TrialRules, run_trial

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


def execute_in_child(
    rules: TrialRules, key: TrialKey, ordinal: int, sample: Sample[Any, Any], experiment: int, attempt: int
) -> bytes:
    """Execute and score one trial in a child process; returns it as an `EvalReply`."""
    result = asyncio.run(run_trial(rules, key, ordinal, sample, experiment, attempt=attempt))
    rules.close()
    return EvalReply(result, 0).to_wire()
