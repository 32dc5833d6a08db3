"""Many at once, for those who have many at hand: cheaper than one by one, with the same meaning.

A mailbox may offer `send_all`, `reply_all` and `acknowledge_all`; with one that does not, each is asked for by itself.
It may also tell what is asked for (`asked_from`) and who its workers are (`announce`, `announced`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fairtrial.errors import LeaseLostError, MailboxConnectionError
from fairtrial.mailbox.protocol import Mailbox, Message


async def send_all(mailbox: Mailbox[Any], bodies: Sequence[Any], *, reply_to: str | Mailbox[Any] | None = None) -> None:
    """Send all of them.

    Raises:
        MailboxError: not all of them were sent; some may have been.
    """
    offered = getattr(mailbox, "send_all", None)
    if offered is not None:
        await offered(bodies, reply_to=reply_to)
    else:
        await asyncio.gather(*(mailbox.send(body, reply_to=reply_to) for body in bodies))


async def reply_all(mailbox: Mailbox[Any], replies: Sequence[tuple[Message[Any], Any]]) -> None:
    """Send each message of this mailbox its answer.

    Raises:
        MailboxError: not all of them were sent; some may have been.
    """
    offered = getattr(mailbox, "reply_all", None)
    if offered is not None:
        await offered(replies)
    else:
        await asyncio.gather(*(message.reply(body) for message, body in replies))


async def acknowledge_all(mailbox: Mailbox[Any], messages: Sequence[Message[Any]]) -> Sequence[bool]:
    """Acknowledge messages of this mailbox; False for those that were not ours any more.

    Raises:
        MailboxConnectionError: nothing is known about them; try again soon.
    """
    offered = getattr(mailbox, "acknowledge_all", None)
    if offered is None:
        return await asyncio.gather(*map(_acknowledged, messages))
    for message in messages:
        message.settled = True  # Before it leaves: a renewal that crosses it must not take the lease for lost.
    try:
        kept: Sequence[bool] = await offered(messages)
    except MailboxConnectionError:
        for message in messages:
            message.settled = False
        raise
    return kept


async def _acknowledged(message: Message[Any]) -> bool:
    try:
        await message.acknowledge()
    except LeaseLostError:
        return False
    return True


async def asked_from(mailbox: Mailbox[Any], address: str) -> bool | None:
    """Whether anything in this mailbox asks for its reply at an address; None when the mailbox cannot tell."""
    offered = getattr(mailbox, "asked_from", None)
    if offered is None:
        return None
    found: bool = await offered(address)
    return found


async def announce(mailbox: Mailbox[Any], worker: str, fingerprint: str, seconds: float) -> None:
    """Say for so many seconds that a worker serves this mailbox, and with which code; 0 seconds withdraw it.

    A mailbox that keeps no such list is left alone.
    """
    offered = getattr(mailbox, "announce", None)
    if offered is not None:
        await offered(worker, fingerprint, seconds)


async def announced(mailbox: Mailbox[Any]) -> Sequence[str] | None:
    """The fingerprint of each worker of this mailbox, empty for one that accepts any; None when it cannot tell."""
    offered = getattr(mailbox, "announced", None)
    if offered is None:
        return None
    fingerprints: Sequence[str] = await offered()
    return fingerprints
