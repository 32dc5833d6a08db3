"""EvalLoop: what it delivers, when it ends, and which failures it survives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio
import pytest

from fairtrial import Experiment, Sample, TrialContext, TrialKey, evaluator, exact_match, open_store
from fairtrial.errors import ConfigurationError, MailboxConnectionError, StoreError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoop, MainLoopRequest
from fairtrial.fleet.worker import eval_loop
from fairtrial.fleet.worker.outbox import ToMailbox, ToStore
from fairtrial.mailbox import InMemoryMailbox, Message, RedisMailbox
from fairtrial.store.protocol import RunRecord
from tests.fleet.build import Flaky, boxes, echo, emptied, request, rules, sent, serving, take, until
from tests.fleet.fake_worker import answer


async def hang(input: str) -> str:
    await asyncio.sleep(3600)
    return input


class TestOneHop:
    @pytest.mark.proves("R49", "R54", "R61")
    async def test_a_suites_rules_are_executed_scored_delivered_and_acknowledged(self) -> None:
        requests, results = boxes()
        for number in range(25):
            await requests.send(request(number, expected="q" if number % 5 else "other"))
        loop = await emptied(requests, results, config=EvalLoopConfig(concurrency=4))
        found = await take(results)
        assert [result.passed for result in found] == [number % 5 > 0 for number in range(25)]
        assert await requests.approximate_count() == 0
        assert (loop.counters.received, loop.counters.finished, loop.counters.in_flight) == (25, 25, 0)
        assert loop.counters.outcomes == {"scored": 25}

    @pytest.mark.proves("R52", "R61")
    @pytest.mark.parametrize("hops", [1, 2])
    async def test_a_request_is_acknowledged_only_after_its_result_is_delivered(self, hops: int) -> None:
        steps: list[str] = []

        class Requests(InMemoryMailbox[EvalRequest]):
            def _settle(self, *args: Any) -> None:
                steps.append("acknowledge")
                super()._settle(*args)

        class Results(InMemoryMailbox[EvalReply]):
            async def send(self, body: EvalReply, *, reply_to: Any = None) -> str:
                steps.append("deliver")
                return await super().send(body, reply_to=reply_to)

        async def work(input: str) -> str:
            steps.append("execute")
            return input

        @evaluator(inline=True)
        def score(output: str, expected: str) -> bool:
            steps.append("score")
            return output == expected

        requests, results = Requests("requests", EvalRequest), Results("results", EvalReply)
        await requests.send(request())
        if hops == 1:
            await EvalLoop(requests=requests, loop=work, evaluator=score, results=results).run(until_empty=True)
        else:
            inputs = InMemoryMailbox("inputs", MainLoopRequest)
            main = MainLoop(work, requests=inputs)
            loop = EvalLoop(requests=requests, mainloop_requests=inputs, evaluator=score, results=results)
            async with serving(main):
                await loop.run(until_empty=True)
        assert steps == ["execute", "score", "deliver", "acknowledge"]
        assert [result.passed for result in await take(results)] == [True]

    @pytest.mark.proves("R49")
    async def test_any_callable_or_main_loop_will_do_and_reads_the_experiment(self) -> None:
        async def styled(input: str, ctx: TrialContext) -> str:
            return f"{input} {ctx.experiment.name} {ctx.experiment.params.get('style')}"

        for what in (styled, MainLoop(styled)):
            styles = enumerate(("short", "long"))
            requests, results = await sent(
                *(
                    request(n, "q", f"q terse {style}", experiment="terse", params={"style": style})
                    for n, style in styles
                )
            )
            await emptied(requests, results, evaluator=exact_match, loop=what)
            assert [result.passed for result in await take(results)] == [True, True]

    @pytest.mark.proves("R54")
    async def test_without_a_results_mailbox_results_are_sent_to_the_reply_address(self) -> None:
        requests, results = boxes()
        await requests.send(request(3, echo=True), reply_to=results)
        await EvalLoop(requests=requests, rules=rules(), name="me").run(max_iterations=1)
        (message,) = await results.receive(wait_time_seconds=0)
        assert message.body == EvalReply(
            message.body.result, 3, Sample("s3", "q", "q"), message.body.request_id, worker="me"
        )
        assert message.body.result.output == "q"

    @pytest.mark.proves("R54", "R61")
    async def test_results_go_straight_into_a_store(self) -> None:
        store = open_store("memory:")
        store.create_run(RunRecord("run", "s", "d", "1", "f", 20, ("baseline",), 1))
        requests, _ = await sent(*map(request, range(20)))
        await requests.send(request(5))  # Twice: stored once.
        await emptied(requests, store, config=EvalLoopConfig(concurrency=7))
        assert [result.output for result in store.results("run")] == ["q"] * 20
        assert store.sample("run", 4).input == "q"
        assert await requests.approximate_count() == 0

    async def test_a_result_that_the_store_refuses_is_dead_lettered_and_others_are_stored(self) -> None:
        store = open_store("memory:")
        store.create_run(RunRecord("run", "s", "d", "1", "f", 2, ("baseline",), 1))
        requests, _ = await sent(*map(request, (0, 7, 1)))  # There is no place 7 in a plan of 2.
        await emptied(requests, store)
        assert len(list(store.results("run"))) == 2
        (letter,) = await requests.dead_letters.page()
        assert "refuses" in letter.reason

    @pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError("the disk is full")])
    async def test_results_that_a_store_could_not_commit_are_not_taken_for_delivered(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        store = open_store("memory:")
        for run_id in ("run", "other"):
            store.create_run(RunRecord(run_id, "s", "d", "1", "f", 2, ("baseline",), 1))
        commit = store.commit

        def fails_for_one(run_id: str, *given: Any) -> Any:
            if run_id == "run":
                raise error
            return commit(run_id, *given)

        monkeypatch.setattr(store, "commit", fails_for_one)
        requests, _ = boxes()
        batch = []
        for number, run_id in enumerate(("run", "other")):
            await requests.send(request(number, run_id=run_id, echo=True))
            (message,) = await requests.receive(wait_time_seconds=0)
            batch.append((message, answer(message.body)))
        delivery = ToStore(store)
        delivered = await asyncio.gather(*(delivery.deliver(*one) for one in batch), return_exceptions=True)
        assert [type(one) for one in delivered] == [StoreError, type(None)]
        assert "the disk is full" in str(delivered[0])
        assert [len(list(store.results(run_id))) for run_id in ("run", "other")] == [0, 1]

    async def test_in_a_batch_only_requests_that_delivery_did_not_settle_are_acknowledged(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        acknowledged: list[str] = []

        class Requests(InMemoryMailbox[EvalRequest]):
            def _settle(self, *args: Any) -> None:
                acknowledged.append("one")
                super()._settle(*args)

        class Half(ToMailbox):
            async def deliver_all(self, batch: Sequence[tuple[Message[EvalRequest], EvalReply]]) -> None:
                await super().deliver_all(batch)
                for message, reply in batch:
                    if reply.result.ordinal % 2:
                        await message.acknowledge()

        requests, results = Requests("requests", EvalRequest), InMemoryMailbox("results", EvalReply)
        for number in range(10):
            await requests.send(request(number))
        monkeypatch.setattr(eval_loop, "delivery_to", lambda *given: Half(results))
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        with anyio.fail_after(20):
            await loop.run(until_empty=True)
        assert len(await take(results)) == len(acknowledged) == 10
        assert (loop.counters.finished, loop.counters.outcomes, loop.counters.in_flight) == (10, {"scored": 10}, 0)
        assert await requests.approximate_count() == 0

    async def test_typed_samples_are_read_with_the_suites_types(self) -> None:
        @dataclass(frozen=True)
        class Question:
            text: str

        async def read(input: Question) -> str:
            return input.text

        requests, results = await sent(request(0, Question("why"), "why"), request(1, "not a question", "why"))
        await EvalLoop(requests=requests, rules=rules(read), results=results, input_type=Question).run(until_empty=True)
        good, bad = await take(results)
        assert good.passed
        assert (bad.outcome, bad.stage) == ("task_error", "setup")

    async def test_an_experiment_the_suite_does_not_have_is_that_trials_error(self) -> None:
        requests, results = await sent(request(0, experiment="unheard-of"))
        await EvalLoop(requests=requests, rules=rules(echo, "a", "b"), results=results).run(until_empty=True)
        (result,) = await take(results)
        assert result.outcome == "task_error"
        assert "no experiment 'unheard-of' (it has a, b)" in str(result.error)

    def test_it_runs_without_an_event_loop(self) -> None:
        requests, results = InMemoryMailbox[EvalRequest]("q"), InMemoryMailbox[EvalReply]("r")
        loop = EvalLoop(requests=requests, rules=rules(), results=results)

        async def fill() -> None:
            await requests.send(request())

        anyio.run(fill)
        loop.run_sync(until_empty=True)
        assert loop.counters.outcomes == {"scored": 1}


class TestConfiguration:
    def test_exactly_one_way_to_execute_and_one_evaluator(self) -> None:
        requests, _ = boxes()
        wrong: list[dict[str, Any]] = [
            {},
            {"rules": rules(), "loop": echo, "evaluator": exact_match},
            {"rules": rules(), "evaluator": exact_match},
            {"loop": echo},
        ]
        for arguments in wrong:
            with pytest.raises(ConfigurationError, match="EvalLoop requires"):
                EvalLoop(requests=requests, **arguments)

    @pytest.mark.proves("R76")
    def test_a_message_may_be_held_for_as_long_as_its_trial_can_take(self) -> None:
        requests, _ = boxes()
        trial = rules(timeout_seconds=100.0, close_seconds=10.0)
        for visibility, fine in ((249.0, False), (250.0, True), (None, True)):
            config = EvalLoopConfig(visibility_seconds=visibility, buffer_seconds=30.0)
            if fine:
                EvalLoop(requests=requests, rules=trial, config=config)
                continue
            with pytest.raises(ConfigurationError, match=r"at least 250"):
                EvalLoop(requests=requests, rules=trial, config=config)

    @pytest.mark.parametrize(
        "settings",
        [
            {"concurrency": 0},
            {"lease_seconds": 0},
            {"wait_seconds": -1},
            {"mainloop_timeout": float("nan")},
            {"isolated_processes": 0},
            {"max_retries": -1},
            {"drain_seconds": "1"},
        ],
        ids=str,
    )
    def test_settings_that_cannot_work_are_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            EvalLoopConfig(**settings)

    async def test_a_loop_runs_once_at_a_time(self) -> None:
        requests, results = boxes()
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        async with anyio.create_task_group() as group:
            group.start_soon(loop.run)
            await until(lambda: loop.ready)
            with pytest.raises(ConfigurationError, match="already running"):
                await loop.run()
            loop.stop()
        assert not loop.ready


class TestEnding:
    @pytest.mark.proves("R51")
    @pytest.mark.parametrize("where", ["memory", "redis"])
    async def test_one_iteration_takes_everything_that_is_waiting(self, where: str, redis_url: str) -> None:
        async with (
            RedisMailbox("requests", EvalRequest, redis_url) as queue,
            RedisMailbox("results", EvalReply, redis_url) as replies,
        ):
            requests, results = boxes() if where == "memory" else (queue, replies)
            for number in range(25):
                await requests.send(request(number))
            loop = EvalLoop(requests=requests, rules=rules(), results=results)
            assert loop.config.concurrency == 10
            await loop.run(max_iterations=1)
            assert len(await take(results)) == 25
            assert await requests.approximate_count() == 0

    @pytest.mark.proves("R51")
    async def test_an_iteration_leaves_what_is_sent_later_to_the_next(self) -> None:
        requests, results = await sent(*map(request, range(10)))
        numbers = count(10)

        async def send_another(input: str) -> str:
            await requests.send(request(next(numbers)))
            return input

        config = EvalLoopConfig(concurrency=3, wait_seconds=0)
        loop = EvalLoop(requests=requests, rules=rules(send_another), results=results, config=config)
        await loop.run(max_iterations=1)
        done = len(await take(results))
        assert 10 <= done <= 13  # What the first three sent before the backlog was counted may be part of it.
        assert await requests.approximate_count() == next(numbers) - done == 10
        await loop.run(max_iterations=2)
        assert await requests.approximate_count() > 0

    async def test_a_mailbox_that_does_not_say_how_much_is_waiting_is_emptied_by_an_iteration(self) -> None:
        away = [MailboxConnectionError("away") for _ in range(100)]
        requests, results = Flaky(EvalRequest, *away, on="approximate_count"), InMemoryMailbox("r", EvalReply)
        for number in range(25):
            await requests.send(request(number))
        await EvalLoop(requests=requests, rules=rules(), results=results).run(max_iterations=1)
        assert len(await take(results)) == 25

    @pytest.mark.proves("R51")
    async def test_a_receive_waits_twenty_seconds_and_leases_for_sixty_unless_told_otherwise(self) -> None:
        for config, asked in ((EvalLoopConfig(), (60, 20)), (EvalLoopConfig(lease_seconds=7, wait_seconds=3), (7, 3))):
            requests, results = Flaky(EvalRequest), InMemoryMailbox("r", EvalReply)
            await requests.send(request())
            loop = EvalLoop(requests=requests, rules=rules(), results=results, config=config)
            await loop.run(max_iterations=1)
            assert [args[1:] for args in requests.calls] == [asked]

    async def test_a_receive_fills_all_free_slots_at_once(self) -> None:
        requests, results = Flaky(EvalRequest), InMemoryMailbox("r", EvalReply)
        for number in range(64):
            await requests.send(request(number))
        await emptied(requests, results, config=EvalLoopConfig(concurrency=32))
        assert requests.calls[0][0] == 32
        assert len(requests.calls) <= 6

    @pytest.mark.proves("R83")
    async def test_stop_finishes_what_is_in_flight_and_leaves_the_rest(self) -> None:
        requests, results = await sent(*map(request, range(6)))
        gate = asyncio.Event()

        async def wait(input: str) -> str:
            await gate.wait()
            return input

        loop = EvalLoop(requests=requests, rules=rules(wait), results=results, config=EvalLoopConfig(concurrency=2))
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.counters.in_flight == 2)
        threading.Thread(target=loop.stop).start()  # From anywhere, such as a signal handler.
        await asyncio.sleep(0)
        gate.set()
        await running
        assert len(await take(results)) == 2
        assert (await requests.depth()).waiting == 4

    @pytest.mark.proves("R83")
    async def test_what_does_not_end_in_time_is_handed_back_as_if_never_delivered(self) -> None:
        requests, results = await sent(*map(request, range(3)))

        config = EvalLoopConfig(concurrency=3, drain_seconds=0.05)
        loop = EvalLoop(requests=requests, rules=rules(hang), results=results, config=config)
        async with serving(loop):
            await until(lambda: loop.counters.in_flight == 3)
        assert loop.counters.handed_back == 3
        again = await requests.receive(3, wait_time_seconds=0)
        assert [message.delivery_count for message in again] == [1, 1, 1]

    async def test_stop_ends_an_idle_wait_at_once(self) -> None:
        requests, results = boxes()
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(0)
        loop.stop()
        with anyio.fail_after(5):
            await running

    async def test_cancelling_the_loop_hands_everything_back(self) -> None:
        requests, results = await sent(request())

        loop = EvalLoop(requests=requests, rules=rules(hang), results=results)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.counters.in_flight == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await requests.depth()).waiting == 1

    async def test_heartbeats_continue_while_there_is_nothing_to_do(self) -> None:
        requests, results = boxes()
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        async with serving(loop):
            await until(lambda: loop.beat > 0)
            first = loop.beat
            await until(lambda: loop.beat > first)


def test_the_key_of_a_trial_is_all_a_request_needs() -> None:
    made = EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", "in"))
    assert made.experiment == Experiment()
