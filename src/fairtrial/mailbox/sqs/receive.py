"""Receive from SQS and settle what was received."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from fairtrial.errors import BodyError, ConfigurationError, LeaseLostError, MailboxError
from fairtrial.mailbox.protocol import Message
from fairtrial.mailbox.receive import BackgroundReads, Delivery, ServerReceipt
from fairtrial.mailbox.sqs.connection import FAILURES, MAX_ENTRIES, entry_error, is_gone, is_lost_lease, translated
from fairtrial.mailbox.sqs.queues import WireMessage

if TYPE_CHECKING:
    from fairtrial.mailbox.sqs.mailbox import SqsMailbox

MAX_LEASE_SECONDS: Final = 43_200
"""A message is in flight for at most 12 hours after it was received, however often its lease is renewed."""
MAX_DELAY_SECONDS: Final = 900
_LEASE_MARGIN: Final = 5


def whole_lease(seconds: float) -> int:
    """Return the lease in whole seconds, as SQS counts them."""
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise ConfigurationError(f"a lease on SQS must be more than 0 s and at most 12 hours (got {seconds})")
    return math.ceil(seconds)


class SqsReceipt(ServerReceipt):
    """The handle of one delivery.

    Attributes:
        url: The queue it came from.
        handle: The receipt handle of SQS.
        received: When it was received, on the clock of the connection.
        deadline: When its lease ends.
        wire: The message, with the counters of earlier copies.
        receives: How often this copy was received, this time included.
        sent_ms: When this copy was sent, in milliseconds since the epoch by the clock of SQS; 0 if unknown.
        settled: Whether it was settled.
    """

    __slots__ = (
        "_copied",
        "deadline",
        "handle",
        "received",
        "receives",
        "sent_ms",
        "settled",
        "url",
        "wire",
    )

    mailbox: SqsMailbox[Any]

    def __init__(
        self,
        mailbox: SqsMailbox[Any],
        url: str,
        handle: str,
        wire: WireMessage,
        *,
        receives: int,
        received: float,
        lease: int,
        sent_ms: int = 0,
    ) -> None:
        self.mailbox = mailbox
        self.message_id = wire.id
        self.url = url
        self.handle = handle
        self.wire = wire
        self.receives = receives
        self.sent_ms = sent_ms
        self.received = received
        self.deadline = received + lease
        self.settled = False
        self._copied = False

    @property
    def deliveries(self) -> int:
        """The number of this delivery, from 1."""
        return self.wire.deliveries + self.receives

    @property
    def expiries(self) -> int:
        """The number of earlier deliveries that ended with an expired lease."""
        return self.wire.expiries + self.receives - 1

    def is_held(self) -> bool:
        """Return whether the lease is valid."""
        return not self.settled and self.mailbox.connection.clock.monotonic() < self.deadline

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        await self._settle(self.delete())

    async def nack(self, delay: float, *, counted: bool) -> None:
        """See `Receipt.nack`."""
        await self._settle(self._return(delay, counted=counted))

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        self._check_held()
        now = self.mailbox.connection.clock.monotonic()
        lease = self.allowed_lease(whole_lease(seconds), now)
        if lease < 1:
            raise self.lost()
        entry = {"ReceiptHandle": self.handle, "VisibilityTimeout": lease}
        await self._submit("change_message_visibility_batch", entry, "extending")
        self.deadline = now + lease

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        await self._settle(self._set_aside(reason, error))

    def allowed_lease(self, lease: int, now: float) -> int:
        """Return the lease, or less if it would end later than 12 hours after the message was received."""
        return min(lease, int(self.received + MAX_LEASE_SECONDS - _LEASE_MARGIN - now))

    async def delete(self) -> None:
        """Delete the message."""
        await self._submit("delete_message_batch", {"ReceiptHandle": self.handle}, "acknowledging")

    async def _return(self, delay: float, *, counted: bool) -> None:
        # The copy first: a crash in between repeats the message instead of losing it.
        if not self._copied:
            await self._send_copy(delay, self.deliveries if counted else self.deliveries - 1)
            self._copied = True
        await self.delete()

    async def _send_copy(self, delay: float, deliveries: int) -> None:
        whole = math.ceil(delay)
        late = self.mailbox.connection.clock.time() + delay if whole > MAX_DELAY_SECONDS else 0.0
        copy = replace(self.wire, deliveries=deliveries, expiries=self.expiries, not_before=late)
        text = copy.dumps()
        entry = {"MessageBody": text, "DelaySeconds": min(whole, MAX_DELAY_SECONDS)}
        await self._submit("send_message_batch", entry, "giving back", len(text.encode("utf-8", "surrogatepass")))

    async def _set_aside(self, reason: str, error: str) -> None:
        if not self._copied:
            dead = replace(self.wire, deliveries=self.deliveries, expiries=self.expiries)
            await self.mailbox.add_dead_letter(dead, reason, error)
            self._copied = True
        await self.delete()

    def _check_held(self) -> None:
        self.mailbox.check_open()
        if not self.is_held():
            raise self.lost()

    async def _settle(self, settling: Awaitable[None]) -> None:
        try:
            self._check_held()
        except MailboxError:
            settling.close()  # type: ignore[attr-defined]  # a coroutine, which would warn that it was never awaited
            raise
        self.settled = True  # Before sending: of two attempts at once, one must fail.
        try:
            await settling
        except LeaseLostError:
            raise
        except MailboxError:
            self.settled = False
            raise

    async def _submit(self, operation: str, entry: dict[str, Any], doing: str, size: int = 0) -> None:
        what = f"{doing} message {self.wire.id} of {self.mailbox.name}"
        try:
            failure = await self.mailbox.connection.batcher.submit(operation, self.url, entry, size)
        except FAILURES as error:
            raise translated(error, what) from None
        if failure is not None:
            raise self.lost() if "ReceiptHandle" in entry and is_lost_lease(failure) else entry_error(failure, what)


_PARALLEL: Final = 8
_SHARD_POLL_SECONDS: Final = 2  # With several queues: nothing else is received while one of them is polled.
_LATE_SECONDS: Final = 1.0
_ATTRIBUTES: Final = ["ApproximateReceiveCount", "SentTimestamp"]


class SqsReceiver[T](BackgroundReads[T]):
    """Receives messages from one mailbox. Closing it waits until all polls have ended."""

    _mailbox: SqsMailbox[T]

    def __init__(self, mailbox: SqsMailbox[T]) -> None:
        super().__init__(mailbox)
        self._next = random.randrange(64)  # noqa: S311 - receivers start at different shards

    async def _look(self, count: int, visibility: float, wait: float) -> Sequence[Delivery]:
        """Receive from all queues; wait in one of them if there is nothing."""
        lease = whole_lease(visibility)
        await self._mailbox.queues.refresh_shards()
        urls = self._mailbox.queues.urls
        self._next += 1
        urls = [urls[(self._next + at) % len(urls)] for at in range(len(urls))]
        found: list[Delivery] = []
        longest = self._mailbox.poll_seconds if len(urls) == 1 else _SHARD_POLL_SECONDS
        # Whole seconds, and rather a second too long than not at all: without waiting, SQS asks only some of its
        # servers and may miss messages.
        seconds = 0 if wait <= 0 else min(longest, max(1, int(wait)))
        try:
            for url in urls if len(urls) > 1 else ():
                found += await self._drain(url, count - len(found), lease, 0)
                if len(found) >= count:
                    return found
            if not found and (seconds or len(urls) == 1):
                found += await self._drain(urls[0], count, lease, seconds)
        except (asyncio.CancelledError, MailboxError):
            self._hand_back(found)
            raise
        return found

    async def _drain(self, url: str, count: int, lease: int, wait: int) -> list[Delivery]:
        """Receive up to `count` from one queue: ten, and if there are as many, the others at once."""
        found = [*await self._poll(url, min(count, MAX_ENTRIES), lease, wait)]
        full = len(found) == MAX_ENTRIES
        while full and len(found) < count and not self._closing:
            missing = count - len(found)
            asked = [
                min(MAX_ENTRIES, missing - at) for at in range(0, min(missing, _PARALLEL * MAX_ENTRIES), MAX_ENTRIES)
            ]
            polls = [asyncio.ensure_future(self._poll(url, number, lease, 0)) for number in asked]
            try:
                await asyncio.wait(polls)
            except asyncio.CancelledError:
                for poll in polls:
                    poll.cancel()
                self._hand_back(found)
                raise
            more = [poll.result() for poll in polls if poll.exception() is None]
            found += chain.from_iterable(more)
            full = len(more) == len(polls) and all(
                len(part) == number for part, number in zip(more, asked, strict=True)
            )
        return found

    async def _poll(self, url: str, count: int, lease: int, wait: int) -> Sequence[Delivery]:
        try:
            return await self._read(self._request(url, count, lease, wait))
        except FAILURES as error:
            if is_gone(error):
                await self._mailbox.open(again=True)
                return []
            raise translated(error, f"receiving from {self._mailbox.name}") from None

    async def _request(self, url: str, count: int, lease: int, wait: int) -> Sequence[tuple[SqsReceipt, WireMessage]]:
        clock = self._mailbox.connection.clock
        began = clock.monotonic()
        messages = await self._mailbox.connection.receive(
            QueueUrl=url,
            MaxNumberOfMessages=count,
            VisibilityTimeout=lease,
            WaitTimeSeconds=wait,
            MessageSystemAttributeNames=_ATTRIBUTES,
        )
        now = clock.monotonic()
        # The leases began when SQS sent its answer. If that was late, it may have been at any time since the request.
        received = now if now - began <= wait + _LATE_SECONDS else began
        receipts = [self._receipt(url, message, received, lease) for message in messages]
        return [(receipt, receipt.wire) for receipt in receipts]

    def _receipt(self, url: str, message: dict[str, Any], received: float, lease: int) -> SqsReceipt:
        try:
            wire = WireMessage.loads(message["Body"])
        except BodyError:
            # A foreign message, which will become a dead letter. Its id must have our form.
            id = hashlib.sha256(str(message.get("MessageId", "")).encode()).hexdigest()[:32]
            wire = WireMessage(message["Body"], "foreign", id)
        receives = int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        return SqsReceipt(
            self._mailbox,
            url,
            message["ReceiptHandle"],
            wire,
            receives=max(1, receives),
            received=received,
            lease=lease,
            sent_ms=int(message.get("Attributes", {}).get("SentTimestamp", 0)),
        )

    async def _message(self, receipt: SqsReceipt, content: WireMessage) -> Message[T] | None:
        now = self._mailbox.connection.clock.time()
        if content.not_before > now + 1:  # SQS delays at most 15 minutes: it is delayed again.
            await self._settle(receipt.nack(content.not_before - now, counted=False))
            return None
        return await self._read_message(
            receipt,
            self._mailbox.body_of(content),
            content.reply_to,
            delivery_count=receipt.deliveries,
            expiries=receipt.expiries,
            waited_seconds=max(0.0, now - receipt.sent_ms / 1000) if receipt.sent_ms else None,
        )
