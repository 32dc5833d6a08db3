"""A process that works on the trials of one suite: `python -m fairtrial.suites.worker SUITE --mailbox URL`.

The suite comes from the command line of this process, never from a message. What arrives is data: which sample, which
experiment, which run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from fairtrial.data.dataset import Dataset
from fairtrial.errors import ConfigurationError, FairtrialError
from fairtrial.fleet.config import EvalLoopConfig
from fairtrial.fleet.eval_loop import EvalLoop
from fairtrial.fleet.group import LoopGroup
from fairtrial.fleet.isolated import ExecuteInChild, emit_answers
from fairtrial.fleet.post import PostOffice, open_post_office
from fairtrial.fleet.supervise import Bound
from fairtrial.fleet.watchdog import InterpreterWatchdog
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.isolation.child import emit
from fairtrial.logs import start_logging
from fairtrial.mailbox.claim_check import ClaimCheck
from fairtrial.mailbox.memory import InMemoryMailbox
from fairtrial.mailbox.protocol import Mailbox
from fairtrial.offload import DaemonThreads
from fairtrial.runs.identity import identify
from fairtrial.runs.runner import open_lifespan
from fairtrial.store import open_store
from fairtrial.store.protocol import RunStore
from fairtrial.suites.loading import load_suite
from fairtrial.suites.suite import EvalSuite

_log = logging.getLogger("fairtrial.fleet")
_LOOKED_AT = 1000


async def run_worker(
    suite: EvalSuite | str,
    mailbox: PostOffice | str,
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
    """Work on a suite's trials until told to stop; returns the loop, whose counters say what was done.

    Args:
        suite: The suite, or where it is: `evals/support.py`, `package.module:name`. Named by where it is, trials that
            may have killed a worker are run in a child process that loads the suite from there; else the task and the
            evaluator are sent to it.
        mailbox: Where the work comes from, such as `redis://host:6379`.
        config: Settings of the loop; concurrency is the suite's `max_concurrent` unless they are given. The
            fingerprint is filled in here.
        store: Write results straight into this store, not into the mailbox of the client that asked for them.
        claim_check: Where bodies over 64 KB are kept: a folder that clients and workers share.
        name: What results call this worker.
        until_empty: End when there is nothing left to do.
        max_iterations: End after so many receives.
        signals: Whether SIGTERM and SIGINT mean: finish what is in flight, then end. A second one hands it back. Such
            a worker is the main thing of its process, which is killed if its interpreter stalls for as long as a lease.
        health_port: Where to answer `/live`, `/ready`, `/health` and `/metrics`; nowhere unless given.
        health_host: The interface to answer on.
        started: Called with the loop before it runs, by those who want to stop or watch it.
    """
    chosen = load_suite(suite) if isinstance(suite, str) else suite
    office = open_post_office(mailbox, claim_check=claim_check) if isinstance(mailbox, str) else mailbox
    results = open_store(store) if isinstance(store, str) else store
    threads = DaemonThreads()
    try:
        async with open_lifespan(chosen.lifespan) as shared:
            requests = await office.requests(chosen.name)
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
            if not signals and health_port is None:
                await loop.run(max_iterations=max_iterations, until_empty=until_empty)
            else:
                with InterpreterWatchdog(loop.config.lease_seconds) if signals else nullcontext():
                    await _supervised(loop, requests, max_iterations, until_empty, health_port, health_host)
            await office.leave(requests)
            return loop
    finally:
        threads.close()
        if office is not mailbox:
            await office.close()
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
    """The loop that works on a suite's trials."""
    request = suite.prepared()
    settings = config or EvalLoopConfig(concurrency=suite.config.max_concurrent)
    input_type, expected_type = types_of(suite.dataset)
    return EvalLoop(
        requests=requests,
        rules=replace(request.rules, shared=shared, threads=threads or DaemonThreads()),
        results=results,
        config=replace(settings, fingerprint=settings.fingerprint or identify(request, samples=False).fingerprint),
        input_type=input_type,
        expected_type=expected_type,
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
    """A suspected trial could not even begin, so it is not what ended its process."""


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
        traceback.print_exc()  # The trial is done, and its result must not be lost by this.


def types_of(dataset: Dataset[Any, Any]) -> tuple[Any, Any]:
    """What the inputs and expected values of a dataset are: as it was loaded, or as its samples are.

    A dataset made in code does not say; its samples are records of one type, if of any.
    """
    kinds = []
    for said, name in ((dataset.input_type, "input"), (dataset.expected_type, "expected")):
        if said is object:
            seen = {type(getattr(sample, name)) for sample in islice(dataset, _LOOKED_AT)} - {type(None)}
            only = next(iter(seen)) if len(seen) == 1 else object
            # Containers lose the types of what is in them; as plain JSON they arrive as they were.
            said = object if only in (dict, list, tuple, set, frozenset) else only
        kinds.append(said)
    return kinds[0], kinds[1]


async def _supervised(
    loop: EvalLoop,
    requests: Mailbox[Any],
    max_iterations: int | None,
    until_empty: bool,
    health_port: int | None,
    health_host: str,
) -> None:
    """Run the loop as the main thing of a process: restarted, drained by signals, watched, probed."""
    bound = Bound(loop, lambda: loop.run(max_iterations=max_iterations, until_empty=until_empty))
    group = LoopGroup(
        {loop.name: bound}, health_port=health_port, health_host=health_host, watch={requests.name: requests}
    )
    await group.run()
    if group.hurried:
        raise asyncio.CancelledError


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m fairtrial.suites.worker", description="Work on the trials of a suite."
    )
    made.add_argument("suite", help="path/to/file.py or package.module, with :name if it has several suites")
    made.add_argument(
        "--mailbox",
        default=os.environ.get("FAIRTRIAL_MAILBOX"),
        help="where the work comes from: redis://host:port (or FAIRTRIAL_MAILBOX)",
    )
    made.add_argument("--concurrency", type=int, help="trials at once; the suite's max_concurrent unless given")
    made.add_argument("--store", help="write results straight into this store, not back to the client")
    made.add_argument("--claim-check", metavar="FOLDER", help="the shared folder for bodies over 64 KB")
    made.add_argument("--lease", type=float, default=60.0, metavar="SECONDS", help="lease of a request; it is renewed")
    made.add_argument("--drain", type=float, default=30.0, metavar="SECONDS", help="how long to finish after SIGTERM")
    made.add_argument(
        "--isolated-processes", type=int, default=4, metavar="N", help="child processes for suspected poison messages"
    )
    made.add_argument("--allow-drift", action="store_true", help="also run requests made from other code")
    made.add_argument("--until-empty", action="store_true", help="end when there is nothing left to do")
    made.add_argument("--name", help="what results call this worker")
    made.add_argument(
        "--log-format", choices=("text", "json"), default=os.environ.get("FAIRTRIAL_LOG_FORMAT") or "text",
        help="json: one object a line, with the ids of run and trial (or FAIRTRIAL_LOG_FORMAT)",
    )  # fmt: skip
    made.add_argument("--health-port", type=int, metavar="PORT", help="answer /health and /metrics here")
    made.add_argument("--health-host", default="127.0.0.1", metavar="HOST", help="the interface to answer on")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; 0 after a clean drain."""
    options = parser().parse_args(arguments)
    stop_logging = start_logging(options.log_format, logging.INFO)
    try:
        if not options.mailbox:
            raise ConfigurationError("say where the work comes from: --mailbox redis://host:port")
        suite = load_suite(options.suite)
        config = EvalLoopConfig(
            concurrency=options.concurrency or suite.config.max_concurrent,
            lease_seconds=options.lease,
            drain_seconds=options.drain,
            allow_drift=options.allow_drift,
            isolated_processes=options.isolated_processes,
        )
        asyncio.run(
            run_worker(
                options.suite,
                options.mailbox,
                config=config,
                store=options.store,
                claim_check=ClaimCheck(options.claim_check) if options.claim_check else None,
                name=options.name,
                until_empty=options.until_empty,
                signals=True,
                health_port=options.health_port,
                health_host=options.health_host,
            )
        )
    except FairtrialError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    finally:
        stop_logging()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
