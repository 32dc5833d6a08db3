"""An evaluation loop survives lost servers, bad messages and drift of code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from fairtrial import ToolInvoked, evaluator, task
from fairtrial.errors import MailboxAccessError, MailboxClosedError, MailboxConnectionError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest
from fairtrial.fleet.worker.jobs import backoff
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, Message
from fairtrial.trials.context import current_trial
from tests.fleet.build import QUICK, boxes, request, take, until
from tests.fleet.eval_loops import echo, rules


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

    async def test_a_request_without_any_reply_address_is_not_executed(self) -> None:
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

    async def test_a_result_that_is_too_large_to_send_is_delivered_without_its_payload(self) -> None:
        requests = InMemoryMailbox("q", EvalRequest)
        results = InMemoryMailbox("r", EvalReply, max_body_bytes=2000)

        async def grow(input: str) -> str:
            return input * 10_000

        await requests.send(request())
        await EvalLoop(requests=requests, rules=rules(grow), results=results).run(until_empty=True)
        (result,) = await take(results)
        assert (result.outcome, result.output, result.snapshot) == ("scored", None, None)
        assert result.metadata["dropped"] == ["output"]  # It recorded nothing, so it had no transcript.

    async def test_only_the_transcript_is_dropped_if_it_is_too_large_to_send(self) -> None:
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

    @pytest.mark.long
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
            threading.Event().wait(4.0)
            return input

        config = EvalLoopConfig(lease_seconds=2)
        loop = EvalLoop(requests=requests, rules=rules(block), results=results, config=config)
        await loop.run(until_empty=True)
        assert (loop.counters.received, loop.counters.lease_losses) == (1, 0)
        assert len(await take(results)) == 1


class TestDrift:
    async def test_requests_made_from_other_code_are_given_back_and_never_dead_lettered(
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
