"""What mailboxes on a server, and their connections, have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self

from typing_extensions import TypeVar

from fairtrial.errors import ConfigurationError, MailboxClosedError, MailboxError, ReplyNotAvailableError
from fairtrial.mailbox.body import check_body_type
from fairtrial.mailbox.bulk import send_all
from fairtrial.mailbox.protocol import Mailbox, Message, validate_name
from fairtrial.mailbox.resolver import CompositeResolver, MailboxFactory, MailboxResolver

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
