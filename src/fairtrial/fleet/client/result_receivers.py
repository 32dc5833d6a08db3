"""Receives the results of a run: several tasks that each receive a batch, commit it and then acknowledge it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.errors import MailboxConnectionError, MailboxError
from fairtrial.fleet.client.batches import acknowledge, handed_back_on_error, take
from fairtrial.fleet.client.commits import ResultCommitter
from fairtrial.fleet.client.fleet_run import FleetRun, Wakeup, raise_if_cancelled
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.silence import Silence
from fairtrial.fleet.log import log
from fairtrial.fleet.messages import EvalReply
from fairtrial.mailbox.protocol import Message

_WAIT_SECONDS = 5.0


class ResultReceivers:
    """Receives and commits the results of a run in several tasks.

    `close` ends tasks that are receiving at once; tasks that are committing a batch finish it first.
    """

    def __init__(
        self, fleet: FleetRun, ledger: Ledger, committer: ResultCommitter, silence: Silence, wakeup: Wakeup
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._committer = committer
        self._silence = silence
        self._wakeup = wakeup
        self._closing = False
        self._receiving: set[asyncio.Task[None]] = set()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the tasks in a task group."""
        for _ in range(self._fleet.config.receivers):
            group.create_task(self._collect())

    def close(self) -> None:
        """End the tasks: at once if receiving, otherwise when the current batch is settled."""
        self._closing = True
        for task in self._receiving:
            task.cancel()

    async def drain(self) -> None:
        """Settle duplicates that have arrived in the meantime: they are acknowledged and change nothing."""
        fleet = self._fleet
        try:
            while messages := await fleet.results.receive(fleet.config.batch, fleet.config.lease_seconds, 0):
                await self._settle(messages)
        except MailboxConnectionError as error:
            log.debug("messages remain in %s: %s", fleet.results.name, error)

    async def _collect(self) -> None:
        while not self._closing:
            raise_if_cancelled()
            messages = await self._receive()
            if messages:
                self._ledger.received += len(messages)
                self._wakeup.wake()  # There is room for requests, while these are committed.
                async with handed_back_on_error(messages):
                    await self._settle(messages)

    async def _receive(self) -> Sequence[Message[EvalReply]]:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a receiver is a task
        self._receiving.add(task)
        try:
            return await retry_while_unavailable(self._take, "collecting results", log)
        except asyncio.CancelledError:
            if self._closing and task.uncancel() == 0:
                return ()
            raise  # Cancelled from outside, perhaps in addition.
        finally:
            self._receiving.discard(task)

    async def _take(self) -> Sequence[Message[EvalReply]]:
        fleet, config = self._fleet, self._fleet.config
        return await take(fleet.results, config.batch, lease_seconds=config.lease_seconds, wait_seconds=_WAIT_SECONDS)

    async def _settle(self, messages: Sequence[Message[EvalReply]]) -> None:
        """Commit a batch, acknowledge it, then publish the new results."""
        replies: list[EvalReply] = []
        good: list[Message[EvalReply]] = []
        for message in messages:
            problem = self._ledger.find_problem(message.body)
            if problem is None:
                replies.append(message.body)
                good.append(message)
            else:
                await self._dead_letter(message, problem)
        fresh = await self._committer.commit(replies)
        await acknowledge(self._fleet.results, good)
        self._silence.end()
        self._wakeup.wake()
        if self._fleet.work.on_result is not None:
            for result in fresh:
                await self._fleet.work.on_result(result)

    async def _dead_letter(self, message: Message[EvalReply], problem: str) -> None:
        log.warning("a reply in %s becomes a dead letter: %s", self._fleet.results.name, problem)
        try:
            await message.dead_letter(f"not a reply of this run: {problem}", error="BodyError")
        except MailboxError:
            pass  # It will be redelivered.
