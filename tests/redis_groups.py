"""Real groups of Redis servers on the loopback, for tests: a Cluster, and a master with a replica under Sentinels."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis

from tests.redis_server import RedisServer, free_port

_SLOTS = 16384
_AT_ONCE = ("--repl-diskless-sync-delay", "0")


def wait_until(happened: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a state of the servers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if happened():
                return
        except redis.exceptions.RedisError:
            pass
        time.sleep(0.05)
    raise AssertionError("the servers did not get there in time")


class RedisCluster:
    """Three primaries, each with as many replicas as wanted."""

    def __init__(self, folder: Path, *options: str, replicas: int = 0, binary: str = "redis-server") -> None:
        self._stack = ExitStack()
        self.servers: list[RedisServer] = []
        for number in range(3 * (1 + replicas)):
            more = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", str(free_port()))
            self.servers.append(RedisServer(folder / str(number), *more, *_AT_ONCE, *options, binary=binary))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers[:3])

    def __enter__(self) -> Self:
        with self._stack as stack:
            for server in self.servers:
                stack.enter_context(server)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        clients: list[Any] = [server.client() for server in self.servers]
        ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
        for number, client in enumerate(clients[:3]):
            first, last = number * _SLOTS // 3, (number + 1) * _SLOTS // 3 - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            bus = clients[self.servers.index(server)].config_get("cluster-port")["cluster-port"]
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        wait_until(lambda: all(len(client.execute_command("CLUSTER NODES")) == len(clients) for client in clients))
        for number, client in enumerate(clients[3:]):
            client.execute_command("CLUSTER REPLICATE", ids[number % 3])
        for client in clients:
            wait_until(lambda client=client: _is_ready(client))  # type: ignore[misc]
        for client in clients:
            client.close()

    def clear(self) -> None:
        """Delete all keys."""
        for server in self.servers:
            with server.client() as client:
                if client.info()["role"] == "master":
                    client.flushall()

    def slot_of(self, key: str) -> int:
        """The slot of a key."""
        with self.servers[-1].client() as client:
            return int(client.execute_command("CLUSTER KEYSLOT", key))

    def primary_of(self, key: str) -> RedisServer:
        """The server that has a key now."""
        slot = self.slot_of(key)
        with self.servers[-1].client() as client:
            for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(server for server in self.servers if server.port == port)
        raise AssertionError(f"no server has slot {slot}")


class SentinelGroup:
    """A master, one replica, and three Sentinels that know the master as `queue`."""

    name = "queue"

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.servers = [RedisServer(folder / name, *_AT_ONCE, *options) for name in ("first", "second")]
        self.ports = [free_port() for _ in range(3)]

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in self.ports) + f"/{self.name}"

    def __enter__(self) -> Self:
        with self._stack as stack:
            first, second = (stack.enter_context(server) for server in self.servers)
            with second.client() as client:
                client.execute_command("REPLICAOF", "127.0.0.1", first.port)
            for port in self.ports:
                stack.callback(_end, self._sentinel(port, first.port))
            with second.client() as client:
                wait_until(lambda: client.info()["master_link_status"] == "up")
            for port in self.ports:
                with redis.Redis(port=port, protocol=2) as sentinel:
                    wait_until(lambda sentinel=sentinel: self._sees_all(sentinel))  # type: ignore[misc]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _sees_all(self, sentinel: Any) -> bool:
        state = sentinel.sentinel_master(self.name)
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)

    def _sentinel(self, port: int, master: int) -> subprocess.Popen[bytes]:
        folder = self._folder / f"sentinel-{port}"
        folder.mkdir(parents=True)
        (folder / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/log\n"
            f"sentinel monitor {self.name} 127.0.0.1 {master} 2\n"
            f"sentinel down-after-milliseconds {self.name} 1000\nsentinel failover-timeout {self.name} 10000\n"
        )
        return subprocess.Popen(["redis-server", folder / "sentinel.conf", "--sentinel"])

    @property
    def master(self) -> RedisServer:
        """The master that the first Sentinel names."""
        with redis.Redis(port=self.ports[0], protocol=2) as sentinel:
            _, port = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return next(server for server in self.servers if server.port == int(port))


def _is_ready(client: Any) -> bool:
    """Whether a node of a cluster knows all slots and, as a replica, has the data of its primary."""
    info = client.info()
    synced = info["role"] == "master" or info["master_link_status"] == "up"
    return bool(synced and client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:  # In the middle of a failover.
        process.kill()
        process.wait(timeout=20)
