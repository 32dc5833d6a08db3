"""Receive from PostgreSQL, settle what was received, and look at dead letters."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from fairtrial.errors import BodyError, ConfigurationError, LeaseLostError, MailboxClosedError, MailboxError
from fairtrial.mailbox.body import ClaimCheck, readable
from fairtrial.mailbox.postgres.connection import PostgresConnection, RenewalConnection, Rows
from fairtrial.mailbox.postgres.statements import (
    ACKNOWLEDGE,
    CHANNEL,
    CLAIM,
    DEAD_COUNT,
    DEAD_LETTER,
    DEAD_PAGE,
    DROP,
    EXTEND,
    NACK,
    NEXT_DUE,
    RENEW,
    RETRY,
)
from fairtrial.mailbox.protocol import DeadLetter, Message, Renewer, validate_receive
from fairtrial.mailbox.server import UNREADABLE, BodySource, hand_back_all, read_body

CHUNK = 1000
_MAX_REASON = 2000


class PostgresQueue(Protocol):
    """The interface of a mailbox for its receipts."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def connection(self) -> PostgresConnection:
        """The connection to PostgreSQL."""
        ...

    @property
    def renewer(self) -> Renewer:
        """Renews the leases of this mailbox."""
        ...

    @property
    def settlement(self) -> Settlement:
        """Settles deliveries in batches."""
        ...

    def check_open(self) -> None:
        """Raise `MailboxClosedError` after `close`."""
        ...

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        ...


class PostgresReceipt:
    """The handle of one delivery: its row and the token of its lease."""

    __slots__ = ("lease", "mailbox", "row")

    def __init__(self, mailbox: PostgresQueue, row: int, lease: int) -> None:
        self.mailbox = mailbox
        self.row = row
        self.lease = lease

    @property
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        return self.mailbox.renewer

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._settle(self.mailbox.settlement.acknowledge, ())

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        await self._settle(self.mailbox.settlement.nack, (float(delay), int(counted)))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        await self._settle(self.mailbox.settlement.extend, (float(seconds),))

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        await self._settle(self.mailbox.settlement.dead_letter, (_storable(reason), _storable(error)))

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        return await self.mailbox.send_reply(str(self.row), address, body)

    async def _settle(self, operation: Any, args: tuple[Any, ...]) -> None:
        mailbox = self.mailbox
        mailbox.check_open()
        item = (self.row, self.lease, *args)
        if not await mailbox.connection.batcher.submit(operation, mailbox.name, item):
            raise LeaseLostError(
                f"the lease of message {self.row} of {mailbox.name} was lost: it expired, or the message was settled "
                "before"
            )


class Settlement:
    """Settles many deliveries with one statement; each operation tells for each item whether its lease was valid.

    Its methods are the operations of a `StatementBatcher`, so each exists once.
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        names = ("ids", "leases")
        self.acknowledge = partial(self._run, "acknowledging", ACKNOWLEDGE, names)
        self.nack = partial(self._nack, (*names, "delays", "counted"))
        self.extend = partial(self._run, "extending", EXTEND, (*names, "seconds"))
        self.dead_letter = partial(self._run, "setting aside", DEAD_LETTER, (*names, "reasons", "errors"))

    async def _nack(self, names: Sequence[str], mailbox: str, items: Sequence[tuple[Any, ...]]) -> Sequence[bool]:
        doing = f"giving back messages of {mailbox}"
        rows = await self._connection.run(doing, NACK, _columns(names, items))
        return _kept([(id,) for ids, _ in rows for id in ids], [item[0] for item in items])

    async def _run(
        self, doing: str, statement: str, names: Sequence[str], mailbox: str, items: Sequence[tuple[Any, ...]]
    ) -> Sequence[bool]:
        rows = await self._connection.run(f"{doing} messages of {mailbox}", statement, _columns(names, items))
        return _kept(rows, [item[0] for item in items])


def settle_within(
    execute: Callable[[str, Any], Iterable[Any]],
    receipts: Sequence[PostgresReceipt],
    deaths: Sequence[tuple[str, str]] | None = None,
) -> int:
    """Settle deliveries in a transaction of the caller; returns the number of those whose lease was valid.

    Args:
        execute: Executes a statement of psycopg in the transaction, in a thread or not, and returns its rows.
        receipts: The deliveries.
        deaths: The reason and the error of each, if they become dead letters; otherwise they are acknowledged.
    """
    leases = [(receipt.row, receipt.lease) for receipt in receipts]
    if deaths is None:
        return len(list(execute(ACKNOWLEDGE, _columns(("ids", "leases"), leases))))
    items = [(*lease, _storable(why), _storable(error)) for lease, (why, error) in zip(leases, deaths, strict=True)]
    return len(list(execute(DEAD_LETTER, _columns(("ids", "leases", "reasons", "errors"), items))))


class PostgresRenewer:
    """Renews the leases of a mailbox from any thread."""

    def __init__(self, connection: RenewalConnection) -> None:
        self._connection = connection

    def renew(self, receipts: Sequence[PostgresReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost."""
        kept: list[bool] = []
        for start in range(0, len(receipts), CHUNK):
            chunk = receipts[start : start + CHUNK]
            columns = _columns(("ids", "leases"), [(receipt.row, receipt.lease) for receipt in chunk])
            rows = self._connection.run("renewing leases", RENEW, {**columns, "seconds": float(seconds)})
            kept += _kept(list(rows), [receipt.row for receipt in chunk])
        return kept


def _columns(names: Sequence[str], items: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the items as one array for each parameter."""
    return dict(zip(names, map(list, zip(*items, strict=True)), strict=True))


def _kept(rows: Rows, ids: Sequence[int]) -> list[bool]:
    """Return for each id whether its row was changed; a second settlement of the same delivery was not."""
    changed = {row[0] for row in rows}
    answers = []
    for id in ids:
        answers.append(id in changed)
        changed.discard(id)
    return answers


def _storable(text: str) -> str:
    return text[:_MAX_REASON].replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


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


_MAX_ID = 2**63 - 1


class MailboxWithClaims(PostgresQueue, Protocol):
    """The interface of a mailbox for its dead letters."""

    @property
    def claim_check(self) -> ClaimCheck | None:
        """The store for large bodies."""
        ...


class PostgresDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: MailboxWithClaims) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        return int((await self._run(DEAD_COUNT))[0][0])

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        first = 0 if after is None else next(iter(_numbers([after])), _MAX_ID)
        return [await self._letter(row) for row in await self._run(DEAD_PAGE, after=first, limit=limit)]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        rows = await self._run(RETRY, ids=_numbers(ids))
        return sum(number for number, _ in rows)

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        self._mailbox.check_open()
        parameters = {"name": self._mailbox.name, "ids": _numbers(ids)}
        return await self._mailbox.connection.change(f"dropping dead letters of {self._mailbox.name}", DROP, parameters)

    async def _run(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        self._mailbox.check_open()
        doing = f"reading dead letters of {self._mailbox.name}"
        return await self._mailbox.connection.run(doing, statement, {"name": self._mailbox.name, **parameters})

    async def _letter(self, row: tuple[Any, ...]) -> DeadLetter:
        death, id, data, kept, deliveries, reason, error, reply_to, died_at = row
        body = await self._kept(bytes(data)) if kept else readable(bytes(data)).decode("utf-8", "replace")
        return DeadLetter(str(death), str(id), body, deliveries, reason, error, reply_to, died_at=died_at)

    async def _kept(self, claim: bytes) -> str:
        """Return the body from the claim check, or a placeholder if it cannot be read."""
        sha256 = claim.decode("utf-8", "replace")
        if self._mailbox.claim_check is not None:
            try:
                return readable(await self._mailbox.claim_check.fetch(sha256)).decode("utf-8", "replace")
            except (BodyError, OSError):
                pass
        return f"sha256:{sha256}"


def _numbers(ids: Sequence[str]) -> list[int]:
    """Return the ids that can be those of dead letters."""
    return [int(id) for id in dict.fromkeys(ids) if id.isascii() and id.isdecimal() and int(id) <= _MAX_ID]
