"""Where sessions lie that are too big to travel in a result.

Whoever executes a task saves its session here and puts the session's id into the result; whoever scores loads it.
Ids come from the wire, so they are checked before they become a file name or a key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio.to_thread

from fairtrial.errors import ConfigurationError, SessionError

if TYPE_CHECKING:
    from fairtrial.mailbox.redis import RedisConnection

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")


class SessionStore(Protocol):
    """Keeps session snapshots by id."""

    async def save(self, session_id: str, snapshot: bytes) -> None:
        """Keep a snapshot; a second one under the same id takes its place."""
        ...

    async def load(self, session_id: str) -> bytes:
        """The snapshot of that id. Raises `SessionError` if there is none."""
        ...

    async def delete(self, session_id: str) -> None:
        """Forget a snapshot; one that is not there is no error."""
        ...


def _checked(session_id: str) -> str:
    if not _ID.fullmatch(session_id):
        raise SessionError(f"{session_id[:100]!r} is not the id of a session")
    return session_id


def _missing(session_id: str) -> SessionError:
    return SessionError(f"the session store has no session {session_id}")


class InMemorySessionStore:
    """Sessions in this process's memory: for tests, and for fleets of one."""

    def __init__(self) -> None:
        self._sessions: dict[str, bytes] = {}

    async def save(self, session_id: str, snapshot: bytes) -> None:
        """Keep a snapshot."""
        self._sessions[_checked(session_id)] = snapshot

    async def load(self, session_id: str) -> bytes:
        """The snapshot of that id."""
        try:
            return self._sessions[_checked(session_id)]
        except KeyError:
            raise _missing(session_id) from None

    async def delete(self, session_id: str) -> None:
        """Forget a snapshot."""
        self._sessions.pop(_checked(session_id), None)


class FolderSessionStore:
    """Sessions as files under a folder that all workers share."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    async def save(self, session_id: str, snapshot: bytes) -> None:
        """Keep a snapshot."""
        await anyio.to_thread.run_sync(self._save, self._path(session_id), snapshot)

    async def load(self, session_id: str) -> bytes:
        """The snapshot of that id."""
        try:
            return await anyio.to_thread.run_sync(self._path(session_id).read_bytes)
        except FileNotFoundError:
            raise _missing(session_id) from None

    async def delete(self, session_id: str) -> None:
        """Forget a snapshot."""
        path = self._path(session_id)
        await anyio.to_thread.run_sync(lambda: path.unlink(missing_ok=True))

    def _path(self, session_id: str) -> Path:
        return self.root / f"{_checked(session_id)}.json"

    def _save(self, path: Path, snapshot: bytes) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written beside and renamed: a reader sees all of it or none.
        part = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(snapshot)
        part.replace(path)


class RedisSessionStore:
    """Sessions on a Redis, for a while: what nobody fetched is gone after `ttl_seconds`."""

    def __init__(self, connection: RedisConnection, *, ttl_seconds: float = 3600.0, prefix: str = "fairtrial") -> None:
        if ttl_seconds <= 0:
            raise ConfigurationError(f"ttl_seconds is more than 0, not {ttl_seconds}")
        self._connection = connection
        self._milliseconds = max(1, round(ttl_seconds * 1000))
        self._prefix = prefix

    async def save(self, session_id: str, snapshot: bytes) -> None:
        """Keep a snapshot."""
        await self._run("SET", self._key(session_id), snapshot, "PX", self._milliseconds)

    async def load(self, session_id: str) -> bytes:
        """The snapshot of that id."""
        found: bytes | None = await self._run("GET", self._key(session_id))  # type: ignore[assignment]  # a GET
        if found is None:
            raise _missing(session_id)
        return found

    async def delete(self, session_id: str) -> None:
        """Forget a snapshot."""
        await self._run("DEL", self._key(session_id))

    def _key(self, session_id: str) -> str:
        return f"{self._prefix}:session:{_checked(session_id)}"

    async def _run(self, *command: str | bytes | int) -> object:
        from redis.exceptions import RedisError

        from fairtrial.mailbox.redis.errors import translated

        try:
            return await self._connection.command(*command)
        except (RedisError, OSError) as error:
            raise translated(error, "reaching the session store") from None
