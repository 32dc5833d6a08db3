"""The numbers of all trials of a run as arrays, indexed by ordinal: everything that the viewer filters and sorts by.

This is the only module of the viewer that reads trials in bulk. numpy is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.store.rows import OUTCOMES
from fairtrial.types import JSON

MAX_VALUES = 1_000
"""Metadata keys with more distinct values are no facets."""
_MAX_KEYS = 40
_KEPT = 4  # Runs whose columns are kept.


class RunColumns(Protocol):
    """The columns of a run. Floats are NaN where a trial has no value.

    Columns are `outcome` (0 for none, else the store's codes), `passed`, `score`, `latency_ms`, `tokens`, `cost_usd`,
    `metric:NAME`, and for each metadata key `meta:KEY`: 0 where a sample lacks it, else 1 + the place of its value.
    """

    @property
    def run(self) -> RunRecord:
        """The run as it was when the columns were read."""
        ...

    @property
    def planned(self) -> int:
        """The length of every column."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        ...

    @property
    def metadata(self) -> tuple[str, ...]:
        """The metadata keys that can be filtered by."""
        ...

    def values(self, column: str) -> NDArray[Any]:
        """Return a column. Raises KeyError for an unknown one."""
        ...

    def metadata_values(self, key: str) -> Sequence[JSON]:
        """Return the distinct values of a metadata key."""
        ...


class ColumnsInMemory:
    """Columns that are read from the store into memory."""

    def __init__(self, store: RunStore, run: RunRecord) -> None:
        self.run = run
        self.planned = run.planned
        self._columns: dict[str, NDArray[Any]] = {"outcome": np.zeros(run.planned, dtype=np.uint8)}
        for name in ("passed", "score", "latency_ms", "tokens", "cost_usd"):
            self._columns[name] = np.full(run.planned, np.nan)
        for experiment in run.experiments:
            self._read_scores(store, experiment)
        self.metrics = tuple(name.removeprefix("metric:") for name in self._columns if name.startswith("metric:"))
        self._values: dict[str, list[JSON]] = {}
        self._read_metadata(store)
        self.metadata = tuple(self._values)

    def _read_scores(self, store: RunStore, experiment: str) -> None:
        columns = self._columns
        for row in store.scores(self.run.run_id, experiment=experiment):
            at = row.ordinal
            if not 0 <= at < self.planned:
                continue
            columns["outcome"][at] = OUTCOMES[row.outcome]
            columns["tokens"][at] = row.tokens
            numbers = {"passed": row.passed, "score": row.value, "latency_ms": row.latency_ms, "cost_usd": row.cost_usd}
            for name, number in numbers.items():
                if number is not None:
                    columns[name][at] = number
            for metric, value in row.metrics.items():
                column = columns.get(f"metric:{metric}")
                if column is None:
                    column = columns[f"metric:{metric}"] = np.full(self.planned, np.nan)
                column[at] = value

    def _read_metadata(self, store: RunStore) -> None:
        codes: dict[str, NDArray[np.uint16]] = {}
        known: dict[str, dict[str, int]] = {}
        for place, sample in store.samples(self.run.run_id):
            if place >= self.run.dataset_size:
                continue
            for key, value in sample.metadata.items():
                if key not in codes and len(codes) < _MAX_KEYS:
                    codes[key] = np.zeros(self.run.dataset_size, dtype=np.uint16)
                    known[key] = {}
                    self._values[key] = []
                numbers = known.get(key)
                if numbers is None or len(numbers) > MAX_VALUES:
                    continue
                text = json.dumps(value, sort_keys=True, default=str)
                if text not in numbers:
                    numbers[text] = len(numbers) + 1
                    self._values[key].append(value)
                codes[key][place] = numbers[text]
        for key in [key for key, numbers in known.items() if len(numbers) > MAX_VALUES]:
            del self._values[key]
        each = len(self.run.experiments) * self.run.repeats
        self._columns |= {f"meta:{key}": np.repeat(codes[key], each) for key in self._values}

    def values(self, column: str) -> NDArray[Any]:
        """Return a column. Raises KeyError for an unknown one."""
        return self._columns[column]

    def metadata_values(self, key: str) -> Sequence[JSON]:
        """Return the distinct values of a metadata key."""
        return self._values[key]


class ColumnsCache:
    """Keeps the columns of the runs that were looked at last."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._kept: dict[tuple[Any, ...], RunColumns] = {}
        self._lock = Lock()

    def get(self, run: RunRecord) -> RunColumns:
        """Return the columns of a run; reads them if they are absent or out of date."""
        key = state_of(self._store, run)
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                found = ColumnsInMemory(self._store, run)
                for stale in [kept for kept in self._kept if kept[0] == run.run_id]:
                    del self._kept[stale]
            self._kept[key] = found
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return found


def state_of(store: RunStore, run: RunRecord) -> tuple[Any, ...]:
    """Return what changes whenever the results of a run change: of a finished run, its id and its end."""
    if run.status != "running" and run.finished_at is not None:
        return run.run_id, run.finished_at, run.status
    stored = [tuple(sorted(part.outcomes.items())) for part in store.totals(run.run_id)]
    return run.run_id, run.finished_at, run.status, tuple(stored)
