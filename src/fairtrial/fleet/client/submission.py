"""Submit trials in batches, within a window, and commit what comes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Self

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.base.offload import finish, in_thread
from fairtrial.errors import BodyError, MailboxConnectionError, MailboxFullError, SecretInDataError
from fairtrial.fleet.client.fleet_run import FleetRun, log
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.messages import EvalReply, EvalRequest
from fairtrial.mailbox import server as bulk
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, Message
from fairtrial.runs.events import SampleEvaluated, TrialStarted
from fairtrial.runs.plan import PlannedTrial
from fairtrial.runs.retries import RetrySet
from fairtrial.runs.scheduler import Limits
from fairtrial.runs.writer import Item, commit_items
from fairtrial.store.notes import FleetNote, write_notes
from fairtrial.store.protocol import Committed, RunStore
from fairtrial.store.redact import Redactor, current
from fairtrial.store.rows import refuse_secrets
from fairtrial.trials.result import EvalResult, failed_result
from fairtrial.trials.sample_types import PLAIN

LINGER_SECONDS = 0.02


async def send_all(
    requests: Mailbox[EvalRequest],
    bodies: Sequence[EvalRequest],
    *,
    reply_to: str | Mailbox[Any] | None,
    enough: Callable[[], bool] = lambda: False,
) -> list[tuple[EvalRequest, BodyError]]:
    """Send all requests; returns those that cannot be sent, and why.

    Retries while the server is unavailable, until `enough` returns true. A request may therefore be sent twice; its
    result counts once.
    """
    refused: list[tuple[EvalRequest, BodyError]] = []
    waiting = list(bodies)

    async def attempt() -> None:
        if hasattr(requests, "send_all"):
            try:
                await bulk.send_all(requests, waiting, reply_to=reply_to)
            except BodyError:
                pass  # Nothing was sent: sending one by one shows which request is the cause.
            else:
                waiting.clear()
                return
        outcomes = await asyncio.gather(
            *(requests.send(body, reply_to=reply_to) for body in waiting), return_exceptions=True
        )
        again: list[EvalRequest] = []
        away: BaseException | None = None
        for body, outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, BodyError):
                refused.append((body, outcome))
            elif isinstance(outcome, MailboxConnectionError | MailboxFullError):
                again.append(body)
                away = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        waiting[:] = again
        if away is not None:
            raise away

    await retry_while_unavailable(attempt, f"sending to {requests.name}", log, enough=enough)
    return refused


async def take(
    results: Mailbox[EvalReply], most: int, *, lease_seconds: float, wait_seconds: float
) -> Sequence[Message[EvalReply]]:
    """Receive replies: wait for the first one, then a moment longer to fill the batch."""
    first = await results.receive(most, lease_seconds, wait_seconds)
    if not first or len(first) >= most:
        return first
    async with handed_back_on_error(first):
        await asyncio.sleep(LINGER_SECONDS)
        try:
            return [*first, *await results.receive(most - len(first), lease_seconds, 0)]
        except MailboxConnectionError:
            return first


async def commit(
    store: RunStore, run_id: str, items: Sequence[Item], on_failure: Callable[[], None] = lambda: None
) -> Committed:
    """Commit results in a thread; see `commit_items`."""
    return await in_thread(lambda: commit_items(store, run_id, items, on_failure))


async def acknowledge(mailbox: Mailbox[Any], messages: Sequence[Message[Any]]) -> None:
    """Acknowledge a committed batch. Messages that cannot be acknowledged are redelivered as duplicates."""
    try:
        kept = await bulk.acknowledge_all(mailbox, messages)
    except MailboxConnectionError as error:
        log.debug("%d messages will be redelivered: %s", len(messages), error)
    else:
        if not all(kept):
            lost = list(kept).count(False)
            log.debug("%d of %d messages will be redelivered: their leases have expired", lost, len(messages))


async def hand_back(messages: Sequence[Message[Any]]) -> None:
    """Return a batch without counting its delivery. Messages that fail return when their lease expires."""
    outcomes = await asyncio.gather(*(message.hand_back() for message in messages), return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failed:
        log.debug("%d messages return when their leases expire: %s", len(failed), failed[0])


@asynccontextmanager
async def handed_back_on_error(messages: Sequence[Message[Any]]) -> AsyncIterator[None]:
    """Hand unsettled messages back at once if the block fails or is cancelled, instead of when their lease expires."""
    try:
        yield
    except BaseException:
        await finish(hand_back([message for message in messages if not message.settled]))
        raise


class ResultCommitter:
    """Commits results, records them in the ledger and checks the limits of the run.

    Attributes:
        limits: The limits of the run.
        refused: Trials whose results the store refuses.
    """

    def __init__(self, fleet: FleetRun, ledger: Ledger, retries: RetrySet, limits: Limits) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._retries = retries
        self.limits = limits
        self.refused: set[int] = set()

    async def commit(self, replies: Sequence[EvalReply]) -> list[EvalResult]:
        """Commit replies; returns the new results. A cancellation does not interrupt a commit that has begun."""
        fleet, ledger = self._fleet, self._ledger
        fresh: list[EvalResult] = []
        items: list[Item] = []
        seen: set[int] = set()
        for reply in replies:
            result = self._complete(reply.result)
            if ledger.is_fresh(reply) and result.ordinal not in seen:
                seen.add(result.ordinal)
                fresh.append(result)
            # Samples of late duplicates are stored too: a failover may have lost result and sample.
            items.append((result, reply.sample_ordinal, ledger.sample(reply)))
        with ledger.committing(seen):
            if fleet.observers:
                for result in fresh:
                    fleet.observers.publish(SampleEvaluated(fleet.run_id, result))
            committed = await finish(commit(fleet.store, fleet.run_id, items, fleet.note_store_failure))
            if committed.refused:
                refused = {key for key, _problem in committed.refused}
                self.refused.update(result.ordinal for result in fresh if result.key in refused)
            for result in fresh:
                ledger.mark_done(result.ordinal)
                self.limits.check(result, fleet.stop)
        return fresh

    async def give_up(self, trials: Sequence[PlannedTrial], reason: str) -> None:
        """Store error results for trials that could not be delivered to a worker."""
        await self.commit([_undelivered(trial, reason) for trial in trials])

    @property
    def has_listeners(self) -> bool:
        """Whether anything needs every result: observers, limits, adaptive stopping, a stream."""
        fleet = self._fleet
        return bool(fleet.observers or fleet.work.on_result is not None or self.limits.matter or fleet.stop.adaptive)

    async def publish_stored(self, result: EvalResult) -> None:
        """Publish a result that another process has stored, as if it had been committed here."""
        fleet = self._fleet
        if fleet.work.progress is not None:
            fleet.work.progress.cost_usd += result.total_cost_usd
        fleet.observers.publish(SampleEvaluated(fleet.run_id, result))
        self.limits.check(result, fleet.stop)
        if fleet.work.on_result is not None:
            await fleet.work.on_result(result)

    def _complete(self, result: EvalResult) -> EvalResult:
        """Add what only the client knows: the costs of earlier attempts, and the code version."""
        code = self._fleet.work.code
        return self._retries.with_earlier_cost(replace(result, code=code) if code else result)


def _undelivered(trial: PlannedTrial, reason: str) -> EvalReply:
    """Build the error result of a trial that no worker answered."""
    result = failed_result(trial.key, trial.ordinal, trial.attempt, "dead_letter", "delivery", reason)
    return EvalReply(result, trial.sample_ordinal, trial.sample)


_GROWTH = 1.5
_STARVED_GROWTH = 2.0
_DECAY = 0.9


class Window:
    """The maximum number of requests in the mailbox, waiting or in progress.

    The target is as many waiting requests as there are in progress, and at least `floor`. The size is found by trial:
    one computed from throughput and latency would shrink in a slow phase and make the fleet slower still.

    Args:
        floor: The minimum number of waiting requests.

    Attributes:
        is_starved: Whether workers had taken every request at the last look, so that another look should follow soon.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self.size = floor
        self.is_starved = False

    def look(self, depth: MailboxDepth, *, full: bool, crowded: bool) -> None:
        """Adjust the window to the state of the mailbox.

        Args:
            depth: The depth of the request mailbox.
            full: Whether the window has been the limit since the last call.
            crowded: Whether there is a backlog of results, which more requests would only increase.
        """
        aim = max(self._floor, depth.in_flight)
        self.is_starved = full and not crowded and depth.waiting == 0
        if full and not crowded and 2 * depth.waiting < aim:
            self.size = round(self.size * (_STARVED_GROWTH if self.is_starved else _GROWTH))
        elif depth.waiting > 2 * aim:
            self.size = max(self._floor, round(self.size * _DECAY))


_STARVED_LOOKS = 4
_BATCHES_AHEAD = 4


class StoredCursor:
    """The position of the submission, stored in the run's notes.

    Attributes:
        position: All trials before this ordinal have been sent, or were about to be.
        is_found: Whether an earlier client stored a position.
        is_stale: Whether that client had other code, so that workers with this client's code refuse its requests.
    """

    def __init__(self, fleet: FleetRun, note: FleetNote | None) -> None:
        self._fleet = fleet
        self.is_found = note is not None
        self.is_stale = note is not None and note.fingerprint != fleet.fingerprint
        self.position = 0 if note is None or self.is_stale else note.cursor

    @classmethod
    async def load(cls, fleet: FleetRun) -> Self:
        """Read the position that an earlier client stored."""
        return cls(fleet, (await fleet.ask_store(lambda: fleet.store.get_run(fleet.run_id))).noted.fleet)

    async def save(self, position: int) -> None:
        """Store the position."""
        fleet = self._fleet
        note = write_notes(fleet=FleetNote(position, fleet.fingerprint))
        await fleet.ask_store(lambda: fleet.store.update_run(fleet.run_id, notes=note))


class Submission:
    """Sends the requests of a run, at most as many at a time as the window allows."""

    def __init__(self, fleet: FleetRun, ledger: Ledger, cursor: StoredCursor, committer: ResultCommitter) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._cursor = cursor
        self._committer = committer
        self._window = Window(fleet.config.floor)
        self._unsent: Iterator[PlannedTrial] = ledger.to_send()
        self._held_back = bytearray((fleet.run.planned + 7) // 8)  # Trials of experiments that were stopped.
        self._was_full = False  # Whether the window was the limit since it was last adjusted.
        self._queued: float = math.inf  # Requests in the mailbox at the last look and sent since; unknown before.
        self._received = 0  # Replies received before that look.

    async def send_next(self) -> bool:
        """Send the next batch if the window has room; returns whether anything was sent."""
        batch = self._fleet.config.batch
        # Every reply received since the last look was a request in the mailbox then, also while it is being committed.
        queued = max(0, self._queued - (self._ledger.received - self._received))
        room = self._window.size - int(min(self._ledger.outstanding, queued))
        if room < max(1, min(self._window.size // 8, batch)):
            self._was_full = True
            return False
        trials = self._next(min(room, batch))
        if trials:
            await self._send(trials)
        return bool(trials)

    def send_again(self, trials: Iterator[PlannedTrial]) -> None:
        """Send these trials before all others."""
        self._unsent = chain(trials, self._unsent)

    def adjust_window(self, depth: MailboxDepth, results_waiting: int) -> None:
        """Adjust the window to the requests and results that are in the mailboxes."""
        config = self._fleet.config
        # A backlog of results slows submission down; results leased by a dead client and lost requests must not.
        crowded = results_waiting > 2 * config.receivers * config.batch
        self._window.look(depth, full=self._was_full, crowded=crowded)
        self._was_full = False
        self._queued = math.inf if crowded else count_requests(depth)
        self._received = self._ledger.received

    @property
    def poll_seconds(self) -> float:
        """Return the time until the next look at the mailbox: short while workers wait for requests."""
        return self._fleet.config.poll_seconds / (_STARVED_LOOKS if self._window.is_starved else 1)

    async def save_position(self) -> None:
        """Store the final position. With nothing outstanding, the next client can send at once."""
        await self._cursor.save(self._ledger.position if self._ledger.outstanding else 0)

    def _next(self, count: int) -> list[PlannedTrial]:
        """Return the next trials to send, up to the horizon of adaptive stopping."""
        adaptive = self._fleet.stop.adaptive
        missing = (trial for trial in self._unsent if self._is_wanted(trial))
        if adaptive is None:
            return list(islice(missing, count))
        trials: list[PlannedTrial] = []
        for trial in islice(missing, count):
            if trial.ordinal >= adaptive.horizon:
                self._unsent = chain((trial,), self._unsent)
                break
            trials.append(trial)
        return trials

    def _is_wanted(self, trial: PlannedTrial) -> bool:
        if self._ledger.is_done(trial.ordinal):
            return False
        if self._committer.limits.is_stopped(trial.key.experiment):
            self._held_back[trial.ordinal >> 3] |= 1 << (trial.ordinal & 7)
            return False
        return True

    def end_stopped(self) -> None:
        """End the run if nothing is missing but the trials of experiments that were stopped."""
        held_back = sum(byte.bit_count() for byte in self._held_back)
        if held_back and self._ledger.missing <= held_back:
            self._committer.limits.end_stopped(self._fleet.stop)

    async def _send(self, trials: list[PlannedTrial]) -> None:
        fleet, ledger = self._fleet, self._ledger
        end = max(trial.ordinal for trial in trials) + 1
        if end > ledger.cursor:
            # Stored before sending: a client killed in between leaves these trials to recover. A fast fleet would wait
            # for the store with every batch, so its position is stored for several batches.
            ahead = _BATCHES_AHEAD * fleet.config.batch
            ledger.cursor = min(end + (ahead if self._window.size > ahead else 0), fleet.run.planned)
            await self._cursor.save(ledger.cursor)
        ledger.mark_sent(trials)
        self._queued += len(trials)
        if fleet.observers:
            for trial in trials:
                fleet.observers.publish(TrialStarted(fleet.run_id, trial.key))
        refused = await send_all(
            fleet.requests, self._bodies(trials), reply_to=fleet.results.name, enough=fleet.is_stopped
        )
        for body, problem in refused:
            trial = next(trial for trial in trials if trial.ordinal == body.ordinal)
            await self._committer.give_up([trial], f"the request cannot be sent: {problem}")

    def _bodies(self, trials: list[PlannedTrial]) -> list[EvalRequest]:
        request = self._fleet.work.request
        tags = dict(request.rules.tags)
        shared, redactor = self._fleet.shared is not None, current()
        dataset = request.dataset
        # Workers of the suite know declared types; what samples made in code are is said with each request.
        declared = dataset.input_type is not object and dataset.expected_type is not object
        types = PLAIN if declared else None
        return [
            EvalRequest(
                trial.key,
                trial.sample,
                trial.ordinal,
                trial.sample_ordinal,
                trial.attempt,
                request.experiments[trial.experiment].params,
                self._fleet.run.suite,
                self._fleet.fingerprint,
                tags=tags,
                types=types,
                commit=shared and _may_be_stored_by_worker(trial, redactor),
                code=self._fleet.work.code,
            )
            for trial in trials
        ]


def _may_be_stored_by_worker(trial: PlannedTrial, redactor: Redactor) -> bool:
    """Return False for results to which the client adds what only it knows: earlier costs, and its secrets."""
    if trial.attempt > 1:
        return False
    try:
        refuse_secrets(redactor, trial.sample, trial.sample_ordinal)
    except SecretInDataError:
        return False
    return True


def count_requests(depth: MailboxDepth) -> int:
    """Return the number of requests in the mailbox, of all runs."""
    return depth.waiting + depth.delayed + depth.in_flight
