"""Connections to SQLite and PostgreSQL, and schema migrations."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import QueuePool
from sqlalchemy.schema import CreateColumn

from fairtrial import errors
from fairtrial.store import schema
from fairtrial.store.bulk import ISOLATION, register_arrays, warn_about_plain_text
from fairtrial.store.bulk import POSTGRES_SETTINGS as _POSTGRES_SETTINGS
from fairtrial.store.redact import current, register_guess

_BUSY_SECONDS = 30.0
_MIGRATION_LOCK = 0x66616972  # The key of an advisory lock.

# The last two: a quota or the limit of a file's size, and a file of shared memory that cannot grow.
_DISK_FULL = ("53100", sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)

STATEMENT_TIMEOUT_SECONDS = 300
SHORT_WRITE_SECONDS = 60
WRITE = "fairtrial_write"
_POOLED = "pgbouncer"  # A parameter of ours, as in the address of a queue.
SHORT_WRITE = "fairtrial_short_write"  # A transaction of which no statement takes long.


def sqlite_engine(path: Path, *, read_only: bool = False) -> sa.Engine:
    """Create an engine for an SQLite file. The file is created for its owner only, unless opened read-only."""
    read_only = read_only or (path.is_file() and not os.access(path, os.W_OK))
    if read_only:
        if not path.is_file():
            raise errors.StoreError(f"there is no store at {path}")
        uri = read_only_uri(path)
    else:
        _create_private(path)
        uri = f"{path.absolute().as_uri()}?mode=rw"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            if not read_only:
                _use_wal(connection)
            # With a write-ahead log, NORMAL survives the crash of any process; a power failure can lose the last
            # commits, but never damages the file.
            connection.execute("PRAGMA synchronous=NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection

    engine = sa.create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=4, max_overflow=28, hide_parameters=True
    )

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # Writers lock at once: upgrading a read transaction can fail without waiting.
        write = connection.get_execution_options().get(WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    @sa.event.listens_for(engine, "handle_error", retval=True)
    def name_the_file(context: sa.engine.ExceptionContext) -> BaseException | None:
        if "readonly database" not in str(context.original_exception):
            return None
        return errors.StoreError(f"the store {path} is read-only here: choose another with --store or FAIRTRIAL_STORE")

    return engine


def read_only_uri(path: Path) -> str:
    """Return the URI of a read-only file. On a read-only file system SQLite cannot create its lock files."""
    immutable = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"


def file_identity(path: Path | str) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _create_private(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Created with private permissions. SQLite gives its auxiliary files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise errors.StoreError(f"cannot open the store {path}: {error.strerror}") from None


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging, with retries: two processes that open a new file at once conflict here."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # This statement does not wait for a lock by itself.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def postgres_engine(url: str) -> sa.Engine:
    """Create an engine for a PostgreSQL database."""
    try:
        import psycopg
    except ImportError:
        raise errors.MissingExtraError("a store in PostgreSQL", "postgres") from None
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise errors.ConfigurationError("invalid database URL: use postgresql://host/database") from None
    _warn_about_plain_text(parsed)
    if parsed.password:
        register_guess(str(parsed.password), "password", "the password of the store's URL")
    register_arrays(psycopg.adapters)
    engine = sa.create_engine(
        parsed.set(drivername="postgresql+psycopg").difference_update_query([_POOLED]),
        pool_pre_ping=True,  # Detects a restarted server before a statement is sent.
        pool_size=4,
        max_overflow=28,
        hide_parameters=True,
        connect_args=_connection_settings(parsed),
    )
    _limit_waits(engine, _given_options(parsed))
    return engine


def _limit_waits(engine: sa.Engine, given: str) -> None:
    """Limit how long an answer is waited for, and how long an absent process keeps the locks of a transaction."""
    from fairtrial.store.bounded import ANSWER_MARGIN_SECONDS, BoundedConnection

    limited = "statement_timeout" not in given

    @sa.event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, arguments: Any, parameters: Any) -> BoundedConnection:
        connection = BoundedConnection.connect(*arguments, **parameters)
        if limited:
            connection.answer_seconds = STATEMENT_TIMEOUT_SECONDS + ANSWER_MARGIN_SECONDS
        return connection

    ping = engine.dialect.do_ping

    def do_ping(connection: Any) -> bool:
        with connection.answering_within(ANSWER_MARGIN_SECONDS):
            return ping(connection)

    setattr(engine.dialect, "do_ping", do_ping)  # noqa: B010 - a method, for the types

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        seconds = STATEMENT_TIMEOUT_SECONDS
        if connection.get_execution_options().get(SHORT_WRITE, False):
            seconds = SHORT_WRITE_SECONDS
            limits = ("statement_timeout", "idle_in_transaction_session_timeout")
            settings = [f"set_config('{name}', '{seconds}s', true)" for name in limits if name not in given]
            connection.exec_driver_sql(f"SELECT {', '.join(settings) or 1}")
        if limited:
            driver: Any = connection.connection.driver_connection
            driver.answer_seconds = seconds + ANSWER_MARGIN_SECONDS


def postgres_engine_from(connect: Callable[[], Any]) -> sa.Engine:
    """Create an engine whose connections are opened by a function: those of a queue in the same database."""
    import psycopg

    register_arrays(psycopg.adapters)
    return sa.create_engine(
        "postgresql+psycopg://", creator=connect, pool_pre_ping=True, pool_size=2, max_overflow=2, hide_parameters=True
    )


def _warn_about_plain_text(url: URL) -> None:
    """Warn, once per host, if the connection may be unencrypted or the server is not authenticated."""
    host = url.query.get("host", url.host) or ""
    warn_about_plain_text(host if isinstance(host, str) else host[0], url.query.get("sslmode"), "store")


def _connection_settings(url: URL) -> dict[str, Any]:
    """Return the options of every connection: time limits that detect an unresponsive server.

    Parameters of the URL come first: `?tcp_user_timeout=0`, `?options=-c%20statement_timeout%3D0`.
    `?pgbouncer=true` is for a PgBouncer in transaction mode: no startup options, no prepared statements.
    """
    settings = {name: value for name, value in _POSTGRES_SETTINGS.items() if name not in url.query}
    pooled = url.query.get(_POOLED, "false")
    if pooled not in ("true", "false"):
        raise errors.ConfigurationError("pgbouncer in a PostgreSQL URL must be true or false")
    if pooled == "true":
        return {**settings, "prepare_threshold": None}
    given = _given_options(url)
    if "statement_timeout" not in given:
        given = f"{given} -c statement_timeout={STATEMENT_TIMEOUT_SECONDS * 1000}".strip()
    if "transaction_isolation" not in given:
        given = f"{given} {ISOLATION}"
    return {**settings, "options": given}


def _given_options(url: URL) -> str:
    options = url.query.get("options", "")
    return options if isinstance(options, str) else " ".join(options)


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of the database into `StoreError`s, without secrets and row data."""
    try:
        yield
    except DBAPIError as error:
        message = current().text(str(error.orig).strip())
        if "unsupported startup parameter" in message:
            raise errors.ConfigurationError(f"{message}\nfor a PgBouncer, add ?pgbouncer=true to the address") from None
        if _is_disk_full(error):
            raise errors.StoreFullError(f"the disk of the store is full: {message}") from None
        if error.connection_invalidated or _may_pass(error):
            raise errors.StoreUnavailableError(f"the store is unavailable: {message}") from None
        raise errors.StoreError(f"the database reports an error: {message}") from None
    except PoolTimeoutError:
        raise errors.StoreUnavailableError("the store has no free connection; too many are in use at once") from None
    except SQLAlchemyError as error:
        raise errors.StoreError(f"the database reports an error: {error}") from None


def _may_pass(error: DBAPIError) -> bool:
    if getattr(error.orig, "sqlstate", None) == "25006":
        return True  # A read-only server, as during a failover.
    if not isinstance(error, OperationalError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        return "locked" in str(error.orig) or "busy" in str(error.orig)
    # PostgreSQL's classes for lost connections, restarts and deadlocks; all of them can be temporary.
    return True


def _is_disk_full(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorcode", None)
    return code in _DISK_FULL


def prepare(engine: sa.Engine, address: str, *, create: bool = True) -> int:
    """Prepare a store for use and return the version of its schema.

    Creates the tables of a new store, unless it is read-only. An older store is presented with today's columns and can
    then be read; `migrate` upgrades it. Safe with concurrent processes.
    """
    with translated():
        found = found_version(engine, address)
        if found == 0 and not create:
            raise errors.StoreError(f"{address} is not a Fairtrial store: it has no table `meta`")
        if found == 0:
            migrate(engine, address)
            found = schema.VERSION
        elif found < schema.VERSION:
            _show_as_current(engine, found)
        return found


def migrate(engine: sa.Engine, address: str) -> int:
    """Create the tables, or upgrade an older store; returns the version it had."""
    with translated(), engine.execution_options(**{WRITE: True}).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        found = _version(connection, address)
        if found == 0:
            schema.metadata.create_all(connection, checkfirst=False)
        else:
            for added in _added_since(found):
                if isinstance(added, sa.Table):
                    added.create(connection)
                else:
                    column = CreateColumn(added).compile(dialect=connection.dialect)
                    connection.exec_driver_sql(f"ALTER TABLE {added.table.name} ADD COLUMN {column}")
        if found != schema.VERSION:
            connection.execute(schema.meta.delete().where(schema.meta.c.name == "schema"))
            connection.execute(schema.meta.insert().values(name="schema", value=str(schema.VERSION)))
    return found


def _show_as_current(engine: sa.Engine, found: int) -> None:
    """Create temporary views over the tables of an older store that add the missing columns.

    Both databases resolve names to temporary objects first, so all reading statements work unchanged.
    """
    lacking: dict[str, list[str]] = {}
    for column in _added_since(found):
        if isinstance(column, sa.Table):
            continue
        default = column.server_default.arg if isinstance(column.server_default, sa.DefaultClause) else "NULL"
        kind = column.type.compile(dialect=engine.dialect)
        lacking.setdefault(column.table.name, []).append(f"CAST({default} AS {kind}) AS {column.name}")

    @sa.event.listens_for(engine, "connect")
    def cover(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        if engine.dialect.name == "postgresql":
            cursor.execute("SELECT current_schema()")
            home = cursor.fetchone()[0]
        else:
            home = "main"
        for table, columns in lacking.items():
            query = f'SELECT *, {", ".join(columns)} FROM "{home}".{table}'  # noqa: S608 - names of our own
            cursor.execute(f"CREATE TEMPORARY VIEW {table} AS {query}")
        cursor.close()
        if engine.dialect.name == "postgresql":
            connection.commit()

    engine.dispose()  # Existing connections do not have the views.


def _added_since(found: int) -> Iterator[sa.Table | sa.Column[Any]]:
    for version in range(found + 1, schema.VERSION + 1):
        yield from schema.ADDED[version]


def found_version(engine: sa.Engine, address: str) -> int:
    """Return the version of a store's schema; 0 if it has no tables of ours yet."""
    with engine.begin() as connection:
        return _version(connection, address)


def _version(connection: sa.Connection, address: str) -> int:
    tables = set(sa.inspect(connection).get_table_names())
    if schema.meta.name not in tables:
        taken = tables & set(schema.metadata.tables)
        if taken:
            raise errors.StoreError(f"{address} has tables of other programs with the names {', '.join(sorted(taken))}")
        return 0
    found = connection.execute(sa.select(schema.meta.c.value).where(schema.meta.c.name == "schema")).scalar()
    if not isinstance(found, str) or not found.isdecimal() or len(found) > 9:
        raise errors.StoreError(f"{address} has a table `meta` that is not of a Fairtrial store")
    if int(found) > schema.VERSION:
        raise errors.StoreVersionError(
            f"{address} was written by a newer Fairtrial: it has schema {found}, this version supports up to "
            f"{schema.VERSION}. Upgrade with pip install --upgrade fairtrial, or open another store."
        )
    if int(found) + 1 < min(schema.ADDED, default=schema.VERSION + 1):
        raise errors.StoreVersionError(
            f"{address} was written before the first release of Fairtrial: it has schema {found}, which cannot be "
            "read. Open another store."
        )
    return int(found)
