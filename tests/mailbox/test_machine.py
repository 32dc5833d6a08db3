"""Random operations compared with a model: 500 in memory, 200 on Redis and PostgreSQL, 12 on SQS, or
FAIRTRIAL_SCHEDULES of each.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from fairtrial.mailbox import InMemoryMailbox, Mailbox, PostgresConnection, PostgresMailbox, SqsConnection, SqsMailbox
from fairtrial.mailbox.redis import RedisConnection, RedisMailbox
from fairtrial.testing import FakeClock
from fairtrial.testing.mailbox_machine import mailbox_machine
from tests.mailbox.ageing import age, age_rows
from tests.sqs_server import SqsServer

SCHEDULES = int(os.environ.get("FAIRTRIAL_SCHEDULES", "500"))
SERVER_SCHEDULES = int(os.environ.get("FAIRTRIAL_SCHEDULES", "200"))
SQS_SCHEDULES = int(os.environ.get("FAIRTRIAL_SCHEDULES", "12"))
STEPS = 30


class World:
    """Mailboxes that are used by blocking calls."""

    def __init__(self, runner: asyncio.Runner, connection: Any = None) -> None:
        self.runner = runner
        self.connection = connection
        self.clock = FakeClock()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def opened(self, kind: Any, **settings: Any) -> Mailbox[int]:
        mailbox = kind(f"box-{uuid.uuid4().hex}", int, self.connection, **settings)
        self.run(mailbox.open())
        return mailbox  # type: ignore[no-any-return]

    def close(self, mailbox: Mailbox[int]) -> None:
        self.run(mailbox.close())


class InMemoryWorld(World):
    def open(self) -> Mailbox[int]:
        return InMemoryMailbox("box", int, clock=self.clock)

    def pass_time(self, mailbox: Mailbox[int], seconds: float) -> None:
        self.clock.advance(seconds)
        self.run(mailbox.depth())  # Looks for what is due, as a sweeper would.


class RedisWorld(World):
    def open(self) -> Mailbox[int]:
        return self.opened(RedisMailbox, sweep_seconds=None, ttl_seconds=600)

    def pass_time(self, mailbox: Mailbox[int], seconds: float) -> None:
        assert isinstance(mailbox, RedisMailbox)
        self.run(age(mailbox, seconds))
        self.run(mailbox.sweep())


class PostgresWorld(World):
    def open(self) -> Mailbox[int]:
        return self.opened(PostgresMailbox, ttl_seconds=600)

    def pass_time(self, mailbox: Mailbox[int], seconds: float) -> None:
        assert isinstance(mailbox, PostgresMailbox)
        self.run(age_rows(mailbox, seconds))


class SqsWorld(World):
    retention_seconds = 14 * 24 * 3600.0

    def __init__(self, runner: asyncio.Runner, server: SqsServer, connection: SqsConnection, clock: FakeClock) -> None:
        super().__init__(runner, connection)
        self.server = server
        self.clock = clock

    def open(self) -> Mailbox[int]:
        return self.opened(SqsMailbox)

    def pass_time(self, mailbox: Mailbox[int], seconds: float) -> None:
        self.server.pass_time(seconds)
        self.clock.advance(seconds)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def check(world: Callable[[], Any], count: int) -> None:
    """Compare random schedules with the model."""
    checks = list(HealthCheck)
    chosen = settings(
        max_examples=count, stateful_step_count=STEPS, deadline=None, suppress_health_check=checks, database=None
    )
    last = world()
    try:
        run_state_machine_as_test(mailbox_machine(world), settings=chosen)
    finally:
        if last.connection is not None:
            last.run(last.connection.close())


@pytest.mark.proves("R61", "R67", "R68")
@pytest.mark.long
def test_500_random_schedules_in_memory_agree_with_the_model(runner: asyncio.Runner) -> None:
    check(lambda: InMemoryWorld(runner), SCHEDULES)


@pytest.mark.long
@pytest.mark.proves("R61", "R67", "R69")
def test_random_schedules_on_redis_agree_with_the_model(runner: asyncio.Runner, redis_url: str) -> None:
    connection = RedisConnection(redis_url)
    check(lambda: RedisWorld(runner, connection), SERVER_SCHEDULES)


@pytest.mark.long
@pytest.mark.proves("R61", "R67", "R70")
@pytest.mark.parametrize("shards", [1, 3])
def test_random_schedules_on_sqs_agree_with_the_model(runner: asyncio.Runner, sqs_url: str, shards: int) -> None:
    clock = FakeClock()
    with SqsServer() as server:  # A server of its own, because its clock stands still.
        server.freeze()
        connection = SqsConnection(server.url(linger=0, shards=shards), clock=clock)
        check(lambda: SqsWorld(runner, server, connection, clock), SQS_SCHEDULES)


@pytest.mark.long
@pytest.mark.proves("R61", "R67")
def test_random_schedules_on_postgresql_agree_with_the_model(runner: asyncio.Runner, mailbox_database: str) -> None:
    connection = PostgresConnection(mailbox_database)
    check(lambda: PostgresWorld(runner, connection), SERVER_SCHEDULES)
