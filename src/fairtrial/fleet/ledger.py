"""Which trials of a plan are stored, which are out with the fleet, and how far submission has come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from itertools import chain
from typing import Any

from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.fleet.wire import EvalReply
from fairtrial.frozen import EMPTY
from fairtrial.runs.plan import PlannedTrial, missing_trials
from fairtrial.store.protocol import RunRecord


class Ledger:
    """The books of one run on a fleet. Memory: one bit per trial, and the samples that are out.

    Args:
        run: The run.
        dataset: Its samples.
        done: The bitmap of stored trials; it is changed here.
        cursor: Everything before this place in the plan has been sent, or was about to be when the last client ended.
        attempts: Stored trials that are to be executed again, with the number of the attempt.
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
        self.cursor = self.position = min(cursor, run.planned)
        self.missing = run.planned - sum(byte.bit_count() for byte in done)
        self.outstanding = self._missing_before(cursor) - sum(ordinal < cursor for ordinal in attempts)

    def _missing_before(self, place: int) -> int:
        before = _up_to(self._done, place, fill=False)
        return place - sum(byte.bit_count() for byte in before)

    def is_done(self, ordinal: int) -> bool:
        """Whether a trial needs no further result."""
        return bool(self._done[ordinal >> 3] >> (ordinal & 7) & 1)

    def to_send(self) -> Iterator[PlannedTrial]:
        """What nobody has sent yet, in plan order; read as it is needed."""
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

    def lost(self) -> Iterator[PlannedTrial]:
        """What was sent and has no result; asked for when it is known to be nowhere. Nothing is out afterwards."""
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

    def sent(self, trials: list[PlannedTrial]) -> None:
        """These are going out."""
        for trial in trials:
            self._out[trial.ordinal] = trial.sample
            self.position = max(self.position, trial.ordinal + 1)
        self.outstanding += len(trials)

    def problem(self, reply: EvalReply) -> str | None:
        """Why a reply cannot be one of this run's, if so."""
        result = reply.result
        run = self._run
        if result.key.run_id != run.run_id:
            return f"it belongs to run {result.key.run_id}"
        if result.ordinal >= run.planned:
            return f"the plan ends before trial {result.ordinal}"
        sample_ordinal, experiment, repeat = run.split(result.ordinal)
        named = (reply.sample_ordinal, result.key.experiment, result.key.repeat)
        if named != (sample_ordinal, run.experiments[experiment], repeat):
            return f"trial {result.key} is not at place {result.ordinal} of the plan"
        return None

    def sample(self, reply: EvalReply) -> Sample[Any, Any]:
        """The sample of a reply's trial."""
        found = self._out.get(reply.result.ordinal)
        return self._dataset[reply.sample_ordinal] if found is None else found

    def is_fresh(self, reply: EvalReply) -> bool:
        """Whether the reply brings a trial what it lacks: any result or, when errors are tried again, a new one."""
        result = reply.result
        if self.is_done(result.ordinal) or result.outcome == "not_run":
            return False
        return result.success or result.attempt >= self._attempts.get(result.ordinal, 1)

    def retries_out(self) -> Iterator[tuple[int, int]]:
        """The trials that are to be executed again and have no result of that yet, with the number of the attempt."""
        return ((ordinal, attempt) for ordinal, attempt in self._attempts.items() if not self.is_done(ordinal))

    def news(self, done: bytearray) -> list[int]:
        """The trials that are done in this bitmap of the store's, and were not known to be."""
        found: list[int] = []
        for place, (known, stored) in enumerate(zip(self._done, done, strict=False)):
            new = stored & ~known
            if new:
                found += [
                    8 * place + bit for bit in range(8) if new >> bit & 1 and 8 * place + bit not in self._attempts
                ]
        return found

    def known(self) -> bytes:
        """The bitmap of the trials that are known to be stored, for `reopen`."""
        return bytes(self._done)

    def reopen(self, known: bytes, stored: bytearray, refused: Set[int]) -> Iterator[PlannedTrial] | None:
        """The trials that were known to be stored before the store was read, and are not in it; None if there are none.

        They are missing from now on. Trials of which the store takes nothing (`refused`) are left out.
        """
        again = bytearray(b"\xff" * len(self._done))
        for place, (ours, theirs) in enumerate(zip(known, stored, strict=False)):
            for bit in range(8) if ours & ~theirs else ():
                ordinal = 8 * place + bit
                if ours & ~theirs & 1 << bit and ordinal not in refused and self.is_done(ordinal):
                    again[place] &= ~(1 << bit)
                    self._done[place] &= ~(1 << bit)
                    self.missing += 1
        if again == b"\xff" * len(again):
            return None
        return self._numbered(missing_trials(self._run, self._dataset, again))

    def back(self, ordinal: int) -> None:
        """A trial has its result."""
        if self.is_done(ordinal):
            return
        self._done[ordinal >> 3] |= 1 << (ordinal & 7)
        self._out.pop(ordinal, None)
        self.missing -= 1
        if ordinal < self.position:
            self.outstanding = max(0, self.outstanding - 1)


def _up_to(done: bytearray, place: int, *, fill: bool) -> bytearray:
    """The bitmap of the first `place` trials in whole bytes.

    With `fill`, those trials count as done and the last byte keeps what is known of the trials behind them;
    without it, the last byte knows nothing of them.
    """
    whole, rest = divmod(place, 8)
    head = bytearray(b"\xff" * whole) if fill else done[:whole]
    if rest:
        low = (1 << rest) - 1
        head.append(done[whole] | low if fill else done[whole] & low)
    return head
