"""A fleet on SQS: workers and the client are killed, the server pauses; every trial is stored once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairtrial import TrialContext, exact_match, open_store
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, SqsBroker, connect_broker
from fairtrial.mailbox import SqsConnection, SqsMailbox
from fairtrial.mailbox.sqs.queues import EXPIRES_TAG, delete_abandoned, tags_of
from tests.fleet.build import request
from tests.fleet.processes import Processes, end, said, wait_for_lines
from tests.sqs_server import SqsServer

pytestmark = pytest.mark.proves("R70")


def stored(store: Path) -> list[int]:
    opened = open_store(str(store))
    (run,) = opened.runs()
    ordinals = sorted(result.ordinal for result in opened.results(run.run_id))
    opened.close()
    return ordinals


def test_a_fleet_on_sqs_completes_a_run_and_its_commands_work(sqs_url: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    with Processes(tmp_path, sqs_url, samples=60, log=tmp_path / "log") as fleet:
        worker = fleet.worker()
        answer = said(fleet.client(str(store)))
        assert answer["status"] == "finished", fleet.logs()
        assert stored(store) == list(range(60))
        shown, _ = fleet.command("fleet", "fleet-test", "--mailbox", sqs_url, "--json").communicate(timeout=60)
        (suite,) = json.loads(shown)["suites"]
        assert (suite["waiting"], suite["in_flight"], suite["dead_letters"]) == (0, 0, 0)
        asked = fleet.command("fleet", "dlq", "list", "fleet-test", "--mailbox", sqs_url, "--json")
        listed, _ = asked.communicate(timeout=60)
        assert json.loads(listed)["letters"] == []
        checked, _ = fleet.command("doctor", "--store", str(store), "--mailbox", sqs_url, "--json").communicate(
            timeout=60
        )
        assert {"queue": "ok", "queue rights": "ok"}.items() <= {
            check["name"]: check["status"] for check in json.loads(checked)["checks"]
        }.items()
        assert end(worker) == 0, fleet.logs()
        assert (tmp_path / "log").read_bytes().count(b"\n") == 60


async def test_the_broker_lists_suites_and_marks_what_it_leaves_behind(sqs_url: str) -> None:
    broker = connect_broker(sqs_url)
    assert isinstance(broker, SqsBroker)
    try:
        requests = await broker.requests("support")
        await requests.approximate_count()
        results = await broker.results("support", "run-1")
        assert await broker.suites() == ["support"]
        assert await broker.has_mailbox(results.name)
        assert not await broker.has_mailbox("support.results.run-2")
        (url,) = results.queues.urls  # type: ignore[attr-defined]
        opened = int((await tags_of(broker.connection, url))[EXPIRES_TAG])
        await broker.retire(results)
        retired = int((await tags_of(broker.connection, url))[EXPIRES_TAG])
        assert opened - time.time() > 29 * 24 * 3600
        assert 3000 < retired - time.time() < 3700
        broker.connection.clock = SimpleNamespace(time=lambda: retired + 100.0, monotonic=time.monotonic)
        assert await delete_abandoned(broker.connection) == 2  # Results and their dead letters.
        assert not await broker.has_mailbox(results.name)
        assert await broker.suites() == ["support"]
    finally:
        await broker.close()


@pytest.mark.long
def test_every_trial_is_stored_once_although_workers_and_client_are_killed_and_sqs_pauses(
    sqs_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials, store, log = 1500, tmp_path / "runs.db", tmp_path / "log"
    kills = 0
    with SqsServer() as server:
        url = server.url("chaos", poll=1, linger=0.05, shards=2, lag=2)
        with Processes(tmp_path, url, samples=trials, log=log, sleep="0.05,0.3", concurrency=20) as fleet:
            client = fleet.client(str(store))
            workers = [fleet.worker("--lease", "5") for _ in range(3)]
            began = time.monotonic()
            for share in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85):
                wait_for_lines(log, round(share * trials), timeout=120)
                which = kills % len(workers)
                workers[which].kill()
                workers[which].communicate()
                workers[which] = fleet.worker("--lease", "5")
                kills += 1
                if kills == 3:
                    server.pause()
                    time.sleep(2)
                    server.resume()
                if kills == 4:
                    client.kill()
                    client.communicate()
                    client = fleet.client(str(store))
            answer = said(client, timeout=200)
            executed = log.read_bytes().count(b"\n")
            assert answer["status"] == "finished", fleet.logs()
    assert stored(store) == list(range(trials))
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(
            f"\nSQS: {trials} trials in {seconds:.0f} s, {kills} workers killed, {executed - trials} extra executions"
        )
    assert 0 <= executed - trials < trials / 2


def disturb(server: SqsServer) -> int:
    """Send every queued message of the requests again, several times, with garbage between; return how many."""
    client, copied = server.client(), 0
    for url in client.list_queues()["QueueUrls"]:
        found = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0).get("Messages", [])
        for message in found:
            for text in (
                message["Body"],
                "garbage",
                message["Body"],
                message["Body"][: len(message["Body"]) // 2 + 1],
                "{}\n" + "[" * 50_000,
            ):
                client.send_message(QueueUrl=url, MessageBody=text)
            copied += 1
    return copied


@pytest.mark.long
def test_copies_and_garbage_in_every_queue_change_nothing(sqs_url: str, tmp_path: Path) -> None:
    trials, store, log = 150, tmp_path / "runs.db", tmp_path / "log"
    with SqsServer() as server:
        url = server.url("copies", poll=1, linger=0, lag=2)
        with Processes(tmp_path, url, samples=trials, log=log, sleep="0.05,0.1") as fleet:
            client = fleet.client(str(store))
            worker = fleet.worker("--concurrency", "4")
            copied = 0
            for share in (0.1, 0.3, 0.5):
                wait_for_lines(log, round(share * trials))
                copied += disturb(server)
            assert copied > 0
            assert said(client)["status"] == "finished", fleet.logs()
            assert end(worker) == 0, fleet.logs()
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT ordinal, count(*) FROM results GROUP BY ordinal ORDER BY ordinal").fetchall()
    assert rows == [(ordinal, 1) for ordinal in range(trials)]


async def count_receives(url: str) -> tuple[int, float]:
    """Work on forty requests in ten slots that become free one by one; return how often the worker has received."""
    async with SqsConnection(url) as connection:
        requests: SqsMailbox[EvalRequest] = SqsMailbox("requests", EvalRequest, connection)
        results: SqsMailbox[EvalReply] = SqsMailbox("results", EvalReply, connection)
        async with requests, results:
            await requests.send_all([request(number) for number in range(40)])
            before = connection.requests["receive_message"]

            async def work(input: str, ctx: TrialContext) -> str:
                await asyncio.sleep(0.03 * (1 + int(ctx.key.sample_id.removeprefix("s")) % 10))
                return input

            config = EvalLoopConfig(concurrency=10)
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=work, results=results, config=config)
            await asyncio.wait_for(loop.run(until_empty=True), 50)
            assert loop.counters.finished == 40
            return connection.requests["receive_message"] - before, requests.gather_seconds


async def test_a_worker_gathers_free_slots_before_it_receives_because_requests_cost_money(
    sqs_url: str, sqs_server: SqsServer
) -> None:
    at_once, gather = await count_receives(sqs_server.url("at-once", poll=1, linger=0, lag=2))
    assert gather == 0
    gathered, gather = await count_receives(sqs_server.url("gathered", poll=1, linger=0.2, lag=2))
    assert gather == 0.2
    assert gathered < at_once / 2
