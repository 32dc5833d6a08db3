"""Where a Redis is: addresses, Sentinel, Cluster; its errors; connections for threads."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode

import redis
import redis.backoff
import redis.exceptions as theirs
import redis.retry
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from fairtrial.errors import (
    ConfigurationError,
    MailboxAccessError,
    MailboxClosedError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    MailboxNotDurableError,
)
from fairtrial.mailbox.redis.scripts import Call

_PASSING = (
    "LOADING",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY ",
    "UNBLOCKED",
    "MISCONF",
    "NOREPLICAS",
)
_MOVING = (theirs.ClusterError, theirs.AskError, theirs.TryAgainError)
_REFUSED = ("NOAUTH", "NOPERM", "WRONGPASS", "NOPROTO")


@contextmanager
def lost_connections() -> Iterator[None]:
    """Raise redis-py's ConnectionError where it raises something else for a connection that was reset.

    Depending on the timing, redis-py raises an AttributeError, a TypeError or a RuntimeError (its issue 4287), because
    its reader or writer is None.
    """
    try:
        yield
    except (AttributeError, TypeError, RuntimeError) as error:
        raise theirs.ConnectionError(f"the connection was lost ({error!r})") from error


class ServerNotDurableError(theirs.RedisError):
    """The server may lose confirmed messages. A RedisError, so that redis-py closes the connection."""


def translated(error: BaseException, doing: str) -> MailboxError:
    """Return the error as a `MailboxError`, with the text of the server, which contains no URL and no password."""
    if isinstance(error, MailboxError):
        return error
    if isinstance(error, ServerNotDurableError):
        return MailboxNotDurableError(str(error))
    text = f"{doing}: {error}"
    if isinstance(error, theirs.AuthenticationError | theirs.NoPermissionError | theirs.AuthorizationError):
        return MailboxAccessError(text)
    if isinstance(error, theirs.ConnectionError | theirs.TimeoutError | theirs.ReadOnlyError | OSError):
        return MailboxConnectionError(f"{doing}: {_plainly(str(error))}")
    message = str(error)
    if isinstance(error, _MOVING):  # redis-py has cut off the word by which they could be known.
        return MailboxConnectionError(f"{doing}: the Redis Cluster is changing ({type(error).__name__}: {message})")
    if message.startswith(_REFUSED):
        return MailboxAccessError(text)
    if isinstance(error, theirs.OutOfMemoryError) or message.startswith("OOM"):
        return MailboxFullError(text)
    if message.startswith(_PASSING):
        return MailboxConnectionError(text)
    return MailboxError(text)


def is_gone(error: BaseException) -> bool:
    """Return whether the error means that the mailbox or its consumer group does not exist."""
    message = str(error)
    return message.startswith(("NOGROUP", "UNBLOCKED")) or "no such key" in message.lower()


def _plainly(message: str) -> str:
    """Simplify redis-py's message about an unreachable server."""
    found = re.match(r"Error (\d+) connecting to (\S+)\.(?: |$)(.*)", message, re.DOTALL)
    if found is None:
        return message
    secured = re.search(r"\[SSL[^]]*\] (.*?)(?: \(_ssl\.c|$)", found[3])  # Its number means something else there.
    return f"cannot connect to {found[2]}: {secured[1] if secured else os.strerror(int(found[1]))}"


type Node = tuple[str, int] | None
"""Host and port of a server; None is the one server of a plain URL."""

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_PORTS = {"sentinel": 26379, "cluster": 6379}
_FORMS = (
    "invalid Redis URL: write redis://[user:password@]host[:port][/db], rediss://... for TLS, unix://path, "
    "redis+sentinel://[user:password@]host[:port],host[:port]/name[/db] or "
    "redis+cluster://[user:password@]host[:port],host[:port], with / ? # @ : % in a password percent-encoded"
)


def invalid_address() -> ConfigurationError:
    """Return the error of an address that cannot be read. It quotes nothing, because a part may be a password."""
    return ConfigurationError(_FORMS)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed address.

    Attributes:
        mode: What the address leads to.
        url: The address of one server as redis-py reads it; empty in the other modes.
        seeds: The Sentinels, or the nodes of a Cluster that are asked for the others.
        service: The name by which the Sentinels know the master.
    """

    mode: Literal["server", "sentinel", "cluster"]
    url: str = field(default="", repr=False)
    seeds: tuple[tuple[str, int], ...] = ()
    service: str = ""
    tls: bool = False
    credentials: str = field(default="", repr=False)
    database: int = 0
    query: str = field(default="", repr=False)
    sentinel_credentials: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Read an address.

        Raises:
            ConfigurationError: it is not an address of Redis.
        """
        scheme, separator, rest = url.partition("://")
        plain, _, mode = scheme.partition("+")
        if not separator or scheme not in SCHEMES:
            raise invalid_address()
        if not mode:
            return cls("server", url)
        location, _, query = rest.partition("?")
        authority, _, path = location.partition("/")
        credentials, at, hosts = authority.rpartition("@")
        seeds = tuple(_host_and_port(host, _PORTS[mode]) for host in hosts.split(","))
        options = dict(parse_qsl(query, keep_blank_values=True))
        own = [options.pop(name, "") for name in ("sentinel_username", "sentinel_password")]
        service, _, database = path.partition("/") if mode == "sentinel" else ("", "", path)
        database = database or "0"
        if not database.isdecimal() or (mode == "sentinel" and not service):
            raise invalid_address()
        if mode == "cluster" and database != "0":
            raise ConfigurationError(f"the database of a Redis Cluster must be 0 (got {database})")
        return cls(
            "sentinel" if mode == "sentinel" else "cluster",
            seeds=seeds,
            service=unquote(service),
            tls=plain == "rediss",
            credentials=credentials + at,
            database=int(database),
            query=urlencode(options),
            sentinel_credentials=f"{quote(own[0], safe='')}:{quote(own[1], safe='')}@" if any(own) else "",
        )

    def url_of(self, node: Node) -> str:
        """Return the address of one server with messages."""
        return self.url if node is None else self._url(node, self.credentials, f"/{self.database}")

    def url_of_seed(self, seed: tuple[str, int]) -> str:
        """Return the address of a server that knows where the messages are."""
        return self._url(seed, self.sentinel_credentials if self.mode == "sentinel" else self.credentials, "")

    def _url(self, node: tuple[str, int], credentials: str, path: str) -> str:
        url = f"{'rediss' if self.tls else 'redis'}://{credentials}{_shown(node)}{path}"
        return f"{url}?{self.query}" if self.query else url

    def __str__(self) -> str:
        """Return the address without credentials and options."""
        if self.mode == "server":
            scheme, _, rest = self.url.partition("://")
            authority = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
            host, port = ("", 6379) if scheme == "unix" or not authority else _host_and_port(authority, 6379)
            return f"{scheme}://{host}:{port}"
        name = f"/{quote(self.service)}" if self.service else ""
        return f"{'rediss' if self.tls else 'redis'}+{self.mode}://{','.join(map(_shown, self.seeds))}{name}"


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    """Split `host`, `host:port` or `[IPv6]:port`."""
    host, separator, port = text.rpartition(":")
    if not separator or port.endswith("]"):
        host, port = text, str(default)
    host = unquote(host.removeprefix("[").removesuffix("]"))
    if not host or not port.isdecimal() or int(port) > 65535:
        raise invalid_address()
    return host, int(port)


def _shown(node: tuple[str, int]) -> str:
    host, port = node
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


SLOTS: Final = 16384
MAX_REDIRECTS: Final = 3
"""How often a command that a node refused with MOVED or ASK follows to another one."""
DISCOVERY_SECONDS: Final = 2.0
_FAILED = (ConnectionError, TimeoutError, OSError, ReadOnlyError, ClusterDownError, MasterDownError)
_NOT_PERMITTED = (AuthenticationError, NoPermissionError)


class Topology:
    """What is known about the servers behind an address. It is shared with the thread that renews leases.

    Attributes:
        stale: The servers must be asked for again before the next command.
    """

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self.stale = address.mode != "server"
        self._seeds = list(address.seeds)
        self._master: Node = None
        self._slots: list[Node] = []

    def node_of(self, key: str | None) -> Node:
        """Return the server with a key; without a key, any server.

        Raises:
            ConnectionError: no server has it at present.
        """
        if self.address.mode != "cluster":
            return self._master
        node = self._slots[0 if key is None else key_slot(key.encode())] if self._slots else None
        if node is None:
            self.stale = True
            raise ConnectionError("no node of the Redis Cluster serves this queue at present")
        return node

    def nodes(self) -> list[Node]:
        """Return all servers with keys."""
        return list(dict.fromkeys(self._slots)) if self.address.mode == "cluster" else [self._master]

    def seeds(self) -> list[tuple[str, int]]:
        """Return the servers to ask, most recently responsive first."""
        known = [node for node in dict.fromkeys(self._slots) if node is not None and node not in self._seeds]
        return [*self._seeds, *known]

    def question(self) -> tuple[str, ...]:
        """Return the command that asks for the servers."""
        if self.address.mode == "sentinel":
            return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.address.service)
        return ("CLUSTER", "SLOTS")

    def learn(self, seed: tuple[str, int], answer: Any) -> bool:
        """Read an answer; returns whether it names servers."""
        if not answer:
            return False
        if self.address.mode == "sentinel":
            self._master = _node(answer[0], answer[1], seed)
        else:
            slots: list[Node] = [None] * SLOTS
            for first, last, primary, *_ in answer:
                slots[first : last + 1] = [_node(primary[0], primary[1], seed)] * (last - first + 1)
            self._slots = slots
        if seed in self._seeds:
            self._seeds.sort(key=lambda other: other != seed)
        self.stale = False
        return True

    def note(self, error: BaseException, node: Node) -> None:
        """Take note of what an error says about the servers."""
        if self.address.mode == "server":
            return
        if isinstance(error, MovedError) and self._slots and node is not None:
            self._slots[error.slot_id] = (error.host or node[0], error.port)
        elif isinstance(error, _FAILED):
            self.stale = True

    def unknown(self, errors: Sequence[BaseException]) -> BaseException:
        """Return the error for seeds of which none named a server."""
        for error in errors:
            if isinstance(error, _NOT_PERMITTED):
                return error
        who = "Sentinel" if self.address.mode == "sentinel" else "node of the Redis Cluster"
        of = f" knows a master named {self.address.service!r}" if self.address.mode == "sentinel" else " answers"
        return ConnectionError(f"no {who}{of}" + (f": {errors[-1]}" if errors else ""))


def _node(host: Any, port: Any, asked: tuple[str, int]) -> tuple[str, int]:
    """Return a server from an answer. A node that does not know its host says nothing, or a question mark."""
    name = host.decode() if isinstance(host, bytes) else str(host or "")
    return (asked[0] if name in ("", "?") else name), int(port)


class AsyncNodes:
    """The clients of one event loop, one for each server.

    Args:
        topology: What is known about the servers.
        connect: Creates a client for a URL.
        ask: Creates a client for a URL that is used for one question.
    """

    def __init__(self, topology: Topology, connect: Callable[[str], Any], ask: Callable[[str], Any]) -> None:
        self._topology = topology
        self._connect = connect
        self._ask = ask
        self._clients: dict[Node, Any] = {}
        self._discovering = asyncio.Lock()

    async def node_of(self, key: str | None) -> Node:
        """Return the server with a key, after asking for the servers if necessary."""
        if self._topology.stale:
            await self._discover()
        return self._topology.node_of(key)

    async def nodes(self) -> list[Node]:
        """Return all servers with keys."""
        await self.node_of(None)
        return self._topology.nodes()

    def client(self, node: Node) -> Any:
        """Return the client of a server."""
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = self._connect(self._topology.address.url_of(node))
        return client

    async def close(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def _discover(self) -> None:
        async with self._discovering:
            topology, errors = self._topology, []
            for seed in topology.seeds() if topology.stale else ():
                client = self._ask(topology.address.url_of_seed(seed))
                try:
                    with lost_connections():
                        if topology.learn(seed, await client.execute_command(*topology.question())):
                            return
                except (RedisError, OSError) as error:
                    errors.append(error)
                finally:
                    await client.aclose()
            if topology.stale:
                raise topology.unknown(errors)


class ThreadConnection:
    """Connections for threads, opened on first use."""

    def __init__(self, topology: Topology, options: dict[str, Any]) -> None:
        self._topology = topology
        self._options = options
        self._lock = threading.Lock()
        self._closed = False
        self._clients: dict[Node, Any] = {}

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip to each server.

        Raises:
            MailboxError: they could not be run.
        """
        with self._lock:
            if self._closed:
                raise MailboxClosedError("the connection to Redis is closed")
            answers: list[Any] = [None] * len(calls)
            left: Sequence[int] = range(len(calls))
            try:
                for _ in range(1 + MAX_REDIRECTS):
                    self._run_on_each(calls, left, answers)
                    left = [at for at in left if isinstance(answers[at], MovedError)]  # They had no effect.
                    if not left:
                        break
            except (RedisError, OSError) as error:
                raise translated(error, "renewing leases") from None
        return answers

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._closed = True
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _run_on_each(self, calls: Sequence[Call], wanted: Sequence[int], answers: list[Any]) -> None:
        groups: dict[Node, list[int]] = {}
        for at in wanted:
            if self._topology.stale:
                self._discover()
            groups.setdefault(self._topology.node_of(calls[at].keys[0]), []).append(at)
        for node, group in groups.items():
            try:
                found = self._run_at(node, [calls[at] for at in group])
            except (RedisError, OSError) as error:
                self._topology.note(error, node)
                raise
            for at, answer in zip(group, found, strict=True):
                answers[at] = answer
                if isinstance(answer, BaseException):
                    self._topology.note(answer, node)

    def _run_at(self, node: Node, calls: Sequence[Call]) -> list[Any]:
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = self._connect(self._topology.address.url_of(node))
        answers = _pipelined(client, calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            for script in {call.script for call in calls}:
                with lost_connections():
                    client.script_load(script.text)
            answers = _pipelined(client, calls)
        return answers

    def _discover(self) -> None:
        topology, errors = self._topology, []
        for seed in topology.seeds():
            seconds = min(self._options["socket_timeout"], DISCOVERY_SECONDS)
            client = self._connect(
                topology.address.url_of_seed(seed), socket_connect_timeout=seconds, socket_timeout=seconds
            )
            try:
                with lost_connections():
                    if topology.learn(seed, client.execute_command(*topology.question())):
                        return
            except (RedisError, OSError) as error:
                errors.append(error)
            finally:
                client.close()
        raise topology.unknown(errors)

    def _connect(self, url: str, **options: Any) -> Any:
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        return redis.Redis.from_url(url, **{**self._options, **options}, retry=retry)


def _pipelined(client: Any, calls: Sequence[Call]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.command())
    with lost_connections():
        return list(pipeline.execute(raise_on_error=False))
