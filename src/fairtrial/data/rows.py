"""Convert rows of files to samples, for every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fairtrial.base.codec import digest, from_json, parse_json, to_json
from fairtrial.base.codec.escape import restore
from fairtrial.base.frozen import EMPTY
from fairtrial.data.sample import NOT_GIVEN, Sample
from fairtrial.errors import CodecError, ConfigurationError, DatasetError

type Row = dict[str, Any]
type RowMapper = Callable[[Row], Sample[Any, Any]]
type Columns = Mapping[str, str | Sequence[str]]
"""Which column of a file holds which field of a sample; several columns make a dict of their values."""

_KEYS = frozenset({"id", "input", "expected", "ground_truth", "metadata"})
_FIELDS = ("id", "input", "expected", "metadata")

COLUMNS_EXAMPLE = 'columns={"input": "question", "expected": "answer"}'
"""How code names columns in messages; the command line shows its own option instead."""


def row_reader(input_type: Any, expected_type: Any, row: RowMapper | None, columns: Columns | None) -> RowMapper:
    """Return the function that converts a row of JSON to a sample: the caller's, or the one for standard keys."""
    if row is not None:
        return _checked(row)
    read = _reader_of_keys(_typed(input_type, "input"), _typed(expected_type, "expected"))
    return read if columns is None else _mapped(read, columns)


def table_reader(input_type: Any, expected_type: Any, row: RowMapper | None, columns: Columns | None) -> RowMapper:
    """Return the function that converts a row of a table to a sample; other columns become metadata."""
    if row is not None:
        return _checked(row)
    read = _reader_of_keys(_typed_cell(input_type, "input"), _typed_cell(expected_type, "expected"))

    def read_cells(cells: Row) -> Sample[Any, Any]:
        fields: Row = {}
        metadata: dict[str, Any] = {}
        for name, cell in cells.items():
            if name in ("expected", "ground_truth"):
                if cell is not None and cell != "":  # A table has no other way to say that there is none.
                    fields[name] = cell
            elif name in ("id", "input"):
                fields[name] = cell
            elif name == "metadata" and isinstance(cell, Mapping):
                metadata.update(restore(to_json(cell)))
            else:
                metadata[name] = restore(to_json(cell))  # Dates and the like become text: metadata is JSON.
        return read({**fields, "metadata": metadata})

    return read_cells if columns is None else _mapped(read_cells, columns)


def check_columns(columns: Columns, row: RowMapper | None) -> None:
    """Reject a mapping with an unknown field of a sample, or one that is combined with a row function."""
    if row is not None:
        raise ConfigurationError("columns= and row= both map rows: give one of them")
    for field in columns:
        if field not in _FIELDS:
            raise ConfigurationError(
                f"columns must map fields of a sample ({', '.join(_FIELDS)}) to columns of the file (got {field!r})\n"
                f"for example: {COLUMNS_EXAMPLE}"
            )


def _mapped(read: RowMapper, columns: Columns) -> RowMapper:
    """A reader of rows whose fields have other names; what no field takes becomes metadata, unless that is mapped."""
    used = {name for names in columns.values() for name in ([names] if isinstance(names, str) else names)}
    taken = {*columns, "ground_truth"} if "expected" in columns else set(columns)

    def read_mapped(row: Row) -> Sample[Any, Any]:
        fields: Row = {field: _cells(row, field, names) for field, names in columns.items()}
        if "metadata" in columns:
            if not isinstance(fields["metadata"], Mapping):
                fields["metadata"] = {str(columns["metadata"]): fields["metadata"]}
            return read(fields)
        metadata = dict(row["metadata"]) if isinstance(row.get("metadata"), Mapping) else {}
        for name, value in row.items():
            if name in _KEYS and name not in taken:
                if name != "metadata":
                    fields[name] = value
            elif name not in used:
                metadata[name] = value
        return read({**fields, "metadata": metadata})

    return read_mapped


def _cells(row: Row, field: str, names: str | Sequence[str]) -> Any:
    for name in [names] if isinstance(names, str) else names:
        if name not in row:
            found = ", ".join(map(str, list(row)[:10])) or "nothing"
            raise DatasetError(f"there is no column {name!r} for {field!r} (found {found}){separator_hint(list(row))}")
    return row[names] if isinstance(names, str) else {name: row[name] for name in names}


def _reader_of_keys(read_input: _Read | None, read_expected: _Read | None) -> RowMapper:
    def read(fields: Row) -> Sample[Any, Any]:
        if not _KEYS.issuperset(fields):
            raise DatasetError(_unknown_key(next(key for key in fields if key not in _KEYS)))
        if "input" not in fields:
            raise DatasetError(_missing_input(fields))
        expected = fields.get("expected", NOT_GIVEN)
        if "ground_truth" in fields:
            missing = expected is NOT_GIVEN or expected is None
            if not missing and fields["ground_truth"] != expected:
                raise DatasetError("a row must have either 'expected' or 'ground_truth' (got both)")
            expected = fields["ground_truth"] if missing else expected
        metadata = EMPTY if fields.get("metadata") is None else fields["metadata"]
        given = fields["input"] if read_input is None else read_input(fields["input"])
        known = expected is not NOT_GIVEN and expected is not None
        wanted = read_expected(expected) if read_expected is not None and known else expected
        sample_id = fields["id"] if "id" in fields else content_id(given, wanted if known else None)
        return Sample(str(sample_id) if type(sample_id) is int else sample_id, given, wanted, metadata)

    return read


def content_id(given: Any, wanted: Any) -> str:
    """Return the id of a sample without one: a hash of its input and its expected value."""
    return digest([given, wanted])[:16]


def duplicate_id(sample: Sample[Any, Any], where: str) -> DatasetError:
    """Return the error for a sample whose id was used before."""
    if sample.id == content_id(sample.input, sample.expected):
        return DatasetError(f"the same input and reference as on {where}; remove it, or give each row an id")
    return DatasetError(f"duplicate id {sample.id!r}; it was used before on {where}")


type _Read = Callable[[Any], Any]


def _checked(row: RowMapper) -> RowMapper:
    def read(fields: Row) -> Sample[Any, Any]:
        try:
            sample = row(fields)
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(f"the row function failed: {type(error).__name__}: {error}") from error
        if not isinstance(sample, Sample):
            raise DatasetError(f"the row function must return a Sample (got {type(sample).__name__})")
        return sample

    return read


def _typed(kind: Any, field: str) -> _Read | None:
    if kind is object or kind is Any:
        return None

    def read(value: Any) -> Any:
        try:
            # Through our own wire form: a file that uses our escape character means that character.
            return from_json(kind, to_json(value))
        except CodecError as error:
            raise error.under(field) from None

    return read


def _typed_cell(kind: Any, field: str) -> _Read | None:
    """Text in a cell is taken as it is where text is asked for, and as JSON where another type is."""
    read = _typed(kind, field)
    if read is None:
        return None

    def read_cell(cell: Any) -> Any:
        if not isinstance(cell, str) or kind is str:
            return read(cell)
        try:
            value = parse_json(cell)
        except CodecError:
            return read(cell)  # Dates, enums and the like are text without quotes in a table.
        first, second = (cell, value) if isinstance(value, str) else (value, cell)
        try:
            return read(first)
        except CodecError as error:
            try:
                return read(second)
            except CodecError:
                raise error from None

    return read_cell


def _missing_input(fields: Row) -> str:
    others = fields.get("metadata")
    found = [key for key in fields if key != "metadata"] + list(others if isinstance(others, Mapping) else ())
    if hint := separator_hint(found):
        return f"a row needs 'input' (found one column, {found[0]!r}){hint}"
    return (
        f"a row needs 'input' (found {', '.join(map(str, found[:10])) or 'nothing'})\n"
        f"say which column it is, as in {COLUMNS_EXAMPLE}, or rename it in the file"
    )


def separator_hint(names: Sequence[str]) -> str:
    """Return a remedy, on a line of its own, if a table's only column looks like several with another separator."""
    mark = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if mark is None:
        return ""
    return f"\nits values seem to be separated by {mark!r}: save the file with ',' between them, or as .tsv with tabs"


def _unknown_key(key: str) -> str:
    near = get_close_matches(key, _KEYS)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else "put facts about a sample under 'metadata', or map foreign fields with columns=..."
    )
    return f"unknown field {key!r}; {hint}"
