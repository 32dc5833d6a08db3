"""Traces on a fleet: every worker has a receiver of its own."""

from __future__ import annotations

import asyncio

import pytest

from fairtrial import Dataset, EvalConfig, EvalSuite, Sample, ToolInvoked, TrialContext, tool_called
from fairtrial.fleet import EvalLoop, EvalLoopConfig, MemoryBroker
from fairtrial.suites.worker import run_worker
from fairtrial.tracing import TraceReceiver
from tests.tracing.test_receive import App


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


@pytest.mark.anyio
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
