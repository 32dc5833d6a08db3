"""Which store an address means. Databases are imported only when one is opened."""

from __future__ import annotations

import os
from pathlib import Path

from fairtrial.errors import ConfigurationError
from fairtrial.store.protocol import RunStore

DEFAULT_PATH = Path(".fairtrial") / "runs.db"
_FILES = (".db", ".sqlite", ".sqlite3")


def default_store() -> str:
    """Where runs are kept unless told otherwise: FAIRTRIAL_STORE, or a file in the current folder."""
    return os.environ.get("FAIRTRIAL_STORE") or str(DEFAULT_PATH)


def open_store(url: str | Path | None = None) -> RunStore:
    """Open a store, creating it if it is new.

    Args:
        url: `sqlite:///path`, a path that ends in .db or .sqlite, `postgresql://host/database`, or
            `memory:`. Left out, `default_store()`.
    """
    where = default_store() if url is None else str(url)
    scheme, separator, rest = where.partition(":")
    if scheme == "memory" and separator and not rest.strip("/"):
        from fairtrial.store.memory import MemoryStore

        return MemoryStore()
    if scheme in ("postgresql", "postgres", "postgresql+psycopg") and rest.startswith("//"):
        from fairtrial.store.sql import SqlStore

        return SqlStore.postgres(f"postgresql:{rest}")
    path = _sqlite_path(where)
    if path is None:
        # The address itself is not repeated: it may hold a password.
        raise ConfigurationError(
            "not the address of a store: use sqlite:///path, a path that ends in .db or .sqlite, "
            "postgresql://host/database, or memory:"
        )
    from fairtrial.store.sql import SqlStore

    return SqlStore.sqlite(path)


def _sqlite_path(where: str) -> Path | None:
    if where.startswith("sqlite:"):
        path = where.removeprefix("sqlite:///")
        return Path(path) if path and path != where else None
    return Path(where) if where.endswith(_FILES) and "://" not in where else None
