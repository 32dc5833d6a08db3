"""The table of trials: filtered, sorted, paged, counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairtrial.base.frozen import JSON
from fairtrial.reports.figures.trial_columns import Condition, TrialColumns
from fairtrial.reports.render.safe_text import value_text
from fairtrial.store.protocol import RunRecord, RunStore
from fairtrial.store.rows import OUTCOMES
from fairtrial.viewer.question import PAGE, STATES, Question, RowCursor

BUILT_HERE = 20_000
"""Largest run whose columns the server builds itself; larger ones are built in a child process."""


def open_columns_of(store: RunStore, run: RunRecord) -> TrialColumns:
    """Open the columns of a run in its present state; builds or updates their file if necessary.

    Opening a current file only maps it, so every request opens its own: columns belong to one thread.
    """
    return TrialColumns.open(store, run)


def needs_building(store: RunStore, run: RunRecord) -> bool:
    """Return whether opening the columns would take long."""
    return run.planned > BUILT_HERE and TrialColumns.open_existing(store, run) is None


def accepted_values(columns: TrialColumns, key: str, texts: tuple[str, ...]) -> list[JSON]:
    """Return the values of a metadata key that are shown as one of these texts; None stands for samples without it."""
    found = [value for value in columns.metadata_values(key) if value_text(value) in texts]
    return [*found, None] if "" in texts else found


def conditions_of(columns: TrialColumns, question: Question) -> list[Condition] | None:
    """Return the conditions of a question that selects by no result; None if no trial can meet them."""
    made = []
    if question.experiments:
        known = tuple(name for name in question.experiments if name in columns.run.experiments)
        if not known:
            return None
        made.append(Condition("experiment", known))
    for key, texts in question.metadata:
        values = accepted_values(columns, key, texts) if key in columns.metadata else []
        if not values:
            return None
        made.append(Condition(f"meta:{key}", tuple(values)))
    if any(name not in columns.columns for name, _ in question.spans):
        return None
    made += [Condition(name, low=span.low, high=span.high) for name, span in question.spans]
    return made


type Mask = NDArray[np.bool_]
_BLOCK = 1 << 18
_NEAR = 1 << 14  # Where a page in plan order is likely to be found in the first block.
_FEW = 16  # If fewer than one trial in 16 is selected, only the metadata of these is read.
SHOWN_VALUES = 30
SHOWN_FACETS = 8
_PASSED, _FAILED = STATES.index("passed") + 1, STATES.index("failed") + 1
_STATE_OF_OUTCOME = np.zeros(256, dtype=np.uint8)
for _name, _code in OUTCOMES.items():
    _STATE_OF_OUTCOME[_code] = _PASSED if _name == "scored" else STATES.index(_name) + 1 if _name in STATES else 0


class FacetValue(NamedTuple):
    """One value of a facet: its text, the number of trials with it, and whether it is selected."""

    text: str
    trials: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """The values of one facet, counted under all other filters; `others` values are not shown."""

    name: str
    title: str
    values: tuple[FacetValue, ...]
    others: int = 0


@dataclass(frozen=True, slots=True)
class TableCounts:
    """The counts of everything that is filtered, and of the values to filter by."""

    total: int
    scored: int
    passed: int
    facets: tuple[Facet, ...]


@dataclass(frozen=True, slots=True)
class TablePage:
    """The rows of one page; `next` and `previous` are where the pages beside it begin."""

    ordinals: tuple[int, ...]
    next: RowCursor | None
    previous: RowCursor | None


def count_trials(columns: TrialColumns, question: Question) -> TableCounts:
    """Return the counts of what a question selects, the same for each of its pages."""
    tally = _Tally(columns, question)
    for block in _blocks(columns, question):
        tally.add(block)
    return tally.counts()


def find_page(columns: TrialColumns, question: Question, *, limit: int = PAGE) -> TablePage:
    """Return the rows that a question asks for."""
    sorter = _Sorter(columns, question, limit)
    for block in _blocks(columns, question, sorter.starts()):
        sorter.add(block.start, block.selected())
        if sorter.is_complete:
            break
    return sorter.page()


def count_and_find(columns: TrialColumns, question: Question) -> tuple[TableCounts, TablePage]:
    """Return the counts and the rows of a page, in one pass where the order allows it."""
    sorter, tally = _Sorter(columns, question, PAGE), _Tally(columns, question)
    if not sorter.goes_forwards:
        return count_trials(columns, question), find_page(columns, question)
    for block in _blocks(columns, question):
        tally.add(block)
        if not sorter.is_complete:
            sorter.add(block.start, block.selected())
    return tally.counts(), sorter.page()


def neighbours(columns: TrialColumns, question: Question, ordinal: int) -> tuple[int | None, int | None]:
    """Return the trials before and after this one, in the order of the question."""
    if not 0 <= ordinal < columns.extent:
        return None, None
    known = question.sort in columns.columns
    key = float(columns.at(question.sort, np.array([ordinal]))[0]) if known else np.nan
    cursor = RowCursor(None if np.isnan(key) else key, ordinal)
    here = question.first_page
    before = find_page(columns, replace(here, before=cursor), limit=1).ordinals
    after = find_page(columns, replace(here, after=cursor), limit=1).ordinals
    return (before[-1] if before else None), (after[0] if after else None)


def chosen_ordinals(columns: TrialColumns, question: Question) -> Iterator[int]:
    """Yield the trials that a question selects, in plan order."""
    for block in _blocks(columns, question):
        yield from (np.flatnonzero(block.selected()) + block.start).tolist()


class _Block:
    """The trials from one ordinal to another: their codes, and the mask of every filter."""

    def __init__(self, columns: TrialColumns, start: int, end: int) -> None:
        self.start, self._end = start, min(end, columns.extent)
        self._columns = columns
        self._codes: dict[str, NDArray[Any]] = {}
        self._chosen: Mask | None = None
        self._places: NDArray[np.intp] | None = None
        self.masks: dict[str, Mask] = {}

    def part(self, column: str) -> NDArray[Any]:
        """Return a column."""
        return self._columns.part(column, self.start, self._end)

    def codes(self, name: str) -> NDArray[Any]:
        """Return the code of each trial's experiment, outcome (1 + its place in `STATES`) or metadata ("m.kind")."""
        if name not in self._codes:
            if name == "outcome":
                self._codes[name] = self._states()
            else:
                self._codes[name] = self.part(f"meta:{name[2:]}" if name.startswith("m.") else name)
        return self._codes[name]

    def _states(self) -> NDArray[np.uint8]:
        states = np.take(_STATE_OF_OUTCOME, self.part("outcome"))
        passed = self._columns.stored_part("passed", self.start, self._end) == 1
        return np.where(passed | (states != _PASSED), states, np.uint8(_FAILED))

    def choose(self, name: str, accepted: Sequence[int], size: int) -> None:
        """Add the filter for some of the `size` codes of an experiment, an outcome or metadata."""
        codes = self.codes(name)
        if len(accepted) == 1:
            self.masks[name] = codes == accepted[0]
        else:
            table = np.zeros(size, np.bool_)
            table[list(accepted)] = True
            self.masks[name] = np.take(table, codes)

    def selected(self, without: str = "") -> Mask:
        """Return the trials that pass all filters, or all but one."""
        if without in self.masks:
            kept = [mask for name, mask in self.masks.items() if name != without]
            return np.logical_and.reduce(kept) if len(kept) > 1 else kept[0]
        if self._chosen is None:
            self._chosen = np.logical_and.reduce(list(self.masks.values()))
        return self._chosen

    def codes_of_chosen(self, name: str, *, without: str = "") -> NDArray[Any]:
        """Return the codes of the trials that pass all filters, or all but one."""
        if without in self.masks:
            places = np.flatnonzero(self.selected(without))
        else:
            if self._places is None:
                self._places = np.flatnonzero(self.selected())
            places = self._places
        if name not in self._codes and name.startswith("m.") and places.size * _FEW < self._end - self.start:
            return self._columns.at(f"meta:{name[2:]}", places + self.start)
        return np.take(self.codes(name), places)


def _blocks(
    columns: TrialColumns, question: Question, parts: Iterable[tuple[int, int]] | None = None
) -> Iterator[_Block]:
    """Yield the blocks of ordinals with the masks of the filters; "stored" is that for trials with a result."""
    metadata = [
        (f"m.{key}", _codes(columns, key, texts), len(columns.metadata_values(key)) + 1)
        for key, texts in question.metadata
        if key in columns.metadata
    ]
    unknown = any(key not in columns.metadata for key, _ in question.metadata)
    unknown = unknown or any(name not in columns.columns for name, _ in question.spans)
    names = columns.run.experiments
    wanted = [names.index(name) for name in question.experiments if name in names]
    states = [STATES.index(state) + 1 for state in question.states]
    for start, end in ((at, at + _BLOCK) for at in range(0, columns.extent, _BLOCK)) if parts is None else parts:
        block = _Block(columns, start, end)
        stored = block.part("outcome") != 0
        block.masks["stored"] = np.zeros_like(stored) if unknown else stored
        if question.experiments:
            block.choose("experiment", wanted, len(names))
        if question.states:
            block.choose("outcome", states, len(STATES) + 1)
        for name, accepted, size in metadata:
            block.choose(name, accepted, size)
        for name, span in () if unknown else question.spans:
            values = block.part(name).astype(np.float64)
            inside = ~np.isnan(values)
            if span.low is not None:
                inside &= values >= span.low
            if span.high is not None:
                inside &= values <= span.high
            block.masks[f"span:{name}"] = inside
        yield block


def _codes(columns: TrialColumns, key: str, texts: Sequence[str]) -> list[int]:
    shown = [value_text(value) for value in columns.metadata_values(key)]
    found = [place + 1 for place, text in enumerate(shown) if text in texts]
    return [*found, 0] if "" in texts else found


class _Sorter:
    """Collects the rows of one page: of every block no more than may be on it."""

    def __init__(self, columns: TrialColumns, question: Question, limit: int) -> None:
        self._backwards = question.before is not None and question.after is None
        self._cursor = question.before if self._backwards else question.after
        self._limit = limit
        self._columns = columns
        known = question.sort in columns.columns  # What no trial has is no column, and sorts nothing.
        self._sort = question.sort if known else "ordinal"
        self._sign = -1.0 if question.descending and known else 1.0
        self._keys: list[NDArray[np.float64]] = []
        self._ordinals: list[NDArray[np.int64]] = []

    @property
    def _in_plan_order(self) -> bool:
        return self._sort == "ordinal" and self._sign > 0

    @property
    def goes_forwards(self) -> bool:
        """True if the page can be found in blocks from the first to the last."""
        return not (self._backwards and self._in_plan_order)

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield the blocks to look at: in the order of the plan from the place on, forwards or backwards."""
        size, extent = (_NEAR, self._columns.extent) if self._in_plan_order else (_BLOCK, self._columns.extent)
        at = 0 if self._cursor is None else min(self._cursor.ordinal, extent)
        if not self._in_plan_order:
            at = 0
        if self._backwards and self._in_plan_order:
            while at > 0:
                yield max(at - size, 0), at
                at -= size
            return
        while at < extent:
            yield at, at + size
            at += size

    @property
    def is_complete(self) -> bool:
        """True if later blocks cannot have rows of the page."""
        return self._in_plan_order and sum(map(len, self._ordinals)) > self._limit

    def add(self, start: int, chosen: Mask) -> None:
        """Add the rows of a block."""
        ordinals = np.flatnonzero(chosen).astype(np.int64) + start
        if self._sort == "ordinal":
            keys: NDArray[np.float64] = ordinals.astype(np.float64) * self._sign
        else:
            keys = np.asarray(self._columns.at(self._sort, ordinals), dtype=np.float64) * self._sign
            keys[np.isnan(keys)] = np.inf  # Without a value: last in both directions.
        if self._cursor is not None:
            own = self._own_key(self._cursor)
            if self._backwards:
                kept = (keys < own) | ((keys == own) & (ordinals < self._cursor.ordinal))
            else:
                kept = (keys > own) | ((keys == own) & (ordinals > self._cursor.ordinal))
            keys, ordinals = keys[kept], ordinals[kept]
        keys, ordinals = _nearest(keys, ordinals, self._limit + 1, self._backwards)
        self._keys.append(keys)
        self._ordinals.append(ordinals)

    def page(self) -> TablePage:
        """Return the rows."""
        cursors, more_before, more_after = self._page_rows()
        return TablePage(
            tuple(cursor.ordinal for cursor in cursors),
            cursors[-1] if cursors and more_after else None,
            cursors[0] if cursors and more_before else None,
        )

    def _page_rows(self) -> tuple[list[RowCursor], bool, bool]:
        """Return the rows, and whether there are others before and after them."""
        if not self._keys:
            return [], False, False
        keys, ordinals = np.concatenate(self._keys), np.concatenate(self._ordinals)
        order = np.lexsort((ordinals, keys))
        more = order.size > self._limit
        order = order[-self._limit :] if self._backwards else order[: self._limit]
        cursors = [RowCursor(self._shown_key(keys[at]), int(ordinals[at])) for at in order]
        if self._backwards:
            return cursors, more, True
        return cursors, self._cursor is not None, more

    def _own_key(self, cursor: RowCursor) -> float:
        if self._sort == "ordinal":
            return cursor.ordinal * self._sign
        return np.inf if cursor.key is None else cursor.key * self._sign

    def _shown_key(self, key: float) -> float | None:
        return None if np.isinf(key) or self._sort == "ordinal" else float(key * self._sign)


def _nearest(
    keys: NDArray[np.float64], ordinals: NDArray[np.int64], count: int, backwards: bool
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the `count` smallest rows, or the largest; of equal keys those with the smallest, or largest, ordinals."""
    if keys.size <= count:
        return keys, ordinals
    if backwards:
        edge = np.partition(keys, keys.size - count)[keys.size - count]
        inside = np.flatnonzero(keys > edge)
        equal = np.flatnonzero(keys == edge)[-(count - inside.size) :]
    else:
        edge = np.partition(keys, count - 1)[count - 1]
        inside = np.flatnonzero(keys < edge)
        equal = np.flatnonzero(keys == edge)[: count - inside.size]
    rows = np.concatenate([inside, equal])
    return keys[rows], ordinals[rows]


class _Tally:
    """Counts everything that is filtered, and the values to filter by."""

    def __init__(self, columns: TrialColumns, question: Question) -> None:
        self._counters = _counters(columns, question)
        self._trials = 0
        self._by_state = np.zeros(len(STATES) + 1, dtype=np.int64)

    def add(self, block: _Block) -> None:
        """Count the rows of a block."""
        states = block.codes_of_chosen("outcome")
        self._trials += states.size
        self._by_state += np.bincount(states, minlength=self._by_state.size)
        for counter in self._counters:
            counter.add(block)

    def counts(self) -> TableCounts:
        """Return the counts."""
        passed, failed = int(self._by_state[_PASSED]), int(self._by_state[_FAILED])
        facets = tuple(counter.facet() for counter in self._counters)
        return TableCounts(self._trials, passed + failed, passed, facets)


class _Counter:
    """Counts the values of one facet."""

    def __init__(self, question: Question, name: str, title: str, texts: Sequence[str]) -> None:
        self.name = name
        self._title, self._texts = title, texts
        self._chosen = frozenset(question.selected(name))
        self._counts = np.zeros(len(texts), dtype=np.int64)

    def add(self, block: _Block) -> None:
        """Count the rows of a block."""
        codes = block.codes_of_chosen(self.name, without=self.name)
        self._counts += np.bincount(codes, minlength=self._counts.size)[: self._counts.size]

    def facet(self) -> Facet:
        """Return the counts; those that are selected are shown even if they are rare."""
        found = [
            FacetValue(text, int(count), text in self._chosen)
            for text, count in zip(self._texts, self._counts.tolist(), strict=True)
            if count or text in self._chosen
        ]
        if self.name.startswith("m."):
            found.sort(key=lambda value: (not value.chosen, -value.trials))
        shown = found[:SHOWN_VALUES]
        return Facet(self.name, self._title, tuple(shown), len(found) - len(shown))


def _counters(columns: TrialColumns, question: Question) -> list[_Counter]:
    made = []
    if len(columns.run.experiments) > 1:
        made.append(_Counter(question, "experiment", "experiment", columns.run.experiments))
    made.append(_Counter(question, "outcome", "outcome", ("", *STATES)))
    selected = [key for key, _ in question.metadata if key in columns.metadata]
    for key in list(dict.fromkeys((*selected, *columns.metadata)))[:SHOWN_FACETS]:
        texts = ["", *(value_text(value) for value in columns.metadata_values(key))]
        made.append(_Counter(question, f"m.{key}", key, texts))
    return made
