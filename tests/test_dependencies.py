"""Every import is declared: a core install must not depend on packages that happen to be installed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from fairtrial.errors import Extra

ROOT = Path(__file__).resolve().parent.parent
# The names packages are imported by, where they differ from those they are installed by.
IMPORTED_AS = {
    "PyYAML": "yaml",
    "inspect-ai": "inspect_ai",
    "typing-extensions": "typing_extensions",
    "genai-prices": "genai_prices",
    "prometheus-client": "prometheus_client",
    "opentelemetry-proto": "opentelemetry",
    "markdown-it-py": "markdown_it",
    "math-verify": "math_verify",
    "rouge-score": "rouge_score",
}
# Brought along by a declared dependency, as a documented part of it.
PARTS = {
    "pydantic_core": "pydantic",
    "trio": "anyio",
    "referencing": "jsonschema",
    "yarl": "aiohttp",
    "google": "opentelemetry",
}
# Brought by whoever runs the suites of `fairtrial.testing` on a part of their own.
BROUGHT = {"pytest", "hypothesis"}
# Brought by whoever trains: `fairtrial.rl` installs no trainer.
TRAINERS = {"datasets", "openenv", "skyrl_gym", "torch", "transformers", "trl", "verifiers"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def declared(*extras: str) -> set[str]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    names = {re.match(r"[\w.-]+", line)[0] for line in lines}  # type: ignore[index]
    return {IMPORTED_AS.get(name, name) for name in names} | set(sys.stdlib_module_names) | {"fairtrial"}


def imported(folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return found


def test_what_tests_read_is_part_of_the_source_distribution() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'\bROOT / "([\w.-]+)"', text)} - {".mypy_cache"}
    read |= {"examples"}  # Run by tests that put its path together.
    assert "scripts" in read
    assert sorted(read - set(build["include"]) - {"pyproject.toml"}) == []  # That one is always in it.


def test_type_checkers_see_only_names_that_exist() -> None:
    """A module's `__getattr__` would tell them that every name does."""
    for path in sorted((ROOT / "src").rglob("__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert "__getattr__" not in top, path


def test_everything_imported_is_declared() -> None:
    known = declared(*EXTRAS) | BROUGHT | TRAINERS
    strangers = {
        name: place for name, place in imported("src").items() if name not in known and PARTS.get(name, "") not in known
    }
    assert strangers == {}


@pytest.mark.parametrize("folder", ["viewer", "cli", "stats", "reports/render"])
def test_the_default_installation_has_what_viewer_and_commands_import(folder: str) -> None:
    """What only some commands need is imported in `try`, or by the parts they call."""
    optional = {"redis", "botocore", "psycopg"}  # Of `doctor`, which checks these servers.
    assert imported(f"src/fairtrial/{folder}").keys() - declared() <= optional


def test_errors_name_the_extras_of_the_project() -> None:
    assert {*get_args(Extra.__value__), "all"} == EXTRAS.keys()
    assert len(EXTRAS) == 10
