from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fairtrial.fleet.client import dispatch
from fairtrial.fleet.client.dispatch import DispatchConfig
from fairtrial.fleet.queues import MemoryBroker, PostgresBroker
from tests.fleet.limit_servers import ENGINES, PostgresState, RedisState, SharedServer
from tests.redis_server import RedisServer


@pytest.fixture
def anyio_backend() -> str:
    """The fleet is asyncio's."""
    return "asyncio"


@dataclass(frozen=True)
class Place:
    """Where a fleet has its queue and its store, and so how results reach the store."""

    broker: Any
    store: str

    async def count_requests(self) -> int:
        return int(await (await self.broker.requests("numbers")).approximate_count())


@pytest.fixture(params=["replies", "postgresql"], ids=["replies", "one-transaction-postgresql"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A fleet whose client stores the results that workers send it, and one whose workers store them themselves."""
    if request.param == "replies":
        yield Place(MemoryBroker(), f"{tmp_path}/runs.db")
        return
    url = str(request.getfixturevalue("pg_url"))
    broker = PostgresBroker(url)
    yield Place(broker, url)
    await broker.close()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and short waits, so that much happens in little time."""

    def made(**changes: Any) -> DispatchConfig:
        base = {"batch": 16, "floor": 20, "poll_seconds": 0.01, "recovery_seconds": 0.1, "hint_seconds": 0.1}
        return DispatchConfig(**{**base, **changes})

    monkeypatch.setattr(dispatch, "DispatchConfig", made)


@pytest.fixture(params=ENGINES)
def limits(request: pytest.FixtureRequest) -> Iterator[SharedServer]:
    """A server for limits and budgets, with none on it."""
    server: SharedServer
    if request.param == "redis":
        server = RedisState(request.getfixturevalue("redis_url"))
    else:
        server = PostgresState(request.getfixturevalue("mailbox_database"))
    yield server
    server.clear()


@pytest.fixture(params=ENGINES)
def refusing_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a server, with a password that it does not accept."""
    if request.param == "redis":
        with RedisServer(tmp_path / "locked", "--requirepass", "sesame-open") as server:
            yield f"redis://:wrong-password@127.0.0.1:{server.port}"
    else:
        port = request.getfixturevalue("pg_server").port
        yield f"postgresql://tester:wrong-password@127.0.0.1:{port}/postgres"
