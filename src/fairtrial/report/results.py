"""The results of a run, read from the store as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult


class Results(Sequence[EvalResult]):
    """Results in plan order. Iterating streams them; nothing but the one at hand is held."""

    def __init__(self, store: RunStore, run_id: str, count: int, **filters: Any) -> None:
        self._store = store
        self._run_id = run_id
        self._count = count
        self._filters = filters

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[EvalResult]:
        return self._store.results(self._run_id, **self._filters)

    @overload
    def __getitem__(self, index: int) -> EvalResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EvalResult]: ...
    def __getitem__(self, index: int | slice) -> EvalResult | Sequence[EvalResult]:
        if isinstance(index, slice):
            positions = range(len(self))[index]
            if positions.step > 0:
                return tuple(islice(self, positions.start, positions.stop, positions.step))
            return tuple(self)[index]
        position = range(len(self))[index]  # Raises IndexError, and counts from the end, as sequences do.
        return next(islice(self, position, None))

    def __repr__(self) -> str:
        return f"<{len(self)} results of run {self._run_id}>"
