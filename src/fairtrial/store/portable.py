"""One run as one file: an SQLite store that holds nothing else."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import batched
from pathlib import Path

from fairtrial.codec import dumps
from fairtrial.errors import StoreError
from fairtrial.store.protocol import RunStore

_BATCH = 256


def save_run(store: RunStore, run_id: str, path: Path | str) -> None:
    """Write a run, with its samples, transcripts, labels and attachments, to one file that `load_run` reads."""
    from fairtrial.store.sql import SqlStore

    run = store.get_run(run_id)
    target = Path(path)
    # Written aside and renamed: there is never half a file under the name people use.
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
    """Open a saved run: (a store that can only be read, the run's id)."""
    from fairtrial.store.sql import SqlStore

    _check_foreign(Path(path))
    store = SqlStore.sqlite(path, read_only=True)
    found = store.runs(limit=2)
    if len(found) != 1:
        store.close()
        raise StoreError(f"{path} is not one saved run; open it with open_store to choose among its runs")
    return store, found[0].run_id


def _check_foreign(path: Path) -> None:
    """Refuse a file that holds anything but our own tables: a view or a virtual table runs somebody else's query."""
    from fairtrial.store.engine import read_only_uri
    from fairtrial.store.schema import metadata

    if not path.is_file():
        return  # Explained by who opens it.
    try:
        with closing(sqlite3.connect(read_only_uri(path), uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema=OFF")
            for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
                ours = name in metadata.tables or name.startswith("sqlite_") or name == "ix_labels_run"
                if kind not in ("table", "index") or not ours or (sql or "").upper().startswith("CREATE VIRTUAL"):
                    raise StoreError(f"{path} is not a saved run: it contains the {kind} {name!r}, which is not ours")
    except sqlite3.Error as error:
        raise StoreError(f"{path} is not a saved run: {error}") from None


def _copy_blobs(store: RunStore, copy: RunStore, texts: Iterable[str | bytes | None]) -> None:
    from fairtrial.store.upkeep import ATTACHED

    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        if data and b'"sha256"' in data:
            for found in ATTACHED.finditer(data):
                with suppress(StoreError):  # Named here, but kept elsewhere.
                    copy.put_blob(store.get_blob(found[1].decode()))


def _settle(path: Path) -> None:
    """Leave one file behind, without a write-ahead log beside it: it can then be read from anywhere."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=DELETE")
    finally:
        connection.close()
