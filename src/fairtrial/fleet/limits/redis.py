"""Limits and budgets on Redis: each operation is a script, and each limit or run is one hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from fairtrial.data.session.events import TokenUsage
from fairtrial.fleet.limits.redis_scripts import LEASE, LISTEN, REFUSED, SPEND
from fairtrial.fleet.limits.servers import REMEMBERED_DAYS, CooldownState, LimitServer, Quota, ReservedBlock
from fairtrial.mailbox.redis import RedisConnection
from fairtrial.mailbox.redis.errors import translated
from fairtrial.mailbox.redis.scripts import LuaScript


class RedisLimits(LimitServer):
    """Limits and budgets on one Redis."""

    server = "Redis"

    def __init__(self, connection: RedisConnection) -> None:
        super().__init__(connection)
        self.connection = connection

    @classmethod
    def of(cls, source: Any, **options: Any) -> RedisLimits:
        """Return the limits on the Redis at an address or of a connection."""
        return cls(RedisConnection(source, **options) if isinstance(source, str) else source)

    async def reserve(self, quota: Quota, count: int, tokens_each: float, tokens_owed: float) -> ReservedBlock:
        """Reserve start times."""
        rates = (quota.cost_us, quota.burst, quota.token_cost_us, quota.token_burst)
        args = (count, *rates, tokens_each, tokens_owed, quota.first, quota.largest)
        epoch, wait, rate, *offsets = await self._limit(LEASE, quota, args)
        return ReservedBlock(epoch, wait, rate / 1000, offsets)

    async def refuse(self, quota: Quota, epoch: int, told_us: float) -> CooldownState:
        """Record a refusal."""
        args = (epoch, round(told_us), quota.cost_us, quota.first)
        return CooldownState(*await self._limit(REFUSED, quota, args))

    async def listen(self, quota: Quota) -> CooldownState:
        """Return what others were told."""
        return CooldownState(*await self._limit(LISTEN, quota, ()))

    async def spend(self, name: str, usage: TokenUsage, requests: int) -> tuple[TokenUsage, int]:
        """Add usage to the total of a run."""
        dollars = "" if usage.cost_usd is None else repr(usage.cost_usd)
        args = (requests, usage.input_tokens, usage.output_tokens, usage.cached_tokens, dollars)
        key = f"{{fairtrial:spent:{name}}}:run"
        answer = await self._script(SPEND, key, (*args, REMEMBERED_DAYS * 86_400_000), f"counting the usage of {name}")
        counts = [int(number or 0) for number in answer[:4]]
        cost = None if answer[4] is None else float(answer[4])
        return TokenUsage(counts[1], counts[2], counts[3], cost), counts[0]

    async def _limit(self, script: LuaScript, quota: Quota, args: Sequence[Any]) -> Any:
        key = f"{{fairtrial:limits:{quota.name}}}:state"
        return await self._script(script, key, args, f"asking for the limit {quota.name}")

    async def _script(self, script: LuaScript, key: str, args: Sequence[Any], doing: str) -> Any:
        try:
            return await self.connection.script(script, (key,), args)
        except (RedisError, OSError) as error:
            raise translated(error, doing) from None
