"""The statements of mailboxes on PostgreSQL. Each is one transaction.

`clock_timestamp()` is the time at which it is evaluated; `now()` would be that of the transaction's start. As the bound
of an index scan it is in a subquery, because a volatile function cannot be one.

Rows are locked in the order of their ids where several may be changed, so that settling and renewing the same messages
at once cannot deadlock.
"""

# ruff: noqa: S608 - values of callers are parameters and never part of a text

from __future__ import annotations

from typing import Final, LiteralString

CHANNEL: Final = "fairtrial_mailbox_"
"""The prefix of the channels on which receivers are notified; the id of the queue follows."""

_QUEUE: Final = "(SELECT id FROM mailbox_queues WHERE name = %(name)s)"
_UNSETTLED: Final = f"mailbox_messages WHERE queue = {_QUEUE} AND death IS NULL"
_NOW: Final = "(SELECT clock_timestamp())"
_NOTIFY: Final = f"pg_notify('{CHANNEL}' || queues.id, '')"

VERSION: Final = "SELECT version FROM mailbox_schema"

SERVER: Final[LiteralString] = """
    SELECT current_setting('server_version'), extract(epoch FROM clock_timestamp())::float8,
        current_setting('max_connections')::integer, (SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL),
        to_regclass('mailbox_messages')::text, has_schema_privilege(current_schema(), 'CREATE')
"""

OPEN: Final[LiteralString] = """
    INSERT INTO mailbox_queues (name, expires_at)
    VALUES (%(name)s, clock_timestamp() + make_interval(secs => %(ttl)s))
    ON CONFLICT (name) DO UPDATE SET expires_at = CASE WHEN %(ttl)s::float8 IS NULL
        THEN mailbox_queues.expires_at ELSE EXCLUDED.expires_at END
    RETURNING id
"""

FIND: Final[LiteralString] = "SELECT id FROM mailbox_queues WHERE name = %(name)s"

NAMES: Final[LiteralString] = """
    SELECT name FROM mailbox_queues WHERE right(name, length(%(suffix)s)) = %(suffix)s ORDER BY name LIMIT %(most)s
"""

EXPIRE: Final[LiteralString] = """
    UPDATE mailbox_queues SET expires_at = clock_timestamp() + make_interval(secs => %(ttl)s) WHERE name = %(name)s
"""

_REMOVE: Final = """
    WITH gone AS (DELETE FROM mailbox_queues WHERE {which} RETURNING id),
    workers AS (DELETE FROM mailbox_workers USING gone WHERE queue = gone.id)
    SELECT id FROM gone
"""

REMOVE: Final = _REMOVE.format(which="name = %(name)s")
REMOVE_EXPIRED: Final = _REMOVE.format(which=f"expires_at < {_NOW}")

# Both indexes of messages are partial: one statement for all messages of a queue would read the whole table.
_OF_QUEUES: Final = """
    DELETE FROM mailbox_messages WHERE id IN (
        SELECT id FROM mailbox_messages WHERE queue = ANY(%(queues)s) AND death IS {death}
        LIMIT %(most)s FOR UPDATE SKIP LOCKED
    )
"""

REMOVE_UNSETTLED: Final = _OF_QUEUES.format(death="NULL")
REMOVE_DEAD: Final = _OF_QUEUES.format(death="NOT NULL")

REMOVE_OLD_LETTERS: Final[LiteralString] = """
    DELETE FROM mailbox_messages
    WHERE death IS NOT NULL AND died_at < (SELECT clock_timestamp() - interval '30 days')
"""

# The queues that messages name, each found by one step in an index, as there are many messages and few queues.
_NAMED_QUEUES: Final = """(
    SELECT queue FROM mailbox_messages WHERE death IS {death} {after} ORDER BY queue, {order} LIMIT 1
)"""
_NAMED: Final = """
    {name} AS (
        {first}
        UNION ALL SELECT {next} FROM {name} WHERE {name}.queue IS NOT NULL
    )
"""
_WAITING: Final = _NAMED.format(
    name="waiting",
    first=_NAMED_QUEUES.format(death="NULL", after="", order="visible_at"),
    next=_NAMED_QUEUES.format(death="NULL", after="AND queue > waiting.queue", order="visible_at"),
)
_DEAD: Final = _NAMED.format(
    name="dead",
    first=_NAMED_QUEUES.format(death="NOT NULL", after="", order="death"),
    next=_NAMED_QUEUES.format(death="NOT NULL", after="AND queue > dead.queue", order="death"),
)

ABANDONED: Final = f"""
    WITH RECURSIVE {_WAITING}, {_DEAD}
    SELECT queue FROM (SELECT queue FROM waiting UNION SELECT queue FROM dead) AS named
    WHERE queue IS NOT NULL AND NOT EXISTS (SELECT FROM mailbox_queues WHERE id = named.queue)
"""
"""The ids of queues that were removed and have messages: the process that removed them was killed meanwhile."""

SEND: Final[LiteralString] = f"""
    WITH queues AS MATERIALIZED (
        SELECT id FROM mailbox_queues
        WHERE name = %(name)s AND (expires_at IS NULL OR expires_at > clock_timestamp())
        FOR KEY SHARE  -- So that the queue is not removed before the messages are committed.
    ), sent AS (
        INSERT INTO mailbox_messages (queue, kept, body, reply_to)
        SELECT queues.id, row.kept, row.body, NULLIF(row.reply_to, '')
        FROM queues, unnest(%(kept)b::boolean[], %(bodies)b::bytea[], %(addresses)b::text[]) WITH ORDINALITY
            AS row (kept, body, reply_to, place)
        ORDER BY place
        RETURNING id
    )
    SELECT (SELECT array_agg(id ORDER BY id) FROM sent), {_NOTIFY} FROM queues
"""

CLAIM: Final[LiteralString] = f"""
    WITH due AS MATERIALIZED (
        SELECT id, lease, holder, visible_at FROM {_UNSETTLED} AND visible_at <= {_NOW}
        ORDER BY visible_at LIMIT %(count)s FOR UPDATE SKIP LOCKED
    ), lost AS MATERIALIZED (SELECT count(DISTINCT holder) AS holders FROM due WHERE lease <> 0)
    UPDATE mailbox_messages AS message SET
        visible_at = clock_timestamp() + make_interval(secs => %(seconds)s),
        leased_at = clock_timestamp(),
        lease = %(lease)s,
        holder = %(holder)s,
        deliveries = message.deliveries + 1,
        half_expiries = message.half_expiries
            + CASE WHEN due.lease = 0 THEN 0 WHEN lost.holders > 1 THEN 1 ELSE 2 END
    FROM due, lost WHERE message.id = due.id
    RETURNING message.id, message.body, message.kept, message.deliveries, message.half_expiries / 2,
        message.reply_to, extract(epoch FROM message.leased_at - due.visible_at)::float8, due.visible_at
"""

NEXT_DUE: Final[LiteralString] = """
    SELECT id, (
        SELECT greatest(0, extract(epoch FROM visible_at - clock_timestamp()))::float8 FROM mailbox_messages
        WHERE queue = queues.id AND death IS NULL ORDER BY visible_at LIMIT 1
    ) FROM mailbox_queues AS queues WHERE name = %(name)s
"""

_HELD: Final = """
    WITH held AS MATERIALIZED (
        SELECT message.id, row.* FROM mailbox_messages AS message
        JOIN unnest({arrays}) AS row ({names}) ON message.id = row.message AND message.lease = row.token
        WHERE message.visible_at > clock_timestamp()
        ORDER BY message.id FOR UPDATE OF message
    )
"""

_LEASES: Final = _HELD.format(arrays="%(ids)b::bigint[], %(leases)b::bigint[]", names="message, token")

ACKNOWLEDGE: Final = (
    _LEASES + "DELETE FROM mailbox_messages AS message USING held WHERE message.id = held.id RETURNING message.id"
)

NACK: Final = (
    _HELD.format(
        arrays="%(ids)b::bigint[], %(leases)b::bigint[], %(delays)b::float8[], %(counted)b::integer[]",
        names="message, token, delay, counted",
    )
    + f""", returned AS (
        UPDATE mailbox_messages AS message SET
            lease = 0, holder = 0, leased_at = NULL,
            visible_at = clock_timestamp() + make_interval(secs => held.delay),
            deliveries = message.deliveries - 1 + held.counted
        FROM held WHERE message.id = held.id
        RETURNING message.id, message.queue
    ), queues AS (SELECT queue AS id, array_agg(id) AS messages FROM returned GROUP BY queue)
    SELECT messages, {_NOTIFY} FROM queues
"""
)

EXTEND: Final = (
    _HELD.format(
        arrays="%(ids)b::bigint[], %(leases)b::bigint[], %(seconds)b::float8[]", names="message, token, seconds"
    )
    + """
    UPDATE mailbox_messages AS message SET visible_at = clock_timestamp() + make_interval(secs => held.seconds)
    FROM held WHERE message.id = held.id RETURNING message.id
"""
)

RENEW: Final = (
    _LEASES
    + """
    UPDATE mailbox_messages AS message SET visible_at = clock_timestamp() + make_interval(secs => %(seconds)s)
    FROM held WHERE message.id = held.id RETURNING message.id
"""
)

DEAD_LETTER: Final = (
    _HELD.format(
        arrays="%(ids)b::bigint[], %(leases)b::bigint[], %(reasons)b::text[], %(errors)b::text[]",
        names="message, token, reason, error",
    )
    + """
    UPDATE mailbox_messages AS message SET
        lease = 0, holder = 0, leased_at = NULL, death = nextval('mailbox_deaths'), died_at = clock_timestamp(),
        reason = held.reason, error = held.error
    FROM held WHERE message.id = held.id RETURNING message.id
"""
)

COUNT: Final[LiteralString] = f"SELECT count(*) FROM {_UNSETTLED}"

# Waiting messages, of which there may be very many, are counted in the index alone.
DEPTH: Final[LiteralString] = f"""
    WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS moment)
    SELECT (SELECT count(*) FROM {_UNSETTLED} AND visible_at <= (SELECT moment FROM clock)),
        count(*) FILTER (WHERE lease = 0), count(*) FILTER (WHERE lease <> 0),
        (SELECT count(*) FROM mailbox_messages WHERE queue = {_QUEUE} AND death IS NOT NULL)
    FROM {_UNSETTLED} AND visible_at > (SELECT moment FROM clock)
"""

OLDEST: Final[LiteralString] = f"""
    SELECT extract(epoch FROM clock_timestamp() - visible_at)::float8
    FROM {_UNSETTLED} AND visible_at <= {_NOW} ORDER BY visible_at LIMIT 1
"""

ASKED: Final[LiteralString] = f"SELECT EXISTS (SELECT FROM {_UNSETTLED} AND reply_to = %(address)s)"

REPLY_ADDRESSES: Final[LiteralString] = f"""
    SELECT reply_to, count(*) FROM {_UNSETTLED} AND reply_to IS NOT NULL GROUP BY reply_to
"""

_PURGE: Final = f"""
    DELETE FROM mailbox_messages WHERE id IN (
        SELECT id FROM {_UNSETTLED} {{filter}} ORDER BY id LIMIT %(most)s FOR UPDATE
    )
"""

PURGE: Final = _PURGE.format(filter="")
PURGE_REPLIES: Final = _PURGE.format(filter="AND reply_to = ANY(%(addresses)s)")

READERS: Final[LiteralString] = f"""
    SELECT holder, count(*), min(extract(epoch FROM clock_timestamp() - leased_at))::float8,
        max(extract(epoch FROM clock_timestamp() - leased_at))::float8,
        max(extract(epoch FROM visible_at - clock_timestamp()))::float8
    FROM {_UNSETTLED} AND visible_at > {_NOW} AND lease <> 0 GROUP BY holder
"""

ANNOUNCE: Final[LiteralString] = """
    WITH forgotten AS (
        DELETE FROM mailbox_workers WHERE expires_at < clock_timestamp() - make_interval(secs => %(kept)s)
    )
    INSERT INTO mailbox_workers (queue, worker, holder, fingerprint, expires_at)
    SELECT id, %(worker)s, %(holder)s, %(fingerprint)s, clock_timestamp() + make_interval(secs => %(seconds)s)
    FROM mailbox_queues WHERE name = %(name)s
    ON CONFLICT (queue, worker) DO UPDATE SET holder = EXCLUDED.holder, fingerprint = EXCLUDED.fingerprint,
        expires_at = EXCLUDED.expires_at
"""

WITHDRAW: Final[LiteralString] = f"DELETE FROM mailbox_workers WHERE queue = {_QUEUE} AND worker = %(worker)s"

WORKERS: Final[LiteralString] = f"""
    SELECT worker, holder, fingerprint, extract(epoch FROM expires_at - clock_timestamp())::float8
    FROM mailbox_workers WHERE queue = {_QUEUE} ORDER BY worker LIMIT %(most)s
"""

DEAD_COUNT: Final[LiteralString] = f"""
    SELECT count(*) FROM mailbox_messages WHERE queue = {_QUEUE} AND death IS NOT NULL
"""

DEAD_PAGE: Final[LiteralString] = f"""
    SELECT death, id, body, kept, deliveries, reason, error, reply_to, extract(epoch FROM died_at)::float8
    FROM mailbox_messages WHERE queue = {_QUEUE} AND death > %(after)s ORDER BY death LIMIT %(limit)s
"""

RETRY: Final[LiteralString] = f"""
    WITH retried AS (
        UPDATE mailbox_messages SET death = NULL, died_at = NULL, reason = NULL, error = NULL, deliveries = 0,
            visible_at = clock_timestamp()
        WHERE queue = {_QUEUE} AND death = ANY(%(ids)s)
        RETURNING queue
    ), queues AS (SELECT queue AS id, count(*) AS number FROM retried GROUP BY queue)
    SELECT number, {_NOTIFY} FROM queues
"""

DROP: Final[LiteralString] = f"DELETE FROM mailbox_messages WHERE queue = {_QUEUE} AND death = ANY(%(ids)s)"
