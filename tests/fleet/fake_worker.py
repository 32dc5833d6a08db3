"""A minimal worker for tests of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fairtrial import EvalResult, Score
from fairtrial.data.session.events import NO_USAGE
from fairtrial.errors import MailboxError
from fairtrial.fleet import Broker, EvalReply, EvalRequest, LoopCounters
from fairtrial.fleet.worker.outbox import Delivery, delivery_to
from fairtrial.mailbox.protocol import Message


def answer(request: EvalRequest, **changes: Any) -> EvalReply:
    """A passing result for a request."""
    made: dict[str, Any] = {
        "outcome": "scored",
        "score": Score(1.0, True),
        "output": request.sample.input,
        "output_json": None,
        "usage": NO_USAGE,
        "attempt": request.attempt,
        "execution": request.ordinal + 1,
        **changes,
    }
    if made["outcome"] != "scored":
        made["score"] = None
    sample = request.sample if request.echo else None
    return EvalReply(
        EvalResult(key=request.key, ordinal=request.ordinal, **made), request.sample_ordinal, sample, "id", "fake"
    )


@dataclass
class FakeWorker:
    """Executes nothing, counts everything."""

    broker: Broker
    suite: str
    treat: Callable[[EvalRequest], EvalReply | None] = answer
    concurrency: int = 100
    delay: Callable[[EvalRequest], Awaitable[None]] | None = None
    seen: list[EvalRequest] = field(default_factory=list)
    twice: bool = False
    refuses: str = ""  # A run whose requests it hands back.
    counters: LoopCounters = field(default_factory=LoopCounters)
    delivery: Delivery = field(init=False)

    async def run(self) -> None:
        requests = await self.broker.requests(self.suite)
        self.delivery = delivery_to(None, requests, self.counters)
        try:
            while True:
                try:
                    messages = await requests.receive(self.concurrency, 30, 1)
                except MailboxError:
                    await asyncio.sleep(0.05)
                    continue
                await asyncio.gather(*(self.one(message) for message in messages))
        finally:
            self.delivery.close()

    async def one(self, message: Message[EvalRequest]) -> None:
        if message.body.key.run_id == self.refuses:
            await message.hand_back(0.05)
            return
        self.seen.append(message.body)
        if self.delay is not None:
            await self.delay(message.body)
        reply = self.treat(message.body)
        if reply is not None:
            await self.delivery.deliver(message, reply)
            if self.twice:
                await message.reply(reply)
        if not message.settled:
            await message.acknowledge()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[FakeWorker]:
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
