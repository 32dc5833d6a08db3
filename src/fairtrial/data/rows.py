"""From one row of a file to one sample, the same for every format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from fairtrial.codec import from_json, to_json
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, DatasetError
from fairtrial.frozen import EMPTY, FrozenDict, freeze

type Row = dict[str, Any]
type RowMapper = Callable[[Row], Sample[Any, Any]]

_KEYS = frozenset({"id", "input", "expected", "ground_truth", "metadata"})


def row_reader(input_type: Any, expected_type: Any, row: RowMapper | None) -> RowMapper:
    """The function that makes a sample of a row: the caller's own, or the one for our keys."""
    if row is not None:
        return _checked(row)
    read_input = _reader(input_type, "input")
    read_expected = _reader(expected_type, "expected")

    def read(fields: Row) -> Sample[Any, Any]:
        if not _KEYS.issuperset(fields):
            raise DatasetError(_unknown_key(next(key for key in fields if key not in _KEYS)))
        if "id" not in fields or "input" not in fields:
            raise DatasetError(f"a row needs the field {'id' if 'id' not in fields else 'input'!r}")
        sample_id = fields["id"]
        if type(sample_id) is int:
            sample_id = str(sample_id)
        expected = fields.get("expected")
        if expected is None:
            expected = fields.get("ground_truth")
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


def flat_row(cells: Mapping[str, Any], input_type: Any, expected_type: Any) -> Row:
    """A row of a table: cells for our keys, every other column becomes metadata.

    Text in a cell is the value itself where text is asked for, and JSON where another type is.
    """
    row: Row = {}
    metadata: dict[str, Any] = {}
    for name, cell in cells.items():
        if name in ("expected", "ground_truth"):
            row[name] = None if cell == "" or cell is None else _cell(cell, expected_type)
        elif name == "input":
            row[name] = _cell(cell, input_type)
        elif name == "id":
            row[name] = cell
        else:
            metadata[name] = cell
    row["metadata"] = FrozenDict(metadata)
    return row


def _cell(cell: Any, kind: Any) -> Any:
    if not isinstance(cell, str) or kind in (object, Any, str):
        return to_json(cell)
    from fairtrial.codec import parse_json

    try:
        return parse_json(cell)
    except CodecError:
        return cell  # Dates, enums and the like are text without quotes in a table.


def _reader(kind: Any, field: str) -> Callable[[Any], Any] | None:
    if kind is object or kind is Any:
        return None

    def read(value: Any) -> Any:
        try:
            return from_json(kind, value)
        except CodecError as error:
            raise error.under(field) from None

    return read


def _unknown_key(key: str) -> str:
    near = get_close_matches(key, _KEYS, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else "put facts about a sample under 'metadata', or map foreign rows with row=..."
    )
    return f"unknown field {key!r}; {hint}"


def describe_type(kind: Any) -> Any:
    """What a type looks like today, for cache keys: a dataset read with a changed type is read again."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return [
            f"{kind.__module__}.{kind.__qualname__}",
            *([field.name, str(field.type), repr(field.default)] for field in dataclasses.fields(kind)),
        ]
    if hasattr(kind, "model_json_schema"):
        return [f"{kind.__module__}.{kind.__qualname__}", kind.model_json_schema()]
    return str(kind)
