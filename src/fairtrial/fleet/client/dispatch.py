"""Executes a run on a fleet: windowed submission, collection of results, recovery of lost requests.

The store is authoritative; the mailboxes only transport. Each part keeps its own state: `Submission` the requests sent,
`ResultReceivers` the results, `CommittedResults` those that workers store themselves, `Recovery` the lost requests,
`Silence` the time without results. `Dispatch` decides which of them acts next.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.offload import finish, require_asyncio
from fairtrial.errors import MailboxConnectionError, MailboxError, MailboxFullError
from fairtrial.fleet.client.fleet_run import (
    DispatchConfig,
    FleetRun,
    RunOwnership,
    Wakeup,
    find_shared_database,
    log,
    raise_if_cancelled,
)
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.results import CommittedResults, ResultReceivers, StoredResults
from fairtrial.fleet.client.silence import Silence
from fairtrial.fleet.client.submission import (
    ResultCommitter,
    StoredCursor,
    Submission,
    acknowledge,
    count_requests,
    hand_back,
)
from fairtrial.fleet.messages import EvalRequest
from fairtrial.fleet.queues import Broker
from fairtrial.mailbox import server as bulk
from fairtrial.mailbox.protocol import MailboxDepth, Message
from fairtrial.runs.plan import RunRequest
from fairtrial.runs.retries import RetrySet
from fairtrial.runs.runner import Interrupt, OnResult, OpenRun, run_to_end
from fairtrial.runs.scheduler import Limits, run_trials, unwrap_error_groups
from fairtrial.runs.writer import Writer
from fairtrial.store.protocol import RunRecord

__all__ = ["DispatchConfig", "dispatch_run"]

_LONGEST_PAUSE = 1.0


async def dispatch_run(
    request: RunRequest,
    broker: Broker,
    *,
    fingerprint: str = "",
    interrupt: Interrupt | None = None,
    on_result: OnResult | None = None,
    config: DispatchConfig | None = None,
) -> RunRecord:
    """Execute a run on the workers of a broker, with the usual rules for resuming."""
    require_asyncio("a fleet", "run this suite under it, or without a mailbox")
    settings = config or DispatchConfig()
    if request.config.warmup:
        log.warning(
            "warmup=%d has no effect on a fleet: workers start at any time, without warm-up", request.config.warmup
        )
    if request.config.processes > 1:
        log.warning(
            "processes=%d has no effect on a fleet: start one worker for each processor", request.config.processes
        )

    async def execute(work: OpenRun) -> None:
        # In a separate task, which is cancelled once, however often the caller is.
        await finish(_dispatch(work, broker, fingerprint, settings), cancel=True)

    return await run_to_end(request, execute, interrupt=interrupt, on_result=on_result)


async def _dispatch(work: OpenRun, broker: Broker, fingerprint: str, config: DispatchConfig) -> None:
    """Open the mailboxes of a run and dispatch it; then close them, and delete the run's own if it is complete."""
    suite, run_id = work.request.suite, work.run.run_id
    opening, seconds = f"opening the mailboxes of {suite!r}", config.open_seconds
    requests = await retry_while_unavailable(lambda: broker.requests(suite), opening, log, seconds=seconds)
    results = await retry_while_unavailable(lambda: broker.results(suite, run_id), opening, log, seconds=seconds)
    complete = False
    try:
        shared = await find_shared_database(broker, work.request.store) if config.one_transaction else None
        dispatch = await open_dispatch(FleetRun(work, requests, results, fingerprint, config, shared))
        complete = await dispatch.run()
    finally:
        try:
            await broker.leave(requests)
            await (broker.retire(results) if complete else broker.leave(results))
        except MailboxError as error:
            log.warning("the mailbox of run %s could not be deleted: %s", run_id, error)


async def open_dispatch(fleet: FleetRun) -> Dispatch:
    """Acquire the run, score stored outputs, and read the progress of earlier clients."""
    ownership = RunOwnership(fleet)
    await ownership.acquire()
    work, request = fleet.work, fleet.work.request
    done = await work.done()
    retries = await fleet.ask_store(
        lambda: RetrySet(
            request.store, request.dataset, fleet.run, request.rules, retry_errors=request.resume.retry_errors
        )
    )
    await work.follow(retries.ordinals, window=fleet.config.ahead)
    limits = await work.start(retries.costs())
    if retries.to_score:
        await _score_stored_outputs(fleet, retries, limits)
    attempts = await fleet.ask_store(retries.attempts)
    cursor = await StoredCursor.load(fleet)
    if cursor.is_stale:
        await withdraw_requests(fleet, stale_only=True)
    ledger = Ledger(fleet.run, request.dataset, done, cursor=cursor.position, attempts=attempts)
    return Dispatch(fleet, ownership, ledger, cursor, ResultCommitter(fleet, ledger, retries, limits))


async def _score_stored_outputs(fleet: FleetRun, retries: RetrySet, limits: Limits) -> None:
    """Score stored outputs in this process: the task is not called again, so no worker is needed."""
    work, config = fleet.work, fleet.work.request.config
    work.writer = Writer(fleet.store, fleet.run_id, epoch=work.epoch)
    await run_trials(
        retries.trials(only_score=True),
        retries.score,
        work.writer,
        workers=min(config.max_concurrent, len(retries.to_score)),
        stop=fleet.stop,
        limits=limits,
        observers=fleet.observers,
        grace_seconds=config.grace_seconds,
        on_result=work.on_result,
    )
    await work.writer.close()
    work.writer = None


class Dispatch:
    """The execution of one run on a fleet: submitting, then stopping if requested, then ending."""

    def __init__(
        self,
        fleet: FleetRun,
        ownership: RunOwnership,
        ledger: Ledger,
        cursor: StoredCursor,
        committer: ResultCommitter,
    ) -> None:
        self._fleet = fleet
        self._ownership = ownership
        self._ledger = ledger
        self._resumed = cursor.is_found
        self._wakeup = Wakeup()
        self._silence = Silence(fleet)
        self._submission = Submission(fleet, ledger, cursor, committer)
        self._lanes = ResultReceivers(fleet, ledger, committer, self._silence, self._wakeup)
        self._stored = stored = StoredResults(fleet, ledger, committer, self._silence)
        self._committed = CommittedResults(fleet, stored, self._wakeup)
        self._recovery = Recovery(
            fleet, ledger, self._submission, committer, self._silence, stored, stale=cursor.is_stale
        )
        self._looked = 0.0
        self._pause_seconds = 0.0

    async def run(self) -> bool:
        """Execute the run; returns whether every trial has a result."""
        with unwrap_error_groups():
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_stop())
                self._lanes.start(group)
                self._committed.start(group)
                try:
                    await self._submit()
                except (MailboxConnectionError, MailboxFullError):
                    if not self._fleet.is_stopped():
                        raise  # Otherwise the run was stopped while the server is unavailable: do not wait for it.
                if self._fleet.is_stopped():
                    await self._stop()
                self._lanes.close()
                self._committed.close()
                watching.cancel()
        await self._ownership.acquire(ending=True)
        complete = self._ledger.missing == 0
        if complete:
            await self._lanes.drain()
            if self._resumed or self._recovery.resent:
                await self._withdraw()  # Requests may have been sent twice: remove the remaining duplicates.
        return complete

    async def _submit(self) -> None:
        """Send the missing trials and monitor them until every trial has a result or the run is stopped."""
        config, recovery = self._fleet.config, self._recovery
        turned = time.monotonic()
        while not self._fleet.is_stopped():
            raise_if_cancelled()
            now = time.monotonic()
            if now - turned > config.recovery_seconds:
                await self._stored.read()  # This process was frozen: another client may have continued the run.
            turned = now
            if self._ledger.missing == 0 and not await recovery.resend_vanished():
                return
            if await self._submission.send_next():
                continue
            self._submission.end_stopped()
            pause = self._looked + max(self._submission.poll_seconds, self._pause_seconds) - time.monotonic()
            if pause <= 0:
                await self._look()
            else:
                await self._wakeup.pause(pause)

    async def _look(self) -> None:
        """Check the mailboxes: adjust the window, look for lost requests and for workers."""
        fleet = self._fleet
        began = time.monotonic()
        depth = await fleet.ask_mailbox(fleet.requests.depth, "looking at the requests")
        if fleet.clear_store_failure():
            await self._recovery.resend_vanished()
        now = self._looked = time.monotonic()
        coming = await fleet.ask_mailbox(fleet.results.approximate_count, "looking at the results")
        # Counting takes long where a snapshot keeps settled messages from being vacuumed: then look less often.
        self._pause_seconds = min(_LONGEST_PAUSE, 3 * (time.monotonic() - began))
        self._submission.adjust_window(depth, coming)
        self._silence.note_depth(depth)
        self._show_progress(depth)
        look = self._ledger.outstanding > 0 and self._silence.is_worth_a_look(now)
        hint_due = self._silence.is_worth_a_hint(now)
        await self._recovery.look(depth, now)  # Restarts the silence if it resends anything.
        if look:
            await self._silence.look_for_workers(depth, hint_due=hint_due)
        await self._ownership.renew_if_due(now)

    def _show_progress(self, depth: MailboxDepth) -> None:
        if (progress := self._fleet.work.progress) is not None:
            progress.depths[self._fleet.requests.name] = depth
            progress.stored = progress.planned - self._ledger.missing
            progress.outstanding = self._ledger.outstanding

    async def _stop(self) -> None:
        """Withdraw requests that no worker has begun, and wait a moment for results in flight."""
        await self._withdraw()
        end = time.monotonic() + self._fleet.work.request.config.grace_seconds
        while self._ledger.outstanding and (left := end - time.monotonic()) > 0:
            raise_if_cancelled()
            await self._wakeup.pause(min(left, 1.0) if self._silence.handed_back else left)
            if self._silence.handed_back:
                await self._withdraw()  # Requests that workers with other code had handed back with a delay.
        await self._submission.save_position()

    async def _withdraw(self) -> None:
        self._ledger.mark_withdrawn(await withdraw_requests(self._fleet))

    async def _watch_stop(self) -> None:
        await self._fleet.stop.requested.wait()
        self._wakeup.wake()


async def withdraw_requests(fleet: FleetRun, *, stale_only: bool = False) -> list[int]:
    """Remove the requests of a run that no worker has begun from the mailbox; returns the ordinals of their trials.

    With `stale_only`, only requests made from other code than this client's.
    """
    withdrawn: list[int] = []
    others: list[Message[EvalRequest]] = []
    try:
        while messages := await fleet.requests.receive(fleet.config.batch, fleet.config.batch_seconds, 0):
            ours: list[Message[EvalRequest]] = []
            for message in messages:
                body = message.body
                stale = body.fingerprint != fleet.fingerprint
                mine = body.key.run_id == fleet.run_id and (stale or not stale_only)
                (ours if mine else others).append(message)
            await acknowledge(fleet.requests, ours)
            withdrawn += [message.body.ordinal for message in ours]
    except MailboxConnectionError as error:
        log.warning("waiting requests could not be withdrawn: %s", error)
    await hand_back(others)
    return withdrawn


class Recovery:
    """Finds lost requests and resends them."""

    def __init__(
        self,
        fleet: FleetRun,
        ledger: Ledger,
        submission: Submission,
        committer: ResultCommitter,
        silence: Silence,
        stored: StoredResults,
        *,
        stale: bool,
    ) -> None:
        """Initialize; `stale` means that requests of this run made from other code may be queued."""
        self._fleet = fleet
        self._ledger = ledger
        self._submission = submission
        self._committer = committer
        self._silence = silence
        self._stale = stale
        self._stored = stored
        self._rounds = 0  # Consecutive losses without a result in between.
        self._returned_before: int | None = None  # Number of results at the last loss.
        self._next_search = 0.0

    @property
    def resent(self) -> bool:
        """Whether lost requests were resent, so that duplicates may be queued."""
        return self._returned_before is not None

    async def resend_vanished(self) -> bool:
        """Resend the trials whose committed results the store has lost; returns whether there were any."""
        vanished = await self._stored.find_vanished()
        if vanished is None:
            return False
        self._submission.send_again(vanished)
        return True

    async def look(self, depth: MailboxDepth, now: float) -> None:
        """After a time without results, check whether requests were lost or other processes stored their results."""
        out, quiet, recovery_seconds = (
            self._ledger.outstanding,
            self._silence.seconds(now),
            # The counts of some servers are late: their silence must last longer.
            max(self._fleet.config.recovery_seconds, getattr(self._fleet.requests, "count_lag_seconds", 0.0)),
        )
        if not out:
            return
        if quiet >= recovery_seconds and await self._may_be_lost(depth, quiet):
            await self._resend_lost()
        elif quiet >= recovery_seconds / (4 if out > count_requests(depth) else 1) and self._stored.is_due(now):
            # Also if there are as many requests as outstanding trials: they may belong to other runs or other code.
            await self._stored.read()
            if self._stale:
                await withdraw_requests(self._fleet, stale_only=True)

    async def _may_be_lost(self, depth: MailboxDepth, quiet: float) -> bool:
        """Return whether the mailbox contains no request of this run, whatever it contains of other runs."""
        fleet = self._fleet
        if count_requests(depth) == 0:
            return True
        now = time.monotonic()
        if now < self._next_search:
            return False
        asked = await fleet.ask_mailbox(
            lambda: bulk.asked_from(fleet.requests, fleet.results.name), "looking for requests"
        )
        if asked is not None:
            # This run's requests are usually found first; behind many others the search is slow, so search less often.
            self._next_search = time.monotonic() + max(fleet.config.recovery_seconds, 20 * (time.monotonic() - now))
            return not asked
        # The mailbox cannot tell: resend after the longest time limit of a trial.
        config = fleet.work.request.config
        longest = 2 * (config.timeout_seconds + config.close_seconds) * (1 + config.max_retries) + 60
        return depth.waiting == 0 and quiet > longest

    async def _resend_lost(self) -> None:
        """Resend trials that are neither stored nor in a mailbox; after `max_rounds`, store them as not delivered."""
        fleet, ledger = self._fleet, self._ledger
        # Workers deliver before they acknowledge, and the client commits before it acknowledges: a trial that has left
        # the requests is in the results or in the ledger by now. Reading the results first would miss trials in
        # between.
        before = ledger.returned
        coming = await fleet.ask_mailbox(fleet.results.approximate_count, "looking at the results")
        if coming or ledger.returned != before or await self._stored.read() or not ledger.outstanding:
            return
        self._rounds = self._rounds + 1 if ledger.returned == self._returned_before else 0
        self._returned_before = ledger.returned
        self._silence.restart()
        if self._rounds < fleet.config.max_rounds:
            log.warning("%d requests were lost or never sent; sending them now", ledger.outstanding)
            self._submission.send_again(ledger.take_lost())
            return
        lost = ledger.take_lost()
        times = self._rounds + 1
        reason = f"sent {times} times without an answer: see the dead letters of {fleet.requests.name}"
        while trials := list(islice(lost, fleet.config.batch)):
            await self._committer.give_up(trials, reason)
