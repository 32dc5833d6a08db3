"""Receive from PostgreSQL, settle what was received, and look at dead letters."""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from fairtrial.errors import ConfigurationError
from fairtrial.mailbox.postgres import statements
from fairtrial.mailbox.postgres.connection import Rows
from fairtrial.mailbox.protocol import DeadLetter, Message, validate_receive
from fairtrial.mailbox.receive import BackgroundReads, ServerReceipt

if TYPE_CHECKING:
    from fairtrial.mailbox.postgres.mailbox import PostgresMailbox

_MAX_REASON = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Settlement:
    """Settles many deliveries with one statement; tells for each item whether its lease was valid."""

    doing: str
    statement: str
    names: Sequence[str] = ("ids", "leases")

    async def __call__(self, mailbox: PostgresMailbox[Any], items: Sequence[tuple[Any, ...]]) -> Sequence[bool]:
        """Settle deliveries of a mailbox, each given by its row, its lease and further values."""
        rows = await mailbox.connection.run(
            f"{self.doing} messages of {mailbox.name}", self.statement, columns(self.names, items)
        )
        if self.statement is statements.NACK:
            rows = [(id,) for ids, _ in rows for id in ids]
        return kept(rows, [item[0] for item in items])


ACKNOWLEDGING = Settlement("acknowledging", statements.ACKNOWLEDGE)
_NACKING = Settlement("giving back", statements.NACK, ("ids", "leases", "delays", "counted"))
_EXTENDING = Settlement("extending", statements.EXTEND, ("ids", "leases", "seconds"))
_DEAD_LETTERING = Settlement("setting aside", statements.DEAD_LETTER, ("ids", "leases", "reasons", "errors"))


class PostgresReceipt(ServerReceipt):
    """The handle of one delivery: its row and the token of its lease."""

    __slots__ = ("lease", "row")

    mailbox: PostgresMailbox[Any]

    def __init__(self, mailbox: PostgresMailbox[Any], row: int, lease: int) -> None:
        self.mailbox = mailbox
        self.message_id = str(row)
        self.row = row
        self.lease = lease

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._settle(ACKNOWLEDGING)

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        await self._settle(_NACKING, float(delay), int(counted))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        await self._settle(_EXTENDING, float(seconds))

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        await self._settle(_DEAD_LETTERING, _storable(reason), _storable(error))

    async def _settle(self, settlement: Settlement, *args: Any) -> None:
        mailbox = self.mailbox
        mailbox.check_open()
        if not await mailbox.connection.batcher.submit((settlement, mailbox), (self.row, self.lease, *args)):
            raise self.lost()


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
    settlement = ACKNOWLEDGING if deaths is None else _DEAD_LETTERING
    items = [
        (receipt.row, receipt.lease, *map(_storable, death))
        for receipt, death in zip(receipts, repeat((), len(receipts)) if deaths is None else deaths, strict=True)
    ]
    return len(list(execute(settlement.statement, columns(settlement.names, items))))


class Bigints(list[int]):
    """An array that is written in a tenth of the time that psycopg takes for a list."""


class Byteas(list[bytes]):
    """An array that is written in a quarter of the time that psycopg takes for a list."""


class _BigintsDumper(Dumper):
    format = Format.BINARY
    oid = psycopg.adapters.types["int8"].array_oid

    def dump(self, obj: Bigints) -> bytes:
        values = [8] * (2 * len(obj))  # Each after its size in bytes.
        values[1::2] = obj
        return _array_head("int8", len(obj)) + struct.pack("!" + "iq" * len(obj), *values)


class _ByteasDumper(Dumper):
    format = Format.BINARY
    oid = psycopg.adapters.types["bytea"].array_oid

    def dump(self, obj: Byteas) -> bytes:
        return _array_head("bytea", len(obj)) + b"".join([part for data in obj for part in (_SIZE(len(data)), data)])


def _array_head(element: str, count: int) -> bytes:
    """Return the head of an array in PostgreSQL's binary format: one dimension that begins at 1, without nulls."""
    return struct.pack("!iiIii", 1, 0, psycopg.adapters.types[element].oid, count, 1)


_SIZE = struct.Struct("!i").pack
psycopg.adapters.register_dumper(Bigints, _BigintsDumper)
psycopg.adapters.register_dumper(Byteas, _ByteasDumper)
_ARRAYS: dict[str, type[list[Any]]] = {"ids": Bigints, "leases": Bigints, "bodies": Byteas}


def columns(names: Sequence[str], items: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the items as one array for each parameter."""
    values = zip(names, zip(*items, strict=True), strict=True)
    return {name: _ARRAYS.get(name, list)(column) for name, column in values}


def kept(rows: Rows, ids: Sequence[int]) -> list[bool]:
    """Return for each id whether its row was changed; a second settlement of the same delivery was not."""
    changed = {row[0] for row in rows}
    answers = []
    for id in ids:
        answers.append(id in changed)
        changed.discard(id)
    return answers


def _storable(text: str) -> str:
    return text[:_MAX_REASON].replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


_LISTENING_SECONDS = 10.0
"""The longest wait between two looks while notifications arrive and no lease or delay ends sooner."""
_BRIEF = 0.05
"""A wait this short needs no look at what is due next: under load, messages come sooner."""
_FIRST_POLL = 0.02
_LONGEST_POLL = 0.25
"""The shortest and longest wait between two looks without notifications."""
_REOPEN_SECONDS = 5.0


class RowReceiver[T](BackgroundReads[T]):
    """Receives messages from one mailbox."""

    _mailbox: PostgresMailbox[T]

    def __init__(self, mailbox: PostgresMailbox[T]) -> None:
        super().__init__(mailbox)
        self._waiting: set[asyncio.Event] = set()
        self._taken: tuple[str, int] | None = None  # A channel and its arrivals when nothing more was waiting.

    async def receive(self, max_messages: int, visibility: float, wait: float) -> Sequence[Message[T]]:
        """See `Mailbox.receive`."""
        validate_receive(max_messages, visibility, wait)
        end = asyncio.get_running_loop().time() + wait
        connection = self._mailbox.connection
        while True:
            id = await self._mailbox.open()
            channel = _channel(id)
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
        loop, listener, channel = asyncio.get_running_loop(), self._mailbox.connection.listener, _channel(id)
        poll, opened = _FIRST_POLL, loop.time()
        waited = end <= opened
        while True:
            event.clear()
            self._check_open()
            messages: Sequence[Message[T]] = ()
            arrivals = listener.arrivals(channel)
            # After a claim that was not filled, only a notification or the end of a lease or delay brings more.
            if waited or arrivals is None or self._taken != (channel, arrivals):
                deliveries = await self._read(self._claim(count, visibility))
                # Of leases and delays that ended, which nothing notifies, there may be more than one claim takes.
                self._taken = (channel, arrivals) if arrivals is not None and len(deliveries) < count else None
                messages = await self._messages(deliveries)
            left = end - loop.time()
            if messages or left <= 0:
                return messages
            waited = True
            if arrivals is not None:
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
        rows = await self._mailbox.connection.run(doing, statements.NEXT_DUE, {"name": self._mailbox.name})
        if not rows or rows[0][0] != id:
            return False
        due = _LISTENING_SECONDS * _spread() if rows[0][1] is None else rows[0][1] + 0.001
        await _wait(event, min(seconds - _BRIEF, due, _LISTENING_SECONDS * _spread()))
        return True

    async def close(self) -> None:
        """End all waits, and hand back the messages that unfinished and cancelled receives claimed."""
        for event in self._waiting:
            event.set()
        await super().close()

    async def _claim(self, count: int, seconds: float) -> Sequence[tuple[PostgresReceipt, tuple[Any, ...]]]:
        lease = secrets.randbits(62) + 1
        parameters = {
            "name": self._mailbox.name,
            "count": count,
            "seconds": float(seconds),
            "lease": lease,
            "holder": self._mailbox.holder,
        }
        rows = await self._mailbox.connection.run(f"receiving from {self._mailbox.name}", statements.CLAIM, parameters)
        rows.sort(key=lambda row: (row[7], row[0]))  # Whatever waited longest is first.
        return [(PostgresReceipt(self._mailbox, row[0], lease), row) for row in rows]

    async def _message(self, receipt: PostgresReceipt, content: tuple[Any, ...]) -> Message[T] | None:
        _, data, kept, deliveries, expiries, reply_to, waited, _ = content
        return await self._read_message(
            receipt,
            self._mailbox.claimed_body(bytes(data).decode("utf-8", "replace")) if kept else bytes(data),
            reply_to or "",
            delivery_count=deliveries,
            expiries=expiries,
            waited_seconds=max(0.0, waited),
        )


def _channel(id: int) -> str:
    return f"{statements.CHANNEL}{id}"


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


class PostgresDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: PostgresMailbox[Any]) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        return int((await self._run(statements.DEAD_COUNT))[0][0])

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        first = 0 if after is None else next(iter(_numbers([after])), _MAX_ID)
        return [await self._letter(row) for row in await self._run(statements.DEAD_PAGE, after=first, limit=limit)]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        rows = await self._run(statements.RETRY, ids=_numbers(ids))
        return sum(number for number, _ in rows)

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        return await self._mailbox.change("dropping dead letters of", statements.DROP, ids=_numbers(ids))

    async def _run(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return await self._mailbox.run("reading dead letters of", statement, **parameters)

    async def _letter(self, row: tuple[Any, ...]) -> DeadLetter:
        death, id, data, kept, deliveries, reason, error, reply_to, died_at = row
        body = await self._mailbox.display_text(bytes(data), claimed=kept)
        return DeadLetter(str(death), str(id), body, deliveries, reason, error, reply_to, died_at=died_at)


def _numbers(ids: Sequence[str]) -> list[int]:
    """Return the ids that can be those of dead letters."""
    return [int(id) for id in dict.fromkeys(ids) if id.isascii() and id.isdecimal() and int(id) <= _MAX_ID]
