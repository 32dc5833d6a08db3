"""The connections of a process to one Redis server: for commands, blocking reads, and renewals from a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import quote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.retry
from redis.exceptions import NoScriptError, RedisError

from fairtrial.errors import ConfigurationError, MailboxClosedError, MailboxError
from fairtrial.mailbox.redis.coalesce import Call, Coalescer
from fairtrial.mailbox.redis.errors import ServerNotDurable, lost_connections, translated
from fairtrial.mailbox.redis.scripts import ALL, LuaScript
from fairtrial.store.redact import register_guess

MIN_VERSION = (7, 0)
BLOCK_SECONDS = 5.0
"""The longest single blocking read; longer waits consist of several, so that a dead connection is detected."""

type RedisSource = RedisConnection | str | redis.Redis | redis.asyncio.Redis
"""A connection, a URL, or a client of redis-py."""

_TLS = (redis.SSLConnection, redis.asyncio.SSLConnection)


def _address(options: dict[str, Any], *, tls: bool) -> str:
    """Return the URL for the connection options of a client."""
    named = [quote(str(options.get(part) or ""), safe="") for part in ("username", "password")]
    credentials = f"{named[0]}:{named[1]}@" if any(named) else ""
    database = options.get("db") or 0
    if path := options.get("path"):
        return f"unix://{credentials}{path}?db={database}"
    host = str(options.get("host") or "localhost")
    host = f"[{host}]" if ":" in host else host
    return f"{'rediss' if tls else 'redis'}://{credentials}{host}:{options.get('port') or 6379}/{database}"


class RedisConnection:
    """The connections of one process to one Redis server, shared by all its mailboxes there.

    Commands and blocking reads never share a connection, so that waiting readers do not delay the renewal of leases.
    Nothing is retried implicitly: a send that raised may have arrived, and only the caller knows whether sending twice
    is harmless.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix://` for a socket.
        timeout_seconds: Time limit for connecting and for each answer.
        durable: Refuse a server that could lose a message after confirming it, that is, one without `appendonly yes`
            and `appendfsync always`. `?durable=yes` in the URL does the same.
        options: Further connection options of redis-py, such as `ssl_ca_certs`.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 10.0, durable: bool = False, **options: Any) -> None:
        url, asked = _without_durable(url)
        self.durable = durable or asked
        self._url = url
        self._timeout = timeout_seconds
        self._options = {
            "socket_keepalive": True,
            **options,
            "socket_connect_timeout": timeout_seconds,
            "decode_responses": False,
            "protocol": 2,  # The same format of answers from all versions of server and client.
        }
        if urlsplit(url).scheme == "unix":
            del self._options["socket_keepalive"]
        only_durable: dict[str, Any] = {"redis_connect_func": _refuse_if_not_durable} if self.durable else {}
        try:
            self._commands: Any = redis.asyncio.Redis.from_url(
                url, **self._options, **only_durable, socket_timeout=timeout_seconds, retry=_no_retry()
            )
        except ValueError:
            # Without the parser's message: it quotes the presumed port, which may be a part of the password.
            raise ConfigurationError(
                "invalid Redis URL: write redis://[user:password@]host[:port][/db], rediss://... for TLS or "
                "unix://path, with / ? # @ : % in a password percent-encoded"
            ) from None
        if password := self._commands.connection_pool.connection_kwargs.get("password"):
            register_guess(str(password), "password", "the password of the queue's URL")
        self._coalescer = Coalescer(self.run)
        self._readers: list[ReadConnection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checked = False
        self._ahead = 0.0  # Seconds by which the server's clock is ahead of this machine's.
        self._closed = False
        self._under_way = 0
        self._idle = asyncio.Event()
        self.renewals = ThreadConnection(url, {**self._options, "socket_timeout": timeout_seconds})

    @classmethod
    def of(cls, source: RedisSource) -> RedisConnection:
        """Return a connection to a URL, or to the server of a redis-py client with its credentials and TLS options.

        New connections are opened in any case: those of a client are not suitable for long blocking reads.
        """
        if isinstance(source, RedisConnection):
            return source
        if isinstance(source, str):
            return cls(source)
        pool: Any = getattr(source, "connection_pool", None)
        options = getattr(pool, "connection_kwargs", None)
        if not isinstance(options, dict):
            raise ConfigurationError(
                f"connection must be a URL, a RedisConnection or a client of redis-py (got {source!r})"
            )
        kept = {name: value for name, value in options.items() if name.startswith("ssl_") and value is not None}
        if (provider := options.get("credential_provider")) is not None:
            kept["credential_provider"] = provider
        return cls(_address(options, tls=issubclass(pool.connection_class, _TLS)), **kept)

    def __repr__(self) -> str:
        parts = urlsplit(self._url)
        return f"RedisConnection({parts.scheme}://{parts.hostname or ''}:{parts.port or 6379})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def check_loop(self) -> None:
        """Raise `MailboxError` after `close`, or in another event loop than the first."""
        if self._closed:
            raise MailboxClosedError("the connection to Redis is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise MailboxError("a RedisConnection belongs to the event loop in which it was first used: create another")

    async def command(self, *args: Any) -> Any:
        """Run one command.

        Raises:
            RedisError: an error of the server or the connection, not yet translated.
        """
        self.check_loop()
        with self._using(), lost_connections():
            return await self._commands.execute_command(*args)

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip; each answer is the result of a script or its error."""
        self.check_loop()
        with self._using():
            try:
                answers = await self._pipelined(calls)
                unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
                if unknown:  # A restarted server has no scripts; these calls had no effect.
                    await self._load({calls[at].script for at in unknown})
                    for at, answer in zip(unknown, await self._pipelined([calls[at] for at in unknown]), strict=True):
                        answers[at] = answer
                return answers
            except (RedisError, OSError) as error:
                return [error] * len(calls)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Count operations in progress; `close` waits for them, because a connection being opened cannot be closed."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def script(self, script: LuaScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run one script immediately.

        Raises:
            RedisError: an error of the server or the connection.
        """
        (answer,) = await self.run([Call(script, tuple(keys), list(args))])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def submit(self, script: LuaScript, keys: tuple[str, ...], head: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Add one operation to the next pipeline; returns the future of its answer."""
        self.check_loop()
        return self._coalescer.submit(script, keys, head, args)

    async def _pipelined(self, calls: Sequence[Call]) -> list[Any]:
        if len(calls) == 1:
            try:
                with lost_connections():
                    return [await self._commands.execute_command(*calls[0].command())]
            except redis.exceptions.ResponseError as error:
                return [error]
        pipeline = self._commands.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(*call.command())
        with lost_connections():
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def _load(self, scripts: Iterable[LuaScript]) -> None:
        pipeline = self._commands.pipeline(transaction=False)
        for script in {*ALL, *scripts}:  # Load all: the others are missing too.
            pipeline.execute_command("SCRIPT LOAD", script.text)
        with lost_connections():
            await pipeline.execute()

    async def check_server(self) -> None:
        """Check the version of the server and that it never evicts keys.

        Raises:
            ConfigurationError: the version is too old, or keys may be evicted.
        """
        if self._checked:
            return
        try:
            said: Any = await self.command("INFO")
        except redis.exceptions.NoPermissionError:
            self._checked = True  # This user may not read the configuration, so it cannot be checked.
            self._ahead = await self.clock_difference()
            return
        version = str(said.get("redis_version", "7.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise ConfigurationError(f"the Redis version must be 7.0 or newer (got {version})")
        policy = str(said.get("maxmemory_policy", "noeviction"))
        if int(said.get("maxmemory", 0)) > 0 and policy != "noeviction":
            raise ConfigurationError(
                f"the maxmemory-policy of Redis must be noeviction (got {policy}): other policies delete messages when "
                "memory is short"
            )
        self._ahead = await self.clock_difference()
        self._checked = True

    async def clock_difference(self) -> float:
        """Return the seconds by which the server's clock is ahead, accurate to half a round trip."""
        before = time.time()
        seconds, microseconds = await self.command("TIME")
        return int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2

    def age_of(self, entry: str) -> float:
        """Return how long an entry has been in its stream: its id is the server's time of its addition."""
        return max(0.0, time.time() + self._ahead - int(entry.partition("-")[0]) / 1000)

    def reader(self) -> ReadConnection:
        """Return a connection for one blocking read; give it back, or discard it after an error."""
        self.check_loop()
        if self._readers:
            return self._readers.pop()
        client = redis.asyncio.Redis.from_url(
            self._url,
            single_connection_client=True,
            **self._options,
            socket_timeout=BLOCK_SECONDS + self._timeout,
            retry=_no_retry(),
        )
        return ReadConnection(self, client)

    async def give_back(self, reader: ReadConnection) -> None:
        """Return a reader to the pool."""
        if self._closed:
            await reader.close()
        else:
            reader.used = True
            self._readers.append(reader)

    async def discard(self, reader: ReadConnection) -> None:
        """Close a reader that failed, and all idle readers, because the server has probably gone away."""
        idle, self._readers = self._readers, []
        for gone in (reader, *idle):
            await gone.close()

    async def unblock(self, client_id: int) -> None:
        """End a blocking read on the server, as if its time were over, so that no message is lost."""
        with self._using(), lost_connections():
            await self._commands.execute_command("CLIENT UNBLOCK", client_id)

    async def close(self) -> None:
        """Send pending operations, then close all connections."""
        if self._closed:
            return
        await self._coalescer.close()
        self._closed = True
        while self._under_way:  # All of them end: they have their own time limits.
            self._idle.clear()
            await self._idle.wait()
        for reader in self._readers:
            await reader.close()
        self._readers.clear()
        await self._commands.aclose()
        self.renewals.close()


class ReadConnection:
    """A connection on which one read at a time may block."""

    def __init__(self, connection: RedisConnection, client: Any) -> None:
        self._connection = connection
        self._client = client
        self._id: int | None = None
        self.used = False  # Idle since an earlier read; the server may have closed it.

    async def read(self, *command: Any) -> Any:
        """Run a command that may block for up to `BLOCK_SECONDS`."""
        with lost_connections():
            if self._id is None:
                self._id = int(await self._client.execute_command("CLIENT ID"))
            return await self._client.execute_command(*command)

    async def interrupt(self, reading: asyncio.Task[Any]) -> None:
        """End a read early, without losing messages that it may have received in the meantime."""
        while not reading.done():
            if self._id is not None:
                try:
                    await self._connection.unblock(self._id)
                except (RedisError, OSError):
                    pass  # No permission, or no server: the read ends by itself within seconds.
            await asyncio.wait([reading], timeout=0.05)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


class ThreadConnection:
    """A connection for threads, opened on first use."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._closed = False
        self._client: Any = None  # redis-py's own annotations do not cover what we call.

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip.

        Raises:
            MailboxError: they could not be run.
        """
        with self._lock:
            if self._closed:
                raise MailboxClosedError("the connection to Redis is closed")
            try:
                if self._client is None:
                    self._client = redis.Redis.from_url(
                        self._url, **self._options, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0)
                    )
                answers = self._pipelined(self._client, calls)
                if any(isinstance(answer, NoScriptError) for answer in answers):
                    for script in {call.script for call in calls}:
                        with lost_connections():
                            self._client.script_load(script.text)
                    answers = self._pipelined(self._client, calls)
            except (RedisError, OSError) as error:
                raise translated(error, "renewing leases") from None
        return answers

    def _pipelined(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(*call.command())
        with lost_connections():
            return list(pipeline.execute(raise_on_error=False))

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close()
                self._client = None


def _without_durable(url: str) -> tuple[str, bool]:
    """Return the URL without our parameter `durable`, and its value."""
    address, mark, query = url.partition("?")
    if not mark:
        return url, False
    asked = [part for part in query.split("&") if part.partition("=")[0] == "durable"]
    if any(part not in ("durable=yes", "durable=no") for part in asked):
        raise ConfigurationError("durable in a Redis URL must be yes or no")
    rest = "&".join(part for part in query.split("&") if part not in asked)
    return (f"{address}?{rest}" if rest else address), "durable=yes" in asked


async def _refuse_if_not_durable(connection: Any) -> None:
    """Check each new connection before its first command: it may lead to another server than before."""
    await connection.on_connect()
    await connection.send_command("CONFIG", "GET", "append*")
    try:
        said = await connection.read_response()
    except redis.exceptions.NoPermissionError:
        raise ServerNotDurable(
            "durable=yes: this user has no permission to read appendonly and appendfsync of the Redis server; "
            "grant +config|get, or leave out durable"
        ) from None
    settings = dict(zip(said[::2], said[1::2], strict=True))
    found = {name: settings.get(name.encode(), b"unknown").decode() for name in ("appendonly", "appendfsync")}
    if found != {"appendonly": "yes", "appendfsync": "always"}:
        got = ", ".join(f"{name} {value}" for name, value in found.items())
        raise ServerNotDurable(
            f"durable=yes: Redis must run appendonly yes and appendfsync always (got {got}); with other settings a "
            "crash can lose messages whose sending was confirmed"
        )


def _no_retry() -> redis.asyncio.retry.Retry:
    return redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
