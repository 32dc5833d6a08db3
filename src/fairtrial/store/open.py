"""Opens stores by URL. Database drivers are imported only when a store is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fairtrial.base.plugins import find_plugin
from fairtrial.errors import ConfigurationError
from fairtrial.store.protocol import RunStore

DEFAULT_PATH = Path(".fairtrial") / "runs.db"
_FILES = (".db", ".sqlite", ".sqlite3")
_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
_SCHEMES = ("memory", "sqlite", *_POSTGRESQL)


def default_store() -> str:
    """Return the URL of the default store: FAIRTRIAL_STORE, or a file in the current folder."""
    return os.environ.get("FAIRTRIAL_STORE") or str(DEFAULT_PATH)


def open_store(url: str | Path | None = None, *, transcripts: str | Path | None = None) -> RunStore:
    """Open a store, creating it if it is new.

    Args:
        url: `sqlite:///path`, a path that ends in .db or .sqlite, `postgresql://host/database`,
            `memory:`, or an address whose scheme is an entry point of `fairtrial.stores`, which is called with it.
            `default_store()` by default.
        transcripts: A bucket or a folder for the transcripts of new runs: `s3://bucket/prefix`, `gs://...`, `az://...`
            or a path. FAIRTRIAL_TRANSCRIPTS, or the database, by default.
    """
    address = default_store() if url is None else str(url)
    opened = _open(address)
    if place := transcripts or os.environ.get("FAIRTRIAL_TRANSCRIPTS"):
        from fairtrial.store.objects import full_address
        from fairtrial.store.sql import SqlStore

        if isinstance(opened, SqlStore):
            opened.transcripts = full_address(place)
        elif transcripts:
            raise ConfigurationError(f"transcripts are stored apart with SQLite and PostgreSQL only (got {address!r})")
    return opened


def _open(where: str) -> RunStore:
    if _is_memory(where):
        from fairtrial.store.memory import MemoryStore

        return MemoryStore()
    opener = _opener(where)
    if opener is not None:
        return opener(where)
    from fairtrial.store.sql import SqlStore

    database = _database(where)
    return SqlStore.sqlite(database) if isinstance(database, Path) else SqlStore.postgres(database)


def migrate_store(url: str | Path | None = None) -> tuple[int, int]:
    """Create a store, or upgrade its schema; returns (the version it had, 0 if new; the version it has)."""
    from fairtrial.store import engine as engines
    from fairtrial.store.schema import VERSION

    where = default_store() if url is None else str(url)
    if _is_memory(where) or _opener(where) is not None:
        return VERSION, VERSION
    database = _database(where)
    if isinstance(database, Path):
        engine, address = engines.sqlite_engine(database), str(database)
    else:
        engine = engines.postgres_engine(database)
        address = engine.url.render_as_string(hide_password=True)
    try:
        return engines.migrate(engine, address), VERSION
    finally:
        engine.dispose()


def find_database(url: str) -> Path | str | None:
    """Return the path of an SQLite file, or the URL of a database; None for memory."""
    if _opener(url) is not None:
        return url
    return None if _is_memory(url) else _database(url)


def _opener(where: str) -> Callable[[str], RunStore] | None:
    """Return what another package has for the scheme of a URL."""
    scheme, separator, _ = where.partition("://")
    return find_plugin("stores", scheme) if separator and scheme not in _SCHEMES else None


def _is_memory(where: str) -> bool:
    scheme, separator, rest = where.partition(":")
    return scheme == "memory" and bool(separator) and not rest.strip("/")


def _database(where: str) -> Path | str:
    """Return the path of an SQLite file, or the URL of a PostgreSQL database."""
    scheme, _, rest = where.partition(":")
    if scheme in _POSTGRESQL and rest.startswith("//"):
        return f"postgresql:{rest}"
    path = _sqlite_path(where)
    if path is None:
        # The URL is not repeated: it may contain a password.
        raise ConfigurationError(
            "invalid store URL: use sqlite:///path, a path that ends in .db or .sqlite, "
            "postgresql://host/database, or memory:"
        )
    return path


def _sqlite_path(where: str) -> Path | None:
    if where.startswith("sqlite:"):
        path = where.removeprefix("sqlite:///")
        return Path(path) if path and path != where else None
    return Path(where) if where.endswith(_FILES) and "://" not in where else None
