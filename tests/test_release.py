"""What a release is made of is checked, and the rehearsal says what failed. The rehearsal itself takes many minutes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest

from tests.scripts import ROOT, load_script

WHEEL = "fairtrial-0.1.0-py3-none-any.whl"


@pytest.fixture
def script() -> ModuleType:
    return load_script("release")


def metadata(description: str) -> bytes:
    fields = (
        "Metadata-Version: 2.4", "Name: fairtrial", "Version: 0.1.0", "Summary: s", "License-Expression: Apache-2.0",
        "License-File: LICENSE", "Project-URL: Source, https://example.com", "Classifier: Typing :: Typed",
        "Requires-Python: >=3.12", "Description-Content-Type: text/markdown",
    )  # fmt: skip
    return ("\n".join(fields) + f"\n\n{description}").encode()


def test_links_of_the_readme_lead_somewhere_on_an_index(script: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Any] = {"version": "0.1.0"}
    module.Readme(str(ROOT), {}).update(made)
    text = made["readme"]["text"]
    assert "](https://github.com/fairtrial/fairtrial/blob/v0.1.0/docs/README.md)" in text
    assert "![The report of a run in a terminal](https://raw.githubusercontent.com/" in text
    assert "](https://github.com/UKGovernmentBEIS/" in text
    assert script.metadata_problems(metadata(text)) == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        (b"License-Expression: Apache-2.0\n", b"", "no License-Expression"),
        (b"text/markdown", b"text/plain", "the description is not Markdown"),
        (b"[a](https://a)", b"[a](docs/a.md)", "docs/a.md leads nowhere on an index"),
        (b"Version: 0.1.0", b"Version: one", "version"),
        (b">=3.12", b"3.12 or newer", "requires-python"),
    ],
)
def test_metadata_that_an_index_refuses_or_shows_wrong_is_named(
    script: ModuleType, good: bytes, bad: bytes, problem: str
) -> None:
    right = metadata("[a](https://a)")
    assert script.metadata_problems(right) == []
    (found,) = script.metadata_problems(right.replace(good, bad))
    assert problem in found


def test_pip_finds_a_published_file_on_the_index_and_checks_its_hash(script: ModuleType, tmp_path: Path) -> None:
    dist, index = tmp_path / "dist", tmp_path / "index"
    dist.mkdir()
    (dist / WHEEL).write_bytes(b"a wheel")
    script.publish(dist, index)
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--isolated",
        "--no-deps",
        "--dest",
        str(tmp_path),
        "fairtrial",
    ]
    with script.served(index) as address:
        assert f"#sha256={hashlib.sha256(b'a wheel').hexdigest()}" in urlopen(f"{address}fairtrial/").read().decode()
        (index / "fairtrial" / WHEEL).write_bytes(b"another")
        tampered = subprocess.run([*download, "--index-url", address], capture_output=True, text=True, check=False)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in tampered.stderr


def test_notes_and_provenance_describe_the_files(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DIST", tmp_path)
    (tmp_path / "sbom.json").write_text("{}")
    script.write_provenance({WHEEL: "ab"})
    statement = json.loads((tmp_path / "provenance.json").read_text())
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == {
        WHEEL: "ab", "sbom.json": hashlib.sha256(b"{}").hexdigest()
    }  # fmt: skip
    (source,) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert set(source["digest"]) == {"gitCommit"}
    script.write_notes({WHEEL: "ab"})
    notes = (tmp_path / "notes.md").read_text()
    assert notes.startswith(f"# Fairtrial {script.code_version()}\n")
    assert "**Statistics**" in notes
    assert f"ab  {WHEEL}\n" in notes


def test_the_list_of_dependencies_has_the_hash_and_licence_of_each(script: ModuleType) -> None:
    item = {
        "metadata": {"name": "A_b", "version": "1", "license_expression": "MIT"},
        "download_info": {"archive_info": {"hashes": {"sha256": "ab"}}},
    }
    assert script.component(item) == {
        "type": "library", "name": "a-b", "version": "1", "purl": "pkg:pypi/a-b@1",
        "hashes": [{"alg": "SHA-256", "content": "ab"}], "licenses": [{"expression": "MIT"}],
    }  # fmt: skip


def test_every_extra_is_installed_alone_and_used(script: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(script.SMOKE) == set(project["optional-dependencies"]) - {"all"}


def test_a_step_that_fails_is_listed_and_the_others_go_on(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = script.Rehearsal(tmp_path, None)

    def fail() -> Any:
        return rehearsal.command(sys.executable, "-c", "print('so it is'); raise SystemExit(3)")

    monkeypatch.setattr(rehearsal, "clone", lambda tag: "abc")
    monkeypatch.setattr(rehearsal, "tools", lambda: None)
    monkeypatch.setattr(rehearsal, "build", fail)
    assert rehearsal.run() == 1
    printed = capsys.readouterr().out
    assert "build twice, metadata, SBOM, provenance, notes: FAILED: so it is" in printed
    assert printed.endswith("3 steps, 1 failed\n")
    monkeypatch.setattr(rehearsal, "build", lambda: "built")
    monkeypatch.setattr(rehearsal, "users", lambda: None)
    monkeypatch.setattr(script, "publish", lambda dist, index: index.mkdir())
    rehearsal.steps.clear()
    assert rehearsal.run() == 0


def test_the_readme_names_the_size_of_an_installation_once(script: ModuleType, tmp_path: Path) -> None:
    said = script.readme_megabytes((ROOT / "README.md").read_text(encoding="utf-8"))
    packages = tmp_path / "bin" / "lib" / "python3" / "site-packages"
    rehearsal = script.Rehearsal(tmp_path, None)
    rehearsal.source, rehearsal.python = ROOT, tmp_path / "bin" / "bin" / "python"
    for megabytes, right in ((said, True), (round(said * 1.04), True), (round(said * 1.2), False)):
        (packages / "scipy").mkdir(parents=True, exist_ok=True)
        with (packages / "scipy" / "all.so").open("wb") as file:
            file.truncate(megabytes * 1_000_000)
        if right:
            assert rehearsal.size().startswith(f"{megabytes} MB (scipy {megabytes}")
        else:
            with pytest.raises(AssertionError, match=f"{megabytes} MB, not {said}"):
                rehearsal.size()


def test_an_image_is_built_by_the_given_command(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = script.Rehearsal(tmp_path, "buildah build --isolation chroot")
    rehearsal.source = tmp_path
    typed: list[str] = []
    monkeypatch.setattr(rehearsal, "command", lambda *words: typed.extend(map(str, words)))
    assert rehearsal.image() == "built"
    assert typed[:6] == ["buildah", "build", "--isolation", "chroot", "-f", str(tmp_path / "deploy" / "Dockerfile")]
    assert typed[-1] == str(tmp_path)
