"""Health checks and metrics of the client of a run, and metrics of workers, with real servers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, ScriptedAdapter, exact_match, open_store, task
from fairtrial.base import metrics
from fairtrial.fleet.ops.health import ClientProbe, exposition, process_families
from fairtrial.mailbox import RedisConnection, RedisMailbox
from fairtrial.suites.worker import run_worker
from tests.redis_server import RedisServer
from tests.servers import PostgresServer


@pytest.fixture
def probe() -> Iterator[ClientProbe]:
    probe = ClientProbe("127.0.0.1", 0, stall_seconds=0.5)
    with probe.serving():
        yield probe


def ask(probe: ClientProbe, path: str) -> tuple[int, str]:
    assert probe.address is not None
    try:
        with urlopen("http://{}:{}{}".format(*probe.address, path), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def number(text: str, name: str, **labels: str) -> float:
    """The value of the one series with this name and these labels."""
    found = [
        float(value)
        for series, named, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        if series == name and all(f'{key}="{label}"' in named for key, label in labels.items())
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 25
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def numbers(count: int) -> Dataset[int, int]:
    return Dataset([Sample(f"s{value}", value, value) for value in range(count)])


def test_a_local_run_shows_where_it_stands(probe: ClientProbe, tmp_path: Path) -> None:
    gate, seen = threading.Event(), threading.Event()

    def wait_at_three(value: int) -> int:
        if value >= 3:
            seen.set()
            gate.wait(60)
        return value

    suite = EvalSuite("local", numbers(5), wait_at_three, exact_match, config=EvalConfig(max_concurrent=2))
    assert ask(probe, "/ready")[0] == 503
    before = sum(count for _, (counts, _) in metrics.COMMIT_SECONDS.read().items() for count in counts)
    thread = threading.Thread(target=suite.run_sync, kwargs={"store": str(tmp_path / "runs.db"), "bus": [probe]})
    thread.start()
    try:
        assert seen.wait(60)
        until(lambda: number(ask(probe, "/metrics")[1], "fairtrial_run_trials", state="stored") == 3)
        text = ask(probe, "/metrics")[1]
        assert number(text, "fairtrial_run_trials", state="planned", suite="local") == 5
        assert number(text, "fairtrial_run_trials", state="outstanding") == 2
        assert number(text, "fairtrial_run_cost_usd", suite="local") == 0
        assert number(text, "fairtrial_commit_duration_seconds_count") > before
        assert number(text, "fairtrial_trial_duration_seconds_count", outcome="scored") >= 3
        assert number(text, "fairtrial_slow_commits_total") >= 0
        assert ask(probe, "/ready")[0] == 200
        assert json.loads(ask(probe, "/health")[1])["live"] is True
    finally:
        gate.set()
        thread.join(60)
    assert "fairtrial_run_trials{" not in ask(probe, "/metrics")[1]


def test_health_fails_while_the_event_loop_of_a_run_is_blocked(probe: ClientProbe) -> None:
    gate, seen = threading.Event(), threading.Event()

    async def block(value: int) -> int:
        seen.set()
        gate.wait(60)
        return value

    suite = EvalSuite("blocked", numbers(1), block, exact_match)
    thread = threading.Thread(target=suite.run_sync, kwargs={"store": "memory:", "bus": [probe]})
    thread.start()
    try:
        assert seen.wait(60)
        until(lambda: ask(probe, "/health")[0] == 503)
        status, said = ask(probe, "/live")
        assert status == 503
        assert "the event loop has been stuck for" in said
        until(lambda: number(ask(probe, "/metrics")[1], "fairtrial_event_loop_stalls_total") == 1)
    finally:
        gate.set()
        thread.join(60)
    until(lambda: ask(probe, "/health")[0] == 200)


def test_a_run_that_waits_for_its_database_says_so(probe: ClientProbe) -> None:
    server = PostgresServer()
    try:
        server.start()
        url = server.new_database()
        gate, seen = threading.Event(), threading.Event()

        def wait(value: int) -> int:
            seen.set()
            gate.wait(60)
            return value

        suite = EvalSuite("away", numbers(2), wait, exact_match)
        store = open_store(url)
        thread = threading.Thread(target=suite.run_sync, kwargs={"store": store, "bus": [probe]})
        thread.start()
        try:
            assert seen.wait(60)
            server.stop(crash=True)
            gate.set()
            until(lambda: ask(probe, "/ready") == (503, '{"ready": false, "why": "waiting for the store"}\n'))
            assert number(ask(probe, "/metrics")[1], "fairtrial_waiting_for", resource="store") >= 1
            assert ask(probe, "/health")[0] == 200  # Restarting the client would not bring the database back.
        finally:
            gate.set()
            server.start()
            thread.join(120)
        assert number(ask(probe, "/metrics")[1], "fairtrial_waiting_for", resource="store") == 0
        store.close()
    finally:
        server.close()


async def test_a_fleets_client_and_worker_measure_their_queue(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        suite = EvalSuite("fleet", numbers(6), task(inline=True)(lambda value: value), exact_match)
        run = asyncio.create_task(suite.run(store="memory:", mailbox=server.url))

        def shown() -> str:
            return exposition(process_families())

        async with RedisConnection(server.url) as connection:
            requests: RedisMailbox[object] = RedisMailbox("fleet.requests", object, connection, sweep_seconds=None)
            async with asyncio.timeout(60):
                while 'state="waiting"} 6.0' not in shown():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.02)
            assert number(shown(), "fairtrial_mailbox_messages", mailbox="fleet.requests", state="waiting") == 6
            assert number(shown(), "fairtrial_run_trials", suite="fleet", state="outstanding") == 6
            oldest = await requests.oldest_waiting_seconds()
            assert oldest is not None
            assert 0 <= oldest < 60
            await run_worker(suite, server.url, until_empty=True)
            await run
            assert await requests.oldest_waiting_seconds() is None
            await requests.close()
        text = shown()
        assert number(text, "fairtrial_queue_delay_seconds_count", mailbox="fleet.requests") == 6
        assert number(text, "fairtrial_queue_delay_seconds_sum", mailbox="fleet.requests") >= 0


async def test_calls_to_a_provider_are_timed() -> None:
    adapter = ScriptedAdapter(["yes"], model="timed")
    await adapter.complete([])
    text = exposition(process_families())
    assert number(text, "fairtrial_model_call_duration_seconds_count", model="timed", outcome="answered") == 1


async def test_renewals_that_fail_are_counted(tmp_path: Path) -> None:
    from fairtrial.mailbox.lease import LeaseExtender

    with RedisServer(tmp_path / "redis") as server:
        async with RedisConnection(server.url) as connection:
            mailbox = RedisMailbox("jobs", int, connection, sweep_seconds=None)
            await mailbox.send(1)
            (message,) = await mailbox.receive(1, 30)
            before = metrics.FAILED_RENEWALS.read()[()]
            extender = LeaseExtender(lease_seconds=1.0)
            lease = extender.keep(message, deadline=time.monotonic() + 60, on_lost=lambda: None)
            server.kill()
            await asyncio.to_thread(until, lambda: metrics.FAILED_RENEWALS.read()[()] > before)
            extender.release(lease)
            await extender.__aexit__()
            await mailbox.close()
