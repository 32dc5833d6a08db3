"""Servers on which limits and budgets are shared, with their state as the tests read and change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
import redis
from psycopg.rows import dict_row
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


@dataclass
class RedisState:
    url: str
    title: str = "Redis"

    def state(self, name: str) -> dict[str, float]:
        with redis.Redis.from_url(self.url, protocol=2) as client:
            found: Any = client.hgetall(f"{{fairtrial:limits:{name}}}:state")
        return {field.decode(): float(value) for field, value in found.items()}

    def change(self, name: str, **fields: float) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.hset(f"{{fairtrial:limits:{name}}}:state", mapping=fields)


@dataclass
class PostgresState:
    url: str
    title: str = "PostgreSQL"

    def state(self, name: str) -> dict[str, float]:
        with psycopg.connect(self.url, row_factory=dict_row) as client:
            row = client.execute("SELECT * FROM fleet_limits WHERE name = %s", (name,)).fetchone() or {}
        # Redis has no field for what was never set.
        return {field: float(row[column]) for field, column in COLUMNS.items() if row.get(column)}

    def change(self, name: str, **fields: float) -> None:
        with psycopg.connect(self.url) as client:
            for field, value in fields.items():
                statement = SQL("UPDATE fleet_limits SET {} = %s WHERE name = %s").format(Identifier(COLUMNS[field]))
                assert client.execute(statement, (value, name)).rowcount == 1

    def clear(self) -> None:
        """Forget all limits and budgets."""
        with psycopg.connect(self.url) as client:
            for table in ("fleet_limits", "fleet_spending"):
                if client.execute("SELECT to_regclass(%s)", (table,)).fetchone() != (None,):
                    client.execute(SQL("DELETE FROM {}").format(Identifier(table)))


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
