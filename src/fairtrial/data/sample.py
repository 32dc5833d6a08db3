"""One case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

from fairtrial.errors import DatasetError
from fairtrial.frozen import EMPTY, FrozenDict, freeze
from fairtrial.types import JSON


@dataclass(frozen=True, slots=True)
class Sample[I, E]:
    """One case: what goes in, what should come out (if anything is known), and facts to slice by."""

    id: str
    input: I
    expected: E | None = None
    metadata: Mapping[str, JSON] = EMPTY

    def __post_init__(self) -> None:
        if type(self.id) is not str or not self.id:
            raise DatasetError(f"a sample's id must be text that is not empty, not {self.id!r}")
        if type(self.metadata) is not FrozenDict:
            if not isinstance(self.metadata, Mapping):
                raise DatasetError(
                    f"sample {self.id!r}: metadata must be a mapping, not {type(self.metadata).__name__}"
                )
            for key in self.metadata:
                if not isinstance(key, str):
                    raise DatasetError(f"sample {self.id!r}: metadata keys must be text, not {key!r}")
            object.__setattr__(self, "metadata", freeze(dict(self.metadata)))

    @property
    def ground_truth(self) -> E | None:
        """The same value as `expected`, under the name reinforcement learning uses."""
        return self.expected


def _refuse(sample: object, name: str, _value: Any = None) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r} of a sample")


# What dataclass generates for a frozen class with slots breaks `Sample[int, str](...)` in Python 3.12.
Sample.__setattr__ = _refuse  # type: ignore[method-assign]  # the class is complete only now
Sample.__delattr__ = _refuse  # type: ignore[method-assign]
