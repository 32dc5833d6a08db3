"""What is special about SQS: old receipts, 12 hours, sizes, batches, characters, a server that pauses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairtrial import ConfigurationError
from fairtrial.errors import (
    BodyError,
    LeaseLostError,
    MailboxAccessError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    MessageTooLargeError,
    ReplyNotAvailableError,
)
from fairtrial.mailbox import S3ClaimCheck, SqsAddress, SqsConnection, SqsMailbox, acknowledge_all, send_all
from fairtrial.mailbox.sqs.connection import RequestBatcher, entry_error
from fairtrial.mailbox.sqs.mailbox import MAX_BODY_BYTES
from fairtrial.mailbox.sqs.queues import (
    EXPIRES_TAG,
    MAILBOX_TAG,
    OWNER_TAG,
    WireMessage,
    delete_abandoned,
    queue_name,
    tags_of,
)
from tests.mailbox.ageing import ShiftedClock
from tests.sqs_server import CREDENTIALS, SqsServer

pytestmark = pytest.mark.proves("R70")


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def connection(sqs_url: str, clock: ShiftedClock) -> AsyncIterator[SqsConnection]:
    async with SqsConnection(sqs_url, clock=clock) as connection:
        yield connection


@pytest.fixture
async def mailbox(connection: SqsConnection) -> AsyncIterator[SqsMailbox[Any]]:
    async with SqsMailbox("box", object, connection) as mailbox:
        yield mailbox


async def test_a_receipt_of_an_expired_lease_is_refused_by_our_own_clock(
    mailbox: SqsMailbox[Any], sqs_server: SqsServer, clock: ShiftedClock
) -> None:
    await mailbox.send(1)
    (stale,) = await mailbox.receive(1, 30, 1)
    sqs_server.pass_time(31)
    clock.ahead += 31
    before = mailbox.connection.requests.total()
    for settle in (stale.acknowledge, stale.nack, stale.hand_back):
        with pytest.raises(LeaseLostError):
            await settle()
    assert mailbox.connection.requests.total() == before  # SQS was not asked: it would have accepted the receipt.
    (fresh,) = await mailbox.receive(1, 30, 1)
    assert (fresh.delivery_count, fresh.expiries) == (2, 1)


async def test_a_lease_lasts_at_most_twelve_hours_however_often_it_is_renewed(
    mailbox: SqsMailbox[Any], sqs_server: SqsServer, clock: ShiftedClock
) -> None:
    for seconds in (43_201, 86_400):
        with pytest.raises(ConfigurationError, match="12 hours"):
            await mailbox.receive(1, seconds, 0)
    await mailbox.send(1)
    (message,) = await mailbox.receive(1, 43_200, 1)
    with pytest.raises(ConfigurationError, match="12 hours"):
        await message.extend_visibility(43_201)
    receipt = message.receipt
    for hours, kept in ((6, True), (5.99, True), (0.1, False)):
        sqs_server.pass_time(hours * 3600)
        clock.ahead += hours * 3600
        assert list(await asyncio.to_thread(receipt.renewer.renew, [receipt], 43_200)) == [kept]
    with pytest.raises(LeaseLostError):
        await message.acknowledge()


async def test_a_delay_over_fifteen_minutes_is_kept(
    mailbox: SqsMailbox[Any], sqs_server: SqsServer, clock: ShiftedClock
) -> None:
    await mailbox.send("later")
    (message,) = await mailbox.receive(1, 30, 1)
    await message.nack(3 * 3600)
    for minutes in (16, 16, 60, 60):
        assert not await mailbox.receive(1, 30, 0)
        assert (await mailbox.depth()).delayed == 1
        sqs_server.pass_time(minutes * 60)
        clock.ahead += minutes * 60
    assert not await mailbox.receive(1, 30, 0)
    sqs_server.pass_time(1800)
    clock.ahead += 1800
    (again,) = await mailbox.receive(1, 30, 1)
    assert (again.body, again.delivery_count, again.expiries) == ("later", 2, 0)


@pytest.mark.parametrize(
    "text", ["\x00", "\x0b\x1f", "\ufffe\uffff", "\ud800", "\r\n\t", "\U0001f600", "é" * 5000, "]]>&<"],
    ids=["nul", "control", "noncharacters", "surrogate", "lines", "emoji", "compressed", "xml"],
)  # fmt: skip
async def test_every_character_arrives(mailbox: SqsMailbox[Any], text: str) -> None:
    await mailbox.send({"text": text})
    (message,) = await mailbox.receive(1, 30, 1)
    assert message.body == {"text": text}
    await message.nack()  # The copy is sent from what was received.
    (message,) = await mailbox.receive(1, 30, 1)
    assert message.body == {"text": text}
    await message.dead_letter(f"reason {text}", error=text)
    (letter,) = await mailbox.dead_letters.page()
    assert letter.body(object) == {"text": text}


async def test_the_largest_body_passes_and_a_larger_one_is_refused(mailbox: SqsMailbox[Any]) -> None:
    def body(size: int) -> str:
        return secrets.token_urlsafe(size)[: size - 2]  # Random text, and two quotes: it compresses to about 3/4.

    largest = MAX_BODY_BYTES
    await mailbox.send(body(largest))
    (message,) = await mailbox.receive(1, 30, 5)
    assert len(message.body) == largest - 2
    await message.dead_letter("large")
    (letter,) = await mailbox.dead_letters.page()
    assert len(letter.text) == largest
    with pytest.raises(MessageTooLargeError, match="bucket"):
        await mailbox.send(secrets.token_hex(2 * largest))
    assert await mailbox.approximate_count() == 0


async def test_a_batch_of_large_messages_is_split_by_its_size(mailbox: SqsMailbox[Any]) -> None:
    texts = [secrets.token_hex(150_000) for _ in range(12)]
    await send_all(mailbox, texts)
    assert mailbox.connection.requests["send_message_batch"] >= 3
    got = await mailbox.receive(20, 60, 5)
    assert {message.body for message in got} == set(texts)


async def test_large_bodies_are_kept_in_s3(sqs_url: str, sqs_server: SqsServer) -> None:
    s3 = sqs_server.client("s3")
    bucket = f"bodies-{secrets.token_hex(4)}"
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    async with SqsConnection(f"{sqs_url}&bucket={bucket}") as connection, SqsMailbox("b", str, connection) as mailbox:
        text = secrets.token_hex(3_000_000)
        await send_all(mailbox, [text, "small"])
        (stored,) = s3.list_objects_v2(Bucket=bucket)["Contents"]
        got = {message.body: message for message in await mailbox.receive(2, 60, 5)}
        assert set(got) == {text, "small"}
        await got[text].nack()
        await got["small"].acknowledge()
        (again,) = await mailbox.receive(1, 60, 5)
        assert again.body == text
        s3.put_object(Bucket=bucket, Key=stored["Key"], Body=b"something else")
        await again.nack()
        assert not await mailbox.receive(1, 60, 1)
        (letter,) = await mailbox.dead_letters.page()
        assert "damaged" in letter.reason
        s3.delete_object(Bucket=bucket, Key=stored["Key"])
        await mailbox.dead_letters.retry(letter.id)
        assert not await mailbox.receive(1, 60, 1)
        (letter,) = await mailbox.dead_letters.page()
        assert "is not in bucket" in letter.reason
        check = mailbox.claim_check
        assert isinstance(check, S3ClaimCheck)
        with pytest.raises(BodyError):
            await check.fetch("../../etc/passwd")


async def test_the_other_entries_of_a_batch_succeed_when_one_fails(
    mailbox: SqsMailbox[Any], sqs_server: SqsServer
) -> None:
    await send_all(mailbox, list(range(10)))
    messages = await mailbox.receive(10, 60, 1)
    spoiled: Any = messages[3].receipt
    spoiled.handle = "no-such-receipt"
    requests = mailbox.connection.requests
    before = requests["delete_message_batch"]
    assert await acknowledge_all(mailbox, messages) == [at != 3 for at in range(10)]
    assert requests["delete_message_batch"] == before + 1
    assert await mailbox.approximate_count() == 1


async def test_failures_of_single_entries_are_told_apart() -> None:
    outcomes = {
        "0": {"Id": "0", "Code": "InternalError", "Message": "try again", "SenderFault": False},
        "1": {"Id": "1", "Code": "AWS.SimpleQueueService.ReceiptHandleIsInvalid", "SenderFault": True},
        "2": {"Id": "2", "Code": "AccessDenied", "Message": "no", "SenderFault": True},
    }

    async def run(operation: str, url: str, entries: list[dict[str, Any]], size: int) -> Any:
        return {"Failed": list(outcomes.values()), "Successful": [{"Id": "3"}]}

    batcher = RequestBatcher(run, 0)
    futures = [batcher.submit("delete_message_batch", "queue", {}) for _ in range(5)]
    failures = [await future for future in futures[:4]]
    kinds = [entry_error(failure, "testing").__class__ for failure in failures if failure is not None]
    assert kinds == [MailboxConnectionError, LeaseLostError, MailboxAccessError]
    assert failures[3] is None
    with pytest.raises(MailboxConnectionError, match="did not confirm"):
        await futures[4]
    assert isinstance(entry_error({"Code": "OverLimit"}, "receiving"), MailboxFullError)


async def test_entries_wait_for_others_and_leave_in_full_batches() -> None:
    sent: list[int] = []
    running = asyncio.Event()

    async def run(operation: str, url: str, entries: list[dict[str, Any]], size: int) -> Any:
        sent.append(len(entries))
        await running.wait()
        return {"Successful": [{"Id": entry["Id"]} for entry in entries]}

    batcher = RequestBatcher(run, 60)  # It would linger for a minute.
    futures = [batcher.submit("send_message_batch", "queue", {}, 1) for _ in range(25)]
    await asyncio.sleep(0.01)
    assert sent == [10, 10]
    running.set()
    await asyncio.gather(*futures[:20])
    assert sent == [10, 10]
    await batcher.close()
    assert sent == [10, 10, 5]
    assert await asyncio.gather(*futures) == [None] * 25


@pytest.mark.long
@pytest.mark.usefixtures("sqs_url")
async def test_a_paused_server_loses_nothing_and_errors_can_be_retried() -> None:
    with SqsServer() as server:
        async with (
            SqsConnection(server.url(poll=1, linger=0), timeout_seconds=8) as connection,
            SqsMailbox("box", int, connection) as mailbox,
        ):
            await send_all(mailbox, [1, 2, 4])
            (first, second, third) = sorted(await mailbox.receive(3, 300, 1), key=lambda message: int(message.body))
            server.pause()
            try:
                renewing = asyncio.to_thread(third.receipt.renewer.renew, [third.receipt], 60)
                calls = (mailbox.send(3), first.acknowledge(), second.nack(), mailbox.depth(), renewing)
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert [type(outcome) for outcome in outcomes] == [MailboxConnectionError] * 5
                assert not first.settled
            finally:
                server.resume()
            try:
                await first.acknowledge()
            except LeaseLostError:
                pass  # The first attempt arrived after all.
            await second.nack()
            found = [await mailbox.receive(10, 300, 1) for _ in range(3)]
            # A send that raised may have arrived, also that of the copy of a nack.
            bodies = {message.body for part in found for message in part}
            assert {2} <= bodies <= {2, 3}


async def test_a_foreign_message_becomes_a_dead_letter(mailbox: SqsMailbox[Any], sqs_server: SqsServer) -> None:
    client = sqs_server.client()
    forged = WireMessage("{}", id="0" * 32).dumps().replace('"id"', '"deliveries":-1,"id"')
    for text in ("hello", "{}\nx", '{"id":7}\nx', f'{{"id":"{"0" * 32}","form":"x"}}\nx', "[" * 1_000_000, forged):
        client.send_message(QueueUrl=mailbox.queues.urls[0], MessageBody=text)
    await mailbox.send("ours")
    (ours,) = await mailbox.receive(10, 30, 2)
    assert ours.body == "ours"
    letters = await mailbox.dead_letters.page()
    assert len(letters) == 6
    assert all("not sent by a mailbox" in letter.reason for letter in letters)
    assert "hello" in {letter.text for letter in letters}


async def test_a_reply_never_creates_a_queue(mailbox: SqsMailbox[Any], connection: SqsConnection) -> None:
    await mailbox.send(1, reply_to="nobody")
    (message,) = await mailbox.receive(1, 30, 1)
    with pytest.raises(ReplyNotAvailableError):
        await message.reply("hello")
    async with SqsMailbox("replies", str, connection, ttl_seconds=60) as replies:
        await mailbox.send(2, reply_to=replies)
        (asked,) = await mailbox.receive(1, 30, 1)
        await asked.reply("two")
        (reply,) = await replies.receive(1, 30, 1)
        assert reply.body == "two"
        url = replies.queues.urls[0]
        tags = await tags_of(connection, url)
        assert tags[MAILBOX_TAG] == "replies"
        assert tags[OWNER_TAG]
        assert int(tags[EXPIRES_TAG]) > 0
    with pytest.raises(ReplyNotAvailableError):
        await asked.reply("too late")


async def test_the_sweeper_deletes_queues_whose_owner_is_gone_and_no_others(
    connection: SqsConnection, mailbox: SqsMailbox[Any], clock: ShiftedClock, sqs_server: SqsServer
) -> None:
    killed = SqsMailbox("killed", str, connection, ttl_seconds=600)
    alive = SqsMailbox("alive", str, connection, ttl_seconds=6000)
    await killed.open()
    await alive.open()
    foreign = sqs_server.client().create_queue(QueueName="of-somebody-else", tags={EXPIRES_TAG: "1"})["QueueUrl"]
    assert await delete_abandoned(connection) == 0
    clock.ahead += 700
    assert await delete_abandoned(connection) == 1
    assert [await box.exists() for box in (killed, alive, mailbox)] == [False, True, True]
    assert await tags_of(connection, foreign)
    await alive.close()
    assert not await SqsMailbox("alive", str, connection).exists()
    await killed.close()


async def test_a_queue_that_was_deleted_is_created_again(mailbox: SqsMailbox[Any], sqs_server: SqsServer) -> None:
    sqs_server.client().delete_queue(QueueUrl=mailbox.queues.urls[0])
    with pytest.raises(MailboxConnectionError, match="retry"):
        await mailbox.send(1)
    await mailbox.send(2)
    sqs_server.client().delete_queue(QueueUrl=mailbox.queues.urls[0])
    assert not await mailbox.receive(1, 30, 1)
    await mailbox.send(3)
    (message,) = await mailbox.receive(1, 30, 1)
    assert message.body == 3


async def test_clients_with_fewer_shards_learn_of_the_others(sqs_url: str, clock: ShiftedClock) -> None:
    async with (
        SqsConnection(sqs_url, clock=clock) as one,
        SqsConnection(f"{sqs_url}&shards=3", clock=clock) as three,
        SqsMailbox("box", int, one) as worker,
        SqsMailbox("box", int, three) as client,
    ):
        await send_all(client, list(range(60)))
        got = [message.body for message in await worker.receive(100, 60, 1)]
        assert 0 < len(got) < 60
        clock.ahead += 61  # Receivers look for new shards once a minute.
        while more := await worker.receive(100, 600, 1):
            got += [message.body for message in more]
        assert set(got) == set(range(60))


@pytest.mark.parametrize("name", ["a", "a.b:c", "x" * 200, "a-b.c", "a.b-c"])
def test_names_of_queues_are_valid_and_differ(name: str) -> None:
    made = {queue_name("p" * 20, name, 63), queue_name("p" * 20, name + "!"), f"{queue_name('p' * 20, name)}-dead"}
    assert len(made) == 3
    for queue in made:
        assert len(queue) <= 80
        assert set(queue) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@pytest.mark.parametrize(
    "url",
    [
        "sqs://", "sqs:///prefix", "sqs://key:secret@eu-central-1/p", "sqs://eu-central-1/a/b", "sqs://eu-central-1/ä",
        "sqs://eu-central-1/p?shards=0", "sqs://eu-central-1/p?shards=x", "sqs://eu-central-1/p?poll=21",
        "sqs://eu-central-1/p?linger=9", "sqs://eu-central-1/p?bucket=A", "sqs://eu-central-1/p?unknown=1",
        "sqs://eu-central-1/p?endpoint=ftp://x", "sqs://eu-central-1/p?endpoint=http://a:s3cret@x",
        "sqs://eu-central-1/p?endpoint=http://x:99999", "sqs://eu-central-1/p?a",
    ],
)  # fmt: skip
def test_invalid_addresses_are_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        SqsAddress.parse(url)
    assert "secret" not in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_addresses_are_read() -> None:
    address = SqsAddress.parse(
        "sqs://us-east-1/evals?endpoint=http%3A%2F%2F127.0.0.1%3A4566&bucket=big-bodies&shards=4&poll=20&linger=0.05&lag=5"
    )
    assert address == SqsAddress("us-east-1", "evals", "http://127.0.0.1:4566", "big-bodies", 4, 20, 0.05, 5.0)
    assert SqsAddress.parse("sqs://us-east-1") == SqsAddress("us-east-1")
    assert str(address) == "sqs://us-east-1/evals"


async def test_missing_credentials_are_named_and_secrets_are_not(
    sqs_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    async with SqsConnection(sqs_url) as connection:
        assert not set(CREDENTIALS.values()) & {repr(connection), str(connection.address)}
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    async with SqsConnection(sqs_url) as connection:
        with pytest.raises(MailboxAccessError, match="credentials"):
            await SqsMailbox("box", int, connection).open()


async def test_a_server_that_is_not_there_is_a_connection_error(sqs_url: str) -> None:
    async with SqsConnection("sqs://eu-central-1/p?endpoint=http://127.0.0.1:9", timeout_seconds=1) as connection:
        with pytest.raises(MailboxConnectionError, match="opening box"):
            await SqsMailbox("box", int, connection).open()


async def test_a_connection_serves_one_event_loop(sqs_url: str) -> None:
    connection = SqsConnection(sqs_url)
    await SqsMailbox("box", int, connection).open()

    def elsewhere() -> None:
        asyncio.run(SqsMailbox("other", int, connection).open())

    with pytest.raises(MailboxError, match="event loop"):
        await asyncio.to_thread(elsewhere)
    await connection.close()
