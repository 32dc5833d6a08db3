"""What a mailbox is: messages with leases, delivered at least once.

    send ──> waiting ──receive──> in flight ──acknowledge──> gone
                ^                    │ │
                │<── nack, or the lease ran out
                │                    │ └──dead_letter──> dead letters ──retry──> waiting
                └── delayed <──nack(seconds)

A received message is ours until its lease runs out. Whoever settles it later finds that it is lost
(`LeaseLostError`): it may be with someone else by then. What has been acknowledged never comes back.
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
"""No lease and no delay is longer than a year."""


def checked_name(name: str) -> str:
    """The name, if it is one: it becomes part of keys on a server and travels as a reply address."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            "a mailbox name is 1 to 200 letters, digits and any of _ . : - and starts with a letter or digit, "
            f"not {name[:200]!r}"
        )
    return name


def checked_receive(max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> None:
    """Refuse arguments of `receive` that cannot work."""
    if max_messages < 1:
        raise ConfigurationError(f"max_messages is at least 1, not {max_messages}")
    if not 0 < visibility_timeout <= MAX_SECONDS:
        raise ConfigurationError(f"visibility_timeout is more than 0 seconds and at most a year: {visibility_timeout}")
    if not 0 <= wait_time_seconds <= MAX_SECONDS:
        raise ConfigurationError(f"wait_time_seconds is 0 or more: {wait_time_seconds}")


def checked_delay(seconds: float) -> float:
    """The delay of a nack, if it can be one."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise ConfigurationError(f"a message can be delayed by 0 seconds to a year, not {seconds}")
    return seconds


def checked_lease(seconds: float) -> float:
    """The length of a lease, if it can be one."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigurationError(f"a lease is more than 0 seconds and at most a year, not {seconds}")
    return seconds


@dataclass(frozen=True, slots=True)
class MailboxDepth:
    """How many messages are where."""

    waiting: int
    delayed: int
    in_flight: int
    dead: int


class Renewer(Protocol):
    """Renews leases from any thread, so that a busy event loop does not lose them."""

    def renew(self, receipts: Sequence[Any], seconds: float) -> Sequence[bool]:
        """Make each lease last `seconds` from now; False for those that are lost.

        Raises:
            MailboxConnectionError: nothing is known about them; try again soon.
        """
        ...


class Receipt(Protocol):
    """What a mailbox hands out with a message: the right to settle this one delivery of it."""

    @property
    def renewer(self) -> Renewer:
        """Renews this lease and its neighbours."""
        ...

    async def acknowledge(self) -> None:
        """See `Message.acknowledge`."""
        ...

    async def nack(self, delay: float, *, counted: bool) -> None:
        """Give it back: after `delay` seconds, as one more delivery or as if it had never been delivered."""
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
        id: The message's identity, the same in every delivery.
        body: What was sent.
        delivery_count: Which delivery this is, from 1.
        expiries: How many earlier deliveries ended in silence, by a lease that ran out: the mark of a message that
            kills its workers, and of its innocent neighbours.
        reply_to: The name of the mailbox that wants the answer.
        waited_seconds: How long it waited for this delivery; None where the mailbox cannot tell.
        receipt: The right to settle this delivery; for `LeaseExtender` and other code that renews leases.
        settled: Whether it was acknowledged or given away, or is about to be: nothing is left to renew.
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
        self.settled = True  # Before it leaves: a renewal that crosses it must not take the lease for lost.
        try:
            await call
        except MailboxConnectionError:
            self.settled = False
            raise

    async def acknowledge(self) -> None:
        """Say that the work is done: the message is gone for good.

        Raises:
            LeaseLostError: the message is not ours any more.
        """
        await self._settle(self.receipt.acknowledge())

    async def nack(self, visibility_timeout: float = 0) -> None:
        """Give the message back, to be delivered again after `visibility_timeout` seconds.

        Raises:
            LeaseLostError: the message is not ours any more.
        """
        await self._settle(self.receipt.nack(checked_delay(visibility_timeout), counted=True))

    async def hand_back(self, visibility_timeout: float = 0) -> None:
        """Give the message back as if it had never been delivered: what a worker does with work it did not start.

        Args:
            visibility_timeout: Seconds until it may be delivered again.

        Raises:
            LeaseLostError: the message is not ours any more.
        """
        await self._settle(self.receipt.nack(checked_delay(visibility_timeout), counted=False))

    async def extend_visibility(self, seconds: float) -> None:
        """Make the lease last `seconds` from now.

        Raises:
            LeaseLostError: the message is not ours any more.
        """
        await self.receipt.extend(checked_lease(seconds))

    async def dead_letter(self, reason: str, *, error: str = "") -> None:
        """Set the message aside: it is not delivered again unless someone retries it.

        Args:
            reason: Why, for a person.
            error: The type of the error behind it, for a machine.

        Raises:
            LeaseLostError: the message is not ours any more.
        """
        await self._settle(self.receipt.dead_letter(reason, error))

    async def reply(self, body: Any) -> str:
        """Send an answer to `reply_to`; returns its id. A reply never creates a mailbox.

        Raises:
            ReplyNotAvailableError: no address, one that nobody knows, or a mailbox that is gone.
        """
        return await self.receipt.reply(self.reply_to, body)


@runtime_checkable
class Mailbox[T](Protocol):
    """Messages with leases, delivered at least once and in no particular order.

    `fairtrial.testing.mailbox_suite` holds the tests an implementation must pass.
    """

    @property
    def name(self) -> str:
        """Where to send to, as a reply address."""
        ...

    @property
    def dead_letters(self) -> DeadLetters:
        """The messages that were set aside."""
        ...

    async def send(self, body: T, *, reply_to: str | Mailbox[Any] | None = None) -> str:
        """Put a message in; returns its id. When this returns, the message is in."""
        ...

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[Message[T]]:
        """Take up to `max_messages`, each on a lease of `visibility_timeout` seconds.

        Waits up to `wait_time_seconds` for the first one, then returns what there is; nothing if there was none.
        """
        ...

    async def approximate_count(self) -> int:
        """How many messages have not been settled: waiting, delayed and in flight."""
        ...

    async def depth(self) -> MailboxDepth:
        """How many messages are where."""
        ...

    async def purge(self) -> int:
        """Remove everything that is waiting, delayed or in flight; returns how many. Dead letters stay."""
        ...

    async def close(self) -> None:
        """Give back what was received and not handed out, and let go of connections. Closing twice is harmless."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...
