"""Datasets as other tools export them: what their rows are called here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from fairtrial.base.foreign import check_limit, read_whole
from fairtrial.data.index import open_data
from fairtrial.data.rows import Row
from fairtrial.errors import ConfigurationError, DataError, DatasetError, MissingExtraError

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
        raise MissingExtraError("reading this format", "yaml") from None
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
    """Rename the fields of a row. Those in `kept` become metadata; what nobody knows is refused."""
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
