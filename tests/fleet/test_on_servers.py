"""The loops and whole fleets on real servers: stopping, restarts, killed workers, reply mailboxes that vanish."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairtrial import exact_match, open_store
from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoop, MainLoopConfig, MainLoopRequest
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, PostgresMailbox, RedisConnection, RedisMailbox
from fairtrial.mailbox.postgres import PostgresConnection
from tests.fleet.build import request, take, until
from tests.fleet.processes import Processes, said, wait_for_lines
from tests.redis_server import RedisServer
from tests.servers import PostgresServer

POLICY = DLQPolicy(base_seconds=0.05, max_seconds=0.1)


class OnRedis:
    """What differs on Redis."""

    connection: Any = RedisConnection
    mailbox: Any = RedisMailbox
    options: dict[str, Any] = {"sweep_seconds": 0.1}
    fixture = "redis_url"
    trials, stops = 400, 3
    lease_seconds = 2.0

    @staticmethod
    async def reply_mailboxes(connection: Any) -> int:
        """How many expire; if there are none, how many keys are left of them."""
        streams = await connection.command("KEYS", "{fairtrial:main.replies.*}:stream")
        expiring = [int(await connection.command("PTTL", key)) > 0 for key in streams]
        return sum(expiring) if streams else len(await connection.command("KEYS", "*replies*"))

    @staticmethod
    @contextmanager
    def own_server(folder: Path) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
        """The address of a server, and how to crash and start it."""
        with RedisServer(folder / "redis") as server:
            yield server.url, server.kill, server.start


class OnPostgres:
    """What differs on PostgreSQL."""

    connection: Any = PostgresConnection
    mailbox: Any = PostgresMailbox
    options: dict[str, Any] = {}
    fixture = "pg_url"
    trials, stops = 200, 1
    lease_seconds = 3.0

    @staticmethod
    async def reply_mailboxes(connection: Any) -> int:
        """How many expire."""
        statement = "SELECT count(*) FROM mailbox_queues WHERE name LIKE 'main.replies.%%' AND expires_at IS NOT NULL"
        return int((await connection.run("counting", statement, {}))[0][0])

    @staticmethod
    @contextmanager
    def own_server(folder: Path) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
        """The address of a database, and how to crash and start its server."""
        with PostgresServer() as server:
            yield server.new_database(), lambda: server.stop(crash=True), server.start


type Queue = type[OnRedis | OnPostgres]


@pytest.fixture(params=[OnRedis, OnPostgres], ids=["redis", "postgresql"])
def queue(request: pytest.FixtureRequest) -> Queue:
    chosen: Queue = request.param
    return chosen


@pytest.fixture
def url(queue: Queue, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(queue.fixture))


async def test_stopping_at_any_moment_strands_nothing(queue: Queue, url: str) -> None:
    """What was received and not finished is back at once, not when its lease ends."""

    async def work(input: str) -> str:
        await asyncio.sleep(random.uniform(0, 0.01))
        return input

    total = queue.trials
    async with (
        queue.connection(url) as connection,
        queue.mailbox("requests", EvalRequest, connection) as requests,
        queue.mailbox("results", EvalReply, connection) as results,
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
                return bool(depth.in_flight == 0 and depth.waiting + len(delivered) == total)

            await until(everything_is_waiting_or_delivered, 30)  # A lease is 60.
        assert delivered == set(range(total))
        assert stops > queue.stops


@pytest.mark.proves("R79")
async def test_a_server_that_goes_away_and_comes_back_costs_no_trial(queue: Queue, tmp_path: Path) -> None:
    started = asyncio.Event()

    async def work(input: str) -> str:
        started.set()
        await asyncio.sleep(0.05)
        return input

    with queue.own_server(tmp_path) as (url, crash, start):
        async with (
            queue.connection(url) as connection,
            queue.mailbox("requests", EvalRequest, connection, **queue.options) as requests,
            queue.mailbox("results", EvalReply, connection) as results,
        ):
            await asyncio.gather(*(requests.send(request(number)) for number in range(60)))
            config = EvalLoopConfig(concurrency=10, lease_seconds=queue.lease_seconds, wait_seconds=0.5, dlq=POLICY)
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config)
            running = asyncio.create_task(loop.run(until_empty=True))
            await started.wait()
            await asyncio.to_thread(crash)
            await until(lambda: loop.counters.receive_errors + loop.counters.delivery_retries > 0)
            await asyncio.to_thread(start)
            await asyncio.wait_for(running, 60)
            found = await take(results)
            assert {result.ordinal for result in found} == set(range(60))
            assert {result.outcome for result in found} == {"scored"}
            assert await requests.dead_letters.count() == 0


@pytest.mark.proves("R53", "R80")
async def test_a_reply_mailbox_per_worker_that_vanishes_with_it(queue: Queue, url: str) -> None:
    async with (
        queue.connection(url) as connection,
        queue.mailbox("requests", EvalRequest, connection) as requests,
        queue.mailbox("results", EvalReply, connection) as results,
        queue.mailbox("main", MainLoopRequest, connection) as main,
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
            return await queue.reply_mailboxes(connection) == 2

        await until(both_are_there)
        await asyncio.gather(*running)
        assert all(result.passed for result in await take(results, 30))
        assert await queue.reply_mailboxes(connection) == 0
        # A request from someone who is gone: the answer makes no mailbox anew, and the loop goes on.
        await main.send(MainLoopRequest("late"), reply_to="main.replies.worker-0")
        await main.send(MainLoopRequest("on"))
        await until(lambda: served.counters.finished >= 32)
        assert await queue.reply_mailboxes(connection) == 0
        served.stop()
        await serving


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


@pytest.mark.proves("R60", "R61", "R67", "R146")
@pytest.mark.timeout(300)
def test_workers_that_are_killed_cost_no_trial(tmp_path: Path, pg_url: str) -> None:
    """Queue and store are one database; each kill loses only leases."""
    trials, log = 160, tmp_path / "executed"
    settings: dict[str, Any] = {"samples": trials, "log": log, "sleep": "0.05,0.15", "concurrency": 8}
    with Processes(tmp_path, pg_url, **settings) as fleet:
        workers = [fleet.worker("--lease", "2") for _ in range(2)]
        client = fleet.client(pg_url)
        for kill, lines in enumerate((30, 80)):
            wait_for_lines(log, lines, timeout=120)
            workers[kill % 2].kill()
            workers[kill % 2].wait()
            workers[kill % 2] = fleet.worker("--lease", "2")
        answer = said(client, 180)
        assert (answer["status"], answer["successful"]) == ("finished", trials), fleet.logs()
    store = open_store(pg_url)
    (run,) = store.runs()
    assert sorted(result.ordinal for result in store.results(run.run_id)) == list(range(trials))
    executed = log.read_bytes().count(b"\n")
    assert trials < executed <= trials + 2 * 2 * 16
    store.close()
