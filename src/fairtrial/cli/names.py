"""Find the runs that are named on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from fairtrial.cli.user_errors import UserError
from fairtrial.reports.render.safe_text import plain
from fairtrial.reports.render.session_text import is_hash
from fairtrial.reports.run_names import RunName, UnknownName, name_of
from fairtrial.reports.run_names import find_run as find_stored_run
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.protocol import RunRecord, RunStore

__all__ = ["RunName", "UnknownName", "find_baseline", "find_run", "find_sample", "name_of", "other_experiment"]

_SHORTEST_START = 4  # Characters of a hash.


def find_run(store: RunStore, text: str) -> RunName:
    """Find the run with a name, with its current status.

    Raises:
        UnknownName: with the names that are near.
    """
    named = find_stored_run(store, text)
    return replace(named, run=with_current_status(store, named.run))


def find_baseline(store: RunStore, text: str, run: RunRecord) -> RunName:
    """Find the baseline for a run by name; an experiment of the same run may be named without the run."""
    try:
        return find_run(store, text)
    except UnknownName:
        if text not in run.experiments:
            raise
        return RunName(run, text)


def other_experiment(store: RunStore, run: RunRecord, experiment: str) -> str | None:
    """Return the name of a stored experiment to compare with this one: of the same run, else of another run."""
    for name in run.experiments:
        if name != experiment:
            return shlex.quote(f"{name_of(run)}:{name}")
    for other in store.runs(suite=run.suite):
        if other.run_id != run.run_id:
            same = experiment if experiment in other.experiments else other.experiments[0]
            return shlex.quote(name_of(other) + (f":{same}" if len(other.experiments) > 1 else ""))
    return None


def find_sample(text: str, sample_ids: Iterable[str]) -> str | None:
    """Return the id of a sample: as it is, as a table shows it if it is cut, or the start of a hash.

    Raises:
        UserError: several ids match.
    """
    sample_ids = list(sample_ids)
    if text in sample_ids:
        return text
    start, cut, end = text.partition("…")
    if not start or (not cut and len(start) < _SHORTEST_START):
        return None
    matching = [
        sample_id
        for sample_id in dict.fromkeys(sample_ids)
        if (cut or is_hash(sample_id)) and sample_id.startswith(start) and sample_id.endswith(end)
    ]
    if len(matching) > 1:
        shown = ", ".join(map(plain, matching[:4]))
        raise UserError(f"{plain(text)!r} matches {len(matching)} sample ids", f"give more characters: {shown}")
    return matching[0] if matching else None
