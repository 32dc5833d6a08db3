"""Tracks the time without results: its duration, its cause, and when a client stops waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from fairtrial.fleet.client.fleet_run import FleetRun, log
from fairtrial.mailbox import server as bulk
from fairtrial.mailbox.protocol import MailboxDepth

_CODE_SHOWN = 8  # Characters of a fingerprint: enough to distinguish the versions of one suite.


class Silence:
    """The time since the last result arrived.

    Attributes:
        handed_back: Whether workers have handed requests back since the last result.
    """

    def __init__(self, fleet: FleetRun) -> None:
        self._fleet = fleet
        self._began = time.monotonic()
        self._hinted = False
        self._lost_named: set[str] = set()  # The lost workers that were logged since the last result.
        self._next_look = 0.0
        self._unserved_since: float | None = None  # The time since which no worker has had this run's code.
        self._had_workers = False  # Whether workers have announced themselves during this run.
        self.handed_back = False

    def seconds(self, now: float) -> float:
        """Return the seconds since the last result."""
        return now - self._began

    def end(self) -> None:
        """Reset: a worker's result has arrived."""
        self.restart()
        self._hinted = self.handed_back = False
        self._lost_named.clear()
        self._unserved_since = None

    def restart(self) -> None:
        """Restart the clock: results appeared in the store, or lost requests were resent."""
        self._began = time.monotonic()

    def note_depth(self, depth: MailboxDepth) -> None:
        """Record the depth of the request mailbox."""
        self.handed_back = self.handed_back or depth.delayed > 0

    def is_worth_a_look(self, now: float) -> bool:
        """Return whether it is time to call `look_for_workers`."""
        return now >= self._next_look

    def is_worth_a_hint(self, now: float) -> bool:
        """Return whether there has been no result for so long that the reason is worth logging."""
        return self.seconds(now) >= self._fleet.config.hint_seconds

    async def look_for_workers(self, depth: MailboxDepth, *, hint_due: bool) -> None:
        """Look which workers there are. If a hint is due, log why no results arrive.

        The run is stopped when no worker has had its code for `worker_seconds`.
        """
        fleet, config, suite, code = self._fleet, self._fleet.config, self._fleet.run.suite, self._fleet.fingerprint
        announced = await fleet.ask_mailbox(lambda: bulk.announced(fleet.requests), "looking for workers")
        now = time.monotonic()
        self._had_workers = self._had_workers or bool(announced)
        shortest = config.hint_seconds / 10
        if not hint_due:
            # Also while results arrive: only who has seen the workers can tell that they are gone.
            left = config.hint_seconds - self.seconds(now)
            self._next_look = now + max(shortest, min(left, config.hint_seconds / 2))
            return
        self._next_look = now + shortest
        if not self._hinted:
            gone = self._had_workers and announced is not None and not announced
            reason = hint(
                depth, suite, handed_back=self.handed_back, announced=announced, fingerprint=code, workers_gone=gone
            )
            if reason is not None:  # None: workers are busy with long trials.
                self._hinted = True
                log.warning(reason)
        if announced:
            await self._log_lost_workers()
        # A worker that does not announce itself still shows by the messages it has leased.
        if announced is None or has_worker(announced, code) or (not announced and depth.in_flight):
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = now
        elif now - self._unserved_since >= config.worker_seconds:
            waited = f"no worker has had this run's code for {config.worker_seconds:g} s"
            reason = f"{waited}. {missing_worker(suite, announced, code)}"
            fleet.stop.request(reason, resumable=True, incomplete=True)

    async def _log_lost_workers(self) -> None:
        """Log which lost workers hold requests while others are alive, and when these are delivered again."""
        fleet = self._fleet
        workers = await fleet.ask_mailbox(lambda: bulk.workers(fleet.requests), "looking for workers")
        for worker in workers:
            if not worker.alive and worker.in_flight and worker.name not in self._lost_named:
                self._lost_named.add(worker.name)
                log.warning(lost_worker(worker, fleet.run.suite))


def lost_worker(worker: bulk.ServingWorker, suite: str) -> str:
    """Return the message that a lost worker holds requests, with the time after which they are delivered again."""
    one = worker.in_flight == 1
    requests = "1 request" if one else f"{worker.in_flight} requests"
    return (
        f"{requests} of suite {suite!r} {'is' if one else 'are'} held by worker {worker.name!r}, which was last heard "
        f"of {worker.silent_seconds:.0f} s ago. {'It is' if one else 'They are'} delivered to another worker within "
        f"{math.ceil(worker.leased_seconds) + 1} s"
    )


def hint(
    depth: MailboxDepth,
    suite: str,
    *,
    handed_back: bool = False,
    announced: Sequence[str] | None = None,
    fingerprint: str = "",
    workers_gone: bool = False,
) -> str | None:
    """Return why no results arrive, as far as the mailbox shows it; None if workers are busy.

    `handed_back` means that requests were handed back earlier: between two refusals all of them are waiting, as if
    there were no worker. `announced` are the fingerprints of the workers, `fingerprint` is the run's. `workers_gone`
    means that there were workers and are none any more: what is in flight are leases of dead workers.
    """
    if announced and not has_worker(announced, fingerprint):
        return missing_worker(suite, announced, fingerprint)
    if workers_gone and (unsettled := depth.waiting + depth.delayed + depth.in_flight):
        return (
            f"{unsettled} requests of suite {suite!r} are waiting, but no worker takes them any more: the workers of "
            "this run are gone. Start one with `fairtrial worker SUITE --mailbox URL`"
        )
    if depth.in_flight or announced:
        return None
    if handed_back or depth.delayed:
        return (
            f"workers refuse the requests of suite {suite!r} ({depth.delayed} at present): their code or settings "
            "differ from this client's; see their log"
        )
    if depth.waiting:
        return (
            f"{depth.waiting} requests of suite {suite!r} are waiting, but no worker takes them: start one with "
            "`fairtrial worker SUITE --mailbox URL`"
        )
    return None


def has_worker(announced: Sequence[str], fingerprint: str) -> bool:
    """Return whether one of the announced workers accepts requests with this fingerprint."""
    return any(not code or not fingerprint or code == fingerprint for code in announced)


def missing_worker(suite: str, announced: Sequence[str], fingerprint: str) -> str:
    """Return the message that no worker can serve a run: the connected workers, and the remedy."""
    if not announced:
        return f"No worker of suite {suite!r} is connected: start one with `fairtrial worker SUITE --mailbox URL`"
    several = len(announced) > 1
    codes = ", ".join(sorted({code[:_CODE_SHOWN] for code in announced}))
    return (
        f"{len(announced)} worker{'s' if several else ''} of suite {suite!r} {'are' if several else 'is'} connected, "
        f"but with code {codes}; this run needs code {fingerprint[:_CODE_SHOWN]}: start workers with this client's "
        "code, or with --allow-drift"
    )
