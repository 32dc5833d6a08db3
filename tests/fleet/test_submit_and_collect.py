"""Submitting by hand and collecting by hand: nothing lost, nothing counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fairtrial import (
    ConfigurationError,
    Dataset,
    EvalReport,
    Experiment,
    Sample,
    StoreError,
    TrialContext,
    exact_match,
    open_store,
)
from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet import EvalLoop, collect_results, collect_results_sync, submit_dataset, submit_dataset_sync
from fairtrial.fleet.post import MemoryPostOffice
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.mailbox.resolver import CompositeResolver
from fairtrial.trials.keys import TrialKey
from tests.fleet.fake_worker import FakeWorker, answer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def office() -> MemoryPostOffice:
    return MemoryPostOffice()


def numbers(count: int = 30) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, i) for i in range(count)], name="numbers")


async def mailboxes(office: MemoryPostOffice) -> tuple[InMemoryMailbox[EvalRequest], InMemoryMailbox[EvalReply]]:
    requests, results = await office.requests("hand"), await office.results("hand", "all")
    assert isinstance(requests, InMemoryMailbox)
    assert isinstance(results, InMemoryMailbox)
    return requests, results


def reply(place: int, *, run_id: str = "r", experiment: str = "a", repeat: int = 0, repeats: int = 1) -> EvalReply:
    key = TrialKey(run_id, experiment, f"s{place}", repeat)
    return answer(EvalRequest(key, Sample(f"s{place}", place), place * repeats + repeat, place, echo=True))


@pytest.mark.proves("R48", "R56", "R57")
async def test_a_dataset_goes_out_and_its_results_come_in(office: MemoryPostOffice) -> None:
    requests, results = await mailboxes(office)
    async with FakeWorker(office, "hand").at_work() as worker:
        run_id = await submit_dataset(numbers(700), Experiment("a", {"x": 1}), requests, repeats=2, reply_to=results)
        report = await collect_results(results, 1400, repeats=2)
    assert isinstance(report, EvalReport)
    assert (report.run_id, report.status, report.total, report.pass_rate) == (run_id, "finished", 1400, 1.0)
    assert {dict(request.params)["x"] for request in worker.seen} == {1}
    assert report.results[3].sample.input == 1
    assert await results.approximate_count() == 0


@pytest.mark.proves("R48", "R54", "R56", "R57")
@pytest.mark.parametrize("where", ["results", "reply_to"])
async def test_a_dataset_is_submitted_executed_scored_and_collected(where: str) -> None:
    """The whole way by hand, with the loop that users run."""
    results = InMemoryMailbox("results", EvalReply)
    requests = InMemoryMailbox("requests", EvalRequest, resolver=CompositeResolver({"results": results}))
    to: dict[str, Any] = {"results": results} if where == "results" else {}

    async def styled(input: int, ctx: TrialContext) -> int:
        return input + int(str(ctx.experiment.params["offset"])) * (input % 2)

    loop = EvalLoop(requests=requests, loop=styled, evaluator=exact_match, **to)
    run_id = await submit_dataset(
        numbers(30), Experiment("odd", {"offset": 1}), requests, repeats=2, reply_to=None if to else "results"
    )
    working = asyncio.create_task(loop.run(until_empty=True))
    report = await collect_results(results, 60, repeats=2, timeout_seconds=10)
    await working
    assert (report.run_id, report.status, report.total) == (run_id, "finished", 60)
    assert report["odd"].pass_rate == 0.5
    assert [(found.sample_id, found.repeat, found.output) for found in report.results][:4] == [
        ("s0", 0, 0),
        ("s0", 1, 0),
        ("s1", 0, 2),
        ("s1", 1, 2),
    ]
    assert (await requests.approximate_count(), await results.approximate_count()) == (0, 0)


@pytest.mark.proves("R57", "R61")
async def test_a_duplicate_does_not_count_toward_what_is_expected(office: MemoryPostOffice) -> None:
    _, results = await mailboxes(office)
    for place in (0, 0, 1, 1, 0):
        await results.send(reply(place))
    with pytest.warns(UserWarning, match=r"1 of 3 results of run r did not come in time: a/sample 2#0$"):
        report = await collect_results(results, 3, timeout_seconds=0.2)
    assert (report.total, report.status) == (2, "interrupted")
    assert report.run.notes["missing"] == {"count": 1, "first": ["a/sample 2#0"]}


@pytest.mark.proves("R57")
async def test_what_is_missing_is_named_by_its_sample_when_the_run_was_recorded(office: MemoryPostOffice) -> None:
    requests, results = await mailboxes(office)
    store = open_store("memory:")
    run_id = await submit_dataset(numbers(40), Experiment("a"), requests, reply_to=results, store=store, suite="hand")

    def treat(request: EvalRequest) -> EvalReply | None:
        return answer(request) if request.ordinal < 15 else None

    async with FakeWorker(office, "hand", treat).at_work():
        with pytest.warns(UserWarning, match=r"25 of 40 results .*: a/s15#0, a/s16#0, .*a/s34#0, \.\.\.$"):
            report = await collect_results(results, 40, timeout_seconds=0.3, store=store)
    assert (report.run_id, report.run.suite, report.planned) == (run_id, "hand", 40)


@pytest.mark.proves("R61")
async def test_a_batch_is_committed_before_it_is_acknowledged(office: MemoryPostOffice) -> None:
    _, results = await mailboxes(office)
    store = open_store("memory:")
    steps: list[str] = []
    whole, settle = store.commit, results._settle

    def commit(*args: Any, **rest: Any) -> Any:
        done = whole(*args, **rest)
        steps.append("commit")
        return done

    def settled(*args: Any) -> None:
        steps.append("acknowledge")
        settle(*args)

    store.commit = commit  # type: ignore[method-assign]  # to see the order
    results._settle = settled  # type: ignore[method-assign,assignment]  # to see the order
    for place in range(3):
        await results.send(reply(place))
    await collect_results(results, 3, store=store)
    assert steps == ["commit", "acknowledge", "acknowledge", "acknowledge"]


@pytest.mark.proves("R61")
async def test_a_collector_that_dies_before_its_commit_has_acknowledged_nothing(
    office: MemoryPostOffice, tmp_path: Path
) -> None:
    _, results = await mailboxes(office)
    store = open_store(f"{tmp_path}/runs.db")
    whole = store.commit

    def commit(*args: Any, **rest: Any) -> Any:
        raise RuntimeError("the machine is gone")

    for place in range(5):
        await results.send(reply(place))
    store.commit = commit  # type: ignore[method-assign]  # a crash
    with pytest.raises(RuntimeError, match="gone"):
        await collect_results(results, 5, store=store)
    assert await results.approximate_count() == 5
    store.commit = whole  # type: ignore[method-assign]  # as it was
    report = await collect_results(results, 5, store=store)
    assert (report.status, report.total) == ("finished", 5)


async def test_collecting_goes_on_where_an_earlier_collector_ended(office: MemoryPostOffice, tmp_path: Path) -> None:
    _, results = await mailboxes(office)
    store = open_store(f"{tmp_path}/runs.db")
    for place in (0, 1):
        await results.send(reply(place))
    with pytest.warns(UserWarning, match="1 of 3"):
        await collect_results(results, 3, timeout_seconds=0.1, store=store)
    for place in (1, 2):
        await results.send(reply(place))
    report = await collect_results(results, 3, store=store, run_id="r")
    assert (report.status, report.total, report.run.notes["missing"]) == ("finished", 3, None)
    again = await collect_results(results, 3, timeout_seconds=0.1, store=store, run_id="r")
    assert again.total == 3


class Waits(InMemoryMailbox[EvalReply]):
    """Notes how long it is asked to wait."""

    asked: list[float]

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Any:
        self.asked.append(wait_time_seconds)
        return await super().receive(max_messages, visibility_timeout, wait_time_seconds)


@pytest.mark.proves("R57")
async def test_no_receive_waits_longer_than_the_time_that_is_left_nor_shorter_than_need_be() -> None:
    results = Waits("results", EvalReply)
    results.asked = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError, match="none of 5 results came: are there workers"):
        await collect_results(results, 5, timeout_seconds=0.3)
    assert 0.29 < loop.time() - began < 3
    assert all(0 < wait <= 0.3 for wait in results.asked)
    results.asked.clear()
    for place in range(5):
        await results.send(reply(place))
    await collect_results(results, 5, timeout_seconds=1000)
    assert results.asked[0] == 20


async def test_several_experiments_of_one_run_are_collected_when_they_are_named(office: MemoryPostOffice) -> None:
    requests, results = await mailboxes(office)
    async with FakeWorker(office, "hand").at_work():
        for name in ("a", "b"):
            await submit_dataset(numbers(10), Experiment(name), requests, run_id="r", repeats=2, reply_to=results.name)
        report = await collect_results(results, 40, experiments=["a", "b"], repeats=2)
    assert (report["a"].total, report["b"].total) == (20, 20)
    assert [result.key.sample_id for result in report["b"].results][:4] == ["s0", "s0", "s1", "s1"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"experiment": "b"}, r"of experiment 'b', the run has a: collect with experiments="),
        ({"run_id": "q"}, "replies of runs r and q come to one mailbox"),
        ({"repeat": 1}, r"lies outside a plan of 2 samples x 1 experiments x 1 repeats"),
        ({"place": 7}, "lies outside a plan"),
    ],
)
async def test_replies_that_do_not_fit_the_plan_are_refused_and_not_lost(
    office: MemoryPostOffice, second: dict[str, Any], said: str
) -> None:
    _, results = await mailboxes(office)
    await results.send(reply(0))
    await results.send(reply(**{"place": 1, **second}))
    with pytest.raises(ConfigurationError, match=said):
        await collect_results(results, 2)
    assert await results.approximate_count() == 2


async def test_a_result_the_store_refuses_is_an_error_and_stays_in_the_mailbox(office: MemoryPostOffice) -> None:
    _, results = await mailboxes(office)
    good = reply(0)
    await results.send(good)
    other = reply(0)
    key = TrialKey("r", "a", "another name for the same place")
    await results.send(answer(EvalRequest(key, Sample(key.sample_id, 1), 0, 0, echo=True)))
    assert other.result.key == good.result.key
    with pytest.raises(StoreError, match="1 results cannot be stored"):
        await collect_results(results, 1)
    assert await results.approximate_count() == 2


async def test_a_plan_that_cannot_be_is_refused(office: MemoryPostOffice) -> None:
    requests, results = await mailboxes(office)
    await results.send(reply(0))
    with pytest.raises(ConfigurationError, match="3 trials cannot be 1 experiments x 2 repeats"):
        await collect_results(results, 3, repeats=2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        await collect_results(results, 0)
    with pytest.raises(ConfigurationError, match="repeats is at least 1"):
        await submit_dataset(numbers(), Experiment("a"), requests, repeats=0)
    store = open_store("memory:")
    await submit_dataset(numbers(), Experiment("a"), requests, run_id="r", store=store)
    await submit_dataset(numbers(), Experiment("a"), requests, run_id="r", store=store)
    with pytest.raises(ConfigurationError, match="run r is in the store already, with another plan"):
        await submit_dataset(numbers(), Experiment("b"), requests, run_id="r", store=store)


async def test_a_sample_that_cannot_be_sent_is_named(office: MemoryPostOffice) -> None:
    requests, _ = await mailboxes(office)
    data: Dataset[str, str] = Dataset([Sample("fits", "x"), Sample("too much", "x" * 2_000_000)])
    with pytest.raises(ConfigurationError, match=r"1 of the requests cannot be sent, the first for trial .*too much#0"):
        await submit_dataset(data, Experiment("a"), requests)
    assert await requests.approximate_count() == 1


@pytest.mark.proves("R62")
async def test_submitting_waits_for_a_server_that_is_away(
    office: MemoryPostOffice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests, _ = await mailboxes(office)
    away = 10
    whole = requests.send

    async def send(body: EvalRequest, *, reply_to: Any = None) -> str:
        nonlocal away
        if away:
            away -= 1
            raise MailboxConnectionError("restarting")
        return await whole(body, reply_to=reply_to)

    monkeypatch.setattr(requests, "send", send)
    await submit_dataset(numbers(20), Experiment("a"), requests)
    assert await requests.approximate_count() == 20
    assert "sending to hand.requests: restarting; trying again" in caplog.text


def test_both_can_be_called_from_ordinary_code() -> None:
    requests = InMemoryMailbox("requests", EvalRequest)
    results = InMemoryMailbox("results", EvalReply)
    run_id = submit_dataset_sync(numbers(3), Experiment("a"), requests, reply_to="results")

    async def work() -> None:
        for message in await requests.receive(10, 30, 0):
            await results.send(answer(message.body))

    from fairtrial.portal import call_sync

    call_sync(work)
    report = collect_results_sync(results, 3)
    assert (report.run_id, report.total) == (run_id, 3)
