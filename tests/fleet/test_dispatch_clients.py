"""Several clients of one fleet run, and the ledger of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from fairtrial import Dataset, EvalSuite, Sample, exact_match, open_store
from fairtrial.errors import RunBusyError
from fairtrial.fleet.client.fleet_run import Wakeup
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.results import CommittedResults
from fairtrial.fleet.queues import MemoryBroker
from fairtrial.runs import run_lease
from fairtrial.runs.identity import identify
from fairtrial.store.protocol import RunRecord
from tests.fleet.dispatching import suite_of, until
from tests.fleet.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.usefixtures("short_waits")


async def test_a_second_client_of_a_run_is_warned_and_nothing_is_counted_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker, url = MemoryBroker(), f"{tmp_path}/runs.db"
    first = asyncio.create_task(suite_of(100).run(store=url, mailbox=broker))
    await until(
        lambda: "numbers.requests" in broker._mailboxes and bool(broker._mailboxes["numbers.requests"]._waiting)
    )
    (run,) = open_store(url).runs()
    second = asyncio.create_task(suite_of(100).run(store=url, mailbox=broker))
    await until(lambda: "already has an active client (process" in caplog.text)
    async with FakeWorker(broker, "numbers").at_work():
        reports = await asyncio.gather(first, second)
    assert [(report.run_id, report.total, report.status) for report in reports] == [(run.run_id, 100, "finished")] * 2


async def test_without_notifications_results_of_workers_are_looked_for_soon_after_others_and_then_less_often() -> None:
    finds = [0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0]
    waits: list[float] = []

    class Stored:
        async def read_committed(self) -> int:
            return finds[len(waits)]

    class Following(CommittedResults):
        async def _wait(self, seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == len(finds) - 1:
                self.close()

    listener = SimpleNamespace(
        listens=lambda channel: False, unsubscribe=lambda channel, event: None, forget=lambda channel: None
    )
    fleet: Any = SimpleNamespace(
        run_id="r", shared=SimpleNamespace(connection=SimpleNamespace(listener=listener, pooled=True))
    )
    await Following(fleet, cast(Any, Stored()), Wakeup())._follow()
    alone, after_results = waits[:9], waits[9:]
    assert alone == sorted(alone)
    assert alone[0] < 0.1 < alone[-1] < 0.5  # Neither many queries nor a long wait for a run of short trials.
    assert after_results[0] < alone[0]
    assert after_results[1] == alone[0]


async def test_a_client_that_joined_owns_the_run_once_the_owner_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "HEARTBEAT_SECONDS", 0.1)
    broker, url = MemoryBroker(), f"{tmp_path}/runs.db"
    store = open_store(url)
    first = asyncio.create_task(suite_of(100).run(store=url, mailbox=broker))
    await until(lambda: bool(store.runs()) and store.run_owner(store.runs()[0].run_id).epoch == 1)
    (run,) = store.runs()
    second = asyncio.create_task(suite_of(100).run(store=url, mailbox=broker))
    await asyncio.sleep(0.3)
    assert store.run_owner(run.run_id).epoch == 1
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: store.run_owner(run.run_id).epoch == 2)
    async with FakeWorker(broker, "numbers").at_work():
        report = await second
    assert (report.run_id, report.total, report.status) == (run.run_id, 100, "finished")
    assert store.run_owner(run.run_id).owner is None


async def test_a_client_that_was_taken_over_by_another_client_still_ends_well(tmp_path: Path) -> None:
    broker, url = MemoryBroker(), f"{tmp_path}/runs.db"
    store = open_store(url)
    first = asyncio.create_task(suite_of(50).run(store=url, mailbox=broker))
    await until(lambda: bool(store.runs()) and store.run_owner(store.runs()[0].run_id).epoch == 1)
    (run,) = store.runs()
    seen = store.run_owner(run.run_id)
    assert store.acquire_run(run.run_id, '{"pid": 1, "host": "elsewhere", "client": true}', seen) == 2
    async with FakeWorker(broker, "numbers").at_work():
        report = await first
    assert (report.total, report.status) == (50, "finished")


class TestLedger:
    def test_its_books_agree_with_a_plain_model(self) -> None:
        import random

        for seed in range(300):
            chance = random.Random(seed)
            samples, repeats = chance.randrange(1, 40), chance.randrange(1, 3)
            experiments = ("a", "b")[: chance.randrange(1, 3)]
            run = RunRecord("r", "s", "d", "1", "f", samples, experiments, repeats)
            data: Dataset[int, int] = Dataset([Sample(f"s{i}", i) for i in range(samples)])
            planned = run.planned
            done = {i for i in range(planned) if chance.random() < 0.4}
            bits = bytearray()
            for i in sorted(done):
                bits.extend(bytes((i >> 3) + 1 - len(bits)))
                bits[i >> 3] |= 1 << (i & 7)
            cursor = chance.randrange(planned + 1)
            attempts = {i: 2 for i in done if chance.random() < 0.2}
            ledger = Ledger(run, data, bits, cursor=cursor, attempts=attempts)
            missing = {i for i in range(planned) if i not in done or i in attempts}
            assert ledger.missing == len(missing)
            assert ledger.outstanding == sum(i not in done for i in range(cursor))
            waiting = list(ledger.to_send())
            assert [trial.ordinal for trial in waiting] == [
                *sorted(i for i in attempts if i < cursor),
                *(i for i in range(cursor, planned) if i in missing),
            ]
            assert all(trial.attempt == attempts.get(trial.ordinal, 1) for trial in waiting)
            sent = waiting[: len(waiting) // 2]
            ledger.mark_sent(sent)
            back = [trial.ordinal for trial in sent if chance.random() < 0.5]
            for ordinal in back:
                ledger.mark_done(ordinal)
                ledger.mark_done(ordinal)
            assert ledger.missing == len(missing) - len(back)
            left: Sequence[int] = sorted(i for i in missing - set(back) if i < ledger.position)
            for _ in range(2):  # The second time, it skips what was complete before.
                assert ledger.awaited() == [i for i in left if i not in attempts]
            assert [trial.ordinal for trial in ledger.take_lost()] == left
            assert ledger.outstanding == 0


async def test_a_run_that_another_process_executes_is_not_given_to_a_fleet_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, broker = open_store("memory:"), MemoryBroker()
    monkeypatch.setattr(run_lease, "_POLL_SECONDS", 0.01)
    stopping = asyncio.create_task(suite_of(20).run(store=store, mailbox=broker))
    await until(lambda: bool(store.runs(suite="numbers")) and "fleet" in store.runs(suite="numbers")[0].notes)
    stopping.cancel()
    await asyncio.wait([stopping])
    (run,) = store.runs(suite="numbers")

    epoch = store.acquire_run(run.run_id, '{"host": "elsewhere", "pid": 1}', store.run_owner(run.run_id))
    assert epoch is not None
    going_on = asyncio.create_task(suite_of(20).run(store=store, mailbox=broker))
    await asyncio.sleep(0.05)
    assert not going_on.done()
    while not going_on.done():  # The client may first look after any of them.
        store.renew_run(run.run_id, epoch)
        await asyncio.sleep(0.01)
    with pytest.raises(RunBusyError, match="process 1 on elsewhere"):
        await going_on


async def test_resuming_a_fleet_run_locally_warns_of_queued_requests(caplog: pytest.LogCaptureFixture) -> None:
    store, broker = open_store("memory:"), MemoryBroker()

    async def echo(given: int) -> int:
        return given

    def suite() -> EvalSuite:
        data = Dataset([Sample(f"s{i}", i, i) for i in range(5)], name="numbers")
        return EvalSuite("numbers", data, echo, exact_match, version="1")

    killed = asyncio.create_task(suite().run(store=store, mailbox=broker))
    requests = await broker.requests("numbers")
    while not await requests.approximate_count():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)
    killed.cancel()
    await asyncio.wait([killed])
    report = await suite().run(store=store)
    assert (report.status, report.total) == ("finished", 5)
    assert "its requests may still be queued" in caplog.text


class Refuser(FakeWorker):
    """A worker that gives requests made from other code back for a moment, as `EvalLoop` does."""

    fingerprint = ""

    async def one(self, message: Any) -> None:
        if message.body.fingerprint != self.fingerprint:
            await message.hand_back(0.3)
        else:
            await super().one(message)


class Outrun:
    """The mailboxes of a client whose results are always collected by another client."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def results(self, suite: str, run_id: str) -> Any:
        mailbox: Any = await self._broker.results(suite, run_id)

        class Empty:
            def __getattr__(self, name: str) -> Any:
                return getattr(mailbox, name)

            async def receive(self, *args: Any) -> Any:
                await asyncio.sleep(0.05)
                return ()

        return Empty()


async def two_clients(run: Callable[[Any], Any], broker: MemoryBroker, worker: FakeWorker) -> list[Any]:
    """Have two clients carry a run out, the second from when the first one's trials are being executed."""
    first = asyncio.create_task(run(broker))
    await until(lambda: len(worker.seen) > 5)
    return list(await asyncio.gather(first, run(Outrun(broker))))


async def test_two_clients_end_beside_requests_of_older_code(tmp_path: Path) -> None:
    """A killed client's requests stay in the queue; the code changes; one worker and two clients start."""
    broker, store = MemoryBroker(), open_store(f"{tmp_path}/runs.db")
    older = suite_of(60)
    killed = asyncio.create_task(older.run(store=store, mailbox=broker))
    requests = await broker.requests("numbers")

    async def queued() -> int:
        return (await requests.depth()).waiting

    while await queued() < 20:  # noqa: ASYNC110 - a mailbox has no event
        await asyncio.sleep(0.01)
    killed.cancel()
    await asyncio.wait([killed])

    newer = suite_of(60)
    newer.version = "2"
    worker = Refuser(broker, "numbers", concurrency=5, delay=lambda _: asyncio.sleep(0.05))
    worker.fingerprint = identify(newer.prepared(), samples=False).fingerprint
    async with worker.at_work():
        # The worker has seen the older requests and keeps them from coming back.
        while await queued():  # noqa: ASYNC110 - a mailbox has no event
            await asyncio.sleep(0.01)
        with anyio.fail_after(30):  # Nothing of the older code is stored, so nothing is said of two versions.
            reports = await two_clients(
                lambda reached: newer.run(store=store, mailbox=reached, allow_changed_code=True), broker, worker
            )
    assert [(report.status, report.total) for report in reports] == [("finished", 60)] * 2


async def test_a_client_that_retries_errors_learns_of_results_another_client_stored(tmp_path: Path) -> None:
    broker, store = MemoryBroker(), open_store(f"{tmp_path}/runs.db")
    failing = FakeWorker(broker, "numbers", lambda request: answer(request, outcome="task_error", error="no"))
    async with failing.at_work():
        await suite_of(20).run(store=store, mailbox=broker)
    worker = FakeWorker(broker, "numbers", concurrency=2, delay=lambda _: asyncio.sleep(0.05))
    async with worker.at_work():
        with anyio.fail_after(20):
            reports = await two_clients(
                lambda reached: suite_of(20).run(store=store, mailbox=reached, resume="errors"), broker, worker
            )
    assert [(report.status, report.successful) for report in reports] == [("finished", 20)] * 2
