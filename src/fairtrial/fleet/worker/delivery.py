"""Delivers results: to the sender's reply address, to one mailbox, or directly into a store.

`one_transaction` has a further way: into the store, in the transaction that settles the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from fairtrial.base.offload import DaemonThreads
from fairtrial.errors import BodyError, StoreError
from fairtrial.fleet.messages import EvalReply, EvalRequest, by_run
from fairtrial.mailbox.bulk import reply_all, send_all
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.runs.writer import size_of, split_batches
from fairtrial.store.protocol import RunStore

_log = logging.getLogger("fairtrial.fleet")


class Delivery(Protocol):
    """The destination of results. When `deliver` returns, the result is durable and its request may be settled.

    A delivery that has settled the request itself says so by `message.settled`.
    """

    needs_sample: bool

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """Deliver one result.

        Args:
            message: The request.
            reply: The result.
            death: The type of the error because of which the request will be a dead letter; None if it will be
                acknowledged.

        Raises:
            BodyError: this result can never be delivered.
            FairtrialError: delivery failed for now; retrying may help.
        """
        ...

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """Deliver many results whose requests will be acknowledged.

        Raises if any fails, and the caller must then deliver each one whose request is not settled separately.
        """
        ...

    def close(self) -> None:
        """Close connections; a later delivery opens them again."""
        ...


class ToSender:
    """Replies to the `reply_to` of each request."""

    needs_sample = False

    def __init__(self, requests: Mailbox[EvalRequest]) -> None:
        self._requests = requests

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        await message.reply(reply)

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """See `Delivery`."""
        await reply_all(self._requests, batch)

    def close(self) -> None:
        """See `Delivery`."""


class ToMailbox:
    """Sends everything to one mailbox."""

    needs_sample = False

    def __init__(self, mailbox: Mailbox[Any]) -> None:
        self._mailbox = mailbox

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        await self._mailbox.send(reply)

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """See `Delivery`."""
        await send_all(self._mailbox, [reply for _, reply in batch])

    def close(self) -> None:
        """See `Delivery`."""


class ToStore:
    """Commits to a store. Results that arrive during a commit form the next batch."""

    needs_sample = True

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._threads = DaemonThreads()
        self._waiting: list[tuple[EvalReply, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def deliver(self, message: Message[EvalRequest], reply: EvalReply, *, death: str | None = None) -> None:
        """See `Delivery`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((reply, done))
        if self._committing is None:
            self._committing = loop.create_task(self._commit_all())
        await done

    async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
        """See `Delivery`."""
        await asyncio.gather(*(self.deliver(message, reply) for message, reply in batch))

    def close(self) -> None:
        """See `Delivery`."""

    async def _commit_all(self) -> None:
        try:
            while self._waiting:
                batch = next(split_batches(self._waiting, _size))
                self._waiting = self._waiting[len(batch) :]
                problems: dict[int, Exception] = {}
                for run_id, (results, samples) in by_run(reply for reply, _ in batch).items():
                    try:
                        committed = await self._threads.run(partial(self._store.commit, run_id, results, samples))
                        refused = dict(committed.refused)
                    except Exception as error:
                        problems.update({id(result): _shared(error) for result in results})
                        continue
                    for result in results:
                        if result.key in refused:
                            problems[id(result)] = BodyError(f"the store refuses it: {refused[result.key]}")
                _settle(batch, problems)
        finally:
            self._committing = None


def _size(waiting: tuple[EvalReply, asyncio.Future[None]]) -> int:
    reply = waiting[0]
    return size_of((reply.result, reply.sample_ordinal, reply.sample))


def _shared(error: Exception) -> Exception:
    return error if isinstance(error, StoreError) else StoreError(f"committing failed: {error!r}")


def _settle(batch: Sequence[tuple[EvalReply, asyncio.Future[None]]], problems: dict[int, Exception]) -> None:
    for reply, done in batch:
        if done.done():
            continue  # The waiting task was cancelled; the result is committed anyway.
        problem = problems.get(id(reply.result))
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)
