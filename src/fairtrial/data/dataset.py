"""An immutable, fingerprinted collection of samples."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from fairtrial.codec import digest
from fairtrial.data.fingerprint import Fingerprint, Order
from fairtrial.data.lazy import FileRows, Selection
from fairtrial.data.loaders import load_samples, open_samples
from fairtrial.data.sample import Sample
from fairtrial.errors import DatasetError


class Dataset[I, E](Sequence[Sample[I, E]]):
    """Samples that never change, in memory or in their file, with one identity for their content."""

    __slots__ = ("_expected_type", "_fingerprint", "_input_type", "_name", "_order", "_samples", "_version")

    def __init__(self, samples: Iterable[Sample[I, E]], name: str = "dataset", version: str = "1.0") -> None:
        self._samples: Sequence[Sample[I, E]] = _distinct(tuple(samples))
        self._name = name
        self._version = version
        self._fingerprint: str | None = None
        self._order: str | None = None
        self._input_type: Any = object
        self._expected_type: Any = object

    def _with(self, samples: Sequence[Sample[Any, Any]], fingerprint: str | None = None) -> Dataset[Any, Any]:
        """The same dataset with other samples, which are known to be distinct."""
        made: Dataset[Any, Any] = Dataset((), self._name, self._version)
        made._samples, made._fingerprint = samples, fingerprint
        made._input_type, made._expected_type = self._input_type, self._expected_type
        return made

    @staticmethod
    def of[A, B](pairs: Mapping[A, B] | Iterable[tuple[A, B]], *, name: str = "dataset") -> Dataset[A, B]:
        """A dataset from (input, expected) pairs; each sample's id is a hash of its pair."""
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        samples: list[Sample[A, B]] = []
        positions: dict[str, int] = {}
        for position, (given, wanted) in enumerate(items):
            sample_id = digest([given, wanted])[:16]
            if (first := positions.setdefault(sample_id, position)) != position:
                raise DatasetError(
                    f"pairs must be distinct: pair {position} repeats pair {first} ({given!r:.80}, {wanted!r:.80})\n"
                    "remove it, or make a Dataset of Samples with ids of your own"
                )
            samples.append(Sample(sample_id, given, wanted))
        return Dataset(samples, name=name)

    @overload
    @staticmethod
    def load(
        path: Path | str, *, lazy: bool = ..., name: str | None = ..., version: str = ...
    ) -> Dataset[Any, Any]: ...
    @overload
    @staticmethod
    def load[A](
        path: Path | str, input_type: type[A], *, lazy: bool = ..., name: str | None = ..., version: str = ...
    ) -> Dataset[A, Any]: ...
    @overload
    @staticmethod
    def load[A, B](
        path: Path | str,
        input_type: type[A],
        expected_type: type[B],
        *,
        lazy: bool = ...,
        name: str | None = ...,
        version: str = ...,
    ) -> Dataset[A, B]: ...
    @overload
    @staticmethod
    def load[A, B](
        path: Path | str,
        *,
        row: Callable[[dict[str, Any]], Sample[A, B]],
        lazy: bool = ...,
        name: str | None = ...,
        version: str = ...,
    ) -> Dataset[A, B]: ...
    @staticmethod
    def load(
        path: Path | str,
        input_type: Any = object,
        expected_type: Any = object,
        *,
        row: Callable[[dict[str, Any]], Sample[Any, Any]] | None = None,
        lazy: bool = False,
        name: str | None = None,
        version: str = "1.0",
    ) -> Dataset[Any, Any]:
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
        made: Dataset[Any, Any] = Dataset((), path.stem if name is None else name, version)
        made._input_type, made._expected_type = input_type, expected_type
        if lazy:
            samples, identity = open_samples(path, input_type, expected_type, row)
            made = made._with(samples, identity.fingerprint)
            made._order = identity.order
            return made
        return made._with(load_samples(path, input_type, expected_type, row))

    @property
    def name(self) -> str:
        """What people call it."""
        return self._name

    @property
    def version(self) -> str:
        """Which edition of it this is, as its owner counts."""
        return self._version

    @property
    def input_type(self) -> Any:
        """The type the inputs were read as; object where none was asked for."""
        return self._input_type

    @property
    def expected_type(self) -> Any:
        """The type the references were read as; object where none was asked for."""
        return self._expected_type

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

    @property
    def order(self) -> str:
        """A hash of the ids in their order: a run that goes on needs the same samples in the same places."""
        if self._order is None:
            order = Order()
            for sample in self._samples:
                order.add(sample.id)
            self._order = order.hexdigest()
        return self._order

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample[I, E]]:
        return iter(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample[I, E]: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset[I, E]: ...
    def __getitem__(self, index: int | slice) -> Sample[I, E] | Dataset[I, E]:
        return self._with(self._samples[index]) if isinstance(index, slice) else self._samples[index]

    def head(self, count: int) -> Dataset[I, E]:
        """The first `count` samples."""
        return self[: max(count, 0)]

    def filter(self, keep: Callable[[Sample[I, E]], bool]) -> Dataset[I, E]:
        """The samples for which `keep` is true."""
        if not isinstance(self._samples, FileRows | Selection):
            return self._with(tuple(sample for sample in self._samples if keep(sample)))
        positions = array("Q", (position for position, sample in enumerate(self._samples) if keep(sample)))
        return self._with(Selection(self._samples, positions))

    def shuffle(self, seed: int) -> Dataset[I, E]:
        """The same samples in an order that depends on the seed alone; the fingerprint stays."""
        positions = array("Q", range(len(self)))
        random.Random(seed).shuffle(positions)  # noqa: S311 - an order, not a secret
        if isinstance(self._samples, FileRows | Selection):
            return self._with(Selection(self._samples, positions), self._fingerprint)
        return self._with(tuple(self._samples[position] for position in positions), self._fingerprint)

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


def _distinct[I, E](samples: tuple[Sample[I, E], ...]) -> tuple[Sample[I, E], ...]:
    seen: dict[str, int] = {}
    for position, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise DatasetError(f"a dataset holds Sample objects, not {type(sample).__name__}")
        first = seen.setdefault(sample.id, position)
        if first != position:
            raise DatasetError(f"duplicate id {sample.id!r} at positions {first} and {position}; each needs its own")
    return samples
