"""Batches of messages: sending with retries, receiving, committing and acknowledging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.offload import finish, in_thread
from fairtrial.errors import BodyError, MailboxConnectionError, MailboxFullError
from fairtrial.fleet.log import log
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.mailbox import bulk
from fairtrial.mailbox.protocol import Mailbox, Message
from fairtrial.runs.writer import Item, commit_items
from fairtrial.store.protocol import Committed, RunStore

LINGER_SECONDS = 0.02


async def send_all(
    requests: Mailbox[EvalRequest],
    bodies: Sequence[EvalRequest],
    *,
    reply_to: str | Mailbox[Any] | None,
    enough: Callable[[], bool] = lambda: False,
) -> list[tuple[EvalRequest, BodyError]]:
    """Send all requests; returns those that cannot be sent, and why.

    Retries while the server is unavailable, until `enough` returns true. A request may therefore be sent twice; its
    result counts once.
    """
    refused: list[tuple[EvalRequest, BodyError]] = []
    waiting = list(bodies)

    async def attempt() -> None:
        if hasattr(requests, "send_all"):
            try:
                await bulk.send_all(requests, waiting, reply_to=reply_to)
            except BodyError:
                pass  # Nothing was sent: sending one by one shows which request is the cause.
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
    """Receive replies: wait for the first one, then a moment longer to fill the batch."""
    first = await results.receive(most, lease_seconds, wait_seconds)
    if not first or len(first) >= most:
        return first
    async with handed_back_on_error(first):
        await asyncio.sleep(LINGER_SECONDS)
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
    """Acknowledge a committed batch. Messages that cannot be acknowledged are redelivered as duplicates."""
    try:
        kept = await bulk.acknowledge_all(mailbox, messages)
    except MailboxConnectionError as error:
        log.debug("%d messages will be redelivered: %s", len(messages), error)
    else:
        if not all(kept):
            lost = list(kept).count(False)
            log.debug("%d of %d messages will be redelivered: their leases have expired", lost, len(messages))


async def hand_back(messages: Sequence[Message[Any]]) -> None:
    """Return a batch without counting its delivery. Messages that fail return when their lease expires."""
    outcomes = await asyncio.gather(*(message.hand_back() for message in messages), return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failed:
        log.debug("%d messages return when their leases expire: %s", len(failed), failed[0])


@asynccontextmanager
async def handed_back_on_error(messages: Sequence[Message[Any]]) -> AsyncIterator[None]:
    """Hand unsettled messages back at once if the block fails or is cancelled, instead of when their lease expires."""
    try:
        yield
    except BaseException:
        await finish(hand_back([message for message in messages if not message.settled]))
        raise
