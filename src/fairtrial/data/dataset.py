"""An immutable, fingerprinted collection of samples."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from fairtrial.data.fingerprint import Fingerprint, Order
from fairtrial.data.index import FileRows, SelectedRows, line_index
from fairtrial.data.loaders import DatasetFormat, load_samples, open_samples
from fairtrial.data.rows import Columns, Row, check_columns, content_id
from fairtrial.data.sample import Sample
from fairtrial.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from fairtrial.data.splits import SplitOrigin, Splits


class Dataset[I, E](Sequence[Sample[I, E]]):
    """An immutable collection of samples, in memory or in a file, identified by a hash of its content."""

    __slots__ = (
        "_expected_type", "_fingerprint", "_input_type", "_name", "_order", "_samples", "_split_origin", "_version",
    )  # fmt: skip

    def __init__(self, samples: Iterable[Sample[I, E]], name: str = "dataset", version: str = "1.0") -> None:
        self._samples: Sequence[Sample[I, E]] = _distinct(tuple(samples))
        self._name = name
        self._version = version
        self._fingerprint: str | None = None
        self._order: str | None = None
        self._input_type: Any = object
        self._expected_type: Any = object
        self._split_origin: SplitOrigin | None = None

    def _with(self, samples: Sequence[Sample[Any, Any]], fingerprint: str | None = None) -> Dataset[Any, Any]:
        """The same dataset with other samples, which are known to be distinct."""
        made: Dataset[Any, Any] = Dataset((), self._name, self._version)
        made._samples, made._fingerprint = samples, fingerprint
        made._input_type, made._expected_type = self._input_type, self._expected_type
        made._split_origin = self._split_origin
        return made

    def _marked(self) -> Dataset[Any, Any]:
        """Return the dataset as the split that the metadata of all its samples names, if they are failures."""
        from fairtrial.data.splits import FAILURES, SplitOrigin

        if not self or any(sample.metadata.get("split") != FAILURES for sample in self):  # Most often, the first one.
            return self
        return self.as_split(SplitOrigin(FAILURES, self.fingerprint, len(self), "", 0))

    @staticmethod
    def of[A, B](pairs: Mapping[A, B] | Iterable[tuple[A, B]], *, name: str = "dataset") -> Dataset[A, B]:
        """Create a dataset from (input, expected) pairs; the id of each sample is a hash of its pair."""
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        samples: list[Sample[A, B]] = []
        positions: dict[str, int] = {}
        for position, pair in enumerate(items):
            given, wanted = _as_pair(pair, position)
            sample_id = content_id(given, wanted)
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
        path: Path | str,
        *,
        columns: Columns | None = ...,
        format: DatasetFormat | None = ...,
        lazy: bool = ...,
        name: str | None = ...,
        version: str = ...,
    ) -> Dataset[Any, Any]: ...
    @overload
    @staticmethod
    def load[A](
        path: Path | str,
        input_type: type[A],
        *,
        columns: Columns | None = ...,
        format: DatasetFormat | None = ...,
        lazy: bool = ...,
        name: str | None = ...,
        version: str = ...,
    ) -> Dataset[A, Any]: ...
    @overload
    @staticmethod
    def load[A, B](
        path: Path | str,
        input_type: type[A],
        expected_type: type[B],
        *,
        columns: Columns | None = ...,
        format: DatasetFormat | None = ...,
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
        columns: Columns | None = None,
        row: Callable[[dict[str, Any]], Sample[Any, Any]] | None = None,
        format: DatasetFormat | None = None,
        lazy: bool = False,
        name: str | None = None,
        version: str = "1.0",
    ) -> Dataset[Any, Any]:
        """Read a .jsonl, .json, .csv, .tsv or .parquet file.

        Rows without an `id` get one from their content: a hash of input and reference.

        Args:
            path: The file.
            input_type: What each row's `input` must be; any type the codec knows.
            expected_type: What each row's `expected` must be, where there is one.
            columns: Which column holds which field, as in `{"input": "question", "expected": "answer"}`. Several
                columns (`{"input": ["question", "context"]}`) make a dict. Columns not named become metadata.
            row: Makes a sample of a foreign row; the two types are then its own business.
            format: The tool that exported the file: langsmith, braintrust, langfuse, pydantic-evals, deepeval, ragas,
                openai or promptfoo. Its fields are known, and rows that do not have them are refused.
            lazy: Leave the samples of a .jsonl file on disk; they are read as they are needed.
            name: The name of the dataset; by default that of the file.
            version: The dataset's version, yours to count.

        Raises:
            DatasetError: with file, line and field.
        """
        if columns is not None:
            check_columns(columns, row)
        if format is not None and (columns is not None or row is not None):
            raise ConfigurationError("format= knows the fields of a row: leave out columns= and row=")
        path = Path(path)
        made: Dataset[Any, Any] = Dataset((), path.stem if name is None else name, version)
        made._input_type, made._expected_type = input_type, expected_type
        if lazy:
            samples, identity = open_samples(path, input_type, expected_type, row, columns, format)
            made = made._with(samples, identity.fingerprint)
            made._order = identity.order
        else:
            made = made._with(load_samples(path, input_type, expected_type, row, columns, format))
        return made._marked()

    @property
    def name(self) -> str:
        """The name of the dataset."""
        return self._name

    @property
    def version(self) -> str:
        """The version of the dataset, as given by its owner."""
        return self._version

    @property
    def input_type(self) -> Any:
        """The type of the inputs; object if none was given."""
        return self._input_type

    @property
    def expected_type(self) -> Any:
        """The type of the expected values; object if none was given."""
        return self._expected_type

    @property
    def samples(self) -> Sequence[Sample[I, E]]:
        """The samples: a tuple, or a view of the file for a lazy dataset."""
        return self._samples

    @property
    def fingerprint(self) -> str:
        """A hash of the content, independent of the order of samples."""
        if self._fingerprint is None:
            fingerprint = Fingerprint()
            for sample in self._samples:
                fingerprint.add(sample)
            self._fingerprint = fingerprint.hexdigest()
        return self._fingerprint

    @property
    def order(self) -> str:
        """A hash of the ids in order: a run can be resumed only with the same samples in the same order."""
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
        """Return a dataset of the first `count` samples."""
        return self[: max(count, 0)]

    def filter(self, keep: Callable[[Sample[I, E]], bool]) -> Dataset[I, E]:
        """Return a dataset of the samples for which `keep` is true."""
        return self._at(array("Q", (position for position, sample in enumerate(self._samples) if keep(sample))))

    def shuffle(self, seed: int) -> Dataset[I, E]:
        """Return the same samples in an order that depends only on the seed; the fingerprint stays the same."""
        positions = array("Q", range(len(self)))
        random.Random(seed).shuffle(positions)  # noqa: S311 - an order, not a secret
        return self._at(positions, self._fingerprint)

    def _at(self, positions: array[int], fingerprint: str | None = None) -> Dataset[I, E]:
        if isinstance(self._samples, FileRows | SelectedRows):
            return self._with(SelectedRows(self._samples, positions), fingerprint)
        return self._with(tuple(self._samples[position] for position in positions), fingerprint)

    def split(
        self,
        *,
        train: float = 0.5,
        validation: float = 0.2,
        test: float = 0.3,
        seed: int = 0,
        by: str | None = None,
        similar: float | None = 0.8,
        file: Path | str | None = None,
    ) -> Splits[I, E]:
        """Split the dataset into parts to search on, to choose by, and to test with.

        The hash of a sample's id decides. Samples of one cluster and samples with nearly the same input stay together.
        With a file, the assignments are stored: a sample that is added later goes to the split of those it belongs to
        and moves none; one that belongs to two splits is left out and named in `Splits.left_out`.

        Args:
            train: The share of the samples to search on.
            validation: The share to choose candidates by; may be 0.
            test: The share that shows what the chosen one gained.
            seed: Another seed makes other splits.
            by: The metadata key of clusters; samples without it are on their own.
            similar: Inputs that share this much of their text stay together, from 0.5; None for equal texts only.
            file: Where assignments are stored, such as `support.splits.jsonl`. It contains ids and hashes, no inputs.

        Raises:
            DatasetError: the file is damaged, or its splits were made with other shares, seed, `by` or `similar`.
        """
        from fairtrial.data.splits import SplitRequest, split_dataset

        shares = {"train": train, "validation": validation, "test": test}
        return split_dataset(self, SplitRequest(shares, seed, by, similar), None if file is None else Path(file))

    @property
    def split_origin(self) -> SplitOrigin | None:
        """The split that this dataset is, or is a part of; None without one."""
        return self._split_origin

    def take(self, positions: Sequence[int]) -> Dataset[I, E]:
        """Return a dataset of the samples at these positions."""
        return self._at(array("Q", positions))

    def as_split(self, origin: SplitOrigin) -> Dataset[I, E]:
        """Return the same samples as a split."""
        made = self._with(self._samples, self._fingerprint)
        made._split_origin = origin
        return made

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
        split = "" if self._split_origin is None else f", split {self._split_origin.name}"
        return f"<Dataset {self._name!r} version {self._version}{split}: {len(self)} samples>"


@overload
def load_jsonl(path: Path | str) -> Sequence[Row]: ...
@overload
def load_jsonl[I](path: Path | str, input_type: type[I]) -> Dataset[I, Any]: ...
@overload
def load_jsonl[I, E](path: Path | str, input_type: type[I], expected_type: type[E]) -> Dataset[I, E]: ...
def load_jsonl(path: Path | str, input_type: Any = None, expected_type: Any = object) -> Any:
    """Read a JSONL file: raw rows if no type is given, else a typed dataset.

    Raw rows stay in the file and are read as they are asked for.
    """
    if input_type is None:
        path = Path(path)
        return FileRows(path, lambda row: row, line_index(path))
    return Dataset.load(path, input_type, expected_type)


def _distinct[I, E](samples: tuple[Sample[I, E], ...]) -> tuple[Sample[I, E], ...]:
    seen: dict[str, int] = {}
    for position, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise DatasetError(
                f"the samples of a dataset must be Sample objects (got {type(sample).__name__})\n"
                'write Sample("id", input, expected) for each; Dataset.of({"2+2": "4"}) makes them of pairs, '
                "Dataset.load(...) of a file"
            )
        first = seen.setdefault(sample.id, position)
        if first != position:
            raise DatasetError(f"duplicate id {sample.id!r} at positions {first} and {position}; each needs its own")
    return samples


def _as_pair(pair: Any, position: int) -> tuple[Any, Any]:
    try:
        given, wanted = [] if isinstance(pair, str | bytes) else list(pair)
    except (TypeError, ValueError):
        raise DatasetError(
            f"pairs must be (input, expected) (got {pair!r:.80} as pair {position})\n"
            "samples without expected values: Dataset([Sample(id, input), ...])"
        ) from None
    return given, wanted
