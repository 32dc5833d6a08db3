"""`fairtrial init --template`: every kind of project runs at once, without a key and without a network."""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from fairtrial import open_store
from tests.cli.conftest import Cli
from tests.doc_pages import unknown_in

# Trials of each experiment, and what the two experiments come to.
TEMPLATES: dict[str, tuple[dict[str, int], tuple[float, float]]] = {
    "agent": ({"scored": 39, "task_error": 1}, (0.75, 0.875)),
    "rag": ({"scored": 16}, (0.875, 0.875)),
    "classification": ({"scored": 40}, (0.625, 0.975)),
    "code": ({"scored": 24}, (0.625, 0.833)),
    "benchmark": ({"scored": 120}, (0.65, 0.942)),
    "judge": ({"scored": 24}, (0.0, 1.0)),
    "pairwise": ({"scored": 24}, (0.583, 1.0)),
    "mcp": ({"scored": 60}, (0.2, 0.95)),
}
# Each run of this one starts two servers, which import the SDK.
RUN = [pytest.param(name, marks=[pytest.mark.long] if name == "mcp" else []) for name in TEMPLATES]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: object, address: object, *rest: object) -> Any:
        raise OSError(f"the network is unreachable: {address}")

    monkeypatch.setattr(socket.socket, "connect", closed)
    monkeypatch.setattr(socket.socket, "connect_ex", closed)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.proves("R158")
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("template", RUN)
def test_a_template_runs_and_is_reported(template: str, cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cli("init", "project", "--template", template)
    assert made.code == 0, made.err
    monkeypatch.chdir(place / "project")
    assert cli("run").code == 0
    outcomes, rates = TEMPLATES[template]
    store = open_store()
    run = store.runs()[0]
    assert [part.outcomes for part in store.totals(run.run_id)] == [outcomes, outcomes]
    one, other = run.experiments
    report = cli("export", run.suite, "--format", "html", "--output", "report.html")
    assert report.code == 0, report.err
    page = Path("report.html").read_text(encoding="utf-8")
    assert one in page
    assert other in page
    facts = cli("show", run.suite, "--json").json
    assert facts["format"].startswith("fairtrial.")
    compared = cli("compare", f"{run.suite}:{one}", f"{run.suite}:{other}", "--json")
    assert compared.code == 0
    found = [float(part.passed) / sum(outcomes.values()) for part in store.totals(run.run_id)]
    assert found == pytest.approx(rates, abs=0.02)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_says_in_ten_lines_what_to_run_and_what_to_change(template: str, cli: Cli, place: Path) -> None:
    cli("init", "project", "--template", template)
    folder = place / "project"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 10
    assert "fairtrial run" in text
    assert not unknown_in(re.findall(r"`(fairtrial compare [^`]+)`", text)[0])
    named = set(re.findall(r"`([\w.]+\.(?:py|jsonl|csv))`", text))
    assert named >= {path.name for path in folder.glob("[a-z]*.*") if path.name != "pyproject.toml"}
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    lines = re.findall(r"`(\w+) = ", text) or re.findall(r"lines of `(\w+)`", text)
    assert lines
    assert all(re.search(rf"^{name} = ", code, re.MULTILINE) for name in lines)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_uses_public_names_only(template: str, cli: Cli, place: Path) -> None:
    import fairtrial

    cli("init", "project", "--template", template)
    for path in (place / "project").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "fairtrial":
                assert {alias.name for alias in node.names} <= set(fairtrial.__all__)


def test_an_unknown_template_is_refused_with_those_that_exist(cli: Cli, place: Path) -> None:
    done = cli("init", "project", "--template", "chat")
    assert done.code == 2
    assert all(name in done.err for name in TEMPLATES)
    assert not (place / "project").exists()
