"""Trials as columns, for tables that filter and sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.codec import canonical
from fairtrial.base.frozen import JSON
from fairtrial.errors import ConfigurationError
from fairtrial.reports.figures.column_file import ColumnFile, open_columns
from fairtrial.reports.figures.metrics import NOT_RUN, PASSED, ExperimentSource
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.store.rows import OUTCOME_NAMES, OUTCOMES
from fairtrial.trials.result import AMOUNTS, COUNTS, TRIAL_FIGURES

if TYPE_CHECKING:
    from fairtrial.reports.figures.estimates import Estimate


type Mask = NDArray[np.bool_]
type Ordinals = NDArray[np.int64]

_BLOCK = 1 << 18
_SUMS = {name: figure.columns for name, figure in TRIAL_FIGURES.items() if len(figure.columns) > 1}
_COMPUTED = ("ordinal", "sample", "experiment", "repeat", *_SUMS)
_STORED = ("outcome", "passed", "score", "reward", *COUNTS, *AMOUNTS, "attempt", "started_at")
_METADATA, _METRIC, _VERDICT = "meta:", "metric:", "verdict:"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one column.

    Attributes:
        column: The column.
        any_of: Values of which a trial must have one: names of outcomes and experiments, True, False or None (no
            verdict) of `passed` and verdicts, whole numbers, values of metadata (None: the sample lacks the key).
        low: The lowest number.
        high: The highest number.
        missing: True for trials without a value, False for those with one.
    """

    column: str
    any_of: tuple[JSON, ...] | None = None
    low: float | None = None
    high: float | None = None
    missing: bool | None = None


class TrialColumns:
    """The numbers of all trials of a run in one state, by ordinal."""

    def __init__(self, store: RunStore, run: RunRecord, file: ColumnFile) -> None:
        self.store, self.run, self._file = store, run, file

    @classmethod
    def open(
        cls, store: RunStore, run: RunRecord, *, progress: Callable[[int, int], None] | None = None
    ) -> TrialColumns:
        """Open the columns of a run in its present state; builds or updates their file if necessary.

        Args:
            store: The store of the run, in a database.
            run: The run.
            progress: Called with the numbers of trials read and planned.
        """
        file = open_columns(store, run, progress=progress)
        if file is None:
            raise ConfigurationError("columns are made of stores in a database (got a store in memory)")
        return cls(store, run, file)

    @classmethod
    def open_existing(cls, store: RunStore, run: RunRecord) -> TrialColumns | None:
        """Open the columns of a run if their file is there and current."""
        file = open_columns(store, run, build=False)
        return None if file is None else cls(store, run, file)

    @property
    def extent(self) -> int:
        """The length of all columns: the highest stored ordinal + 1."""
        return self._file.header.extent

    @property
    def planned(self) -> int:
        """The number of planned trials."""
        return self.run.planned

    @property
    def stored(self) -> int:
        """The number of trials with a result."""
        return self._file.header.rows

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of metrics, in the order of their first occurrence."""
        firsts: dict[str, tuple[int, int]] = {}
        for names in self._file.header.metrics:
            for name, ordinal, place in names:
                firsts[name] = min(firsts.get(name, (ordinal, place)), (ordinal, place))
        return tuple(sorted(firsts, key=firsts.__getitem__))

    @property
    def metadata(self) -> tuple[str, ...]:
        """The metadata keys that can be asked for; keys with more than 65,534 values cannot."""
        return tuple(self._file.header.codes)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns."""
        return (
            *_COMPUTED,
            *(name for name in _STORED if name in self._file),
            *(f"{_METRIC}{name}" for name in self.metrics),
            *(f"{_VERDICT}{name}" for name in self.metrics if f"{_VERDICT}{name}" in self._file),
            *(f"{_METADATA}{name}" for name in self.metadata),
        )

    def values(self, column: str) -> NDArray[Any]:
        """Return a column over all ordinals. Floats are NaN and codes of metadata 0 where there is no value."""
        return np.concatenate([part for *_, part in self._parts(column)] or [np.empty(0)])

    def _parts(self, column: str) -> Iterator[tuple[int, int, NDArray[Any]]]:
        for start, end in self._blocks():
            yield start, end, self.part(column, start, end)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        return ((start, min(start + _BLOCK, self.extent)) for start in range(0, self.extent, _BLOCK))

    def part(self, column: str, start: int, end: int) -> NDArray[Any]:
        """Return a column over some ordinals; raises `ConfigurationError` for an unknown column."""
        self._check(column)
        if column == "experiment" or column.startswith(_METADATA):
            return self._repeated(column, start, end)
        if column in _COMPUTED:
            return self._of(column, np.arange(start, end, dtype=np.int64))
        return self._numbers(column, self._file.array(column)[start:end])

    def _repeated(self, column: str, start: int, end: int) -> NDArray[Any]:
        """Return what follows from the place of a trial in the plan: a pattern, or a number per sample, repeated."""
        experiments, repeats = len(self.run.experiments), self.run.repeats
        width = experiments * repeats
        first, last = start // width, -(-end // width)
        if column == "experiment":
            found = np.tile(np.repeat(np.arange(experiments, dtype=np.uint16), repeats), last - first)
        else:
            codes, known = self._file.array(column), self._file.sample_ordinals
            low, high = np.searchsorted(known, (first, last))
            by_sample = np.zeros(last - first, dtype=codes.dtype)
            by_sample[known[low:high] - first] = codes[low:high]
            found = np.repeat(by_sample, width)
        return found[start - first * width : end - first * width]

    def stored_part(self, column: str, start: int, end: int) -> NDArray[Any]:
        """Return a column of whole numbers as the file has it: -1 for none."""
        self._check(column)
        return self._file.array(column)[start:end]

    def at(self, column: str, ordinals: Ordinals) -> NDArray[Any]:
        """Return a column at these ordinals."""
        self._check(column)
        if column in _COMPUTED or column.startswith(_METADATA):
            return self._of(column, ordinals)
        return self._numbers(column, self._file.array(column)[ordinals])

    def _check(self, column: str) -> None:
        if column not in self.columns:
            raise ConfigurationError(
                f"the column must be one of {', '.join(self.columns)} (got {column!r})"
                if len(self.columns) < 40
                else f"run {self.run.run_id} has no column {column!r}"
            )

    def _of(self, column: str, ordinals: Ordinals) -> NDArray[Any]:
        experiments, repeats = len(self.run.experiments), self.run.repeats
        if column == "ordinal":
            return ordinals
        if column == "repeat":
            return ordinals % repeats
        if column == "experiment":
            return ordinals // repeats % experiments
        samples = ordinals // (repeats * experiments)
        if column == "sample":
            return samples
        if column in _SUMS:
            parts = [self._file.array(name)[ordinals].astype(np.float64) for name in _SUMS[column]]
            return np.where(parts[0] < 0, np.nan, reduce(np.add, parts))
        codes = self._file.array(column)
        places = self._sample_places(samples)
        found = np.zeros(len(ordinals), dtype=codes.dtype)
        known = places >= 0
        found[known] = codes[places[known]]
        return found

    def _sample_places(self, samples: Ordinals) -> NDArray[np.intp]:
        """Return the places of samples among the known ones; -1 if they are not known."""
        known = self._file.sample_ordinals
        if not known.size:
            return np.full(len(samples), -1, dtype=np.intp)
        if known[-1] == known.size - 1:  # All up to the last one.
            return np.where(samples < known.size, samples, -1)
        places = np.minimum(np.searchsorted(known, samples), known.size - 1)
        return np.where(known[places] == samples, places, -1)

    @staticmethod
    def _numbers(column: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return numbers with NaN for none; outcomes stay codes."""
        if column == "outcome" or array.dtype.kind == "f":
            return array
        numbers = array.astype(np.float64)
        return np.where(numbers < 0, np.nan, numbers)

    def metadata_values(self, key: str) -> list[JSON]:
        """Return the distinct values of a metadata key, in the order of their codes, from 1."""
        self._check(_METADATA + key)
        return self._file.metadata_values(key)

    def metadata_code(self, key: str, value: JSON) -> int | None:
        """Return the code of a value: 0 for None (samples without the key), None if no sample has the value."""
        if value is None:
            return 0
        wanted = canonical(value)  # 1, 1.0 and True are equal in Python, and other values here.
        for code, known in enumerate(self.metadata_values(key), 1):
            if known == value and canonical(known) == wanted:
                return code
        return None

    def sample_id(self, sample: int) -> str:
        """Return the id of a sample by its ordinal; "" if it is not known."""
        place = int(self._sample_places(np.array([sample], dtype=np.int64))[0])
        return "" if place < 0 else self._file.ids[place]

    def sample_ids(self, ordinals: Sequence[int] | Ordinals) -> list[str]:
        """Return the sample ids of trials."""
        width = self.run.repeats * len(self.run.experiments)
        places = self._sample_places(np.asarray(ordinals, dtype=np.int64) // width)
        return ["" if place < 0 else self._file.ids[place] for place in places.tolist()]

    def rows(self, ordinals: Sequence[int] | Ordinals) -> list[dict[str, Any]]:
        """Return the numbers of a few trials as plain values: names of outcomes and experiments, values of metadata."""
        places = np.asarray(ordinals, dtype=np.int64)
        found: list[dict[str, Any]] = [{"sample_id": name} for name in self.sample_ids(places)]
        for column in self.columns:
            for row, value in zip(found, self._plain(column, self.at(column, places)), strict=True):
                row[column] = value
        return found

    def _plain(self, column: str, numbers: NDArray[Any]) -> list[Any]:
        if column == "experiment":
            return [self.run.experiments[place] for place in numbers.tolist()]
        if column == "outcome":
            return [OUTCOME_NAMES.get(code) for code in numbers.tolist()]
        if column.startswith(_METADATA):
            values = [None, *self._file.metadata_values(column.removeprefix(_METADATA))]
            return [values[code] for code in numbers.tolist()]
        if column == "passed" or column.startswith(_VERDICT):
            return [None if np.isnan(number) else bool(number) for number in numbers.tolist()]
        whole = column not in ("score", "reward", *AMOUNTS, "started_at") and not column.startswith(_METRIC)
        return [None if np.isnan(number) else int(number) if whole else float(number) for number in numbers.tolist()]

    def select(self, *conditions: Condition) -> TrialSelection:
        """Return the stored trials that meet all conditions."""
        tests = [self._test(condition) for condition in conditions]
        mask = np.empty(self.extent, dtype=np.bool_)
        outcome = self._file.array("outcome")
        for start, end in self._blocks():
            part = outcome[start:end] > 0
            for condition, test in zip(conditions, tests, strict=True):
                if not part.any():
                    break
                part &= test(self.part(condition.column, start, end))
            mask[start:end] = part
        return TrialSelection(self, mask)

    def _test(self, condition: Condition) -> Callable[[NDArray[Any]], Mask]:
        self._check(condition.column)
        codes = None if condition.any_of is None else self._codes(condition.column, condition.any_of)
        is_code = condition.column.startswith(_METADATA)

        def test(numbers: NDArray[Any]) -> Mask:
            found = np.ones(len(numbers), dtype=np.bool_)
            absent = numbers == 0 if is_code else np.isnan(numbers) if numbers.dtype.kind == "f" else ~found
            if codes is not None:
                numbers_wanted = [code for code in codes if code is not None]
                chosen = np.isin(numbers, numbers_wanted) if len(numbers_wanted) != 1 else numbers == numbers_wanted[0]
                found &= (chosen | absent) if None in codes else chosen
            if condition.low is not None:
                found &= numbers >= condition.low
            if condition.high is not None:
                found &= numbers <= condition.high
            if condition.missing is not None:
                found &= absent if condition.missing else ~absent
            return found

        return test

    def _codes(self, column: str, values: Sequence[JSON]) -> list[float | None]:
        """Return the numbers that stand for values; None for no value. Unknown values match nothing."""
        codes: list[float | None] = []
        for value in values:
            if column == "experiment":
                codes.append(self.run.experiments.index(value) if value in self.run.experiments else -1)
            elif column == "outcome":
                codes.append(OUTCOMES.get(value, -1) if isinstance(value, str) else -1)  # type: ignore[call-overload]
            elif value is None:
                codes.append(None)
            elif column.startswith(_METADATA):
                code = self.metadata_code(column.removeprefix(_METADATA), value)
                codes.append(-1 if code is None else code)
            else:
                codes.append(float(value) if isinstance(value, int | float) else np.nan)
        return codes


class TrialSelection:
    """Some stored trials of a run."""

    def __init__(self, columns: TrialColumns, mask: Mask) -> None:
        self.columns, self.mask = columns, mask

    @cached_property
    def total(self) -> int:
        """The number of trials."""
        return int(np.count_nonzero(self.mask))

    def ordinals(self) -> Ordinals:
        """Return the ordinals of the trials, ascending."""
        return np.flatnonzero(self.mask)

    def pass_rates(self, *, level: float = 0.95) -> dict[str, Estimate]:
        """Estimate the pass rate of the selected trials of each experiment that has any, with the report's own method.

        Trials that are not selected count as not run. Loads scipy.
        """
        # scipy takes longer to load than a page takes, and more memory.
        from fairtrial.reports.figures.column_reader import read_columns
        from fairtrial.reports.figures.estimates import estimate

        run, found = self.columns.run, {}
        width = len(run.experiments) * run.repeats
        cells = np.zeros(run.dataset_size * width, dtype=np.bool_)
        cells[: self.mask.size] = self.mask
        for place, name in enumerate(run.experiments):
            selected = cells.reshape(run.dataset_size, len(run.experiments), run.repeats)[:, place, :]
            if not selected.any():
                continue
            whole = read_columns(ExperimentSource(self.columns.store, run, name), metrics=[PASSED])
            if len(whole.ids) != run.dataset_size:
                selected = selected[self.columns._file.sample_ordinals]
            rows = selected.any(axis=1)
            some = whole.take(rows)
            outcomes = np.where(selected[rows], some.outcomes, NOT_RUN).astype(np.int8)
            found[name] = estimate(replace(some, outcomes=outcomes), PASSED, name="pass_rate", level=level)
        return found
