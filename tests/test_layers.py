"""No module imports itself indirectly, and no class name has two meanings.

`lint-imports` keeps the order of packages. This looks inside them, and at every import: also those in functions and
those for type checkers, which hide a circle and do not break it. Only within one folder may modules name each other's
types: the alternative is a protocol for each class that one of them uses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Every module with all that it imports of ours, except the types of modules in its own folder."""
    paths = {module_name(path, root): path for path in (root / "fairtrial").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        every = imported_modules(ast.walk(tree), paths)
        types = {node for test in ast.walk(tree) if is_for_types(test) for part in test.body for node in ast.walk(part)}
        others = imported_modules((node for node in ast.walk(tree) if node not in types), paths)
        graph[module] = {name for name in every if name in others or paths[name].parent != path.parent} - {module}
    return graph


def imported_modules(nodes: Iterable[ast.AST], paths: Mapping[str, Path]) -> set[str]:
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, "a relative import, which this test does not follow"
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            imported.update(name if name in paths else node.module for name in within)
    return imported & paths.keys()


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


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
    ("first", "late", "found"),
    [
        ("render/a", "def f():\n    from fairtrial.render import b", True),
        ("render/a", "if TYPE_CHECKING:\n    import fairtrial.render.b", False),
        ("render/a", "if TYPE_CHECKING:\n    pass\nelse:\n    import fairtrial.render.b", True),
        ("render/a", "if TYPE_CHECKING:\n    import fairtrial.render.b\nimport fairtrial.render.b", True),
        ("store/a", "if TYPE_CHECKING:\n    import fairtrial.render.b", True),
    ],
)
def test_a_circle_that_is_closed_late_is_found(first: str, late: str, found: bool, tmp_path: Path) -> None:
    for folder in ("render", "store"):
        (tmp_path / "fairtrial" / folder).mkdir(parents=True)
        (tmp_path / "fairtrial" / folder / "__init__.py").write_text("")
    module = f"fairtrial.{first.replace('/', '.')}"
    (tmp_path / "fairtrial" / f"{first}.py").write_text(late)
    (tmp_path / "fairtrial" / "render" / "b.py").write_text(f"from {module} import f")
    assert set(circle(import_graph(tmp_path))) == ({module, "fairtrial.render.b"} if found else set())


def test_no_class_name_is_defined_twice() -> None:
    found = class_definitions(SOURCE)
    assert len(found) > 500
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
