"""The ids of samples as one text, decoded one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class StoredIds(Sequence[str]):
    """Sample ids in UTF-8: id i is `text[starts[i]:ends[i]]`. They become strings only where somebody needs them."""

    def __init__(self, text: memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._text, self._starts, self._ends = text, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> StoredIds: ...
    def __getitem__(self, index: int | slice) -> str | StoredIds:
        if isinstance(index, slice):
            return StoredIds(self._text, self._starts[index], self._ends[index])
        return _decoded(self._text[self._starts[index] : self._ends[index]])

    def __iter__(self) -> Iterator[str]:
        text = self._text
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            yield _decoded(text[start:end])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredIds):
            return self.same_as(other)
        return list(self) == list(other) if isinstance(other, Sequence) and not isinstance(other, str) else False

    __hash__ = None  # type: ignore[assignment]  # As of a list.

    def take(self, places: NDArray[Any]) -> StoredIds:
        """Return the ids at these positions."""
        return StoredIds(self._text, self._starts[places], self._ends[places])

    def same_as(self, other: StoredIds) -> bool:
        """True if both have the same ids in the same order."""
        if len(self) != len(other):
            return False
        if self._text is other._text and self._starts is other._starts:
            return True
        if self._is_whole and other._is_whole:
            return bool(np.array_equal(self._ends, other._ends)) and self._text == other._text
        return list(self) == list(other)

    @cached_property
    def _is_whole(self) -> bool:
        """True if these are all ids of the text, in its order."""
        starts, ends = self._starts, self._ends
        if not len(starts):
            return not len(self._text)
        return bool(starts[0] == 0 and ends[-1] == len(self._text) and np.array_equal(starts[1:], ends[:-1]))

    @cached_property
    def are_unique(self) -> bool:
        """True if no id occurs twice."""
        hashes = np.fromiter(map(hash, self), dtype=np.int64, count=len(self))
        hashes.sort()
        return not bool(np.any(hashes[1:] == hashes[:-1])) or len(set(self)) == len(self)


def _decoded(text: memoryview) -> str:
    return str(text, "utf-8", "surrogatepass")
