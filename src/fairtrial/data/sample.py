"""One case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
