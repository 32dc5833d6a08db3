"""The public conformance tests, run on all mailboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fairtrial.mailbox import InMemoryMailbox, Mailbox, MailboxResolver, RedisMailbox, SqsConnection, SqsMailbox
from fairtrial.mailbox.postgres import PostgresMailbox
from fairtrial.testing import FakeClock
from fairtrial.testing.mailbox_suite import MailboxConformance
from tests.mailbox.ageing import ShiftedClock, age, age_rows
from tests.sqs_server import SqsServer


@pytest.mark.proves("R67", "R68", "R72", "R81", "R82")
class TestInMemoryMailbox(MailboxConformance):
    @pytest.fixture(autouse=True)
    def world(self) -> None:
        self.clock = FakeClock()
        self.rooms: dict[str, InMemoryMailbox[Any]] = {}

    @asynccontextmanager
    async def make_mailbox(
        self, name: str, body_type: type[Any], *, resolver: MailboxResolver | None = None
    ) -> AsyncIterator[Mailbox[Any]]:
        # Another process is another object where mailboxes are real; in memory it is the same one.
        mailbox = self.rooms.get(name)
        if mailbox is None:
            mailbox = self.rooms[name] = InMemoryMailbox(name, body_type, reply_resolver=resolver, clock=self.clock)
        yield mailbox

    async def pass_time(self, mailbox: Mailbox[Any], seconds: float) -> None:
        self.clock.advance(seconds)


class OnServer(MailboxConformance):
    """Mailboxes of one kind on the server at `url`."""

    url: str
    kind: Any
    settings: dict[str, Any] = {}

    @asynccontextmanager
    async def make_mailbox(
        self, name: str, body_type: type[Any], *, resolver: MailboxResolver | None = None
    ) -> AsyncIterator[Mailbox[Any]]:
        async with self.kind(name, body_type, self.url, reply_resolver=resolver, **self.settings) as mailbox:
            yield mailbox


@pytest.mark.proves("R67", "R69", "R72", "R81", "R82")
class TestRedisMailbox(OnServer):
    kind = RedisMailbox
    settings = {"sweep_seconds": 0.02}

    @pytest.fixture(autouse=True)
    def world(self, redis_url: str) -> None:
        self.url = redis_url

    async def pass_time(self, mailbox: Mailbox[Any], seconds: float) -> None:
        assert isinstance(mailbox, RedisMailbox)
        await age(mailbox, seconds)


@pytest.mark.proves("R67", "R72", "R81", "R82")
class TestPostgresMailbox(OnServer):
    kind = PostgresMailbox

    @pytest.fixture(autouse=True)
    def world(self, mailbox_database: str) -> None:
        self.url = mailbox_database

    async def pass_time(self, mailbox: Mailbox[Any], seconds: float) -> None:
        assert isinstance(mailbox, PostgresMailbox)
        await age_rows(mailbox, seconds)


@pytest.mark.proves("R67", "R70", "R72", "R81", "R82")
class TestSqsMailbox(MailboxConformance):
    can_tell_lost_after_purge = False

    @pytest.fixture(autouse=True)
    def world(self, sqs_server: SqsServer, sqs_url: str) -> None:
        self.server = sqs_server
        self.url = sqs_url
        self.clock = ShiftedClock()

    @asynccontextmanager
    async def make_mailbox(
        self, name: str, body_type: type[Any], *, resolver: MailboxResolver | None = None
    ) -> AsyncIterator[Mailbox[Any]]:
        async with (
            SqsConnection(self.url, clock=self.clock) as connection,
            SqsMailbox(name, body_type, connection, reply_resolver=resolver) as mailbox,
        ):
            yield mailbox

    async def pass_time(self, mailbox: Mailbox[Any], seconds: float) -> None:
        self.server.pass_time(seconds)
        self.clock.ahead += seconds


@pytest.mark.long
class TestSqsMailboxWithShards(TestSqsMailbox):
    """The same on three queues instead of one."""

    @pytest.fixture(autouse=True)
    def world(self, sqs_server: SqsServer, sqs_url: str) -> None:
        self.server = sqs_server
        self.url = f"{sqs_url}&shards=3"
        self.clock = ShiftedClock()


REAL_TIME = {
    "test_a_lease_that_runs_out_brings_the_message_back_once",
    "test_a_late_acknowledgement_never_ends_someone_elses_delivery",
    "test_counts_grow_with_every_delivery",
    "test_nack_with_delay_hides_the_message_until_then",
}


class InRealTime(MailboxConformance):
    """What depends on time, on leases that really run out."""

    lease = 1.0
    margin = 0.3

    for _name in dir(MailboxConformance):
        if _name.startswith("test_") and _name not in REAL_TIME:
            locals()[_name] = None

    async def pass_time(self, mailbox: Mailbox[Any], seconds: float) -> None:
        await MailboxConformance.pass_time(self, mailbox, seconds)


class TestRedisMailboxInRealTime(InRealTime, TestRedisMailbox):
    pass


class TestPostgresMailboxInRealTime(InRealTime, TestPostgresMailbox):
    pass


@pytest.mark.proves("R69")
class TestRedisClusterMailbox(TestRedisMailbox):
    """Every script on a Cluster of three nodes, which refuses keys of different slots."""

    @pytest.fixture(autouse=True)
    def world(self, cluster_url: str) -> None:
        self.url = cluster_url


@pytest.mark.proves("R69")
class TestValkeyMailbox(TestRedisMailbox):
    @pytest.fixture(autouse=True)
    def world(self, valkey_url: str) -> None:
        self.url = valkey_url
