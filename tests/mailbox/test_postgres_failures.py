"""Servers, connections and workers of a mailbox on PostgreSQL that crash, restart, block or refuse."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator

import psycopg
import pytest

from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxAccessError, MailboxConnectionError
from fairtrial.mailbox.postgres import PostgresConnection, PostgresMailbox, receive
from fairtrial.mailbox.postgres.statements import CHANNEL, SCHEMA_VERSION
from tests.fleet.build import until
from tests.mailbox.ageing import age_rows
from tests.servers import PgBouncer, PostgresServer


def disconnect_all(url: str) -> int:
    """End every other connection to a database, as an administrator or a network does."""
    with psycopg.connect(url, autocommit=True) as admin:
        statement = """
            SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()
        """
        ((count,),) = admin.execute(statement).fetchall()
        return int(count)


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "crash"])
async def test_a_restart_in_mid_receive_ends_waits_with_an_error_and_keeps_leases(
    own_postgres: PostgresServer, crash: bool
) -> None:
    async with PostgresMailbox("box", int, own_postgres.new_database()) as mailbox:
        await mailbox.send(1)
        (held,) = await mailbox.receive(1, 60, 1)
        waiting = asyncio.create_task(mailbox.receive(1, 60, 30))
        await until(lambda: bool(mailbox.connection.listener._listened))
        await asyncio.to_thread(own_postgres.stop, crash=crash)
        with pytest.raises(MailboxConnectionError):
            await waiting
        with pytest.raises(MailboxConnectionError):
            await mailbox.send(2)
        with pytest.raises(MailboxConnectionError):
            await asyncio.to_thread(mailbox.renew, [held.receipt], 60.0)  # type: ignore[list-item]
        await asyncio.to_thread(own_postgres.start)
        assert list(await asyncio.to_thread(mailbox.renew, [held.receipt], 60.0)) == [True]  # type: ignore[list-item]
        await held.acknowledge()
        await mailbox.send(3)
        (message,) = await mailbox.receive(1, 60, 10)
        assert message.body == 3
        await message.acknowledge()
        # Notifications arrive again: a send ends a wait at once.
        waiting = asyncio.create_task(mailbox.receive(1, 60, 30))
        await until(lambda: bool(mailbox.connection.listener._listened))
        await mailbox.send(4)
        assert [message.body for message in await waiting] == [4]


async def test_killed_connections_are_replaced_without_an_error(pg_url: str) -> None:
    """A connection that was closed while it was idle is noticed before a statement is sent on it."""
    async with PostgresMailbox("box", int, pg_url) as mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 60, 1)
        await asyncio.to_thread(mailbox.renew, [message.receipt], 60.0)  # type: ignore[list-item]
        assert disconnect_all(pg_url) >= 2
        await asyncio.sleep(0.1)
        assert list(await asyncio.to_thread(mailbox.renew, [message.receipt], 60.0)) == [True]  # type: ignore[list-item]
        await mailbox.send(2)
        await message.acknowledge()
        assert await mailbox.approximate_count() == 1


async def test_a_killed_listener_is_replaced_and_nothing_waits_for_it(pg_url: str) -> None:
    async with PostgresMailbox("box", int, pg_url) as mailbox, PostgresMailbox("box", int, pg_url) as other:
        for number in range(3):
            waiting = asyncio.create_task(mailbox.receive(1, 60, 30))
            await until(lambda: bool(mailbox.connection.listener._listened))
            if number == 1:
                with psycopg.connect(pg_url, autocommit=True) as admin:
                    admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE query LIKE 'LISTEN%' AND datname = current_database()"
                    )
                await until(lambda: not mailbox.connection.listener._listened)
            await other.send(number)
            (message,) = await asyncio.wait_for(waiting, 10)
            assert message.body == number
            await message.acknowledge()


async def test_a_session_that_idles_in_a_transaction_delays_only_what_it_locked(pg_url: str) -> None:
    url = f"{pg_url}?options=-c%20lock_timeout%3D300"
    async with PostgresMailbox("box", int, url) as mailbox:
        await mailbox.send_all([1, 2, 3])
        (held,) = await mailbox.receive(1, 60, 1)
        with psycopg.connect(pg_url) as idle:
            idle.execute("SELECT * FROM mailbox_messages WHERE id IN (%s, %s) FOR UPDATE", (held.id, int(held.id) + 1))
            began = time.monotonic()
            (message,) = await mailbox.receive(10, 60, 0)  # Locked rows are skipped.
            assert message.body == 3
            await message.acknowledge()
            assert time.monotonic() - began < 5
            with pytest.raises(MailboxConnectionError, match="lock"):
                await held.acknowledge()
            assert not held.settled
        await held.acknowledge()
        (message,) = await mailbox.receive(10, 60, 0)
        assert message.body == 2


async def test_renewing_and_settling_the_same_messages_at_once_never_deadlocks(mailbox_database: str) -> None:
    async with PostgresMailbox(f"both-{uuid.uuid4().hex}", int, mailbox_database) as mailbox:
        for _ in range(10):
            await mailbox.send_all(range(200))
            messages = list(await mailbox.receive(200, 60, 1))
            receipts = [message.receipt for message in reversed(messages)]
            renewing = asyncio.create_task(asyncio.to_thread(mailbox.renew, receipts, 60.0))  # type: ignore[arg-type]
            assert all(await mailbox.acknowledge_all(messages))
            await renewing
        assert await mailbox.approximate_count() == 0


async def test_leases_of_several_workers_that_expire_together_are_an_outage(mailbox_database: str) -> None:
    name = f"outage-{uuid.uuid4().hex}"
    async with (
        PostgresMailbox(name, int, mailbox_database) as one,
        PostgresMailbox(name, int, mailbox_database) as two,
    ):
        await one.send_all([1, 2])
        for expiries in (0, 1):
            await one.receive(1, 60, 1)
            await two.receive(1, 60, 1)
            await age_rows(one, 61)
            messages = await one.receive(2, 60, 1)
            assert [message.expiries for message in messages] == [expiries, expiries]
            for message in messages:
                await message.nack()


async def test_a_wrong_password_is_an_access_error(pg_url: str) -> None:
    mailbox: PostgresMailbox[int] = PostgresMailbox("box", int, pg_url.replace("store-test", "wrong-test"))
    with pytest.raises(MailboxAccessError) as caught:
        await mailbox.send(1)
    assert "wrong-test" not in str(caught.value)
    await mailbox.close()


async def test_a_user_without_rights_is_told_so(pg_url: str) -> None:
    async with PostgresMailbox("box", int, pg_url):
        pass
    role = f"reader_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(pg_url, autocommit=True) as admin:
        admin.execute(psycopg.sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'reader'").format(psycopg.sql.Identifier(role)))
    _, _, rest = pg_url.partition("@")
    mailbox: PostgresMailbox[int] = PostgresMailbox("box", int, f"postgresql://{role}:reader@{rest}")
    with pytest.raises(MailboxAccessError, match="permission denied"):
        await mailbox.send(1)
    await mailbox.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:pass/word@host/db?port=x y",
        "postgresql://[::1",
        "mysql://me:secret@host/db",
        "postgresql://host/db?pgbouncer=maybe",
        "postgresql://host/db?secret=yes",
    ],
)
def test_an_invalid_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PostgresConnection(url)
    assert "pass" not in str(caught.value).replace("password", "")
    assert "secret" not in str(caught.value)


async def test_tables_of_a_newer_version_are_refused(pg_url: str) -> None:
    async with PostgresMailbox("box", int, pg_url):
        pass
    with psycopg.connect(pg_url, autocommit=True) as admin:
        admin.execute("UPDATE mailbox_schema SET version = %s", (SCHEMA_VERSION + 1,))
    mailbox: PostgresMailbox[int] = PostgresMailbox("box", int, pg_url)
    with pytest.raises(ConfigurationError, match="newer Fairtrial"):
        await mailbox.open()
    await mailbox.close()


async def test_many_processes_may_create_the_tables_at_once(pg_url: str) -> None:
    connections = [PostgresConnection(pg_url) for _ in range(8)]
    try:
        boxes = [PostgresMailbox("box", int, connection) for connection in connections]
        await asyncio.gather(*(box.send(number) for number, box in enumerate(boxes)))
        assert await boxes[0].approximate_count() == 8
    finally:
        for connection in connections:
            await connection.close()


async def test_a_database_that_lost_its_tables_gets_them_again_and_leases_are_lost(pg_url: str) -> None:
    """As after a restore of an older copy."""
    async with PostgresMailbox("box", int, pg_url) as mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 60, 1)
        with psycopg.connect(pg_url, autocommit=True) as admin:
            admin.execute("DROP TABLE mailbox_schema, mailbox_queues, mailbox_messages, mailbox_workers")
            admin.execute("DROP SEQUENCE mailbox_deaths")
        with pytest.raises(LeaseLostError):
            await message.acknowledge()
        await mailbox.send(2)
        (message,) = await mailbox.receive(1, 60, 1)
        assert message.body == 2


@pytest.fixture(scope="module")
def pooler(pg_server: PostgresServer) -> Iterator[PgBouncer]:
    with PgBouncer(pg_server) as started:
        yield started


class TestPgBouncer:
    async def test_messages_pass_a_pooler_in_transaction_mode(self, pooler: PgBouncer, mailbox_database: str) -> None:
        url = f"{pooler.url(mailbox_database)}?pgbouncer=true"
        name = f"pooled-{uuid.uuid4().hex}"
        async with PostgresMailbox(name, int, url) as mailbox, PostgresMailbox(name, int, url) as other:
            waiting = asyncio.create_task(mailbox.receive(1, 60, 20))
            await asyncio.sleep(0.3)
            began = time.monotonic()
            await other.send(-1)
            (message,) = await waiting
            assert time.monotonic() - began < 2  # Found by polling.
            await message.acknowledge()
            for round in range(8):  # More often than a statement is executed before it would be prepared.
                await asyncio.gather(*(other.send(number) for number in range(round * 10, round * 10 + 10)))
                messages = await mailbox.receive(10, 60, 5)
                assert len(messages) == 10
                receipts = [message.receipt for message in messages]
                assert all(await asyncio.to_thread(mailbox.renew, receipts, 60.0))  # type: ignore[arg-type]
                await asyncio.gather(*(message.acknowledge() for message in messages))
            assert await mailbox.approximate_count() == 0

    async def test_an_address_without_the_parameter_is_explained(
        self, pooler: PgBouncer, mailbox_database: str
    ) -> None:
        mailbox: PostgresMailbox[int] = PostgresMailbox("box", int, pooler.url(mailbox_database))
        with pytest.raises(ConfigurationError, match=r"\?pgbouncer=true"):
            await mailbox.send(1)
        await mailbox.close()


async def test_notifications_that_do_not_arrive_are_noticed_and_replaced_by_polling(
    mailbox_database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fairtrial.mailbox.postgres.connection._PROBE_SECONDS", 0.1)
    name = f"deaf-{uuid.uuid4().hex}"
    async with (
        PostgresConnection(mailbox_database) as connection,
        PostgresMailbox(name, int, connection) as mailbox,
        PostgresMailbox(name, int, mailbox_database) as other,
    ):

        async def lose(channel: str) -> None:
            """As a PgBouncer in transaction mode does with what a session listens to."""

        connection.listener._notify = lose
        with caplog.at_level(logging.WARNING):
            waiting = asyncio.create_task(mailbox.receive(1, 60, 20))
            await until(lambda: "notifications do not arrive" in caplog.text)
        await other.send(7)
        (message,) = await asyncio.wait_for(waiting, 5)
        assert message.body == 7


async def test_notifications_that_were_late_once_are_tried_again(
    mailbox_database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fairtrial.mailbox.postgres.connection._PROBE_SECONDS", 0.1)
    monkeypatch.setattr("fairtrial.mailbox.postgres.connection._FIRST_PROBE_PAUSE", 0.2)
    name = f"late-{uuid.uuid4().hex}"
    async with PostgresConnection(mailbox_database) as connection, PostgresMailbox(name, int, connection) as mailbox:
        notify, lost = connection.listener._notify, 0

        async def lose_two(channel: str) -> None:
            nonlocal lost
            lost += 1
            if lost > 2:
                monkeypatch.setattr("fairtrial.mailbox.postgres.connection._PROBE_SECONDS", 5.0)
                await notify(channel)

        connection.listener._notify = lose_two
        channel = f"{CHANNEL}{await mailbox.open()}"
        with caplog.at_level(logging.WARNING):
            waiting = asyncio.create_task(mailbox.receive(1, 60, 20))
            await until(lambda: connection.listener.listens(channel))
        assert lost == 3
        assert caplog.text.count("tried again in") == 1
        await mailbox.send(7)
        (message,) = await asyncio.wait_for(waiting, 5)
        assert message.body == 7


async def test_a_waiting_receiver_follows_a_mailbox_that_was_removed_and_created_again(
    pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new id has another channel: on the old one, no notification would ever arrive."""
    monkeypatch.setattr(receive, "_LISTENING_SECONDS", 0.2)
    async with PostgresMailbox("box", int, pg_url) as mailbox, PostgresMailbox("box", int, pg_url) as other:
        waiting = asyncio.create_task(mailbox.receive(1, 60, 20))
        first = await mailbox.open()
        channel = f"{CHANNEL}{first}"
        await until(lambda: mailbox.connection.listener.listens(channel))
        with psycopg.connect(pg_url, autocommit=True) as connection:
            connection.execute("DELETE FROM mailbox_queues")
        channel = f"{CHANNEL}{await other.open(again=True)}"
        await until(lambda: mailbox.connection.listener.listens(channel))
        monkeypatch.setattr(receive, "_LISTENING_SECONDS", 60.0)
        await asyncio.sleep(0.3)  # The last look of the old length is over: only a notification ends this wait.
        assert not waiting.done()
        await other.send(7)
        (message,) = await asyncio.wait_for(waiting, 5)
        assert message.body == 7
        assert await mailbox.open() != first
