"""One case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fairtrial.errors import DatasetError
from fairtrial.frozen import EMPTY, FrozenDict, allow_type_arguments, freeze
from fairtrial.types import JSON


@dataclass(frozen=True, slots=True, init=False)
class Sample[I, E]:
    """One test case: input, expected value (if known) and metadata to slice by.

    `ground_truth` is another name for `expected`, for reading and for writing.
    """

    id: str
    input: I
    expected: E | None = None
    metadata: Mapping[str, JSON] = EMPTY

    def __init__(
        self,
        id: str,
        input: I,
        expected: E | None = None,
        metadata: Mapping[str, JSON] = EMPTY,
        *,
        ground_truth: E | None = None,
    ) -> None:
        if type(id) is not str or not id:
            raise DatasetError(f"the id of a sample must be text that is not empty (got {id!r})")
        if ground_truth is not None:
            if expected is not None:
                raise DatasetError(f"sample {id!r}: expected and ground_truth are the same value; give one of them")
            expected = ground_truth
        if type(metadata) is not FrozenDict:
            if not isinstance(metadata, Mapping):
                raise DatasetError(f"sample {id!r}: metadata must be a mapping (got {type(metadata).__name__})")
            for key in metadata:
                if not isinstance(key, str):
                    raise DatasetError(f"sample {id!r}: metadata keys must be text (got {key!r})")
            metadata = freeze(dict(metadata))
        set_field = object.__setattr__
        set_field(self, "id", id)
        set_field(self, "input", input)
        set_field(self, "expected", expected)
        set_field(self, "metadata", metadata)

    @property
    def ground_truth(self) -> E | None:
        """The same value as `expected`, under the name reinforcement learning uses."""
        return self.expected


allow_type_arguments(Sample)
