"""Files that hold samples: JSONL, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from fairtrial.codec.escape import parse_json_array
from fairtrial.data.fingerprint import Identity
from fairtrial.data.index import build_index, cached_index, line_index, open_data, parse_line, placed, read_lines
from fairtrial.data.lazy import FileRows
from fairtrial.data.rows import Row, RowMapper, row_reader, table_reader
from fairtrial.data.sample import Sample
from fairtrial.data.signature import signature_of
from fairtrial.errors import CodecError, ConfigurationError, DataError, DatasetError, MissingExtraError

if TYPE_CHECKING:
    from fairtrial.data.dataset import Dataset

_JSONL = (".jsonl", ".ndjson")


@overload
def load_jsonl(path: Path | str) -> Sequence[Row]: ...
@overload
def load_jsonl[I](path: Path | str, input_type: type[I]) -> Dataset[I, Any]: ...
@overload
def load_jsonl[I, E](path: Path | str, input_type: type[I], expected_type: type[E]) -> Dataset[I, E]: ...
def load_jsonl(path: Path | str, input_type: Any = None, expected_type: Any = object) -> Any:
    """Raw rows when no type is given (build the samples yourself), a typed dataset when one is.

    Raw rows stay in the file and are read as they are asked for.
    """
    if input_type is None:
        path = Path(path)
        return FileRows(path, lambda row: row, line_index(path))
    from fairtrial.data.dataset import Dataset

    return Dataset.load(path, input_type, expected_type)


def load_samples(
    path: Path, input_type: Any, expected_type: Any, row: RowMapper | None
) -> tuple[Sample[Any, Any], ...]:
    """All samples of a file, their ids checked."""
    suffix = path.suffix.lower()
    if suffix in _JSONL:
        return _checked(path, _jsonl_rows(path), row_reader(input_type, expected_type, row))
    if suffix == ".json":
        return _checked(path, _json_rows(path), row_reader(input_type, expected_type, row))
    read = table_reader(input_type, expected_type, row)
    if suffix in (".csv", ".tsv"):
        return _checked(path, _csv_rows(path, "\t" if suffix == ".tsv" else ","), read)
    if suffix == ".parquet":
        return _checked(path, _parquet_rows(path), read, unit="row")
    known = ", ".join((*_JSONL, ".json", ".csv", ".tsv", ".parquet"))
    raise ConfigurationError(f"{path}: the format is read from the suffix, which must be one of {known}")


def open_samples(
    path: Path, input_type: Any, expected_type: Any, row: RowMapper | None
) -> tuple[FileRows[Sample[Any, Any]], Identity]:
    """The samples of a file, left where they are, and their identity."""
    if path.suffix.lower() not in _JSONL:
        raise ConfigurationError(f"{path}: lazy=True reads .jsonl files only; convert it, or load it whole")
    read = row_reader(input_type, expected_type, row)
    if row is None:
        index = cached_index(path, read, key=[signature_of(input_type), signature_of(expected_type)])
    else:  # A row function has no identity that could be part of a cache key.
        index = build_index(path, read)
    return FileRows(path, read, index), index.identity


def _checked(
    path: Path, rows: Iterable[tuple[int, Row]], read: RowMapper, *, unit: Literal["line", "row"] = "line"
) -> tuple[Sample[Any, Any], ...]:
    samples: list[Sample[Any, Any]] = []
    first_seen: dict[str, int] = {}
    for number, row in rows:
        try:
            sample = read(row)
            if sample.id in first_seen:
                raise DatasetError(f"duplicate id {sample.id!r}; it was used before on {unit} {first_seen[sample.id]}")
        except DataError as error:
            if unit == "line":
                raise placed(error, path, number) from error.__cause__
            problem = error.problem if isinstance(error, DatasetError) else str(error)
            raise DatasetError(f"row {number}: {problem}", path=path) from error.__cause__
        first_seen[sample.id] = number
        samples.append(sample)
    return tuple(samples)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, _, line in read_lines(path):
        try:
            row = parse_line(line)
        except CodecError as error:
            raise placed(error, path, number) from None
        yield number, row


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with open_data(path) as file:
        content = file.read().removeprefix(b"\xef\xbb\xbf")
    try:
        for line, row in parse_json_array(content):
            if not isinstance(row, dict):
                raise DatasetError("a row must be a JSON object", path=path, line=line)
            yield line, row
    except CodecError as error:
        raise placed(error, path, None) from None


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, Row]]:
    open_data(path).close()
    with path.open(encoding="utf-8-sig", newline="") as file, _any_cell_size():
        # Strict: a quote that is never closed must not swallow the rest of the file.
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = _column_names(next(reader, []), path)
            for cells in reader:
                if len(cells) == len(names):
                    yield reader.line_num, dict(zip(names, cells, strict=True))
                elif cells:  # A blank line has none.
                    raise DatasetError(
                        f"expected {len(names)} cells, found {len(cells)}", path=path, line=reader.line_num
                    )
        except csv.Error as error:
            raise DatasetError(f"not CSV: {error}", path=path, line=reader.line_num) from None
        except UnicodeDecodeError as error:
            # Text is decoded far ahead of the row being read, so the line is looked for in the bytes.
            with open_data(path) as raw:
                bad = next((number for number, line in enumerate(raw, 1) if not _is_utf8(line)), None)
            raise DatasetError(f"not UTF-8: {error.reason}", path=path, line=bad) from None


def _column_names(names: list[str], path: Path) -> list[str]:
    seen: set[str] = set()
    for position, name in enumerate(names, 1):
        if not name:
            raise DatasetError(f"column {position} has no name; name it or remove it", path=path, line=1)
        if name in seen:
            raise DatasetError(f"two columns are both named {name!r}", path=path, line=1)
        seen.add(name)
    return names


@contextmanager
def _any_cell_size() -> Iterator[None]:
    # A prompt is easily longer than the 128 kB that the csv module allows a cell.
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("reading Parquet", "parquet") from None
    open_data(path).close()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            cells = (cells for batch in file.iter_batches() for cells in batch.to_pylist())
            yield from enumerate(cells, 1)
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"not Parquet: {error}", path=path) from None
