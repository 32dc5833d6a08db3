"""A mailbox on Redis Streams."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Sequence
from typing import Any, cast

from redis.exceptions import RedisError
from typing_extensions import TypeVar

from fairtrial.errors import (
    BodyError,
    CodecError,
    ConfigurationError,
    MailboxError,
    MessageTooLargeError,
    ReplyNotAvailableError,
)
from fairtrial.mailbox.body import ClaimCheck, encode_body, queue_key, seal
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, MailboxFactory, MailboxResolver, Message, validate_name
from fairtrial.mailbox.redis.coalesce import MAX_BYTES, MAX_OPERATIONS, Call
from fairtrial.mailbox.redis.connection import RedisConnection, RedisSource
from fairtrial.mailbox.redis.receive import (
    OURS,
    Consumers,
    Keys,
    Receiver,
    RedisDeadLetters,
    RedisReceipt,
    RedisRenewer,
    Sweeper,
)
from fairtrial.mailbox.redis.scripts import (
    ACK,
    ANNOUNCE,
    ANNOUNCED,
    ASKED,
    DEPTH,
    GROUP,
    OLDEST,
    PURGE,
    PURGE_REPLIES,
    READERS,
    RESIGN,
    SEND,
    WORKERS,
    LuaScript,
)
from fairtrial.mailbox.redis.topology import is_gone, translated
from fairtrial.mailbox.server import ANNOUNCEMENT_SECONDS, Reader, Readers, ServerMailbox, ServingWorker

MAX_BODY_BYTES = 1024 * 1024
SWEEP_SECONDS = 1.0
_MAX_ANNOUNCED = 10_000
_LOST_KEPT_SECONDS = 600.0  # For this long, workers that were lost are listed.
_UNANNOUNCED_SECONDS = 45.0  # A process that never announced itself is lost after this time; a receive may last 20 s.
_ANNOUNCEMENT = re.compile(rb"([0-9A-Za-z]{0,64}) .{1,200}", re.DOTALL)


T = TypeVar("T", default=Any)  # A mailbox without a body type carries any JSON.


class RedisMailbox(ServerMailbox[T]):
    """A mailbox on Redis 7.0 or newer (or Valkey): a stream with a consumer group. Requires asyncio.

    Args:
        name: The name, which is also the reply address.
        body_type: The type of bodies. Invalid bodies become dead letters and never reach a worker. By default, loops
            and `collect_results` set it; until then bodies are plain JSON values.
        connection: A connection that mailboxes can share, the URL of a Redis server, or a redis-py client, whose
            connection options are used.
        client: An alias of `connection`.
        resolver: Finds the mailbox for a reply address; by default a mailbox on the same Redis server.
        reply_resolver: An alias of `resolver`.
        claim_check: The store for large bodies; without it they are refused.
        max_body_bytes: The size limit of bodies in Redis.
        sweep_seconds: The interval of sweeps while this object receives; None to leave them to other processes.
        ttl_seconds: Makes this object the owner of the mailbox, such as one for replies: the mailbox expires this long
            after its owner ends.
        create: Whether sending may create the mailbox. Mailboxes for replies must not.
    """

    server = "Redis"

    def __init__(
        self,
        name: str,
        body_type: type[T] = object,  # type: ignore[assignment]  # plain JSON values
        connection: RedisSource | None = None,
        *,
        client: RedisSource | None = None,
        resolver: MailboxResolver | None = None,
        reply_resolver: MailboxResolver | None = None,
        claim_check: ClaimCheck | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        sweep_seconds: float | None = SWEEP_SECONDS,
        ttl_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        if sweep_seconds is not None and sweep_seconds <= 0:
            raise ConfigurationError(f"sweep_seconds must be more than 0 (got {sweep_seconds})")
        if ttl_seconds is not None and ttl_seconds < 1:
            raise ConfigurationError(f"ttl_seconds must be at least 1 (got {ttl_seconds})")
        self.name = validate_name(name)
        self.body_type = body_type
        self.keys = Keys.of(name)
        self.claim_check = claim_check
        self.max_body_bytes = max_body_bytes
        self.key = queue_key()
        self._small = max_body_bytes if claim_check is None else min(max_body_bytes, claim_check.threshold)
        self.connection = RedisConnection.of(_given(connection, client))
        self._owns_connection = self.connection is not connection and self.connection is not client
        self.consumers = Consumers(f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(6)}".replace("/", "-"))
        self.renewer = RedisRenewer(self.connection.renewals)
        self.dead_letters = RedisDeadLetters(self)
        self._resolver = resolver or reply_resolver
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
        """Put a message in; returns its id. Sends of one turn of the event loop leave together.

        Redis holds the message when this returns. Whether it still does after a crash of the server is decided by the
        server's `appendfsync`: only `always` promises it (`RedisConnection(durable=True)` insists on that).
        """
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
                raise ReplyNotAvailableError(f"mailbox {self.name} does not exist")
            ids += [id.decode() for id in answer]
        return ids

    async def acknowledge_all(self, messages: Sequence[Message[T]]) -> Sequence[bool]:
        """Acknowledge many messages of this mailbox; False for those whose lease was lost."""
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
        """Bring back what is due now; returns how many, or None when another process holds the sweeper lock.

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
        """Return the number of messages by state."""
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
            said = await self.run("reading", ASKED, (self.keys.stream,), (address, after, 200))
            if isinstance(said, int):
                return said == 1
            after = said.decode()

    async def readers(self) -> Readers:
        """Return the processes that receive from this mailbox, including dead ones whose consumer still exists."""
        now, oldest, rows = await self.run("looking at the readers of", READERS, (self.keys.stream,), ())
        held: dict[str, Reader] = {}
        for name, pending, idle in rows:
            token, _, lease = name.decode().partition("/")  # One process reads under a name for each length of lease.
            known = held.get(token, Reader(token, 0, float("inf")))
            left = max(0.0, (int(lease) - idle) / 1000) if pending and lease.isdecimal() else 0.0
            held[token] = Reader(
                token,
                known.in_flight + pending,
                min(known.idle_seconds, idle / 1000),
                max(known.leased_seconds, left),
            )
        age = max(0.0, int(now) - int(oldest.split(b"-")[0]) / 1000) if oldest else None
        return Readers(tuple(held[token] for token in sorted(held)), age)

    async def announce(self, worker: str, fingerprint: str, seconds: float) -> None:
        """Announce for this many seconds that a worker with this fingerprint serves the mailbox; 0 withdraws it."""
        member = f"{fingerprint} {worker} {self.consumers.token}"
        args = (member, round(seconds * 1000), round(_LOST_KEPT_SECONDS * 1000))
        await self.run("announcing a worker of", ANNOUNCE, (self.keys.workers,), args)

    async def announced(self) -> Sequence[str]:
        """Return the fingerprint of each worker of this mailbox; empty if it accepts any code."""
        members = await self.run("looking for workers of", ANNOUNCED, (self.keys.workers,), (_MAX_ANNOUNCED,))
        # Anyone with access to Redis can write here, so only digests are displayed.
        return [found[1].decode() for member in members if (found := _ANNOUNCEMENT.fullmatch(member))]

    async def workers(self) -> Sequence[ServingWorker]:
        """Return the workers of this mailbox, also those that were lost in the last minutes or still hold leases.

        A worker is lost when its announcement has expired. A process that never announced itself is lost when it holds
        leases and has not received for a while.
        """
        readers = {reader.name: reader for reader in (await self.readers()).readers}
        now, found = await self.run("looking for workers of", WORKERS, (self.keys.workers,), (_MAX_ANNOUNCED,))
        workers: dict[str, ServingWorker] = {}
        for member, expires in zip(found[::2], found[1::2], strict=True):
            parts = member.decode("utf-8", "replace").split(" ")
            if len(parts) != 4:
                continue
            left = (float(expires) - now) / 1000
            reader = readers.pop(parts[3], Reader(parts[3], 0, float("inf")))
            silent = min(reader.idle_seconds, max(0.0, ANNOUNCEMENT_SECONDS - left))
            workers[parts[3]] = ServingWorker(
                parts[2], left > 0, silent, in_flight=reader.in_flight, leased_seconds=reader.leased_seconds
            )
        for token, reader in readers.items():
            alive = reader.idle_seconds < _UNANNOUNCED_SECONDS
            if alive or reader.in_flight:
                workers[token] = ServingWorker(
                    token,
                    alive,
                    reader.idle_seconds,
                    in_flight=reader.in_flight,
                    leased_seconds=reader.leased_seconds,
                )
        return sorted(workers.values(), key=lambda worker: (not worker.alive, worker.name))

    async def exists(self) -> bool:
        """Return whether the server has messages, dead letters, readers or workers of this mailbox."""
        keys = (self.keys.stream, self.keys.delayed, self.keys.dead, self.keys.workers)
        return bool(await self._command("EXISTS", *keys))

    async def reply_addresses(self) -> dict[str, int]:
        """How many messages that have not been settled ask for replies at each address."""
        found: dict[str, int] = {}
        after = "-"
        while True:
            page = await self._command("XRANGE", self.keys.stream, after, "+", "COUNT", 500)
            for _, fields in page:
                if b"r" in fields:
                    address = fields[b"r"].decode("utf-8", "replace")
                    found[address] = found.get(address, 0) + 1
            if len(page) < 500:
                return found
            after = f"({page[-1][0].decode()}"

    async def purge_replies(self, addresses: Sequence[str]) -> int:
        """Remove the messages that ask for replies at these addresses; returns how many. Dead letters stay."""
        removed = 0
        after = "-"
        while True:
            keys = (self.keys.stream, self.keys.delayed)
            step, last = await self.run("purging", PURGE_REPLIES, keys, (after, 500, *addresses))
            removed += int(step)
            if not last:
                return removed
            after = last.decode()

    async def purge(self) -> int:
        """Remove all messages that are waiting, delayed or in flight; returns their number. Dead letters stay."""
        target = await self.approximate_count()  # Messages sent meanwhile may stay, so that this ends.
        removed = 0
        while removed < target:
            step = await self.run("purging", PURGE, (self.keys.stream, self.keys.delayed), (500,))
            if step == 0:
                break
            removed += step
        return removed

    async def close(self) -> None:
        """Return messages that were received and not handed out, leave the consumer group, and close connections."""
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
                pass  # The server is unavailable. The sweeper lock expires, and idle consumers are removed later.
        self._closed = True
        if self._owns_connection:
            await self.connection.close()

    def for_replies[R](self, name: str, body_type: type[R], ttl_seconds: float) -> RedisMailbox[R]:
        """Create a mailbox for replies to messages of this one, on the same server, with this expiry."""
        return RedisMailbox(
            name,
            body_type,
            self.connection,
            claim_check=self.claim_check,
            max_body_bytes=self.max_body_bytes,
            ttl_seconds=ttl_seconds,
        )

    async def run(self, doing: str, script: LuaScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script on this mailbox immediately and translate errors."""
        self.check_open()
        try:
            return await self.connection.script(script, keys, args)
        except (RedisError, OSError) as error:
            raise translated(error, f"{doing} {self.name}") from None

    async def _command(self, *args: Any) -> Any:
        """Run a command that reads this mailbox and translate errors."""
        self.check_open()
        try:
            return await self.connection.command(*args)
        except (RedisError, OSError) as error:
            raise translated(error, f"reading {self.name}") from None

    def _factory(self) -> MailboxFactory:
        return RedisMailboxFactory(self.connection, object, claim_check=self.claim_check)

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
            raise ReplyNotAvailableError(f"mailbox {self.name} does not exist")
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
                f"{self.name}: the body must have at most {self.max_body_bytes} bytes (got {len(wire)}); "
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
                pass  # The next receive recreates the mailbox if it was deleted.

    async def _retire(self) -> None:
        names = self.consumers.names()
        await self.run("closing", RESIGN, (self.keys.stream, self.keys.sweeper), (self.consumers.token, *names))
        if self._ttl is not None:
            await self.connection.command("DEL", *(self.keys.stream, self.keys.delayed, self.keys.dead))


def _given(connection: RedisSource | None, client: RedisSource | None) -> RedisSource:
    """Return the one of two aliased arguments that was given."""
    if connection is not None and client is not None:
        raise ConfigurationError("connection and client are aliases: pass only one of them")
    found = client if connection is None else connection
    if found is None:
        raise ConfigurationError("a Redis mailbox requires a connection: a URL, or a client of redis-py")
    return found


class RedisMailboxFactory:
    """Creates objects for sending to mailboxes on one Redis server. They never create a mailbox.

    Args:
        connection: A connection, the URL of a Redis server, or a client of redis-py.
        body_type: The type of bodies, for receiving.
        client: An alias of `connection`.
        claim_check: The store for large bodies.
    """

    def __init__(
        self,
        connection: RedisSource | None = None,
        body_type: type[Any] = object,
        *,
        client: RedisSource | None = None,
        claim_check: ClaimCheck | None = None,
    ) -> None:
        self.connection = RedisConnection.of(_given(connection, client))
        self._owns_connection = self.connection is not connection and self.connection is not client
        self._body_type = body_type
        self._claim_check = claim_check

    def create(self, name: str) -> RedisMailbox[Any]:
        """Return an object for sending to the mailbox with this name."""
        return RedisMailbox(name, self._body_type, self.connection, claim_check=self._claim_check, create=False)

    async def close(self) -> None:
        """Close the connection, if it was opened here."""
        if self._owns_connection:
            await self.connection.close()
