"""One process's connections to one Redis: for commands, for blocking reads, and for renewals from a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.retry
from redis.exceptions import NoScriptError, RedisError

from fairtrial.errors import ConfigurationError, MailboxClosedError, MailboxError
from fairtrial.mailbox.redis.coalesce import Call, Coalescer
from fairtrial.mailbox.redis.errors import lost_connections, translated
from fairtrial.mailbox.redis.scripts import ALL, Script
from fairtrial.store.redact import register_guess

MIN_VERSION = (7, 0)
BLOCK_SECONDS = 5.0
"""The longest one blocking read; longer waits are made of several, so that a dead connection is noticed."""


class RedisConnection:
    """The connections of one process to one Redis, shared by all its mailboxes there.

    Commands and blocking reads never share a connection: ten readers that wait must not keep a lease from being
    renewed. Nothing is retried behind the caller's back: a send that raised may have arrived, and only the caller
    knows whether sending twice is harmless.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix://` for a socket.
        timeout_seconds: How long to wait for a connection and for an answer.
        options: Further options of redis-py's connections, such as `ssl_ca_certs`.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 10.0, **options: Any) -> None:
        self._url = url
        self._timeout = timeout_seconds
        self._options = {
            "socket_keepalive": True,
            **options,
            "socket_connect_timeout": timeout_seconds,
            "decode_responses": False,
            "protocol": 2,  # One shape of answers, from every version of server and client.
        }
        if urlsplit(url).scheme == "unix":
            del self._options["socket_keepalive"]
        try:
            self._commands: Any = redis.asyncio.Redis.from_url(
                url, **self._options, socket_timeout=timeout_seconds, retry=_no_retry()
            )
        except ValueError:
            # Not what the parser said: it quotes what it takes for a port, which may be half of a password.
            raise ConfigurationError(
                "not a Redis address: write redis://[user:password@]host[:port][/db], rediss://... for TLS or "
                "unix://path, with / ? # @ : % in a password percent-encoded"
            ) from None
        if password := self._commands.connection_pool.connection_kwargs.get("password"):
            register_guess(str(password), "password", "the password of the queue's URL")
        self._coalescer = Coalescer(self.run)
        self._readers: list[Reader] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checked = False
        self._ahead = 0.0  # Seconds that the server's clock is ahead of ours.
        self._closed = False
        self._under_way = 0
        self._idle = asyncio.Event()
        self.renewals = ThreadConnection(url, {**self._options, "socket_timeout": timeout_seconds})

    def __repr__(self) -> str:
        parts = urlsplit(self._url)
        return f"RedisConnection({parts.scheme}://{parts.hostname or ''}:{parts.port or 6379})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def check_loop(self) -> None:
        """Refuse to be used after `close`, or from an event loop other than the first."""
        if self._closed:
            raise MailboxClosedError("the connection to Redis is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise MailboxError("a connection to Redis belongs to the event loop it was first used in; make another")

    async def command(self, *args: Any) -> Any:
        """Run one command.

        Raises:
            RedisError: what the server or the wire said; callers look at it before they translate it.
        """
        self.check_loop()
        with self._using(), lost_connections():
            return await self._commands.execute_command(*args)

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip; an answer is what the script returned, or its error."""
        self.check_loop()
        with self._using():
            try:
                answers = await self._pipelined(calls)
                unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
                if unknown:  # A server that was restarted has forgotten its scripts. Those calls have done nothing.
                    await self._load({calls[at].script for at in unknown})
                    for at, answer in zip(unknown, await self._pipelined([calls[at] for at in unknown]), strict=True):
                        answers[at] = answer
                return answers
            except (RedisError, OSError) as error:
                return [error] * len(calls)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Counts what is under way: closing waits for it, for a connection that is just being made cannot be closed."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run one script now, by itself.

        Raises:
            RedisError: what the server or the wire said.
        """
        (answer,) = await self.run([Call(script, tuple(keys), list(args))])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def submit(self, script: Script, keys: tuple[str, ...], head: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Put one operation on the next departure; returns the future of its own answer."""
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

    async def _load(self, scripts: Iterable[Script]) -> None:
        pipeline = self._commands.pipeline(transaction=False)
        for script in {*ALL, *scripts}:  # The others will be missed next.
            pipeline.execute_command("SCRIPT LOAD", script.text)
        with lost_connections():
            await pipeline.execute()

    async def check_server(self) -> None:
        """Refuse a server that is too old, or that may throw messages away to make room.

        Raises:
            ConfigurationError: it is, or it may.
        """
        if self._checked:
            return
        try:
            said: Any = await self.command("INFO")
        except redis.exceptions.NoPermissionError:
            self._checked = True  # A user who may not ask. The administrator knows what the server is.
            self._ahead = await self.clock_difference()
            return
        version = str(said.get("redis_version", "7.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise ConfigurationError(f"mailboxes need Redis 7.0 or newer; this is {version}")
        policy = str(said.get("maxmemory_policy", "noeviction"))
        if int(said.get("maxmemory", 0)) > 0 and policy != "noeviction":
            raise ConfigurationError(
                f"this Redis deletes keys when memory is short (maxmemory-policy {policy}), messages among them: "
                "set maxmemory-policy noeviction"
            )
        self._ahead = await self.clock_difference()
        self._checked = True

    async def clock_difference(self) -> float:
        """Seconds that the server's clock is ahead of this machine's, to half the time of a round trip."""
        before = time.time()
        seconds, microseconds = await self.command("TIME")
        return int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2

    def age_of(self, entry: str) -> float:
        """How long an entry has been in its stream: its id is the server's time when it was added."""
        return max(0.0, time.time() + self._ahead - int(entry.partition("-")[0]) / 1000)

    def reader(self) -> Reader:
        """A connection for one blocking read; give it back, or throw it away after an error."""
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
        return Reader(self, client)

    async def give_back(self, reader: Reader) -> None:
        """Keep a reader for the next blocking read."""
        if self._closed:
            await reader.close()
        else:
            reader.used = True
            self._readers.append(reader)

    async def discard(self, reader: Reader) -> None:
        """Let go of a reader that failed, and of those that lay idle: the server they knew is gone."""
        idle, self._readers = self._readers, []
        for gone in (reader, *idle):
            await gone.close()

    async def unblock(self, client_id: int) -> None:
        """End a blocking read on the server's side, as if its time were over: nothing it was given gets lost."""
        with self._using(), lost_connections():
            await self._commands.execute_command("CLIENT UNBLOCK", client_id)

    async def close(self) -> None:
        """Send what is waiting to be sent, then let go of every connection."""
        if self._closed:
            return
        await self._coalescer.close()
        self._closed = True
        while self._under_way:  # Each of them ends: they have time limits of their own.
            self._idle.clear()
            await self._idle.wait()
        for reader in self._readers:
            await reader.close()
        self._readers.clear()
        await self._commands.aclose()
        self.renewals.close()


class Reader:
    """A connection on which one read at a time may block."""

    def __init__(self, connection: RedisConnection, client: Any) -> None:
        self._connection = connection
        self._client = client
        self._id: int | None = None
        self.used = False  # Lay idle since an earlier read; the server may have hung up meanwhile.

    async def read(self, *command: Any) -> Any:
        """Run a command that may block for up to `BLOCK_SECONDS`."""
        with lost_connections():
            if self._id is None:
                self._id = int(await self._client.execute_command("CLIENT ID"))
            return await self._client.execute_command(*command)

    async def interrupt(self, reading: asyncio.Task[Any]) -> None:
        """End a read early, without losing what it may have been given in the meantime."""
        while not reading.done():
            if self._id is not None:
                try:
                    await self._connection.unblock(self._id)
                except (RedisError, OSError):
                    pass  # Not allowed to, or no server: the read ends by itself within seconds.
            await asyncio.wait([reading], timeout=0.05)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._client.aclose()


class ThreadConnection:
    """A connection for threads. It is made when it is first used."""

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
        """Let go of the connection."""
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close()
                self._client = None


def _no_retry() -> redis.asyncio.retry.Retry:
    return redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
