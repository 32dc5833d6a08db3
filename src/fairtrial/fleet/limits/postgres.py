"""Limits and budgets on PostgreSQL: each operation is a statement, and each limit or run is one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import MailboxError
from fairtrial.fleet.limits.postgres_statements import FORGET, LISTEN, OPEN, REFUSE, RESERVE, SPEND, SPENT
from fairtrial.fleet.limits.servers import REMEMBERED_DAYS, CooldownState, LimitServer, Quota, ReservedBlock
from fairtrial.mailbox.postgres import PostgresConnection

_FEWEST_TOKENS = 1e-6
_ATTEMPTS = 3


class PostgresLimits(LimitServer):
    """Limits and budgets in one PostgreSQL database."""

    server = "PostgreSQL"

    def __init__(self, connection: PostgresConnection) -> None:
        super().__init__(connection)
        self.connection = connection
        self._forgotten = False

    @classmethod
    def of(cls, source: Any, **options: Any) -> PostgresLimits:
        """Return the limits in the database at an address or of a connection."""
        if isinstance(source, str):  # One connection is enough: statements wait for each other at the row anyway.
            source = PostgresConnection(source, **{"max_connections": 1, **options})
        return cls(source)

    async def reserve(self, quota: Quota, count: int, tokens_each: float, tokens_owed: float) -> ReservedBlock:
        """Reserve start times."""
        parameters = {
            "count": count,
            "cost": quota.cost_us,
            "burst": quota.burst,
            "token_cost": quota.token_cost_us,
            "token_burst": quota.token_burst,
            "each": _without_underflow(tokens_each),
            "owed": _without_underflow(tokens_owed),
            "first": quota.first,
            "largest": quota.largest,
        }
        epoch, wait, rate, granted, start, cost, token_start, step = await self._change(RESERVE, quota, parameters)
        offsets = [max(0.0, start + number * cost, token_start + number * step) for number in range(granted)]
        return ReservedBlock(epoch, wait, rate, offsets)

    async def refuse(self, quota: Quota, epoch: int, told_us: float) -> CooldownState:
        """Record a refusal."""
        parameters = {"epoch": epoch, "told": told_us, "cost": quota.cost_us, "first": quota.first}
        return CooldownState(*await self._change(REFUSE, quota, parameters))

    async def listen(self, quota: Quota) -> CooldownState:
        """Return what others were told."""
        rows = await self.connection.run(_asking(quota), LISTEN, {"name": quota.name})
        return CooldownState(*rows[0]) if rows else CooldownState(0, 0.0)

    async def spend(self, name: str, usage: TokenUsage, requests: int) -> tuple[TokenUsage, int]:
        """Add usage to the total of a run."""
        doing = f"counting the usage of {name}"
        if not self._forgotten:
            await self.connection.change(doing, FORGET, {"days": REMEMBERED_DAYS})
            self._forgotten = True
        parameters: dict[str, Any] = {"name": name}
        if requests:
            parameters |= {"requests": requests, "input": usage.input_tokens, "output": usage.output_tokens}
            parameters |= {"cached": usage.cached_tokens, "dollars": usage.cost_usd}
        rows = await self.connection.run(doing, SPEND if requests else SPENT, parameters)
        if not rows:
            return TokenUsage(), 0
        ((total, *counts),) = rows
        return TokenUsage(*counts), total

    async def _change(self, statement: LiteralString, quota: Quota, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Change the row of a limit, which is created if it does not exist or was not used for a day."""
        for _ in range(_ATTEMPTS):
            rows = await self.connection.run(_asking(quota), statement, {"name": quota.name, **parameters})
            if rows:
                return rows[0]
            await self.connection.change(_asking(quota), OPEN, {"name": quota.name})
        raise MailboxError(f"{_asking(quota)}: its row is deleted again and again")


def _without_underflow(tokens: float) -> float:
    """Return 0 for next to nothing, as is expected after thousands of calls without usage: PostgreSQL refuses it."""
    return tokens if abs(tokens) > _FEWEST_TOKENS else 0.0


def _asking(quota: Quota) -> str:
    return f"asking for the limit {quota.name}"
