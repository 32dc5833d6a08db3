"""Maintenance of databases: size, vacuum, online backup, deletion of rows and of unreferenced attachments."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Engine, Table, delete, func, select, text

from fairtrial.errors import StoreError
from fairtrial.store.compress import decompress
from fairtrial.store.engine import translated
from fairtrial.store.schema import blobs, datasets, details, metadata, results, runs, samples

_PAGE = 256
_DELETED_AT_ONCE = 10_000

ATTACHED = re.compile(rb'"sha256":\s*"([0-9a-f]{64})"')
"""The reference to an attachment in samples, outputs and transcripts."""


def sqlite_size(path: Path) -> int:
    """Return the size of an SQLite database in bytes: the file, its log and its index."""
    files = [path.with_name(path.name + ending) for ending in ("", "-wal", "-shm")]
    return sum(file.stat().st_size for file in files if file.exists())


def postgres_size(connection: Connection) -> int:
    """Return the size of the store's tables and indexes in bytes."""
    names = [table.name for table in metadata.sorted_tables]
    query = text(
        "SELECT coalesce(sum(pg_total_relation_size(to_regclass(name))), 0) FROM unnest(CAST(:names AS text[])) AS name"
    )
    return int(connection.execute(query, {"names": names}).scalar_one())


def delete_rows(write: Callable[[], AbstractContextManager[Connection]], table: Table, owner: int) -> None:
    """Delete the rows of a run, or the samples of a dataset, in transactions of a limited size."""
    owners, ordinal = table.primary_key.columns.values()[:2]
    start = 0
    while True:
        with write() as connection:
            rest = select(func.min(ordinal)).where(owners == owner, ordinal >= start)
            first = connection.execute(rest).scalar()
            if first is None:
                return
            # Not from the lowest ordinal again: an index has entries of deleted rows until it is vacuumed.
            start = first + _DELETED_AT_ONCE
            connection.execute(delete(table).where(owners == owner, ordinal >= first, ordinal < start))


def delete_remains(write: Callable[[], AbstractContextManager[Connection]]) -> None:
    """Delete the rows of runs and datasets whose deletion was interrupted."""
    for table, parents in ((details, runs), (results, runs), (samples, datasets)):
        owners = table.primary_key.columns.values()[0]
        with write() as connection:
            remains = [
                number
                for number in _distinct(connection, owners)
                if connection.execute(select(parents.c.id).where(parents.c.id == number)).first() is None
            ]
        for number in remains:
            delete_rows(write, table, number)


def _distinct(connection: Connection, column: Column[int]) -> Iterator[int]:
    """Yield the values of the first column of an index, each found by one look into it."""
    value = connection.execute(select(func.min(column))).scalar()
    while value is not None:
        yield value
        value = connection.execute(select(func.min(column)).where(column > value)).scalar()


def vacuum(engine: Engine, *, full: bool = False) -> None:
    """Reclaim the space of deleted rows: SQLite shrinks its file, as PostgreSQL does with `full`; else it reuses it."""
    with translated():
        if engine.dialect.name == "postgresql":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("SET statement_timeout = 0"))
                driver: Any = connection.connection.driver_connection
                driver.answer_seconds = math.inf
                for table in metadata.sorted_tables:
                    connection.execute(text(f"VACUUM ({'FULL, ' if full else ''}ANALYZE) {table.name}"))
                connection.invalidate()  # It has no time limit any more.
            return
        with closing(engine.raw_connection()) as pooled:
            cursor = pooled.cursor()
            try:
                cursor.execute("VACUUM")
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise StoreError(f"the store cannot be vacuumed: {error}") from None
            finally:
                cursor.close()


def backup_sqlite(source: Path, target: Path) -> None:
    """Copy a snapshot of an SQLite database into a new file, while others write to it.

    Runs in the copy have no owner.
    """
    if target.exists():
        raise StoreError(f"the backup {target} must be a new file (it exists): name another, or remove it")
    try:
        folder = tempfile.TemporaryDirectory(dir=target.parent, prefix=".fairtrial-")
    except OSError as error:
        raise StoreError(f"cannot write the backup {target}: {error.strerror}") from None
    with folder as name:
        aside = Path(name) / "backup.db"
        os.close(os.open(aside, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            with (
                closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)) as original,
                closing(sqlite3.connect(aside, isolation_level=None)) as copy,
            ):
                # All pages in one step: a consistent snapshot that does not block writers.
                original.backup(copy)
                # A single file without a log.
                copy.execute("PRAGMA journal_mode=DELETE")
                columns = {row[1] for row in copy.execute("PRAGMA table_info(runs)")}
                if "owner" in columns:
                    copy.execute("UPDATE runs SET owner = NULL, heartbeat_at = NULL")
                (state,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot back {source} up: {error}") from None
        if state != "ok":
            raise StoreError(f"cannot back {source} up: it is damaged ({state})")
        _publish(aside, target)


def _publish(aside: Path, target: Path) -> None:
    """Rename a finished file without overwriting another file, if the file system supports that."""
    try:
        os.link(aside, target)
    except FileExistsError:
        raise StoreError(f"the backup {target} must be a new file (it exists): name another, or remove it") from None
    except OSError:  # A file system without hard links.
        os.rename(aside, target)


def delete_unnamed_blobs(connection: Connection) -> tuple[int, int]:
    """Delete attachments without a reference in a sample, output or transcript; returns (their number, their bytes).

    Does nothing while a run is being executed: its attachments are stored before the results that refer to them.
    """
    unnamed = set(connection.execute(select(blobs.c.sha256)).scalars())
    if not unnamed or connection.execute(select(runs.c.id).where(runs.c.status == "running").limit(1)).first():
        return 0, 0
    for data in _texts(connection):
        if b'"sha256"' in data:
            unnamed.difference_update(found.decode() for found in ATTACHED.findall(data))
    size = 0
    for name in unnamed:
        size += connection.execute(select(func.length(blobs.c.data)).where(blobs.c.sha256 == name)).scalar_one()
        connection.execute(delete(blobs).where(blobs.c.sha256 == name))
    return len(unnamed), size


def _texts(connection: Connection) -> Iterator[bytes]:
    """Yield everything in the store that may refer to an attachment."""
    given = select(samples.c.input, samples.c.expected, samples.c.metadata).execution_options(yield_per=_PAGE)
    for row in connection.execute(given):
        yield "\n".join(column for column in row if column).encode()
    made = select(details.c.output, details.c.metadata, details.c.transcript).execution_options(yield_per=_PAGE)
    for output, facts, transcript in connection.execute(made):
        yield f"{output or ''}\n{facts or ''}".encode()
        if transcript:
            yield decompress(bytes(transcript))
