"""Shared limits in PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, LiteralString

from fairtrial.data.session.events import TokenUsage
from fairtrial.errors import MailboxError
from fairtrial.fleet.limits.servers import REMEMBERED_DAYS, CooldownState, LimitServer, Quota, ReservedBlock
from fairtrial.mailbox.postgres import PostgresConnection

# ruff: noqa: S608 - values of callers are parameters and never part of a text


_UNSYNCED: Final = "(SELECT set_config('synchronous_commit', 'off', true) AS unsynced)"
_NOW: Final = "(extract(epoch FROM clock_timestamp()) * 1000000)::float8"

# If the server's clock was set back, calls must not be blocked for the rest of the day.
_COOL: Final = "CASE WHEN paused_until > now + 120e6 THEN 0 ELSE coalesce(paused_until, 0) END"

# The clock is read in a step of its own, after the lock was obtained.
_LOCKED: Final = f"""
    WITH locked AS MATERIALIZED (
        SELECT * FROM fleet_limits
        WHERE name = %(name)s AND used_at > clock_timestamp() - interval '1 day' FOR UPDATE
    ), state AS MATERIALIZED (
        SELECT locked.*, {_NOW} AS now FROM locked, {_UNSYNCED} AS setting WHERE unsynced = 'off'
    )"""

OPEN: Final[LiteralString] = """
    WITH old_limits AS (DELETE FROM fleet_limits WHERE used_at <= clock_timestamp() - interval '1 day')
    INSERT INTO fleet_limits (name) VALUES (%(name)s) ON CONFLICT DO NOTHING
"""

RESERVE: Final[LiteralString] = f"""{_LOCKED}, settings AS (
        SELECT %(count)s::float8 AS count, %(cost)s::float8 AS given_cost, %(burst)s::float8 AS given_burst,
            %(token_cost)s::float8 AS token_cost, %(token_burst)s::float8 AS token_burst, %(each)s::float8 AS each,
            %(owed)s::float8 AS owed, %(first)s::float8 AS first, %(largest)s::float8 AS largest, 10e6::float8 AS ahead
    ), block AS MATERIALIZED (
        SELECT * FROM state, settings,
        LATERAL (
            SELECT {_COOL} AS cool, coalesce(rate, least(first, largest)) AS old_rate,
                CASE WHEN requests_at > now + 240e6 THEN now ELSE coalesce(requests_at, 0) END AS due
        ) AS request,
        LATERAL (
            SELECT due <= now OR cool > now AS is_idle, now - coalesce(grown_at, now) >= 1e6 AS is_time_to_grow
        ) AS demand,
        -- The full rate was in demand and nothing was refused: increase it, slowly near the rate of the last refusal.
        LATERAL (
            SELECT first > 0 AND (is_idle OR is_time_to_grow) AS is_adjusted, CASE
                WHEN is_idle OR NOT is_time_to_grow THEN old_rate
                WHEN ceiling IS NULL THEN least(largest, old_rate * 2)
                WHEN old_rate < ceiling * 0.9 OR old_rate > ceiling * 1.1 THEN least(largest, old_rate * 1.05)
                ELSE least(largest, old_rate + ceiling * 0.005)
            END AS new_rate
        ) AS growth,
        LATERAL (
            SELECT CASE WHEN first > 0 THEN 1e6 / nullif(new_rate, 0) ELSE given_cost END AS cost,
                CASE WHEN first > 0 THEN greatest(1, new_rate * 0.05) ELSE given_burst END AS burst
        ) AS price,
        LATERAL (
            SELECT greatest(due, now - burst * cost, cool) AS start, now - token_burst * token_cost AS earliest,
                each * token_cost AS token_step
        ) AS turn,
        LATERAL (
            SELECT greatest(
                CASE WHEN tokens_at > now + 3600e6 THEN now ELSE coalesce(tokens_at, 0) END, earliest
            ) + owed * token_cost AS token_due
        ) AS token,
        LATERAL (SELECT CASE WHEN token_cost > 0 THEN greatest(token_due, earliest, cool) ELSE 0 END AS token_start)
            AS token_turn,
        LATERAL (
            SELECT greatest(start, token_start) - now - ahead AS too_early, least(
                count,
                floor((now + ahead - start) / cost) + 1,
                floor((now + ahead - token_start) / nullif(token_step, 0)) + 1
            ) AS fitting
        ) AS room,
        LATERAL (SELECT CASE WHEN too_early > 0 THEN 0 ELSE fitting END AS granted) AS allowed
    )
    UPDATE fleet_limits AS kept SET
        requests_at = CASE WHEN granted > 0 THEN start + granted * cost ELSE kept.requests_at END,
        tokens_at = CASE
            WHEN token_cost = 0 THEN kept.tokens_at
            WHEN granted > 0 THEN token_start + granted * token_step
            ELSE token_due
        END,
        rate = CASE WHEN is_adjusted THEN new_rate ELSE kept.rate END,
        grown_at = CASE WHEN is_adjusted THEN now ELSE kept.grown_at END,
        used_at = clock_timestamp()
    FROM block WHERE kept.name = block.name
    RETURNING kept.epoch, CASE WHEN granted = 0 AND count > 0 THEN too_early + 1000 ELSE 0 END, 1e6 / cost,
        granted::integer, start - now, cost, token_start - now, token_step
"""

REFUSE: Final[LiteralString] = f"""{_LOCKED}, settings AS (
        SELECT %(epoch)s::bigint AS call_epoch, %(told)s::float8 AS told, %(cost)s::float8 AS given_cost,
            %(first)s::float8 AS first
    ), refusal AS MATERIALIZED (
        SELECT * FROM state, settings,
        LATERAL (
            SELECT {_COOL} AS cool, coalesce(rate, first) AS old_rate, now - coalesce(began_at, 0) AS since
        ) AS before,
        LATERAL (SELECT CASE WHEN first > 0 THEN 1e6 / nullif(old_rate, 0) ELSE given_cost END AS cost) AS price,
        -- Other processes learn of an episode within half a second: refusals until then belong to it.
        LATERAL (
            SELECT call_epoch = epoch AND abs(since) > 1e6 AS is_new,
                now + least(CASE WHEN told < 0 THEN least(1e6, 10 * cost) ELSE told END, 120e6) AS till
        ) AS episode,
        LATERAL (
            SELECT is_new AND first > 0 AS is_learned, CASE
                WHEN ceiling IS NULL THEN 0.5  -- While the rate doubled, half of it was the last known to be good.
                WHEN since < 4e6 THEN 0.85  -- Refused again so soon: far off.
                ELSE 0.92
            END AS share, greatest(cool, CASE WHEN is_new OR told >= 0 THEN till ELSE 0 END) AS pause
        ) AS consequence
    )
    UPDATE fleet_limits AS kept SET
        epoch = kept.epoch + is_new::integer,
        began_at = CASE WHEN is_new THEN now ELSE kept.began_at END,
        requests_at = CASE WHEN is_new THEN greatest(till, cool) ELSE kept.requests_at END,
        ceiling = CASE WHEN is_learned THEN old_rate ELSE kept.ceiling END,
        rate = CASE WHEN is_learned THEN old_rate * share ELSE kept.rate END,
        grown_at = CASE WHEN is_learned THEN now ELSE kept.grown_at END,
        paused_until = pause,
        used_at = clock_timestamp()
    FROM refusal WHERE kept.name = refusal.name
    RETURNING kept.epoch, greatest(0, pause - now)
"""

LISTEN: Final[LiteralString] = f"""
    SELECT epoch, greatest(0, {_COOL} - now) FROM fleet_limits, (SELECT {_NOW} AS now) AS clock
    WHERE name = %(name)s AND used_at > clock_timestamp() - interval '1 day'
"""

FORGET: Final[LiteralString] = """
    DELETE FROM fleet_spending WHERE used_at <= clock_timestamp() - make_interval(days => %(days)s)
"""

SPEND: Final[LiteralString] = f"""
    INSERT INTO fleet_spending AS spent (name, requests, input_tokens, output_tokens, cached_tokens, dollars)
    SELECT %(name)s, %(requests)s, %(input)s, %(output)s, %(cached)s, %(dollars)s FROM {_UNSYNCED} AS setting
    WHERE unsynced = 'off'
    ON CONFLICT (name) DO UPDATE SET
        requests = spent.requests + EXCLUDED.requests,
        input_tokens = spent.input_tokens + EXCLUDED.input_tokens,
        output_tokens = spent.output_tokens + EXCLUDED.output_tokens,
        cached_tokens = spent.cached_tokens + EXCLUDED.cached_tokens,
        dollars = CASE
            WHEN EXCLUDED.dollars IS NULL THEN spent.dollars ELSE coalesce(spent.dollars, 0) + EXCLUDED.dollars
        END,
        used_at = clock_timestamp()
    RETURNING requests, input_tokens, output_tokens, cached_tokens, dollars
"""

SPENT: Final[LiteralString] = """
    SELECT requests, input_tokens, output_tokens, cached_tokens, dollars FROM fleet_spending WHERE name = %(name)s
"""


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
        """Return the state that others see."""
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
