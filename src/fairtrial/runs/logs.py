"""Log records as JSON, one object a line, with the ids of run, trial, attempt and worker as fields."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from fairtrial.base.frozen import EMPTY
from fairtrial.store.redact import RedactingFilter, current
from fairtrial.trials.context import running_trial
from fairtrial.trials.keys import TrialKey

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
