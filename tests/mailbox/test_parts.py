"""The parts around a mailbox: resolvers, policy, claim check, and what only the one in memory does."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import ConfigurationError
from fairtrial.errors import (
    BodyError,
    MailboxClosedError,
    MailboxConnectionError,
    MessageTooLargeError,
    ReplyNotAvailableError,
)
from fairtrial.mailbox import ClaimCheck, CompositeResolver, DLQPolicy, InMemoryMailbox, Mailbox, RedisMailbox
from fairtrial.mailbox.redis import RedisConnection, RedisMailboxFactory
from fairtrial.testing import FakeClock

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


class Maker:
    def __init__(self) -> None:
        self.made: list[str] = []

    def create(self, name: str) -> Mailbox[Any]:
        self.made.append(name)
        return InMemoryMailbox(name)


@pytest.mark.proves("R71")
class TestResolvers:
    def test_the_registry_comes_first_then_the_factory(self) -> None:
        known, maker = InMemoryMailbox[int]("known"), Maker()
        resolver = CompositeResolver({"known": known}, maker)
        assert resolver.resolve("known") is known
        assert resolver.resolve("other").name == "other"
        assert maker.made == ["other"]

    def test_a_registry_may_grow(self) -> None:
        registry: dict[str, Mailbox[Any]] = {}
        resolver = CompositeResolver(registry)
        with pytest.raises(ReplyNotAvailableError, match="late"):
            resolver.resolve("late")
        registry["late"] = InMemoryMailbox("late")
        assert resolver.resolve("late") is registry["late"]

    def test_what_was_made_is_kept_for_the_names_used_last(self) -> None:
        maker = Maker()
        resolver = CompositeResolver(factory=maker, keep=2)
        for name in ("a", "b", "a", "c", "a", "b"):
            resolver.resolve(name)
        assert maker.made == ["a", "b", "c", "b"]

    def test_a_name_that_is_none_never_reaches_the_factory(self) -> None:
        maker = Maker()
        with pytest.raises(ReplyNotAvailableError):
            CompositeResolver(factory=maker).resolve("{evil}")
        assert maker.made == []

    def test_keeping_none_is_refused(self) -> None:
        with pytest.raises(ConfigurationError):
            CompositeResolver(keep=0)

    @on_asyncio
    async def test_the_factory_for_redis_sends_to_mailboxes_and_creates_none(self, redis_url: str) -> None:
        factory = RedisMailboxFactory(redis_url, int)
        async with RedisMailbox("there", int, redis_url) as there:
            await factory.create("there").send(3)
            assert (await there.receive(1, 60, 1))[0].body == 3
            with pytest.raises(ReplyNotAvailableError):
                await factory.create("nowhere").send(3)
            assert await there.connection.command("EXISTS", factory.create("nowhere").keys.stream) == 0
        await factory.close()

    @on_asyncio
    async def test_replies_between_redis_and_memory_meet_in_a_resolver(self, redis_url: str) -> None:
        replies = InMemoryMailbox[str]("replies")
        async with (
            RedisConnection(redis_url) as connection,
            RedisMailbox("q", int, connection, reply_resolver=CompositeResolver({"replies": replies})) as requests,
        ):
            await requests.send(1, reply_to=replies)
            (message,) = await requests.receive(1, 60, 1)
            await message.reply("done")
            assert (await replies.receive(1, 60, 1))[0].body == "done"
            await replies.close()
            with pytest.raises(ReplyNotAvailableError):
                await message.reply("too late")
            factory = RedisMailboxFactory(connection)
            await factory.close()  # Somebody else's connection stays open.
            assert await requests.approximate_count() == 1


class Poisoned(Exception):
    pass


@pytest.mark.proves("R77", "R82")
class TestPolicy:
    def test_an_error_is_tried_again_until_the_last_delivery(self) -> None:
        policy = DLQPolicy(max_deliveries=3)
        verdicts = [policy.verdict(ValueError("x"), count) for count in (1, 2, 3, 4)]
        assert verdicts == ["retry", "retry", "dead_letter", "dead_letter"]

    def test_some_errors_are_final_and_some_never_count(self) -> None:
        policy = DLQPolicy(max_deliveries=2, fatal=(Poisoned, BodyError))
        assert policy.verdict(Poisoned(), 1) == "dead_letter"
        assert policy.verdict(BodyError("x"), 1) == "dead_letter"
        assert policy.verdict(MailboxConnectionError("x"), 1000) == "retry"

    def test_silence_makes_a_suspect_and_no_more(self) -> None:
        policy = DLQPolicy(suspect_after=2)
        treatments = [policy.treatment(expiries) for expiries in (0, 1, 2, 50)]
        assert treatments == ["run", "run", "run_isolated", "run_isolated"]
        assert DLQPolicy().treatment(1) == "run_isolated"

    def test_delays_double_up_to_a_cap_with_jitter(self) -> None:
        longest = DLQPolicy(base_seconds=1, max_seconds=10, draw=lambda: 1.0)
        shortest = DLQPolicy(base_seconds=1, max_seconds=10, draw=lambda: 0.0)
        assert [longest.delay(count) for count in (1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 10, 10]
        assert [shortest.delay(count) for count in (1, 2)] == [0.5, 1]
        assert 0.5 <= DLQPolicy().delay(1) <= 1

    @pytest.mark.parametrize(
        "settings",
        [{"max_deliveries": 0}, {"suspect_after": 0}, {"base_seconds": 0.0}, {"base_seconds": 9.0, "max_seconds": 8.0}],
    )
    def test_a_policy_that_cannot_work_is_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            DLQPolicy(**settings)


def blobs(root: Path) -> list[Path]:
    return sorted(root.glob("??/*"))


@dataclass(frozen=True, slots=True)
class Big:
    text: str


@on_asyncio
class TestClaimCheck:
    async def test_large_bodies_are_stored_outside_redis_and_small_ones_in_it(
        self, redis_url: str, tmp_path: Path
    ) -> None:
        async with RedisMailbox("big", Big, redis_url, claim_check=ClaimCheck(tmp_path)) as mailbox:
            text = secrets.token_hex(3_000_000)  # Compressed, it is still too large.
            await mailbox.send(Big("s"))
            await mailbox.send(Big(text))
            entries = await mailbox.connection.command("XRANGE", mailbox.keys.stream, "-", "+")
            assert [list(fields) for _, fields in entries] == [[b"b"], [b"s"]]
            assert len(entries[1][1][b"s"]) == 64
            small, large = await mailbox.receive(2, 60, 1)
            assert small.body == Big("s")
            assert large.body == Big(text)
            await large.nack()
            (again,) = await mailbox.receive(1, 60, 1)
            assert again.body == large.body
            await again.dead_letter("enough")
            (letter,) = await mailbox.dead_letters.page()
            assert letter.body(Big) == large.body

    async def test_replies_are_checked_in_too(self, redis_url: str, tmp_path: Path) -> None:
        check = ClaimCheck(tmp_path, threshold=100)
        async with (
            RedisMailbox("q", int, redis_url, claim_check=check) as requests,
            RedisMailbox("a", str, redis_url, claim_check=check, ttl_seconds=30) as replies,
        ):
            await requests.send(1, reply_to=replies)
            (message,) = await requests.receive(1, 60, 1)
            await message.reply("y" * 1000)
            assert (await replies.receive(1, 60, 1))[0].body == "y" * 1000
            assert len(blobs(tmp_path)) == 1

    async def test_a_missing_or_damaged_body_is_set_aside(self, redis_url: str, tmp_path: Path) -> None:
        async with RedisMailbox("gone", str, redis_url, claim_check=ClaimCheck(tmp_path, threshold=10)) as mailbox:
            await mailbox.send("a" * 100)
            await mailbox.send("b" * 100)
            first, second = blobs(tmp_path)
            first.unlink()
            second.write_bytes(b'"not what was hashed"')
            assert not await mailbox.receive(2, 60, 0)
            letters = await mailbox.dead_letters.page()
            assert len(letters) == 2
            assert all(letter.text.startswith("sha256:") for letter in letters)
            with pytest.raises(BodyError):
                letters[0].body(str)

    async def test_a_folder_out_of_reach_is_not_the_messages_fault(self, redis_url: str, tmp_path: Path) -> None:
        class Offline(ClaimCheck):
            async def fetch(self, sha256: str) -> bytes:
                raise OSError("stale file handle")

        async with RedisMailbox("nfs", str, redis_url, claim_check=Offline(tmp_path, threshold=10)) as mailbox:
            await mailbox.send("a" * 100)
            assert not await mailbox.receive(1, 60, 0)
            depth = await mailbox.depth()
            assert (depth.delayed, depth.dead) == (1, 0)

    async def test_the_limit_holds_for_checked_bodies(self, tmp_path: Path) -> None:
        check = ClaimCheck(tmp_path, threshold=10, max_bytes=100)
        with pytest.raises(MessageTooLargeError):
            await check.keep(b"x" * 101)
        with pytest.raises(ConfigurationError):
            ClaimCheck(tmp_path, threshold=10, max_bytes=9)

    async def test_only_a_hash_is_looked_up(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("do not read")
        for name in ("secret", "../secret", "A" * 64, "file:///etc/passwd", "", "0" * 63):
            with pytest.raises(BodyError):
                await ClaimCheck(tmp_path / "root").fetch(name)

    async def test_old_bodies_are_pruned_unless_sent_again(self, tmp_path: Path) -> None:
        check = ClaimCheck(tmp_path)
        old, again, new = [await check.keep(body) for body in (b"old", b"again", b"new")]
        for sha256 in (old, again):
            os.utime(tmp_path / sha256[:2] / sha256, (1, 1))
        await check.keep(b"again")
        stranger = tmp_path / "ab" / "not-ours"
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("x")
        os.utime(stranger, (1, 1))
        assert await check.prune(3600) == 1
        assert await check.fetch(again) == b"again"
        assert await check.fetch(new) == b"new"
        assert stranger.exists()
        with pytest.raises(BodyError):
            await check.fetch(old)


@pytest.mark.proves("R68")
class TestInMemoryOnly:
    async def test_without_a_type_the_very_object_arrives(self) -> None:
        async with InMemoryMailbox[object]() as mailbox:
            thing = object()
            await mailbox.send(thing)
            (message,) = await mailbox.receive()
            assert message.body is thing
            await message.dead_letter("odd")
            assert "object object" in (await mailbox.dead_letters.page())[0].text

    async def test_a_lease_that_runs_out_wakes_a_waiting_receive(self) -> None:
        mailbox = InMemoryMailbox[int]()
        await mailbox.send(1)
        await mailbox.receive(1, 0.05, 1)
        (again,) = await mailbox.receive(1, 60, 10)
        assert again.delivery_count == 2

    @pytest.mark.parametrize("anyio_backend", ["trio"])
    async def test_a_mailbox_is_refused_on_trio_with_the_reason(self) -> None:
        with pytest.raises(ConfigurationError, match="a mailbox needs asyncio"):
            await InMemoryMailbox[int]().receive()

    async def test_a_clock_that_stands_still_does_not_make_receive_wait_forever(self) -> None:
        mailbox = InMemoryMailbox[int](clock=FakeClock())
        with anyio.fail_after(5):
            assert not await mailbox.receive(1, 60, 0.05)

    async def test_closing_ends_waits_and_a_reply_to_it_says_so(self) -> None:
        mailbox, requests = InMemoryMailbox[int](), InMemoryMailbox[int]()
        await requests.send(1, reply_to=mailbox)
        (message,) = await requests.receive()
        ended: list[str] = []

        async def wait() -> None:
            try:
                await mailbox.receive(1, 60, 60)
            except MailboxClosedError:
                ended.append("closed")

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await mailbox.close()
        assert ended == ["closed"]
        with pytest.raises(ReplyNotAvailableError):
            await message.reply(1)

    async def test_settled_messages_are_not_kept_alive_by_their_leases(self) -> None:
        mailbox = InMemoryMailbox[int]()
        for number in range(1000):
            await mailbox.send(number)
            (message,) = await mailbox.receive(1, 3600, 0)
            await message.acknowledge()
        assert len(mailbox._expiry) < 100

    async def test_a_reply_by_name_needs_a_resolver(self) -> None:
        mailbox = InMemoryMailbox[int]()
        await mailbox.send(1, reply_to="somewhere")
        (message,) = await mailbox.receive()
        with pytest.raises(ReplyNotAvailableError, match="resolver"):
            await message.reply(1)
        assert "reply_to='somewhere'" in repr(message)
        assert repr(mailbox) == "InMemoryMailbox('memory')"


class TestImports:
    def run(self, code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def test_redis_is_imported_only_by_those_who_use_it(self) -> None:
        code = "import sys, fairtrial, fairtrial.mailbox as m; m.InMemoryMailbox; print('redis' in sys.modules)"
        assert self.run(code) == "False"

    def test_without_redis_the_error_names_the_extra(self) -> None:
        code = (
            "import sys; sys.modules['redis'] = None\n"
            "import fairtrial.mailbox as m\n"
            "try: m.RedisMailbox\n"
            "except ImportError as error: print(error)\n"
        )
        assert 'pip install "fairtrial[redis]"' in self.run(code)
