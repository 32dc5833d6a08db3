"""The identity of the code behind a suite: the files it is made of, and functions that are in no file."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fairtrial.codec import digest
from fairtrial.runs.callables import describe


def code_version(version: str | None, home: str, *, tasks: Sequence[Any], others: Sequence[Any] = ()) -> str:
    """Return the identity of the code of a suite.

    Not every module that happens to be loaded: client and worker of a fleet are different programs. What counts is the
    file the suite was made in and what it imports, as far as that is the project's own, and how the tasks are composed.

    Args:
        version: The version that the user keeps count of, in place of all that.
        home: The file the suite was made in.
        tasks: The functions under test.
        others: Whatever else the suite calls.
    """
    if version is not None:
        return f"version:{version}"
    files = code_hash(None, files=project_files(home, [*tasks, *others]), home=home)
    return digest([files, [describe(task, mutable=False) for task in tasks]])[:32]


def project_files(home: str, parts: Iterable[Any] = ()) -> list[str]:
    """Return the project's files that a suite is made of."""
    prefixes = _prefixes(None, home)
    by_file: dict[str, ModuleType] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and _relative(file, prefixes) is not None:
            by_file.setdefault(file, module)
    waiting = [home, *(file for part in parts for file in _files_of(part))]
    found: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file in found or file not in by_file:
            continue
        found.add(file)
        waiting.extend(_imported_by(by_file[file], file))
    return sorted(found)


def code_hash(
    version: str | None, root: Path | None = None, *, files: Iterable[str] | None = None, home: str = ""
) -> str:
    """The identity of the project's own code: every loaded module under the current folder, or a given version.

    Installed packages are left out: a change there shows in a lock file, not here.

    Args:
        version: The identity, where somebody keeps count.
        root: The project's folder.
        files: The modules that matter, in place of all that are loaded.
        home: The file of a suite that may be outside the current folder.
    """
    if version is not None:
        return f"version:{version}"
    prefixes = _prefixes(root, home)
    hashes: dict[str, str] = {}
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in loaded if files is None else files:
        relative = _relative(file, prefixes)
        if file is None or relative is None:
            continue
        try:
            hashes[relative] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError:
            continue  # A module whose file is gone says nothing about the code that is left.
    content = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _prefixes(root: Path | None, home: str) -> tuple[str, ...]:
    """Return the folders whose files are the project's own: the current one, and that of the suite."""
    folders = [os.path.realpath(root or Path.cwd()), *([os.path.dirname(os.path.realpath(home))] if home else [])]
    return tuple(os.path.join(folder, "") for folder in folders)


def _relative(file: str | None, prefixes: Sequence[str]) -> str | None:
    """Return the path of a module of the project's own within it."""
    if not file or not file.endswith(".py"):
        return None
    path = os.path.abspath(file)
    prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
    if prefix is None:
        return None
    relative = path[len(prefix) :]
    installed = any(part in ("site-packages", "dist-packages") or part[0] == "." for part in relative.split(os.sep))
    return None if installed else relative


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
        source = Path(file).read_bytes()
    except OSError:
        return
    for name in _imports(source, getattr(module, "__package__", None) or ""):
        imported = getattr(sys.modules.get(name), "__file__", None)
        if imported:
            yield imported


@lru_cache(maxsize=1024)
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Return the names of the modules that a file imports: parsing it for each run would cost more than a small run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    return tuple(dict.fromkeys(name for node in _statements(tree) for name in _names(node, package)))


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
