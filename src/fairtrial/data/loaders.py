"""Files that hold samples: JSONL, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from fairtrial.codec import parse_json, to_json
from fairtrial.data.index import build_index, cached_index, open_data, placed, read_rows, read_samples
from fairtrial.data.lazy import FileRows
from fairtrial.data.rows import Row, RowMapper, describe_type, flat_row, row_reader
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError, DataError, DatasetError, MissingExtraError

if TYPE_CHECKING:
    from fairtrial.data.dataset import Dataset

_JSONL = (".jsonl", ".ndjson")


class RawRows(Sequence[Row]):
    """The rows of a JSONL file as plain dicts, read as they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        open_data(path).close()

    def __iter__(self) -> Iterator[Row]:
        for _, _, row in read_rows(self._path):
            yield row

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return list(self)[index]


@overload
def load_jsonl(path: Path | str) -> Sequence[Row]: ...
@overload
def load_jsonl[I](path: Path | str, input_type: type[I]) -> Dataset[I, Any]: ...
@overload
def load_jsonl[I, E](path: Path | str, input_type: type[I], expected_type: type[E]) -> Dataset[I, E]: ...
def load_jsonl(path: Path | str, input_type: Any = None, expected_type: Any = object) -> Any:
    """Raw rows when no type is given (build the samples yourself), a typed dataset when one is."""
    if input_type is None:
        return RawRows(Path(path))
    from fairtrial.data.dataset import Dataset

    return Dataset.load(path, input_type, expected_type)


def load_samples(
    path: Path, input_type: Any, expected_type: Any, row: RowMapper | None, *, lazy: bool
) -> tuple[Sequence[Sample[Any, Any]], str | None]:
    """The samples of a file, and their fingerprint where reading them gave it."""
    read = row_reader(input_type, expected_type, row)
    suffix = path.suffix.lower()
    if suffix in _JSONL:
        if lazy:
            # A row function has no identity that could be part of a cache key.
            key = None if row is not None else [describe_type(input_type), describe_type(expected_type)]
            index = cached_index(path, read, key=key)
            return FileRows(path, read, index), index.fingerprint
        return tuple(sample for _, _, sample in read_samples(path, read)), None
    if lazy:
        raise ConfigurationError(f"{path}: lazy=True reads .jsonl files only; convert it, or load it whole")
    if suffix == ".json":
        rows: Iterator[tuple[int | None, Row]] = _json_rows(path)
    elif suffix in (".csv", ".tsv"):
        rows = _csv_rows(path, "\t" if suffix == ".tsv" else ",", input_type, expected_type, raw=row is not None)
    elif suffix == ".parquet":
        rows = _parquet_rows(path, input_type, expected_type, raw=row is not None)
    else:
        known = ", ".join((*_JSONL, ".json", ".csv", ".tsv", ".parquet"))
        raise ConfigurationError(f"{path}: the format is read from the suffix, which must be one of {known}")
    return tuple(_samples(path, rows, read)), None


def _samples(path: Path, rows: Iterator[tuple[int | None, Row]], read: RowMapper) -> Iterator[Sample[Any, Any]]:
    for line, row in rows:
        try:
            sample = read(row)
        except DataError as error:
            raise placed(error, path, line) from error.__cause__
        yield sample


def _json_rows(path: Path) -> Iterator[tuple[None, Row]]:
    with open_data(path) as file:
        try:
            rows = parse_json(file.read().removeprefix(b"\xef\xbb\xbf"))
        except CodecError as error:
            raise placed(error, path, None) from None
    if isinstance(rows, dict) and isinstance(rows.get("samples"), list):
        rows = rows["samples"]
    if not isinstance(rows, list):
        raise DatasetError("a .json dataset is an array of rows", path=path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DatasetError(f"row {number} must be a JSON object", path=path)
        yield None, to_json(row)


def _csv_rows(
    path: Path, delimiter: str, input_type: Any, expected_type: Any, *, raw: bool
) -> Iterator[tuple[int, Row]]:
    open_data(path).close()
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, restkey="")
        try:
            for cells in reader:
                if "" in cells or None in cells.values():
                    raise DatasetError(
                        f"expected {len(reader.fieldnames or ())} cells", path=path, line=reader.line_num
                    )
                yield reader.line_num, dict(cells) if raw else flat_row(cells, input_type, expected_type)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DatasetError(f"not CSV: {error}", path=path, line=reader.line_num + 1) from None


def _parquet_rows(path: Path, input_type: Any, expected_type: Any, *, raw: bool) -> Iterator[tuple[None, Row]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("reading Parquet", "parquet") from None
    open_data(path).close()
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DatasetError(f"not Parquet: {error}", path=path) from None
    with file:
        for batch in file.iter_batches():
            for cells in batch.to_pylist():
                yield None, cells if raw else flat_row(cells, input_type, expected_type)


__all__ = ["build_index", "load_jsonl", "load_samples"]
