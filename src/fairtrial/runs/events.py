"""What a run tells those who watch it: progress bars, tracers, message buses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fairtrial.frozen import EMPTY
from fairtrial.store.protocol import RunRecord
from fairtrial.store.redact import RedactingFilter
from fairtrial.trials.keys import TrialKey
from fairtrial.trials.result import EvalResult

log = logging.getLogger("fairtrial.runs")
log.addFilter(RedactingFilter())  # What users' code raises may quote a key.


@dataclass(frozen=True, slots=True)
class EvalRunStarted:
    """A run begins, or goes on: `done` trials were stored before."""

    run_id: str
    dataset_name: str
    sample_count: int
    planned: int
    done: int
    run: RunRecord
    notice: str | None = None  # Why an unfinished run was not resumed, or that a run has two code versions.


class ResumeWarning(UserWarning):
    """An unfinished run was not resumed because it differs, or is resumed by other code."""


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A trial is about to be executed."""

    run_id: str
    key: TrialKey


@dataclass(frozen=True, slots=True)
class SampleEvaluated:
    """A trial has a result; it is about to be stored."""

    run_id: str
    result: EvalResult


@dataclass(frozen=True, slots=True)
class ExperimentFigures:
    """The figures of one experiment at the end of a run; None where nothing was scored."""

    pass_rate: float | None
    mean_score: float | None
    total_tokens: int


@dataclass(frozen=True, slots=True)
class EvalRunCompleted:
    """A run ended; everything it did is stored.

    `pass_rate` and `mean_score` are those of the run's one experiment; with several they are None, because a mean
    over different systems describes none of them: `experiments` has the figures of each, by name.
    """

    run_id: str
    status: str
    pass_rate: float | None
    mean_score: float | None
    total_tokens: int
    experiments: Mapping[str, ExperimentFigures] = EMPTY


type RunEvent = EvalRunStarted | TrialStarted | SampleEvaluated | EvalRunCompleted


class Observer(Protocol):
    """Anything with a `publish` method: a progress display, a tracer, an event bus."""

    def publish(self, event: RunEvent) -> None:
        """Take note of an event; quickly, this is called on the event loop."""
        ...


class Observers:
    """Several observers behind one; what they raise is logged and stops nothing."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def publish(self, event: RunEvent) -> None:
        """Tell everyone."""
        for observer in self._observers:
            try:
                observer.publish(event)
            except Exception:
                log.exception("an observer failed on %s; the run goes on", type(event).__name__)
