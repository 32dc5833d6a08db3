"""Answers kept for the next time the same thing is asked.

The key is the content of the request, the repeat of the trial and which identical call of the trial it is: sampling
the same prompt five times in a trial gives five answers, and the same five when the suite runs again.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import anyio.to_thread

from fairtrial.clock import SYSTEM_CLOCK, Clock
from fairtrial.codec import decode, dumps
from fairtrial.errors import CodecError, ConfigurationError, StoreError
from fairtrial.models.reply import ModelReply
from fairtrial.offload import on_trio

type CachePolicy = Literal["off", "read", "read-write", "refresh"]
"""Use nothing; use what is there; also keep new answers; ask anew and keep the answers."""

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    key TEXT PRIMARY KEY, created REAL NOT NULL, size INTEGER NOT NULL, reply TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_created ON responses (created);
"""
_CHECK_EVERY = 64


class ResponseCache:
    """Answers of models in a SQLite file that only its owner may read. Errors are never kept.

    Args:
        path: The file; made if it is not there.
        policy: "off", "read", "read-write" or "refresh" (ask anew, and keep the answers).
        max_bytes: The oldest answers go when all together are larger than this.
        max_age_seconds: Older answers are not used.
    """

    def __init__(
        self,
        path: Path | str,
        policy: CachePolicy = "read-write",
        *,
        max_bytes: int = 4 * 1024**3,
        max_age_seconds: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if policy not in get_args(CachePolicy.__value__):
            raise ConfigurationError(
                f"a cache policy is one of {', '.join(get_args(CachePolicy.__value__))}, not {policy!r}"
            )
        if max_bytes < 1 or (max_age_seconds is not None and max_age_seconds <= 0):
            raise ConfigurationError("a cache needs a size and an age of more than 0")
        self.path = Path(path)
        self.policy: CachePolicy = policy
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._writes = 0
        self._flights: dict[tuple[int, str], _Flight] = {}
        self._hits = self._misses = 0

    @property
    def hits(self) -> int:
        """How many answers it gave."""
        return self._hits

    @property
    def misses(self) -> int:
        """How many it did not have."""
        return self._misses

    async def get(
        self, key: str, ask: Callable[[], Awaitable[ModelReply]], keep: Callable[[ModelReply], bool]
    ) -> tuple[ModelReply, bool]:
        """The kept answer, or else the one `ask` gives; and whether it was there already.

        Calls with one key at one time share one request. If it fails, each of the others asks for itself, one after
        the other. `keep` says whether an answer is worth keeping.
        """
        if self.policy == "off":
            return await ask(), False
        flight_key = (_loop_id(), key)
        while (flight := self._flights.get(flight_key)) is not None:
            await flight.landed.wait()
            if flight.reply is not None:
                self._hits += 1
                return flight.reply, True
        flight = self._flights[flight_key] = _Flight()
        try:
            found = None if self.policy == "refresh" else await self._in_thread(self._read, key)
            if found is not None:
                self._hits += 1
                flight.reply = found
                return found, True
            self._misses += 1
            reply = await ask()
            if keep(reply):
                flight.reply = reply
                if self.policy != "read":
                    await self._in_thread(self._write, key, reply)
            return reply, False
        finally:
            del self._flights[flight_key]
            flight.landed.set()

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        # Shielded by nature: a thread cannot be cancelled, and each of these takes a moment only.
        return await anyio.to_thread.run_sync(call, *args)

    def _open(self) -> sqlite3.Connection:
        """The connection; the lock is held."""
        if self._database is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Made by us before SQLite sees it, so that it is never readable by others; SQLite gives the files it
                # keeps beside it the same rights.
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
                os.chmod(self.path, 0o600)
                database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
                try:
                    database.execute("PRAGMA journal_mode=WAL")
                    database.execute("PRAGMA synchronous=NORMAL")
                    (version,) = database.execute("PRAGMA user_version").fetchone()
                    if version not in (0, _FORMAT):
                        raise StoreError(f"{self.path} has cache format {version}; this version reads {_FORMAT}")
                    database.executescript(_SCHEMA)
                    database.execute(f"PRAGMA user_version={_FORMAT}")
                except BaseException:
                    database.close()
                    raise
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"the response cache {self.path} cannot be used: {error}") from error
            self._database = database
            weakref.finalize(self, database.close)  # A cache that nobody closes is closed when it is gone.
        return self._database

    def _read(self, key: str) -> ModelReply | None:
        with self._lock:
            row = self._open().execute("SELECT created, reply FROM responses WHERE key = ?", (key,)).fetchone()
        if row is None or (self._max_age is not None and row[0] < self._clock.time() - self._max_age):
            return None
        try:
            return decode(ModelReply, row[1], frozen=True)
        except CodecError:
            return None  # Damaged, or of another version: asked for again.

    def _write(self, key: str, reply: ModelReply) -> None:
        text = dumps(reply)
        row = (key, self._clock.time(), len(text.encode()), text)
        with self._lock:
            database = self._open()
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", row)
            self._writes += 1
            if self._writes % _CHECK_EVERY == 1 or self._max_bytes < 64 * 1024**2:
                self._trim(database)

    def _trim(self, database: sqlite3.Connection) -> None:
        if self._max_age is not None:
            database.execute("DELETE FROM responses WHERE created < ?", (self._clock.time() - self._max_age,))
        (total,) = database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()
        if total <= self._max_bytes:
            return
        # Down to nine tenths, so that not every write has to.
        surplus = total - self._max_bytes * 0.9
        for key, size in database.execute("SELECT key, size FROM responses ORDER BY created, key").fetchall():
            if surplus <= 0:
                break
            database.execute("DELETE FROM responses WHERE key = ?", (key,))
            surplus -= size

    def __len__(self) -> int:
        with self._lock:
            (count,) = self._open().execute("SELECT COUNT(*) FROM responses").fetchone()
            return int(count)

    def prune(self, older_than_seconds: float) -> int:
        """Delete answers that were kept longer ago than this, and shrink the file; returns how many."""
        with self._lock:
            database = self._open()
            before = self._clock.time() - older_than_seconds
            deleted = database.execute("DELETE FROM responses WHERE created < ?", (before,)).rowcount
            if deleted:
                database.execute("VACUUM")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return deleted

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._open().execute("DELETE FROM responses")

    def close(self) -> None:
        """Close the file; it opens again when it is needed."""
        with self._lock:
            if self._database is not None:
                with closing(self._database):
                    self._database = None

    def __repr__(self) -> str:
        return f"<ResponseCache {str(self.path)!r} {self.policy}>"


_shared: ResponseCache | None = None


def share_cache(cache: ResponseCache | None) -> ResponseCache | None:
    """From now on the cache of every provider's adapter of this process that has none of its own.

    Returns the one before. For programs that run other people's suites, as the command line does.
    """
    global _shared
    before, _shared = _shared, cache
    return before


def shared_cache() -> ResponseCache | None:
    """The cache of adapters that have none of their own."""
    return _shared


class _Flight:
    """One request that several callers wait for."""

    __slots__ = ("landed", "reply")

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.reply: ModelReply | None = None


def _loop_id() -> int:
    """What tells event loops apart: waiting across them would need threads to wake each other."""
    if on_trio():
        import trio

        return id(trio.lowlevel.current_trio_token())
    import asyncio

    return id(asyncio.get_running_loop())
