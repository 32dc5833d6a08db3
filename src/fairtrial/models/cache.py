"""A cache of model responses.

The key consists of the content of the request, the sample and the repeat of the trial, and a counter of identical calls
in the trial: sampling the same prompt five times in a trial gives five answers, and the same five when the suite runs
again. Two samples with the same prompt get an answer each.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import anyio.to_thread

from fairtrial.base.backoff import SYSTEM_CLOCK, Clock
from fairtrial.base.codec import decode, dumps, to_json
from fairtrial.base.offload import on_trio
from fairtrial.errors import CodecError, ConfigurationError, StoreError
from fairtrial.models.adapter import ModelReply

type CachePolicy = Literal["off", "read", "read-write", "refresh"]
"""No caching; only read; read and store new answers; never read, but store new answers."""

_FORMAT = 2  # 1: without the sample in the key, and with answers that were not complete.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
    key TEXT PRIMARY KEY, created REAL NOT NULL, size INTEGER NOT NULL, reply TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_created ON responses (created);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT COALESCE(SUM(size), 0) FROM responses WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS replaced AFTER UPDATE ON responses BEGIN
    UPDATE total SET bytes = bytes + new.size - old.size;
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON responses BEGIN UPDATE total SET bytes = bytes - old.size; END;
COMMIT;
"""
# Not INSERT OR REPLACE, which deletes the old row without its trigger.
_STORE = """
INSERT INTO responses VALUES (?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET created = excluded.created, size = excluded.size, reply = excluded.reply
"""
_CHECK_EVERY = 64
_disabled: ContextVar[bool] = ContextVar("fairtrial_cache_disabled", default=False)


@contextmanager
def without_cache() -> Iterator[None]:
    """Call models instead of using cached answers in this block and the tasks it starts; judges keep their cache."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def cache_disabled() -> bool:
    """Return whether cached answers may not be used for tasks."""
    return _disabled.get()


class ResponseCache:
    """Model responses in an SQLite file that only its owner can read. Only complete answers are stored.

    Answers of an earlier format of the cache are deleted when the file is opened.

    Args:
        path: The file; it is created if needed.
        policy: "off", "read", "read-write" or "refresh" (call the model again and replace stored answers).
        max_bytes: The largest total size; the oldest answers are deleted beyond it.
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
                f"a cache policy must be one of {', '.join(get_args(CachePolicy.__value__))} (got {policy!r})"
            )
        if max_bytes < 1 or (max_age_seconds is not None and max_age_seconds <= 0):
            raise ConfigurationError(
                f"max_bytes and max_age_seconds of a cache must be more than 0 (got {max_bytes} and {max_age_seconds})"
            )
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

    def __reduce__(self) -> Any:
        return _reopened, (self.path, self.policy, self._max_bytes, self._max_age)

    @property
    def hits(self) -> int:
        """The number of cache hits."""
        return self._hits

    @property
    def misses(self) -> int:
        """The number of cache misses."""
        return self._misses

    async def get(
        self, key: str, ask: Callable[[], Awaitable[ModelReply]], keep: Callable[[ModelReply], bool]
    ) -> tuple[ModelReply, bool]:
        """Return the cached answer, or else that of `ask`, and whether it was cached.

        Concurrent calls with the same key share one request. If it fails, the others send their own, one after the
        other. `keep` decides whether an answer is stored.
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
        # Needs no shielding: a thread cannot be cancelled, and these calls are short.
        return await anyio.to_thread.run_sync(call, *args)

    def _open(self) -> sqlite3.Connection:
        """Return the connection, opened on first use; the lock must be held."""
        if self._database is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Created before SQLite opens it, so that others can never read it; SQLite gives its additional files
                # the same permissions.
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
                os.chmod(self.path, 0o600)
                database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
                try:
                    database.execute("PRAGMA journal_mode=WAL")
                    database.execute("PRAGMA synchronous=NORMAL")
                    (version,) = database.execute("PRAGMA user_version").fetchone()
                    if version > _FORMAT:
                        raise StoreError(f"{self.path} has cache format {version}; this version reads {_FORMAT}")
                    if 0 < version < _FORMAT:
                        database.executescript("DROP TABLE IF EXISTS responses; DROP TABLE IF EXISTS total")
                    database.executescript(_SCHEMA)
                    database.execute(f"PRAGMA user_version={_FORMAT}")
                except BaseException:
                    database.close()
                    raise
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"the response cache {self.path} cannot be used: {error}") from error
            self._database = database
            weakref.finalize(self, database.close)  # For a cache that is never closed.
        return self._database

    def _read(self, key: str) -> ModelReply | None:
        with self._lock:
            row = self._open().execute("SELECT created, reply FROM responses WHERE key = ?", (key,)).fetchone()
        if row is None or (self._max_age is not None and row[0] < self._clock.time() - self._max_age):
            return None
        try:
            return decode(ModelReply, row[1], frozen=True)
        except CodecError:
            return None  # Damaged, or written by another version: the model is called again.

    def _write(self, key: str, reply: ModelReply) -> None:
        text = dumps({**to_json(reply), "message": reply.message.to_record()})
        row = (key, self._clock.time(), len(text.encode()), text)
        with self._lock:
            database = self._open()
            database.execute(_STORE, row)
            self._writes += 1
            if self._writes % _CHECK_EVERY == 1 or self._max_bytes < 64 * 1024**2:
                self._trim(database)

    def _trim(self, database: sqlite3.Connection) -> None:
        if self._max_age is not None:
            database.execute("DELETE FROM responses WHERE created < ?", (self._clock.time() - self._max_age,))
        (total,) = database.execute("SELECT bytes FROM total").fetchone()
        if total <= self._max_bytes:
            return
        # Shrink to nine tenths, so that not every write has to delete.
        surplus = total - self._max_bytes * 0.9
        last = (0.0, "")
        oldest = database.execute("SELECT created, key, size FROM responses ORDER BY created, key")
        with closing(oldest):
            for created, key, size in oldest:
                last = (created, key)
                surplus -= size
                if surplus <= 0:
                    break
        database.execute("DELETE FROM responses WHERE (created, key) <= (?, ?)", last)

    def __len__(self) -> int:
        with self._lock:
            (count,) = self._open().execute("SELECT COUNT(*) FROM responses").fetchone()
            return int(count)

    def prune(self, older_than_seconds: float) -> int:
        """Delete answers older than this, and shrink the file; returns their number."""
        with self._lock:
            database = self._open()
            before = self._clock.time() - older_than_seconds
            deleted = database.execute("DELETE FROM responses WHERE created < ?", (before,)).rowcount
            if deleted:
                database.execute("VACUUM")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return deleted

    def clear(self) -> None:
        """Delete all answers."""
        with self._lock:
            self._open().execute("DELETE FROM responses")

    def close(self) -> None:
        """Close the file; it is reopened on next use."""
        with self._lock:
            if self._database is not None:
                with closing(self._database):
                    self._database = None

    def __repr__(self) -> str:
        return f"<ResponseCache {str(self.path)!r} {self.policy}>"


def _reopened(path: Path, policy: CachePolicy, max_bytes: int, max_age_seconds: float | None) -> ResponseCache:
    """Return the cache of another process."""
    return ResponseCache(path, policy, max_bytes=max_bytes, max_age_seconds=max_age_seconds)


_shared: ResponseCache | None = None


def share_cache(cache: ResponseCache | None) -> ResponseCache | None:
    """Set the cache of all adapters of this process that have none; returns the previous one.

    For programs that run other people's suites, such as the command line.
    """
    global _shared
    before, _shared = _shared, cache
    return before


def shared_cache() -> ResponseCache | None:
    """Return the cache of adapters that have none of their own."""
    return _shared


class _Flight:
    """One request that several callers wait for."""

    __slots__ = ("landed", "reply")

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.reply: ModelReply | None = None


def _loop_id() -> int:
    """Return an id of the event loop. Requests are only shared within one: waiting across loops needs threads."""
    if on_trio():
        import trio

        return id(trio.lowlevel.current_trio_token())
    import asyncio

    return id(asyncio.get_running_loop())
