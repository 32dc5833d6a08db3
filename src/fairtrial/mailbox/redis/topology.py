"""Which server has the keys of a mailbox, and the clients of these servers.

A mailbox lives on one server at a time: all its keys share a hash tag. Its server is the one of the URL, the master
that Sentinels name, or the node of a Cluster that serves the slot. What was learned is used until a server fails, is no
master any more, or says that a slot has moved. redis-py's own clients for Sentinel and Cluster are not used: they
repeat commands after a lost connection, and a message must not be sent twice without its sender's knowledge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from fairtrial.mailbox.redis.address import Node, RedisAddress
from fairtrial.mailbox.redis.errors import lost_connections

SLOTS: Final = 16384
MAX_REDIRECTS: Final = 3
"""How often a command that a node refused with MOVED or ASK follows to another one."""
DISCOVERY_SECONDS: Final = 2.0
_FAILED = (ConnectionError, TimeoutError, OSError, ReadOnlyError, ClusterDownError, MasterDownError)
_REFUSED = (AuthenticationError, NoPermissionError)


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
        """Return whom to ask, those that answered last first."""
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
            if isinstance(error, _REFUSED):
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


class ThreadNodes:
    """The same for a thread, with blocking clients."""

    def __init__(self, topology: Topology, connect: Callable[[str], Any], ask: Callable[[str], Any]) -> None:
        self._topology = topology
        self._connect = connect
        self._ask = ask
        self._clients: dict[Node, Any] = {}

    def node_of(self, key: str) -> Node:
        """Return the server with a key, after asking for the servers if necessary."""
        if self._topology.stale:
            self._discover()
        return self._topology.node_of(key)

    def client(self, node: Node) -> Any:
        """Return the client of a server."""
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = self._connect(self._topology.address.url_of(node))
        return client

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _discover(self) -> None:
        topology, errors = self._topology, []
        for seed in topology.seeds():
            client = self._ask(topology.address.url_of_seed(seed))
            try:
                with lost_connections():
                    if topology.learn(seed, client.execute_command(*topology.question())):
                        return
            except (RedisError, OSError) as error:
                errors.append(error)
            finally:
                client.close()
        raise topology.unknown(errors)
