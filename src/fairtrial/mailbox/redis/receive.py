"""Reading from a stream: what a cancelled read was given is given back, what cannot be read is set aside."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from fairtrial.errors import BodyError, CodecError, MailboxClosedError, MailboxError, NewerFormatError
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, decode_body
from fairtrial.mailbox.protocol import Message, checked_receive
from fairtrial.mailbox.redis.connection import BLOCK_SECONDS, Reader
from fairtrial.mailbox.redis.errors import is_gone, translated
from fairtrial.mailbox.redis.receipt import RedisReceipt
from fairtrial.mailbox.redis.scripts import GROUP
from fairtrial.mailbox.sealing import unseal

if TYPE_CHECKING:
    from fairtrial.mailbox.redis.mailbox import RedisMailbox

_log = logging.getLogger(__name__)
_MISSING_BLOB_DELAY = 5.0
_ID = re.compile(rb"[0-9]+-[0-9]+")

type Entry = tuple[bytes, dict[bytes, bytes]]


class Receiver[T]:
    """Takes messages out of one mailbox."""

    def __init__(self, mailbox: RedisMailbox[T]) -> None:
        self._mailbox = mailbox
        self._reading: dict[asyncio.Task[Any], Reader] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._closing = False

    async def receive(self, max_messages: int, visibility: float, wait: float) -> Sequence[Message[T]]:
        """See `Mailbox.receive`."""
        checked_receive(max_messages, visibility, wait)
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
                self._later(self._hand_back(entries, consumer))
                raise
            if messages or loop.time() >= end:
                return messages

    async def close(self) -> None:
        """End every read, and give back what they and cancelled reads were given."""
        self._closing = True
        await asyncio.gather(*(reader.interrupt(reading) for reading, reader in self._reading.items()))
        while self._reading or self._returning:
            await asyncio.wait({*self._reading, *self._returning})
            await asyncio.sleep(0)  # Whoever waited for a read finds out, and hands back what it was given.

    async def _read(self, count: int, consumer: str, wait: float) -> Sequence[Entry]:
        connection = self._mailbox.connection
        reader = connection.reader()
        block = min(wait, BLOCK_SECONDS)
        command: tuple[Any, ...] = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count)
        if block > 0:
            command += ("BLOCK", max(1, round(block * 1000)))  # Never 0, which would mean for ever.
        reading = asyncio.ensure_future(reader.read(*command, "STREAMS", self._mailbox.keys.stream, ">"))
        self._reading[reading] = reader
        reading.add_done_callback(lambda done: self._reading.pop(done, None))
        try:
            # Shielded: a read that is torn down while the server answers strands what it was given until the
            # lease ends.
            answer = await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._later(self._return(reader, reading, consumer))
            raise
        except (RedisError, OSError) as error:
            await connection.discard(reader)
            if is_gone(error):
                await self._mailbox.open(again=True)
                return ()
            if reader.used:
                return await self._read(count, consumer, wait)
            raise translated(error, f"receiving from {self._mailbox.name}") from None
        await connection.give_back(reader)
        entries = _entries(answer)
        if self._closing:
            self._later(self._hand_back(entries, consumer))
            raise MailboxClosedError(f"mailbox {self._mailbox.name} is closed")
        return entries

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, reader: Reader, reading: asyncio.Task[Any], consumer: str) -> None:
        await reader.interrupt(reading)
        try:
            entries = _entries(reading.result())
        except (RedisError, OSError, asyncio.CancelledError):
            await self._mailbox.connection.discard(reader)
            return
        await self._mailbox.connection.give_back(reader)
        await self._hand_back(entries, consumer)

    async def _hand_back(self, entries: Sequence[Entry], consumer: str) -> None:
        """Undo a delivery nobody saw."""
        receipts = [RedisReceipt(self._mailbox, entry.decode(), consumer, entry.decode()) for entry, _ in entries]
        backs = (receipt.nack(0, counted=False) for receipt in receipts)
        for outcome in await asyncio.gather(*backs, return_exceptions=True):
            if isinstance(outcome, BaseException):
                _log.warning("a message of %s comes back when its lease ends: %s", self._mailbox.name, outcome)

    async def _message(self, consumer: str, entry: bytes, fields: dict[bytes, bytes]) -> Message[T] | None:
        id = entry.decode()
        origin = message_id(fields.get(b"i")) or id
        receipt = RedisReceipt(self._mailbox, id, consumer, origin)
        deliveries = number(fields.get(b"n")) + 1
        try:
            data = fields.get(b"b")
            if data is None or len(data) > self._mailbox.max_body_bytes:
                data = await self._bytes(fields)
            data = unseal(data, self._mailbox.key, self._mailbox.name, _text(fields.get(b"r")))
            body = decode_body(self._mailbox.body_type, data)
        except NewerFormatError as error:
            # Not damaged: a worker of that version can read it, and this one will have been replaced soon.
            _log.warning("message %s of %s is left to newer workers: %s", origin, self._mailbox.name, error)
            await self._quietly(receipt.nack(NEWER_FORMAT_DELAY, counted=False))
            return None
        except (BodyError, CodecError) as error:
            await self._aside(receipt, f"the body cannot be read: {error}")
            return None
        except OSError as error:
            _log.warning("the body of message %s of %s is out of reach: %s", origin, self._mailbox.name, error)
            await self._quietly(receipt.nack(_MISSING_BLOB_DELAY, counted=False))
            return None
        except Exception as error:  # A validator of the user's that fails in its own way.
            await self._aside(receipt, f"reading the body failed: {type(error).__name__}: {error}")
            return None
        return Message(
            origin,
            body,
            receipt,
            delivery_count=deliveries,
            expiries=number(fields.get(b"x")) + number(fields.get(b"y")) // 2,
            reply_to=_text(fields.get(b"r")) or None,
            waited_seconds=self._mailbox.connection.age_of(id),
        )

    async def _bytes(self, fields: dict[bytes, bytes]) -> bytes:
        body = fields.get(b"b")
        if body is None:
            claim = fields.get(b"s")
            if claim is None:
                raise BodyError("there is none")
            if self._mailbox.claim_check is None:
                raise BodyError("it is kept outside, and this mailbox has no claim check to fetch it with")
            return await self._mailbox.claim_check.fetch(_text(claim))
        if len(body) > self._mailbox.max_body_bytes:
            raise BodyError(f"{len(body)} bytes are more than {self._mailbox.max_body_bytes}")
        return body

    async def _aside(self, receipt: RedisReceipt, reason: str) -> None:
        await self._quietly(receipt.dead_letter(reason, "BodyError"))

    async def _quietly(self, settling: Any) -> None:
        try:
            await settling
        except MailboxError as error:
            # One bad message must not cost the good ones beside it; it comes back when its lease ends.
            _log.warning("a message of %s could not be set aside: %s", self._mailbox.name, error)


def _entries(answer: Any) -> Sequence[Entry]:
    if not answer:
        return ()
    entries: Sequence[Entry] = answer[0][1]
    return entries


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def number(value: bytes | None) -> int:
    """A count in a field; 0 if it is none, whoever wrote it."""
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def milliseconds(value: bytes | None) -> int:
    """A time in a field; 0 if it is none."""
    return int(value) if value is not None and value.isdigit() and len(value) < 16 else 0


def message_id(value: bytes | None) -> str:
    """The identity in a field; nothing if it is none: it is shown to people and written to logs."""
    return value.decode() if value is not None and len(value) < 42 and _ID.fullmatch(value) else ""
