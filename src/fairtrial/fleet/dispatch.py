"""A run carried out by a fleet: opened, dispatched, and its mailboxes tidied away."""

from __future__ import annotations

import anyio

from fairtrial.backoff import retry_while_unavailable
from fairtrial.errors import ConfigurationError, MailboxError
from fairtrial.fleet.dispatcher import Dispatch, DispatchConfig
from fairtrial.fleet.log import log
from fairtrial.fleet.post import PostOffice
from fairtrial.offload import on_trio
from fairtrial.runs.runner import Interrupt, OnResult, OpenRun, RunRequest, carry_out
from fairtrial.store.protocol import RunRecord

__all__ = ["DispatchConfig", "dispatch_run"]


async def dispatch_run(
    request: RunRequest,
    office: PostOffice,
    *,
    fingerprint: str = "",
    interrupt: Interrupt | None = None,
    on_result: OnResult | None = None,
    config: DispatchConfig | None = None,
) -> RunRecord:
    """Carry out a run by the workers behind a post office; resumes like any other run."""
    if on_trio():
        raise ConfigurationError("a fleet needs asyncio: run this suite under it, or without a mailbox")
    settings = config or DispatchConfig()
    if request.config.warmup:
        log.warning("warmup=%d is left out: a fleet's workers come and go, and begin cold", request.config.warmup)

    async def carry(work: OpenRun) -> None:
        suite, run_id = work.request.suite, work.run.run_id
        opening = f"opening the mailboxes of {suite!r}"
        seconds = settings.open_seconds
        requests = await retry_while_unavailable(lambda: office.requests(suite), opening, log, seconds=seconds)
        results = await retry_while_unavailable(lambda: office.results(suite, run_id), opening, log, seconds=seconds)
        complete = False
        try:
            dispatch = Dispatch(work, requests, results, fingerprint, settings)
            complete = await dispatch.run()
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await office.leave(requests)
                    await (office.retire(results) if complete else office.leave(results))
                except MailboxError as error:
                    log.warning("the mailbox of run %s could not be tidied away: %s", run_id, error)

    return await carry_out(request, carry, interrupt=interrupt, on_result=on_result)
