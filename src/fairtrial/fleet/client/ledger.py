"""Tracks which trials of a plan are stored, which are outstanding, and how far submission has come."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

from fairtrial.base.frozen import EMPTY
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.fleet.messages import EvalReply
from fairtrial.runs.plan import PlannedTrial, missing_trials
from fairtrial.store.protocol import RunRecord

_INCOMPLETE = re.compile(rb"[^\xff]", re.DOTALL)


class Ledger:
    """The state of every trial of one fleet run. Memory: one bit per trial, plus the outstanding samples.

    Args:
        run: The run.
        dataset: Its samples.
        done: The bitmap of stored trials; modified in place.
        cursor: All trials before this ordinal were sent, or were about to be sent when the last client ended.
        attempts: Stored trials to be retried, with the number of the attempt.
    """

    def __init__(
        self,
        run: RunRecord,
        dataset: Dataset[Any, Any],
        done: bytearray,
        *,
        cursor: int = 0,
        attempts: Mapping[int, int] = EMPTY,  # type: ignore[assignment]  # empty
    ) -> None:
        self._run = run
        self._dataset = dataset
        self._attempts = attempts
        self._done = done
        done.extend(bytes((run.planned + 7) // 8 - len(done)))
        for ordinal in attempts:
            done[ordinal >> 3] &= ~(1 << (ordinal & 7))
        self._out: dict[int, Sample[Any, Any]] = {}
        self._committing: set[int] = set()
        self._all_done = 0  # All trials before this ordinal have a result.
        self.received = 0  # Results that arrived, also those that are still to be committed, and duplicates.
        self.returned = 0  # Results that counted.
        self.cursor = self.position = min(cursor, run.planned)
        self.missing = run.planned - sum(byte.bit_count() for byte in done)
        self.outstanding = self._missing_before(cursor) - sum(ordinal < cursor for ordinal in attempts)

    def _missing_before(self, place: int) -> int:
        before = _up_to(self._done, place, fill=False)
        return place - sum(byte.bit_count() for byte in before)

    def is_done(self, ordinal: int) -> bool:
        """Return whether a trial needs no further result."""
        return bool(self._done[ordinal >> 3] >> (ordinal & 7) & 1)

    def awaits_result(self, ordinal: int) -> bool:
        """Return whether a trial needs a result that this process is not committing already."""
        return not self.is_done(ordinal) and ordinal not in self._committing

    def to_send(self) -> Iterator[PlannedTrial]:
        """Iterate over the trials that have not been sent, in plan order."""
        again = bytearray(b"\xff" * len(self._done))
        for ordinal in self._attempts:
            if ordinal < self.position:
                again[ordinal >> 3] &= ~(1 << (ordinal & 7))
        ahead = _up_to(self._done, self.position, fill=True) + self._done[(self.position + 7) // 8 :]
        return self._numbered(
            chain(
                missing_trials(self._run, self._dataset, again),
                missing_trials(self._run, self._dataset, ahead),
            )
        )

    def take_lost(self) -> Iterator[PlannedTrial]:
        """Iterate over the sent trials without a result, which are known to be lost; none is outstanding afterwards."""
        self.outstanding = 0
        self._out.clear()
        kept = _up_to(self._done, self.position, fill=False)
        if kept and self.position & 7:
            kept[-1] |= 0xFF << (self.position & 7) & 0xFF
        kept.extend(b"\xff" * (len(self._done) - len(kept)))
        return self._numbered(missing_trials(self._run, self._dataset, kept))

    def _numbered(self, trials: Iterator[PlannedTrial]) -> Iterator[PlannedTrial]:
        for trial in trials:
            if not self.is_done(trial.ordinal) and trial.ordinal not in self._out:
                attempt = self._attempts.get(trial.ordinal, 1)
                yield trial if attempt == 1 else trial._replace(attempt=attempt)

    def mark_sent(self, trials: list[PlannedTrial]) -> None:
        """Mark trials as outstanding."""
        for trial in trials:
            self._out[trial.ordinal] = trial.sample
            self.position = max(self.position, trial.ordinal + 1)
        self.outstanding += len(trials)

    def find_problem(self, reply: EvalReply) -> str | None:
        """Return why a reply cannot belong to this run; None if it can."""
        result = reply.result
        run = self._run
        if result.key.run_id != run.run_id:
            return f"it belongs to run {result.key.run_id}"
        if result.ordinal >= run.planned:
            return f"its ordinal {result.ordinal} is outside the plan"
        sample_ordinal, experiment, repeat = run.split(result.ordinal)
        named = (reply.sample_ordinal, result.key.experiment, result.key.repeat)
        if named != (sample_ordinal, run.experiments[experiment], repeat):
            return f"trial {result.key} does not have ordinal {result.ordinal} in the plan"
        return None

    def sample(self, reply: EvalReply) -> Sample[Any, Any]:
        """Return the sample of a reply's trial."""
        found = self._out.get(reply.result.ordinal)
        return self._dataset[reply.sample_ordinal] if found is None else found

    def is_fresh(self, reply: EvalReply) -> bool:
        """Return whether the reply is the first result of its trial or, for retried trials, of the current attempt."""
        result = reply.result
        if not self.awaits_result(result.ordinal) or result.outcome == "not_run":
            return False
        return result.success or result.attempt >= self._attempts.get(result.ordinal, 1)

    @contextmanager
    def committing(self, ordinals: Set[int]) -> Iterator[None]:
        """Mark trials as being committed by this process, so that nothing else takes their results for new ones."""
        self._committing |= ordinals
        try:
            yield
        finally:
            self._committing -= ordinals

    def retries_out(self) -> Iterator[tuple[int, int]]:
        """Iterate over the retried trials without a new result, with the number of the attempt."""
        return ((ordinal, attempt) for ordinal, attempt in self._attempts.items() if self.awaits_result(ordinal))

    def find_new(self, done: bytearray) -> list[int]:
        """Return the trials that another process has stored: done in this bitmap of the store, not in the ledger."""
        found: list[int] = []
        for place, (known, stored) in enumerate(zip(self._done, done, strict=False)):
            new = stored & ~known
            found += [8 * place + bit for bit in range(8) if new >> bit & 1] if new else ()
        return [ordinal for ordinal in found if ordinal not in self._attempts and ordinal not in self._committing]

    def awaited(self) -> list[int]:
        """Return the trials that were sent and have no result, in plan order, without those that are retried."""
        whole, end = self._all_done >> 3, self.position + 7 >> 3
        found = [
            ordinal
            for place in _INCOMPLETE.finditer(self._done, whole, end)
            for ordinal in range(8 * place.start(), min(8 * place.end(), self.position))
            if self.awaits_result(ordinal)
        ]
        self._all_done = found[0] if found else self.position
        return [ordinal for ordinal in found if ordinal not in self._attempts] if self._attempts else found

    def done_snapshot(self) -> bytes:
        """Return the bitmap of the trials known to be stored, for `reopen`."""
        return bytes(self._done)

    def reopen(self, known: bytes, stored: bytearray, refused: Set[int]) -> Iterator[PlannedTrial] | None:
        """Return the trials that the store has lost: known to be stored before it was read, and not in it; None if
        none.

        They count as missing from now on. Trials whose results the store refuses (`refused`) are left out.
        """
        again = bytearray(b"\xff" * len(self._done))
        for place, (ours, theirs) in enumerate(zip(known, stored, strict=False)):
            for bit in range(8) if ours & ~theirs else ():
                ordinal = 8 * place + bit
                if ours & ~theirs & 1 << bit and ordinal not in refused and self.is_done(ordinal):
                    again[place] &= ~(1 << bit)
                    self._done[place] &= ~(1 << bit)
                    self._all_done = min(self._all_done, ordinal)
                    self.missing += 1
        if again == b"\xff" * len(again):
            return None
        return self._numbered(missing_trials(self._run, self._dataset, again))

    def mark_done(self, ordinal: int) -> None:
        """Mark a trial as done."""
        if self.is_done(ordinal):
            return
        self._done[ordinal >> 3] |= 1 << (ordinal & 7)
        self._out.pop(ordinal, None)
        self.missing -= 1
        self.returned += 1
        if ordinal < self.position:
            self.outstanding = max(0, self.outstanding - 1)

    def mark_withdrawn(self, ordinals: Iterable[int]) -> None:
        """Mark trials as not sent after their requests were withdrawn."""
        count = sum(not self.is_done(ordinal) for ordinal in ordinals)
        self.outstanding = max(0, self.outstanding - count)


def _up_to(done: bytearray, place: int, *, fill: bool) -> bytearray:
    """Return the bitmap of the first `place` trials in whole bytes.

    With `fill`, those trials count as done and the last byte keeps the bits of the trials after them; without it, the
    last byte has no bits for later trials.
    """
    whole, rest = divmod(place, 8)
    head = bytearray(b"\xff" * whole) if fill else done[:whole]
    if rest:
        low = (1 << rest) - 1
        head.append(done[whole] | low if fill else done[whole] & low)
    return head
