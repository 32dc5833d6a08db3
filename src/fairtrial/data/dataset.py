"""An immutable, fingerprinted collection of samples."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, overload

from fairtrial.codec import digest
from fairtrial.data.fingerprint import Fingerprint
from fairtrial.data.lazy import Selection
from fairtrial.data.loaders import load_samples
from fairtrial.data.sample import Sample
from fairtrial.errors import DatasetError


class Dataset[I, E](Sequence[Sample[I, E]]):
    """Samples that never change, in memory or in their file, with one identity for their content."""

    __slots__ = ("_fingerprint", "_name", "_samples", "_version", "expected_type", "input_type")

    def __init__(self, samples: Iterable[Sample[I, E]], name: str = "dataset", version: str = "1.0") -> None:
        kept = tuple(samples)
        _refuse_duplicates(kept)
        self._set(kept, name, version, None)

    def _set(
        self,
        samples: Sequence[Sample[I, E]],
        name: str,
        version: str,
        fingerprint: str | None,
        input_type: Any = object,
        expected_type: Any = object,
    ) -> None:
        self._samples = samples
        self._name = name
        self._version = version
        self._fingerprint = fingerprint
        self.input_type = input_type
        self.expected_type = expected_type

    @classmethod
    def _of_parts(cls, *parts: Any) -> Dataset[I, E]:
        made: Dataset[I, E] = cls.__new__(cls)
        made._set(*parts)
        return made

    def _derived(self, samples: Sequence[Sample[I, E]]) -> Dataset[I, E]:
        return Dataset._of_parts(samples, self._name, self._version, None, self.input_type, self.expected_type)

    @staticmethod
    def of[A, B](pairs: Mapping[A, B] | Iterable[tuple[A, B]], *, name: str = "dataset") -> Dataset[A, B]:
        """A dataset from (input, expected) pairs; each sample's id is a hash of its pair."""
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        return Dataset([Sample(digest([given, wanted])[:12], given, wanted) for given, wanted in items], name=name)

    @staticmethod
    def load[A, B](
        path: Path | str,
        input_type: type[A] = cast(Any, object),  # noqa: B008 - a type, not a call
        expected_type: type[B] = cast(Any, object),  # noqa: B008
        *,
        row: Callable[[dict[str, Any]], Sample[A, B]] | None = None,
        lazy: bool = False,
        name: str | None = None,
        version: str = "1.0",
    ) -> Dataset[A, B]:
        """Read a .jsonl, .json, .csv, .tsv or .parquet file.

        Args:
            path: The file.
            input_type: What each row's `input` must be; any type the codec knows.
            expected_type: What each row's `expected` must be, where there is one.
            row: Makes a sample of a foreign row; the two types are then its own business.
            lazy: Leave the samples of a .jsonl file on disk; they are read as they are needed.
            name: The dataset's name; the file's name unless given.
            version: The dataset's version, yours to count.

        Raises:
            DatasetError: with file, line and field.
        """
        path = Path(path)
        samples, fingerprint = load_samples(path, input_type, expected_type, row, lazy=lazy)
        if not lazy:
            _refuse_duplicates(samples, path)
        parts = (samples, path.stem if name is None else name, version, fingerprint, input_type, expected_type)
        return cast("Dataset[A, B]", Dataset._of_parts(*parts))

    @property
    def name(self) -> str:
        """What people call it."""
        return self._name

    @property
    def version(self) -> str:
        """Which edition of it this is, as its owner counts."""
        return self._version

    @property
    def samples(self) -> Sequence[Sample[I, E]]:
        """The samples: a tuple, or a view of the file for a lazy dataset."""
        return self._samples

    @property
    def fingerprint(self) -> str:
        """A hash of the content: the same samples in any order have the same one, any change gives another."""
        if self._fingerprint is None:
            fingerprint = Fingerprint()
            for sample in self._samples:
                fingerprint.add(sample)
            self._fingerprint = fingerprint.hexdigest()
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample[I, E]]:
        return iter(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample[I, E]: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset[I, E]: ...
    def __getitem__(self, index: int | slice) -> Sample[I, E] | Dataset[I, E]:
        return self._derived(self._samples[index]) if isinstance(index, slice) else self._samples[index]

    def head(self, count: int) -> Dataset[I, E]:
        """The first `count` samples."""
        return self[: max(count, 0)]

    def filter(self, keep: Callable[[Sample[I, E]], bool]) -> Dataset[I, E]:
        """The samples for which `keep` is true."""
        if isinstance(self._samples, tuple):
            return self._derived(tuple(sample for sample in self._samples if keep(sample)))
        positions = array("Q", (position for position, sample in enumerate(self._samples) if keep(sample)))
        return self._derived(Selection(self._samples, positions))

    def shuffle(self, seed: int) -> Dataset[I, E]:
        """The same samples in an order that depends on the seed alone; the fingerprint stays."""
        positions = array("Q", range(len(self)))
        random.Random(seed).shuffle(positions)  # noqa: S311 - an order, not a secret
        shuffled = Selection(self._samples, positions)
        samples = tuple(shuffled) if isinstance(self._samples, tuple) else shuffled
        parts = (samples, self._name, self._version, self._fingerprint, self.input_type, self.expected_type)
        return Dataset._of_parts(*parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dataset):
            return NotImplemented
        return (
            (self._name, self._version, len(self)) == (other._name, other._version, len(other))
            and self.fingerprint == other.fingerprint
            and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self._name, self._version, self.fingerprint))

    def __repr__(self) -> str:
        return f"<Dataset {self._name!r} version {self._version}: {len(self)} samples>"


def _refuse_duplicates(samples: Sequence[Sample[Any, Any]], path: Path | None = None) -> None:
    seen: set[str] = set()
    for sample in samples:
        if not isinstance(sample, Sample):
            raise DatasetError(f"a dataset holds Sample objects, not {type(sample).__name__}")
        if sample.id in seen:
            raise DatasetError(f"duplicate id {sample.id!r}; every sample needs its own", path=path)
        seen.add(sample.id)
