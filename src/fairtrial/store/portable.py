"""Saves a run to a single file: an SQLite store that contains nothing else."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.base.codec import dumps
from fairtrial.base.system import replace_file
from fairtrial.data.sample import Sample
from fairtrial.errors import StoreError
from fairtrial.scoring.score import Score
from fairtrial.store.attachments import attached
from fairtrial.store.export import naming
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    from sqlalchemy import Column, Table

_BATCH = 256
_NAMED = 5  # Runs that an error names.
_ERROR_TYPE = re.compile(r"[A-Za-z_][\w.]{0,99}(?=:|$)")
_CHECKED_ROWS = 100_000  # Of each table: a fifth of a second.


def save_run(store: RunStore, run_id: str, path: Path | str, *, content: bool = True) -> None:
    """Save a run, with its samples, transcripts, labels and attachments, to a file that `load_run` opens.

    Args:
        store: The store of the run.
        run_id: The run.
        path: The file, replaced when it is complete.
        content: False leaves out inputs, expected values, outputs, transcripts, reasons, the texts of errors and
            attachments and labels. Numbers, names, metadata of samples and settings stay.
    """
    from fairtrial.store.sql import SqlStore

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary file and renamed, so that the target is never incomplete.
    with naming(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=".fairtrial-") as folder:
        aside = Path(folder) / "run.db"
        copy = SqlStore.sqlite(aside)
        try:
            copy_run(store, store.get_run(run_id), copy, content=content)
        finally:
            copy.close()
        _settle(aside)
        replace_file(aside, target)


def copy_run(store: RunStore, run: RunRecord, copy: RunStore, *, content: bool = True) -> RunRecord:
    """Copy a run to another store as the given record; returns the copy. `content` as in `save_run`."""
    run_id = run.run_id
    made = copy.create_run(run)
    for samples in batched(store.samples(run_id), _BATCH):
        copy.commit(run_id, (), dict(samples) if content else {at: _bare_sample(one) for at, one in samples})
        if content:
            _copy_blobs(store, copy, (dumps((sample.input, sample.expected)) for _place, sample in samples))
    for results in batched(store.results(run_id, snapshots=True), _BATCH):
        committed = copy.commit(run_id, results if content else [_bare_result(one) for one in results])
        refused = committed.refused or committed.unstorable
        if refused:
            raise StoreError(f"trial {refused[0][0]} cannot be copied: {refused[0][1]}")
        if content:
            _copy_blobs(store, copy, (result.output_json for result in results))
            _copy_blobs(store, copy, (result.snapshot for result in results))
    for label in store.labels(run_id) if content else ():
        copy.label(label)
    if (split := run.noted.split) is not None and (looks := store.looks(split.fingerprint)):
        copy.record_looks(split.fingerprint, looks)
    return made


def _bare_sample(sample: Sample[Any, Any]) -> Sample[Any, Any]:
    return Sample(sample.id, None, metadata=sample.metadata)


def _bare_result(result: EvalResult) -> EvalResult:
    """Return a result with its numbers and without its texts; of an error, its type stays."""
    score = result.score
    if score is not None:
        metrics = [replace(metric, reason="", metadata={}) for metric in score.metrics]
        score = Score(score.value, score.passed, metrics=metrics, name=score.name)
    error = result.error and (found[0] if (found := _ERROR_TYPE.match(result.error)) else result.outcome)
    metadata = {name: value for name, value in result.own_metadata.items() if isinstance(value, bool | int | float)}
    return replace(
        result, score=score, error=error, metadata=metadata, output=None, output_json=None, snapshot=None, source=None
    )


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
    for sha256 in attached(texts):
        with suppress(StoreError):  # Referenced here, but stored elsewhere.
            copy.put_blob(store.get_blob(sha256))


def _settle(path: Path) -> None:
    """Close the write-ahead log, so that a single file remains."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=DELETE")
    finally:
        connection.close()
