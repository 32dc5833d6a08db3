"""Submits the requests of a run in plan order, within a window.

The position is stored with the run before anything is sent, so a client that is killed and restarted does not resend
requests that are still queued.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Self

from fairtrial.errors import SecretInDataError
from fairtrial.fleet.client.batches import send_all
from fairtrial.fleet.client.commits import ResultCommitter
from fairtrial.fleet.client.fleet_run import FleetRun
from fairtrial.fleet.client.ledger import Ledger
from fairtrial.fleet.client.window import Window
from fairtrial.fleet.messages import EvalRequest
from fairtrial.mailbox.protocol import MailboxDepth
from fairtrial.runs.events import TrialStarted
from fairtrial.runs.plan import PlannedTrial
from fairtrial.store.notes import FleetNote, write_notes
from fairtrial.store.redact import Redactor, current
from fairtrial.store.rows import refuse_secrets
from fairtrial.trials.sample_types import PLAIN

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
        if self._committer.is_stopped(trial):
            self._held_back[trial.ordinal >> 3] |= 1 << (trial.ordinal & 7)
            return False
        return True

    def end_stopped(self) -> None:
        """End the run if nothing is missing but the trials of experiments that were stopped."""
        held_back = sum(byte.bit_count() for byte in self._held_back)
        if held_back and self._ledger.missing <= held_back:
            self._committer.end_stopped()

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
