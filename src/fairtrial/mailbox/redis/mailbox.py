"""A mailbox on Redis Streams."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Sequence
from typing import Any, cast

from redis.exceptions import RedisError

from fairtrial.errors import ConfigurationError, ReplyNotAvailableError
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, MailboxResolver, Message
from fairtrial.mailbox.redis import receive, scripts
from fairtrial.mailbox.redis.connection import MAX_BYTES, MAX_OPERATIONS, RedisConnection, RedisSource
from fairtrial.mailbox.redis.topology import is_gone, translated
from fairtrial.mailbox.server import Reader, Readers, ServerMailbox, ServerMailboxFactory, ServingWorker, T

MAX_BODY_BYTES = 1024 * 1024
SWEEP_SECONDS = 1.0
_MAX_ANNOUNCED = 10_000
_LOST_KEPT_SECONDS = 600.0  # For this long, workers that were lost are listed.
_ANNOUNCEMENT = re.compile(rb"([0-9A-Za-z]{0,64}) .{1,200}", re.DOTALL)


class RedisMailbox(ServerMailbox[T]):
    """A mailbox on Redis 7.0 or newer (or Valkey): a stream with a consumer group. Requires asyncio.

    Args:
        name: The name, which is also the reply address.
        body_type: The type of bodies. Invalid bodies become dead letters and never reach a worker. By default, loops
            and `collect_results` set it; until then bodies are plain JSON values.
        client: A connection that mailboxes can share, the URL of a Redis server, or a redis-py client, whose connection
            options are used.
        reply_resolver: Finds the mailbox for a reply address; by default a mailbox on the same Redis server.
        claim_check: The store for large bodies; without it they are refused.
        max_body_bytes: The size limit of bodies in Redis.
        sweep_seconds: The interval of sweeps while this object receives; None to leave them to other processes.
        ttl_seconds: Makes this object the owner of the mailbox, such as one for replies: the mailbox expires this long
            after its owner ends.
        create: Whether sending may create the mailbox. Mailboxes for replies must not.
    """

    server = "Redis"
    connection_type = RedisConnection
    connection: RedisConnection

    def __init__(
        self,
        name: str,
        body_type: type[T] = object,  # type: ignore[assignment]  # plain JSON values
        client: RedisSource | None = None,
        *,
        reply_resolver: MailboxResolver | None = None,
        claim_check: ClaimCheck | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        sweep_seconds: float | None = SWEEP_SECONDS,
        ttl_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        if sweep_seconds is not None and sweep_seconds <= 0:
            raise ConfigurationError(f"sweep_seconds must be more than 0 (got {sweep_seconds})")
        super().__init__(
            name,
            body_type,
            client,
            reply_resolver=reply_resolver,
            claim_check=claim_check,
            max_body_bytes=max_body_bytes,
            ttl_seconds=ttl_seconds,
            create=create,
        )
        self.keys = receive.Keys.of(name)
        self.consumers = receive.Consumers(
            f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(6)}".replace("/", "-")
        )
        self.dead_letters = receive.RedisDeadLetters(self)
        self._receiver = receive.StreamReceiver(self)
        self._sweeper = receive.Sweeper(self, sweep_seconds or SWEEP_SECONDS)
        self._sweeps = sweep_seconds is not None
        self._opened = False

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
            await self.connection.command("XGROUP CREATE", self.keys.stream, scripts.GROUP, "0", "MKSTREAM")
        except (RedisError, OSError) as error:
            if not str(error).startswith("BUSYGROUP"):
                self.check_open()  # It may have been closed meanwhile, and its connection with it.
                raise translated(error, f"opening {self.name}") from None
        self._opened = True
        if self._ttl is not None:
            await self._refresh(self._ttl)
            self._keep_refreshed()

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Put a message in; returns its id. Sends of one turn of the event loop leave together.

        Redis holds the message when this returns. Whether it still does after a crash of the server is decided by the
        server's `appendfsync`: only `always` promises it (`RedisConnection(durable=True)` insists on that).
        """
        self.check_open()
        address = await self._address(reply_to)
        claimed, data = await self._pack(body, address)
        args = ("s" if claimed else "b", data, address)
        try:
            id = await self.connection.submit(scripts.SEND, (self.keys.stream,), (int(self._create),), args, len(data))
        except (RedisError, OSError) as error:
            raise translated(error, f"sending to {self.name}") from None
        if id is None:
            raise ReplyNotAvailableError(f"mailbox {self.name} does not exist")
        return str(id.decode())

    async def send_all(self, bodies: Sequence[T], *, reply_to: str | Mailbox[Any] | None = None) -> Sequence[str]:
        """Put many messages in; returns their ids. What `send` does for each, in fewer steps."""
        self.check_open()
        address = await self._address(reply_to)
        parts: list[list[tuple[bool, bytes]]] = []
        size = MAX_BYTES  # Full: the first message opens the first part.
        for body in bodies:
            packed = await self._pack(body, address)
            size += len(packed[1])
            if size >= MAX_BYTES or len(parts[-1]) >= MAX_OPERATIONS:
                parts.append([])
                size = len(packed[1])
            parts[-1].append(packed)
        calls = [self._send_call(part, address) for part in parts]
        ids: list[str] = []
        for answer in await self.connection.run(calls) if calls else ():
            if isinstance(answer, BaseException):
                raise translated(answer, f"sending to {self.name}") from None
            if answer is None:
                raise ReplyNotAvailableError(f"mailbox {self.name} does not exist")
            ids += answer.decode().split()
        return ids

    def _send_call(self, part: Sequence[tuple[bool, bytes]], address: str) -> scripts.Call:
        sizes = "".join(f"{'s' if claimed else 'b'}{len(data)}" for claimed, data in part)
        values = b"".join(data for _, data in part)
        return scripts.Call(scripts.SEND_ALL, (self.keys.stream,), [int(self._create), address, sizes, values])

    async def acknowledge_all(self, messages: Sequence[Message[T]]) -> Sequence[bool]:
        """Acknowledge many messages of this mailbox; False for those whose lease was lost."""
        self.check_open()
        entries = [cast(receive.RedisReceipt, message.receipt).entry for message in messages]
        chunks = [entries[start : start + MAX_OPERATIONS] for start in range(0, len(entries), MAX_OPERATIONS)]
        calls = [
            scripts.Call(scripts.ACK, (self.keys.stream,), [self.consumers.token, " ".join(chunk)]) for chunk in chunks
        ]
        kept: list[bool] = []
        for chunk, answer in zip(chunks, await self.connection.run(calls) if calls else (), strict=True):
            if isinstance(answer, BaseException):
                if not is_gone(answer):
                    raise translated(answer, f"acknowledging messages of {self.name}") from None
                answer = bytes(len(chunk))
            kept += [one == receive.OURS for one in answer]
        return kept

    def renew(self, receipts: Sequence[receive.RedisReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; may be called from any thread.

        In chunks that keep the server responsive.
        """
        groups: dict[str, list[int]] = {}
        for at, receipt in enumerate(receipts):
            groups.setdefault(receipt.consumer, []).append(at)
        consumer, idle = self.consumers.extended(seconds)
        calls: list[scripts.Call] = []
        places: list[list[int]] = []
        for held_by, group in groups.items():
            group.sort(key=lambda at: _order(receipts[at].entry))
            for start in range(0, len(group), MAX_OPERATIONS):
                chunk = group[start : start + MAX_OPERATIONS]
                head = [self.consumers.token, consumer, idle, held_by]
                calls.append(
                    scripts.Call(scripts.EXTEND, (self.keys.stream,), head + [receipts[at].entry for at in chunk])
                )
                places.append(chunk)
                for at in chunk:
                    receipts[at].consumer = consumer
        kept = [False] * len(receipts)
        for answer, chunk in zip(self.connection.renewals.run(calls), places, strict=True):
            if isinstance(answer, BaseException):
                if is_gone(answer):
                    continue
                raise translated(answer, "renewing leases")
            for at, held in zip(chunk, answer, strict=True):
                kept[at] = held == receive.OURS
        return kept

    def start_sweeping(self) -> None:
        """Start sweeping in the background, unless it is left to other processes."""
        if self._sweeps:
            self._sweeper.start()

    async def sweep(self) -> int | None:
        """Bring back what is due now; returns how many, or None when another process holds the sweeper lock.

        Receiving does this by itself. For those who set `sweep_seconds=None`.
        """
        self.check_open()
        done = await self._sweeper.sweep()
        return None if done is None else done.moved

    async def approximate_count(self) -> int:
        """How many messages have not been settled: waiting, delayed and in flight."""
        return int(await self.command("counting", "XLEN", self.keys.stream))

    async def depth(self) -> MailboxDepth:
        """Return the number of messages by state."""
        keys = (self.keys.stream, self.keys.delayed, self.keys.dead)
        entries, pending, delayed, dead = await self.run("counting", scripts.DEPTH, keys, ())
        return MailboxDepth(max(0, entries - pending - delayed), delayed, pending, dead)

    async def oldest_waiting_seconds(self) -> float | None:
        """How long the message that waits longest has waited; None if none waits, or if we may not ask."""
        found = await self.run("looking at", scripts.OLDEST, (self.keys.stream,), ())
        return self.connection.age_of(found.decode()) if found else None

    async def asked_from(self, address: str) -> bool:
        """Whether a message that has not been settled asks for its reply at this address.

        Looked for from the oldest on, in steps that keep the server responsive. What comes back is added at the end,
        so nothing slips past.
        """
        after = "-"
        while True:
            reply = await self.run("reading", scripts.ASKED, (self.keys.stream,), (address, after, 200))
            if isinstance(reply, int):
                return reply == 1
            after = reply.decode()

    async def readers(self) -> Readers:
        """Return the processes that receive from this mailbox, including dead ones whose consumer still exists."""
        now, oldest, rows = await self.run("looking at the readers of", scripts.READERS, (self.keys.stream,), ())
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
        await self.run("announcing a worker of", scripts.ANNOUNCE, (self.keys.workers,), args)

    async def announced(self) -> Sequence[str]:
        """Return the fingerprint of each worker of this mailbox; empty if it accepts any code."""
        members = await self.run("looking for workers of", scripts.ANNOUNCED, (self.keys.workers,), (_MAX_ANNOUNCED,))
        # Anyone with access to Redis can write here, so only digests are displayed.
        return [found[1].decode() for member in members if (found := _ANNOUNCEMENT.fullmatch(member))]

    async def workers(self) -> Sequence[ServingWorker]:
        """Return the workers of this mailbox, also those that were lost in the last minutes or still hold leases."""
        now, found = await self.run("looking for workers of", scripts.WORKERS, (self.keys.workers,), (_MAX_ANNOUNCED,))
        announced: dict[str, tuple[str, float]] = {}
        for member, expires in zip(found[::2], found[1::2], strict=True):
            parts = member.decode("utf-8", "replace").split(" ")
            if len(parts) == 4:
                announced[parts[3]] = parts[2], (float(expires) - now) / 1000
        return (await self.readers()).serving((name, token, left) for token, (name, left) in announced.items())

    async def exists(self) -> bool:
        """Return whether the server has messages, dead letters, readers or workers of this mailbox."""
        keys = (self.keys.stream, self.keys.delayed, self.keys.dead, self.keys.workers)
        return bool(await self.command("reading", "EXISTS", *keys))

    async def reply_addresses(self) -> dict[str, int]:
        """How many messages that have not been settled ask for replies at each address."""
        found: dict[str, int] = {}
        after = "-"
        while True:
            page = await self.command("reading", "XRANGE", self.keys.stream, after, "+", "COUNT", 500)
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
            step, last = await self.run("purging", scripts.PURGE_REPLIES, keys, (after, 500, *addresses))
            removed += int(step)
            if not last:
                return removed
            after = last.decode()

    async def purge(self) -> int:
        """Remove all messages that are waiting, delayed or in flight; returns their number. Dead letters stay."""
        target = await self.approximate_count()  # Messages sent meanwhile may stay, so that this ends.
        removed = 0
        while removed < target:
            step = await self.run("purging", scripts.PURGE, (self.keys.stream, self.keys.delayed), (500,))
            if step == 0:
                break
            removed += step
        return removed

    async def run(self, doing: str, script: scripts.LuaScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script on this mailbox immediately and translate errors."""
        self.check_open()
        try:
            return await self.connection.script(script, keys, args)
        except (RedisError, OSError) as error:
            raise translated(error, f"{doing} {self.name}") from None

    async def command(self, doing: str, *args: Any) -> Any:
        """Run a command on this mailbox and translate errors."""
        self.check_open()
        try:
            return await self.connection.command(*args)
        except (RedisError, OSError) as error:
            raise translated(error, f"{doing} {self.name}") from None

    async def _refresh(self, ttl: float) -> None:
        for key in (self.keys.stream, self.keys.delayed, self.keys.dead):
            await self.command("keeping", "PEXPIRE", key, round(ttl * 1000))

    async def _retire(self) -> None:
        """Leave the consumer group. Otherwise the sweeper lock expires, and idle consumers are removed later."""
        await self._sweeper.stop()
        if self._opened:
            names = self.consumers.names()
            await self.run(
                "closing", scripts.RESIGN, (self.keys.stream, self.keys.sweeper), (self.consumers.token, *names)
            )
            if self._ttl is not None:
                await self.command("closing", "DEL", self.keys.stream, self.keys.delayed, self.keys.dead)


def _order(entry: str) -> tuple[int, int]:
    time, _, sequence = entry.partition("-")
    return int(time), int(sequence)


class RedisMailboxFactory(ServerMailboxFactory[RedisMailbox[Any]]):
    """Creates objects for sending to mailboxes on one Redis server. They never create a mailbox.

    Args:
        client: A connection, the URL of a Redis server, or a client of redis-py.
        body_type: The type of bodies, for receiving.
        claim_check: The store for large bodies.
    """

    def __init__(
        self, client: RedisSource, body_type: type[Any] = object, *, claim_check: ClaimCheck | None = None
    ) -> None:
        super().__init__(RedisMailbox, client, body_type, claim_check=claim_check)
