"""Shared limits in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from fairtrial.data.session.events import TokenUsage
from fairtrial.fleet.limits.servers import REMEMBERED_DAYS, CooldownState, LimitServer, Quota, ReservedBlock
from fairtrial.mailbox.redis import RedisConnection
from fairtrial.mailbox.redis.scripts import LuaScript
from fairtrial.mailbox.redis.topology import translated

_COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local LONGEST = 120 * 1000000
local function whole(number) return string.format('%.0f', number) end
local function cooling(text)
  local till = tonumber(text) or 0
  -- If the server's clock was set back, calls must not be blocked for the rest of the day.
  if till > now + LONGEST then return 0 end
  return till
end
"""

RESERVE = LuaScript(
    _COMMON
    + """
-- KEYS state; ARGV how many, us per request, burst of requests, us per token (0: no limit), burst of tokens,
-- tokens per request, tokens to settle, first rate to learn from (0: the rate is known), largest rate
-- Returns {epoch, us to wait before asking again or 0, requests per 1000 s, us until each of those that were granted}
local AHEAD = 10 * 1000000
local state = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'until', 'epoch', 'rate', 'ceiling', 'grown')
local count, cost, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local token_cost, token_burst, each = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local first, largest = tonumber(ARGV[8]), tonumber(ARGV[9])
local cool = cooling(state[3])
local due = tonumber(state[1]) or 0
if due > now + 2 * LONGEST then due = now end
if first > 0 then
  local rate = tonumber(state[5]) or math.min(first, largest)
  if due <= now or cool > now then
    redis.call('HSET', KEYS[1], 'rate', rate, 'grown', whole(now))
  elseif now - (tonumber(state[7]) or now) >= 1000000 then
    -- The full rate was in demand and nothing was refused: increase it.
    local ceiling = tonumber(state[6])
    if not ceiling then rate = rate * 2
    elseif rate < ceiling * 0.9 or rate > ceiling * 1.1 then rate = rate * 1.05
    else rate = rate + ceiling * 0.005 end  -- Slowly near the rate of the last refusal.
    rate = math.min(rate, largest)
    redis.call('HSET', KEYS[1], 'rate', rate, 'grown', whole(now))
  end
  cost = 1000000 / rate
  burst = math.max(1, rate * 0.05)
end
local start = math.max(due, now - burst * cost, cool)
local token_start, token_due = 0, 0
if token_cost > 0 then
  token_due = tonumber(state[2]) or 0
  if token_due > now + 30 * LONGEST then token_due = now end
  token_due = math.max(token_due, now - token_burst * token_cost) + tonumber(ARGV[7]) * token_cost
  token_start = math.max(token_due, now - token_burst * token_cost, cool)
end
local out, granted = {tonumber(state[4]) or 0, 0, math.floor(1000000000 / cost)}, 0
while granted < count do
  local at = math.max(now, start + granted * cost, token_start + granted * each * token_cost)
  if at > now + AHEAD then
    if granted == 0 then out[2] = math.ceil(at - now - AHEAD) + 1000 end
    break
  end
  granted = granted + 1
  out[#out + 1] = math.floor(at - now)
end
if granted > 0 then redis.call('HSET', KEYS[1], 'requests', whole(start + granted * cost)) end
if token_cost > 0 then
  local from = token_due
  if granted > 0 then from = token_start end
  redis.call('HSET', KEYS[1], 'tokens', whole(from + granted * each * token_cost))
end
redis.call('PEXPIRE', KEYS[1], 86400000)
return out
"""
)

REFUSED = LuaScript(
    _COMMON
    + """
-- KEYS state; ARGV epoch of the call, us it was told to wait (-1: not told), us per request, first rate (0: known)
-- Returns {epoch, us until calls may begin again}
local state = redis.call('HMGET', KEYS[1], 'until', 'epoch', 'rate', 'began')
local epoch, told, cost = tonumber(state[2]) or 0, tonumber(ARGV[2]), tonumber(ARGV[3])
local rate = tonumber(state[3]) or tonumber(ARGV[4])
if tonumber(ARGV[4]) > 0 then cost = 1000000 / rate end
local pause = told
if told < 0 then pause = math.min(1000000, 10 * cost) end
local till = now + math.min(pause, LONGEST)
local cool = cooling(state[1])
-- Other processes learn of an episode within half a second: refusals until then belong to it.
if tonumber(ARGV[1]) == epoch and math.abs(now - (tonumber(state[4]) or 0)) > 1000000 then
  epoch = epoch + 1
  redis.call('HSET', KEYS[1], 'epoch', epoch, 'began', whole(now), 'requests', whole(math.max(till, cool)))
  if tonumber(ARGV[4]) > 0 then
    local share = 0.92
    -- While the rate doubled, half of it was the last that is known to be good.
    if not redis.call('HGET', KEYS[1], 'ceiling') then share = 0.5
    elseif now - (tonumber(state[4]) or 0) < 4000000 then share = 0.85 end  -- Refused again so soon: far off.
    redis.call('HSET', KEYS[1], 'ceiling', rate, 'rate', rate * share, 'grown', whole(now))
  end
elseif told < 0 then
  till = 0  -- The episode was handled before.
end
cool = math.max(cool, till)
redis.call('HSET', KEYS[1], 'until', whole(cool))
redis.call('PEXPIRE', KEYS[1], 86400000)
return {epoch, math.max(0, math.ceil(cool - now))}
"""
)

LISTEN = LuaScript(
    _COMMON
    + """
-- KEYS state. Returns {epoch, us until calls may begin again}
local state = redis.call('HMGET', KEYS[1], 'until', 'epoch')
return {tonumber(state[2]) or 0, math.max(0, math.ceil(cooling(state[1]) - now))}
"""
)

SPEND = LuaScript("""
-- KEYS spent; ARGV requests, input tokens, output tokens, cached tokens, dollars or '', days to remember in ms
-- Returns {requests, input tokens, output tokens, cached tokens, dollars or false}
local names = {'requests', 'input', 'output', 'cached'}
for at, name in ipairs(names) do
  if ARGV[at] ~= '0' then redis.call('HINCRBY', KEYS[1], name, ARGV[at]) end
end
if ARGV[5] ~= '' then redis.call('HINCRBYFLOAT', KEYS[1], 'dollars', ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return redis.call('HMGET', KEYS[1], 'requests', 'input', 'output', 'cached', 'dollars')
""")


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
        epoch, wait, rate, *offsets = await self._limit(RESERVE, quota, args)
        return ReservedBlock(epoch, wait, rate / 1000, offsets)

    async def refuse(self, quota: Quota, epoch: int, told_us: float) -> CooldownState:
        """Record a refusal."""
        args = (epoch, round(told_us), quota.cost_us, quota.first)
        return CooldownState(*await self._limit(REFUSED, quota, args))

    async def listen(self, quota: Quota) -> CooldownState:
        """Return the state that others see."""
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
