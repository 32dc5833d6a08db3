"""The connections of a process to one Redis: for commands, blocking reads, and renewals from a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self
from urllib.parse import quote

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
from redis.exceptions import AskError, MovedError, NoScriptError, RedisError

from fairtrial.errors import ConfigurationError
from fairtrial.mailbox.batcher import Batcher, OpenBatch
from fairtrial.mailbox.redis import topology
from fairtrial.mailbox.redis.scripts import ALL, SEND, SEND_ALL, Call, LuaScript
from fairtrial.mailbox.server import ServerConnection
from fairtrial.store.redact import register_guess

MIN_VERSION = (7, 0)
MAX_OPERATIONS = 200
MAX_BYTES = 4 * 1024 * 1024
_SENDS = (SEND, SEND_ALL)
"""The scripts that add messages: in the durable mode, their answers wait for the flush."""
BLOCK_SECONDS = 5.0
"""The longest single blocking read; longer waits consist of several, so that a dead connection is detected."""

type RedisSource = RedisConnection | str | redis.Redis | redis.asyncio.Redis
"""A connection, a URL, or a client of redis-py."""

_TLS = (redis.SSLConnection, redis.asyncio.SSLConnection)
_KEYLESS = ("INFO", "TIME", "SCAN", "KEYS")
"""Commands without a key: any server can answer them. The first argument of all other commands is a key."""


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


class RedisConnection(ServerConnection):
    """The connections of one process to one Redis, shared by all its mailboxes there.

    Commands and blocking reads never share a connection, so that waiting readers do not delay the renewal of leases.
    Nothing is retried implicitly: a send that raised may have arrived, and only the caller knows whether sending twice
    is harmless.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix://` for a socket;
            `redis+sentinel://[[user]:password@]host[:port],.../name[/db]` for the master that Sentinels name;
            `redis+cluster://[[user]:password@]host[:port],...` for a Cluster.
        timeout_seconds: Time limit for connecting and for each answer.
        durable: Refuse a server that could lose a message after confirming it: it must have `appendonly yes`, and
            `appendfsync always`, or `everysec` from Redis 7.2 on, where each send then waits for the flush (WAITAOF).
            `?durable=yes` in the URL does the same. Not with Sentinels or a Cluster: their replication is asynchronous.
        options: Further connection options of redis-py, such as `ssl_ca_certs`.
    """

    server = "Redis"
    required = "a Redis mailbox requires a connection: a URL, or a client of redis-py"

    def __init__(self, url: str, *, timeout_seconds: float = 10.0, durable: bool = False, **options: Any) -> None:
        super().__init__(url)
        url, asked = _without_durable(url)
        self.durable = durable or asked
        self._url = url
        self._address = topology.RedisAddress.parse(url)
        self._timeout = timeout_seconds
        self._options = {
            "socket_keepalive": True,
            **options,
            "socket_connect_timeout": timeout_seconds,
            "decode_responses": False,
            "protocol": 2,  # The same format of answers from all versions of server and client.
        }
        if url.startswith("unix:"):
            del self._options["socket_keepalive"]
        if self.durable and self._address.mode != "server":
            raise ConfigurationError(
                "durable=yes requires the address of one Redis server: the replication of Sentinels and Clusters is "
                "asynchronous, so a failover can lose messages whose sending was confirmed"
            )
        self._topology = topology.Topology(self._address)
        self._nodes = topology.AsyncNodes(self._topology, self._connect, self._connect_briefly)
        self._check_url()
        self._batcher = Batcher(self.server, self._run_batches, MAX_OPERATIONS, MAX_BYTES)
        self._readers: dict[topology.Node, list[ReadConnection]] = {}
        self._waits = self.durable  # Whether sends must wait for the flush; each new connection tells.
        self._checked = False
        self._ahead = 0.0  # Seconds by which the server's clock is ahead of this machine's.
        self._under_way = 0
        self._idle = asyncio.Event()
        self.renewals = topology.ThreadConnection(self._topology, {**self._options, "socket_timeout": timeout_seconds})

    @classmethod
    def of(cls, source: RedisSource | None) -> Self:
        """Return a connection to a URL, or to the server of a redis-py client with its credentials and TLS options.

        New connections are opened in any case: those of a client are not suitable for long blocking reads.
        """
        if source is None or isinstance(source, str | RedisConnection):
            return super().of(source)
        pool: Any = getattr(source, "connection_pool", None)
        options = getattr(pool, "connection_kwargs", None)
        if not isinstance(options, dict):
            raise ConfigurationError(
                f"connection must be a URL, a RedisConnection or a client of redis-py for one server (got {source!r}); "
                "for a Cluster, pass redis+cluster://host:port"
            )
        if hasattr(pool, "sentinel_manager"):
            raise ConfigurationError(
                "connection must be a URL if Sentinels name the server: pass redis+sentinel://host:port/name"
            )
        kept = {name: value for name, value in options.items() if name.startswith("ssl_") and value is not None}
        if (provider := options.get("credential_provider")) is not None:
            kept["credential_provider"] = provider
        return cls(_address(options, tls=issubclass(pool.connection_class, _TLS)), **kept)

    def __repr__(self) -> str:
        return f"RedisConnection({self._address})"

    async def command(self, *args: Any) -> Any:
        """Run one command.

        Raises:
            RedisError: an error of the server or the connection, not yet translated.
        """
        self.check_loop()
        key = None if len(args) < 2 or args[0] in _KEYLESS else args[1]
        with self._using():
            for _ in range(topology.MAX_REDIRECTS):
                node = await self._nodes.node_of(key)
                try:
                    return await self._execute(node, args)
                except MovedError:
                    continue  # The command had no effect.
            return await self._execute(await self._nodes.node_of(key), args)

    async def command_everywhere(self, *args: Any) -> list[Any]:
        """Run a command without a key on all servers that have keys."""
        self.check_loop()
        with self._using():
            return [await self._execute(node, args) for node in await self._nodes.nodes()]

    async def scan(self, pattern: str, max_steps: int) -> set[str]:
        """Return the keys of all servers that match a pattern, as far as `max_steps` on each server find them."""
        self.check_loop()
        found: set[str] = set()
        with self._using():
            for node in await self._nodes.nodes():
                cursor = b"0"
                for _ in range(max_steps):
                    cursor, keys = await self._execute(node, ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
                    found |= {key.decode("utf-8", "replace") for key in keys}
                    if int(cursor) == 0:
                        break
        return found

    async def _execute(self, node: topology.Node, args: Sequence[Any]) -> Any:
        try:
            with topology.lost_connections():
                return await self._nodes.client(node).execute_command(*args)
        except (RedisError, OSError) as error:
            self._topology.note(error, node)
            raise

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip; each answer is the result of a script or its error."""
        self.check_loop()
        with self._using():
            if self._address.mode != "cluster":
                return await self._run_on_one(calls)
            answers: list[Any] = [None] * len(calls)
            left: Sequence[int] = range(len(calls))
            for _ in range(1 + topology.MAX_REDIRECTS):
                await self._run_on_each(calls, left, answers)
                left = [at for at in left if isinstance(answers[at], MovedError)]  # They had no effect.
                if not left:
                    break
            return answers

    async def _run_on_each(self, calls: Sequence[Call], wanted: Sequence[int], answers: list[Any]) -> None:
        """Run some of the calls on the nodes of their keys, all nodes at once, and put the answers in place."""
        groups: dict[topology.Node, list[int]] = {}
        for at in wanted:
            try:
                groups.setdefault(await self._nodes.node_of(calls[at].keys[0]), []).append(at)
            except (RedisError, OSError) as error:
                answers[at] = error
        running = (self._run_at(node, [calls[at] for at in group]) for node, group in groups.items())
        for group, found in zip(groups.values(), await asyncio.gather(*running), strict=True):
            for at, answer in zip(group, found, strict=True):
                answers[at] = answer

    async def _run_on_one(self, calls: Sequence[Call]) -> list[Any]:
        try:
            node = await self._nodes.node_of(None)
        except (RedisError, OSError) as error:
            return [error] * len(calls)
        return await self._run_at(node, calls)

    async def _run_at(self, node: topology.Node, calls: Sequence[Call]) -> list[Any]:
        client = self._nodes.client(node)
        try:
            answers = await self._confirmed(client, calls)
            unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:  # A restarted server has no scripts; these calls had no effect.
                await self._load(client, {calls[at].script for at in unknown})
                again = await self._confirmed(client, [calls[at] for at in unknown])
                for at, answer in zip(unknown, again, strict=True):
                    answers[at] = answer
        except (RedisError, OSError) as error:
            self._topology.note(error, node)
            return [error] * len(calls)
        if self._address.mode != "server":
            for at, answer in enumerate(answers):
                if isinstance(answer, BaseException):
                    self._topology.note(answer, node)
                    if isinstance(answer, AskError) and not isinstance(answer, MovedError):
                        answers[at] = await self._ask(answer, calls[at])
        return answers

    async def _confirmed(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """Run calls; in the durable mode, what was sent is confirmed when the server's file has it on disk."""
        commands = [call.command() for call in calls]
        sends = [at for at, call in enumerate(calls) if call.script in _SENDS]
        if not self.durable or not sends:
            return await self._pipelined(client, commands)
        if self._waits:  # Not as long as the time limit of the connection, which would be lost.
            commands.append(("WAITAOF", 1, 0, round(self._timeout * 900)))
        answers = await self._pipelined(client, commands)
        flushed = answers[len(calls) :]
        # A new connection may have found out only now that sends must wait.
        if self._waits and not (flushed and isinstance(flushed[0], list) and flushed[0][0]):
            unflushed = redis.exceptions.TimeoutError(f"durable=yes: Redis did not flush the message (got {flushed})")
            for at in sends:
                if not isinstance(answers[at], BaseException):
                    answers[at] = unflushed
        return answers[: len(calls)]

    async def _ask(self, answer: AskError, call: Call) -> Any:
        """Run a call on the node to which its slot is being moved."""
        client = self._nodes.client((answer.host, answer.port))
        try:
            if isinstance(found := (await self._asking(client, call)), NoScriptError):
                await self._load(client, {call.script})
                found = await self._asking(client, call)
        except (RedisError, OSError) as error:
            return error
        return found

    async def _asking(self, client: Any, call: Call) -> Any:
        return (await self._pipelined(client, [("ASKING",), call.command()]))[1]

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

    def submit(
        self, script: LuaScript, keys: tuple[str, ...], head: tuple[Any, ...], args: tuple[Any, ...], size: int = 0
    ) -> asyncio.Future[Any]:
        """Add one operation to the next pipeline; returns the future of its answer.

        Operations with the same script, keys and `head` become one call.
        """
        self.check_loop()
        return self._batcher.submit((script, keys, head), args, size)

    async def _run_batches(self, batches: Sequence[OpenBatch]) -> list[Any]:
        calls = []
        for batch in batches:
            script, keys, head = batch.key
            calls.append(Call(script, keys, [*head, *chain.from_iterable(batch.items)]))
        return await self.run(calls)

    async def _pipelined(self, client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(commands) == 1:
            try:
                with topology.lost_connections():
                    return [await client.execute_command(*commands[0])]
            except redis.exceptions.ResponseError as error:
                return [error]
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        with topology.lost_connections():
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def _load(self, client: Any, scripts: Iterable[LuaScript]) -> None:
        pipeline = client.pipeline(transaction=False)
        for script in {*ALL, *scripts}:  # Load all: the others are missing too.
            pipeline.execute_command("SCRIPT LOAD", script.text)
        with topology.lost_connections():
            await pipeline.execute()

    async def check_server(self) -> None:
        """Check the version of the server and that it never evicts keys.

        Raises:
            ConfigurationError: the version is too old, or keys may be evicted.
        """
        if self._checked:
            return
        try:
            servers = await self.command_everywhere("INFO")
        except redis.exceptions.NoPermissionError:
            self._checked = True  # This user may not read the configuration, so it cannot be checked.
            self._ahead = await self.clock_difference()
            return
        for server in servers:
            _check_settings(server)
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

    async def reader(self, key: str) -> ReadConnection:
        """Return a connection for one blocking read of a key; give it back, or discard it after an error."""
        self.check_loop()
        with self._using():
            node = await self._nodes.node_of(key)
        if idle := self._readers.get(node):
            return idle.pop()
        client = redis.asyncio.Redis.from_url(
            self._address.url_of(node),
            single_connection_client=True,
            **self._options,
            **_parser_options(),
            socket_timeout=BLOCK_SECONDS + self._timeout,
            retry=_no_retry(),
        )
        return ReadConnection(self, node, client)

    async def give_back(self, reader: ReadConnection) -> None:
        """Return a reader to the pool."""
        if self._closed:
            await reader.close()
        else:
            reader.used = True
            self._readers.setdefault(reader.node, []).append(reader)

    async def discard(self, reader: ReadConnection, error: BaseException | None = None) -> None:
        """Close a reader that failed, and all idle readers of its server, which has probably gone away."""
        if error is not None:
            self._topology.note(error, reader.node)
        for gone in (reader, *self._readers.pop(reader.node, ())):
            await gone.close()

    async def unblock(self, node: topology.Node, client_id: int) -> None:
        """End a blocking read on the server, as if its time were over, so that no message is lost."""
        with self._using(), topology.lost_connections():
            await self._nodes.client(node).execute_command("CLIENT UNBLOCK", client_id)

    async def close(self) -> None:
        """Send pending operations, then close all connections."""
        if self._closed:
            return
        await self._batcher.close()
        self._closed = True
        while self._under_way:  # All of them end: they have their own time limits.
            self._idle.clear()
            await self._idle.wait()
        for reader in [reader for idle in self._readers.values() for reader in idle]:
            await reader.close()
        self._readers.clear()
        await self._nodes.close()
        self.renewals.close()

    def _check_url(self) -> None:
        """Refuse a URL that redis-py cannot read, and remember its passwords as secrets."""
        address = self._address
        try:
            if address.mode == "server":
                clients = [self._nodes.client(None)]
            else:
                clients = [
                    redis.asyncio.Redis.from_url(url)
                    for seed in address.seeds
                    for url in (address.url_of(seed), address.url_of_seed(seed))
                ]
        except ValueError:
            # Without the parser's message: it quotes the presumed port, which may be a part of the password.
            raise topology.invalid_address() from None
        for client in clients:
            if password := client.connection_pool.connection_kwargs.get("password"):
                register_guess(str(password), "password", "the password of the queue's URL")

    def _connect(self, url: str) -> Any:
        only_durable: dict[str, Any] = {"redis_connect_func": self._check_durable} if self.durable else {}
        return redis.asyncio.Redis.from_url(
            url, **self._options, **only_durable, socket_timeout=self._timeout, retry=_no_retry()
        )

    async def _check_durable(self, connection: Any) -> None:
        """Check each new connection before its first command: it may lead to another server than before."""
        await connection.on_connect()
        settings = await _asked(connection, "CONFIG", "GET", "append*", grant="config|get")
        pairs = dict(zip(settings[::2], settings[1::2], strict=True))
        found = {name: pairs.get(name.encode(), b"unknown").decode() for name in ("appendonly", "appendfsync")}
        self._waits = found["appendfsync"] != "always"
        if found["appendonly"] == "yes" and found["appendfsync"] in ("always", "everysec"):
            if not self._waits:
                return
            try:  # With nothing written on this connection, it answers at once.
                await _asked(connection, "WAITAOF", 1, 0, 1, grant="waitaof")
                return
            except redis.exceptions.ResponseError:
                pass  # Redis before 7.2.
        got = ", ".join(f"{name} {value}" for name, value in found.items())
        raise topology.ServerNotDurableError(
            f"durable=yes: Redis must run appendonly yes and appendfsync always (got {got}), or everysec from 7.2 on; "
            "with other settings a crash can lose messages whose sending was confirmed"
        )

    def _connect_briefly(self, url: str) -> Any:
        seconds = min(self._timeout, topology.DISCOVERY_SECONDS)
        options = {**self._options, "socket_connect_timeout": seconds, "socket_timeout": seconds}
        return redis.asyncio.Redis.from_url(url, **options, single_connection_client=True, retry=_no_retry())


class ReadConnection:
    """A connection on which one read at a time may block."""

    def __init__(self, connection: RedisConnection, node: topology.Node, client: Any) -> None:
        self._connection = connection
        self.node = node
        self._client = client
        self._id: int | None = None
        self.used = False  # Idle since an earlier read; the server may have closed it.

    async def read(self, *command: Any) -> Any:
        """Run a command that may block for up to `BLOCK_SECONDS`."""
        with topology.lost_connections():
            if self._id is None:
                self._id = int(await self._client.execute_command("CLIENT ID"))
            return await self._client.execute_command(*command)

    async def interrupt(self, reading: asyncio.Task[Any]) -> None:
        """End a read early, without losing messages that it may have received in the meantime."""
        while not reading.done():
            if self._id is not None:
                try:
                    await self._connection.unblock(self.node, self._id)
                except (RedisError, OSError):
                    pass  # No permission, or no server: the read ends by itself within seconds.
            await asyncio.wait([reading], timeout=0.05)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


def _parser_options() -> dict[str, Any]:
    """Return the options for a faster parser; none if redis-py no longer has the private classes that it extends."""
    try:
        from fairtrial.mailbox.redis.answers import parser_options
    except ImportError:
        return {}
    return parser_options()


def _check_settings(server: Any) -> None:
    """Refuse a server that is too old or deletes messages, by its answer to INFO."""
    version = str(server.get("redis_version", "7.0"))
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise ConfigurationError(f"the Redis version must be 7.0 or newer (got {version})")
    policy = str(server.get("maxmemory_policy", "noeviction"))
    if int(server.get("maxmemory", 0)) > 0 and policy != "noeviction":
        raise ConfigurationError(
            f"the maxmemory-policy of Redis must be noeviction (got {policy}): other policies delete messages when "
            "memory is short"
        )


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


async def _asked(connection: Any, *command: Any, grant: str) -> Any:
    """Return the answer to a command on a connection that is being opened."""
    await connection.send_command(*command)
    try:
        return await connection.read_response()
    except redis.exceptions.NoPermissionError:
        raise topology.ServerNotDurableError(
            f"durable=yes: this user has no permission for {command[0]}, by which the durability of the Redis server "
            f"is checked; grant +{grant}, or leave out durable"
        ) from None


def _no_retry() -> redis.asyncio.retry.Retry:
    return redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
