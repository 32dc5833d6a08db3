"""What a mailbox is: messages, leases, replies, dead letters."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, Self, runtime_checkable

from fairtrial import errors
from fairtrial.base.backoff import backoff
from fairtrial.base.frozen import EMPTY, LruCache, first_is
from fairtrial.mailbox.body import decode_body

type Verdict = Literal["retry", "dead_letter"]
type Treatment = Literal["run", "run_isolated"]


@first_is(str)
@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that is not delivered any more.

    Attributes:
        id: The id of the dead letter.
        message_id: The id of the message.
        text: The serialized body; bytes that are not UTF-8 are replaced. Untrusted: escape it before display.
        delivery_count: The number of deliveries.
        reason: The reason, for people.
        error: The type of the error that caused it.
        reply_to: The reply address.
        died_at: The time, in seconds since the epoch, by the server's clock if there is one.
    """

    id: str
    message_id: str
    text: str
    delivery_count: int
    reason: str
    error: str = ""
    reply_to: str | None = None
    died_at: float = 0.0

    def body[T](self, kind: type[T]) -> T:
        """Return the body decoded as `kind`.

        Raises:
            BodyError: decoding fails, which may be why it is a dead letter.
        """
        try:
            return decode_body(kind, self.text.encode("utf-8", "surrogatepass"))
        except errors.CodecError as error:
            raise errors.BodyError(
                f"dead letter {self.id} is not a {getattr(kind, '__name__', kind)}: {error}"
            ) from None


class DeadLetters(Protocol):
    """The dead letters of one mailbox."""

    async def count(self) -> int:
        """Return the number of dead letters."""
        ...

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the oldest `limit` dead letters, or the next ones `after` an id."""
        ...

    async def retry(self, *ids: str) -> int:
        """Return these to the mailbox with their delivery count reset, but not `expiries`; returns their number."""
        ...

    async def drop(self, *ids: str) -> int:
        """Delete these; returns their number."""
        ...


@first_is(int)
@dataclass(frozen=True, slots=True)
class DLQPolicy:
    """When to retry, when to isolate, and when to give up.

    A worker that crashes loses the leases of all its messages, so one expired lease says little about a single message.
    After `suspect_after` expired leases a message is a suspected poison message and is executed in a child process,
    first with others, then alone; only the outcome there counts.

    Attributes:
        max_deliveries: A message that fails on this or a later delivery becomes a dead letter.
        fatal: Errors that a retry cannot fix: dead letter at once.
        transient: Errors unrelated to the message, such as an unavailable server: always retried.
        suspect_after: Number of expired leases after which a message is suspected.
        base_seconds: The delay before the second delivery; doubled each time.
        max_seconds: The longest delay.
        draw: The source of jitter: returns a number from 0 to 1.
    """

    max_deliveries: int = 5
    fatal: tuple[type[BaseException], ...] = (errors.BodyError,)
    transient: tuple[type[BaseException], ...] = (errors.MailboxError, errors.StoreUnavailableError)
    suspect_after: int = 1
    base_seconds: float = 1.0
    max_seconds: float = 300.0
    draw: Callable[[], float] = field(default=random.random, repr=False)

    def __post_init__(self) -> None:
        if self.max_deliveries < 1 or self.suspect_after < 1:
            raise errors.ConfigurationError("max_deliveries and suspect_after must be at least 1")
        if not 0 < self.base_seconds <= self.max_seconds:
            raise errors.ConfigurationError("base_seconds must be more than 0 and at most max_seconds")

    def treatment(self, expiries: int) -> Treatment:
        """Return how to execute a message after this many expired leases."""
        return "run_isolated" if expiries >= self.suspect_after else "run"

    def verdict(self, error: BaseException, delivery_count: int) -> Verdict:
        """Return what to do with a message whose `delivery_count`-th delivery ended with this error."""
        if isinstance(error, self.fatal):
            return "dead_letter"
        if isinstance(error, self.transient):
            return "retry"
        return "dead_letter" if delivery_count >= self.max_deliveries else "retry"

    def delay(self, delivery_count: int) -> float:
        """Return the seconds until the next delivery: capped exponential backoff, half of it random."""
        return backoff(delivery_count, first=self.base_seconds, longest=self.max_seconds, draw=self.draw)


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")
MAX_SECONDS: Final = 365 * 24 * 3600.0
"""The longest lease and delay: a year."""


def validate_name(name: str) -> str:
    """Return the name if it is valid: it becomes part of keys on a server, and a reply address."""
    if not _NAME.fullmatch(name):
        raise errors.ConfigurationError(
            "a mailbox name must have 1 to 200 letters, digits or any of _ . : - and start with a letter or digit "
            f"(got {name[:200]!r})"
        )
    return name


def validate_receive(max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> None:
    """Raise `ConfigurationError` if arguments of `receive` are invalid."""
    if max_messages < 1:
        raise errors.ConfigurationError(f"max_messages must be at least 1 (got {max_messages})")
    if not 0 < visibility_timeout <= MAX_SECONDS:
        range_of = "more than 0 s and at most a year"
        raise errors.ConfigurationError(f"visibility_timeout must be {range_of} (got {visibility_timeout})")
    if not 0 <= wait_time_seconds <= MAX_SECONDS:
        raise errors.ConfigurationError(f"wait_time_seconds must be at least 0 (got {wait_time_seconds})")


def validate_delay(seconds: float) -> float:
    """Return the delay of a nack if it is valid."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise errors.ConfigurationError(f"the delay of a message must be from 0 s to a year (got {seconds})")
    return seconds


def validate_lease(seconds: float) -> float:
    """Return the duration of a lease if it is valid."""
    if not 0 < seconds <= MAX_SECONDS:
        raise errors.ConfigurationError(f"a lease must be more than 0 s and at most a year (got {seconds})")
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
        except errors.MailboxConnectionError:
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


class MailboxResolver(Protocol):
    """Resolves names to mailboxes."""

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name.

        Raises:
            ReplyNotAvailableError: nobody knows it.
        """
        ...


class MailboxFactory(Protocol):
    """Creates client objects for remote mailboxes; they never create the mailbox itself."""

    def create(self, name: str) -> Mailbox[Any]:
        """Return an object for sending to the mailbox with this name."""
        ...


class CompositeResolver:
    """Looks in a registry first, then calls a factory.

    Names come from messages, so only the `keep` most recently used mailboxes of the factory are cached.

    Args:
        registry: Mailboxes by name; the mapping may change later.
        factory: Creates the others; without one, only the registry is used.
        keep: Number of the factory's mailboxes to cache.
    """

    def __init__(
        self, registry: Mapping[str, Mailbox[Any]] = EMPTY, factory: MailboxFactory | None = None, *, keep: int = 1024
    ) -> None:
        if keep < 1:
            raise errors.ConfigurationError(f"keep must be at least 1 (got {keep})")
        self._registry = registry
        self._factory = factory
        self._made: LruCache[str, Mailbox[Any]] = LruCache(keep)

    def resolve(self, name: str) -> Mailbox[Any]:
        """The mailbox of that name.

        Raises:
            ReplyNotAvailableError: nobody knows it.
        """
        if (known := self._registry.get(name)) is not None:
            return known
        if (made := self._made.get(name)) is not None:
            return made
        if self._factory is None:
            raise errors.ReplyNotAvailableError(f"there is no mailbox named {name!r}")
        try:
            made = self._factory.create(validate_name(name))
        except errors.ConfigurationError as error:
            raise errors.ReplyNotAvailableError(str(error)) from None
        self._made.put(name, made)
        return made
