"""The trials of a report as a table that can be filtered, shown and converted to data frames."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from fairtrial.errors import ConfigurationError, MissingExtraError
from fairtrial.reports.figures.trial_rows import TrialRows
from fairtrial.reports.renderable import Renderable
from fairtrial.store.export import ExportColumns, text_of
from fairtrial.store.protocol import RunRecord, RunStore

if TYPE_CHECKING:
    import pandas
    import polars

type TrialRow = dict[str, Any]
"""One trial: the value of every column by its name."""

_SHOWN = 20
_PREFIXES = ("metadata.", "metrics.", "passed.")


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
            raise MissingExtraError("a pandas DataFrame of trials", "pandas") from None
        frame = pandas.DataFrame(list(self), columns=list(self._columns))
        named = {int: "Int64", float: "float64", bool: "boolean"}
        kinds = {name: named[type_name] for name, type_name in self._known.kinds.items() if name in self._columns}
        return frame.astype(kinds)

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame; inputs, outputs and metadata that are not text are JSON, as in `export`."""
        try:
            import polars
        except ImportError:
            raise MissingExtraError("a polars DataFrame of trials", "polars") from None
        kinds = self._known.kinds
        named = {int: polars.Int64, float: polars.Float64, bool: polars.Boolean}
        rows = list(self)
        return polars.DataFrame(
            {name: [row[name] if name in kinds else text_of(row[name]) for row in rows] for name in self._columns},
            schema={name: named[kinds[name]] if name in kinds else polars.String for name in self._columns},
        )

    def rows(self, limit: int = _SHOWN) -> TrialRows:
        """Return the first rows."""
        rows = list(islice(self, limit + 1))
        return TrialRows(self._run, self._columns, tuple(rows[:limit]), len(rows) > limit)

    def _record(self) -> TrialRows:
        table = self if len(self._columns) < len(self._known.names) else self.select(*overview(self._run))
        return table.rows()

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
