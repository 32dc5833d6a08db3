"""Connections to PostgreSQL: a pool, notifications, errors."""

from __future__ import annotations

import asyncio
import logging
import secrets
import select
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairtrial import errors
from fairtrial.base.backoff import longest_pause
from fairtrial.base.system import require_posix
from fairtrial.mailbox.batcher import Batcher, OpenBatch
from fairtrial.mailbox.postgres.statements import (
    FIND_VERSION,
    MAX_BYTES,
    MAX_OPERATIONS,
    MIGRATION_LOCK,
    MIGRATIONS,
    SCHEMA_VERSION,
)
from fairtrial.mailbox.server import ServerConnection
from fairtrial.store import bounded, bulk
from fairtrial.store.redact import register_guess

_FULL = ("53100", "53200")  # disk_full, out_of_memory
_READ_ONLY = "25006"  # As during a failover.
# The server tells the state of a refused connection, but psycopg passes on the text alone.
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "permission denied for database")
_POOLED = ("unsupported startup parameter", "prepared statement")


def translated(error: BaseException, doing: str) -> errors.FairtrialError:
    """Return the error as a `MailboxError`, with the text of the server, which contains no URL and no password."""
    if isinstance(error, errors.FairtrialError):
        return error
    text = f"{doing}: {_first_lines(str(error))}"
    if any(part in text for part in _POOLED):
        return errors.ConfigurationError(f"{text}\nfor a PgBouncer, add ?pgbouncer=true to the address")
    state = getattr(error, "sqlstate", None) or ""
    if isinstance(error, psycopg.errors.InsufficientPrivilege) or state.startswith("28") or _is_refusal(text):
        return errors.MailboxAccessError(text)
    if state in _FULL:
        return errors.MailboxFullError(text)
    if isinstance(error, psycopg.OperationalError | OSError | TimeoutError) or state == _READ_ONLY:
        return errors.MailboxConnectionError(text)
    return errors.MailboxError(text)


def _is_refusal(text: str) -> bool:
    return any(part in text for part in _REFUSED) or ('role "' in text and "does not exist" in text)


def _first_lines(text: str) -> str:
    """Return the message without the multiple attempts and the row data that may follow."""
    lines = [line for line in text.strip().splitlines() if not line.startswith(("DETAIL", "CONTEXT", "- "))]
    return " ".join(lines[:2])


_log = logging.getLogger(__name__)
_PROBE_SECONDS = 2.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# After a probe that did not arrive: the server may have been busy, or a PgBouncer loses all notifications.
_FIRST_PROBE_PAUSE = 60.0
_LONGEST_PROBE_PAUSE = 3600.0

type Connect = Callable[[], Awaitable[psycopg.AsyncConnection[Any]]]


class Listener:
    """Listens on the channels of mailboxes.

    Args:
        connect: Opens the connection.
        notify: Sends a notification by another connection, to test that notifications arrive.
    """

    def __init__(self, connect: Connect, notify: Callable[[str], Awaitable[Any]]) -> None:
        self._connect = connect
        self._notify = notify
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._arrivals: dict[str, int] = {}  # The number of the last notification on each channel.
        self._numbers = count(1)
        self._listened: set[str] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._probe = f"fairtrial_probe_{secrets.token_hex(8)}"

    def listens(self, channel: str) -> bool:
        """Return whether notifications on this channel arrive."""
        return channel in self._listened

    def arrivals(self, channel: str) -> int | None:
        """Return a number that changes when a message arrives; None while notifications do not arrive."""
        return self._arrivals.get(channel, 0) if channel in self._listened else None

    def subscribe(self, channel: str) -> asyncio.Event:
        """Return an event that is set when a message arrives, and when listening begins or ends."""
        event = asyncio.Event()
        if channel not in self._waiting:
            self._waiting[channel] = set()
            self._changed.set()
        self._waiting[channel].add(event)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="fairtrial mailbox listener")
        return event

    def unsubscribe(self, channel: str, event: asyncio.Event) -> None:
        """Stop waiting; the channel stays open, because another receive usually follows."""
        self._waiting.get(channel, set()).discard(event)

    def forget(self, channel: str) -> None:
        """Stop listening on a channel that no mailbox of this process uses any more."""
        if not self._waiting.get(channel):
            self._waiting.pop(channel, None)
            self._arrivals.pop(channel, None)
            self._changed.set()

    async def close(self) -> None:
        """End listening."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _wake(self, channel: str) -> None:
        if channel in self._waiting:
            self._arrivals[channel] = next(self._numbers)
        for event in self._waiting.get(channel, ()):
            event.set()

    def _wake_all(self) -> None:
        for channel in list(self._waiting):
            self._wake(channel)

    async def _run(self) -> None:
        failures = lost_probes = 0
        while True:
            try:
                connection = await self._connect()
                try:
                    if await self._receives(connection):
                        failures = lost_probes = 0
                        await self._listen(connection)
                    else:
                        lost_probes += 1
                finally:
                    self._listened.clear()
                    self._wake_all()
                    await connection.close()
            except (psycopg.Error, OSError, errors.FairtrialError) as error:
                _log.debug("listening for messages failed: %s", error)
            failures += 1
            pause = longest_pause(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)
            if lost_probes:
                pause = longest_pause(lost_probes, first=_FIRST_PROBE_PAUSE, longest=_LONGEST_PROBE_PAUSE)
                _log.log(
                    logging.WARNING if lost_probes == 1 else logging.DEBUG,
                    "PostgreSQL's notifications do not arrive here within %g s, so mailboxes look for messages often; "
                    "notifications are tried again in %.0f s. Behind a PgBouncer in transaction mode, add "
                    "?pgbouncer=true to the address",
                    _PROBE_SECONDS,
                    pause,
                )
            await asyncio.sleep(pause)

    async def _receives(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """Return whether a notification that is sent by another connection arrives at this one."""
        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._probe)))
        await self._notify(self._probe)
        async for _ in connection.notifies(timeout=_PROBE_SECONDS, stop_after=1):
            return True
        return False

    async def _listen(self, connection: psycopg.AsyncConnection[Any]) -> None:
        loop = asyncio.get_running_loop()
        readable = self._changed
        connection.add_notify_handler(lambda notification: self._wake(notification.channel))
        while True:
            readable.clear()
            await self._change_channels(connection)
            self._read(connection)  # What came with the answer of a statement makes the socket readable no more.
            # psycopg registers the socket itself while a statement runs, and removes it afterwards.
            loop.add_reader(connection.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(connection.fileno())
            self._read(connection)

    def _read(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Wake the receivers of all notifications that have arrived; raises if the connection was closed."""
        connection.pgconn.consume_input()
        while (notification := connection.pgconn.notifies()) is not None:
            self._wake(notification.relname.decode())

    async def _change_channels(self, connection: psycopg.AsyncConnection[Any]) -> None:
        for channel in self._listened - self._waiting.keys():
            self._listened.discard(channel)
            await connection.execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
        for channel in [*(self._waiting.keys() - self._listened)]:
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self._listened.add(channel)
            self._wake(channel)  # What was sent before the channel was open is not notified.


MAX_CONNECTIONS = 2
"""Connections for statements: one, and another while a statement takes long. They are opened when needed."""
_STATEMENT_SECONDS = 60
_LOCK_SECONDS = 10
_IDLE_SECONDS = 10.0
_ANSWER_SECONDS = _STATEMENT_SECONDS + bounded.ANSWER_MARGIN_SECONDS

type PostgresSource = PostgresConnection | str
"""A connection or a URL."""

type Rows = list[tuple[Any, ...]]


class PostgresConnection(ServerConnection):
    """The connections of one process to one PostgreSQL database, shared by all its mailboxes there.

    Every statement is one transaction. Nothing is retried implicitly: a send that raised may have arrived, and only the
    caller knows whether sending twice is harmless.

    Args:
        url: `postgresql://[user[:password]@]host[:port]/database`, with any parameter of libpq, such as
            `?sslmode=verify-full`. `?pgbouncer=true` is for a PgBouncer in transaction mode: no notifications, no
            prepared statements, no startup options.
        timeout_seconds: Time limit for connecting.
        max_connections: The number of connections for statements; two more may be open for notifications and renewals.
    """

    server = "PostgreSQL"
    required = "a PostgreSQL mailbox requires a connection: a URL, or a PostgresConnection"

    def __init__(self, url: str, *, timeout_seconds: float = 10.0, max_connections: int = MAX_CONNECTIONS) -> None:
        require_posix("a mailbox on PostgreSQL works", "use Redis or SQS")  # psycopg refuses the event loop of Windows.
        if max_connections < 1:
            raise errors.ConfigurationError(f"max_connections must be at least 1 (got {max_connections})")
        super().__init__(url)
        self._parameters, self.pooled = _parse(url)
        self._parameters["connect_timeout"] = max(2, round(timeout_seconds))
        self._idle: list[psycopg.AsyncConnection[Any]] = []
        self._free = asyncio.Semaphore(max_connections)
        self._under_way: set[asyncio.Task[Rows]] = set()
        self._prepared = False
        self._preparing = asyncio.Lock()
        self.batcher = Batcher(self.server, _run_batches, MAX_OPERATIONS, MAX_BYTES)
        self.listener = Listener(self._connect, self._notify)
        self.renewals = RenewalConnection(self._conninfo(), self._prepare_threshold())

    @property
    def address(self) -> str:
        """The address without user and password."""
        found = self._parameters
        port = found.get("port")
        return f"postgresql://{found.get('host') or ''}{f':{port}' if port else ''}/{found.get('dbname') or ''}"

    def __repr__(self) -> str:
        return f"PostgresConnection({self.address})"

    async def run(self, doing: str, statement: str, parameters: Mapping[str, Any]) -> Rows:
        """Run a statement to its end, also if the caller is cancelled, and return its rows.

        Raises:
            MailboxError: an error of the server or the connection.
        """
        return await self._finish(doing, self._run(statement, parameters))

    async def ask(self, doing: str, statement: str) -> Rows:
        """Run a statement that needs none of our tables, and create none."""
        self.check_loop()
        try:
            return await self._execute(statement, {}, counted=False)
        except (psycopg.Error, OSError) as error:
            raise translated(error, doing) from None

    async def change(self, doing: str, statement: str, parameters: Mapping[str, Any]) -> int:
        """Run a statement that returns no rows, and return the number of rows that it changed."""
        ((count,),) = await self._finish(doing, self._run(statement, parameters, counted=True))
        return int(count)

    async def close(self) -> None:
        """Execute pending operations, then close all connections."""
        if self._closed:
            return
        await self.batcher.close()
        self._closed = True
        await self.listener.close()
        if self._under_way:  # All of them end: they have their own time limits.
            await asyncio.wait(self._under_way)
        for connection in self._idle:
            await connection.close()
        self._idle.clear()
        self.renewals.close()

    async def _finish(self, doing: str, running: Coroutine[Any, Any, Rows]) -> Rows:
        try:
            self.check_loop()
        except errors.MailboxError:
            running.close()
            raise
        task = asyncio.ensure_future(running)
        self._under_way.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except (psycopg.Error, OSError) as error:
            raise translated(error, doing) from None

    def _done(self, task: asyncio.Task[Rows]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # Mark as retrieved: a cancelled caller will not do so.

    async def _run(self, statement: str, parameters: Mapping[str, Any], *, counted: bool = False) -> Rows:
        await self._prepare()
        try:
            return await self._execute(statement, parameters, counted)
        except psycopg.errors.UndefinedTable:
            # The database was replaced by an older copy or emptied: create the tables again.
            self._prepared = False
            await self._prepare()
            return await self._execute(statement, parameters, counted)

    async def _execute(self, statement: str, parameters: Mapping[str, Any], counted: bool) -> Rows:
        async with self._use() as connection:
            cursor = await connection.execute(statement, parameters, binary=True)
            return [(cursor.rowcount,)] if counted else await cursor.fetchall()

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with self._free:
            connection = await self._open()
            try:
                yield connection
            except BaseException:
                if connection.broken or connection.closed:
                    idle, self._idle = self._idle, []  # The server has probably restarted.
                    for gone in idle:
                        await gone.close()
                raise
            finally:
                if not connection.closed:
                    self._idle.append(connection)

    async def _open(self) -> psycopg.AsyncConnection[Any]:
        while self._idle:
            connection = self._idle.pop()
            if _is_alive(connection):
                return connection
            await connection.close()
        return await self._connect()

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        connection = await bounded.BoundedAsyncConnection.connect(
            self._conninfo(), autocommit=True, prepare_threshold=self._prepare_threshold()
        )
        connection.answer_seconds = _ANSWER_SECONDS
        return connection

    def connect_blocking(self) -> psycopg.Connection[Any]:
        """Open a further connection to this database, for transactions of threads; the caller closes it.

        A process that is frozen within a transaction would hold its locks: the server ends the connection.
        """
        name, parameters = "idle_in_transaction_session_timeout", dict(self._parameters)
        if not self.pooled and name not in parameters["options"]:
            parameters["options"] += f" -c {name}={round(_IDLE_SECONDS * 1000)}"
        return _connect_blocking(make_conninfo(**parameters), prepare_threshold=self._prepare_threshold())

    def _conninfo(self) -> str:
        return make_conninfo(**self._parameters)

    def _prepare_threshold(self) -> int | None:
        return None if self.pooled else 3

    async def _notify(self, channel: str) -> None:
        await self._execute("SELECT pg_notify(%(channel)s, '')", {"channel": channel}, counted=False)

    async def _prepare(self) -> None:
        """Create or migrate the tables, once."""
        if not self._prepared:
            async with self._preparing:
                await self._check_schema()

    async def _check_schema(self) -> None:
        if not self._prepared:
            try:
                ((found,),) = await self._execute(FIND_VERSION, {}, counted=False)
            except psycopg.errors.UndefinedTable:
                found = 0
            if found < SCHEMA_VERSION:
                found = await self._migrate()
            if found > SCHEMA_VERSION:
                raise errors.ConfigurationError(
                    f"the mailboxes in {self.address} were created by a newer Fairtrial: they have schema {found}, "
                    f"this version supports up to {SCHEMA_VERSION}. Upgrade with pip install --upgrade fairtrial."
                )
            self._prepared = True

    async def _migrate(self) -> int:
        async with self._use() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            cursor = await connection.execute("SELECT to_regclass('mailbox_schema')")
            found = 0
            if (await cursor.fetchone() or (None,))[0] is not None:
                ((found,),) = await (await connection.execute(FIND_VERSION)).fetchall()
            for statements in MIGRATIONS[found:]:
                for statement in statements:
                    await connection.execute(statement)
            if found < SCHEMA_VERSION:
                await connection.execute("UPDATE mailbox_schema SET version = %s", (SCHEMA_VERSION,))
            return max(int(found), SCHEMA_VERSION)


async def _run_batches(batches: Sequence[OpenBatch]) -> Sequence[Any]:
    """Execute the operations of batches, which are keyed by a function and the mailbox that it takes."""
    running = (operation(mailbox, batch.items) for batch in batches for operation, mailbox in [batch.key])
    return await asyncio.gather(*running, return_exceptions=True)


class RenewalConnection:
    """A connection for threads, opened on first use."""

    def __init__(self, conninfo: str, prepare_threshold: int | None) -> None:
        self._conninfo = conninfo
        self._prepare_threshold = prepare_threshold
        self._lock = threading.Lock()
        self._closed = False
        self._connection: psycopg.Connection[Any] | None = None

    def run(self, doing: str, statement: str, parameters: Mapping[str, Any]) -> Rows:
        """Run a statement and return its rows.

        Raises:
            MailboxError: it could not be run.
        """
        with self._lock:
            if self._closed:
                raise errors.MailboxClosedError("the connection to PostgreSQL is closed")
            try:
                if self._connection is not None and not _is_alive(self._connection):
                    self._connection.close()
                    self._connection = None
                if self._connection is None:
                    self._connection = _connect_blocking(
                        self._conninfo, autocommit=True, prepare_threshold=self._prepare_threshold
                    )
                return self._connection.execute(statement, parameters, binary=True).fetchall()
            except (psycopg.Error, OSError) as error:
                raise translated(error, doing) from None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _connect_blocking(
    conninfo: str, *, prepare_threshold: int | None, autocommit: bool = False
) -> bounded.BoundedConnection:
    connection = bounded.BoundedConnection.connect(conninfo, autocommit=autocommit, prepare_threshold=prepare_threshold)
    connection.answer_seconds = _ANSWER_SECONDS
    return connection


def _parse(url: str) -> tuple[dict[str, Any], bool]:
    """Return the parameters of libpq for a URL, and whether it is for a PgBouncer in transaction mode."""
    url, pooled = _without_pgbouncer(url)
    scheme, _, rest = url.partition(":")
    try:
        given: dict[str, Any] = conninfo_to_dict(f"postgresql:{rest}")
    except psycopg.Error:
        # Without the parser's message: it quotes parts of the URL.
        raise errors.ConfigurationError(
            "invalid PostgreSQL URL: write postgresql://[user[:password]@]host[:port]/database, with / ? # @ : % in a "
            "password percent-encoded"
        ) from None
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise errors.ConfigurationError("the URL of a mailbox on PostgreSQL must start with postgresql://")
    if given.get("password"):
        register_guess(str(given["password"]), "password", "the password of the queue's URL")
    bulk.warn_about_plain_text(str(given.get("host") or "").partition(",")[0], given.get("sslmode"), "queue")
    if not pooled:
        limits = {"statement_timeout": _STATEMENT_SECONDS, "lock_timeout": _LOCK_SECONDS}
        options = str(given.get("options") or "")
        for name, seconds in limits.items():
            if name not in options:
                options = f"{options} -c {name}={seconds * 1000}".strip()
        given["options"] = options if "transaction_isolation" in options else f"{options} {bulk.ISOLATION}"
    return {**bulk.POSTGRES_SETTINGS, **given}, pooled


def _without_pgbouncer(url: str) -> tuple[str, bool]:
    """Return the URL without our parameter `pgbouncer`, and its value."""
    address, mark, query = url.partition("?")
    parts = query.split("&") if mark else []
    asked = [part.partition("=")[2] for part in parts if part.partition("=")[0] == "pgbouncer"]
    if any(value not in ("true", "false") for value in asked):
        raise errors.ConfigurationError("pgbouncer in a PostgreSQL URL must be true or false")
    rest = "&".join(part for part in parts if part.partition("=")[0] != "pgbouncer")
    return (f"{address}?{rest}" if rest else address), "true" in asked


def _is_alive(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> bool:
    """Return False if the server has sent something on an idle connection: it closes it, as a restart does.

    A statement on it would fail, and the caller could not know whether it was executed.
    """
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)
