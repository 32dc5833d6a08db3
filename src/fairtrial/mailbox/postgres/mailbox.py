"""A mailbox on PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

from fairtrial.errors import ReplyNotAvailableError
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.mailbox.postgres import receive
from fairtrial.mailbox.postgres import statements as sql
from fairtrial.mailbox.postgres.connection import PostgresConnection, PostgresSource
from fairtrial.mailbox.postgres.statements import MAX_BYTES, MAX_OPERATIONS
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, MailboxResolver, Message
from fairtrial.mailbox.server import Reader, Readers, ServerMailbox, ServingWorker, T

MAX_BODY_BYTES = 1024 * 1024
_MAX_ANNOUNCED = 10_000
_LOST_KEPT_SECONDS = 600.0  # For this long, workers that were lost are listed.
_PURGED_AT_ONCE = 5_000
_RENEWED_AT_ONCE = 1_000

type _Wire = tuple[bool, bytes, str]
"""A body as it is stored: whether it is in the claim check, the bytes or their hash, and the reply address."""


class PostgresMailbox(ServerMailbox[T]):
    """A mailbox in a PostgreSQL database, version 13 or newer: a row for each message. Requires asyncio.

    Args:
        name: The name, which is also the reply address.
        body_type: The type of bodies. Invalid bodies become dead letters and never reach a worker. By default, loops
            and `collect_results` set it; until then bodies are plain JSON values.
        connection: A connection that mailboxes can share, or the URL of a database. It may be the store's.
        reply_resolver: Finds the mailbox for a reply address; by default a mailbox in the same database.
        claim_check: The store for large bodies; without it they are refused.
        max_body_bytes: The size limit of bodies in the database.
        ttl_seconds: Makes this object the owner of the mailbox, such as one for replies: the mailbox expires this long
            after its owner ends.
        create: Whether sending may create the mailbox. Mailboxes for replies must not.
    """

    server = "PostgreSQL"
    connection_type = PostgresConnection
    connection: PostgresConnection

    def __init__(
        self,
        name: str,
        body_type: type[T] = object,  # type: ignore[assignment]  # plain JSON values
        connection: PostgresSource | None = None,
        *,
        reply_resolver: MailboxResolver | None = None,
        claim_check: ClaimCheck | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        ttl_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        super().__init__(
            name,
            body_type,
            connection,
            reply_resolver=reply_resolver,
            claim_check=claim_check,
            max_body_bytes=max_body_bytes,
            ttl_seconds=ttl_seconds,
            create=create,
        )
        self.holder = secrets.randbits(62) + 1
        self.dead_letters = receive.PostgresDeadLetters(self)
        self._receiver = receive.RowReceiver(self)
        self._id: int | None = None

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
        self._id = await self._refresh(self._ttl)
        self._keep_refreshed()
        return self._id

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Put a message in; returns its id when it is committed. Sends of one turn of the event loop leave together."""
        self.check_open()
        address = await self._address(reply_to)
        wire = (*await self._pack(body, address), address)
        return str(await self.connection.batcher.submit((_insert_all, self), wire, len(wire[1])))

    async def send_all(self, bodies: Sequence[T], *, reply_to: str | Mailbox[Any] | None = None) -> Sequence[str]:
        """Put many messages in; returns their ids. What `send` does for each, in fewer steps."""
        self.check_open()
        address = await self._address(reply_to)
        ids: list[str] = []
        batch: list[_Wire] = []
        size = 0
        for body in bodies:
            wire = (*await self._pack(body, address), address)
            batch.append(wire)
            size += len(wire[1])
            if len(batch) >= MAX_OPERATIONS or size >= MAX_BYTES:
                ids += map(str, await _insert_all(self, batch))
                batch, size = [], 0
        if batch:
            ids += map(str, await _insert_all(self, batch))
        return ids

    async def acknowledge_all(self, messages: Sequence[Message[T]]) -> Sequence[bool]:
        """Acknowledge many messages of this mailbox; False for those whose lease was lost."""
        self.check_open()
        receipts = [cast(receive.PostgresReceipt, message.receipt) for message in messages]
        ours: list[bool] = []
        for start in range(0, len(receipts), MAX_OPERATIONS):
            chunk = [(receipt.row, receipt.lease) for receipt in receipts[start : start + MAX_OPERATIONS]]
            ours += await receive.ACKNOWLEDGING(self, chunk)
        return ours

    def renew(self, receipts: Sequence[receive.PostgresReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; may be called from any thread."""
        ours: list[bool] = []
        for start in range(0, len(receipts), _RENEWED_AT_ONCE):
            leases = [(receipt.row, receipt.lease) for receipt in receipts[start : start + _RENEWED_AT_ONCE]]
            parameters = {**receive.columns(("ids", "leases"), leases), "seconds": float(seconds)}
            rows = self.connection.renewals.run("renewing leases", sql.RENEW, parameters)
            ours += receive.kept(rows, [row for row, _ in leases])
        return ours

    async def approximate_count(self) -> int:
        """How many messages have not been settled: waiting, delayed and in flight."""
        return int((await self.run("counting", sql.COUNT))[0][0])

    async def depth(self) -> MailboxDepth:
        """Return the number of messages by state."""
        return MailboxDepth(*(await self.run("counting", sql.DEPTH))[0])

    async def oldest_waiting_seconds(self) -> float | None:
        """How long the message that waits longest has waited; None if none waits."""
        rows = await self.run("looking at", sql.OLDEST)
        return max(0.0, rows[0][0]) if rows else None

    async def asked_from(self, address: str) -> bool:
        """Whether a message that has not been settled asks for its reply at this address."""
        return bool((await self.run("reading", sql.ASKED, address=address))[0][0])

    async def readers(self) -> Readers:
        """Return the processes that hold messages of this mailbox."""
        rows = await self.run("looking at the readers of", sql.READERS)
        found = [Reader(str(holder), count, idle, left) for holder, count, idle, _, left in rows]
        return Readers(
            tuple(sorted(found, key=lambda reader: reader.name)), max((row[3] for row in rows), default=None)
        )

    async def announce(self, worker: str, fingerprint: str, seconds: float) -> None:
        """Announce for this many seconds that a worker with this fingerprint serves the mailbox; 0 withdraws it."""
        if seconds == 0:
            await self.change("announcing a worker of", sql.WITHDRAW, worker=worker)
            return
        await self.open()
        about = {"worker": worker, "fingerprint": fingerprint, "holder": self.holder}
        await self.change(
            "announcing a worker of", sql.ANNOUNCE, **about, seconds=float(seconds), kept=_LOST_KEPT_SECONDS
        )

    async def announced(self) -> Sequence[str]:
        """Return the fingerprint of each worker of this mailbox; empty if it accepts any code."""
        rows = await self.run("looking for workers of", sql.WORKERS, most=_MAX_ANNOUNCED)
        return [fingerprint for _, _, fingerprint, left in rows if left > 0]

    async def workers(self) -> Sequence[ServingWorker]:
        """Return the workers of this mailbox, also those that were lost in the last minutes or still hold leases."""
        rows = await self.run("looking for workers of", sql.WORKERS, most=_MAX_ANNOUNCED)
        announced = ((worker.partition(" ")[2] or worker, str(holder), left) for worker, holder, _, left in rows)
        return (await self.readers()).serving(announced)

    async def exists(self) -> bool:
        """Return whether the database has this mailbox."""
        return bool(await self.run("looking for", sql.FIND))

    async def reply_addresses(self) -> dict[str, int]:
        """How many messages that have not been settled ask for replies at each address."""
        return dict(cast(Any, await self.run("reading", sql.REPLY_ADDRESSES)))

    async def purge_replies(self, addresses: Sequence[str]) -> int:
        """Remove the messages that ask for replies at these addresses; returns how many. Dead letters stay."""
        return await self._purge(sql.PURGE_REPLIES, addresses=list(addresses))

    async def purge(self) -> int:
        """Remove all messages that are waiting, delayed or in flight; returns their number. Dead letters stay."""
        return await self._purge(sql.PURGE)

    async def expire(self, seconds: float) -> None:
        """Let the mailbox and its messages be removed after this time, unless it is given another."""
        await self.change("keeping", sql.EXPIRE, ttl=float(seconds))

    async def run(self, doing: str, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement on this mailbox."""
        self.check_open()
        return await self.connection.run(f"{doing} {self.name}", statement, {"name": self.name, **parameters})

    async def change(self, doing: str, statement: str, **parameters: Any) -> int:
        """Run a statement that changes this mailbox, and return the number of rows that it changed."""
        self.check_open()
        return await self.connection.change(f"{doing} {self.name}", statement, {"name": self.name, **parameters})

    async def _purge(self, statement: str, **parameters: Any) -> int:
        target = await self.approximate_count()  # Messages sent meanwhile may stay, so that this ends.
        removed = 0
        while removed < target:
            step = await self.change("purging", statement, most=_PURGED_AT_ONCE, **parameters)
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
            while await self.change("removing the messages of", statement, **values) == _PURGED_AT_ONCE:
                pass

    async def _refresh(self, ttl: float | None) -> int:
        rows = await self.run("opening", sql.OPEN, ttl=ttl)
        return int(rows[0][0])

    async def _retire(self) -> None:
        if self._id is not None:
            self.connection.listener.forget(f"{sql.CHANNEL}{self._id}")
            if self._ttl is not None:
                await self._remove_messages(await self.run("closing", sql.REMOVE))


async def _insert_all(mailbox: PostgresMailbox[Any], items: Sequence[_Wire]) -> Sequence[int]:
    values = receive.columns(("kept", "bodies", "addresses"), items)
    for name in ("kept", "addresses"):
        if not any(values[name]):
            values[name] = []  # The statement takes what is missing at the end for false, and for no address.
    rows = await mailbox.run("sending to", sql.SEND, **values)
    if not rows and mailbox._create:
        await mailbox.open(again=True)
        rows = await mailbox.run("sending to", sql.SEND, **values)
    if not rows:
        raise ReplyNotAvailableError(f"mailbox {mailbox.name} does not exist")
    ids: Sequence[int] = rows[0][0]
    return ids
