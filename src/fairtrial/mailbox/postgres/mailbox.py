"""A mailbox on PostgreSQL."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, cast

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
from fairtrial.mailbox.postgres import statements as sql
from fairtrial.mailbox.postgres.connection import PostgresConnection, PostgresSource
from fairtrial.mailbox.postgres.receive import (
    PostgresDeadLetters,
    PostgresReceipt,
    PostgresRenewer,
    RowReceiver,
    Settlement,
)
from fairtrial.mailbox.postgres.statements import MAX_BYTES, MAX_OPERATIONS
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, MailboxFactory, MailboxResolver, Message, validate_name
from fairtrial.mailbox.server import ANNOUNCEMENT_SECONDS, Reader, Readers, ServerMailbox, ServingWorker

MAX_BODY_BYTES = 1024 * 1024
_MAX_ANNOUNCED = 10_000
_LOST_KEPT_SECONDS = 600.0  # For this long, workers that were lost are listed.
_UNANNOUNCED_SECONDS = 45.0  # A process that never announced itself is lost after this time without a new lease.
_PURGED_AT_ONCE = 5_000

T = TypeVar("T", default=Any)  # A mailbox without a body type carries any JSON.

type _Wire = tuple[bool, bytes, str]
"""A body as it is stored: whether it is in the claim check, the bytes or their hash, and the reply address."""


class PostgresMailbox(ServerMailbox[T]):
    """A mailbox in a PostgreSQL database, version 13 or newer: a row for each message. Requires asyncio.

    Args:
        name: The name, which is also the reply address.
        body_type: The type of bodies. Invalid bodies become dead letters and never reach a worker. By default, loops
            and `collect_results` set it; until then bodies are plain JSON values.
        connection: A connection that mailboxes can share, or the URL of a database. It may be the store's.
        resolver: Finds the mailbox for a reply address; by default a mailbox in the same database.
        reply_resolver: An alias of `resolver`.
        claim_check: The store for large bodies; without it they are refused.
        max_body_bytes: The size limit of bodies in the database.
        ttl_seconds: Makes this object the owner of the mailbox, such as one for replies: the mailbox expires this long
            after its owner ends.
        create: Whether sending may create the mailbox. Mailboxes for replies must not.
    """

    server = "PostgreSQL"

    def __init__(
        self,
        name: str,
        body_type: type[T] = object,  # type: ignore[assignment]  # plain JSON values
        connection: PostgresSource | None = None,
        *,
        resolver: MailboxResolver | None = None,
        reply_resolver: MailboxResolver | None = None,
        claim_check: ClaimCheck | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        ttl_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        if ttl_seconds is not None and ttl_seconds < 1:
            raise ConfigurationError(f"ttl_seconds must be at least 1 (got {ttl_seconds})")
        if connection is None:
            raise ConfigurationError("a PostgreSQL mailbox requires a connection: a URL, or a PostgresConnection")
        self.name = validate_name(name)
        self.body_type = body_type
        self.claim_check = claim_check
        self.max_body_bytes = max_body_bytes
        self.key = queue_key()
        self.connection = PostgresConnection.of(connection)
        self._owns_connection = self.connection is not connection
        self.holder = secrets.randbits(62) + 1
        self.settlement = Settlement(self.connection)
        self.renewer = PostgresRenewer(self.connection.renewals)
        self.dead_letters = PostgresDeadLetters(self)
        self._resolver = resolver or reply_resolver
        self._receiver = RowReceiver(self)
        self._ttl = ttl_seconds
        self._create = create
        self._id: int | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"PostgresMailbox({self.name!r}, {self.connection!r})"

    async def open(self, *, again: bool = False) -> int:
        """Create the mailbox if it does not exist, and return its id. Receiving does it too.

        Raises:
            ConfigurationError: its tables were created by a newer version.
        """
        self.check_open()
        if self._id is not None and not again:
            return self._id
        if self._id is None:
            await self._remove_expired()
        self._id = await self._refresh()
        if self._ttl is not None and self._refresher is None:
            self._refresher = asyncio.get_running_loop().create_task(self._keep_alive(self._ttl))
        return self._id

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Put a message in; returns its id when it is committed. Sends of one turn of the event loop leave together."""
        self.check_open()
        address = "" if reply_to is None else await self._address(reply_to)
        wire = await self._wire(body, address)
        return str(await self.connection.batcher.submit(self._insert_all, self.name, wire, len(wire[1])))

    async def send_all(self, bodies: Sequence[T], *, reply_to: str | Mailbox[Any] | None = None) -> Sequence[str]:
        """Put many messages in; returns their ids. What `send` does for each, in fewer steps."""
        self.check_open()
        address = "" if reply_to is None else await self._address(reply_to)
        ids: list[str] = []
        batch: list[_Wire] = []
        size = 0
        for body in bodies:
            wire = await self._wire(body, address)
            batch.append(wire)
            size += len(wire[1])
            if len(batch) >= MAX_OPERATIONS or size >= MAX_BYTES:
                ids += map(str, await self._insert_all(self.name, batch))
                batch, size = [], 0
        if batch:
            ids += map(str, await self._insert_all(self.name, batch))
        return ids

    async def acknowledge_all(self, messages: Sequence[Message[T]]) -> Sequence[bool]:
        """Acknowledge many messages of this mailbox; False for those whose lease was lost."""
        self.check_open()
        receipts = [cast(PostgresReceipt, message.receipt) for message in messages]
        kept: list[bool] = []
        for start in range(0, len(receipts), MAX_OPERATIONS):
            chunk = [(receipt.row, receipt.lease) for receipt in receipts[start : start + MAX_OPERATIONS]]
            kept += await self.settlement.acknowledge(self.name, chunk)
        return kept

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[Message[T]]:
        """Take up to `max_messages`; see `Mailbox.receive`. A cancelled receive loses nothing."""
        await self.open()
        return await self._receiver.receive(max_messages, visibility_timeout, wait_time_seconds)

    async def approximate_count(self) -> int:
        """How many messages have not been settled: waiting, delayed and in flight."""
        return int((await self._run("counting", sql.COUNT))[0][0])

    async def depth(self) -> MailboxDepth:
        """Return the number of messages by state."""
        return MailboxDepth(*(await self._run("counting", sql.DEPTH))[0])

    async def oldest_waiting_seconds(self) -> float | None:
        """How long the message that waits longest has waited; None if none waits."""
        rows = await self._run("looking at", sql.OLDEST)
        return max(0.0, rows[0][0]) if rows else None

    async def asked_from(self, address: str) -> bool:
        """Whether a message that has not been settled asks for its reply at this address."""
        return bool((await self._run("reading", sql.ASKED, address=address))[0][0])

    async def readers(self) -> Readers:
        """Return the processes that hold messages of this mailbox."""
        rows = await self._run("looking at the readers of", sql.READERS)
        found = [Reader(str(holder), count, idle, left) for holder, count, idle, _, left in rows]
        return Readers(
            tuple(sorted(found, key=lambda reader: reader.name)), max((row[3] for row in rows), default=None)
        )

    async def announce(self, worker: str, fingerprint: str, seconds: float) -> None:
        """Announce for this many seconds that a worker with this fingerprint serves the mailbox; 0 withdraws it."""
        if seconds == 0:
            await self._change("announcing a worker of", sql.WITHDRAW, worker=worker)
            return
        await self.open()
        about = {"worker": worker, "fingerprint": fingerprint, "holder": self.holder}
        await self._change(
            "announcing a worker of", sql.ANNOUNCE, **about, seconds=float(seconds), kept=_LOST_KEPT_SECONDS
        )

    async def announced(self) -> Sequence[str]:
        """Return the fingerprint of each worker of this mailbox; empty if it accepts any code."""
        rows = await self._run("looking for workers of", sql.WORKERS, most=_MAX_ANNOUNCED)
        return [fingerprint for _, _, fingerprint, left in rows if left > 0]

    async def workers(self) -> Sequence[ServingWorker]:
        """Return the workers of this mailbox, also those that were lost in the last minutes or still hold leases.

        A worker is lost when its announcement has expired. A process that never announced itself is lost when it holds
        leases and has not received for a while.
        """
        readers = {reader.name: reader for reader in (await self.readers()).readers}
        workers: list[ServingWorker] = []
        for worker, holder, _, left in await self._run("looking for workers of", sql.WORKERS, most=_MAX_ANNOUNCED):
            reader = readers.pop(str(holder), Reader("", 0, float("inf")))
            silent = min(reader.idle_seconds, max(0.0, ANNOUNCEMENT_SECONDS - left))
            name = worker.partition(" ")[2] or worker
            workers.append(ServingWorker(name, left > 0, silent, reader.in_flight, reader.leased_seconds))
        for name, reader in readers.items():
            alive = reader.idle_seconds < _UNANNOUNCED_SECONDS
            workers.append(ServingWorker(name, alive, reader.idle_seconds, reader.in_flight, reader.leased_seconds))
        return sorted(workers, key=lambda worker: (not worker.alive, worker.name))

    async def exists(self) -> bool:
        """Return whether the database has this mailbox."""
        return bool(await self._run("looking for", sql.FIND))

    async def reply_addresses(self) -> dict[str, int]:
        """How many messages that have not been settled ask for replies at each address."""
        return dict(cast(Any, await self._run("reading", sql.REPLY_ADDRESSES)))

    async def purge_replies(self, addresses: Sequence[str]) -> int:
        """Remove the messages that ask for replies at these addresses; returns how many. Dead letters stay."""
        return await self._purge(sql.PURGE_REPLIES, addresses=list(addresses))

    async def purge(self) -> int:
        """Remove all messages that are waiting, delayed or in flight; returns their number. Dead letters stay."""
        return await self._purge(sql.PURGE)

    async def expire(self, seconds: float) -> None:
        """Let the mailbox and its messages be removed after this time, unless it is given another."""
        await self._change("keeping", sql.EXPIRE, ttl=float(seconds))

    async def close(self) -> None:
        """Return messages that were received and not handed out, and close connections. Idempotent."""
        if self._closed:
            return
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.wait([self._refresher])
        await self._receiver.close()
        if self._id is not None:
            self.connection.listener.forget(f"{sql.CHANNEL}{self._id}")
            try:
                if self._ttl is not None:
                    await self._remove_messages(await self._run("closing", sql.REMOVE))
            except MailboxError:
                pass  # The server is unavailable; the mailbox expires.
        self._closed = True
        if self._owns_connection:
            await self.connection.close()

    def for_replies[R](self, name: str, body_type: type[R], ttl_seconds: float) -> PostgresMailbox[R]:
        """Create a mailbox for replies to messages of this one, in the same database, with this expiry."""
        return PostgresMailbox(
            name,
            body_type,
            self.connection,
            claim_check=self.claim_check,
            max_body_bytes=self.max_body_bytes,
            ttl_seconds=ttl_seconds,
        )

    def _factory(self) -> MailboxFactory:
        return PostgresMailboxFactory(self.connection, object, claim_check=self.claim_check)

    async def _insert_all(self, _mailbox: str, items: Sequence[_Wire]) -> Sequence[int]:
        kept, bodies, addresses = map(list, zip(*items, strict=True))
        values = {"kept": kept, "bodies": bodies, "addresses": addresses}
        rows = await self._run("sending to", sql.SEND, **values)
        if not rows and self._create:
            await self.open(again=True)
            rows = await self._run("sending to", sql.SEND, **values)
        if not rows:
            raise ReplyNotAvailableError(f"mailbox {self.name} does not exist")
        ids: Sequence[int] = rows[0][0]
        return ids

    async def _wire(self, body: Any, address: str) -> _Wire:
        try:
            wire = seal(encode_body(body), self.key, self.name, address)
        except CodecError as error:
            raise BodyError(f"the body cannot be sent to {self.name}: {error}") from None
        if self.claim_check is not None and len(wire) > self.claim_check.threshold:
            return True, (await self.claim_check.keep(wire)).encode(), address
        if len(wire) > self.max_body_bytes:
            raise MessageTooLargeError(
                f"{self.name}: the body must have at most {self.max_body_bytes} bytes (got {len(wire)}); "
                "give the mailbox a claim check, which keeps large bodies in a shared folder"
            )
        return False, wire, address

    async def _run(self, doing: str, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        self.check_open()
        return await self.connection.run(f"{doing} {self.name}", statement, {"name": self.name, **parameters})

    async def _change(self, doing: str, statement: str, **parameters: Any) -> int:
        self.check_open()
        return await self.connection.change(f"{doing} {self.name}", statement, {"name": self.name, **parameters})

    async def _purge(self, statement: str, **parameters: Any) -> int:
        target = await self.approximate_count()  # Messages sent meanwhile may stay, so that this ends.
        removed = 0
        while removed < target:
            step = await self._change("purging", statement, most=_PURGED_AT_ONCE, **parameters)
            if step == 0:
                break
            removed += step
        return removed

    async def _remove_expired(self) -> None:
        """Remove expired mailboxes, what an interrupted removal has left behind, and old dead letters."""
        doing = "removing expired mailboxes"
        await self.connection.run(doing, sql.REMOVE_EXPIRED, {})
        await self._remove_messages(await self.connection.run(doing, sql.ABANDONED, {}))
        await self.connection.change(doing, sql.REMOVE_OLD_LETTERS, {})

    async def _remove_messages(self, queues: Sequence[tuple[Any, ...]]) -> None:
        """Remove the messages of mailboxes that no longer exist, in batches: each is a short transaction."""
        values = {"queues": [queue for (queue,) in queues], "most": _PURGED_AT_ONCE}
        for statement in (sql.REMOVE_UNSETTLED, sql.REMOVE_DEAD) if queues else ():
            while await self._change("removing the messages of", statement, **values) == _PURGED_AT_ONCE:
                pass

    async def _refresh(self) -> int:
        rows = await self._run("opening", sql.OPEN, ttl=self._ttl)
        return int(rows[0][0])

    async def _keep_alive(self, ttl: float) -> None:
        while True:
            await asyncio.sleep(ttl / 3)
            try:
                await self._refresh()
            except MailboxError:
                pass  # The next receive recreates the mailbox if it was deleted.


class PostgresMailboxFactory:
    """Creates objects for sending to mailboxes in one PostgreSQL database. They never create a mailbox.

    Args:
        connection: A connection, or the URL of a database.
        body_type: The type of bodies, for receiving.
        claim_check: The store for large bodies.
    """

    def __init__(
        self,
        connection: PostgresSource,
        body_type: type[Any] = object,
        *,
        claim_check: ClaimCheck | None = None,
    ) -> None:
        self.connection = PostgresConnection.of(connection)
        self._owns_connection = self.connection is not connection
        self._body_type = body_type
        self._claim_check = claim_check

    def create(self, name: str) -> PostgresMailbox[Any]:
        """Return an object for sending to the mailbox with this name."""
        return PostgresMailbox(name, self._body_type, self.connection, claim_check=self._claim_check, create=False)

    async def close(self) -> None:
        """Close the connection, if it was opened here."""
        if self._owns_connection:
            await self.connection.close()
