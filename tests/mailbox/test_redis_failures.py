"""Servers and workers that crash, restart, lose data or refuse commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial.errors import (
    ConfigurationError,
    LeaseLostError,
    MailboxAccessError,
    MailboxConnectionError,
    MailboxError,
    MailboxNotDurableError,
)
from fairtrial.mailbox import RedisConnection, RedisMailbox
from fairtrial.mailbox.batcher import Batcher
from tests.mailbox.ageing import age
from tests.mailbox.conftest import valkey_binary
from tests.mailbox.kill_under_load import busy_disk, kill_under_load
from tests.redis_server import RedisServer


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.mark.proves("R61", "R79")
async def test_a_server_killed_under_load_loses_no_acknowledged_send_and_the_mailbox_recovers(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--appendfsync", "always") as server:
        outcome = await kill_under_load(server, f"{server.url}?durable=yes")
    assert outcome.refused > 0
    assert len(outcome.confirmed) > 4000
    assert outcome.lost == 0


@pytest.mark.long
def test_a_durable_server_killed_while_the_disk_is_busy_loses_no_acknowledged_send(tmp_path: Path) -> None:
    with busy_disk(tmp_path):
        for number in range(3):
            with RedisServer(tmp_path / f"redis{number}", "--appendfsync", "always") as server:
                assert asyncio.run(kill_under_load(server, f"{server.url}?durable=yes", sends=800)).lost == 0


class TestDurable:
    """A sender that asks for durability is never confirmed by a server that does not give it."""

    async def test_a_server_that_flushes_when_it_likes_is_refused(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path / "redis", "--appendfsync", "no") as server:
            await self._is_refused(server, "no")

    async def test_a_server_that_flushes_every_second_is_refused_unless_sends_can_wait_for_that(
        self, own_server: RedisServer, valkey_server: RedisServer
    ) -> None:
        for server in (own_server, valkey_server):
            with server.client() as client:
                version = tuple(map(int, client.info()["redis_version"].split(".")[:2]))
            if version < (7, 2):
                await self._is_refused(server, "everysec")
            else:
                async with RedisMailbox("m", int, f"{server.url}?durable=yes") as mailbox:
                    await mailbox.send(1)
                    (message,) = await mailbox.receive(1, 60, 1)
                    await message.acknowledge()

    async def _is_refused(self, own_server: RedisServer, policy: str) -> None:
        mailbox = RedisMailbox("m", int, RedisConnection(own_server.url, durable=True))
        for use in (mailbox.open, lambda: mailbox.send(1), lambda: mailbox.send_all([1])):
            with pytest.raises(
                ConfigurationError, match=rf"appendfsync always \(got appendonly yes, appendfsync {policy}"
            ):
                await use()
        with own_server.client() as client:
            assert not client.exists(mailbox.keys.stream)
        await mailbox.connection.close()

    async def test_a_server_that_changed_its_settings_is_refused_after_a_reconnection(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path / "redis", "--appendfsync", "no") as server, server.client() as client:
            client.config_set("appendfsync", "always")
            async with RedisMailbox("m", int, f"{server.url}?durable=yes") as mailbox:
                await mailbox.send(1)
                await anyio.to_thread.run_sync(server.restart)
                with pytest.raises(MailboxNotDurableError, match="appendfsync no"):
                    await mailbox.send(2)
                with server.client() as again:
                    assert again.xlen(mailbox.keys.stream) == 1

    async def test_a_send_is_not_confirmed_before_the_server_has_flushed_it(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path / "valkey", binary=valkey_binary()) as server, server.client() as client:
            async with RedisConnection(server.url, timeout_seconds=2.0, durable=True) as connection:
                mailbox = RedisMailbox("m", int, connection)
                await mailbox.send(1)
                await mailbox.send_all([2, 3])
                client.config_set("appendfsync", "no")
                for send in (mailbox.send(4), mailbox.send_all([5, 6])):
                    with pytest.raises(MailboxConnectionError, match="did not flush"):
                        await send
                assert await mailbox.approximate_count() == 6  # They may have arrived; nothing else waits.
                await mailbox.close()

    async def test_a_user_who_may_not_wait_is_told_what_to_grant(self, valkey_server: RedisServer) -> None:
        with valkey_server.client() as client:
            client.acl_setuser("guest", enabled=True, passwords=["+word"], keys=["*"], categories=["+@all"])
            client.execute_command("ACL", "SETUSER", "guest", "-waitaof")
        async with RedisConnection(valkey_server.url.replace("//", "//guest:word@"), durable=True) as connection:
            with pytest.raises(ConfigurationError, match=r"grant \+waitaof"):
                await RedisMailbox("m", int, connection).send(1)

    async def test_a_user_who_may_not_read_the_settings_is_told_what_to_grant(self, own_server: RedisServer) -> None:
        with own_server.client() as client:
            client.acl_setuser("guest", enabled=True, passwords=["+word"], keys=["*"], categories=["+@all"])
            client.execute_command("ACL", "SETUSER", "guest", "-config|get")
        url = own_server.url.replace("//", "//guest:word@")
        async with RedisConnection(url, durable=True) as connection:
            with pytest.raises(ConfigurationError, match=r"grant \+config\|get"):
                await RedisMailbox("m", int, connection).send(1)

    async def test_other_words_than_yes_and_no_are_refused_and_other_options_are_kept(
        self, own_server: RedisServer
    ) -> None:
        with pytest.raises(ConfigurationError, match="durable in a Redis URL must be yes or no"):
            RedisConnection(f"{own_server.url}?durable=1")
        connection = RedisConnection(f"{own_server.url}?durable=no&client_name=me")
        assert not connection.durable
        try:
            assert await connection.command("CLIENT GETNAME") == "me"
        finally:
            await connection.close()


@pytest.mark.proves("R79")
async def test_a_restart_ends_waits_with_an_error_and_keeps_leases(own_server: RedisServer) -> None:
    async with RedisMailbox("restart", int, own_server.url, sweep_seconds=0.05) as mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 60, 1)
        waiting = asyncio.create_task(mailbox.receive(1, 60, 20))
        await asyncio.sleep(0.1)
        await anyio.to_thread.run_sync(own_server.stop)
        with pytest.raises(MailboxConnectionError):
            await waiting
        for ask in (mailbox.approximate_count, mailbox.depth, mailbox.purge, mailbox.sweep, mailbox.dead_letters.count):
            with pytest.raises(MailboxConnectionError):
                await ask()
        with pytest.raises(MailboxConnectionError):
            await message.acknowledge()
        assert not message.settled
        with pytest.raises(MailboxConnectionError):
            message.receipt.renewer.renew([message.receipt], 60)
        await anyio.to_thread.run_sync(own_server.start)
        # The server has forgotten its scripts, not its messages.
        assert list(message.receipt.renewer.renew([message.receipt], 60)) == [True]
        await message.acknowledge()
        assert await mailbox.approximate_count() == 0


async def test_closing_while_the_server_is_away_works(own_server: RedisServer) -> None:
    mailbox = RedisMailbox("away", int, own_server.url, ttl_seconds=5)
    await mailbox.send(1)
    await mailbox.receive(1, 60, 1)
    own_server.stop()
    await mailbox.close()
    own_server.start()
    with pytest.raises(MailboxError):
        await mailbox.send(2)


async def test_a_flushed_server_loses_leases_and_nothing_else(own_server: RedisServer) -> None:
    async with RedisMailbox("flushed", int, own_server.url) as mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 60, 1)
        await mailbox.connection.command("FLUSHALL")
        with pytest.raises(LeaseLostError):
            await message.acknowledge()
        assert list(message.receipt.renewer.renew([message.receipt], 60)) == [False]
        assert await mailbox.sweep() == 0
        assert (await mailbox.depth()).in_flight == 0
        await mailbox.send(2)
        (message,) = await mailbox.receive(1, 60, 5)
        assert message.body == 2


class TestAccess:
    """Users, passwords and TLS."""

    pytestmark = pytest.mark.proves("R69")

    @pytest.fixture
    def acl(self, tmp_path: Path) -> Iterator[RedisServer]:
        with RedisServer(tmp_path / "acl") as server:
            # What deploy guides should grant: our keys, streams and scripts; neither INFO nor CLIENT UNBLOCK.
            rules = ["on", ">s3cret", "resetkeys", "~{fairtrial:*", "nocommands", "+@stream", "+@scripting"]
            rules += ["+@sortedset", "+pexpire", "+pttl", "+exists", "+del", "+get", "+set", "+time", "+client|id"]
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", "worker", *rules)
            yield server

    async def test_a_restricted_user_can_do_all_a_mailbox_needs(self, acl: RedisServer) -> None:
        url = f"redis://worker:s3cret@127.0.0.1:{acl.port}/0"
        async with (
            RedisMailbox("jobs", int, url, sweep_seconds=0.02) as mailbox,
            RedisMailbox("replies", int, url, ttl_seconds=30) as replies,
        ):
            for number in range(4):
                await mailbox.send(number, reply_to=replies)
            first, second, third, fourth = await mailbox.receive(4, 60, 1)
            await first.nack(5)
            await second.nack()
            await third.extend_visibility(100)
            await third.reply(9)
            await third.acknowledge()
            await fourth.dead_letter("no")
            assert (await replies.receive(1, 60, 5))[0].body == 9
            assert await mailbox.dead_letters.retry((await mailbox.dead_letters.page())[0].id) == 1
            assert (await mailbox.depth()).waiting == 2
            assert await mailbox.purge() == 3

    async def test_a_read_that_cannot_be_interrupted_still_strands_nothing(
        self, acl: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.mailbox.redis.receive.BLOCK_SECONDS", 0.3)
        url = f"redis://worker:s3cret@127.0.0.1:{acl.port}/0"
        async with RedisMailbox("cancelled", int, url) as other:
            mailbox = RedisMailbox("cancelled", int, url)
            reading = asyncio.create_task(mailbox.receive(1, 600, 20))
            await asyncio.sleep(0.1)
            reading.cancel()
            await other.send(1)
            await mailbox.close()
            (message,) = await other.receive(1, 60, 5)
            assert message.delivery_count == 1

    @pytest.mark.parametrize("credentials", ["worker:wrong@", "nobody:s3cret@"])
    async def test_wrong_credentials_are_named_and_not_shown(self, acl: RedisServer, credentials: str) -> None:
        async with RedisConnection(f"redis://{credentials}127.0.0.1:{acl.port}/0") as connection:
            mailbox = RedisMailbox("jobs", int, connection)
            with pytest.raises(MailboxAccessError) as caught:
                await mailbox.send(1)
            assert "s3cret" not in f"{caught.value} {mailbox!r}"
            assert "wrong" not in repr(mailbox)

    async def test_a_user_without_rights_is_told_so(self, acl: RedisServer) -> None:
        with acl.client() as client:
            client.execute_command("ACL", "SETUSER", "guest", "on", ">guest", "nocommands", "+ping", "+client|id")
        async with RedisConnection(f"redis://guest:guest@127.0.0.1:{acl.port}/0") as connection:
            mailbox = RedisMailbox("jobs", int, connection)
            with pytest.raises(MailboxAccessError):
                await mailbox.receive(1, 60, 0)
            with pytest.raises(MailboxAccessError):
                await mailbox.send(1)

    async def test_tls_works_and_a_certificate_nobody_signed_is_refused(self, tmp_path: Path) -> None:
        certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key)]
        await anyio.run_process([*command, "-out", str(certificate)])
        with RedisServer(tmp_path / "redis", tls=(certificate, key)) as server:
            url = f"rediss://127.0.0.1:{server.port}/0"
            async with (
                RedisConnection(url, ssl_ca_certs=str(certificate)) as connection,
                RedisMailbox("tls", int, connection) as mailbox,
            ):
                await mailbox.send(1)
                (message,) = await mailbox.receive(1, 60, 1)
                assert list(message.receipt.renewer.renew([message.receipt], 60)) == [True]
                await message.acknowledge()
            async with RedisConnection(url, timeout_seconds=5) as untyped:
                with pytest.raises(MailboxConnectionError):
                    await RedisMailbox("tls", int, untyped).send(1)


class TestConnections:
    async def test_one_connection_serves_many_mailboxes_and_outlives_them(self, redis_url: str) -> None:
        async with RedisConnection(redis_url) as connection:
            async with RedisMailbox("a", int, connection) as first, RedisMailbox("b", int, connection) as second:
                await asyncio.gather(first.send(1), second.send(2))
                assert (await first.receive(1, 60, 1))[0].body == 1
                assert (await second.receive(1, 60, 1))[0].body == 2
            async with RedisMailbox("a", int, connection) as again:
                assert await again.approximate_count() == 1

    @pytest.mark.parametrize("url", ["http://localhost", "localhost:6379"])
    def test_an_address_that_is_none_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError):
            RedisConnection(url)

    def test_settings_that_cannot_work_are_refused(self, redis_url: str) -> None:
        with pytest.raises(ConfigurationError):
            RedisMailbox("x", int, redis_url, sweep_seconds=0)
        with pytest.raises(ConfigurationError):
            RedisMailbox("x", int, redis_url, ttl_seconds=0)

    async def test_a_unix_socket_works(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        with RedisServer(tmp_path / "redis", "--unixsocket", str(path)):
            async with RedisMailbox("unix", int, f"unix://{path}") as mailbox:
                await mailbox.send(1)
                assert (await mailbox.receive(1, 60, 1))[0].body == 1


class TestCoalescing:
    """Per-message calls, few round trips."""

    async def calls(self, mailbox: RedisMailbox[int]) -> int:
        info = await mailbox.connection.command("INFO", "commandstats")
        return int(info.get("cmdstat_evalsha", {"calls": 0})["calls"])

    async def test_a_thousand_operations_of_one_turn_leave_as_a_few_calls(self, redis_url: str) -> None:
        async with RedisMailbox("many", int, redis_url, sweep_seconds=None) as mailbox:
            await mailbox.send(0)  # Loads the script.
            before = await self.calls(mailbox)
            await asyncio.gather(*(mailbox.send(number) for number in range(1, 1000)))
            assert await self.calls(mailbox) - before == 5
            messages = list(await mailbox.receive(1000, 60, 1))
            assert len(messages) == 1000
            await asyncio.gather(*(message.extend_visibility(60) for message in messages[:200]))
            before = await self.calls(mailbox)
            await asyncio.gather(*(message.extend_visibility(60) for message in messages))
            assert await self.calls(mailbox) - before == 5
            await messages.pop().acknowledge()
            before = await self.calls(mailbox)
            await asyncio.gather(*(message.acknowledge() for message in messages))
            assert await self.calls(mailbox) - before == 5

    async def test_large_bodies_are_sent_in_several_calls(self, redis_url: str) -> None:
        async with RedisMailbox("large", str, redis_url, sweep_seconds=None) as mailbox:
            await asyncio.gather(*(mailbox.send("x" * 500_000) for _ in range(30)))
            assert await mailbox.approximate_count() == 30

    async def test_a_call_that_fails_fails_each_of_its_operations_alone(self, redis_url: str) -> None:
        async with RedisMailbox("mixed", int, redis_url) as mailbox:
            await asyncio.gather(*(mailbox.send(number) for number in range(3)))
            messages = await mailbox.receive(3, 60, 1)
            await messages[1].acknowledge()
            outcomes = await asyncio.gather(*(message.acknowledge() for message in messages), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [type(None), LeaseLostError, type(None)]

    async def test_a_cancelled_acknowledgement_that_left_still_counts(self, redis_url: str) -> None:
        async with RedisMailbox("left", int, redis_url) as mailbox:
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            task = asyncio.create_task(message.acknowledge())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await mailbox.connection.close()  # Sends what is waiting to be sent.
            async with RedisMailbox("left", int, redis_url) as other:
                assert await other.approximate_count() == 0


class TestSweeper:
    async def test_one_of_many_sweeps_and_another_takes_over_when_it_leaves(self, redis_url: str) -> None:
        async with (
            RedisMailbox("sweeper-lock", int, redis_url, sweep_seconds=None) as first,
            RedisMailbox("sweeper-lock", int, redis_url, sweep_seconds=None) as second,
        ):
            assert await first.sweep() == 0
            assert await second.sweep() is None
            assert await first.sweep() == 0
            await first.close()
            assert await second.sweep() == 0

    async def test_the_lock_of_a_dead_sweeper_expires_on_the_servers_clock(self, redis_url: str) -> None:
        async with (
            RedisMailbox("sweeper-lock", int, redis_url, sweep_seconds=None) as dead,
            RedisMailbox("sweeper-lock", int, redis_url, sweep_seconds=0.05) as alive,
        ):
            await alive.send(1)
            await dead.sweep()
            await dead.receive(1, 60, 0)
            await age(dead, 61)
            (message,) = await alive.receive(1, 60, 20)
            assert message.delivery_count == 2

    async def test_a_sweeper_survives_an_absent_server(self, own_server: RedisServer) -> None:
        async with RedisMailbox("absent", int, own_server.url, sweep_seconds=0.05) as mailbox:
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            await anyio.to_thread.run_sync(own_server.stop)
            await asyncio.sleep(0.2)
            await anyio.to_thread.run_sync(own_server.start)
            await message.nack(0.1)
            (again,) = await mailbox.receive(1, 60, 10)
            assert again.delivery_count == 2

    async def test_consumers_of_others_are_left_alone(self, redis_url: str) -> None:
        async with RedisMailbox("guests", int, redis_url, sweep_seconds=None) as mailbox:
            await mailbox.send(1)
            stream = mailbox.keys.stream
            await mailbox.connection.command("XREADGROUP", "GROUP", "fairtrial", "someone", "STREAMS", stream, ">")
            await age(mailbox, 1e6)
            assert await mailbox.sweep() == 0
            assert (await mailbox.depth()).in_flight == 1


class TestResets:
    """A connection that is reset makes redis-py raise AttributeError, TypeError or RuntimeError out of itself."""

    @pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
    async def test_whatever_redis_py_raises_for_a_lost_connection_may_be_tried_again(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
    ) -> None:
        from redis.asyncio.connection import AbstractConnection

        real = AbstractConnection.read_response
        failures = 0

        async def reset(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                await self.disconnect(nowait=True)
                raise error("'NoneType' object has no attribute 'read'")
            return await real(self, *args, **options)

        async with RedisConnection(redis_url) as connection, RedisMailbox("resets", int, connection) as mailbox:
            await mailbox.send(1)
            monkeypatch.setattr(AbstractConnection, "read_response", reset)
            for call in (
                lambda: mailbox.send(2),
                mailbox.approximate_count,
                lambda: asyncio.gather(*(mailbox.send(n) for n in range(3))),
            ):
                failures = 1
                with pytest.raises(MailboxConnectionError):
                    await call()
                await mailbox.approximate_count()
            for _ in range(3):  # A read that lost its connection may be repeated inside.
                failures = 1
                with contextlib.suppress(MailboxConnectionError):
                    await mailbox.receive(1, 60, 0)
                failures = 0
            await mailbox.approximate_count()

    async def test_a_failure_while_operations_leave_together_is_passed_on(self) -> None:
        async def run(calls: Any) -> list[Any]:
            raise AttributeError("'NoneType' object has no attribute 'write'")

        batcher = Batcher("Redis", run, 200, 1000)
        with pytest.raises(MailboxConnectionError, match="object has no attribute 'write'"):
            await batcher.submit("key", "a")
