"""`export --format bundle` and `import` of it: what another machine can verify, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairtrial import EvalReport, open_store
from fairtrial._version import __version__
from fairtrial.reports import bundle as bundles
from fairtrial.store import schema
from fairtrial.store.portable import load_run
from tests.cli.conftest import TWO, Cli

NAMES = ("manifest.json", "README.txt", "figures.json", "provenance.json", "run.db")
LEAKY = (
    TWO.replace("that is too hard", "the reader wrote marmalade")
    .replace("return number *", 'ctx.session.record(ChatMessage("user", "marmalade"))\n    return number *')
    .replace("import Dataset", "import ChatMessage, Dataset")
    .replace('params={"factor": 3}', 'params={"breaks_at": 3}')
)


made: dict[str, bytes] = {}


@pytest.fixture
def bundle(cli: Cli, place: Path) -> Path:
    """A bundle in a folder with the store of its author, which is not the one that commands use there."""
    path, store = place / "doubles-1.bundle.zip", place / "author" / "runs.db"
    if not made:
        Path("evals.py").write_text(TWO)
        assert cli("run", "evals.py", "--quiet", "--store", "runs.db").code == 0
        done = cli("export", "doubles", "--format", "bundle", "--json", "--store", "runs.db")
        assert done.code == 0, done.err
        assert done.json["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        connection = sqlite3.connect("runs.db")
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.close()
        made.update(bundle=path.read_bytes(), store=Path("runs.db").read_bytes())
    store.parent.mkdir()
    path.write_bytes(made["bundle"])
    store.write_bytes(made["store"])
    return path


def read(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path: Path, parts: dict[str, bytes], *, manifest: bool = True, **changes: Any) -> None:
    """Write a bundle again; with a manifest that fits its parts, unless it is to be as it was."""
    if manifest:
        tree = json.loads(parts["manifest.json"]) | changes
        tree["parts"] = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for name, data in parts.items() if name != "manifest.json"
        }  # fmt: skip
        parts = parts | {"manifest.json": json.dumps(tree).encode()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def edited(parts: dict[str, bytes], place: Path, sql: str) -> dict[str, bytes]:
    file = place / "edited.db"
    file.write_bytes(parts["run.db"])
    connection = sqlite3.connect(file)
    assert connection.execute(sql).rowcount
    connection.commit()
    connection.close()
    return parts | {"run.db": file.read_bytes()}


def test_another_machine_recomputes_every_figure(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another process, working folder, home and cache; the author's store is gone."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRTRIAL", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-m", "fairtrial.cli", "import", str(bundle), "--verify", "--json"],
        cwd=elsewhere, env={**environment, "HOME": str(elsewhere)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check = json.loads(done.stdout)
    assert (check["matches"], check["differences"], check["trials"], check["samples_match"]) == (True, [], 8, True)
    assert check["figures"] > 200
    assert check["sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert [path for path in elsewhere.rglob("*") if path.is_file()] == []  # Nothing is stored, nothing is left.


def test_a_bundle_has_the_figures_of_the_screen_and_what_the_run_was_made_of(bundle: Path, cli: Cli) -> None:
    parts = read(bundle)
    assert tuple(parts) == NAMES
    figures, provenance = json.loads(parts["figures.json"]), json.loads(parts["provenance.json"])
    words = ("--store", "author/runs.db", "--json")
    assert figures == {
        "report": cli("show", "doubles", *words).json,
        "comparison": cli("compare", "doubles", *words).json,
    }
    assert provenance["dataset"]["samples"] == 4
    assert provenance["experiments"] == {"plain": {}, "triple": {"factor": 3}}
    assert provenance["packages"]["fairtrial"] == __version__
    assert provenance["settings"]["seed"] == 0
    assert "evals.py" in provenance["code"]["parts"]


def test_the_same_run_makes_the_same_bytes(bundle: Path, cli: Cli) -> None:
    words = ("--store", "author/runs.db", "--format", "bundle", "-o", "again.zip")
    assert cli("export", "doubles", *words).code == 0
    assert Path("again.zip").read_bytes() == bundle.read_bytes()


def test_the_screen_says_what_was_verified(bundle: Path, cli: Cli) -> None:
    done = cli("import", str(bundle), "--verify")
    assert done.code == 0
    assert "samples     4 of 4 have the fingerprint of dataset numbers" in done.out
    assert "recomputed from 8 trials match" in done.out
    assert hashlib.sha256(bundle.read_bytes()).hexdigest() in done.out
    assert not Path(".fairtrial").exists()
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_verified_bundle_is_imported_once_and_never_resumed(bundle: Path, cli: Cli) -> None:
    assert "stored; the report" in cli("import", str(bundle)).out
    assert "this store has it already" in cli("import", str(bundle)).out
    store = open_store()
    (run,) = store.runs()
    assert (run.imported, run.status, run.name) == (True, "finished", "doubles@1")
    report = EvalReport(store, run)
    assert report.total == 8
    wanted = json.loads(read(bundle)["figures.json"])["report"]["experiments"]
    assert json.loads(json.dumps(report.to_json()["experiments"])) == wanted
    store.close()


def test_an_import_that_was_interrupted_is_done_again(bundle: Path, cli: Cli) -> None:
    cli("import", str(bundle))
    with sqlite3.connect(".fairtrial/runs.db") as connection:
        connection.execute("UPDATE runs SET status = 'running', finished_at = NULL")
        connection.execute("DELETE FROM results WHERE ordinal > 2")
    connection.close()
    assert cli("import", str(bundle), "--json").json["state"] == "imported"
    store = open_store()
    assert EvalReport(store, store.runs()[0]).total == 8
    store.close()


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_changed_part_is_refused_by_name(bundle: Path, cli: Cli, name: str) -> None:
    parts = read(bundle)
    write(bundle, parts | {name: parts[name].replace(b"doubles", b"troubles", 1)}, manifest=False)
    done = cli("import", str(bundle))
    assert (done.code, done.out) == (2, "")
    assert f"was changed: {name} does not have the SHA-256 of the manifest" in done.err
    assert not Path(".fairtrial").exists()


@pytest.mark.parametrize(
    ("part", "old", "new", "said"),
    [
        ("figures.json", b'"passed": 3', b'"passed": 4', "experiments[plain].trials.passed: published 4, recomputed 3"),
        ("figures.json", b'"value": 0.75', b'"value": 0.7500001', "published 0.7500001, recomputed 0.75"),
        ("provenance.json", b'"seed": 0', b'"seed": 7', "settings.seed: published 7, recomputed 0"),
        ("provenance.json", b'"factor": 3', b'"factor": 2', "experiments.triple.factor: published 2, recomputed 3"),
    ],
)
def test_a_false_figure_is_found_although_the_manifest_was_made_to_fit(
    bundle: Path, cli: Cli, part: str, old: bytes, new: bytes, said: str
) -> None:
    parts = read(bundle)
    assert old in parts[part]
    write(bundle, parts | {part: parts[part].replace(old, new, 1)})
    done = cli("import", str(bundle))
    assert done.code == 1
    assert said in " ".join(done.out.split())
    assert "Nothing was stored" in done.out
    assert not Path(".fairtrial").exists()


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("UPDATE results SET passed = 1 - passed WHERE ordinal = 0", "trials.passed: published 3, recomputed 2"),
        ("DELETE FROM results WHERE ordinal = 0", "trials.finished: published 4, recomputed 3"),
        ("""UPDATE samples SET input = '{"v":5}'""", "they do not have the fingerprint of dataset numbers"),
    ],
)
def test_changed_trials_and_samples_are_found_although_the_manifest_was_made_to_fit(
    bundle: Path, cli: Cli, place: Path, sql: str, said: str
) -> None:
    write(bundle, edited(read(bundle), place, sql))
    done = cli("import", str(bundle), "--verify")
    assert done.code == 1
    assert said in " ".join(done.out.split())


def test_a_false_figure_is_found_although_the_true_one_stands_elsewhere_under_its_name(bundle: Path, cli: Cli) -> None:
    parts = read(bundle)
    figures = json.loads(parts["figures.json"])
    plain = figures["report"]["experiments"][0]
    plain["trials"]["passed"] = 4
    plain["trials.passed"] = 3
    write(bundle, parts | {"figures.json": json.dumps(figures).encode()})
    done = cli("import", str(bundle), "--verify")
    assert done.code == 1
    assert "experiments[plain].trials.passed: published 4, recomputed 3" in " ".join(done.out.split())
    twice = parts["figures.json"].replace(b'"passed": 3', b'"passed": 4, "passed": 3', 1)
    write(bundle, parts | {"figures.json": twice})
    done = cli("import", str(bundle), "--verify")
    assert done.code == 2
    assert "figures.json cannot be read: it has 'passed' twice in one object" in " ".join(done.err.split())


def test_samples_that_are_said_to_be_left_out_are_compared_if_they_are_there(
    bundle: Path, cli: Cli, place: Path
) -> None:
    changed = edited(read(bundle), place, """UPDATE samples SET input = '{"v":5}'""")
    write(bundle, changed, content=False)
    done = cli("import", str(bundle), "--verify")
    assert done.code == 1
    assert "they do not have the fingerprint of dataset numbers" in " ".join(done.out.split())


@pytest.mark.parametrize(
    "sql", ["UPDATE results SET ordinal = 1000000000 WHERE ordinal = 0", "UPDATE runs SET created_at = 9e999"]
)
def test_a_store_that_contradicts_itself_is_no_failure_of_the_program(
    bundle: Path, cli: Cli, place: Path, sql: str
) -> None:
    write(bundle, edited(read(bundle), place, sql))
    done = cli("import", str(bundle), "--verify")
    assert done.code == 2
    assert "the run in it contradicts itself" in " ".join(done.err.split())


def test_a_run_that_did_not_reach_all_samples_is_verified(bundle: Path, cli: Cli, place: Path) -> None:
    connection = sqlite3.connect("author/runs.db")
    connection.execute("DELETE FROM results WHERE ordinal >= 6")
    connection.execute("DELETE FROM samples WHERE ordinal = 3")
    connection.execute("UPDATE runs SET status = 'interrupted', revision = revision + 1")
    connection.commit()
    connection.close()
    assert cli("export", "doubles", "--format", "bundle", "-o", "some.zip", "--store", "author/runs.db").code == 0
    done = cli("import", "some.zip", "--verify", "--json")
    assert (done.code, done.json["samples_match"], done.json["differences"]) == (0, None, [])
    some = Path("some.zip")
    write(some, edited(read(some), place, """UPDATE samples SET input = '{"v":5}'"""))
    done = cli("import", "some.zip", "--verify", "--json")
    assert done.code == 1
    assert "provenance.json: samples.digest" in [one["name"] for one in done.json["differences"]]


@pytest.mark.parametrize("models", [[], "gpt", 1, {"plain": 3}])
def test_odd_models_of_a_bundle_without_content_are_no_failure_of_the_program(
    bundle: Path, cli: Cli, models: Any
) -> None:
    parts = read(bundle)
    provenance = json.loads(parts["provenance.json"]) | {"models": models}
    write(bundle, parts | {"provenance.json": json.dumps(provenance).encode()}, content=False)
    assert cli("import", str(bundle), "--verify").code in (0, 1)


def rewritten(path: Path, change: Callable[[zipfile.ZipFile, dict[str, bytes]], None]) -> None:
    parts = read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
        change(archive, parts)


def add(name: str, data: bytes = b"import os") -> Callable[[zipfile.ZipFile, dict[str, bytes]], None]:
    def change(archive: zipfile.ZipFile, parts: dict[str, bytes]) -> None:
        with pytest.warns(UserWarning, match="Duplicate") if name in parts else open(os.devnull):
            archive.writestr(name, data)

    return change


def link(archive: zipfile.ZipFile, _parts: dict[str, bytes]) -> None:
    info = archive.getinfo("README.txt")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add("../evil.py"), "'../evil.py' leads out of the archive"),
        (add("/etc/evil"), "'/etc/evil' leads out of the archive"),
        (add("C:\\evil"), "leads out of the archive"),
        (add("evals.py"), "'evals.py' is no part of a bundle"),
        (add("folder/"), "'folder/' is no part of a bundle"),
        (add("figures.json"), "it has two parts named 'figures.json'"),
        (link, "'README.txt' is a link or another special file"),
    ],
)
def test_an_archive_with_other_members_is_refused(bundle: Path, cli: Cli, place: Path, change: Any, said: str) -> None:
    rewritten(bundle, change)
    before = sorted(place.rglob("*"))
    done = cli("import", str(bundle), "--verify")
    assert (done.code, done.out) == (2, "")
    assert said in " ".join(done.err.split())
    assert sorted(place.rglob("*")) == before


def test_an_archive_that_lacks_a_part_is_refused(bundle: Path, cli: Cli) -> None:
    write(bundle, {name: data for name, data in read(bundle).items() if name != "run.db"}, manifest=False)
    assert "it has no run.db" in cli("import", str(bundle), "--verify").err


def test_a_zip_bomb_is_refused_before_it_is_unpacked(bundle: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bundle, read(bundle) | {"run.db": bytes(64 << 20)})
    assert bundle.stat().st_size < 1 << 20
    done = cli("import", str(bundle), "--verify")
    assert done.code == 2
    assert "run.db must have at most" in done.err
    assert "FAIRTRIAL_FILE_LIMITS" in done.err
    monkeypatch.setattr(bundles, "_TEXT_BYTES", 100)
    assert "manifest.json must have at most 100 bytes" in cli("import", str(bundle), "--verify").err


def test_sizes_in_the_directory_of_the_archive_are_not_believed(bundle: Path, cli: Cli) -> None:
    """A member that expands to more than it says."""
    data = bytearray(bundle.read_bytes())
    at = data.rindex(b"PK\x01\x02")  # Of the last member, the store.
    (size,) = struct.unpack_from("<I", data, at + 24)
    struct.pack_into("<I", data, at + 24, size // 2 if size != 0xFFFFFFFF else 4096)
    bundle.write_bytes(data)
    done = cli("import", str(bundle), "--verify")
    assert (done.code, done.out) == (2, "")


def test_damaged_and_foreign_files_are_refused(bundle: Path, cli: Cli, place: Path) -> None:
    whole = bundle.read_bytes()
    for content in (
        whole[: len(whole) // 2],
        whole[:-4],
        b"",
        b"not a zip file",
        whole[:3000] + b"\0" * 99 + whole[3099:],
    ):
        bundle.write_bytes(content)
        done = cli("import", str(bundle), "--verify")
        assert (done.code, done.out) == (2, ""), content[:20]
        assert "was it copied completely?" in done.err
    assert "bundles are verified one at a time" in cli("import", str(bundle), str(bundle), "--verify").err
    assert "must be a file" in cli("import", str(place), "--verify").err
    parts = {"manifest.json": b"[]", **dict.fromkeys(NAMES[1:], b"{}")}
    write(bundle, parts, manifest=False)
    assert "manifest.json must be a JSON object" in cli("import", str(bundle)).err


def test_a_newer_format_is_refused_with_the_version_that_reads_it(bundle: Path, cli: Cli) -> None:
    write(bundle, read(bundle), format="fairtrial.bundle/2", fairtrial="9.1.0")
    done = cli("import", str(bundle))
    assert done.code == 2
    assert "has the format fairtrial.bundle/2 of Fairtrial 9.1.0" in " ".join(done.err.split())
    assert "install that version" in done.err


def test_another_version_verifies_the_figures_that_both_have(bundle: Path, cli: Cli) -> None:
    parts = read(bundle)
    figures = json.loads(parts["figures.json"])
    del figures["report"]["experiments"][0]["refused_calls"]  # As if this version had added it.
    older = parts | {"figures.json": json.dumps(figures).encode()}
    write(bundle, older, fairtrial="0.0.9")
    done = cli("import", str(bundle), "--verify")
    assert done.code == 0
    assert f"not in it   1 value that Fairtrial {__version__} computes" in done.out
    write(bundle, older)  # This very version does not forget figures.
    assert "published nothing, recomputed 0" in cli("import", str(bundle), "--verify").out
    figures["report"]["experiments"][0]["later"] = 1.5
    write(bundle, parts | {"figures.json": json.dumps(figures).encode()}, fairtrial="9.0.0")
    done = cli("import", str(bundle), "--verify")
    assert done.code == 1
    assert "later: published 1.5, recomputed nothing" in " ".join(done.out.split())
    assert f"This is Fairtrial {__version__}, which may compute some figures in another way." in " ".join(
        done.out.split()
    )


@pytest.mark.parametrize("kept", ["x", "n", "interval", "experiment"])
def test_no_version_leaves_out_the_main_figures(bundle: Path, cli: Cli, kept: str) -> None:
    parts = read(bundle)
    figures = json.loads(parts["figures.json"])
    first = figures["report"]["experiments"][0]
    (rate,) = (one for one in first["estimates"] if one["name"] == "pass_rate")
    if kept == "x":
        figures = {"x": {}}
    elif kept == "experiment":
        first["estimates"].remove(rate)
    else:
        for name in ("low", "high") if kept == "n" else ("n",):
            del rate[name]
    write(bundle, parts | {"figures.json": json.dumps(figures).encode()}, fairtrial="0.0.9")
    done = cli("import", str(bundle), "--verify", "--json")
    assert (done.code, done.json["matches"]) == (1, False)
    lacking = [one["name"] for one in done.json["differences"] if "published" not in one]
    assert len(lacking) == {"x": 8, "n": 2, "interval": 1, "experiment": 4}[kept]
    assert all("].estimates[pass_rate]." in name for name in lacking)
    assert "figures     -" not in cli("import", str(bundle), "--verify").out


def test_a_store_of_a_later_schema_is_refused(bundle: Path, cli: Cli, place: Path) -> None:
    write(bundle, edited(read(bundle), place, "UPDATE meta SET value = '99' WHERE name = 'schema'"))
    done = cli("import", str(bundle), "--verify")
    assert done.code == 2
    assert "newer" in done.err


def test_a_store_of_an_earlier_schema_is_verified(
    bundle: Path, cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schema.ADDED, schema.VERSION, (schema.results.c.refused_calls,))
    older = edited(read(bundle), place, f"UPDATE meta SET value = '{schema.VERSION - 1}' WHERE name = 'schema'")
    write(bundle, edited(older, place, "ALTER TABLE results DROP COLUMN refused_calls"))
    assert cli("import", str(bundle), "--verify", "--json").json["differences"] == []


def test_a_bundle_without_content_has_numbers_and_no_text_of_trials(cli: Cli, place: Path) -> None:
    Path("evals.py").write_text(LEAKY)
    cli("run", "evals.py", "--quiet")
    assert "needs --format bundle" in cli("export", "doubles", "-f", "csv", "--without-content").err
    for name, words in (("whole.zip", ()), ("bare.zip", ("--without-content",))):
        assert cli("export", "doubles", "--format", "bundle", "-o", name, *words).code == 0
    assert b"marmalade" in read(Path("whole.zip"))["figures.json"]
    bare = read(Path("bare.zip"))
    assert not [name for name, data in bare.items() if b"marmalade" in data]
    Path("bare.db").write_bytes(bare["run.db"])
    store, run_id = load_run("bare.db")
    results = list(store.results(run_id, snapshots=True))
    assert {result.output for result in results} == {None}
    assert {result.snapshot for result in results} == {None}
    assert {result.error for result in results} == {None, "ValueError"}
    assert {result.score.reason for result in results if result.score} == {""}
    (_, first), *_ = store.samples(run_id)
    assert (first.input, first.has_expected, first.metadata["level"]) == (None, False, "easy")
    store.close()
    done = cli("import", "bare.zip", "--verify")
    assert done.code == 0
    assert "samples     left out of the bundle" in done.out
    rates = [json.loads(read(Path(name))["figures.json"])["comparison"]["candidates"][0]["metrics"][0]
             for name in ("whole.zip", "bare.zip")]  # fmt: skip
    assert rates[0] == rates[1]


def test_nothing_in_a_bundle_is_imported_as_code(bundle: Path, cli: Cli) -> None:
    """The suite's file is beside the bundle, and has an effect when it is imported."""
    Path("evals.py").write_text("open('executed', 'w').close()\n" + TWO)
    sys.modules.pop("evals", None)
    assert cli("import", str(bundle)).code == 0
    assert not Path("executed").exists()
