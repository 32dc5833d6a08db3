"""The loops on a real Redis: stopping, partitions, reply mailboxes that vanish."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from fairtrial import exact_match
from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoop, MainLoopConfig, MainLoopRequest
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, RedisConnection, RedisMailbox
from tests.fleet.build import request, take, until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio
POLICY = DLQPolicy(base_seconds=0.05, max_seconds=0.1)


async def test_stopping_at_any_moment_strands_nothing(redis_url: str) -> None:
    """Engine trap 4: what was received and not finished is back at once, not when its lease ends."""

    async def work(input: str) -> str:
        await asyncio.sleep(random.uniform(0, 0.01))
        return input

    total = 400
    async with (
        RedisConnection(redis_url) as connection,
        RedisMailbox("requests", EvalRequest, connection) as requests,
        RedisMailbox("results", EvalReply, connection) as results,
    ):
        await asyncio.gather(*(requests.send(request(number)) for number in range(total)))
        stops = 0
        delivered: set[int] = set()
        while (await requests.depth()).waiting:
            config = EvalLoopConfig(concurrency=20, drain_seconds=random.choice([0, 0.005, 5]))
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config)
            running = asyncio.create_task(loop.run())
            await asyncio.sleep(random.uniform(0.005, 0.05))
            loop.stop()
            await running
            stops += 1

            # A read that was cancelled is handed back in the background.
            async def everything_is_waiting_or_delivered() -> bool:
                delivered.update(result.ordinal for result in await take(results))
                depth = await requests.depth()
                return depth.in_flight == 0 and depth.waiting + len(delivered) == total

            await until(everything_is_waiting_or_delivered, 30)  # A lease is 60.
        assert delivered == set(range(total))
        assert stops > 3


async def test_what_is_handed_back_while_redis_is_frozen_is_back_when_it_answers(tmp_path: Path) -> None:
    async def work(input: str) -> str:
        await asyncio.sleep(60)
        return input

    with RedisServer(tmp_path / "redis") as server:
        async with (
            RedisConnection(server.url, timeout_seconds=0.3) as connection,
            RedisMailbox("requests", EvalRequest, connection) as requests,
        ):
            results: InMemoryMailbox[EvalReply] = InMemoryMailbox("results")
            await asyncio.gather(*(requests.send(request(number)) for number in range(20)))
            config = EvalLoopConfig(concurrency=20)
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config)
            running = asyncio.create_task(loop.run())
            await until(lambda: loop.counters.in_flight == 20)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                sending = asyncio.create_task(requests.send(request(20)))
                await asyncio.sleep(0.1)
                loop.hurry()  # What is handed back now waits until the send has failed.
                await asyncio.sleep(1)  # Several times the limit for an answer.
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await running
            with pytest.raises(MailboxConnectionError):
                await sending

            async def nothing_is_held() -> bool:
                return (await requests.depth()).in_flight == 0

            await until(nothing_is_held)  # A lease is 60 seconds.
            assert (await requests.depth()).waiting in (20, 21)  # A send that fails may have arrived.


@pytest.mark.proves("R79")
async def test_a_redis_that_goes_away_and_comes_back_costs_no_trial(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def work(input: str) -> str:
        started.set()
        await asyncio.sleep(0.05)
        return input

    with RedisServer(tmp_path / "redis") as server:
        async with (
            RedisConnection(server.url) as connection,
            RedisMailbox("requests", EvalRequest, connection, sweep_seconds=0.1) as requests,
            RedisMailbox("results", EvalReply, connection) as results,
        ):
            await asyncio.gather(*(requests.send(request(number)) for number in range(60)))
            config = EvalLoopConfig(concurrency=10, lease_seconds=2.0, wait_seconds=0.5, dlq=POLICY)
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config)
            running = asyncio.create_task(loop.run(until_empty=True))
            await started.wait()
            await asyncio.to_thread(server.kill)
            await until(lambda: loop.counters.receive_errors + loop.counters.delivery_retries > 0)
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(running, 60)
            found = await take(results)
            assert {result.ordinal for result in found} == set(range(60))
            assert {result.outcome for result in found} == {"scored"}
            assert await requests.dead_letters.count() == 0


@pytest.mark.proves("R53", "R80")
async def test_a_reply_mailbox_per_worker_that_vanishes_with_it(redis_url: str) -> None:
    """Engine trap 10, from the worker's side."""
    async with (
        RedisConnection(redis_url) as connection,
        RedisMailbox("requests", EvalRequest, connection) as requests,
        RedisMailbox("results", EvalReply, connection) as results,
        RedisMailbox("main", MainLoopRequest, connection) as main,
    ):
        for number in range(30):
            await requests.send(request(number, "q", "Q"))
        loops = [
            EvalLoop(
                requests=requests,
                evaluator=exact_match,
                mainloop_requests=main,
                results=results,
                name=f"worker-{number}",
                config=EvalLoopConfig(concurrency=4),
            )
            for number in range(2)
        ]
        served = MainLoop(str.upper, requests=main, config=MainLoopConfig(concurrency=4))
        serving = asyncio.create_task(served.run())
        running = [asyncio.create_task(loop.run(until_empty=True)) for loop in loops]

        async def both_are_there() -> bool:
            return len(await connection.command("KEYS", "{fairtrial:main.replies.*}:stream")) == 2

        await until(both_are_there)
        for key in await connection.command("KEYS", "{fairtrial:main.replies.*}:stream"):
            assert int(await connection.command("PTTL", key)) > 0
        await asyncio.gather(*running)
        assert all(result.passed for result in await take(results, 30))
        assert await connection.command("KEYS", "*replies*") == []
        # A request from someone who is gone: the answer makes no mailbox anew, and the loop goes on.
        await main.send(MainLoopRequest("late"), reply_to="main.replies.worker-0")
        await main.send(MainLoopRequest("on"))
        await until(lambda: served.counters.finished >= 32)
        assert await connection.command("KEYS", "*replies*") == []
        served.stop()
        await serving
