"""What receivers of mailboxes on servers share: receipts, and reads that run to their end in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from fairtrial import errors
from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, decode_body, unseal
from fairtrial.mailbox.protocol import Message, Receipt, Renewer, validate_receive
from fairtrial.mailbox.server import ServerMailbox

_log = logging.getLogger(__name__)
_MISSING_BLOB_DELAY = 5.0
RETURN_SECONDS = 5.0
"""How long returning a message is retried while its server does not answer; after that, its lease has to expire."""


async def hand_back_all(mailbox: str, receipts: Iterable[Receipt]) -> None:
    """Hand back messages that were received and not returned to a caller."""
    doing = f"handing back a message of {mailbox}"
    backs = (
        retry_while_unavailable(partial(receipt.nack, 0, counted=False), doing, _log, seconds=RETURN_SECONDS)
        for receipt in receipts
    )
    for outcome in await asyncio.gather(*backs, return_exceptions=True):
        if isinstance(outcome, BaseException):
            _log.warning("a message of %s will be redelivered when its lease expires: %s", mailbox, outcome)


class ServerReceipt:
    """The base of the handles of deliveries."""

    __slots__ = ("mailbox", "message_id")

    mailbox: ServerMailbox[Any]
    message_id: str

    @property
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        return self.mailbox

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        return await self.mailbox.send_reply(self.message_id, address, body)

    def lost(self) -> errors.LeaseLostError:
        """Return the error for a lease that was lost."""
        return errors.LeaseLostError(
            f"the lease of message {self.message_id} of {self.mailbox.name} was lost: it expired, or the message was "
            "settled before"
        )


type Delivery = tuple[Any, Any]
"""A receipt, and what the server delivered."""
type _Interrupt = Callable[[asyncio.Task[Any]], Awaitable[None]]


class BackgroundReads[T]:
    """The base of receivers.

    A read runs to its end even if its caller is cancelled: its messages would otherwise be leased, and nobody would
    work on them. They are handed back.
    """

    def __init__(self, mailbox: ServerMailbox[Any]) -> None:
        self._mailbox = mailbox
        self._reading: dict[asyncio.Task[Sequence[Delivery]], _Interrupt | None] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._closing = False

    async def receive(self, max_messages: int, visibility: float, wait: float) -> Sequence[Message[T]]:
        """See `Mailbox.receive`."""
        validate_receive(max_messages, visibility, wait)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            self._check_open()
            messages = await self._messages(await self._look(max_messages, visibility, end - loop.time()))
            if messages or loop.time() >= end:
                return messages

    async def close(self) -> None:
        """End all reads, and hand back the messages that they and cancelled reads received."""
        self._closing = True
        await asyncio.gather(*(interrupt(reading) for reading, interrupt in self._reading.items() if interrupt))
        while self._reading or self._returning:
            await asyncio.wait({*self._reading, *self._returning})
            await asyncio.sleep(0)  # Let waiting callers end and hand back their messages.

    async def _look(self, count: int, visibility: float, wait: float) -> Sequence[Delivery]:
        """Take messages that are there, or wait for some, not necessarily for the whole time."""
        raise NotImplementedError

    async def _message(self, receipt: Any, content: Any) -> Message[T] | None:
        """Return the message of a delivery; None if it was settled because its body cannot be read."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closing:
            raise errors.MailboxClosedError(f"mailbox {self._mailbox.name} is closed")
        self._mailbox.check_open()

    async def _read(
        self, reading: Coroutine[Any, Any, Sequence[Delivery]], interrupt: _Interrupt | None = None
    ) -> Sequence[Delivery]:
        """Run one read, which `interrupt` ends early."""
        task = asyncio.ensure_future(reading)
        self._reading[task] = interrupt
        task.add_done_callback(self._reading.pop)
        try:
            # Shielded: if a read is aborted while the server answers, its messages are not redelivered until the
            # lease expires.
            deliveries = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._run_in_background(self._return(task, interrupt))
            raise
        self._hand_back_if_closing(deliveries)
        return deliveries

    async def _messages(self, deliveries: Sequence[Delivery]) -> Sequence[Message[T]]:
        self._hand_back_if_closing(deliveries)
        messages: list[Message[T]] = []
        at = 0
        try:
            for at, (receipt, content) in enumerate(deliveries):  # noqa: B007 - read when a cancellation ends the loop
                if (message := await self._message(receipt, content)) is not None:
                    messages.append(message)
        except asyncio.CancelledError:
            self._hand_back([*((message.receipt, None) for message in messages), *deliveries[at:]])
            raise
        return messages

    async def _read_message(
        self,
        receipt: Any,
        data: bytes | Awaitable[bytes],
        reply_to: str,
        *,
        delivery_count: int,
        expiries: int,
        waited_seconds: float | None,
    ) -> Message[T] | None:
        """Return a message, or settle it if its body cannot be read: as a dead letter, or for later."""
        mailbox, id = self._mailbox, receipt.message_id
        try:
            if not isinstance(data, bytes):
                data = await data
            elif len(data) > mailbox.max_body_bytes:
                raise errors.BodyError(f"the body must have at most {mailbox.max_body_bytes} bytes (got {len(data)})")
            body = decode_body(mailbox.body_type, unseal(data, mailbox.key, mailbox.name, reply_to))
        except errors.NewerFormatError as error:
            # Not damaged: a worker of a newer version can read it.
            _log.warning("handing message %s of %s back to newer workers: %s", id, mailbox.name, error)
            await self._settle(receipt.nack(NEWER_FORMAT_DELAY, counted=False))
        except (errors.BodyError, errors.CodecError) as error:
            await self._settle(receipt.dead_letter(f"the body cannot be read: {error}", "BodyError"))
        except OSError as error:
            _log.warning("the body of message %s of %s cannot be fetched: %s", id, mailbox.name, error)
            await self._settle(receipt.nack(_MISSING_BLOB_DELAY, counted=False))
        except Exception as error:  # An arbitrary error of a user's validator.
            reason = f"reading the body failed: {type(error).__name__}: {error}"
            await self._settle(receipt.dead_letter(reason, "BodyError"))
        else:
            return Message(
                id,
                body,
                receipt,
                delivery_count=delivery_count,
                expiries=expiries,
                reply_to=reply_to or None,
                waited_seconds=waited_seconds,
            )
        return None

    async def _settle(self, settling: Awaitable[None]) -> None:
        try:
            await settling
        except errors.MailboxError as error:
            # One invalid message must not affect the others; it is redelivered when its lease expires.
            _log.warning("a message of %s could not be dead-lettered: %s", self._mailbox.name, error)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, reading: asyncio.Task[Sequence[Delivery]], interrupt: _Interrupt | None) -> None:
        if interrupt is not None:
            await interrupt(reading)
        try:
            deliveries = await reading
        except (Exception, asyncio.CancelledError):
            return  # It received nothing.
        self._hand_back(deliveries)

    def _hand_back_if_closing(self, deliveries: Sequence[Delivery]) -> None:
        if self._closing:
            self._hand_back(deliveries)
            self._check_open()

    def _hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Hand back messages that were not returned to a caller."""
        if deliveries:
            self._run_in_background(hand_back_all(self._mailbox.name, [receipt for receipt, _ in deliveries]))
