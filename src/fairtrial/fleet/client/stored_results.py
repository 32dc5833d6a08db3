"""Compares the ledger of a run with its store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import batched, islice

from fairtrial.fleet.client.commits import ResultCommitter
from fairtrial.fleet.client.fleet_run import FleetRun
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.silence import Silence
from fairtrial.fleet.log import log
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
