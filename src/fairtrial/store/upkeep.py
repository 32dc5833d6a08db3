"""Maintenance of databases: size, vacuum, online backup, deletion of unreferenced attachments."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, func, select, text

from fairtrial.errors import StoreError
from fairtrial.store.compress import decompress
from fairtrial.store.engine import translated
from fairtrial.store.schema import blobs, details, metadata, runs, samples

_PAGE = 256

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


def vacuum(engine: Engine) -> None:
    """Reclaim the space of deleted rows: SQLite shrinks the file, PostgreSQL reuses the space."""
    with translated():
        if engine.dialect.name == "postgresql":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("SET statement_timeout = 0"))
                for table in metadata.sorted_tables:
                    connection.execute(text(f"VACUUM (ANALYZE) {table.name}"))
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
