"""Receive from Redis, settle what was received, return what was left, look at dead letters."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from redis.exceptions import MovedError, RedisError

from fairtrial.errors import BodyError, ConfigurationError, LeaseLostError, MailboxClosedError, MailboxError
from fairtrial.mailbox.body import ClaimCheck, readable
from fairtrial.mailbox.protocol import DeadLetter, Message, Renewer, validate_receive
from fairtrial.mailbox.redis.coalesce import Call, ThreadConnection
from fairtrial.mailbox.redis.connection import BLOCK_SECONDS, ReadConnection, RedisConnection
from fairtrial.mailbox.redis.scripts import ACK, BURY, EXTEND, GROUP, LATE, NACK, RECLAIM, REVIVE, SWEEP, LuaScript
from fairtrial.mailbox.redis.topology import is_gone, translated
from fairtrial.mailbox.server import UNREADABLE, hand_back_all, read_body


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one mailbox. They share a hash tag, so a cluster keeps them on one node."""

    stream: str
    delayed: str
    dead: str
    sweeper: str
    workers: str

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the keys of the mailbox with this name."""
        tag = f"{{fairtrial:{name}}}"
        return cls(f"{tag}:stream", f"{tag}:delayed", f"{tag}:dead", f"{tag}:sweeper", f"{tag}:workers")


class Consumers:
    """The consumer names of one mailbox object: `<token>/<lease in ms>`.

    Each object has a new token, so that entries of a dead process are never taken for its own.
    """

    __slots__ = ("_leases", "token")

    def __init__(self, token: str) -> None:
        self.token = token
        self._leases: set[int] = set()

    def names(self) -> list[str]:
        """Return every name used so far."""
        return [f"{self.token}/{lease}" for lease in list(self._leases)]  # A copy: a thread may add to it.

    def reading(self, seconds: float) -> str:
        """Return the consumer name for leases of this duration."""
        lease = max(1, round(seconds * 1000))
        self._leases.add(lease)
        return f"{self.token}/{lease}"

    def extended(self, seconds: float) -> tuple[str, int]:
        """Return the consumer name to move a lease to so that it expires in `seconds`, and its initial idle time.

        Other durations than those of `reading` share a name per power of two, to bound the number of names.
        """
        lease = max(1, round(seconds * 1000))
        if lease in self._leases:
            return f"{self.token}/{lease}", 0
        roof = 1 << (lease - 1).bit_length()
        self._leases.add(roof)
        return f"{self.token}/{roof}", roof - lease


class RedisQueue[T](Protocol):
    """The interface of a mailbox for its receiver, receipts, dead letters and sweeper."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def body_type(self) -> type[T]:
        """The type of bodies."""
        ...

    @property
    def keys(self) -> Keys:
        """The keys in Redis."""
        ...

    @property
    def key(self) -> bytes | None:
        """The key that signs bodies; None if they are not signed."""
        ...

    @property
    def claim_check(self) -> ClaimCheck | None:
        """The store for large bodies."""
        ...

    @property
    def max_body_bytes(self) -> int:
        """The size limit of bodies in Redis."""
        ...

    @property
    def connection(self) -> RedisConnection:
        """The connection to Redis."""
        ...

    @property
    def consumers(self) -> Consumers:
        """The consumer names of this object."""
        ...

    @property
    def renewer(self) -> Renewer:
        """Renews the leases of this mailbox."""
        ...

    def check_open(self) -> None:
        """Raise `MailboxClosedError` after `close`."""
        ...

    async def open(self, *, again: bool = False) -> None:
        """Create the mailbox if it does not exist."""
        ...

    async def run(self, doing: str, script: LuaScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script on this mailbox immediately and translate errors."""
        ...

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        ...


CHUNK = 200
OURS = ord("1")
"""The answer of a settling script if the lease was still valid."""
_MAX_REASON = 2000


class RedisReceipt:
    """The handle of one delivery: its stream entry and its mailbox."""

    __slots__ = ("consumer", "entry", "mailbox", "message_id")

    def __init__(self, mailbox: RedisQueue[Any], entry: str, consumer: str, message_id: str) -> None:
        self.mailbox = mailbox
        self.entry = entry
        self.consumer = consumer
        self.message_id = message_id

    @property
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        return self.mailbox.renewer

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._run("acknowledging", ACK, (self.mailbox.keys.stream,), (self.entry,))

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        keys = (self.mailbox.keys.stream, self.mailbox.keys.delayed)
        # Rounded up: a message must not return before its delay has passed.
        await self._run("giving back", NACK, keys, (self.entry, int(delay * 1000 + 0.999999), int(counted)))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        consumer, idle = self.mailbox.consumers.extended(seconds)
        head = (consumer, idle, self.consumer)
        await self._run("extending", EXTEND, (self.mailbox.keys.stream,), (self.entry,), head=head)
        self.consumer = consumer

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        keys = (self.mailbox.keys.stream, self.mailbox.keys.dead)
        args = (self.entry, _storable(reason), _storable(error))
        await self._run("setting aside", BURY, keys, args)

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        return await self.mailbox.send_reply(self.message_id, address, body)

    async def _run(
        self,
        doing: str,
        script: LuaScript,
        keys: tuple[str, ...],
        args: tuple[Any, ...],
        *,
        head: tuple[Any, ...] = (),
    ) -> None:
        mailbox = self.mailbox
        mailbox.check_open()
        try:
            ours = await mailbox.connection.submit(script, keys, (mailbox.consumers.token, *head), args)
        except (RedisError, OSError) as error:
            if is_gone(error):
                raise self.lost() from None
            raise translated(error, f"{doing} message {self.message_id} of {mailbox.name}") from None
        if ours != OURS:
            raise self.lost()

    def lost(self) -> LeaseLostError:
        """Return the error for a lease that was lost."""
        return LeaseLostError(
            f"the lease of message {self.message_id} of {self.mailbox.name} was lost: it expired, or the message was "
            "settled before"
        )


class RedisRenewer:
    """Renews the leases of a mailbox from any thread, in chunks that keep the server responsive."""

    def __init__(self, connection: ThreadConnection) -> None:
        self._connection = connection

    def renew(self, receipts: Sequence[RedisReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost."""
        groups: dict[tuple[int, str], list[int]] = {}
        for at, receipt in enumerate(receipts):
            groups.setdefault((id(receipt.mailbox), receipt.consumer), []).append(at)
        calls: list[Call] = []
        places: list[list[int]] = []
        for group in groups.values():
            group.sort(key=lambda at: _order(receipts[at].entry))
            first = receipts[group[0]]
            consumer, idle = first.mailbox.consumers.extended(seconds)
            for start in range(0, len(group), CHUNK):
                chunk = group[start : start + CHUNK]
                head = [first.mailbox.consumers.token, consumer, idle, first.consumer]
                entries = [receipts[at].entry for at in chunk]
                calls.append(Call(EXTEND, (first.mailbox.keys.stream,), head + entries))
                places.append(chunk)
                for at in chunk:
                    receipts[at].consumer = consumer
        kept = [False] * len(receipts)
        for answer, chunk in zip(self._connection.run(calls), places, strict=True):
            if isinstance(answer, BaseException):
                if is_gone(answer):
                    continue
                raise translated(answer, "renewing leases")
            for at, held in zip(chunk, answer, strict=True):
                kept[at] = held == OURS
        return kept


def _order(entry: str) -> tuple[int, int]:
    time, _, sequence = entry.partition("-")
    return int(time), int(sequence)


def _storable(text: str) -> bytes:
    return text[:_MAX_REASON].encode("utf-8", "replace")


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


class RedisDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: RedisQueue[Any]) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        return int(await self._command("XLEN", self._mailbox.keys.dead))

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        start = "-" if after is None else f"({after}"
        entries = await self._command("XRANGE", self._mailbox.keys.dead, start, "+", "COUNT", limit)
        return [await self._letter(entry.decode(), fields) for entry, fields in entries]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        keys = (self._mailbox.keys.stream, self._mailbox.keys.dead)
        return int(await self._mailbox.run("retrying dead letters of", REVIVE, keys, ids)) if ids else 0

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        return int(await self._command("XDEL", self._mailbox.keys.dead, *ids)) if ids else 0

    async def _command(self, *args: Any) -> Any:
        self._mailbox.check_open()
        try:
            return await self._mailbox.connection.command(*args)
        except (RedisError, OSError) as error:
            raise translated(error, f"reading dead letters of {self._mailbox.name}") from None

    async def _letter(self, id: str, fields: dict[bytes, bytes]) -> DeadLetter:
        def text(name: bytes) -> str:
            return fields.get(name, b"").decode("utf-8", "replace")

        body = readable(fields.get(b"b", b"")).decode("utf-8", "replace")
        if b"s" in fields:
            body = await self._kept(text(b"s"))
        return DeadLetter(
            id,
            message_id(fields.get(b"i")) or id,
            body,
            number(fields.get(b"n")),
            text(b"reason"),
            text(b"error"),
            text(b"r") or None,
            died_at=milliseconds(fields.get(b"at")) / 1000,
        )

    async def _kept(self, sha256: str) -> str:
        """Return the body from the claim check, or a placeholder if it cannot be read."""
        if self._mailbox.claim_check is not None:
            try:
                return readable(await self._mailbox.claim_check.fetch(sha256)).decode("utf-8", "replace")
            except (BodyError, OSError):
                pass
        return f"sha256:{sha256}"


_MOST = 200
_STRAY_MS = 10 * 60 * 1000
_SECONDS_PER_LEASE = 25e-6
"""Checking a lease takes the server 0.1 to 1.2 us: with this pause for each, sweeping uses at most a twentieth."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of one sweep: the number of messages returned, and the seconds until the next sweep."""

    moved: int
    pause: float


class Sweeper:
    """Sweeps one mailbox while it holds the sweeper lock.

    Args:
        mailbox: The mailbox to sweep.
        interval: Seconds between sweeps; longer with very many leases.
    """

    def __init__(self, mailbox: RedisQueue[object], interval: float) -> None:
        self._mailbox = mailbox
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start competing for the sweeper lock."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="fairtrial mailbox sweeper")

    async def stop(self) -> None:
        """Stop sweeping."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def sweep(self) -> Sweep | None:
        """Return all due messages to the queue; None if another process holds the lock.

        Raises:
            MailboxError: Redis is unavailable.
        """
        moved = 0
        keys = self._mailbox.keys
        lock_ms = round(max(1.0, 4 * self._interval) * 1000)
        try:
            while True:
                answer = await self._mailbox.connection.script(
                    SWEEP,
                    (keys.stream, keys.delayed, keys.sweeper),
                    (self._mailbox.consumers.token, lock_ms, _MOST, _STRAY_MS),
                )
                if not answer:
                    return None
                promoted, wait, held, names = answer
                reclaimed = await self._reclaim(names)
                moved += promoted + sum(reclaimed)
                if promoted < _MOST and max(reclaimed, default=0) < _MOST:
                    pause = max(self._interval, held * _SECONDS_PER_LEASE)
                    return Sweep(moved, pause if wait < 0 else min(pause, wait / 1000 + 0.002))
        except (RedisError, OSError) as error:
            if is_gone(error):
                return Sweep(moved, self._interval)
            raise translated(error, f"sweeping {self._mailbox.name}") from None

    async def _reclaim(self, names: list[bytes]) -> list[int]:
        # One call per consumer, so that the server can serve other clients in between.
        consumers = [(name, int(lease)) for name in names if (lease := name.rpartition(b"/")[2]).isdigit()]
        found = await self._each(LATE, consumers)
        late = [consumer for consumer, is_late in zip(consumers, found, strict=True) if is_late]
        # If the leases of several workers expire together, the cause is an outage of the server or of machines, and
        # not a message that crashes its worker.
        workers = {name.rpartition(b"/")[0] for name, _ in late}
        return await self._each(RECLAIM, late, _MOST, int(len(workers) > 1))

    async def _each(self, script: LuaScript, consumers: list[tuple[bytes, int]], *args: int) -> list[int]:
        calls = [Call(script, (self._mailbox.keys.stream,), [name, lease, *args]) for name, lease in consumers]
        answers = await self._mailbox.connection.run(calls) if calls else []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [int(answer) for answer in answers]

    async def _run(self) -> None:
        while True:
            pause = self._interval
            try:
                done = await self.sweep()
            except MailboxError as error:
                _log.debug("sweeping %s failed: %s", self._mailbox.name, error)
            except Exception:
                _log.exception("sweeping %s failed; retrying", self._mailbox.name)
            else:
                # Random pauses spread the candidates.
                pause = pause * (1 + random.random()) if done is None else done.pause  # noqa: S311
            await asyncio.sleep(pause)
