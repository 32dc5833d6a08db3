"""Reads the columns of an experiment: from its column file, or from the store without making a result of every row.

numpy is imported here: import this module only where numbers are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, batched, chain, groupby, repeat
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.frozen import EMPTY, FrozenDict
from fairtrial.data.fingerprint import UNKNOWN
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.column_file import ColumnFile, open_columns
from fairtrial.reports.figures.columns import (
    Columns,
    FloatArray,
    IntArray,
    RepeatedInputs,
    SampleContents,
    codes_of,
    hashable,
)
from fairtrial.reports.figures.metrics import (
    BUILT_IN,
    COST,
    COSTS,
    NOT_RUN,
    OUTCOME_CLASS,
    PASSED,
    REWARD,
    VALUE,
    VERDICT_PREFIX,
    ExperimentSource,
    Range,
    is_verdict,
    verdict_column,
    widen,
)
from fairtrial.store.notes import SAMPLING_WEIGHT
from fairtrial.store.numbers import NumberStore, VerdictRow
from fairtrial.store.protocol import METRIC_CODES, REWARD_PLACE, RunRecord, RunStore, ScoreRow, split_facts
from fairtrial.store.rows import OUTCOMES, facts_reader, restored_text
from fairtrial.trials.result import TRIAL_FIGURES

_PAGE = 5_000  # Trials per batch.
_VERDICTS = {code: float(passed) for code, (passed, _) in METRIC_CODES.items() if passed is not None}
_NO_VERDICTS: Mapping[str, str] = {}
SMALLEST_FILE = 5_000
_TRIALS_AT_ONCE = 100_000
"""Trials from which on a run gets a column file when it is read. Smaller runs are read as quickly without."""
_CLASSES = np.zeros(max(OUTCOMES.values()) + 1, dtype=np.int8)
for _outcome, _code in OUTCOMES.items():
    _CLASSES[_code] = OUTCOME_CLASS[_outcome]


def read_columns(
    source: ExperimentSource,
    *,
    metrics: Iterable[str] | None = None,
    cluster: str | None = None,
    keys: Sequence[str] = (),
    inputs: Mapping[str, Callable[[Any], Hashable]] = EMPTY,
    name: str | None = None,
    costs: bool = False,
    batch: RunBatch | None = None,
) -> Columns:
    """Read the columns of one experiment.

    Args:
        source: The experiment.
        metrics: The metrics to read; by default all, the verdicts on each criterion ("passed:polite"), and of what is
            built in "passed", "value" and, where it differs from the value, "reward".
        cluster: The metadata key of clusters; None for that of the run (`EvalConfig.cluster`), "" for no clusters.
        keys: Metadata keys whose values become `groups`.
        inputs: Functions of each sample's input whose results become `groups`.
        name: The name of the columns; that of the experiment by default.
        costs: Whether to read latency, tokens and cost too.
        batch: What was read of many runs at once; used for its runs if no other metrics are wanted.
    """
    run = source.run
    key = source.cluster_key if cluster is None else cluster
    wanted = None if metrics is None else frozenset(metrics)
    if batch is not None and source.run.run_id in batch.runs and wanted is not None and wanted <= batch.METRICS:
        reader: _Reader = _BatchReader(source, wanted, costs, batch)
    else:
        reader = _reader(source, wanted, costs=costs)
    weighing = (SAMPLING_WEIGHT,) if run.noted.sampling is not None else ()
    ordinals, ids, facts = reader.facts([*keys, *weighing, key] if key else [*keys, *weighing])
    declared: Sequence[Hashable] = facts[-1] if key else ()
    if cluster and len(ids) and _all_none(declared):
        raise ConfigurationError(
            f"no sample of run {run.run_id} has {cluster!r} in its metadata, so it names no cluster"
        )
    labels, repeated = (
        _with_repeated_inputs(source, ordinals, declared, reader.repeated_inputs()) if key else (declared, None)
    )
    clusters = None if _all_none(labels) else codes_of(labels)
    if clusters is not None and np.unique(clusters).size == len(ids):
        clusters = None  # Each sample is its own cluster: they are independent.
    groups: dict[str, Sequence[Hashable]] = dict(zip(keys, facts, strict=False))
    if inputs:
        groups |= _of_inputs(source, ordinals, inputs)
    outcomes, values, directions, ranges = reader.numbers(ordinals)
    note = run.noted.adaptive
    return Columns(
        source.name if name is None else name,
        ids,
        run.dataset_size,
        outcomes,
        values,
        clusters,
        FrozenDict(groups),
        run.dataset_fingerprint,
        None if note is None else int(np.count_nonzero(ordinals < note.samples)),
        ranges=FrozenDict({name: ends for name, ends in ranges.items() if ends is not None}),
        directions=FrozenDict(directions),
        stopped_by_width=note is not None and note.rule.narrower_than is not None,
        repeated_inputs=repeated,
        contents=SampleContents(lambda: _hashes(source, ordinals)),
        weights=_weights(facts[len(keys)]) if weighing else None,
    )


def _weights(facts: Sequence[Any]) -> FloatArray:
    """Return how many traces each sample stands for."""
    weights = np.array([one if isinstance(one, int | float) else np.nan for one in facts], dtype=np.float64)
    weights[~(weights > 0)] = np.nanmean(weights) if np.isfinite(weights).any() else 1.0
    return weights


def sample_ordinals(source: ExperimentSource) -> IntArray:
    """Return the ordinals of the samples whose columns are read, in the same order."""
    return _reader(source, frozenset(), costs=False).facts(())[0]


type _Numbers = tuple[NDArray[np.int8], dict[str, FloatArray], dict[str, bool], Mapping[str, Range | None]]


class _Reader(Protocol):
    """Reads what columns are made of. All readers return exactly the same numbers, in the same order."""

    def facts(self, keys: Sequence[str]) -> tuple[IntArray, Sequence[str], list[Sequence[Hashable]]]:
        """Return ordinals and ids of the known samples, and their values of each of these metadata keys."""
        ...

    def repeated_inputs(self) -> Sequence[tuple[int, int]]:
        """Return (ordinal, hash of the input) of the known samples whose input is not unique, ascending."""
        ...

    def numbers(self, ordinals: IntArray) -> _Numbers:
        """Return outcomes and values of these samples, and the directions and ranges that metrics declare."""
        ...


def _reader(source: ExperimentSource, wanted: frozenset[str] | None, *, costs: bool) -> _Reader:
    file = open_columns(source.store, source.run, build=source.run.planned >= SMALLEST_FILE)
    return _StoreReader(source, wanted, costs) if file is None else _FileReader(source, file, wanted, costs)


@dataclass(frozen=True, slots=True)
class _StoreReader:
    """Reads from the store, trial by trial."""

    source: ExperimentSource
    wanted: frozenset[str] | None
    costs: bool

    def facts(self, keys: Sequence[str]) -> tuple[IntArray, Sequence[str], list[Sequence[Hashable]]]:
        return _facts(self.source, keys)

    def repeated_inputs(self) -> Sequence[tuple[int, int]]:
        return self.source.store.repeated_inputs(self.source.run.run_id)

    def numbers(self, ordinals: IntArray) -> _Numbers:
        run, store = self.source.run, self.source.store
        table = _Cells(run.dataset_size, run.repeats, len(run.experiments), self.wanted, costs=self.costs)
        for page in batched(store.scores(run.run_id, experiment=self.source.name), _PAGE):
            table.add(page)
        return *table.arrays(ordinals), table.directions, table.ranges


class RunBatch:
    """The verdicts and costs of many small runs, read with a query for each kind of row instead of one for each run."""

    METRICS = frozenset((PASSED, COST))

    def __init__(self, store: NumberStore, run_ids: Sequence[str]) -> None:
        self.runs = store.verdicts(run_ids)
        self._samples = store.facts_of_datasets(sorted({run.dataset for run in self.runs.values()}))
        self._repeated = {dataset: _repeated(rows) for dataset, rows in self._samples.items()}
        self._facts: dict[tuple[int, str], list[tuple[int, str, tuple[Any, ...]]]] = {}

    def numbers(self, run_id: str) -> FloatArray:
        """Return the rows of a run as numbers; a NaN stands for nothing."""
        return np.array(self.runs[run_id].rows, dtype=np.float64).reshape(-1, len(VerdictRow._fields))

    def unpriced_calls(self, source: ExperimentSource) -> int:
        """Return the number of calls of an experiment's task without a known price."""
        place = source.run.experiments.index(source.name)
        return sum(row[6] for row in self.runs[source.run.run_id].rows if row[2] == place)

    def facts(self, run_id: str, keys: Sequence[str]) -> list[tuple[int, str, tuple[Any, ...]]]:
        """Return what `RunStore.sample_facts` does."""
        dataset = self.runs[run_id].dataset
        found = self._facts.get(asked := (dataset, repr(keys)))
        if found is None:
            read = facts_reader(keys)
            rows = self._samples[dataset]
            found = self._facts[asked] = [(at, restored_text(id), read(metadata)) for at, id, metadata, _ in rows]
        return found

    def repeated_inputs(self, run_id: str) -> list[tuple[int, int]]:
        """Return what `RunStore.repeated_inputs` does."""
        return self._repeated[self.runs[run_id].dataset]


def in_batches(
    store: RunStore, runs: Sequence[RunRecord], metrics: Iterable[str]
) -> Iterator[tuple[RunRecord, RunBatch | None]]:
    """Yield runs, each with the batch that its metrics are in; None if they have to be read alone."""
    if not isinstance(store, NumberStore) or not RunBatch.METRICS.issuperset(metrics):
        yield from zip(runs, repeat(None))
        return
    reached = accumulate(run.planned for run in runs)
    for _, block in groupby(zip(runs, reached, strict=True), lambda one: one[1] // _TRIALS_AT_ONCE):
        some = [run for run, _ in block]
        small = [run.run_id for run in some if run.planned < SMALLEST_FILE]
        batch = RunBatch(store, small) if small else None
        yield from zip(some, repeat(batch))


def _repeated(rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, int]]:
    times = Counter(row[3] for row in rows if row[3] is not None)
    return [(row[0], row[3]) for row in rows if times[row[3]] > 1]


@dataclass(frozen=True, slots=True)
class _BatchReader(_StoreReader):
    """Reads from a batch."""

    batch: RunBatch

    def facts(self, keys: Sequence[str]) -> tuple[IntArray, Sequence[str], list[Sequence[Hashable]]]:
        return _in_columns(self.batch.facts(self.source.run.run_id, keys), self.source.run, keys)

    def repeated_inputs(self) -> Sequence[tuple[int, int]]:
        return self.batch.repeated_inputs(self.source.run.run_id)

    def numbers(self, ordinals: IntArray) -> _Numbers:
        run = self.source.run
        rows = self.batch.numbers(run.run_id)
        own = rows[rows[:, 2] == run.experiments.index(self.source.name)]
        _, places, _, codes, passed, cost, _ = own.T
        cells, repeats = np.divmod(places.astype(np.intp), run.repeats)
        at, shape = (cells // len(run.experiments), repeats), (run.dataset_size, run.repeats)
        outcomes = np.zeros(shape, dtype=np.int8)
        outcomes[at] = _CLASSES[codes.astype(np.intp)]
        values = {PASSED: np.full(shape, np.nan), COST: np.full(shape, np.nan)}
        values[PASSED][at] = passed
        values[COST][at] = np.where(codes == OUTCOMES["not_run"], np.nan, cost)
        if not np.isfinite(cost).any():
            del values[COST]
        kept = {name: array[ordinals] for name, array in values.items() if self.wanted and name in self.wanted}
        return outcomes[ordinals], kept, {}, {}


@dataclass(frozen=True, slots=True)
class _FileReader:
    """Reads from the column file of the run."""

    source: ExperimentSource
    file: ColumnFile
    wanted: frozenset[str] | None
    costs: bool

    def facts(self, keys: Sequence[str]) -> tuple[IntArray, Sequence[str], list[Sequence[Hashable]]]:
        if any(key in self.file.header.uncoded for key in keys):
            return _facts(self.source, keys)
        return self.file.sample_ordinals, self.file.ids, [self._labels(key) for key in keys]

    def _labels(self, key: str) -> Sequence[Hashable]:
        if key not in self.file.header.codes:
            return _Nothing(len(self.file.ids))
        values = np.empty(len(self.file.header.codes[key]) + 1, dtype=object)
        values[0] = None
        values[1:] = [hashable(value) for value in self.file.metadata_values(key)]
        found: list[Hashable] = values[self.file.array(f"meta:{key}")].tolist()
        return found

    def repeated_inputs(self) -> Sequence[tuple[int, int]]:
        if "repeated" not in self.file:
            return ()
        places, hashes = self.file.array("repeated").reshape(2, -1).tolist()
        return list(zip(places, hashes, strict=True))

    def numbers(self, ordinals: IntArray) -> _Numbers:
        asked = ("numbers", self.source.name, self.wanted, self.costs)
        found: _Numbers | None = self.file.remembered(asked)
        if found is None:
            found = self._numbers(ordinals)
            self.file.remember(asked, found)
        return found

    def _numbers(self, ordinals: IntArray) -> _Numbers:
        file, run = self.file, self.source.run
        place = run.experiments.index(self.source.name)
        names = [name for name, *_first in file.header.metrics[place]]

        def cells(name: str, missing: float, dtype: Any) -> NDArray[Any]:
            return _cells_of(file.array(name), run, place, missing, dtype)

        classes = _CLASSES[cells("outcome", 0, np.uint8)]
        found: dict[str, FloatArray] = {}
        score = cells("score", np.nan, np.float64)
        scored = ~np.isnan(score)
        if self._wants(PASSED):
            found[PASSED] = _absent_as_nan(cells("passed", -1, np.float64), also=~scored)
        if self._wants(VALUE):
            found[VALUE] = score
        ran = classes != NOT_RUN
        for name in COSTS:
            if self.costs or (self.wanted is not None and name in self.wanted):
                numbers = self._cost(name, cells, ran)
                if numbers is not None:
                    found[name] = numbers
        if self._wants(REWARD) and scored.any():
            reward = cells("reward", np.nan, np.float64) if "reward" in file else None
            found[REWARD] = score if reward is None else np.where(np.isnan(reward), score, reward)
        for name in names:
            if self._wants(name) and name not in BUILT_IN and not is_verdict(name):
                found[name] = cells(f"metric:{name}", np.nan, np.float64)
        for name in names:
            column = verdict_column(name)
            if self._wants(column) and f"verdict:{name}" in file:
                verdicts = _absent_as_nan(cells(f"verdict:{name}", -1, np.float64))
                if np.isfinite(verdicts).any():
                    found[column] = verdicts
        _drop_equal_rewards(found, self.wanted)
        directions = {name: higher for name, higher, *_first in file.header.directions[place]}
        declared = file.header.ranges[place].items()
        ranges = {name: None if ends is None else (ends[0], ends[1]) for name, ends in declared}
        if ordinals.size == run.dataset_size:
            return classes, found, directions, ranges
        return classes[ordinals], {name: array[ordinals] for name, array in found.items()}, directions, ranges

    def _wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted

    def _cost(self, name: str, cells: Callable[..., NDArray[Any]], ran: NDArray[np.bool_]) -> FloatArray | None:
        columns = TRIAL_FIGURES[name].columns
        if not all(column in self.file for column in columns):
            return None
        numbers = reduce(np.add, (_absent_as_nan(cells(column, -1, np.float64), also=~ran) for column in columns))
        return numbers if np.isfinite(numbers).any() else None


def _cells_of(array: NDArray[Any], run: RunRecord, experiment: int, missing: float, dtype: Any) -> NDArray[Any]:
    """Return the cells of one experiment, a row for each sample of the plan, of an array by ordinal."""
    width = len(run.experiments) * run.repeats
    rows = -(-array.size // width)
    if rows * width != array.size:
        array = np.append(array, np.full(rows * width - array.size, missing, dtype=array.dtype))
    found = array.reshape(rows, len(run.experiments), run.repeats)[:, experiment, :]
    if rows == run.dataset_size:
        return np.ascontiguousarray(found, dtype=dtype)
    cells = np.full((run.dataset_size, run.repeats), missing, dtype=dtype)
    cells[:rows] = found
    return cells


def _absent_as_nan(numbers: FloatArray, *, also: NDArray[np.bool_] | None = None) -> FloatArray:
    """Return a copy with NaN in place of -1, and where `also` says so."""
    absent = numbers < 0 if also is None else (numbers < 0) | also
    return np.where(absent, np.nan, numbers) if absent.any() else numbers


def _drop_equal_rewards(values: dict[str, FloatArray], wanted: frozenset[str] | None) -> None:
    """Leave rewards out that are the values, unless they are asked for."""
    if wanted is None and REWARD in values and np.array_equal(values[REWARD], values[VALUE], equal_nan=True):
        del values[REWARD]


def _all_none(labels: Sequence[Hashable]) -> bool:
    return isinstance(labels, _Nothing) or all(label is None for label in labels)


class _Nothing(Sequence[None]):
    """None for every sample."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> None: ...
    @overload
    def __getitem__(self, index: slice) -> _Nothing: ...
    def __getitem__(self, index: int | slice) -> _Nothing | None:
        if isinstance(index, slice):
            return _Nothing(len(range(*index.indices(self._count))))
        range(self._count)[index]  # Raises IndexError.
        return None

    def __iter__(self) -> Iterator[None]:
        return repeat(None, self._count)


class _Cells:
    """Cells in plan order (sample-major), filled in batches."""

    def __init__(
        self, samples: int, repeats: int, experiments: int, wanted: frozenset[str] | None, *, costs: bool = False
    ) -> None:
        self._shape = (samples, repeats)
        self._experiments = experiments
        self._wanted = wanted
        self._costs = [name for name in COSTS if costs or (wanted is not None and name in wanted)]
        self._wants_verdicts = wanted is None or any(name.startswith(VERDICT_PREFIX) for name in wanted)
        self._outcomes = np.zeros(samples * repeats, dtype=np.int8)
        self._values: dict[str, FloatArray] = {}
        self.directions: dict[str, bool] = {}
        self.ranges: dict[str, Range | None] = {}
        self._names: dict[str, None] = {}  # Of metrics, in the order of their first occurrence.
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
        for name in self._costs:
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
        names = dict.fromkeys(chain.from_iterable(metrics))
        self._names.update(names)
        for name in names:
            # A built-in metric takes precedence over one with the same name.
            if self._wants(name) and name not in BUILT_IN and not is_verdict(name):
                self._set(name, scored, [found.get(name) for found in metrics])
        # Most scores have the same metrics; in the order in which they came, since the first declared direction counts.
        kinds = dict.fromkeys((row.verdicts, tuple(row.metrics)) for row in some)
        for facts, declared in kinds:
            if facts and not facts.isdigit():
                self._add_declared(facts, declared)
        if self._wants_verdicts:
            self._add_verdicts(scored, some)

    def _add_declared(self, facts: str, names: tuple[str, ...]) -> None:
        codes, ranges = split_facts(facts)
        for name, code in zip(names, codes, strict=True):
            _, higher = METRIC_CODES[code]
            if higher is not None:
                self.directions.setdefault(name, higher)
        for place, bounds in ranges.items():
            widen(self.ranges, REWARD if place == REWARD_PLACE else names[place], bounds)

    def _add_verdicts(self, cells: IntArray, rows: Sequence[ScoreRow]) -> None:
        judged = [
            dict(zip(row.metrics, split_facts(row.verdicts)[0], strict=True)) if row.verdicts else _NO_VERDICTS
            for row in rows
        ]
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
        order = (PASSED, VALUE, *COSTS, REWARD, *self._names, *map(verdict_column, self._names))
        values = {name: self._values[name].reshape(self._shape) for name in order if name in self._values}
        _drop_equal_rewards(values, self._wanted)
        if ordinals.size == self._shape[0]:
            return outcomes, values
        return outcomes[ordinals], {name: array[ordinals] for name, array in values.items()}


def _facts(source: ExperimentSource, keys: Sequence[str]) -> tuple[IntArray, list[str], list[Sequence[Hashable]]]:
    return _in_columns(source.store.sample_facts(source.run.run_id, keys), source.run, keys)


def _in_columns(
    rows: Iterable[tuple[int, str, tuple[Any, ...]]], run: RunRecord, keys: Sequence[str]
) -> tuple[IntArray, list[str], list[Sequence[Hashable]]]:
    known = [row for row in rows if row[0] < run.dataset_size]
    ordinals = np.fromiter((row[0] for row in known), dtype=np.intp, count=len(known))
    columns = zip(*(row[2] for row in known), strict=True) if known else ((),) * len(keys)
    facts: list[Sequence[Hashable]] = [
        [None if value is None else hashable(value) for value in column] for column in columns
    ]
    return ordinals, [row[1] for row in known], facts


def _hashes(source: ExperimentSource, ordinals: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    found = np.full((source.run.dataset_size, 2), UNKNOWN, dtype=np.int64)
    for page in batched(source.store.sample_hashes(source.run.run_id), _PAGE):
        known = np.array(page, dtype=np.int64)
        known = known[known[:, 0] < len(found)]
        found[known[:, 0]] = known[:, 1:]
    return found[ordinals, 0], found[ordinals, 1]


def _with_repeated_inputs(
    source: ExperimentSource, ordinals: IntArray, declared: Sequence[Hashable], found: Sequence[tuple[int, int]]
) -> tuple[Sequence[Hashable], RepeatedInputs | None]:
    """Return the cluster of each sample; equal inputs form a cluster if none is declared."""
    if not found:
        return declared, None
    where = {ordinal: place for place, ordinal in enumerate(ordinals.tolist())}
    groups: dict[int, list[int]] = {}
    for ordinal, content in found:
        if ordinal in where:
            groups.setdefault(content, []).append(where[ordinal])
    groups = {content: places for content, places in groups.items() if len(places) > 1}
    count = sum(len(places) - 1 for places in groups.values())
    if not count:
        return declared, None
    if source.run.noted.is_adaptive:
        why = "in a run that used its own results to stop they count as independent, which overstates its evidence."
        return declared, RepeatedInputs(count, independent=why)
    if len(groups) == 1 and count == len(ordinals) - 1:
        return declared, None  # All inputs are equal: the real input must be elsewhere, such as in metadata.
    labels, across = list(declared), 0
    for content, places in groups.items():
        across += len({labels[place] for place in places if labels[place] is not None}) > 1
        for place in places:
            if labels[place] is None:
                labels[place] = ("input", content)
    return labels, RepeatedInputs(count, across)


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
