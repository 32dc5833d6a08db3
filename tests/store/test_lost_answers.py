"""Answers of PostgreSQL that never arrive, while the network answers for the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import text

from fairtrial.errors import MailboxConnectionError, StoreUnavailableError
from fairtrial.mailbox.postgres import PostgresConnection
from fairtrial.mailbox.postgres import connection as queue
from fairtrial.store import bounded as bounded_connection
from fairtrial.store import engine as engines
from fairtrial.store import open_store
from fairtrial.store.sql import SqlStore
from tests.proxy import Proxy

pytestmark = pytest.mark.postgres


@pytest.fixture
def proxy(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(bounded_connection, "ANSWER_MARGIN_SECONDS", 1.0)
    for limit in ("STATEMENT_TIMEOUT_SECONDS", "SHORT_WRITE_SECONDS"):
        monkeypatch.setattr(engines, limit, 0)  # None but the margin.
    monkeypatch.setattr(engines, "_connection_settings", lambda url: {"connect_timeout": 2})
    monkeypatch.setattr(queue, "_ANSWER_SECONDS", 1.0)
    with Proxy(int(pg_url.rpartition(":")[2].partition("/")[0])) as proxy:
        end = threading.Timer(15, proxy.cut)  # A wait without a limit ends, too, but with another error.
        end.start()
        yield proxy
        end.cancel()


def open_sql(url: str) -> SqlStore:
    store = open_store(url)
    assert isinstance(store, SqlStore)
    return store


def through(proxy: Proxy, url: str) -> str:
    address, _, rest = url.rpartition(":")
    return f"{address}:{proxy.port}/{rest.partition('/')[2]}"


def test_a_store_whose_answer_is_lost_is_unavailable_and_found_again(pg_url: str, proxy: Proxy) -> None:
    def lose_an_answer() -> None:
        with store._read() as connection:
            connection.execute(text("SELECT 1"))
            proxy.dropped = frozenset({"down"})
            connection.execute(text("SELECT 2"))

    with closing(open_sql(through(proxy, pg_url))) as store:
        with pytest.raises(StoreUnavailableError, match="the server has not answered for 1 s"):
            lose_an_answer()
        with pytest.raises(StoreUnavailableError, match="timeout expired"):
            store.runs()
        proxy.dropped = frozenset()
        assert store.runs() == []


def test_a_connection_that_was_lost_while_it_was_idle_is_replaced(pg_url: str, proxy: Proxy) -> None:
    with closing(open_store(through(proxy, pg_url))) as store:
        proxy.dropped = frozenset({"down"})
        timer = threading.Timer(0.5, lambda: setattr(proxy, "dropped", frozenset()))  # The first answer is lost.
        timer.start()
        assert store.runs() == []
        timer.join()


def test_answers_of_a_queue_that_are_lost_are_not_waited_for(pg_url: str, proxy: Proxy) -> None:
    async def lose_answers() -> None:
        connection = PostgresConnection(through(proxy, pg_url), timeout_seconds=2)

        async def ask() -> None:
            assert await connection.run("asking", "SELECT 1", {}) == [(1,)]

        async def renew() -> None:
            assert await asyncio.to_thread(connection.renewals.run, "renewing", "SELECT 1", {}) == [(1,)]

        await asyncio.gather(ask(), ask(), renew())  # Opens its connections.
        for call in (ask, renew):
            proxy.dropped = frozenset({"down"})
            with pytest.raises(MailboxConnectionError, match="the server has not answered for 1 s"):
                await call()
            proxy.dropped = frozenset()
            await call()
        await connection.close()

    asyncio.run(lose_answers())


def test_a_process_that_is_gone_does_not_keep_the_locks_of_its_transaction(
    pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SHORT_WRITE_SECONDS", 1)

    def lock_and_vanish() -> None:
        with store._write() as connection:
            connection.execute(text("LOCK TABLE runs"))
            other.execute("UPDATE runs SET status = status")  # Waits for the server to end the transaction.
            connection.execute(text("SELECT 1"))

    with (
        closing(open_sql(pg_url)) as store,
        psycopg.connect(pg_url, autocommit=True, options="-c lock_timeout=10s") as other,
        pytest.raises(StoreUnavailableError, match="idle-in-transaction timeout"),
    ):
        lock_and_vanish()


def test_a_vacuum_may_take_longer_than_an_answer(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connection, "ANSWER_MARGIN_SECONDS", 0.5)
    with closing(open_sql(pg_url)) as store, psycopg.connect(pg_url) as other:
        monkeypatch.setattr(engines, "STATEMENT_TIMEOUT_SECONDS", 0)
        other.execute("LOCK TABLE runs IN SHARE UPDATE EXCLUSIVE MODE")
        timer = threading.Timer(1.5, other.rollback)
        timer.start()
        store.vacuum()
        timer.join()
