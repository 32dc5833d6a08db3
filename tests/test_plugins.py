"""A package of others adds an evaluator, a provider, a store and an importer by its own pyproject.toml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fairtrial.base import plugins
from fairtrial.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, folder, ROOT / "examples" / "plugin"], check=True, timeout=120, env=environment)
    return folder


def fairtrial(installed: Path, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fairtrial.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_names_of_another_package_work_wherever_ours_do(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    (tmp_path / "ask.md").write_text("Repeat: ${text}")
    (tmp_path / "data.jsonl").write_text('{"id": "a", "input": {"text": "quiet"}}\n')
    adhoc = ["ask.md", "--dataset", "data.jsonl", "--evaluator", "no_shouting", "--store", "team://search"]
    ran = fairtrial(installed, tmp_path, "try", *adhoc, "--model", "echo:soft", "--model", "echo:loud", "--json")
    rates = {one["name"]: one["estimates"][0]["value"] for one in json.loads(ran)["runs"][0]["report"]["experiments"]}
    assert rates == {"echo-soft": 1.0, "echo-loud": 0.0}
    assert (tmp_path / "stores" / "search.db").exists()
    (tmp_path / "ratings.survey.csv").write_text("question,answer,liked\nwho?,me,yes\nwhen?,now,no\n")
    imported = json.loads(
        fairtrial(installed, tmp_path, "import", "ratings.survey.csv", "--store", "team://search", "--json")
    )
    assert imported["suites"][0]["runs"][0]["state"] == "imported"
    shown = fairtrial(installed, tmp_path, "doctor", "--store", "team://search", "--json")
    listed = {check["name"]: check["detail"] for check in json.loads(shown)["checks"]}
    assert "survey (fairtrial-plugin-example 1.0)" in listed["importers"]
    assert listed["store"] == "a SqlStore opened by team"
    assert listed["stores"] == "team (fairtrial-plugin-example 1.0)"


def test_nothing_is_imported_before_it_is_named(installed: Path, tmp_path: Path) -> None:
    code = "from fairtrial.base.plugins import plugins; import sys; found = list(plugins())\n"
    code += "print(len(found), [name for name in sys.modules if 'plugin_example' in name or 'integrations' in name])"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    number, _, modules = done.stdout.partition(" ")
    assert int(number) > 10
    assert modules.strip() == "[]"


def found(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint("mine", value, "fairtrial.stores") for value in values]
    monkeypatch.setattr(plugins, "_installed", lambda group: {"mine": points})


def test_a_name_that_two_packages_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "one:open", "two:open")
    with pytest.raises(ConfigurationError, match=r"one:open and two:open both have 'mine' among fairtrial\.stores"):
        plugins.find_plugin("stores", "mine")


@pytest.mark.parametrize("value", ["no_such_module:open", "json:no_such_name"])
def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    found(monkeypatch, value)
    with pytest.raises(ConfigurationError, match=r"'mine' of .* \(fairtrial.stores\) cannot be imported: "):
        plugins.find_plugin("stores", "mine")


def test_an_unknown_name_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "json:loads")
    with pytest.raises(ConfigurationError, match=r"the store must be one of mine \(got 'mime'\) did you mean mine\?"):
        plugins.load_plugin("stores", "mime", "the store")
    assert plugins.load_plugin("stores", "mine", "the store") is json.loads
