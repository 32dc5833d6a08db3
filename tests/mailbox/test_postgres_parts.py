"""Parts of the mailbox on PostgreSQL that other mailboxes do not have, or do differently."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairtrial import ConfigurationError, EvalResult, TrialKey
from fairtrial.errors import BodyError, LeaseLostError, ReplyNotAvailableError
from fairtrial.fleet import Broker, EvalReply, PostgresBroker, connect_broker
from fairtrial.mailbox import ClaimCheck, InMemoryMailbox, MailboxDepth, PostgresConnection, ServerMailboxFactory
from fairtrial.mailbox.postgres import PostgresMailbox
from fairtrial.mailbox.postgres import statements as sql
from fairtrial.mailbox.postgres.connection import Rows
from fairtrial.mailbox.postgres.receive import Bigints, Byteas
from fairtrial.mailbox.postgres.statements import MAX_BYTES, MAX_OPERATIONS
from fairtrial.mailbox.protocol import Message
from tests.mailbox.ageing import age_rows


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()


async def test_a_reply_never_creates_a_mailbox(pg_url: str) -> None:
    async with PostgresMailbox("requests", int, pg_url) as requests:
        await requests.send(1, reply_to="nobody")
        (message,) = await requests.receive(1, 60, 1)
        with pytest.raises(ReplyNotAvailableError):
            await message.reply("hello")
        replies = requests.for_replies("replies", str, 60)
        async with replies:
            await requests.send(2, reply_to=replies)
            (second,) = await requests.receive(1, 60, 1)
            await second.reply("hello")
            (reply,) = await replies.receive(1, 60, 1)
            assert reply.body == "hello"
        with pytest.raises(ReplyNotAvailableError):  # Its owner has ended.
            await second.reply("too late")
        with pytest.raises(ConfigurationError, match="must be a mailbox on PostgreSQL"):
            await requests.send(3, reply_to=InMemoryMailbox("m", str))
    assert rows(pg_url, "SELECT name FROM mailbox_queues") == [("requests",)]
    factory = ServerMailboxFactory(PostgresMailbox, pg_url)
    with pytest.raises(ReplyNotAvailableError):
        await factory.create("new").send("x")
    await factory.close()


async def test_a_removal_and_a_send_exclude_each_other(pg_url: str) -> None:
    async with PostgresConnection(pg_url) as senders, PostgresConnection(pg_url) as owners:

        async def race(name: str) -> None:
            owner: PostgresMailbox[int] = PostgresMailbox(name, int, owners, ttl_seconds=60)
            sender: PostgresMailbox[int] = PostgresMailbox(name, int, senders, create=False)
            await owner.open()

            async def send() -> None:
                with contextlib.suppress(ReplyNotAvailableError):
                    for number in range(20):
                        await sender.send(number)

            await asyncio.gather(send(), send(), owner.close())

        for number in range(15):
            await race(f"replies{number}")
    assert rows(pg_url, "SELECT count(*) FROM mailbox_messages") == [(0,)]


async def test_a_send_holds_the_removal_of_its_mailbox_back(pg_url: str) -> None:
    async with PostgresMailbox("replies", int, pg_url, ttl_seconds=60) as mailbox:
        await mailbox.open()
        with psycopg.connect(pg_url) as sender:
            values = {"name": "replies", "kept": [False], "bodies": [b"x"], "addresses": [""]}
            sender.execute(sql.SEND, values)
            removal = asyncio.create_task(mailbox.close())
            await asyncio.sleep(0.2)
            assert not removal.done()
            sender.commit()
        await removal
    assert rows(pg_url, "SELECT count(*) FROM mailbox_messages") == [(0,)]


async def test_messages_that_an_interrupted_removal_left_are_removed_when_a_mailbox_is_opened(pg_url: str) -> None:
    async with PostgresMailbox("one", int, pg_url) as one, PostgresMailbox("other", int, pg_url) as other:
        for mailbox in (one, other):
            await mailbox.send_all([1, 2, 3])
            (message,) = await mailbox.receive(1, 60, 1)
            await message.dead_letter("no")
        assert rows(pg_url, "DELETE FROM mailbox_queues WHERE name = 'one' RETURNING name") == [("one",)]
        async with PostgresMailbox("third", int, pg_url) as third:
            await third.open()
        assert await other.depth() == MailboxDepth(waiting=2, delayed=0, in_flight=0, dead=1)
    assert rows(pg_url, "SELECT count(*) FROM mailbox_messages") == [(3,)]


async def test_statements_on_one_mailbox_do_not_read_the_messages_of_others(pg_url: str) -> None:
    """By their plans, which say the same on a busy machine."""
    async with PostgresMailbox("busy", int, pg_url) as busy, PostgresMailbox("small", int, pg_url) as small:
        await small.send_all([1, 2], reply_to="somewhere")
        queue = await busy.open()
        with psycopg.connect(pg_url, autocommit=True) as connection:
            connection.execute(
                "INSERT INTO mailbox_messages (queue, body, death, died_at) "
                "SELECT %s, repeat('x', 300)::bytea, CASE WHEN number %% 50 = 0 THEN number END, clock_timestamp() "
                "FROM generate_series(1, 20000) AS number",
                (queue,),
            )
            connection.execute("VACUUM ANALYZE mailbox_messages")
            statements: dict[str, dict[str, object]] = {
                "REMOVE_UNSETTLED": {"queues": [await small.open()], "most": 1000},
                "REMOVE_DEAD": {"queues": [await small.open()], "most": 1000},
                "REMOVE_OLD_LETTERS": {},
                "ABANDONED": {},
                "ASKED": {"name": "busy", "address": "nobody"},
                "REPLY_ADDRESSES": {"name": "busy"},
                "DEPTH": {"name": "busy"},
            }
            for name, values in statements.items():
                plan = [str(row[0]) for row in connection.execute("EXPLAIN " + getattr(sql, name), values).fetchall()]
                assert not [line for line in plan if "Seq Scan on mailbox_messages" in line], (name, plan)
            assert "Index Only Scan using mailbox_messages_due" in "".join(
                str(row[0]) for row in connection.execute("EXPLAIN " + sql.DEPTH, {"name": "busy"}).fetchall()
            )
        depth = await busy.depth()
        assert (depth.waiting, depth.dead) == (19_600, 400)


async def test_an_expired_mailbox_is_removed_with_its_messages(pg_url: str) -> None:
    async with PostgresMailbox("old", int, pg_url) as old, PostgresMailbox("kept", int, pg_url) as kept:
        await old.send(1)
        await kept.send(2)
        await old.expire(1000)
        await old.open(again=True)  # Opening it does not change when it ends.
        left = rows(pg_url, "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM mailbox_queues "
                            "WHERE name = 'old'")  # fmt: skip
        assert 900 < float(str(left[0][0])) <= 1000
        await old.expire(-1)
        factory = ServerMailboxFactory(PostgresMailbox, old.connection)
        with pytest.raises(ReplyNotAvailableError):  # Not yet removed, but over.
            await factory.create("old").send(3)
        async with PostgresMailbox("another", int, pg_url):
            assert not await old.exists()
        assert rows(pg_url, "SELECT count(*) FROM mailbox_messages") == [(1,)]
        assert await kept.approximate_count() == 1


async def test_dead_letters_are_kept_for_thirty_days(pg_url: str) -> None:
    async with PostgresMailbox("box", int, pg_url) as mailbox:
        await mailbox.send_all([1, 2])
        for message in await mailbox.receive(2, 60, 1):
            await message.dead_letter("no")
        rows(pg_url, "UPDATE mailbox_messages SET died_at = died_at - interval '31 days' WHERE id = 1 RETURNING id")
        async with PostgresMailbox("another", int, pg_url):
            assert [letter.message_id for letter in await mailbox.dead_letters.page()] == ["2"]


async def test_large_batches_are_split_and_every_sender_gets_its_own_id(mailbox_database: str) -> None:
    async with PostgresMailbox(f"large-{secrets.token_hex(4)}", str, mailbox_database) as mailbox:
        count = MAX_OPERATIONS + 7
        ids = await asyncio.gather(*(mailbox.send(str(number)) for number in range(count)))
        text = secrets.token_hex(MAX_BYTES // 10)
        ids += await asyncio.gather(*(mailbox.send(f"{number} {text}") for number in range(12)))
        ids += await mailbox.send_all([f"{number}" for number in range(count)])
        messages = await mailbox.receive(5000, 60, 1)
        assert {message.id: message.body.partition(" ")[0] for message in messages} == dict(
            zip(ids, [*map(str, range(count)), *map(str, range(12)), *map(str, range(count))], strict=True)
        )
        assert all(message.waited_seconds is not None and message.waited_seconds < 60 for message in messages)


async def test_claim_checks_keep_large_bodies_outside_the_database(pg_url: str, tmp_path: Path) -> None:
    check = ClaimCheck(tmp_path, threshold=1000)
    large = secrets.token_hex(5000)
    async with (
        PostgresMailbox("box", str, pg_url, claim_check=check) as mailbox,
        PostgresMailbox("box", str, pg_url) as without,
    ):
        await mailbox.send(large)
        ((size,),) = rows(pg_url, "SELECT length(body) FROM mailbox_messages")
        assert size == 64
        (message,) = await mailbox.receive(1, 60, 1)
        assert message.body == large
        await message.dead_letter("reason \0 with a NUL and \ud800")
        (letter,) = await mailbox.dead_letters.page()
        assert large in letter.text
        assert (await without.dead_letters.page())[0].text.startswith("sha256:")
        await mailbox.dead_letters.retry(letter.id)
        assert not await without.receive(1, 60, 0)
        (letter,) = await without.dead_letters.page()
        assert "claim check" in letter.reason
        with pytest.raises(BodyError):
            letter.body(str)


async def test_workers_are_listed_with_their_leases(pg_url: str) -> None:
    async with PostgresMailbox("box", int, pg_url) as mailbox, PostgresMailbox("box", int, pg_url) as other:
        await mailbox.send_all(range(5))
        await mailbox.announce("abc w1", "f" * 32, 15)
        await mailbox.receive(2, 60, 1)
        await other.receive(1, 30, 1)
        first, second = sorted(await other.workers(), key=lambda worker: worker.in_flight, reverse=True)
        assert (first.name, first.alive, first.in_flight) == ("w1", True, 2)
        assert 50 < first.leased_seconds <= 60
        assert (second.alive, second.in_flight) == (True, 1)
        assert await other.announced() == ["f" * 32]
        readers = await other.readers()
        assert [reader.in_flight for reader in readers.readers] in ([1, 2], [2, 1])
        assert readers.oldest_seconds is not None
        assert (await other.oldest_waiting_seconds() or -1) >= 0
        rows_before = rows(pg_url, "UPDATE mailbox_workers SET expires_at = clock_timestamp() - interval '1 second' "
                                   "RETURNING worker")  # fmt: skip
        assert rows_before == [("abc w1",)]
        lost = next(worker for worker in await other.workers() if worker.name == "w1")
        assert not lost.alive
        assert await other.announced() == []
        await mailbox.announce("abc w1", "f" * 32, 0)
        assert all(worker.name != "w1" for worker in await other.workers())
        assert await mailbox.reply_addresses() == {}


async def test_requests_are_purged_by_reply_address(pg_url: str) -> None:
    async with PostgresMailbox("box", int, pg_url) as mailbox:
        await mailbox.send_all(range(3), reply_to="here")
        await mailbox.send_all(range(2), reply_to="there")
        assert await mailbox.reply_addresses() == {"here": 3, "there": 2}
        assert await mailbox.asked_from("there")
        assert await mailbox.purge_replies(["there", "nowhere"]) == 2
        assert not await mailbox.asked_from("there")
        assert await mailbox.approximate_count() == 3


async def test_the_results_of_a_run_do_not_stay_forever(pg_url: str) -> None:
    broker: Broker = connect_broker(pg_url)
    assert isinstance(broker, PostgresBroker)
    assert "password" not in repr(broker)
    results = await broker.results("suite", "run")
    await results.send(EvalReply(EvalResult(key=TrialKey("run", "baseline", "s"), ordinal=0, outcome="timeout")))
    await (await broker.requests("a suite")).send(None)  # type: ignore[arg-type]
    seconds = "SELECT round(extract(epoch FROM expires_at - clock_timestamp()) / 3600)::integer FROM mailbox_queues"
    assert rows(pg_url, f"{seconds} WHERE name = 'suite.results.run'") == [(30 * 24,)]
    assert await broker.has_mailbox("suite.results.run")
    assert not await broker.has_mailbox("suite.results.other")
    assert len(await broker.suites()) == 1
    await broker.retire(results)
    assert rows(pg_url, f"{seconds} WHERE name = 'suite.results.run'") == [(1,)]
    assert rows(pg_url, "SELECT count(*) FROM mailbox_messages") == [(1,)]
    await broker.close()


async def test_space_of_settled_messages_is_used_again_unless_an_old_snapshot_is_open_in_the_database(
    pg_url: str, mailbox_database: str
) -> None:
    """The advice of the documentation: a table that is vacuumed does not grow; snapshots elsewhere do no harm."""
    async with PostgresMailbox("box", str, pg_url) as mailbox:

        async def pass_messages() -> int:
            await mailbox.send_all(["x" * 500] * 1500)
            assert all(await mailbox.acknowledge_all(await mailbox.receive(1500, 60, 1)))
            with psycopg.connect(pg_url, autocommit=True) as admin:
                admin.execute("VACUUM mailbox_messages")
            ((size,),) = rows(pg_url, "SELECT pg_relation_size('mailbox_messages') + 8192")
            return int(str(size))

        def hold(url: str) -> psycopg.Connection[tuple[object, ...]]:
            held = psycopg.connect(url)
            held.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            held.execute("SELECT count(*) FROM pg_class")
            return held

        with hold(mailbox_database):
            elsewhere = [await pass_messages() for _ in range(3)]
        with hold(pg_url):
            here = [await pass_messages() for _ in range(3)]
        assert elsewhere[-1] < 500_000  # Vacuuming returned the space.
        assert here[-1] - here[0] > 1_500_000, (elsewhere, here)
        ((settings,),) = rows(pg_url, "SELECT reloptions FROM pg_class WHERE relname = 'mailbox_messages'")
        assert {"autovacuum_vacuum_scale_factor=0.01", "autovacuum_vacuum_cost_delay=0"} <= set(settings)  # type: ignore[call-overload]


async def test_an_expired_lease_cannot_be_used(mailbox_database: str) -> None:
    """Not even before somebody else has received the message: the server's clock decides."""
    async with PostgresMailbox(f"late-{secrets.token_hex(4)}", int, mailbox_database) as mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 60, 1)
        await age_rows(mailbox, 61)
        for settle in (message.acknowledge, message.nack, partial(message.extend_visibility, 60)):
            with pytest.raises(LeaseLostError):
                await settle()
        assert list(await asyncio.to_thread(mailbox.renew, [message.receipt], 60.0)) == [False]  # type: ignore[list-item]
        assert (await mailbox.receive(1, 60, 0))[0].expiries == 1


async def test_a_receive_after_one_that_took_everything_waits_without_a_look(
    mailbox_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PostgresMailbox("m", int, mailbox_database) as mailbox:
        connection, claims, looks = mailbox.connection, 0, 0

        async def counted(doing: str, statement: str, parameters: Mapping[str, Any]) -> Rows:
            nonlocal claims, looks
            claims += statement == sql.CLAIM
            looks += statement == sql.NEXT_DUE
            return await run(doing, statement, parameters)

        run = connection.run
        monkeypatch.setattr(connection, "run", counted)
        channel = f"{sql.CHANNEL}{await mailbox.open()}"
        assert await mailbox.receive(5, 60, 0.2) == []
        async with asyncio.timeout(10):
            while not connection.listener.listens(channel):
                await mailbox.receive(5, 60, 0.02)
        begun, number = claims, 8
        taken: list[Message[int]] = []
        for sent in range(number):
            waiting = asyncio.create_task(mailbox.receive(5, 60, 20))
            await asyncio.sleep(0.01)
            await mailbox.send(sent)
            taken += await waiting
        assert [message.body for message in taken] == list(range(number))
        # One for each notification; with a look before each wait they would be twice as many.
        assert claims - begun <= number + 3

        begun = claims
        assert await mailbox.receive(5, 60, 0) == []
        assert claims == begun + 1  # Without a wait, what is there is taken.
        await taken[0].nack(0.3)  # It becomes due without a notification at that time.
        (again,) = await mailbox.receive(5, 60, 20)
        assert (again.id, again.delivery_count) == (taken[0].id, 2)

        await mailbox.receive(5, 60, 0)
        for message in (again, *taken[1:]):
            await message.nack(1.0)
        assert await mailbox.receive(5, 60, 0.1) == []
        await asyncio.sleep(1.1)
        begun, looks = claims, 0
        for _ in range(number):
            (message,) = await mailbox.receive(1, 60, 20)
            assert message.delivery_count > 1
        # Of many that became due at once, only the first one is waited for.
        assert (looks, claims - begun) == (1, number)


async def test_a_send_wakes_a_waiting_process_at_once(mailbox_database: str) -> None:
    name = f"wake-{secrets.token_hex(4)}"
    async with PostgresMailbox(name, int, mailbox_database) as mailbox:
        took = []
        async with PostgresConnection(mailbox_database) as other:
            sender: PostgresMailbox[int] = PostgresMailbox(name, int, other)
            loop = asyncio.get_running_loop()
            for number in range(5):
                waiting = asyncio.create_task(mailbox.receive(1, 60, 30))
                await asyncio.sleep(0.3)  # Past the first looks: from here on, only a notification ends the wait early.
                began = loop.time()
                await sender.send(number)
                (message,) = await waiting
                took.append(loop.time() - began)
                await message.acknowledge()
        # Without notifications the wait between two looks grows to 0.25 s; while listening it is up to 10 s.
        assert sorted(took)[len(took) // 2] < 0.1, took


@pytest.mark.parametrize(
    ("ours", "kind"),
    [
        (Bigints([0, -1, 2**62, -(2**63), 2**63 - 1]), "bigint"),
        (Bigints([7]), "bigint"),
        (Byteas([b"", b"\0\xff", b"{}" * 5_000]), "bytea"),
    ],
)
def test_arrays_arrive_as_those_of_psycopg_do(pg_url: str, ours: Bigints | Byteas, kind: str) -> None:
    with psycopg.connect(pg_url) as connection:
        query = f"SELECT %(ours)b::{kind}[], %(ours)b::{kind}[] = %(theirs)b::{kind}[]"
        values = {"ours": ours, "theirs": list(ours)}
        ((found, equal),) = connection.execute(query.encode(), values, binary=True).fetchall()
    assert (found, equal) == (list(ours), True)
