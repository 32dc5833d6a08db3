"""The names people give to runs: `suite`, `suite:experiment`, `suite@3`, `suite@latest`, or the start of an id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.cli.faults import Mistake
from fairtrial.errors import UnknownRunError
from fairtrial.render.safe_text import plain
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.protocol import RunRecord, RunStore

_NAME = re.compile(r"(?P<name>[^:@]+)(?P<rest>(?:[:@][^:@]+)*)")
_SHORTEST = 4


class UnknownName(Mistake, UnknownRunError):
    """No run of that name, and what might have been meant."""


@dataclass(frozen=True, slots=True)
class RunName:
    """A run, and the experiment of it that was named, if one was."""

    run: RunRecord
    experiment: str | None = None

    @property
    def experiments(self) -> tuple[str, ...]:
        """The experiments that are meant: the one that was named, or all."""
        return self.run.experiments if self.experiment is None else (self.experiment,)

    def __str__(self) -> str:
        return name_of(self.run) + (f":{self.experiment}" if self.experiment else "")


def name_of(run: RunRecord) -> str:
    """What to type for a run."""
    return f"{plain(run.suite)}@{run.number}"


def find_run(store: RunStore, text: str) -> RunName:
    """The run a person means.

    Raises:
        UnknownName: with the names that are near.
    """
    matched = _NAME.fullmatch(text)
    if matched is None:
        raise UnknownName(f"{plain(text)!r} is not the name of a run", _FORMS)
    which: str | None = None
    experiment: str | None = None
    for part in re.findall(r"[:@][^:@]+", matched["rest"]):
        if part[0] == "@" and which is None:
            which = part[1:]
        elif part[0] == ":" and experiment is None:
            experiment = part[1:]
        else:
            raise UnknownName(f"{plain(text)!r} is not the name of a run", _FORMS)
    run = _run(store, matched["name"], which)
    if experiment is not None and experiment not in run.experiments:
        near = difflib.get_close_matches(experiment, run.experiments, 1)
        meant = f"did you mean {name_of(run)}:{near[0]}?" if near else f"it has {', '.join(run.experiments)}"
        raise UnknownName(f"run {name_of(run)} has no experiment {plain(experiment)!r}", meant)
    return RunName(with_current_status(store, run), experiment)


_FORMS = "a run is named by its suite (support), suite@number (support@3), suite:experiment, or the start of its id"


def _run(store: RunStore, name: str, which: str | None) -> RunRecord:
    if which is None or which == "latest":
        latest = store.runs(suite=name, limit=1)
        if latest:
            return latest[0]
    elif not which.isdecimal():
        raise UnknownName(f"after '@' comes the number of a run or 'latest', not {plain(which)!r}", _FORMS)
    else:
        runs = store.runs(suite=name)
        found = next((run for run in runs if run.number == int(which)), None)
        if found is not None:
            return found
        if runs:
            has = (
                f"{name}@{runs[0].number}" if len(runs) == 1 else f"{name}@{runs[-1].number} to {name}@{runs[0].number}"
            )
            raise UnknownName(f"suite {plain(name)!r} has no run {which}", f"there is {has}; see: fairtrial runs")
    everything = store.runs()
    if which is None and len(name) >= _SHORTEST:
        matching = [run for run in everything if run.run_id.startswith(name)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            shown = ", ".join(f"{run.run_id} ({name_of(run)})" for run in matching[:4])
            raise UnknownName(f"{plain(name)!r} is the start of {len(matching)} ids", f"type more of one: {shown}")
    raise UnknownName(f"there is no run {plain(name)!r}", _near(name, everything))


def _near(name: str, runs: Sequence[RunRecord]) -> str:
    if not runs:
        return "this store has no runs yet; make one with: fairtrial run SUITE"
    suites = list(dict.fromkeys(run.suite for run in runs))
    near = difflib.get_close_matches(name, [*suites, *(run.run_id for run in runs)], 3, 0.5)
    if near:
        return f"did you mean {' or '.join(near)}? See: fairtrial runs"
    return f"the latest are {', '.join(suites[:5])}; see: fairtrial runs"
