"""What mailboxes on servers share: connections, settings, replies, workers, many messages at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

from typing_extensions import TypeVar

from fairtrial import errors
from fairtrial.mailbox.body import check_body_type, encode_body, queue_key, readable, seal
from fairtrial.mailbox.protocol import CompositeResolver, Mailbox, MailboxResolver, Message, validate_name

if TYPE_CHECKING:
    from fairtrial.mailbox.receive import BackgroundReads

_UNANNOUNCED_SECONDS = 45.0  # A process that never announced itself is lost after this time; a receive may last 20 s.

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

    def serving(self, announced: Iterable[tuple[str, str, float]]) -> Sequence[ServingWorker]:
        """Return the workers among them, from their announcements: name, reader and the seconds until it expires.

        A worker is lost when its announcement has expired. A process that never announced itself is lost when it holds
        leases and has not received for a while.
        """
        readers = {reader.name: reader for reader in self.readers}
        workers: list[ServingWorker] = []
        for name, token, left in announced:
            reader = readers.pop(token, Reader(token, 0, float("inf")))
            silent = min(reader.idle_seconds, max(0.0, ANNOUNCEMENT_SECONDS - left))
            workers.append(ServingWorker(name, left > 0, silent, reader.in_flight, reader.leased_seconds))
        for name, reader in readers.items():
            alive = reader.idle_seconds < _UNANNOUNCED_SECONDS
            if alive or reader.in_flight:
                workers.append(ServingWorker(name, alive, reader.idle_seconds, reader.in_flight, reader.leased_seconds))
        return sorted(workers, key=lambda worker: (not worker.alive, worker.name))


async def send_all(mailbox: Mailbox[Any], bodies: Sequence[Any], *, reply_to: str | Mailbox[Any] | None = None) -> None:
    """Send all bodies.

    Raises:
        MailboxError: not all of them were sent; some may have been.
    """
    if hasattr(mailbox, "send_all"):
        await mailbox.send_all(bodies, reply_to=reply_to)
    else:
        await asyncio.gather(*(mailbox.send(body, reply_to=reply_to) for body in bodies))


async def reply_all(mailbox: Mailbox[Any], replies: Sequence[tuple[Message[Any], Any]]) -> None:
    """Send the reply to each message of this mailbox.

    Raises:
        MailboxError: not all of them were sent; some may have been.
    """
    if hasattr(mailbox, "reply_all"):
        await mailbox.reply_all(replies)
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
    except errors.MailboxConnectionError:
        for message in messages:
            message.settled = False
        raise
    return kept


async def _acknowledged(message: Message[Any]) -> bool:
    try:
        await message.acknowledge()
    except errors.LeaseLostError:
        return False
    return True


async def asked_from(mailbox: Mailbox[Any], address: str) -> bool | None:
    """Return whether a message in this mailbox has this reply address; None if the mailbox cannot tell."""
    return await mailbox.asked_from(address) if hasattr(mailbox, "asked_from") else None


async def announce(mailbox: Mailbox[Any], worker: str, fingerprint: str, seconds: float) -> None:
    """Announce for this many seconds that a worker with this fingerprint serves the mailbox; 0 withdraws it.

    Does nothing if the mailbox does not support announcements.
    """
    if hasattr(mailbox, "announce"):
        await mailbox.announce(worker, fingerprint, seconds)


async def announced(mailbox: Mailbox[Any]) -> Sequence[str] | None:
    """Return the fingerprint of each worker of this mailbox, empty if it accepts any code; None if unsupported."""
    return await mailbox.announced() if hasattr(mailbox, "announced") else None


async def workers(mailbox: Mailbox[Any]) -> Sequence[ServingWorker]:
    """Return the workers of this mailbox, including lost ones; empty if the mailbox does not support this."""
    return await mailbox.workers() if hasattr(mailbox, "workers") else ()


T = TypeVar("T", default=Any)  # A mailbox without a body type carries any JSON.


class ServerConnection:
    """The base of connections that mailboxes share, which belong to one event loop."""

    server: ClassVar[str]
    """The server's name in messages."""
    required: ClassVar[str]
    """What a mailbox without a connection says."""

    def __init__(self, address: Any) -> None:
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of(cls, source: Any) -> Self:
        """Return the connection, or a new one to an address."""
        if source is None:
            raise errors.ConfigurationError(cls.required)
        return source if isinstance(source, cls) else cls(source)

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
            raise errors.MailboxClosedError(f"the connection to {self.server} is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise errors.MailboxError(
                f"the connection to {self.server} belongs to the event loop in which it was first used: create another"
            )


class ServerMailbox(Generic[T]):
    """The base of mailboxes on a server."""

    server: ClassVar[str]
    """The server's name in messages."""
    large_bodies: ClassVar[str] = "give the mailbox a claim check, which keeps large bodies in a shared folder"
    """What the error of a body that is too large advises."""

    connection_type: ClassVar[type[ServerConnection]]
    connection: Any
    _receiver: BackgroundReads[T]
    _neighbours: CompositeResolver | None = None

    def __init__(
        self,
        name: str,
        body_type: type[Any] = object,
        connection: Any = None,
        *,
        reply_resolver: MailboxResolver | None = None,
        claim_check: Any = None,
        max_body_bytes: int = 0,
        ttl_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        if ttl_seconds is not None and ttl_seconds < 1:
            raise errors.ConfigurationError(f"ttl_seconds must be at least 1 (got {ttl_seconds})")
        self.name = validate_name(name)
        self.body_type: type[Any] = body_type
        self.claim_check = claim_check
        self.max_body_bytes = max_body_bytes
        self.key = queue_key()
        self.connection = self.connection_type.of(connection)
        self._owns_connection = self.connection is not connection
        self._resolver = reply_resolver
        self._ttl = ttl_seconds
        self._create = create
        self._refresher: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.connection!r})"

    async def open(self, *, again: bool = False) -> Any:
        """Create the mailbox if it does not exist. Receiving does it too; a reply address must be opened first."""
        raise NotImplementedError

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[Message[T]]:
        """Receive up to `max_messages`; see `Mailbox.receive`. A cancelled receive loses nothing."""
        await self.open()
        return await self._receiver.receive(max_messages, visibility_timeout, wait_time_seconds)

    def renew(self, receipts: Sequence[Any], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost. May be called from any thread."""
        raise NotImplementedError

    async def close(self) -> None:
        """Return messages that were received and not handed out, and close connections. Idempotent."""
        if self._closed:
            return
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.wait([self._refresher])
        await self._receiver.close()
        try:
            await self._retire()
        except errors.MailboxError:
            pass  # The server is unavailable: what this object has there expires.
        self._closed = True
        if self._owns_connection:
            await self.connection.close()

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
            raise errors.MailboxClosedError(f"mailbox {self.name} is closed")

    def bind_body_type(self, kind: type[Any]) -> None:
        """Read bodies as `kind`, unless they are read as another type: then raise `ConfigurationError`."""
        if self.body_type is object:
            self.body_type = kind
        check_body_type(self.name, self.body_type, kind)

    def for_replies[R](self, name: str, body_type: type[R], ttl_seconds: float) -> Mailbox[R]:
        """Create a mailbox for replies to messages of this one, on the same server, which expires with its owner."""
        kind: Any = type(self)
        made: Mailbox[R] = kind(
            name,
            body_type,
            self.connection,
            claim_check=self.claim_check,
            max_body_bytes=self.max_body_bytes,
            ttl_seconds=ttl_seconds,
        )
        return made

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        self.check_open()
        if address is None:
            raise errors.ReplyNotAvailableError(f"message {message_id} of {self.name} has no reply address")
        try:
            return await self._resolved(address).send(body)
        except errors.MailboxClosedError as error:
            raise errors.ReplyNotAvailableError(str(error)) from None

    async def reply_all(self, replies: Sequence[tuple[Message[T], Any]]) -> None:
        """Send many messages of this mailbox their answers."""
        addresses: dict[str, list[Any]] = {}
        for message, body in replies:
            if message.reply_to is None:
                raise errors.ReplyNotAvailableError(f"message {message.id} of {self.name} has no reply address")
            addresses.setdefault(message.reply_to, []).append(body)
        for address, bodies in addresses.items():
            try:
                await send_all(self._resolved(address), bodies)
            except errors.MailboxClosedError as error:
                raise errors.ReplyNotAvailableError(str(error)) from None

    async def claimed_body(self, claim: str) -> bytes:
        """Return a body from the claim check.

        Raises:
            BodyError: the body is missing or damaged, or there is no claim check.
            OSError: the claim check cannot be read at present.
        """
        if self.claim_check is None:
            raise errors.BodyError("it is in a claim check, and this mailbox has none")
        body: bytes = await self.claim_check.fetch(claim)
        return body

    async def display_text(self, data: bytes, *, claimed: bool) -> str:
        """Return a body as text for a dead letter, or the hash by which the claim check does not find it."""
        if claimed:
            claim = data.decode("utf-8", "replace")
            try:
                data = await self.claimed_body(claim)
            except (errors.BodyError, OSError):
                return f"sha256:{claim}"
        return readable(data).decode("utf-8", "replace")

    async def _retire(self) -> None:
        """Remove what this object has on the server."""
        raise NotImplementedError

    async def _refresh(self, ttl: float) -> Any:
        """Let the mailbox expire after this time."""
        raise NotImplementedError

    def _keep_refreshed(self) -> None:
        if self._ttl is not None and self._refresher is None:
            self._refresher = asyncio.get_running_loop().create_task(self._refresh_always(self._ttl))

    async def _refresh_always(self, ttl: float) -> None:
        while True:
            await asyncio.sleep(ttl / 3)
            try:
                await self._refresh(ttl)
            except errors.MailboxError:
                pass  # The next receive recreates the mailbox if it was deleted.

    async def _pack(self, body: Any, address: str) -> tuple[bool, bytes]:
        """Return whether the body of a message is in the claim check, and the bytes to send: the body or its hash."""
        try:
            data = seal(encode_body(body), self.key, self.name, address)
        except errors.CodecError as error:
            raise errors.BodyError(f"the body cannot be sent to {self.name}: {error}") from None
        if self.claim_check is not None and len(data) > min(self.max_body_bytes, self.claim_check.threshold):
            return True, (await self.claim_check.keep(data)).encode()
        if len(data) > self.max_body_bytes:
            raise errors.MessageTooLargeError(
                f"{self.name}: the body must have at most {self.max_body_bytes} bytes (got {len(data)}); "
                f"{self.large_bodies}"
            )
        return False, data

    def _resolved(self, address: str) -> Mailbox[Any]:
        if self._resolver is not None:
            return self._resolver.resolve(address)
        if self._neighbours is None:
            factory: Any = ServerMailboxFactory(type(self), self.connection, claim_check=self.claim_check)
            self._neighbours = CompositeResolver(factory=factory)
        return self._neighbours.resolve(address)

    async def _address(self, reply_to: str | Mailbox[Any] | None) -> str:
        """Return the reply address of a mailbox, which is opened: a reply never creates one."""
        if reply_to is None:
            return ""
        if isinstance(reply_to, str):
            return validate_name(reply_to)
        if isinstance(reply_to, ServerMailbox) and reply_to.server == self.server:
            await reply_to.open()
        elif self._resolver is None:
            raise errors.ConfigurationError(
                f"reply_to of a message on {self.server} must be a mailbox on {self.server} or a name "
                f"(got {reply_to!r}): the worker that replies may be another process"
            )
        return reply_to.name


class ServerMailboxFactory[M: ServerMailbox[Any]]:
    """Creates objects for sending to mailboxes on one server. They never create a mailbox.

    Args:
        mailbox_type: The class of the mailboxes.
        connection: A connection, or the address of a server.
        body_type: The type of bodies, for receiving.
        claim_check: The store for large bodies.
    """

    def __init__(
        self, mailbox_type: type[M], connection: Any, body_type: type[Any] = object, *, claim_check: Any = None
    ) -> None:
        self.connection = mailbox_type.connection_type.of(connection)
        self._owns_connection = self.connection is not connection
        self._mailbox_type = mailbox_type
        self._body_type = body_type
        self._claim_check = claim_check

    def create(self, name: str) -> M:
        """Return an object for sending to the mailbox with this name."""
        return self._mailbox_type(name, self._body_type, self.connection, claim_check=self._claim_check, create=False)

    async def close(self) -> None:
        """Close the connection, if it was opened here."""
        if self._owns_connection:
            await self.connection.close()
