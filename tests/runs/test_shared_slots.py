"""Places of running trials that are given up while a trial only waits."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from fairtrial.runs import scheduler
from fairtrial.runs.scheduler import SharedSlots
from fairtrial.trials.context import current_slot, slot_released


async def test_waiting_trials_let_others_run_and_never_too_many_run() -> None:
    left, done = list(range(40)), list[int]()
    running = waiting = most_running = most_waiting = workers = 0

    async def trial(number: int) -> None:
        nonlocal running, waiting, most_running, most_waiting
        running += 1
        most_running = max(most_running, running)
        await anyio.sleep(0.001)
        running -= 1
        async with slot_released():
            waiting += 1
            most_waiting = max(most_waiting, waiting)
            await anyio.sleep(0.02)
            waiting -= 1
        running += 1
        most_running = max(most_running, running)
        await anyio.lowlevel.checkpoint()
        running -= 1
        done.append(number)

    async def work() -> None:
        nonlocal workers
        workers += 1
        async with slots:
            assert current_slot.get() is slots
            while left:
                await trial(left.pop(0))
                if await slots.is_surplus():
                    break
        workers -= 1

    with anyio.fail_after(20):
        async with anyio.create_task_group() as crew:
            slots = SharedSlots(2, lambda: crew.start_soon(work))
            for _ in range(2):
                crew.start_soon(work)
    assert sorted(done) == list(range(40))
    assert most_running == 2
    assert most_waiting > 4
    assert workers == 0
    assert slots._slots.value == 2  # All places are free again.


async def test_the_number_of_trials_that_wait_without_a_slot_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_LEAST_WAITING", 1)
    monkeypatch.setattr(scheduler, "_WAITING_PER_SLOT", 3)
    started: list[int] = []
    slots = SharedSlots(2, lambda: started.append(1))
    assert [slots.release() for _ in range(8)] == [True] * 6 + [False] * 2
    assert len(started) == 6
    monkeypatch.setattr(scheduler, "_LEAST_WAITING", 4)
    few = SharedSlots(1, lambda: started.append(1))
    assert [few.release() for _ in range(5)] == [True] * 4 + [False]


async def test_a_surplus_worker_ends_and_others_queue_again() -> None:
    slots = SharedSlots(1, lambda: None)
    await slots.acquire()
    assert not await slots.is_surplus()
    assert slots.release()
    assert await slots.is_surplus()
    assert not await slots.is_surplus()


async def test_a_worker_that_is_not_surplus_has_a_place_afterwards() -> None:
    slots = SharedSlots(1, lambda: None)
    async with slots:
        assert not await slots.is_surplus()
        with anyio.move_on_after(0.02) as waiting:
            async with slots:
                pass
        assert waiting.cancelled_caught
