"""Runs whose trials are executed by several processes of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Experiment, Sample, TrialContext, exact_match, tool_called
from fairtrial.base.isolation import IsolatedError, NotSendableError
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.local import pool
from fairtrial.integrations.tracing import TraceReceiver, TrialSpanProcessor
from fairtrial.models.limiter import named_spending
from fairtrial.reports import EvalReport
from fairtrial.store import RunStore, open_store, redact
from fairtrial.store.redact import current
from tests.integrations.tracing.traced_app import App
from tests.runs import several, several_traced
from tests.runs.several import Answer, counted

TWO = EvalConfig(processes=2)


def suite_of(
    folder: Path, count: int = 20, config: EvalConfig = TWO, task: Any = several.answer, **params: Any
) -> EvalSuite[Any, Any, Any]:
    experiments = [Experiment("baseline", {"folder": str(folder), **params})]
    evaluator = several.same_number if task is several.answer else several.fine
    return EvalSuite("several", several.questions(count), task, evaluator, experiments=experiments, config=config)


def children() -> set[int]:
    """Return the child processes of this process."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found |= set(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return found


def facts(report: EvalReport[Any]) -> dict[str, Any]:
    return {
        f"{result.sample_id} {result.key.repeat}": (result.outcome, result.score and result.score.value, result.error)
        for result in report.results
    }


def test_two_processes_give_the_results_of_one(tmp_path: Path, store: RunStore) -> None:
    config = EvalConfig(repeats=2, max_concurrent=4)
    one = suite_of(tmp_path, config=config, fails=3).run_sync(store=store)
    before = children()
    in_two = EvalConfig(repeats=2, max_concurrent=4, processes=2)
    two = suite_of(tmp_path, config=in_two, fails=3, together=2).run_sync(store=store)
    assert facts(two) == facts(one)
    assert one.run_id != two.run_id
    processes = {result.output.process for result in two.results if result.output is not None}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert children() == before


def test_a_run_is_resumed_with_another_number_of_processes(tmp_path: Path, store: RunStore) -> None:
    config = EvalConfig(stop_on_error=True, max_concurrent=1)
    ended = suite_of(tmp_path, config=config, fails=7).run_sync(store=store)
    assert ended.status == "interrupted"
    report = suite_of(tmp_path, config=EvalConfig(processes=3), fails=7).run_sync(store=store, resume="errors")
    assert (report.status, report.run_id, report.total) == ("finished", ended.run_id, 20)
    calls = counted(str(tmp_path))
    assert calls == {f"s{number}-0": 2 if number == 7 else 1 for number in range(20)}


def test_a_stream_yields_what_the_task_returned(tmp_path: Path) -> None:
    outputs = [result.output for result in suite_of(tmp_path, 4).stream_sync(store="memory:")]
    assert sorted(output.number for output in outputs) == [0, 1, 2, 3]
    assert all(type(output) is Answer for output in outputs)


def test_code_that_cannot_be_imported_is_sent(tmp_path: Path) -> None:
    factor = 3

    class Local:
        def __init__(self, number: int) -> None:
            self.number = number

    dataset = Dataset([Sample(f"s{number}", number, 3 * number) for number in range(6)])
    suite = EvalSuite("local", dataset, lambda n: Local(factor * n).number, exact_match, config=TWO)
    assert suite.run_sync(store="memory:").pass_rate == 1.0


def test_what_exists_in_one_process_only_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:

        def task(number: int) -> int:
            file.write("x")
            return number

        suite = EvalSuite("open", Dataset([Sample("a", 1, 1)]), task, exact_match, config=TWO)
        with pytest.raises(NotSendableError, match=r"(?s)what the processes of suite 'open' need.*use processes=1"):
            suite.run_sync(store="memory:")


@pytest.mark.long
def test_killed_processes_lose_no_trial_and_store_none_twice(tmp_path: Path) -> None:
    seen, ended, before = list[str](), threading.Event(), children()
    processes, killed = set[int](), set[int]()
    draw = random.Random(7)

    def kill_some() -> None:
        while not ended.wait(draw.uniform(0.05, 0.5)) and len(killed) < 12:
            if running := sorted(processes - killed):
                chosen = draw.choice(running)
                killed.add(chosen)
                os.kill(chosen, signal.SIGKILL)

    store = open_store(f"sqlite:///{tmp_path}/runs.db")
    calls = tmp_path / "calls"
    calls.mkdir()
    killer = threading.Thread(target=kill_some)
    killer.start()
    config = EvalConfig(processes=3, max_concurrent=12)
    try:
        for result in suite_of(calls, 1200, config).stream_sync(store=store):
            seen.append(result.sample_id)
            if result.output is not None:
                processes.add(result.output.process)
    finally:
        ended.set()
        killer.join()
    report = EvalReport.load(store, "several")
    assert sorted(seen) == sorted(f"s{number}" for number in range(1200))
    assert (report.status, report.total, report.pass_rate) == ("finished", 1200, 1.0)
    assert len(counted(str(calls))) == 1200
    assert len(killed) >= 3
    assert children() == before


def test_a_trial_that_ends_its_process_fails_alone(tmp_path: Path) -> None:
    report = suite_of(tmp_path, 12, EvalConfig(processes=2, max_concurrent=4), crashes=5).run_sync(store="memory:")
    failed = [result for result in report.results if not result.success]
    assert [result.sample_id for result in failed] == ["s5"]
    assert "crashes its process" in str(failed[0].error)
    assert "signal 9" in str(failed[0].error)
    assert counted(str(tmp_path))["s5-0"] == 3


def test_a_process_that_hangs_is_killed_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LATE_SECONDS", 5.0)
    config = EvalConfig(processes=2, max_concurrent=4, timeout_seconds=2, close_seconds=0.1)
    report = suite_of(tmp_path, 12, config, hangs=5).run_sync(store="memory:")
    failed = {result.sample_id: result.outcome for result in report.results if not result.success}
    assert failed == {"s5": "timeout"}
    assert counted(str(tmp_path))["s5-0"] == 2  # With others, then alone.


def test_processes_share_a_limiter(tmp_path: Path) -> None:
    report = suite_of(tmp_path, 40, EvalConfig(processes=2, max_concurrent=20), several.ask_limited).run_sync(
        store="memory:"
    )
    assert report.pass_rate == 1.0
    times = [tuple(map(float, line.split())) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(times) == 40
    most = max(sum(began <= start < end for began, end in times) for start, _ in times)
    assert most == 2


def test_processes_share_a_budget(tmp_path: Path) -> None:
    config = EvalConfig(processes=2, max_concurrent=2)
    report = suite_of(tmp_path, 40, config, several.ask_budgeted).run_sync(store="memory:")
    # Calls that are under way when the budget is used up: at most one in the other process.
    assert 12 <= report.successful <= 13
    assert all("budget of 12 requests is used up" in str(result.error) for result in report.results if result.error)
    spending: Any = several.budgeted._spending
    assert named_spending(spending.name).of(report.run_id)[1] == report.successful


def test_every_process_has_a_lifespan_which_is_closed(tmp_path: Path) -> None:
    lifespan = partial(several.counted_lifespan, str(tmp_path))
    suite = EvalSuite(
        "lived", several.questions(20), several.shared_folder, several.fine, config=TWO, lifespan=lifespan
    )
    assert suite.run_sync(store="memory:").pass_rate == 1.0
    noted = [name.split() for name in counted(str(tmp_path))]
    opened = {process for what, process in noted if what == "open"}
    assert len(opened) == 2
    assert opened == {process for what, process in noted if what == "close"}
    assert opened == {process for what, process in noted if what == "trial"}


def test_a_lifespan_that_does_not_open_ends_the_run(tmp_path: Path, store: RunStore) -> None:
    def broken() -> contextlib.AbstractContextManager[None]:
        raise OSError("no database")

    suite = EvalSuite("lived", several.questions(4), several.shared_folder, several.fine, config=TWO, lifespan=broken)
    with pytest.raises(IsolatedError, match="could not start: OSError: no database"):
        suite.run_sync(store=store)
    assert store.runs()[0].status == "interrupted"


def test_log_records_of_processes_are_logged_by_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    suite_of(tmp_path, 4, logs=3).run_sync(store="memory:")
    records = [record for record in caplog.records if record.name == "application"]
    assert [record.getMessage() for record in records] == ["number 3 is odd"]
    assert vars(records[0])["trial"].endswith("s3#0")


def test_secrets_that_only_a_process_knows_are_redacted(
    tmp_path: Path, store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    report = suite_of(tmp_path, 3, task=several.tell_secret).run_sync(store=store)
    assert {result.output for result in store.results(report.run_id)} == {"the password is [redacted]"}
    logged = [record for record in caplog.records if record.name == "application"]
    assert [current().text(record.getMessage()) for record in logged] == ["the password is [redacted]"] * 3


@pytest.mark.parametrize("processes", [1, 2])
def test_secrets_that_only_an_isolated_task_knows_are_redacted(
    processes: int, tmp_path: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    monkeypatch.setenv("INHERITED_KEY", "inherited-4711")
    config = EvalConfig(processes=processes, max_retries=0)
    report = suite_of(tmp_path, 6, config, several.tell_isolated).run_sync(store=store)
    results = list(store.results(report.run_id))
    assert [result.output for result in results if result.ordinal != 1] == ["the password is [redacted]"] * 5
    assert "ValueError: the password [redacted] is wrong" in (results[1].error or "")
    assert {result.redacted_parts for result in results} == {("output", "transcript"), ("transcript", "error")}
    if processes == 1:
        assert set(redact._registered) == {"isolated-baseline-baseline"}


def test_a_secret_of_a_lifespan_that_does_not_open_is_redacted(
    tmp_path: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redact, "_registered", {})
    lifespan = several.lifespan_that_fails
    suite = EvalSuite("s", several.questions(4), several.shared_folder, several.fine, config=TWO, lifespan=lifespan)
    with pytest.raises(Exception, match="the password lifespan-of-failures is wrong") as raised:
        suite.run_sync(store=store)
    assert "the password [redacted] is wrong" in current().text(str(raised.value))


def test_outputs_are_scored_again_by_processes(tmp_path: Path, store: RunStore) -> None:
    suite = suite_of(tmp_path, 6)
    run = suite.run_sync(store=store)
    report = suite.rescore_sync(run.run_id, several.scored_elsewhere, store=store)
    assert report.total == 6
    assert all(result.score is not None and int(result.score.reason) != os.getpid() for result in report.results)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_run_ends_its_processes(tmp_path: Path) -> None:
    before = children()
    with anyio.move_on_after(4) as scope:
        await suite_of(tmp_path, 20, seconds=30).run(store="memory:")
    assert scope.cancelled_caught
    wait_until(lambda: children() == before)


def test_processes_need_asyncio(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EvalConfig\.processes needs asyncio"):
        anyio.run(lambda: suite_of(tmp_path, 2).run(store="memory:"), backend="trio")


def test_the_number_of_processes_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"EvalConfig\.processes must be a whole number of at least 1"):
        EvalConfig(processes=0)


def send_spans(number: int, ctx: TrialContext) -> str:
    app = App(ctx.trace_endpoint, ctx.traceparent)
    app.send(*app.whole())
    return "snow"


def test_the_run_receives_the_traces_of_all_processes() -> None:
    receiver = TraceReceiver(trace_wait_seconds=60)
    dataset = Dataset([Sample(f"s{number}", number, "snow") for number in range(8)], name="questions")
    suite = EvalSuite("traced", dataset, send_spans, tool_called("weather"), config=TWO, traces=receiver)
    report = suite.run_sync(store="memory:")
    assert [str(result.error) for result in report.results if not result.success] == []
    assert report.pass_rate == 1.0
    assert receiver.endpoint == ""


def test_spans_of_tasks_are_collected_where_they_are_recorded() -> None:
    report = several_traced.suite_with(several_traced.processor).run_sync(store="memory:")
    assert [str(result.error) for result in report.results if not result.success] == []
    assert report.pass_rate == 1.0
    with pytest.raises(ConfigurationError, match=r"must be a variable of a module that each of them can import"):
        several_traced.suite_with(TrialSpanProcessor()).run_sync(store="memory:")


PROGRAM = """
import os, sys, time
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, exact_match

LOG, MODE = sys.argv[1:3]

def task(number):
    with open(LOG, "ab", buffering=0) as log:
        log.write(f"{os.getpid()}\\n".encode())
    if MODE == "busy":
        while True:
            sum(range(10 ** 9))  # Holds the interpreter lock for seconds.
    time.sleep(0.2 if MODE == "short" else 600)
    return number

dataset = Dataset([Sample(f"s{number}", number, number) for number in range(40)], name="numbers")
config = EvalConfig(processes=2, max_concurrent=4, grace_seconds=20 if MODE == "short" else 600)
report = EvalSuite("program", dataset, task, exact_match, config=config).run_sync(store=LOG + ".db")
print(report.status, report.total)
"""


class Program:
    """A run in a program that is not protected by `if __name__ == "__main__"`."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.log = folder / "log"
        self.script = folder / "program.py"
        self.script.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, str(self.script), str(self.log), mode], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def processes(self) -> set[int]:
        return set(map(int, self.log.read_text().split())) if self.log.exists() else set()

    def wait_for_processes(self) -> set[int]:
        wait_until(lambda: len(self.processes()) == 2)
        return self.processes()


def wait_until(check: Callable[[], bool], seconds: float = 50.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("mode", ["slow", "busy"])
def test_no_process_outlives_a_run_that_was_killed(tmp_path: Path, mode: str) -> None:
    program = Program(tmp_path, mode)
    processes = program.wait_for_processes()
    program.process.kill()
    program.process.communicate()
    wait_until(lambda: not any(map(is_running, processes)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_drains_and_is_resumed(tmp_path: Path, number: signal.Signals) -> None:
    program = Program(tmp_path, "short")
    processes = program.wait_for_processes()
    program.process.send_signal(number)
    _, errors = program.process.communicate(timeout=50)
    assert "the run was interrupted; its results are stored" in errors
    assert not any(map(is_running, processes))
    calls = len(program.log.read_text().split())
    store = open_store(f"sqlite:///{tmp_path}/log.db")
    run = store.runs()[0]
    assert run.status == "interrupted"
    assert sum(byte.bit_count() for byte in store.done(run.run_id)) == calls < 40  # Those in flight ended.
    again = Program(tmp_path, "short")
    assert again.process.communicate(timeout=50)[0] == "finished 40\n"
    assert len(program.log.read_text().split()) == 40


def test_a_second_interrupt_cancels_what_is_in_flight(tmp_path: Path) -> None:
    program = Program(tmp_path, "slow")
    processes = program.wait_for_processes()
    program.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    program.process.send_signal(signal.SIGINT)
    program.process.communicate(timeout=50)
    assert not any(map(is_running, processes))
