"""Receive from SQS and settle what was received."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from fairtrial.errors import (
    BodyError,
    CodecError,
    ConfigurationError,
    LeaseLostError,
    MailboxClosedError,
    MailboxError,
    NewerFormatError,
)
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, decode_body, unseal
from fairtrial.mailbox.protocol import Message, Renewer, validate_receive
from fairtrial.mailbox.server import hand_back_all
from fairtrial.mailbox.sqs.connection import (
    FAILURES,
    MAX_ENTRIES,
    SqsConnection,
    entry_error,
    is_gone,
    is_lost_lease,
    translated,
)
from fairtrial.mailbox.sqs.queues import MailboxQueues, WireMessage

MAX_LEASE_SECONDS: Final = 43_200
"""A message is in flight for at most 12 hours after it was received, however often its lease is renewed."""
MAX_DELAY_SECONDS: Final = 900
_LEASE_MARGIN: Final = 5


def whole_lease(seconds: float) -> int:
    """Return the lease in whole seconds, as SQS counts them."""
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise ConfigurationError(f"a lease on SQS must be more than 0 s and at most 12 hours (got {seconds})")
    return math.ceil(seconds)


class SqsSettling(Protocol):
    """The interface of a mailbox for its receipts."""

    name: str
    connection: SqsConnection
    renewer: Renewer

    def check_open(self) -> None:
        """Raise `MailboxClosedError` after `close`."""
        ...

    async def add_dead_letter(self, wire: WireMessage, reason: str, error: str) -> None:
        """Store a dead letter."""
        ...

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        ...


class SqsReceipt:
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
        "mailbox",
        "received",
        "receives",
        "sent_ms",
        "settled",
        "url",
        "wire",
    )

    def __init__(
        self,
        mailbox: SqsSettling,
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
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        return self.mailbox.renewer

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

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        return await self.mailbox.send_reply(self.wire.id, address, body)

    def allowed_lease(self, lease: int, now: float) -> int:
        """Return the lease, or less if it would end later than 12 hours after the message was received."""
        return min(lease, int(self.received + MAX_LEASE_SECONDS - _LEASE_MARGIN - now))

    async def delete(self) -> None:
        """Delete the message."""
        await self._submit("delete_message_batch", {"ReceiptHandle": self.handle}, "acknowledging")

    def lost(self) -> LeaseLostError:
        """Return the error for a lease that was lost."""
        return LeaseLostError(
            f"the lease of message {self.wire.id} of {self.mailbox.name} was lost: it expired, or the message was "
            "settled before"
        )

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


class SqsRenewer:
    """Renews the leases of a mailbox from any thread, ten in a request."""

    def __init__(self, connection: SqsConnection) -> None:
        self._connection = connection

    def renew(self, receipts: Sequence[SqsReceipt], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost."""
        lease = whole_lease(seconds)
        kept = [False] * len(receipts)
        queues: dict[str, list[int]] = {}
        for at, receipt in enumerate(receipts):
            if receipt.is_held():
                queues.setdefault(receipt.url, []).append(at)
        for url, places in queues.items():
            for start in range(0, len(places), MAX_ENTRIES):
                self._renew(url, receipts, places[start : start + MAX_ENTRIES], lease, kept)
        return kept

    def _renew(self, url: str, receipts: Sequence[SqsReceipt], places: list[int], lease: int, kept: list[bool]) -> None:
        now = self._connection.clock.monotonic()
        leases = {at: receipts[at].allowed_lease(lease, now) for at in places}
        entries = [
            {"Id": str(at), "ReceiptHandle": receipts[at].handle, "VisibilityTimeout": leases[at]}
            for at in places
            if leases[at] >= 1
        ]
        if not entries:
            return
        answer = self._connection.call_blocking("change_message_visibility_batch", QueueUrl=url, Entries=entries)
        for success in answer.get("Successful") or ():
            at = int(success["Id"])
            receipts[at].deadline = now + leases[at]
            kept[at] = True
        for failure in answer.get("Failed") or ():
            if not is_lost_lease(failure):
                raise entry_error(failure, "renewing leases")


_log = logging.getLogger(__name__)
_MISSING_BLOB_DELAY: Final = 5.0
_PARALLEL: Final = 8
_SHARD_POLL_SECONDS: Final = 2  # With several queues: nothing else is received while one of them is polled.
_LATE_SECONDS: Final = 1.0
_ATTRIBUTES: Final = ["ApproximateReceiveCount", "SentTimestamp"]


class SqsInbox(SqsSettling, Protocol):
    """The interface of a mailbox for its receiver."""

    queues: MailboxQueues
    body_type: type[Any]
    key: bytes | None
    poll_seconds: int

    async def open(self, *, again: bool = False) -> None:
        """Find or create the queues."""
        ...

    async def body_of(self, wire: WireMessage) -> bytes:
        """Return the body of a message, from the claim check if it is there."""
        ...


class SqsReceiver:
    """Receives messages from one mailbox."""

    def __init__(self, mailbox: SqsInbox) -> None:
        self._mailbox = mailbox
        self._polls: set[asyncio.Task[list[SqsReceipt]]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._closing = False
        self._next = random.randrange(64)  # noqa: S311 - receivers start at different shards

    async def receive(self, max_messages: int, visibility: float, wait: float) -> Sequence[Message[Any]]:
        """See `Mailbox.receive`."""
        validate_receive(max_messages, visibility, wait)
        lease = whole_lease(visibility)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            self._mailbox.check_open()
            await self._mailbox.queues.refresh_shards()
            receipts = await self._look(max_messages, lease, end - loop.time())
            if self._closing:
                self._hand_back_later(receipts)
                raise MailboxClosedError(f"mailbox {self._mailbox.name} is closed")
            messages = await self._messages(receipts)
            if messages or loop.time() >= end:
                return messages

    async def close(self) -> None:
        """Wait until all polls have ended, and hand back the messages that they received."""
        self._closing = True
        while self._polls or self._returning:
            await asyncio.wait({*self._polls, *self._returning})
            await asyncio.sleep(0)  # Let waiting callers end and hand back their messages.

    async def _look(self, count: int, lease: int, left: float) -> list[SqsReceipt]:
        """Receive from all queues; wait in one of them if there is nothing."""
        urls = self._mailbox.queues.urls
        self._next += 1
        urls = [urls[(self._next + at) % len(urls)] for at in range(len(urls))]
        receipts: list[SqsReceipt] = []
        longest = self._mailbox.poll_seconds if len(urls) == 1 else _SHARD_POLL_SECONDS
        # Whole seconds, and rather a second too long than not at all: without waiting, SQS asks only some of its
        # servers and may miss messages.
        wait = 0 if left <= 0 else min(longest, max(1, int(left)))
        try:
            for url in urls if len(urls) > 1 else ():
                receipts += await self._drain(url, count - len(receipts), lease, 0)
                if len(receipts) >= count:
                    return receipts
            if not receipts and (wait or len(urls) == 1):
                receipts += await self._drain(urls[0], count, lease, wait)
        except (asyncio.CancelledError, MailboxError):
            self._hand_back_later(receipts)
            raise
        return receipts

    async def _drain(self, url: str, count: int, lease: int, wait: int) -> list[SqsReceipt]:
        """Receive up to `count` from one queue: ten, and if there are as many, the others at once."""
        receipts = await self._poll(url, min(count, MAX_ENTRIES), lease, wait)
        full = len(receipts) == MAX_ENTRIES
        while full and len(receipts) < count and not self._closing:
            missing = count - len(receipts)
            asked = [
                min(MAX_ENTRIES, missing - at) for at in range(0, min(missing, _PARALLEL * MAX_ENTRIES), MAX_ENTRIES)
            ]
            polls = [asyncio.ensure_future(self._poll(url, number, lease, 0)) for number in asked]
            try:
                await asyncio.wait(polls)
            except asyncio.CancelledError:
                for poll in polls:
                    poll.cancel()
                self._hand_back_later(receipts)
                raise
            more = [poll.result() for poll in polls if poll.exception() is None]
            receipts += [receipt for part in more for receipt in part]
            full = len(more) == len(polls) and all(
                len(part) == number for part, number in zip(more, asked, strict=True)
            )
        return receipts

    async def _poll(self, url: str, count: int, lease: int, wait: int) -> list[SqsReceipt]:
        poll = asyncio.ensure_future(self._request(url, count, lease, wait))
        self._polls.add(poll)
        poll.add_done_callback(self._polls.discard)
        try:
            # Shielded: the messages of an aborted poll would not be redelivered until their leases expire.
            receipts = await asyncio.shield(poll)
        except asyncio.CancelledError:
            self._run_in_background(self._return(poll))
            raise
        except FAILURES as error:
            if is_gone(error):
                await self._mailbox.open(again=True)
                return []
            raise translated(error, f"receiving from {self._mailbox.name}") from None
        if self._closing:
            self._hand_back_later(receipts)
            raise MailboxClosedError(f"mailbox {self._mailbox.name} is closed")
        return receipts

    async def _request(self, url: str, count: int, lease: int, wait: int) -> list[SqsReceipt]:
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
        return [self._receipt(url, message, received, lease) for message in messages]

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

    async def _messages(self, receipts: Sequence[SqsReceipt]) -> list[Message[Any]]:
        messages = []
        try:
            for receipt in receipts:
                if (message := await self._message(receipt)) is not None:
                    messages.append(message)
        except asyncio.CancelledError:
            self._hand_back_later([receipt for receipt in receipts if not receipt.settled])
            raise
        return messages

    async def _message(self, receipt: SqsReceipt) -> Message[Any] | None:
        mailbox, wire = self._mailbox, receipt.wire
        now = mailbox.connection.clock.time()
        if wire.not_before > now + 1:  # SQS delays at most 15 minutes: it is delayed again.
            await self._settle(receipt.nack(wire.not_before - now, counted=False))
            return None
        try:
            if wire.form == "foreign":
                raise BodyError("it was not sent by a mailbox")
            data = unseal(await mailbox.body_of(wire), mailbox.key, mailbox.name, wire.reply_to)
            body = decode_body(mailbox.body_type, data)
        except NewerFormatError as error:
            # Not damaged: a worker of a newer version can read it.
            _log.warning("handing message %s of %s back to newer workers: %s", wire.id, mailbox.name, error)
            await self._settle(receipt.nack(NEWER_FORMAT_DELAY, counted=False))
            return None
        except (BodyError, CodecError) as error:
            await self._settle(receipt.dead_letter(f"the body cannot be read: {error}", "BodyError"))
            return None
        except OSError as error:
            _log.warning("the body of message %s of %s cannot be fetched: %s", wire.id, mailbox.name, error)
            await self._settle(receipt.nack(_MISSING_BLOB_DELAY, counted=False))
            return None
        except Exception as error:  # An arbitrary error of a user's validator.
            reason = f"reading the body failed: {type(error).__name__}: {error}"
            await self._settle(receipt.dead_letter(reason, "BodyError"))
            return None
        return Message(
            wire.id,
            body,
            receipt,
            delivery_count=receipt.deliveries,
            expiries=receipt.expiries,
            reply_to=wire.reply_to or None,
            waited_seconds=max(0.0, now - receipt.sent_ms / 1000) if receipt.sent_ms else None,
        )

    async def _settle(self, settling: Any) -> None:
        try:
            await settling
        except MailboxError as error:
            # One invalid message must not affect the others; it is redelivered when its lease expires.
            _log.warning("a message of %s could not be set aside: %s", self._mailbox.name, error)

    def _hand_back_later(self, receipts: Sequence[SqsReceipt]) -> None:
        if receipts:
            self._run_in_background(hand_back_all(self._mailbox.name, receipts))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, poll: asyncio.Task[list[SqsReceipt]]) -> None:
        try:
            receipts = await poll
        except FAILURES:
            return
        await hand_back_all(self._mailbox.name, receipts)
