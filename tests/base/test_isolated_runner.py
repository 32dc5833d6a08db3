"""Functions in child processes: what is sent and returned, and what remains after a call."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, Score, SessionView, ToolInvoked, evaluator, task
from fairtrial.base.isolation import ChildDiedError, IsolatedError, IsolatedRunner, NotSendableError
from fairtrial.base.isolation.runner import IsolatedChild
from fairtrial.base.offload import DaemonThreads, orphan
from fairtrial.errors import ConfigurationError
from fairtrial.store import redact
from tests.base import functions


@pytest.fixture
def runner() -> Iterator[IsolatedRunner]:
    made = IsolatedRunner()
    yield made
    made.close()


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


class TestCalls:
    async def test_functions_of_every_kind_are_sent_and_results_are_typed(self, runner: IsolatedRunner) -> None:
        offset = 10

        def closure(point: Point) -> Point:
            return Point(point.x + offset, point.y)

        assert await runner.run(functions.add, 1, other=2, kind=int) == 3
        assert await runner.run(partial(functions.add, 5), kind=int) == 6
        assert await runner.run(closure, Point(1, 2), kind=Point) == Point(11, 2)
        assert await runner.run(lambda text: text * 2, "ab", kind=str) == "abab"
        assert await runner.run(len, "x" * 3_000_000, kind=int) == 3_000_000

    async def test_a_secret_that_a_child_sets_in_its_environment_is_known_here(
        self, runner: IsolatedRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(redact, "_registered", {})
        monkeypatch.setenv("INHERITED_KEY", "inherited-4711")
        await runner.run(functions.set_variable, "CHILD_KEY", "from-a-vault-4711", kind=str)
        assert redact._registered == {"from-a-vault-4711": "the value of $CHILD_KEY"}
        await runner.run(functions.set_variable, "CHILD_KEY", "from-a-vault-4712", kind=str)
        assert set(redact._registered) == {"from-a-vault-4711", "from-a-vault-4712"}

    async def test_a_child_is_used_again_and_is_not_this_process(self, runner: IsolatedRunner) -> None:
        pids = {await runner.run(functions.process, kind=int) for _ in range(5)}
        assert len(pids) == 1
        assert os.getpid() not in pids

    async def test_calls_at_once_have_a_child_each(self, runner: IsolatedRunner) -> None:
        async def call() -> None:
            pids.add(await runner.run(functions.process_after, 0.5, kind=int))

        pids: set[int] = set()
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(call)
        assert len(pids) == 3

    async def test_a_lock_that_a_thread_holds_here_is_free_in_the_child(self, runner: IsolatedRunner) -> None:
        with functions.LOCK:
            assert await runner.run(functions.under_the_lock, kind=bool)

    async def test_errors_and_deaths_of_children_are_distinguished_and_the_next_call_works(
        self, runner: IsolatedRunner
    ) -> None:
        def fail() -> None:
            error = ConnectionError("busy")
            error.retry_after = 3  # type: ignore[attr-defined]
            raise error

        with pytest.raises(IsolatedError, match="ConnectionError: busy") as told:
            await runner.run(fail, kind=int)
        assert (told.value.retry_after, isinstance(told.value, ChildDiedError)) == (3.0, False)
        with pytest.raises(ChildDiedError, match="exit code 7"):
            await runner.run(os._exit, 7, kind=int)
        with pytest.raises(ChildDiedError, match="killed by signal 9"):
            await runner.run(functions.kill_itself, kind=int)
        with pytest.raises(IsolatedError, match="cannot be sent as JSON"):
            await runner.run(object, kind=object)
        assert await runner.run(functions.add, 1, kind=int) == 2

    async def test_a_child_that_closes_its_connection_and_goes_on_does_not_block_the_event_loop(
        self, runner: IsolatedRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fairtrial.base.isolation.runner._EXIT_SECONDS", 1.5)
        await runner.run(functions.add, 1, kind=int)
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while True:
                before = time.monotonic()
                await anyio.sleep(0.02)
                longest = max(longest, time.monotonic() - before)

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            with pytest.raises(ChildDiedError, match="closed its connection without an answer"):
                await runner.run(functions.close_descriptors_and_sleep, kind=int)
            group.cancel_scope.cancel()
        assert 0 < longest < 1.0

    async def test_methods_of_one_object_are_serialized_once(self, runner: IsolatedRunner) -> None:
        class Adder:
            def add(self, one: int) -> int:
                return one + 1

        adder = Adder()
        assert runner.function(adder.add, "it") is runner.function(adder.add, "it")
        assert runner.function(adder.add, "it") is not runner.function(Adder().add, "it")
        assert len(runner._functions) == 2

    @pytest.mark.parametrize("how", ["fork", "exec", "daemon"])
    async def test_a_process_left_behind_neither_delays_the_answer_nor_survives_it(
        self, runner: IsolatedRunner, how: str
    ) -> None:
        with anyio.fail_after(60):
            left = await runner.run(functions.fork_and_answer, how, kind=int)
        assert is_gone(left)
        assert await runner.run(functions.add, 1, kind=int) == 2

    async def test_a_cancelled_call_kills_the_child_and_what_it_started(
        self, runner: IsolatedRunner, tmp_path: Path
    ) -> None:
        file = tmp_path / "pids"
        await runner.run(functions.add, 1, kind=int)
        with anyio.move_on_after(60) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(runner.run, functions.fork_and_hang, str(file), kind=int))
                while not file.exists() or not file.read_text():  # noqa: ASYNC110 - it is written by another process
                    await anyio.sleep(0.05)
                group.cancel_scope.cancel()
        assert not scope.cancelled_caught
        assert all(is_gone(int(pid)) for pid in file.read_text().split())

    async def test_what_cannot_be_sent_is_refused_with_a_sentence(self, runner: IsolatedRunner) -> None:
        with socket.socket() as connection:

            def connected() -> bool:
                return connection.fileno() > 0

            with pytest.raises(NotSendableError, match=r"the function must be something that can be sent .*socket"):
                await runner.run(connected, kind=bool)
            with pytest.raises(NotSendableError, match="the arguments of the function must be"):
                await runner.run(functions.process, connection, kind=int)

    async def test_a_lock_is_replaced_by_a_free_one_in_the_child(self, runner: IsolatedRunner) -> None:
        locks = (threading.Lock(), threading.RLock())

        def locked() -> bool:
            with locks[0], locks[1], locks[1]:
                return True

        with locks[0], locks[1]:
            assert await runner.run(locked, kind=bool)

    async def test_it_works_in_a_thread_with_an_event_loop_of_its_own(self, runner: IsolatedRunner) -> None:
        def other_thread() -> int:
            return asyncio.run(runner.run(functions.add, 1, kind=int))

        assert await anyio.to_thread.run_sync(other_thread) == 2
        assert await runner.run(functions.add, 2, kind=int) == 3


def test_children_end_with_a_parent_that_is_killed_even_while_they_hold_the_interpreter(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from fairtrial.base.isolation import IsolatedRunner
from tests.base import functions
async def main():
    runner = IsolatedRunner()
    async with runner.child() as idle:
        pass
    await runner.run(functions.hold_the_interpreter, sys.argv[1], kind=int)
asyncio.run(main())
"""
    file = tmp_path / "pid"
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    parent = subprocess.Popen([sys.executable, "-c", code, str(file)], env={**os.environ, "PYTHONPATH": path})
    while not file.exists() or not file.read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert is_gone(int(file.read_text()))


def run_script(
    code: str, folder: Path, *, name: str = "script.py", **settings: Any
) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=120, check=False, **settings
    )


def test_a_script_needs_no_main_guard_and_its_output_appears_once(tmp_path: Path) -> None:
    """Locks, classes and globals of the script are its own in the child; nothing is printed twice."""
    done = run_script(
        """
        from dataclasses import dataclass
        from fairtrial import Dataset, evaluate_sync, evaluator, task

        print("HEADER")
        FACTOR = 2

        @dataclass
        class Number:
            value: int

        def helper(number):
            return Number(number.value * FACTOR)

        @task(isolate=True)
        def work(number: Number) -> Number:
            print("working")
            return helper(number)

        same = evaluator(isolate=True)(lambda output, expected: output.value == expected)
        report = evaluate_sync(Dataset.of([(Number(i), 2 * i) for i in range(3)]), work, same)
        print("done", report.pass_rate)
        """,
        tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split("\n")) == sorted(["", "HEADER", "working", "working", "working", "done 1.0"])


def test_isolation_works_with_a_running_event_loop_as_in_a_notebook(tmp_path: Path) -> None:
    done = run_script(
        """
        import asyncio
        from fairtrial import Dataset, evaluate_sync, exact_match, task

        async def cell():  # A kernel runs cells inside its event loop; their functions have no file.
            space = {"task": task, "__name__": "__main__"}
            exec("@task(isolate=True)\\ndef work(x):\\n    return x", space)
            return evaluate_sync(Dataset.of({"a": "a"}), space["work"], exact_match)

        print(asyncio.run(cell()).pass_rate)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr


def test_a_file_in_the_folder_does_not_replace_a_module_of_the_child(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "socket.py").write_text("raise SystemExit('the wrong socket')")
    (tmp_path / "suite" / "script.py").write_text(
        "from fairtrial import *\nfrom fairtrial import task\n"
        "print(evaluate_sync(Dataset.of({1: 1}), task(isolate=True)(lambda x: x), exact_match).pass_rate)"
    )
    done = subprocess.run(
        [sys.executable, "suite/script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr


@task(isolate=True)
def record_and_fail(given: int, ctx: Any) -> int:
    ctx.session.record(ToolInvoked("search"))
    if given == 2:
        raise ValueError("two")
    return given


@evaluator(isolate=True)
def searched(output: int, expected: int, session: SessionView) -> Score:
    return Score(1.0 if len(session[ToolInvoked].all()) == 1 else 0.0)


def suite_of(work: Any, judge: Any, **settings: Any) -> EvalSuite:
    config = EvalConfig(max_concurrent=4, max_retries=0, timeout_seconds=settings.pop("timeout_seconds", 60.0))
    samples = Dataset([Sample(str(i), i, i) for i in range(settings.pop("samples", 4))])
    return EvalSuite("isolated", samples, work, judge, config=config, **settings)


def test_events_of_isolated_tasks_arrive_in_their_session_also_from_those_that_fail() -> None:
    report = suite_of(record_and_fail, searched).run_sync(store="memory:")
    results = {result.sample_id: result for result in report.results}
    assert {key: (result.outcome, result.passed) for key, result in results.items()} == {
        "0": ("scored", True),
        "1": ("scored", True),
        "2": ("task_error", False),
        "3": ("scored", True),
    }
    assert len(results["2"].session[ToolInvoked].all()) == 1


def test_the_start_of_a_child_is_not_charged_to_the_time_limit_of_its_trial() -> None:
    report = suite_of(task(isolate=True)(lambda x: x), searched_never, timeout_seconds=0.15).run_sync(store="memory:")
    assert dict(report.errors) == {}
    assert all(result.latency_ms < 150 for result in report.results)


@evaluator(isolate=True)
def searched_never(output: int, expected: int) -> bool:
    return output == expected


def test_a_lifespan_that_cannot_be_sent_is_refused_before_the_first_trial() -> None:
    from contextlib import contextmanager

    called: list[int] = []

    @contextmanager
    def lifespan() -> Iterator[Any]:
        with socket.socket() as connection:
            yield connection

    def judge(output: int, expected: int) -> bool:
        called.append(output)
        return True

    with pytest.raises(ConfigurationError, match=r"ctx\.shared must be something that can be sent"):
        suite_of(record_and_fail, judge, lifespan=lifespan).run_sync(store="memory:")
    assert called == []


def test_a_task_or_evaluator_that_cannot_be_sent_is_refused_before_the_first_trial() -> None:
    connection = socket.socket()
    connection.close()

    def connected(*_: Any) -> bool:
        return connection.fileno() > 0

    with pytest.raises(ConfigurationError, match="task 'connected' must be something that can be sent"):
        suite_of(task(isolate=True)(connected), searched_never).run_sync(store="memory:")
    with pytest.raises(ConfigurationError, match="evaluator 'connected' must be something that can be sent"):
        suite_of(lambda x: x, evaluator(isolate=True)(connected)).run_sync(store="memory:")


async def test_a_thread_whose_event_loop_is_gone_serves_the_next_one() -> None:
    threads = DaemonThreads()
    release, ended = threading.Event(), threading.Event()

    def block() -> None:
        release.wait(20)
        ended.set()

    def other_loop() -> None:
        async def leave() -> None:
            job = asyncio.ensure_future(threads.run(block))
            await asyncio.sleep(0.2)
            orphan(job)  # The loop ends without it.

        asyncio.run(leave())

    await anyio.to_thread.run_sync(other_loop)
    release.set()
    await anyio.to_thread.run_sync(ended.wait)
    with anyio.fail_after(20):
        for _ in range(3):
            assert await threads.run(lambda: 1) == 1
    threads.close()


def test_a_signal_from_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    done = run_script(
        """
        import os, signal, threading, time
        from fairtrial import Dataset, EvalConfig, evaluate_sync, exact_match, task

        @task(isolate=True)
        def work(x):
            time.sleep(2)
            return x

        def interrupt():
            time.sleep(1.5)
            os.killpg(0, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            evaluate_sync(Dataset.of({"a": "a"}), work, exact_match, EvalConfig(grace_seconds=30))
        except KeyboardInterrupt:
            print("drained")
        """,
        tmp_path,
        start_new_session=True,
    )
    assert done.stdout == "drained\n", done.stderr
    assert "KeyboardInterrupt" not in done.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_end_still_waits_for_the_process() -> None:
    child = await IsolatedChild.start()
    process = child._process
    end = asyncio.ensure_future(child.end())
    await asyncio.sleep(0)
    end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await end
    assert process.returncode == -signal.SIGKILL
