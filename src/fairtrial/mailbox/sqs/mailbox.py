"""The mailbox on SQS, and its dead letters."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from fairtrial.errors import BodyError, ConfigurationError, LeaseLostError, MailboxConnectionError
from fairtrial.mailbox.body import ClaimCheck, readable
from fairtrial.mailbox.protocol import DeadLetter, Mailbox, MailboxDepth, MailboxResolver, Message
from fairtrial.mailbox.server import ServerMailbox, T
from fairtrial.mailbox.sqs import connection as connecting
from fairtrial.mailbox.sqs.queues import HEADER_BYTES, MailboxQueues, S3ClaimCheck, WireMessage, as_storable
from fairtrial.mailbox.sqs.receive import SqsReceipt, SqsReceiver, whole_lease

_LISTING_SECONDS: Final = 120
_EMPTY_POLLS: Final = 2  # A short poll of SQS may miss messages: the queue is empty when several found none.


class SqsDeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, mailbox: SqsMailbox[Any]) -> None:
        self._mailbox = mailbox

    async def count(self) -> int:
        """Return the number of dead letters."""
        await self._mailbox.open()
        url = self._mailbox.queues.dead
        return 0 if url is None else sum(await self._mailbox.count(url))

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1 (got {limit})")
        held = await self._receive_all()
        await self._release([handle for handle, _ in held])
        wires = {wire.dead_id: wire for _, wire in held if after is None or wire.dead_id > after}
        return [await self._letter(wires[id]) for id in sorted(wires)[:limit]]

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        return await self._remove(ids, send=True)

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        return await self._remove(ids, send=False)

    async def _remove(self, ids: Collection[str], *, send: bool) -> int:
        wanted = set(ids)
        if not wanted:
            return 0
        held = await self._receive_all()
        found = {}
        try:
            for handle, wire in held:
                if wire.dead_id in wanted:
                    if send:
                        clean = replace(wire, deliveries=0, dead_id="", reason="", error="", died_at=0.0)
                        await self._mailbox.send_wire(clean)
                    await self._batch("delete_message_batch", [handle])
                    found[handle] = wire.dead_id
        finally:
            await self._release([handle for handle, _ in held if handle not in found])
        return len(set(found.values()))

    async def _receive_all(self) -> list[tuple[str, WireMessage]]:
        await self._mailbox.open()
        url = self._mailbox.queues.dead
        held: list[tuple[str, WireMessage]] = []
        empty = 0
        while url is not None and empty < _EMPTY_POLLS:
            try:
                messages = await self._mailbox.connection.receive(
                    QueueUrl=url,
                    MaxNumberOfMessages=connecting.MAX_ENTRIES,
                    VisibilityTimeout=_LISTING_SECONDS,
                    WaitTimeSeconds=0,
                )
            except connecting.FAILURES as error:
                raise connecting.translated(error, f"reading dead letters of {self._mailbox.name}") from None
            empty = 0 if messages else empty + 1
            for message in messages:
                try:
                    wire = WireMessage.loads(message["Body"])
                except BodyError:
                    continue  # Not ours; it becomes visible again by itself.
                if wire.dead_id:
                    held.append((message["ReceiptHandle"], wire))
        return held

    async def _release(self, handles: Sequence[str]) -> None:
        await self._batch("change_message_visibility_batch", handles, VisibilityTimeout=0)

    async def _batch(self, operation: str, handles: Sequence[str], **more: Any) -> None:
        url = self._mailbox.queues.dead
        doing = f"changing dead letters of {self._mailbox.name}"
        submit = self._mailbox.connection.batcher.submit
        for future in [submit(operation, url or "", {"ReceiptHandle": handle, **more}) for handle in handles]:
            try:
                failure = await future
            except connecting.FAILURES as error:
                raise connecting.translated(error, doing) from None
            if failure is not None:
                raise connecting.entry_error(failure, doing)

    async def _letter(self, wire: WireMessage) -> DeadLetter:
        try:
            text = readable(await self._mailbox.body_of(wire)).decode("utf-8", "replace")
        except (BodyError, OSError):
            text = f"sha256:{wire.payload}" if wire.form == "claim" else wire.payload
        return DeadLetter(
            wire.dead_id,
            wire.id,
            text,
            wire.deliveries,
            wire.reason,
            wire.error,
            wire.reply_to or None,
            died_at=wire.died_at,
        )


MAX_BODY_BYTES = (connecting.MAX_BYTES - HEADER_BYTES) * 3 // 4  # Binary bodies grow by a third in base64.
_MAX_FOREIGN = 200_000


class SqsMailbox(ServerMailbox[T]):
    """A mailbox on standard queues of Amazon SQS. Requires asyncio.

    Leases last at most 12 hours. Counts are approximate, up to a minute late, and a receive without waiting may miss
    messages. After `purge`, acknowledging a message that was in flight does not fail.

    Args:
        name: The name, which is also the reply address.
        body_type: The type of bodies. Invalid bodies become dead letters and never reach a worker. By default, loops
            and `collect_results` set it; until then bodies are plain JSON values.
        connection: A connection that mailboxes can share, or an address: `sqs://region/prefix`.
        reply_resolver: Finds the mailbox for a reply address; by default a mailbox at the same address.
        claim_check: The store for large bodies; by default the bucket in the address. Without either, they are refused.
        max_body_bytes: The size limit of bodies in a message, after compression.
        ttl_seconds: Makes this object the owner of the mailbox, such as one for replies: it is deleted when this object
            is closed, or by a sweeper some time after its owner was killed.
        create: Whether sending may create the mailbox. Mailboxes for replies must not.
        shards: The number of queues; by default that of the address, and one for mailboxes with an owner.
    """

    server = "SQS"
    large_bodies = "name an S3 bucket for large bodies in the address: ?bucket=NAME"
    connection_type = connecting.SqsConnection
    connection: connecting.SqsConnection

    def __init__(
        self,
        name: str,
        body_type: type[T] = object,  # type: ignore[assignment]  # plain JSON values
        connection: connecting.SqsSource | None = None,
        *,
        reply_resolver: MailboxResolver | None = None,
        claim_check: ClaimCheck | S3ClaimCheck | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        ttl_seconds: float | None = None,
        create: bool = True,
        shards: int | None = None,
    ) -> None:
        if not 0 < max_body_bytes <= MAX_BODY_BYTES:
            raise ConfigurationError(f"max_body_bytes must be from 1 to {MAX_BODY_BYTES} (got {max_body_bytes})")
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
        if claim_check is None and self.connection.address.bucket is not None:
            self.claim_check = S3ClaimCheck(self.connection)
        self.poll_seconds = self.connection.address.poll_seconds
        self.gather_seconds = self.connection.address.linger_seconds
        self.count_lag_seconds = self.connection.address.lag_seconds
        growing = shards is None and ttl_seconds is None and create
        self.queues = MailboxQueues(
            self.connection,
            name,
            shards or (self.connection.address.shards if growing else 1),
            growing=growing,
            ttl_seconds=ttl_seconds,
        )
        self.dead_letters = SqsDeadLetters(self)
        self._receiver = SqsReceiver(self)
        self._turn = secrets.randbelow(64)

    async def open(self, *, again: bool = False) -> None:
        """Create the queues if they do not exist. Receiving does it too; a reply address must be opened first."""
        self.check_open()
        await self.queues.open(create=self._create, again=again)
        if self._ttl is not None and self._refresher is None:
            await self.queues.expire(self._ttl)  # The queue may be older than this object.
            self._keep_refreshed()

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Send a message; returns its id when SQS has stored it. Sends of one turn of the event loop leave together."""
        self.check_open()
        address = await self._address(reply_to)
        wire = await self._wire(body, address)
        await self.send_wire(wire)
        return wire.id

    async def send_all(self, bodies: Sequence[T], *, reply_to: str | Mailbox[Any] | None = None) -> Sequence[str]:
        """Send many messages, ten in a request; returns their ids."""
        self.check_open()
        address = await self._address(reply_to)
        wires = [await self._wire(body, address) for body in bodies]
        await self.open()
        sending = []
        for start in range(0, len(wires), connecting.MAX_ENTRIES):
            url = self._next_queue()
            sending += [self.send_wire(wire, url) for wire in wires[start : start + connecting.MAX_ENTRIES]]
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [wire.id for wire in wires]

    async def acknowledge_all(self, messages: Sequence[Message[T]]) -> Sequence[bool]:
        """Acknowledge many messages of this mailbox; False for those whose lease was lost."""
        receipts = [cast(SqsReceipt, message.receipt) for message in messages]
        outcomes = await asyncio.gather(*(receipt.acknowledge() for receipt in receipts), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, LeaseLostError):
                for receipt, own in zip(receipts, outcomes, strict=True):
                    receipt.settled = receipt.settled and isinstance(own, LeaseLostError)
                raise outcome
        return [outcome is None for outcome in outcomes]

    def renew(self, receipts: Sequence[SqsReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now, ten in a request; may be called from any thread."""
        lease = whole_lease(seconds)
        kept = [False] * len(receipts)
        queues: dict[str, list[int]] = {}
        for at, receipt in enumerate(receipts):
            if receipt.is_held():
                queues.setdefault(receipt.url, []).append(at)
        for url, places in queues.items():
            for start in range(0, len(places), connecting.MAX_ENTRIES):
                self._renew(url, receipts, places[start : start + connecting.MAX_ENTRIES], lease, kept)
        return kept

    def _renew(self, url: str, receipts: Sequence[SqsReceipt], places: list[int], lease: int, kept: list[bool]) -> None:
        now = self.connection.clock.monotonic()
        leases = {at: receipts[at].allowed_lease(lease, now) for at in places}
        entries = [
            {"Id": str(at), "ReceiptHandle": receipts[at].handle, "VisibilityTimeout": leases[at]}
            for at in places
            if leases[at] >= 1
        ]
        if not entries:
            return
        answer = self.connection.call_blocking("change_message_visibility_batch", QueueUrl=url, Entries=entries)
        for success in answer.get("Successful") or ():
            at = int(success["Id"])
            receipts[at].deadline = now + leases[at]
            kept[at] = True
        for failure in answer.get("Failed") or ():
            if not connecting.is_lost_lease(failure):
                raise connecting.entry_error(failure, "renewing leases")

    async def approximate_count(self) -> int:
        """Return about how many messages have not been settled: waiting, delayed and in flight."""
        depth = await self._depth(dead=False)
        return depth.waiting + depth.delayed + depth.in_flight

    async def depth(self) -> MailboxDepth:
        """Return about how many messages are in each state."""
        return await self._depth(dead=True)

    async def exists(self) -> bool:
        """Return whether the mailbox has a queue."""
        self.check_open()
        return await self.queues.exists()

    async def purge(self) -> int:
        """Remove all messages except dead letters; returns about how many. SQS allows it once a minute."""
        removed = await self.approximate_count()
        for url in self.queues.urls:
            try:
                await self.connection.call("purge_queue", QueueUrl=url)
            except connecting.FAILURES as error:
                raise connecting.translated(error, f"purging {self.name}") from None
        return removed

    async def count(self, url: str) -> tuple[int, int, int]:
        """Return about how many messages of a queue are waiting, delayed and in flight."""
        names = [f"ApproximateNumberOfMessages{state}" for state in ("", "Delayed", "NotVisible")]
        try:
            answer = await self.connection.call("get_queue_attributes", QueueUrl=url, AttributeNames=names)
        except connecting.FAILURES as error:
            if connecting.is_gone(error):
                return 0, 0, 0
            raise connecting.translated(error, f"counting {self.name}") from None
        waiting, delayed, in_flight = (int(answer["Attributes"][name]) for name in names)
        return waiting, delayed, in_flight

    async def add_dead_letter(self, wire: WireMessage, reason: str, error: str) -> None:
        """Store a dead letter."""
        now = self.connection.clock.time()
        if wire.form == "foreign":  # Shortened: with our header it could be too large for SQS.
            wire = replace(wire, form="text", payload=wire.payload[:_MAX_FOREIGN])
        dead = replace(
            wire,
            dead_id=f"{round(now * 1000):013d}-{secrets.token_hex(4)}",
            reason=as_storable(reason),
            error=as_storable(error, 200),
            died_at=now,
        )
        await self.send_wire(dead, await self.queues.open_dead())

    async def body_of(self, wire: WireMessage) -> bytes:
        """Return the body of a message, from the claim check if it is there.

        Raises:
            BodyError: the body is missing or damaged.
            OSError: the claim check cannot be read at present.
        """
        return await self.claimed_body(wire.payload) if wire.form == "claim" else wire.body()

    async def send_wire(self, wire: WireMessage, url: str | None = None) -> None:
        """Send a message to one of the queues, or to this one.

        Raises:
            ReplyNotAvailableError: the queue does not exist, and this object must not create it.
        """
        self.check_open()
        await self.open()
        text = wire.dumps()
        doing = f"sending to {self.name}"
        size = len(text.encode("utf-8", "surrogatepass"))
        try:
            failure = await self.connection.batcher.submit(
                "send_message_batch", url or self._next_queue(), {"MessageBody": text}, size
            )
        except connecting.FAILURES as error:
            if connecting.is_gone(error):
                await self.open(again=True)  # Raises if it must not be created.
                raise MailboxConnectionError(f"{doing}: its queue was deleted, and created again: retry") from None
            raise connecting.translated(error, doing) from None
        if failure is not None:
            raise connecting.entry_error(failure, doing)

    async def _depth(self, *, dead: bool) -> MailboxDepth:
        self.check_open()
        await self.open()
        counts = await asyncio.gather(*(self.count(url) for url in self.queues.urls))
        waiting, delayed, in_flight = (sum(state) for state in zip(*counts, strict=True))
        return MailboxDepth(waiting, delayed, in_flight, await self.dead_letters.count() if dead else 0)

    def _next_queue(self) -> str:
        self._turn += 1
        return self.queues.urls[self._turn % len(self.queues.urls)]

    async def _wire(self, body: Any, address: str) -> WireMessage:
        claimed, data = await self._pack(body, address)
        return WireMessage.of_claim(data.decode(), address) if claimed else WireMessage.of(data, address)

    async def _refresh(self, ttl: float) -> None:
        await self.queues.expire(ttl)

    async def _retire(self) -> None:
        """Delete a mailbox with an owner. If SQS is unavailable, the sweeper of another process deletes it."""
        if self._ttl is not None and self.queues.urls:
            await self.queues.delete()
