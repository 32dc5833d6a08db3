"""Reads the bodies of messages that come from a server. Messages that cannot be read never reach a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from enum import Enum
from functools import partial
from typing import Literal, Protocol

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.errors import BodyError, CodecError, MailboxError, NewerFormatError
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, decode_body
from fairtrial.mailbox.claim_check import ClaimCheck
from fairtrial.mailbox.protocol import Receipt
from fairtrial.mailbox.sealing import unseal

_log = logging.getLogger(__name__)
_MISSING_BLOB_DELAY = 5.0
RETURN_SECONDS = 5.0
"""How long returning a message is retried while its server does not answer; after that, its lease has to expire."""


class Unreadable(Enum):
    """Instead of a body: the message was settled, and there is nothing to deliver."""

    UNREADABLE = "unreadable"


UNREADABLE = Unreadable.UNREADABLE


class BodySource[T](Protocol):
    """What reading needs to know of a mailbox."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def body_type(self) -> type[T]:
        """The type of bodies."""
        ...

    @property
    def key(self) -> bytes | None:
        """The key that signs bodies; None if they are not signed."""
        ...

    @property
    def claim_check(self) -> ClaimCheck | None:
        """The store for large bodies."""
        ...

    @property
    def max_body_bytes(self) -> int:
        """The size limit of bodies on the server."""
        ...


async def read_body[T](
    mailbox: BodySource[T], receipt: Receipt, id: str, data: bytes | None, claim: bytes | None, reply_to: str
) -> T | Literal[Unreadable.UNREADABLE]:
    """Return the body of a message that was received, or settle the message if its body cannot be read.

    Args:
        mailbox: The mailbox that it comes from.
        receipt: The receipt, to settle it: as a dead letter, or for later if another worker may read it.
        id: The id of the message, for log records.
        data: The body as it was sent; None if it is in the claim check.
        claim: The hash of a body in the claim check.
        reply_to: The reply address, which is signed with the body.
    """
    try:
        if data is None or len(data) > mailbox.max_body_bytes:
            data = await _fetch(mailbox, data, claim)
        return decode_body(mailbox.body_type, unseal(data, mailbox.key, mailbox.name, reply_to))
    except NewerFormatError as error:
        # Not damaged: a worker of a newer version can read it.
        _log.warning("handing message %s of %s back to newer workers: %s", id, mailbox.name, error)
        await _settle(mailbox.name, receipt.nack(NEWER_FORMAT_DELAY, counted=False))
    except (BodyError, CodecError) as error:
        await _settle(mailbox.name, receipt.dead_letter(f"the body cannot be read: {error}", "BodyError"))
    except OSError as error:
        _log.warning("the body of message %s of %s cannot be fetched: %s", id, mailbox.name, error)
        await _settle(mailbox.name, receipt.nack(_MISSING_BLOB_DELAY, counted=False))
    except Exception as error:  # An arbitrary error of a user's validator.
        reason = f"reading the body failed: {type(error).__name__}: {error}"
        await _settle(mailbox.name, receipt.dead_letter(reason, "BodyError"))
    return UNREADABLE


async def hand_back_all(mailbox: str, receipts: Sequence[Receipt]) -> None:
    """Hand back messages that were received and not returned to a caller."""
    doing = f"handing back a message of {mailbox}"
    backs = (
        retry_while_unavailable(partial(receipt.nack, 0, counted=False), doing, _log, seconds=RETURN_SECONDS)
        for receipt in receipts
    )
    for outcome in await asyncio.gather(*backs, return_exceptions=True):
        if isinstance(outcome, BaseException):
            _log.warning("a message of %s will be redelivered when its lease expires: %s", mailbox, outcome)


async def _fetch[T](mailbox: BodySource[T], data: bytes | None, claim: bytes | None) -> bytes:
    if data is not None:
        raise BodyError(f"the body must have at most {mailbox.max_body_bytes} bytes (got {len(data)})")
    if claim is None:
        raise BodyError("the message has no body")
    if mailbox.claim_check is None:
        raise BodyError("it is in a claim check, and this mailbox has none")
    return await mailbox.claim_check.fetch(claim.decode("utf-8", "replace"))


async def _settle(mailbox: str, settling: Awaitable[None]) -> None:
    try:
        await settling
    except MailboxError as error:
        # One invalid message must not affect the others; it is redelivered when its lease expires.
        _log.warning("a message of %s could not be dead-lettered: %s", mailbox, error)
