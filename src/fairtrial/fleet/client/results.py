"""Results on their way to a client: received, or committed by workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import batched, islice

from fairtrial.base.backoff import retry_while_unavailable
from fairtrial.errors import MailboxConnectionError, MailboxError
from fairtrial.fleet.client.fleet_run import FleetRun, Wakeup, log, raise_if_cancelled
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.silence import Silence
from fairtrial.fleet.client.submission import LINGER_SECONDS, ResultCommitter, acknowledge, handed_back_on_error, take
from fairtrial.fleet.messages import EvalReply
from fairtrial.fleet.queues import committed_channel
from fairtrial.mailbox.protocol import Message
from fairtrial.runs.plan import PlannedTrial
from fairtrial.trials.result import EvalResult

_RETRIES_READ = 200
_PAGE = 256


class StoredResults:
    """Finds results that other processes have stored, and results that the store has lost."""

    def __init__(self, fleet: FleetRun, ledger: Ledger, committer: ResultCommitter, silence: Silence) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._committer = committer
        self._silence = silence
        self._next_read = 0.0
        self._losses = 0  # Number of times that committed results were not in the store.

    def is_due(self, now: float) -> bool:
        """Whether the store may be read again."""
        return now >= self._next_read

    async def read(self) -> int:
        """Record results stored by other processes: workers that write to the store directly, a second client.

        Returns their number.
        """
        fleet, ledger = self._fleet, self._ledger
        began = time.monotonic()
        done = await fleet.ask_store(lambda: fleet.store.done(fleet.run_id))
        now = time.monotonic()
        # The cost grows with the run: spend at most a tenth of the time on it.
        self._next_read = now + max(fleet.config.recovery_seconds / 4, 10 * (now - began))
        retried = await fleet.ask_store(self._retried_elsewhere)
        news = ledger.find_new(done) + [ordinal for ordinal in retried if ledger.awaits_result(ordinal)]
        if news:
            self._silence.restart()
        return await self._count(news)

    async def read_committed(self) -> int:
        """Record the results that workers have stored; reads only what the client waits for. Returns their number."""
        fleet = self._fleet
        if fleet.shared is None or not (awaited := self._ledger.awaited()):
            return 0
        stored_among = fleet.shared.store.stored_among
        found = await fleet.ask_store(lambda: stored_among(fleet.run_id, awaited))
        self._ledger.received += len(found)  # Their requests have left the mailbox.
        counted = await self._count(found)
        if counted:
            self._silence.end()
        return counted

    async def _count(self, ordinals: Sequence[int]) -> int:
        """Count results that other processes have stored and publish them; returns how many were new."""
        fleet, ledger, committer = self._fleet, self._ledger, self._committer
        if fleet.shared is None and not committer.has_listeners:  # Nobody asks what they are.
            for ordinal in ordinals:
                ledger.mark_done(ordinal)
            return len(ordinals)
        counted = 0
        for some in batched(ordinals, _PAGE):
            read = partial(fleet.store.results, fleet.run_id, ordinals=some, outputs=committer.has_listeners)
            results = await fleet.ask_store(lambda read=read: list(read()))  # type: ignore[misc]  # a default value
            # Another task may have counted some of them meanwhile.
            new = [result for result in results if ledger.awaits_result(result.ordinal)]
            for result in new:
                ledger.mark_done(result.ordinal)
            counted += len(new)
            for result in new:
                await committer.publish_stored(result)
        return counted

    async def find_vanished(self) -> Iterator[PlannedTrial] | None:
        """Return the trials whose committed results are not in the store, to be resent; None if there are none.

        A database that failed over to an older copy, or was restored from a backup, loses commits.
        """
        fleet, ledger = self._fleet, self._ledger
        if self._losses >= fleet.config.max_rounds:
            return None  # The run will be `incomplete`.
        known = ledger.done_snapshot()
        stored = await fleet.ask_store(lambda: fleet.store.done(fleet.run_id))
        vanished = ledger.reopen(known, stored, self._committer.refused)
        if vanished is None:
            return None
        self._losses += 1
        log.warning(
            "%d committed results of run %s are missing from the store: sending these trials again",
            ledger.missing,
            fleet.run_id,
        )
        return vanished

    def _retried_elsewhere(self) -> list[int]:
        """Return the retried trials that have a new result by now, which the bitmap does not show."""
        found = []
        for ordinal, attempt in islice(self._ledger.retries_out(), _RETRIES_READ):
            stored = self._result(ordinal)
            if stored is not None and (stored.success or stored.attempt >= attempt):
                found.append(ordinal)
        return found

    def _result(self, ordinal: int) -> EvalResult | None:
        page = self._fleet.store.results(self._fleet.run_id, after=ordinal - 1, limit=1, outputs=False)
        result = next(iter(page), None)
        return result if result is not None and result.ordinal == ordinal else None


_WAIT_SECONDS = 5.0


class ResultReceivers:
    """Receives and commits the results of a run in several tasks.

    `close` ends tasks that are receiving at once; tasks that are committing a batch finish it first.
    """

    def __init__(
        self, fleet: FleetRun, ledger: Ledger, committer: ResultCommitter, silence: Silence, wakeup: Wakeup
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._committer = committer
        self._silence = silence
        self._wakeup = wakeup
        self._closing = False
        self._receiving: set[asyncio.Task[None]] = set()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the tasks in a task group."""
        for _ in range(self._fleet.config.receivers):
            group.create_task(self._collect())

    def close(self) -> None:
        """End the tasks: at once if receiving, otherwise when the current batch is settled."""
        self._closing = True
        for task in self._receiving:
            task.cancel()

    async def drain(self) -> None:
        """Settle duplicates that have arrived in the meantime: they are acknowledged and change nothing."""
        fleet = self._fleet
        try:
            while messages := await fleet.results.receive(fleet.config.batch, fleet.config.batch_seconds, 0):
                await self._settle(messages)
        except MailboxConnectionError as error:
            log.debug("messages remain in %s: %s", fleet.results.name, error)

    async def _collect(self) -> None:
        while not self._closing:
            raise_if_cancelled()
            messages = await self._receive()
            if messages:
                self._ledger.received += len(messages)
                self._wakeup.wake()  # There is room for requests, while these are committed.
                async with handed_back_on_error(messages):
                    await self._settle(messages)

    async def _receive(self) -> Sequence[Message[EvalReply]]:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a receiver is a task
        self._receiving.add(task)
        try:
            return await retry_while_unavailable(self._take, "collecting results", log)
        except asyncio.CancelledError:
            if self._closing and task.uncancel() == 0:
                return ()
            raise  # Cancelled from outside, perhaps in addition.
        finally:
            self._receiving.discard(task)

    async def _take(self) -> Sequence[Message[EvalReply]]:
        fleet, config = self._fleet, self._fleet.config
        return await take(fleet.results, config.batch, lease_seconds=config.batch_seconds, wait_seconds=_WAIT_SECONDS)

    async def _settle(self, messages: Sequence[Message[EvalReply]]) -> None:
        """Commit a batch, acknowledge it, then publish the new results."""
        replies: list[EvalReply] = []
        good: list[Message[EvalReply]] = []
        for message in messages:
            problem = self._ledger.find_problem(message.body)
            if problem is None:
                replies.append(message.body)
                good.append(message)
            else:
                await self._dead_letter(message, problem)
        fresh = await self._committer.commit(replies)
        await acknowledge(self._fleet.results, good)
        self._silence.end()
        self._wakeup.wake()
        if self._fleet.work.on_result is not None:
            for result in fresh:
                await self._fleet.work.on_result(result)

    async def _dead_letter(self, message: Message[EvalReply], problem: str) -> None:
        log.warning("a reply in %s becomes a dead letter: %s", self._fleet.results.name, problem)
        try:
            await message.dead_letter(f"not a reply of this run: {problem}", error="BodyError")
        except MailboxError:
            pass  # It will be redelivered.


_LISTENING_SECONDS = 2.0
_FIRST_POLL = 0.02
_LONGEST_POLL = 0.25


class CommittedResults:
    """Counts and publishes results that workers have stored, in a task; does nothing without a shared database."""

    def __init__(self, fleet: FleetRun, stored: StoredResults, wakeup: Wakeup) -> None:
        self._fleet = fleet
        self._stored = stored
        self._wakeup = wakeup
        self._event = asyncio.Event()
        self._closing = False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the task in a task group."""
        if self._fleet.shared is not None:
            group.create_task(self._follow())

    def close(self) -> None:
        """End the task, after a last look."""
        self._closing = True
        self._event.set()

    async def _follow(self) -> None:
        shared = self._fleet.shared
        assert shared is not None  # noqa: S101 - see `start`
        listener, channel = shared.connection.listener, committed_channel(self._fleet.run_id)
        if not shared.connection.pooled:
            self._event = listener.subscribe(channel)
        poll = _FIRST_POLL
        try:
            while True:
                raise_if_cancelled()
                last = self._closing
                self._event.clear()
                found = await self._stored.read_committed()
                if found:
                    self._wakeup.wake()
                if last:
                    return
                poll = _FIRST_POLL if found else min(1.5 * poll, _LONGEST_POLL)
                await self._wait(_LISTENING_SECONDS if listener.listens(channel) else poll)
        finally:
            listener.unsubscribe(channel, self._event)
            listener.forget(channel)

    async def _wait(self, seconds: float) -> None:
        """Wait for a notification; then a moment longer, because more results follow."""
        if self._closing:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return
        if not self._closing:
            await asyncio.sleep(LINGER_SECONDS)
