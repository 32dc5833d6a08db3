"""Receives from a stream: messages of cancelled reads are handed back, invalid messages become dead letters."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Sequence
from typing import Any

from redis.exceptions import MovedError, RedisError

from fairtrial.errors import MailboxClosedError
from fairtrial.mailbox.protocol import Message, validate_receive
from fairtrial.mailbox.reading import UNREADABLE, hand_back_all, read_body
from fairtrial.mailbox.redis.connection import BLOCK_SECONDS, ReadConnection
from fairtrial.mailbox.redis.errors import is_gone, translated
from fairtrial.mailbox.redis.queue import RedisQueue
from fairtrial.mailbox.redis.receipt import RedisReceipt
from fairtrial.mailbox.redis.scripts import GROUP

_log = logging.getLogger(__name__)
_ID = re.compile(rb"[0-9]+-[0-9]+")

type Entry = tuple[bytes, dict[bytes, bytes]]


class Receiver[T]:
    """Receives messages from one mailbox."""

    def __init__(self, mailbox: RedisQueue[T]) -> None:
        self._mailbox = mailbox
        self._reading: dict[asyncio.Task[Any], ReadConnection] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._closing = False

    async def receive(self, max_messages: int, visibility: float, wait: float) -> Sequence[Message[T]]:
        """See `Mailbox.receive`."""
        validate_receive(max_messages, visibility, wait)
        consumer = self._mailbox.consumers.reading(visibility)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            self._mailbox.check_open()
            entries = await self._read(max_messages, consumer, end - loop.time())
            messages = []
            try:
                for entry, fields in entries:
                    if (message := await self._message(consumer, entry, fields)) is not None:
                        messages.append(message)
            except asyncio.CancelledError:
                self._run_in_background(self._hand_back(entries, consumer))
                raise
            if messages or loop.time() >= end:
                return messages

    async def close(self) -> None:
        """End all reads, and hand back the messages that they and cancelled reads received."""
        self._closing = True
        await asyncio.gather(*(reader.interrupt(reading) for reading, reader in self._reading.items()))
        while self._reading or self._returning:
            await asyncio.wait({*self._reading, *self._returning})
            await asyncio.sleep(0)  # Let waiting callers end and hand back their messages.

    async def _read(self, count: int, consumer: str, wait: float) -> Sequence[Entry]:
        connection = self._mailbox.connection
        try:
            reader = await connection.reader(self._mailbox.keys.stream)
        except (RedisError, OSError) as error:
            raise translated(error, f"receiving from {self._mailbox.name}") from None
        block = min(wait, BLOCK_SECONDS)
        command: tuple[Any, ...] = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count)
        if block > 0:
            command += ("BLOCK", max(1, round(block * 1000)))  # Never 0, which means no time limit.
        reading = asyncio.ensure_future(reader.read(*command, "STREAMS", self._mailbox.keys.stream, ">"))
        self._reading[reading] = reader
        reading.add_done_callback(lambda done: self._reading.pop(done, None))
        try:
            # Shielded: if a read is aborted while the server answers, its messages are not redelivered until the
            # lease expires.
            answer = await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._run_in_background(self._return(reader, reading, consumer))
            raise
        except (RedisError, OSError) as error:
            await connection.discard(reader, error)
            if isinstance(error, MovedError):
                return ()  # The next read goes to the node that it names.
            if is_gone(error):
                await self._mailbox.open(again=True)
                return ()
            if reader.used:
                return await self._read(count, consumer, wait)
            raise translated(error, f"receiving from {self._mailbox.name}") from None
        await connection.give_back(reader)
        entries = _entries(answer)
        if self._closing:
            self._run_in_background(self._hand_back(entries, consumer))
            raise MailboxClosedError(f"mailbox {self._mailbox.name} is closed")
        return entries

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, reader: ReadConnection, reading: asyncio.Task[Any], consumer: str) -> None:
        await reader.interrupt(reading)
        try:
            entries = _entries(reading.result())
        except (RedisError, OSError, asyncio.CancelledError):
            await self._mailbox.connection.discard(reader)
            return
        await self._mailbox.connection.give_back(reader)
        await self._hand_back(entries, consumer)

    async def _hand_back(self, entries: Sequence[Entry], consumer: str) -> None:
        """Hand back messages that were not returned to a caller."""
        receipts = [RedisReceipt(self._mailbox, entry.decode(), consumer, entry.decode()) for entry, _ in entries]
        await hand_back_all(self._mailbox.name, receipts)

    async def _message(self, consumer: str, entry: bytes, fields: dict[bytes, bytes]) -> Message[T] | None:
        id = entry.decode()
        origin = message_id(fields.get(b"i")) or id
        receipt = RedisReceipt(self._mailbox, id, consumer, origin)
        deliveries = number(fields.get(b"n")) + 1
        address = _text(fields.get(b"r"))
        body = await read_body(self._mailbox, receipt, origin, fields.get(b"b"), fields.get(b"s"), address)
        if body is UNREADABLE:
            return None
        return Message(
            origin,
            body,
            receipt,
            delivery_count=deliveries,
            expiries=number(fields.get(b"x")) + number(fields.get(b"y")) // 2,
            reply_to=address or None,
            waited_seconds=self._mailbox.connection.age_of(id),
        )


def _entries(answer: Any) -> Sequence[Entry]:
    if not answer:
        return ()
    entries: Sequence[Entry] = answer[0][1]
    return entries


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def number(value: bytes | None) -> int:
    """Return the count in a field; 0 if it is invalid."""
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def milliseconds(value: bytes | None) -> int:
    """Return the time in a field; 0 if it is invalid."""
    return int(value) if value is not None and value.isdigit() and len(value) < 16 else 0


def message_id(value: bytes | None) -> str:
    """Return the message id in a field; empty if it is invalid, because ids are displayed and logged."""
    return value.decode() if value is not None and len(value) < 42 and _ID.fullmatch(value) else ""
