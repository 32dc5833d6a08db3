"""Definitions shared by the parts of a mailbox on Redis: keys, consumer names, and their common interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from fairtrial.mailbox.claim_check import ClaimCheck
from fairtrial.mailbox.protocol import Renewer
from fairtrial.mailbox.redis.connection import RedisConnection
from fairtrial.mailbox.redis.scripts import LuaScript


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one mailbox. They share a hash tag, so a cluster keeps them on one node."""

    stream: str
    delayed: str
    dead: str
    sweeper: str
    workers: str

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the keys of the mailbox with this name."""
        tag = f"{{fairtrial:{name}}}"
        return cls(f"{tag}:stream", f"{tag}:delayed", f"{tag}:dead", f"{tag}:sweeper", f"{tag}:workers")


class Consumers:
    """The consumer names of one mailbox object: `<token>/<lease in ms>`.

    Each object has a new token, so that entries of a dead process are never taken for its own.
    """

    __slots__ = ("_leases", "token")

    def __init__(self, token: str) -> None:
        self.token = token
        self._leases: set[int] = set()

    def names(self) -> list[str]:
        """Return every name used so far."""
        return [f"{self.token}/{lease}" for lease in list(self._leases)]  # A copy: a thread may add to it.

    def reading(self, seconds: float) -> str:
        """Return the consumer name for leases of this duration."""
        lease = max(1, round(seconds * 1000))
        self._leases.add(lease)
        return f"{self.token}/{lease}"

    def extended(self, seconds: float) -> tuple[str, int]:
        """Return the consumer name to move a lease to so that it expires in `seconds`, and its initial idle time.

        Other durations than those of `reading` share a name per power of two, to bound the number of names.
        """
        lease = max(1, round(seconds * 1000))
        if lease in self._leases:
            return f"{self.token}/{lease}", 0
        roof = 1 << (lease - 1).bit_length()
        self._leases.add(roof)
        return f"{self.token}/{roof}", roof - lease


class RedisQueue[T](Protocol):
    """The interface of a mailbox for its receiver, receipts, dead letters and sweeper."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def body_type(self) -> type[T]:
        """The type of bodies."""
        ...

    @property
    def keys(self) -> Keys:
        """The keys in Redis."""
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
        """The size limit of bodies in Redis."""
        ...

    @property
    def connection(self) -> RedisConnection:
        """The connection to Redis."""
        ...

    @property
    def consumers(self) -> Consumers:
        """The consumer names of this object."""
        ...

    @property
    def renewer(self) -> Renewer:
        """Renews the leases of this mailbox."""
        ...

    def check_open(self) -> None:
        """Raise `MailboxClosedError` after `close`."""
        ...

    async def open(self, *, again: bool = False) -> None:
        """Create the mailbox if it does not exist."""
        ...

    async def run(self, doing: str, script: LuaScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script on this mailbox immediately and translate errors."""
        ...

    async def send_reply(self, message_id: str, address: str | None, body: Any) -> str:
        """Send a reply to the reply address of a message."""
        ...
