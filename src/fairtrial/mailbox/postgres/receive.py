"""Receives from a mailbox on PostgreSQL: claims rows, and waits for a notification or the next due message."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from fairtrial.errors import MailboxClosedError, MailboxError
from fairtrial.mailbox.postgres.connection import Rows
from fairtrial.mailbox.postgres.receipt import PostgresQueue, PostgresReceipt
from fairtrial.mailbox.postgres.statements import CHANNEL, CLAIM, NEXT_DUE
from fairtrial.mailbox.protocol import Message, validate_receive
from fairtrial.mailbox.reading import UNREADABLE, BodySource, read_body

_log = logging.getLogger(__name__)
_LISTENING_SECONDS = 2.0
"""The longest wait between two looks while notifications arrive: leases expire without one."""
_FIRST_POLL = 0.02
_LONGEST_POLL = 0.25
"""The shortest and longest wait between two looks without notifications."""
_REOPEN_SECONDS = 5.0


class ReceivingMailbox[T](PostgresQueue, BodySource[T], Protocol):
    """The interface of a mailbox for its receiver."""

    @property
    def holder(self) -> int:
        """The number of this object, stored with its leases."""
        ...

    async def open(self, *, again: bool = False) -> int:
        """Create the mailbox if it does not exist, and return its id."""
        ...


class RowReceiver[T]:
    """Receives messages from one mailbox."""

    def __init__(self, mailbox: ReceivingMailbox[T]) -> None:
        self._mailbox = mailbox
        self._background: set[asyncio.Task[None]] = set()
        self._claiming: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Event] = set()
        self._closing = False

    async def receive(self, max_messages: int, visibility: float, wait: float) -> Sequence[Message[T]]:
        """See `Mailbox.receive`."""
        validate_receive(max_messages, visibility, wait)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        if messages := await self._take(max_messages, visibility):
            return messages
        if loop.time() >= end:
            return ()
        channel = f"{CHANNEL}{await self._mailbox.open()}"
        listener = self._mailbox.connection.listener
        event = asyncio.Event() if self._mailbox.connection.pooled else listener.subscribe(channel)
        self._waiting.add(event)
        try:
            poll, opened = _FIRST_POLL, loop.time()
            while (left := end - loop.time()) > 0:
                event.clear()
                if messages := await self._take(max_messages, visibility):
                    return messages
                listens = listener.listens(channel)
                pause = await self._next_look(_LISTENING_SECONDS if listens else poll)
                await _wait(event, min(pause, left))
                poll = min(1.5 * poll, _LONGEST_POLL)
                if loop.time() - opened > _REOPEN_SECONDS:  # It may have been lost with the database.
                    opened = loop.time()
                    await self._mailbox.open(again=True)
            return await self._take(max_messages, visibility)
        finally:
            self._waiting.discard(event)
            listener.unsubscribe(channel, event)

    async def close(self) -> None:
        """End all waits, and hand back the messages that unfinished and cancelled receives claimed."""
        self._closing = True
        for event in self._waiting:
            event.set()
        while self._claiming or self._background:
            await asyncio.wait({*self._claiming, *self._background})
            await asyncio.sleep(0)  # Let waiting callers end and hand back their messages.

    async def _next_look(self, longest: float) -> float:
        """Return the seconds until a message is due, at most `longest`; spread, so that workers do not look at once."""
        longest *= random.uniform(0.8, 1.0)  # noqa: S311 - only to spread them
        if longest < _LONGEST_POLL:
            return longest
        rows = await self._mailbox.connection.run(
            f"receiving from {self._mailbox.name}", NEXT_DUE, {"name": self._mailbox.name}
        )
        return min(longest, rows[0][0] + 0.001) if rows else longest

    async def _take(self, count: int, seconds: float) -> Sequence[Message[T]]:
        self._check_open()
        lease = secrets.randbits(62) + 1
        claiming = asyncio.ensure_future(self._claim(count, seconds, lease))
        self._claiming.add(claiming)
        claiming.add_done_callback(self._claimed)
        try:
            # Shielded: if a claim is aborted, its messages are not redelivered until the lease expires.
            rows = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            self._run_in_background(self._return(claiming, lease))
            raise
        if self._closing:
            self._run_in_background(self._hand_back(rows, lease))
            self._check_open()
        try:
            return [message for row in rows if (message := await self._message(row, lease)) is not None]
        except asyncio.CancelledError:
            self._run_in_background(self._hand_back(rows, lease))
            raise

    async def _claim(self, count: int, seconds: float, lease: int) -> Rows:
        parameters = {
            "name": self._mailbox.name,
            "count": count,
            "seconds": float(seconds),
            "lease": lease,
            "holder": self._mailbox.holder,
        }
        rows = await self._mailbox.connection.run(f"receiving from {self._mailbox.name}", CLAIM, parameters)
        rows.sort(key=lambda row: (row[7], row[0]))  # Whatever waited longest is first.
        return rows

    def _claimed(self, task: asyncio.Task[Any]) -> None:
        self._claiming.discard(task)
        if not task.cancelled():
            task.exception()  # Mark as retrieved: a cancelled caller will not do so.

    def _check_open(self) -> None:
        if self._closing:
            raise MailboxClosedError(f"mailbox {self._mailbox.name} is closed")
        self._mailbox.check_open()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _return(self, claiming: asyncio.Task[Rows], lease: int) -> None:
        try:
            rows = await claiming
        except MailboxError:
            return
        await self._hand_back(rows, lease)

    async def _hand_back(self, rows: Rows, lease: int) -> None:
        """Hand back messages that were not returned to a caller."""
        receipts = [PostgresReceipt(self._mailbox, row[0], lease) for row in rows]
        backs = (receipt.nack(0, counted=False) for receipt in receipts)
        for outcome in await asyncio.gather(*backs, return_exceptions=True):
            if isinstance(outcome, BaseException):
                name = self._mailbox.name
                _log.warning("a message of %s will be redelivered when its lease expires: %s", name, outcome)

    async def _message(self, row: tuple[Any, ...], lease: int) -> Message[T] | None:
        id, data, kept, deliveries, expiries, reply_to, waited, _ = row
        receipt = PostgresReceipt(self._mailbox, id, lease)
        wire, claim = (None, bytes(data)) if kept else (bytes(data), None)
        body = await read_body(self._mailbox, receipt, str(id), wire, claim, reply_to or "")
        if body is UNREADABLE:
            return None
        return Message(
            str(id),
            body,
            receipt,
            delivery_count=deliveries,
            expiries=expiries,
            reply_to=reply_to,
            waited_seconds=max(0.0, waited),
        )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
