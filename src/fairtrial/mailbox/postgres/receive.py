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
from fairtrial.mailbox.reading import UNREADABLE, BodySource, hand_back_all, read_body

_log = logging.getLogger(__name__)
_LISTENING_SECONDS = 10.0
"""The longest wait between two looks while notifications arrive and no lease or delay ends sooner."""
_BRIEF = 0.05
"""A wait this short needs no look at what is due next: under load, messages come sooner."""
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
        end = asyncio.get_running_loop().time() + wait
        connection = self._mailbox.connection
        while True:
            id = await self._mailbox.open()
            channel = f"{CHANNEL}{id}"
            # Subscribed before the first look, so that nothing that arrives after it is missed.
            event = asyncio.Event() if connection.pooled or not wait else connection.listener.subscribe(channel)
            self._waiting.add(event)
            try:
                messages = await self._receive(max_messages, visibility, end, id, event)
            finally:
                self._waiting.discard(event)
                connection.listener.unsubscribe(channel, event)
            if messages is not None:
                return messages
            await self._mailbox.open(again=True)

    async def _receive(
        self, count: int, visibility: float, end: float, id: int, event: asyncio.Event
    ) -> Sequence[Message[T]] | None:
        """Return messages, or none at the end; None if the mailbox no longer has this id."""
        loop = asyncio.get_running_loop()
        poll, opened = _FIRST_POLL, loop.time()
        while True:
            event.clear()
            messages = await self._take(count, visibility)
            left = end - loop.time()
            if messages or left <= 0:
                return messages
            if self._mailbox.connection.listener.listens(f"{CHANNEL}{id}"):
                if not await self._listen(event, left, id):
                    return None
                continue
            await _wait(event, min(poll * _spread(), left))
            poll = min(1.5 * poll, _LONGEST_POLL)
            if loop.time() - opened > _REOPEN_SECONDS:  # It may have been lost with the database.
                opened = loop.time()
                await self._mailbox.open(again=True)

    async def _listen(self, event: asyncio.Event, seconds: float, id: int) -> bool:
        """Wait for a notification, until a lease or delay ends, or for a while; False if nobody would notify this id.

        A mailbox that was lost with the database, or has expired, is created again with another id and channel.
        """
        if await _wait(event, min(seconds, _BRIEF)) or seconds <= _BRIEF:
            return True
        doing = f"receiving from {self._mailbox.name}"
        rows = await self._mailbox.connection.run(doing, NEXT_DUE, {"name": self._mailbox.name})
        if not rows or rows[0][0] != id:
            return False
        due = _LISTENING_SECONDS * _spread() if rows[0][1] is None else rows[0][1] + 0.001
        await _wait(event, min(seconds - _BRIEF, due, _LISTENING_SECONDS * _spread()))
        return True

    async def close(self) -> None:
        """End all waits, and hand back the messages that unfinished and cancelled receives claimed."""
        self._closing = True
        for event in self._waiting:
            event.set()
        while self._claiming or self._background:
            await asyncio.wait({*self._claiming, *self._background})
            await asyncio.sleep(0)  # Let waiting callers end and hand back their messages.

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
        await hand_back_all(self._mailbox.name, [PostgresReceipt(self._mailbox, row[0], lease) for row in rows])

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


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; False if it did not happen in this time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _spread() -> float:
    """Return a factor that keeps workers from looking all at once."""
    return random.uniform(0.8, 1.0)  # noqa: S311 - only to spread them
