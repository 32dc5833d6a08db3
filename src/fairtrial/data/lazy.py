"""Samples that stay in their file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

from fairtrial.data.index import Index, open_data, parse_line, placed
from fairtrial.data.rows import RowMapper
from fairtrial.data.sample import Sample
from fairtrial.errors import DataError, DatasetError


class FileRows(Sequence[Sample[Any, Any]]):
    """A JSONL file as a sequence of samples; only the row being read is held."""

    def __init__(self, path: Path, read: RowMapper, index: Index) -> None:
        self._path = path
        self._read = read
        self._index = index
        self._state = self._current_state()

    def _current_state(self) -> tuple[int, int]:
        state = self._path.stat()
        return state.st_size, state.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._current_state() != self._state:
            raise DatasetError("the file has changed since it was indexed; load the dataset again", path=self._path)

    def __len__(self) -> int:
        return len(self._index.offsets)

    def __iter__(self) -> Iterator[Sample[Any, Any]]:
        self._check_unchanged()
        read = self._read
        with open_data(self._path) as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    sample = read(parse_line(line))
                except DataError as error:
                    raise placed(error, self._path, number) from error.__cause__
                yield sample

    @overload
    def __getitem__(self, index: int) -> Sample[Any, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample[Any, Any]]: ...
    def __getitem__(self, index: int | slice) -> Sample[Any, Any] | Sequence[Sample[Any, Any]]:
        if isinstance(index, slice):
            return Selection(self, range(len(self))[index])
        self._check_unchanged()
        with open_data(self._path) as file:
            file.seek(self._index.offsets[index])
            line = file.readline()
        try:
            return self._read(parse_line(line))
        except DataError as error:
            raise placed(error, self._path, None) from error.__cause__


class Selection(Sequence[Sample[Any, Any]]):
    """Some rows of another sequence, by position, in any order."""

    def __init__(self, source: Sequence[Sample[Any, Any]], positions: Sequence[int]) -> None:
        self._source = source
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[Sample[Any, Any]]:
        if isinstance(self._positions, range) and self._positions.step == 1:
            yield from islice(self._source, self._positions.start, self._positions.stop)
            return
        for position in self._positions:
            yield self._source[position]

    @overload
    def __getitem__(self, index: int) -> Sample[Any, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample[Any, Any]]: ...
    def __getitem__(self, index: int | slice) -> Sample[Any, Any] | Sequence[Sample[Any, Any]]:
        if isinstance(index, slice):
            return Selection(self._source, self._positions[index])
        return self._source[self._positions[index]]
