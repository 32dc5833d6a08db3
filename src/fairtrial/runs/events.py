"""Events of runs for observers, and log records."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fairtrial.base.formatting import count
from fairtrial.base.frozen import EMPTY
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import ControlDispatcher
from fairtrial.store.protocol import RunRecord
from fairtrial.store.redact import RedactingFilter, current
from fairtrial.trials.context import TrialKey, running_trial
from fairtrial.trials.result import EvalResult

type LogFormat = Literal["text", "json"]

_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))
_fields: ContextVar[Mapping[str, Any]] = ContextVar("fairtrial_log_fields", default=EMPTY)


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add fields to every JSON record that is logged in here, by this task and the tasks it starts."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def trial_fields(key: TrialKey, attempt: int | None = None) -> dict[str, Any]:
    """The fields that name a trial, for `extra=`."""
    return {"run": key.run_id, "trial": str(key)} | ({} if attempt is None else {"attempt": attempt})


class JsonLogFormatter(logging.Formatter):
    """Formats a log record as one line of JSON, without secrets.

    Every record has `time` (UTC), `level`, `logger` and `message`. It has `run`, `trial`, `attempt` and `worker` where
    they are known: what user code logs during a trial has them too. What is passed as `extra=` becomes a field.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        fields: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= _fields.get()
        trial = running_trial()
        if trial is not None:
            fields |= trial_fields(trial.key, trial.attempt)
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        for name, text in (("exception", record.exc_text), ("stack", record.stack_info)):
            if text:
                fields[name] = text
        plain = {name: value if isinstance(value, str | int) else str(value) for name, value in fields.items()}
        return current().json(json.dumps(plain))


def start_logging(log_format: LogFormat, level: int) -> Callable[[], None]:
    """Log to standard error for a whole process; returns a function that undoes it.

    Text is what Fairtrial logs. JSON is everything that is logged, so that each line can be parsed.
    """
    handler = logging.StreamHandler()
    ours = logging.getLogger("fairtrial")
    logger = logging.getLogger() if log_format == "json" else ours
    before = logger.handlers[:], ours.level, ours.propagate
    if log_format == "json":
        handler.setFormatter(JsonLogFormatter())
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handler.addFilter(RedactingFilter())
        ours.propagate = False
    logger.handlers[:] = [handler]
    ours.setLevel(level)

    def undo() -> None:
        logger.handlers[:], level, ours.propagate = before
        ours.setLevel(level)
        if log_format == "json":
            logging.captureWarnings(False)

    return undo


log = logging.getLogger("fairtrial.runs")
log.addFilter(RedactingFilter())  # Errors of user code may contain a key.


@dataclass(frozen=True, slots=True)
class EvalRunStarted:
    """A run starts, or is resumed with `done` stored trials."""

    run_id: str
    dataset_name: str
    sample_count: int
    planned: int = 0
    done: int = 0
    run: RunRecord = None  # type: ignore[assignment]  # Every run has one; an event made for a test need not.
    notice: str | None = None  # Why an unfinished run was not resumed, or that a run has two code versions.
    retried: int = 0  # Stored trials that ended in an error and are executed or scored again, if that was asked for.

    def resume_text(self, name: str) -> str:
        """Say that a run is resumed, or which of its trials are retried; `name` is what to call the run."""
        of = (
            f" of {count(self.planned, 'trial')}" if self.planned else ""
        )  # Of live traces, nobody knows how many come.
        stored = f"{self.done:,}{of} are stored"
        if not self.retried:
            return f"resuming {name}: {stored}"
        if self.done == self.planned:
            return f"retrying {count(self.retried, 'trial')} of {name}: the others are stored"
        return f"resuming {name}: {stored}, of which {self.retried:,} are retried"


class ResumeWarning(UserWarning):
    """An unfinished run was not resumed because it differs, or is resumed by other code."""


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A trial is about to be executed."""

    run_id: str
    key: TrialKey


@dataclass(frozen=True, slots=True)
class SampleEvaluated:
    """A trial has a result; it is about to be stored. `sample` is None if a fleet executed the trial."""

    run_id: str
    result: EvalResult
    sample: Sample[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class BatchesProgressed:
    """How far the batches at the providers of models are, as a line for people; "" if none is under way."""

    run_id: str
    line: str


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
    pass_rate: float | None
    mean_score: float | None
    total_tokens: int
    status: str = "finished"
    experiments: Mapping[str, ExperimentFigures] = EMPTY


type RunEvent = EvalRunStarted | TrialStarted | SampleEvaluated | BatchesProgressed | EvalRunCompleted
"""The events that observers of a run receive."""


class Observer(Protocol):
    """Anything with a `publish` method: a progress display, a tracer, an event bus."""

    def publish(self, event: RunEvent) -> None:
        """Handle an event. Must be quick: this is called on the event loop."""
        ...


_of_every_run: tuple[Observer, ...] = ()


def observe_every_run(observer: Observer | None) -> None:
    """Publish the events of every run that starts from now on to this observer too; None for no such observer."""
    global _of_every_run
    _of_every_run = () if observer is None else (observer,)


class Observers:
    """Combines several observers, with that of every run; their errors are logged and do not affect the run."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        observers = self._observers = (*observers, *_of_every_run)
        # An observer that has no use for them says so, and events of which every trial has one are not even made.
        self.hears_starts = any(not getattr(observer, "ignores_trial_starts", False) for observer in observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    @property
    def announce_resume(self) -> bool:
        """True if an observer says that a run is resumed, so that it need not be logged."""
        return any(getattr(observer, "announces_resume", False) for observer in self._observers)

    @property
    def dispatcher(self) -> ControlDispatcher | None:
        """The dispatcher for events that trials record, if one of the observers is a dispatcher."""
        found = [observer for observer in self._observers if isinstance(observer, ControlDispatcher)]
        if len(found) < 2:
            return found[0] if found else None
        several = ControlDispatcher()
        for dispatcher in found:
            several.subscribe(object, dispatcher.pass_on)
        return several

    def publish(self, event: RunEvent) -> None:
        """Publish an event to all observers."""
        for observer in self._observers:
            try:
                observer.publish(event)
            except Exception:
                log.exception("an observer failed on %s; the run continues", type(event).__name__)
