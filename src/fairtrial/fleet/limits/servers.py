"""What limits and budgets ask of the server through which a fleet shares them: Redis or PostgreSQL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from fairtrial.data.session.events import TokenUsage
from fairtrial.mailbox.server import ServerConnection

LONGEST_COOLDOWN: Final = 120.0
"""A `retry-after` counts for at most this many seconds."""
REMEMBERED_DAYS: Final = 30
"""How long the usage of a run is kept after the last call."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The settings of a limit, as every process that shares it must have them."""

    name: str
    cost_us: float  # Per request; if adaptive, at the largest rate.
    burst: float
    token_cost_us: float  # 0: tokens are not limited.
    token_burst: float
    first: float  # The rate to begin with if adaptive; 0: the rate is known.
    largest: float


@dataclass(frozen=True, slots=True)
class ReservedBlock:
    """Start times that were reserved.

    Attributes:
        epoch: Number of episodes of refusals so far.
        wait_us: If there are none: how long to wait before asking again.
        rate: Requests per second of the whole fleet.
        offsets_us: When each call may begin, from now.
    """

    epoch: int
    wait_us: float
    rate: float
    offsets_us: Sequence[float]


@dataclass(frozen=True, slots=True)
class CooldownState:
    """The number of episodes of refusals so far, and how long no call may begin."""

    epoch: int
    wait_us: float


class LimitServer(ABC):
    """The state of limits and budgets on one server, as one event loop reaches it.

    Only the server's clock counts. All methods raise a `FairtrialError`: `MailboxAccessError` and `ConfigurationError`
    if waiting would not help, another `MailboxError` while the server is unavailable.
    """

    server: ClassVar[str]
    """The server's name in messages."""

    def __init__(self, connection: ServerConnection) -> None:
        self._shared = connection

    def __repr__(self) -> str:
        return repr(self._shared)

    async def close(self) -> None:
        """Close the connection."""
        await self._shared.close()

    @abstractmethod
    async def reserve(self, quota: Quota, count: int, tokens_each: float, tokens_owed: float) -> ReservedBlock:
        """Reserve start times for `count` calls of `tokens_each`.

        Args:
            quota: The limit.
            count: How many calls are waiting; 0 to correct the usage of earlier ones only.
            tokens_each: The expected usage of a call.
            tokens_owed: What earlier calls used beyond what was reserved for them; negative if they used less.
        """

    @abstractmethod
    async def refuse(self, quota: Quota, epoch: int, told_us: float) -> CooldownState:
        """Record that the provider refused a call of this epoch, and how long it told us to wait (-1: not told)."""

    @abstractmethod
    async def listen(self, quota: Quota) -> CooldownState:
        """Return what the processes of the fleet were told by the provider."""

    @abstractmethod
    async def spend(self, name: str, usage: TokenUsage, requests: int) -> tuple[TokenUsage, int]:
        """Add the usage of requests to the total of a run, and return the total."""
