"""Tasks that catch their own cancellation, as `except:` in a retry loop does."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from fairtrial.fleet import EvalLoop, EvalLoopConfig, LoopConfig, LoopCounters
from fairtrial.fleet.worker.jobs import Job
from fairtrial.fleet.worker.worker import Worker
from fairtrial.mailbox import InMemoryMailbox, Mailbox
from tests.conftest import Child
from tests.fleet.build import QUICK, request, rules, sent, serving, take


def loop_of(task: Any, requests: Mailbox[Any], results: Mailbox[Any]) -> EvalLoop:
    """A loop whose trials have a twentieth of a second."""
    hasty = rules(task, timeout_seconds=0.05, close_seconds=0.0)
    config = EvalLoopConfig(concurrency=1, buffer_seconds=0.05, wait_seconds=0.1)
    return EvalLoop(requests=requests, rules=hasty, results=results, config=config)


@pytest.mark.proves("R132")
async def test_a_task_that_ignores_its_cancellation_has_timed_out_and_its_slot_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = anyio.Event()
    ended: list[Any] = []

    async def stubborn(input: str) -> str:
        while input == "stubborn" and not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                pass
        ended.append(input)
        return input

    requests, results = await sent(request(0, "stubborn", "stubborn"), request(1, "meek", "meek"))
    loop = loop_of(stubborn, requests, results)
    async with serving(loop):
        first, second = await take(results, 2)
        released.set()
        while "stubborn" not in ended:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    assert (first.outcome, second.outcome) == ("timeout", "scored")
    assert "ignored its cancellation" in (first.error or "")
    assert "must let CancelledError through" in caplog.text
    assert (loop.counters.hung, loop.counters.finished, loop.counters.in_flight) == (1, 2, 0)
    assert not await take(results)  # What it says in the end is of no account.
    assert await requests.approximate_count() == 0
    assert not await requests.dead_letters.count()


@pytest.mark.proves("R132")
async def test_where_nothing_better_is_known_such_a_message_has_failed() -> None:
    released = anyio.Event()

    async def stubborn(job: Job[int]) -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                pass

    mailbox: InMemoryMailbox[int] = InMemoryMailbox("q", int)
    await mailbox.send(1)
    counters = LoopCounters()
    config = LoopConfig(concurrency=1, wait_seconds=0.1, drain_seconds=0, dlq=QUICK)
    worker = Worker(mailbox, stubborn, config, counters, hold_seconds=0.05)
    await worker.run(max_iterations=1)
    released.set()
    assert (counters.hung, counters.retried) == (1, 1)
    assert (await mailbox.depth()).delayed + (await mailbox.depth()).waiting == 1


ENDING = """
import asyncio
from fairtrial.mailbox import InMemoryMailbox
from tests.fleet.build import request
from tests.fleet.test_stubborn import loop_of

async def stubborn(input):
    while True:
        try:
            await asyncio.sleep(300)
        except BaseException:
            pass

async def main():
    requests, results = InMemoryMailbox("q"), InMemoryMailbox("r")
    await requests.send(request())
    loop = loop_of(stubborn, requests, results)
    await loop.run(max_iterations=1)
    print("over", loop.counters.hung, flush=True)

asyncio.run(main())
"""


@pytest.mark.timeout(60)
def test_a_process_ends_although_a_task_in_it_does_not(child: Child) -> None:
    assert child(ENDING) == "over 1"
