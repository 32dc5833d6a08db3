"""Receives from queues: messages of cancelled polls are handed back, invalid messages become dead letters."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

from fairtrial.errors import BodyError, CodecError, MailboxClosedError, MailboxError, NewerFormatError
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, decode_body
from fairtrial.mailbox.protocol import Message, validate_receive
from fairtrial.mailbox.reading import hand_back_all
from fairtrial.mailbox.sealing import unseal
from fairtrial.mailbox.sqs.batches import MAX_ENTRIES
from fairtrial.mailbox.sqs.errors import FAILURES, is_gone, translated
from fairtrial.mailbox.sqs.queues import MailboxQueues
from fairtrial.mailbox.sqs.receipt import SqsReceipt, SqsSettling, whole_lease
from fairtrial.mailbox.sqs.wire_message import WireMessage

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
