"""A mailbox on Redis Streams."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from redis.exceptions import RedisError

from fairtrial.errors import (
    BodyError,
    CodecError,
    ConfigurationError,
    MailboxClosedError,
    MailboxError,
    MessageTooLargeError,
    ReplyNotAvailableError,
)
from fairtrial.mailbox.body import encode_body
from fairtrial.mailbox.bulk import send_all
from fairtrial.mailbox.claim_check import ClaimCheck
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, Message, checked_name
from fairtrial.mailbox.redis.coalesce import MAX_BYTES, MAX_OPERATIONS, Call
from fairtrial.mailbox.redis.connection import RedisConnection
from fairtrial.mailbox.redis.dead_letters import RedisDeadLetters
from fairtrial.mailbox.redis.errors import is_gone, translated
from fairtrial.mailbox.redis.receipt import OURS, Consumers, RedisReceipt, RedisRenewer
from fairtrial.mailbox.redis.receive import Receiver
from fairtrial.mailbox.redis.scripts import (
    ACK,
    ANNOUNCE,
    ANNOUNCED,
    ASKED,
    DEPTH,
    GROUP,
    OLDEST,
    PURGE,
    READERS,
    RESIGN,
    SEND,
)
from fairtrial.mailbox.redis.sweeper import Sweeper
from fairtrial.mailbox.resolver import CompositeResolver, MailboxResolver
from fairtrial.mailbox.sealing import queue_key, seal

MAX_BODY_BYTES = 1024 * 1024
SWEEP_SECONDS = 1.0
_MAX_ANNOUNCED = 10_000
_ANNOUNCEMENT = re.compile(rb"([0-9A-Za-z]{0,64}) .{1,200}", re.DOTALL)


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
        """The keys of the mailbox of that name."""
        tag = f"{{fairtrial:{name}}}"
        return cls(f"{tag}:stream", f"{tag}:delayed", f"{tag}:dead", f"{tag}:sweeper", f"{tag}:workers")


@dataclass(frozen=True, slots=True)
class Reader:
    """A process that receives from a mailbox: its host and number, what it holds, and when it was last heard of."""

    name: str
    in_flight: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class Readers:
    """Who receives from a mailbox, and for how long the oldest message in flight has been in it; None if none is."""

    readers: tuple[Reader, ...]
    oldest_seconds: float | None


class RedisMailbox[T]:
    """A mailbox on Redis 7.0 or newer (or Valkey): a stream with a group of readers. asyncio only.

    Args:
        name: Its name, and its reply address.
        body_type: What bodies are read as. What is not one goes to the dead letters and never reaches a worker.
        connection: The connection to use, shared with other mailboxes, or the address of a Redis to connect to.
        resolver: Finds the mailbox behind a reply address; unless given, it is a mailbox on the same Redis.
        claim_check: Where large bodies are kept; without it they are refused.
        max_body_bytes: The largest body that travels through Redis.
        sweep_seconds: How often to bring back what is due, while this object receives; None to leave it to others.
        ttl_seconds: Makes this a mailbox that belongs to this object, such as one for replies: it vanishes this long
            after its owner does.
        create: Whether sending may create the mailbox. One that was made to reply to someone must not.
    """

    def __init__(
        self,
        name: str,
        body_type: type[T],
        connection: RedisConnection | str,
        *,
        resolver: MailboxResolver | None = None,
        claim_check: ClaimCheck | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        sweep_seconds: float | None = SWEEP_SECONDS,
        ttl_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        if sweep_seconds is not None and sweep_seconds <= 0:
            raise ConfigurationError(f"sweep_seconds is more than 0, not {sweep_seconds}")
        if ttl_seconds is not None and ttl_seconds < 1:
            raise ConfigurationError(f"ttl_seconds is at least 1, not {ttl_seconds}")
        self.name = checked_name(name)
        self.body_type = body_type
        self.keys = Keys.of(name)
        self.claim_check = claim_check
        self.max_body_bytes = max_body_bytes
        self.key = queue_key()
        self._small = max_body_bytes if claim_check is None else min(max_body_bytes, claim_check.threshold)
        self._owns_connection = isinstance(connection, str)
        self.connection = RedisConnection(connection) if isinstance(connection, str) else connection
        self.consumers = Consumers(f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(6)}".replace("/", "-"))
        self.renewer = RedisRenewer(self.connection.renewals)
        self.dead_letters = RedisDeadLetters(self)
        self._resolver = resolver
        self._receiver = Receiver(self)
        self._sweeper = Sweeper(self, sweep_seconds or SWEEP_SECONDS)
        self._sweeps = sweep_seconds is not None
        self._ttl = ttl_seconds
        self._create = create
        self._opened = False
        self._refresher: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"RedisMailbox({self.name!r}, {self.connection!r})"

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def check_open(self) -> None:
        """Refuse to be used after `close`."""
        if self._closed:
            raise MailboxClosedError(f"mailbox {self.name} is closed")

    async def open(self, *, again: bool = False) -> None:
        """Create the mailbox if it does not exist. Receiving does it too; a reply address must be opened first.

        Raises:
            ConfigurationError: this Redis cannot carry mailboxes.
        """
        self.check_open()
        if self._opened and not again:
            return
        try:
            await self.connection.check_server()
            await self.connection.command("XGROUP CREATE", self.keys.stream, GROUP, "0", "MKSTREAM")
        except (RedisError, OSError) as error:
            if not str(error).startswith("BUSYGROUP"):
                self.check_open()  # It may have been closed meanwhile, and its connection with it.
                raise translated(error, f"opening {self.name}") from None
        self._opened = True
        if self._ttl is not None:
            await self._refresh(self._ttl)
            if self._refresher is None:
                self._refresher = asyncio.get_running_loop().create_task(self._keep_alive(self._ttl))

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Put a message in; returns its id. Sends of one turn of the event loop leave together."""
        return await self._send(body, "" if reply_to is None else await self._address(reply_to))

    async def send_all(self, bodies: Sequence[T], *, reply_to: str | Mailbox[Any] | None = None) -> Sequence[str]:
        """Put many messages in; returns their ids. What `send` does for each, in fewer steps."""
        self.check_open()
        address = "" if reply_to is None else await self._address(reply_to)
        calls: list[Call] = []
        size = count = MAX_BYTES  # Full: the first message opens the first call.
        for body in bodies:
            field, value = "b", self._encoded(body, address)
            if len(value) > self._small:
                field, value = await self._wire(value)
            size += len(value)
            if count >= MAX_OPERATIONS or size >= MAX_BYTES:
                calls.append(Call(SEND, (self.keys.stream,), [int(self._create)]))
                size = count = 0
            calls[-1].args += (field, value, address)
            count += 1
        ids: list[str] = []
        for answer in await self.connection.run(calls) if calls else ():
            if isinstance(answer, BaseException):
                raise translated(answer, f"sending to {self.name}") from None
            if None in answer:
                raise ReplyNotAvailableError(f"mailbox {self.name} does not exist, or not any more")
            ids += [id.decode() for id in answer]
        return ids

    async def reply_all(self, replies: Sequence[tuple[Message[T], Any]]) -> None:
        """Send many messages of this mailbox their answers."""
        addresses: dict[str, list[Any]] = {}
        for message, body in replies:
            if message.reply_to is None:
                raise ReplyNotAvailableError(f"message {message.id} of {self.name} asks for no reply")
            addresses.setdefault(message.reply_to, []).append(body)
        for address, bodies in addresses.items():
            try:
                await send_all(self._resolved(address), bodies)
            except MailboxClosedError as error:
                raise ReplyNotAvailableError(str(error)) from None

    async def acknowledge_all(self, messages: Sequence[Message[T]]) -> Sequence[bool]:
        """Acknowledge many messages of this mailbox; False for those that were not ours any more."""
        self.check_open()
        entries = [cast(RedisReceipt, message.receipt).entry for message in messages]
        chunks = [entries[start : start + MAX_OPERATIONS] for start in range(0, len(entries), MAX_OPERATIONS)]
        calls = [Call(ACK, (self.keys.stream,), [self.consumers.token, *chunk]) for chunk in chunks]
        kept: list[bool] = []
        for chunk, answer in zip(chunks, await self.connection.run(calls) if calls else (), strict=True):
            if isinstance(answer, BaseException):
                if not is_gone(answer):
                    raise translated(answer, f"acknowledging messages of {self.name}") from None
                answer = bytes(len(chunk))
            kept += [one == OURS for one in answer]
        return kept

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[Message[T]]:
        """Take up to `max_messages`; see `Mailbox.receive`. A cancelled receive loses nothing."""
        await self.open()
        if self._sweeps:
            self._sweeper.start()
        return await self._receiver.receive(max_messages, visibility_timeout, wait_time_seconds)

    async def sweep(self) -> int | None:
        """Bring back what is due now; returns how many, or None when another process has the office.

        Receiving does this by itself. For those who set `sweep_seconds=None`.
        """
        self.check_open()
        done = await self._sweeper.sweep()
        return None if done is None else done.moved

    async def approximate_count(self) -> int:
        """How many messages have not been settled: waiting, delayed and in flight."""
        self.check_open()
        try:
            return int(await self.connection.command("XLEN", self.keys.stream))
        except (RedisError, OSError) as error:
            raise translated(error, f"counting {self.name}") from None

    async def depth(self) -> MailboxDepth:
        """How many messages are where."""
        keys = (self.keys.stream, self.keys.delayed, self.keys.dead)
        entries, pending, delayed, dead = await self.run("counting", DEPTH, keys, ())
        return MailboxDepth(max(0, entries - pending - delayed), delayed, pending, dead)

    async def oldest_waiting_seconds(self) -> float | None:
        """How long the message that waits longest has waited; None if none waits, or if we may not ask."""
        found = await self.run("looking at", OLDEST, (self.keys.stream,), ())
        return self.connection.age_of(found.decode()) if found else None

    async def asked_from(self, address: str) -> bool:
        """Whether a message that has not been settled asks for its reply at this address.

        Looked for from the oldest on, in steps that keep the server responsive. What comes back is added at the end,
        so nothing slips past.
        """
        after = "-"
        while True:
            said = await self.run("looking into", ASKED, (self.keys.stream,), (address, after, 200))
            if isinstance(said, int):
                return said == 1
            after = said.decode()

    async def readers(self) -> Readers:
        """Who receives from this mailbox. A process that died is listed until the group forgets it."""
        now, oldest, rows = await self.run("looking at the readers of", READERS, (self.keys.stream,), ())
        held: dict[str, Reader] = {}
        for name, pending, idle in rows:
            token = name.decode().split("/")[0]  # One process reads under a name for each length of lease.
            known = held.get(token, Reader(token, 0, float("inf")))
            held[token] = Reader(token, known.in_flight + pending, min(known.idle_seconds, idle / 1000))
        age = max(0.0, int(now) - int(oldest.split(b"-")[0]) / 1000) if oldest else None
        return Readers(tuple(held[token] for token in sorted(held)), age)

    async def announce(self, worker: str, fingerprint: str, seconds: float) -> None:
        """Say for so many seconds that a worker serves this mailbox, and with which code; 0 to withdraw it."""
        member = f"{fingerprint} {worker}"
        await self.run("announcing a worker of", ANNOUNCE, (self.keys.workers,), (member, round(seconds * 1000)))

    async def announced(self) -> Sequence[str]:
        """The fingerprint of each worker that serves this mailbox; empty for one that accepts any code."""
        members = await self.run("looking for workers of", ANNOUNCED, (self.keys.workers,), (_MAX_ANNOUNCED,))
        # Whoever can write to Redis can write here: what is shown to people is a digest or nothing.
        return [found[1].decode() for member in members if (found := _ANNOUNCEMENT.fullmatch(member))]

    async def purge(self) -> int:
        """Remove everything that is waiting, delayed or in flight; returns how many. Dead letters stay."""
        target = await self.approximate_count()  # What is sent meanwhile may stay: this must end.
        removed = 0
        while removed < target:
            step = await self.run("purging", PURGE, (self.keys.stream, self.keys.delayed), (500,))
            if step == 0:
                break
            removed += step
        return removed

    async def close(self) -> None:
        """Give back what was received and not handed out, retire from the group, and let go of connections."""
        if self._closed:
            return
        await self._sweeper.stop()
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.wait([self._refresher])
        await self._receiver.close()
        if self._opened:
            try:
                await self._retire()
            except (MailboxError, RedisError, OSError):
                pass  # The server is away. The office expires, and the group forgets idle readers by itself.
        self._closed = True
        if self._owns_connection:
            await self.connection.close()

    def for_replies[R](self, name: str, body_type: type[R], ttl_seconds: float) -> RedisMailbox[R]:
        """A mailbox for answers to what is sent here: on the same Redis, and gone this long after its owner."""
        return RedisMailbox(
            name,
            body_type,
            self.connection,
            claim_check=self.claim_check,
            max_body_bytes=self.max_body_bytes,
            ttl_seconds=ttl_seconds,
        )

    async def run(self, doing: str, script: Any, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script on this mailbox now, with errors as ours."""
        self.check_open()
        try:
            return await self.connection.script(script, keys, args)
        except (RedisError, OSError) as error:
            raise translated(error, f"{doing} {self.name}") from None

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send an answer to where a message of this mailbox wants it."""
        self.check_open()
        if address is None:
            raise ReplyNotAvailableError(f"message {message_id} of {self.name} asks for no reply")
        try:
            return await self._resolved(address).send(body)
        except MailboxClosedError as error:
            raise ReplyNotAvailableError(str(error)) from None

    def _resolved(self, address: str) -> Mailbox[Any]:
        if self._resolver is None:
            self._resolver = CompositeResolver(
                factory=RedisMailboxFactory(self.connection, object, claim_check=self.claim_check)
            )
        return self._resolver.resolve(address)

    async def _address(self, reply_to: str | Mailbox[Any]) -> str:
        if isinstance(reply_to, str):
            return checked_name(reply_to)
        if isinstance(reply_to, RedisMailbox):
            await reply_to.open()  # A reply never creates a mailbox, so it has to be there before it is asked for.
        return reply_to.name

    async def _send(self, body: Any, address: str) -> str:
        self.check_open()
        field, value = "b", self._encoded(body, address)
        if len(value) > self._small:
            field, value = await self._wire(value)
        try:
            id = await self.connection.submit(SEND, (self.keys.stream,), (int(self._create),), (field, value, address))
        except (RedisError, OSError) as error:
            raise translated(error, f"sending to {self.name}") from None
        if id is None:
            raise ReplyNotAvailableError(f"mailbox {self.name} does not exist, or not any more")
        return str(id.decode())

    def _encoded(self, body: Any, address: str) -> bytes:
        try:
            return seal(encode_body(body), self.key, self.name, address)
        except CodecError as error:
            raise BodyError(f"the body cannot be sent to {self.name}: {error}") from None

    async def _wire(self, wire: bytes) -> tuple[str, bytes]:
        if self.claim_check is not None and len(wire) > self.claim_check.threshold:
            return "s", (await self.claim_check.keep(wire)).encode()
        if len(wire) > self.max_body_bytes:
            raise MessageTooLargeError(
                f"{self.name} takes bodies of {self.max_body_bytes} bytes; this has {len(wire)}: "
                "give the mailbox a claim check, which keeps large bodies in a shared folder"
            )
        return "b", wire

    async def _refresh(self, ttl: float) -> None:
        milliseconds = round(ttl * 1000)
        try:
            for key in (self.keys.stream, self.keys.delayed, self.keys.dead):
                await self.connection.command("PEXPIRE", key, milliseconds)
        except (RedisError, OSError) as error:
            raise translated(error, f"keeping {self.name}") from None

    async def _keep_alive(self, ttl: float) -> None:
        while True:
            await asyncio.sleep(ttl / 3)
            try:
                await self._refresh(ttl)
            except MailboxError:
                pass  # The next receive finds out, and makes the mailbox anew if it is gone.

    async def _retire(self) -> None:
        names = self.consumers.names()
        await self.run("closing", RESIGN, (self.keys.stream, self.keys.sweeper), (self.consumers.token, *names))
        if self._ttl is not None:
            await self.connection.command("DEL", *(self.keys.stream, self.keys.delayed, self.keys.dead))


class RedisMailboxFactory:
    """Makes objects to send to mailboxes on one Redis with. What it makes never creates a mailbox.

    Args:
        connection: The connection to use, or the address of a Redis to connect to.
        body_type: What bodies are read as, should anyone receive.
        claim_check: Where large bodies are kept.
    """

    def __init__(
        self, connection: RedisConnection | str, body_type: type[Any] = object, *, claim_check: ClaimCheck | None = None
    ) -> None:
        self._owns_connection = isinstance(connection, str)
        self.connection = RedisConnection(connection) if isinstance(connection, str) else connection
        self._body_type = body_type
        self._claim_check = claim_check

    def create(self, name: str) -> RedisMailbox[Any]:
        """An object to send to the mailbox of that name with."""
        return RedisMailbox(name, self._body_type, self.connection, claim_check=self._claim_check, create=False)

    async def close(self) -> None:
        """Let go of the connection, if it was made here."""
        if self._owns_connection:
            await self.connection.close()
