"""Read the numbers of a run's results from its store, a block of ordinals at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.reports.figures.metrics import REWARD, Range, widen
from fairtrial.store.column_cache import ColumnHeader
from fairtrial.store.numbers import BlockState, NumberStore, NumberTexts
from fairtrial.store.protocol import METRIC_CODES, REWARD_PLACE, RunRecord, split_facts
from fairtrial.store.rows import SCORED, all_metrics

BLOCK = 1 << 16
"""Ordinals in a block, the unit in which a column file is compared with its store and updated."""
RESULT_ARRAYS = {
    "outcome": "u1", "passed": "i1", "score": "f8", "latency_ms": "i4", "input_tokens": "i4", "output_tokens": "i4",
    "attempt": "i4", "started_at": "f8", "cost_usd": "f8", "reward": "f8",
}  # fmt: skip
"""Arrays with a number for each trial. No value: NaN or -1, outcome 0. The last two are absent if no trial has any."""
OPTIONAL_ARRAYS = ("cost_usd", "reward")
_CHUNK = 1 << 13  # Rows in memory at a time.
_VERDICT = {code: -1 if passed is None else int(passed) for code, (passed, _) in METRIC_CODES.items()}

type _Arrays = dict[str, NDArray[Any]]
type Occurrence = tuple[int, int]
"""Where a metric was first seen: the ordinal of the trial and the place in its score."""


def _numbers(text: str) -> NDArray[np.int64]:
    return np.fromstring(text, dtype=np.int64, sep=",")


class BlockReader:
    """Reads blocks; collects where each metric and each declared direction first occurred, by experiment."""

    def __init__(self, run: RunRecord, old: ColumnHeader | None) -> None:
        self._experiments, self._repeats = len(run.experiments), run.repeats
        self.metrics: list[dict[str, Occurrence]] = [{} for _ in run.experiments]
        self.directions: list[dict[str, tuple[Occurrence, bool]]] = [{} for _ in run.experiments]
        self.ranges: list[dict[str, Range | None]] = [{} for _ in run.experiments]
        self._shapes: dict[tuple[int, tuple[str, ...], str | None], int] = {}
        if old is not None:
            # A scored result is final, so what occurred once stays.
            for names, found in zip(self.metrics, old.metrics, strict=True):
                names.update((name, (ordinal, place)) for name, ordinal, place in found)
            for declared, told in zip(self.directions, old.directions, strict=True):
                declared.update((name, ((ordinal, place), higher)) for name, higher, ordinal, place in told)
            for ranges, known in zip(self.ranges, old.ranges, strict=True):
                ranges.update((name, None if ends is None else (ends[0], ends[1])) for name, ends in known.items())

    def read(self, store: NumberStore, run_id: str, start: int, end: int) -> tuple[_Arrays, BlockState]:
        """Return the arrays of the ordinals from `start` to `end`, and the state of what was read."""
        arrays: _Arrays = {
            name: np.full(end - start, 0 if name == "outcome" else np.nan if dtype == "f8" else -1, dtype=dtype)
            for name, dtype in RESULT_ARRAYS.items()
            if name not in OPTIONAL_ARRAYS
        }
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            texts = store.result_numbers(run_id, first, last)
            if texts is not None:
                self._add(arrays, texts, start)
                if texts.detailed:
                    self._add_details(arrays, store.result_details(run_id, first, last), start, end - start)
        stored = arrays["outcome"] > 0
        return arrays, BlockState(
            int(np.count_nonzero(stored)),
            int(np.count_nonzero(arrays["outcome"] == SCORED)),
            int(arrays["attempt"].sum(where=stored, dtype=np.int64)),
        )

    def _add(self, arrays: _Arrays, texts: NumberTexts, start: int) -> None:
        where: Any = _numbers(texts.ordinal) - start
        low, high = int(where.min()), int(where.max())
        if where[0] == low and where.size == high - low + 1 and bool((np.diff(where) == 1).all()):
            where = slice(low, high + 1)  # In order and without gaps: a copy instead of a scatter.
        for name in ("outcome", "passed", "latency_ms", "input_tokens", "output_tokens", "attempt"):
            arrays[name][where] = _numbers(getattr(texts, name))
        arrays["started_at"][where] = np.fromstring(texts.started_at, dtype=np.float64, sep=",")
        values = _numbers(texts.value).astype(np.float64)
        arrays["score"][where] = np.where(values < 0, np.nan, values)

    def _add_details(self, arrays: _Arrays, rows: Sequence[tuple[Any, ...]], start: int, size: int) -> None:
        ordinals, values, costs, rewards, metrics, verdicts = zip(*rows, strict=True)
        where = np.array(ordinals, dtype=np.intp) - start
        arrays["score"][where] = np.array(values, dtype=np.float64)  # None becomes NaN.
        for name, numbers in (("cost_usd", costs), ("reward", rewards)):
            if numbers.count(None) != len(numbers):
                self._array(arrays, name, "f8", size)[where] = np.array(numbers, dtype=np.float64)
        if metrics.count(None) != len(metrics):
            self._add_metrics(arrays, ordinals, values, metrics, verdicts, start, size)

    def _array(self, arrays: _Arrays, name: str, dtype: str, size: int) -> NDArray[Any]:
        if name not in arrays:
            arrays[name] = np.full(size, np.nan if dtype == "f8" else -1, dtype=dtype)
        return arrays[name]

    def _add_metrics(
        self,
        arrays: _Arrays,
        ordinals: Sequence[int],
        values: Sequence[float | None],
        texts: Sequence[str | None],
        verdicts: Sequence[str | None],
        start: int,
        size: int,
    ) -> None:
        """Add metrics, the scores with the same metrics and verdicts together: most runs have few kinds of scores."""
        found = all_metrics(texts)
        groups: dict[tuple[tuple[str, ...], str | None], list[int]] = {}
        for place, (value, scores, codes) in enumerate(zip(values, found, verdicts, strict=True)):
            if value is not None and scores:
                groups.setdefault((tuple(scores), codes), []).append(place)
        for (names, codes), places in groups.items():
            here = [ordinals[place] for place in places]
            self._note(names, codes, here)
            where = np.array(here, dtype=np.intp) - start
            for index, name in enumerate(names):
                array = self._array(arrays, f"metric:{name}", "f8", size)
                array[where] = [found[place][name] for place in places]
                if codes and (verdict := _VERDICT[codes[index]]) >= 0:
                    self._array(arrays, f"verdict:{name}", "i1", size)[where] = verdict

    def _note(self, names: tuple[str, ...], codes: str | None, ordinals: Sequence[int]) -> None:
        """Note first occurrences; the ordinals ascend, so the first of each experiment is enough."""
        seen: set[int] = set()
        for ordinal in ordinals:
            experiment = ordinal // self._repeats % self._experiments
            if experiment in seen:
                continue
            seen.add(experiment)
            shape = (experiment, names, codes)
            if self._shapes.get(shape, ordinal + 1) > ordinal:
                self._shapes[shape] = ordinal
                self._note_first(experiment, names, codes, ordinal)
            if len(seen) == self._experiments:
                return

    def _note_first(self, experiment: int, names: tuple[str, ...], codes: str | None, ordinal: int) -> None:
        known, declared, ranges = self.metrics[experiment], self.directions[experiment], self.ranges[experiment]
        for place, bounds in split_facts(codes)[1].items() if codes else ():
            widen(ranges, REWARD if place == REWARD_PLACE else names[place], bounds)
        for place, name in enumerate(names):
            if name not in known or known[name] > (ordinal, place):
                known[name] = (ordinal, place)
            higher = METRIC_CODES[codes[place]][1] if codes else None
            if higher is not None and (name not in declared or declared[name][0] > (ordinal, place)):
                declared[name] = ((ordinal, place), higher)

    def metrics_json(self) -> list[list[list[Any]]]:
        """Return the metrics of each experiment in the order in which they first occurred."""
        return [
            [[name, *first] for name, first in sorted(names.items(), key=lambda item: item[1])]
            for names in self.metrics
        ]

    def directions_json(self) -> list[list[list[Any]]]:
        """Return the declared directions of each experiment in the order in which they first occurred."""
        return [
            [[name, higher, *first] for name, (first, higher) in sorted(names.items(), key=lambda item: item[1][0])]
            for names in self.directions
        ]
