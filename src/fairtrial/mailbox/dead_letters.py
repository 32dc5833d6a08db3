"""Dead letters, and the policy for retries."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fairtrial.base.backoff import backoff
from fairtrial.base.frozen import first_is
from fairtrial.errors import BodyError, CodecError, ConfigurationError, MailboxError, StoreUnavailableError
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
        except CodecError as error:
            raise BodyError(f"dead letter {self.id} is not a {getattr(kind, '__name__', kind)}: {error}") from None


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
    fatal: tuple[type[BaseException], ...] = (BodyError,)
    transient: tuple[type[BaseException], ...] = (MailboxError, StoreUnavailableError)
    suspect_after: int = 1
    base_seconds: float = 1.0
    max_seconds: float = 300.0
    draw: Callable[[], float] = field(default=random.random, repr=False)

    def __post_init__(self) -> None:
        if self.max_deliveries < 1 or self.suspect_after < 1:
            raise ConfigurationError("max_deliveries and suspect_after must be at least 1")
        if not 0 < self.base_seconds <= self.max_seconds:
            raise ConfigurationError("base_seconds must be more than 0 and at most max_seconds")

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
