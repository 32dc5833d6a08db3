"""The results of a report: in memory or stored, and as tables."""

from __future__ import annotations

import difflib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, overload
from uuid import uuid4

from fairtrial.base.codec import dumps, from_json, to_json
from fairtrial.base.frozen import EMPTY
from fairtrial.data.dataset import Dataset
from fairtrial.data.sample import Sample
from fairtrial.data.session.session import Session
from fairtrial.data.session.views import RecordedView
from fairtrial.errors import CodecError, ConfigurationError, MissingExtraError
from fairtrial.reports.figures.summaries import equally_weighted
from fairtrial.reports.render.renderable import Renderable
from fairtrial.store.export import ExportColumns
from fairtrial.store.export_columns import cell_text
from fairtrial.store.memory import MemoryStore
from fairtrial.store.notes import write_notes
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.trials.config import EvalConfig
from fairtrial.trials.result import EvalResult

if TYPE_CHECKING:
    import pandas
    import polars

    from fairtrial.reports.render.document import Document


def store_results(
    results: Iterable[EvalResult[Any]], *, run_id: str, dataset_name: str, config: EvalConfig | None
) -> tuple[RunStore, RunRecord]:
    """Store results as a new run in memory."""
    chosen = tuple(equally_weighted(results, "a report of selected results"))
    places: dict[str, int] = {}
    samples: list[Sample[Any, Any]] = []
    for result in chosen:
        if result.sample_id not in places:
            places[result.sample_id] = len(samples)
            samples.append(Sample(result.sample_id, None) if result.source is None else result.sample)
    experiments = tuple(dict.fromkeys(result.experiment for result in chosen)) or ("baseline",)
    repeats = max((result.repeat for result in chosen), default=0) + 1
    named = dataset_name or "results"
    dataset = Dataset(samples, name=named)
    store = MemoryStore()
    now = time.time()
    run = store.create_run(
        RunRecord(
            run_id or uuid4().hex[:12],
            named,
            named,
            dataset.version,
            dataset.fingerprint,
            len(samples),
            experiments,
            repeats,
            config=to_json(config or EvalConfig()),
            created_at=now,
            notes=write_notes(order=dataset.order),
        )
    )
    seen: set[int] = set()
    for result in chosen:
        position = places[result.sample_id]
        ordinal = run.ordinal(position, experiments.index(result.experiment), result.repeat)
        if ordinal in seen:
            raise ConfigurationError(
                f"two results are of sample {result.sample_id!r}, experiment {result.experiment!r}, "
                f"repeat {result.repeat}\ngive one of them another experiment or repeat: replace(result, key=...)"
            )
        seen.add(ordinal)
        committed = store.commit(run.run_id, [_moved(result, run.run_id, ordinal)], {position: samples[position]})
        for key, problem in (*committed.refused, *committed.unstorable):
            raise ConfigurationError(f"the result of trial {key} cannot be reported: {problem}")
    store.update_run(run.run_id, status="finished" if len(seen) == run.planned else "stopped", finished_at=now)
    return store, store.get_run(run.run_id)


def _moved(result: EvalResult[Any], run_id: str, ordinal: int) -> EvalResult[Any]:
    """Return the result as part of another run, with its output and session loaded."""
    try:
        output_json = result.output_json or dumps(result.output)
    except CodecError as error:
        raise ConfigurationError(f"the output of sample {result.sample_id!r} cannot be stored: {error}") from None
    snapshot = result.snapshot
    if snapshot is None and result.source is not None and isinstance(recorded := result.session, RecordedView):
        session = Session(session_id=recorded.session_id, tags=recorded.tags)
        session.extend(recorded.everything().envelopes, keep_attempts=True)
        snapshot = session.snapshot() if len(session) else None
    return replace(
        result,
        key=result.key._replace(run_id=run_id),
        ordinal=ordinal,
        metadata=result.own_metadata,
        output_json=output_json,
        snapshot=snapshot,
        source=None,
    )


_READ_IN_ORDER = 20  # Up to here, reading what comes before is quicker than looking up where all results are.


class Results(Sequence[EvalResult]):
    """Results in plan order. Iteration streams them; only one is held in memory.

    Args:
        store: Where the run is.
        run_id: The run.
        count: How many results there are.
        output_types: What the tasks of the experiments return; outputs are JSON values without it.
        filters: Arguments of `RunStore.results`.
    """

    def __init__(
        self, store: RunStore, run_id: str, count: int, output_types: Mapping[str, Any] = EMPTY, **filters: Any
    ) -> None:
        self._store = store
        self._output_types = output_types
        self._run_id = run_id
        self._count = count
        self._filters = filters

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[EvalResult]:
        return map(self._typed, self._store.results(self._run_id, **self._filters))

    def _typed(self, result: EvalResult) -> EvalResult:
        """Return the result with the output as its task returned it; as stored, where it does not fit that type."""
        output_type = self._output_types.get(result.experiment, object)
        if output_type is object or result.output is None or type(result.output) is output_type:
            return result
        try:
            return replace(result, output=from_json(output_type, to_json(result.output)))
        except CodecError:  # Redacted, or stored by another version of the code.
            return result

    @cached_property
    def _ordinals(self) -> Sequence[int]:
        """The places of the results in the plan, by which one of them is read without those before it."""
        return array(
            "q", (found.ordinal for found in self._store.results(self._run_id, outputs=False, **self._filters))
        )

    @overload
    def __getitem__(self, index: int) -> EvalResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EvalResult]: ...
    def __getitem__(self, index: Any) -> EvalResult | Sequence[EvalResult]:
        if isinstance(index, slice):
            positions = range(len(self))[index]
            if positions.step > 0:
                return tuple(islice(self, positions.start, positions.stop, positions.step))
            return tuple(self)[index]
        if isinstance(index, str):
            raise TypeError(
                f"results are numbered, as in results[0]; those of a sample are "
                f"[result for result in report.results if result.sample_id == {index!r}]"
            )
        position = range(len(self))[index]  # Raises IndexError, and counts from the end, as sequences do.
        if position < _READ_IN_ORDER:
            return next(islice(self, position, None))
        after = self._ordinals[position] - 1
        return self._typed(next(self._store.results(self._run_id, after=after, limit=1, **self._filters)))

    def __repr__(self) -> str:
        return f"<{len(self)} results of run {self._run_id}>"


type TrialRow = dict[str, Any]
"""One trial: the value of every column by its name."""

_SHOWN = 20
_PREFIXES = ("metadata.", "metrics.", "passed.")


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Rows of trials with their columns; `more` is true if there are others."""

    run: RunRecord
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    more: bool


class TrialTable(Renderable):
    """The trials of a run, one row each, read lazily from the store.

        report.trials().failed().where(kind="refund").select("sample_id", "input", "output").to_pandas()

    Columns are those of `report.export("trials.csv")`. Every method that filters gives a new table.
    """

    def __init__(self, store: RunStore, run: RunRecord, **filters: Any) -> None:
        self._store = store
        self._run = run
        self._filters = filters
        self._conditions: tuple[Callable[[TrialRow], bool], ...] = ()
        self._known = ExportColumns(store, run)
        self._columns: tuple[str, ...] = tuple(self._known.names)

    def _with(self, **changes: Any) -> Self:
        table = type(self).__new__(type(self))
        table.__dict__ = {**self.__dict__, **changes}
        return table

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self._columns

    def __iter__(self) -> Iterator[TrialRow]:
        for row in self._known.rows(self._store, **self._filters):
            if all(holds(row) for holds in self._conditions):
                yield {name: row[name] for name in self._columns}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> TrialRow:
        """Return the row at an index; negative indexes read all rows."""
        row = next(islice(self, index, None), None) if index >= 0 else None
        if row is not None:
            return row
        return list(self)[index]

    def failed(self) -> Self:
        """Keep the trials that were scored and did not pass."""
        return self._with(_filters={**self._filters, "passed": False})

    def errors(self) -> Self:
        """Keep the trials that ended in an error or were not scored."""
        return self.where(lambda row: row["outcome"] != "scored")

    def where(self, condition: Callable[[TrialRow], bool] | Mapping[str, Any] | None = None, /, **values: Any) -> Self:
        """Keep the rows that meet all conditions.

        Args:
            condition: A function of a row, or values by column, for columns whose names are no Python names.
            values: The value that a column must have, or a function of its value. A key of the samples' metadata and
                the name of a metric will do for `metadata.<key>` and `metrics.<name>`.
        """
        conditions = list(self._conditions)
        if callable(condition):
            conditions.append(condition)
        elif condition is not None:
            values = {**condition, **values}
        for name, wanted in values.items():
            conditions.append(_has(self.column(name), wanted))
        return self._with(_conditions=tuple(conditions))

    def select(self, *columns: str) -> Self:
        """Keep these columns, in this order."""
        return self._with(_columns=tuple(self.column(name) for name in columns))

    def column(self, name: str) -> str:
        """Resolve a name to a column: its own, or that of a metadata key or metric."""
        names = self._known.names
        for candidate in (name, *(f"{prefix}{name}" for prefix in _PREFIXES)):
            if candidate in names:
                return candidate
        short = [column.removeprefix(prefix) for column in names for prefix in _PREFIXES if column.startswith(prefix)]
        near = difflib.get_close_matches(name, [*names, *short], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise ConfigurationError(f"no column {name!r} in the trials of run {self._run.run_id}\n{hint}")

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame, with nullable types for columns that may be empty."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("a pandas DataFrame of trials", "data") from None
        frame = pandas.DataFrame(list(self), columns=list(self._columns))
        named = {int: "Int64", float: "float64", bool: "boolean"}
        kinds = {name: named[type_name] for name, type_name in self._known.kinds.items() if name in self._columns}
        return frame.astype(kinds)

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame; inputs, outputs and metadata that are not text are JSON, as in `export`."""
        try:
            import polars
        except ImportError:
            raise MissingExtraError("a polars DataFrame of trials", "data") from None
        kinds = self._known.kinds
        named = {int: polars.Int64, float: polars.Float64, bool: polars.Boolean}
        rows = list(self)
        return polars.DataFrame(
            {name: [row[name] if name in kinds else cell_text(row[name]) for row in rows] for name in self._columns},
            schema={name: named[kinds[name]] if name in kinds else polars.String for name in self._columns},
        )

    def rows(self, limit: int = _SHOWN) -> TrialRows:
        """Return the first rows."""
        rows = list(islice(self, limit + 1))
        return TrialRows(self._run, self._columns, tuple(rows[:limit]), len(rows) > limit)

    def document(self, cases: int) -> Document:
        """Return the first rows; unless columns were selected, with those that summarize a trial."""
        from fairtrial.reports.report.trials import trials_document

        table = self if len(self._columns) < len(self._known.names) else self.select(*overview(self._run))
        return trials_document(table.rows())

    def __repr__(self) -> str:
        # The rows are not counted: that may read millions of them.
        chosen = ", filtered" if self._conditions or self._filters else ""
        return f"<TrialTable of {self._run.run_id}: {len(self._columns)} columns{chosen}>"


def overview(run: RunRecord) -> Sequence[str]:
    """Keep the columns that summarize a trial."""
    several = [name for name, many in (("experiment", len(run.experiments) > 1), ("repeat", run.repeats > 1)) if many]
    return ["sample_id", *several, "outcome", "passed", "input", "expected", "output"]


def _has(column: str, wanted: Any) -> Callable[[TrialRow], bool]:
    if callable(wanted):
        return lambda row: row[column] is not None and bool(wanted(row[column]))
    return lambda row: bool(row[column] == wanted)
