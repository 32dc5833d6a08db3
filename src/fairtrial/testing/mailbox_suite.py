"""Tests of the behaviour that every mailbox must have, for your own implementations.

Subclass `MailboxConformance` in a test module, define how to open a mailbox and how time passes, and run pytest:

    class TestMyMailbox(MailboxConformance):
        @asynccontextmanager
        async def make_mailbox(self, name, body_type, *, resolver=None):
            async with MyMailbox(name, body_type, resolver=resolver) as mailbox:
                yield mailbox

Tests are coroutines under anyio's pytest plugin; choose backends with the fixture `anyio_backend`.
"""

from __future__ import annotations

import functools
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fairtrial.errors import (
    BodyError,
    ConfigurationError,
    LeaseLostError,
    MailboxClosedError,
    MessageTooLargeError,
    ReplyNotAvailableError,
)
from fairtrial.mailbox.protocol import CompositeResolver, Mailbox, MailboxDepth, MailboxResolver, Message
from fairtrial.mailbox.server import send_all


@dataclass(frozen=True, slots=True)
class SuiteJob:
    """The body of the messages that the tests send."""

    number: int
    text: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


class MailboxConformance:
    """Tests for all mailboxes. Override `make_mailbox`, and also `pass_time` if the tests can control time."""

    pytestmark = pytest.mark.anyio

    lease = 60.0
    """The lease of received messages in seconds. If the tests cannot control time, choose about one second."""
    margin = 1.0
    """Additional seconds to wait after a lease or delay should have ended."""
    patience = 20.0
    """How many seconds to wait for a message that must arrive."""
    max_body_bytes = 1024 * 1024
    """The largest size of a body; a larger one must be refused."""
    can_tell_lost_after_purge = True
    """Whether settling a message that was in flight during a purge must fail. False: the server may accept it."""

    def make_mailbox(
        self, name: str, body_type: type[Any], *, resolver: MailboxResolver | None = None
    ) -> AbstractAsyncContextManager[Mailbox[Any]]:
        """Open a mailbox. The same name within one test is the same mailbox, as another process would open it."""
        raise NotImplementedError

    async def pass_time(self, mailbox: Mailbox[Any], seconds: float) -> None:
        """Age the leases and delays of this mailbox by `seconds`."""
        await anyio.sleep(seconds)

    @asynccontextmanager
    async def mailbox(self, body_type: type[Any] = SuiteJob) -> AsyncIterator[Mailbox[Any]]:
        """Open a mailbox with a unique name."""
        async with self.make_mailbox(f"test-{uuid.uuid4().hex}", body_type) as mailbox:
            yield mailbox

    async def take(self, mailbox: Mailbox[Any], count: int = 1, *, lease: float | None = None) -> list[Message[Any]]:
        """Receive exactly `count` messages, and fail if fewer arrive."""
        taken: list[Message[Any]] = []
        with anyio.move_on_after(self.patience):
            while len(taken) < count:
                taken += await mailbox.receive(count - len(taken), lease or self.lease, self.patience)
        assert len(taken) == count, f"{len(taken)} of {count} messages came"
        return taken

    @asynccontextmanager
    async def delivery(self) -> AsyncIterator[tuple[Mailbox[Any], Message[Any]]]:
        """Open a mailbox with a unique name, send a message and receive it."""
        async with self.mailbox() as mailbox:
            await mailbox.send(SuiteJob(1))
            (message,) = await self.take(mailbox)
            yield mailbox, message

    async def nothing(self, mailbox: Mailbox[Any]) -> bool:
        """Return whether there is nothing to receive."""
        return not await mailbox.receive(10, self.lease, 0)

    async def test_a_sent_message_arrives_whole(self) -> None:
        async with self.mailbox() as mailbox:
            job = SuiteJob(7, "zażółć \N{SNOWMAN} \x00 end", {"a": "b"})
            id = await mailbox.send(job)
            (message,) = await self.take(mailbox)
            assert message.body == job
            assert message.id == id
            assert message.delivery_count == 1
            assert message.expiries == 0
            assert message.reply_to is None

    async def test_an_acknowledged_message_is_gone(self) -> None:
        async with self.delivery() as (mailbox, message):
            await message.acknowledge()
            await self.pass_time(mailbox, self.lease + self.margin)
            assert await self.nothing(mailbox)
            assert await mailbox.approximate_count() == 0

    async def test_a_message_in_flight_is_hidden_from_others(self) -> None:
        async with self.delivery() as (mailbox, message), self.make_mailbox(mailbox.name, SuiteJob) as other:
            assert await self.nothing(other)
            await message.acknowledge()

    async def test_receive_takes_what_there_is_up_to_the_limit(self) -> None:
        async with self.mailbox() as mailbox:
            for number in range(5):
                await mailbox.send(SuiteJob(number))
            first = await mailbox.receive(3, self.lease, 0)
            second = await mailbox.receive(10, self.lease, 0)
            assert len(first) == 3
            assert len(second) == 2
            assert {message.body.number for message in [*first, *second]} == set(range(5))

    async def test_receive_returns_nothing_after_its_wait(self) -> None:
        async with self.mailbox() as mailbox:
            began = anyio.current_time()
            assert not await mailbox.receive(1, self.lease, 0.2)
            assert 0.15 < anyio.current_time() - began < 5

    async def test_a_waiting_receive_is_woken_by_a_send(self) -> None:
        async with (
            self.mailbox() as mailbox,
            self.make_mailbox(mailbox.name, SuiteJob) as other,
            anyio.create_task_group() as group,
        ):
            taken: list[Message[Any]] = []

            async def wait() -> None:
                taken.extend(await mailbox.receive(1, self.lease, self.patience))

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            began = anyio.current_time()
            await other.send(SuiteJob(1))
            while not taken:
                await anyio.sleep(0.001)
                assert anyio.current_time() - began < self.patience / 2
            await taken[0].acknowledge()

    async def test_a_lease_that_runs_out_brings_the_message_back_once(self) -> None:
        async with self.mailbox() as mailbox:
            id = await mailbox.send(SuiteJob(1))
            await self.take(mailbox)
            await self.pass_time(mailbox, self.lease + self.margin)
            (again,) = await self.take(mailbox)
            assert (again.id, again.delivery_count, again.expiries) == (id, 2, 1)
            assert await self.nothing(mailbox)
            await again.acknowledge()

    async def test_counts_grow_with_every_delivery(self) -> None:
        async with self.delivery() as (mailbox, message):
            await message.nack()
            (message,) = await self.take(mailbox)
            assert (message.delivery_count, message.expiries) == (2, 0)
            await self.pass_time(mailbox, self.lease + self.margin)
            (message,) = await self.take(mailbox)
            assert (message.delivery_count, message.expiries) == (3, 1)
            await message.nack(self.lease / 2)
            await self.pass_time(mailbox, self.lease / 2 + self.margin)
            (message,) = await self.take(mailbox)
            assert (message.delivery_count, message.expiries) == (4, 1)
            await message.acknowledge()

    async def test_a_late_acknowledgement_never_ends_someone_elses_delivery(self) -> None:
        async with self.delivery() as (mailbox, stale), self.make_mailbox(mailbox.name, SuiteJob) as other:
            await self.pass_time(mailbox, self.lease + self.margin)
            (fresh,) = await self.take(other)
            for settle in (
                stale.acknowledge,
                stale.nack,
                stale.hand_back,
                functools.partial(stale.extend_visibility, self.lease),
                functools.partial(stale.dead_letter, "late"),
            ):
                with pytest.raises(LeaseLostError):
                    await settle()
            assert await mailbox.approximate_count() == 1
            assert await self.nothing(mailbox)
            await fresh.acknowledge()
            assert await mailbox.approximate_count() == 0

    async def test_an_acknowledgement_after_the_lease_is_refused_or_final(self) -> None:
        async with self.delivery() as (mailbox, message):
            await self.pass_time(mailbox, self.lease + self.margin)
            try:
                await message.acknowledge()
            except LeaseLostError:
                (again,) = await self.take(mailbox)
                await again.acknowledge()
            assert await self.nothing(mailbox)
            assert await mailbox.approximate_count() == 0

    async def test_a_message_is_settled_once(self) -> None:
        async with self.delivery() as (mailbox, message):
            await message.acknowledge()
            for settle in (message.acknowledge, message.nack, message.hand_back):
                with pytest.raises(LeaseLostError):
                    await settle()
            assert await self.nothing(mailbox)

    async def test_two_acknowledgements_at_once_settle_once(self) -> None:
        async with self.delivery() as (_, message):
            outcomes: list[str] = []

            async def settle() -> None:
                try:
                    await message.acknowledge()
                    outcomes.append("settled")
                except LeaseLostError:
                    outcomes.append("lost")

            async with anyio.create_task_group() as group:
                group.start_soon(settle)
                group.start_soon(settle)
            assert sorted(outcomes) == ["lost", "settled"]

    async def test_nack_without_delay_returns_the_message_at_once(self) -> None:
        async with self.delivery() as (mailbox, message), self.make_mailbox(mailbox.name, SuiteJob) as other:
            await message.nack()
            (again,) = await self.take(other)
            assert again.id == message.id
            await again.acknowledge()

    async def test_nack_with_delay_hides_the_message_until_then(self) -> None:
        async with self.delivery() as (mailbox, message):
            await message.nack(3 * self.lease)
            await self.pass_time(mailbox, self.lease)
            assert await self.nothing(mailbox)
            assert await mailbox.approximate_count() == 1
            await self.pass_time(mailbox, 2 * self.lease + self.margin)
            (again,) = await self.take(mailbox)
            assert (again.id, again.delivery_count, again.expiries) == (message.id, 2, 0)
            await again.acknowledge()

    async def test_a_message_handed_back_was_never_delivered(self) -> None:
        async with self.mailbox() as mailbox:
            await mailbox.send(SuiteJob(1))
            for _ in range(3):
                (message,) = await self.take(mailbox)
                assert (message.delivery_count, message.expiries) == (1, 0)
                await message.hand_back()
            assert await mailbox.approximate_count() == 1

    async def test_a_message_handed_back_for_later_was_never_delivered_either(self) -> None:
        async with self.mailbox() as mailbox:
            sent = await mailbox.send(SuiteJob(1))
            for _ in range(2):
                (message,) = await self.take(mailbox)
                assert (message.delivery_count, message.expiries) == (1, 0)
                await message.hand_back(self.lease)
                assert (await mailbox.depth()).delayed == 1
                assert await self.nothing(mailbox)
                await self.pass_time(mailbox, self.lease + self.margin)
            (again,) = await self.take(mailbox)
            assert (again.id, again.delivery_count) == (sent, 1)
            await again.hand_back(self.lease)
            assert await mailbox.purge() == 1
            assert (await mailbox.depth()).delayed == 0

    @pytest.mark.parametrize("factor", [0.75, 1.0, 3.0, 7.3])
    async def test_an_extended_lease_lasts_as_long_as_was_asked(self, factor: float) -> None:
        async with self.delivery() as (mailbox, message):
            await self.pass_time(mailbox, self.lease / 2)
            await message.extend_visibility(factor * self.lease)
            await self.pass_time(mailbox, 0.7 * factor * self.lease)
            assert await self.nothing(mailbox)
            await self.pass_time(mailbox, 0.3 * factor * self.lease + self.margin)
            (again,) = await self.take(mailbox)
            assert again.delivery_count == 2

    async def test_an_extended_message_can_be_settled(self) -> None:
        async with self.mailbox() as mailbox:
            for number in range(3):
                await mailbox.send(SuiteJob(number))
            first, second, third = await self.take(mailbox, 3)
            for message in (first, second, third):
                await message.extend_visibility(2.5 * self.lease)
            await first.acknowledge()
            await second.nack()
            await third.dead_letter("no")
            assert await mailbox.depth() == MailboxDepth(waiting=1, delayed=0, in_flight=0, dead=1)

    async def test_leases_are_renewed_from_a_thread(self) -> None:
        async with self.mailbox() as mailbox:
            await send_all(mailbox, [SuiteJob(number) for number in range(450)])
            messages = await self.take(mailbox, 450)
            await messages[7].acknowledge()
            await self.pass_time(mailbox, self.lease / 2)
            receipts = [message.receipt for message in messages]
            renew = messages[0].receipt.renewer.renew
            kept = await anyio.to_thread.run_sync(renew, receipts, self.lease)
            assert [at for at, ours in enumerate(kept) if not ours] == [7]
            await self.pass_time(mailbox, 0.6 * self.lease)
            assert await self.nothing(mailbox)
            await messages[0].acknowledge()
            assert list(await anyio.to_thread.run_sync(renew, receipts[:2], self.lease)) == [False, True]
            await self.pass_time(mailbox, self.lease + self.margin)
            assert (await self.take(mailbox))[0].delivery_count == 2

    async def test_depth_tells_where_messages_are(self) -> None:
        async with self.mailbox() as mailbox:
            for number in range(6):
                await mailbox.send(SuiteJob(number))
            first, second, *_ = await self.take(mailbox, 4)
            await first.nack(10 * self.lease)
            await second.dead_letter("bad")
            assert await mailbox.depth() == MailboxDepth(waiting=2, delayed=1, in_flight=2, dead=1)
            assert await mailbox.approximate_count() == 5

    async def test_purge_removes_all_but_the_dead(self) -> None:
        async with self.mailbox() as mailbox:
            for number in range(6):
                await mailbox.send(SuiteJob(number))
            first, second, third = await self.take(mailbox, 3)
            await first.nack(self.lease)
            await second.dead_letter("bad")
            assert await mailbox.purge() == 5
            assert await mailbox.depth() == MailboxDepth(waiting=0, delayed=0, in_flight=0, dead=1)
            with pytest.raises(LeaseLostError) if self.can_tell_lost_after_purge else suppress(LeaseLostError):
                await third.acknowledge()
            await self.pass_time(mailbox, 2 * self.lease + self.margin)
            assert await self.nothing(mailbox)
            await mailbox.send(SuiteJob(9))
            (after,) = await self.take(mailbox)
            assert after.body == SuiteJob(9)

    async def test_dead_letters_are_kept_listed_retried_and_dropped(self) -> None:
        async with self.mailbox() as mailbox:
            ids = [await mailbox.send(SuiteJob(number), reply_to="somewhere") for number in range(3)]
            for message in await self.take(mailbox, 3):
                await message.dead_letter(f"reason {message.body.number}", error="ValueError")
            await self.pass_time(mailbox, self.lease + self.margin)
            assert await self.nothing(mailbox)
            assert await mailbox.dead_letters.count() == 3
            (first,) = await mailbox.dead_letters.page(limit=1)
            rest = await mailbox.dead_letters.page(after=first.id)
            letters = {letter.message_id: letter for letter in [first, *rest]}
            assert set(letters) == set(ids)
            for number, id in enumerate(ids):
                assert letters[id].reason == f"reason {number}"
                assert letters[id].error == "ValueError"
                assert letters[id].reply_to == "somewhere"
                assert letters[id].delivery_count == 1
                assert letters[id].body(SuiteJob) == SuiteJob(number)
            assert await mailbox.dead_letters.retry(first.id, first.id, "0-1") == 1
            (again,) = await self.take(mailbox)
            assert (again.id, again.delivery_count, again.reply_to) == (first.message_id, 1, "somewhere")
            assert await mailbox.dead_letters.drop(rest[0].id, "0-1") == 1
            assert [letter.id for letter in await mailbox.dead_letters.page()] == [rest[1].id]

    async def test_a_retried_dead_letter_keeps_its_count_of_expired_leases(self) -> None:
        async with self.mailbox() as mailbox:
            await mailbox.send(SuiteJob(1))
            await self.take(mailbox)
            await self.pass_time(mailbox, self.lease + self.margin)
            (message,) = await self.take(mailbox)
            assert (message.delivery_count, message.expiries) == (2, 1)
            await message.dead_letter("it kills its worker")
            (letter,) = await mailbox.dead_letters.page()
            await mailbox.dead_letters.retry(letter.id)
            (again,) = await self.take(mailbox)
            assert (again.delivery_count, again.expiries) == (1, 1)

    async def test_a_reply_reaches_the_mailbox_that_was_named(self) -> None:
        async with AsyncExitStack() as stack:
            known: dict[str, Mailbox[Any]] = {}
            requests = await stack.enter_async_context(
                self.make_mailbox(f"test-{uuid.uuid4().hex}", SuiteJob, resolver=CompositeResolver(known))
            )
            replies = await stack.enter_async_context(self.mailbox(str))
            known[replies.name] = replies
            await requests.send(SuiteJob(1), reply_to=replies.name)
            await requests.send(SuiteJob(2), reply_to=replies)
            for message in await self.take(requests, 2):
                assert message.reply_to == replies.name
                await message.reply(f"done {message.body.number}")
                await message.acknowledge()
            assert {reply.body for reply in await self.take(replies, 2)} == {"done 1", "done 2"}

    async def test_a_reply_to_nobody_says_so(self) -> None:
        async with self.make_mailbox(f"test-{uuid.uuid4().hex}", SuiteJob, resolver=CompositeResolver()) as mailbox:
            await mailbox.send(SuiteJob(1))
            await mailbox.send(SuiteJob(2), reply_to="nobody-there")
            for message in await self.take(mailbox, 2):
                with pytest.raises(ReplyNotAvailableError):
                    await message.reply("hello")
                await message.acknowledge()

    async def test_a_body_that_cannot_be_encoded_is_refused_when_it_is_sent(self) -> None:
        async with self.mailbox() as mailbox:
            with pytest.raises(BodyError):
                await mailbox.send(object())
            with pytest.raises(MessageTooLargeError):
                await mailbox.send(
                    SuiteJob(1, secrets.token_hex(self.max_body_bytes))
                )  # Random text does not compress.
            assert await mailbox.approximate_count() == 0

    async def test_a_body_of_another_type_goes_to_the_dead_letters_and_harms_nobody(self) -> None:
        async with self.mailbox() as mailbox, self.make_mailbox(mailbox.name, object) as untyped:
            await untyped.send({"number": "seven"})
            await mailbox.send(SuiteJob(1))
            await untyped.send([[[]]])
            (good,) = await self.take(mailbox)
            assert good.body == SuiteJob(1)
            assert await self.nothing(mailbox)
            assert await mailbox.dead_letters.count() == 2
            (letter, _) = await mailbox.dead_letters.page()
            assert letter.error == "BodyError"
            assert letter.delivery_count == 1
            with pytest.raises(BodyError):
                letter.body(SuiteJob)
            await good.acknowledge()

    async def test_a_cancelled_receive_loses_nothing(self) -> None:
        async with self.mailbox() as mailbox, self.make_mailbox(mailbox.name, SuiteJob) as other:
            sent = 60
            got: list[Message[Any]] = []
            with anyio.fail_after(self.patience):
                for number in range(sent):
                    async with anyio.create_task_group() as group:

                        async def wait() -> None:
                            got.extend(await mailbox.receive(1, self.lease, self.patience))

                        group.start_soon(wait)
                        await anyio.lowlevel.checkpoint()
                        await other.send(SuiteJob(number))
                        group.cancel_scope.cancel()
            rest = await self.take(other, sent - len(got))
            assert {message.body.number for message in [*got, *rest]} == set(range(sent))
            assert all(message.delivery_count == 1 for message in rest)

    async def test_a_closed_mailbox_says_so(self) -> None:
        async with self.delivery() as (mailbox, message):
            await mailbox.close()
            await mailbox.close()
            with pytest.raises(MailboxClosedError):
                await mailbox.send(SuiteJob(2))
            with pytest.raises(MailboxClosedError):
                await mailbox.receive()
            with pytest.raises(MailboxClosedError):
                await message.acknowledge()

    async def test_arguments_that_cannot_work_are_refused(self) -> None:
        async with self.mailbox() as mailbox:
            for arguments in [(0, 1, 0), (1, 0, 0), (1, -1, 0), (1, 1, -1), (1, float("nan"), 0), (1, float("inf"), 0)]:
                with pytest.raises(ConfigurationError):
                    await mailbox.receive(*arguments)
            await mailbox.send(SuiteJob(1))
            (message,) = await self.take(mailbox)
            with pytest.raises(ConfigurationError):
                await message.nack(-1)
            with pytest.raises(ConfigurationError):
                await message.extend_visibility(0)
            await message.acknowledge()
            with pytest.raises(ConfigurationError):
                async with self.make_mailbox("not a {name}", SuiteJob):
                    pass

    async def test_many_senders_and_receivers_share_the_work_without_loss_or_doubles(self) -> None:
        async with self.mailbox() as mailbox, AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(self.make_mailbox(mailbox.name, SuiteJob)) for _ in range(3)]
            done: list[int] = []

            async def send(start: int) -> None:
                for number in range(start, start + 40):
                    await mailbox.send(SuiteJob(number))

            async def work(worker: Mailbox[Any]) -> None:
                while len(done) < 200:
                    for message in await worker.receive(7, self.lease, 0.1):
                        await message.acknowledge()
                        done.append(message.body.number)

            with anyio.fail_after(self.patience):
                async with anyio.create_task_group() as group:
                    for sender in range(5):
                        group.start_soon(send, sender * 40)
                    for worker in workers:
                        group.start_soon(work, worker)
            assert sorted(done) == list(range(200))
            assert await mailbox.approximate_count() == 0

    async def test_it_is_a_mailbox_by_protocol(self) -> None:
        async with self.mailbox() as mailbox:
            assert isinstance(mailbox, Mailbox)
