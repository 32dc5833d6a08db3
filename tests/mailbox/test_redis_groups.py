"""Redis under Sentinels and as a Cluster: addresses, keys, servers that change, limits and budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
from redis.crc import key_slot

from fairtrial import ConfigurationError, TokenUsage
from fairtrial.errors import MailboxAccessError, MailboxConnectionError, MailboxError
from fairtrial.fleet import FleetLimiter, FleetSpending, RedisBroker, connect_broker
from fairtrial.mailbox import RedisConnection, RedisMailbox
from fairtrial.mailbox.redis.receive import Keys
from fairtrial.mailbox.redis.topology import RedisAddress
from tests.fleet.build import request
from tests.redis_groups import RedisCluster, SentinelGroup, wait_until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    with SentinelGroup(tmp_path_factory.mktemp("sentinels")) as group:
        yield group


class Move:
    """Moves the slot of a key from its node to another one, as `redis-cli --cluster reshard` does."""

    def __init__(self, cluster: RedisCluster, key: str) -> None:
        self._cluster = cluster
        self._slot = cluster.slot_of(key)
        self._source = cluster.primary_of(key)
        self._target = next(server for server in cluster.servers if server is not self._source)

    def _on(self, server: RedisServer, *command: Any) -> Any:
        with server.client() as client:
            return client.execute_command(*command)

    def _id(self, server: RedisServer) -> str:
        return str(self._on(server, "CLUSTER MYID").decode())

    def announce(self) -> None:
        self._on(self._target, "CLUSTER SETSLOT", self._slot, "IMPORTING", self._id(self._source))
        self._on(self._source, "CLUSTER SETSLOT", self._slot, "MIGRATING", self._id(self._target))

    def migrate(self, keys: Keys) -> None:
        names = [getattr(keys, name) for name in keys.__slots__]
        self._on(self._source, "MIGRATE", "127.0.0.1", self._target.port, "", 0, 5000, "KEYS", *names)

    def end(self) -> None:
        for server in (self._target, self._source, *self._cluster.servers):
            self._on(server, "CLUSTER SETSLOT", self._slot, "NODE", self._id(self._target))


class TestAddresses:
    def test_sentinels_their_names_passwords_and_options_are_read(self) -> None:
        address = RedisAddress.parse(
            "rediss+sentinel://me:a%2Fb@one:7000,[::1],three/my%20queue/2"
            "?sentinel_password=s%40p&ssl_ca_certs=/etc/ca.pem"
        )
        assert address.seeds == (("one", 7000), ("::1", 26379), ("three", 26379))
        assert address.service == "my queue"
        assert address.url_of(("::2", 1)) == "rediss://me:a%2Fb@[::2]:1/2?ssl_ca_certs=%2Fetc%2Fca.pem"
        assert address.url_of_seed(("one", 7000)) == "rediss://:s%40p@one:7000?ssl_ca_certs=%2Fetc%2Fca.pem"
        shown = "rediss+sentinel://one:7000,[::1]:26379,three:26379/my%20queue"
        assert str(address) == shown
        assert "a%2Fb" not in repr(address)

    def test_the_nodes_of_a_cluster_are_read(self) -> None:
        address = RedisAddress.parse("redis+cluster://me:pw@one,two:7001")
        assert address.seeds == (("one", 6379), ("two", 7001))
        assert address.url_of(("three", 1)) == "redis://me:pw@three:1/0"
        assert address.url_of_seed(("three", 1)) == "redis://me:pw@three:1"
        assert RedisAddress.parse("redis+cluster://one/0") == RedisAddress.parse("redis+cluster://one")

    @pytest.mark.parametrize(
        "url",
        [
            "redis+sentinel://one:7000",
            "redis+sentinel://one:port/name",
            "redis+sentinel://one,,two/name",
            "redis+sentinel://one/name/second",
            "redis+cluster://",
            "redis+cluster://one:99999",
            "redis+other://one",
            "unix+cluster://one",
        ],
    )
    def test_an_incomplete_address_is_refused_with_the_right_form(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"redis\+sentinel://\[user:password@\]host"):
            connect_broker(url)

    def test_what_the_servers_cannot_do_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"must be 0 \(got 3\)"):
            RedisConnection("redis+cluster://one/3")
        for url in ("redis+cluster://one?durable=yes", "redis+sentinel://one/name?durable=yes"):
            with pytest.raises(ConfigurationError, match="asynchronous"):
                RedisConnection(url)

    def test_a_client_of_sentinels_is_refused_instead_of_connecting_elsewhere(self) -> None:
        master = redis.asyncio.sentinel.Sentinel([("one", 26379)]).master_for("queue")  # type: ignore[no-untyped-call]
        with pytest.raises(ConfigurationError, match=r"redis\+sentinel://"):
            RedisConnection.of(master)


def test_all_keys_of_a_mailbox_are_in_one_slot() -> None:
    keys = Keys.of("support.results.run-1")
    names = [getattr(keys, name) for name in keys.__slots__]
    assert len(names) == 5
    assert len({key_slot(name.encode()) for name in names}) == 1


class TestCluster:
    async def test_mailboxes_of_different_nodes_share_a_connection(self, cluster_url: str) -> None:
        async with RedisConnection(cluster_url) as connection:
            boxes = [RedisMailbox(f"box-{number}", int, connection) for number in range(8)]
            assert len({connection._topology.node_of(box.keys.stream) for box in boxes if await box.send(0)}) == 3
            await asyncio.gather(*(box.send(number) for box in boxes for number in range(1, 6)))
            for box in boxes:
                messages = await box.receive(10, 60, 1)
                assert [message.body for message in messages] == list(range(6))
                receipts: list[Any] = [message.receipt for message in messages]
                assert list(box.renew(receipts, 60)) == [True] * 6
                assert list(await box.acknowledge_all(messages)) == [True] * 6
                await box.close()

    async def test_queues_of_all_nodes_are_found(self, cluster_url: str) -> None:
        broker = RedisBroker(cluster_url)
        suites = [f"suite-{number}" for number in range(8)]
        for suite in suites:
            await (await broker.requests(suite)).send(request(1))
        assert await broker.suites() == suites
        await broker.close()

    async def test_limits_and_budgets_are_shared(self, cluster_url: str) -> None:
        await _use_limits(cluster_url)

    async def test_a_slot_that_moves_is_followed(self, redis_cluster: RedisCluster, cluster_url: str) -> None:
        async with (
            RedisMailbox("moving", int, cluster_url, sweep_seconds=None) as sender,
            RedisMailbox("moving", int, cluster_url) as receiver,
        ):
            await sender.send(1)
            (first,) = await receiver.receive(1, 60, 1)
            reading = asyncio.create_task(receiver.receive(1, 60, 10))  # Blocks on the node that loses the slot.
            await asyncio.sleep(0.2)
            move = Move(redis_cluster, sender.keys.stream)
            await asyncio.to_thread(move.announce)
            await asyncio.to_thread(move.migrate, sender.keys)
            await asyncio.to_thread(move.end)
            assert list(first.receipt.renewer.renew([first.receipt], 60)) == [True]
            await sender.send(2)
            try:
                (second,) = await reading
            except MailboxConnectionError:  # It ended while the slot was on its way: the caller tries again.
                (second,) = await receiver.receive(1, 60, 10)
            assert (first.body, second.body) == (1, 2)
            await first.acknowledge()
            await second.acknowledge()
            assert await sender.approximate_count() == 0

    async def test_a_message_for_a_slot_that_is_being_moved_goes_to_its_new_node(
        self, redis_cluster: RedisCluster, cluster_url: str
    ) -> None:
        async with RedisMailbox("asked", int, cluster_url, sweep_seconds=None) as mailbox:
            await mailbox.connection.command("DEL", mailbox.keys.stream)
            move = Move(redis_cluster, mailbox.keys.stream)
            await asyncio.to_thread(move.announce)  # No key is left here, so the node answers ASK.
            await mailbox.send(7)
            await asyncio.to_thread(move.end)
            (message,) = await mailbox.receive(1, 60, 5)
            assert message.body == 7

    async def test_the_deployed_rights_are_enough_on_a_cluster(
        self, redis_cluster: RedisCluster, cluster_url: str
    ) -> None:
        rights = (Path(__file__).parents[2] / "deploy" / "redis-user.acl").read_text().split()
        for server in redis_cluster.servers:
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">s3cret", *rights)
        url = cluster_url.replace("://", "://worker:s3cret@")
        async with RedisConnection(url) as connection, RedisMailbox("rights", int, connection) as mailbox:
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            assert list(message.receipt.renewer.renew([message.receipt], 60)) == [True]
            move = Move(redis_cluster, Keys.of("rights-asked").stream)
            await asyncio.to_thread(move.announce)
            await RedisMailbox("rights-asked", int, connection).send(2)
            await asyncio.to_thread(move.end)
        wrong = cluster_url.replace("://", "://worker:other@")
        async with RedisConnection(wrong) as connection:
            with pytest.raises(MailboxAccessError):
                await RedisMailbox("rights", int, connection).send(1)

    async def test_a_cluster_that_is_not_there_is_named_without_its_password(self) -> None:
        async with RedisConnection("redis+cluster://me:s3cret@127.0.0.1:1", timeout_seconds=2) as connection:
            with pytest.raises(MailboxConnectionError, match="no node of the Redis Cluster answers") as caught:
                await RedisMailbox("box", int, connection).send(1)
            with pytest.raises(MailboxError):
                await RedisMailbox("box", int, connection).receive(1, 60, 0)
            assert "s3cret" not in f"{caught.value} {connection!r}"


class TestSentinels:
    async def test_mailboxes_limits_and_budgets_are_on_the_master(self, sentinels: SentinelGroup) -> None:
        await _use_limits(sentinels.url)
        async with RedisMailbox("box", int, sentinels.url) as mailbox:
            await mailbox.send(5)
            (message,) = await mailbox.receive(1, 60, 1)
            assert list(message.receipt.renewer.renew([message.receipt], 60)) == [True]
            await message.acknowledge()

    async def test_a_name_that_no_sentinel_knows_is_said(self, sentinels: SentinelGroup) -> None:
        url = sentinels.url.replace("/queue", "/other")
        async with RedisConnection(url) as connection:
            with pytest.raises(MailboxConnectionError, match="no Sentinel knows a master named 'other'"):
                await RedisMailbox("box", int, connection).send(1)

    async def test_one_sentinel_that_answers_is_enough(self, sentinels: SentinelGroup) -> None:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinels.ports[2]}/queue"
        async with RedisMailbox("one", int, url) as mailbox:
            await mailbox.send(1)
            assert (await mailbox.depth()).waiting == 1

    @pytest.mark.long
    async def test_a_demoted_master_is_left_for_the_new_one(self, sentinels: SentinelGroup) -> None:
        """A planned failover: no server goes away, but the old master becomes a replica."""
        async with RedisMailbox("planned", int, sentinels.url) as mailbox:
            await mailbox.send(1)
            before = sentinels.master
            await asyncio.to_thread(_fail_over, sentinels)
            sent = False
            for _ in range(100):  # The connections to the old master are closed, or refuse to write.
                try:
                    await mailbox.send(2)
                    sent = True
                    break
                except MailboxConnectionError:
                    await asyncio.sleep(0.1)
            assert sent
            assert mailbox.connection._topology.node_of(None) == ("127.0.0.1", sentinels.master.port)
            assert sentinels.master is not before
            found = [message.body for message in await mailbox.receive(10, 60, 5)]
            assert found == [1, 2]


def _fail_over(group: SentinelGroup) -> None:
    before = group.master
    with redis.Redis(port=group.ports[0], protocol=2) as sentinel, before.client() as old:
        sentinel.execute_command("SENTINEL", "FAILOVER", group.name)
        # Until then the old master takes messages, which are lost with its demotion.
        wait_until(lambda: group.master is not before and old.info()["role"] == "slave")


async def _use_limits(url: str) -> None:
    async with (
        FleetLimiter(url, "one", requests_per_second=1000) as limiter,
        FleetLimiter(url, "two", requests_per_second=1000) as other,
        FleetSpending(url) as spending,
    ):
        for _ in range(3):
            async with limiter.slot(), other.slot():
                pass
        assert limiter.counters["limiter_admitted"] == 3
        for run in ("first", "second"):
            spending.add(run, TokenUsage(5, 2))
            await spending.refresh(run)
            assert spending.of(run)[0].input_tokens == 5
