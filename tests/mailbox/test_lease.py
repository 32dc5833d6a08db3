"""Leases are renewed while a job runs, and not afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import pytest

from fairtrial.errors import ConfigurationError, LeaseLostError, MailboxConnectionError
from fairtrial.mailbox import InMemoryMailbox, Lease, LeaseExtender, Message, RedisMailbox
from fairtrial.testing import FakeClock
from tests.mailbox.ageing import age

pytestmark = pytest.mark.proves("R75")


class Renewals:
    """A mailbox as the extender sees it: it answers as told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.answer: Callable[[], bool] = lambda: True
        self.turned = threading.Condition()

    def renew(self, receipts: Sequence[Any], seconds: float) -> Sequence[bool]:
        with self.turned:
            self.asked.append(len(receipts))
            self.turned.notify_all()
        return [self.answer() for _ in receipts]

    def wait(self, more: int = 1) -> bool:
        """Wait for further renewals, blocking the caller."""
        with self.turned:
            wanted = len(self.asked) + more
            return self.turned.wait_for(lambda: len(self.asked) >= wanted, timeout=10)


class FakeReceipt:
    def __init__(self, renewer: Renewals) -> None:
        self.renewer = renewer

    async def acknowledge(self) -> None: ...

    async def nack(self, delay: float, *, counted: bool) -> None: ...

    async def extend(self, seconds: float) -> None: ...

    async def dead_letter(self, reason: str, error: str) -> None: ...

    async def reply(self, address: str | None, body: Any) -> str:
        return ""


@pytest.fixture
def renewals() -> Renewals:
    return Renewals()


@pytest.fixture
def message(renewals: Renewals) -> Message[int]:
    return Message("1-0", 1, FakeReceipt(renewals))


@pytest.fixture
async def extender() -> AsyncIterator[LeaseExtender]:
    async with LeaseExtender(lease_seconds=0.06) as extender:
        yield extender


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


class TestWhileItIsHeld:
    async def test_a_blocked_event_loop_does_not_stop_renewals(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals
    ) -> None:
        with extender.hold(message, deadline=soon()) as lease:
            assert renewals.wait(5)
            assert not lease.lost

    async def test_everything_held_is_renewed_together(
        self, extender: LeaseExtender, renewals: Renewals, anyio_backend_name: str
    ) -> None:
        async def work(number: int) -> None:
            with extender.hold(Message(f"{number}-0", number, FakeReceipt(renewals)), deadline=soon()):
                await anyio.sleep(60)

        async with anyio.create_task_group() as group:
            for number in range(700):
                group.start_soon(work, number)
            await anyio.wait_all_tasks_blocked()
            assert extender.held == 700
            assert await anyio.to_thread.run_sync(renewals.wait, 2)
            assert renewals.asked[-1] == 700
            group.cancel_scope.cancel()
        assert extender.held == 0

    async def test_nothing_is_renewed_after_it_was_let_go(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals
    ) -> None:
        with extender.hold(message, deadline=soon()):
            assert renewals.wait()
        other = Renewals()
        with extender.hold(Message("2-0", 2, FakeReceipt(other)), deadline=soon()):
            assert other.wait()
            count = len(renewals.asked)
            assert other.wait(3)
        assert len(renewals.asked) == count

    @pytest.mark.parametrize("error", [MailboxConnectionError("away"), RuntimeError("a bug")], ids=["away", "bug"])
    async def test_a_server_that_is_away_is_asked_again_sooner_and_nothing_is_lost(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals, error: Exception
    ) -> None:
        def fail() -> bool:
            raise error

        renewals.answer = fail
        with extender.hold(message, deadline=soon()) as lease:
            assert await anyio.to_thread.run_sync(renewals.wait, 4)
            renewals.answer = lambda: True
            assert await anyio.to_thread.run_sync(renewals.wait, 2)
            assert not lease.lost


class TestWhenItIsLost:
    async def test_the_job_is_cancelled_and_told_why(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals
    ) -> None:
        renewals.answer = lambda: False
        leases: list[Lease] = []

        async def job() -> None:
            with extender.hold(message, deadline=soon()) as lease:
                leases.append(lease)
                await anyio.sleep(60)

        with anyio.fail_after(10), pytest.raises(LeaseLostError):
            await job()
        assert leases[0].lost
        assert extender.held == 0

    async def test_other_jobs_continue(self, extender: LeaseExtender, renewals: Renewals) -> None:
        stolen = Renewals()
        stolen.answer = lambda: False
        ended: list[str] = []

        async def lose() -> None:
            try:
                with extender.hold(Message("1-0", 1, FakeReceipt(stolen)), deadline=soon()):
                    await anyio.sleep(60)
            except LeaseLostError:
                ended.append("lost")

        with anyio.fail_after(10), extender.hold(Message("2-0", 2, FakeReceipt(renewals)), deadline=soon()) as kept:
            async with anyio.create_task_group() as group:
                group.start_soon(lose)
            assert ended == ["lost"]
            assert await anyio.to_thread.run_sync(renewals.wait)
            assert not kept.lost

    async def test_a_job_that_settled_its_message_is_not_cancelled_for_it(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals
    ) -> None:
        with extender.hold(message, deadline=soon()) as lease:
            assert await anyio.to_thread.run_sync(renewals.wait)
            renewals.answer = lambda: False
            await message.acknowledge()
            await anyio.sleep(0.2)
            assert not lease.lost

    async def test_a_loss_that_is_reported_after_the_job_ended_cancels_nothing(
        self, extender: LeaseExtender, message: Message[int]
    ) -> None:
        with extender.hold(message, deadline=soon()) as lease:
            pass
        lease._cancel()  # As the thread that renews has it called on the event loop, a moment too late.
        await asyncio.sleep(0)

    async def test_a_job_that_is_cancelled_as_well_stays_cancelled(
        self, extender: LeaseExtender, message: Message[int]
    ) -> None:
        leases: list[Lease] = []

        async def job() -> None:
            with extender.hold(message, deadline=soon()) as lease:
                leases.append(lease)
                await asyncio.sleep(60)

        task = asyncio.create_task(job())
        await asyncio.sleep(0)
        leases[0]._cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert extender.held == 0

    async def test_a_job_that_catches_its_cancellation_leaves_none_behind(
        self, extender: LeaseExtender, message: Message[int]
    ) -> None:
        with extender.hold(message, deadline=soon()) as lease:
            lease._cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def test_an_error_of_the_job_passes_through(self, extender: LeaseExtender, message: Message[int]) -> None:
        with pytest.raises(ZeroDivisionError), extender.hold(message, deadline=soon()):
            raise ZeroDivisionError
        assert extender.held == 0


class TestWhenNobodyIsThereToWorkFor:
    async def test_renewing_ends_at_the_jobs_deadline(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals
    ) -> None:
        with extender.hold(message, deadline=soon(0.2)) as lease:
            assert eventually(lambda: extender.held == 0)
            count = len(renewals.asked)
            await anyio.sleep(0.1)
            assert len(renewals.asked) == count
            assert not lease.lost

    async def test_a_job_without_a_deadline_is_refused(self, extender: LeaseExtender, message: Message[int]) -> None:
        for never in (float("inf"), float("nan")):
            with pytest.raises(ConfigurationError, match="deadline"), extender.hold(message, deadline=never):
                pass

    def test_renewing_ends_with_the_event_loop(self, message: Message[int], renewals: Renewals) -> None:
        extender = LeaseExtender(lease_seconds=0.06)
        loop = asyncio.new_event_loop()

        async def hold() -> None:
            extender.keep(message, deadline=soon(3600), on_lost=print)  # Never left: the event loop goes first.

        loop.run_until_complete(hold())
        assert renewals.wait(2)
        loop.close()
        assert eventually(lambda: extender.held == 0)
        extender.close()

    def test_renewing_ends_with_the_event_loops_thread(self, message: Message[int], renewals: Renewals) -> None:
        extender = LeaseExtender(lease_seconds=0.06)
        loop = asyncio.new_event_loop()
        leave = threading.Event()

        async def hold() -> None:
            extender.keep(message, deadline=soon(3600), on_lost=print)

        def live() -> None:
            loop.run_until_complete(hold())
            leave.wait(10)

        thread = threading.Thread(target=live)
        thread.start()
        assert renewals.wait(2)
        leave.set()
        thread.join()
        assert eventually(lambda: extender.held == 0)
        extender.close()
        loop.close()

    async def test_stall_detection_is_off_unless_asked_for(
        self, extender: LeaseExtender, message: Message[int], renewals: Renewals
    ) -> None:
        with extender.hold(message, deadline=soon()):
            assert renewals.wait(10)

    async def test_a_stalled_event_loop_gets_nothing_renewed_until_it_turns_again(
        self, message: Message[int], renewals: Renewals
    ) -> None:
        async with LeaseExtender(lease_seconds=0.06, stall_seconds=0.15) as extender:
            with extender.hold(message, deadline=soon()) as lease:
                assert await anyio.to_thread.run_sync(renewals.wait, 10)
                time.sleep(0.4)  # noqa: ASYNC251 - the stall
                count = len(renewals.asked)
                time.sleep(0.3)  # noqa: ASYNC251
                assert len(renewals.asked) == count
                assert await anyio.to_thread.run_sync(renewals.wait, 3)
                assert not lease.lost


class TestSettings:
    def test_settings_that_cannot_work_are_refused(self) -> None:
        for name, value in (("lease", 0), ("interval", 40), ("interval", 0), ("stall", 0)):
            with pytest.raises(ConfigurationError):
                LeaseExtender(**{f"{name}_seconds": value})  # type: ignore[arg-type]

    async def test_a_closed_extender_takes_no_more(self, message: Message[int]) -> None:
        extender = LeaseExtender()
        extender.close()
        with pytest.raises(ConfigurationError, match="closed"), extender.hold(message, deadline=soon()):
            pass


class RenewedMailbox(InMemoryMailbox[int]):
    """A mailbox that tells when its leases have been renewed."""

    def __init__(self, name: str, clock: FakeClock) -> None:
        super().__init__(name, clock=clock)
        self._renewed = threading.Semaphore(0)

    def renew(self, receipts: Sequence[Any], seconds: float) -> Sequence[bool]:
        kept = super().renew(receipts, seconds)
        self._renewed.release()
        return kept

    def wait_for_renewal(self) -> None:
        """Wait for a renewal that begins from now on, blocking the caller."""
        while self._renewed.acquire(blocking=False):
            pass
        for _ in range(2):  # The first may have begun earlier.
            assert self._renewed.acquire(timeout=20)


class TestWithRealMailboxes:
    async def test_in_memory_a_lease_is_kept_through_a_blocked_event_loop(self) -> None:
        clock = FakeClock()
        mailbox = RenewedMailbox("m", clock=clock)
        await mailbox.send(1)
        (message,) = await mailbox.receive(1, 30, 1)
        async with LeaseExtender(lease_seconds=30, interval_seconds=0.02) as extender:
            with extender.hold(message, deadline=soon()):
                for _ in range(4):  # A task that computes for 80 seconds.
                    clock.advance(20)
                    mailbox.wait_for_renewal()
                assert not await mailbox.receive(1, 1, 0)
                await message.acknowledge()
        assert await mailbox.approximate_count() == 0

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    async def test_on_redis_a_lease_is_kept_through_a_blocked_event_loop(self, redis_url: str) -> None:
        name = f"block-{uuid.uuid4().hex}"
        async with (
            RedisMailbox(name, int, redis_url, sweep_seconds=None) as mailbox,
            RedisMailbox(name, int, redis_url, sweep_seconds=None) as other,
            LeaseExtender(lease_seconds=2, interval_seconds=0.2) as extender,
        ):
            await asyncio.gather(*(mailbox.send(number) for number in range(300)))
            messages = await mailbox.receive(300, 2, 1)
            with extender.hold(messages[0], deadline=soon()):
                time.sleep(2.5)  # noqa: ASYNC251 - a task that computes
                assert await other.sweep() == 299
                await messages[0].acknowledge()

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    async def test_on_redis_a_lost_lease_cancels_its_job(self, redis_url: str) -> None:
        name = f"lost-{uuid.uuid4().hex}"
        async with (
            RedisMailbox(name, int, redis_url, sweep_seconds=None) as mailbox,
            RedisMailbox(name, int, redis_url, sweep_seconds=None) as other,
            LeaseExtender(lease_seconds=1.0) as extender,
        ):
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 60, 1)
            stolen: list[Message[int]] = []

            async def job() -> None:
                with extender.hold(message, deadline=soon()):
                    await age(other, 61)
                    assert await other.sweep() == 1
                    stolen.extend(await other.receive(1, 60, 0))
                    await anyio.sleep(60)

            with anyio.fail_after(10), pytest.raises(LeaseLostError):
                await job()
            await stolen[0].acknowledge()
