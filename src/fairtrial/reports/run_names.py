"""Runs found by name, and the commands that rerun them."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.errors import ConfigurationError, UnknownRunError
from fairtrial.reports.render.safe_text import plain
from fairtrial.store.protocol import RunRecord, RunStore

PART = "+part"
"""Ends the name of a suite of which only some samples were run."""


def base_words(run: RunRecord) -> list[str]:
    """Return the words after `fairtrial` for the suite of a run: `run evals.py`, or `try ask.md` with its options."""
    words = run.noted.command_line or ("SUITE",)
    return list(words if words[0] == "try" else ("run", *words))


def resume_command(run: RunRecord, *, max_cost: float | None = None) -> str:
    """Return the command that resumes a run, with the options that it was started with."""
    words = run.noted.resume_words
    if words is None:
        words = tuple(base_words(run))
    if max_cost is not None:
        before = [place for place, word in enumerate(words) if word == "--max-cost"]
        kept = [word for place, word in enumerate(words) if place not in before and place - 1 not in before]
        words = (*(word for word in kept if not word.startswith("--max-cost=")), "--max-cost", f"{max_cost:g}")
    hint = " (with the password in place of [redacted])" if any("[redacted]" in word for word in words) else ""
    return shlex.join(["fairtrial", *words]) + hint


def rerun_command(run: RunRecord, *, sample: str | None = None, experiment: str | None = None) -> str:
    """Return the command that runs a suite again, or one sample of it."""
    words = ["fairtrial", *base_words(run)]
    if experiment is not None and len(run.experiments) > 1:
        words += ["--experiment", experiment]
    if sample is not None:
        words += ["--sample", sample]
    return shlex.join(words)


_NAME = re.compile(r"(?P<name>[^:@]+)(?P<rest>(?:[:@][^:@]+)*)")
_SHORTEST = 4


class UnknownNameError(UnknownRunError, ConfigurationError):
    """There is no run with that name; the remedy suggests similar ones."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n{remedy}")
        self.what = what
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class RunName:
    """A run, and one of its experiments if the name includes it."""

    run: RunRecord
    experiment: str | None = None

    @property
    def experiments(self) -> tuple[str, ...]:
        """The named experiment, or all experiments of the run."""
        return self.run.experiments if self.experiment is None else (self.experiment,)

    def __str__(self) -> str:
        return name_of(self.run) + (f":{self.experiment}" if self.experiment else "")


def name_of(run: RunRecord) -> str:
    """Return the name of a run, safe to display."""
    return plain(run.name)


def find_run(store: RunStore, text: str) -> RunName:
    """Find the run with a name, with its stored status.

    Raises:
        UnknownNameError: with the names that are near.
    """
    matched = _NAME.fullmatch(text)
    if matched is None:
        raise UnknownNameError(f"invalid run name {plain(text)!r}", _FORMS)
    which: str | None = None
    experiment: str | None = None
    for part in re.findall(r"[:@][^:@]+", matched["rest"]):
        if part[0] == "@" and which is None:
            which = part[1:]
        elif part[0] == ":" and experiment is None:
            experiment = part[1:]
        else:
            raise UnknownNameError(f"invalid run name {plain(text)!r}", _FORMS)
    run = _run(store, matched["name"], which)
    if experiment is not None and experiment not in run.experiments:
        near = difflib.get_close_matches(experiment, run.experiments, 1)
        meant = f"did you mean {name_of(run)}:{near[0]}?" if near else f"it has {', '.join(run.experiments)}"
        raise UnknownNameError(f"run {name_of(run)} has no experiment {plain(experiment)!r}", meant)
    return RunName(run, experiment)


_FORMS = "a run is named by its suite (support), suite@number (support@3), suite:experiment, or the start of its id"


def _run(store: RunStore, name: str, which: str | None) -> RunRecord:
    if which is None or which == "latest":
        latest = store.runs(suite=name, limit=1)
        if latest:
            return latest[0]
    elif not which.isdecimal():
        raise UnknownNameError(f"'@' must be followed by a run number or 'latest' (got {plain(which)!r})", _FORMS)
    else:
        runs = store.runs(suite=name)
        numbered = next((run for run in runs if run.number == int(which)), None)
        if numbered is not None:
            return numbered
        if runs:
            has = (
                f"{name}@{runs[0].number}" if len(runs) == 1 else f"{name}@{runs[-1].number} to {name}@{runs[0].number}"
            )
            raise UnknownNameError(f"suite {plain(name)!r} has no run {which}", f"there is {has}; see: fairtrial runs")
    everything = store.runs()
    if which is None:
        matching = [run for run in everything if run.run_id == name]
        if not matching and len(name) >= _SHORTEST:
            matching = [run for run in everything if run.run_id.startswith(name)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            shown = ", ".join(f"{run.run_id} ({name_of(run)})" for run in matching[:4])
            raise UnknownNameError(
                f"{plain(name)!r} is the start of {len(matching)} ids", f"give more characters: {shown}"
            )
    raise UnknownNameError(f"there is no run {plain(name)!r}", _near(name, everything))


def _near(name: str, runs: Sequence[RunRecord]) -> str:
    if not runs:
        return "this store has no runs yet; start one with: fairtrial run SUITE"
    suites = list(dict.fromkeys(run.suite for run in runs))
    near = difflib.get_close_matches(name, [*suites, *(run.run_id for run in runs)], 3, 0.5)
    if near:
        return f"did you mean {' or '.join(near)}? See: fairtrial runs"
    return f"the latest are {', '.join(suites[:5])}; see: fairtrial runs"
