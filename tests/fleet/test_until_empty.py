"""Workers that end when the queue is empty, on a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairtrial import exact_match
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest
from fairtrial.mailbox import RedisConnection, RedisMailbox
from tests.fleet.build import request, take, until
from tests.fleet.processes import Processes, said, wait_for_lines
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis
type Boxes = tuple[RedisMailbox[EvalRequest], RedisMailbox[EvalReply]]


@pytest.fixture
async def boxes(redis_url: str) -> AsyncIterator[Boxes]:
    async with (
        RedisConnection(redis_url) as connection,
        RedisMailbox("requests", EvalRequest, connection, sweep_seconds=0.1) as requests,
        RedisMailbox("results", EvalReply, connection) as results,
    ):
        yield requests, results


def worker(boxes: Boxes, *, empty_seconds: float = 0.0) -> EvalLoop:
    async def work(input: str) -> str:
        await asyncio.sleep(0.02)
        return input

    config = EvalLoopConfig(concurrency=4, empty_seconds=empty_seconds)
    return EvalLoop(requests=boxes[0], evaluator=exact_match, loop=work, results=boxes[1], config=config)


@pytest.mark.parametrize("empty_seconds", [0.0, 0.6])
async def test_a_worker_of_an_empty_queue_ends_after_the_stated_time(boxes: Boxes, empty_seconds: float) -> None:
    loop = worker(boxes, empty_seconds=empty_seconds)
    began = time.monotonic()
    await asyncio.wait_for(loop.run(until_empty=True), 20)
    assert time.monotonic() - began >= empty_seconds
    assert loop.counters.received == 0


async def test_a_worker_waits_for_what_is_in_flight_at_another_and_does_it_if_it_comes_back(boxes: Boxes) -> None:
    await boxes[0].send(request(7))
    (taken,) = await boxes[0].receive(1, visibility_timeout=60)
    loop = worker(boxes)
    running = asyncio.create_task(loop.run(until_empty=True))
    await asyncio.sleep(1)  # Several looks at a queue with nothing to receive.
    assert not running.done()
    await taken.nack(0.5)  # Now it is delayed, which is not empty either.
    await asyncio.wait_for(running, 20)
    assert [result.ordinal for result in await take(boxes[1])] == [7]


async def test_work_that_arrives_within_the_stated_time_is_done_and_the_time_begins_again(boxes: Boxes) -> None:
    loop = worker(boxes, empty_seconds=1.5)
    running = asyncio.create_task(loop.run(until_empty=True))
    await until(lambda: loop._worker._empty_since is not None)
    await asyncio.sleep(0.5)
    await boxes[0].send(request(1))
    await until(lambda: loop.counters.finished == 1)
    finished = time.monotonic()
    await asyncio.wait_for(running, 20)
    assert time.monotonic() - finished >= 1.4  # Less the moment between the end of the trial and its counting.
    assert [result.ordinal for result in await take(boxes[1])] == [1]


async def test_two_workers_share_the_work_and_both_end(boxes: Boxes) -> None:
    await boxes[0].send_all([request(number) for number in range(60)])
    loops = [worker(boxes, empty_seconds=0.3) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(*(loop.run(until_empty=True) for loop in loops)), 30)
    assert [result.ordinal for result in await take(boxes[1])] == list(range(60))
    assert all(loop.counters.received for loop in loops)
    assert sum(loop.counters.received for loop in loops) == 60


async def test_an_unreachable_queue_is_not_an_empty_one(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        async with (
            RedisConnection(server.url) as connection,
            RedisMailbox("requests", EvalRequest, connection) as requests,
            RedisMailbox("results", EvalReply, connection) as results,
        ):
            loop = worker((requests, results), empty_seconds=2.0)
            running = asyncio.create_task(loop.run(until_empty=True))
            await until(lambda: loop._worker._empty_since is not None)
            await asyncio.to_thread(server.kill)
            await until(lambda: loop.counters.receive_errors > 0)
            assert loop._worker._empty_since is None
            await asyncio.to_thread(server.start)
            await requests.send(request(3))
            await asyncio.wait_for(running, 30)
            assert [result.ordinal for result in await take(results)] == [3]


def test_worker_processes_end_with_code_0_when_the_run_is_done(tmp_path: Path, redis_url: str) -> None:
    log = tmp_path / "executed"
    with Processes(tmp_path, redis_url, samples=40, log=log, sleep="0.1,0.2") as fleet:
        client = fleet.client(f"{tmp_path}/runs.db")
        options = ("--until-empty", "--empty-seconds", "1", "--concurrency", "4")
        first = fleet.worker(*options)
        wait_for_lines(log, 4)
        second = fleet.worker(*options)  # Starts with work in flight at the first.
        assert said(client)["successful"] == 40, fleet.logs()
        assert [process.wait(30) for process in (first, second)] == [0, 0], fleet.logs()
        assert fleet.worker("--until-empty", "--empty-seconds", "0").wait(30) == 0, fleet.logs()
    assert sorted(map(int, log.read_text().split())) == list(range(40))
