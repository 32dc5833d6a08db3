"""Files that hold samples: JSONL, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fairtrial.base.codec.escape import parse_json_array
from fairtrial.base.foreign import ExpansionBudget, limit_factor, lines_of, read_whole
from fairtrial.data.fingerprint import Identity
from fairtrial.data.formats import converter_of, document_rows
from fairtrial.data.index import build_index, cached_index, open_data, parse_line, placed, read_lines
from fairtrial.data.lazy import FileRows
from fairtrial.data.rows import Columns, Row, RowMapper, duplicate_id, row_reader, separator_hint, table_reader
from fairtrial.data.sample import Sample
from fairtrial.data.signature import signature_of
from fairtrial.errors import CodecError, ConfigurationError, DataError, DatasetError, MissingExtraError

_JSONL = (".jsonl", ".ndjson")
_PARQUET_BYTES, _PARQUET_ROWS = 1 << 30, 64


def load_samples(
    path: Path,
    input_type: Any,
    expected_type: Any,
    row: RowMapper | None,
    columns: Columns | None,
    format: str | None = None,
) -> tuple[Sample[Any, Any], ...]:
    """Load all samples of a file and check their ids."""
    suffix = path.suffix.lower()
    if format is not None:
        read = _converted(format, row_reader(input_type, expected_type, None, None))
        rows = document_rows(path, format)
        if rows is None:
            rows = _foreign_rows(path, suffix)
        return _checked(path, rows, read)
    if suffix in _JSONL:
        return _checked(path, _jsonl_rows(path), row_reader(input_type, expected_type, row, columns))
    if suffix == ".json":
        return _checked(path, _json_rows(path), row_reader(input_type, expected_type, row, columns))
    read = table_reader(input_type, expected_type, row, columns)
    if suffix in (".csv", ".tsv"):
        return _checked(path, _csv_rows(path, "\t" if suffix == ".tsv" else ","), read)
    if suffix == ".parquet":
        return _checked(path, _parquet_rows(path), read, unit="row")
    known = ", ".join((*_JSONL, ".json", ".csv", ".tsv", ".parquet"))
    raise ConfigurationError(f"{path}: the format is read from the suffix, which must be one of {known}")


def _converted(format: str, read: RowMapper) -> RowMapper:
    convert = converter_of(format)
    return lambda row: read(convert(row))


def _foreign_rows(path: Path, suffix: str) -> Iterator[tuple[int, Row]]:
    """Return the rows of a file; cells of a table that are empty are left out."""
    if suffix in _JSONL:
        return _jsonl_rows(path)
    if suffix == ".json":
        return _json_rows(path)
    if suffix in (".csv", ".tsv"):
        cells = _csv_rows(path, "\t" if suffix == ".tsv" else ",")
        return ((number, {name: cell for name, cell in row.items() if cell != ""}) for number, row in cells)
    raise ConfigurationError(f"{path}: a file of another tool must be .jsonl, .json, .csv or .tsv, or .yaml for some")


def open_samples(
    path: Path,
    input_type: Any,
    expected_type: Any,
    row: RowMapper | None,
    columns: Columns | None,
    format: str | None = None,
) -> tuple[FileRows[Sample[Any, Any]], Identity]:
    """Open the samples of a file without loading them; returns them with their identity."""
    if path.suffix.lower() not in _JSONL:
        raise ConfigurationError(f"{path}: lazy=True reads .jsonl files only; convert it, or load it whole")
    read = row_reader(input_type, expected_type, row, columns)
    if format is not None:
        read = _converted(format, read)
        index = build_index(path, read)
    elif row is None:
        mapping = [] if columns is None else [columns]
        index = cached_index(path, read, key=[signature_of(input_type), signature_of(expected_type), *mapping])
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
                raise duplicate_id(sample, f"{unit} {first_seen[sample.id]}")
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
        content = read_whole(file, str(path)).removeprefix(b"\xef\xbb\xbf")
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
        reader = csv.reader(lines_of(file, str(path)), delimiter=delimiter, strict=True)
        first_line = 1  # Of the row that is being read; a quoted cell may have several lines.
        try:
            names = _column_names(next(reader, []), path)
            first_line = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(names):
                    yield reader.line_num, dict(zip(names, cells, strict=True))
                elif cells:  # A blank line has none.
                    raise DatasetError(
                        f"expected {len(names)} cells, found {len(cells)}{separator_hint(names)}",
                        path=path,
                        line=reader.line_num,
                    )
                first_line = reader.line_num + 1
        except csv.Error as error:
            raise DatasetError(_quote_problem(error, first_line, reader.line_num), path=path, line=first_line) from None
        except UnicodeDecodeError as error:
            # Text is decoded far ahead of the row being read, so the line is looked for in the bytes.
            with open_data(path) as raw:
                bad = next((number for number, line in enumerate(raw, 1) if not _is_utf8(line)), None)
            raise DatasetError(
                f"not UTF-8: {error.reason}\n"
                'save the file as UTF-8 (in Excel: "CSV UTF-8"), or convert it, as in: '
                f"iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8-{path.name}",
                path=path,
                line=bad,
            ) from None


def _quote_problem(error: csv.Error, first_line: int, last_line: int) -> str:
    """Describe a row that the csv module rejects: nearly always a quote that is not closed, or not doubled."""
    remedy = '\nclose it, or write quotes inside a cell twice, as in "He said ""yes""."'
    if "unexpected end of data" in str(error):
        return f"not CSV: the row that begins on this line has a quote that is never closed{remedy}"
    where = "" if last_line == first_line else f" on line {last_line}, in the row that begins on this line"
    return f"not CSV: {error}{where}{remedy}" if '"' in str(error) else f"not CSV: {error}{where}"


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
            budget = ExpansionBudget(str(path), int(max(_PARQUET_BYTES, 20 * path.stat().st_size) * limit_factor()))
            yield from enumerate(_cells(file, budget), 1)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # Such as a date that Python lacks.
        raise DatasetError(f"not Parquet: {error}", path=path) from None


def _cells(file: Any, budget: ExpansionBudget) -> Iterator[Row]:
    """Yield rows a few at a time: a dictionary or a run of equal values is small in the file, whatever it becomes."""
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
        plain = (getattr(column, "dictionary_decode", lambda column=column: column)() for column in batch.columns)
        budget.take(sum(column.nbytes for column in plain))
        yield from batch.to_pylist()
