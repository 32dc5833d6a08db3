"""Time that passes on a server, without waiting for it.

On Redis, every lease and delay of a mailbox is made older, as if the server's clock had moved on. The clock of the SQS
emulator is moved, and that of the mailbox with it.
"""

from __future__ import annotations

import time
from typing import Any

from fairtrial.mailbox import PostgresMailbox, RedisMailbox
from fairtrial.mailbox.redis.scripts import LuaScript

AGE = LuaScript("""
local count = redis.pcall('XPENDING', KEYS[1], 'fairtrial')
if not count.err and count[1] > 0 then
  for _, found in ipairs(redis.call('XPENDING', KEYS[1], 'fairtrial', '-', '+', count[1])) do
    redis.call('XCLAIM', KEYS[1], 'fairtrial', found[2], 0, found[1], 'IDLE', found[3] + ARGV[1], 'JUSTID')
  end
end
local delayed = redis.call('ZRANGE', KEYS[2], 0, -1)
for _, id in ipairs(delayed) do redis.call('ZINCRBY', KEYS[2], -ARGV[1], id) end
return #delayed
""")


async def age(mailbox: RedisMailbox[Any], seconds: float) -> None:
    await mailbox.connection.script(AGE, (mailbox.keys.stream, mailbox.keys.delayed), (round(seconds * 1000),))


class ShiftedClock:
    """The system's clocks, moved ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


async def age_rows(mailbox: PostgresMailbox[Any], seconds: float) -> None:
    """The same on PostgreSQL."""
    statement = """
        UPDATE mailbox_messages
        SET visible_at = visible_at - make_interval(secs => %(seconds)s),
            leased_at = leased_at - make_interval(secs => %(seconds)s)
        WHERE queue = (SELECT id FROM mailbox_queues WHERE name = %(name)s)
    """
    await mailbox.connection.change("ageing", statement, {"name": mailbox.name, "seconds": seconds})
