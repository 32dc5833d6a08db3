"""What the processes of a run ask: slots of limiters, the usage of a run, traces; and what they tell."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from fairtrial.base.codec import decode, dumps
from fairtrial.data.session.events import TokenUsage
from fairtrial.models.limiter import AdaptiveLimiter, Permit, Spending, named_limiter, named_spending
from fairtrial.store.redact import register_known
from fairtrial.trials.context import CollectedTrace, ExpectedTrace, slot_released

type TraceName = tuple[str, int]
"""A trial and its attempt."""


@dataclass(slots=True)
class SharedRunState:
    """What the processes of a run share.

    Attributes:
        limiters: The limiters by name, which keep what they have learned.
        spending: The usage by name.
        traces: The traces that trials in flight may ask for, each with the context of the trial in this process.
    """

    limiters: dict[str, AdaptiveLimiter] = field(default_factory=dict)
    spending: dict[str, Spending] = field(default_factory=dict)
    traces: dict[TraceName, tuple[ExpectedTrace, Context]] = field(default_factory=dict)

    def limiter(self, name: str, settings: dict[str, Any]) -> AdaptiveLimiter:
        """Return the limiter with this name."""
        if name not in self.limiters:
            self.limiters[name] = named_limiter(name, settings)
        return self.limiters[name]

    def spent(self, name: str) -> Spending:
        """Return the usage with this name."""
        if name not in self.spending:
            self.spending[name] = named_spending(name)
        return self.spending[name]


class Questions:
    """The open questions of one process.

    Args:
        state: What the processes share.
        answer: Sends the answer to a question.
    """

    def __init__(self, state: SharedRunState, answer: Callable[[int, bytes], None]) -> None:
        self._state = state
        self._send = answer
        self._open: dict[int, asyncio.Task[None]] = {}

    def ask(self, id: int, content: bytes) -> None:
        """Begin to answer a question."""
        what, *facts = json.loads(content)
        if what == "slot":
            work, context = self._admit(id, *facts), None
        elif what == "spent":
            name, run_id = facts
            self._send(id, dumps(self._state.spent(name).of(run_id)).encode())
            return
        else:
            trace, context = self._state.traces.get((facts[0], facts[1]), (None, None))
            work = self._collect(id, trace)
        self._open[id] = asyncio.get_running_loop().create_task(work, context=context)

    def withdraw(self, id: int) -> None:
        """Stop answering a question, and free the slot that it was answered with."""
        if (task := self._open.pop(id, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Withdraw all questions of a process that has ended."""
        for id in list(self._open):
            self.withdraw(id)

    def hear(self, content: bytes) -> None:
        """Take note of what a process tells."""
        what, *facts = json.loads(content)
        if what == "called":
            name, settings, epoch, verdict, retry_after = facts
            limiter = self._state.limiter(name, settings)
            if epoch is None:
                limiter.hold_back(retry_after)
            else:
                limiter.report(Permit(epoch), verdict, retry_after=retry_after)
        elif what == "spend":
            name, run_id, usage = facts
            self._state.spent(name).add(run_id, None if usage is None else decode(TokenUsage, usage))
        elif what == "secrets":
            register_known(facts[0])
        else:
            name, level, text, fields = facts
            logger = logging.getLogger(name)
            if logger.isEnabledFor(level):
                logger.handle(logger.makeRecord(name, level, "", 0, text, (), None, extra=fields))

    async def _admit(self, id: int, name: str, settings: dict[str, Any]) -> None:
        async with self._state.limiter(name, settings).slot() as permit:
            self._send(id, str(permit.epoch).encode())
            await asyncio.Event().wait()  # Until it is withdrawn.

    async def _collect(self, id: int, trace: ExpectedTrace | None) -> None:
        if trace is None:
            collected = CollectedTrace((), 0, "the trial has ended")
        else:
            async with slot_released():
                collected = await trace.wait()
        self._send(id, dumps(collected).encode())
