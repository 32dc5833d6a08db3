"""The permissions that a fleet needs on Redis, and the harm that someone with write access can do."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis

from fairtrial import ConfigurationError, Sample, TokenUsage
from fairtrial.errors import BodyError, MailboxAccessError, MailboxConnectionError, ReplyNotAvailableError
from fairtrial.fleet.limits.quota import FleetLimiter, FleetSpending
from fairtrial.mailbox import ClaimCheck, RedisConnection, RedisMailbox
from tests.redis_server import RedisServer

pytestmark = pytest.mark.proves("R69")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis with the settings and the user of `deploy/`, as compose starts it."""
    rules = (DEPLOY / "redis-user.acl").read_text().split()
    settings = [
        word
        for line in (DEPLOY / "redis.conf").read_text().splitlines()
        if line and not line.startswith(("#", "appendonly", "appendfsync", "save"))
        for word in (f"--{line.split()[0]}", *line.split()[1:])
    ]
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, *settings, "--user", "fairtrial", "on", f">{PASSWORD}", *rules) as found:
        yield found


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """Someone who may write anything: an administrator, or the worst case."""
    with server.client() as client:
        yield client
        client.flushall()


@pytest.fixture
def url(server: RedisServer, admin: redis.Redis) -> str:
    return f"redis://fairtrial:{PASSWORD}@127.0.0.1:{server.port}/0"


class TestRights:
    async def test_the_documented_user_can_do_all_a_fleet_needs(self, url: str) -> None:
        async with (
            RedisMailbox("jobs", int, url, sweep_seconds=0.02) as jobs,
            RedisMailbox("replies", int, url, ttl_seconds=30) as replies,
            FleetLimiter(url, "model", requests_per_second=100, tokens_per_minute=6e6) as limiter,
            FleetLimiter(url, "learnt", adaptive=True) as learnt,
            FleetSpending(url) as spending,
        ):
            for number in range(5):
                await jobs.send(number, reply_to=replies)
            first, second, third, fourth, fifth = await jobs.receive(5, 60, 1)
            await first.nack(0.05)
            await second.nack()
            await third.extend_visibility(100)
            assert list(third.receipt.renewer.renew([third.receipt], 60)) == [True]
            await third.reply(9)
            await third.acknowledge()
            await fourth.dead_letter("no")
            await fifth.hand_back()
            assert (await replies.receive(1, 60, 5))[0].body == 9
            letter = (await jobs.dead_letters.page())[0]
            assert await jobs.dead_letters.retry(letter.id) == 1
            assert await jobs.dead_letters.drop(letter.id) == 0
            assert await jobs.dead_letters.count() == 0
            again = [*await jobs.receive(4, 60, 5)]
            while len(again) < 4:
                again += await jobs.receive(4, 60, 5)
            assert (await jobs.depth()).in_flight == 4
            await jobs.announce("id w1", "", 15)
            assert await jobs.announced() == [""]
            assert [(worker.name, worker.in_flight) for worker in await jobs.workers()] == [("w1", 4)]
            waiting = asyncio.create_task(jobs.receive(1, 60, 20))
            await asyncio.sleep(0.05)
            waiting.cancel()  # Ends its read by CLIENT UNBLOCK.
            await asyncio.wait([waiting])
            assert await jobs.purge() == 4
            for kind in (limiter, learnt):
                async with kind.slot() as permit:
                    kind.report(permit, "rate_limited", retry_after=0.01)
                async with kind.slot() as permit:
                    kind.used(permit, 10)
            spending.add("run", TokenUsage(1, 2, 0, 0.5))
            await spending.refresh("run")
            assert spending.of("run")[1] == 1

    @pytest.mark.parametrize(
        "command",
        [
            "FLUSHALL",
            "KEYS *",
            "CONFIG GET *",
            "ACL LIST",
            "EVAL return(1) 0",
            "GET somebody-elses",
            "XADD somebody-elses * a b",
            "PUBLISH channel x",
            "SHUTDOWN",
            "MIGRATE localhost 1 k 0 1",
            "SCRIPT FLUSH",
            "REPLICAOF 127.0.0.1 1",
        ],
    )
    async def test_it_can_do_nothing_else(self, url: str, command: str) -> None:
        async with RedisConnection(url) as connection:
            with pytest.raises(redis.exceptions.NoPermissionError):
                await connection.command(*command.split())

    async def test_a_user_can_be_kept_to_one_suite(self, admin: redis.Redis, server: RedisServer) -> None:
        rules = (DEPLOY / "redis-user.acl").read_text().replace("~{fairtrial:*", "~{fairtrial:support.*").split()
        admin.execute_command("ACL", "SETUSER", "support", "on", f">{PASSWORD}", *rules)  # type: ignore[no-untyped-call]  # redis-py does not annotate it
        url = f"redis://support:{PASSWORD}@127.0.0.1:{server.port}/0"
        async with RedisMailbox("support.requests", int, url) as mine:
            await mine.send(1)
            with pytest.raises(MailboxAccessError):
                await RedisMailbox("billing.requests", int, mine.connection).send(1)

    async def test_every_key_is_in_our_part(self, url: str, admin: redis.Redis) -> None:
        async with (
            RedisMailbox("keys", int, url) as mailbox,
            FleetLimiter(url, "keys", requests_per_second=100) as limiter,
            FleetSpending(url) as spending,
        ):
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            await message.nack(60)
            await mailbox.send(2)
            (message,) = await mailbox.receive(1, 60, 1)
            await message.dead_letter("no")
            await mailbox.sweep()
            async with limiter.slot():
                pass
            await spending.refresh("odd } run * name")
            keys: Any = admin.keys("*")
            assert len(keys) >= 5
            assert all(key.startswith(b"{fairtrial:") and key.count(b"}") == 1 for key in keys)


class TestSecrets:
    @pytest.mark.parametrize("user", ["fairtrial:wrong-password-1", "nobody:wrong-password-1", ":wrong-password-1"])
    async def test_a_wrong_password_is_a_sentence_without_the_password(
        self, server: RedisServer, user: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        async with RedisConnection(f"redis://{user}@127.0.0.1:{server.port}/0") as connection:
            mailbox = RedisMailbox("jobs", int, connection)
            for ask in (lambda: mailbox.send(1), lambda: mailbox.receive(1, 60, 0), mailbox.depth):
                with pytest.raises(MailboxAccessError) as caught:
                    await ask()
                assert "jobs" in str(caught.value)
                assert caught.value.__cause__ is None
                shown = f"{caught.value!r} {caught.value} {mailbox!r} {connection!r} {caplog.text}"
                assert "wrong-password" not in shown

    @pytest.mark.parametrize(
        "url", ["redis://:pa/ss-word@host:6379/0", "redis://u:p#ss-word@host", "redis://u:p?ss-word@host:1/0"]
    )
    def test_a_password_with_odd_characters_is_not_shown_when_the_address_cannot_be_read(self, url: str) -> None:
        try:
            shown = repr(RedisConnection(url))
        except ConfigurationError as error:
            shown = f"{error}"
            assert "percent" in shown  # What to do about it.
        assert "ss-word" not in shown
        assert "'p" not in shown


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority of our own, and a certificate for 127.0.0.1 that it has signed."""
    folder = tmp_path_factory.mktemp("tls")

    async def make() -> None:
        new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout"]
        # Python 3.13 wants an authority to say that it is one.
        rights = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        await anyio.run_process(
            [*new, "ca.key", "-x509", "-days", "2", "-subj", "/CN=Test authority", *rights, "-out", "ca.pem"],
            cwd=folder,
        )
        await anyio.run_process([*new, "key.pem", "-subj", "/CN=queue", "-out", "request.pem"], cwd=folder)
        (folder / "names").write_text(
            "subjectAltName=DNS:localhost,IP:127.0.0.1\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        )
        sign = ["openssl", "x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2"]
        await anyio.run_process([*sign, "-extfile", "names", "-CAcreateserial", "-out", "cert.pem"], cwd=folder)

    anyio.run(make)
    return folder


@pytest.fixture(scope="module")
def tls_server(certificates: Path) -> Iterator[RedisServer]:
    pair = (certificates / "cert.pem", certificates / "key.pem")
    with RedisServer(certificates / "redis", tls=pair) as server:
        yield server


class TestTLS:
    async def test_mailboxes_limits_and_budgets_work_over_tls(
        self, tls_server: RedisServer, certificates: Path
    ) -> None:
        url = f"rediss://127.0.0.1:{tls_server.port}/0?ssl_ca_certs={certificates / 'ca.pem'}"
        async with (
            RedisMailbox("tls", int, url) as mailbox,
            FleetLimiter(url, "tls", requests_per_second=100) as limiter,
            FleetSpending(url) as spending,
        ):
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            assert list(message.receipt.renewer.renew([message.receipt], 60)) == [True]
            await message.acknowledge()
            async with limiter.slot():
                pass
            await spending.refresh("run")
            assert spending.of("run") == (TokenUsage(), 0)

    async def test_a_server_nobody_we_trust_has_signed_is_refused(self, tls_server: RedisServer) -> None:
        async with RedisConnection(f"rediss://127.0.0.1:{tls_server.port}/0", timeout_seconds=5) as connection:
            with pytest.raises(MailboxConnectionError, match=r"(?i)certificate"):
                await RedisMailbox("tls", int, connection).send(1)

    async def test_another_name_than_the_certificates_is_refused(
        self, tls_server: RedisServer, certificates: Path
    ) -> None:
        url = f"rediss://127.0.0.2:{tls_server.port}/0?ssl_ca_certs={certificates / 'ca.pem'}"
        async with RedisConnection(url, timeout_seconds=5) as connection:
            with pytest.raises(MailboxConnectionError):
                await RedisMailbox("tls", int, connection).send(1)

    async def test_a_server_that_asks_for_client_certificates_gets_one(
        self, certificates: Path, tmp_path: Path
    ) -> None:
        pair = (certificates / "cert.pem", certificates / "key.pem")
        trust = ("--tls-auth-clients", "yes", "--tls-ca-cert-file", str(certificates / "ca.pem"))
        with RedisServer(tmp_path / "redis", *trust, tls=pair) as server:
            url = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={certificates / 'ca.pem'}"
            async with RedisConnection(url, timeout_seconds=5) as connection:
                with pytest.raises(MailboxConnectionError):
                    await RedisMailbox("tls", int, connection).send(1)
            own = f"{url}&ssl_certfile={pair[0]}&ssl_keyfile={pair[1]}"
            async with RedisMailbox("tls", int, own) as mailbox, FleetLimiter(own, "tls", adaptive=True) as limiter:
                await mailbox.send(1)
                (message,) = await mailbox.receive(1, 60, 1)
                assert list(message.receipt.renewer.renew([message.receipt], 60)) == [True]
                async with limiter.slot():
                    pass


NESTED = b"[" * 100_000 + b"]" * 100_000
GOOD = b'{"id":"s1","input":"q","expected":null,"metadata":{}}'
BODIES: dict[str, dict[Any, Any]] = {
    "huge": {"b": b'"' + b"x" * 1_100_000 + b'"'},
    "deeply nested": {"b": NESTED},
    "a deeply nested value": {"b": b'{"id":"s","input":' + NESTED[:10_000] + NESTED[-10_000:] + b"}"},
    "not JSON": {"b": b"\x80\x04\x95cposix\nsystem\n"},
    "not UTF-8": {"b": b'{"id":"\xff\xfe"}'},
    "the wrong type": {"b": b"[1,2,3]"},
    "a field of the wrong type": {"b": b'{"id":{"$ne":1},"input":1}'},
    "a field too many": {"b": GOOD[:-1] + b',"__class__":"os.system","__reduce__":["rm"]}'},
    "a field too few": {"b": b'{"input":1}'},
    "a number that is none": {"b": b'{"id":"s","input":NaN,"metadata":{"x":Infinity}}'},
    "a very long number": {"b": b'{"id":"s","input":"q","metadata":{"x":' + b"9" * 5_000 + b"}}"},
    "nothing": {"z": b"1"},
    "empty": {"b": b""},
    "a path instead of a hash": {"s": b"../../../../etc/passwd"},
    "an absolute path": {"s": b"/etc/passwd"},
    "an address": {"s": b"http://127.0.0.1/x"},
    "a hash with a tail": {"s": b"a" * 64 + b"/../../x"},
    "a hash with a newline": {"s": b"a" * 64 + b"\n"},
    "a hash nobody has": {"s": b"a" * 64},
    "a hash in capitals": {"s": b"A" * 64},
    "five hundred fields": {**{f"f{number}": b"x" for number in range(500)}, "b": b"?"},
    "counts that are none": {"b": b"?", "n": b"1e308", "x": b"-1", "i": b"0x10"},
    "endless counts": {"b": b"?", "n": b"inf", "x": b"nan"},
    "a count of many digits": {"b": b"?", "n": b"9" * 400},
    "an id to fool the log": {"b": b"?", "i": b"1-0\nCRITICAL all is lost\x1b[31m"},
    "names that are not text": {b"\xff\xfe": b"\x00", b"b": b"?"},
}


class TestMalice:
    """Every one of these is put into the stream by someone who writes to Redis directly."""

    @pytest.fixture
    async def mailbox(self, url: str, tmp_path: Path) -> AsyncIterator[RedisMailbox[Sample[str, str]]]:
        check = ClaimCheck(tmp_path / "blobs", threshold=1000)
        async with RedisMailbox("jobs", Sample[str, str], url, claim_check=check, sweep_seconds=0.02) as mailbox:
            yield mailbox

    @pytest.mark.parametrize("what", BODIES)
    async def test_a_bad_message_ends_among_the_dead_letters_and_its_neighbour_is_worked_on(
        self, mailbox: RedisMailbox[Sample[str, str]], admin: redis.Redis, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        admin.xadd(mailbox.keys.stream, BODIES[what])
        await mailbox.send(Sample("good", "q"))
        (message,) = await mailbox.receive(10, 60, 5)
        assert message.body == Sample("good", "q")
        await message.acknowledge()
        assert await mailbox.dead_letters.count() == 1
        (letter,) = await mailbox.dead_letters.page()
        assert letter.error == "BodyError"
        assert letter.delivery_count >= 1
        assert len(letter.reason) <= 2000
        assert "\n" not in letter.message_id
        assert "root:" not in letter.text + letter.reason
        assert await mailbox.approximate_count() == 0
        # Retrying it brings it back once, and it dies again.
        assert await mailbox.dead_letters.retry(letter.id) == 1
        assert list(await mailbox.receive(1, 60, 0)) == []
        assert await mailbox.dead_letters.count() == 1
        assert "CRITICAL all is lost" not in caplog.text

    async def test_a_message_that_is_given_back_keeps_none_of_what_it_made_up(
        self, mailbox: RedisMailbox[Sample[str, str]], admin: redis.Redis
    ) -> None:
        fields: Any = {"b": GOOD, "n": "1e308", "x": "inf", "i": "; DROP", **{f"f{n}": "x" for n in range(500)}}
        admin.xadd(mailbox.keys.stream, fields)
        (message,) = await mailbox.receive(1, 60, 1)
        assert (message.delivery_count, message.expiries) == (1, 0)
        assert message.id[0].isdigit()
        await message.nack()
        (message,) = await mailbox.receive(1, 60, 5)
        assert message.delivery_count <= 2
        assert message.body.id == "s1"
        await message.nack(0.02)
        (message,) = await mailbox.receive(1, 60, 5)
        await message.dead_letter("enough")
        (letter,) = await mailbox.dead_letters.page()
        assert letter.delivery_count <= 3

    @pytest.mark.parametrize(
        "address",
        [
            b"nobody",
            b"../jobs",
            b"jobs}:stream",
            b"*",
            b"a b",
            b"x" * 5000,
            b"\xff\xfe",
            b"redis://elsewhere:6379/jobs",
            b"http://169.254.169.254/",
            b"jobs\n",
        ],
    )
    async def test_an_odd_reply_address_reaches_nobody_and_creates_nothing(
        self, mailbox: RedisMailbox[Sample[str, str]], admin: redis.Redis, address: bytes
    ) -> None:
        admin.xadd(mailbox.keys.stream, {"b": GOOD, "r": address})
        (message,) = await mailbox.receive(1, 60, 1)
        before: Any = set(admin.keys("*")) - {mailbox.keys.sweeper.encode()}
        with pytest.raises(ReplyNotAvailableError) as caught:
            await message.reply("answer")
        after: Any = set(admin.keys("*")) - {mailbox.keys.sweeper.encode()}
        assert after == before
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)
        await message.acknowledge()

    async def test_a_reply_sent_to_a_mailbox_of_requests_is_dead_lettered(
        self, mailbox: RedisMailbox[Sample[str, str]], admin: redis.Redis
    ) -> None:
        admin.xadd(mailbox.keys.stream, {"b": GOOD, "r": mailbox.name})
        (message,) = await mailbox.receive(1, 60, 1)
        await message.reply({"score": 1})
        await message.acknowledge()
        assert list(await mailbox.receive(1, 60, 0)) == []
        assert (await mailbox.depth()).dead == 1

    async def test_a_body_kept_outside_has_a_limit_too(self, url: str, tmp_path: Path, admin: redis.Redis) -> None:
        generous = ClaimCheck(tmp_path / "blobs", threshold=10, max_bytes=1_000_000)
        strict = ClaimCheck(tmp_path / "blobs", threshold=10, max_bytes=1000)
        sha = await generous.keep(json.dumps("x" * 5000).encode())
        with pytest.raises(BodyError, match="1000"):
            await strict.fetch(sha)
        async with RedisMailbox("kept", str, url, claim_check=strict) as mailbox:
            admin.xadd(mailbox.keys.stream, {"s": sha})
            assert list(await mailbox.receive(1, 60, 0)) == []
            assert (await mailbox.depth()).dead == 1

    async def test_a_link_out_of_the_folder_is_not_followed_to_anything_useful(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("root:x:0:0")
        check = ClaimCheck(tmp_path / "blobs")
        (tmp_path / "blobs" / "aa").mkdir(parents=True)
        (tmp_path / "blobs" / "aa" / ("a" * 64)).symlink_to(secret)
        with pytest.raises(BodyError) as caught:
            await check.fetch("a" * 64)
        assert "root:" not in str(caught.value)

    async def test_random_entries_never_stop_the_worker(
        self, mailbox: RedisMailbox[Sample[str, str]], admin: redis.Redis
    ) -> None:
        draw = random.Random(7)
        for _ in range(300):
            names = draw.sample([b"b", b"s", b"r", b"i", b"n", b"x", b"q"], draw.randint(1, 7))
            fields: Any = {name: draw.randbytes(draw.randint(0, 40)) for name in names}
            if draw.random() < 0.3 and b"b" in fields:
                fields[b"b"] = GOOD
            admin.xadd(mailbox.keys.stream, fields)
        await mailbox.send(Sample("last", "q"))
        seen: list[str] = []
        async with asyncio.timeout(30):
            while "last" not in seen:
                for message in await mailbox.receive(50, 60, 5):
                    seen.append(message.body.id)
                    await message.acknowledge()
        assert set(seen) == {"s1", "last"}
        assert len(seen) + await mailbox.dead_letters.count() == 301
        letters = await mailbox.dead_letters.page(limit=1000)
        assert all(0 < letter.delivery_count < 1e9 for letter in letters)

    async def test_dead_letters_written_by_others_can_still_be_listed(
        self, mailbox: RedisMailbox[Sample[str, str]], admin: redis.Redis
    ) -> None:
        admin.xadd(mailbox.keys.dead, {"n": "many", "at": "long ago", "i": "\n", "b": b"\xff", "s": "../x"})
        (letter,) = await mailbox.dead_letters.page()
        assert (letter.delivery_count, letter.died_at) == (0, 0.0)
        with pytest.raises(BodyError):
            letter.body(Sample[str, str])
