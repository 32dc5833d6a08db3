"""One case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.base.frozen import EMPTY, FrozenDict, allow_type_arguments, freeze
from fairtrial.base.types import JSON
from fairtrial.errors import DatasetError


class _NotGiven:
    """The default of arguments for which None is a value."""

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()
"""No expected value, where None would be one."""


@dataclass(frozen=True, slots=True, init=False)
class Sample[I, E]:
    """One test case: input, expected value (if known) and metadata to slice by.

    A sample without an expected value reads as None, and `has_expected` is False: evaluators that compare with a
    reference refuse to score it. With `expected=None`, None is the right answer. `ground_truth` is another name for
    `expected`, for reading and for writing.
    """

    id: str
    input: I
    expected: E | None = None
    metadata: Mapping[str, JSON] = EMPTY
    has_expected: bool = field(default=False, repr=False)

    def __init__(
        self,
        id: str,
        input: I,
        expected: E | None = NOT_GIVEN,
        metadata: Mapping[str, JSON] = EMPTY,
        *,
        ground_truth: E | None = NOT_GIVEN,
        has_expected: bool | None = None,
    ) -> None:
        if type(id) is not str or not id:
            raise DatasetError(f"the id of a sample must be text that is not empty (got {id!r})")
        if ground_truth is not NOT_GIVEN:
            if expected is not NOT_GIVEN and expected is not None:
                raise DatasetError(f"sample {id!r}: expected and ground_truth are the same value; give one of them")
            expected = ground_truth
        # `dataclasses.replace` passes what the sample has: None with has_expected=False is still no value.
        known = expected is not NOT_GIVEN and (expected is not None or has_expected is not False)
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
        set_field(self, "expected", expected if known else None)
        set_field(self, "metadata", metadata)
        set_field(self, "has_expected", known)

    @property
    def ground_truth(self) -> E | None:
        """The same value as `expected`, under the name reinforcement learning uses."""
        return self.expected


allow_type_arguments(Sample)
