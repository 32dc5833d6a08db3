"""Opens the run that a request describes, once its store can be reached."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import anyio

from fairtrial.base.offload import in_thread
from fairtrial.errors import RunBusyError
from fairtrial.runs import run_lease
from fairtrial.runs.adaptive import refuse_clusters
from fairtrial.runs.costs import check_inputs, check_prices
from fairtrial.runs.events import log
from fairtrial.runs.identity import ResumedRun, describe_run, identify, open_run
from fairtrial.runs.request import RunRequest
from fairtrial.runs.writer import ask_store
from fairtrial.store.protocol import RunRecord
from fairtrial.store.redact import current
from fairtrial.store.rows import refuse_secrets

_CHECKED_FIRST = 1000  # Samples searched for secrets before the run is opened; the others when they are read.
_POLL_SECONDS = 1.0

type Opening = Callable[[RunRequest], ResumedRun]


async def open_requested(request: RunRequest, opening: Opening | None = None) -> ResumedRun:
    """Create or resume a run: by `opening`, or else as the request describes."""
    if opening is not None:
        return await ask_store(lambda: opening(request), "opening the run")
    wanted = await in_thread(lambda: _describe(request))  # Once: a repeated attempt must not create a second run.
    return await ask_store(
        lambda: open_run(
            request.store,
            wanted,
            fresh=request.fresh,
            retry_errors=request.retry_errors,
            run_id=request.run_id,
            force=request.force,
            code=request.code,
        ),
        "opening the run",
    )


def _describe(request: RunRequest) -> RunRecord:
    check_prices(request.config, request.rules)
    check_inputs(request.rules, request.dataset)
    refuse_clusters(request.config, request.dataset)
    redactor = current()
    for ordinal, sample in enumerate(islice(request.dataset, _CHECKED_FIRST)):
        refuse_secrets(redactor, sample, ordinal)
    identity = identify(request)
    return describe_run(
        identity, request.experiments, request.config, tags=request.tags, once=request.once, plan=request.plan
    )


async def wait_for_other(
    request: RunRequest, run: RunRecord, error: RunBusyError, interrupted: Callable[[], bool]
) -> None:
    """Wait until no other process executes a run with the same key; raises `error` if that is interrupted."""
    log.warning("run %s has the same key and is being executed by another process: waiting for its end", run.run_id)
    while await ask_store(lambda: run_lease.active_owner(request.store, run.run_id), "reading the run") is not None:
        if interrupted():
            raise error
        await anyio.sleep(_POLL_SECONDS)
