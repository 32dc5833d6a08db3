"""Loops with failing stores, reply mailboxes and child processes, and with interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import TrialContext, exact_match, open_store
from fairtrial.base.isolation import IsolatedRunner, NotSendableError
from fairtrial.base.isolation.child import emit
from fairtrial.errors import CodecError, MailboxConnectionError, StoreUnavailableError
from fairtrial.fleet import (
    EvalLoop,
    EvalLoopConfig,
    EvalReply,
    EvalRequest,
    MainLoop,
    MainLoopConfig,
    MainLoopRequest,
    MainLoopResult,
)
from fairtrial.fleet.worker.execution import SuspectPool
from fairtrial.mailbox import DLQPolicy, InMemoryMailbox, Message
from fairtrial.store.memory import MemoryStore
from fairtrial.store.protocol import Committed, RunRecord
from tests.fleet.build import QUICK, Flaky, answers, boxes, emptied, request, rules, sent, take, two_hops, until


class Store(MemoryStore):
    """Fails as often as it is told to."""

    errors: list[Exception]

    def commit(self, *args: Any, **named: Any) -> Committed:
        if self.errors:
            raise self.errors.pop(0)
        return super().commit(*args, **named)


class TestStores:
    async def test_a_database_that_is_away_for_a_moment_loses_nothing(self) -> None:
        store = Store()
        store.errors = [StoreUnavailableError("restarting"), RuntimeError("a bug")]
        store.create_run(RunRecord("run", "s", "d", "1", "f", 3, ("baseline",), 1))
        requests, _ = await sent(*map(request, range(3)))
        loop = await emptied(requests, store)
        assert len(list(store.results("run"))) == 3
        assert loop.counters.delivery_retries >= 3

    async def test_requests_of_an_unknown_run_are_dead_lettered(self) -> None:
        requests, _ = await sent(request())
        config = EvalLoopConfig(delivery_seconds=0)
        await emptied(requests, open_store("memory:"), config=config)
        (letter,) = await requests.dead_letters.page()
        assert letter.error == "UnknownRunError"


class Balky(InMemoryMailbox[Any]):
    """Acknowledging fails as often as it is told to."""

    failures = 0

    async def acknowledge_all(self, messages: Sequence[Message[Any]]) -> Sequence[bool]:
        if self.failures:
            self.failures -= 1
            raise MailboxConnectionError("away")
        for message in messages:
            await message.receipt.acknowledge()
        return [True] * len(messages)


class TestSettling:
    async def test_an_acknowledgement_that_fails_is_repeated_and_nothing_runs_twice(self) -> None:
        requests, results = Balky("q", EvalRequest), InMemoryMailbox("r", EvalReply)
        requests.failures = 1
        await requests.send(request())
        loop = await emptied(requests, results, name="me")
        assert len(await take(results)) == 1
        assert (loop.counters.received, loop.counters.finished) == (1, 1)
        assert repr(loop) == "<EvalLoop me on q>"

    async def test_a_result_whose_error_cannot_be_sent_is_dead_lettered(self) -> None:
        requests, results = InMemoryMailbox("q", EvalRequest), InMemoryMailbox("r", EvalReply, max_body_bytes=10)
        await requests.send(request())
        loop = await emptied(requests, results)
        (letter,) = await requests.dead_letters.page()
        assert letter.error == "MessageTooLargeError"
        assert loop.counters.dead_lettered == 1

    async def test_a_delivery_with_a_bug_is_tried_again_and_then_given_up(self) -> None:
        requests, _ = await sent(request())
        config = EvalLoopConfig(dlq=DLQPolicy(base_seconds=0.01, max_seconds=0.01, max_deliveries=2))
        await emptied(requests, Flaky(EvalReply, *(RuntimeError("a bug") for _ in range(99)), on="send"), config=config)
        (letter,) = await requests.dead_letters.page()
        assert (letter.error, letter.delivery_count) == ("RuntimeError", 2)

    async def test_cancelling_while_a_result_waits_for_its_mailbox_hands_the_request_back(self) -> None:
        requests, _ = await sent(request())
        away = Flaky(EvalReply, *(MailboxConnectionError("away") for _ in range(999)), on="send")
        loop = EvalLoop(requests=requests, rules=rules(), results=away)
        running = asyncio.create_task(loop.run())
        await until(lambda: loop.counters.delivery_retries > 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await requests.depth()).waiting == 1

    async def test_a_mailbox_that_is_not_there_yet_is_waited_for(self) -> None:
        errors = [MailboxConnectionError("not yet") for _ in range(2)]
        requests, results = Flaky(EvalRequest, *errors, on="approximate_count"), InMemoryMailbox("r", EvalReply)
        await requests.send(request())
        loop = await emptied(requests, results)
        assert len(await take(results)) == 1
        loop.stop()  # Nothing to stop any more, and no trouble.


class TestMainLoops:
    async def test_an_answer_that_does_not_get_through_is_sent_again(self) -> None:
        requests: InMemoryMailbox[Any] = InMemoryMailbox("main", MainLoopRequest)
        replies = Flaky(MainLoopResult, *(MailboxConnectionError("away") for _ in range(2)), on="send")
        await requests.send(MainLoopRequest("a"), reply_to=replies)
        loop = MainLoop(str.upper, requests=requests)
        await loop.run(until_empty=True)
        (message,) = await replies.receive(wait_time_seconds=0)
        assert (message.body.output, loop.counters.delivery_retries) == ("A", 2)

        replies.errors = [MailboxConnectionError("away")]
        await requests.send(MainLoopRequest("b"), reply_to=replies)
        hasty = MainLoop(str.upper, requests=requests, config=MainLoopConfig(delivery_seconds=0, dlq=QUICK))
        await hasty.run(until_empty=True)
        assert (hasty.counters.retried, hasty.counters.received) == (0, 1)

    async def test_a_resource_that_does_not_close_costs_no_answer(self, caplog: pytest.LogCaptureFixture) -> None:
        @asynccontextmanager
        async def sticky() -> AsyncIterator[None]:
            yield
            raise OSError("will not close")

        async def work(input: str, ctx: TrialContext) -> str:
            await ctx.enter(sticky())
            return input

        (answer,) = await answers(work, MainLoopRequest("a"))
        assert answer.output == "a"
        assert "will not close" in caplog.text

    async def test_typed_outputs_are_read_with_the_evaluators_type(self) -> None:
        both = request(0, [2, 1], [1, 2]), request(1, "text", [1, 2])
        _, _, (good, bad) = await two_hops(sorted, *both, output_type=list[int])
        assert good.passed
        assert bad.outcome == "task_error"


class TestSuspects:
    async def test_a_child_that_answers_nonsense_is_an_error(self) -> None:
        runner = IsolatedRunner()
        nonsense = lambda requests: emit("nonsense")  # noqa: E731 - by value
        config = EvalLoopConfig(concurrency=1, isolated_processes=1, buffer_seconds=1)
        pool = SuspectPool(nonsense, runner, config, limit_seconds=60)
        with pytest.raises(CodecError):
            await pool.run(b"")
        runner.close()

    async def test_a_suspected_trial_that_cannot_be_sent_to_a_child_says_so(self) -> None:
        connection = socket.socket()
        connection.close()

        def connected(input: str) -> str:
            return input if connection.fileno() else ""

        requests, results = boxes()
        loop = EvalLoop(requests=requests, evaluator=exact_match, loop=connected, results=results)
        with pytest.raises(NotSendableError, match="the arguments of a suspected trial must be something"):
            await loop._suspects.pool.run(await loop._suspects.prepare(request()))


INTERRUPTED = """
import asyncio, sys
from fairtrial import Sample, TrialKey, exact_match
from fairtrial.fleet import MainLoop
from fairtrial.fleet import EvalLoop, EvalLoopConfig, EvalRequest
from fairtrial.mailbox import InMemoryMailbox

async def hang(input):
    print("ready", flush=True)
    await asyncio.sleep(300)

requests = InMemoryMailbox("q")
asyncio.run(requests.send(EvalRequest(TrialKey("r", "baseline", "s"), Sample("s", 1))))
config = EvalLoopConfig(drain_seconds=float(sys.argv[1]))
loop = EvalLoop(requests=requests, evaluator=exact_match, loop=hang, results=InMemoryMailbox("r"), config=config)
try:
    loop.run_sync()
except KeyboardInterrupt:
    print("handed back", loop.counters.handed_back, flush=True)
"""


@pytest.mark.parametrize(("drain", "interrupts", "said"), [("0.1", 1, "handed back 1"), ("60", 2, "handed back")])
def test_ctrl_c_drains_and_a_second_one_does_not_wait(drain: str, interrupts: int, said: str) -> None:
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    command = [sys.executable, "-c", INTERRUPTED, drain]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in range(interrupts):
            process.send_signal(signal.SIGINT)
            if number + 1 < interrupts:
                anyio.run(anyio.sleep, 0.3)  # Two in one breath are one to Python.
        assert process.stdout.readline().startswith(said)
        assert process.wait(30) == 0
