"""Batch operations on mailboxes: cheaper than single ones, with the same semantics.

A mailbox may implement `send_all`, `reply_all` and `acknowledge_all`; otherwise the single operations are called. It
may also search its requests by reply address (`asked_from`) and list its workers (`announce`, `announced`, `workers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairtrial.errors import LeaseLostError, MailboxConnectionError
from fairtrial.mailbox.protocol import Mailbox, Message

ANNOUNCEMENT_SECONDS = 15.0
"""How long the announcement of a worker is valid: three times the interval at which workers announce themselves."""


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """A worker of a mailbox.

    Attributes:
        name: The name that it announced, or the one it receives under.
        alive: False if its announcements have stopped: it was killed, or lost its connection.
        silent_seconds: The time since it was last heard of.
        in_flight: The number of messages that it holds.
        leased_seconds: The time after which these messages are delivered again, unless their leases are renewed.
    """

    name: str
    alive: bool
    silent_seconds: float
    in_flight: int = 0
    leased_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Reader:
    """A process that receives from a mailbox: host, process id, number of leases, time of the last activity.

    `leased_seconds` is the time after which all its leases have expired unless they are renewed.
    """

    name: str
    in_flight: int
    idle_seconds: float
    leased_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Readers:
    """The processes that receive from a mailbox, and the age of the oldest message in flight; None if there is none."""

    readers: tuple[Reader, ...]
    oldest_seconds: float | None


async def send_all(mailbox: Mailbox[Any], bodies: Sequence[Any], *, reply_to: str | Mailbox[Any] | None = None) -> None:
    """Send all bodies.

    Raises:
        MailboxError: not all of them were sent; some may have been.
    """
    offered = getattr(mailbox, "send_all", None)
    if offered is not None:
        await offered(bodies, reply_to=reply_to)
    else:
        await asyncio.gather(*(mailbox.send(body, reply_to=reply_to) for body in bodies))


async def reply_all(mailbox: Mailbox[Any], replies: Sequence[tuple[Message[Any], Any]]) -> None:
    """Send the reply to each message of this mailbox.

    Raises:
        MailboxError: not all of them were sent; some may have been.
    """
    offered = getattr(mailbox, "reply_all", None)
    if offered is not None:
        await offered(replies)
    else:
        await asyncio.gather(*(message.reply(body) for message, body in replies))


async def acknowledge_all(mailbox: Mailbox[Any], messages: Sequence[Message[Any]]) -> Sequence[bool]:
    """Acknowledge messages of this mailbox; False for those whose lease was lost.

    Raises:
        MailboxConnectionError: their state is unknown; retry.
    """
    offered = getattr(mailbox, "acknowledge_all", None)
    if offered is None:
        return await asyncio.gather(*map(_acknowledged, messages))
    for message in messages:
        message.settled = True  # Set before sending: a concurrent renewal must not report the lease as lost.
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
    """Return whether a message in this mailbox has this reply address; None if the mailbox cannot tell."""
    offered = getattr(mailbox, "asked_from", None)
    if offered is None:
        return None
    found: bool = await offered(address)
    return found


async def announce(mailbox: Mailbox[Any], worker: str, fingerprint: str, seconds: float) -> None:
    """Announce for this many seconds that a worker with this fingerprint serves the mailbox; 0 withdraws it.

    Does nothing if the mailbox does not support announcements.
    """
    offered = getattr(mailbox, "announce", None)
    if offered is not None:
        await offered(worker, fingerprint, seconds)


async def announced(mailbox: Mailbox[Any]) -> Sequence[str] | None:
    """Return the fingerprint of each worker of this mailbox, empty if it accepts any code; None if unsupported."""
    offered = getattr(mailbox, "announced", None)
    if offered is None:
        return None
    fingerprints: Sequence[str] = await offered()
    return fingerprints


async def workers(mailbox: Mailbox[Any]) -> Sequence[ServingWorker]:
    """Return the workers of this mailbox, including lost ones; empty if the mailbox does not support this."""
    offered = getattr(mailbox, "workers", None)
    if offered is None:
        return ()
    found: Sequence[ServingWorker] = await offered()
    return found
