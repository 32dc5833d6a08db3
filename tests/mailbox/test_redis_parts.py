"""Parts of the Redis mailbox, in states that a real server cannot be brought into."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions as theirs

from fairtrial.errors import (
    ConfigurationError,
    MailboxAccessError,
    MailboxClosedError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
)
from fairtrial.mailbox import ClaimCheck, InMemoryMailbox, RedisConnection, RedisMailbox
from fairtrial.mailbox.batcher import Batcher, OpenBatch
from fairtrial.mailbox.redis.receive import Consumers
from fairtrial.mailbox.redis.topology import is_gone, translated


class TestErrors:
    pytestmark = pytest.mark.proves("R72")

    @pytest.mark.parametrize(
        ("theirs_", "ours"),
        [
            (theirs.ConnectionError("x"), MailboxConnectionError),
            (theirs.TimeoutError("x"), MailboxConnectionError),
            (theirs.BusyLoadingError("x"), MailboxConnectionError),
            (theirs.ReadOnlyError("x"), MailboxConnectionError),
            (OSError("x"), MailboxConnectionError),
            (theirs.ResponseError("MISCONF cannot write"), MailboxConnectionError),
            (theirs.ResponseError("LOADING"), MailboxConnectionError),
            (theirs.AuthenticationError("x"), MailboxAccessError),
            (theirs.ResponseError("NOPERM this user"), MailboxAccessError),
            (theirs.OutOfMemoryError("x"), MailboxFullError),
            (theirs.ResponseError("OOM command not allowed"), MailboxFullError),
            (theirs.ResponseError("ERR what"), MailboxError),
            (MailboxClosedError("x"), MailboxClosedError),
        ],
    )
    def test_every_error_of_theirs_is_one_of_ours(self, theirs_: Exception, ours: type[MailboxError]) -> None:
        assert type(translated(theirs_, "doing")) is ours

    def test_errors_of_a_missing_stream_are_recognised(self) -> None:
        for text in ("NOGROUP No such key 'x'", "UNBLOCKED the stream key no longer exists", "ERR no such key"):
            assert is_gone(theirs.ResponseError(text))
        assert not is_gone(theirs.ResponseError("WRONGTYPE"))


class TestBatcher:
    async def test_an_unexpected_failure_reaches_all_waiting_callers(self) -> None:
        async def run(batches: Sequence[OpenBatch]) -> list[Any]:
            raise LookupError("a bug")

        batcher = Batcher("Redis", run, 200, 1000)
        futures = [batcher.submit("k", number) for number in range(300)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {MailboxConnectionError}  # What is retried.
        assert "a bug" in str(outcomes[0])

    async def test_operations_are_batched_while_an_earlier_pipeline_is_running(self) -> None:
        sizes: list[int] = []
        gate = asyncio.Event()

        async def run(batches: Sequence[OpenBatch]) -> list[Any]:
            sizes.append(sum(len(batch.items) for batch in batches))
            await gate.wait()
            return [[b"1-0"] * len(batch.items) for batch in batches]

        batcher = Batcher("Redis", run, 200, 1000)
        first = batcher.submit("k", b"x", 1)
        await asyncio.sleep(0.01)
        rest = [batcher.submit("k", b"x", 1) for _ in range(50)]
        gate.set()
        await asyncio.gather(first, *rest)
        assert sizes == [1, 50]
        await batcher.close()
        with pytest.raises(MailboxClosedError):
            batcher.submit("k", 1)

    async def test_a_cancelled_sender_leaves_nobody_waiting(self) -> None:
        async def run(batches: Sequence[OpenBatch]) -> list[Any]:
            await asyncio.sleep(60)
            return []

        batcher = Batcher("Redis", run, 200, 1000)
        future = batcher.submit("k", 1)
        await asyncio.sleep(0)
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "fairtrial mailbox operations"]
        task.cancel()
        with pytest.raises(MailboxClosedError):
            await future


class TestConsumers:
    def test_leases_of_any_length_need_few_names(self) -> None:
        consumers = Consumers("t")
        reading = consumers.reading(60)
        assert reading == "t/60000"
        assert consumers.extended(60) == ("t/60000", 0)
        for tenths in range(1, 36_000):
            name, idle = consumers.extended(tenths / 10)
            assert int(name.rpartition("/")[2]) - idle == tenths * 100
        assert len(consumers.names()) < 25


class TestServers:
    async def test_a_server_that_is_too_old_is_refused(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async def old(*args: Any) -> Any:  # One of the nodes.
            return [{"redis_version": "7.2.4"}, {"redis_version": "6.2.14"}]

        async with RedisConnection(redis_url) as connection:
            monkeypatch.setattr(connection, "command_everywhere", old)
            with pytest.raises(ConfigurationError, match=r"7\.0"):
                await RedisMailbox("old", int, connection).open()

    async def test_a_closed_connection_says_so_everywhere(self, redis_url: str) -> None:
        connection = RedisConnection(redis_url)
        mailbox = RedisMailbox("closed", int, connection)
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 60, 1)
        await connection.close()
        await connection.close()
        with pytest.raises(MailboxClosedError):
            await message.acknowledge()
        with pytest.raises(MailboxClosedError):
            message.receipt.renewer.renew([message.receipt], 60)
        with pytest.raises(MailboxClosedError):
            await mailbox.receive(1, 60, 0)
        await mailbox.close()

    async def test_a_page_of_nothing_is_refused(self, redis_url: str) -> None:
        async with RedisMailbox("page", int, redis_url) as mailbox:
            with pytest.raises(ConfigurationError):
                await mailbox.dead_letters.page(limit=0)
            assert await mailbox.dead_letters.retry() == 0
            assert await mailbox.dead_letters.drop() == 0


class TestClosingAndCancelling:
    async def test_closing_ends_waits_at_once_and_strands_nothing(self, redis_url: str) -> None:
        async with RedisMailbox("c", int, redis_url, sweep_seconds=None) as other:
            mailbox = RedisMailbox("c", int, redis_url)
            waiting = [asyncio.create_task(mailbox.receive(1, 600, 20)) for _ in range(5)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(3):
                await asyncio.gather(mailbox.close(), *(other.send(number) for number in range(3)))
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            got = [message for outcome in outcomes if not isinstance(outcome, BaseException) for message in outcome]
            rest = await other.receive(5, 60, 0)
            assert len(got) + len(rest) == 3
            assert all(message.delivery_count == 1 for message in rest)
            assert sum(isinstance(outcome, MailboxClosedError) for outcome in outcomes) == 5 - len(got)

    async def test_every_waiting_receive_ends_when_the_mailbox_is_closed_at_any_time(self, redis_url: str) -> None:
        for step in range(30):
            mailbox = RedisMailbox("moment", int, redis_url)
            waiting = [asyncio.create_task(mailbox.receive(1, 600, 20)) for _ in range(3)]
            await asyncio.sleep(0.0005 * step)
            await mailbox.close()
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [MailboxClosedError] * 3

    async def test_a_receive_cancelled_while_it_fetches_a_body_hands_everything_back(
        self, redis_url: str, tmp_path: Path
    ) -> None:
        fetching = asyncio.Event()

        class Slow(ClaimCheck):
            async def fetch(self, sha256: str) -> bytes:
                fetching.set()
                await asyncio.sleep(60)
                raise AssertionError

        async with RedisMailbox("f", str, redis_url, claim_check=ClaimCheck(tmp_path, threshold=50)) as other:
            await other.send("small")
            await other.send("large" * 20)
            mailbox = RedisMailbox("f", str, redis_url, claim_check=Slow(tmp_path, threshold=50))
            reading = asyncio.create_task(mailbox.receive(2, 600, 5))
            await fetching.wait()
            reading.cancel()
            await asyncio.wait([reading])
            await mailbox.close()
            again = await other.receive(2, 60, 0)
            assert {message.body for message in again} == {"small", "large" * 20}
            assert {message.delivery_count for message in again} == {1}

    async def test_a_bad_body_that_cannot_be_dead_lettered_does_not_affect_others(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def fail(*args: Any) -> None:
            raise MailboxConnectionError("away")

        async with RedisMailbox("bad", int, redis_url) as mailbox:
            await mailbox.connection.command("XADD", mailbox.keys.stream, "*", "b", "junk")
            await mailbox.send(1)
            monkeypatch.setattr("fairtrial.mailbox.redis.receive.RedisReceipt.dead_letter", fail)
            (message,) = await mailbox.receive(2, 60, 1)
            assert message.body == 1
            assert "could not be dead-lettered" in caplog.text


class TestReaders:
    async def test_a_mailbox_knows_who_receives_from_it_and_how_old_its_oldest_work_is(self, redis_url: str) -> None:
        async with RedisMailbox("work", int, redis_url) as one, RedisMailbox("work", int, redis_url) as two:
            assert (await one.readers()) == await two.readers()
            assert (await one.readers()).oldest_seconds is None
            for number in range(5):
                await one.send(number)
            await one.receive(2, 30, 0)
            await one.receive(1, 60, 0)  # A lease of another length is the same reader.
            await two.receive(2, 30, 0)
            found = await two.readers()
        assert sorted(reader.in_flight for reader in found.readers) == [2, 3]
        assert all(reader.idle_seconds < 60 for reader in found.readers)
        assert found.oldest_seconds is not None
        assert 0 <= found.oldest_seconds < 60

    async def test_a_worker_is_lost_when_its_announcement_has_expired(self, redis_url: str) -> None:
        async with RedisMailbox("work", int, redis_url) as one, RedisMailbox("work", int, redis_url) as two:
            await one.announce("id-1 w1", "", 0.001)
            await two.announce("id-2 w2", "", 15)
            for number in range(3):
                await one.send(number)
            await one.receive(2, 40, 0)
            await two.receive(1, 40, 0)
            await asyncio.sleep(0.01)
            alive, lost = await two.workers()
            assert (alive.name, alive.alive, alive.in_flight) == ("w2", True, 1)
            assert (lost.name, lost.alive, lost.in_flight) == ("w1", False, 2)
            assert 0 < lost.leased_seconds <= 40
            assert lost.silent_seconds < 15
            assert await two.announced() == [""]

    async def test_a_worker_that_withdrew_its_announcement_is_not_lost(self, redis_url: str) -> None:
        async with RedisMailbox("work", int, redis_url) as one:
            await one.announce("id-1 w1", "", 15)
            assert [worker.name for worker in await one.workers()] == ["w1"]
            await one.announce("id-1 w1", "", 0)
            assert await one.workers() == []

    async def test_a_mailbox_that_was_never_created_has_no_readers(self, redis_url: str) -> None:
        mailbox = RedisMailbox("nowhere", int, redis_url)
        assert (await mailbox.readers()).readers == ()
        await mailbox.close()


async def test_a_mailbox_elsewhere_is_refused_for_replies_also_after_a_reply(redis_url: str) -> None:
    async with (
        RedisMailbox("requests", int, redis_url) as requests,
        RedisMailbox("answers", str, redis_url) as answers,
        InMemoryMailbox("elsewhere", str) as elsewhere,
    ):
        await requests.send(1, reply_to=answers)
        (message,) = await requests.receive(1, 60, 1)
        await message.reply("hello")
        with pytest.raises(ConfigurationError, match="must be a mailbox on Redis"):
            await requests.send(2, reply_to=elsewhere)


async def test_many_messages_come_in_order_with_their_identities(redis_url: str, tmp_path: Path) -> None:
    check = ClaimCheck(tmp_path, threshold=2_000)
    bodies = ["a", "\n, ;", "x" * 3_000, "\u00e9 1-1,2;"]
    async with RedisMailbox("both", str, redis_url, claim_check=check, sweep_seconds=None) as mailbox:
        ids = await mailbox.send_all(bodies * 2, reply_to="replies")
        read = await mailbox.receive(2, 60, 1)
        for message in read:
            await message.nack()  # Added again, with its identity and a count.
        both = [*await mailbox.receive(3, 60, 0), *await mailbox.receive(100, 60, 1)]
        assert [(message.id, message.body) for message in both] == [
            *zip(ids[2:], (bodies * 2)[2:], strict=True),
            *zip(ids[:2], bodies[:2], strict=True),
        ]
        assert [message.delivery_count for message in both] == [1] * 6 + [2] * 2
        assert {message.reply_to for message in both} == {"replies"}
        assert await mailbox.acknowledge_all([*both, both[0]]) == [True] * 8 + [False]
        assert await mailbox.approximate_count() == 0
