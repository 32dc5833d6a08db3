"""What a fleet client says of workers that are missing, gone, refuse, or have other code."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import anyio
import pytest

from fairtrial.fleet.messages import EvalRequest
from fairtrial.fleet.queues import MemoryBroker, RedisBroker, requests_name
from fairtrial.mailbox import RedisMailbox
from fairtrial.runs.identity import identify
from tests.fleet.dispatching import suite_of, until
from tests.fleet.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.usefixtures("short_waits")


async def test_a_client_without_workers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    broker = MemoryBroker()
    run = asyncio.create_task(suite_of(30).run(store="memory:", mailbox=broker))
    await until(lambda: "no worker takes them" in caplog.text)
    assert "20 requests of suite 'numbers' are waiting" in caplog.text
    assert "`fairtrial worker SUITE --mailbox URL`" in caplog.text
    async with FakeWorker(broker, "numbers").at_work():
        assert (await run).total == 30


async def test_a_client_whose_workers_die_in_the_middle_of_a_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    broker = MemoryBroker()
    requests: Any = await broker.requests("numbers")
    await requests.announce("w1", "", 30)
    run = asyncio.create_task(suite_of(30).run(store="memory:", mailbox=broker))
    await until(lambda: bool(requests._waiting))
    taken = await requests.receive(3, 30, 5)
    await taken[0].reply(answer(taken[0].body))
    await taken[0].acknowledge()
    await asyncio.sleep(0.3)  # Longer than the client waits for a hint: the worker may be busy.
    assert "no worker takes them" not in caplog.text
    await requests.announce("w1", "", 0)  # It dies with two requests, whose leases last.
    await until(lambda: "no worker takes them any more" in caplog.text)
    assert "requests of suite 'numbers' are waiting" in caplog.text
    assert (await requests.depth()).in_flight == 2
    for message in taken[1:]:
        await message.nack()
    async with FakeWorker(broker, "numbers").at_work():
        assert (await run).total == 30


async def test_requests_of_a_lost_worker_are_logged_with_the_time_of_their_redelivery(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = RedisBroker(redis_url)
    async with RedisMailbox(requests_name("numbers"), EvalRequest, redis_url) as lost:
        requests: Any = await broker.requests("numbers")
        await requests.announce("id w2", "", 60)
        await lost.announce("id w1", "", 60)
        run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=broker))
        taken = await lost.receive(2, 30, 20)
        await asyncio.sleep(0.3)  # Longer than the client waits for a hint: the worker may be busy.
        assert "held by worker" not in caplog.text
        await lost.announce("id w1", "", 0.001)
        try:
            async with asyncio.timeout(15):
                await until(lambda: "held by worker 'w1', which was last heard of" in caplog.text)
        except TimeoutError:
            run.cancel()
            pytest.fail("the client did not log the requests of the lost worker")
        (found,) = re.findall(
            r"(\d) requests? of suite 'numbers' \w+ held .*? to another worker within (\d+) s", caplog.text
        )
        assert int(found[0]) == len(taken)
        assert 0 < int(found[1]) <= 31
        for message in taken:
            await message.nack()
        async with FakeWorker(broker, "numbers").at_work():
            assert (await run).total == 3
    await broker.close()


async def test_a_client_whose_requests_are_handed_back_says_so(caplog: pytest.LogCaptureFixture) -> None:
    broker = MemoryBroker()
    run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=broker))
    requests = await broker.requests("numbers")
    handed = 0
    while "workers refuse the requests of suite 'numbers' (3 at present)" not in caplog.text:
        for message in await requests.receive(5, 30, 0.01):
            await message.nack(0.4)
            handed += 1
    assert handed >= 3
    async with FakeWorker(broker, "numbers").at_work():
        assert (await run).total == 3


async def test_workers_that_refuse_are_not_taken_for_no_workers(caplog: pytest.LogCaptureFixture) -> None:
    """Between two refusals everything waits, as if there were nobody: what was seen before decides."""
    broker = MemoryBroker()
    run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=broker))
    requests = await broker.requests("numbers")
    for message in await requests.receive(1, 30, 5):
        await message.hand_back(0.05)
    await until(lambda: "requests of suite 'numbers'" in caplog.text)
    assert "workers refuse the requests of suite 'numbers'" in caplog.text
    assert "no worker takes them" not in caplog.text
    async with FakeWorker(broker, "numbers").at_work():
        assert (await run).total == 3


async def test_a_client_whose_workers_have_other_code_names_both_versions_and_ends_the_run_as_incomplete(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.3")
    broker = MemoryBroker()
    requests: Any = await broker.requests("numbers")
    for worker in ("one", "two"):
        await requests.announce(worker, "0123456789abcdef", 60)
    with anyio.fail_after(15):
        report = await suite_of(3).run(store="memory:", mailbox=broker)
    needed = identify(suite_of(3).prepared(), samples=False).fingerprint
    said = f"2 workers of suite 'numbers' are connected, but with code 01234567; this run needs code {needed[:8]}"
    assert said in caplog.text
    assert report.status == "incomplete"
    reason = str(report.run.notes["stopped"])
    assert reason.startswith("3 of 3 trials have no stored result: no worker has had this run's code for 0.3 s. ")
    assert said in reason
    assert (await requests.depth()).waiting == 0  # Taken back.


async def test_a_client_waits_as_long_as_a_worker_with_its_code_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.05")
    broker = MemoryBroker()
    requests: Any = await broker.requests("numbers")
    await requests.announce("one", identify(suite_of(3).prepared(), samples=False).fingerprint, 60)
    await requests.announce("two", "0123456789abcdef", 60)
    run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=broker))
    await asyncio.sleep(0.5)
    assert not run.done()
    await requests.announce("one", "", 0)
    with anyio.fail_after(15):
        assert (await run).status == "incomplete"
