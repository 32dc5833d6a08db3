"""A suite's run by way of mailboxes: the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import (
    ConfigurationError,
    Dataset,
    EvalConfig,
    EvalSuite,
    Experiment,
    Sample,
    StopWhen,
    TokenUsage,
    TrialKey,
    exact_match,
    open_store,
)
from fairtrial.errors import MailboxConnectionError, RunBusyError, StoreUnavailableError
from fairtrial.fleet import dispatch
from fairtrial.fleet.dispatch import DispatchConfig
from fairtrial.fleet.ledger import Ledger
from fairtrial.fleet.post import MemoryPostOffice
from fairtrial.fleet.window import Window
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox.protocol import MailboxDepth
from fairtrial.runs import run_lease
from fairtrial.runs.events import RunEvent
from fairtrial.runs.identity import identify
from fairtrial.runs.runner import Interrupt
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import Committed, RunRecord, RunStore
from tests.fleet.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and short waits, so that much happens in little time."""

    def made(**changes: Any) -> DispatchConfig:
        base = {"batch": 16, "floor": 20, "look_seconds": 0.01, "heal_seconds": 0.1, "hint_seconds": 0.1}
        return DispatchConfig(**{**base, **changes})

    monkeypatch.setattr(dispatch, "DispatchConfig", made)


def never(given: Any) -> Any:
    raise AssertionError("the client must not execute tasks")


def suite_of(count: int = 60, *, evaluator: Any = exact_match, experiments: Any = (), **settings: Any) -> EvalSuite:
    data = Dataset([Sample(f"s{i}", i, i) for i in range(count)], name="numbers")
    config = EvalConfig(**{"grace_seconds": 0.2, **settings})
    return EvalSuite("numbers", data, never, evaluator, experiments=experiments, config=config, version="1")


async def until(met: Callable[[], bool]) -> None:
    """Wait for something to have happened, for as long as the test's own time limit allows."""
    while not met():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)


class Watcher:
    def __init__(self) -> None:
        self.events: list[RunEvent] = []

    def publish(self, event: RunEvent) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == name]


@pytest.mark.proves("R59", "R61")
async def test_a_suite_is_run_by_workers_and_reported_like_any_other(tmp_path: Path) -> None:
    office, watcher = MemoryPostOffice(), Watcher()
    suite = suite_of(40, experiments=[Experiment("a", {"x": 1}), Experiment("b")], repeats=3)
    async with FakeWorker(office, "numbers").at_work() as worker:
        report = await suite.run(store=f"{tmp_path}/runs.db", mailbox=office, bus=watcher)
    assert (report.status, report.total, report.planned) == ("finished", 240, 240)
    assert report["a"].pass_rate == 1.0
    assert len({request.key for request in worker.seen}) == len(worker.seen) == 240
    assert {request.key.experiment: dict(request.params) for request in worker.seen} == {"a": {"x": 1}, "b": {}}
    assert report["a"].results[0].sample.input == 0
    assert len(watcher.named("TrialStarted")) == len(watcher.named("SampleEvaluated")) == 240
    (completed,) = watcher.named("EvalRunCompleted")
    assert completed.status == "finished"
    with pytest.raises(LookupError):
        office._mailboxes[f"numbers.results.{report.run_id}"]


@pytest.mark.proves("R57", "R61")
async def test_duplicates_are_not_counted(tmp_path: Path) -> None:
    office, watcher = MemoryPostOffice(), Watcher()
    async with FakeWorker(office, "numbers", twice=True).at_work():
        report = await suite_of().run(store="memory:", mailbox=office, bus=watcher)
    assert (report.status, report.total) == ("finished", 60)
    assert len(watcher.named("SampleEvaluated")) == 60


async def test_no_more_is_out_than_the_window_allows() -> None:
    office = MemoryPostOffice()
    most = 0

    async def look(request: EvalRequest) -> None:
        nonlocal most
        depth = await (await office.requests("numbers")).depth()
        most = max(most, depth.waiting + depth.in_flight)
        await asyncio.sleep(0.001)

    async with FakeWorker(office, "numbers", concurrency=5, delay=look).at_work() as worker:
        report = await suite_of(300).run(store="memory:", mailbox=office)
    assert report.total == len(worker.seen) == 300
    assert most <= 150


def test_the_window_grows_while_workers_take_everything_and_shrinks_when_much_waits() -> None:
    window = Window(floor=100)

    def look(waiting: int, in_flight: int, *, full: bool = True, crowded: bool = False) -> int:
        window.look(MailboxDepth(waiting, 0, in_flight, 0), full=full, crowded=crowded)
        return window.size

    assert look(90, 10) == 100  # Enough is waiting for the ten that are worked on.
    assert look(0, 100) == 150
    assert look(0, 100, full=False) == 150  # Nothing was held back: there is nothing more to send.
    assert look(0, 100, crowded=True) == 150  # It is the client that cannot keep up.
    for _ in range(10):
        look(0, 2000)
    assert window.size > 4000
    before = window.size
    assert look(2000, 2000) == before
    for _ in range(100):
        look(5000, 10)
    assert window.size == 100


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
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"
    suite = suite_of(200)
    worker = FakeWorker(office, "numbers", concurrency=7)
    for after in (1, 2, 3):
        async with worker.at_work():
            with pytest.raises(Crash):
                await suite.run(store=dying_store(open_store(url), after=after), mailbox=office)
        for mailbox in office._mailboxes.values():  # The leases of a dead client run out.
            for item in list(mailbox._leased.values()):
                mailbox._leased.pop(item.id)
                item.lease = 0
                mailbox._waiting.append(item)
    assert open_store(url).runs()[0].status == "running"
    async with worker.at_work():
        report = await suite.run(store=url, mailbox=office)
    assert (report.status, report.total) == ("finished", 200)
    assert len(open_store(url).runs()) == 1
    sent: dict[Any, set[str]] = {}
    for request in worker.seen:
        sent.setdefault(request.key, set()).add(request.request_id)
    assert len(sent) == 200
    assert all(len(ids) == 1 for ids in sent.values())


@pytest.mark.proves("R61")
async def test_what_the_queue_lost_is_sent_again_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    office = MemoryPostOffice()
    dropped: set[int] = set()

    def treat(request: EvalRequest) -> EvalReply | None:
        if request.ordinal % 7 == 0 and request.ordinal not in dropped:
            dropped.add(request.ordinal)
            return None  # Acknowledged, and no result: what a Redis that lost its memory looks like.
        return answer(request)

    async with FakeWorker(office, "numbers", treat).at_work() as worker:
        report = await suite_of(100).run(store="memory:", mailbox=office)
    assert (report.status, report.total) == ("finished", 100)
    assert len(worker.seen) == 100 + len(dropped) == 115
    assert "got lost on the way, or were never sent; sending them now" in caplog.text


@pytest.mark.parametrize("delay", [0.0, 600.0])
async def test_requests_of_a_run_that_nobody_accepts_keep_no_other_run_from_being_healed(delay: float) -> None:
    office = MemoryPostOffice()
    requests = await office.requests("numbers")
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

    async with FakeWorker(office, "numbers", treat, refuses="abandoned").at_work():
        with anyio.fail_after(20):
            report = await suite_of(50).run(store="memory:", mailbox=office)
    assert (report.status, report.total, len(dropped)) == ("finished", 50, 8)
    assert await requests.approximate_count() == 3  # They are another client's, who may come back for them.


async def test_what_is_never_answered_ends_as_a_dead_letter() -> None:
    office = MemoryPostOffice()

    def treat(request: EvalRequest) -> EvalReply | None:
        return None if request.ordinal == 5 else answer(request)

    async with FakeWorker(office, "numbers", treat).at_work() as worker:
        report = await suite_of(20).run(store="memory:", mailbox=office)
    assert report.status == "finished"
    assert dict(report.errors) == {"dead_letter": 1}
    assert sum(request.ordinal == 5 for request in worker.seen) == 4
    (lost,) = [result for result in report.results if not result.success]
    assert lost.error is not None
    assert lost.error.startswith("it was sent 4 times and never answered")
    assert (lost.stage, lost.sample.input) == ("delivery", 5)


async def test_a_sample_that_is_too_large_to_send_is_a_dead_letter_and_the_others_go_on() -> None:
    office = MemoryPostOffice()
    data: Dataset[str, str] = Dataset([Sample("small", "x"), Sample("large", "x" * 2_000_000), Sample("other", "y")])
    async with FakeWorker(office, "numbers").at_work():
        report = await EvalSuite("numbers", data, never, exact_match).run(store="memory:", mailbox=office)
    assert [(result.sample_id, result.outcome) for result in report.results] == [
        ("small", "scored"),
        ("large", "dead_letter"),
        ("other", "scored"),
    ]


async def test_an_error_stays_unless_it_is_to_be_retried_and_the_retry_is_a_further_attempt(tmp_path: Path) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"

    def fails(request: EvalRequest) -> EvalReply:
        bad = request.ordinal in (3, 9) and request.attempt == 1
        return answer(request, outcome="task_error", error="no") if bad else answer(request)

    async with FakeWorker(office, "numbers", fails).at_work() as worker:
        report = await suite_of(30).run(store=url, mailbox=office)
        assert (report.status, dict(report.errors)) == ("finished", {"task_error": 2})
        worker.seen.clear()
        again = await suite_of(30).run(store=url, mailbox=office, retry_errors=True)
    assert again.run_id == report.run_id
    assert (again.status, again.successful) == ("finished", 30)
    assert [(request.ordinal, request.attempt) for request in worker.seen] == [(3, 2), (9, 2)]


async def test_failed_scoring_is_made_up_for_here_and_no_task_is_called(tmp_path: Path) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"

    def unscored(request: EvalRequest) -> EvalReply:
        return answer(request, outcome="scorer_error", error="no judge", output=7, output_json="7")

    async with FakeWorker(office, "numbers", unscored).at_work() as worker:
        report = await suite_of(5).run(store=url, mailbox=office)
        assert report.status == "unscored"
        worker.seen.clear()
        again = await suite_of(5).run(store=url, mailbox=office)
    assert (again.run_id, again.status, again.successful) == (report.run_id, "finished", 5)
    assert [result.output for result in again.results] == [7] * 5
    assert worker.seen == []


@pytest.mark.parametrize("limit", [{"stop_on_error": True}, {"max_cost_usd": 0.05}])
async def test_a_limit_stops_the_run_takes_back_what_waits_and_leaves_it_resumable(
    tmp_path: Path, limit: dict[str, Any]
) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"

    def costly(request: EvalRequest) -> EvalReply:
        usage = TokenUsage(1, 1, cost_usd=0.01)
        outcome = "task_error" if request.ordinal == 4 else "scored"
        return answer(request, outcome=outcome, usage=usage)

    async def slowly(request: EvalRequest) -> None:
        await anyio.sleep(0.005)  # Or the worker is through with the plan before the client has stored the first of it.

    async with FakeWorker(office, "numbers", costly, concurrency=2, delay=slowly).at_work() as worker:
        report = await suite_of(200, **limit).run(store=url, mailbox=office)
        assert report.status == "interrupted"
        assert 5 <= report.total < 60
        assert await (await office.requests("numbers")).approximate_count() == 0
        worker.seen.clear()
        again = await suite_of(200).run(store=url, mailbox=office)
    assert (again.run_id, again.status, again.total) == (report.run_id, "finished", 200)
    assert len(worker.seen) == 200 - report.total


async def test_adaptive_stopping_ends_a_fleets_run_at_the_same_prefix_and_sends_nothing_far_ahead_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soon = dispatch.DispatchConfig
    monkeypatch.setattr(dispatch, "DispatchConfig", lambda: soon(ahead=50))
    office = MemoryPostOffice()
    held, highest = asyncio.Event(), 0

    async def slow_first(request: EvalRequest) -> None:
        nonlocal highest
        highest = max(highest, request.ordinal)
        if request.ordinal == 0:
            await held.wait()
        elif request.ordinal == 49:
            await asyncio.sleep(0.2)  # Long enough for more to be sent, if it were.
            assert highest == 49
            held.set()

    suite = suite_of(600, stop_when=StopWhen(narrower_than=0.2))
    workers = [FakeWorker(office, "numbers", delay=slow_first).at_work() for _ in range(2)]
    async with workers[0], workers[1]:
        report = await suite.run(store="memory:", mailbox=office)
    alone = EvalSuite(
        "numbers",
        suite.dataset,
        lambda given: given,
        exact_match,
        config=EvalConfig(stop_when=StopWhen(narrower_than=0.2)),
    )
    assert report.status == "stopped"
    assert report.adaptive is not None
    local = (await alone.run(store="memory:")).adaptive
    assert local is not None
    assert (report.adaptive["samples"], report.adaptive["reason"]) == (local["samples"], local["reason"])
    assert report.total < 600
    assert await (await office.requests("numbers")).approximate_count() == 0


async def test_results_are_streamed_and_leaving_early_leaves_the_run_resumable(tmp_path: Path) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"
    async with FakeWorker(office, "numbers").at_work():
        every = [result.key async for result in suite_of(50).stream(store="memory:", mailbox=office)]
        assert len(set(every)) == len(every) == 50
        async with aclosing(suite_of(50).stream(store=url, mailbox=office)) as stream:
            async for _ in stream:
                break
        assert open_store(url).runs()[0].status == "interrupted"
        report = await suite_of(50).run(store=url, mailbox=office)
    assert (report.status, report.total, len(open_store(url).runs())) == ("finished", 50, 1)


async def test_a_client_without_workers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    office = MemoryPostOffice()
    run = asyncio.create_task(suite_of(30).run(store="memory:", mailbox=office))
    await until(lambda: "no worker takes them" in caplog.text)
    assert "20 requests of suite 'numbers' are waiting" in caplog.text
    assert "`fairtrial worker SUITE --mailbox URL`" in caplog.text
    async with FakeWorker(office, "numbers").at_work():
        assert (await run).total == 30


async def test_a_client_whose_requests_are_handed_back_says_so(caplog: pytest.LogCaptureFixture) -> None:
    office = MemoryPostOffice()
    run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=office))
    requests = await office.requests("numbers")
    handed = 0
    while "workers hand back requests of suite 'numbers' (3 at present)" not in caplog.text:
        for message in await requests.receive(5, 30, 0.01):
            await message.nack(0.4)
            handed += 1
    assert handed >= 3
    async with FakeWorker(office, "numbers").at_work():
        assert (await run).total == 3


async def test_workers_that_refuse_are_not_taken_for_no_workers(caplog: pytest.LogCaptureFixture) -> None:
    """Between two refusals everything waits, as if there were nobody: what was seen before decides."""
    office = MemoryPostOffice()
    run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=office))
    requests = await office.requests("numbers")
    for message in await requests.receive(1, 30, 5):
        await message.hand_back(0.05)
    await until(lambda: "requests of suite 'numbers'" in caplog.text)
    assert "workers hand back requests of suite 'numbers'" in caplog.text
    assert "no worker takes them" not in caplog.text
    async with FakeWorker(office, "numbers").at_work():
        assert (await run).total == 3


async def test_a_client_whose_workers_have_other_code_names_both_versions_and_ends_the_run_as_incomplete(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_PATIENCE_SECONDS", "0.3")
    office = MemoryPostOffice()
    requests: Any = await office.requests("numbers")
    for worker in ("one", "two"):
        await requests.announce(worker, "0123456789abcdef", 60)
    with anyio.fail_after(15):
        report = await suite_of(3).run(store="memory:", mailbox=office)
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
    office = MemoryPostOffice()
    requests: Any = await office.requests("numbers")
    await requests.announce("one", identify(suite_of(3).prepared(), samples=False).fingerprint, 60)
    await requests.announce("two", "0123456789abcdef", 60)
    run = asyncio.create_task(suite_of(3).run(store="memory:", mailbox=office))
    await asyncio.sleep(0.5)
    assert not run.done()
    await requests.announce("one", "", 0)
    with anyio.fail_after(15):
        assert (await run).status == "incomplete"


async def test_replies_that_are_not_this_runs_are_set_aside() -> None:
    office = MemoryPostOffice()
    kept: dict[int, Any] = {}

    async def forge(request: EvalRequest) -> None:
        if request.ordinal:
            return
        results = kept[0] = next(box for name, box in office._mailboxes.items() if ".results." in name)
        good = answer(request)
        for change in (
            {"key": good.result.key._replace(run_id="other")},
            {"ordinal": 10_000},
            {"ordinal": 7},
            {"key": good.result.key._replace(experiment="other")},
        ):
            await results.send(replace(good, result=replace(good.result, **change)))

    async with FakeWorker(office, "numbers", delay=forge).at_work():
        report = await suite_of(10).run(store="memory:", mailbox=office)
    assert (report.total, report.successful) == (10, 10)
    letters = await kept[0].dead_letters.page()
    assert sorted(letter.reason.partition(": ")[2].split(" ")[0] for letter in letters) == [
        "it",
        "the",
        "trial",
        "trial",
    ]


async def test_the_server_may_be_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    office = MemoryPostOffice()
    failures = {"send": 3, "receive": 2, "depth": 2, "acknowledge": 1}

    def failing(name: str, whole: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            if failures[name]:
                failures[name] -= 1
                raise MailboxConnectionError("away")
            return await whole(*args, **options)

        return call

    requests, results_of = await office.requests("numbers"), office.results
    monkeypatch.setattr(requests, "send", failing("send", requests.send))
    monkeypatch.setattr(requests, "depth", failing("depth", requests.depth))

    async def results(suite: str, run_id: str) -> Any:
        mailbox = await results_of(suite, run_id)
        monkeypatch.setattr(mailbox, "receive", failing("receive", mailbox.receive))
        return mailbox

    monkeypatch.setattr(office, "results", results)
    async with FakeWorker(office, "numbers").at_work():
        report = await suite_of(40).run(store="memory:", mailbox=office)
    assert (report.status, report.total) == ("finished", 40)
    assert failures["send"] == failures["receive"] == failures["depth"] == 0


async def test_the_database_may_be_away_for_a_while() -> None:
    office, store = MemoryPostOffice(), open_store("memory:")
    away = 2
    whole = store.commit

    def commit(*args: Any, **rest: Any) -> Any:
        nonlocal away
        if away:
            away -= 1
            raise StoreUnavailableError("restarting")
        return whole(*args, **rest)

    store.commit = commit  # type: ignore[method-assign]  # a store that fails
    async with FakeWorker(office, "numbers").at_work():
        report = await suite_of(10).run(store=store, mailbox=office)
    assert (report.status, report.total, away) == ("finished", 10, 0)


async def test_requests_made_for_other_code_are_taken_back_and_made_anew(tmp_path: Path) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"
    first = suite_of(30)
    run = asyncio.create_task(first.run(store=url, mailbox=office))
    requests = await office.requests("numbers")
    await until(lambda: len(office._mailboxes["numbers.requests"]._waiting) == 20)
    run.cancel()
    await asyncio.wait([run])
    assert await requests.approximate_count() == 20  # Cancelled, not stopped: what is queued stays queued.
    changed = suite_of(30)
    changed.version = "2"
    old = {item.id for item in office._mailboxes["numbers.requests"]._waiting}
    run = asyncio.create_task(changed.run(store=url, mailbox=office, force=True))

    def now() -> set[str]:
        return {item.id for item in office._mailboxes["numbers.requests"]._waiting}

    with pytest.warns(UserWarning, match="results of two code versions"):
        await until(lambda: bool(now() - old))
    assert now().isdisjoint(old)
    async with FakeWorker(office, "numbers").at_work() as worker:
        report = await run
    assert (report.status, report.total) == ("finished", 30)
    assert {result.code for result in report.results} == {1}
    assert len({request.fingerprint for request in worker.seen}) == 1
    assert len(worker.seen) == 30


async def test_a_second_client_of_one_run_hears_of_the_first_and_nothing_is_counted_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"
    first = asyncio.create_task(suite_of(100).run(store=url, mailbox=office))
    await until(
        lambda: "numbers.requests" in office._mailboxes and bool(office._mailboxes["numbers.requests"]._waiting)
    )
    (run,) = open_store(url).runs()
    second = asyncio.create_task(suite_of(100).run(store=url, mailbox=office))
    await until(lambda: "is being worked on already (process" in caplog.text)
    async with FakeWorker(office, "numbers").at_work():
        reports = await asyncio.gather(first, second)
    assert [(report.run_id, report.total, report.status) for report in reports] == [(run.run_id, 100, "finished")] * 2


async def test_a_client_that_joined_owns_the_run_once_the_owner_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "HEARTBEAT_SECONDS", 0.1)
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"
    store = open_store(url)
    first = asyncio.create_task(suite_of(100).run(store=url, mailbox=office))
    await until(lambda: bool(store.runs()) and store.run_owner(store.runs()[0].run_id).epoch == 1)
    (run,) = store.runs()
    second = asyncio.create_task(suite_of(100).run(store=url, mailbox=office))
    await asyncio.sleep(0.3)
    assert store.run_owner(run.run_id).epoch == 1
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: store.run_owner(run.run_id).epoch == 2)
    async with FakeWorker(office, "numbers").at_work():
        report = await second
    assert (report.run_id, report.total, report.status) == (run.run_id, 100, "finished")
    assert store.run_owner(run.run_id).owner is None


async def test_a_client_that_was_taken_over_by_another_client_still_ends_well(tmp_path: Path) -> None:
    office, url = MemoryPostOffice(), f"{tmp_path}/runs.db"
    store = open_store(url)
    first = asyncio.create_task(suite_of(50).run(store=url, mailbox=office))
    await until(lambda: bool(store.runs()) and store.run_owner(store.runs()[0].run_id).epoch == 1)
    (run,) = store.runs()
    seen = store.run_owner(run.run_id)
    assert store.acquire_run(run.run_id, '{"pid": 1, "host": "elsewhere", "client": true}', seen) == 2
    async with FakeWorker(office, "numbers").at_work():
        report = await first
    assert (report.total, report.status) == (50, "finished")


def test_a_fleet_needs_asyncio_and_says_so() -> None:
    async def run() -> None:
        await suite_of(3).run(store="memory:", mailbox=MemoryPostOffice())

    with pytest.raises(ConfigurationError, match="a fleet needs asyncio"):
        anyio.run(run, backend="trio")


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
            ledger.sent(sent)
            back = [trial.ordinal for trial in sent if chance.random() < 0.5]
            for ordinal in back:
                ledger.back(ordinal)
                ledger.back(ordinal)
            assert ledger.missing == len(missing) - len(back)
            left: Sequence[int] = sorted(i for i in missing - set(back) if i < ledger.position)
            assert [trial.ordinal for trial in ledger.lost()] == left
            assert ledger.outstanding == 0


async def test_a_run_that_another_process_executes_is_not_given_to_a_fleet_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, office = open_store("memory:"), MemoryPostOffice()
    monkeypatch.setattr(run_lease, "_POLL_SECONDS", 0.01)
    stopping = asyncio.create_task(suite_of(20).run(store=store, mailbox=office))
    await until(lambda: bool(store.runs(suite="numbers")) and "fleet" in store.runs(suite="numbers")[0].notes)
    stopping.cancel()
    await asyncio.wait([stopping])
    (run,) = store.runs(suite="numbers")

    epoch = store.acquire_run(run.run_id, '{"host": "elsewhere", "pid": 1}', store.run_owner(run.run_id))
    assert epoch is not None
    going_on = asyncio.create_task(suite_of(20).run(store=store, mailbox=office))
    await asyncio.sleep(0.05)
    assert not going_on.done()
    store.renew_run(run.run_id, epoch)
    with pytest.raises(RunBusyError, match="process 1 on elsewhere"):
        await going_on


async def test_a_fleets_run_that_goes_on_without_it_warns_of_what_is_queued(caplog: pytest.LogCaptureFixture) -> None:
    store, office = open_store("memory:"), MemoryPostOffice()

    async def echo(given: int) -> int:
        return given

    def suite() -> EvalSuite:
        data = Dataset([Sample(f"s{i}", i, i) for i in range(5)], name="numbers")
        return EvalSuite("numbers", data, echo, exact_match, version="1")

    killed = asyncio.create_task(suite().run(store=store, mailbox=office))
    requests = await office.requests("numbers")
    while not await requests.approximate_count():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)
    killed.cancel()
    await asyncio.wait([killed])
    report = await suite().run(store=store)
    assert (report.status, report.total) == ("finished", 5)
    assert "requests of it may still be queued" in caplog.text


async def test_warming_up_is_left_out_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    office = MemoryPostOffice()
    async with FakeWorker(office, "numbers").at_work():
        report = await suite_of(5, warmup=3).run(store="memory:", mailbox=office)
    assert report.total == 5
    assert "warmup=3 is left out" in caplog.text


async def test_a_client_told_to_stop_does_not_wait_for_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, office, interrupt = open_store("memory:"), MemoryPostOffice(), Interrupt()
    requests = await office.requests("numbers")
    away = asyncio.Event()

    async def gone(*args: Any, **options: Any) -> Any:
        away.set()
        raise MailboxConnectionError("away")

    suite = suite_of(20)
    run = asyncio.create_task(suite._carried_out(suite._request(store, {}, ()), office, interrupt=interrupt))
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

    store, office, watcher = Store(), MemoryPostOffice(), Watcher()

    def keep(request: EvalRequest) -> None:
        store.commit(request.key.run_id, [answer(request).result], {request.sample_ordinal: request.sample})

    async with FakeWorker(office, "numbers", keep).at_work():
        report = await suite_of(10).run(store=store, mailbox=office, bus=watcher)
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

    store, office = Forgetful(), MemoryPostOffice()
    async with FakeWorker(office, "numbers", concurrency=10).at_work() as worker:
        with anyio.fail_after(30):
            report = await suite_of(200).run(store=store, mailbox=office)
    assert (report.status, report.successful) == ("finished", 200)
    assert store.lost > 0
    assert len(worker.seen) == 200 + store.lost
    assert "were committed and are not in the store: sending these trials again" in caplog.text


async def test_a_run_is_incomplete_when_the_store_takes_nothing_for_a_trial() -> None:
    class Picky(MemoryStore):
        def commit(self, run_id: str, results: Any, *samples: Any, **rest: Any) -> Committed:
            bad = [result for result in results if result.sample_id == "s1"]
            kept = super().commit(run_id, [result for result in results if result not in bad], *samples, **rest)
            return Committed(kept.new, kept.duplicate, tuple((result.key, "no") for result in bad))

    office = MemoryPostOffice()
    async with FakeWorker(office, "numbers").at_work() as worker:
        with anyio.fail_after(30):
            report = await suite_of(20).run(store=Picky(), mailbox=office)
    assert (report.status, report.successful, report.not_run) == ("incomplete", 19, 1)
    assert len(worker.seen) == 20


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

    def __init__(self, office: MemoryPostOffice) -> None:
        self._office = office

    def __getattr__(self, name: str) -> Any:
        return getattr(self._office, name)

    async def results(self, suite: str, run_id: str) -> Any:
        mailbox: Any = await self._office.results(suite, run_id)

        class Empty:
            def __getattr__(self, name: str) -> Any:
                return getattr(mailbox, name)

            async def receive(self, *args: Any) -> Any:
                await asyncio.sleep(0.05)
                return ()

        return Empty()


async def two_clients(run: Callable[[Any], Any], office: MemoryPostOffice, worker: FakeWorker) -> list[Any]:
    """Have two clients carry a run out, the second from when the first one's trials are being executed."""
    first = asyncio.create_task(run(office))
    await until(lambda: len(worker.seen) > 5)
    return list(await asyncio.gather(first, run(Outrun(office))))


async def test_two_clients_end_beside_requests_of_older_code(tmp_path: Path) -> None:
    """A killed client's requests stay in the queue; the code changes; one worker and two clients start."""
    office, store = MemoryPostOffice(), open_store(f"{tmp_path}/runs.db")
    older = suite_of(60)
    killed = asyncio.create_task(older.run(store=store, mailbox=office))
    requests = await office.requests("numbers")

    async def queued() -> int:
        return (await requests.depth()).waiting

    while await queued() < 20:  # noqa: ASYNC110 - a mailbox has no event
        await asyncio.sleep(0.01)
    killed.cancel()
    await asyncio.wait([killed])

    newer = suite_of(60)
    newer.version = "2"
    worker = Refuser(office, "numbers", concurrency=5, delay=lambda _: asyncio.sleep(0.05))
    worker.fingerprint = identify(newer.prepared(), samples=False).fingerprint
    async with worker.at_work():
        # The worker has seen the older requests and keeps them from coming back.
        while await queued():  # noqa: ASYNC110 - a mailbox has no event
            await asyncio.sleep(0.01)
        with anyio.fail_after(30), pytest.warns(UserWarning, match="has changed"):
            reports = await two_clients(
                lambda reached: newer.run(store=store, mailbox=reached, force=True), office, worker
            )
    assert [(report.status, report.total) for report in reports] == [("finished", 60)] * 2


async def test_a_client_that_retries_errors_learns_of_results_another_client_stored(tmp_path: Path) -> None:
    office, store = MemoryPostOffice(), open_store(f"{tmp_path}/runs.db")
    failing = FakeWorker(office, "numbers", lambda request: answer(request, outcome="task_error", error="no"))
    async with failing.at_work():
        await suite_of(20).run(store=store, mailbox=office)
    worker = FakeWorker(office, "numbers", concurrency=2, delay=lambda _: asyncio.sleep(0.05))
    async with worker.at_work():
        with anyio.fail_after(30):
            reports = await two_clients(
                lambda reached: suite_of(20).run(store=store, mailbox=reached, retry_errors=True), office, worker
            )
    assert [(report.status, report.successful) for report in reports] == [("finished", 20)] * 2
