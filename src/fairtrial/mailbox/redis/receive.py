"""Receive from Redis, settle what was received, return what was left, look at dead letters."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from redis.exceptions import MovedError, RedisError

from fairtrial.errors import BodyError, ConfigurationError, MailboxError
from fairtrial.mailbox.protocol import DeadLetter, Message
from fairtrial.mailbox.receive import BackgroundReads, Delivery, ServerReceipt
from fairtrial.mailbox.redis import scripts
from fairtrial.mailbox.redis.connection import BLOCK_SECONDS, ReadConnection
from fairtrial.mailbox.redis.topology import is_gone, translated

if TYPE_CHECKING:
    from fairtrial.mailbox.redis.mailbox import RedisMailbox


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


OURS = ord("1")
"""The answer of a settling script if the lease was still valid."""
_MAX_REASON = 2000


class RedisReceipt(ServerReceipt):
    """The handle of one delivery: its stream entry and its mailbox."""

    __slots__ = ("consumer", "entry")

    mailbox: RedisMailbox[Any]

    def __init__(self, mailbox: RedisMailbox[Any], entry: str, consumer: str, message_id: str) -> None:
        self.mailbox = mailbox
        self.entry = entry
        self.consumer = consumer
        self.message_id = message_id

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._run("acknowledging", scripts.ACK, (self.mailbox.keys.stream,), (self.entry,))

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        keys = (self.mailbox.keys.stream, self.mailbox.keys.delayed)
        # Rounded up: a message must not return before its delay has passed.
        await self._run("giving back", scripts.NACK, keys, (self.entry, int(delay * 1000 + 0.999999), int(counted)))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        consumer, idle = self.mailbox.consumers.extended(seconds)
        head = (consumer, idle, self.consumer)
        await self._run("extending", scripts.EXTEND, (self.mailbox.keys.stream,), (self.entry,), head=head)
        self.consumer = consumer

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        keys = (self.mailbox.keys.stream, self.mailbox.keys.dead)
        args = (self.entry, _storable(reason), _storable(error))
        await self._run("setting aside", scripts.BURY, keys, args)

    async def _run(
        self,
        doing: str,
        script: scripts.LuaScript,
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


def _storable(text: str) -> bytes:
    return text[:_MAX_REASON].encode("utf-8", "replace")


_log = logging.getLogger(__name__)
_ID = re.compile(rb"[0-9]+-[0-9]+")


class StreamReceiver[T](BackgroundReads[T]):
    """Receives messages from one mailbox."""

    _mailbox: RedisMailbox[T]

    async def _look(self, count: int, visibility: float, wait: float) -> Sequence[Delivery]:
        mailbox, used = self._mailbox, False
        mailbox.start_sweeping()
        consumer = mailbox.consumers.reading(visibility)
        command: tuple[Any, ...] = ("XREADGROUP", "GROUP", scripts.GROUP, consumer, "COUNT", count)
        if wait > 0:  # Never 0, which means no time limit.
            command += ("BLOCK", max(1, round(min(wait, BLOCK_SECONDS) * 1000)))
        try:
            reader = await mailbox.connection.reader(mailbox.keys.stream)
            used = reader.used
            reading = self._deliveries(reader, consumer, (*command, "STREAMS", mailbox.keys.stream, ">"))
            return await self._read(reading, reader.interrupt)
        except (RedisError, OSError) as error:
            if isinstance(error, MovedError):
                return ()  # The next read goes to the node that it names.
            if is_gone(error):
                await mailbox.open(again=True)
                return ()
            if used:
                return await self._look(count, visibility, wait)
            raise translated(error, f"receiving from {mailbox.name}") from None

    async def _deliveries(
        self, reader: ReadConnection, consumer: str, command: tuple[Any, ...]
    ) -> Sequence[tuple[RedisReceipt, dict[bytes, bytes]]]:
        connection = self._mailbox.connection
        try:
            answer = await reader.read(*command)
        except BaseException as error:
            await connection.discard(reader, error)
            raise
        await connection.give_back(reader)
        deliveries = []
        for entry, fields in answer[0][1] if answer else ():
            id = entry.decode()
            origin = message_id(fields.get(b"i")) or id
            deliveries.append((RedisReceipt(self._mailbox, id, consumer, origin), fields))
        return deliveries

    async def _message(self, receipt: RedisReceipt, content: dict[bytes, bytes]) -> Message[T] | None:
        return await self._read_message(
            receipt,
            content[b"b"] if b"b" in content else self._claimed(content),
            _text(content.get(b"r")),
            delivery_count=number(content.get(b"n")) + 1,
            expiries=number(content.get(b"x")) + number(content.get(b"y")) // 2,
            waited_seconds=self._mailbox.connection.age_of(receipt.entry),
        )

    async def _claimed(self, fields: dict[bytes, bytes]) -> bytes:
        if b"s" not in fields:
            raise BodyError("the message has no body")
        return await self._mailbox.claimed_body(_text(fields[b"s"]))


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

    def __init__(self, mailbox: RedisMailbox[Any]) -> None:
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
        return int(await self._mailbox.run("retrying dead letters of", scripts.REVIVE, keys, ids)) if ids else 0

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        return int(await self._command("XDEL", self._mailbox.keys.dead, *ids)) if ids else 0

    async def _command(self, *args: Any) -> Any:
        return await self._mailbox.command("reading dead letters of", *args)

    async def _letter(self, id: str, fields: dict[bytes, bytes]) -> DeadLetter:
        return DeadLetter(
            id,
            message_id(fields.get(b"i")) or id,
            await self._mailbox.display_text(fields.get(b"s", fields.get(b"b", b"")), claimed=b"s" in fields),
            number(fields.get(b"n")),
            _text(fields.get(b"reason")),
            _text(fields.get(b"error")),
            _text(fields.get(b"r")) or None,
            died_at=milliseconds(fields.get(b"at")) / 1000,
        )


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

    def __init__(self, mailbox: RedisMailbox[Any], interval: float) -> None:
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
                    scripts.SWEEP,
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
        found = await self._each(scripts.LATE, consumers)
        late = [consumer for consumer, is_late in zip(consumers, found, strict=True) if is_late]
        # If the leases of several workers expire together, the cause is an outage of the server or of machines, and
        # not a message that crashes its worker.
        workers = {name.rpartition(b"/")[0] for name, _ in late}
        return await self._each(scripts.RECLAIM, late, _MOST, int(len(workers) > 1))

    async def _each(self, script: scripts.LuaScript, consumers: list[tuple[bytes, int]], *args: int) -> list[int]:
        calls = [scripts.Call(script, (self._mailbox.keys.stream,), [name, lease, *args]) for name, lease in consumers]
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
