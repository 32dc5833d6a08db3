"""The mailbox protocol: messages with leases, delivered at least once.

    send ──> waiting ──receive──> in flight ──acknowledge──> gone
                ^                    │ │
                │<── nack, or the lease ran out
                │                    │ └──dead_letter──> dead letters ──retry──> waiting
                └── delayed <──nack(seconds)

A received message is leased until its lease expires. Settling it later raises `LeaseLostError`, because it may have
been redelivered. An acknowledged message is never redelivered.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, runtime_checkable

from fairtrial.errors import ConfigurationError, MailboxConnectionError
from fairtrial.mailbox.dead_letters import DeadLetters

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")
MAX_SECONDS: Final = 365 * 24 * 3600.0
"""The longest lease and delay: a year."""


def validate_name(name: str) -> str:
    """Return the name if it is valid: it becomes part of keys on a server, and a reply address."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            "a mailbox name must have 1 to 200 letters, digits or any of _ . : - and start with a letter or digit "
            f"(got {name[:200]!r})"
        )
    return name


def validate_receive(max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> None:
    """Raise `ConfigurationError` if arguments of `receive` are invalid."""
    if max_messages < 1:
        raise ConfigurationError(f"max_messages must be at least 1 (got {max_messages})")
    if not 0 < visibility_timeout <= MAX_SECONDS:
        range_of = "more than 0 s and at most a year"
        raise ConfigurationError(f"visibility_timeout must be {range_of} (got {visibility_timeout})")
    if not 0 <= wait_time_seconds <= MAX_SECONDS:
        raise ConfigurationError(f"wait_time_seconds must be at least 0 (got {wait_time_seconds})")


def validate_delay(seconds: float) -> float:
    """Return the delay of a nack if it is valid."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise ConfigurationError(f"the delay of a message must be from 0 s to a year (got {seconds})")
    return seconds


def validate_lease(seconds: float) -> float:
    """Return the duration of a lease if it is valid."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigurationError(f"a lease must be more than 0 s and at most a year (got {seconds})")
    return seconds


@dataclass(frozen=True, slots=True)
class MailboxDepth:
    """The number of messages by state."""

    waiting: int
    delayed: int
    in_flight: int
    dead: int


class Renewer(Protocol):
    """Renews leases from any thread, independently of the event loop."""

    def renew(self, receipts: Sequence[Any], seconds: float) -> Sequence[bool]:
        """Renew each lease for `seconds` from now; False for those that are lost.

        Raises:
            MailboxConnectionError: their state is unknown; retry.
        """
        ...


class Receipt(Protocol):
    """The handle of one delivery, with which it is settled."""

    @property
    def renewer(self) -> Renewer:
        """The renewer for this lease and others of the same mailbox."""
        ...

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        ...

    async def nack(self, delay: float, *, counted: bool) -> None:
        """Return the message after `delay` seconds, with or without counting this delivery."""
        ...

    async def extend(self, seconds: float) -> None:
        """See `Message.extend_visibility`."""
        ...

    async def dead_letter(self, reason: str, error: str) -> None:
        """See `Message.dead_letter`."""
        ...

    async def reply(self, address: str | None, body: Any) -> str:
        """See `Message.reply`."""
        ...


class Message[T]:
    """One delivery of a message.

    Attributes:
        id: The id of the message, the same in every delivery.
        body: The body.
        delivery_count: The number of this delivery, from 1.
        expiries: The number of earlier deliveries that ended with an expired lease: a sign of a message that crashes
            its workers, but also of other messages of these workers.
        reply_to: The name of the mailbox for the reply.
        waited_seconds: How long it waited for this delivery; None if the mailbox cannot tell.
        receipt: The handle of this delivery, for `LeaseExtender` and other code that renews leases.
        settled: Whether it was settled or is about to be, so that its lease need not be renewed.
    """

    __slots__ = ("body", "delivery_count", "expiries", "id", "receipt", "reply_to", "settled", "waited_seconds")

    def __init__(
        self,
        id: str,
        body: T,
        receipt: Receipt,
        *,
        delivery_count: int = 1,
        expiries: int = 0,
        reply_to: str | None = None,
        waited_seconds: float | None = None,
    ) -> None:
        self.id = id
        self.waited_seconds = waited_seconds
        self.body = body
        self.receipt = receipt
        self.delivery_count = delivery_count
        self.expiries = expiries
        self.reply_to = reply_to
        self.settled = False

    def __repr__(self) -> str:
        return f"Message(id={self.id!r}, delivery_count={self.delivery_count}, reply_to={self.reply_to!r})"

    async def _settle(self, call: Awaitable[None]) -> None:
        self.settled = True  # Set before sending: a concurrent renewal must not report the lease as lost.
        try:
            await call
        except MailboxConnectionError:
            self.settled = False
            raise

    async def acknowledge(self) -> None:
        """Confirm that the work is done and delete the message.

        Raises:
            LeaseLostError: the lease of the message was lost.
        """
        await self._settle(self.receipt.acknowledge())

    async def nack(self, visibility_timeout: float = 0) -> None:
        """Return the message, to be redelivered after `visibility_timeout` seconds.

        Raises:
            LeaseLostError: the lease of the message was lost.
        """
        await self._settle(self.receipt.nack(validate_delay(visibility_timeout), counted=True))

    async def hand_back(self, visibility_timeout: float = 0) -> None:
        """Return the message without counting this delivery, as a worker does with work it did not start.

        Args:
            visibility_timeout: Seconds until it may be redelivered.

        Raises:
            LeaseLostError: the lease of the message was lost.
        """
        await self._settle(self.receipt.nack(validate_delay(visibility_timeout), counted=False))

    async def extend_visibility(self, seconds: float) -> None:
        """Renew the lease for `seconds` from now.

        Raises:
            LeaseLostError: the lease of the message was lost.
        """
        await self.receipt.extend(validate_lease(seconds))

    async def dead_letter(self, reason: str, *, error: str = "") -> None:
        """Make the message a dead letter: it is not delivered again unless it is retried.

        Args:
            reason: The reason, for people.
            error: The type of the error, for programs.

        Raises:
            LeaseLostError: the lease of the message was lost.
        """
        await self._settle(self.receipt.dead_letter(reason, error))

    async def reply(self, body: Any) -> str:
        """Send a reply to `reply_to`; returns its id. A reply never creates a mailbox.

        Raises:
            ReplyNotAvailableError: there is no reply address, it is unknown, or its mailbox has been deleted.
        """
        return await self.receipt.reply(self.reply_to, body)


@runtime_checkable
class Mailbox[T](Protocol):
    """A queue of messages with leases, delivered at least once and in no particular order.

    `fairtrial.testing.mailbox_suite` has the tests that an implementation must pass.
    """

    @property
    def name(self) -> str:
        """The name, which is also the reply address."""
        ...

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters."""
        ...

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Send a message; returns its id when the message is stored."""
        ...

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[Message[T]]:
        """Receive up to `max_messages`, each with a lease of `visibility_timeout` seconds.

        Waits up to `wait_time_seconds` for the first one, then returns those available; empty if there are none.
        """
        ...

    async def approximate_count(self) -> int:
        """Return the number of messages that have not been settled: waiting, delayed and in flight."""
        ...

    async def depth(self) -> MailboxDepth:
        """Return the number of messages by state."""
        ...

    async def purge(self) -> int:
        """Remove all messages that are waiting, delayed or in flight; returns their number. Dead letters stay."""
        ...

    async def close(self) -> None:
        """Return messages that were received and not handed out, and close connections. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...
