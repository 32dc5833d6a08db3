"""The SQL of a mailbox: its tables, its statements, and their batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, LiteralString

from fairtrial.errors import MailboxClosedError, MailboxError

MAX_OPERATIONS = 500
MAX_BYTES = 4 * 1024 * 1024

type Operation = Callable[[str, Sequence[Any]], Awaitable[Sequence[Any]]]
"""Executes a batch on one mailbox and returns an answer for each item."""


class _Batch:
    __slots__ = ("futures", "items", "size")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.size = 0


class StatementBatcher:
    """Collects operations and executes them together."""

    def __init__(self) -> None:
        self._open: dict[tuple[Operation, str], _Batch] = {}
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, operation: Operation, mailbox: str, item: Any, size: int = 0) -> Any:
        """Execute an operation in the next batch for this mailbox and return its answer."""
        if self._closed:
            raise MailboxClosedError("the connection to PostgreSQL is closed")
        loop = asyncio.get_running_loop()
        batch = self._open.setdefault((operation, mailbox), _Batch())
        future: asyncio.Future[Any] = loop.create_future()
        batch.items.append(item)
        batch.futures.append(future)
        batch.size += size
        if self._running is None:
            # The task starts in the next iteration of the event loop, after all operations of this one were added.
            self._running = loop.create_task(self._run(), name="fairtrial mailbox operations")
        return await future

    async def _run(self) -> None:
        try:
            while self._open:
                batches, self._open = self._open, {}
                parts = [
                    (operation, mailbox, part)
                    for (operation, mailbox), batch in batches.items()
                    for part in _parts(batch)
                ]
                await asyncio.gather(*(_execute(*part) for part in parts))
        finally:
            self._running = None

    async def close(self) -> None:
        """Execute the pending operations, then refuse more."""
        self._closed = True
        while self._running is not None:
            await asyncio.wait([self._running])


def _parts(batch: _Batch) -> list[_Batch]:
    """Split a batch that is too large for one statement."""
    if len(batch.items) <= MAX_OPERATIONS and batch.size <= MAX_BYTES:
        return [batch]
    count = MAX_OPERATIONS if batch.size <= MAX_BYTES else max(1, MAX_BYTES * len(batch.items) // batch.size)
    parts = []
    for start in range(0, len(batch.items), min(count, MAX_OPERATIONS)):
        part = _Batch()
        part.items = batch.items[start : start + min(count, MAX_OPERATIONS)]
        part.futures = batch.futures[start : start + min(count, MAX_OPERATIONS)]
        parts.append(part)
    return parts


async def _execute(operation: Operation, mailbox: str, batch: _Batch) -> None:
    try:
        answers = await operation(mailbox, batch.items)
    except BaseException as error:  # Waiting callers must receive any error.
        told: BaseException = error
        if not isinstance(error, Exception):
            told = MailboxClosedError("the connection to PostgreSQL was closed before the operation was executed")
        for future in batch.futures:
            if not future.done():
                future.set_exception(told)
                future.exception()  # Mark as retrieved: a cancelled caller will not do so.
        if not isinstance(error, MailboxError | Exception):
            raise
        return
    for future, answer in zip(batch.futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


MIGRATION_LOCK: Final = 0x66616971
"""The key of the advisory lock under which the tables are created and migrated."""

# Every message leaves two dead rows. The default of autovacuum waits for a fifth of the table, and pauses as it works.
_VACUUM: Final = """
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.1,
    toast.autovacuum_vacuum_scale_factor = 0.01, toast.autovacuum_vacuum_threshold = 5000,
    toast.autovacuum_vacuum_cost_delay = 0
"""

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        "CREATE TABLE mailbox_schema (version integer NOT NULL)",
        "INSERT INTO mailbox_schema VALUES (0)",
        """CREATE TABLE mailbox_queues (
            id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            name text NOT NULL UNIQUE,
            expires_at timestamptz
        )""",
        "CREATE INDEX mailbox_queues_expiry ON mailbox_queues (expires_at) WHERE expires_at IS NOT NULL",
        f"""CREATE TABLE mailbox_messages (
            id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
            visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            lease bigint NOT NULL DEFAULT 0,
            holder bigint NOT NULL DEFAULT 0,
            leased_at timestamptz,
            death bigint,
            died_at timestamptz,
            queue integer NOT NULL,
            deliveries integer NOT NULL DEFAULT 0,
            half_expiries integer NOT NULL DEFAULT 0,
            kept boolean NOT NULL DEFAULT false,
            reply_to text,
            reason text,
            error text,
            body bytea NOT NULL
        ) WITH ({_VACUUM})""",
        "ALTER TABLE mailbox_messages ALTER body SET STORAGE EXTERNAL",  # Bodies are compressed before they are sent.
        "CREATE INDEX mailbox_messages_due ON mailbox_messages (queue, visible_at) WHERE death IS NULL",
        "CREATE INDEX mailbox_messages_dead ON mailbox_messages (queue, death) WHERE death IS NOT NULL",
        "CREATE SEQUENCE mailbox_deaths",
        """CREATE TABLE mailbox_workers (
            queue integer NOT NULL,
            worker text NOT NULL,
            holder bigint NOT NULL,
            fingerprint text NOT NULL,
            expires_at timestamptz NOT NULL,
            PRIMARY KEY (queue, worker)
        )""",
    ),
    # Times in microseconds; half of each page stays free, so that new versions of a row fit beside the old ones.
    (
        """CREATE TABLE IF NOT EXISTS fleet_limits (
            name text PRIMARY KEY,
            requests_at float8,
            tokens_at float8,
            paused_until float8,
            epoch bigint NOT NULL DEFAULT 0,
            began_at float8,
            rate float8,
            ceiling float8,
            grown_at float8,
            used_at timestamptz NOT NULL DEFAULT clock_timestamp()
        ) WITH (fillfactor = 50)""",
        """CREATE TABLE IF NOT EXISTS fleet_spending (
            name text PRIMARY KEY,
            requests bigint NOT NULL,
            input_tokens bigint NOT NULL,
            output_tokens bigint NOT NULL,
            cached_tokens bigint NOT NULL,
            dollars float8,
            used_at timestamptz NOT NULL DEFAULT clock_timestamp()
        ) WITH (fillfactor = 50)""",
    ),
    (
        """CREATE INDEX mailbox_messages_reply ON mailbox_messages (queue, reply_to)
            WHERE death IS NULL AND reply_to IS NOT NULL""",
        "CREATE INDEX mailbox_messages_died ON mailbox_messages (died_at) WHERE death IS NOT NULL",
    ),
)

SCHEMA_VERSION: Final = len(MIGRATIONS)


# ruff: noqa: S608 - values of callers are parameters and never part of a text


CHANNEL: Final = "fairtrial_mailbox_"
"""The prefix of the channels on which receivers are notified; the id of the queue follows."""

_QUEUE: Final = "(SELECT id FROM mailbox_queues WHERE name = %(name)s)"
_UNSETTLED: Final = f"mailbox_messages WHERE queue = {_QUEUE} AND death IS NULL"
_NOW: Final = "(SELECT clock_timestamp())"
_NOTIFY: Final = f"pg_notify('{CHANNEL}' || queues.id, '')"

FIND_VERSION: Final = "SELECT version FROM mailbox_schema"

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
