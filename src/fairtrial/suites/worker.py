"""A worker process for the trials of one suite, as `fairtrial worker` starts it.

The suite is named on the command line, never by a message. Messages contain only data: the sample, the
experiment and the run.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from fairtrial.base.garbage import fewer_collections
from fairtrial.base.isolation.child import emit
from fairtrial.base.offload import DaemonThreads
from fairtrial.base.system import require_posix
from fairtrial.errors import ConfigurationError
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.fleet.ops.group import LoopGroup
from fairtrial.fleet.ops.supervise import Bound
from fairtrial.fleet.ops.watchdog import InterpreterWatchdog
from fairtrial.fleet.queues import Broker, connect_broker
from fairtrial.fleet.worker.config import EvalLoopConfig
from fairtrial.fleet.worker.eval_loop import EvalLoop
from fairtrial.fleet.worker.execution import ExecuteInChild, emit_answers
from fairtrial.mailbox.body import ClaimCheck
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.runs.executor import open_lifespan, receive_traces
from fairtrial.runs.identity import identify
from fairtrial.store import open_store
from fairtrial.store.protocol import RunStore
from fairtrial.suites.loading import load_suite
from fairtrial.suites.suite import EvalSuite

_log = logging.getLogger("fairtrial.fleet")


async def run_worker(
    suite: EvalSuite | str,
    mailbox: Broker | str,
    *,
    config: EvalLoopConfig | None = None,
    store: RunStore | str | None = None,
    claim_check: ClaimCheck | None = None,
    name: str | None = None,
    until_empty: bool = False,
    max_iterations: int | None = None,
    signals: bool = False,
    health_port: int | None = None,
    health_host: str = "127.0.0.1",
    started: Callable[[EvalLoop], None] | None = None,
) -> EvalLoop:
    """Execute a suite's trials until stopped; returns the loop with its counters.

    Args:
        suite: The suite, or its import string: `evals/support.py`, `package.module:name`. With an import string, trials
            that may have killed a worker are executed in a child process that loads the suite from there; otherwise
            the task and the evaluator are sent to the child process.
        mailbox: The broker with the requests, such as `redis://host:6379` or `postgresql://host/database`.
        config: Settings of the loop; without them, concurrency is the suite's `max_concurrent`. The fingerprint is
            always set here.
        store: Write results directly to this store instead of sending them to the client.
        claim_check: A folder shared by clients and workers for bodies over 64 KB.
        name: The name of this worker in results.
        until_empty: Stop when there have been no more requests for `config.empty_seconds`.
        max_iterations: Stop after this many receives.
        signals: Handle SIGTERM and SIGINT: the first stops the worker after the trials in flight, the second hands
            those trials back. The process is then also killed if its interpreter stalls for as long as a lease.
        health_port: The port for `/live`, `/ready`, `/health` and `/metrics`; by default there is none.
        health_host: The network interface for `health_port`.
        started: Called with the loop before it starts.
    """
    if signals:
        require_posix("a worker process runs", "start it there, or in a Linux of Windows (WSL 2)")
    chosen = load_suite(suite) if isinstance(suite, str) else suite
    broker = connect_broker(mailbox, claim_check=claim_check) if isinstance(mailbox, str) else mailbox
    results = open_store(store) if isinstance(store, str) else store
    threads = DaemonThreads()
    try:
        async with open_lifespan(chosen.lifespan) as shared, receive_traces(chosen.traces):
            requests = await broker.requests(chosen.name)
            loop = make_loop(
                chosen,
                requests,
                config=config,
                shared=shared,
                threads=threads,
                results=results,
                isolated=partial(execute_suspects, suite) if isinstance(suite, str) else None,
                name=name,
            )
            _log.info("worker %s takes work of suite %r from %s", loop.name, chosen.name, requests.name)
            if started is not None:
                started(loop)
            with fewer_collections():
                if not signals and health_port is None:
                    await loop.run(max_iterations=max_iterations, until_empty=until_empty)
                else:
                    with InterpreterWatchdog(loop.config.lease_seconds) if signals else nullcontext():
                        await _supervised(loop, requests, max_iterations, until_empty, health_port, health_host)
            await broker.leave(requests)
            return loop
    finally:
        threads.close()
        if broker is not mailbox:
            await broker.close()
        if results is not None and results is not store:
            results.close()


def make_loop(
    suite: EvalSuite,
    requests: Mailbox[Any],
    *,
    config: EvalLoopConfig | None = None,
    shared: Any = None,
    threads: DaemonThreads | None = None,
    results: RunStore | None = None,
    isolated: ExecuteInChild | None = None,
    name: str | None = None,
) -> EvalLoop:
    """Create the loop that executes a suite's trials."""
    request = suite.prepared()
    settings = config or EvalLoopConfig(concurrency=suite.config.max_concurrent)
    dataset = suite.dataset
    return EvalLoop(
        requests=requests,
        rules=replace(request.rules, shared=shared, threads=threads or DaemonThreads()),
        results=results,
        config=replace(settings, fingerprint=settings.fingerprint or identify(request, samples=False).fingerprint),
        input_type=None if dataset.input_type is object else dataset.input_type,
        expected_type=None if dataset.expected_type is object else dataset.expected_type,
        dataset=dataset,
        isolated=isolated,
        name=name,
    )


def execute_suspects(suite: str, requests: Sequence[bytes]) -> None:
    """Execute requests of a suite in a child process, with a lifespan of its own."""
    try:
        loaded = load_suite(suite)
    except ConfigurationError as error:  # Code on disk may have changed since the worker started.
        raise NotStartedError(f"the child process for a suspected trial could not begin: {error}") from error
    asyncio.run(execute_requests(loaded, requests))


class NotStartedError(Exception):
    """A suspected trial could not start, so it did not cause the end of its process."""


async def execute_requests(suite: EvalSuite, requests: Sequence[bytes], send: Callable[[Any], None] = emit) -> None:
    """Execute and score requests of a suite, with a lifespan of its own, and send each reply.

    Raises:
        NotStartedError: the suite's lifespan does not open.
    """
    async with AsyncExitStack() as stack:
        lifespan = open_lifespan(suite.lifespan)
        try:
            shared = await lifespan.__aenter__()
        except Exception as error:
            text = f"the suite's lifespan does not open: {error!r}"
            raise NotStartedError(f"the child process for a suspected trial could not begin: {text}") from error
        stack.push_async_callback(_close_lifespan, lifespan)
        await stack.enter_async_context(receive_traces(suite.traces))
        loop = make_loop(suite, InMemoryMailbox("isolated", EvalRequest), shared=shared)

        async def execute(data: bytes) -> bytes:
            request = EvalRequest.from_wire(data)
            result = await loop.execute(request)
            return EvalReply(result, request.sample_ordinal, None, request.request_id, loop.name).to_wire()

        await emit_answers(execute, requests, send)


async def _close_lifespan(lifespan: AbstractAsyncContextManager[Any]) -> None:
    try:
        await lifespan.__aexit__(None, None, None)
    except Exception:
        traceback.print_exc()  # The trial is done: this error must not discard its result.


async def _supervised(
    loop: EvalLoop,
    requests: Mailbox[Any],
    max_iterations: int | None,
    until_empty: bool,
    health_port: int | None,
    health_host: str,
) -> None:
    """Run the loop with restarts, signal handlers, the watchdog and health checks."""
    bound = Bound(loop, lambda: loop.run(max_iterations=max_iterations, until_empty=until_empty))
    group = LoopGroup(
        {loop.name: bound}, health_port=health_port, health_host=health_host, watch={requests.name: requests}
    )
    await group.run()
    if group.hurried:
        raise asyncio.CancelledError
