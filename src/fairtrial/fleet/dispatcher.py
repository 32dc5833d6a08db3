"""A run carried out by a fleet: windowed submission, collection, and the healing of what got lost on the way.

The store is the truth. The mailboxes hold a window of the plan and can be lost at any moment: when both are empty and
trials are missing, exactly those are sent again. Where submission stands is written to the run's notes before anything
is sent, so a client that was killed and started again sends nothing twice that is still queued.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import anyio

from fairtrial.backoff import patience_seconds, retry_while_unavailable
from fairtrial.data.sample import Sample
from fairtrial.errors import MailboxConnectionError, MailboxError, MailboxFullError, RunBusyError
from fairtrial.fleet.batches import acknowledge, commit, given_back, hand_back, in_thread, send_all, take
from fairtrial.fleet.hints import has_worker, hint, missing_worker, undelivered
from fairtrial.fleet.ledger import Ledger
from fairtrial.fleet.log import log
from fairtrial.fleet.window import Window
from fairtrial.fleet.wire import EvalReply, EvalRequest
from fairtrial.mailbox import bulk
from fairtrial.mailbox.protocol import Mailbox, MailboxDepth, Message
from fairtrial.runs import run_lease
from fairtrial.runs.events import SampleEvaluated, TrialStarted
from fairtrial.runs.plan import PlannedTrial
from fairtrial.runs.retries import RetrySet
from fairtrial.runs.runner import OpenRun
from fairtrial.runs.scheduler import Limits, run_trials, unwrapped
from fairtrial.runs.writer import Item, Writer, call_store
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult
from fairtrial.types import JSON

_NOTE = "fleet"
_RETRIES_READ = 200


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """How a client deals with its fleet.

    Attributes:
        batch: How many requests are sent, or results committed, at once; at most.
        lanes: How many batches of results are on their way into the store at once.
        floor: The least number of requests to keep out, however few workers there seem to be.
        lease_seconds: How long a batch of results is ours before it is given to another collector.
        look_seconds: How often to look at how many requests wait.
        heal_seconds: After so long without a result, find out whether anything got lost.
        hint_seconds: After so long without a result and without a worker, say so.
        worker_seconds: After so long without a worker that has this run's code, end the run as `incomplete`.
        ahead: With adaptive stopping, how far trials may be sent ahead of the first one without a result.
        max_rounds: How often to send again what got lost, without one result in between, before giving up on it.
        open_seconds: How long to wait for the server of the mailboxes at the start.
    """

    batch: int = 500
    lanes: int = 2
    floor: int = 100
    lease_seconds: float = 15.0
    look_seconds: float = 0.1
    heal_seconds: float = 2.0
    hint_seconds: float = 10.0
    worker_seconds: float = field(default_factory=patience_seconds)
    ahead: int = 10_000
    max_rounds: int = 3
    open_seconds: float = 30.0


class Dispatch:
    """One run on its way through the mailboxes."""

    def __init__(
        self,
        work: OpenRun,
        requests: Mailbox[EvalRequest],
        results: Mailbox[EvalReply],
        fingerprint: str,
        config: DispatchConfig,
    ) -> None:
        self._work = work
        self._run = work.run
        self._store = work.request.store
        self._observers = work.request.observers
        self._stop = work.stop
        self._requests = requests
        self._results = results
        self._fingerprint = fingerprint
        self._config = config
        self._window = Window(config.floor)
        self._changed = anyio.Event()
        self._closing = False
        self._receiving: set[anyio.CancelScope] = set()
        self._fresh = 0  # Results that counted.
        self._fresh_at_heal = -1
        self._rounds = 0
        self._heard = time.monotonic()
        self._looked = 0.0
        self._full = False  # Whether the window has held anything back since then.
        self._noted = time.monotonic()
        self._read_again = 0.0
        self._search_again = 0.0
        self._elsewhere = 0  # Of what is out, how much is not among the requests: on its way in, or lost.
        self._hinted = False
        self._workers_again = 0.0
        self._unserved_since: float | None = None  # Since when no worker has had this run's code.
        self._handed_back = False  # Whether requests were seen to be handed back since the last result.
        self._stale = False  # Whether requests of this run that were made from other code may be queued.
        self._refused: set[int] = set()  # Trials of which the store takes nothing.
        self._was_away = False  # Whether the store was unavailable since its results were last compared with ours.
        self._vanished = 0  # How often committed results were not in the store.
        self._joined = False  # Another client owns the run.
        self._ledger: Ledger
        self._source: Iterator[PlannedTrial]
        self._limits: Limits
        self._retries: RetrySet

    async def run(self) -> bool:
        """Carry the run out; whether every trial has its result."""
        await self._own()
        done = await self._work.done()
        request = self._work.request
        retries = await in_thread(
            lambda: RetrySet(
                request.store, request.dataset, self._run, request.rules, retry_errors=request.retry_errors
            )
        )
        await self._work.follow(retries.ordinals, window=self._config.ahead)
        self._limits = await self._work.start(retries.costs())
        self._retries = retries
        if retries.to_score:
            await self._score_here(retries)
        attempts = await in_thread(retries.attempts)
        notes = (await self._stored(lambda: self._store.get_run(self._run.run_id))).notes
        found = notes.get(_NOTE)
        note: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        known = isinstance(note.get("cursor"), int) and note.get("fingerprint") == self._fingerprint
        if note and not known:
            self._stale = True  # Requests made for other code, which no worker of this one would accept.
            await self._withdraw(stale_only=True)
        self._ledger = Ledger(
            self._run, self._work.request.dataset, done, cursor=note["cursor"] if known else 0, attempts=attempts
        )
        self._source = self._ledger.to_send()
        with unwrapped():
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch_stop)
                async with anyio.create_task_group() as lanes:
                    for _ in range(self._config.lanes):
                        lanes.start_soon(self._collect)
                    try:
                        await self._submit()
                    except (MailboxConnectionError, MailboxFullError):
                        if self._stop.reason is None:
                            raise  # Else: told to stop while the server is away, and not to wait for it.
                    if self._stop.reason is not None:
                        await self._wind_down()
                    self._close()
                group.cancel_scope.cancel()
        await self._own(ending=True)
        complete = self._ledger.missing == 0
        if complete:
            await self._drain()
            if known or self._stale or self._fresh_at_heal >= 0:
                await self._withdraw()  # Something may have been sent twice; what is left of it is of no use.
        return complete

    async def _own(self, *, ending: bool = False) -> None:
        """Own the run, or join another client, which does no harm; a process that executes the run itself would.

        Called again now and then: a client that joined takes over once the other one is gone, unless it is `ending`.
        """
        run_id, work = self._run.run_id, self._work
        if work.lease is not None:
            try:
                await self._stored(work.lease.heartbeat)
                return
            except RunBusyError:
                work.lease.stop()
                work.lease = None  # Taken over while this client was frozen, by a client or by someone else.
        who = await self._stored(lambda: run_lease.active_owner(self._store, run_id))
        if ending and who is None:
            return
        if who is None or not await self._stored(lambda: run_lease.is_client(self._store, run_id)):
            work.lease = await run_lease.acquire(self._store, run_id, client=True)
        elif not self._joined:
            self._joined = True
            log.warning("run %s is being worked on already (%s); results count once all the same", run_id, who)

    async def _score_here(self, retries: RetrySet) -> None:
        """Score stored outputs in this process: the task was paid for and is not called, so no worker is needed."""
        config = self._work.request.config
        self._work.writer = Writer(self._store, self._run.run_id, epoch=self._work.epoch)
        await run_trials(
            retries.trials(only_score=True),
            retries.score,
            self._work.writer,
            workers=min(config.max_concurrent, len(retries.to_score)),
            stop=self._stop,
            limits=self._limits,
            observers=self._observers,
            grace_seconds=config.grace_seconds,
            on_result=self._work.on_result,
        )
        await self._work.writer.close()
        self._work.writer = None

    # Submission

    async def _submit(self) -> None:
        ledger, config = self._ledger, self._config
        turned = time.monotonic()
        while self._stop.reason is None:
            now = time.monotonic()
            if now - turned > config.heal_seconds:
                await self._read_store()  # This process was frozen: another client may have gone on meanwhile.
            turned = now
            if ledger.missing == 0 and not await self._resend_vanished():
                return
            room = self._window.size - max(0, ledger.outstanding - self._elsewhere)
            if room >= max(1, min(self._window.size // 8, config.batch)):
                trials = self._next(min(room, config.batch))
                if trials:
                    await self._send(trials)
                    continue
            else:
                self._full = True
            if time.monotonic() - self._looked >= config.look_seconds:
                await self._look()
                continue
            await self._pause(config.look_seconds)

    def _next(self, count: int) -> list[PlannedTrial]:
        """The next trials to send: none from the horizon of adaptive stopping on."""
        unknown = (trial for trial in self._source if not self._ledger.is_done(trial.ordinal))
        if self._stop.adaptive is None:
            return list(islice(unknown, count))
        trials: list[PlannedTrial] = []
        for trial in islice(unknown, count):
            if trial.ordinal >= self._stop.adaptive.horizon:
                self._source = chain((trial,), self._source)
                break
            trials.append(trial)
        return trials

    async def _send(self, trials: list[PlannedTrial]) -> None:
        ledger, run = self._ledger, self._run
        top = max(trial.ordinal for trial in trials) + 1
        if top > ledger.cursor:
            ledger.cursor = top  # Stored before they are sent: a client killed in between leaves a batch to heal.
            await self._store_cursor(ledger.cursor)
        ledger.sent(trials)
        if self._observers:
            for trial in trials:
                self._observers.publish(TrialStarted(run.run_id, trial.key))
        experiments = self._work.request.experiments
        tags = dict(self._work.request.rules.tags)
        bodies = [
            EvalRequest(
                trial.key,
                trial.sample,
                trial.ordinal,
                trial.sample_ordinal,
                trial.attempt,
                experiments[trial.experiment].params,
                run.suite,
                self._fingerprint,
                tags=tags,
            )
            for trial in trials
        ]
        for body, problem in await send_all(self._requests, bodies, reply_to=self._results.name, enough=self._stopped):
            await self._give_up([(body.key, body.ordinal, body.attempt, body.sample)], f"it cannot be sent: {problem}")

    async def _store_cursor(self, cursor: int) -> None:
        note: dict[str, JSON] = {_NOTE: {"cursor": cursor, "fingerprint": self._fingerprint}}
        await self._stored(lambda: self._store.update_run(self._run.run_id, notes=note))

    async def _stored[T](self, call: Callable[[], T]) -> T:
        """The result of a call to the store, which may be away for a while."""
        return await in_thread(lambda: call_store(call, f"asking for run {self._run.run_id}", self._store_away))

    def _store_away(self) -> None:
        self._was_away = True

    def _stopped(self) -> bool:
        return self._stop.reason is not None

    async def _ask[T](self, call: Callable[[], Awaitable[T]], doing: str) -> T:
        """The result of a call to a mailbox, which may be away for a while."""
        return await retry_while_unavailable(call, doing, log, enough=self._stopped)

    async def _look(self) -> None:
        """See how the fleet is doing: how much to keep out, whether anything got lost, whether there is a fleet."""
        depth = await self._ask(self._requests.depth, "looking at the requests")
        if self._was_away:
            self._was_away = False
            await self._resend_vanished()
        now = self._looked = time.monotonic()
        requested = depth.waiting + depth.delayed + depth.in_flight
        # Results that pile up hold submission back; those a dead client left leased, and what got lost, must not.
        coming = await self._ask(self._results.approximate_count, "looking at the results")
        crowded = coming > 2 * self._config.lanes * self._config.batch
        self._window.look(depth, full=self._full, crowded=crowded)
        self._full = False
        self._elsewhere = 0 if crowded else max(0, self._ledger.outstanding - requested)
        self._handed_back = self._handed_back or depth.delayed > 0
        if (progress := self._work.progress) is not None:
            progress.depths[self._requests.name] = depth
            progress.stored = progress.planned - self._ledger.missing
            progress.outstanding = self._ledger.outstanding
        quiet = now - self._heard
        out = self._ledger.outstanding
        if out and quiet >= self._config.heal_seconds and await self._may_be_lost(depth, quiet):
            await self._heal()
        elif out and quiet >= self._config.heal_seconds / (4 if out > requested else 1) and now >= self._read_again:
            # Also if there are as many requests as trials out: they may be others', or made for other code.
            await self._read_store()
            if self._stale:
                await self._withdraw(stale_only=True)
        if out and quiet >= self._config.hint_seconds and now >= self._workers_again:
            await self._look_for_workers(depth)
        if now - self._noted >= run_lease.HEARTBEAT_SECONDS:
            self._noted = now
            await self._own()

    async def _may_be_lost(self, depth: MailboxDepth, quiet: float) -> bool:
        """Whether none of this run's requests is in the mailbox, whatever there is of others'."""
        if depth.waiting + depth.delayed + depth.in_flight == 0:
            return True
        now = time.monotonic()
        if now < self._search_again:
            return False
        asked = await self._ask(lambda: bulk.asked_from(self._requests, self._results.name), "looking for requests")
        if asked is not None:
            # Ours are usually the first that are seen; where they are behind many others, look less often.
            self._search_again = time.monotonic() + max(self._config.heal_seconds, 20 * (time.monotonic() - now))
            return not asked
        # A mailbox that cannot tell: past any trial's own time limit, send anew.
        config = self._work.request.config
        longest = 2 * (config.timeout_seconds + config.close_seconds) * (1 + config.max_retries) + 60
        return depth.waiting == 0 and quiet > longest

    async def _heal(self) -> None:
        """Send again what is neither stored nor in a mailbox."""
        # A worker delivers before it acknowledges and we commit before we do: what had left the requests is in the
        # results or in the books by now. Looking at the results first would miss what moves in between.
        before = self._fresh
        if await self._ask(self._results.approximate_count, "looking at the results") or self._fresh != before:
            return
        if await self._read_store():
            return
        self._rounds = self._rounds + 1 if self._fresh == self._fresh_at_heal else 0
        self._fresh_at_heal = self._fresh
        self._heard = time.monotonic()
        if self._rounds < self._config.max_rounds:
            log.warning("%d trials got lost on the way, or were never sent; sending them now", self._ledger.outstanding)
            self._source = chain(self._ledger.lost(), self._source)
            return
        lost = self._ledger.lost()
        said = f"it was sent {self._rounds + 1} times and never answered: see the dead letters of {self._requests.name}"
        while trials := list(islice(lost, self._config.batch)):
            await self._give_up([(t.key, t.ordinal, t.attempt, t.sample) for t in trials], said)

    async def _read_store(self) -> int:
        """Take note of results that others stored: workers that write the store themselves, a second client."""
        began = time.monotonic()
        done = await self._stored(lambda: self._store.done(self._run.run_id))
        now = time.monotonic()
        # It grows with the run: a tenth of the time at most goes into it.
        self._read_again = now + max(self._config.heal_seconds / 4, 10 * (now - began))
        news = self._ledger.news(done) + await self._stored(self._retried_elsewhere)
        for ordinal in news:
            self._ledger.back(ordinal)
        if news:
            self._fresh += len(news)
            self._heard = time.monotonic()
            if self._observers or self._work.on_result is not None or self._limits.matter or self._stop.adaptive:
                await self._tell(news)
        return len(news)

    def _retried_elsewhere(self) -> list[int]:
        """Trials that are to be executed again and have the result of that by now; the bitmap cannot tell."""
        found = []
        for ordinal, attempt in islice(self._ledger.retries_out(), _RETRIES_READ):
            stored = self._stored_result(ordinal)
            if stored is not None and (stored.success or stored.attempt >= attempt):
                found.append(ordinal)
        return found

    def _stored_result(self, ordinal: int) -> EvalResult | None:
        found = next(iter(self._store.results(self._run.run_id, after=ordinal - 1, limit=1, outputs=False)), None)
        return found if found is not None and found.ordinal == ordinal else None

    async def _resend_vanished(self) -> bool:
        """Send again the trials whose committed results are not in the store; whether there were any.

        A database that failed over to an older copy, or was restored from a backup, loses commits.
        """
        if self._vanished >= self._config.max_rounds:
            return False  # The run will be `incomplete`.
        known = self._ledger.known()
        stored = await self._stored(lambda: self._store.done(self._run.run_id))
        vanished = self._ledger.reopen(known, stored, self._refused)
        if vanished is None:
            return False
        self._vanished += 1
        log.warning(
            "%d results of run %s were committed and are not in the store: sending these trials again",
            self._ledger.missing,
            self._run.run_id,
        )
        self._source = chain(vanished, self._source)
        return True

    async def _tell(self, ordinals: Sequence[int]) -> None:
        def stored(ordinal: int) -> EvalResult:
            return next(iter(self._store.results(self._run.run_id, after=ordinal - 1, limit=1)))

        for ordinal in ordinals:
            result = await self._stored(partial(stored, ordinal))
            self._observers.publish(SampleEvaluated(self._run.run_id, result))
            self._limits.check(result, self._stop)
            if self._work.on_result is not None:
                await self._work.on_result(result)

    async def _give_up(self, trials: Sequence[tuple[TrialKey, int, int, Sample[Any, Any]]], reason: str) -> None:
        await self._keep([undelivered(self._run, *trial, reason) for trial in trials])

    async def _look_for_workers(self, depth: MailboxDepth) -> None:
        """Say why no results come; end the run when no worker has had its code for `worker_seconds`."""
        config, suite, code = self._config, self._run.suite, self._fingerprint
        announced = await self._ask(lambda: bulk.announced(self._requests), "looking for workers")
        now = time.monotonic()
        self._workers_again = now + config.hint_seconds / 10
        if not self._hinted:
            reason = hint(depth, suite, handed_back=self._handed_back, announced=announced, fingerprint=code)
            if reason is not None:  # None: someone is at work; it takes long.
                self._hinted = True
                log.warning(reason)
        # A worker that does not announce itself still shows by what it holds.
        if announced is None or has_worker(announced, code) or (not announced and depth.in_flight):
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = now
        elif now - self._unserved_since >= config.worker_seconds:
            waited = f"no worker has had this run's code for {config.worker_seconds:g} s"
            reason = f"{waited}. {missing_worker(suite, announced, code)}"
            self._stop.request(reason, resumable=True, incomplete=True)

    # Collection

    async def _collect(self) -> None:
        while not self._closing:
            messages: Sequence[Message[EvalReply]] = ()
            with anyio.CancelScope() as scope:
                self._receiving.add(scope)
                try:
                    messages = await retry_while_unavailable(self._take, "collecting results", log)
                finally:
                    self._receiving.discard(scope)
            if messages:
                async with given_back(messages):
                    await self._settle(messages)

    async def _take(self) -> Sequence[Message[EvalReply]]:
        return await take(self._results, self._config.batch, lease_seconds=self._config.lease_seconds, wait_seconds=5.0)

    async def _settle(self, messages: Sequence[Message[EvalReply]]) -> None:
        """Commit a batch, then acknowledge it, then tell those who wait for results."""
        replies: list[EvalReply] = []
        good: list[Message[EvalReply]] = []
        for message in messages:
            problem = self._ledger.problem(message.body)
            if problem is None:
                replies.append(message.body)
                good.append(message)
            else:
                await self._set_aside(message, problem)
        fresh = await self._keep(replies)
        await acknowledge(self._results, good)
        self._heard = time.monotonic()
        self._hinted = self._handed_back = False
        self._unserved_since = None
        self._wake()
        if self._work.on_result is not None:
            for result in fresh:
                await self._work.on_result(result)

    async def _keep(self, replies: Sequence[EvalReply]) -> list[EvalResult]:
        """Commit replies; returns the results that were news."""
        ledger = self._ledger
        fresh: list[EvalResult] = []
        items: list[Item] = []
        seen: set[int] = set()
        for reply in replies:
            if ledger.is_fresh(reply) and reply.result.ordinal not in seen:
                seen.add(reply.result.ordinal)
                fresh.append(self._finish(reply.result))
            # Late duplicates, too, bring their samples: a failover may have lost both.
            items.append((self._finish(reply.result), reply.sample_ordinal, ledger.sample(reply)))
        if self._observers:
            for result in fresh:
                self._observers.publish(SampleEvaluated(self._run.run_id, result))
        committed = await commit(self._store, self._run.run_id, items, self._store_away)
        if committed.refused:
            refused = {key for key, _problem in committed.refused}
            self._refused.update(result.ordinal for result in fresh if result.key in refused)
        for result in fresh:
            if not ledger.is_done(result.ordinal):  # Another lane may have brought the same one meanwhile.
                self._fresh += 1
                ledger.back(result.ordinal)
                self._limits.check(result, self._stop)
        return fresh

    def _finish(self, result: EvalResult) -> EvalResult:
        """Add to a worker's result what only the client knows: earlier costs, and the version of the code."""
        code = self._work.code
        return self._retries.with_earlier_cost(replace(result, code=code) if code else result)

    async def _set_aside(self, message: Message[EvalReply], problem: str) -> None:
        log.warning("a reply in %s is set aside: %s", self._results.name, problem)
        try:
            await message.dead_letter(f"not a reply of this run: {problem}", error="BodyError")
        except MailboxError:
            pass  # It comes again.

    # The end

    async def _wind_down(self) -> None:
        """After a stop: take back what no worker has begun, and give what is in flight a moment to come in."""
        ledger = self._ledger
        await self._withdraw()
        end = time.monotonic() + self._work.request.config.grace_seconds
        while ledger.outstanding and (left := end - time.monotonic()) > 0:
            await self._pause(min(left, 1.0) if self._handed_back else left)
            if self._handed_back:
                await self._withdraw()  # What workers of other code had handed back with a delay.
        # What was taken back is not out: with nothing out, the next start need not wait to find that out.
        await self._store_cursor(ledger.position if ledger.outstanding else 0)

    async def _withdraw(self, *, stale_only: bool = False) -> None:
        """Take this run's requests out of the mailbox, as far as nobody has begun with them.

        With `stale_only`, only those that were made from other code than this client's.
        """
        others: list[Message[EvalRequest]] = []
        try:
            while messages := await self._requests.receive(self._config.batch, self._config.lease_seconds, 0):
                ours: list[Message[EvalRequest]] = []
                for message in messages:
                    body = message.body
                    stale = body.fingerprint != self._fingerprint
                    mine = body.key.run_id == self._run.run_id and (stale or not stale_only)
                    (ours if mine else others).append(message)
                await acknowledge(self._requests, ours)
                for message in () if stale_only else ours:
                    self._taken_back(message.body)
        except MailboxConnectionError as error:
            log.warning("requests that are waiting could not be taken back: %s", error)
        await hand_back(others)

    def _taken_back(self, body: EvalRequest) -> None:
        ledger: Ledger | None = getattr(self, "_ledger", None)
        if ledger is not None and not ledger.is_done(body.ordinal):
            ledger.outstanding = max(0, ledger.outstanding - 1)

    async def _drain(self) -> None:
        """Take the duplicates that have come in the meantime: they are counted, and change nothing."""
        try:
            while messages := await self._results.receive(self._config.batch, self._config.lease_seconds, 0):
                await self._settle(messages)
        except MailboxConnectionError as error:
            log.debug("what is left in %s stays: %s", self._results.name, error)

    def _close(self) -> None:
        self._closing = True
        for scope in self._receiving:
            scope.cancel()

    async def _watch_stop(self) -> None:
        await self._stop.requested.wait()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._changed.wait()
