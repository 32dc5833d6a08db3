"""Stores for sessions that are too large to be sent with a result.

The worker that executes a task saves its session here and puts the session's id into the result; the worker that scores
loads and deletes it. Sessions whose worker died in between are deleted by age when a later one is saved.
Ids come from messages, so they are validated before they become a file name or a key.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fairtrial.base.offload import in_thread
from fairtrial.base.system import replace_file
from fairtrial.data.session.session import Session
from fairtrial.errors import ConfigurationError, SessionError
from fairtrial.store.protocol import RunStore

if TYPE_CHECKING:
    from fairtrial.mailbox.redis import RedisConnection

_log = logging.getLogger("fairtrial.fleet")
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_TTL_SECONDS = 86_400.0
_CHECKS_PER_TTL = 24  # How often to look for abandoned sessions.


class SessionStore(Protocol):
    """Stores sessions by id, as snapshots, until they are deleted or expire."""

    async def save(self, session_id: str, session: Session | bytes) -> None:
        """Save a session or its snapshot; replaces one with the same id."""
        ...

    async def load(self, session_id: str) -> bytes:
        """Return the snapshot with this id, for `restore_session`. Raises `SessionError` if there is none."""
        ...

    async def delete(self, session_id: str) -> None:
        """Delete a session, if it exists."""
        ...


class _Expiry:
    """Decides when sessions expire, and when to look for expired ones.

    Args:
        ttl_seconds: How long a session is kept unless it is deleted.
    """

    def __init__(self, ttl_seconds: float) -> None:
        if not ttl_seconds > 0:
            raise ConfigurationError(f"ttl_seconds must be more than 0 (got {ttl_seconds})")
        self._ttl = ttl_seconds
        self._checked_at = -math.inf

    @property
    def oldest(self) -> float:
        """Return the time before which saved sessions have expired."""
        return time.time() - self._ttl

    def is_due(self) -> bool:
        """Return whether it is time to look for expired sessions, and schedule the next time."""
        now = time.monotonic()
        if now - self._checked_at < self._ttl / _CHECKS_PER_TTL:
            return False
        self._checked_at = now
        return True


async def discard_session(sessions: SessionStore | None, session_id: str | None) -> None:
    """Delete a session that is no longer needed; if that fails, it is deleted when it expires."""
    if sessions is None or session_id is None:
        return
    try:
        await sessions.delete(session_id)
    except Exception as error:
        _log.warning("session %.100s cannot be deleted now and will be when it expires: %r", session_id, error)


def _snapshot(session: Session | bytes) -> bytes:
    return session.snapshot() if isinstance(session, Session) else bytes(session)


def _checked(session_id: str) -> str:
    if not _ID.fullmatch(session_id):
        raise SessionError(f"invalid session id {session_id[:100]!r}")
    return session_id


def _missing(session_id: str) -> SessionError:
    return SessionError(f"the session store has no session {session_id}")


class InMemorySessionStore:
    """A session store in memory, for tests and single-process fleets.

    Args:
        ttl_seconds: How long a session is kept unless it is deleted.
    """

    def __init__(self, *, ttl_seconds: float = _TTL_SECONDS) -> None:
        self._expiry = _Expiry(ttl_seconds)
        self._sessions: dict[str, tuple[float, bytes]] = {}

    async def save(self, session_id: str, session: Session | bytes) -> None:
        """Save a session."""
        if self._expiry.is_due():
            oldest = self._expiry.oldest
            self._sessions = {name: kept for name, kept in self._sessions.items() if kept[0] > oldest}
        self._sessions[_checked(session_id)] = time.time(), _snapshot(session)

    async def load(self, session_id: str) -> bytes:
        """Return the snapshot with this id."""
        try:
            return self._sessions[_checked(session_id)][1]
        except KeyError:
            raise _missing(session_id) from None

    async def delete(self, session_id: str) -> None:
        """Delete a session."""
        self._sessions.pop(_checked(session_id), None)


class FolderSessionStore:
    """A session store in a folder that all workers share.

    Args:
        root: The folder; created when the first session is saved. It should contain nothing else.
        ttl_seconds: How long a session is kept unless it is deleted.
    """

    def __init__(self, root: Path | str, *, ttl_seconds: float = _TTL_SECONDS) -> None:
        self.root = Path(root)
        self._expiry = _Expiry(ttl_seconds)

    async def save(self, session_id: str, session: Session | bytes) -> None:
        """Save a session."""
        await in_thread(lambda: self._save(self._path(session_id), _snapshot(session)))

    async def load(self, session_id: str) -> bytes:
        """Return the snapshot with this id."""
        try:
            return await in_thread(self._path(session_id).read_bytes)
        except FileNotFoundError:
            raise _missing(session_id) from None

    async def delete(self, session_id: str) -> None:
        """Delete a session."""
        path = self._path(session_id)
        await in_thread(lambda: path.unlink(missing_ok=True))

    def _path(self, session_id: str) -> Path:
        return self.root / f"{_checked(session_id)}.json"

    def _save(self, path: Path, snapshot: bytes) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._expiry.is_due():
            self._delete_old()
        # Written to a temporary file and renamed, so that readers see a complete file or none.
        part = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(snapshot)
        replace_file(part, path)

    def _delete_old(self) -> None:
        """Delete the files of workers that died: sessions, and incomplete files."""
        oldest = self._expiry.oldest
        for file in self.root.glob("*.json*"):
            try:
                if file.stat().st_mtime < oldest:
                    file.unlink()
            except FileNotFoundError:
                pass  # Another worker has deleted it.


class StoreSessionStore:
    """A session store in the database of a run store (SQLite or PostgreSQL), in a separate table.

    Known secrets are replaced by `[redacted]`, as in all tables of the store.

    Args:
        store: The run store, as `open_store` returns it; not one in memory.
        ttl_seconds: How long a session is kept unless it is deleted.
    """

    def __init__(self, store: RunStore, *, ttl_seconds: float = _TTL_SECONDS) -> None:
        from fairtrial.store.sql import SqlStore

        if not isinstance(store, SqlStore):
            raise ConfigurationError(
                f"store must be a run store in SQLite or PostgreSQL (got {store!r}): open_store('runs.db')"
            )
        self._store = store
        self._expiry = _Expiry(ttl_seconds)

    async def save(self, session_id: str, session: Session | bytes) -> None:
        """Save a session."""
        name = _checked(session_id)
        oldest = self._expiry.oldest if self._expiry.is_due() else None
        await in_thread(lambda: self._store.save_session(name, _snapshot(session), delete_before=oldest))

    async def load(self, session_id: str) -> bytes:
        """Return the snapshot with this id."""
        name = _checked(session_id)
        found = await in_thread(lambda: self._store.load_session(name))
        if found is None:
            raise _missing(session_id)
        return found

    async def delete(self, session_id: str) -> None:
        """Delete a session."""
        name = _checked(session_id)
        await in_thread(lambda: self._store.delete_session(name))


class RedisSessionStore:
    """A session store on Redis; sessions expire after `ttl_seconds`."""

    def __init__(self, connection: RedisConnection, *, ttl_seconds: float = 3600.0, prefix: str = "fairtrial") -> None:
        if not ttl_seconds > 0:
            raise ConfigurationError(f"ttl_seconds must be more than 0 (got {ttl_seconds})")
        self._connection = connection
        self._milliseconds = max(1, round(ttl_seconds * 1000))
        self._prefix = prefix

    async def save(self, session_id: str, session: Session | bytes) -> None:
        """Save a session."""
        await self._run("SET", self._key(session_id), _snapshot(session), "PX", self._milliseconds)

    async def load(self, session_id: str) -> bytes:
        """Return the snapshot with this id."""
        found: bytes | None = await self._run("GET", self._key(session_id))  # type: ignore[assignment]  # a GET
        if found is None:
            raise _missing(session_id)
        return found

    async def delete(self, session_id: str) -> None:
        """Delete a session."""
        await self._run("DEL", self._key(session_id))

    def _key(self, session_id: str) -> str:
        return f"{self._prefix}:session:{_checked(session_id)}"

    async def _run(self, *command: str | bytes | int) -> object:
        from redis.exceptions import RedisError

        from fairtrial.mailbox.redis.topology import translated

        try:
            return await self._connection.command(*command)
        except (RedisError, OSError) as error:
            raise translated(error, "reaching the session store") from None
