"""The matrix of samples and experiments: which rows a question selects, and what came of each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.reports.render.safe_text import value_text
from fairtrial.store.protocol import RunRecord
from fairtrial.store.rows import NOT_RUN, OUTCOME_NAMES, SCORED
from fairtrial.viewer.question import MatrixQuestion
from fairtrial.viewer.trial_table import SHOWN_FACETS, SHOWN_VALUES, Facet, FacetValue, Mask

ROWS = 25
"""Rows of a page."""


class CellTrial(NamedTuple):
    """One repeat of a cell: its ordinal, and what came of it."""

    ordinal: int
    repeat: int
    state: str


@dataclass(frozen=True, slots=True)
class MatrixPage:
    """The rows of one page, by the places of their samples, and where the pages beside it begin."""

    rows: tuple[int, ...]
    first: int  # The number of the first row among those that are selected, from 1.
    total: int
    next: int | None
    previous: int | None


class MatrixColumn:
    """One experiment of a run, in the rows of the matrix: those of another run are found by the ids of samples."""

    def __init__(self, columns: TrialColumns, experiment: str, rows: TrialColumns) -> None:
        self.run: RunRecord = columns.run
        self.experiment = experiment
        self._number = self.run.experiments.index(experiment)
        self._columns = columns
        self._places = None if columns.run.run_id == rows.run.run_id else _places(columns, rows)

    def _grid(self, name: str, nothing: int) -> NDArray[Any]:
        """Return a column as samples x repeats."""
        stored = self._columns.stored_part(name, 0, self._columns.extent)
        whole = np.full(self.run.planned, nothing, dtype=stored.dtype)
        whole[: stored.size] = stored
        found = whole.reshape(self.run.dataset_size, len(self.run.experiments), self.run.repeats)[:, self._number]
        if self._places is None:
            return found
        moved = np.full((self._places.size, self.run.repeats), nothing, dtype=stored.dtype)
        moved[self._places >= 0] = found[self._places[self._places >= 0]]
        return moved

    @cached_property
    def _outcomes(self) -> NDArray[Any]:
        return self._grid("outcome", 0)

    @cached_property
    def _passes(self) -> Mask:
        found: Mask = (self._outcomes == SCORED) & (self._grid("passed", -1) == 1)
        return found

    @cached_property
    def passed(self) -> NDArray[np.intp]:
        """How many trials of each row passed."""
        return _counted(self._passes)

    @cached_property
    def failed(self) -> NDArray[np.intp]:
        """How many trials of each row were scored and did not pass."""
        return _counted(self._outcomes == SCORED) - self.passed

    @cached_property
    def errors(self) -> NDArray[np.intp]:
        """How many trials of each row ended without a score."""
        ended = (self._outcomes != 0) & (self._outcomes != NOT_RUN)
        return _counted(ended) - self.passed - self.failed

    @cached_property
    def share(self) -> NDArray[np.float64]:
        """The share of each row's trials that passed, errors among them; NaN without a trial."""
        ended = self.passed + self.failed + self.errors
        found: NDArray[np.float64] = np.divide(self.passed, ended, out=np.full(ended.size, np.nan), where=ended > 0)
        return found

    def trials(self, row: int) -> list[CellTrial]:
        """Return the stored trials of a cell."""
        place = row if self._places is None else int(self._places[row])
        return [
            CellTrial(
                self.run.ordinal(place, self._number, repeat), repeat,
                ("passed" if self._passes[row, repeat] else "failed") if code == SCORED else OUTCOME_NAMES[code],
            )
            for repeat, code in enumerate(self._outcomes[row].tolist())
            if code not in (0, NOT_RUN)
        ]  # fmt: skip

    def shown(self, row: int, repeat: int) -> list[CellTrial]:
        """Return the stored trials of a cell, the one whose output is shown first: this repeat, or the first."""
        found = self.trials(row)
        return sorted(found, key=lambda trial: trial.repeat != repeat)


def _counted(trials: Mask) -> NDArray[np.intp]:
    """Return how many trials of each row are chosen."""
    found: NDArray[np.intp] = np.count_nonzero(trials, axis=1)
    return found


def _places(columns: TrialColumns, rows: TrialColumns) -> NDArray[np.int64]:
    """Return the place of each row's sample in another run; -1 if that run does not have it."""
    known = {sample_id: place for place, sample_id in enumerate(_ids(columns)) if sample_id}
    return np.array([known.get(sample_id, -1) for sample_id in _ids(rows)], dtype=np.int64)


def _ids(columns: TrialColumns) -> list[str]:
    width = len(columns.run.experiments) * columns.run.repeats
    return columns.sample_ids(np.arange(columns.run.dataset_size, dtype=np.int64) * width)


class Matrix:
    """Experiments side by side. The rows are the samples of the first column's run.

    Columns hold what is computed of them, and belong to one thread.
    """

    def __init__(self, sides: Sequence[tuple[TrialColumns, str]]) -> None:
        self._samples = sides[0][0]
        self.columns = [MatrixColumn(columns, experiment, self._samples) for columns, experiment in sides]

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        return np.stack([column.share for column in self.columns])

    @cached_property
    def _stored(self) -> Mask:
        found: Mask = ~np.isnan(self._shares).all(axis=0)
        return found

    @cached_property
    def differing(self) -> Mask:
        """The rows whose verdicts differ: by the share that passed, or by an error in some columns only."""
        has_result = ~np.isnan(self._shares)
        low = np.where(has_result, self._shares, np.inf).min(axis=0)
        high = np.where(has_result, self._shares, -np.inf).max(axis=0)
        failing = np.stack([column.errors > 0 for column in self.columns])
        found: Mask = (low < high) | (failing.any(axis=0) & (~failing & has_result).any(axis=0))
        return found

    def _masks(self, question: MatrixQuestion) -> dict[str, Mask]:
        """Return the rows of each filter."""
        masks = {"stored": self._stored, "show": self._chosen(question.show)}
        for key, texts in question.filters.metadata:
            masks[f"m.{key}"] = self._with_metadata(key, texts)
        return masks

    def _chosen(self, show: str) -> Mask:
        first, others = self._shares[0], self._shares[1:]
        match show:
            case "differ":
                return self.differing
            case "worse":
                return _any(others < first)
            case "better":
                return _any(others > first)
            case "failed":
                return _any([column.failed > 0 for column in self.columns])
            case "errors":
                return _any([column.errors > 0 for column in self.columns])
        return self._stored

    def _codes(self, key: str) -> NDArray[Any]:
        width = len(self._samples.run.experiments) * self._samples.run.repeats
        return self._samples.at(f"meta:{key}", np.arange(self._samples.run.dataset_size, dtype=np.int64) * width)

    def _with_metadata(self, key: str, texts: Sequence[str]) -> Mask:
        if key not in self._samples.metadata:
            return np.zeros(self._samples.run.dataset_size, dtype=np.bool_)
        shown = ["", *map(value_text, self._samples.metadata_values(key))]
        found: Mask = np.isin(self._codes(key), [code for code, text in enumerate(shown) if text in texts])
        return found

    def rows(self, question: MatrixQuestion) -> NDArray[np.intp]:
        """Return the rows that a question selects, without its text and without reading outputs."""
        return np.flatnonzero(np.logical_and.reduce(list(self._masks(question).values())))

    def page(self, question: MatrixQuestion) -> MatrixPage:
        """Return one page of the rows."""
        rows = self.rows(question)
        start = int(np.searchsorted(rows, question.filters.scan_from))
        following, before = start + ROWS, max(start - ROWS, 0)
        return MatrixPage(
            tuple(rows[start:following].tolist()),
            start + 1,
            int(rows.size),
            int(rows[following]) if following < rows.size else None,
            int(rows[before]) if start else None,
        )

    def counts(self, question: MatrixQuestion, choices: Sequence[str]) -> dict[str, int]:
        """Return the number of rows of each choice of what to show, under all other filters."""
        masks = self._masks(question)
        kept = np.logical_and.reduce([mask for name, mask in masks.items() if name != "show"])
        return {choice: int(np.count_nonzero(kept & self._chosen(choice))) for choice in choices}

    def tallies(self, question: MatrixQuestion) -> list[tuple[int, int, int]]:
        """Return of each column how many trials passed, failed and ended in an error, under the filters by metadata."""
        masks = self._masks(question)
        kept = np.logical_and.reduce([mask for name, mask in masks.items() if name != "show"])
        return [
            (int(column.passed[kept].sum()), int(column.failed[kept].sum()), int(column.errors[kept].sum()))
            for column in self.columns
        ]

    def facets(self, question: MatrixQuestion) -> Iterator[Facet]:
        """Yield the metadata to filter by: each value with the number of rows under all other filters."""
        masks, chosen = self._masks(question), dict(question.filters.metadata)
        known = self._samples.metadata
        for key in list(dict.fromkeys((*(key for key in chosen if key in known), *known)))[:SHOWN_FACETS]:
            kept = np.logical_and.reduce([mask for name, mask in masks.items() if name != f"m.{key}"])
            texts = ["", *map(value_text, self._samples.metadata_values(key))]
            counts = np.bincount(self._codes(key)[kept], minlength=len(texts)).tolist()
            values = [
                FacetValue(text, number, text in chosen.get(key, ()))
                for text, number in zip(texts, counts, strict=True)
                if number or text in chosen.get(key, ())
            ]
            values.sort(key=lambda value: (not value.chosen, -value.trials))
            yield Facet(f"m.{key}", key, tuple(values[:SHOWN_VALUES]), max(len(values) - SHOWN_VALUES, 0))

    def sample_id(self, row: int) -> str:
        """Return the id of a row's sample."""
        return self._samples.sample_id(row)


def _any(masks: Any) -> Mask:
    found: Mask = np.asarray(masks).any(axis=0)
    return found
