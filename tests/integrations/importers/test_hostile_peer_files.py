"""Files of promptfoo, pydantic-evals, lm-eval and Inspect that were made to do harm: code, paths, bombs, odd names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairtrial import Dataset, open_store
from fairtrial.base.foreign import SETTING
from fairtrial.cli.app import invoke
from fairtrial.errors import DataError, DatasetError
from fairtrial.runs.imported import load_importer, store_run, write_suite
from tests.integrations.importers.test_arbitrary_fields import FORMATS, import_file, places, put

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
