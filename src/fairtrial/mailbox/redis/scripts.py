"""What runs inside Redis. Each script is atomic; none trusts a worker's clock.

Every delivery of a message is a stream entry of its own: a message that comes back is added again under a new entry
id, with its identity, its count of deliveries and its count of silent ends kept in fields. So an entry is delivered
once, waiting readers are woken by the ordinary blocking read, and an old receipt finds nothing to settle.

A lease is the idle time of a pending entry against the length in its consumer's name: `<token>/<milliseconds>`. The
token belongs to one start of one mailbox object. The fence of every settling script is: the entry is pending, with
this token, delivered once. Settling scripts answer with one character per entry, 1 for settled and 0 for lost: a
single text is read much faster than a hundred numbers.

| key        | what                                                                                   |
|------------|----------------------------------------------------------------------------------------|
| `:stream`  | waiting, in flight and delayed entries                                                 |
| `:delayed` | sorted set: entry id -> when it is due, in the server's milliseconds; `!` and the id    |
|            | where the delivery does not count                                                      |
| `:dead`    | stream of dead letters                                                                 |
| `:sweeper` | who sweeps just now; expires by itself                                                 |
| `:workers` | sorted set: fingerprint and id of each worker -> when its announcement expires; kept    |
|            | for some minutes after that, so that lost workers can be named                         |

| field | what                                              |
|-------|---------------------------------------------------|
| `b`   | the body, JSON                                    |
| `s`   | instead of it: the SHA-256 of a body kept outside |
| `r`   | the reply address                                 |
| `i`   | the message's id, when it is not the entry's      |
| `n`   | earlier deliveries                                |
| `x`   | earlier deliveries that ended in silence          |
| `y`   | such that ended together with those of other      |
|       | workers: each counts half                         |
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Final

GROUP: Final = "fairtrial"
# Dead letters are deleted after a month, so that they do not fill the server.
MAX_DEAD_LETTERS: Final = 100_000
MAX_DEAD_AGE_SECONDS: Final = 30 * 24 * 3600


@dataclass(frozen=True, slots=True, eq=False)
class LuaScript:
    """A script and the name Redis knows it by."""

    text: str = field(repr=False)
    sha: str = ""

    def __post_init__(self) -> None:
        # Redis names scripts by SHA-1; nothing is protected by it.
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


class Call:
    """One call of one script."""

    __slots__ = ("args", "keys", "script")

    def __init__(self, script: LuaScript, keys: tuple[str, ...], args: list[Any]) -> None:
        self.script = script
        self.keys = keys
        self.args = args

    def command(self) -> tuple[Any, ...]:
        """Return the command to send."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)


_FENCE = """
local function ours(id, token)
  local found = redis.call('XPENDING', KEYS[1], 'fairtrial', id, id, 1)[1]
  return found and found[4] == 1 and string.sub(found[2], 1, #token + 1) == token .. '/'
end
"""

_NOW = """
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

# All keys of a mailbox with a time to live must expire together.
_EXPIRE = """
local function expire_with_stream(key)
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then redis.call('PEXPIRE', key, left) end
end
"""

# Anyone with access to the stream can write fields: an invalid count is read as 0, and an invalid identity is ignored.
_READ_FIELDS = """
local function read_count(text)
  local number = tonumber(text)
  if number and number >= 0 and number < 1e9 then return math.floor(number) end
  return 0
end

local function read_id(text, id)
  if #text < 42 and string.match(text, '^%d+%-%d+$') then return text end
  return id
end
"""

_REQUEUE = (
    _READ_FIELDS
    + """
local function forget(id)
  redis.call('XACK', KEYS[1], 'fairtrial', id)
  redis.call('XDEL', KEYS[1], id)
end

local function requeue(id, delivered, silent, together)
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then
    local origin, n, x, y, rest = id, 0, 0, together or 0, {}
    for f = 1, #entry[2], 2 do
      local name, value = entry[2][f], entry[2][f + 1]
      if name == 'i' then origin = read_id(value, id)
      elseif name == 'n' then n = read_count(value)
      elseif name == 'x' then x = read_count(value)
      elseif name == 'y' then y = y + read_count(value)
      elseif #rest < 64 then rest[#rest + 1] = name; rest[#rest + 1] = value end
    end
    if y > 0 then rest[#rest + 1] = 'y'; rest[#rest + 1] = y end
    redis.call('XADD', KEYS[1], '*', 'i', origin, 'n', n + delivered, 'x', x + silent, unpack(rest))
  end
  forget(id)
end
"""
)

_ADD = """
local function add(name, value, address)
  if ARGV[1] == '1' then
    if address == '' then return redis.call('XADD', KEYS[1], '*', name, value) end
    return redis.call('XADD', KEYS[1], '*', name, value, 'r', address)
  end
  if address == '' then return redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', name, value) end
  return redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', name, value, 'r', address)
end
"""

SEND = LuaScript(
    _ADD
    + """
-- KEYS stream; ARGV may-create, then per message: field (b or s), value, reply address
local out = {}
for a = 2, #ARGV, 3 do out[#out + 1] = add(ARGV[a], ARGV[a + 1], ARGV[a + 2]) end
return out
"""
)

# redis-py takes longer for each argument, and for each part of an answer, than Redis for a message.
SEND_ALL = LuaScript(
    _ADD
    + """
-- KEYS stream; ARGV may-create, reply address of all, field and size of each value ('b238s64...'), all values in one
-- text. Returns the ids in one text, or false if the stream does not exist and may not be created.
local out, at = {}, 1
for name, size in string.gmatch(ARGV[3], '(%a)(%d+)') do
  local id = add(name, string.sub(ARGV[4], at, at + size - 1), ARGV[2])
  if not id then return false end
  at = at + size
  out[#out + 1] = id
end
return table.concat(out, ' ')
"""
)

ACK = LuaScript(
    _FENCE
    + """
-- KEYS stream; ARGV token, then entry ids, one or several in each argument
local out = {}
for a = 2, #ARGV do
  for id in string.gmatch(ARGV[a], '%S+') do
    if ours(id, ARGV[1]) then
      redis.call('XACK', KEYS[1], 'fairtrial', id)
      redis.call('XDEL', KEYS[1], id)
      out[#out + 1] = '1'
    else
      out[#out + 1] = '0'
    end
  end
end
return table.concat(out)
"""
)

NACK = LuaScript(
    _FENCE
    + _NOW
    + _EXPIRE
    + _REQUEUE
    + """
-- KEYS stream, delayed; ARGV token, then per message: entry id, delay in ms, counted (0 or 1)
local out = {}
local time = now()
for a = 2, #ARGV, 3 do
  local id, delay = ARGV[a], tonumber(ARGV[a + 1])
  if ours(id, ARGV[1]) then
    if delay > 0 then
      -- Not pending and not unread, the entry rests in the stream until it is due.
      redis.call('XACK', KEYS[1], 'fairtrial', id)
      redis.call('ZADD', KEYS[2], time + delay, (ARGV[a + 2] == '0' and '!' or '') .. id)
    else
      requeue(id, tonumber(ARGV[a + 2]), 0)
    end
    out[#out + 1] = '1'
  else
    out[#out + 1] = '0'
  end
end
if redis.call('EXISTS', KEYS[2]) == 1 then expire_with_stream(KEYS[2]) end
return table.concat(out)
"""
)

EXTEND = LuaScript(
    _FENCE
    + """
-- KEYS stream; ARGV token, consumer to move to, idle time to start with in ms, consumer they were last known at,
-- then entry ids in order
local mine, keep, out = {}, {}, {}
local first, last = ARGV[5], ARGV[#ARGV]
-- One look at the neighbourhood instead of one look per id; whatever it misses is looked at alone.
for _, found in ipairs(redis.call('XPENDING', KEYS[1], 'fairtrial', first, last, 4 * (#ARGV - 4), ARGV[4])) do
  if found[4] == 1 then mine[found[1]] = true end
end
for a = 5, #ARGV do
  local held = mine[ARGV[a]] or ours(ARGV[a], ARGV[1])
  out[#out + 1] = held and '1' or '0'
  if held then keep[#keep + 1] = ARGV[a] end
end
if #keep > 0 then
  keep[#keep + 1] = 'IDLE'
  keep[#keep + 1] = ARGV[3]
  keep[#keep + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], 'fairtrial', ARGV[2], 0, unpack(keep))
end
return table.concat(out)
"""
)

BURY = LuaScript(
    _FENCE
    + _NOW
    + _EXPIRE
    + _REQUEUE
    + """
-- KEYS stream, dead; ARGV token, then per message: entry id, reason, error
local out = {}
local time = now()
for a = 2, #ARGV, 3 do
  local id = ARGV[a]
  if ours(id, ARGV[1]) then
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if entry then
      local origin, n, rest = id, 0, {}
      for f = 1, #entry[2], 2 do
        local name, value = entry[2][f], entry[2][f + 1]
        if name == 'i' then origin = read_id(value, id)
        elseif name == 'n' then n = read_count(value)
        elseif (name == 'b' or name == 's' or name == 'r' or name == 'x' or name == 'y') and #rest < 64 then
          rest[#rest + 1] = name
          rest[#rest + 1] = value
        end
      end
      local how, bound = 'MINID', string.format('%d', math.max(0, time - __MAX_DEAD_AGE_MS__))
      if redis.call('XLEN', KEYS[2]) >= __MAX_DEAD_LETTERS__ then how, bound = 'MAXLEN', __MAX_DEAD_LETTERS__ end
      redis.call('XADD', KEYS[2], how, '~', bound, '*', 'i', origin, 'n', n + 1, 'reason', ARGV[a + 1],
        'error', ARGV[a + 2], 'at', time, unpack(rest))
    end
    forget(id)
    out[#out + 1] = '1'
  else
    out[#out + 1] = '0'
  end
end
if redis.call('EXISTS', KEYS[2]) == 1 then expire_with_stream(KEYS[2]) end
return table.concat(out)
""".replace("__MAX_DEAD_AGE_MS__", str(MAX_DEAD_AGE_SECONDS * 1000)).replace(
        "__MAX_DEAD_LETTERS__", str(MAX_DEAD_LETTERS)
    )
)

REVIVE = LuaScript("""
-- KEYS stream, dead; ARGV dead letter ids
-- The count of deliveries starts again. The counts of silent ends stay: a message that may have killed its worker must
-- be executed in a child process again.
local revived = 0
for a = 1, #ARGV do
  local entry = redis.call('XRANGE', KEYS[2], ARGV[a], ARGV[a])[1]
  if entry then
    local rest = {}
    for f = 1, #entry[2], 2 do
      local name = entry[2][f]
      if name == 'i' or name == 'b' or name == 's' or name == 'r' or name == 'x' or name == 'y' then
        rest[#rest + 1] = name
        rest[#rest + 1] = entry[2][f + 1]
      end
    end
    redis.call('XADD', KEYS[1], '*', unpack(rest))
    redis.call('XDEL', KEYS[2], ARGV[a])
    revived = revived + 1
  end
end
return revived
""")

SWEEP = LuaScript(
    _NOW
    + _REQUEUE
    + """
-- KEYS stream, delayed, sweeper lock; ARGV token, duration of the lock in ms, most to move, idle ms of a stray consumer
-- Returns {} when another process holds the lock, else {moved, ms until the next delay is due or -1, leases held,
-- consumer names}.
local holder = redis.call('GET', KEYS[3])
if holder and holder ~= ARGV[1] then return {} end
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
local time = now()
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', time, 'LIMIT', 0, ARGV[3])
for _, member in ipairs(due) do
  local uncounted = string.sub(member, 1, 1) == '!'
  requeue(uncounted and string.sub(member, 2) or member, uncounted and 0 or 1, 0)
  redis.call('ZREM', KEYS[2], member)
end
local wait = -1
local soonest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if soonest[2] then wait = math.max(0, tonumber(soonest[2]) - time) end
local names, held = {}, 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], 'fairtrial')) do
  if consumer[4] > 0 then
    names[#names + 1] = consumer[2]
    held = held + consumer[4]
  elseif consumer[6] > tonumber(ARGV[4]) then
    -- Only with nothing pending: what a deleted consumer had pending would be lost.
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'fairtrial', consumer[2])
  end
end
-- Many leases make for long pauses between sweeps; the lock must outlast them.
redis.call('PEXPIRE', KEYS[3], math.max(tonumber(ARGV[2]), math.ceil(held / 10)))
return {#due, wait, held, names}
"""
)

RECLAIM = LuaScript(
    _REQUEUE
    + """
-- KEYS stream; ARGV consumer, its lease in ms, most to move, whether leases of other workers ended too (0 or 1).
-- Returns how many leases had run out.
local late = redis.call('XPENDING', KEYS[1], 'fairtrial', 'IDLE', ARGV[2], '-', '+', ARGV[3], ARGV[1])
local together = tonumber(ARGV[4])
for _, found in ipairs(late) do requeue(found[1], 1, 1 - together, together) end
return #late
"""
)

LATE = LuaScript("""
-- KEYS stream; ARGV consumer, its lease in ms. Returns 1 when one of its leases has run out.
return #redis.call('XPENDING', KEYS[1], 'fairtrial', 'IDLE', ARGV[2], '-', '+', 1, ARGV[1])
""")

RESIGN = LuaScript("""
-- KEYS stream, sweeper; ARGV token, then consumers to retire
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local retired = 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], 'fairtrial')) do
  for a = 2, #ARGV do
    if consumer[2] == ARGV[a] and consumer[4] == 0 then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'fairtrial', consumer[2])
      retired = retired + 1
    end
  end
end
return retired
""")

DEPTH = LuaScript("""
-- KEYS stream, delayed, dead. Returns {entries, pending, delayed, dead}.
local pending = redis.pcall('XPENDING', KEYS[1], 'fairtrial')
return {redis.call('XLEN', KEYS[1]), pending.err and 0 or pending[1], redis.call('ZCARD', KEYS[2]),
  redis.call('XLEN', KEYS[3])}
""")

OLDEST = LuaScript("""
-- KEYS stream. Returns the id of the first entry that was not delivered yet, '' if there is none or it is not allowed.
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then return '' end
local after = '-'  -- Without a group, nobody has received yet.
for _, group in ipairs(groups) do
  local facts = {}
  for place = 1, #group, 2 do facts[group[place]] = group[place + 1] end
  if facts['name'] == 'fairtrial' then after = '(' .. facts['last-delivered-id'] end
end
local first = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', 1)[1]
return first and first[1] or ''
""")

ASKED = LuaScript("""
-- KEYS stream; ARGV reply address, entry id to begin after or '-', most to look at.
-- Returns 1 when an entry asks for replies there, 0 when none to the end does, else the id to continue after.
local start = ARGV[2]
if start ~= '-' then start = '(' .. start end
local entries = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', ARGV[3])
for _, entry in ipairs(entries) do
  for f = 1, #entry[2], 2 do
    if entry[2][f] == 'r' and entry[2][f + 1] == ARGV[1] then return 1 end
  end
end
if #entries < tonumber(ARGV[3]) then return 0 end
return entries[#entries][1]
""")

PURGE = LuaScript("""
-- KEYS stream, delayed; ARGV most to remove at once. Returns how many were removed; call again until it is 0.
local removed = 0
local entries = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1])
for _, entry in ipairs(entries) do
  redis.pcall('XACK', KEYS[1], 'fairtrial', entry[1])
  redis.call('ZREM', KEYS[2], entry[1], '!' .. entry[1])
  removed = removed + redis.call('XDEL', KEYS[1], entry[1])
end
return removed
""")

PURGE_REPLIES = LuaScript("""
-- KEYS stream, delayed; ARGV entry id to begin after or '-', most to look at, then reply addresses.
-- Removes the entries that ask for replies there. Returns {how many, the id to continue after or ''}.
local start, wanted, removed = ARGV[1], {}, 0
if start ~= '-' then start = '(' .. start end
for place = 3, #ARGV do wanted[ARGV[place]] = true end
local entries = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', ARGV[2])
for _, entry in ipairs(entries) do
  for f = 1, #entry[2], 2 do
    if entry[2][f] == 'r' and wanted[entry[2][f + 1]] then
      redis.pcall('XACK', KEYS[1], 'fairtrial', entry[1])
      redis.call('ZREM', KEYS[2], entry[1], '!' .. entry[1])
      removed = removed + redis.call('XDEL', KEYS[1], entry[1])
    end
  end
end
if #entries < tonumber(ARGV[2]) then return {removed, ''} end
return {removed, entries[#entries][1]}
""")

READERS = LuaScript("""
-- KEYS stream. Returns {seconds now, id of the oldest entry in flight or '', {{name, pending, idle ms}, ...}}.
local readers = {}
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], 'fairtrial')
if consumers.err then return {redis.call('TIME')[1], '', readers} end
for _, consumer in ipairs(consumers) do
  local facts = {}
  for place = 1, #consumer, 2 do facts[consumer[place]] = consumer[place + 1] end
  table.insert(readers, {facts['name'], facts['pending'], facts['idle']})
end
local pending = redis.call('XPENDING', KEYS[1], 'fairtrial')
return {redis.call('TIME')[1], pending[2] or '', readers}
""")

ANNOUNCE = LuaScript(
    _NOW
    + """
-- KEYS workers; ARGV member, how long it lasts in ms (0 to withdraw it), how long expired ones are kept in ms
local time = now()
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', time - ARGV[3], 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[1], member)
end
local lasts = tonumber(ARGV[2])
if lasts == 0 then return redis.call('ZREM', KEYS[1], ARGV[1]) end
redis.call('ZADD', KEYS[1], time + lasts, ARGV[1])
return redis.call('PEXPIRE', KEYS[1], lasts + ARGV[3])
"""
)

ANNOUNCED = LuaScript(
    _NOW
    + """
-- KEYS workers; ARGV most to return. Returns the members that have not expired.
return redis.call('ZRANGEBYSCORE', KEYS[1], now(), '+inf', 'LIMIT', 0, ARGV[1])
"""
)

WORKERS = LuaScript(
    _NOW
    + """
-- KEYS workers; ARGV most to return. Returns {ms now, {member, ms when it expires, ...}}, also of expired ones.
return {now(), redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1, 'REV', 'WITHSCORES')}
"""
)

ALL: Final = (
    SEND,
    SEND_ALL,
    ACK,
    NACK,
    EXTEND,
    BURY,
    REVIVE,
    SWEEP,
    RECLAIM,
    LATE,
    RESIGN,
    DEPTH,
    OLDEST,
    ASKED,
    PURGE,
    PURGE_REPLIES,
    READERS,
    ANNOUNCE,
    ANNOUNCED,
    WORKERS,
)
