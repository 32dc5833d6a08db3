"""From one row of a file to one sample, the same for every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from fairtrial.codec import from_json, parse_json, to_json
from fairtrial.codec.escape import restore
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, DatasetError
from fairtrial.frozen import EMPTY, freeze

type Row = dict[str, Any]
type RowMapper = Callable[[Row], Sample[Any, Any]]

_KEYS = frozenset({"id", "input", "expected", "ground_truth", "metadata"})


def row_reader(input_type: Any, expected_type: Any, row: RowMapper | None) -> RowMapper:
    """The function that makes a sample of a row of JSON: the caller's own, or the one for our keys."""
    if row is not None:
        return _checked(row)
    return _reader_of_keys(_typed(input_type, "input"), _typed(expected_type, "expected"))


def table_reader(input_type: Any, expected_type: Any, row: RowMapper | None) -> RowMapper:
    """The function that makes a sample of a row of a table: columns with other names than ours become metadata."""
    if row is not None:
        return _checked(row)
    read = _reader_of_keys(_typed_cell(input_type, "input"), _typed_cell(expected_type, "expected"))

    def read_cells(cells: Row) -> Sample[Any, Any]:
        fields: Row = {}
        metadata: dict[str, Any] = {}
        for name, cell in cells.items():
            if name in ("expected", "ground_truth"):
                fields[name] = None if cell == "" else cell
            elif name in ("id", "input"):
                fields[name] = cell
            elif name == "metadata" and isinstance(cell, Mapping):
                metadata.update(restore(to_json(cell)))
            else:
                metadata[name] = restore(to_json(cell))  # Dates and the like become text: metadata is JSON.
        return read({**fields, "metadata": metadata})

    return read_cells


def _reader_of_keys(read_input: _Read | None, read_expected: _Read | None) -> RowMapper:
    def read(fields: Row) -> Sample[Any, Any]:
        if not _KEYS.issuperset(fields):
            raise DatasetError(_unknown_key(next(key for key in fields if key not in _KEYS)))
        if "id" not in fields or "input" not in fields:
            raise DatasetError(_missing_keys(fields))
        sample_id = fields["id"]
        if type(sample_id) is int:
            sample_id = str(sample_id)
        expected = fields.get("expected")
        if "ground_truth" in fields:
            if expected is not None and fields["ground_truth"] != expected:
                raise DatasetError("a row has either 'expected' or 'ground_truth', and this one has two references")
            expected = fields["ground_truth"] if expected is None else expected
        metadata = fields.get("metadata")
        if metadata is None:
            metadata = EMPTY
        elif type(metadata) is dict:
            metadata = freeze(metadata) if metadata else EMPTY
        return Sample(
            sample_id,
            fields["input"] if read_input is None else read_input(fields["input"]),
            expected if read_expected is None or expected is None else read_expected(expected),
            metadata,
        )

    return read


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
            raise DatasetError(f"the row function must return a Sample, not {type(sample).__name__}")
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


def _missing_keys(fields: Row) -> str:
    missing = " and ".join(repr(key) for key in ("id", "input") if key not in fields)
    others = fields.get("metadata")
    found = [key for key in fields if key != "metadata"] + list(others if isinstance(others, Mapping) else ())
    if len(found) == 1 and (mark := next((mark for mark in ";\t|" if mark in found[0]), None)):
        return (
            f"a row needs {missing} (found one column, {found[0]!r})\n"
            f"its values seem to be separated by {mark!r}: save the file with ',' between them, or as .tsv with tabs"
        )
    return (
        f"a row needs {missing} (found {', '.join(map(str, found[:10])) or 'nothing'})\n"
        "rename the fields in the file, or map rows in Python: Dataset.load(path, row=lambda row: Sample(...))"
    )


def _unknown_key(key: str) -> str:
    near = get_close_matches(key, _KEYS, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else "put facts about a sample under 'metadata', or map foreign rows with row=..."
    )
    return f"unknown field {key!r}; {hint}"
