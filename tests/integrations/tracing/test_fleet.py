"""Traces on a fleet: every worker has a receiver of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from fairtrial import Dataset, EvalReport, EvalSuite, Sample, ToolInvoked, TrialContext, open_store, tool_called
from fairtrial.fleet import EvalLoop, EvalLoopConfig, MemoryBroker
from fairtrial.integrations.tracing import TraceReceiver
from fairtrial.suites.worker import run_worker
from fairtrial.trials import EvalConfig
from tests.integrations.tracing.traced_app import App
from tests.redis_server import RedisServer


def suite() -> EvalSuite:
    async def ask(number: int, ctx: TrialContext) -> str:
        app = App(ctx.trace_endpoint, ctx.traceparent)
        await asyncio.to_thread(app.send, *app.whole())
        return ctx.trace_endpoint

    samples: Dataset[int, None] = Dataset([Sample(f"s{n}", n) for n in range(40)], name="questions")
    config = EvalConfig(max_concurrent=2)
    receiver = TraceReceiver(trace_wait_seconds=120.0)
    return EvalSuite("forecast", samples, ask, tool_called("weather"), config=config, version="1", traces=receiver)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_two_workers_receive_the_traces_of_their_own_trials() -> None:
    broker = MemoryBroker()
    loops: list[EvalLoop] = []
    suites = [suite(), suite()]
    config = EvalLoopConfig(concurrency=2)
    workers = [
        asyncio.create_task(run_worker(each, broker, config=config, name=f"w{number}", started=loops.append))
        for number, each in enumerate(suites)
    ]
    report = await suite().run(store="memory:", mailbox=broker)
    for loop in loops:
        loop.stop()
    await asyncio.gather(*workers)
    assert (report.successful, report.pass_rate) == (40, 1.0)
    results = list(report.results)
    assert all([call.name for call in result.session[ToolInvoked].all()] == ["weather"] for result in results)
    endpoints = {result.output for result in results}
    assert len(endpoints) == 2
    received = [each.traces.counts.spans for each in suites if isinstance(each.traces, TraceReceiver)]
    assert (sum(received), min(received) > 0) == (120, True)


EVALS = """
import time
from pathlib import Path
from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, TrialContext, tool_called
from fairtrial.integrations.tracing import TraceReceiver
from tests.integrations.tracing.traced_app import App

def ask(number: int, ctx: TrialContext) -> str:
    # The first trial of a worker waits for the first one of the other, so that both take part.
    port = ctx.trace_endpoint.rpartition(":")[2]
    Path(f"worker-{port}").touch()
    while len(list(Path().glob("worker-*"))) < 2:
        time.sleep(0.02)
    app = App(ctx.trace_endpoint, ctx.traceparent)
    app.send(*app.whole())
    return ctx.trace_endpoint

samples = Dataset([Sample(f"s{n}", n) for n in range(16)], name="questions")
suite = EvalSuite("forecast", samples, ask, tool_called("weather"), config=EvalConfig(max_concurrent=2),
                  version="1", traces=TraceReceiver(trace_wait_seconds=120.0))
"""


@pytest.mark.long
def test_two_worker_processes_over_redis_each_receive_the_traces_of_their_own_trials(tmp_path: Path) -> None:
    (tmp_path / "evals.py").write_text(EVALS)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "fairtrial.cli"]

    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path / "redis"))
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "worker", "evals.py", "--mailbox", redis.url, "--name", f"w{number}"],
                    cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
                )
            )
            for number in range(2)
        ]  # fmt: skip
        try:
            done = subprocess.run(
                [*command, "run", "evals.py", "--mailbox", redis.url, "--store", "runs.db", "--quiet"],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            logs = [worker.communicate(timeout=120)[1] for worker in workers]
    assert done.stdout == "forecast@1:baseline  pass rate 100.0%, 16 scored, 0 errors\n", (done.stderr, logs)
    store = open_store(str(tmp_path / "runs.db"))
    (run,) = store.runs()
    results = list(EvalReport(store, run).results)
    assert len({result.output for result in results}) == 2
    for result in results:
        assert [call.name for call in result.session[ToolInvoked].all()] == ["weather"]
        assert result.usage.total_tokens == 35
    store.close()
