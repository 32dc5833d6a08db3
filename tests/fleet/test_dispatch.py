"""The client of a fleet: sending the requests of a run and collecting its results."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

import anyio
import pytest

from fairtrial import AnalysisPlan, ConfigurationError, Dataset, EvalSuite, Sample, TokenUsage, exact_match, open_store
from fairtrial.fleet import EvalReply, EvalRequest, MemoryBroker
from fairtrial.fleet.client import dispatch
from fairtrial.fleet.client.submission import Window
from fairtrial.mailbox.protocol import MailboxDepth
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import Committed
from fairtrial.trials import EvalConfig, Experiment, StopWhen
from tests.fleet.conftest import Place
from tests.fleet.dispatching import Watcher, never, suite_of
from tests.fleet.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.mark.proves("R59", "R61")
async def test_a_suite_is_run_by_workers_and_reported_like_any_other(place: Place) -> None:
    broker, watcher = place.broker, Watcher()
    suite = suite_of(40, experiments=[Experiment("a", {"x": 1}), Experiment("b")], repeats=3)
    async with FakeWorker(broker, "numbers").at_work() as worker:
        report = await suite.run(store=place.store, mailbox=broker, bus=watcher)
    assert (report.status, report.total, report.planned) == ("finished", 240, 240)
    assert report["a"].pass_rate == 1.0
    assert len({request.key for request in worker.seen}) == len(worker.seen) == 240
    assert {request.key.experiment: dict(request.params) for request in worker.seen} == {"a": {"x": 1}, "b": {}}
    assert report["a"].results[0].sample.input == 0
    assert len(watcher.named("TrialStarted")) == len(watcher.named("SampleEvaluated")) == 240
    (completed,) = watcher.named("EvalRunCompleted")
    assert completed.status == "finished"
    if isinstance(broker, MemoryBroker):
        assert f"numbers.results.{report.run_id}" not in broker._mailboxes


async def test_the_plan_of_a_fleets_run_is_stored_before_its_first_request(place: Place) -> None:
    plan, seen, store = AnalysisPlan(samples=20), [], open_store(place.store)

    class Reader(Watcher):
        def publish(self, event: Any) -> None:
            super().publish(event)
            if type(event).__name__ == "EvalRunStarted":
                seen.append([(note.digest, note.results) for note in store.get_run(event.run_id).noted.plans])

    async with FakeWorker(place.broker, "numbers").at_work():
        report = await suite_of(20).run(store=store, mailbox=place.broker, bus=Reader(), plan=plan)
    assert seen == [[(plan.digest, 0)]]
    assert "As planned on 20" in str(report)


@pytest.mark.proves("R57", "R61")
async def test_duplicates_are_not_counted(place: Place) -> None:
    watcher = Watcher()
    async with FakeWorker(place.broker, "numbers", twice=True).at_work():
        report = await suite_of().run(store=place.store, mailbox=place.broker, bus=watcher)
    assert (report.status, report.total) == ("finished", 60)
    assert len(watcher.named("SampleEvaluated")) == 60


@pytest.mark.parametrize("twice", [False, True])
async def test_results_in_a_slow_commit_are_published_once(*, twice: bool) -> None:
    """The store is read during the commit, and two receivers may have the same results."""

    class Slow(MemoryStore):
        reads = 0

        def commit(self, *given: Any, **rest: Any) -> Committed:
            committed = super().commit(*given, **rest)
            before, deadline = self.reads, time.monotonic() + 0.4
            while self.reads < before + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            return committed

        def done(self, run_id: str) -> bytearray:
            self.reads += 1
            return super().done(run_id)

    broker, watcher = MemoryBroker(), Watcher()
    async with FakeWorker(broker, "numbers", twice=twice).at_work():
        streamed = [result.key async for result in suite_of(40).stream(store=Slow(), mailbox=broker, bus=watcher)]
    assert len(set(streamed)) == len(streamed) == 40
    assert len(watcher.named("SampleEvaluated")) == 40


async def test_no_more_is_out_than_the_window_allows() -> None:
    broker = MemoryBroker()
    most = 0

    async def look(request: EvalRequest) -> None:
        nonlocal most
        depth = await (await broker.requests("numbers")).depth()
        most = max(most, depth.waiting + depth.in_flight)
        await asyncio.sleep(0.001)

    async with FakeWorker(broker, "numbers", concurrency=5, delay=look).at_work() as worker:
        report = await suite_of(300).run(store="memory:", mailbox=broker)
    assert report.total == len(worker.seen) == 300
    assert most <= 150


def test_the_window_grows_while_workers_take_everything_and_shrinks_when_much_waits() -> None:
    window = Window(floor=100)

    def look(waiting: int, in_flight: int, *, full: bool = True, crowded: bool = False) -> int:
        window.look(MailboxDepth(waiting, 0, in_flight, 0), full=full, crowded=crowded)
        return window.size

    assert look(90, 10) == 100  # Enough is waiting for the ten that are worked on.
    assert look(50, 100) == 100  # Half as many are waiting.
    assert (look(49, 100), window.is_starved) == (150, False)
    assert (look(0, 100), window.is_starved) == (300, True)  # Workers wait for more: it grows faster.
    assert look(0, 100, full=False) == 300  # Nothing was held back: there is nothing more to send.
    assert look(0, 100, crowded=True) == 300  # It is the client that cannot keep up.
    for _ in range(10):
        look(0, 2000)
    assert window.size > 4000
    before = window.size
    assert look(2000, 2000) == before
    for _ in range(100):
        look(5000, 10)
    assert window.size == 100


async def test_a_sample_that_is_too_large_to_send_is_a_dead_letter_and_the_others_go_on() -> None:
    broker = MemoryBroker()
    data: Dataset[str, str] = Dataset([Sample("small", "x"), Sample("large", "x" * 2_000_000), Sample("other", "y")])
    async with FakeWorker(broker, "numbers").at_work():
        report = await EvalSuite("numbers", data, never, exact_match).run(store="memory:", mailbox=broker)
    assert [(result.sample_id, result.outcome) for result in report.results] == [
        ("small", "scored"),
        ("large", "dead_letter"),
        ("other", "scored"),
    ]


async def test_an_error_stays_unless_it_is_to_be_retried_and_the_retry_is_a_further_attempt(place: Place) -> None:
    broker, url = place.broker, place.store

    def fails(request: EvalRequest) -> EvalReply:
        bad = request.ordinal in (3, 9) and request.attempt == 1
        return answer(request, outcome="task_error", error="no") if bad else answer(request)

    async with FakeWorker(broker, "numbers", fails).at_work() as worker:
        report = await suite_of(30).run(store=url, mailbox=broker)
        assert (report.status, dict(report.errors)) == ("finished", {"task_error": 2})
        worker.seen.clear()
        again = await suite_of(30).run(store=url, mailbox=broker, resume="errors")
    assert again.run_id == report.run_id
    assert (again.status, again.successful) == ("finished", 30)
    assert [(request.ordinal, request.attempt) for request in worker.seen] == [(3, 2), (9, 2)]


async def test_failed_scoring_is_made_up_for_here_and_no_task_is_called(place: Place) -> None:
    broker, url = place.broker, place.store

    def unscored(request: EvalRequest) -> EvalReply:
        return answer(request, outcome="scorer_error", error="no judge", output=7, output_json="7")

    async with FakeWorker(broker, "numbers", unscored).at_work() as worker:
        report = await suite_of(5).run(store=url, mailbox=broker)
        assert report.status == "unscored"
        worker.seen.clear()
        again = await suite_of(5).run(store=url, mailbox=broker)
    assert (again.run_id, again.status, again.successful) == (report.run_id, "finished", 5)
    assert [result.output for result in again.results] == [7] * 5
    assert worker.seen == []


@pytest.mark.parametrize("limit", [{"stop_on_error": True}, {"max_cost_usd": 0.05}])
async def test_a_limit_stops_the_run_takes_back_what_waits_and_leaves_it_resumable(
    place: Place, limit: dict[str, Any]
) -> None:
    broker, url = place.broker, place.store

    def costly(request: EvalRequest) -> EvalReply:
        usage = TokenUsage(1, 1, cost_usd=0.01)
        outcome = "task_error" if request.ordinal == 4 else "scored"
        return answer(request, outcome=outcome, usage=usage)

    async def slowly(request: EvalRequest) -> None:
        await anyio.sleep(0.005)  # Or the worker is through with the plan before the client has stored the first of it.

    async with FakeWorker(broker, "numbers", costly, concurrency=2, delay=slowly).at_work() as worker:
        report = await suite_of(200, **limit).run(store=url, mailbox=broker)
        assert report.status == "interrupted"
        stored = report.total  # A report shows what is stored now, also after the run was resumed.
        assert 5 <= stored < 60
        assert await place.count_requests() == 0
        worker.seen.clear()
        again = await suite_of(200).run(store=url, mailbox=broker)
    assert (again.run_id, again.status, again.total) == (report.run_id, "finished", 200)
    assert len(worker.seen) == 200 - stored


async def test_adaptive_stopping_ends_a_fleets_run_at_the_same_prefix_and_sends_nothing_far_ahead_of_it(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    soon = dispatch.DispatchConfig
    monkeypatch.setattr(dispatch, "DispatchConfig", lambda: soon(ahead=50))
    broker = place.broker
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
    workers = [FakeWorker(broker, "numbers", delay=slow_first).at_work() for _ in range(2)]
    async with workers[0], workers[1]:
        report = await suite.run(store=place.store, mailbox=broker)
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
    assert await place.count_requests() == 0


async def test_results_are_streamed_and_leaving_early_leaves_the_run_resumable(place: Place) -> None:
    broker, url = place.broker, place.store
    with closing(open_store(url)) as store:
        async with FakeWorker(broker, "numbers").at_work():
            every = [result.key async for result in suite_of(50).stream(store=url, mailbox=broker)]
            assert len(set(every)) == len(every) == 50
            async with aclosing(suite_of(50).stream(store=url, mailbox=broker, resume="never")) as stream:
                async for _ in stream:
                    break
            assert store.runs()[0].status == "interrupted"
            report = await suite_of(50).run(store=url, mailbox=broker)
        assert (report.status, report.total, len(store.runs())) == ("finished", 50, 2)


async def test_replies_of_other_runs_are_dead_lettered() -> None:
    broker = MemoryBroker()
    kept: dict[int, Any] = {}

    async def forge(request: EvalRequest) -> None:
        if request.ordinal:
            return
        results = kept[0] = next(box for name, box in broker._mailboxes.items() if ".results." in name)
        good = answer(request)
        for change in (
            {"key": good.result.key._replace(run_id="other")},
            {"ordinal": 10_000},
            {"ordinal": 7},
            {"key": good.result.key._replace(experiment="other")},
        ):
            await results.send(replace(good, result=replace(good.result, **change)))

    async with FakeWorker(broker, "numbers", delay=forge).at_work():
        report = await suite_of(10).run(store="memory:", mailbox=broker)
    assert (report.total, report.successful) == (10, 10)
    letters = await kept[0].dead_letters.page()
    assert sorted(letter.reason.partition(": ")[2].split(" ")[0] for letter in letters) == [
        "it",
        "its",
        "trial",
        "trial",
    ]


def test_a_fleet_needs_asyncio_and_says_so() -> None:
    async def run() -> None:
        await suite_of(3).run(store="memory:", mailbox=MemoryBroker())

    with pytest.raises(ConfigurationError, match="a fleet needs asyncio"):
        anyio.run(run, backend="trio")


async def test_warmup_on_a_fleet_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    broker = MemoryBroker()
    async with FakeWorker(broker, "numbers").at_work():
        report = await suite_of(5, warmup=3).run(store="memory:", mailbox=broker)
    assert report.total == 5
    assert "warmup=3 has no effect" in caplog.text


def _mistaken(request: EvalRequest) -> EvalReply:
    if request.key.experiment == "good":
        return answer(request)
    traceback = '  File "/project/evals.py", line 3, in task\n    return x.outputt\n'
    return answer(
        request,
        outcome="task_error",
        stage="task",
        error="AttributeError: 'int' object has no attribute 'outputt'",
        metadata={"traceback": traceback, "programming_error": True},
    )


@pytest.mark.parametrize("others", [True, False])
async def test_an_experiment_of_equal_programming_errors_is_stopped_and_others_go_on(
    place: Place, *, others: bool
) -> None:
    experiments = [Experiment("bad"), *([Experiment("good")] if others else [])]
    suite = suite_of(1200, experiments=experiments)
    async with FakeWorker(place.broker, "numbers", _mistaken, concurrency=5).at_work() as worker:
        report = await suite.run(store=place.store, mailbox=place.broker)
    assert report.status == "incomplete"
    assert "was stopped because its first 20 trials all ended in the same error" in (report.run.noted.stopped or "")
    executed = sum(request.key.experiment == "bad" for request in worker.seen)
    assert 20 <= executed < 1200
    assert report["bad"].total >= 20
    if others:
        assert (report["good"].total, report["good"].pass_rate) == (1200, 1.0)
