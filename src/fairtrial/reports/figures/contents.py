"""What samples ask and expect, as hashes: an id that means something else on another side is no pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.store.sample_hashes import UNKNOWN

type _Hashes = NDArray[np.int64]
type _Mask = NDArray[np.bool_]


class SampleContents:
    """The hashes of the input and of the expected value of each sample, read when they are needed."""

    def __init__(self, read: Callable[[], tuple[_Hashes, _Hashes]]) -> None:
        self._read = read

    @cached_property
    def hashes(self) -> tuple[_Hashes, _Hashes]:
        """The hashes of inputs and of expected values, in the order of the samples."""
        return self._read()

    def take(self, places: NDArray[Any]) -> SampleContents:
        """Return those of the samples at these positions."""

        def read() -> tuple[_Hashes, _Hashes]:
            inputs, expected = self.hashes
            return inputs[places], expected[places]

        return SampleContents(read)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedContents:
    """Which samples are not the same on all sides: masks of another input, and of the same with another expected value.

    `unknown` counts the others whose input is not known on every side: only their id says that they are the same.
    """

    inputs: _Mask
    expected: _Mask
    unknown: int

    @property
    def masks(self) -> tuple[_Mask, _Mask]:
        """The samples with another input, and those with another expected value only."""
        return self.inputs, self.expected

    @property
    def any(self) -> _Mask:
        """The samples that are not the same."""
        return np.asarray(self.inputs | self.expected)

    def take(self, rows: NDArray[Any]) -> ChangedContents:
        """Return those of some of the samples."""
        return ChangedContents(self.inputs[rows], self.expected[rows], self.unknown)


def compare_contents(sides: Sequence[SampleContents]) -> ChangedContents:
    """Compare what the same ids mean on several sides. What is unknown differs from nothing."""
    inputs, expected = (_differ([side.hashes[which] for side in sides]) for which in (0, 1))
    unknown = np.any([side.hashes[0] == UNKNOWN for side in sides], axis=0)
    return ChangedContents(inputs, expected & ~inputs, int(np.count_nonzero(unknown & ~inputs & ~expected)))


def _differ(columns: Sequence[_Hashes]) -> _Mask:
    seen, differ = columns[0], np.zeros(columns[0].size, dtype=np.bool_)
    for other in columns[1:]:
        differ |= (seen != other) & (seen != UNKNOWN) & (other != UNKNOWN)
        seen = np.where(seen == UNKNOWN, other, seen)
    return differ
