"""Submitting and collecting from a program: nothing lost, nothing counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fairtrial import ConfigurationError, Dataset, EvalReport, Experiment, Sample, TrialContext, exact_match, open_store
from fairtrial.errors import MailboxConnectionError, StoreError
from fairtrial.fleet import (
    EvalLoop,
    MainLoop,
    collect_results,
    collect_results_sync,
    submit_dataset,
    submit_dataset_sync,
)
from fairtrial.fleet.client import collect
from fairtrial.fleet.client.collect import submitted
from fairtrial.fleet.messages import EvalReply, EvalRequest, current_implicit_run, end_implicit_run
from fairtrial.fleet.queues import MemoryBroker
from fairtrial.mailbox import CompositeResolver, InMemoryMailbox, RedisMailbox
from fairtrial.testing import FakeClock
from fairtrial.trials.context import TrialKey
from tests.fleet.build import serving
from tests.fleet.fake_worker import FakeWorker, answer


@pytest.fixture(autouse=True)
def nothing_submitted() -> None:
    """Other tests submit runs, and make requests without a key, that nobody collects."""
    submitted.clear()
    if implicit := current_implicit_run():
        end_implicit_run(implicit)


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_submitting_and_collecting_are_refused_on_trio_with_the_reason(broker: MemoryBroker) -> None:
    requests, results = await mailboxes(broker)
    with pytest.raises(ConfigurationError, match="a fleet needs asyncio"):
        await submit_dataset(numbers(1), Experiment("a"), requests)
    with pytest.raises(ConfigurationError, match="a fleet needs asyncio"):
        await collect_results(results, 1)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


def numbers(count: int = 30) -> Dataset[int, int]:
    return Dataset([Sample(f"s{i}", i, i) for i in range(count)], name="numbers")


async def mailboxes(broker: MemoryBroker) -> tuple[InMemoryMailbox[EvalRequest], InMemoryMailbox[EvalReply]]:
    requests, results = await broker.requests("hand"), await broker.results("hand", "all")
    assert isinstance(requests, InMemoryMailbox)
    assert isinstance(results, InMemoryMailbox)
    return requests, results


def reply(place: int, *, run_id: str = "r", experiment: str = "a", repeat: int = 0, repeats: int = 1) -> EvalReply:
    key = TrialKey(run_id, experiment, f"s{place}", repeat)
    return answer(EvalRequest(key, Sample(f"s{place}", place), place * repeats + repeat, place, echo=True))


@pytest.mark.proves("R48", "R56", "R57")
async def test_a_dataset_goes_out_and_its_results_come_in(broker: MemoryBroker) -> None:
    requests, results = await mailboxes(broker)
    async with FakeWorker(broker, "hand").at_work() as worker:
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
    """The whole path, with the loop that users run."""
    results = InMemoryMailbox("results", EvalReply)
    requests = InMemoryMailbox("requests", EvalRequest, reply_resolver=CompositeResolver({"results": results}))
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
async def test_a_duplicate_does_not_count_toward_what_is_expected(broker: MemoryBroker) -> None:
    _, results = await mailboxes(broker)
    for place in (0, 0, 1, 1, 0):
        await results.send(reply(place))
    with pytest.warns(UserWarning, match=r"1 of 3 results of run r did not arrive in time: a/sample 2#0$"):
        report = await collect_results(results, 3, timeout_seconds=0.2)
    assert (report.total, report.status) == (2, "interrupted")
    assert report.run.notes["missing"] == {"count": 1, "first": ["a/sample 2#0"]}


@pytest.mark.proves("R57")
async def test_what_is_missing_is_named_by_its_sample_when_the_run_was_recorded(broker: MemoryBroker) -> None:
    requests, results = await mailboxes(broker)
    store = open_store("memory:")
    run_id = await submit_dataset(numbers(40), Experiment("a"), requests, reply_to=results, store=store, suite="hand")

    def treat(request: EvalRequest) -> EvalReply | None:
        return answer(request) if request.ordinal < 15 else None

    async with FakeWorker(broker, "hand", treat).at_work():
        with pytest.warns(UserWarning, match=r"25 of 40 results .*: a/s15#0, a/s16#0, .*a/s34#0, \.\.\.$"):
            report = await collect_results(results, 40, timeout_seconds=0.3, store=store)
    assert (report.run_id, report.run.suite, report.planned) == (run_id, "hand", 40)


@pytest.mark.proves("R61")
async def test_a_batch_is_committed_before_it_is_acknowledged(broker: MemoryBroker) -> None:
    _, results = await mailboxes(broker)
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
    broker: MemoryBroker, tmp_path: Path
) -> None:
    _, results = await mailboxes(broker)
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


async def test_collecting_continues_where_an_earlier_collector_ended(broker: MemoryBroker, tmp_path: Path) -> None:
    _, results = await mailboxes(broker)
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
    with pytest.warns(UserWarning, match=r"5 of 5 results of run \w+ did not arrive in time: default/sample 0#0, "):
        report = await collect_results(results, 5, timeout_seconds=0.3)
    assert (report.total, report.planned, report.status) == (0, 5, "interrupted")
    assert 0.29 < loop.time() - began < 3
    assert all(0 < wait <= 0.3 for wait in results.asked)
    results.asked.clear()
    for place in range(5):
        await results.send(reply(place))
    await collect_results(results, 5, timeout_seconds=1000)
    assert results.asked[0] == 20


@pytest.mark.proves("R57")
@pytest.mark.parametrize("named", [True, False])
async def test_a_late_result_of_another_run_disturbs_no_collection_and_is_not_lost(named: bool) -> None:
    clock = FakeClock()
    requests = InMemoryMailbox("requests", EvalRequest)
    results = InMemoryMailbox("results", EvalReply, clock=clock)
    may_end = asyncio.Event()

    async def slow(input: int) -> int:
        if input == 3:
            await may_end.wait()
        return input

    loop = EvalLoop(loop=slow, evaluator=exact_match, requests=requests, results=results)
    async with serving(loop):
        first = await submit_dataset(numbers(4), Experiment(), requests)
        with pytest.warns(UserWarning, match=rf"1 of 4 results of run {first} did not arrive in time"):
            await collect_results(results, 4, timeout_seconds=0.5)
        may_end.set()
        (late,) = await results.receive(1, 60, 20)
        await late.nack(0)
        for _ in range(5):  # The straggler is offered to other collectors first.
            second = await submit_dataset(numbers(4), Experiment(), requests)
            report = await collect_results(results, 4, timeout_seconds=20, run_id=second if named else None)
            assert (report.run_id, report.total, report.status) == (second, 4, "finished")
            clock.advance(10)
        (letter,) = await results.dead_letters.page()
        assert first in letter.reason


@pytest.mark.parametrize("durable", [True, False])
async def test_a_run_of_which_nothing_came_in_time_is_collected_by_the_next_call(durable: bool) -> None:
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    loop = EvalLoop(loop=lambda input: input, evaluator=exact_match, requests=requests, results=results)
    store = open_store("memory:") if durable else None
    run_id = await submit_dataset(numbers(4), requests, store=store)
    with pytest.warns(UserWarning, match=rf"4 of 4 results of run {run_id} did not arrive in time"):
        assert (await collect_results(results, 4, timeout_seconds=0.1, store=store)).total == 0
    await loop.run(until_empty=True)
    report = await collect_results(results, 4, timeout_seconds=20, store=store)
    assert (report.run_id, report.total, report.status) == (run_id, 4, "finished")


async def test_results_of_a_run_that_was_collected_in_part_are_named_and_not_said_to_be_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    may_end = asyncio.Event()

    async def slow(input: int) -> int:
        if input >= 2:
            await may_end.wait()
        return input

    loop = EvalLoop(loop=slow, evaluator=exact_match, requests=requests, results=results)
    async with serving(loop):
        store = open_store("memory:")
        run_id = await submit_dataset(numbers(4), requests)
        with pytest.warns(UserWarning, match="2 of 4 results"):
            await collect_results(results, 4, timeout_seconds=0.5, store=store)
        may_end.set()
        while await results.approximate_count() < 2:  # noqa: ASYNC110 - the mailbox has no event for it
            await asyncio.sleep(0.01)
        remedy = rf"the mailbox has results of other runs: 2 of run {run_id}\. .* pass run_id='{run_id}'\.$"
        with pytest.warns(UserWarning, match=rf"4 of 4 results .* did not arrive in time: .*; {remedy}"):
            await collect_results(results, 4, timeout_seconds=0.1)
        assert f"none of the 4 results arrived; the mailbox has results of other runs: 2 of run {run_id}" in caplog.text
        assert "check that workers are running" not in caplog.text
        report = await collect_results(results, 4, timeout_seconds=20, run_id=run_id, store=store)
        assert (report.total, report.status) == (4, "finished")


async def test_of_two_submissions_one_is_collected_and_the_other_is_named() -> None:
    clock = FakeClock()
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply, clock=clock)
    loop = EvalLoop(loop=lambda input: input, evaluator=exact_match, requests=requests, results=results)
    one, two = [await submit_dataset(numbers(3), requests) for _ in range(2)]
    await loop.run(until_empty=True)
    with pytest.warns(UserWarning, match=r"3 of 6 results") as warned:
        first = await collect_results(results, 6, timeout_seconds=0.2)
    other = ({one, two} - {first.run_id}).pop()
    assert f"3 of run {other}. Each call collects one run; for the first of these pass run_id={other!r}" in str(
        warned[0].message
    )
    clock.advance(10)
    second = await collect_results(results, 3, timeout_seconds=20)
    assert (second.run_id, second.total) == (other, 3)


async def test_results_of_another_run_that_became_dead_letters_are_said_to_be_there() -> None:
    clock = FakeClock()
    results = InMemoryMailbox("results", EvalReply, clock=clock)
    await results.send(reply(0))
    for expected in ("1 of run r. Each call", "1 of them are dead letters by now: retry those first."):
        with pytest.warns(UserWarning, match="1 of 1 results") as warned:
            await collect_results(results, 1, run_id="another", timeout_seconds=0.1)
        assert expected in str(warned[0].message)
        clock.advance(10)
        for message in await results.receive(1, 60, 0):  # Another collector; there are as many as it is offered to.
            await message.nack(0)
            for _ in range(2):
                (message,) = await results.receive(1, 60, 0)
                await message.nack(0)


async def test_an_empty_dataset_is_submitted_and_collected_at_once(caplog: pytest.LogCaptureFixture) -> None:
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    await submit_dataset(Dataset([]), requests)
    report = await collect_results(results, 0)
    assert (report.total, report.pass_rate, report.status) == (0, None, "finished")
    assert not caplog.text


@pytest.mark.proves("R131")
async def test_replies_go_to_a_mailbox_in_memory_by_reference() -> None:
    requests, results = InMemoryMailbox[EvalRequest]("requests"), InMemoryMailbox[EvalReply]("results")
    loop = EvalLoop(loop=lambda input: input, evaluator=exact_match, requests=requests)
    await submit_dataset(numbers(5), Experiment(), requests, reply_to=results)
    await loop.run(until_empty=True)
    assert (await collect_results(results, 5, timeout_seconds=20)).pass_rate == 1.0


async def test_a_mailbox_in_memory_cannot_be_the_reply_address_of_a_message_on_redis(redis_url: str) -> None:
    async with RedisMailbox("by-reference", EvalRequest, redis_url) as requests:
        with pytest.raises(ConfigurationError, match=r"must be a mailbox on Redis or a name \(got InMemoryMailbox"):
            await submit_dataset(numbers(1), Experiment(), requests, reply_to=InMemoryMailbox("results"))
        assert await requests.approximate_count() == 0


async def test_requests_that_the_queue_lost_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_LOST_SECONDS", 0.05)
    requests, results = InMemoryMailbox("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
    store = open_store("memory:")
    executed = []

    def task(input: int, ctx: TrialContext) -> int:
        executed.append(input)
        return input + int(str(ctx.experiment.params["add"]))

    run_id = await submit_dataset(numbers(30), Experiment("a", {"add": 0}), requests, store=store)
    lost = await requests.receive(20, 60, 0)
    loop = EvalLoop(loop=task, evaluator=exact_match, requests=requests, results=results)
    await loop.run(max_iterations=1)
    assert (len(executed), len(lost)) == (10, 20)
    await requests.purge()
    loop = EvalLoop(loop=task, evaluator=exact_match, requests=requests, results=results)
    async with serving(loop):
        report = await collect_results(results, 30, timeout_seconds=20, store=store, run_id=run_id, requests=requests)
        assert (report.total, report.pass_rate, report.status) == (30, 1.0, "finished")
        assert sorted(executed) == list(range(30))
    with pytest.raises(ConfigurationError, match="requests must be given with the run_id and the store"):
        await collect_results(results, 30, requests=requests)


async def test_several_experiments_of_one_run_are_collected_when_they_are_named(broker: MemoryBroker) -> None:
    requests, results = await mailboxes(broker)
    async with FakeWorker(broker, "hand").at_work():
        for name in ("a", "b"):
            await submit_dataset(numbers(10), Experiment(name), requests, run_id="r", repeats=2, reply_to=results.name)
        report = await collect_results(results, 40, experiments=["a", "b"], repeats=2)
    assert (report["a"].total, report["b"].total) == (20, 20)
    assert [result.key.sample_id for result in report["b"].results][:4] == ["s0", "s0", "s1", "s1"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"experiment": "b"}, r"belongs to experiment 'b', but the run has a: name all of them with experiments="),
        ({"repeat": 1}, r"is outside the plan of 2 samples x 1 experiments x 1 repeats"),
        ({"place": 7}, "is outside the plan"),
    ],
)
async def test_replies_that_do_not_fit_the_plan_are_refused_and_not_lost(
    broker: MemoryBroker, second: dict[str, Any], said: str
) -> None:
    _, results = await mailboxes(broker)
    await results.send(reply(0))
    await results.send(reply(**{"place": 1, **second}))
    with pytest.raises(ConfigurationError, match=said):
        await collect_results(results, 2)
    assert await results.approximate_count() == 2


async def test_a_result_the_store_refuses_is_an_error_and_stays_in_the_mailbox(broker: MemoryBroker) -> None:
    _, results = await mailboxes(broker)
    good = reply(0)
    await results.send(good)
    other = reply(0)
    key = TrialKey("r", "a", "another name for the same place")
    await results.send(answer(EvalRequest(key, Sample(key.sample_id, 1), 0, 0, echo=True)))
    assert other.result.key == good.result.key
    with pytest.raises(StoreError, match="1 results cannot be stored"):
        await collect_results(results, 1)
    assert await results.approximate_count() == 2


async def test_a_plan_that_cannot_be_is_refused(broker: MemoryBroker) -> None:
    requests, results = await mailboxes(broker)
    await results.send(reply(0))
    with pytest.raises(ConfigurationError, match=r"a multiple of 1 experiments x 2 repeats \(got 3\)"):
        await collect_results(results, 3, repeats=2)
    with pytest.raises(ConfigurationError, match=r"at least 0 and repeats at least 1 \(got -1 and 1\)"):
        await collect_results(results, -1)
    with pytest.raises(ConfigurationError, match="repeats must be at least 1"):
        await submit_dataset(numbers(), Experiment("a"), requests, repeats=0)
    store = open_store("memory:")
    await submit_dataset(numbers(), Experiment("a"), requests, run_id="r", store=store)
    await submit_dataset(numbers(), Experiment("a"), requests, run_id="r", store=store)
    with pytest.raises(ConfigurationError, match="run r is already in the store with a different plan"):
        await submit_dataset(numbers(), Experiment("b"), requests, run_id="r", store=store)


async def test_a_sample_that_cannot_be_sent_is_named(broker: MemoryBroker) -> None:
    requests, _ = await mailboxes(broker)
    data: Dataset[str, str] = Dataset([Sample("fits", "x"), Sample("too much", "x" * 2_000_000)])
    with pytest.raises(ConfigurationError, match=r"1 requests cannot be sent; the first is for trial .*too much#0"):
        await submit_dataset(data, Experiment("a"), requests)
    assert await requests.approximate_count() == 1


@pytest.mark.proves("R62")
async def test_submitting_waits_for_a_server_that_is_away(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests, _ = await mailboxes(broker)
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


def test_both_have_blocking_versions() -> None:
    requests = InMemoryMailbox("requests", EvalRequest)
    results = InMemoryMailbox("results", EvalReply)
    run_id = submit_dataset_sync(numbers(3), Experiment("a"), requests, reply_to="results")

    async def work() -> None:
        for message in await requests.receive(10, 30, 0):
            await results.send(answer(message.body))

    from fairtrial.base.sync_bridge import call_sync

    call_sync(work)
    report = collect_results_sync(results, 3)
    assert (report.run_id, report.total) == (run_id, 3)


@pytest.mark.proves("R57", "R156")
async def test_requests_without_a_key_are_one_run_that_is_placed_by_its_samples_and_resumed_later(
    tmp_path: Path,
) -> None:
    results = InMemoryMailbox("results", EvalReply)
    store = open_store(f"{tmp_path}/runs.db")
    made: list[EvalRequest] = [EvalRequest(sample=Sample(f"s{i}", i, i)) for i in range(4)]
    assert len({request.key.run_id for request in made}) == 1
    for request in (made[2], made[0], made[2]):
        await results.send(answer(request))
    with pytest.warns(UserWarning, match="1 of 3 results"):
        report = await collect_results(results, 3, timeout_seconds=0.1, store=store)
    assert [(found.sample_id, found.sample.input) for found in report.results] == [("s2", 2), ("s0", 0)]
    for request in (made[0], made[1]):
        await results.send(answer(request))
    report = await collect_results(results, 3, store=store, run_id=report.run_id)
    assert [found.sample_id for found in report.results] == ["s2", "s0", "s1"]
    await results.send(answer(made[3]))
    with pytest.raises(ConfigurationError, match="is outside the plan of 3 samples"):
        await collect_results(results, 4, store=store, run_id=report.run_id, timeout_seconds=5)


@pytest.mark.proves("R57", "R156")
async def test_requests_without_a_key_after_a_collection_are_another_run_which_stragglers_do_not_enter() -> None:
    results = InMemoryMailbox("results", EvalReply)
    first: list[EvalRequest] = [EvalRequest(sample=Sample(f"s{i}", i, i)) for i in range(2)]
    await results.send(answer(first[0]))
    with pytest.warns(UserWarning, match="1 of 2 results"):
        await collect_results(results, 2, timeout_seconds=0.1)
    second: EvalRequest = EvalRequest(sample=Sample("s1", 1, 1))
    assert second.key.run_id != first[1].key.run_id
    for request in (first[1], second):
        await results.send(answer(request))
    report = await collect_results(results, 1, timeout_seconds=10)
    assert (report.run_id, report.total) == (second.key.run_id, 1)


@pytest.mark.proves("R57", "R156")
async def test_requests_without_a_key_are_collected_although_an_earlier_run_was_never_collected() -> None:
    await submit_dataset(numbers(1), InMemoryMailbox("requests", EvalRequest))
    results = InMemoryMailbox("results", EvalReply)
    request: EvalRequest = EvalRequest(sample=Sample("s", 1, 1))
    await results.send(answer(request))
    report = await collect_results(results, 1, timeout_seconds=10)
    assert (report.run_id, report.total) == (request.key.run_id, 1)


@pytest.mark.proves("R156")
async def test_submitting_needs_a_mailbox_and_an_experiment_that_is_one() -> None:
    requests = InMemoryMailbox("requests", EvalRequest)
    with pytest.raises(ConfigurationError, match=r"must be given a mailbox: submit_dataset\(dataset, requests\), or "):
        await submit_dataset(numbers(1), Experiment("a"))
    with pytest.raises(ConfigurationError, match=r"experiment must be an Experiment \(got 'a'\)"):
        await submit_dataset(numbers(1), "a", requests)  # type: ignore[arg-type]
    await submit_dataset(numbers(1), requests=requests)
    (message,) = await requests.receive(1, 30, 0)
    assert message.body.key.experiment == "baseline"
    with pytest.raises(ConfigurationError, match=r"must be given a sample: EvalRequest\(sample=sample\)"):
        EvalRequest()


@pytest.mark.proves("R156")
@pytest.mark.parametrize("where", ["redis", "memory"])
async def test_a_mailbox_is_read_as_one_type_and_a_second_one_is_refused(where: str, redis_url: str) -> None:
    box: Any = RedisMailbox("shared", client=redis_url) if where == "redis" else InMemoryMailbox("shared", EvalRequest)
    async with box:
        EvalLoop(requests=box, loop=lambda input: input, evaluator=exact_match)
        with pytest.raises(
            ConfigurationError, match=r"'shared' must carry MainLoopRequest \(got EvalRequest\)\nuse a separate mailbox"
        ):
            MainLoop(lambda input: input, requests=box)
        with pytest.raises(ConfigurationError, match="must carry EvalReply"):
            await collect_results(box, 1)
        EvalLoop(requests=box, loop=lambda input: input, evaluator=exact_match)
