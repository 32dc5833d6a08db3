"""Errors of trials: where they were raised, and which of them belong together."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fairtrial.reports.figures.metrics import ERRORS
from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult, Outcome

READ_ERRORS = 5_000
"""How many errors of a run are read to group them."""

_CALL = re.compile(r'^ *File "([^"\n]{1,1000})", line (\d{1,9}), in (\S{1,200})', re.MULTILINE)
_OURS = re.compile(
    r"[/\\]fairtrial[/\\](?:offload\.py|(?:trials|isolation|fleet|runs|scoring|judging|models|session)[/\\])"
)
_INSTALLED = re.compile(r"[/\\](?:(?:site|dist)-packages|python\d(?:\.\d+)?)[/\\]|^<")
_NUMBER = re.compile(r"\d+")
_SHOWN = 200  # Characters of an error in one line.


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Trials that ended in the same error: of one type and raised in one place, or else with the same text.

    `error` is the text of the first one; `varied` says that others have another text. Numbers in texts do not count.
    """

    trials: int
    outcome: Outcome
    error: str
    location: str  # As `file.py:8 in name`; empty if unknown.
    sample_id: str  # Of the first trial.
    varied: bool = False

    def __str__(self) -> str:
        return f"{self.trials:,} x {error_line(self.error, self.location, varied=self.varied)}"


def error_line(error: str, location: str = "", *, varied: bool = False) -> str:
    """Return an error in one line, with the place where it was raised."""
    text = " ".join(error.split())
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    return f"{text}{' and similar' if varied else ''}{f' ({location})' if location else ''}"


def error_key(result: EvalResult) -> tuple[str, ...]:
    """Return what errors of one group have in common."""
    error, location = plain_error(result), error_location(result)
    message = error.partition(":")[0] if location else _NUMBER.sub("0", error)
    return result.outcome, message, location


def group_errors(results: Iterable[EvalResult]) -> list[ErrorGroup]:
    """Group the errors among results, the most frequent first."""
    groups: dict[tuple[str, ...], list[EvalResult]] = {}
    counts: dict[tuple[str, ...], int] = {}
    for result in results:
        if result.outcome not in ERRORS:
            continue
        key = error_key(result)
        counts[key] = counts.get(key, 0) + 1
        examples = groups.setdefault(key, [result])
        if len(examples) == 1 and result.error != examples[0].error:
            examples.append(result)
    found = [
        ErrorGroup(
            counts[key], first.outcome, plain_error(first), error_location(first), first.sample_id, varied=bool(others)
        )
        for key, (first, *others) in groups.items()
    ]
    return sorted(found, key=lambda group: -group.trials)


def read_error_groups(store: RunStore, run_id: str, experiment: str | None = None) -> list[ErrorGroup]:
    """Read and group the first `READ_ERRORS` errors of a run, or of one experiment, in plan order."""
    return group_errors(store.results(run_id, experiment=experiment, outcomes=ERRORS, limit=READ_ERRORS, outputs=False))


def plain_error(result: EvalResult) -> str:
    """Return the text of an error; without one, its outcome."""
    return (result.error or result.outcome.replace("_", " ")).removeprefix("fairtrial.errors.")


def traceback_of(result: EvalResult) -> str:
    """The last calls before the error of a trial, from the first outside Fairtrial on; nothing if none were stored."""
    stored = result.own_metadata.get("traceback")
    return _from_first_call(stored) if isinstance(stored, str) else ""


def _from_first_call(stored: str) -> str:
    first = next((call for call in _CALL.finditer(stored) if not _OURS.search(call[1])), None)
    return textwrap.dedent(stored[first.start() if first else 0 :]).rstrip()


def error_location(result: EvalResult) -> str:
    """Where the error of a trial was raised, as `file.py:8 in name`: the last call in a file that is not installed."""
    stored = result.own_metadata.get("traceback")
    return _location(stored) if isinstance(stored, str) else ""


@lru_cache(maxsize=128)  # Errors of one kind have the same traceback.
def _location(stored: str) -> str:
    calls = _CALL.findall(_from_first_call(stored))
    own = [call for call in calls if not _OURS.search(call[0]) and not _INSTALLED.search(call[0])]
    if not own:
        return ""
    file, line, name = own[-1]
    return f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line} in {name}"


def error_text(result: EvalResult) -> str:
    """The error of a trial, and where it was raised."""
    location = error_location(result)
    error = (result.error or "").removeprefix("fairtrial.errors.")
    return f"{error} ({location})" if location else error
