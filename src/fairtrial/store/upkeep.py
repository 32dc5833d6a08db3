"""Maintenance of databases: size, vacuum, online backup, deletion of rows and of unreferenced attachments."""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Engine, Select, Table, delete, func, select, text, tuple_, update

from fairtrial.base.backoff import Clock
from fairtrial.base.codec import decode, dumps
from fairtrial.errors import StoreError
from fairtrial.store.attachments import ATTACHED
from fairtrial.store.compress import REFERENCE, decompress
from fairtrial.store.engine import translated
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RunRecord
from fairtrial.store.schema import blobs, datasets, details, metadata, results, runs, samples
from fairtrial.store.segments import COMMIT_SECONDS, SegmentPart, Segments, reference

_PAGE = 256
_DELETED_AT_ONCE = 10_000
_MOVED_AT_ONCE = 500


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


def delete_rows(write: Connect, table: Table, owner: int) -> None:
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


def delete_remains(write: Connect) -> None:
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
                if "notes" in columns:
                    _share_transcripts(copy)
                (state,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot back {source} up: {error}") from None
        if state != "ok":
            raise StoreError(f"cannot back {source} up: it is damaged ({state})")
        _publish(aside, target)


def _share_transcripts(copy: sqlite3.Connection) -> None:
    """Note in a backup that the transcripts in buckets and folders are those of the original too."""
    for number, stored in copy.execute("SELECT id, notes FROM runs").fetchall():
        notes = decode(dict[str, Any], stored)
        if notes.get("transcripts") is not None:
            shared = dumps(notes | write_notes(transcripts_shared=True))
            copy.execute("UPDATE runs SET notes = ? WHERE id = ?", (shared, number))


def _publish(aside: Path, target: Path) -> None:
    """Rename a finished file without overwriting another file, if the file system supports that."""
    try:
        os.link(aside, target)
    except FileExistsError:
        raise StoreError(f"the backup {target} must be a new file (it exists): name another, or remove it") from None
    except OSError:  # A file system without hard links.
        os.rename(aside, target)


type Connect = Callable[[], AbstractContextManager[Connection]]
"""Begins a transaction."""
type ReadTranscripts = Callable[[int, Sequence[bytes | None]], Sequence[bytes | None]]
"""Returns the transcripts of a run, by its number, for what their columns contain."""


def delete_unnamed_blobs(read: Connect, write: Connect, transcripts_of: ReadTranscripts) -> tuple[int, int]:
    """Delete attachments without a reference in a sample, output or transcript; returns (their number, their bytes).

    Does nothing while a run is being executed: its attachments are stored before the results that refer to them.
    Nobody waits while everything is read. If a run was changed meanwhile, nothing is deleted.
    """
    with read() as connection:
        before = _revisions(connection)
        unnamed = set(connection.execute(select(blobs.c.sha256)).scalars())
    if not unnamed or before is None:
        return 0, 0
    for data in _texts(read, transcripts_of):
        if b'"sha256"' in data:
            unnamed.difference_update(found.decode() for found in ATTACHED.findall(data))
    size = 0
    with write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE"))
        if _revisions(connection) != before:
            raise StoreError("results were stored while the others were read; try again")
        for name in unnamed:
            size += connection.execute(select(func.length(blobs.c.data)).where(blobs.c.sha256 == name)).scalar() or 0
            connection.execute(delete(blobs).where(blobs.c.sha256 == name))
    return len(unnamed), size


def _revisions(connection: Connection) -> set[tuple[int, str]] | None:
    """Return what changes with any result or sample of a run; None if a run is being executed."""
    rows = connection.execute(select(runs.c.id, runs.c.revision, runs.c.status)).all()
    return None if any(status == "running" for *_, status in rows) else {(number, rev) for number, rev, _ in rows}


def _texts(read: Connect, transcripts_of: ReadTranscripts) -> Iterator[bytes]:
    """Yield everything in the store that may refer to an attachment."""
    given = select(samples.c.dataset, samples.c.ordinal, samples.c.input, samples.c.expected, samples.c.metadata)
    for rows in _pages(read, given, samples.c.dataset, samples.c.ordinal):
        for row in rows:
            yield "\n".join(column for column in row[2:] if column).encode()
    key = (details.c.run, details.c.ordinal, details.c.execution)
    made = select(*key, details.c.output, details.c.metadata, details.c.transcript)
    for rows in _pages(read, made, *key):
        for number, some in groupby(rows, key=itemgetter(0)):
            transcripts: list[bytes | None] = []
            for *_key, output, facts, transcript in some:
                yield f"{output or ''}\n{facts or ''}".encode()
                transcripts.append(transcript and bytes(transcript))
            yield from (decompress(found) for found in transcripts_of(number, transcripts) if found)


def _pages(read: Connect, query: Select[Any], *key: Column[int]) -> Iterator[Sequence[Sequence[Any]]]:
    """Yield the rows of a query, whose first columns are the key, in pages; no transaction is open between them."""
    page = query.order_by(*key).limit(_PAGE)
    with read() as connection:
        rows = connection.execute(page).all()
    while rows:
        yield rows
        with read() as connection:
            rows = connection.execute(page.where(tuple_(*key) > tuple(rows[-1][: len(key)]))).all()


def segments_named(connection: Connection, number: int) -> set[bytes]:
    """Return the segments that the rows of a run refer to."""
    column = details.c.transcript
    query = select(func.substr(column, 5, 32)).where(details.c.run == number, func.substr(column, 1, 4) == REFERENCE)
    return {bytes(found) for found in connection.execute(query.distinct()).scalars()}


class SegmentCheck(NamedTuple):
    """The segments of a run beside its rows.

    `unreadable` has the ordinals of trials whose transcript is in a segment that is missing or too short; `unnamed` the
    segments that no row refers to.
    """

    run: RunRecord
    segments: int
    size: int
    unreadable: tuple[int, ...]
    unnamed: int


def check_segments(connection: Connection, number: int, run: RunRecord, segments: Segments) -> SegmentCheck:
    """Compare the rows of a run with its segments, by names and sizes."""
    sizes = {segment: found.size for segment, found in segments.stored()}
    column = details.c.transcript
    referring = select(details.c.ordinal, column).where(details.c.run == number, func.substr(column, 1, 4) == REFERENCE)
    missing: list[tuple[int, SegmentPart]] = []
    named: set[bytes] = set()
    for ordinal, transcript in connection.execute(referring.execution_options(yield_per=_PAGE)):
        part = reference(bytes(transcript))
        if part is not None:
            named.add(part.segment)
            if sizes.get(part.segment, 0) < part.end:
                missing.append((ordinal, part))
    if missing:  # Unless they were written since the first look, by a run that is being executed.
        sizes = {segment: found.size for segment, found in segments.stored()}
    unreadable = [ordinal for ordinal, part in missing if sizes.get(part.segment, 0) < part.end]
    unnamed = len(sizes.keys() - named)
    return SegmentCheck(run, len(sizes), sum(sizes.values()), tuple(sorted(unreadable)), unnamed)


def move_transcripts(
    read: Connect,
    write: Connect,
    number: int,
    convert: Callable[[Sequence[bytes | None]], Sequence[bytes | None]],
    done: Callable[[int], None],
    clock: Clock,
) -> None:
    """Replace the transcripts of a run, a few in one transaction. If it is interrupted, it can be called again.

    No transaction is open while they are converted: a bucket may be slow.
    """
    key = (details.c.ordinal, details.c.execution)
    after: tuple[int, int] | None = None
    while True:
        query = select(*key, details.c.transcript).where(details.c.run == number, details.c.transcript.is_not(None))
        if after is not None:
            query = query.where(tuple_(*key) > after)
        with read() as connection:
            rows = connection.execute(query.order_by(*key).limit(_MOVED_AT_ONCE)).all()
        if not rows:
            return
        before, began = [bytes(row[2]) for row in rows], clock.time()
        converted = convert(before)
        with write() as connection:
            if clock.time() - began > COMMIT_SECONDS:  # What was written may have been deleted.
                raise StoreError("the process was suspended; the same command completes the move")
            for row, old, new in zip(rows, before, converted, strict=True):
                if new != old:
                    ours = (details.c.run == number, key[0] == row[0], key[1] == row[1], details.c.transcript == old)
                    connection.execute(update(details).where(*ours).values(transcript=new))
        after = (rows[-1][0], rows[-1][1])
        done(len(rows))
