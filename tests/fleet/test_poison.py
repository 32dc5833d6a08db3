"""Trials that kill their workers, and other trials on the same workers. Engine trap 7."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import ToolInvoked, TrialContext, evaluator, exact_match
from fairtrial.base.codec import dumps
from fairtrial.base.isolation import IsolatedRunner
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalReply, EvalRequest, MainLoop, MainLoopConfig, MainLoopRequest
from fairtrial.fleet.worker.execution import SuspectPool, emit_answers
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, Mailbox, RedisConnection, RedisMailbox
from tests.fleet.build import answers, boxes, emptied, request, rules, sent, serving, take

TRIALS = 150
POISON = 5


def started(url: str, way: str, concurrency: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    command = [sys.executable, str(Path(__file__).with_name("worker_process.py")), url, way, str(concurrency)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


def keep_running(url: str, way: str, concurrency: int, seconds: float) -> Counter[int]:
    """Replace workers that die, until two have found the mailbox empty; returns how they ended."""
    ended: Counter[int] = Counter()
    workers = [started(url, way, concurrency) for _ in range(2)]
    end = time.monotonic() + seconds
    try:
        while workers:
            assert time.monotonic() < end, f"not done after {seconds} s: {ended}"
            for worker in list(workers):
                if (code := worker.poll()) is None:
                    continue
                workers.remove(worker)
                ended[code] += 1
                if code == 7:
                    workers.append(started(url, way, concurrency))
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return ended


@pytest.mark.proves("R59", "R82")
@pytest.mark.parametrize(("way", "concurrency"), [("sent", 50), ("loaded", 8)])
async def test_only_trials_that_crash_their_process_are_dead_lettered(
    redis_url: str, way: str, concurrency: int
) -> None:
    async with (
        RedisConnection(redis_url) as connection,
        RedisMailbox("poison.requests", EvalRequest, connection, sweep_seconds=None) as requests,
        RedisMailbox("poison.results", EvalReply, connection, sweep_seconds=None) as results,
        RedisMailbox("poison.requests", object, connection, sweep_seconds=None) as anything,
    ):
        for number in range(TRIALS):
            await requests.send(request(number, "die" if number == POISON else "q"))
        await anything.send({"v": 1, "key": "nonsense"})
        ended = await anyio.to_thread.run_sync(keep_running, redis_url, way, concurrency, 120)
        found = await take(results, TRIALS)
        by_ordinal: dict[int, set[str]] = {}
        for result in found:
            by_ordinal.setdefault(result.ordinal, set()).add(result.outcome)
        assert by_ordinal == {n: {"dead_letter" if n == POISON else "scored"} for n in range(TRIALS)}
        letters = await requests.dead_letters.page()
        assert sorted(letter.error for letter in letters) == ["BodyError", "ChildDiedError"]
        guilty = next(letter for letter in letters if letter.error == "ChildDiedError")
        assert guilty.body(EvalRequest).ordinal == POISON
        assert "exit code 7" in guilty.reason
        assert ended == {7: 1, 0: 2}  # Suspected at its second delivery, it ends no second worker.


async def test_a_worker_sends_no_secret_that_only_it_knows(redis_url: str) -> None:
    async with (
        RedisConnection(redis_url) as connection,
        RedisMailbox("poison.requests", EvalRequest, connection, sweep_seconds=None) as requests,
        RedisMailbox("poison.results", object, connection, sweep_seconds=None) as results,
    ):
        for number, input in enumerate(("tell", "tell by an error")):
            await requests.send(request(number, input))
        await anyio.to_thread.run_sync(keep_running, redis_url, "sent", 2, 60)
        bodies = [dumps(message.body).encode() for message in await results.receive(10, wait_time_seconds=0)]
    assert len(bodies) == 2
    assert not [body for body in bodies if b"known-to-a-worker" in body]
    told, failed = sorted((EvalReply.from_wire(body).result for body in bodies), key=lambda result: result.ordinal)
    assert told.score is not None
    assert (told.output, told.score.reason) == ("the password is [redacted]",) * 2
    assert told.redacted_parts == ("output", "transcript", "reason")
    assert "ValueError: the password [redacted] is wrong" in (failed.error or "")
    assert failed.redacted_parts == ("transcript", "error")


class Suspected(InMemoryMailbox[Any]):
    """Every message in it has outlived two workers, unless told otherwise."""

    expiries = 2

    def _take(self, count: int, seconds: float) -> Any:
        messages = super()._take(count, seconds)
        for message in messages:
            message.expiries = self.expiries
        return messages


async def alone(fn: Any, *numbers: int, scorer: Any = exact_match, **settings: Any) -> tuple[EvalLoop, Any, Any]:
    requests, (_, results) = Suspected("requests", EvalRequest), boxes()
    for number in numbers or (0,):
        await requests.send(request(number))
    config = EvalLoopConfig(dlq=DLQPolicy(base_seconds=0.01, max_seconds=0.01, max_deliveries=2), **settings)
    loop = await emptied(requests, results, evaluator=scorer, loop=fn, config=config)
    return loop, await take(results), requests


class TestAlone:
    async def test_a_suspected_trial_that_does_not_crash_is_scored(self) -> None:
        here = os.getpid()

        def work(input: str, ctx: TrialContext) -> str:  # In a thread, which the child must have of its own.
            ctx.session.record(ToolInvoked("search"))
            return input if os.getpid() != here else "not alone"

        loop, results, requests = await alone(work, *range(6), isolated_processes=2)
        assert [result.passed for result in results] == [True] * 6
        assert all(b"ToolInvoked" in result.snapshot for result in results)
        assert (loop.counters.suspects, loop.counters.crashes) == (6, 0)
        assert await requests.dead_letters.count() == 0

    async def test_suspected_trials_are_executed_with_at_least_half_the_concurrency(self, tmp_path: Path) -> None:
        concurrency, log = 8, tmp_path / "started"

        async def work(input: str) -> str:  # Ends only if enough others are executed at the same time.
            with log.open("a") as file:
                file.write("x")
            while log.stat().st_size < concurrency // 2:  # noqa: ASYNC110 - others write from other processes
                await asyncio.sleep(0.02)
            return input

        settings = {"concurrency": concurrency, "isolated_processes": 2, "timeout_seconds": 8.0}
        loop, results, _ = await alone(work, *range(2 * concurrency), **settings)
        assert [result.outcome for result in results] == ["scored"] * (2 * concurrency)
        assert (loop.counters.suspects, loop.counters.crashes) == (2 * concurrency, 0)

    async def test_only_what_ends_its_process_alone_is_a_dead_letter_and_its_group_is_not(self) -> None:
        async def work(input: str, ctx: TrialContext) -> str:
            if ctx.sample.id == "s3":
                await asyncio.sleep(0.2)
                os._exit(3)
            if ctx.sample.id == "s4":
                await asyncio.sleep(0.4)  # Under way when its process dies.
            return input

        loop, results, requests = await alone(work, *range(8), isolated_processes=1, concurrency=8)
        assert [result.outcome for result in results] == ["dead_letter" if n == 3 else "scored" for n in range(8)]
        assert loop.counters.crashes == 1
        assert await requests.dead_letters.count() == 1

    async def test_a_child_whose_interpreter_stalls_is_killed_and_its_group_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.fleet.worker.execution._LEAST_SILENCE", 2.0)

        def execute(requests: Sequence[bytes]) -> None:
            async def one(request: bytes) -> bytes:
                await asyncio.sleep(0.1)
                if request == b"stall":
                    ctypes.PyDLL(None).sleep(600)  # Holds the interpreter lock.
                await asyncio.sleep(0.3)
                return request

            asyncio.run(emit_answers(one, requests))

        runner = IsolatedRunner()
        config = EvalLoopConfig(concurrency=6, isolated_processes=2, buffer_seconds=1, lease_seconds=1)
        pool = SuspectPool(execute, runner, config, limit_seconds=600)
        stalled, *others = (asyncio.create_task(pool.run(request)) for request in (b"stall", b"1", b"2"))
        with anyio.fail_after(30):
            assert await asyncio.gather(*others) == [b"1", b"2"]
        assert not stalled.done()  # Alone, it has the whole time of a trial.
        stalled.cancel()
        await asyncio.wait([stalled, *pool._tasks])
        runner.close()

    async def test_a_message_that_lost_one_worker_and_cannot_be_isolated_is_executed_in_the_worker(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(requests: Sequence[bytes]) -> None:
            raise RuntimeError("no room for a process")

        requests, (_, results) = Suspected("requests", EvalRequest), boxes()
        requests.expiries = 1
        await requests.send(request())
        await emptied(requests, results, evaluator=exact_match, loop=str, isolated=broken)
        (result,) = await take(results)
        assert result.outcome == "scored"
        assert (
            "executing suspected trial run/baseline/s0#0 in this process: RuntimeError: no room for a process"
            in caplog.text
        )

    async def test_an_error_of_the_task_is_data_and_no_crash(self) -> None:
        async def fail(input: str) -> str:
            raise ValueError("no")

        _, (result,), requests = await alone(fail)
        assert (result.outcome, result.error) == ("task_error", "ValueError: no")
        assert await requests.dead_letters.count() == 0

    async def test_a_crash_is_an_outcome_first_and_a_dead_letter_then(self) -> None:
        async def die(input: str) -> str:
            os._exit(3)

        loop, (result,), requests = await alone(die)
        assert (result.outcome, result.score) == ("dead_letter", None)
        assert "exit code 3" in result.error
        (letter,) = await requests.dead_letters.page()
        assert letter.error == "ChildDiedError"
        assert (loop.counters.crashes, loop.counters.dead_lettered) == (1, 1)

    async def test_a_retried_dead_letter_that_killed_its_process_is_executed_in_a_child_process_again(self) -> None:
        here = os.getpid()

        async def die(input: str) -> str:
            if os.getpid() == here:
                return input  # Outside of a child process it would have ended its worker.
            os._exit(3)

        requests, results = await sent(request())
        await requests.receive(visibility_timeout=0.01)  # By a worker that dies of it.
        loop = EvalLoop(requests=requests, evaluator=exact_match, loop=die, results=results)
        await asyncio.sleep(0.02)
        await loop.run(until_empty=True)
        (letter,) = await requests.dead_letters.page()
        await requests.dead_letters.retry(letter.id)
        await EvalLoop(requests=requests, evaluator=exact_match, loop=die, results=results).run(until_empty=True)
        assert [result.outcome for result in await take(results)] == ["dead_letter", "dead_letter"]

    async def test_a_suspect_that_never_ends_is_killed_and_timed_out(self) -> None:
        async def stuck(input: str) -> str:
            while True:  # The interpreter is its own: no timeout of ours gets a word in.
                pass

        requests, (_, results) = Suspected("requests", EvalRequest), boxes()
        await requests.send(request())
        hasty = rules(stuck, timeout_seconds=0.1, close_seconds=0.1)
        await emptied(requests, results, rules=hasty, config=EvalLoopConfig(buffer_seconds=0.1))
        (result,) = await take(results)
        assert result.outcome == "timeout"
        assert "killed" in str(result.error)

    async def test_a_suspect_that_cannot_be_isolated_is_tried_again_and_then_given_up(self) -> None:
        requests, (_, results) = Suspected("requests", EvalRequest), boxes()
        await requests.send(request())

        def broken(requests: Sequence[bytes]) -> None:
            raise RuntimeError("no room for a process")

        config = EvalLoopConfig(dlq=DLQPolicy(base_seconds=0.01, max_seconds=0.01, max_deliveries=2))
        loop = await emptied(requests, results, evaluator=exact_match, loop=str.upper, config=config, isolated=broken)
        (result,) = await take(results)
        assert (result.outcome, loop.counters.suspects) == ("dead_letter", 2)
        assert "no room" in str(result.error)


class TestTwoHops:
    async def test_a_suspects_task_runs_where_it_always_did_and_only_scoring_is_alone(self) -> None:
        asked: Mailbox[MainLoopRequest] = InMemoryMailbox("main", MainLoopRequest)

        @evaluator(inline=True)
        def dies_on_b(output: str, expected: str) -> bool:
            if output == "B":
                os._exit(9)
            return output == expected

        requests, (_, results) = Suspected("requests", EvalRequest), boxes()
        await requests.send(request(0, "a", "A"))
        await requests.send(request(1, "b", "B"))
        async with serving(MainLoop(str.upper, requests=asked)):
            await emptied(requests, results, evaluator=dies_on_b, mainloop_requests=asked)
        outcomes = [(result.outcome, result.passed) for result in await take(results)]
        assert outcomes == [("scored", True), ("dead_letter", False)]

    async def test_an_input_that_kills_its_main_loop_is_an_error_and_a_dead_letter(self) -> None:
        here = os.getpid()

        def work(input: str) -> str:
            if input == "die":
                os._exit(5)
            return "alone" if os.getpid() != here else "not alone"

        requests = Suspected("main", MainLoopRequest)
        sent = MainLoopRequest("fine", "one"), MainLoopRequest("die", "two")
        found = {answer.request_id: answer for answer in await answers(work, *sent, requests=requests)}
        assert found["one"].output == "alone"
        assert "crashes its process" in str(found["two"].error)
        (letter,) = await requests.dead_letters.page()
        assert letter.error == "ChildDiedError"

    async def test_an_input_that_never_ends_is_killed(self) -> None:
        def stuck(input: str) -> str:
            while True:
                pass

        requests = Suspected("main", MainLoopRequest)
        replies: InMemoryMailbox[Any] = InMemoryMailbox("replies")
        await requests.send(MainLoopRequest("x", "one"), reply_to=replies)
        main = MainLoop(stuck, requests=requests, config=MainLoopConfig(timeout_seconds=0.2, buffer_seconds=0.1))
        main._needed = 0.2  # Without the ten seconds for closing.
        await main.run(until_empty=True)
        (message,) = await replies.receive(wait_time_seconds=0)
        assert "killed" in message.body.error or "did not finish" in message.body.error
