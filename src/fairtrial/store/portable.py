"""Saves a run to a single file: an SQLite store that contains nothing else."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import dumps
from fairtrial.errors import StoreError
from fairtrial.store.protocol import RunRecord, RunStore

if TYPE_CHECKING:
    from sqlalchemy import Column, Table

_BATCH = 256
_NAMED = 5  # Runs that an error names.
_CHECKED_ROWS = 100_000  # Of each table: a fifth of a second.


def save_run(store: RunStore, run_id: str, path: Path | str) -> None:
    """Save a run, with its samples, transcripts, labels and attachments, to a file that `load_run` opens."""
    from fairtrial.store.sql import SqlStore

    run = store.get_run(run_id)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary file and renamed, so that the target is never incomplete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fairtrial-") as folder:
        aside = Path(folder) / "run.db"
        copy = SqlStore.sqlite(aside)
        try:
            copy.create_run(run)
            for samples in batched(store.samples(run_id), _BATCH):
                copy.commit(run_id, (), dict(samples))
                _copy_blobs(store, copy, (dumps((sample.input, sample.expected)) for _place, sample in samples))
            for results in batched(store.results(run_id, snapshots=True), _BATCH):
                committed = copy.commit(run_id, results)
                refused = committed.refused or committed.unstorable
                if refused:
                    raise StoreError(f"trial {refused[0][0]} cannot be copied: {refused[0][1]}")
                _copy_blobs(store, copy, (result.output_json for result in results))
                _copy_blobs(store, copy, (result.snapshot for result in results))
            for label in store.labels(run_id):
                copy.label(label)
        finally:
            copy.close()
        _settle(aside)
        os.replace(aside, target)


def load_run(path: Path | str) -> tuple[RunStore, str]:
    """Open a saved run; returns (a read-only store, the run's id)."""
    store = open_saved(path)
    try:
        return store, only_run(store, str(path), repr(str(path))).run_id
    except StoreError:
        store.close()
        raise


def open_saved(path: Path | str) -> RunStore:
    """Open an SQLite file read-only, whatever its name; refuses files with foreign tables."""
    from fairtrial.store.sql import SqlStore

    _check_foreign(Path(path))
    return SqlStore.sqlite(path, read_only=True)


def only_run(store: RunStore, address: str, argument: str) -> RunRecord:
    """Return the only run of a store; with several, raise an error with their names.

    Args:
        store: The store.
        address: What errors call it.
        argument: What stands for it in Python code.
    """
    runs = store.runs()
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise StoreError(f"{address} contains no runs")
    names = [run.name for run in runs]
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    raise StoreError(
        f"{address} does not contain exactly one run: it has {shown}\n"
        f"name one, as in EvalReport.load({argument}, {names[0]!r})"
    )


def _check_foreign(path: Path) -> None:
    """Refuse a file with other tables, views or virtual tables: they could execute foreign queries."""
    from fairtrial.store.engine import read_only_uri
    from fairtrial.store.schema import metadata

    if not path.is_file():
        return  # Opening the file reports the error.
    own_names = {*metadata.tables, *(index.name for table in metadata.tables.values() for index in table.indexes)}
    try:
        with closing(sqlite3.connect(read_only_uri(path), uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema=OFF")
            for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
                ours = name in own_names or name.startswith("sqlite_")
                if kind not in ("table", "index") or not ours or (sql or "").upper().startswith("CREATE VIRTUAL"):
                    raise StoreError(f"{path} is not a saved run: it contains the foreign {kind} {name!r}")
            for table in metadata.sorted_tables:
                _check_types(path, connection, table)
    except sqlite3.Error as error:
        raise StoreError(f"{path} is not a saved run: {error}") from None


def _check_types(path: Path, connection: sqlite3.Connection, table: Table) -> None:
    """Refuse values of other types than a column's: SQLite stores any value in any column."""
    present = {row[1] for row in connection.execute(f'PRAGMA table_info("{table.name}")')}
    wrong = {
        column.name: f'typeof("{column.name}") NOT IN ({_storage_classes(column)})'
        for column in table.columns
        if column.name in present
    }
    if not wrong:
        return  # A table that later versions added.
    rows = f'(SELECT * FROM "{table.name}" LIMIT {_CHECKED_ROWS})'  # noqa: S608 - names of our schema
    query = f"SELECT {', '.join(wrong.values())} FROM {rows} WHERE {' OR '.join(wrong.values())}"  # noqa: S608
    for row in connection.execute(query):
        name = next(name for name, is_wrong in zip(wrong, row, strict=True) if is_wrong)
        raise StoreError(
            f"{path} is not a saved run: a value of {table.name}.{name} has another type than it must have"
        )


def _storage_classes(column: Column[Any]) -> str:
    """Return the types that values of a column may have in SQLite, as SQL."""
    kind = {int: "'integer'", float: "'real', 'integer'", str: "'text'", bytes: "'blob'"}[column.type.python_type]
    return f"{kind}, 'null'" if column.nullable else kind


def _copy_blobs(store: RunStore, copy: RunStore, texts: Iterable[str | bytes | None]) -> None:
    from fairtrial.store.upkeep import ATTACHED

    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        if data and b'"sha256"' in data:
            for found in ATTACHED.finditer(data):
                with suppress(StoreError):  # Referenced here, but stored elsewhere.
                    copy.put_blob(store.get_blob(found[1].decode()))


def _settle(path: Path) -> None:
    """Close the write-ahead log, so that a single file remains."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=DELETE")
    finally:
        connection.close()
