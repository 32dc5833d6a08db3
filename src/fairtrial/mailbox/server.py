"""What mailboxes on servers share: many messages at once, reads in the background, settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, Self

from typing_extensions import TypeVar

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.errors import (
    BodyError,
    CodecError,
    ConfigurationError,
    LeaseLostError,
    MailboxClosedError,
    MailboxConnectionError,
    MailboxError,
    NewerFormatError,
    ReplyNotAvailableError,
)
from fairtrial.mailbox.body import NEWER_FORMAT_DELAY, ClaimCheck, check_body_type, decode_body, unseal
from fairtrial.mailbox.protocol import (
    CompositeResolver,
    Mailbox,
    MailboxFactory,
    MailboxResolver,
    Message,
    Receipt,
    validate_name,
)

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


T = TypeVar("T", default=Any)  # A mailbox without a body type carries any JSON.


class ServerConnection:
    """The base of connections that mailboxes share, which belong to one event loop."""

    server: ClassVar[str]
    """The server's name in messages."""

    _closed: bool
    _loop: asyncio.AbstractEventLoop | None

    async def close(self) -> None:
        """Close the connection."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def check_loop(self) -> None:
        """Raise `MailboxError` after `close`, or in another event loop than the first."""
        if self._closed:
            raise MailboxClosedError(f"the connection to {self.server} is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise MailboxError(
                f"the connection to {self.server} belongs to the event loop in which it was first used: create another"
            )


class ServerMailbox(Generic[T]):
    """The base of mailboxes on a server. Each sets what is declared here before it is used."""

    server: ClassVar[str]
    """The server's name in messages."""

    name: str
    body_type: type[Any]
    _closed: bool
    _resolver: MailboxResolver | None
    _neighbours: CompositeResolver | None = None

    async def open(self, *, again: bool = False) -> Any:
        """Create the mailbox if it does not exist."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the mailbox."""
        raise NotImplementedError

    def _factory(self) -> MailboxFactory:
        """Return what makes the mailboxes of reply addresses, on the same server."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def check_open(self) -> None:
        """Raise `MailboxClosedError` after `close`."""
        if self._closed:
            raise MailboxClosedError(f"mailbox {self.name} is closed")

    def bind_body_type(self, kind: type[Any]) -> None:
        """Read bodies as `kind`, unless they are read as another type: then raise `ConfigurationError`."""
        if self.body_type is object:
            self.body_type = kind
        check_body_type(self.name, self.body_type, kind)

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        self.check_open()
        if address is None:
            raise ReplyNotAvailableError(f"message {message_id} of {self.name} has no reply address")
        try:
            return await self._resolved(address).send(body)
        except MailboxClosedError as error:
            raise ReplyNotAvailableError(str(error)) from None

    async def reply_all(self, replies: Sequence[tuple[Message[T], Any]]) -> None:
        """Send many messages of this mailbox their answers."""
        addresses: dict[str, list[Any]] = {}
        for message, body in replies:
            if message.reply_to is None:
                raise ReplyNotAvailableError(f"message {message.id} of {self.name} has no reply address")
            addresses.setdefault(message.reply_to, []).append(body)
        for address, bodies in addresses.items():
            try:
                await send_all(self._resolved(address), bodies)
            except MailboxClosedError as error:
                raise ReplyNotAvailableError(str(error)) from None

    def _resolved(self, address: str) -> Mailbox[Any]:
        if self._resolver is not None:
            return self._resolver.resolve(address)
        if self._neighbours is None:
            self._neighbours = CompositeResolver(factory=self._factory())
        return self._neighbours.resolve(address)

    async def _address(self, reply_to: str | Mailbox[Any]) -> str:
        """Return the reply address of a mailbox, which is opened: a reply never creates one."""
        if isinstance(reply_to, str):
            return validate_name(reply_to)
        if isinstance(reply_to, ServerMailbox) and reply_to.server == self.server:
            await reply_to.open()
        elif self._resolver is None:
            raise ConfigurationError(
                f"reply_to of a message on {self.server} must be a mailbox on {self.server} or a name "
                f"(got {reply_to!r}): the worker that replies may be another process"
            )
        return reply_to.name
