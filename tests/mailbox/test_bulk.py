"""Operations on many messages have the same effect as on one at a time."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairtrial.errors import BodyError, MailboxConnectionError, MessageTooLargeError, ReplyNotAvailableError
from fairtrial.mailbox import InMemoryMailbox, Mailbox, PostgresMailbox, acknowledge_all, reply_all, send_all
from fairtrial.mailbox.postgres import PostgresConnection
from fairtrial.mailbox.redis import RedisConnection, RedisMailbox
from fairtrial.mailbox.server import asked_from
from tests.redis_server import RedisServer


@pytest.fixture(params=["memory", "redis", "postgresql"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Mailbox[Any], Mailbox[Any]]]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield InMemoryMailbox("a", dict), InMemoryMailbox("b", dict)
            return
        if request.param == "postgresql":
            database = await stack.enter_async_context(PostgresConnection(request.getfixturevalue("pg_url")))
            c: PostgresMailbox[Any] = PostgresMailbox("a", dict, database, max_body_bytes=100_000)
            d: PostgresMailbox[Any] = PostgresMailbox("b", dict, database)
            yield await stack.enter_async_context(c), await stack.enter_async_context(d)
            return
        connection = await stack.enter_async_context(RedisConnection(request.getfixturevalue("redis_url")))
        a: RedisMailbox[Any] = RedisMailbox("a", dict, connection, max_body_bytes=100_000)
        b: RedisMailbox[Any] = RedisMailbox("b", dict, connection)
        yield await stack.enter_async_context(a), await stack.enter_async_context(b)


async def test_what_is_sent_together_arrives_and_is_acknowledged_together(
    pair: tuple[Mailbox[Any], Mailbox[Any]],
) -> None:
    here, there = pair
    await send_all(here, [{"n": number} for number in range(450)], reply_to=there)
    messages = await here.receive(1000, 60, 1)
    assert [message.body["n"] for message in messages] == list(range(450))
    await reply_all(here, [(message, {"answer": message.body["n"]}) for message in messages])
    answers = await there.receive(1000, 60, 1)
    assert sorted(answer.body["answer"] for answer in answers) == list(range(450))
    await messages[3].acknowledge()
    kept = await acknowledge_all(here, messages)
    assert [place for place, ours in enumerate(kept) if not ours] == [3]
    assert await here.approximate_count() == 0
    assert all(message.settled for message in messages)


async def test_empty_batches_are_accepted(pair: tuple[Mailbox[Any], Mailbox[Any]]) -> None:
    here, _ = pair
    await send_all(here, [])
    await reply_all(here, [])
    assert list(await acknowledge_all(here, [])) == []


async def test_one_without_an_address_raises(pair: tuple[Mailbox[Any], Mailbox[Any]]) -> None:
    here, _ = pair
    await send_all(here, [{}])
    messages = await here.receive(10, 60, 1)
    with pytest.raises(ReplyNotAvailableError):
        await reply_all(here, [(message, {}) for message in messages])


async def test_bodies_are_checked_before_anything_leaves(pair: tuple[Mailbox[Any], Mailbox[Any]]) -> None:
    here, _ = pair
    with pytest.raises(BodyError):
        await send_all(here, [{"x": object()}])
    if isinstance(here, RedisMailbox):
        with pytest.raises(MessageTooLargeError):
            await here.send_all([{"x": secrets.token_hex(100_001)}])
        assert len(await here.send_all([{"x": "y" * 90_000}] * 60)) == 60  # More than one call can carry.
        assert await here.approximate_count() == 60


async def test_a_missing_mailbox_is_not_created_by_a_send_and_nothing_is_acknowledged(redis_url: str) -> None:
    async with RedisConnection(redis_url) as connection, RedisMailbox("a", dict, connection) as here:
        sender: RedisMailbox[Any] = RedisMailbox("nowhere", dict, connection, create=False)
        with pytest.raises(ReplyNotAvailableError):
            await sender.send_all([{}])
        await here.send({}, reply_to="nowhere")
        (message,) = await here.receive(1, 60, 1)
        with pytest.raises(ReplyNotAvailableError):
            await reply_all(here, [(message, {})])
        await connection.command("DEL", here.keys.stream)
        assert list(await acknowledge_all(here, [message])) == [False]


async def test_a_server_that_is_away_leaves_messages_unsettled(redis_server: RedisServer, redis_url: str) -> None:
    async with RedisConnection(redis_url) as connection, RedisMailbox("a", dict, connection) as here:
        await connection.command("CONFIG", "SET", "appendfsync", "always")  # Or the kill may lose the lease.
        await here.send({})
        (message,) = await here.receive(1, 60, 1)
        redis_server.kill()
        try:
            with pytest.raises(MailboxConnectionError):
                await acknowledge_all(here, [message])
            assert not message.settled
            with pytest.raises(MailboxConnectionError):
                await here.send_all([{}])
        finally:
            redis_server.start()
        assert list(await acknowledge_all(here, [message])) == [True]


async def test_a_mailbox_tells_whether_anything_in_it_asks_for_replies_somewhere(
    pair: tuple[Mailbox[Any], Mailbox[Any]],
) -> None:
    here, there = pair
    assert await asked_from(here, there.name) is False
    await send_all(here, [{"n": number} for number in range(450)])
    assert await asked_from(here, there.name) is False
    await here.send({"n": 450}, reply_to=there)
    await here.send({"n": 451}, reply_to="elsewhere")
    assert await asked_from(here, there.name) is True
    messages = await here.receive(1000, 60, 1)
    assert await asked_from(here, there.name) is True  # In flight.
    await acknowledge_all(here, messages[:450])
    await messages[450].nack(600)
    assert await asked_from(here, there.name) is True  # Delayed.
    assert await asked_from(here, "elsewhere") is True
    await here.purge()
    assert await asked_from(here, there.name) is False


async def test_asked_from_is_none_for_a_mailbox_that_cannot_search() -> None:
    assert await asked_from(object(), "anywhere") is None  # type: ignore[arg-type]  # of no use, and that is the point
