"""The history of a suite: the figures of its days, runs or versions of the code, and what changed between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from itertools import groupby, pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from fairtrial.base.frozen import LruCache
from fairtrial.data.session.session import restore_session
from fairtrial.reports.figures.column_reader import in_batches, read_columns
from fairtrial.reports.figures.columns import Columns
from fairtrial.reports.figures.estimates import Estimate, estimate
from fairtrial.reports.figures.metrics import COST, FAILED, MISSING, PASSED, SCORED, ExperimentSource, run_totals
from fairtrial.reports.watch.changes import changed_names, changes_between, models_of
from fairtrial.reports.watch.days import can_be_watched, day_of, is_replayed, runs_to_watch
from fairtrial.runs.run_lease import with_current_status
from fairtrial.store.numbers import NumberStore
from fairtrial.store.protocol import RunRecord, RunStore

_MOST_RUNS = 1_000
"""The runs of a page; there are fewer days on it if they have more."""
_TRIALS = 3
"""The first trials of each run whose transcripts are read for the names of models."""
_PROMPT = re.compile(r"prompt", re.IGNORECASE)

type ModelCache = LruCache[tuple[str, int], list[set[str]]]


class Step(NamedTuple):
    """The runs of a day or of a version of the code, or one run; `key` is its name in an address."""

    place: int
    key: str
    name: str
    runs: list[RunRecord]


def steps_of(runs: Iterable[RunRecord], by: str) -> Iterator[Step]:
    """Group runs, oldest first. Days without a run leave a gap between the places of their neighbours."""
    if not by:
        for day, own in groupby(runs, day_of):
            yield Step(date.fromisoformat(day).toordinal(), day, day, list(own))
        return
    groups = ([run] for run in runs) if by == "run" else (list(own) for _, own in groupby(runs, _code_and_data))
    for place, some in enumerate(groups):
        name = some[0].name if by == "run" else some[0].code_hash[:8] or "unknown"
        yield Step(place, str(some[-1].number), name, some)


def _code_and_data(run: RunRecord) -> tuple[str, str]:
    return run.code_hash, run.dataset_fingerprint


def page_of(steps: Sequence[Step], end: str, span: int) -> tuple[list[Step], str, str]:
    """Return the steps up to the one with this key (default: the last), and the keys of the pages beside them.

    A page has up to `span` places, and ends with a step that has runs.
    """
    last = next((at for at, step in enumerate(steps) if step.key == end), len(steps) - 1)
    first, runs = last, len(steps[last].runs)
    while (
        first and steps[last].place - steps[first - 1].place < span and runs + len(steps[first - 1].runs) <= _MOST_RUNS
    ):
        first -= 1
        runs += len(steps[first].runs)
    newer = [step.key for step in steps[last + 1 :] if step.place - steps[last + 1].place < span]
    return list(steps[first : last + 1]), steps[first - 1].key if first else "", newer[-1] if newer else ""


def read_history(store: RunStore, asked: Mapping[str, Any], models: ModelCache) -> dict[str, Any]:
    """Return what the page shows of a suite's history."""
    every = store.runs(suite=asked["suite"])
    listed = sorted(runs_to_watch(every), key=lambda run: (run.created_at, run.number))
    rescored = len({run.run_id for run in every if run.parent_run is not None} - {run.run_id for run in listed})
    experiments = list(dict.fromkeys(name for run in reversed(listed) for name in run.experiments))
    experiment = asked["experiment"] if asked["experiment"] in experiments else next(iter(experiments), "")
    listed = [run for run in listed if experiment in run.experiments]
    datasets = list(dict.fromkeys(run.dataset_name for run in reversed(listed)))
    dataset = asked["dataset"] if asked["dataset"] in datasets else next(iter(datasets), "")
    runs = [with_current_status(store, run) for run in listed if run.dataset_name == dataset]
    chosen = {"experiments": experiments, "experiment": experiment, "datasets": datasets, "dataset": dataset}
    chosen["rescored"] = rescored
    if not runs:
        return chosen | {"points": [], "older": "", "newer": ""}
    replayed = is_replayed(run for run in runs if can_be_watched(run))
    steps, older, newer = page_of(list(steps_of(runs, asked["by"])), asked["end"], asked["span"])
    reader = _PointReader(store, experiment, replayed, models)
    before = [run for run in runs[: runs.index(steps[0].runs[0])] if can_be_watched(run)]
    return chosen | {"points": reader.points(steps, before[-1:]), "older": older, "newer": newer}


class _PointReader:
    """Reads the points of one experiment."""

    def __init__(self, store: RunStore, experiment: str, replayed: bool, models: ModelCache) -> None:
        self._store, self._experiment, self._replayed, self._models = store, experiment, replayed, models

    def points(self, steps: Sequence[Step], before: Sequence[RunRecord]) -> list[dict[str, Any]]:
        """Return the points of some steps: one for each, or one for each dataset."""
        parts: list[tuple[Step, list[RunRecord], list[RunRecord]]] = []
        for step in steps:
            datasets: dict[str, list[RunRecord]] = {}
            for run in step.runs:
                datasets.setdefault(run.dataset_fingerprint, []).append(run)
            parts += [(step, _counted(own), own) for own in datasets.values()]
        counted = [run for _, own, _ in parts for run in own]
        changes = self._changes([*before, *counted])
        figures = self._figures(counted)
        points = []
        for step, own, every in parts:
            read = [next(figures) for _ in own]
            points.append(
                {
                    "place": step.place, "key": step.key, "name": step.name, "day": day_of(every[-1]),
                    "last": str(every[-1].number), "line": self._line(every[-1]), "runs": [facts for _, facts in read],
                    "others": [[run.run_id, run.status] for run in every if run not in own],
                    "changes": [change for run in own for change in changes.get(run.run_id, ())],
                    **_estimates([columns for columns, _ in read]),
                }
            )  # fmt: skip
        return points

    def _line(self, run: RunRecord) -> str:
        return run.dataset_fingerprint if self._replayed else ""

    def _figures(self, runs: Sequence[RunRecord]) -> Iterator[tuple[Columns, dict[str, Any]]]:
        """Yield the columns of runs with their counts; small runs are read many at a time."""
        metrics = (PASSED, COST)
        for run, batch in in_batches(self._store, runs, metrics):
            source = ExperimentSource(self._store, run, self._experiment)
            columns = read_columns(source, metrics=metrics, batch=batch).analysed_prefix()
            if batch is not None and run.run_id in batch.runs:
                unpriced = batch.unpriced_calls(source)
            else:
                totals = run_totals(self._store, run)[run.experiments.index(self._experiment)]
                unpriced = totals.unpriced_calls
            yield columns, _counts(run, columns) | {"unpriced": unpriced}

    def _changes(self, runs: Sequence[RunRecord]) -> dict[str, list[dict[str, Any]]]:
        """Return what changed with each run, against the one before it."""
        called = self._models_of(runs)
        found: dict[str, list[dict[str, Any]]] = {}
        for earlier, run in pairwise(runs):
            models = [called[one.run_id] for one in (earlier, run)]
            if not all(models):
                models = [set(), set()]  # Of one of the runs, no transcript tells.
            pair = (earlier, run)
            made = list(changes_between(day_of(run), pair, self._experiment, (models[0], models[1])))
            prompts = [*changed_names(*pair), *changed_names(*pair, "reads")]
            prompts = [name for name in prompts if _PROMPT.search(re.split(r"[:(]", name)[-1])]
            found[run.run_id] = [asdict(change) | {"kind": _kind(change.what)} for change in made]
            if prompts:
                change = {"what": "prompt", "before": None, "after": ", ".join(prompts[:2])}
                found[run.run_id].append(change | {"kind": "prompt"})
            if self._line(earlier) != self._line(run):
                before, after = (f"{one.dataset_version} {one.dataset_fingerprint[:8]}" for one in pair)
                found[run.run_id].append({"what": "dataset", "before": before, "after": after, "kind": "dataset"})
        return found

    def _models_of(self, runs: Sequence[RunRecord]) -> dict[str, set[str]]:
        unknown = [run for run in runs if self._models.get((run.run_id, run.revision)) is None]
        stored = [run for run in unknown if run.noted.transcripts is None]
        read = cast(NumberStore, self._store).first_snapshots(
            [run.run_id for run in stored],
            _TRIALS * max((len(run.experiments) * run.repeats for run in stored), default=1),
        )
        for run in unknown:
            sessions = [(place, restore_session(data)) for place, data in read.get(run.run_id, ())]
            own = [models_of(one for place, one in sessions if place == at) for at in range(len(run.experiments))]
            self._models.put((run.run_id, run.revision), own)
        known = {run.run_id: self._models.get((run.run_id, run.revision)) or [] for run in runs}
        return {run.run_id: known[run.run_id][run.experiments.index(self._experiment)] for run in runs}


def _kind(what: str) -> str:
    """Return the row of the plot for what changed: "model", "code", "parameter", or "prompt" for one of that name."""
    return "prompt" if _PROMPT.search(what) else what.split()[0]


def _counted(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that count together. One that decided when to stop counts alone, with its own interval."""
    whole = [run for run in runs if can_be_watched(run)]
    return whole or [run for run in runs if run.status in ("finished", "stopped")][-1:]


def _counts(run: RunRecord, columns: Columns) -> dict[str, Any]:
    scored = columns.outcomes == SCORED
    costs = columns.values.get(COST)
    return {
        "run_id": run.run_id, "passed": int(np.count_nonzero(scored & (columns.values[PASSED] == 1))),
        "scored": int(np.count_nonzero(scored)), "errors": columns.count(FAILED, MISSING),
        "cost": None if costs is None else float(np.nansum(costs)),
    }  # fmt: skip


def _estimates(parts: Sequence[Columns]) -> dict[str, Any]:
    if not parts:
        return {"rate": None, "cost": None}
    columns = pooled(parts)
    cost = estimate(columns, COST) if COST in columns.values else None
    return {"rate": _ends(estimate(columns, PASSED)), "cost": None if cost is None else _ends(cost)}


def _ends(found: Estimate) -> dict[str, Any]:
    return {"value": found.value, "low": found.low, "high": found.high, "note": found.note}


def pooled(parts: Sequence[Columns]) -> Columns:
    """Return the columns of several runs of a dataset as those of one: the trials of a sample are repeats of it."""
    first, *others = parts
    ids = list(first.ids)
    for place, part in enumerate(others):
        at = {sample_id: row for row, sample_id in enumerate(part.ids)}
        others[place] = part.take(np.array([at[sample_id] for sample_id in ids], dtype=np.intp))
    whole = [first, *others]
    gaps = [np.full(part.outcomes.shape, np.nan) for part in whole]
    return replace(
        first,
        outcomes=np.hstack([part.outcomes for part in whole]),
        values={
            name: np.hstack([part.values.get(name, gap) for part, gap in zip(whole, gaps, strict=True)])
            for name in dict.fromkeys(name for part in whole for name in part.values)
        },
    )
