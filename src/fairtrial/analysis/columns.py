"""The numbers of one experiment as columns: a row for each sample, a cell for each of its repeats.

Read from the store without making a result of every row, so that a hundred thousand samples take a second or two.
numpy is imported here: import this module only where numbers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.analysis.metrics import (
    BUILT_IN,
    COSTS,
    FAILED,
    LAST_COUNTED,
    MISSING,
    OUTCOME_CLASS,
    PASSED,
    REWARD,
    SCORED,
    UNIT,
    VALUE,
    VERDICT_PREFIX,
    View,
    is_verdict,
    verdict_column,
)
from fairtrial.analysis.source import ExperimentSource, adaptive_note
from fairtrial.codec import canonical
from fairtrial.errors import ConfigurationError
from fairtrial.frozen import EMPTY, FrozenDict
from fairtrial.stats import Repeats
from fairtrial.store.protocol import ScoreRow

type FloatArray = NDArray[np.float64]
type IntArray = NDArray[np.intp]
_PAGE = 5_000  # Trials taken over together.
_VERDICTS = {"1": 1.0, "0": 0.0}
_NO_VERDICTS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The numbers of one experiment: `outcomes` and each of `values` have a row per sample and a column per repeat.

    A value is NaN where a trial has none. `planned` counts all samples of the plan, `ids` those that are known by
    name. `clusters` numbers the cluster of each sample; None if samples are independent. `groups` says for each way
    of slicing which slice a sample is in. `adaptive` is not None if the run looked at its own results to know when to
    end: so many samples, from the start, are those it had looked at (`looked_at`). `limits` are the ranges of metrics
    as all samples showed them, where these are only some: words counted in a slice are no shares for being few.
    """

    name: str
    ids: Sequence[str]
    planned: int
    outcomes: NDArray[np.int8]
    values: Mapping[str, FloatArray]
    clusters: IntArray | None = None
    groups: Mapping[str, Sequence[Hashable]] = EMPTY
    fingerprint: str = ""
    adaptive: int | None = None
    limits: Mapping[str, tuple[float, float] | None] = EMPTY

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        *,
        name: str = "columns",
        ids: Sequence[str] | None = None,
        clusters: Sequence[Hashable] | NDArray[Any] | None = None,
        outcomes: NDArray[Any] | None = None,
        groups: Mapping[str, Sequence[Hashable]] = EMPTY,
        adaptive: int | None = None,
    ) -> Columns:
        """Columns from arrays of one score, or one row of repeats, per sample; all scored unless `outcomes` says."""
        arrays: dict[str, FloatArray] = {}
        for key, given in values.items():
            array = np.asarray(given, dtype=np.float64)
            arrays[key] = array[:, None] if array.ndim == 1 else array
        shape = next(iter(arrays.values())).shape
        classes = np.full(shape, SCORED, dtype=np.int8) if outcomes is None else np.asarray(outcomes, dtype=np.int8)
        known = [str(place) for place in range(shape[0])] if ids is None else list(ids)
        codes = None if clusters is None else _codes(clusters)
        return cls(name, known, shape[0], classes.reshape(shape), arrays, codes, groups, "", adaptive)

    @property
    def repeats(self) -> int:
        """How often each sample is tried, by the plan."""
        return int(self.outcomes.shape[1])

    @property
    def trials(self) -> int:
        """How many trials the plan has."""
        return self.planned * self.repeats

    def count(self, *classes: int) -> int:
        """How many trials ended in one of these classes."""
        found = np.bincount(self.outcomes.reshape(-1), minlength=MISSING + 1)
        return int(sum(found[one] for one in classes))

    def counted(self, view: View) -> NDArray[np.bool_]:
        """The trials that count, cell by cell."""
        return np.asarray((self.outcomes >= SCORED) & (self.outcomes <= LAST_COUNTED[view]))

    @property
    def missing(self) -> int:
        """Trials that say nothing about the system: not scored through no fault of its own, or not run."""
        return self.trials - self.count(SCORED, FAILED)

    def lacking(self, metric: str) -> int:
        """Scored trials that have no number in this metric."""
        values = self.values.get(metric, np.full((1, 1), np.nan))
        return int(np.count_nonzero((self.outcomes == SCORED) & ~np.isfinite(values)))

    def take(self, rows: NDArray[Any]) -> Columns:
        """The samples at these places, or marked in a mask; all of them count as the plan."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return replace(
            self,
            ids=[self.ids[place] for place in places.tolist()],
            planned=int(places.size),
            outcomes=self.outcomes[places],
            values={name: array[places] for name, array in self.values.items()},
            clusters=None if self.clusters is None else self.clusters[places],
            groups={name: [labels[place] for place in places.tolist()] for name, labels in self.groups.items()},
            limits={name: self.bounds(name) for name in self.values},
        )

    def looked_at(self) -> Columns:
        """The samples that a run which ended by its own rule had looked at; all of any other.

        What finished beyond them did so because it was quick, and would mislead.
        """
        return self if self.adaptive is None else self.take(np.arange(self.adaptive, dtype=np.intp))

    def bounds(self, metric: str) -> tuple[float, float] | None:
        """The range of a metric as far as it is known: 0 to 1 for scores, and for what was never seen outside."""
        if metric == VALUE or is_verdict(metric):
            return UNIT
        if metric in self.limits:
            return self.limits[metric]
        values = self.values.get(metric)
        if values is None or metric in COSTS:
            return None
        seen = values[np.isfinite(values)]
        return UNIT if seen.size and seen.min() >= 0 and seen.max() <= 1 else None

    def scores(self, metric: str, view: View, *, worst: float | None = 0.0) -> Repeats:
        """The counted trials of every sample, which may be none; a failure has the score `worst`, or none if None."""
        values = self.values.get(metric, np.full((1, 1), np.nan))
        finite = np.isfinite(values)
        if not finite.any() and (self.count(SCORED) or metric in COSTS):
            # Nobody measured it: failures alone would say something about a metric that does not exist.
            return Repeats(np.empty(0), np.zeros(len(self.ids), dtype=np.intp))
        scored = finite if metric in COSTS else (self.outcomes == SCORED) & finite
        counted = scored
        if worst is not None and view != "scored":
            counted = scored | (self.counted(view) & (self.outcomes != SCORED))
            values = np.where(scored, values, worst)
        counts = counted.sum(axis=1).astype(np.intp)
        return Repeats(np.broadcast_to(values, counted.shape)[counted], counts)


def read_columns(
    source: ExperimentSource,
    *,
    metrics: Iterable[str] | None = None,
    cluster: str | None = None,
    keys: Sequence[str] = (),
    inputs: Mapping[str, Callable[[Any], Hashable]] = EMPTY,
    name: str | None = None,
) -> Columns:
    """The columns of one experiment, read from its store.

    `metrics` None reads all there are, the verdicts on each criterion ("passed:polite") and of what is built in
    "passed", "value" and, where it differs from the value, "reward". Clusters come from the metadata
    key `cluster`; None stands for the run's own (`EvalConfig.cluster`, "cluster" unless changed), "" for none.
    `groups` gets the values of the metadata `keys`, and what the functions `inputs` say of each sample's input.
    """
    run, store = source.run, source.store
    key = source.cluster_key if cluster is None else cluster
    ordinals, ids, facts = _facts(source, [*keys, key] if key else list(keys))
    clusters = _codes(facts[-1]) if key and any(label is not None for label in facts[-1]) else None
    if cluster and clusters is None and ids:
        raise ConfigurationError(
            f"no sample of run {run.run_id} has {cluster!r} in its metadata, so it names no cluster"
        )
    if clusters is not None and np.unique(clusters).size == len(ids):
        clusters = None  # Each sample is a cluster of its own: they are independent.
    groups: dict[str, Sequence[Hashable]] = dict(zip(keys, facts, strict=False))
    if inputs:
        groups |= _of_inputs(source, ordinals, inputs)
    wanted = None if metrics is None else frozenset(metrics)
    table = _Cells(run.dataset_size, run.repeats, len(run.experiments), wanted)
    for page in batched(store.scores(run.run_id, experiment=source.name), _PAGE):
        table.add(page)
    outcomes, values = table.arrays(ordinals)
    note = adaptive_note(run)
    return Columns(
        source.name if name is None else name,
        ids,
        run.dataset_size,
        outcomes,
        values,
        clusters,
        FrozenDict(groups),
        run.dataset_fingerprint,
        None if note is None else int(np.count_nonzero(ordinals < note["samples"])),
    )


class _Cells:
    """Cells by place, sample-major as the plan is, filled many at a time."""

    def __init__(self, samples: int, repeats: int, experiments: int, wanted: frozenset[str] | None) -> None:
        self._shape = (samples, repeats)
        self._experiments = experiments
        self._wanted = wanted
        self._wants_verdicts = wanted is None or any(name.startswith(VERDICT_PREFIX) for name in wanted)
        self._outcomes = np.zeros(samples * repeats, dtype=np.int8)
        self._values: dict[str, FloatArray] = {}
        for name in (PASSED, VALUE):
            if self._wants(name):
                self._column(name)

    def _wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _column(self, name: str) -> FloatArray:
        return self._values.setdefault(name, np.full(self._outcomes.size, np.nan))

    def add(self, rows: Sequence[ScoreRow]) -> None:
        repeats = self._shape[1]
        ordinals = np.fromiter((row.ordinal for row in rows), dtype=np.intp, count=len(rows))
        cells = ordinals // (repeats * self._experiments) * repeats + ordinals % repeats
        self._outcomes[cells] = [OUTCOME_CLASS[row.outcome] for row in rows]
        if self._wanted is not None:
            for name in self._wanted.intersection(COSTS):
                self._set(name, cells, [None if row.outcome == "not_run" else getattr(row, name) for row in rows])
        places = [place for place, row in enumerate(rows) if row.value is not None]
        scored, some = cells[places], [rows[place] for place in places]
        if self._wants(PASSED):
            self._set(PASSED, scored, [row.passed for row in some])
        if self._wants(VALUE):
            self._set(VALUE, scored, [row.value for row in some])
        if self._wants(REWARD):
            self._set(REWARD, scored, [row.reward for row in some])
        metrics = [row.metrics for row in some]
        for name in dict.fromkeys(chain.from_iterable(metrics)):
            # A metric that has the name of something built in gives way to it.
            if self._wants(name) and name not in BUILT_IN and not is_verdict(name):
                self._set(name, scored, [found.get(name) for found in metrics])
        if self._wants_verdicts:
            self._add_verdicts(scored, some)

    def _add_verdicts(self, cells: IntArray, rows: Sequence[ScoreRow]) -> None:
        judged = [dict(zip(row.metrics, row.verdicts, strict=True)) if row.verdicts else _NO_VERDICTS for row in rows]
        for criterion in dict.fromkeys(chain.from_iterable(judged)):
            name = verdict_column(criterion)
            if self._wants(name):
                self._set(name, cells, [_VERDICTS.get(verdicts.get(criterion, "")) for verdicts in judged])

    def _set(self, name: str, cells: IntArray, values: Sequence[float | None]) -> None:
        numbers = np.array(values, dtype=np.float64)  # None becomes NaN.
        if np.isfinite(numbers).any():
            self._column(name)[cells] = numbers

    def arrays(self, ordinals: IntArray) -> tuple[NDArray[np.int8], dict[str, FloatArray]]:
        outcomes = self._outcomes.reshape(self._shape)
        values = {name: array.reshape(self._shape) for name, array in self._values.items()}
        if self._wanted is None and REWARD in values and np.array_equal(values[REWARD], values[VALUE], equal_nan=True):
            del values[REWARD]
        if ordinals.size == self._shape[0]:
            return outcomes, values
        return outcomes[ordinals], {name: array[ordinals] for name, array in values.items()}


def _facts(source: ExperimentSource, keys: Sequence[str]) -> tuple[IntArray, list[str], list[list[Hashable]]]:
    known = [row for row in source.store.sample_facts(source.run.run_id, keys) if row[0] < source.run.dataset_size]
    ordinals = np.fromiter((row[0] for row in known), dtype=np.intp, count=len(known))
    columns = zip(*(row[2] for row in known), strict=True) if known else ((),) * len(keys)
    facts = [[None if value is None else hashable(value) for value in column] for column in columns]
    return ordinals, [row[1] for row in known], facts


def _of_inputs(
    source: ExperimentSource, ordinals: IntArray, inputs: Mapping[str, Callable[[Any], Hashable]]
) -> dict[str, Sequence[Hashable]]:
    where = {ordinal: place for place, ordinal in enumerate(ordinals.tolist())}
    groups: dict[str, list[Hashable]] = {name: [None] * len(where) for name in inputs}
    for ordinal, sample in source.store.samples(source.run.run_id):
        place = where.get(ordinal)
        if place is not None:
            for name, predicate in inputs.items():
                groups[name][place] = hashable(predicate(sample.input))
    return dict(groups)


def hashable(value: Any) -> Hashable:
    """A JSON value that can stand in a set: lists and objects become their canonical text."""
    return canonical(value).decode() if isinstance(value, list | dict) else value


def _codes(labels: Sequence[Hashable] | NDArray[Any]) -> IntArray:
    """Clusters numbered from 0; a sample without one is a cluster of its own."""
    if isinstance(labels, np.ndarray) and np.issubdtype(labels.dtype, np.integer):
        return labels.astype(np.intp)
    seen: dict[Hashable, int] = {}
    names = labels.tolist() if isinstance(labels, np.ndarray) else labels
    # 1, 1.0 and True are equal in Python and three values in JSON.
    return np.fromiter(
        (
            seen.setdefault((place,) if label is None else (label, type(label).__name__), len(seen))
            for place, label in enumerate(names)
        ),
        dtype=np.intp,
        count=len(names),
    )
