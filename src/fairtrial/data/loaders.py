"""Read samples from files by their suffix, in formats of ours and of other tools."""

from __future__ import annotations

import csv
import dataclasses
import enum
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAliasType

from fairtrial.base.codec.decode import alias_value, field_types
from fairtrial.base.codec.escape import parse_json_array
from fairtrial.base.foreign import ExpansionBudget, check_limit, limit_factor, lines_of, read_whole
from fairtrial.data.fingerprint import Identity
from fairtrial.data.index import FileRows, build_index, cached_index, open_data, parse_line, placed, read_lines
from fairtrial.data.rows import Columns, Row, RowMapper, duplicate_id, row_reader, separator_hint, table_reader
from fairtrial.data.sample import Sample
from fairtrial.errors import CodecError, ConfigurationError, DataError, DatasetError, MissingExtraError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # Where a lambda happens to be in memory is no part of a type.


def signature_of(kind: Any) -> Any:
    """Describe a type, and every type in it, as JSON."""
    return _describe(kind, ())


def _describe(kind: Any, outer: tuple[Any, ...]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    base = origin or kind
    if any(kind is known for known in outer):
        return ["again", str(kind)]
    outer = (*outer, kind)
    if isinstance(base, TypeAliasType):
        return _describe(alias_value(base, args), outer)
    parts = [str(kind), *(_describe(arg, outer) for arg in args)]
    if not isinstance(base, type):
        return parts
    if hasattr(base, "model_json_schema"):
        return [*parts, base.model_json_schema()]
    if issubclass(base, enum.Enum):
        return [*parts, *(repr(member) for member in base)]
    if dataclasses.is_dataclass(base) or typing.is_typeddict(base) or hasattr(base, "_fields"):
        types = {name: _describe(field, outer) for name, field in field_types(base, args).items()}
        defaults = getattr(base, "_field_defaults", None) or getattr(base, "__dataclass_fields__", None)
        return [*parts, types, _ADDRESS.sub("", repr(defaults))]
    return parts


type DatasetFormat = Literal[
    "langsmith", "braintrust", "langfuse", "pydantic-evals", "deepeval", "ragas", "openai", "promptfoo"
]
"""A tool whose datasets `Dataset.load` reads."""
type Converter = Callable[[Row], Row]

_LISTS = {"pydantic-evals": "cases", "promptfoo": "tests"}  # Formats with one document that contains the rows.
_DOCUMENTS = (".yaml", ".yml", ".json")
_MAX_NODES = 1_000_000
_MAX_DEPTH = 200
_INT, _MAX_DIGITS = "tag:yaml.org,2002:int", 308  # Longer ones are no floats, and take a long time to write.


def converter_of(format: str) -> Converter:
    """Return the function that gives the fields of a foreign row their names here."""
    if format not in _CONVERTERS:
        near = get_close_matches(str(format), _CONVERTERS)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"format must be one of {', '.join(_CONVERTERS)} (got {format!r}){hint}")
    return _CONVERTERS[format]


def document_rows(path: Path, format: str) -> Iterator[tuple[int, Row]] | None:
    """Return the rows of a format whose file is one document, with their lines; None for files with a row per line."""
    name = _LISTS.get(format)
    if name is None or path.suffix.lower() not in _DOCUMENTS:
        return None
    return _yaml_rows(path, name)


def _yaml_rows(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("reading this format", "data") from None
    with open_data(path) as file:
        content = read_whole(file, str(path))
    try:
        node, document = _parse_yaml(path, content, yaml)
    except DataError:
        raise
    except RecursionError:
        raise DatasetError("nested too deeply, or it contains itself", path=path) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise DatasetError(f"not YAML: {problem}", path=path, line=None if mark is None else mark.line + 1) from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"not UTF-8: {error.reason}", path=path) from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # A value without the form of its type: the library lets whatever Python raises pass.
        raise DatasetError(f"not YAML: {type(error).__name__}: {str(error)[:200]}", path=path) from None
    if isinstance(document, Mapping):
        rows = document.get(name)
        node = next((value for key, value in reversed(node.value) if key.value == name), None)  # The last one counts.
    else:
        rows = document  # A file of tests alone is a list.
    if not isinstance(rows, list) or node is None:
        raise DatasetError(f"the file must have a list of {name!r} (got {type(rows).__name__})", path=path)
    for row, place in zip(rows, node.value, strict=True):
        line = place.start_mark.line + 1
        if not isinstance(row, dict):
            raise DatasetError(f"an entry of {name!r} must be an object (got {row!r:.80})", path=path, line=line)
        yield line, row


def _parse_yaml(path: Path, content: bytes, yaml: Any) -> tuple[Any, Any]:
    """Return the nodes of a YAML document, which have lines, and its value. Refuses what is too deep or too large."""
    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The one in C is ten times as fast.
    depth = 0
    for event in yaml.parse(content, Loader=kind):  # Without recursion: deep documents are refused where they get deep.
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            line = event.start_mark.line + 1
            raise DatasetError(f"nested too deeply: more than {_MAX_DEPTH} levels", path=path, line=line)
    loader = kind(content)
    try:
        node = loader.get_single_node()  # JSON is YAML, too.
        count, depth = _measure(node, {})
        check_limit(str(path), "values", count, _MAX_NODES)
        if depth > _MAX_DEPTH:
            raise DatasetError(f"nested too deeply: more than {_MAX_DEPTH} levels", path=path)
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _measure(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the values and levels of a YAML document once every alias is replaced by what it stands for."""
    if id(node) not in known:
        if getattr(node, "tag", "") == _INT and len(node.value) > _MAX_DIGITS:
            raise ValueError(f"a number must have at most {_MAX_DIGITS} digits (got {len(node.value):,})")
        inner = node.value if isinstance(getattr(node, "value", None), list) else ()
        parts = [_measure(part, known) for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(count for count, _ in parts), 1 + max((depth for _, depth in parts), default=0)
    return known[id(node)]


def _take(row: Row, fields: Mapping[str, tuple[str, ...]], *, required: str, kept: tuple[str, ...] = ()) -> Row:
    """Rename the fields of a row. Those in `kept` become metadata; unknown fields are refused."""
    names = {name for known in fields.values() for name in known}
    unknown = [name for name in row if name not in names and name not in kept]
    if required not in row:
        raise DatasetError(f"a row needs {required!r} (found {', '.join(map(str, list(row)[:10])) or 'nothing'})")
    if unknown:
        raise DatasetError(f"unknown field {unknown[0]!r}; map rows of your own with row=... or columns=...")
    made: Row = {}
    for field, known in fields.items():
        found = next((name for name in known if row.get(name) is not None), None)
        if found is not None:
            made[field] = row[found]
    metadata = made.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        metadata = {"metadata": metadata}
    extra = {name: row[name] for name in kept if row.get(name) not in (None, [], {})}
    made["metadata"] = {**(metadata or {}), **extra}
    if "id" in made and not isinstance(made["id"], str | int):
        raise DatasetError(f"the id of a row must be text or a number (got {made['id']!r})")
    made.setdefault("input", None)
    return made


_LANGSMITH = ("split", "dataset_id", "source_run_id", "created_at", "modified_at", "attachment_urls", "name")


def _langsmith(row: Row) -> Row:
    fields = {"id": ("id",), "input": ("inputs",), "expected": ("outputs",), "metadata": ("metadata",)}
    return _take(row, fields, required="inputs", kept=_LANGSMITH)


def _braintrust(row: Row) -> Row:
    fields = {"id": ("id",), "input": ("input",), "expected": ("expected",), "metadata": ("metadata",)}
    kept = ("tags", "created", "origin", "root_span_id", "span_id", "is_root", "dataset_id", "project_id", "_xact_id",
            "_pagination_key", "comments", "audit_data")  # fmt: skip
    return _take(row, fields, required="input", kept=kept)


def _langfuse(row: Row) -> Row:
    fields = {"id": ("id",), "input": ("input",), "expected": ("expectedOutput", "expected_output"),
              "metadata": ("metadata",)}  # fmt: skip
    kept = ("status", "datasetId", "datasetName", "sourceTraceId", "sourceObservationId", "createdAt", "updatedAt",
            "dataset_id", "dataset_name", "source_trace_id", "source_observation_id", "created_at",
            "updated_at")  # fmt: skip
    return _take(row, fields, required="input", kept=kept)


def _pydantic_evals(row: Row) -> Row:
    fields = {"id": ("name",), "input": ("inputs",), "expected": ("expected_output",), "metadata": ("metadata",)}
    return _take(row, fields, required="inputs", kept=("evaluators",))


def _deepeval(row: Row) -> Row:
    if "scenario" in row or "turns" in row:
        raise DatasetError("a golden of a conversation has no single input; map it with row=...")
    fields = {"input": ("input",), "expected": ("expected_output",), "metadata": ("additional_metadata",)}
    kept = ("actual_output", "context", "retrieval_context", "expected_tools", "tools_called", "comments",
            "source_file", "name", "retrieved_context_data", "custom_column_key_values")  # fmt: skip
    return _take(row, fields, required="input", kept=kept)


def _ragas(row: Row) -> Row:
    fields = {"input": ("user_input",), "expected": ("reference",)}
    kept = ("retrieved_contexts", "reference_contexts", "response", "multi_responses", "rubrics", "rubric",
            "reference_tool_calls", "reference_topics", "synthesizer_name", "persona_name", "query_style",
            "query_length", "retrieved_context_ids", "reference_context_ids")  # fmt: skip
    return _take(row, fields, required="user_input", kept=kept)


def _openai(row: Row) -> Row:
    if not isinstance(row.get("item"), dict):
        raise DatasetError(f"a row needs an object 'item' (found {', '.join(map(str, list(row)[:10])) or 'nothing'})")
    return _take(row, {"input": ("item",)}, required="item", kept=("sample",))


def _promptfoo(row: Row) -> Row:
    fields = {"input": ("vars",)}
    kept = ("description", "assert", "options", "threshold", "provider", "providers", "prompts", "providerOutput")
    metadata = row.get("metadata")
    made = _take({name: value for name, value in row.items() if name != "metadata"}, fields, required="vars", kept=kept)
    if isinstance(metadata, Mapping):
        made["metadata"] = {**metadata, **made["metadata"]}
    asserted = row.get("assert")
    equal = [
        one["value"]
        for one in (asserted if isinstance(asserted, list) else ())
        if isinstance(one, dict) and one.get("type") == "equals" and "value" in one
    ]
    if len(equal) == 1:
        made["expected"] = equal[0]
    return made


_CONVERTERS: Mapping[str, Converter] = {
    "langsmith": _langsmith,
    "braintrust": _braintrust,
    "langfuse": _langfuse,
    "pydantic-evals": _pydantic_evals,
    "deepeval": _deepeval,
    "ragas": _ragas,
    "openai": _openai,
    "promptfoo": _promptfoo,
}


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
    how = "\nsave the sheet as .csv (UTF-8)" if suffix in (".xlsx", ".xls", ".ods") else ""
    raise ConfigurationError(f"{path}: the format is read from the suffix, which must be one of {known}{how}")


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
        raise MissingExtraError("reading Parquet", "data") from None
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
