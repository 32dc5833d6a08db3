"""An evaluation loop survives lost servers, bad messages and drift of code."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from fairtrial import ToolInvoked, current_trial, evaluator, task
from fairtrial.errors import MailboxAccessError, MailboxClosedError, MailboxConnectionError
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest
from fairtrial.fleet.worker.jobs import backoff
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox
from tests.fleet.build import QUICK, Flaky, boxes, echo, emptied, request, rules, sent, serving, take, until


class TestWhatItSurvives:
    @pytest.mark.proves("R79")
    async def test_one_bad_receive_does_not_end_the_worker(self) -> None:
        """Engine trap 12."""
        requests = Flaky(EvalRequest, MailboxConnectionError("partition"), RuntimeError("a bug"), OSError("no route"))
        results = InMemoryMailbox("r", EvalReply)
        await requests.send(request())
        loop = await emptied(requests, results)
        assert len(await take(results)) == 1
        assert loop.counters.receive_errors == 3

    async def test_a_mailbox_that_never_let_us_in_is_for_the_person_who_set_it_up(self) -> None:
        requests = Flaky(EvalRequest, MailboxAccessError("wrong password"))
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

        requests, results = await sent(*(request(n, n, n) for n in range(len(raised))), request(99, 0, 0))
        policy = replace(QUICK, max_deliveries=2)
        await emptied(requests, results, rules=rules(fail), config=EvalLoopConfig(concurrency=3, dlq=policy))
        found = await take(results)
        assert len(found) == len(raised) + 1
        assert {result.outcome for result in found} <= {"task_error", "dead_letter"}
        assert await requests.approximate_count() == 0

    @pytest.mark.proves("R55")
    async def test_a_failed_evaluation_is_a_result_with_its_error_and_is_acknowledged(self) -> None:
        @evaluator
        def broken(output: str, expected: str) -> bool:
            raise RuntimeError("scorer down")

        requests, results = await sent(request())
        await emptied(requests, results, loop=echo, evaluator=broken)
        (result,) = await take(results)
        assert (result.outcome, result.output) == ("scorer_error", "q")
        assert "scorer down" in str(result.error)

    @pytest.mark.proves("R55", "R62")
    async def test_a_result_that_cannot_be_delivered_is_retried_with_backoff(self) -> None:
        requests, _ = await sent(request())
        results = Flaky(EvalReply, MailboxConnectionError("away"), MailboxConnectionError("away"), on="send")
        loop = await emptied(requests, results)
        assert len(await take(results)) == 1
        assert (loop.counters.delivery_retries, loop.counters.received) == (2, 1)

    @pytest.mark.proves("R62")
    async def test_pauses_between_deliveries_grow_up_to_a_limit(self) -> None:
        requests, _ = await sent(request())
        results = Flaky(EvalReply, *(MailboxConnectionError("away") for _ in range(5)), on="send")
        await emptied(requests, results)
        assert len(await take(results)) == 1
        pauses = [later - earlier for earlier, later in pairwise(results.times)][1:]  # The first retry is the batch's.
        assert [pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.4), strict=True)] == [True] * 4
        longest = max(backoff(60) for _ in range(200))  # Half of each pause is drawn at random.
        assert max(backoff(50) for _ in range(200)) == pytest.approx(longest, rel=0.2)
        assert longest < 120

    @pytest.mark.proves("R55")
    async def test_a_result_is_kept_while_its_receiver_is_unavailable_however_long_that_is(self) -> None:
        requests, _ = await sent(request())
        results = Flaky(EvalReply, *(MailboxConnectionError("away") for _ in range(3)), on="send")
        config = EvalLoopConfig(delivery_seconds=0, dlq=QUICK)
        loop = await emptied(requests, results, config=config)
        assert len(await take(results)) == 1
        assert (loop.counters.retried, loop.counters.received) == (0, 1)

    @pytest.mark.proves("R55", "R80", "R82")
    async def test_a_reply_mailbox_that_is_gone_for_good_makes_a_dead_letter(self) -> None:
        requests, results = boxes()
        await requests.send(request(), reply_to=results)
        await results.close()
        config = EvalLoopConfig(delivery_seconds=0)
        await emptied(requests, config=config)
        (letter,) = await requests.dead_letters.page()
        assert "could not be delivered" in letter.reason

    async def test_a_request_without_any_reply_address_is_not_executed(self) -> None:
        """Engine trap 12: results without an address would be lost."""
        executed: list[Any] = []

        @task(inline=True)
        def expensive(input: Any) -> Any:
            executed.append(input)
            return input

        requests, _ = await sent(request())
        await EvalLoop(requests=requests, rules=rules(expensive)).run(until_empty=True)
        (letter,) = await requests.dead_letters.page()
        assert "names no mailbox" in letter.reason
        assert executed == []

    @pytest.mark.parametrize(
        ("times", "words", "output", "dropped"),
        [(10_000, 0, None, "output"), (1, 10_000, "q", "transcript")],
        ids=["output", "transcript"],
    )
    async def test_of_a_result_that_is_too_large_to_send_only_what_is_too_large_is_dropped(
        self, times: int, words: int, output: str | None, dropped: str
    ) -> None:
        async def work(input: str) -> str:
            if words:
                current_trial().session.record(ToolInvoked("read", {}, "word " * words))
            return input * times

        (requests, _), results = await sent(request()), InMemoryMailbox("r", EvalReply, max_body_bytes=2000)
        await emptied(requests, results, rules=rules(work))
        (result,) = await take(results)
        assert (result.outcome, result.output, result.snapshot) == ("scored", output, None)
        assert result.metadata["dropped"] == [dropped]

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
        requests, results = await sent(request(0))
        await requests.send({"not": "a request"})  # type: ignore[arg-type]
        await requests.send(request(1))
        await EvalLoop(requests=requests, rules=rules(), results=results).run(until_empty=True)
        assert len(await take(results)) == 2
        assert await requests.dead_letters.count() == 1

    async def test_a_lost_lease_cancels_its_job_and_only_its_own(self) -> None:
        """Engine trap 8."""
        requests, results = await sent(request(0, "slow"), request(1, "quick", "quick"))
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
        requests, results = await sent(request())

        @task(inline=True)
        def block(input: str) -> str:
            threading.Event().wait(4.0)
            return input

        config = EvalLoopConfig(lease_seconds=2)
        loop = await emptied(requests, results, rules=rules(block), config=config)
        assert (loop.counters.received, loop.counters.lease_losses) == (1, 0)
        assert len(await take(results)) == 1


class TestDrift:
    async def test_requests_made_from_other_code_are_given_back_and_never_dead_lettered(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests, results = await sent(request(0, fingerprint="theirs"), request(1, fingerprint="ours"), request(2))
        config = EvalLoopConfig(fingerprint="ours", refuse_seconds=0.01, dlq=DLQPolicy(max_deliveries=1))
        loop = EvalLoop(requests=requests, rules=rules(), results=results, config=config)
        async with serving(loop):
            await until(lambda: loop.counters.refused >= 3 and loop.counters.finished == 2)
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
        requests, results = await sent(request(0, fingerprint="theirs"))
        config = EvalLoopConfig(fingerprint="ours", allow_drift=True)
        await EvalLoop(requests=requests, rules=rules(), results=results, config=config).run(until_empty=True)
        assert len(await take(results)) == 1
