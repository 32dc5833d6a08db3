"""No module imports itself indirectly, and no class name has two meanings.

`lint-imports` keeps the order of packages. This looks inside them, and at every import: also those in functions and
those for type checkers, which hide a circle and do not break it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Every module with all that it imports of ours, wherever the import stands."""
    paths = {module_name(path, root): path for path in (root / "fairtrial").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert not node.level, f"{module} imports relatively, which this test does not follow"
                within = [f"{node.module}.{alias.name}" for alias in node.names]
                imported.update(name if name in paths else node.module for name in within)
        graph[module] = imported & paths.keys() - {module}
    return graph


def class_definitions(root: Path) -> dict[str, list[str]]:
    """Every class name with the modules that define a class of that name, at any depth."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "fairtrial").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_name(path, root))
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of imports, the first of its modules also the last; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph(SOURCE)
    assert {"fairtrial", "fairtrial.base.backoff", "fairtrial.integrations.model_server.service"} <= graph.keys()
    assert circle(graph) == []


@pytest.mark.parametrize(
    "late",
    [
        "def f():\n    from fairtrial.reports.render import b",
        "if TYPE_CHECKING:\n    import fairtrial.reports.render.b",
    ],
)
def test_a_circle_that_is_closed_late_is_found(late: str, tmp_path: Path) -> None:
    folder = tmp_path / "fairtrial" / "render"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text(late)
    (folder / "b.py").write_text("from fairtrial.reports.render.a import f")
    found = circle(import_graph(tmp_path))
    assert set(found) == {"fairtrial.reports.render.a", "fairtrial.reports.render.b"}


def test_no_class_name_is_defined_twice() -> None:
    found = class_definitions(SOURCE)
    assert len(found) > 500
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
