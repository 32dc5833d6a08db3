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

from fairtrial import Dataset, open_store
from fairtrial.base.foreign import SETTING
from fairtrial.base.plugins import plugin_names
from fairtrial.cli.app import invoke
from fairtrial.errors import DataError, DatasetError, StoreError
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


# Files of promptfoo, pydantic-evals, lm-eval and Inspect that were made to do harm: code, paths, bombs, odd names.


PEERS = ("promptfoo", "pydantic-evals", "lm-eval")


@pytest.mark.parametrize("format", PEERS)
def test_code_and_paths_in_every_text_make_nothing_but_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Every text of the file is code, a template and a path at once; what is written is data, in the folder given."""
    monkeypatch.chdir(tmp_path)
    make, write = FORMATS[format]
    document = make()
    attack = f"../../{{{{ x }}}}\n__import__('os').system('touch {tmp_path}/executed')\n'''\"\"\"<!-- ${{IFS}}"
    for way in list(places(document)):
        value: Any = document
        for key in way:
            value = value[key]
        if isinstance(value, str) and way[-1] not in ("filter", "metrics") and "metrics" not in way[:-1]:
            put(document, way, attack if not str(way[-1]).endswith("name") else f"{attack} {len(way)} {way}")
    (tmp_path / "source").mkdir()
    (suite,) = load_importer(format).read(write(document, tmp_path / "source")).suites
    store = open_store("memory:")
    assert store_run(store, suite, suite.runs[0], format).run.planned
    files = write_suite(suite, tmp_path / "out")
    assert [path.suffix for path, _ in files] == [".jsonl"]
    assert all(path.parent == tmp_path / "out" for path, _ in files)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    assert len(Dataset.load(files[0][0])) == len(suite.dataset)


@pytest.mark.parametrize("format", ["lm-eval", "inspect"])
def test_a_sample_whose_id_is_empty_is_refused_with_its_file(tmp_path: Path, format: str) -> None:
    make, write = FORMATS[format]
    document = make()
    document["samples"][1].update({"id": "", "doc_id": ""})
    path = write(document, tmp_path)
    with pytest.raises(DataError, match=path.name):
        import_file(format, path, tmp_path / "out")


@pytest.mark.parametrize("format", PEERS)
def test_ten_thousand_names_of_scores_are_read_in_time(tmp_path: Path, format: str) -> None:
    make, write = FORMATS[format]
    document = make()
    names = [f"score {n}" for n in range(10_000)]
    if format == "promptfoo":
        document["results"]["results"][0]["namedScores"] = dict.fromkeys(names, 0.5)
    elif format == "pydantic-evals":
        document["cases"][0]["scores"] = {name: {"value": 0.5} for name in names}
    else:
        document["samples"][0].update({"metrics": names, **dict.fromkeys(names, 0.5)})
    import_file(format, write(document, tmp_path), tmp_path / "out")


@pytest.mark.parametrize("format", [*PEERS, "inspect", "otlp"])
def test_a_file_beyond_the_limit_is_refused_by_name_and_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    """The limit is 256 MiB for a JSON document; here it is lowered, so that the file can be small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SETTING, "0.000001")
    make, write = FORMATS[format]
    path = write(make(), tmp_path)
    assert invoke(["import", str(path), "--format", format, "--store", str(tmp_path / "x.db")]) == 2
    said = capsys.readouterr().err
    assert SETTING in said
    assert "bug in Fairtrial" not in said


YAML = {
    "code": ("tests: !!python/object/apply:os.system ['touch executed']", "not YAML"),
    "a name of Python": ("tests: [{vars: !!python/name:os.system }]", "not YAML"),
    "billion laughs": (
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{n}: &{n} [{', '.join([f'*{m}'] * 10)}]\n" for m, n in zip("abcdefg", "bcdefgh", strict=True))
        + "tests: [{vars: *h}]\n",
        "at most 1,000,000 values",
    ),
    "merged laughs": (
        "x0: &x0 {a: 1}\n"
        + "".join(f"x{n}: &x{n} {{<<: [*x{n - 1}, *x{n - 1}]}}\n" for n in range(1, 25))
        + "tests: [{vars: *x24}]\n",
        "at most 1,000,000 values",
    ),
    "itself": ("tests: &a [*a]\n", "contains itself"),
    "100,000 brackets": ("tests: " + "[" * 100_000, "more than 200 levels"),
    "100,000 indents": ("- " * 100_000, "more than 200 levels"),
    "a long number": ("tests: [{vars: 0x" + "f" * 5000 + "}]", "at most 308 digits"),
}


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("name", YAML)
def test_hostile_yaml_is_refused_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text, problem = YAML[name]
    path = tmp_path / f"tests{suffix}"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"(?s)tests\{suffix}.*{problem}"):
        Dataset.load(path, format="promptfoo")
    assert not (tmp_path / "executed").exists()


def test_tests_that_name_other_files_are_refused_and_not_read(tmp_path: Path) -> None:
    """promptfoo reads `file://` references; here they stay what they are: text."""
    (tmp_path / "secret.csv").write_text("q\nTOP SECRET\n")
    path = tmp_path / "tests.yaml"
    path.write_text("tests: file://secret.csv\n")
    with pytest.raises(DatasetError, match=r"tests\.yaml.*must have a list of 'tests'"):
        Dataset.load(path, format="promptfoo")
    path.write_text("tests: [{vars: {q: 'file://secret.csv'}}, {vars: 'file://../secret.csv'}]\n")
    assert "TOP SECRET" not in json.dumps([sample.input for sample in Dataset.load(path, format="promptfoo")])


def test_a_sample_that_is_in_a_log_twice_is_one_trial(tmp_path: Path) -> None:
    make, write = FORMATS["inspect"]
    document = make()
    document["samples"] = [document["samples"][0]] * 2
    (suite,) = load_importer("inspect").read(write(document, tmp_path)).suites
    store = open_store("memory:")
    run = store_run(store, suite, suite.runs[0], "inspect").run
    assert (run.planned, len(list(store.results(run.run_id)))) == (1, 1)


def test_a_log_of_thousands_of_members_is_imported(tmp_path: Path) -> None:
    make, write = FORMATS["inspect"]
    document = make()
    document["samples"] = [{"id": number, "epoch": 1} for number in range(3_000)]
    (suite,) = load_importer("inspect").read(write(document, tmp_path)).suites
    assert len(suite.dataset) == 3_000
