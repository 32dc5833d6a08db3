"""The worker that executes and scores: what it delivers, when it ends, and what it survives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from fairtrial import (
    Experiment,
    MainLoop,
    Sample,
    ToolInvoked,
    TrialContext,
    TrialKey,
    evaluator,
    exact_match,
    open_store,
    task,
)
from fairtrial.errors import ConfigurationError, MailboxAccessError, MailboxClosedError, MailboxConnectionError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoopRequest
from fairtrial.fleet.worker import backoff
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, Message
from fairtrial.scoring.evaluator import resolve
from fairtrial.store.protocol import RunRecord
from fairtrial.trials.context import current_trial
from fairtrial.trials.run_trial import TrialRules
from fairtrial.trials.task import resolve_task
from tests.fleet.build import QUICK, boxes, request, take, until

pytestmark = pytest.mark.anyio


async def echo(input: Any) -> Any:
    return input


def rules(fn: Any = echo, *names: str, **settings: Any) -> TrialRules:
    experiments = tuple(Experiment(name, {"of": name}) for name in names or ("baseline",))
    made = TrialRules(
        tasks=tuple(resolve_task(fn) for _ in experiments), experiments=experiments, scorer=resolve(exact_match)
    )
    return replace(made, **settings)


class TestOneHop:
    @pytest.mark.proves("R49", "R54", "R61")
    async def test_a_suites_rules_are_executed_scored_delivered_and_acknowledged(self) -> None:
        requests, results = boxes()
        for number in range(25):
            await requests.send(request(number, expected="q" if number % 5 else "other"))
        loop = EvalLoop(requests=requests, rules=rules(), results=results, config=EvalLoopConfig(concurrency=4))
        await loop.run(until_empty=True)
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
            running = asyncio.create_task(main.run())
            await loop.run(until_empty=True)
            main.stop()
            await running
        assert steps == ["execute", "score", "deliver", "acknowledge"]
        assert [result.passed for result in await take(results)] == [True]

    @pytest.mark.proves("R49")
    async def test_any_callable_or_main_loop_will_do_and_reads_the_experiment(self) -> None:
        async def styled(input: str, ctx: TrialContext) -> str:
            return f"{input} {ctx.experiment.name} {ctx.experiment.params.get('style')}"

        for what in (styled, MainLoop(styled)):
            requests, results = boxes()
            await requests.send(request(0, expected="q terse short", experiment="terse", params={"style": "short"}))
            await requests.send(request(1, expected="q terse long", experiment="terse", params={"style": "long"}))
            loop = EvalLoop(requests=requests, evaluator=exact_match, loop=what, results=results)
            await loop.run(until_empty=True)
            assert [result.passed for result in await take(results)] == [True, True]

    @pytest.mark.proves("R54")
    async def test_results_go_to_whoever_asked_if_there_is_no_mailbox_for_them(self) -> None:
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
        requests, _ = boxes()
        for number in range(20):
            await requests.send(request(number))
        await requests.send(request(5))  # Twice: stored once.
        loop = EvalLoop(requests=requests, rules=rules(), results=store, config=EvalLoopConfig(concurrency=7))
        await loop.run(until_empty=True)
        assert [result.output for result in store.results("run")] == ["q"] * 20
        assert store.sample("run", 4).input == "q"
        assert await requests.approximate_count() == 0

    async def test_what_a_store_refuses_ends_as_a_dead_letter_and_hurts_nobody_else(self) -> None:
        store = open_store("memory:")
        store.create_run(RunRecord("run", "s", "d", "1", "f", 2, ("baseline",), 1))
        requests, _ = boxes()
        for number in (0, 7, 1):  # There is no place 7 in a plan of 2.
            await requests.send(request(number))
        loop = EvalLoop(requests=requests, rules=rules(), results=store)
        await loop.run(until_empty=True)
        assert len(list(store.results("run"))) == 2
        (letter,) = await requests.dead_letters.page()
        assert "refuses" in letter.reason

    async def test_typed_samples_are_read_with_the_suites_types(self) -> None:
        @dataclass(frozen=True)
        class Question:
            text: str

        async def read(input: Question) -> str:
            return input.text

        requests, results = boxes()
        await requests.send(request(0, Question("why"), "why"))
        await requests.send(request(1, "not a question", "why"))
        await EvalLoop(requests=requests, rules=rules(read), results=results, input_type=Question).run(until_empty=True)
        good, bad = await take(results)
        assert good.passed
        assert (bad.outcome, bad.stage) == ("task_error", "setup")

    async def test_an_experiment_the_suite_does_not_have_is_that_trials_error(self) -> None:
        requests, results = boxes()
        await requests.send(request(0, experiment="unheard-of"))
        await EvalLoop(requests=requests, rules=rules(echo, "a", "b"), results=results).run(until_empty=True)
        (result,) = await take(results)
        assert result.outcome == "task_error"
        assert "no experiment 'unheard-of'; it has a, b" in str(result.error)

    def test_it_runs_from_ordinary_code(self) -> None:
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
            with pytest.raises(ConfigurationError, match="EvalLoop needs"):
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
            with pytest.raises(ConfigurationError, match="running already"):
                await loop.run()
            loop.stop()
        assert not loop.ready


class TestEnding:
    @pytest.mark.proves("R51")
    async def test_max_iterations_counts_receives_and_finishes_what_they_brought(self) -> None:
        requests, results = boxes()
        for number in range(10):
            await requests.send(request(number))
        config = EvalLoopConfig(concurrency=3, wait_seconds=0)
        loop = EvalLoop(requests=requests, rules=rules(), results=results, config=config)
        await loop.run(max_iterations=2)
        assert len(await take(results)) == 6
        assert await requests.approximate_count() == 4
        await loop.run(max_iterations=2)
        assert len(await take(results)) == 4

    @pytest.mark.proves("R51")
    async def test_a_receive_waits_twenty_seconds_and_leases_for_sixty_unless_told_otherwise(self) -> None:
        asked: list[tuple[float, float]] = []

        class Asked(InMemoryMailbox[EvalRequest]):
            async def receive(
                self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
            ) -> Sequence[Message[EvalRequest]]:
                asked.append((visibility_timeout, wait_time_seconds))
                return await super().receive(max_messages, visibility_timeout, wait_time_seconds)

        for config in (EvalLoopConfig(), EvalLoopConfig(lease_seconds=7, wait_seconds=3)):
            requests, results = Asked("q", EvalRequest), InMemoryMailbox("r", EvalReply)
            await requests.send(request())
            loop = EvalLoop(requests=requests, rules=rules(), results=results, config=config)
            await loop.run(max_iterations=1)
        assert asked == [(60, 20), (7, 3)]

    async def test_a_receive_fills_all_free_slots_at_once(self) -> None:
        asked: list[int] = []

        class Counting(InMemoryMailbox[EvalRequest]):
            async def receive(
                self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
            ) -> Sequence[Message[EvalRequest]]:
                asked.append(max_messages)
                return await super().receive(max_messages, visibility_timeout, wait_time_seconds)

        requests, results = Counting("q", EvalRequest), InMemoryMailbox("r", EvalReply)
        for number in range(64):
            await requests.send(request(number))
        await EvalLoop(requests=requests, rules=rules(), results=results, config=EvalLoopConfig(concurrency=32)).run(
            until_empty=True
        )
        assert asked[0] == 32
        assert len(asked) <= 6

    @pytest.mark.proves("R83")
    async def test_stop_finishes_what_is_in_flight_and_leaves_the_rest(self) -> None:
        requests, results = boxes()
        for number in range(6):
            await requests.send(request(number))
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
        requests, results = boxes()
        for number in range(3):
            await requests.send(request(number))

        async def hang(input: str) -> str:
            await asyncio.sleep(3600)
            return input

        config = EvalLoopConfig(concurrency=3, drain_seconds=0.05)
        loop = EvalLoop(requests=requests, rules=rules(hang), results=results, config=config)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.counters.in_flight == 3)
        loop.stop()
        await running
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
        requests, results = boxes()
        await requests.send(request())

        async def hang(input: str) -> str:
            await asyncio.sleep(3600)
            return input

        loop = EvalLoop(requests=requests, rules=rules(hang), results=results)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.counters.in_flight == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await requests.depth()).waiting == 1

    async def test_the_beat_goes_on_while_there_is_nothing_to_do(self) -> None:
        requests, results = boxes()
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.beat > 0)
        first = loop.beat
        await until(lambda: loop.beat > first)
        loop.stop()
        await running


class Flaky(InMemoryMailbox[Any]):
    """Fails as often as it is told to, each time with the next of its errors."""

    def __init__(self, name: str, kind: Any, *errors: BaseException, on: str = "receive") -> None:
        super().__init__(name, kind)
        self.errors = list(errors)
        self.on = on

    def _fail(self, what: str) -> None:
        if self.on == what and self.errors:
            raise self.errors.pop(0)

    async def receive(
        self, max_messages: int = 1, visibility_timeout: float = 300, wait_time_seconds: float = 20
    ) -> Sequence[Message[Any]]:
        self._fail("receive")
        return await super().receive(max_messages, visibility_timeout, wait_time_seconds)

    async def send(self, body: Any, *, reply_to: Any = None) -> str:
        self._fail("send")
        return await super().send(body, reply_to=reply_to)


class TestWhatItSurvives:
    @pytest.mark.proves("R79")
    async def test_one_bad_receive_does_not_end_the_worker(self) -> None:
        """Engine trap 12."""
        errors = (MailboxConnectionError("partition"), RuntimeError("a bug"), OSError("no route"))
        requests = Flaky("q", EvalRequest, *errors)
        results = InMemoryMailbox("r", EvalReply)
        await requests.send(request())
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        await loop.run(until_empty=True)
        assert len(await take(results)) == 1
        assert loop.counters.receive_errors == 3

    async def test_a_mailbox_that_never_let_us_in_is_for_the_person_who_set_it_up(self) -> None:
        requests = Flaky("q", EvalRequest, MailboxAccessError("wrong password"))
        with pytest.raises(MailboxAccessError):
            await EvalLoop(requests=requests, rules=rules()).run()

    async def test_a_mailbox_that_its_owner_closes_ends_the_loop(self) -> None:
        requests, results = boxes()
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.running)
        await requests.close()
        with pytest.raises(MailboxClosedError):
            await running

    @pytest.mark.proves("R55")
    async def test_whatever_user_code_raises_is_that_trials_result(self) -> None:
        raised: list[BaseException] = [
            ValueError("v"),
            SystemExit(3),
            KeyboardInterrupt(),
            asyncio.CancelledError(),
            BaseExceptionGroup("group", [SystemExit()]),
            StopIteration(),
            GeneratorExit(),
        ]

        async def fail(input: int) -> Any:
            raise raised[input]

        requests, results = boxes()
        for number in range(len(raised)):
            await requests.send(request(number, number, number))
        await requests.send(request(99, 0, 0))
        policy = replace(QUICK, max_deliveries=2)
        loop = EvalLoop(
            requests=requests, rules=rules(fail), results=results, config=EvalLoopConfig(concurrency=3, dlq=policy)
        )
        await loop.run(until_empty=True)
        found = await take(results)
        assert len(found) == len(raised) + 1
        assert {result.outcome for result in found} <= {"task_error", "dead_letter"}
        assert await requests.approximate_count() == 0

    @pytest.mark.proves("R55")
    async def test_a_failed_evaluation_is_a_result_with_its_error_and_is_acknowledged(self) -> None:
        @evaluator
        def broken(output: str, expected: str) -> bool:
            raise RuntimeError("scorer down")

        requests, results = boxes()
        await requests.send(request())
        loop = EvalLoop(requests=requests, loop=echo, evaluator=broken, results=results)
        await loop.run(until_empty=True)
        (result,) = await take(results)
        assert (result.outcome, result.output) == ("scorer_error", "q")
        assert "scorer down" in str(result.error)

    @pytest.mark.proves("R55", "R62")
    async def test_a_result_that_cannot_be_delivered_is_retried_with_backoff(self) -> None:
        requests, _ = boxes()
        results = Flaky("r", EvalReply, MailboxConnectionError("away"), MailboxConnectionError("away"), on="send")
        await requests.send(request())
        loop = EvalLoop(requests=requests, rules=rules(), results=results)
        await loop.run(until_empty=True)
        assert len(await take(results)) == 1
        assert (loop.counters.delivery_retries, loop.counters.received) == (2, 1)

    @pytest.mark.proves("R62")
    async def test_pauses_between_deliveries_grow_up_to_a_limit(self) -> None:
        class Timed(Flaky):
            def _fail(self, what: str) -> None:
                if what == "send":
                    times.append(asyncio.get_running_loop().time())
                super()._fail(what)

        times: list[float] = []
        requests, _ = boxes()
        results = Timed("r", EvalReply, *(MailboxConnectionError("away") for _ in range(5)), on="send")
        await requests.send(request())
        await EvalLoop(requests=requests, rules=rules(), results=results).run(until_empty=True)
        assert len(await take(results)) == 1
        pauses = [later - earlier for earlier, later in pairwise(times)][1:]  # The first retry is the batch's.
        assert [pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.4), strict=True)] == [True] * 4
        longest = max(backoff(60) for _ in range(200))  # Half of each pause is drawn at random.
        assert max(backoff(50) for _ in range(200)) == pytest.approx(longest, rel=0.2)
        assert longest < 120

    @pytest.mark.proves("R55")
    async def test_a_result_is_kept_while_its_receiver_is_unavailable_however_long_that_is(self) -> None:
        requests, _ = boxes()
        away = [MailboxConnectionError("away") for _ in range(3)]
        results = Flaky("r", EvalReply, *away, on="send")
        await requests.send(request())
        config = EvalLoopConfig(delivery_seconds=0, dlq=QUICK)
        loop = EvalLoop(requests=requests, rules=rules(), results=results, config=config)
        await loop.run(until_empty=True)
        assert len(await take(results)) == 1
        assert (loop.counters.retried, loop.counters.received) == (0, 1)

    @pytest.mark.proves("R55", "R80", "R82")
    async def test_a_reply_mailbox_that_is_gone_for_good_makes_a_dead_letter(self) -> None:
        requests, results = boxes()
        await requests.send(request(), reply_to=results)
        await results.close()
        config = EvalLoopConfig(delivery_seconds=0)
        loop = EvalLoop(requests=requests, rules=rules(), config=config)
        await loop.run(until_empty=True)
        (letter,) = await requests.dead_letters.page()
        assert "could not be delivered" in letter.reason

    async def test_a_request_without_any_address_is_not_paid_for(self) -> None:
        """Engine trap 12: results without an address would be lost."""
        executed: list[Any] = []

        @task(inline=True)
        def expensive(input: Any) -> Any:
            executed.append(input)
            return input

        requests, _ = boxes()
        await requests.send(request())
        await EvalLoop(requests=requests, rules=rules(expensive)).run(until_empty=True)
        (letter,) = await requests.dead_letters.page()
        assert "names no mailbox" in letter.reason
        assert executed == []

    async def test_a_result_too_large_to_travel_is_delivered_without_its_payload(self) -> None:
        requests = InMemoryMailbox("q", EvalRequest)
        results = InMemoryMailbox("r", EvalReply, max_body_bytes=2000)

        async def grow(input: str) -> str:
            return input * 10_000

        await requests.send(request())
        await EvalLoop(requests=requests, rules=rules(grow), results=results).run(until_empty=True)
        (result,) = await take(results)
        assert (result.outcome, result.output, result.snapshot) == ("scored", None, None)
        assert result.metadata["dropped"] == ["output"]  # It recorded nothing, so it had no transcript.

    async def test_a_transcript_too_large_to_travel_costs_only_itself(self) -> None:
        requests = InMemoryMailbox("q", EvalRequest)
        results = InMemoryMailbox("r", EvalReply, max_body_bytes=2000)

        async def talk(input: str) -> str:
            current_trial().session.record(ToolInvoked("read", {}, "word " * 10_000))
            return input

        await requests.send(request(0, "a", "a"))
        await EvalLoop(requests=requests, rules=rules(talk), results=results).run(until_empty=True)
        (result,) = await take(results)
        assert (result.outcome, result.output, result.snapshot) == ("scored", "a", None)
        assert result.metadata["dropped"] == ["transcript"]

    async def test_requests_whose_client_is_gone_do_not_hold_up_the_others(self) -> None:
        requests, replies = boxes()
        for number in range(20):
            await requests.send(request(number), reply_to="client-that-is-gone")
        await requests.send(request(20), reply_to=replies)
        config = EvalLoopConfig(concurrency=2)
        begin = time.monotonic()
        await EvalLoop(requests=requests, rules=rules(), config=config).run(until_empty=True)
        assert time.monotonic() - begin < 30  # One wait of five seconds, not ten times five minutes.
        assert len(await take(replies)) == 1
        assert await requests.dead_letters.count() == 20

    @pytest.mark.proves("R82")
    async def test_an_undecodable_body_is_set_aside_and_the_others_are_executed(self) -> None:
        requests, results = boxes()
        await requests.send(request(0))
        await requests.send({"not": "a request"})  # type: ignore[arg-type]
        await requests.send(request(1))
        await EvalLoop(requests=requests, rules=rules(), results=results).run(until_empty=True)
        assert len(await take(results)) == 2
        assert await requests.dead_letters.count() == 1

    async def test_a_lost_lease_cancels_its_job_and_only_its_own(self) -> None:
        """Engine trap 8."""
        requests, results = boxes()
        await requests.send(request(0, "slow"))
        await requests.send(request(1, "quick", "quick"))
        cancelled = asyncio.Event()
        started = asyncio.Event()

        async def work(input: str) -> str:
            if input == "slow":
                started.set()
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
            return input

        config = EvalLoopConfig(lease_seconds=0.3, drain_seconds=0)
        loop = EvalLoop(requests=requests, rules=rules(work), results=results, config=config)
        running = asyncio.create_task(loop.run())
        await started.wait()
        await until(lambda: loop.counters.finished == 1)
        await requests.purge()  # Now the message is not ours any more.
        with anyio.fail_after(10):
            await cancelled.wait()
        await until(lambda: loop.counters.lease_losses == 1)
        assert not running.done()
        loop.stop()
        await running
        assert [result.output for result in await take(results)] == ["quick"]

    async def test_leases_are_kept_while_user_code_blocks_the_event_loop(self) -> None:
        """Engine trap 8: two leases long, and nobody else gets the message."""
        requests, results = boxes()
        await requests.send(request())

        @task(inline=True)
        def block(input: str) -> str:
            threading.Event().wait(1.0)
            return input

        config = EvalLoopConfig(lease_seconds=0.4)
        loop = EvalLoop(requests=requests, rules=rules(block), results=results, config=config)
        await loop.run(until_empty=True)
        assert (loop.counters.received, loop.counters.lease_losses) == (1, 0)
        assert len(await take(results)) == 1


class TestDrift:
    async def test_requests_made_from_other_code_are_given_back_and_never_condemned(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests, results = boxes()
        await requests.send(request(0, fingerprint="theirs"))
        await requests.send(request(1, fingerprint="ours"))
        await requests.send(request(2))
        config = EvalLoopConfig(fingerprint="ours", refuse_seconds=0.01, dlq=DLQPolicy(max_deliveries=1))
        loop = EvalLoop(requests=requests, rules=rules(), results=results, config=config)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.counters.refused >= 3 and loop.counters.finished == 2)
        loop.stop()
        await running
        assert [result.ordinal for result in await take(results)] == [1, 2]
        assert await requests.dead_letters.count() == 0
        assert sum("other code" in record.message for record in caplog.records) == 1
        assert "or with --allow-drift (EvalLoopConfig.allow_drift)" in caplog.text
        right = EvalLoop(
            requests=requests, rules=rules(), results=results, config=replace(config, fingerprint="theirs")
        )
        await right.run(until_empty=True)
        assert [result.ordinal for result in await take(results)] == [0]

    async def test_drift_may_be_allowed(self) -> None:
        requests, results = boxes()
        await requests.send(request(0, fingerprint="theirs"))
        config = EvalLoopConfig(fingerprint="ours", allow_drift=True)
        await EvalLoop(requests=requests, rules=rules(), results=results, config=config).run(until_empty=True)
        assert len(await take(results)) == 1


def test_the_key_of_a_trial_is_all_a_request_needs() -> None:
    made = EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", "in"))
    assert made.experiment == Experiment()
