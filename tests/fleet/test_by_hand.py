"""Loops, mailboxes, submission and collection assembled by programs, as processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, Experiment, Sample, exact_match, open_store
from fairtrial.base.sync_bridge import call_sync
from fairtrial.fleet import EvalLoop, MainLoop, MainLoopConfig, MainLoopRequest, collect_results, submit_dataset
from fairtrial.mailbox import InMemoryMailbox
from tests.fleet.build import boxes, request, take
from tests.fleet.loop_process import Answer, Problem, mailboxes
from tests.fleet.processes import Processes, end, wait_for_lines

SCRIPT = str(Path(__file__).with_name("loop_process.py"))


def problems(count: int) -> Dataset[Problem, Answer]:
    return Dataset([Sample(f"s{i}", Problem(i, i), Answer(2 * i)) for i in range(count)])


@pytest.fixture
def processes(tmp_path: Path, redis_url: str) -> Iterator[Processes]:
    with Processes(tmp_path, redis_url) as made:
        yield made


def start(processes: Processes, role: str) -> subprocess.Popen[str]:
    return processes._start(role, SCRIPT, role, processes.mailbox, str(processes.folder))


def wait_for_text(processes: Processes, text: str) -> None:
    end = time.monotonic() + 60
    while text not in processes.logs():
        assert time.monotonic() < end, processes.logs()
        time.sleep(0.02)


class TestSignals:
    """`run_sync` of a loop ends by a signal as a LoopGroup does."""

    @pytest.mark.proves("R83")
    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
    )
    async def test_a_signal_lets_a_loop_finish_what_is_in_flight(
        self, processes: Processes, number: signal.Signals, code: int
    ) -> None:
        requests, results, inputs = mailboxes(processes.mailbox)
        async with requests, results, inputs:
            await submit_dataset(problems(5), Experiment(), requests, reply_to=results)
            worker = start(processes, "one")
            wait_for_lines(processes.folder / "executed.log", 2)
            worker.send_signal(number)
            wait_for_text(processes, "for 2 jobs in flight")
            (processes.folder / "go").touch()
            out, _ = worker.communicate(timeout=60)
            # Ctrl-C is a KeyboardInterrupt in the end, which Python answers with its own signal.
            assert worker.returncode in (code, -number if code else 0), processes.logs()
            assert ("ended" in out) is (code == 0)
            assert [result.passed for result in await take(results, 2)] == [True, True]
            assert [message.delivery_count for message in await requests.receive(9, wait_time_seconds=5)] == [1, 1, 1]

    @pytest.mark.proves("R83")
    async def test_a_second_signal_hands_back_what_is_in_flight(self, processes: Processes) -> None:
        requests, results, inputs = mailboxes(processes.mailbox)
        async with requests, results, inputs:
            await submit_dataset(problems(5), Experiment(), requests, reply_to=results)
            worker = start(processes, "one")
            wait_for_lines(processes.folder / "executed.log", 2)
            worker.send_signal(signal.SIGTERM)
            wait_for_text(processes, "for 2 jobs in flight")
            worker.send_signal(signal.SIGTERM)
            out, _ = worker.communicate(timeout=30)
            assert (worker.returncode, out.strip()) == (0, "ended"), processes.logs()
            assert len(await requests.receive(9, wait_time_seconds=5)) == 5
            assert await results.approximate_count() == 0

    @pytest.mark.parametrize("kind", ["eval", "main"])
    def test_handlers_are_installed_in_the_main_thread_alone_and_restored(self, kind: str) -> None:
        seen: list[Any] = []

        def look(input: str) -> str:
            seen.append(signal.getsignal(signal.SIGTERM))
            return input

        def run() -> None:
            before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
            if kind == "eval":
                requests, results = boxes()
                call_sync(lambda: requests.send(request()))
                EvalLoop(requests=requests, evaluator=exact_match, loop=look, results=results).run_sync(
                    until_empty=True
                )
            else:
                inputs = InMemoryMailbox("main", MainLoopRequest)
                call_sync(lambda: inputs.send(MainLoopRequest("q")))
                MainLoop(look, requests=inputs, config=MainLoopConfig(wait_seconds=0)).run_sync(max_iterations=1)
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

        run()
        assert seen.pop() != signal.SIG_DFL
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        assert seen == [signal.SIG_DFL]

    def test_handlers_of_the_program_are_left_in_place(self) -> None:
        seen: list[Any] = []

        def own(number: int, frame: object) -> None: ...

        requests, results = boxes()
        call_sync(lambda: requests.send(request()))
        loop = EvalLoop(
            requests=requests,
            evaluator=exact_match,
            loop=lambda input: seen.append(signal.getsignal(signal.SIGTERM)),
            results=results,
        )
        before = signal.signal(signal.SIGTERM, own)
        try:
            loop.run_sync(until_empty=True)
            assert seen == [signal.getsignal(signal.SIGTERM)] == [own]
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.mark.long
@pytest.mark.proves("R54", "R56", "R60", "R61")
async def test_two_hops_between_processes_give_every_result_once_though_workers_are_killed(
    processes: Processes,
) -> None:
    count = 300
    dataset = problems(count)
    requests, results, inputs = mailboxes(processes.mailbox)
    store = open_store(processes.folder / "runs.db")
    async with requests, results, inputs:
        run_id = await submit_dataset(dataset, Experiment(), requests, reply_to=results, store=store)
        scoring = [start(processes, "eval") for _ in range(2)]
        executing = [start(processes, "main") for _ in range(2)]
        collecting = asyncio.create_task(
            collect_results(results, count, timeout_seconds=100, run_id=run_id, store=store, requests=requests)
        )
        executed = processes.folder / "executed.log"
        for lines, role, victims in ((40, "eval", scoring), (120, "main", executing), (200, "main", executing)):
            await asyncio.to_thread(wait_for_lines, executed, lines)
            victim = victims.pop(0)
            victim.kill()
            victims.append(start(processes, role))
        report = await collecting
        assert (report.total, report.pass_rate, dict(report.errors)) == (count, 1.0, {}), processes.logs()
        assert {result.key.sample_id for result in report.results} == {sample.id for sample in dataset}
        assert not await results.dead_letters.count() + await requests.dead_letters.count()
        executions = await asyncio.to_thread(wait_for_lines, executed, count)
        assert executions < count + 3 * 20  # Beside what the killed ones had in hand, nothing is executed twice.
        for worker in (*scoring, *executing):
            assert await asyncio.to_thread(end, worker) == 0, processes.logs()
        # A worker that was killed leaves at most the sessions that it had in hand.
        left = await asyncio.to_thread(lambda: list((processes.folder / "sessions").iterdir()))
        assert len(left) <= 3 * 20
