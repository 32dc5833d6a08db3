"""Many messages at once: sent with patience, taken, committed, and only then acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from fairtrial.backoff import retry_while_unavailable
from fairtrial.errors import BodyError, MailboxConnectionError, MailboxFullError
from fairtrial.fleet.log import log
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox import bulk
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.runs.writer import Item, commit_items
from fairtrial.store.protocol import Committed, RunStore

LINGER_SECONDS = 0.02


async def send_all(
    requests: Mailbox[EvalRequest],
    bodies: Sequence[EvalRequest],
    *,
    reply_to: str | None,
    enough: Callable[[], bool] = lambda: False,
) -> list[tuple[EvalRequest, BodyError]]:
    """Put all of these in; returns those that cannot travel, and why.

    While the server is away it is tried again, until there is `enough` of that, so a request may be in twice: its
    result is counted once.
    """
    refused: list[tuple[EvalRequest, BodyError]] = []
    waiting = list(bodies)

    async def attempt() -> None:
        if hasattr(requests, "send_all"):
            try:
                await bulk.send_all(requests, waiting, reply_to=reply_to)
            except BodyError:
                pass  # Nothing has left: one by one shows which of them it is.
            else:
                waiting.clear()
                return
        outcomes = await asyncio.gather(
            *(requests.send(body, reply_to=reply_to) for body in waiting), return_exceptions=True
        )
        again: list[EvalRequest] = []
        away: BaseException | None = None
        for body, outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, BodyError):
                refused.append((body, outcome))
            elif isinstance(outcome, MailboxConnectionError | MailboxFullError):
                again.append(body)
                away = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        waiting[:] = again
        if away is not None:
            raise away

    await retry_while_unavailable(attempt, f"sending to {requests.name}", log, enough=enough)
    return refused


async def take(
    results: Mailbox[EvalReply], most: int, *, lease_seconds: float, wait_seconds: float
) -> Sequence[Message[EvalReply]]:
    """The next replies: as soon as there is one, and then those that come within a moment, for larger batches."""
    first = await results.receive(most, lease_seconds, wait_seconds)
    if not first or len(first) >= most:
        return first
    async with given_back(first):
        await anyio.sleep(LINGER_SECONDS)
        try:
            return [*first, *await results.receive(most - len(first), lease_seconds, 0)]
        except MailboxConnectionError:
            return first


async def commit(
    store: RunStore, run_id: str, items: Sequence[Item], on_failure: Callable[[], None] = lambda: None
) -> Committed:
    """Commit results in a thread; see `commit_items`."""
    return await in_thread(lambda: commit_items(store, run_id, items, on_failure))


async def acknowledge(mailbox: Mailbox[Any], messages: Sequence[Message[Any]]) -> None:
    """Acknowledge a batch that is safe. What cannot be acknowledged comes again, and is then a duplicate."""
    try:
        kept = await bulk.acknowledge_all(mailbox, messages)
    except MailboxConnectionError as error:
        log.debug("%d messages will come again: %s", len(messages), error)
    else:
        if not all(kept):
            log.debug("%d of %d messages will come again: their leases ran out", list(kept).count(False), len(messages))


async def hand_back(messages: Sequence[Message[Any]]) -> None:
    """Give a batch back as if it had never been delivered; what cannot be comes back when its lease ends."""
    outcomes = await asyncio.gather(*(message.hand_back() for message in messages), return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failed:
        log.debug("%d messages come back when their leases end: %s", len(failed), failed[0])


@asynccontextmanager
async def given_back(messages: Sequence[Message[Any]]) -> AsyncIterator[None]:
    """If the block fails or is cancelled, what it has not settled goes back at once, not when its lease ends."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await hand_back([message for message in messages if not message.settled])
        raise


async def in_thread[T](call: Callable[[], T]) -> T:
    """The result of a call to a store."""
    return await anyio.to_thread.run_sync(call)
