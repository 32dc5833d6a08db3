"""What a suite is made of, so that a worker with other code refuses its requests.

Not every module that happens to be loaded: client and worker are different programs. What counts is the file the suite
was made in and what it imports, as far as that is the project's own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fairtrial.fleet.wire import suite_fingerprint
from fairtrial.runs.identity import code_hash, is_project_file

if TYPE_CHECKING:
    from fairtrial.runs.runner import RunRequest
    from fairtrial.suites.suite import EvalSuite


def fingerprint_of(suite: EvalSuite, request: RunRequest) -> str:
    """The fingerprint of a suite: its name, code, experiments, evaluator, and the settings that matter to a trial."""
    code = code_hash(suite.version, files=None if suite.version is not None else suite_files(suite))
    return suite_fingerprint(suite.name, code, request.experiments, request.scorer.name, request.config)


def suite_files(suite: EvalSuite) -> list[str]:
    """The project's files a suite is made of."""
    by_file: dict[str, ModuleType] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and is_project_file(file):
            by_file.setdefault(file, module)
    parts = (suite.task, suite.evaluator, suite.lifespan, suite.adapter, *(e.task for e in suite.experiments))
    waiting = [suite.home, *(file for part in parts for file in _files_of(part))]
    found: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file in found or file not in by_file:
            continue
        found.add(file)
        waiting.extend(_imported_by(by_file[file], file))
    return sorted(found)


def _files_of(part: Any) -> Iterator[str]:
    """Where a function or an object comes from."""
    for thing in (part, getattr(part, "func", None), getattr(part, "fn", None), getattr(part, "__wrapped__", None)):
        name = getattr(thing, "__module__", None) or getattr(type(thing), "__module__", None)
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if file:
            yield file


def _imported_by(module: ModuleType, file: str) -> Iterator[str]:
    """The files of the modules that are imported when this one is.

    Imports inside functions are left out: whether they have happened differs from process to process.
    """
    try:
        with open(file, encoding="utf-8") as text:
            tree = ast.parse(text.read())
    except (OSError, SyntaxError, ValueError):
        return
    package = getattr(module, "__package__", None) or ""
    for node in _statements(tree):
        for name in _names(node, package):
            imported = getattr(sys.modules.get(name), "__file__", None)
            if imported:
                yield imported


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _statements(node)


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            yield from (".".join(parts[: length + 1]) for length in range(len(parts)))
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            steps = package.split(".") if package else []
            above = steps[: len(steps) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        if base:
            parts = base.split(".")
            yield from (".".join(parts[: length + 1]) for length in range(len(parts)))
        yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
