"""The results of a run, read lazily from the store."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, overload

from fairtrial.base.codec import from_json, to_json
from fairtrial.base.frozen import EMPTY
from fairtrial.errors import CodecError
from fairtrial.store.protocol import RunStore
from fairtrial.trials.result import EvalResult

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
    def __getitem__(self, index: int | slice) -> EvalResult | Sequence[EvalResult]:
        if isinstance(index, slice):
            positions = range(len(self))[index]
            if positions.step > 0:
                return tuple(islice(self, positions.start, positions.stop, positions.step))
            return tuple(self)[index]
        position = range(len(self))[index]  # Raises IndexError, and counts from the end, as sequences do.
        if position < _READ_IN_ORDER:
            return next(islice(self, position, None))
        after = self._ordinals[position] - 1
        return self._typed(next(self._store.results(self._run_id, after=after, limit=1, **self._filters)))

    def __repr__(self) -> str:
        return f"<{len(self)} results of run {self._run_id}>"
