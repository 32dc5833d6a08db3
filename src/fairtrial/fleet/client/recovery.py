"""Requests that are sent again, and withdrawn."""

from __future__ import annotations

import time
from itertools import islice

from fairtrial.errors import MailboxConnectionError
from fairtrial.fleet.client.fleet_run import FleetRun, log
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.results import StoredResults
from fairtrial.fleet.client.silence import Silence
from fairtrial.fleet.client.submission import ResultCommitter, Submission, acknowledge, count_requests, hand_back
from fairtrial.fleet.messages import EvalRequest
from fairtrial.mailbox import server as bulk
from fairtrial.mailbox.protocol import MailboxDepth, Message


async def withdraw_requests(fleet: FleetRun, *, stale_only: bool = False) -> list[int]:
    """Remove the requests of a run that no worker has begun from the mailbox; returns the ordinals of their trials.

    With `stale_only`, only requests made from other code than this client's.
    """
    withdrawn: list[int] = []
    others: list[Message[EvalRequest]] = []
    try:
        while messages := await fleet.requests.receive(fleet.config.batch, fleet.config.lease_seconds, 0):
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

    async def read_store(self) -> None:
        """Record the results that other processes have stored."""
        await self._stored.read()

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
        if coming or ledger.returned != before or await self._stored.read():
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
