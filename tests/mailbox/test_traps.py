"""Tests for each known failure mode of queues on Redis Streams."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis

from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxFullError, ReplyNotAvailableError
from fairtrial.mailbox import Message, RedisConnection, RedisMailbox
from fairtrial.mailbox.redis import receive as sweeper
from fairtrial.mailbox.redis.scripts import GROUP
from tests.mailbox.ageing import age
from tests.redis_server import RedisServer

pytestmark = pytest.mark.proves("R69")


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RedisMailbox[Any]]:
    name = options.pop("name", f"trap-{uuid.uuid4().hex}")
    async with RedisMailbox[Any](name, options.pop("body_type", int), url, **options) as mailbox:
        yield mailbox


async def fill(mailbox: RedisMailbox[Any], count: int) -> None:
    await asyncio.gather(*(mailbox.send(number) for number in range(count)))


async def acknowledge_all(messages: Any) -> None:
    await asyncio.gather(*(message.acknowledge() for message in messages))


async def consumers(mailbox: RedisMailbox[Any]) -> dict[str, int]:
    rows = await mailbox.connection.command("XINFO CONSUMERS", mailbox.keys.stream, GROUP)
    return {row["name"].decode(): row["pending"] for row in rows}


class TestTrap1MemoryIsFreedAndUnreadWorkIsNot:
    async def test_acknowledged_messages_leave_nothing_behind(self, redis_url: str) -> None:
        async with opened(redis_url, body_type=str) as mailbox:
            await asyncio.gather(*(mailbox.send("x" * 1000) for _ in range(2000)))
            full = await mailbox.connection.command("MEMORY USAGE", mailbox.keys.stream, "SAMPLES", 0)
            while messages := await mailbox.receive(200, 60, 0):
                await acknowledge_all(messages)
            left = await mailbox.connection.command("MEMORY USAGE", mailbox.keys.stream, "SAMPLES", 0)
            assert full > 2_000_000
            assert left < 10_000

    async def test_redelivery_leaves_nothing_behind_either(self, redis_url: str) -> None:
        async with opened(redis_url) as mailbox:
            await fill(mailbox, 50)
            for _ in range(5):
                messages = await mailbox.receive(50, 60, 0)
                assert len(messages) == 50
                await asyncio.gather(*(message.nack() for message in messages))
            assert await mailbox.connection.command("XLEN", mailbox.keys.stream) == 50

    async def test_unread_work_is_kept_however_much_there_is(self, redis_url: str) -> None:
        async with opened(redis_url) as mailbox:
            await fill(mailbox, 20_000)
            assert await mailbox.approximate_count() == 20_000


class TestTrap2ALongPollOutlivesTheSocketTimeout:
    async def test_waiting_longer_than_the_timeout_is_no_error(self, redis_url: str) -> None:
        async with RedisConnection(redis_url, timeout_seconds=0.3) as connection:
            mailbox = RedisMailbox("slow", int, connection)
            began = time.monotonic()
            assert not await mailbox.receive(1, 60, 1.2)
            assert time.monotonic() - began > 1.1
            await mailbox.close()

    async def test_a_wait_of_several_reads_still_gets_the_message_at_once(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.mailbox.redis.receive.BLOCK_SECONDS", 0.1)
        async with opened(redis_url) as mailbox:
            waiting = asyncio.create_task(mailbox.receive(1, 60, 20))
            await asyncio.sleep(0.35)
            assert not waiting.done()
            began = time.monotonic()
            await mailbox.send(7)
            (message,) = await waiting
            assert message.body == 7
            assert time.monotonic() - began < 10


class TestTrap3WaitingReadersDoNotStarveHeartbeats:
    async def test_leases_are_extended_while_fifty_readers_wait(self, redis_url: str) -> None:
        async with opened(redis_url) as mailbox:
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            waiting = [asyncio.create_task(mailbox.receive(1, 60, 30)) for _ in range(50)]
            await asyncio.sleep(0.2)
            with anyio.fail_after(5):
                await message.extend_visibility(60)
                await message.acknowledge()
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)


class TestTrap4ACancelledReadStrandsNothing:
    async def test_300_reads_cancelled_around_their_delivery_leave_nothing_pending(self, redis_url: str) -> None:
        async with opened(redis_url) as sender, opened(redis_url, name=sender.name) as mailbox:
            taken: list[Message[Any]] = []
            for number in range(300):
                reading = asyncio.create_task(mailbox.receive(1, 600, 10))
                sending = asyncio.create_task(sender.send(number))
                for _ in range(number % 12):  # From before the command leaves to after its answer came.
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.wait([reading, sending])
                if not reading.cancelled():
                    taken += reading.result()
            assert len(taken) < 300, "nothing was cancelled: the test has lost its point"
            await mailbox.close()
            rest = await sender.receive(300, 600, 0)
            assert {message.body for message in [*taken, *rest]} == set(range(300))
            assert {message.delivery_count for message in rest} == {1}

    async def test_closing_does_not_wait_for_a_cancelled_read_to_time_out(self, redis_url: str) -> None:
        async with opened(redis_url) as mailbox:
            reading = asyncio.create_task(mailbox.receive(1, 60, 20))
            await asyncio.sleep(0.1)
            reading.cancel()
            await asyncio.wait([reading])
            began = time.monotonic()
            await mailbox.close()
            assert time.monotonic() - began < 10


class TestTrap5ConsumersAreDeletedOnlyWithNothingPending:
    async def test_closing_with_work_in_flight_orphans_nothing(self, redis_url: str) -> None:
        async with opened(redis_url, sweep_seconds=None) as other:
            async with opened(redis_url, name=other.name, sweep_seconds=None) as mailbox:
                await mailbox.send(1)
                await mailbox.receive(1, 60, 1)
            assert list((await consumers(other)).values()) == [1]
            await age(other, 61)
            await other.sweep()
            (again,) = await other.receive(1, 60, 0)
            assert again.delivery_count == 2

    async def test_closing_with_nothing_in_flight_removes_the_consumer(self, redis_url: str) -> None:
        async with opened(redis_url) as other:
            async with opened(redis_url, name=other.name) as mailbox:
                await mailbox.send(1)
                (message,) = await mailbox.receive(1, 60, 1)
                assert len(await consumers(other)) == 1
                await message.acknowledge()
            assert await consumers(other) == {}

    async def test_every_start_reads_under_a_new_name(self, redis_url: str) -> None:
        async with opened(redis_url) as one, opened(redis_url, name=one.name) as two:
            assert one.consumers.token != two.consumers.token

    async def test_the_sweeper_forgets_strays_and_spares_those_with_work(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeper, "_STRAY_MS", -1)
        async with opened(redis_url, sweep_seconds=None) as mailbox:
            await fill(mailbox, 2)
            await mailbox.receive(1, 60, 0)
            (done,) = await mailbox.receive(1, 90, 0)
            await done.acknowledge()
            assert sorted((await consumers(mailbox)).values()) == [0, 1]
            await mailbox.sweep()
            assert list((await consumers(mailbox)).values()) == [1]


class TestTrap6CountsSurviveReclaiming:
    async def test_counts_are_right_after_hundreds_come_back_at_once(self, redis_url: str) -> None:
        async with opened(redis_url, sweep_seconds=None) as mailbox:
            await fill(mailbox, 650)  # More than one step of the sweeper.
            for delivery in (1, 2, 3):
                messages = await mailbox.receive(650, 60, 0)
                assert len(messages) == 650
                assert {message.delivery_count for message in messages} == {delivery}
                assert {message.expiries for message in messages} == {delivery - 1}
                await age(mailbox, 61)
                assert await mailbox.sweep() == 650

    async def test_delays_are_promoted_in_any_number(self, redis_url: str) -> None:
        async with opened(redis_url, sweep_seconds=None) as mailbox:
            await fill(mailbox, 450)
            messages = await mailbox.receive(450, 60, 0)
            await asyncio.gather(*(message.nack(3600 * 24 * 30) for message in messages))
            await age(mailbox, 3600 * 24 * 30 - 5)
            assert await mailbox.sweep() == 0
            await age(mailbox, 6)
            assert await mailbox.sweep() == 450
            assert {m.delivery_count for m in await mailbox.receive(450, 60, 0)} == {2}


class TestTrap7WhatCannotBeReadIsSetAside:
    @pytest.mark.proves("R82")
    @pytest.mark.parametrize(
        "fields",
        [
            ["b", "{not json"],
            ["b", b"\xff\xfe\x00"],
            ["b", '"text, not a number"'],
            ["b", "[" * 5000],
            ["b", "9" * 5000],
            ["other", "field"],
            ["s", "0" * 64],
            ["s", "../../etc/passwd"],
            ["b", "x", "n", "-5", "i", b"\xff", "x", "1e9", "r", "{bad}"],
            ["b", "1" * 3_000_000],
            [field for number in range(60) for field in (f"f{number}", "v")],
        ],
        ids=["json", "utf8", "type", "deep", "digits", "missing", "claim", "path", "odd", "huge", "many"],
    )
    async def test_a_malicious_message_fills_a_dead_letter_and_nothing_else(
        self, redis_url: str, fields: list[Any]
    ) -> None:
        async with opened(redis_url) as mailbox:
            await mailbox.connection.command("XADD", mailbox.keys.stream, "*", *fields)
            await mailbox.send(5)
            (good,) = await mailbox.receive(10, 60, 5)
            assert good.body == 5
            await good.acknowledge()
            (letter,) = await mailbox.dead_letters.page()
            assert letter.error == "BodyError"
            assert await mailbox.approximate_count() == 0
            assert await mailbox.dead_letters.retry(letter.id) == 1
            assert not await mailbox.receive(10, 60, 0)
            assert await mailbox.dead_letters.count() == 1

    async def test_a_validator_that_crashes_is_the_messages_fault(self, redis_url: str) -> None:
        async with opened(redis_url, body_type=Fussy) as mailbox:
            await mailbox.connection.command("XADD", mailbox.keys.stream, "*", "b", '{"number": 13}')
            assert not await mailbox.receive(1, 60, 0)
            (letter,) = await mailbox.dead_letters.page()
            assert "unlucky" in letter.reason

    async def test_a_silent_end_counts_half_when_leases_of_several_workers_end_together(self, redis_url: str) -> None:
        async with (
            opened(redis_url, sweep_seconds=None) as mailbox,
            RedisMailbox(mailbox.name, int, redis_url, sweep_seconds=None) as second,
        ):
            await fill(mailbox, 2)
            for expected in (0, 0, 1):
                (one,), (two,) = await mailbox.receive(1, 60, 0), await second.receive(1, 60, 0)
                assert (one.expiries, two.expiries) == (expected, expected)
                await age(mailbox, 61)
                assert await mailbox.sweep() == 2

    async def test_expired_leases_are_counted_apart_from_deliveries(self, redis_url: str) -> None:
        async with opened(redis_url, sweep_seconds=None) as mailbox:
            await fill(mailbox, 2)
            for _ in range(2):
                victim, polite = sorted(await mailbox.receive(2, 60, 0), key=lambda message: message.body)
                await polite.nack()
                await age(mailbox, 61)
                await mailbox.sweep()
            victim, polite = sorted(await mailbox.receive(2, 60, 0), key=lambda message: message.body)
            assert (victim.delivery_count, victim.expiries) == (3, 2)
            assert (polite.delivery_count, polite.expiries) == (3, 0)


class TestTrap9NoMessageIsEvicted:
    async def test_a_server_that_may_evict_messages_is_refused(self, tmp_path: Path) -> None:
        options = ("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
        with RedisServer(tmp_path, *options) as server, pytest.raises(ConfigurationError, match="noeviction"):
            await RedisMailbox("evicted", int, server.url).__aenter__()

    async def test_a_full_server_reports_it_and_loses_nothing(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as server:
            async with opened(server.url, body_type=str) as mailbox:
                outcomes = await asyncio.gather(
                    *(mailbox.send(secrets.token_hex(50_000)) for _ in range(200)), return_exceptions=True
                )
                sent = sum(isinstance(outcome, str) for outcome in outcomes)
                assert 10 < sent < 200
                assert {type(outcome) for outcome in outcomes} == {str, MailboxFullError}
                # Settling makes room, so it must work without any.
                assert await mailbox.approximate_count() == sent
                while messages := await mailbox.receive(10, 60, 0):
                    await acknowledge_all(messages)
                await mailbox.send("there is room again")


class TestDeadLettersAreBounded:
    async def test_the_oldest_give_way_to_new_ones(self, redis_url: str) -> None:
        async with opened(redis_url) as mailbox:
            with redis.Redis.from_url(redis_url) as client:
                old = int(time.time() - 31 * 24 * 3600) * 1000
                pipe = client.pipeline()
                for number in range(500):
                    pipe.xadd(mailbox.keys.dead, {"b": "1", "reason": "old"}, id=f"{old + number}-0")
                pipe.execute()
                await fill(mailbox, 1)
                (message,) = await mailbox.receive(1, 60, 1)
                await message.dead_letter("new")
                # Redis trims whole nodes of a hundred entries.
                assert client.xlen(mailbox.keys.dead) < 150
                assert (client.xrevrange(mailbox.keys.dead, count=1)[0][1])[b"reason"] == b"new"


class TestTrap10AReplyMailboxVanishesWithItsOwner:
    pytestmark = pytest.mark.proves("R53", "R80")

    async def test_it_has_a_time_to_live_that_its_owner_renews(self, redis_url: str) -> None:
        async with opened(redis_url, ttl_seconds=1) as replies:
            await asyncio.sleep(1.5)
            left = await replies.connection.command("PTTL", replies.keys.stream)
            assert 0 < left <= 1000

    async def test_its_other_keys_vanish_with_it(self, redis_url: str) -> None:
        async with opened(redis_url, ttl_seconds=30) as replies:
            await fill(replies, 2)
            first, second = await replies.receive(2, 60, 1)
            await first.nack(1000)
            await second.dead_letter("no")
            for key in (replies.keys.delayed, replies.keys.dead):
                assert 0 < await replies.connection.command("PTTL", key) <= 30_000

    async def test_a_clean_close_removes_it(self, redis_url: str) -> None:
        async with opened(redis_url) as other:
            async with opened(redis_url, ttl_seconds=30) as replies:
                await replies.send(1)
            assert await other.connection.command("EXISTS", replies.keys.stream) == 0

    async def test_a_late_reply_neither_recreates_it_nor_stops_the_worker(self, redis_url: str) -> None:
        async with opened(redis_url) as requests:
            async with opened(redis_url, ttl_seconds=30) as replies:
                await requests.send(1, reply_to=replies)
            (message,) = await requests.receive(1, 60, 1)
            with pytest.raises(ReplyNotAvailableError):
                await message.reply("too late")
            assert await requests.connection.command("EXISTS", replies.keys.stream) == 0
            await message.acknowledge()

    async def test_a_waiting_receive_recreates_its_expired_mailbox(self, redis_url: str) -> None:
        async with opened(redis_url, ttl_seconds=30) as replies, opened(redis_url) as sender:
            (waiting,) = [asyncio.create_task(replies.receive(1, 60, 10))]
            await asyncio.sleep(0.1)
            await sender.connection.command("DEL", replies.keys.stream)  # As its time to live would.
            await asyncio.sleep(0.1)
            await sender.send(4, reply_to=replies.name)
            (message,) = await sender.receive(1, 60, 1)
            await message.reply(5)
            (reply,) = await waiting
            assert reply.body == 5
            assert 0 < await replies.connection.command("PTTL", replies.keys.stream) <= 30_000

    @pytest.mark.parametrize("address", ["{bad}", "../x", "", "a" * 300, "ok but\nnot"])
    async def test_a_reply_address_that_is_none_is_refused(self, redis_url: str, address: str) -> None:
        async with opened(redis_url) as mailbox:
            await mailbox.connection.command("XADD", mailbox.keys.stream, "*", "b", "1", "r", address)
            (message,) = await mailbox.receive(1, 60, 1)
            with pytest.raises(ReplyNotAvailableError):
                await message.reply(1)
            await message.acknowledge()


class TestTheFence:
    async def test_another_objects_receipt_settles_nothing(self, redis_url: str) -> None:
        async with opened(redis_url) as mailbox, opened(redis_url, name=mailbox.name) as thief:
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            message.receipt.mailbox = thief  # type: ignore[attr-defined]  # the receipt of Redis, forged
            for settle in (message.acknowledge, message.nack, message.hand_back):
                with pytest.raises(LeaseLostError):
                    await settle()
            message.receipt.mailbox = mailbox  # type: ignore[attr-defined]
            await message.acknowledge()

    async def test_leases_are_measured_by_the_servers_clock_alone(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(redis_url, sweep_seconds=0.02) as mailbox:
            await fill(mailbox, 2)
            held, delayed = await mailbox.receive(2, 60, 1)
            monkeypatch.setattr(time, "time", lambda: 9e9)
            await delayed.nack(60)
            assert not await mailbox.receive(2, 60, 0.2)
            await held.acknowledge()


class Fussy:
    """A pydantic-style type whose validation has a bug."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def fail(value: Any) -> Any:
            raise RuntimeError("unlucky")

        return core_schema.no_info_plain_validator_function(fail)
