"""Messages that were set aside, and the rule that says which."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fairtrial.backoff import backoff
from fairtrial.errors import BodyError, CodecError, ConfigurationError, MailboxError, StoreUnavailableError
from fairtrial.mailbox.body import decode_body

type Verdict = Literal["retry", "dead_letter"]
type Treatment = Literal["run", "run_isolated"]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was set aside.

    Attributes:
        id: Its identity among the dead letters.
        message_id: Its identity while it lived.
        text: The body as it travelled; bytes that are not UTF-8 are replaced. Untrusted: mind where it is shown.
        delivery_count: How often it had been delivered.
        reason: Why it was set aside, for a person.
        error: The type of the error behind it.
        reply_to: Who wanted the answer.
        died_at: When, in seconds since the epoch, by the server's clock where there is one.
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
        """The body as a `kind`.

        Raises:
            BodyError: it is not one, which may be why it is here.
        """
        try:
            return decode_body(kind, self.text.encode("utf-8", "surrogatepass"))
        except CodecError as error:
            raise BodyError(f"dead letter {self.id} is not a {getattr(kind, '__name__', kind)}: {error}") from None


class DeadLetters(Protocol):
    """The messages of one mailbox that were set aside."""

    async def count(self) -> int:
        """How many there are."""
        ...

    async def page(self, *, after: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """The oldest `limit` of them, or the next ones `after` an id."""
        ...

    async def retry(self, *ids: str) -> int:
        """Put these back into the mailbox with a clean record; returns how many there were."""
        ...

    async def drop(self, *ids: str) -> int:
        """Delete these; returns how many there were."""
        ...


@dataclass(frozen=True, slots=True)
class DLQPolicy:
    """When to try again, when to try with care, and when to give up.

    A worker that dies takes all its messages with it, so a lease that ran out says little about one of them: after
    `suspect_after` silent ends a message is suspected and executed in a child process, first with others, then alone,
    and only what happens there counts.

    Attributes:
        max_deliveries: A message that failed with an error on this delivery or a later one is set aside.
        fatal: Errors that trying again cannot mend: set aside at once.
        transient: Errors that say nothing about the message (a server that is away): always tried again.
        suspect_after: This many leases that ran out in silence make a message suspected.
        base_seconds: The delay before the second delivery; doubles with each.
        max_seconds: The longest delay.
        draw: Where the jitter comes from: a number from 0 to 1.
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
            raise ConfigurationError("max_deliveries and suspect_after are at least 1")
        if not 0 < self.base_seconds <= self.max_seconds:
            raise ConfigurationError("base_seconds is more than 0 and at most max_seconds")

    def treatment(self, expiries: int) -> Treatment:
        """How to run a message whose earlier deliveries ended in silence this often."""
        return "run_isolated" if expiries >= self.suspect_after else "run"

    def verdict(self, error: BaseException, delivery_count: int) -> Verdict:
        """What to do with a message whose `delivery_count`-th delivery ended with this error."""
        if isinstance(error, self.fatal):
            return "dead_letter"
        if isinstance(error, self.transient):
            return "retry"
        return "dead_letter" if delivery_count >= self.max_deliveries else "retry"

    def delay(self, delivery_count: int) -> float:
        """Seconds to wait before the next delivery: capped exponential, and half of it drawn at random."""
        return backoff(delivery_count, first=self.base_seconds, longest=self.max_seconds, draw=self.draw)
