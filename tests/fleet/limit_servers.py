"""Servers on which limits and budgets are shared, with their state as the tests read and change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import psycopg
import redis
from psycopg.sql import SQL, Identifier

from tests.redis_server import RedisServer, free_port
from tests.servers import PostgresServer

ENGINES = ("redis", "postgresql")

COLUMNS = {
    "requests": "requests_at",
    "tokens": "tokens_at",
    "until": "paused_until",
    "epoch": "epoch",
    "began": "began_at",
    "rate": "rate",
    "ceiling": "ceiling",
    "grown": "grown_at",
}
"""The columns of a limit by the names that Redis has for them."""


class SharedServer(Protocol):
    """A server with the state of limits."""

    title: str
    url: str

    def state(self, name: str) -> dict[str, float]:
        """What is stored for a limit."""

    def change(self, name: str, **fields: float) -> None:
        """Store something else."""

    def begin(self, name: str, now: float, state: Mapping[str, float]) -> None:
        """Store this state and nothing else, last used at this time."""

    def clear(self) -> None:
        """Forget all limits and budgets."""


@dataclass
class RedisState:
    url: str
    title: str = "Redis"

    @cached_property
    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2)

    def state(self, name: str) -> dict[str, float]:
        found: Any = self._client.hgetall(_key(name))
        return {field.decode(): float(value) for field, value in found.items()}

    def change(self, name: str, **fields: float) -> None:
        self._client.hset(_key(name), mapping=dict[Any, Any](fields))

    def begin(self, name: str, now: float, state: Mapping[str, float]) -> None:
        self._client.delete(_key(name))
        self.change(name, **state)

    def clear(self) -> None:
        self._client.flushall()
        self._client.close()


def _key(name: str) -> str:
    return f"{{fairtrial:limits:{name}}}:state"


@dataclass
class PostgresState:
    url: str
    title: str = "PostgreSQL"

    @cached_property
    def _client(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True)

    def state(self, name: str) -> dict[str, float]:
        statement = SQL("SELECT {} FROM fleet_limits WHERE name = %s").format(
            SQL(", ").join(map(Identifier, COLUMNS.values()))
        )
        row = self._client.execute(statement, (name,)).fetchone() or ()
        # Redis has no field for what was never set.
        return {field: float(value) for field, value in zip(COLUMNS, row, strict=False) if value}

    def change(self, name: str, **fields: float) -> None:
        for field, value in fields.items():
            statement = SQL("UPDATE fleet_limits SET {} = %s WHERE name = %s").format(Identifier(COLUMNS[field]))
            assert self._client.execute(statement, (value, name)).rowcount == 1

    def begin(self, name: str, now: float, state: Mapping[str, float]) -> None:
        self._client.execute("DELETE FROM fleet_limits WHERE name = %s", (name,))
        insert = "INSERT INTO fleet_limits (name, used_at) VALUES (%s, to_timestamp(%s))"
        self._client.execute(insert, (name, now))
        self.change(name, **state)

    def clear(self) -> None:
        for table in ("fleet_limits", "fleet_spending"):
            if self._client.execute("SELECT to_regclass(%s)", (table,)).fetchone() != (None,):
                self._client.execute(SQL("DELETE FROM {}").format(Identifier(table)))
        self._client.close()


class OwnServer(Protocol):
    """A server that a test may stop and start."""

    def start(self) -> Any: ...

    def stop(self) -> None: ...


@contextmanager
def own_server(engine: str, folder: Path) -> Iterator[tuple[OwnServer, str]]:
    """A server of its own, and its address."""
    if engine == "redis":
        with RedisServer(folder / "redis") as server:
            yield server, server.url
    else:
        with PostgresServer() as database:
            yield database, database.new_database()


def nobodys_url(engine: str) -> str:
    """An address at which no server answers."""
    return f"{engine}://127.0.0.1:{free_port()}"
