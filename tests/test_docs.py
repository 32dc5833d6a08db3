"""Every Python snippet in the documentation runs, in order, and the documentation mentions everything there is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fairtrial

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")

FILES: dict[str, list[dict[str, Any]]] = {
    "tickets.jsonl": [
        {"id": "t1", "input": {"subject": "Where is my order?", "priority": 1}, "expected": "lookup"},
        {"id": "t2", "input": {"subject": "Cancel my plan", "priority": 2}, "expected": "cancel"},
    ],
    "benchmark.jsonl": [{"question": "2+2?", "answer": "Two and two. #### 4"}],
}


@pytest.fixture
def sample_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("sample_files")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    # A module of its own: the classes in a snippet need one that their annotations can be looked up in.
    module = ModuleType(f"snippets_of_{page.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for found in SNIPPET.finditer(text):
        line = text.count("\n", 0, found.start(1))
        exec(compile("\n" * line + found[1], str(page), "exec"), module.__dict__)
    assert text.count("```python") == len(SNIPPET.findall(text))


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_evaluator_is_documented() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs" / "how-to" / "evaluators.md").read_text(encoding="utf-8")))
    homes = {name: getattr(getattr(fairtrial, name), "__module__", "") for name in fairtrial.__all__}
    evaluators = {name for name, home in homes.items() if home.startswith("fairtrial.scoring") and name.islower()}
    assert len(evaluators) > 20
    assert evaluators <= words


def test_every_package_is_on_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "src" / "fairtrial").glob("*/__init__.py")]
    assert [name for name in packages if f"`{name}`" not in text] == []
