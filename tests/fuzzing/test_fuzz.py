"""A fixed number of changed inputs for every reader of foreign bytes, and the crashes that `scripts/fuzz` found."""

from __future__ import annotations

import json
import sqlite3
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from random import Random

import pytest

from fairtrial import AnalysisPlan, ConfigurationError, Dataset, EvalReport, GateRules
from fairtrial.cli.adhoc import _template
from fairtrial.cli.label_file import read_labels
from fairtrial.cli.settings import load_settings
from fairtrial.cli.user_errors import UserError
from fairtrial.errors import DataError, DatasetError, StoreError
from fairtrial.reports.figures import column_file
from fairtrial.runs.imported import load_importer
from fairtrial.store.column_cache import HEAD, column_path
from fairtrial.store.portable import save_run
from tests.fuzzing.campaign import Campaign, execute
from tests.fuzzing.mutators import mutate_bytes, mutate_json
from tests.fuzzing.readers import READERS, Reader, small_store
from tests.integrations.importers.test_arbitrary_fields import FORMATS, import_file

SLOW = {"saved run": 40, "column file": 60, "viewer": 40}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", READERS)
def test_changed_input_is_read_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRTRIAL_CACHE_DIR", str(tmp_path / "cache"))
    with READERS[name](tmp_path) as reader:
        campaign = Campaign(reader, seed=35)
        campaign.run(lambda executions: executions < SLOW.get(name, 100))
    assert campaign.executions >= 40
    assert not campaign.crashes, "\n".join(
        f"{c.problem}\n{c.trace}\n{c.data!r:.2000}" for c in campaign.crashes.values()
    )


class TestTheFuzzer:
    def test_the_same_seed_makes_the_same_changes(self) -> None:
        data = b'{"a": [1, {"b": "c"}], "d": null}'
        for mutate in (mutate_json, mutate_bytes):
            made = [[mutate(Random(seed), data, [data]) for seed in range(50)] for _ in range(2)]
            assert made[0] == made[1]
            assert len(set(made[0])) > 25

    def test_an_error_of_ours_must_name_the_file(self) -> None:
        def refuse(_data: bytes) -> None:
            raise DataError("x.json must be JSON")

        assert execute(Reader([], refuse, file="x.json"), b"") is None
        crash = execute(Reader([], refuse, file="other.json"), b"")
        assert crash is not None
        assert crash.problem.startswith("no file name")

    def test_any_other_error_is_a_crash(self) -> None:
        crash = execute(Reader([], lambda data: data.decode()), b"\xff")
        assert crash is not None
        assert crash.problem.startswith("UnicodeDecodeError")

    def test_what_takes_too_long_is_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.fuzzing.campaign.MAX_SECONDS", 0.05)

        def read(_data: bytes) -> None:
            end = time.process_time() + 20
            while time.process_time() < end:
                pass

        crash = execute(Reader([], read), b"")
        assert crash is not None
        assert crash.problem.startswith("TooSlow")

    def test_a_guided_campaign_ends_when_it_is_told_to(self) -> None:
        seen: list[bytes] = []
        campaign = Campaign(Reader([b"[]"], lambda data: seen.append(data), mutate_json), 0, guided=True)
        campaign.run(lambda executions: executions < 30)
        assert campaign.executions == len(seen) == 30


def zip_with_entry(path: Path, *, offset: bytes, size: bytes) -> Path:
    """A log whose directory has another place and size for its member."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", "{}")
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\1\2")
    data[entry + 20 : entry + 24], data[entry + 42 : entry + 46] = size, offset
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("offset", "size"), [(b"\0\0\0\0", b"\xfe\xff\xff\xff"), (b"\xfe\xff\xff\x7f", b"\2\0\0\0")])
def test_a_zip_entry_that_leads_outside_is_refused(tmp_path: Path, offset: bytes, size: bytes) -> None:
    path = zip_with_entry(tmp_path / "log.eval", offset=offset, size=size)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"log\.eval: header\.json cannot be read"):
            load_importer("inspect").read(path)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_an_archive_with_bytes_cut_out_before_its_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("samples/1.json", "{}" * 50)
        archive.writestr("header.json", "{}")
    path.write_bytes(path.read_bytes()[60:])  # Places are counted from the end, so that the first is below 0.
    with pytest.raises(DataError, match=r"log\.eval"):
        load_importer("inspect").read(path)


@pytest.mark.parametrize("format", ["pydantic-evals", "promptfoo", "lm-eval"])
def test_a_score_whose_name_is_empty_is_imported(format: str, tmp_path: Path) -> None:
    make, write = FORMATS[format]
    document = make()
    if format == "pydantic-evals":
        document["cases"][0]["scores"] = {"": {"value": 0.5}}
    elif format == "promptfoo":
        document["results"]["results"][0]["namedScores"] = {"": 0.5}
    else:
        document["samples"][0].update({"metrics": [""], "": 0.5})
    import_file(format, write(document, tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cases: [{inputs: 2026-13-45}]", "month must be in 1..12"),
        ("cases: [{inputs: 0000-01-01}]", "year (0 is out of range|must be in 1..9999)"),
        ("cases: " + "1" * 5000, "at most 308 digits"),
        ("cases: [" + "1:" * 20_000 + "1]", "at most 308 digits"),
        ("cases: [!!bool x]", "KeyError"),
        ("cases: [!!int '']", "not YAML"),
        ("cases: [!!timestamp x]", "not YAML"),
        ("cases: [{inputs: 1}]\ncases: [{inputs: 1}, {inputs: 2}, 3]", "must be an object"),
        ("cases: " + "[" * 50_000 + "]" * 50_000, "more than 200 levels"),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 260)), "more than 200 levels"),
    ],
)  # fmt: skip
def test_odd_yaml_is_refused_at_once_with_its_file(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(DatasetError, match=rf"cases\.yaml.*{problem}"):
        Dataset.load(path, format="pydantic-evals")
    assert time.process_time() - started < 1.0


SETTINGS = [
    "concurrency = inf",
    f"max-error-share = {'9' * 400}",
    f"store = {'9' * 5000}",
    f"suites = {'[' * 900}{']' * 900}",
]


@pytest.mark.parametrize("line", SETTINGS)
def test_odd_settings_are_refused_with_their_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.fairtrial]\n{line}\n")
    with pytest.raises(UserError, match=r"pyproject\.toml"):
        load_settings(tmp_path, {})


@pytest.mark.parametrize("text", ["tool = 1 # [tool.fairtrial", "[tool]\nfairtrial = 1 # [tool.fairtrial"])
def test_settings_that_are_no_table_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=r"pyproject\.toml: \[tool.fairtrial\] must be a table"):
        load_settings(tmp_path, {})


@pytest.mark.parametrize(
    "line",
    [
        "alpha = 'x'",
        "slices = 1",
        "slices = [1]",
        "unknown = 1",
        f"alpha = {'[' * 900}{']' * 900}",
        f"floors = {{value = {'9' * 400}}}",
    ],
)
def test_odd_gate_rules_and_plans_are_refused_with_their_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(f"[gate]\n{line}\n[plan]\n{line}\n")
    for load in (GateRules.load, AnalysisPlan.load):
        with pytest.raises(ConfigurationError, match=r"rules\.toml"):
            load(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.csv", b"id,label\nq01,\xff\n"),
        ("labels.csv", b"id,label\nq01,\"" + b"x" * 200_000 + b"\"\n"),
        ("labels.jsonl", b'{"id": "q01", "label": true, "experiment": "baseline", "repeat": [1]}\n'),
        ("labels.jsonl", b'{"id": "q01", "label": true, "experiment": "baseline", "repeat": 1e999}\n'),
        ("labels.jsonl", b"\xff\n"),
    ],
)  # fmt: skip
def test_odd_labels_are_refused_with_their_file(tmp_path: Path, name: str, content: bytes) -> None:
    store = small_store(tmp_path / "runs.db")
    report = EvalReport(store, store.get_run("support-run-1"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read_labels(tmp_path / name, report.parts)
    store.close()


def test_a_prompt_that_is_not_utf_8_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"prompt\.txt must be UTF-8"):
        _template(str(tmp_path / "prompt.txt"))


CELLS = {
    "meta.value": "UPDATE meta SET value = x'33'",
    "meta.value of 5000 digits": f"UPDATE meta SET value = '{'9' * 5000}'",
    "runs.finished_at": "UPDATE runs SET finished_at = 'soon'",
    "runs.evaluator": "UPDATE runs SET evaluator = '\ufdd0nan'",
    "runs.dataset_size": "UPDATE runs SET dataset_size = 1.5",
    "results.value": "UPDATE results SET value = 'high' WHERE ordinal = 1",
    "results.metrics": "UPDATE results SET metrics = '{' WHERE ordinal = 1",
    "samples.input": "UPDATE samples SET input = x'00'",
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_saved_run_with_values_of_other_types_is_refused(tmp_path: Path, cell: str) -> None:
    store = small_store(tmp_path / "runs.db")
    save_run(store, "support-run-1", tmp_path / "saved.db")
    store.close()
    str(EvalReport.load(tmp_path / "saved.db"))
    connection = sqlite3.connect(tmp_path / "saved.db")
    assert connection.execute(CELLS[cell]).rowcount
    connection.commit()
    connection.close()
    with pytest.raises(StoreError):
        str(EvalReport.load(tmp_path / "saved.db"))


def test_a_column_file_that_lacks_an_array_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRTRIAL_CACHE_DIR", str(tmp_path / "cache"))
    store = small_store(tmp_path / "runs.db")
    run = store.get_run("support-run-1")
    assert column_file.write_columns(store, run)
    path = column_path(store.identity, run.run_id)
    data = path.read_bytes()
    magic, offset, length, _ = HEAD.unpack(data[: HEAD.size])
    text = json.dumps({**json.loads(data[offset : offset + length]), "samples": [3, 3]}).encode()
    path.write_bytes(HEAD.pack(magic, offset, len(text), zlib.crc32(text)) + data[HEAD.size : offset] + text)
    column_file.forget()
    found = column_file.open_columns(store, run)
    assert found is not None
    assert found.header.samples == [4, 4]
    store.close()
