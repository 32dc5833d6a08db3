"""Settles one delivery from SQS, and renews its lease from a thread.

SQS accepts a delete with an old receipt and does nothing, so our own clock decides whether a lease is lost.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxError
from fairtrial.mailbox.protocol import Renewer
from fairtrial.mailbox.sqs.batches import MAX_ENTRIES
from fairtrial.mailbox.sqs.connection import SqsConnection
from fairtrial.mailbox.sqs.errors import FAILURES, entry_error, is_lost_lease, translated
from fairtrial.mailbox.sqs.wire_message import WireMessage

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
