"""The code version of a suite: a hash of its files, and of functions that are not in files."""

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
    """Return the code version of a suite.

    It covers the file that defines the suite, the project's own modules that it imports, and the composition of the
    tasks. It does not cover every loaded module, because client and worker of a fleet are different programs.

    Args:
        version: A version maintained by the user, which replaces the hash.
        home: The file that defines the suite.
        tasks: The tasks.
        others: Other callables of the suite.
    """
    if version is not None:
        return f"version:{version}"
    files = code_hash(None, files=project_files(home, [*tasks, *others]), home=home)
    return digest([files, [describe(task, mutable=False) for task in tasks]])[:32]


def project_files(home: str, parts: Iterable[Any] = ()) -> list[str]:
    """Return the project's files that a suite uses."""
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
    """Return the hash of the project's own code: every loaded module under the current folder, or a given version.

    Installed packages are left out: a lock file records their versions.

    Args:
        version: A version maintained by the user, which replaces the hash.
        root: The project's folder.
        files: The modules to include, instead of all loaded ones.
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
            continue  # The file of the module has been deleted.
    content = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _prefixes(root: Path | None, home: str) -> tuple[str, ...]:
    """Return the folders of the project: the current one, and that of the suite."""
    folders = [os.path.realpath(root or Path.cwd()), *([os.path.dirname(os.path.realpath(home))] if home else [])]
    return tuple(os.path.join(folder, "") for folder in folders)


def _relative(file: str | None, prefixes: Sequence[str]) -> str | None:
    """Return the path of a project module relative to the project."""
    if not file or not file.endswith(".py"):
        return None
    path = _normalized(file) if os.path.isabs(file) else os.path.abspath(file)
    prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
    if prefix is None:
        return None
    relative = path[len(prefix) :]
    installed = any(part in ("site-packages", "dist-packages") or part[0] == "." for part in relative.split(os.sep))
    return None if installed else relative


@lru_cache(maxsize=16384)
def _normalized(file: str) -> str:
    """Return an absolute path without `..`; cached, because every run looks at every loaded module."""
    return os.path.normpath(file)


def _files_of(part: Any) -> Iterator[str]:
    """Yield the files that define a function or an object."""
    for thing in (part, getattr(part, "func", None), getattr(part, "fn", None), getattr(part, "__wrapped__", None)):
        name = getattr(thing, "__module__", None) or getattr(type(thing), "__module__", None)
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if file:
            yield file


def _imported_by(module: ModuleType, file: str) -> Iterator[str]:
    """Yield the files of the modules that a module imports at its top level.

    Imports inside functions are left out: whether they have been executed differs between processes.
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
    """Return the names of the modules that a file imports; cached, because parsing is slower than a small run."""
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
