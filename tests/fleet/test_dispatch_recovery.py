"""A fleet client recovers: lost requests, unavailable servers, databases that fail over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Sample, TrialKey, open_store
from fairtrial.errors import MailboxConnectionError, StoreUnavailableError
from fairtrial.fleet import EvalReply, EvalRequest, MemoryBroker
from fairtrial.runs.identity import identify
from fairtrial.runs.runner import Interrupt
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import Committed, RunStore
from tests.fleet.conftest import Place
from tests.fleet.dispatching import Watcher, suite_of, until
from tests.fleet.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.usefixtures("short_waits")


class Crash(Exception):
    """The client dies."""


def dying_store(store: RunStore, *, after: int) -> RunStore:
    """A store whose `after`-th commit never happens, and that remembers nothing of how the run ended."""
    commits = 0
    whole = store.commit

    def commit(*args: Any, **rest: Any) -> Any:
        nonlocal commits
        commits += 1
        if commits > after:
            raise Crash
        return whole(*args, **rest)

    def update_run(run_id: str, **changes: Any) -> None:
        if changes.get("status") != "interrupted":
            type(store).update_run(store, run_id, **changes)

    store.commit = commit  # type: ignore[method-assign]  # a store that fails
    store.update_run = update_run  # type: ignore[method-assign]  # a store that fails
    return store


@pytest.mark.proves("R61")
async def test_a_client_that_comes_back_resubmits_nothing_that_is_queued_and_reruns_nothing_that_is_stored(
    tmp_path: Path,
) -> None:
    broker, url = MemoryBroker(), f"{tmp_path}/runs.db"
    suite = suite_of(200)
    worker = FakeWorker(broker, "numbers", concurrency=7)
    for after in (1, 2, 3):
        async with worker.at_work():
            with pytest.raises(Crash):
                await suite.run(store=dying_store(open_store(url), after=after), mailbox=broker)
        for mailbox in broker._mailboxes.values():  # The leases of a dead client run out.
            for item in list(mailbox._leased.values()):
                mailbox._leased.pop(item.id)
                item.lease = 0
                mailbox._waiting.append(item)
    assert open_store(url).runs()[0].status == "running"
    async with worker.at_work():
        report = await suite.run(store=url, mailbox=broker)
    assert (report.status, report.total) == ("finished", 200)
    assert len(open_store(url).runs()) == 1
    sent: dict[Any, set[str]] = {}
    for request in worker.seen:
        sent.setdefault(request.key, set()).add(request.request_id)
    assert len(sent) == 200
    assert all(len(ids) == 1 for ids in sent.values())


@pytest.mark.proves("R61")
async def test_what_the_queue_lost_is_sent_again_and_nothing_else(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    broker = place.broker
    dropped: set[int] = set()

    def treat(request: EvalRequest) -> EvalReply | None:
        if request.ordinal % 7 == 0 and request.ordinal not in dropped:
            dropped.add(request.ordinal)
            return None  # Acknowledged, and no result: what a Redis that lost its memory looks like.
        return answer(request)

    async with FakeWorker(broker, "numbers", treat).at_work() as worker:
        report = await suite_of(100).run(store=place.store, mailbox=broker)
    assert (report.status, report.total) == ("finished", 100)
    assert len(worker.seen) == 100 + len(dropped) == 115
    assert "were lost or never sent; sending them now" in caplog.text


@pytest.mark.parametrize("delay", [0.0, 600.0])
async def test_requests_that_no_worker_accepts_do_not_delay_the_recovery_of_other_runs(delay: float) -> None:
    broker = MemoryBroker()
    requests = await broker.requests("numbers")
    for number in range(3):
        key = TrialKey("abandoned", "baseline", f"s{number}")
        await requests.send(EvalRequest(key, Sample(f"s{number}", 0)), reply_to="numbers.results.abandoned")
    if delay:
        for message in await requests.receive(3):
            await message.hand_back(delay)
    dropped: set[int] = set()

    def treat(request: EvalRequest) -> EvalReply | None:
        if request.ordinal % 7 == 0 and request.ordinal not in dropped:
            dropped.add(request.ordinal)
            return None
        return answer(request)

    async with FakeWorker(broker, "numbers", treat, refuses="abandoned").at_work():
        with anyio.fail_after(20):
            report = await suite_of(50).run(store="memory:", mailbox=broker)
    assert (report.status, report.total, len(dropped)) == ("finished", 50, 8)
    assert await requests.approximate_count() == 3  # They are another client's, who may come back for them.


async def test_what_is_never_answered_ends_as_a_dead_letter(place: Place) -> None:
    broker = place.broker

    def treat(request: EvalRequest) -> EvalReply | None:
        return None if request.ordinal == 5 else answer(request)

    async with FakeWorker(broker, "numbers", treat).at_work() as worker:
        report = await suite_of(20).run(store=place.store, mailbox=broker)
    assert report.status == "finished"
    assert dict(report.errors) == {"dead_letter": 1}
    assert sum(request.ordinal == 5 for request in worker.seen) == 4
    (lost,) = [result for result in report.results if not result.success]
    assert lost.error is not None
    assert lost.error.startswith("sent 4 times without an answer")
    assert (lost.stage, lost.sample.input) == ("delivery", 5)


async def test_the_server_may_be_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    failures = {"send": 3, "receive": 2, "depth": 2, "acknowledge": 1}

    def failing(name: str, whole: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            if failures[name]:
                failures[name] -= 1
                raise MailboxConnectionError("away")
            return await whole(*args, **options)

        return call

    requests, results_of = await broker.requests("numbers"), broker.results
    monkeypatch.setattr(requests, "send", failing("send", requests.send))
    monkeypatch.setattr(requests, "depth", failing("depth", requests.depth))

    async def results(suite: str, run_id: str) -> Any:
        mailbox = await results_of(suite, run_id)
        monkeypatch.setattr(mailbox, "receive", failing("receive", mailbox.receive))
        return mailbox

    monkeypatch.setattr(broker, "results", results)
    async with FakeWorker(broker, "numbers").at_work():
        report = await suite_of(40).run(store="memory:", mailbox=broker)
    assert (report.status, report.total) == ("finished", 40)
    assert failures["send"] == failures["receive"] == failures["depth"] == 0


async def test_the_database_may_be_away_for_a_while() -> None:
    broker, store = MemoryBroker(), open_store("memory:")
    away = 2
    whole = store.commit

    def commit(*args: Any, **rest: Any) -> Any:
        nonlocal away
        if away:
            away -= 1
            raise StoreUnavailableError("restarting")
        return whole(*args, **rest)

    store.commit = commit  # type: ignore[method-assign]  # a store that fails
    async with FakeWorker(broker, "numbers").at_work():
        report = await suite_of(10).run(store=store, mailbox=broker)
    assert (report.status, report.total, away) == ("finished", 10, 0)


async def test_requests_of_other_code_are_withdrawn_and_sent_again(tmp_path: Path) -> None:
    broker, url = MemoryBroker(), f"{tmp_path}/runs.db"
    first = suite_of(30)
    run = asyncio.create_task(first.run(store=url, mailbox=broker))
    requests = await broker.requests("numbers")
    await until(lambda: len(broker._mailboxes["numbers.requests"]._waiting) == 20)
    run.cancel()
    await asyncio.wait([run])
    assert await requests.approximate_count() == 20  # Cancelled, not stopped: what is queued stays queued.
    changed = suite_of(30)
    changed.version = "2"
    old = {item.id for item in broker._mailboxes["numbers.requests"]._waiting}
    run = asyncio.create_task(changed.run(store=url, mailbox=broker, allow_changed_code=True))

    def now() -> set[str]:
        return {item.id for item in broker._mailboxes["numbers.requests"]._waiting}

    await until(lambda: bool(now() - old))
    assert now().isdisjoint(old)
    async with FakeWorker(broker, "numbers").at_work() as worker:
        report = await run
    assert (report.status, report.total) == ("finished", 30)
    assert {result.code for result in report.results} == {1}
    assert len({request.fingerprint for request in worker.seen}) == 1
    assert len(worker.seen) == 30


async def test_a_client_told_to_stop_does_not_wait_for_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, broker, interrupt = open_store("memory:"), MemoryBroker(), Interrupt()
    requests = await broker.requests("numbers")
    away = asyncio.Event()

    async def gone(*args: Any, **options: Any) -> Any:
        away.set()
        raise MailboxConnectionError("away")

    suite = suite_of(20)
    run = asyncio.create_task(suite._execute(suite._request(store, {}, ()), broker, interrupt=interrupt))
    await until(lambda: len(requests._waiting) == 20)  # type: ignore[attr-defined]  # one in memory
    for name in ("depth", "send", "receive", "approximate_count"):
        monkeypatch.setattr(requests, name, gone)
    await away.wait()
    interrupt()
    with anyio.fail_after(10):
        record = await run
    assert record.status == "interrupted"
    assert record.notes["fleet"] == {"cursor": 20, "fingerprint": identify(suite.prepared(), samples=False).fingerprint}


async def test_the_database_may_be_away_while_the_client_reads_what_workers_stored() -> None:
    class Store(MemoryStore):
        failures = 2

        def results(self, *args: Any, **options: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreUnavailableError("restarting")
            return super().results(*args, **options)

    store, broker, watcher = Store(), MemoryBroker(), Watcher()

    def keep(request: EvalRequest) -> None:
        store.commit(request.key.run_id, [answer(request).result], {request.sample_ordinal: request.sample})

    async with FakeWorker(broker, "numbers", keep).at_work():
        report = await suite_of(10).run(store=store, mailbox=broker, bus=watcher)
    assert (report.status, report.total, store.failures) == ("finished", 10, 0)
    assert len(watcher.named("SampleEvaluated")) == 10


async def test_results_that_a_failover_lost_are_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(MemoryStore):
        commits = lost = 0

        def commit(self, run_id: str, *given: Any, **rest: Any) -> Committed:
            self.commits += 1
            if self.commits == 5:
                self.lost += len(self._runs[run_id].entries)
                self._runs[run_id].entries.clear()
            return super().commit(run_id, *given, **rest)

    store, broker = Forgetful(), MemoryBroker()
    async with FakeWorker(broker, "numbers", concurrency=10).at_work() as worker:
        with anyio.fail_after(30):
            report = await suite_of(200).run(store=store, mailbox=broker)
    assert (report.status, report.successful) == ("finished", 200)
    assert store.lost > 0
    assert len(worker.seen) == 200 + store.lost
    assert "are missing from the store: sending these trials again" in caplog.text


async def test_a_run_is_incomplete_when_the_store_takes_nothing_for_a_trial() -> None:
    class Picky(MemoryStore):
        def commit(self, run_id: str, results: Any, *samples: Any, **rest: Any) -> Committed:
            bad = [result for result in results if result.sample_id == "s1"]
            kept = super().commit(run_id, [result for result in results if result not in bad], *samples, **rest)
            return Committed(kept.new, kept.duplicate, tuple((result.key, "no") for result in bad))

    broker = MemoryBroker()
    async with FakeWorker(broker, "numbers").at_work() as worker:
        with anyio.fail_after(30):
            report = await suite_of(20).run(store=Picky(), mailbox=broker)
    assert (report.status, report.successful, report.not_run) == ("incomplete", 19, 1)
    assert len(worker.seen) == 20


@pytest.mark.parametrize("lag", [0.0, 1.5])
async def test_requests_are_not_taken_for_lost_while_the_counts_of_the_server_may_be_late(lag: float) -> None:
    """SQS counts late: a queue that seems empty is no sign of loss until `count_lag_seconds` have passed."""
    broker = MemoryBroker()
    requests: Any = await broker.requests("numbers")
    requests.count_lag_seconds = lag
    times: list[float] = []

    def treat(request: EvalRequest) -> EvalReply | None:
        if request.ordinal != 3:
            return answer(request)
        times.append(asyncio.get_running_loop().time())
        return None if len(times) == 1 else answer(request)

    async with FakeWorker(broker, "numbers", treat).at_work():
        report = await suite_of(10).run(store="memory:", mailbox=broker)
    assert (report.status, report.total, len(times)) == ("finished", 10, 2)
    assert (times[1] - times[0] >= 1.5) is (lag > 0)
