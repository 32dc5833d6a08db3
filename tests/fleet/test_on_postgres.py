"""The loops and whole fleets on a real PostgreSQL: stopping, restarts, killed workers, reply mailboxes that vanish."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from fairtrial import exact_match, open_store
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoop, MainLoopConfig, MainLoopRequest
from fairtrial.mailbox import DLQPolicy, PostgresConnection, PostgresMailbox
from tests.fleet.build import request, take, until
from tests.fleet.processes import Processes, said, wait_for_lines
from tests.servers import PostgresServer

POLICY = DLQPolicy(base_seconds=0.05, max_seconds=0.1)


@pytest.mark.anyio
async def test_stopping_at_any_moment_strands_nothing(pg_url: str) -> None:
    """What was received and not finished is back at once, not when its lease ends."""

    async def work(input: str) -> str:
        await asyncio.sleep(random.uniform(0, 0.01))
        return input

    total = 200
    async with (
        PostgresConnection(pg_url) as connection,
        PostgresMailbox("requests", EvalRequest, connection) as requests,
        PostgresMailbox("results", EvalReply, connection) as results,
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

            await until(everything_is_waiting_or_delivered, 20)  # A lease is 60.
        assert delivered == set(range(total))
        assert stops > 1


@pytest.mark.anyio
@pytest.mark.proves("R79")
async def test_a_server_that_goes_away_and_comes_back_costs_no_trial() -> None:
    started = asyncio.Event()

    async def work(input: str) -> str:
        started.set()
        await asyncio.sleep(0.05)
        return input

    with PostgresServer() as server:
        async with (
            PostgresConnection(server.new_database()) as connection,
            PostgresMailbox("requests", EvalRequest, connection) as requests,
            PostgresMailbox("results", EvalReply, connection) as results,
        ):
            await asyncio.gather(*(requests.send(request(number)) for number in range(60)))
            config = EvalLoopConfig(concurrency=10, lease_seconds=3.0, wait_seconds=0.5, dlq=POLICY)
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config)
            running = asyncio.create_task(loop.run(until_empty=True))
            await started.wait()
            await asyncio.to_thread(server.stop, crash=True)
            await until(lambda: loop.counters.receive_errors + loop.counters.delivery_retries > 0)
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(running, 60)
            found = await take(results)
            assert {result.ordinal for result in found} == set(range(60))
            assert {result.outcome for result in found} == {"scored"}
            assert await requests.dead_letters.count() == 0


@pytest.mark.anyio
@pytest.mark.proves("R53", "R80")
async def test_a_reply_mailbox_per_worker_that_vanishes_with_it(pg_url: str) -> None:
    async with (
        PostgresConnection(pg_url) as connection,
        PostgresMailbox("requests", EvalRequest, connection) as requests,
        PostgresMailbox("results", EvalReply, connection) as results,
        PostgresMailbox("main", MainLoopRequest, connection) as main,
    ):

        async def reply_mailboxes() -> int:
            statement = (
                "SELECT count(*) FROM mailbox_queues WHERE name LIKE 'main.replies.%%' AND expires_at IS NOT NULL"
            )
            return int((await connection.run("counting", statement, {}))[0][0])

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
            return await reply_mailboxes() == 2

        await until(both_are_there)
        await asyncio.gather(*running)
        assert all(result.passed for result in await take(results, 30))
        assert await reply_mailboxes() == 0
        # A request from someone who is gone: the answer makes no mailbox anew, and the loop goes on.
        await main.send(MainLoopRequest("late"), reply_to="main.replies.worker-0")
        await main.send(MainLoopRequest("on"))
        await until(lambda: served.counters.finished >= 32)
        assert await reply_mailboxes() == 0
        served.stop()
        await serving


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
