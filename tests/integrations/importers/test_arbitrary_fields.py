"""Any JSON in any field of a file of another tool: a run, or an error that says what is wrong; never code."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial import open_store
from fairtrial.base.plugins import plugin_names
from fairtrial.errors import DataError, StoreError
from fairtrial.integrations.model_server import HostedEvals
from fairtrial.runs.imported import load_importer, store_run, write_suite
from tests.integrations.importers.project import CRITERIA, ROWS, answers, eval_of, message, run_of, write_archive
from tests.integrations.importers.test_foreign_code import FULL_WIDTH, SIMILAR, check_statements

FILES = Path(__file__).with_name("files")
CODE = "__import__('os').abort()"
HOSTILE: list[Any] = [
    f"\n{CODE}\n", f"'''\n{CODE}", f'"""\n{CODE}', "{0}", "{0!r}", "{{item.capital}}", "{{item.a.b[0]}}", "\\", "a\0b",
    "\ud800", "../../secret", "/etc/passwd", "attachment://" + "a" * 32, "NaN", 10**400, -(10**400), 2_000_000_000,
    1e308, -1e308, True, None, [], {}, [[]], {"arrayValue": {"values": [{"intValue": 1}]}}, {"doubleValue": 1e308},
    "string_check", "score_model", FULL_WIDTH, "2026-13-45T99:00", "0001-01-01T00:00:00",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(HOSTILE),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
)


def openai(document: Any, folder: Path) -> Path:
    project = HostedEvals(evals=document["evals"], runs=document["runs"], items={"evalrun_a": document["items"]})
    write_archive(project, folder)
    return folder


def inspect(document: Any, folder: Path) -> Path:
    path = folder / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        for place, sample in enumerate(document["samples"]):
            archive.writestr(f"samples/{place}.json", json.dumps(sample))
        archive.writestr("header.json", json.dumps(document["header"]))
    return path


def one_file(name: str) -> Callable[[Any, Path], Path]:
    def write(document: Any, folder: Path) -> Path:
        path = folder / name
        path.write_text(json.dumps(document))
        return path

    return write


def lm_eval(document: Any, folder: Path) -> Path:
    time = "2026-11-16T22-14-33.6"
    (folder / f"results_{time}.json").write_text(json.dumps(document["results"]))
    path = folder / f"samples_capitals_{time}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in document["samples"]))
    return path


def openai_document() -> Any:
    items = answers("evalrun_a", {})[:2]
    judge = {"type": "label_model", "name": "right", "id": "j", "model": "m", "labels": ["a", "b"],
             "passing_labels": ["a"], "input": message("{{item.country}}?")}  # fmt: skip
    similar = {**SIMILAR, "name": "similar", "id": "s"}
    source = {"type": "jsonl", "source": {"type": "file_content", "content": ROWS[:2]},
              "input_messages": {"template": message("{{item.country}}?")}}  # fmt: skip
    return {
        "evals": [eval_of("eval_capitals", "Capitals", [*CRITERIA, judge, similar])],
        "runs": [run_of("evalrun_a", items, data_source=source)],
        "items": items,
    }


def inspect_document() -> Any:
    log = json.loads((FILES / "inspect" / "short.json").read_text())
    return {"samples": log.pop("samples")[:2], "header": log}


def promptfoo_document() -> Any:
    found = json.loads((FILES / "promptfoo" / "results.json").read_text())
    found["results"]["results"] = found["results"]["results"][:2]
    return found


def pydantic_document() -> Any:
    found = json.loads((FILES / "pydantic-evals" / "report.json").read_text())
    return {**found, "cases": found["cases"][:2], "failures": found["failures"][:1]}


def lm_eval_document() -> Any:
    (samples,) = (FILES / "lm-eval").glob("samples_capitals_text*")
    (results,) = (FILES / "lm-eval").glob("results_*")
    rows = [json.loads(line) for line in samples.read_text().splitlines()[:3]]
    return {"samples": rows, "results": json.loads(results.read_text())}


def otlp_document() -> Any:
    recorded = FILES.parent.parent / "tracing" / "recorded" / "genai.jsonl"
    return json.loads(recorded.read_text().splitlines()[0])


FORMATS: dict[str, tuple[Callable[[], Any], Callable[[Any, Path], Path]]] = {
    "inspect": (inspect_document, inspect),
    "promptfoo": (promptfoo_document, one_file("results.json")),
    "lm-eval": (lm_eval_document, lm_eval),
    "pydantic-evals": (pydantic_document, one_file("report.json")),
    "openai-evals": (openai_document, openai),
    "otlp": (otlp_document, one_file("traces.json")),
}


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, by its keys."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in children:
        yield (*way, key)
        yield from places(inner, (*way, key))


def put(document: Any, way: tuple[Any, ...], value: Any) -> None:
    """Replace the value at a place, if an earlier change left the place there."""
    *outer, last = way
    try:
        for key in outer:
            document = document[key]
        document[last] = value
    except (TypeError, LookupError):
        pass


def import_file(format: str, path: Path, folder: Path) -> None:
    """Import a file as the command does; what is written must be ours."""
    imported = load_importer(format).read(path)
    store = open_store("memory:")
    for suite in imported.suites:
        for run in suite.runs:
            store_run(store, suite, run, format)
        files = write_suite(suite, folder) if len(suite.dataset) else []
        for file, _ in files:
            assert file.parent == folder
            if file.suffix == ".py" and format != "otlp":
                check_statements(file.read_text())


def import_everything(format: str, path: Path, folder: Path) -> None:
    """Import a file, which may be refused."""
    try:
        import_file(format, path, folder)
    except (DataError, StoreError) as error:
        if not str(error):
            raise


def test_every_format_is_covered() -> None:
    assert set(FORMATS) == set(plugin_names("importers"))


@pytest.mark.parametrize("format", FORMATS)
def test_any_json_in_any_field_is_a_run_or_an_error(format: str) -> None:
    make, write = FORMATS[format]
    original = make()
    all_places = sorted(places(original), key=lambda way: (len(way), str(way)))
    # Without the order of depth, all draws would be deep in one long document.
    place = st.integers(0, 7).flatmap(
        lambda depth: st.sampled_from([way for way in all_places if len(way) == depth + 1] or all_places)
    )

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.tuples(place, VALUES), min_size=1, max_size=3))
    def check(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
        document = copy.deepcopy(original)
        for way, value in changes:
            put(document, way, value)
        with TemporaryDirectory() as folder:
            source = Path(folder, "source")
            source.mkdir()
            try:
                path = write(document, source)
            except (TypeError, KeyError, AttributeError, OSError, ValueError):
                return  # The change is to a part that makes the files.
            import_everything(format, path, Path(folder, "out"))

    check()


@pytest.mark.parametrize(
    ("format", "way", "value"),
    [
        ("lm-eval", ("samples", 0, "metrics", 0), {}),
        ("lm-eval", ("results", "total_evaluation_time_seconds"), 10**400),
        ("pydantic-evals", ("cases", 0, "assertions", "EqualsExpected"), "yes"),
        ("pydantic-evals", ("cases", 0, "task_duration"), 1e308),
        ("promptfoo", ("results", "results", 0, "latencyMs"), -(10**400)),
        ("openai-evals", ("runs", 0, "result_counts", "total"), "many"),
        ("openai-evals", ("evals", 0, "testing_criteria"), 7),
        ("openai-evals", ("items", 0, "datasource_item_id"), {}),
        ("openai-evals", ("evals", 0, "testing_criteria", 0, "range"), 1),
        ("otlp", ("resourceSpans", 0, "scopeSpans", 0, "spans", 0, "attributes", 0, "value"), {"stringValue": []}),
        (
            "otlp",
            ("resourceSpans", 0, "scopeSpans", 0, "spans", 0, "attributes", 0, "value"),
            {"arrayValue": {"values": [{"intValue": 1}]}},
        ),
    ],
)
def test_values_of_other_types_are_read_or_refused(tmp_path: Path, format: str, way: Any, value: Any) -> None:
    make, write = FORMATS[format]
    document = make()
    put(document, way, value)
    import_everything(format, write(document, tmp_path), tmp_path / "out")
