"""Rows that are read from their file on access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from fairtrial.data.index import Index, is_blank, open_data, parse_line, placed, state_of
from fairtrial.data.rows import Row
from fairtrial.errors import DataError, DatasetError


class FileRows[T](Sequence[T]):
    """A JSONL file as a sequence; only the row being read is held."""

    def __init__(self, path: Path, read: Callable[[Row], T], index: Index) -> None:
        self._path = path
        self._read = read
        self._index = index

    def _check_unchanged(self) -> None:
        if state_of(self._path) != self._index.state:
            raise DatasetError("the file has changed since it was indexed; load the dataset again", path=self._path)

    def __len__(self) -> int:
        return len(self._index.offsets)

    def __iter__(self) -> Iterator[T]:
        self._check_unchanged()
        read = self._read
        with open_data(self._path) as file:
            for number, line in enumerate(file, 1):
                try:
                    item = read(parse_line(line, unique_keys=False))
                except DataError as error:
                    if is_blank(line):
                        continue
                    raise placed(error, self._path, number) from error.__cause__
                yield item

    def pick(self, positions: Iterable[int]) -> Iterator[T]:
        """The rows at these positions, in this order, from one opening of the file."""
        self._check_unchanged()
        with open_data(self._path) as file:
            for position in positions:
                offset = self._index.offsets[position]
                file.seek(offset)
                try:
                    item = self._read(parse_line(file.readline(), unique_keys=False))
                except DataError as error:
                    raise placed(error, self._path, self._line_at(offset)) from error.__cause__
                yield item

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return SelectedRows(self, range(len(self))[index])
        return next(self.pick((index,)))

    def _line_at(self, offset: int) -> int:
        number, passed = 0, 0
        with open_data(self._path) as file:
            while passed <= offset:
                passed += len(file.readline())
                number += 1
        return number


class SelectedRows[T](Sequence[T]):
    """Some rows of a file, by position, in any order."""

    def __init__(self, source: FileRows[T] | SelectedRows[T], positions: Sequence[int]) -> None:
        self._source = source
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[T]:
        return self._source.pick(self._positions)

    def pick(self, positions: Iterable[int]) -> Iterator[T]:
        """The rows at these positions of the selection."""
        return self._source.pick(self._positions[position] for position in positions)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return SelectedRows(self._source, self._positions[index])
        return self._source[self._positions[index]]
